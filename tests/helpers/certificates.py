"""Settings, rows and prompts of small certificates, on a target of five tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from draftlab.engine.engine import Engine
from draftlab.evaluate.certificate.certify import (
    Certificate,
    Certification,
    CertifySettings,
    EngineFactory,
    Sampled,
)
from draftlab.heads.head import DraftHead
from draftlab.progress import Monitor
from draftlab.target_model.model import Target

VOCAB = 5
SETTINGS = CertifySettings(samples=4000, context=3, contexts=12, prompts=6, tokens=16, batch=1024)
# Every cell occurs at this temperature.
ON = Sampled(temperature=1.0, k=2, draft_probs=True, top_k=4)
OFF = Sampled(temperature=1.0, k=2, draft_probs=False, top_k=4)
BLOCK = ON.model_copy(update={"verification": "block"})
PROMPTS = [
    (f"p{i}", tuple(torch.randint(0, VOCAB, (5,), generator=torch.Generator().manual_seed(i))
                    .tolist()))
    for i in range(6)
]  # fmt: skip
MARKOV_ROWS = [
    Sampled(temperature=0.8, k=2, draft_probs=True),
    Sampled(temperature=1.5, k=2, draft_probs=False, top_k=4),
    Sampled(temperature=0.8, k=1, draft_probs=True),  # a block of one slot
]
ROWS = [
    Sampled(temperature=0.7, k=4, draft_probs=True),  # the whole vocabulary
    Sampled(temperature=1.3, k=3, draft_probs=False, top_p=0.8),
    Sampled(temperature=1.0, k=1, draft_probs=True, top_k=3, top_p=0.95),
]
RunCertify = Callable[..., Certificate]


def certify(
    target: Target,
    head: DraftHead,
    rows: Sequence[Sampled],
    *,
    engine: EngineFactory = Engine,
    **changes: Any,
) -> Certificate:
    """Certify an engine with a head at K = 2, with changed settings."""
    settings = replace(SETTINGS, **{"num_rows": len(rows)} | changes)
    certification = Certification(target, head, frozenset(), settings, Monitor(), engine)
    return certification.run(PROMPTS, 2, rows)
