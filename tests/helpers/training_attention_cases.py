"""Cases of training's attention: packed documents, and rows with keys of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from draftlab.kernels.parallel_attention import ParallelRows, parallel_attention
from draftlab.kernels.ttt_attention import StepKeyValues, document_starts, ttt_attention
from draftlab.train.objectives.ttt import window_starts
from tests.helpers.gpu import to_device

Attend = Callable[..., Tensor]


class AttentionCase:
    """Rows of packed documents, some of them padding.

    Args:
        lengths: lengths of each batch row's documents; the rest of its `width` slots is padding.
        device: where the tensors are moved after they were made on the CPU.
    """

    operator: ClassVar[Any]
    index: Tensor
    starts: Tensor

    def __init__(
        self,
        lengths: Sequence[Sequence[int]],
        width: int,
        *,
        heads: int = 2,
        kv_heads: int = 1,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        batch = len(lengths)
        self.documents = torch.full((batch, width), -1)
        for row, each in zip(self.documents, lengths, strict=True):
            number = torch.arange(len(each)).repeat_interleave(torch.tensor(each, dtype=torch.long))
            row[: len(number)] = number
        self.make_rows(batch, width, **options)
        num_rows = self.index.shape[1]
        self.query, self.d_output = (self.random(batch, num_rows, heads) for _ in range(2))
        self.key, self.value = (self.random(batch, width, kv_heads) for _ in range(2))
        for name, value in vars(self).items():
            if name != "generator":
                setattr(self, name, to_device(value, device))

    def make_rows(self, batch: int, width: int, **options: Any) -> None:
        """Set `index` and `starts` of the rows, and the keys and values of their own."""
        raise NotImplementedError

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, self.head_dim, generator=self.generator).to(self.dtype)

    @property
    def padding(self) -> Tensor:
        """Return which rows see nothing, bool [B, R]."""
        return self.starts > self.index

    def leaves(self) -> list[Tensor]:
        """Return every tensor that has a gradient: query, keys, values, then those of rows."""
        return [self.query, self.key, self.value, *self.own_leaves()]

    def own_leaves(self) -> list[Tensor]:
        raise NotImplementedError

    def attend(self, attend: Attend, leaves: Sequence[Tensor]) -> Tensor:
        """Return the output of an implementation of the operator."""
        raise NotImplementedError

    def run(self, attend: Attend, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """Return the output and the gradients of the leaves, computed in `dtype`."""
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in self.leaves()]
        output = self.attend(attend, leaves)
        d_output = self.d_output.to(output.dtype)
        # Without masked slots nothing depends on their keys.
        unused = {"allow_unused": True, "materialize_grads": True}
        return output, *torch.autograd.grad(output, leaves, d_output, **unused)

    def own_keys(self, b: int, r: int, kv: int) -> tuple[Tensor, Tensor]:
        """Return a row's own keys and values [k, head_dim] of a kv head."""
        raise NotImplementedError

    def expected(self) -> Tensor:
        """Return the output row by row and head by head, in float64, by the definition."""
        output = torch.zeros(self.query.shape, dtype=torch.float64)
        for b, r, h in torch.cartesian_prod(*map(torch.arange, self.query.shape[:3])).tolist():
            start, slot = int(self.starts[b, r]), int(self.index[b, r])
            kv = h // (self.heads // self.kv_heads)
            if start > slot:
                continue
            keys, values = (
                torch.cat([of_slots[b, start : slot + 1, kv], own]).double()
                for of_slots, own in zip(
                    (self.key, self.value), self.own_keys(b, r, kv), strict=True
                )
            )
            scores = keys @ self.query[b, r, h].double() * self.head_dim**-0.5
            output[b, r, h] = scores.softmax(0) @ values
        return output

    def check_kernels(
        self, plan: tuple[int, int] | None = (16, 16), tolerance: float = 1e-4
    ) -> None:
        """Compare output and every gradient of the kernels with the reference's in float64.

        Args:
            plan: rows and keys of all tiles; None: the launcher chooses them.
        """
        from draftlab.kernels.ttt_attention.launch import Plan, Tiles

        tiles = plan and Plan(*[Tiles(*plan, 4, 1)] * 4)
        actual = self.run(partial(self.operator.triton, plan=tiles))
        expected = self.run(self.operator.reference, torch.float64)
        for output, exact in zip(actual, expected, strict=True):
            assert output.dtype == self.query.dtype
            torch.testing.assert_close(output.double(), exact, atol=tolerance, rtol=tolerance)


