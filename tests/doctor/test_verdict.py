"""A head is weak if significantly few of its drafts are accepted (docs/guide/doctor.md)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftlab.doctor.score import Score
from draftlab.doctor.verdict import VariantResult, VariantSearch, score_finding
from draftlab.engine.counters import Counters


def searched(shares: list[float], drafts: int) -> VariantSearch:
    """Return a search without variants of a head that accepts these shares of first drafts."""
    counters = tuple(
        Counters(2, drafts, 2 * drafts, round(share * drafts), [round(share * drafts), 0])
        for share in shares
    )
    zeros = np.zeros(len(shares))
    return VariantSearch(VariantResult(None, Score(counters, zeros, zeros, 2)), [])


def provenance(accuracy: float | None) -> dict[str, Any]:
    if accuracy is None:
        return {}
    return {"steps": 40, "tokens_seen": 32097, "validation": {"accuracy": [accuracy, 0.0]}}


ALIKE, MIXED = [0.0] * 16, [-0.1, 0.1] * 8
"""Deviations of sixteen prompts' shares from their mean."""


@pytest.mark.parametrize(
    ("share", "deviations", "drafts", "kind", "words"),
    [
        (0.7, MIXED, 60, None, ""),
        (0.5, MIXED, 60, None, ""),  # the lower end is 0.42
        (0.45, MIXED, 60, "not enough prompts", "45% [37%, 53%] of 960 first drafts"),
        (0.45, ALIKE, 60, None, ""),
        (0.45, ALIKE, 20, "not enough prompts", "[38%, 52%]"),  # Wilson's, over 320 drafts
        (0.35, MIXED, 60, "not enough prompts", "some 22 more prompts would tell"),
        (0.4, MIXED, 60, "not enough prompts", "too near to that for any number of prompts"),
        (0.3, MIXED, 60, "weak", "30% [22%, 38%] of 960 first drafts are accepted (AL 1.30)"),
        (0.0, ALIKE, 2, "weak", "0% [0%, 17%] of 32 first drafts"),
        (0.0, ALIKE, 0, "not enough prompts", "0% [0%, 100%] of 0"),
    ],
)
def test_a_head_is_weak_or_healthy_only_if_the_interval_says_so(
    share: float, deviations: list[float], drafts: int, kind: str | None, words: str
) -> None:
    search = searched([share + d for d in deviations], drafts)
    finding = score_finding(search, {})
    assert (finding and finding.kind) == kind
    assert words in (finding.what if finding else "")
    # Training's figure explains a verdict and changes none, so that an export has the head's.
    for accuracy in (0.1, 0.72):
        other = score_finding(search, provenance(accuracy))
        assert (other and other.kind) == kind


@pytest.mark.parametrize(
    ("accuracy", "words", "do"),
    [
        (0.12, "training measured 12% after 40 steps, 32,097 tokens", "train it longer"),
        (0.72, "training measured 72%", "prompts of another kind"),
        (None, "0 other variants reach", "it is another target's head"),
    ],
)
def test_training_explains_a_weak_head(accuracy: float | None, words: str, do: str) -> None:
    finding = score_finding(searched([0.2] * 16, 60), provenance(accuracy))
    assert finding is not None
    assert words in finding.what
    assert do in finding.do
