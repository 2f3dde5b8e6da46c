"""Attention of training: the references by the definition, the kernels by the references.

A row has keys of its own beside those of its document: of its earlier steps in training-time test,
of masked slots in parallel drafting.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.kernels import ttt_attention as ttt_attention_module
from draftlab.kernels.parallel_attention import parallel_attention
from draftlab.kernels.ttt_attention import StepKeyValues, document_starts, ttt_attention
from draftlab.train.objectives import block
from tests.helpers.gpu import on_gpu, relative_error
from tests.helpers.interpreter import inside, interpreter_test, outside
from tests.helpers.training_attention_cases import (
    AttentionCase,
    ParallelCase,
    StepCase,
    draw_documents,
)

test_in_the_interpreter = pytest.mark.slow(interpreter_test(__file__))
each_kind = pytest.mark.parametrize("kind", [StepCase, ParallelCase])

LENGTHS = [[11, 1, 20], [7, 25], [40]]  # in 40 slots: ends in padding, ends in padding, full


@outside
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((StepCase, {"steps": n, "shuffled": s}) for n in (0, 1, 5) for s in (False, True)),
        *((ParallelCase, {"depths": depths}) for depths in (0, 1, 4)),
    ],
)
def test_reference(kind: type[AttentionCase], options: dict[str, Any]) -> None:
    case = kind(LENGTHS, 40, heads=4, kv_heads=2, head_dim=8, **options)
    assert case.padding.any()
    output, *gradients = case.run(case.operator, torch.float64)
    torch.testing.assert_close(output, case.expected())
    assert not output[case.padding].any()
    assert not gradients[0][case.padding].any()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not any(gradient[case.documents < 0].any() for gradient in gradients[1:3])


@outside
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (StepCase, {}),
        (StepCase, {"steps": 2, "shuffled": True}),
        (StepCase, {"steps": 3, "window": 7}),
        (ParallelCase, {"depths": 3}),
    ],
)
def test_long_rows_are_taken_in_parts(
    kind: type[AttentionCase], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 3 rows, some of padding alone: the same output and gradients."""
    case = kind([*LENGTHS, []], 40, heads=4, kv_heads=2, head_dim=8, **options)
    whole = case.run(case.operator, torch.float64)
    monkeypatch.setattr(ttt_attention_module, "MOST_SCORES", 3 * 4 * 40)
    attend, rows = ttt_attention_module._attend, []
    monkeypatch.setattr(
        ttt_attention_module,
        "_attend",
        lambda q, *rest: rows.append(q.shape[1]) or attend(q, *rest),
    )
    parts = case.run(case.operator, torch.float64)
    assert max(rows) == 3
    assert sum(rows) == 2 * case.index.shape[1]  # each is computed again, not kept
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, other)


@outside
@pytest.mark.parametrize(("kind", "own"), [(StepCase, "steps"), (ParallelCase, "depths")])
def test_gradients_of_the_reference(kind: type[AttentionCase], own: str) -> None:
    """By finite differences, padding included."""
    case = kind([[3, 2], [4]], 6, head_dim=2, dtype=torch.float64, **{own: 2})
    leaves = [t.requires_grad_() for t in case.leaves()]
    assert torch.autograd.gradcheck(lambda *x: case.attend(case.operator, x), leaves)


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
@pytest.mark.parametrize(("kind", "own"), [(StepCase, {"steps": 1}), (ParallelCase, {})])
def test_wrong_inputs(kind: type[AttentionCase], own: dict[str, int]) -> None:
    case = kind([[4]], 4, heads=4, kv_heads=2, **own)
    query, *others = case.leaves()
    with pytest.raises(ValueError, match="3 query heads cannot share 2 kv heads"):
        case.attend(case.operator, [query[:, :, :3], *others])
    with pytest.raises(ValueError, match="of one dtype"):
        case.attend(case.operator, [*(x.double() for x in case.leaves()[:3]), *others[2:]])


