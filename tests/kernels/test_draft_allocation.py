"""Which drafts are verified, and their tokens without gaps: references and kernels."""

from __future__ import annotations

import itertools
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftlab.kernels.draft_allocation import allocate_drafts, compact_tokens, row_index
from draftlab.kernels.paged_attention import attend_paged
from draftlab.kernels.sampling_types import DraftDistribution
from draftlab.kernels.step_layout import available_drafts, gather_batch
from draftlab.kernels.step_types import SlotBuffers, StepLayout
from draftlab.kernels.verify import verify
from tests.helpers.gpu import assert_same, on_gpu, to_device
from tests.helpers.interpreter import INTERPRETED, interpreter_test
from tests.helpers.verify_cases import make_keys
from tests.kernels.test_step_layout import make_slots

test_in_the_interpreter = interpreter_test(__file__)
IMPLEMENTATIONS = ["reference"]
if INTERPRETED:
    from draftlab.kernels import draft_allocation_triton

    draft_allocation_triton._ROWS_TILE, draft_allocation_triton._TOKENS_TILE = 2, 4  # several
    IMPLEMENTATIONS.append("triton")

LIMIT = 40


def make_case(rows: int, k: int, seed: int) -> tuple[SlotBuffers, Tensor, Tensor, Tensor]:
    """Return slots, the index of a batch with dummies, and a calibration by depth."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LIMIT - 2, (rows,), generator=generator)
    lengths[::4] = LIMIT - 2 - torch.arange(len(lengths[::4])) % 3  # little room
    lengths[3::5] = 0
    slots = make_slots(lengths.tolist(), k + 1, 5, 9, seed)
    slots.confidence[0] = slots.confidence[1]  # equal survivals
    index = torch.cat([torch.randperm(rows, generator=generator), torch.tensor([rows, rows])])
    scale = torch.rand(k + 1, generator=generator) + 0.5
    return slots, index, scale, torch.randn(k + 1, generator=generator)


def likeliest(
    slots: SlotBuffers, index: Tensor, scale: Tensor, bias: Tensor, budget: int, k: int
) -> list[int]:
    """Return the counts by sorting (survival, depth, row) in double precision."""
    available = available_drafts(slots, index, max_length=LIMIT, k=k).tolist()
    entries = []
    for row, slot in enumerate(index.tolist()):
        confidence = (slots.confidence[slot] * scale + bias).double().sigmoid()
        entries += [
            (-float(confidence[: depth + 1].prod()), depth, row) for depth in range(available[row])
        ]
    chosen = [row for _, _, row in sorted(entries)[:budget]]
    return [chosen.count(row) for row in range(len(index))]


@pytest.mark.parametrize(("rows", "k", "seed"), [(1, 1, 0), (3, 4, 1), (5, 7, 2), (9, 2, 3)])
def test_the_likeliest_drafts_are_verified(rows: int, k: int, seed: int) -> None:
    slots, index, scale, bias = make_case(rows, k, seed)
    slots.confidence[0, 1:] = slots.confidence[1, 1:] = 8.0  # sums that differ in their last bits
    for budget in (0, 1, 3, rows, rows * k):
        expected = likeliest(slots, index, scale, bias, budget, k)
        for name in IMPLEMENTATIONS:
            before = deepcopy(slots)
            counts = getattr(allocate_drafts, name)(
                slots, index, scale, bias, budget=budget, max_length=LIMIT, k=k
            )
            assert counts.tolist() == expected
            assert_same(slots, before)
    everything = available_drafts(slots, index, max_length=LIMIT, k=k)
    assert expected == everything.tolist()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_confidence_that_is_no_number_keeps_the_budget(value: float) -> None:
    """A head whose outputs overflow drafts badly; its drafts come last."""
    slots, index, scale, bias = make_case(5, 3, 2)
    slots.length[:5], slots.stored[:5] = 5, 3
    slots.confidence[:3] = value
    scale[1] = 0.0  # inf · 0
    for budget in (0, 1, 4, 7, 15):
        counts = {
            name: getattr(allocate_drafts, name)(
                slots, index, scale, bias, budget=budget, max_length=LIMIT, k=3
            )
            for name in IMPLEMENTATIONS
        }
        assert all(int(each.sum()) == budget for each in counts.values())
        assert all(torch.equal(each, counts["reference"]) for each in counts.values())
        if value != torch.inf:
            others = counts["reference"][(index == 3) | (index == 4)]
            assert int(others.sum()) == min(budget, 6)


def test_a_draft_does_not_change_whether_it_is_verified() -> None:
    """Nothing behind a draft does: any confidence at later depths leaves its row's prefix."""
    slots, index, scale, bias = make_case(4, 3, 7)
    slots.length[:4], slots.stored[:4] = 5, 3
    for depth, budget in itertools.product(range(2), range(1, 12)):
        options = {"budget": budget, "max_length": LIMIT, "k": 3}
        before = allocate_drafts(slots, index, scale, bias, **options)
        for value in (-9.0, 9.0):
            changed = deepcopy(slots)
            changed.confidence[:4, depth + 1 :] = value
            after = allocate_drafts(changed, index, scale, bias, **options)
            row = int((index == 0).nonzero())
            alone = deepcopy(slots)
            alone.confidence[0, depth + 1 :] = value
            own = allocate_drafts(alone, index, scale, bias, **options)
            # Of its own row: whether depth d is verified depends on nothing behind d.
            assert (own[row] > depth) == (before[row] > depth)
            assert int(after.sum()) <= budget


