"""Attention of training-time test: reference by the definition, kernels by the reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.kernels.ttt_attention import document_starts, ttt_attention
from draftlab.kernels.ttt_attention_types import StepKeyValues
from tests.helpers.gpu import on_gpu, relative_error
from tests.helpers.interpreter import inside, outside, run_in_the_interpreter, runs_the_others
from tests.helpers.ttt_attention_cases import Case


@pytest.mark.slow
@runs_the_others
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


LENGTHS = [[11, 1, 20], [7, 25], [40]]  # in 40 slots: ends in padding, ends in padding, full


@outside
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("shuffled", [False, True])
def test_reference(steps: int, shuffled: bool) -> None:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 8}
    case = Case(LENGTHS, 40, steps=steps, shuffled=shuffled, **shape)
    padding = case.starts > case.index
    assert padding.any()
    output, *gradients = case.run(ttt_attention, torch.float64)
    torch.testing.assert_close(output, case.expected())
    assert not output[padding].any()
    assert not gradients[0][padding].any()
    assert all(gradient.isfinite().all() for gradient in gradients)
    unseen = case.documents < 0
    assert not gradients[1][unseen].any()
    assert not gradients[2][unseen].any()


@outside
def test_gradients_of_the_reference() -> None:
    """By finite differences, padding included."""
    case = Case([[3, 2], [4]], 6, steps=2, head_dim=2, dtype=torch.float64)

    def attend(query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        made = StepKeyValues(own[:2], own[2:], case.own.rows)
        return ttt_attention(query, key, value, case.index, case.starts, made)

    leaves = [t.requires_grad_() for t in case.leaves()]
    assert torch.autograd.gradcheck(attend, leaves)


@outside
def test_document_starts() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, -1], [-1, 3, 3, 2, -1, 2]])
    assert document_starts(documents).tolist() == [[0, 0, 2, 2, 2, 6], [6, 1, 1, 3, 6, 5]]


@outside
def test_own_keys_follow_their_rows() -> None:
    """Three steps, each of fewer rows: what is found is what each row made."""
    alive = torch.arange(7).expand(2, 7)  # row 0 of step 0 is called 0, and so on
    own = None
    for step, kept in enumerate([[[1, 2, 4, 5], [0, 3, 5, 6]], [[0, 2, 3], [1, 2, 3]], [[1], [0]]]):
        select = torch.tensor(kept)
        alive = alive.gather(1, select)
        made = (100.0 * step + 10 * torch.arange(2)[:, None] + alive)[:, :, None, None]
        own = StepKeyValues.extend(own, made, -made, select)
        for earlier, (keys, values) in enumerate(zip(own.keys, own.values, strict=True)):
            found = keys.flatten(0, 1)[own.rows[earlier]]
            expected = 100.0 * earlier + 10 * torch.arange(2)[:, None] + alive
            assert torch.equal(found[:, :, 0, 0], expected)
            assert torch.equal(values.flatten(0, 1)[own.rows[earlier]], -found)
    assert alive.tolist() == [[4], [3]]


@outside
def test_wrong_inputs() -> None:
    case = Case([[4]], 4, steps=1, heads=4, kv_heads=2)
    rows = case.index, case.starts
    with pytest.raises(ValueError, match="3 query heads cannot share 2 kv heads"):
        ttt_attention(case.query[:, :, :3], case.key, case.value, *rows)
    with pytest.raises(ValueError, match="of one dtype"):
        ttt_attention(case.query.double(), case.key.double(), case.value.double(), *rows, case.own)


def check(case: Case, plan: tuple[int, int] | None = (16, 16), tolerance: float = 1e-4) -> None:
    """Output and every gradient of the kernels, against the reference's in float64."""
    from draftlab.kernels.ttt_attention_launch import Plan, Tiles

    made = plan and Plan(*[Tiles(*plan, 4, 1)] * 4)
    found = case.run(partial(ttt_attention.triton, plan=made))
    expected = case.run(ttt_attention.reference, torch.float64)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == case.query.dtype
        torch.testing.assert_close(mine.double(), theirs, atol=tolerance, rtol=tolerance)


@inside
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_kernels(steps: int) -> None:
    check(Case(LENGTHS, 40, steps=steps))


