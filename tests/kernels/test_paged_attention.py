"""Paged attention: reference and kernels against dense attention in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.kernels.paged_attention import attend_paged, write_paged
from tests.helpers.gpu import on_devices, on_gpu, relative_error
from tests.helpers.interpreter import (
    INTERPRETED,
    inside,
    interpreter_test,
    outside,
)


class Case:
    """Rows of a paged cache. Keys that no query sees and blocks without an owner are NaN.

    Args:
        lengths: keys of each row before its new tokens.
        counts: real new tokens of each row, out of m.
        scale: of the scores; default: 1.3 / √head_dim.
        same_keys: all tokens of a row see the keys up to its last token's.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        counts: Sequence[int],
        m: int,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 8,
        block_size: int = 4,
        spare: int = 2,
        dtype: torch.dtype = torch.float32,
        scale: float | None = None,
        seed: int = 0,
        same_keys: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        num_rows = len(lengths)
        width = max(-(-(n + m) // block_size) for n in lengths) + spare
        num_blocks = num_rows * width + 1
        self.key_pool = torch.full((num_blocks, block_size, kv_heads, head_dim), math.nan).to(dtype)
        self.value_pool = self.key_pool.clone()
        order = torch.randperm(num_blocks, generator=generator)[: num_rows * width]
        self.table = order.view(num_rows, width).int()
        self.counts, self.m, self.same_keys = counts, m, same_keys
        self.positions = torch.full((num_rows, m), -1)
        self.keys, self.values = [], []
        for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            self.positions[b, :count] = torch.arange(length, length + count)
            self.keys.append(random(length + count, kv_heads, head_dim))
            self.values.append(random(length + count, kv_heads, head_dim))
            at = self._at(b, torch.arange(length + count))
            self.key_pool[at], self.value_pool[at] = self.keys[b], self.values[b]
        # As transformers passes it: heads before tokens in memory. Padding is NaN.
        self.query = random(num_rows, heads, m, head_dim).transpose(1, 2)
        self.query[self.positions < 0] = math.nan
        self.scale = scale or 1.3 * head_dim**-0.5

    def _at(self, row: int, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return block and offset of positions of a row."""
        block_size = self.key_pool.shape[1]
        return self.table[row, position // block_size].long(), position % block_size

    def run(
        self, attend: Callable[..., Tensor] = attend_paged, device: str = "cpu", **options
    ) -> Tensor:
        """Return the output of `attend` [B, M, heads, head_dim], computed on `device`."""
        if self.same_keys:
            last = self.positions.amax(1, keepdim=True)
            options["last_seen"] = last.where(self.positions >= 0, -1)
        tensors = self.query, self.key_pool, self.value_pool, self.table, self.positions
        options = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in options.items()}
        return attend(*(t.to(device) for t in tensors), scale=self.scale, **options).cpu()

    def hide(self, window: int | None, chunk: int | None) -> None:
        """Set keys to NaN that lie before what a row's first query sees."""
        for b, first in enumerate(self.positions[:, 0].tolist()):
            position = torch.arange(max(first, 0))
            hidden = torch.zeros_like(position, dtype=torch.bool)
            if window:
                hidden |= position <= first - window
            if chunk:
                hidden |= position < first // chunk * chunk
            at = self._at(b, position[hidden])
            self.key_pool[at] = self.value_pool[at] = math.nan

    def expected(self, *, window=None, chunk=None, softcap=None, sinks=None) -> Tensor:
        """Return attention query by query and head by head, in float64 and by the definition."""
        output = torch.zeros(self.query.shape, dtype=torch.float64)
        group = self.query.shape[2] // self.key_pool.shape[2]
        for b, count in enumerate(self.counts):
            for i in range(count):
                q = self.positions[b, i].item()
                end = self.positions[b].max().item() + 1 if self.same_keys else q + 1
                low = max(0, q - window + 1 if window else 0, q // chunk * chunk if chunk else 0)
                for h in range(self.query.shape[2]):
                    keys = self.keys[b][low:end, h // group].double()
                    scores = keys @ self.query[b, i, h].double() * self.scale
                    if softcap is not None:
                        scores = softcap * (scores / softcap).tanh()
                    weights = scores.exp()
                    total = weights.sum() + (sinks[h].double().exp() if sinks is not None else 0)
                    output[b, i, h] = weights @ self.values[b][low:end, h // group].double()
                    output[b, i, h] /= total
        return output

    def check(
        self,
        attend: Callable[..., Tensor] = attend_paged,
        tolerance: float = 1e-5,
        **options,
    ) -> None:
        """Assert that `attend` equals the definition, entry by entry, and that padding is 0."""
        self.hide(options.get("window"), options.get("chunk"))
        output = self.run(attend, **options)
        assert output.dtype == self.query.dtype
        assert output.is_contiguous()
        expected = self.expected(**options)
        torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
        assert not output[self.positions < 0].any()

    def check_norm(self, device: str, bound: float, **options) -> None:
        """Assert that `attend_paged` on `device` repeats and has a relative error below `bound`."""
        self.hide(options.get("window"), options.get("chunk"))
        output = self.run(device=device, **options)
        assert torch.equal(output, self.run(device=device, **options)), "two runs differ"
        assert not output[self.positions < 0].any()
        error = relative_error(output, self.expected(**options))
        assert error < bound, error


test_in_the_interpreter = pytest.mark.slow(interpreter_test(__file__))


def sinks(heads: int) -> Tensor:
    return torch.randn(heads, generator=torch.Generator().manual_seed(5)) + 1


OPTIONS = [
    {},
    {"window": 1},
    {"window": 5},
    {"chunk": 4},
    {"chunk": 7},
    {"softcap": 2.0},
    {"sinks": True},
    {"window": 6, "softcap": 1.5, "sinks": True},
]


@outside
@pytest.mark.parametrize("block_size", [1, 4, 5, 64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_reference(options: dict, block_size: int) -> None:
    case = Case([9, 0, 14, 3], [3, 2, 1, 0], 3, block_size=block_size, spare=block_size < 64)
    if block_size == 64:
        assert case.table.shape[1] == 1  # the path of a CPU engine
    case.check(**options | ({"sinks": sinks(4)} if "sinks" in options else {}))


@outside
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_reference_on_any_shape(data: st.DataObject) -> None:
    def pick(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    m, rows, kv_heads = pick(1, 6), pick(1, 3), pick(1, 3)
    case = Case(
        [pick(0, 20) for _ in range(rows)],
        [pick(0, m) for _ in range(rows)],
        m,
        heads=kv_heads * pick(1, 4),
        kv_heads=kv_heads,
        head_dim=pick(1, 9),
        block_size=pick(1, 30),
        seed=pick(0, 1000),
    )
    options = {name: pick(1, 12) for name in ("window", "chunk") if pick(0, 1)}
    case.check(**options)


@outside
@pytest.mark.parametrize("block_size", [4, 64])
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"chunk": 8}], ids=str)
def test_tokens_of_a_row_see_each_other(block_size: int, options: dict) -> None:
    Case([9, 30, 0], [3, 1, 4], 4, block_size=block_size, same_keys=True).check(**options)


@outside
def test_reference_in_bf16() -> None:
    Case([9, 30], [3, 2], 3, head_dim=32, dtype=torch.bfloat16).check(tolerance=2e-2)


@outside
def test_one_block_a_row_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([40], [1], 1, block_size=64, spare=0)
    inputs = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
        inputs.extend([key, value])
        return sdpa(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    case.run()
    pools = [case.key_pool, case.value_pool]
    assert [t.untyped_storage().data_ptr() for t in inputs] == [
        t.untyped_storage().data_ptr() for t in pools
    ]


@outside
def test_heads_that_do_not_divide() -> None:
    case = Case([3], [1], 1, heads=4, kv_heads=2)
    case.query = case.query[:, :, :3]
    with pytest.raises(ValueError, match="3 query heads cannot share 2 kv heads"):
        case.run()


@on_devices
@pytest.mark.parametrize(
    ("block_size", "kv_heads", "head_dim"), [(4, 2, 8), (3, 3, 5), (64, 8, 128)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_write(
    dtype: torch.dtype, block_size: int, kv_heads: int, head_dim: int, device: str
) -> None:
    """New entries are in both pools; all others keep their bits."""
    run = write_paged.triton if INTERPRETED else write_paged
    generator = torch.Generator().manual_seed(1)
    shape = 5, block_size, kv_heads, head_dim
    pools = [torch.randn(*shape, generator=generator).to(dtype) for _ in range(2)]
    pools[0][2], pools[1][3] = math.nan, math.inf  # their bits must survive, too
    order = torch.randperm(5 * block_size, generator=generator)[:6]
    slots = torch.stack([order[:3], order[3:]])
    slots[0, 1] = slots[1, 2] = -1
    new = [
        torch.randn(2, kv_heads, 3, head_dim, generator=generator).to(dtype).transpose(1, 2)
        for _ in range(2)
    ]
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    expected = [pool.clone().view(bits).flatten(0, 1) for pool in pools]
    for b, i in ((b, i) for b in range(2) for i in range(3) if slots[b, i] >= 0):
        for rows, source in zip(expected, new, strict=True):
            rows[slots[b, i]] = source[b, i].contiguous().view(bits)
    pools, new, slots = ([x.to(device) for x in pools], [x.to(device) for x in new],
                         slots.to(device))  # fmt: skip
    for _ in range(2):  # slots of -1 alone change nothing
        run(*new, *pools, slots)
        for pool, rows in zip(pools, expected, strict=True):
            assert torch.equal(pool.cpu().view(bits).flatten(0, 1), rows)
        slots = torch.full_like(slots, -1)


@outside
def test_write_into_what_cannot_be_viewed_by_slot() -> None:
    """Pools that interleave keys and values: written through, or refused, never silently lost."""
    both = torch.zeros(3, 2, 4, 2, 8)
    key = torch.ones(1, 1, 2, 8)
    with pytest.raises(RuntimeError, match="view"):
        write_paged(key, key, both[:, 0], both[:, 1], torch.tensor([[1]]))


def make_case(shape: tuple, **others: Any) -> tuple[Case, dict[str, Any]]:
    """Return a case and the options of its attention."""
    lengths, counts, m, heads, kv_heads, head_dim, block_size, options = shape
    options = dict(options)
    others |= {name: options.pop(name) for name in ("same_keys",) if name in options}
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    case = Case(lengths, counts, m, **sizes, **others)
    if "sinks" in options:
        options = options | {"sinks": sinks(heads).to(case.query.dtype)}
    return case, options


# lengths, counts, m, heads, kv heads, head_dim, block size, options
SMALL = [
    # Rows with no keys, with fewer key tiles than splits, and with more.
    *(((33, 0, 90, 3), (3, 2, 1, 0), 3, 4, 2, 16, 16, options) for options in OPTIONS),
    ((21, 40), (3, 2), 3, 4, 4, 16, 8, {"window": 30}),
    ((21, 40), (3, 2), 3, 6, 2, 20, 7, {"window": 30}),
    ((21, 40), (3, 2), 3, 7, 1, 16, 100, {"window": 30}),
    ((21, 40), (3, 2), 3, 20, 1, 24, 16, {"window": 30}),
    ((21, 40), (3, 2), 3, 8, 4, 32, 32, {"window": 30}),
    # Blocks, whose tokens see the same keys: tiles of some of them, and the whole.
    ((21, 40, 0), (7, 5, 0), 7, 4, 1, 16, 16, {"same_keys": True}),
    ((0, 3), (16, 1), 16, 6, 2, 16, 8, {"same_keys": True}),
    ((41, 4, 40), (7, 5, 1), 7, 4, 2, 16, 8, {"same_keys": True, "window": 20}),
    # Several tiles of rows, as in prefill: each has key tiles of its own.
    ((0, 13), (40, 22), 40, 2, 1, 32, 16, {}),
    ((0, 13), (40, 22), 40, 2, 1, 32, 16, {"window": 9}),
    ((0, 13), (40, 22), 40, 2, 1, 32, 16, {"chunk": 16}),
]


@inside
@pytest.mark.parametrize(("shape", "splits"), zip(SMALL, cycle([1, 4]), strict=False), ids=str)
def test_kernel(shape: tuple, splits: int) -> None:
    from draftlab.kernels.paged_attention.launch import Plan

    case, options = make_case(shape)
    group = case.query.shape[2] // case.key_pool.shape[2]
    rows = max(16, 1 << (group - 1).bit_length())
    attend = partial(attend_paged.triton, plan=Plan(rows, 16, splits, 4, 2))
    case.check(attend, **options)


@inside
def test_kernel_as_planned() -> None:
    """The plan's own choices, in float32 and float16."""
    for dtype, block_size, tolerance in ((torch.float32, 16, 1e-5), (torch.float16, 64, 4e-3)):
        case = Case([150, 10], [2, 1], 2, head_dim=32, block_size=block_size, dtype=dtype)
        case.check(attend_paged.triton, tolerance=tolerance)


@inside
@pytest.mark.parametrize("splits", [1, 4])
def test_scores_far_from_zero(splits: int) -> None:
    """Whole tiles of vanishing weight before and after the ones that count."""
    from draftlab.kernels.paged_attention.launch import Plan

    case = Case([60], [2], 2, head_dim=16, block_size=16, scale=40.0)
    case.check(partial(attend_paged.triton, plan=Plan(16, 16, splits, 4, 2)))


REAL = [
    ((700, 0, 33), (5, 3, 0), 5, 32, 8, 128, 16, {}),
    ((700, 0, 33), (9, 5, 0), 9, 32, 8, 128, 64, {}),
    ((2000,), (1,), 1, 32, 8, 128, 64, {}),
    ((130, 257), (7, 4), 7, 14, 2, 80, 16, {"window": 40}),
    ((130, 257), (3, 2), 3, 6, 6, 96, 16, {"chunk": 64}),
    ((512, 90), (4, 2), 4, 16, 4, 64, 32, {"window": 128, "sinks": True}),
    ((512, 90), (4, 2), 4, 8, 4, 256, 16, {"softcap": 30.0, "window": 300}),
    ((37, 300, 0), (150, 75, 0), 150, 12, 4, 128, 16, {}),
    ((0, 900), (333, 167), 333, 4, 4, 112, 24, {"sinks": True, "window": 70}),
    ((100,) * 40, (9, 5, 0) + (9,) * 37, 9, 16, 8, 32, 16, {}),
]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


@on_gpu
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_kernel_at_real_sizes(shape: tuple, dtype: torch.dtype, device: str) -> None:
    """Relative errors against dense attention in float64; repeated runs give equal bits."""
    case, options = make_case(shape, dtype=dtype, scale=shape[5] ** -0.5)
    case.check_norm(device, BOUNDS[dtype], **options)