def sizes(lengths: list[list[int]], width: int, **others: Any) -> dict[str, Any]:
    """Return the arguments of a case, and of its check."""
    return {"lengths": lengths, "width": width} | others


def heads_and_tiles(**two: int) -> dict[str, dict[str, Any]]:
    """Return cases of any operator: heads, tiles, the plan's own choices, float16."""
    heads = [(3, 3, 16), (4, 1, 32), (16, 2, 16), (6, 2, 20)]  # the last leave channels unused
    own = {"plan": None, **two}
    return {
        **{
            f"heads {n, kv, size}": sizes(
                [[9, 12], [19]], 23, heads=n, kv_heads=kv, head_dim=size, **two
            )
            for n, kv, size in heads
        },
        "the plan's own choices": sizes([[40, 30]], 70, **own),
        "float16": sizes([[40, 30]], 70, dtype=torch.float16, **own),
    }


TILES = [(16, 32), (32, 16), (64, 64)]
SIZES: dict[type[AttentionCase], dict[str, dict[str, Any]]] = {
    StepCase: {
        **{f"{steps} steps": sizes(LENGTHS, 40, steps=steps) for steps in (0, 1, 5)},
        **heads_and_tiles(steps=2),
        **{
            f"tiles of {plan}": sizes([[20, 31], [48]], 51, steps=3, share=0.9, plan=plan)
            for plan in TILES
        },
        **{  # blocks of seven and five slots have 7, 28, 35 or 20 queries a kv head
            f"slots {heads, kv_heads}": sizes(
                [[9, 12], [19]], 23, steps=2, heads=heads, kv_heads=kv_heads, plan=None
            )
            for heads, kv_heads in [(14, 2), (28, 1), (35, 1), (40, 2)]
        },
        # Most tiles are seen whole; rows of many neighbouring slots.
        "one long document": sizes([[70], [60, 9]], 70, steps=1, share=1.0),
        **{  # wider than a tile and narrower, at odd ends
            f"a window of {window}": sizes([[70], [60, 9]], 70, steps=2, share=1.0, window=window)
            for window in (3, 16, 33)
        },
        "rows in any order": sizes(LENGTHS, 40, steps=2, shuffled=True),
        "more steps than one kernel takes": sizes([[12]], 12, steps=9),
        "no rows": sizes([[5], [3]], 6, share=0.0),
        "no rows, two steps": sizes([[5], [3]], 6, steps=2, share=0.0),
        "nothing but padding": sizes([[], []], 20, steps=1),
    },
    ParallelCase: {
        **{f"{depths} depths": sizes(LENGTHS, 40, depths=depths) for depths in (0, 1, 5, 9)},
        **heads_and_tiles(depths=2),
        **{f"tiles of {plan}": sizes([[20, 31], [48]], 51, share=0.9, plan=plan) for plan in TILES},
        "one row": sizes([[50, 20, 30]], 100, share=1.0, depths=4),
        "no masked slots": sizes([[5], [3]], 6, share=0.0),
        "nothing but padding": sizes([[], []], 20, depths=1),
    },
}


@inside
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, cases in SIZES.items() for name in cases]
)
def test_kernels(kind: type[AttentionCase], name: str) -> None:
    options = {"plan": (16, 16)} | SIZES[kind][name]
    plan = options.pop("plan")
    case = kind(**options)
    case.check_kernels(plan, 1e-2 if case.dtype == torch.float16 else 1e-4)


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
@each_kind
def test_kernels_of_strided_inputs(kind: type[AttentionCase]) -> None:
    """Queries, keys and values of one projection, heads before rows in memory, and so on."""
    own = {"steps": 1} if kind is StepCase else {}
    case: Any = kind(LENGTHS[:2], 33, heads=4, kv_heads=2, **own)
    case.query = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.cat([case.key, case.value], 2)
    case.key, case.value = both[:, :, :2], both[:, :, 2:]
    if kind is ParallelCase:
        own = torch.cat([case.slot_key, case.slot_value], 1)
        case.slot_key, case.slot_value = own[:, :2], own[:, 2:]
        names = "index", "starts", "slots", "readers"
        strided = {name: getattr(case.rows, name).mT.contiguous().mT for name in names}
        case.rows = replace(case.rows, **strided)
    case.check_kernels()


