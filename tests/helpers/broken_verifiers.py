"""Verifiers with one of the certificate's known faults, made by replacing a piece of the source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from draftlab.engine import drafter as drafter_module
from draftlab.evaluate.certificate.known_faults import Fault
from draftlab.kernels.sampling_types import VerifyResult
from draftlab.kernels.verify import verify
from tests.helpers.lossless import FAULTS, broken

SOURCES = {
    Fault.OFTEN: FAULTS["accepts 5 % too often"],
    Fault.TARGET: FAULTS["residual is p"],
    Fault.UNCLAMPED: FAULTS["residual is |p − q|"],
    Fault.ONE_U: FAULTS["one u a step"],
    Fault.BONUS: FAULTS["bonus from q"],
}


def faulty_verifier(
    fault: Fault, vocab_size: int, draft_ids: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., VerifyResult]:
    """Return a verifier with the fault; for shared noise the drafter is patched instead.

    Args:
        draft_ids: target ids of the draft vocabulary, so that a token has the same noise in the
            draft and in the residual.
    """
    if fault is not Fault.SHARED:
        return broken(*SOURCES[fault]).verify
    shared = f"Purpose.EMIT, {vocab_size})[..., torch.tensor({list(draft_ids)})]"
    module = broken("Purpose.DRAFT, logits.shape[-1])", shared)
    monkeypatch.setattr(drafter_module, "sample_draft", module.sample_draft)
    return verify
