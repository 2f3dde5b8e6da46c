"""The layout and the bookkeeping of a step: references and kernels against the rules."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.kernels import step_layout
from draftlab.kernels.chain_layout import chain_layout
from draftlab.kernels.sampling.types import SamplingMetadata, VerifyResult
from draftlab.kernels.step_layout.types import SlotBuffers, StepLayout
from tests.helpers.gpu import assert_same, capture, on_gpu, to_device
from tests.helpers.interpreter import INTERPRETED, interpreter_test

test_in_the_interpreter = interpreter_test(__file__)
IMPLEMENTATIONS = ["reference"]
if INTERPRETED:
    from draftlab.kernels.step_layout import triton as step_layout_triton

    step_layout_triton._TABLE_TILE, step_layout_triton._LOGITS_TILE = 2, 4  # several of each
    IMPLEMENTATIONS.append("triton")


def make_slots(
    lengths: list[int], k: int, width: int, vocab: int | None, seed: int, dtype=torch.float32
) -> SlotBuffers:
    """Random buffers of these requests and the dummy; some blocks are nobody's."""
    generator = torch.Generator().manual_seed(seed)
    entries = len(lengths) + 1

    def ints(*shape: int, high: int = 99) -> Tensor:
        return torch.randint(0, high, (entries, *shape), generator=generator)

    def floats(*shape: int) -> Tensor:
        return torch.randn(entries, *shape, generator=generator)

    table = ints(width, high=6).int()  # block 0, of which a table may have any number
    slots = SlotBuffers(
        torch.tensor([*lengths, 0]),
        ints(),
        ints(high=k + 1),
        ints(k),
        table,
        SamplingMetadata(floats(), ints(), floats(), ints() << 40, -ints()),
    )
    if vocab is not None:
        slots.draft_logits = floats(k, vocab).to(dtype)
        slots.draft_log_sum = floats(k)
        slots.confidence = floats(k)
    return slots


def equal(one: SlotBuffers, other: SlotBuffers, rows: slice = slice(None)) -> bool:
    """Whether the buffers agree; the dummy's may be left out, whose rows race for one place."""
    names = (
        *("length", "newest", "stored", "drafts", "block_table", "draft_logits", "draft_log_sum"),
        "confidence",
    )
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    pairs += [(one.keys.temperature, other.keys.temperature), (one.keys.seed, other.keys.seed)]
    return all(a is b is None or torch.equal(a[rows], b[rows]) for a, b in pairs)


@st.composite
def steps(draw: st.DrawFn) -> tuple[SlotBuffers, Tensor, dict[str, int]]:
    """Slots, an index with the dummy behind it, and the options of `gather_batch`."""
    k, limit = draw(st.integers(0, 8)), draw(st.integers(2, 40))
    block_size, width = draw(st.sampled_from((1, 3, 4, 16))), draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(0, limit), min_size=1, max_size=5))
    vocab = draw(st.sampled_from((None, 1, 9)))
    slots = make_slots(lengths, k, width, vocab if k else None, draw(st.integers(0, 99)))
    index = draw(st.permutations(range(len(lengths))))[: draw(st.integers(1, 5))]
    dummies = [len(lengths)] * draw(st.integers(0, 3))
    options = {"max_length": limit, "block_size": block_size}
    return slots, torch.tensor([*index, *dummies]), options


