"""Paged attention: reference and kernels against dense attention in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.kernels.paged_attention import attend_paged, write_paged
from tests.helpers.interpreter import INTERPRETED, inside, outside, run_in_the_interpreter


@outside
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="eval/gpu/attention.py checks them there")
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


class Case:
    """Rows of a paged cache. What no query sees is NaN; what no row owns, too.

    Args:
        lengths: keys of each row before its new tokens.
        counts: real new tokens of each row, out of m.
    """

    def __init__(
        self,
        lengths: list[int],
        counts: list[int],
        m: int,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 8,
        block_size: int = 4,
        spare: int = 2,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
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
        self.counts, self.m = counts, m
        self.positions = torch.full((num_rows, m), -1)
        self.keys, self.values = [], []
        for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            self.positions[b, :count] = torch.arange(length, length + count)
            self.keys.append(random(length + count, kv_heads, head_dim))
            self.values.append(random(length + count, kv_heads, head_dim))
            for j in range(length + count):
                at = self.table[b, j // block_size], j % block_size
                self.key_pool[at], self.value_pool[at] = self.keys[b][j], self.values[b][j]
        # As transformers hands it over: heads before tokens in memory. Padding holds rubbish.
        self.query = random(num_rows, heads, m, head_dim).transpose(1, 2)
        self.query[self.positions < 0] = math.nan
        self.scale = 1.3 * head_dim**-0.5

    def run(self, attend=attend_paged, **options) -> Tensor:
        pools = self.key_pool, self.value_pool
        return attend(self.query, *pools, self.table, self.positions, scale=self.scale, **options)

    def hide(self, window: int | None, chunk: int | None) -> None:
        """Makes the keys NaN that lie before what a row's first query sees."""
        block_size = self.key_pool.shape[1]
        for b, first in enumerate(self.positions[:, 0].tolist()):
            for j in range(first):
                if (window and j <= first - window) or (chunk and j < first // chunk * chunk):
                    at = self.table[b, j // block_size], j % block_size
                    self.key_pool[at] = self.value_pool[at] = math.nan

    def expected(self, *, window=None, chunk=None, softcap=None, sinks=None) -> Tensor:
        """Query by query, head by head, in float64 and by the definition."""
        output = torch.zeros(self.query.shape, dtype=torch.float64)
        group = self.query.shape[2] // self.key_pool.shape[2]
        for b, count in enumerate(self.counts):
            for i in range(count):
                q = self.positions[b, i].item()
                low = max(0, q - window + 1 if window else 0, q // chunk * chunk if chunk else 0)
                for h in range(self.query.shape[2]):
                    keys = self.keys[b][low : q + 1, h // group].double()
                    scores = keys @ self.query[b, i, h].double() * self.scale
                    if softcap is not None:
                        scores = softcap * (scores / softcap).tanh()
                    weights = scores.exp()
                    total = weights.sum() + (sinks[h].double().exp() if sinks is not None else 0)
                    output[b, i, h] = weights @ self.values[b][low : q + 1, h // group].double()
                    output[b, i, h] /= total
        return output

    def check(self, attend=attend_paged, tolerance: float = 1e-5, **options) -> None:
        self.hide(options.get("window"), options.get("chunk"))
        found = self.run(attend, **options)
        assert found.dtype == self.query.dtype
        assert found.is_contiguous()
        expected = self.expected(**options)
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
        assert not found[self.positions < 0].any()


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
def test_reference_in_bf16() -> None:
    Case([9, 30], [3, 2], 3, head_dim=32, dtype=torch.bfloat16).check(tolerance=2e-2)


@outside
def test_one_block_a_row_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([40], [1], 1, block_size=64, spare=0)
    seen = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
        seen.extend([key, value])
        return sdpa(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    case.run()
    pools = [case.key_pool, case.value_pool]
    assert [t.untyped_storage().data_ptr() for t in seen] == [
        t.untyped_storage().data_ptr() for t in pools
    ]


@outside
def test_heads_that_do_not_divide() -> None:
    case = Case([3], [1], 1, heads=4, kv_heads=2)
    case.query = case.query[:, :, :3]
    with pytest.raises(ValueError, match="3 query heads cannot share 2 kv heads"):
        case.run()


def write(dtype: torch.dtype, block_size: int, kv_heads: int, head_dim: int) -> None:
    """Checks every entry of both pools: the new ones, and the old ones bit by bit."""
    if INTERPRETED:
        from draftlab.kernels.paged_attention_launch import write_paged_triton as run
    else:
        run = write_paged
    generator = torch.Generator().manual_seed(1)
    shape = 5, block_size, kv_heads, head_dim
    pools = [torch.randn(*shape, generator=generator).to(dtype) for _ in range(2)]
    pools[0][2], pools[1][3] = math.nan, math.inf  # old bits survive whatever they mean
    order = torch.randperm(5 * block_size, generator=generator)[:6]
    slots = torch.stack([order[:3], order[3:]])
    slots[0, 1] = slots[1, 2] = -1
    new = [
        torch.randn(2, kv_heads, 3, head_dim, generator=generator).to(dtype).transpose(1, 2)
        for _ in range(2)
    ]
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    expected = [pool.clone().view(bits).flatten(0, 1) for pool in pools]
    for b in range(2):
        for i in range(3):
            if slots[b, i] >= 0:
                for target, source in zip(expected, new, strict=True):
                    target[slots[b, i]] = source[b, i].contiguous().view(bits)
    run(*new, *pools, slots)
    for pool, wanted in zip(pools, expected, strict=True):
        assert torch.equal(pool.view(bits).flatten(0, 1), wanted)
    before = [pool.clone() for pool in pools]
    run(*new, *pools, torch.full_like(slots, -1))
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool.view(bits), old.view(bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_write(dtype: torch.dtype) -> None:
    write(dtype, block_size=4, kv_heads=2, head_dim=8)


def test_write_odd_sizes() -> None:
    write(torch.float32, block_size=3, kv_heads=3, head_dim=5)


@outside
def test_write_into_what_cannot_be_viewed_by_slot() -> None:
    """Pools that interleave keys and values: written through, or refused, never silently lost."""
    both = torch.zeros(3, 2, 4, 2, 8)
    key = torch.ones(1, 1, 2, 8)
    with pytest.raises(RuntimeError, match="view"):
        write_paged(key, key, both[:, 0], both[:, 1], torch.tensor([[1]]))


def triton_case(plan: tuple[int, ...] | None, case: Case, **options) -> None:
    from draftlab.kernels.paged_attention_launch import Plan, attend_paged_triton

    def attend(*inputs: Tensor, **options) -> Tensor:
        return attend_paged_triton(*inputs, plan=plan and Plan(*plan, 4, 2), **options)

    case.check(attend, **options)


@inside
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_kernel(options: dict, splits: int) -> None:
    """Rows of several lengths: with no keys, with fewer key tiles than splits, and with more."""
    case = Case([33, 0, 90, 3], [3, 2, 1, 0], 3, head_dim=16, block_size=16)
    options = options | ({"sinks": sinks(4)} if "sinks" in options else {})
    triton_case((16, 16, splits), case, **options)


@inside
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(4, 4, 16, 8), (6, 2, 20, 7), (7, 1, 16, 100), (20, 1, 24, 16), (8, 4, 32, 32)],
)
def test_kernel_on_odd_shapes(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    rows = 32 if heads // kv_heads > 16 else 16
    for splits in (1, 2):
        triton_case((rows, 16, splits), Case([21, 40], [3, 2], 3, **shape), window=30)


@inside
def test_kernel_with_many_tokens() -> None:
    """Several tiles of rows, as in prefill: each has key tiles of its own."""
    shape = {"head_dim": 32, "heads": 2, "kv_heads": 1, "block_size": 16}
    for options in ({}, {"window": 9}, {"chunk": 16}):
        triton_case((16, 16, 1), Case([0, 13], [40, 22], 40, **shape), **options)
    triton_case((32, 16, 2), Case([50], [40], 40, **shape))


@inside
def test_kernel_as_planned() -> None:
    """The plan's own choices, in float32 and float16."""
    triton_case(None, Case([150, 10], [2, 1], 2, head_dim=32, block_size=16))
    case = Case([150, 10], [2, 1], 2, head_dim=32, block_size=64, dtype=torch.float16)
    from draftlab.kernels.paged_attention_launch import attend_paged_triton

    case.check(attend_paged_triton, tolerance=4e-3)


@inside
def test_scores_far_from_zero() -> None:
    """Whole tiles of vanishing weight before and after the ones that count."""
    case = Case([60], [2], 2, head_dim=16, block_size=16)
    case.scale = 40.0
    for splits in (1, 4):
        triton_case((16, 16, splits), case)
