"""The layouts of passes of a chain and of parallel drafting, and what they are fed.

References are compared with slow loops and with the heads' layers, kernels with the references.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.heads.eagle3 import Eagle3Layer
from draftlab.kernels import chain_layout as module
from draftlab.kernels.head_inputs import head_inputs
from draftlab.kernels.parallel_layout import parallel_layout
from draftlab.kernels.step_layout.types import MaskedColumns, ParallelLayout
from tests.helpers.gpu import assert_same, capture, on_gpu, to_device
from tests.helpers.head_toys import make_config
from tests.helpers.interpreter import INTERPRETED, interpreter_test, kernel_cases

LAY_OUT: list[Callable] = [module.chain_layout.reference]
LAST: list[Callable] = [module.last_rows.reference]
INPUTS: list[Callable] = [head_inputs.reference]
PARALLEL: list[Callable[..., ParallelLayout]] = [parallel_layout.reference]
test_in_the_interpreter = interpreter_test(__file__)

if INTERPRETED:
    from draftlab.kernels.chain_layout import triton as chain_layout_triton

    chain_layout_triton._COLUMNS, chain_layout_triton._TILE = 4, 16  # several of each
    LAY_OUT.append(chain_layout_triton.chain_layout)
    LAST.append(chain_layout_triton.last_rows)
    INPUTS.append(head_inputs.triton)
    PARALLEL.append(parallel_layout.triton)


@settings(max_examples=40 if INTERPRETED else 150, deadline=None)
@given(st.data())
def test_passes(data: st.DataObject) -> None:
    """Ragged rows, rows of padding, tables that are too short or do not own a block."""
    rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    later, size = data.draw(st.integers(0, 7)), data.draw(st.sampled_from((1, 3, 16)))
    blocks = st.lists(st.integers(0, 5), min_size=3, max_size=3)
    table = torch.tensor([data.draw(blocks) for _ in range(rows)], dtype=torch.int32)
    shown = [data.draw(st.integers(0, width)) for _ in range(rows)]
    starts = [data.draw(st.integers(0, 3 * size)) for _ in range(rows)]
    positions = torch.full((rows, width + 1), -1)[:, :width]  # rows of something wider
    for row, (count, start) in enumerate(zip(shown, starts, strict=True)):
        positions[row, :count] = torch.arange(start, start + count)
    counts = torch.tensor(shown).clamp(min=1)

    def slot(row: int, position: int) -> int:
        if not 0 <= position < 3 * size:
            return -1
        block = int(table[row, position // size])
        return block * size + position % size if block else -1

    for operation in LAY_OUT:
        layout = operation(positions, counts, table, size, later)
        last = [s + c - 1 if c else -1 for c, s in zip(shown, starts, strict=True)]
        assert layout.last.tolist() == last
        for number in range(later + 1):
            if number == 0:
                expected = positions.tolist()
            else:
                expected = [[p + number if p >= 0 else -1] for p in last]
            places = [[slot(row, p) for p in line] for row, line in enumerate(expected)]
            assert layout.select_pass(layout.positions, number).tolist() == expected
            assert layout.select_pass(layout.slots, number).tolist() == places
            assert layout.select_pass(layout.slots, number).is_contiguous()
        assert len(layout.slots) == len(layout.positions) == rows * (width + later)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_last_rows(dtype: torch.dtype) -> None:
    x = torch.arange(3 * 4 * 2 * 11).view(3, 4, 2, 11).to(dtype)
    counts = torch.tensor([4, 1, 2])
    expected = torch.stack([x[0, 3:4], x[1, :1], x[2, 1:2]])
    for operation in LAST:
        assert torch.equal(operation(x, counts), expected)
        turned = x.transpose(2, 3).contiguous().transpose(2, 3)
        assert torch.equal(operation(turned, counts), expected)
        last_two = operation(x, counts.clamp(max=3), 2)
        assert torch.equal(last_two, torch.stack([x[0, 2:4], x[1, :2], x[2, 1:3]]))
    one = x[:, :1]
    assert module.last_rows(one, torch.ones(3, dtype=torch.int64)) is one  # nothing to pick


def make_layer(size: int, norm_before_residual: bool) -> Eagle3Layer:
    """Return a layer whose norms have random weights."""
    config = make_config(
        hidden_size=size,
        target_hidden_size=size,
        rms_norm_eps=1e-3,
        norm_before_residual=norm_before_residual,
    )
    layer = Eagle3Layer(config)
    generator = torch.Generator().manual_seed(0)
    for norm in (layer.input_layernorm, layer.hidden_norm):
        norm.weight.data = 1 + 0.3 * torch.randn(size, generator=generator)
    return layer


def arguments(layer: Eagle3Layer, size: int, width: int, dtype: torch.dtype) -> tuple:
    """Three rows; tokens that lie in memory column by column, as a chain's drafts do."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 7, (width, 3), generator=generator).T
    hidden = torch.randn(3, width, size, generator=generator).to(dtype)
    embeddings = torch.randn(7, size, generator=generator).to(dtype)
    norms = (n.weight.data.to(dtype) for n in (layer.input_layernorm, layer.hidden_norm))
    return tokens, hidden, embeddings, *norms, 1e-3


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("size", "width"), [(64, 4), (40, 1), (24, 1)])
def test_head_inputs_are_the_layers(size: int, width: int, before: bool) -> None:
    layer = make_layer(size, before)
    tokens, hidden, embeddings, *rest = arguments(layer, size, width, torch.float32)
    x, residual = layer.inputs(embeddings[tokens], hidden)
    counts = torch.tensor([width, 1, max(width - 1, 1)]) if width > 1 else None
    if counts is not None:
        residual = residual[torch.arange(3), counts - 1][:, None]
    for operation in INPUTS:
        inputs = operation(
            tokens, hidden, embeddings, *rest, norm_before_residual=before, counts=counts
        )
        torch.testing.assert_close(inputs, (x, residual), atol=2e-6, rtol=2e-6)
        if not before:
            assert torch.equal(inputs[1], residual)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("num_columns", [None, 3])
