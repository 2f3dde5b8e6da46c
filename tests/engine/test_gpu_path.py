"""A whole decode step as a GPU runs it, on its Triton kernels, in the interpreter.

Tensors that claim to be on a GPU send every dispatch down the device's path, and the interpreter
carries the kernels out on a CPU, in float32, so that tokens can be compared. What is left to a real
GPU is speed, order and bfloat16 (`tests/engine/test_on_gpu.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftlab.engine.drafter import new_drafter
from draftlab.engine.fused_head import FusedHead
from draftlab.engine.sampling import Request, Sampling
from draftlab.engine.slots import Slots
from draftlab.engine.step import Step
from draftlab.kernels import linear
from draftlab.target_model.fused_decoder import FusedDecoder
from draftlab.target_model.model import Target, TargetSettings, load_target
from tests.helpers.decoding import PARALLEL, untrained_head
from tests.helpers.hopper import OnGpu, pretend
from tests.helpers.interpreter import inside, run_in_the_interpreter, runs_the_others
from tests.helpers.toys import toy_target_folder

K, BLOCK, STEPS = 3, 4, 4
MAX_LENGTH = 8  # reached on the way, with fewer drafts and then none


@runs_the_others
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


HEADS: dict[str, dict[str, Any]] = {
    "chain": {},
    "parallel": PARALLEL | {"num_layers": 1, "norm_before_residual": True},
    "parallel of two layers": PARALLEL | {"qk_norm": True},
}


def steps(
    target: Target, drafts: list[int], kind: str, *, draft_probs: bool, on_gpu: bool
) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Packed results of the steps of three one-token prompts and the dummy, the first greedy; with
    each, the drafts of all slots for the next step.

    Nothing is cached at first; `drafts` are what the first step verifies.
    """
    head = untrained_head(target, K, 200, **HEADS[kind]).eval()
    drafter = new_drafter(head, K, draft_probs=draft_probs)
    assert drafter.kind == kind.partition(" ")[0]
    width = -(-MAX_LENGTH // BLOCK)
    slots = Slots(
        3,
        K,
        width,
        target.device,
        draft_vocab=drafter.draft_vocab,
        sampling=drafter.sampling,
    )
    blocks = 1 + 3 * width
    cache = target.new_paged_cache(blocks, BLOCK)
    step = Step(target, cache, slots, drafter, max_length=MAX_LENGTH)
    step.decoder = FusedDecoder(target)
    drafter.start(blocks, BLOCK, max_length=MAX_LENGTH)
    drafter.passes = FusedHead(head)
    requests = [
        Request(str(i), (40 + i,), 8, Sampling(temperature))
        for i, temperature in enumerate((0.0, 0.8, 1.5))
    ]
    index = slots.index([0, 2, 1], 4)
    slots.admit(index[:3], [requests[i] for i in (0, 2, 1)])
    for slot, request in enumerate(requests):
        slots.length[slot], slots.newest[slot] = 1, request.prompt_ids[0]
        slots.drafts[slot] = torch.tensor(drafts)
        slots.own(slot, [1 + slot * width + i for i in range(width)])
    if slots.draft_logits is not None:
        slots.draft_log_sum.fill_(float(torch.tensor(200.0).log()))  # of logits of 0
    if on_gpu:
        for owner in (slots, slots.keys, drafter):
            pretend(owner)
        index = index.as_subclass(OnGpu)
    found = []
    for _ in range(STEPS):
        packed = step(index, limited=False).packed
        drafted = slots.drafts[:3]
        found.append(tuple(t.as_subclass(torch.Tensor).tolist() for t in (packed, drafted)))
    return found


@inside
@pytest.mark.parametrize("draft_probs", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_steps_equal_those_of_the_references(
    kind: str, draft_probs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a GPU the kernel leaves float32 to cuBLAS; here it is to be seen.
    monkeypatch.setattr(linear, "_takes", lambda x, weight: x.is_cuda)
    folder = toy_target_folder(tmp_path, layers=4, hidden=32, max_length=64)
    target = load_target(TargetSettings(path=str(folder), device="cpu"))
    plain = steps(target, [90, 91, 92], kind, draft_probs=False, on_gpu=False)
    greedy = [packed[0][0] for packed, _ in plain]  # bad drafts: a token a step
    expected = steps(target, greedy[:K], kind, draft_probs=draft_probs, on_gpu=False)
    found = steps(target, greedy[:K], kind, draft_probs=draft_probs, on_gpu=True)
    first = expected[0][0][0]
    assert first[:K] == greedy[:K]
    assert first[K + 1] == K
    verified = 0
    for number, ((one, drafts), (other, expected_drafts)) in enumerate(
        zip(found, expected, strict=True)
    ):
        following = expected[number + 1][0] if number + 1 < STEPS else None
        for row, slot in enumerate((0, 2, 1)):
            if following is not None:
                real = following[row][K + 2]  # those that the next step verifies
                assert drafts[slot][:real] == expected_drafts[slot][:real], (number, row)
                verified += real
            emitted = one[row][K + 1] + 1
            assert one[row][:emitted] == other[row][:emitted], (number, row)
            assert one[row][K + 1 : K + 3] == other[row][K + 1 : K + 3], (number, row)
    assert {row[K + 2] for one, _ in found for row in one[:3]} >= {K, 0}  # capped near the end
    assert verified > K