def make_layout(rows: int, k: int, seed: int) -> StepLayout:
    slots, index, scale, bias = make_case(rows, k, seed)
    slots.block_table[:] = 1 + torch.arange(slots.block_table.numel()).view_as(slots.block_table)
    counts = allocate_drafts(slots, index, scale, bias, budget=rows * k // 2, max_length=LIMIT, k=k)
    return gather_batch(slots, index, max_length=LIMIT, block_size=8, k=k, num_drafts=counts)


@pytest.mark.parametrize(("rows", "k"), [(1, 1), (3, 4), (9, 2)])
def test_compact_tokens(rows: int, k: int) -> None:
    layout = make_layout(rows, k, 4)
    active = (layout.length > 0).tolist()
    expected: list[tuple[int, ...]] = []
    starts = []
    for row, count in enumerate(layout.num_drafts.tolist()):
        starts.append(len(expected))
        if active[row]:
            columns = (layout.tokens, layout.positions, layout.slots)
            values = (x[row, : count + 1].tolist() for x in columns)
            expected += zip(*values, strict=True)
    for name in IMPLEMENTATIONS:
        for extra in (0, 1, 7):
            compact = getattr(compact_tokens, name)(layout, len(expected) + extra)
            assert compact.query_start.tolist() == starts
            columns = (compact.tokens, compact.positions, compact.slots)
            entries = zip(*(x.tolist() for x in columns), strict=True)
            assert list(entries) == [*expected, *[(0, -1, -1)] * extra]


@pytest.mark.parametrize(("heads", "splits"), [((4, 2), 1), ((4, 4), 4)])
def test_attention_of_compact_queries(heads: tuple[int, int], splits: int) -> None:
    layout = make_layout(5, 3, 5)
    compact = compact_tokens.reference(layout, 16)
    generator = torch.Generator().manual_seed(0)
    pools = torch.randn(2, 60, 8, heads[1], 16, generator=generator)
    query = torch.randn(1, 16, heads[0], 16, generator=generator)
    rows = row_index(compact.query_start, 4, 16)
    real = layout.positions >= 0
    arguments = *pools, layout.block_table, layout.positions
    expected = attend_paged.reference(query[0, rows], *arguments, scale=0.3)[real]
    for name in IMPLEMENTATIONS:
        options = {"scale": 0.3, "query_start": compact.query_start}
        if name == "triton":
            from draftlab.kernels.paged_attention_launch import Plan

            options["plan"] = Plan(16, 16, splits, 4, 2)
        attended = getattr(attend_paged, name)(query, *arguments, **options)
        torch.testing.assert_close(attended[0, rows[real]], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("limited", [False, True])
def test_verification_of_compact_logits(block: bool, limited: bool) -> None:
    layout = make_layout(6, 3, 6)
    rows, width = layout.tokens.shape
    compact = compact_tokens.reference(layout, 20)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(20, 50, generator=generator)
    keys = make_keys(rows)
    keys = replace(keys, top_k=torch.full((rows,), 7 if limited else 0))
    q_logits = torch.randn(rows, width - 1, 50, generator=generator)
    temperature = torch.ones(rows)
    q = DraftDistribution(
        q_logits, q_logits.logsumexp(-1), temperature, temperature > 0, torch.arange(50)
    )
    drafts = torch.randint(0, 50, (rows, width - 1), generator=generator)
    padded = logits[row_index(compact.query_start, width, 20)]
    rest = drafts, layout.num_drafts, q, layout.length, keys
    options = {"limited": limited, "block": block}
    expected = verify.reference(padded, *rest, **options)
    for name in IMPLEMENTATIONS:
        result = getattr(verify, name)(logits, *rest, **options, query_start=compact.query_start)
        active = layout.length > 0
        assert torch.equal(result.accepted[active], expected.accepted[active])
        assert torch.equal(result.emitted[active], expected.emitted[active])
        torch.testing.assert_close(
            result.probability[active], expected.probability[active], rtol=1e-4, atol=1e-5
        )


@on_gpu
@pytest.mark.parametrize(("rows", "k"), [(1, 7), (31, 3), (64, 7)])
def test_at_real_sizes(rows: int, k: int, device: str) -> None:
    slots, index, scale, bias = make_case(rows, k, rows)
    for budget in (rows // 2, rows * k // 2, rows * k):
        options = {"budget": budget, "max_length": LIMIT, "k": k}
        expected = allocate_drafts(slots, index, scale, bias, **options)
        moved = to_device((slots, index, scale, bias), device)
        counts = allocate_drafts(*moved, **options)
        assert torch.equal(counts.cpu(), expected)
        layout = gather_batch(
            slots, index, max_length=LIMIT, block_size=8, k=k, num_drafts=counts.cpu()
        )
        num_tokens = len(index) + budget
        compact = compact_tokens(layout, num_tokens)
        assert_same(
            to_device(compact_tokens(to_device(layout, device), num_tokens), "cpu"), compact
        )
