"""Attention of parallel drafting: reference by the definition, kernels by the reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftlab.kernels.parallel_attention import parallel_attention
from tests.helpers.gpu import on_gpu, relative_error
from tests.helpers.interpreter import inside, interpreter_test, outside
from tests.helpers.parallel_attention_cases import ParallelCase
from tests.helpers.ttt_attention_cases import check_kernels, draw_documents, sizes

test_in_the_interpreter = pytest.mark.slow(interpreter_test(__file__))

LENGTHS = [[11, 1, 20], [7, 25], [40]]  # in 40 slots: ends in padding, ends in padding, full


@outside
@pytest.mark.parametrize("depths", [0, 1, 4])
def test_reference(depths: int) -> None:
    case = ParallelCase(LENGTHS, 40, depths=depths, heads=4, kv_heads=2, head_dim=8)
    padding = case.starts > case.index
    assert padding.any()
    output, *gradients = case.run(parallel_attention, torch.float64)
    torch.testing.assert_close(output, case.expected())
    assert not output[padding].any()
    assert not gradients[0][padding].any()
    assert all(gradient.isfinite().all() for gradient in gradients)


@outside
def test_gradients_of_the_reference() -> None:
    """By finite differences, padding included."""
    case = ParallelCase([[3, 2], [4]], 6, depths=2, head_dim=2, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in case.leaves()]
    assert torch.autograd.gradcheck(lambda *x: parallel_attention(*x, case.rows), leaves)


@outside
def test_wrong_inputs() -> None:
    case = ParallelCase([[4]], 4, heads=4, kv_heads=2)
    query, *others = case.leaves()
    with pytest.raises(ValueError, match="3 query heads cannot share 2 kv heads"):
        parallel_attention(query[:, :, :3], *others, case.rows)
    with pytest.raises(ValueError, match="of one dtype"):
        parallel_attention(*(x.double() for x in case.leaves()[:4]), case.slot_value, case.rows)


check = partial(check_kernels, parallel_attention)

HEADS = [(3, 3, 16), (4, 1, 32), (16, 2, 16), (6, 2, 20)]  # the last leave rows and channels unused
SIZES = {
    **{f"{depths} depths": sizes(LENGTHS, 40, depths=depths) for depths in (0, 1, 5, 9)},
    **{
        f"heads {heads, kv_heads, head_dim}": sizes(
            [[9, 12], [19]], 23, depths=2, heads=heads, kv_heads=kv_heads, head_dim=head_dim
        )
        for heads, kv_heads, head_dim in HEADS
    },
    **{
        f"tiles of {plan}": sizes([[20, 31], [48]], 51, share=0.9, plan=plan)
        for plan in [(16, 32), (32, 16), (64, 64)]
    },
    "one row": sizes([[50, 20, 30]], 100, share=1.0, depths=4),
    "no masked slots": sizes([[5], [3]], 6, share=0.0),
    "nothing but padding": sizes([[], []], 20, depths=1),
    "the plan's own choices": sizes([[40, 30]], 70, depths=2, plan=None),
    "float16": sizes([[40, 30]], 70, depths=2, plan=None, dtype=torch.float16),
}


@inside
@pytest.mark.parametrize("name", SIZES)
def test_kernels(name: str) -> None:
    plan = {"plan": (16, 16)} | SIZES[name]
    case = ParallelCase(**{key: value for key, value in SIZES[name].items() if key != "plan"})
    check(case, plan["plan"], 1e-2 if case.query.dtype == torch.float16 else 1e-4)


@inside
def test_kernels_of_strided_inputs() -> None:
    """Queries, keys and values of one projection, heads before rows in memory, and so on."""
    case = ParallelCase(LENGTHS[:2], 33, heads=4, kv_heads=2)
    case.query = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.cat([case.key, case.value], 2)
    case.key, case.value = both[:, :, :2], both[:, :, 2:]
    own = torch.cat([case.slot_key, case.slot_value], 1)
    case.slot_key, case.slot_value = own[:, :2], own[:, 2:]
    names = "index", "starts", "slots", "readers"
    strided = {name: getattr(case.rows, name).mT.contiguous().mT for name in names}
    case.rows = replace(case.rows, **strided)
    check(case)


@inside
def test_what_is_beyond_a_rows_depth_is_not_read() -> None:
    """Slots of later depths, and of padding, may be any number."""
    case = ParallelCase(LENGTHS, 40)
    output = case.run(parallel_attention.triton)
    depths = torch.arange(1, len(case.sizes))[:, None, None]
    unread = (depths > case.depth) | (case.starts > case.index)
    slots = torch.where(unread, 1 << 40, case.slots)
    case.rows = replace(case.rows, slots=slots)
    for first, second in zip(output, case.run(parallel_attention.triton), strict=True):
        assert torch.equal(first, second)


@inside
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_kernels_on_any_documents(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 40))
    lengths = draw_documents(data, width)
    share, depths = data.draw(st.floats(0, 1)), data.draw(st.integers(0, 3))
    check(ParallelCase(lengths, width, share=share, depths=depths))


# documents of each row, depths, share, heads, kv heads, head_dim
REAL = [
    ([[700, 1, 300, 90, 33]], 7, 0.7, 32, 8, 128),
    ([[700, 1, 300], [90, 33]], 3, 0.7, 8, 4, 32),
    ([[511, 2, 3]], 5, 1.0, 14, 2, 80),
    ([[130, 77, 40]], 9, 0.9, 8, 1, 256),
]
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 5e-6}


@on_gpu
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_kernels_at_real_sizes(shape: tuple, dtype: torch.dtype, device: str) -> None:
    """Relative errors of output and gradients against float64; repeated runs give equal bits."""
    lengths, depths, share, heads, kv_heads, head_dim = shape
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    width = max(map(sum, lengths))
    options = {"depths": depths, "share": share, "dtype": dtype, "device": device}
    case = ParallelCase(lengths, width, **options, **sizes)
    results = case.run(parallel_attention)
    expected = case.run(parallel_attention.reference, torch.float64)
    for first, second, exact in zip(results, case.run(parallel_attention), expected, strict=True):
        assert torch.equal(first, second), "two runs differ"
        assert relative_error(first, exact) < BOUNDS[dtype]
    assert not results[0][case.starts > case.index].any()
