"""Verifiers with one of the certificate's known faults, made by replacing a piece of the source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from draftlab.engine import draft_sampler
from draftlab.evaluate.certificate.known_faults import Fault
from draftlab.kernels.sampling.types import VerifyResult
from draftlab.kernels.verify import verify
from tests.helpers.lossless import BLOCK_FAULTS, FAULTS, broken

SOURCES = {
    Fault.OFTEN: FAULTS["accepts 5 % too often"],
    Fault.TARGET: FAULTS["residual is p"],
    Fault.UNCLAMPED: FAULTS["residual is |p − q|"],
    Fault.ONE_U: FAULTS["one u a step"],
    Fault.BONUS: FAULTS["bonus from q"],
}
BLOCK_SOURCES = SOURCES | {
    Fault.OFTEN: (
        "(reach[-1] * p_draft[:, depth] / q_draft[:, depth])",
        "((1.05 if depth == 0 else 1) * reach[-1] * p_draft[:, depth] / q_draft[:, depth])",
    ),
    Fault.UNCLAMPED: (
        "(scale * p_next - q_next).clamp(min=0)",
        "(scale * p_next - q_next).abs()",
    ),
    Fault.SHARED: (
        "emission_noise(rows, positions + accepted, vocab)",
        "emission_noise(rows, (positions - 2) * BLOCK_STRIDE + 2 + accepted, vocab)",
    ),
    Fault.PREFIX: BLOCK_FAULTS["the residual of token verification"],
}


def faulty_verifier(
    fault: Fault,
    vocab_size: int,
    draft_ids: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
    *,
    block: bool = False,
) -> Callable[..., VerifyResult]:
    """Return a verifier with the fault; for shared noise the drafter is patched too.

    Args:
        block: of block verification, whose drafts are keyed by the step.
        draft_ids: target ids of the draft vocabulary, so that a token has the same noise in the
            draft and in the residual.
    """
    sources = BLOCK_SOURCES if block else SOURCES
    verifier = broken(*sources[fault]).verify if fault in sources else verify
    if fault is not Fault.SHARED:
        return verifier
    shared = f"Purpose.EMIT, {vocab_size})[..., torch.tensor({list(draft_ids)})]"
    module = broken("Purpose.DRAFT, logits.shape[-1])", shared)
    monkeypatch.setattr(draft_sampler, "sample_draft", module.sample_draft)
    return verifier
