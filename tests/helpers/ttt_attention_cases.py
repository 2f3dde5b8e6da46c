"""Cases of training-time test's attention: packed documents, rows and keys of their own steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from draftlab.kernels.ttt_attention import StepKeyValues, document_starts
from tests.helpers.gpu import to_device

Attend = Callable[..., Tensor]


class Case:
    """Rows of packed documents, some of them padding, with keys and values of `steps` steps.

    Args:
        lengths: lengths of each batch row's documents; the rest of its `width` slots is padding.
        share: the share of the slots that are rows.
        steps: the keys that a row has of its own.
        shuffled: whether rows come in any order, padding rows among them.
        device: where the tensors are moved after they were orders on the CPU.
    """

    def __init__(
        self,
        lengths: Sequence[Sequence[int]],
        width: int,
        *,
        share: float = 0.7,
        steps: int = 0,
        heads: int = 2,
        kv_heads: int = 1,
        head_dim: int = 16,
        shuffled: bool = False,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        batch = len(lengths)
        documents = torch.full((batch, width), -1)
        for row, each in zip(documents, lengths, strict=True):
            for number, (start, length) in enumerate(zip(_starts(each), each, strict=True)):
                row[start : start + length] = number
        self.documents = documents
        count = round(share * width)
        self.index = self.choose(width, count, batch)
        self.starts = document_starts(documents).gather(1, self.index)
        if batch > 1:  # one row ends early: its last tokens are padding, as in a batch's step
            self.starts[1, (count + 1) // 2 :] = width
        if shuffled:
            order = torch.randperm(count, generator=self.generator)
            self.index, self.starts = self.index[:, order], self.starts[:, order]
        self.query = self.random(batch, count, heads, head_dim, dtype=dtype)
        self.key, self.value = (
            self.random(batch, width, kv_heads, head_dim, dtype=dtype) for _ in range(2)
        )
        self.steps: StepKeyValues | None = None
        for left in range(steps - 1, -1, -1):  # rows of earlier steps: all of these, and more
            rows = count + 2 * left
            new = (self.random(batch, rows, kv_heads, head_dim, dtype=dtype) for _ in range(2))
            self.steps = StepKeyValues.extend(self.steps, *new, self.choose(rows + 2, rows, batch))
        self.d_output = self.random(batch, count, heads, head_dim, dtype=dtype)
        for name, value in vars(self).items():
            if name != "generator":
                setattr(self, name, to_device(value, device))

    def choose(self, population: int, count: int, batch: int) -> Tensor:
        """Return `count` different numbers below `population`, ascending, int64 [batch, count]."""
        orders = [torch.randperm(population, generator=self.generator) for _ in range(batch)]
        return torch.stack([numbers[:count].sort().values for numbers in orders])

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def leaves(self) -> list[Tensor]:
        """Return every tensor that has a gradient."""
        step_keys = [] if self.steps is None else [*self.steps.keys, *self.steps.values]
        return [self.query, self.key, self.value, *step_keys]

    def run(self, attend: Attend, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """Return the output and the gradients of the leaves, computed in `dtype`."""
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in self.leaves()]
        query, key, value, *step_tensors = leaves
        steps, count = None, len(step_tensors) // 2
        if self.steps is not None:
            keys, values = tuple(step_tensors[:count]), tuple(step_tensors[count:])
            steps = StepKeyValues(keys, values, self.steps.rows)
        output = attend(query, key, value, self.index, self.starts, steps)
        return output, *torch.autograd.grad(output, leaves, self.d_output.to(output.dtype))

    def expected(self) -> Tensor:
        """Return the output row by row and head by head, in float64, by the definition."""
        output = torch.zeros(self.query.shape, dtype=torch.float64)
        group = self.query.shape[2] // self.key.shape[2]
        for b, r, h in torch.cartesian_prod(*map(torch.arange, self.query.shape[:3])).tolist():
            start, slot, kv = self.starts[b, r], self.index[b, r], h // group
            if start > slot:
                continue
            keys = [*self.key[b, start : slot + 1, kv]]
            values = [*self.value[b, start : slot + 1, kv]]
            if self.steps is not None:
                for key, value, at in zip(
                    self.steps.keys,
                    self.steps.values,
                    self.steps.rows[:, b, r],
                    strict=True,
                ):
                    keys.append(key.flatten(0, 1)[at, kv])
                    values.append(value.flatten(0, 1)[at, kv])
            scores = torch.stack(keys).double() @ self.query[b, r, h].double()
            weights = (scores * self.query.shape[-1] ** -0.5).softmax(0)
            output[b, r, h] = weights @ torch.stack(values).double()
        return output


def check_kernels(
    operator: Any, case: Any, plan: tuple[int, int] | None = (16, 16), tolerance: float = 1e-4
) -> None:
    """Compare output and every gradient of an operator's kernels with the reference's in float64.

    Args:
        case: has the `run` and the `query` of `Case`.
        plan: rows and keys of all tiles; None: the launcher chooses them.
    """
    from draftlab.kernels.ttt_attention.launch import Plan, Tiles

    tiles = plan and Plan(*[Tiles(*plan, 4, 1)] * 4)
    actual = case.run(partial(operator.triton, plan=tiles))
    expected = case.run(operator.reference, torch.float64)
    for output, exact in zip(actual, expected, strict=True):
        assert output.dtype == case.query.dtype
        torch.testing.assert_close(output.double(), exact, atol=tolerance, rtol=tolerance)


def sizes(lengths: list[list[int]], width: int, **others: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    return {"lengths": lengths, "width": width} | others


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


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]
