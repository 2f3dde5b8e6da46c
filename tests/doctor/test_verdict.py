"""A poor head is a fault only if it is significantly worse than training measured."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from draftlab.doctor.score import Score
from draftlab.doctor.search import VariantResult
from draftlab.doctor.verdict import poor_finding
from draftlab.engine.counters import Counters
from draftlab.evaluate.statistics import share_interval


def stored_head(accepted: int, drafts: int) -> VariantResult:
    """Return a result with `accepted` first drafts."""
    zeros = np.zeros(1)
    counters = Counters(2, drafts, 2 * drafts, accepted, [accepted, 0])
    return VariantResult(None, (), Score((counters,), zeros, zeros, zeros, 2))  # type: ignore[arg-type]


def provenance(accuracy: float | None) -> dict[str, Any]:
    return {"validation": {"accuracy": [accuracy, 0.0]}} if accuracy is not None else {}


@pytest.mark.parametrize(
    ("accepted", "drafts", "accuracy", "kind"),
    [
        (700, 1000, 0.72, None),
        (100, 1000, 0.72, "nothing fits"),  # training measured far more
        (2, 12, 0.72, None),  # 12 drafts prove little
        (0, 12, 0.95, "nothing fits"),
        (100, 1000, 0.12, "hardly trained"),  # training measured no more
        (2, 12, 0.12, "hardly trained"),
        (1, 1000, 0.12, "nothing fits"),
        (250, 1000, 0.15, None),
        (100, 1000, None, "nothing fits"),  # another program's head has no training metrics
        (2, 12, None, None),
        (0, 0, None, None),
        (0, 0, 0.7, None),
    ],
)
def test_a_poor_head(accepted: int, drafts: int, accuracy: float | None, kind: str | None) -> None:
    finding = poor_finding(stored_head(accepted, drafts), [], provenance(accuracy), sound=True)
    assert (finding and finding.kind) == kind
    if finding is not None:
        assert finding.severity == ("note" if kind == "hardly trained" else "fault")


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