@inside
def test_what_is_beyond_a_rows_depth_is_not_read() -> None:
    """Slots of later depths, and of padding, may be any number."""
    case = ParallelCase(LENGTHS, 40)
    output = case.run(parallel_attention.triton)
    depths = torch.arange(1, len(case.sizes))[:, None, None]
    unread = (depths > case.depth) | case.padding
    slots = torch.where(unread, 1 << 40, case.rows.slots)
    case.rows = replace(case.rows, slots=slots)
    for first, second in zip(output, case.run(parallel_attention.triton), strict=True):
        assert torch.equal(first, second)


@inside
def test_rows_of_padding_that_repeat_others() -> None:
    """What they would write is not written: the real row's gradients stay."""
    case = StepCase([[20]], 20, steps=2, share=0.5)
    case.index[0, -3:], case.starts[0, -3:] = case.index[0, 2], 20
    case.steps.rows[:, 0, -3:] = case.steps.rows[:, 0, 2:3]
    case.check_kernels()


@inside
def test_scores_far_from_zero() -> None:
    """Weights that vanish before and after the ones that count; no overflow of what is masked."""
    case = StepCase(LENGTHS, 40, steps=2)
    case.query *= 30
    case.check_kernels(tolerance=2e-3)


@inside
@each_kind
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_kernels_on_any_documents(kind: type[AttentionCase], data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 40))
    lengths, share = draw_documents(data, width), data.draw(st.floats(0, 1))
    own = {"steps" if kind is StepCase else "depths": data.draw(st.integers(0, 3))}
    kind(lengths, width, share=share, **own).check_kernels()


LONG = [[700, 1, 300], [90, 33], [1001]]
# kind, documents of each row, share, steps or depths, heads, kv heads, head_dim
REAL = [
    (StepCase, LONG, 0.7, 0, 32, 8, 128),
    (StepCase, LONG, 0.7, 6, 32, 8, 128),
    (StepCase, [[511], [2, 3, 500]], 1.0, 3, 14, 2, 80),
    (StepCase, [[257, 260]], 0.5, 1, 8, 8, 64),
    (StepCase, [[130], [77, 40]], 0.9, 9, 8, 1, 256),
    (StepCase, [[37]], 0.3, 2, 6, 6, 32),
    (StepCase, LONG, 0.1, 7, 224, 8, 128),  # blocks of seven slots
    (ParallelCase, [[700, 1, 300, 90, 33]], 0.7, 7, 32, 8, 128),
    (ParallelCase, [[700, 1, 300], [90, 33]], 0.7, 3, 8, 4, 32),
    (ParallelCase, [[511, 2, 3]], 1.0, 5, 14, 2, 80),
    (ParallelCase, [[130, 77, 40]], 0.9, 9, 8, 1, 256),
]
BOUNDS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 5e-6}


@on_gpu
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_kernels_at_real_sizes(shape: tuple, dtype: torch.dtype, device: str) -> None:
    """Relative errors of output and gradients against float64; repeated runs give equal bits."""
    kind, lengths, share, own, heads, kv_heads, head_dim = shape
    options = {"share": share, "steps" if kind is StepCase else "depths": own}
    options |= {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    case = kind(lengths, max(map(sum, lengths)), dtype=dtype, device=device, **options)
    results = case.run(case.operator)
    expected = case.run(case.operator.reference, torch.float64)
    for first, second, exact in zip(results, case.run(case.operator), expected, strict=True):
        assert torch.equal(first, second), "two runs differ"
        assert relative_error(first, exact) < BOUNDS[dtype]
    assert not results[0][case.padding].any()
