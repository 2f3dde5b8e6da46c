"""A head is weak if significantly few of its drafts are accepted (docs/guide/doctor.md)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from draftlab.doctor.score import Score
from draftlab.doctor.search import VariantResult
from draftlab.doctor.verdict import weak_finding
from draftlab.engine.counters import Counters
from draftlab.evaluate.statistics import share_interval


def stored_head(accepted: int, drafts: int) -> VariantResult:
    """Return a result with `accepted` first drafts."""
    zeros = np.zeros(1)
    counters = Counters(2, drafts, 2 * drafts, accepted, [accepted, 0])
    return VariantResult(None, (), Score((counters,), zeros, zeros, zeros, 2))  # type: ignore[arg-type]


def provenance(accuracy: float | None) -> dict[str, Any]:
    if accuracy is None:
        return {}
    return {"steps": 40, "tokens_seen": 32097, "validation": {"accuracy": [accuracy, 0.0]}}


@pytest.mark.parametrize(
    ("accepted", "drafts", "accuracy", "message"),
    [
        (700, 1000, 0.72, None),
        (300, 1000, 0.72, "training measured 72% right"),
        (400, 1000, 0.72, None),  # prompts of another kind
        (2, 12, 0.72, None),  # 12 drafts prove little
        (0, 12, 0.95, "training measured 95% right"),
        (100, 1000, 0.12, "40% are expected of a trained head; training measured 12% after 40 st"),
        (2, 12, 0.12, "steps, 32,097 tokens"),  # both measured little
        (450, 1000, 0.15, None),
        (340, 1000, None, "34% of 1,000 first drafts are accepted (AL 1.34), where 40%"),
        (360, 1000, None, None),  # the interval reaches 41 %
        (2, 12, None, None),
        (0, 12, None, None),
        (0, 30, None, "0% of 30 first drafts"),
        (0, 0, None, None),
        (0, 0, 0.7, None),
    ],
)
def test_a_weak_head(
    accepted: int, drafts: int, accuracy: float | None, message: str | None
) -> None:
    finding = weak_finding(stored_head(accepted, drafts), [], provenance(accuracy))
    assert (finding is None) == (message is None)
    if finding is not None:
        assert (finding.kind, finding.severity) == ("weak", "fault")
        assert message in finding.what


def test_share_interval_is_wilsons() -> None:
    # The ends p are where (share - p)² = z² p (1 - p) / count.
    for hits, count, level in ((0, 10, 0.95), (3, 10, 0.95), (999, 1000, 0.999), (7, 7, 0.9)):
        low, high = share_interval(hits, count, level=level)
        assert -1e-12 <= low - 1e-12 <= hits / count <= high + 1e-12 <= 1 + 2e-12
        z = {0.9: 1.6448536, 0.95: 1.9599640, 0.999: 3.2905267}[level]
        far = partial(pytest.approx, abs=1e-9)
        for end in (low, high):
            assert (hits / count - end) ** 2 == far(z * z * end * (1 - end) / count, rel=1e-6)
    assert share_interval(0, 0) == (0.0, 1.0)