def test_masked_slots_share_a_hidden_state(num_columns: int | None, before: bool) -> None:
    """Rows of n verified pairs, three masked slots and padding; residuals of all, or of three."""
    size, verified, width = 40, 4, 7
    layer, counts = make_layer(size, before), torch.tensor([4, 1, 2])
    tokens, hidden, *rest = arguments(layer, size, width, torch.float32)
    hidden = hidden[:, :verified]
    state = torch.randn(size, generator=torch.Generator().manual_seed(2))
    column = torch.arange(width)
    where = (column >= counts[:, None]) & (column < counts[:, None] + 3)
    real = column < counts[:, None] + 3
    filled = torch.zeros(3, width, size)
    filled[:, :verified] = hidden
    filled[where] = state
    x, residual = layer.inputs(rest[0][tokens], filled)
    for operation in INPUTS:
        actual, actual_residual = operation(
            tokens,
            hidden,
            *rest,
            norm_before_residual=before,
            counts=None if num_columns is None else counts,
            num_columns=num_columns or 1,
            masks=MaskedColumns(where, state),
        )
        torch.testing.assert_close(actual[real], x[real], atol=2e-6, rtol=2e-6)
        if num_columns is None:
            actual_residual, expected = actual_residual[real], residual[real]
        else:
            last = counts[:, None] - 1 + torch.arange(num_columns)
            expected = residual[torch.arange(3)[:, None], last]
        torch.testing.assert_close(actual_residual, expected, atol=2e-6, rtol=2e-6)


@kernel_cases(
    "rows, width, size, dtype",
    [(1, 1, 512, torch.float16), (3, 3, 512, torch.float16)],
    [
        (*rows_and_width, size, dtype)
        for dtype in (torch.bfloat16, torch.float32)
        for rows_and_width in ((1, 1), (3, 1), (5, 4), (33, 2))
        for size in (4096, 200)
    ],
)
def test_head_inputs_of_many_channels(
    rows: int, width: int, size: int, dtype: torch.dtype, device: str
) -> None:
    """Entries differ by one rounding at most; in 16 bit few differ at all."""
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    tokens = torch.randint(0, 999, (width, rows), generator=generator).T.to(device)
    hidden, embeddings, norms = random(rows, width, size), random(999, size), random(2, size)
    counts = None
    if width > 1:
        counts = torch.randint(1, width + 1, (rows,), generator=generator).to(device)
        expected = module.last_rows.reference(hidden, counts)
        assert torch.equal(module.last_rows.triton(hidden, counts), expected)
    rounding = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    differing = {torch.float32: 1.0, torch.float16: 0.005, torch.bfloat16: 0.02}[dtype]
    for before in (False, True):
        options = {"norm_before_residual": before, "counts": counts}
        arguments = tokens, hidden, embeddings, *(1 + 0.1 * norms).to(dtype), 1e-5
        pairs = zip(
            head_inputs.triton(*arguments, **options),
            head_inputs.reference(*arguments, **options),
            strict=True,
        )
        for output, expected in pairs:
            torch.testing.assert_close(output, expected, rtol=rounding, atol=1e-6)
            assert float((output != expected).float().mean()) <= differing


MASK = 777


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
    for operation in PARALLEL:
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
