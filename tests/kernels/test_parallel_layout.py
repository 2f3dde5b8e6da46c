"""The layout of parallel drafting: a slow loop and the worked example; reference and kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.kernels.parallel_layout import parallel_layout
from draftlab.kernels.step_layout.types import ParallelLayout
from tests.helpers.gpu import assert_same, capture, on_gpu, to_device
from tests.helpers.interpreter import INTERPRETED, interpreter_test

MASK = 777
test_in_the_interpreter = interpreter_test(__file__)
OPERATIONS: list[Callable[..., ParallelLayout]] = [parallel_layout.reference]
if INTERPRETED:
    OPERATIONS.append(parallel_layout.triton)


def int64(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@st.composite
def batches(draw: st.DrawFn) -> SimpleNamespace:
    """Rows of any lengths, some near the limit, some without all blocks, some of padding."""
    k = draw(st.integers(1, 6))
    size = draw(st.integers(1, 5))
    blocks = draw(st.integers(1, 6))
    limit = draw(st.integers(1, blocks * size + 4))
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 7))
        rows.append(
            SimpleNamespace(
                inputs=draw(st.lists(st.integers(1, 500), min_size=length, max_size=length)),
                emitted=draw(st.integers(1, 500)),
                pairs=draw(st.integers(1, length)),
                start=draw(st.integers(-2, limit + 2)),
                blocks=draw(st.lists(st.integers(0, 9), min_size=blocks, max_size=blocks)),
            )
        )
    return SimpleNamespace(k=k, size=size, limit=limit, rows=rows)


def expected_row(batch: SimpleNamespace, row: SimpleNamespace, width: int) -> list[tuple]:
    """Return (token, position, slot, is mask) of each column of a row."""
    padding = 0, -1, -1, False
    columns = []
    tokens = [*row.inputs[1 : row.pairs], row.emitted] + [MASK] * (batch.k - 1)
    for column in range(width + batch.k - 1):
        position = row.start + column
        block, offset = divmod(position, batch.size)
        beyond = position >= batch.limit or block >= len(row.blocks)
        if row.start < 0 or column >= len(tokens) or beyond:
            columns.append(padding)
            continue
        slot = row.blocks[block] * batch.size + offset if row.blocks[block] else -1
        columns.append((tokens[column], position, slot, column >= row.pairs))
    return columns


@settings(max_examples=60, deadline=None)
@given(batch=batches())
def test_layout_equals_the_loop(batch: SimpleNamespace) -> None:
    width = max(len(row.inputs) for row in batch.rows)
    tokens = [[*row.inputs[1 : row.pairs], row.emitted] for row in batch.rows]
    padded = int64([row + [9999] * (2 * width - len(row)) for row in tokens])
    for operation in OPERATIONS:
        layout = operation(
            padded[:, :width],  # rows of something wider, as an engine has them
            int64([row.pairs - 1 for row in batch.rows]),
            int64([row.start for row in batch.rows]),
            torch.tensor([row.blocks for row in batch.rows], dtype=torch.int32),
            block_size=batch.size,
            max_length=batch.limit,
            mask_token_id=MASK,
            k=batch.k,
        )
        fields = layout.tokens, layout.positions, layout.slots, layout.is_mask
        rows = zip(*(field.tolist() for field in fields), strict=True)
        assert [list(zip(*row, strict=True)) for row in rows] == [
            expected_row(batch, row, width) for row in batch.rows
        ]
        assert layout.sample_index.tolist() == [
            [row.pairs - 1 + d for d in range(batch.k)] for row in batch.rows
        ]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_worked_example(operation: Callable[..., ParallelLayout]) -> None:
    """servers §1.5: the second request, a verify step that rejected two of four drafts."""
    layout = operation(
        int64([[21, 99, 0, 0]]),
        int64([1]),
        int64([7]),
        torch.tensor([[2, 4]], dtype=torch.int32),
        block_size=8,
        max_length=16,
        mask_token_id=MASK,
        k=4,
    )
    assert layout.tokens.tolist() == [[21, 99, 777, 777, 777, 0, 0]]
    assert layout.positions.tolist() == [[7, 8, 9, 10, 11, -1, -1]]
    assert layout.slots.tolist() == [[23, 32, 33, 34, 35, -1, -1]]
    assert layout.is_mask.tolist() == [[False, False, True, True, True, False, False]]
    assert layout.sample_index.tolist() == [[1, 2, 3, 4]]


def random_arguments(rows: int, k: int, limit: int, device: str) -> tuple[tuple, dict]:
    """Return arguments of real sizes: padding, rows near the limit, missing blocks."""
    table = torch.randint(1, 9999, (rows, limit // 16 + 2), dtype=torch.int32)
    table[torch.rand(table.shape) < 0.1] = 0
    arguments = (
        torch.randint(1, 200_000, (rows, k + 1)),
        torch.randint(0, k + 1, (rows,)),
        torch.randint(-2, limit + 3, (rows,)),
        table,
    )
    sizes = {"block_size": 16, "max_length": limit, "mask_token_id": 128_255, "k": k}
    return to_device(arguments, device), sizes


@on_gpu
@pytest.mark.parametrize("limit", [17, 300, 8192])
@pytest.mark.parametrize("rows", [1, 2, 7, 32, 65])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 13])
def test_layouts_at_real_sizes(k: int, rows: int, limit: int, device: str) -> None:
    torch.manual_seed(k)
    arguments, sizes = random_arguments(rows, k, limit, device)
    layout = parallel_layout(*arguments, **sizes)
    assert_same(layout, parallel_layout.reference(*arguments, **sizes))


@on_gpu
def test_replays_of_a_captured_layout(device: str) -> None:
    torch.manual_seed(0)
    arguments, sizes = random_arguments(9, 5, 300, device)
    graph, layout = capture(lambda: parallel_layout(*arguments, **sizes))
    for _ in range(5):
        for tensor, values in zip(arguments, random_arguments(9, 5, 300, device)[0], strict=True):
            tensor.copy_(values)
        graph.replay()
        assert_same(layout, parallel_layout.reference(*arguments, **sizes))
