"""Cases of parallel drafting's attention: packed documents, and anchors that keep random depths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftlab.kernels.parallel_attention import ParallelRows
from draftlab.kernels.ttt_attention import document_starts
from tests.helpers.gpu import to_device


class ParallelCase:
    """Rows of all depths of packed documents, and masked slots in random order.

    Args:
        lengths: lengths of each batch row's documents; the rest of its `width` slots is padding.
        depths: most depths behind depth 0.
        share: the share of the slots that are anchors; depth 0 has rows at all slots.
        device: where the tensors are moved after they were made on the CPU.
    """

    def __init__(
        self,
        lengths: Sequence[Sequence[int]],
        width: int,
        *,
        depths: int = 3,
        share: float = 0.7,
        heads: int = 2,
        kv_heads: int = 1,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        batch = len(lengths)
        documents = torch.full((batch, width), -1)
        for row, each in zip(documents, lengths, strict=True):
            number = torch.arange(len(each)).repeat_interleave(torch.tensor(each, dtype=torch.long))
            row[: len(number)] = number
        starts = document_starts(documents)
        kept = torch.randint(1, depths + 1, (batch, width), generator=generator) if depths else 0
        kept = kept * (torch.rand(batch, width, generator=generator) < share) * (documents >= 0)
        anchors = [
            [(kept[b] >= d).nonzero().flatten() for b in range(batch)] for d in range(depths + 1)
        ]
        self.sizes = tuple(max(map(len, each)) for each in anchors)
        num_rows = sum(self.sizes)
        self.index = torch.zeros(batch, num_rows, dtype=torch.long)
        self.starts = torch.full((batch, num_rows), width)
        self.depth = torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))
        for b in range(batch):
            for first, each in zip(_starts(self.sizes), anchors, strict=True):
                rows = slice(first, first + len(each[b]))
                self.index[b, rows], self.starts[b, rows] = each[b], starts[b, each[b]]
        real = (self.starts <= self.index) & (self.depth > 0)
        num_slots = int(real.sum())
        self.slots = torch.full((depths, batch, num_rows), -1)
        self.readers = torch.full((depths, num_slots), -1)
        # Keys of slots lie in any order in memory.
        order = torch.randperm(num_slots, generator=generator).tolist()
        rows = [(b, r) for b, r in real.nonzero().tolist()]
        self.slot_of = {
            (b, int(self.index[b, r]), int(self.depth[r])): m
            for m, (b, r) in zip(order, rows, strict=True)
        }
        for (b, anchor, depth), slot in self.slot_of.items():
            for r in (self.index[b] == anchor).nonzero().flatten().tolist():
                if self.starts[b, r] <= anchor:
                    self.slots[depth - 1, b, r] = slot
                    if self.depth[r] >= depth:
                        self.readers[self.depth[r] - 1, slot] = b * num_rows + r
        self.query = random(batch, num_rows, heads, head_dim)
        self.key, self.value = (random(batch, width, kv_heads, head_dim) for _ in range(2))
        self.slot_key, self.slot_value = (random(num_slots, kv_heads, head_dim) for _ in range(2))
        self.d_output = random(batch, num_rows, heads, head_dim)
        for name, value in vars(self).items():
            setattr(self, name, to_device(value, device))
        segments = torch.tensor([*_starts(self.sizes), num_rows], device=device)
        indices = self.index, self.starts, self.slots, self.readers
        self.rows = ParallelRows(self.sizes, *indices, segments)

    def leaves(self) -> list[Tensor]:
        """Return every tensor that has a gradient."""
        return [self.query, self.key, self.value, self.slot_key, self.slot_value]

    def run(
        self, attend: Callable[..., Tensor], dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        """Return the output and the gradients of the leaves, computed in `dtype`."""
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in self.leaves()]
        output = attend(*leaves, self.rows)
        return output, *torch.autograd.grad(
            output,
            leaves,
            self.d_output.to(output.dtype),
            allow_unused=True,  # without masked slots
            materialize_grads=True,
        )

    def expected(self) -> Tensor:
        """Return the output row by row and head by head, in float64, by the definition."""
        output = torch.zeros(self.query.shape, dtype=torch.float64)
        group = self.query.shape[2] // self.key.shape[2]
        for b, r, h in torch.cartesian_prod(*map(torch.arange, self.query.shape[:3])).tolist():
            start, anchor, kv = int(self.starts[b, r]), int(self.index[b, r]), h // group
            if start > anchor:
                continue
            slots = [self.slot_of[b, anchor, d] for d in range(1, int(self.depth[r]) + 1)]
            keys, values = (
                torch.cat([all_[b, start : anchor + 1, kv], own[slots, kv]]).double()
                for all_, own in ((self.key, self.slot_key), (self.value, self.slot_value))
            )
            scores = keys @ self.query[b, r, h].double() * self.query.shape[-1] ** -0.5
            output[b, r, h] = scores.softmax(0) @ values
        return output


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]
