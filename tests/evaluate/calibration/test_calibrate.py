"""Calibrations of simulated steps: errors as small as possible, denominators, and refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy.special import logit

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation
from draftlab.errors import UserError
from draftlab.evaluate.calibration.blocks import MAX_LOGIT, DraftBlocks
from draftlab.evaluate.calibration.calibrate import (
    largest_cutoff,
    threshold_saving,
    verified_by_cutoff,
    verified_by_survival,
)
from draftlab.evaluate.calibration.result import Calibration
from tests.helpers.draft_blocks import calibrated, explained, simulate


def test_a_calibrated_confidence_errs_like_a_perfect_one() -> None:
    one = calibrated(simulate([0.4, 0.6, 0.8, 1.2], [0.6, 0.3, -0.2, -0.5], blocks=80_000))
    assert one.prompts == 100
    assert one.blocks + one.fitted_blocks == 80_000
    for position in one.positions:
        assert position.error_before > 3.2 * position.error_perfect
        assert position.error_after < 1.8 * position.error_perfect
        assert position.temperature is position.error_temperature is None
    assert one.common_temperature is None


def test_a_heads_own_confidence_also_gets_temperatures() -> None:
    one = calibrated(simulate([0.5] * 3, [0.0] * 3, blocks=80_000), "confidence head")
    assert one.common_temperature == pytest.approx(2.0, rel=0.07)
    for position in one.positions:
        assert position.temperature == pytest.approx(2.0, rel=0.13)
        assert position.error_temperature < 0.5 * position.error_before
        assert position.error_common_temperature < 0.5 * position.error_before


def test_positions_that_are_shifted_by_one_are_noticed() -> None:
    """A true confidence needs no fit; at the wrong position it errs, and it tells nothing."""
    blocks = simulate([1.0] * 4, [0.0] * 4, blocks=40_000)
    shifted = DraftBlocks(
        np.roll(blocks.confidence, 1, axis=1), blocks.num_drafts, blocks.accepted, blocks.prompt
    )
    right, wrong = calibrated(blocks), calibrated(shifted)
    for position in right.positions:
        assert position.error_before < 2.1 * position.error_perfect
    assert wrong.positions[0].error_before > 13 * wrong.positions[0].error_perfect
    assert explained(wrong.positions[0]) < 0.02
    assert explained(right.positions[0]) > 0.2
    late = DraftBlocks(
        blocks.confidence, blocks.num_drafts, (blocks.accepted - 1).clip(0), blocks.prompt
    )
    assert min(p.error_before for p in calibrated(late).positions) > 0.05


def test_denominators_are_the_steps_that_had_the_draft() -> None:
    blocks = simulate([1.0] * 3, [0.0] * 3, blocks=6000, short=0.5)
    one = calibrated(blocks)
    _, held_out = blocks.split()
    for k, position in enumerate(one.positions):
        steps = list(zip(held_out.num_drafts.tolist(), held_out.accepted.tolist(), strict=True))
        survived = sum(n > k and a > k for n, a in steps)
        for bins in (position.before, position.after):
            assert sum(b.count for b in bins) == sum(n > k for n, _ in steps)
            total = sum(b.count * b.observed for b in bins)
            assert total == pytest.approx(survived)
    first, last = (sum(n > k for n in held_out.num_drafts) for k in (0, 2))
    assert first > last


def test_the_halves_are_of_prompts() -> None:
    blocks = simulate([1.0], [0.0], blocks=1000, prompts=21)
    first, second = blocks.split()
    assert not set(first.prompt) & set(second.prompt)
    assert (first.num_prompts, second.num_prompts) == (11, 10)
    order = np.random.default_rng(3).permutation(1000)
    again, _ = blocks.select(order).split()
    assert set(again.prompt) == set(first.prompt)
    assert set(blocks.split(seed=1)[0].prompt) != set(first.prompt)


def generation(steps: list[tuple[int, int]], confidence: list[tuple[float, ...]]) -> Generation:
    k = 2
    return Generation(
        "x", (), "length", Counters(k), (0.0,) * k, tuple(steps), 0.0, 0.0,
        confidence=tuple(confidence),
    )  # fmt: skip


def test_blocks_of_generations() -> None:
    inf = float("inf")
    blocks = DraftBlocks.from_generations(
        [
            generation([(2, 1), (0, 0), (1, 1)], [(0.5, -1.0), (), (inf,)]),
            generation([(2, 2)], [(-inf, 3.0)]),
        ]
    )
    assert blocks.prompt.tolist() == [0, 0, 1]
    assert blocks.num_drafts.tolist() == [2, 1, 2]
    assert blocks.accepted.tolist() == [1, 1, 2]
    expected = [[0.5, -1.0], [MAX_LOGIT, math.nan], [-MAX_LOGIT, 3.0]]
    np.testing.assert_array_equal(blocks.confidence, expected)
    rows, survived = blocks.survivors(1)
    assert (rows.tolist(), survived.tolist()) == ([0, 2], [False, True])
    none = DraftBlocks.from_generations([generation([], [])])
    assert (len(none), none.k) == (0, 2)


def test_savings_by_hand() -> None:
    """Three blocks of three drafts: the first accepts all, the second one, the third none."""
    confidence = np.array([[2.0, 2.0, 2.0], [2.0, -2.0, 2.0], [-2.0, 2.0, 2.0]])
    blocks = DraftBlocks(confidence, np.array([3, 3, 2]), np.array([3, 1, 0]), np.array([0, 1, 2]))
    verified = verified_by_cutoff(blocks, 0.5)
    assert verified.tolist() == [3, 1, 0]
    saving = threshold_saving(blocks, verified, 0.5)
    assert (saving.not_verified, saving.lost) == (4 / 8, 0.0)
    survival = np.array([[0.9, 0.6, 0.3], [0.9, 0.2, 0.1], [0.1, 0.1, 0.1]])
    verified = verified_by_survival(blocks, survival, 0.5)
    assert verified.tolist() == [2, 1, 0]
    saving = threshold_saving(blocks, verified, 0.5)
    assert (saving.not_verified, saving.lost) == (5 / 8, 1 / 4)
    assert largest_cutoff(blocks) == 0.88  # σ(2) = 0.8808
    assert verified_by_cutoff(blocks, 0.0).tolist() == [3, 3, 2]


def test_the_cutoff_loses_at_most_two_percent() -> None:
    """A hundred accepted drafts whose confidence is 0.5 %, 1.5 %, …, 99.5 %."""
    confidence = logit((np.arange(100) + 0.5) / 100)[:, None]
    ones = np.ones(100, dtype=np.int64)
    assert largest_cutoff(DraftBlocks(confidence, ones, ones, np.arange(100))) == 0.02


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(UserError, match=r"100 steps .* found 5 and \d+ \(\d+ with all 2"):
        calibrated(simulate([1.0] * 2, [0.0] * 2, blocks=150, prompts=10))
    with pytest.raises(UserError, match=r"6 prompts and 100 steps .* found 5 and "):
        calibrated(simulate([1.0] * 2, [0.0] * 2, blocks=4000, prompts=10))
    with pytest.raises(UserError, match="found 0 and 0"):
        calibrated(DraftBlocks(np.zeros((0, 2)), *[np.zeros(0, dtype=np.int64)] * 3))


def test_a_calibration_is_read_back_and_checked() -> None:
    one = calibrated(simulate([1.0] * 2, [0.0] * 2, blocks=2000), "confidence head")
    fields = one.model_dump(mode="json")
    assert Calibration.model_validate(fields) == one
    assert len(one.positions) == 2
    changes: list[tuple[dict[str, Any], str]] = [
        ({"k": 3}, "expected 3 calibrated positions, found 2"),
        ({"source": "draft probability"}, "temperatures above 0"),
        ({"confidence_temperature": 1.0}, "confidence_temperature exactly with a draft prob"),
    ]
    for change, message in changes:
        with pytest.raises(ValidationError, match=message):
            Calibration.model_validate(fields | change)
