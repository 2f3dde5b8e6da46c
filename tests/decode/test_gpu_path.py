"""A whole decode step as a GPU runs it, on its Triton kernels, in the interpreter.

Tensors that claim to be on a GPU send every dispatch down the device's path, and the interpreter
carries the kernels out on a CPU, in float32, so that tokens can be compared. What is left to a real
GPU is speed, order and bfloat16 (`eval/gpu/engine.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftlab.decode.drafter import ChainDrafter
from draftlab.decode.fused_head import FusedHead
from draftlab.decode.sampling import Request, Sampling
from draftlab.decode.slots import Slots
from draftlab.decode.step import Step
from draftlab.kernels import linear
from draftlab.target.fused import FusedDecoder
from draftlab.target.model import Target, TargetKnobs, load_target
from tests.decode.conftest import untrained_head
from tests.kernels.hopper import OnGpu, pretend
from tests.toys import toy_target_folder

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
K, BLOCK, STEPS = 3, 4, 4
MAX_LENGTH = 8  # reached on the way, with fewer drafts and then none


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="runs the other")
def test_in_the_interpreter() -> None:
    """Triton reads TRITON_INTERPRET when kernels are defined, so they get their own process."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-x", "-p", "no:cacheprovider"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def steps(
    target: Target, drafts: list[int], *, draft_probs: bool, on_gpu: bool
) -> list[list[list[int]]]:
    """Packed results of the steps of three one-token prompts and the dummy, the first greedy.

    Nothing is cached at first; `drafts` are what the first step verifies.
    """
    head = untrained_head(target, K, 200).eval()
    drafter = ChainDrafter(head, K, draft_probs=draft_probs)
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
    drafter.start(blocks, BLOCK)
    drafter.fused = FusedHead(head)
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
        found.append(packed.as_subclass(torch.Tensor).tolist())
    return found


@pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
@pytest.mark.parametrize("draft_probs", [False, True])
def test_steps_equal_those_of_the_references(
    draft_probs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a GPU the kernel leaves float32 to cuBLAS; here it is to be seen.
    monkeypatch.setattr(linear, "_takes", lambda x, weight: x.is_cuda)
    folder = toy_target_folder(tmp_path, layers=4, hidden=32, max_length=64)
    target = load_target(TargetKnobs(path=str(folder), device="cpu"))
    plain = steps(target, [90, 91, 92], draft_probs=False, on_gpu=False)
    greedy = [row[0][0] for row in plain]  # bad drafts: a token a step
    expected = steps(target, greedy[:K], draft_probs=draft_probs, on_gpu=False)
    found = steps(target, greedy[:K], draft_probs=draft_probs, on_gpu=True)
    assert expected[0][0][:K] == greedy[:K]
    assert expected[0][0][K + 1] == K
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        for row in range(3):
            emitted = one[row][K + 1] + 1
            assert one[row][:emitted] == other[row][:emitted], (number, row)
            assert one[row][K + 1 : K + 3] == other[row][K + 1 : K + 3], (number, row)
    assert {row[K + 2] for one in found for row in one[:3]} >= {K, 0}  # capped near the end
