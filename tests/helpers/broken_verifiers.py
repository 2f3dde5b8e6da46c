"""Verifiers and a drafter with a fault, made by replacing a piece of the source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from draftlab.engine import draft_sampler
from draftlab.kernels.sampling.types import VerifyResult
from draftlab.kernels.verify import verify
from tests.helpers.lossless import ARGMAX_DRAFT_FAULTS, BLOCK_FAULTS, FAULTS, broken

SHARED = "draft and residual share noise"
TOKEN_SOURCES = FAULTS | {SHARED: None}
ARGMAX_SOURCES = ARGMAX_DRAFT_FAULTS
BLOCK_SOURCES = BLOCK_FAULTS | {
    "the first draft is accepted 5 % too often": (
        "(reach[-1] * p_draft[:, depth] / q_draft[:, depth])",
        "((1.05 if depth == 0 else 1) * reach[-1] * p_draft[:, depth] / q_draft[:, depth])",
    ),
    "residual is p": FAULTS["residual is p"],
    "residual is |p − q|": (
        "(scale * p_next - q_next).clamp(min=0)",
        "(scale * p_next - q_next).abs()",
    ),
    "bonus from q": FAULTS["bonus from q"],
    SHARED: (
        "emission_noise(rows, positions + accepted, vocab)",
        "emission_noise(rows, (positions - 2) * BLOCK_STRIDE + 2 + accepted, vocab)",
    ),
}


def faulty_verifier(
    source: tuple[str, str] | None,
    name: str,
    vocab_size: int,
    draft_ids: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., VerifyResult]:
    """Return a verifier with the fault; for shared noise the drafter is patched too.

    Args:
        draft_ids: target ids of the draft vocabulary, so that a token has the same noise in the
            draft and in the residual.
    """
    verifier = broken(*source).verify if source else verify
    if name == SHARED:
        shared = f"Purpose.EMIT, {vocab_size})[..., torch.tensor({list(draft_ids)})]"
        module = broken("Purpose.DRAFT, logits.shape[-1])", shared)
        monkeypatch.setattr(draft_sampler, "sample_draft", module.sample_draft)
    return verifier