@inside
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(3, 3, 16), (4, 1, 32), (16, 2, 16), (6, 2, 20)]
)
def test_kernels_of_other_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """Groups of 1, 4, 8 and 3; the last leaves packed rows and dimensions unused."""
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    check(Case([[9, 12], [19]], 23, steps=2, **shape))


@inside
@pytest.mark.parametrize("plan", [(16, 32), (32, 16), (64, 64)])
def test_kernels_with_other_tiles(plan: tuple[int, int]) -> None:
    check(Case([[20, 31], [48]], 51, steps=3, share=0.9), plan)


@inside
def test_kernels_on_whole_tiles() -> None:
    """One long document: most tiles are seen whole; rows of many neighbouring slots."""
    check(Case([[70], [60, 9]], 70, steps=1, share=1.0))


@inside
def test_kernels_with_rows_in_any_order() -> None:
    check(Case(LENGTHS, 40, steps=2, shuffled=True))


@inside
def test_kernels_with_more_steps_than_one_kernel_takes() -> None:
    check(Case([[12]], 12, steps=9))


@inside
def test_kernels_without_rows() -> None:
    for steps in (0, 2):
        check(Case([[5], [3]], 6, steps=steps, share=0.0))


@inside
def test_kernels_with_nothing_but_padding() -> None:
    case = Case([[], []], 20, steps=1)
    assert (case.starts > case.index).all()
    check(case)


@inside
def test_kernels_of_strided_inputs() -> None:
    """Queries, keys and values of one projection, heads before rows in memory."""
    case = Case(LENGTHS[:2], 33, steps=1, heads=4, kv_heads=2)
    case.query = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.cat([case.key, case.value], 2)
    case.key, case.value = both[:, :, :2], both[:, :, 2:]
    check(case)


@inside
def test_rows_of_padding_that_repeat_others() -> None:
    """What they would write is not written: the real row's gradients stay."""
    case = Case([[20]], 20, steps=2, share=0.5)
    case.index[0, -3:], case.starts[0, -3:] = case.index[0, 2], 20
    case.own.rows[:, 0, -3:] = case.own.rows[:, 0, 2:3]
    check(case)


@inside
def test_scores_far_from_zero() -> None:
    """Weights that vanish before and after the ones that count; no overflow of what is masked."""
    case = Case(LENGTHS, 40, steps=2)
    case.query *= 30
    check(case, tolerance=2e-3)


@inside
def test_kernels_as_planned() -> None:
    """The plan's own choices, in float32 and float16."""
    check(Case([[40, 30]], 70, steps=2), None)
    case = Case([[40, 30]], 70, steps=2, dtype=torch.float16)
    check(case, None, tolerance=1e-2)


@inside
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_kernels_on_any_documents(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 40))
    lengths = []
    for _ in range(data.draw(st.integers(1, 2))):
        left, row = width, []
        while left and data.draw(st.booleans()):
            row.append(data.draw(st.integers(1, left)))
            left -= row[-1]
        lengths.append(row)
    share, steps = data.draw(st.floats(0, 1)), data.draw(st.integers(0, 3))
    check(Case(lengths, width, share=share, steps=steps))


# documents of each row, share, steps, heads, kv heads, head_dim
REAL = [
    ([[700, 1, 300], [90, 33], [1001]], 0.7, 0, 32, 8, 128),
    ([[700, 1, 300], [90, 33], [1001]], 0.7, 6, 32, 8, 128),
    ([[511], [2, 3, 500]], 1.0, 3, 14, 2, 80),
    ([[257, 260]], 0.5, 1, 8, 8, 64),
    ([[130], [77, 40]], 0.9, 9, 8, 1, 256),
    ([[37]], 0.3, 2, 6, 6, 32),
]
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 5e-6}


@on_gpu
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_kernels_at_real_sizes(shape: tuple, dtype: torch.dtype, device: str) -> None:
    """Relative errors of output and gradients against float64; repeated runs give equal bits."""
    lengths, share, steps, heads, kv_heads, head_dim = shape
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    width = max(map(sum, lengths))
    case = Case(lengths, width, share=share, steps=steps, **sizes, dtype=dtype, device=device)
    results = case.run(ttt_attention)
    expected = case.run(ttt_attention.reference, torch.float64)
    for first, second, exact in zip(results, case.run(ttt_attention), expected, strict=True):
        assert torch.equal(first, second), "two runs differ"
        assert relative_error(first, exact) < BOUNDS[dtype]
    assert not results[0][case.starts > case.index].any()