@settings(max_examples=40 if INTERPRETED else 150, deadline=None)
@given(steps())
def test_gather_batch(case: tuple[SlotBuffers, Tensor, dict]) -> None:
    slots, index, options = case
    (limit, block_size), k = options.values(), slots.drafts.shape[1]
    span = slots.block_table.shape[1] * block_size
    for name in IMPLEMENTATIONS:
        before, gather = deepcopy(slots), getattr(step_layout.gather_batch, name)
        layout = gather(slots, index, **options)
        assert equal(slots, before)
        for row, slot in enumerate(index.tolist()):
            length, table = int(slots.length[slot]), slots.block_table[slot].tolist()
            room = min(max(limit - 1 - length, 0), k, int(slots.stored[slot])) if length else 0
            positions = [length - 1 + d if length and d <= room else -1 for d in range(k + 1)]
            places = [
                table[p // block_size] * block_size + p % block_size
                if 0 <= p < span and table[p // block_size] > 0
                else -1
                for p in positions
            ]
            assert layout.positions[row].tolist() == positions
            assert layout.slots[row].tolist() == places
            assert layout.num_drafts[row] == room
            assert layout.tokens[row].tolist() == [
                int(slots.newest[slot]),
                *slots.drafts[slot, :k].tolist(),
            ]
            assert max(positions) < limit
        assert torch.equal(layout.length, slots.length[index])
        assert torch.equal(layout.block_table, slots.block_table[index])
        assert_same(layout.keys, slots.keys[index])


@settings(max_examples=40 if INTERPRETED else 150, deadline=None)
@given(steps(), st.integers(0, 99))
def test_commit(case: tuple[SlotBuffers, Tensor, dict], seed: int) -> None:
    slots, index, options = case
    layout = step_layout.gather_batch(slots, index, **options)
    generator = torch.Generator().manual_seed(seed)
    rows, width = layout.tokens.shape
    verdict = VerifyResult(
        (torch.rand(rows, generator=generator) * (layout.num_drafts + 1)).long(),
        torch.randint(100, 2**31 - 1, (rows,), generator=generator),
        torch.rand(rows, width - 1, generator=generator),
    )
    for name in IMPLEMENTATIONS:
        after = deepcopy(slots)
        outcome = getattr(step_layout.commit, name)(after, layout, verdict)
        tokens, counts, num_drafts, values, confidence = step_layout.unpack_results(
            outcome.packed_results, confidence=slots.confidence is not None
        )
        if slots.confidence is not None:
            count = slots.stored[index].where(slots.length[index] > 0, 0)
            stored = torch.arange(width - 1) < count[:, None]
            before = slots.confidence[index, : width - 1]
            assert torch.equal(confidence[stored], before[stored])
            assert confidence[~stored].isnan().all()
        assert not after.stored[index].any()
        for row, slot in enumerate(index.tolist()):
            accepted, token = int(verdict.accepted[row]), int(verdict.emitted[row])
            drafts = layout.tokens[row, 1:].tolist()
            shown = [*drafts[:accepted], token, *drafts[accepted + 1 :]]
            shown += [0] * (width - len(shown))  # behind the last draft there is nothing
            assert outcome.tokens[row].tolist() == tokens[row].tolist() == shown
            live = int(slots.length[slot]) > 0
            num_kept = accepted + 1 if live else 0
            expected = layout.positions[row].tolist()[:num_kept] + [-1] * (width - num_kept)
            assert outcome.positions[row].tolist() == expected
            assert int(outcome.counts[row]) == accepted + 1
            assert int(counts[row]) == accepted
            length = int(slots.length[slot])
            assert int(after.length[slot]) == (length + accepted + 1 if live else 0)
            if slot < len(slots.length) - 1:
                assert int(after.newest[slot]) == token
        assert torch.equal(num_drafts.long(), layout.num_drafts)
        assert torch.equal(values, verdict.probability)  # bit by bit
        others = [s for s in range(len(slots.length)) if s not in index.tolist()]
        assert torch.equal(after.newest[others], slots.newest[others])
        assert torch.equal(after.length[others], slots.length[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("k", "vocab"), [(1, 1), (3, 9), (8, 4), (2, None)])
def test_store_drafts(k: int, vocab: int | None, dtype: torch.dtype) -> None:
    """The slots hold two drafts more than are stored."""
    slots = make_slots([7, 8, 9], k + 2, 2, vocab, 0, dtype)
    index = torch.tensor([2, 0, 3, 3])
    generator = torch.Generator().manual_seed(1)
    drafts = torch.randint(100, 999, (k, 4), generator=generator).T
    distribution: tuple = ()
    if vocab is not None:
        logits = torch.randn(k, 4, vocab + 3, generator=generator).to(dtype)
        floats = (torch.randn(k, 4, generator=generator).T for _ in range(2))
        distribution = logits.transpose(0, 1)[..., :vocab], *floats
    for name in IMPLEMENTATIONS:
        after = deepcopy(slots)
        getattr(step_layout.store_drafts, name)(after, index, drafts, *distribution)
        expected = deepcopy(slots)
        for row, slot in ((0, 2), (1, 0)):
            expected.drafts[slot, :k], expected.stored[slot] = drafts[row], k
            if distribution:
                buffers = expected.draft_logits, expected.draft_log_sum, expected.confidence
                for buffer, values in zip(buffers, distribution, strict=True):
                    buffer[slot, :k] = values[row]
        assert equal(after, expected, slice(3))
        assert not equal(after, slots, slice(3))
        assert after.drafts[3, :k].tolist() in drafts[2:].tolist()


def test_a_result_takes_one_copy() -> None:
    """What a prefill packs has no drafts, and counts below zero keep their sign."""
    tokens, none = torch.tensor([[5], [7]]), torch.zeros(2, dtype=torch.int64)
    packed = step_layout.pack_results(tokens, none, none - 1, torch.zeros(2, 0))
    assert packed.shape == (2, 3)
    results = [values.tolist() for values in step_layout.unpack_results(packed)]
    assert results == [[[5], [7]], [0, 0], [-1, -1], [[], []], [[], []]]


BLOCK, WIDTH = 64, 128
LIMIT = BLOCK * (WIDTH - 1)  # tables are a block longer than the limit
GATHER_OPTIONS = {"max_length": LIMIT, "block_size": BLOCK}


def make_real_slots(entries: int, k: int, dtype: torch.dtype, device: str) -> SlotBuffers:
    """Return buffers of real sizes: some slots empty, some near the limit, the dummy last."""
    generator = torch.Generator().manual_seed(entries)
    lengths = torch.randint(1, LIMIT + 1, (entries - 1,), generator=generator)
    lengths[::3] = LIMIT - torch.arange(len(lengths[::3])) % (k + 2)
    lengths[4::5] = 0
    slots = make_slots(lengths.tolist(), k, WIDTH, 32_000, entries, dtype)
    return to_device(slots, device)


def make_step(
    rows: int, k: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, VerifyResult, tuple[Tensor, Tensor, Tensor]]:
    """Return slots' indices, the dummy's among them, a verification's result, and drafts."""
    generator = torch.Generator().manual_seed(rows)
    index = torch.randperm(2 * rows + 1, generator=generator)[:rows]
    index[rows - rows // 3 :] = 2 * rows + 1
    result = VerifyResult(
        torch.zeros(rows, dtype=torch.int64),
        torch.randint(0, 128_256, (rows,), generator=generator),
        torch.rand(rows, k, generator=generator),
    )
    drafts = (
        torch.randint(0, 128_256, (k, rows), generator=generator).T,
        torch.randn(k, rows, 32_000, generator=generator).to(dtype).transpose(0, 1),
        torch.randn(k, rows, generator=generator).T,
    )
    return to_device((index, result, drafts), device)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (1, 4), (3, 3), (8, 8), (33, 5)])
def test_a_step_at_real_sizes(rows: int, k: int, dtype: torch.dtype, device: str) -> None:
    """The dummy's rows race for one place, so its entry is not compared."""
    slots = make_real_slots(2 * rows + 2, k, dtype, device)
    index, result, drafts = make_step(rows, k, dtype, device)
    layout = step_layout.gather_batch(slots, index, **GATHER_OPTIONS)
    assert_same(layout, step_layout.gather_batch.reference(slots, index, **GATHER_OPTIONS))
    share = torch.rand(rows, generator=torch.Generator().manual_seed(k)).to(device)
    result = replace(result, accepted=(share * (layout.num_drafts + 1)).long())
    changed, eager = deepcopy(slots), deepcopy(slots)
    output = step_layout.commit(changed, layout, result)
    assert_same(output, step_layout.commit.reference(eager, layout, result))
    step_layout.store_drafts(changed, index, *drafts)
    step_layout.store_drafts.reference(eager, index, *drafts)
    assert equal(changed, eager, slice(-1))
    assert not torch.equal(changed.length, slots.length)
    chain = output.positions, output.counts, layout.block_table, BLOCK, k - 1
    assert_same(chain_layout(*chain), chain_layout.reference(*chain))


@on_gpu
def test_replays_of_a_captured_step(device: str) -> None:
    """A CUDA graph of a step reads what its buffers hold at the time of each replay."""
    slots = make_real_slots(18, 4, torch.bfloat16, device)
    index, result, drafts = make_step(8, 4, torch.bfloat16, device)

    def step() -> tuple[StepLayout, object]:
        layout = step_layout.gather_batch(slots, index, **GATHER_OPTIONS)
        output = step_layout.commit(slots, layout, result)
        step_layout.store_drafts(slots, index, *drafts)
        return layout, output

    graph, outputs = capture(step)
    for _ in range(5):
        index[:6] = torch.randperm(17, device=device)[:6]
        eager = deepcopy(slots)
        graph.replay()
        layout = step_layout.gather_batch.reference(eager, index, **GATHER_OPTIONS)
        assert_same(outputs, (layout, step_layout.commit.reference(eager, layout, result)))
        step_layout.store_drafts.reference(eager, index, *drafts)
        assert equal(slots, eager, slice(-1))
