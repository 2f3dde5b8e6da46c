"""The layout of parallel drafting: a slow loop, the worked example, full buffers; both backends."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.kernels import parallel_layout as eager
from draftlab.kernels.parallel_layout import layout_size, parallel_layout, ragged_layout
from tests.helpers.interpreter import INTERPRETED, run_in_the_interpreter, runs_the_others

MASK = 777


@runs_the_others
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def backends() -> list[SimpleNamespace]:
    """The reference, and in the interpreter the kernel."""
    found = [
        SimpleNamespace(
            name="reference",
            rectangle=eager.parallel_layout_reference,
            ragged=eager.ragged_layout_reference,
        )
    ]
    if INTERPRETED:
        from draftlab.kernels import parallel_layout_triton as kernel

        found.append(
            SimpleNamespace(
                name="triton",
                rectangle=kernel.parallel_layout_triton,
                ragged=kernel.ragged_layout_triton,
            )
        )
    return found


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


def check(layout: eager.ParallelLayout, expected: list[list[tuple]]) -> None:
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
def test_rectangle_equals_the_loop(batch: SimpleNamespace) -> None:
    width = max(len(row.fed) for row in batch.rows)
    shown = [[*row.fed[1 : row.pairs], row.emitted] for row in batch.rows]
    out_tokens = int64([row + [9999] * (width - len(row)) for row in shown])
    for backend in backends():
        layout = backend.rectangle(
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


@settings(max_examples=60, deadline=None)
@given(batch=batches())
def test_flattened_rows_equal_the_loop(batch: SimpleNamespace) -> None:
    lengths = [len(row.fed) for row in batch.rows]
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    for backend in backends():
        layout = backend.ragged(
            int64([token for row in batch.rows for token in row.fed]),
            int64([row.emitted for row in batch.rows]),
            torch.tensor(bounds, dtype=torch.int32),
            int64([len(row.fed) - row.pairs for row in batch.rows]),
            int64([row.start for row in batch.rows]),
            table(batch),
            **options(batch),
        )
        expected = [entries(batch, row, len(row.fed)) for row in batch.rows]
        check(layout, expected)
        begins = [bound + i * (batch.k - 1) for i, bound in enumerate(bounds)]
        assert layout.query_start_loc.tolist() == begins
        assert len(layout.tokens) == layout_size(bounds[-1], len(lengths), batch.k) == begins[-1]
        features = [
            0 if column is None else bound + column
            for bound, row in zip(bounds[:-1], expected, strict=True)
            for *_, column in row
        ]
        assert layout.feature_index.tolist() == features
        assert layout.sample_index.tolist() == [
            [begin + row.pairs - 1 + d for d in range(batch.k)]
            for begin, row in zip(begins[:-1], batch.rows, strict=True)
        ]


def test_the_worked_example(backend: SimpleNamespace) -> None:
    """servers §1.5: a prompt of four tokens beside a verify step that rejected two of four."""
    layout = backend.ragged(
        int64([10, 11, 12, 13, 20, 21, 22, 23]),
        int64([14, 99]),
        int64([0, 4, 8]),
        int64([0, 2]),
        int64([0, 7]),
        torch.tensor([[3, 1], [2, 4]], dtype=torch.int32),
        block_size=8,
        max_length=16,
        mask_token_id=MASK,
        k=4,
    )
    assert layout.tokens.tolist() == [11, 12, 13, 14, 777, 777, 777, 21, 99, 777, 777, 777, 0, 0]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, -1, -1]
    assert layout.slots.tolist() == [24, 25, 26, 27, 28, 29, 30, 23, 32, 33, 34, 35, -1, -1]
    assert layout.sample_index.tolist() == [[3, 4, 5, 6], [8, 9, 10, 11]]
    assert layout.query_start_loc.tolist() == [0, 7, 14]
    assert layout.feature_index.tolist() == [0, 1, 2, 3, 0, 0, 0, 4, 5, 0, 0, 0, 0, 0]


def test_the_verify_step_of_the_worked_example(backend: SimpleNamespace) -> None:
    """Its second request as a row of a rectangle: the same tokens, positions and columns."""
    layout = backend.rectangle(
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


def test_a_full_batch_needs_room_for_its_masks(backend: SimpleNamespace) -> None:
    """8,192 tokens of seven rows with K = 4: 8,213 entries, the last row's masks in the last."""
    lengths = [1, 8000, 1, 187, 1, 1, 1]
    bounds = int64([0, *torch.tensor(lengths).cumsum(0).tolist()])
    assert int(bounds[-1]) == 8192
    assert layout_size(8192, 7, 4) == 8192 + 7 * 3
    layout = backend.ragged(
        torch.arange(8192),
        torch.full((7,), 5),
        bounds,
        torch.zeros(7, dtype=torch.int64),
        torch.zeros(7, dtype=torch.int64),
        (torch.arange(7 * 501) + 1).view(7, 501).int(),
        block_size=16,
        max_length=8003,  # exactly the longest row and its masks
        mask_token_id=MASK,
        k=4,
    )
    for tensor in (layout.tokens, layout.positions, layout.slots, layout.is_mask):
        assert tensor.shape == (8213,)
    assert layout.tokens[-4:].tolist() == [5, MASK, MASK, MASK]
    assert layout.sample_index[-1].tolist() == [8209, 8210, 8211, 8212]
    # Nothing is padding, and no two entries share a slot.
    assert int((layout.positions < 0).sum()) == int((layout.slots < 0).sum()) == 0
    assert len(layout.slots.unique()) == 8213
    assert int(layout.is_mask.sum()) == 7 * 3


@pytest.mark.parametrize("room", range(-1, 9))
def test_positions_beyond_the_limit_never_write(room: int, backend: SimpleNamespace) -> None:
    """Whatever is left of a row: the rest is padding, at the end, with no slot of another row."""
    limit, k = 32, 4
    layout = backend.rectangle(
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
    layout = backend.rectangle(
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
    """The entry points, with strided inputs as an engine has them."""
    rectangle = (
        torch.arange(24).view(3, 8)[:, ::2],
        torch.arange(12)[::4] // 3,
        torch.arange(9).view(3, 3)[:, 1],
        torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32),
    )
    ragged = (
        torch.arange(18)[::2],
        torch.arange(6)[::2],
        int64([0, 2, 3, 9]),
        int64([1, 0, 3]),
        *rectangle[2:],
    )
    chosen = {"block_size": 8, "max_length": 14, "mask_token_id": MASK, "k": 3}
    for backend in backends():
        for entry, own, inputs in (
            (parallel_layout, backend.rectangle, rectangle),
            (ragged_layout, backend.ragged, ragged),
        ):
            found, expected = entry(*inputs, **chosen), own(*inputs, **chosen)
            for field in fields(found):
                one, other = getattr(found, field.name), getattr(expected, field.name)
                assert one.dtype == other.dtype
                assert torch.equal(one, other), (backend.name, field.name)
