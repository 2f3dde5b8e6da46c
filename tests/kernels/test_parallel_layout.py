"""The layout of parallel drafting: a slow loop and the worked example; both backends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.kernels.parallel_layout import parallel_layout
from draftlab.kernels.step_types import ParallelLayout
from tests.helpers.gpu import assert_same, capture, on_gpu, to_device
from tests.helpers.interpreter import INTERPRETED, run_in_the_interpreter, runs_the_others

MASK = 777


@runs_the_others
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def backends() -> list[SimpleNamespace]:
    """Return the reference and, in the interpreter, the kernel."""
    runs = [SimpleNamespace(name="reference", layout=parallel_layout.reference)]
    if INTERPRETED:
        runs.append(SimpleNamespace(name="triton", layout=parallel_layout.triton))
    return runs


@pytest.fixture(params=backends(), ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> SimpleNamespace:
    return request.param


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
                fed=draw(st.lists(st.integers(1, 500), min_size=length, max_size=length)),
                emitted=draw(st.integers(1, 500)),
                pairs=draw(st.integers(1, length)),
                start=draw(st.integers(-2, limit + 2)),
                blocks=draw(st.lists(st.integers(0, 90), min_size=blocks, max_size=blocks)),
            )
        )
    return SimpleNamespace(k=k, size=size, limit=limit, rows=rows)


def options(batch: SimpleNamespace) -> dict[str, int]:
    return {
        "block_size": batch.size,
        "max_length": batch.limit,
        "mask_token_id": MASK,
        "k": batch.k,
    }


def table(batch: SimpleNamespace) -> Tensor:
    return torch.tensor([row.blocks for row in batch.rows], dtype=torch.int32)


def entries(batch: SimpleNamespace, row: SimpleNamespace, width: int) -> list[tuple]:
    """(token, position, slot, is mask, column of its feature or None) of a row of `width`."""
    made = []
    shown = [*row.fed[1 : row.pairs], row.emitted]
    for column in range(width + batch.k - 1):
        position = row.start + column
        if row.start < 0 or column >= row.pairs + batch.k - 1 or position >= batch.limit:
            made.append((0, -1, -1, False, None))
            continue
        block, offset = divmod(position, batch.size)
        if block >= len(row.blocks):
            made.append((0, -1, -1, False, None))
            continue
        slot = row.blocks[block] * batch.size + offset if row.blocks[block] else -1
        if column < row.pairs:
            made.append((shown[column], position, slot, False, column))
        else:
            made.append((MASK, position, slot, True, None))
    return made


def check(layout: ParallelLayout, expected: list[list[tuple]]) -> None:
    flat = [entry for row in expected for entry in row]
    found = zip(
        layout.tokens.flatten().tolist(),
        layout.positions.flatten().tolist(),
        layout.slots.flatten().tolist(),
        layout.is_mask.flatten().tolist(),
        strict=True,
    )
    assert list(found) == [entry[:4] for entry in flat]


@settings(max_examples=60, deadline=None)
@given(batch=batches())
def test_layout_equals_the_loop(batch: SimpleNamespace) -> None:
    width = max(len(row.fed) for row in batch.rows)
    shown = [[*row.fed[1 : row.pairs], row.emitted] for row in batch.rows]
    out_tokens = int64([row + [9999] * (width - len(row)) for row in shown])
    for backend in backends():
        layout = backend.layout(
            out_tokens,
            int64([row.pairs - 1 for row in batch.rows]),
            int64([row.start for row in batch.rows]),
            table(batch),
            **options(batch),
        )
        assert layout.tokens.shape == (len(batch.rows), width + batch.k - 1)
        check(layout, [entries(batch, row, width) for row in batch.rows])
        assert layout.sample_index.tolist() == [
            [row.pairs - 1 + d for d in range(batch.k)] for row in batch.rows
        ]


def test_the_worked_example(backend: SimpleNamespace) -> None:
    """servers §1.5: the second request, a verify step that rejected two of four drafts."""
    layout = backend.layout(
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


@pytest.mark.parametrize("room", range(-1, 9))
def test_positions_beyond_the_limit_never_write(room: int, backend: SimpleNamespace) -> None:
    """Whatever is left of a row: the rest is padding, at the end, with no slot of another row."""
    limit, k = 32, 4
    layout = backend.layout(
        int64([[5, 6, 7, 8, 9], [5, 6, 7, 8, 9]]),
        int64([4, 1]),
        int64([limit - room, 0]),
        torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        block_size=16,
        max_length=limit,
        mask_token_id=MASK,
        k=k,
    )
    kept = min(max(room, 0), 8)
    assert layout.positions[0].tolist() == [
        *range(limit - room, limit - room + kept),
        *[-1] * (8 - kept),
    ]
    assert layout.slots[0].tolist() == [
        *(48 - room + i for i in range(kept)),
        *[-1] * (8 - kept),
    ]
    assert int(layout.is_mask[0].sum()) == max(kept - 5, 0)
    assert layout.slots[1].tolist() == [48, 49, 50, 51, 52, -1, -1, -1]


def test_blocks_that_a_row_does_not_own_are_not_written(backend: SimpleNamespace) -> None:
    layout = backend.layout(
        int64([[5, 6]]),
        int64([1]),
        int64([14]),
        torch.tensor([[2, 0]], dtype=torch.int32),
        block_size=16,
        max_length=32,
        mask_token_id=MASK,
        k=3,
    )
    assert layout.positions.tolist() == [[14, 15, 16, 17]]
    assert layout.slots.tolist() == [[46, 47, -1, -1]]


def test_on_a_cpu_the_reference_answers() -> None:
    """With strided inputs, as an engine has them."""
    inputs = (
        torch.arange(24).view(3, 8)[:, ::2],
        torch.arange(12)[::4] // 3,
        torch.arange(9).view(3, 3)[:, 1],
        torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32),
    )
    sizes = {"block_size": 8, "max_length": 14, "mask_token_id": MASK, "k": 3}
    layout = parallel_layout(*inputs, **sizes)
    for backend in backends():
        assert_same(layout, backend.layout(*inputs, **sizes))


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