class StepCase(AttentionCase):
    """Rows of training-time test, with keys and values of `steps` steps.

    Args:
        share: the share of the slots that are rows.
        steps: the keys that a row has of its own.
        shuffled: whether rows come in any order, padding rows among them.
        window: of a head with sliding layers.
    """

    operator = staticmethod(ttt_attention)

    def make_rows(
        self,
        batch: int,
        width: int,
        *,
        share: float = 0.7,
        steps: int = 0,
        shuffled: bool = False,
        window: int | None = None,
    ) -> None:
        count = round(share * width)
        self.index = self.choose(width, count, batch)
        self.starts = document_starts(self.documents).gather(1, self.index)
        self.starts = window_starts(self.starts, self.index, steps, window)
        if batch > 1:  # one row ends early: its last tokens are padding, as in a batch's step
            self.starts[1, (count + 1) // 2 :] = width
        if shuffled:
            order = torch.randperm(count, generator=self.generator)
            self.index, self.starts = self.index[:, order], self.starts[:, order]
        self.steps: StepKeyValues | None = None
        for left in range(steps - 1, -1, -1):  # rows of earlier steps: all of these, and more
            rows = count + 2 * left
            new = (self.random(batch, rows, self.kv_heads) for _ in range(2))
            self.steps = StepKeyValues.extend(self.steps, *new, self.choose(rows + 2, rows, batch))

    def choose(self, population: int, count: int, batch: int) -> Tensor:
        """Return `count` different numbers below `population`, ascending, int64 [batch, count]."""
        orders = [torch.randperm(population, generator=self.generator) for _ in range(batch)]
        return torch.stack([numbers[:count].sort().values for numbers in orders])

    def own_leaves(self) -> list[Tensor]:
        return [] if self.steps is None else [*self.steps.keys, *self.steps.values]

    def attend(self, attend: Attend, leaves: Sequence[Tensor]) -> Tensor:
        query, key, value, *own = leaves
        steps, count = None, len(own) // 2
        if self.steps is not None:
            steps = StepKeyValues(tuple(own[:count]), tuple(own[count:]), self.steps.rows)
        return attend(query, key, value, self.index, self.starts, steps)

    def own_keys(self, b: int, r: int, kv: int) -> tuple[Tensor, Tensor]:
        if self.steps is None:
            return self.key[b, :0, kv], self.value[b, :0, kv]
        rows = self.steps.rows[:, b, r]
        keys, values = (
            torch.stack([x.flatten(0, 1)[at, kv] for x, at in zip(each, rows, strict=True)])
            for each in (self.steps.keys, self.steps.values)
        )
        return keys, values


class ParallelCase(AttentionCase):
    """Rows of all depths of parallel drafting, and masked slots in random order.

    Args:
        depths: most depths behind depth 0.
        share: the share of the slots that are anchors; depth 0 has rows at all slots.
    """

    operator = staticmethod(parallel_attention)

    def make_rows(self, batch: int, width: int, *, depths: int = 3, share: float = 0.7) -> None:
        generator, starts = self.generator, document_starts(self.documents)
        kept = torch.randint(1, depths + 1, (batch, width), generator=generator) if depths else 0
        kept = kept * (torch.rand(batch, width, generator=generator) < share)
        kept = kept * (self.documents >= 0)
        anchors = [
            [(kept[b] >= d).nonzero().flatten() for b in range(batch)] for d in range(depths + 1)
        ]
        self.sizes = tuple(max(map(len, each)) for each in anchors)
        num_rows = sum(self.sizes)
        segments = [sum(self.sizes[:d]) for d in range(len(self.sizes) + 1)]
        self.index = torch.zeros(batch, num_rows, dtype=torch.long)
        self.starts = torch.full((batch, num_rows), width)
        self.depth = torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))
        for b in range(batch):
            for first, each in zip(segments, anchors, strict=False):
                rows = slice(first, first + len(each[b]))
                self.index[b, rows], self.starts[b, rows] = each[b], starts[b, each[b]]
        real = ~self.padding & (self.depth > 0)
        num_slots = int(real.sum())
        slots = torch.full((depths, batch, num_rows), -1)
        readers = torch.full((depths, num_slots), -1)
        # Keys of slots lie in any order in memory.
        order = torch.randperm(num_slots, generator=generator).tolist()
        self.slot_of = {
            (b, int(self.index[b, r]), int(self.depth[r])): m
            for m, (b, r) in zip(order, real.nonzero().tolist(), strict=True)
        }
        for (b, anchor, depth), slot in self.slot_of.items():
            for r in (self.index[b] == anchor).nonzero().flatten().tolist():
                if self.starts[b, r] <= anchor:
                    slots[depth - 1, b, r] = slot
                    if self.depth[r] >= depth:
                        readers[self.depth[r] - 1, slot] = b * num_rows + r
        self.slot_key, self.slot_value = (self.random(num_slots, self.kv_heads) for _ in range(2))
        indices = self.index, self.starts, slots, readers
        self.rows = ParallelRows(self.sizes, *indices, torch.tensor(segments))

    def own_leaves(self) -> list[Tensor]:
        return [self.slot_key, self.slot_value]

    def attend(self, attend: Attend, leaves: Sequence[Tensor]) -> Tensor:
        return attend(*leaves, self.rows)

    def own_keys(self, b: int, r: int, kv: int) -> tuple[Tensor, Tensor]:
        depths = range(1, int(self.depth[r]) + 1)
        slots = [self.slot_of[b, int(self.index[b, r]), d] for d in depths]
        return self.slot_key[slots, kv], self.slot_value[slots, kv]


def draw_documents(data: st.DataObject, width: int) -> list[list[int]]:
    """Draw lengths of the documents of one or two batch rows."""
    lengths = []
    for _ in range(data.draw(st.integers(1, 2))):
        left, row = width, []
        while left and data.draw(st.booleans()):
            row.append(data.draw(st.integers(1, left)))
            left -= row[-1]
        lengths.append(row)
    return lengths
