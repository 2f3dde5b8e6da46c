"""Attention of training-time test: reference by the definition, kernels by the reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.kernels.ttt_attention import StepKeyValues, document_starts, ttt_attention
from draftlab.train.objectives import block
from tests.helpers.gpu import on_gpu, relative_error
from tests.helpers.interpreter import inside, interpreter_test, outside
from tests.helpers.ttt_attention_cases import Case, check_kernels, draw_documents, sizes

test_in_the_interpreter = pytest.mark.slow(interpreter_test(__file__))


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

    def attend(query: Tensor, key: Tensor, value: Tensor, *step_keys: Tensor) -> Tensor:
        steps = StepKeyValues(step_keys[:2], step_keys[2:], case.steps.rows)
        return ttt_attention(query, key, value, case.index, case.starts, steps)

    leaves = [t.requires_grad_() for t in case.leaves()]
    assert torch.autograd.gradcheck(attend, leaves)


@outside
def test_document_starts() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, -1], [-1, 3, 3, 2, -1, 2]])
    assert document_starts(documents).tolist() == [[0, 0, 2, 2, 2, 6], [6, 1, 1, 3, 6, 5]]


@outside
def test_step_keys_follow_their_rows() -> None:
    """Three steps, each of fewer rows: a row reads the keys of its own earlier steps."""
    alive = torch.arange(7).expand(2, 7)  # row 0 of step 0 is called 0, and so on
    step_keys = None
    for step, rows in enumerate([[[1, 2, 4, 5], [0, 3, 5, 6]], [[0, 2, 3], [1, 2, 3]], [[1], [0]]]):
        select = torch.tensor(rows)
        alive = alive.gather(1, select)
        new = (100.0 * step + 10 * torch.arange(2)[:, None] + alive)[:, :, None, None]
        step_keys = StepKeyValues.extend(step_keys, new, -new, select)
        pairs = zip(step_keys.keys, step_keys.values, strict=True)
        for earlier, (keys, values) in enumerate(pairs):
            actual = keys.flatten(0, 1)[step_keys.rows[earlier]]
            expected = 100.0 * earlier + 10 * torch.arange(2)[:, None] + alive
            assert torch.equal(actual[:, :, 0, 0], expected)
            assert torch.equal(values.flatten(0, 1)[step_keys.rows[earlier]], -actual)
    assert alive.tolist() == [[4], [3]]


@outside
def test_wrong_inputs() -> None:
    case = Case([[4]], 4, steps=1, heads=4, kv_heads=2)
    rows = case.index, case.starts
    with pytest.raises(ValueError, match="3 query heads cannot share 2 kv heads"):
        ttt_attention(case.query[:, :, :3], case.key, case.value, *rows)
    with pytest.raises(ValueError, match="of one dtype"):
        ttt_attention(
            case.query.double(), case.key.double(), case.value.double(), *rows, case.steps
        )


check = partial(check_kernels, ttt_attention)

HEADS = [(3, 3, 16), (4, 1, 32), (16, 2, 16), (6, 2, 20)]  # the last leave rows and channels unused
SIZES = {
    **{f"{steps} steps": sizes(LENGTHS, 40, steps=steps) for steps in (0, 1, 5)},
    **{
        f"heads {heads, kv_heads, head_dim}": sizes(
            [[9, 12], [19]], 23, steps=2, heads=heads, kv_heads=kv_heads, head_dim=head_dim
        )
        for heads, kv_heads, head_dim in HEADS
    },
    **{
        f"tiles of {plan}": sizes([[20, 31], [48]], 51, steps=3, share=0.9, plan=plan)
        for plan in [(16, 32), (32, 16), (64, 64)]
    },
    **{  # blocks of seven and five slots have 7, 28, 35 or 20 queries a kv head
        f"slots {heads, kv_heads}": sizes(
            [[9, 12], [19]], 23, steps=2, heads=heads, kv_heads=kv_heads, plan=None
        )
        for heads, kv_heads in [(14, 2), (28, 1), (35, 1), (40, 2)]
    },
    # Most tiles are seen whole; rows of many neighbouring slots.
    "one long document": sizes([[70], [60, 9]], 70, steps=1, share=1.0),
    "rows in any order": sizes(LENGTHS, 40, steps=2, shuffled=True),
    "more steps than one kernel takes": sizes([[12]], 12, steps=9),
    "no rows": sizes([[5], [3]], 6, share=0.0),
    "no rows, two steps": sizes([[5], [3]], 6, steps=2, share=0.0),
    "nothing but padding": sizes([[], []], 20, steps=1),
    "the plan's own choices": sizes([[40, 30]], 70, steps=2, plan=None),
    "float16": sizes([[40, 30]], 70, steps=2, plan=None, dtype=torch.float16),
}


@inside
@pytest.mark.parametrize("name", SIZES)
def test_kernels(name: str) -> None:
    plan = {"plan": (16, 16)} | SIZES[name]
    case = Case(**{key: value for key, value in SIZES[name].items() if key != "plan"})
    check(case, plan["plan"], 1e-2 if case.query.dtype == torch.float16 else 1e-4)


@inside
@pytest.mark.parametrize(
    ("heads", "kv_heads", "slots", "is_causal", "window"),
    [
        (4, 1, 7, False, None),
        (5, 1, 7, True, None),
        (4, 4, 5, True, 6),
        (16, 1, 7, False, None),
        (16, 1, 7, True, 6),
    ],
)
def test_kernels_of_blocks(
    heads: int,
    kv_heads: int,
    slots: int,
    is_causal: bool,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots grouped as heads, with the plan that the shape gets; one anchor is padding.

    The last have so many queries that the kernel takes their slots in two parts.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (1, 5, slots, heads, 16), *[(1, 20, kv_heads, 16)] * 2, *[(1, 5, slots, kv_heads, 16)] * 2,
    )  # fmt: skip
    leaves = [torch.randn(shape, generator=generator) for shape in shapes]
    d_output = torch.randn(shapes[0], generator=generator)
    index, starts = torch.tensor([[2, 9, 10, 17, 3]]), torch.tensor([[0, 8, 8, 12, 20]])

    def attend(dtype: torch.dtype) -> tuple[Tensor, ...]:
        query, key, value, *own = [x.to(dtype, copy=True).requires_grad_() for x in leaves]
        output = block.block_attention(
            query,
            (key, value),
            StepKeyValues(*(x.unbind(2) for x in own), block.slot_row_indices(index, slots)),
            index,
            starts,
            window=window,
            is_causal=is_causal,
        )
        inputs = (query, key, value, *own)
        return output, *torch.autograd.grad(output, inputs, d_output.to(dtype))

    with monkeypatch.context() as whole:
        whole.setattr(block, "MOST_QUERIES", 1000)
        expected = attend(torch.float64)
    monkeypatch.setattr(block, "ttt_attention", ttt_attention.triton)
    for actual, exact in zip(attend(torch.float32), expected, strict=True):
        torch.testing.assert_close(actual.double(), exact, atol=1e-4, rtol=1e-4)


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
    case.steps.rows[:, 0, -3:] = case.steps.rows[:, 0, 2:3]
    check(case)


@inside
def test_scores_far_from_zero() -> None:
    """Weights that vanish before and after the ones that count; no overflow of what is masked."""
    case = Case(LENGTHS, 40, steps=2)
    case.query *= 30
    check(case, tolerance=2e-3)


@inside
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_kernels_on_any_documents(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 40))
    lengths = draw_documents(data, width)
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
    ([[700, 1, 300], [90, 33], [1001]], 0.1, 7, 224, 8, 128),  # blocks of seven slots
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
