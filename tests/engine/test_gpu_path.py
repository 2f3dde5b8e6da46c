"""Decode steps on a GPU's Triton kernels, run by the interpreter.

Tensors that claim to be on a GPU select its dispatch, and the interpreter runs the kernels on a CPU
in float32, so that tokens can be compared. tests/engine/test_on_gpu.py covers speed, order and
bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftlab.engine.drafter import new_drafter
from draftlab.engine.sampling import Request, Sampling
from draftlab.engine.step import InputBatch, Step
from draftlab.kernels import linear
from draftlab.target_model.fused_decoder import FusedDecoder
from draftlab.target_model.model import Target
from tests.helpers.decoding import DSPARK, PARALLEL, untrained_head
from tests.helpers.hopper import OnGpu, pretend
from tests.helpers.interpreter import inside, interpreter_test
from tests.helpers.toys import toy_target_folder
from tests.helpers.zoo import load_on_cpu

K, BLOCK, STEPS = 3, 4, 3
ROWS = 1, 0  # the slot of each row, beside the dummy
MAX_LENGTH = 7  # steps near it have fewer drafts, then none


test_in_the_interpreter = interpreter_test(__file__)


HEADS: dict[str, dict[str, Any]] = {
    "chain": {},
    "parallel": PARALLEL | {"num_layers": 1, "norm_before_residual": True},
    "parallel of two layers": PARALLEL | {"qk_norm": True},
    "parallel block": DSPARK | {"embeddings": "target"},
}
# Both ways to draft, of both drafters: the number of a head's layers makes no difference to them.
CASES = [
    ("chain", False),
    ("chain", True),
    ("parallel", True),
    ("parallel of two layers", False),
    ("parallel block", True),
    ("parallel block", False),
]


def steps(
    target: Target, drafts: list[int], kind: str, *, draft_probs: bool, on_gpu: bool
) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Return each step's packed results and next drafts, for two prompts and the dummy.

    The prompts have one token and the first is greedy. The first step verifies `drafts`.
    """
    head = untrained_head(target, K, 200, boundaries=(0, 1, 2), **HEADS[kind]).eval()
    drafter = new_drafter(head, K, draft_probs=draft_probs)
    assert drafter.drafting == kind.partition(" ")[0]
    width = -(-MAX_LENGTH // BLOCK)
    batch = InputBatch(2, K, width, target.device, draft_vocab=drafter.draft_vocab)
    blocks = 1 + 2 * width
    cache = target.new_paged_cache(blocks, BLOCK)
    step = Step(target, cache, batch, drafter, max_length=MAX_LENGTH)
    step.decoder = FusedDecoder(target)
    drafter.start(blocks, BLOCK, max_length=MAX_LENGTH)
    drafter.runner = drafter.fused_pass(head)
    requests = [
        Request(str(i), (40 + i,), 8, Sampling(temperature))
        for i, temperature in enumerate((0.0, 0.8))
    ]
    index = batch.index(ROWS, 3)
    batch.set_requests(index[:2], [requests[i] for i in ROWS])
    for slot, request in enumerate(requests):
        batch.length[slot], batch.newest[slot] = 1, request.prompt_ids[0]
        batch.drafts[slot], batch.stored[slot] = torch.tensor(drafts), K
        blocks = [1 + slot * width + i for i in range(width)]
        batch.set_blocks(batch.index([slot]), [blocks])
    if batch.draft_logits is not None:
        batch.draft_log_sum.fill_(float(torch.tensor(200.0).log()))  # logits are 0
    if on_gpu:
        for owner in (batch, batch.keys, drafter):
            pretend(owner)
        index = index.as_subclass(OnGpu)
    results = []
    for _ in range(STEPS):
        packed = step(index, limited=False)
        drafted = batch.drafts[:2]
        results.append(tuple(t.as_subclass(torch.Tensor).tolist() for t in (packed, drafted)))
    return results


@inside
@pytest.mark.parametrize(("kind", "draft_probs"), CASES)
def test_steps_equal_the_references(
    kind: str, draft_probs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a GPU the kernel leaves float32 to cuBLAS; here it must run.
    monkeypatch.setattr(linear, "_takes", lambda x, weight: x.is_cuda)
    folder = toy_target_folder(tmp_path, layers=2, hidden=32, max_length=64)
    target = load_on_cpu(folder)
    plain = steps(target, [90, 91, 92], kind, draft_probs=False, on_gpu=False)
    rows = [packed[ROWS.index(0)] for packed, _ in plain]
    greedy = [token for row in rows for token in row[: row[K + 1] + 1]]
    expected = steps(target, greedy[:K], kind, draft_probs=draft_probs, on_gpu=False)
    actual = steps(target, greedy[:K], kind, draft_probs=draft_probs, on_gpu=True)
    first = expected[0][0][ROWS.index(0)]
    assert first[:K] == greedy[:K]
    assert first[K + 1] == K
    verified = 0
    for number, ((one, drafts), (other, expected_drafts)) in enumerate(
        zip(actual, expected, strict=True)
    ):
        following = expected[number + 1][0] if number + 1 < STEPS else None
        for row, slot in enumerate(ROWS):
            if following is not None:
                real = following[row][K + 2]  # those that the next step verifies
                assert drafts[slot][:real] == expected_drafts[slot][:real], (number, row)
                verified += real
            emitted = one[row][K + 1] + 1
            assert one[row][:emitted] == other[row][:emitted], (number, row)
            assert one[row][K + 1 : K + 3] == other[row][K + 1 : K + 3], (number, row)
            bits = [packed[row][K + 3 :][: packed[row][K + 2]] for packed in (one, other)]
            chances = [torch.tensor(each, dtype=torch.int32).view(torch.float32) for each in bits]
            torch.testing.assert_close(*chances, rtol=1e-4, atol=1e-5)  # of each draft verified
    assert {row[K + 2] for one, _ in actual for row in one[:2]} >= {K, 0}  # capped near the end
    assert verified > K
