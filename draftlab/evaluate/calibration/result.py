"""The calibration of a row, as report.json has it (docs/formats.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Source = Literal["confidence head", "draft probability"]
"""Whose logit the raw confidence is: the head's own, or that of its largest draft probability."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class ReliabilityBin(_Part):
    """The blocks of a position whose predictions lie in one of 15 bins of equal width.

    `predicted` is the mean prediction, and `observed` the share of the blocks whose drafts up to
    the position were accepted.
    """

    count: int = Field(ge=1)
    predicted: float
    observed: float


class CalibratedPosition(_Part):
    """Position k of a calibration, on the prompts that no fit has seen.

    The event is "the first k + 1 drafts are accepted". Errors are expected calibration errors of 15
    bins.

    Attributes:
        temperature: of sequential temperature scaling, σ(s / temperature); None: the head has no
            confidence of its own.
        error_before, error_after: of the raw confidence, and of the calibrated survival.
        error_temperature: with the temperatures; error_common_temperature: with the common one.
        error_perfect: the mean error of a perfectly calibrated predictor on as many blocks.
        before, after: the reliability of both.
    """

    temperature: float | None = None
    error_before: float
    error_after: float
    error_temperature: float | None = None
    error_common_temperature: float | None = None
    error_perfect: float
    before: list[ReliabilityBin]
    after: list[ReliabilityBin]


class Saving(_Part):
    """The effect of a threshold: drafts that are not verified, and accepted drafts that are lost.

    Shares are of all drafts and of all accepted drafts.
    """

    threshold: float
    not_verified: float
    lost: float


class Calibration(_Part):
    """The calibrated confidence of one head, temperature, K and drafter setting.

    Attributes:
        engine, head, temperature, k, draft_probs: those of its row.
        head_sha256: of the head's weights; None: they were not in a folder.
        source: what the raw confidence is.
        confidence_temperature: temperature of the draft distribution whose largest probability
            the raw confidence is: 1 of argmax drafts, the draft temperature of sampled ones. None:
            the head's own confidence, which has no temperature.
        suite, suite_sha256: the prompts.
        fitted_blocks: of the half of the prompts that everything is fitted on.
        prompts, blocks: of the other half, on which errors and savings are measured.
        positions: of drafts 0 … k − 1.
        common_temperature: one temperature for all positions; None: see `temperature`.
        survival_saving: drafts are verified while their calibrated survival is at least 0.2.
        cutoff_saving: drafts are verified until the raw confidence of one, as a probability, is
            below the threshold `cutoff`.
        cutoff: the largest such threshold that loses at most 2 % of the accepted drafts of the
            fitted half.
    """

    engine: str
    head: str
    head_sha256: str | None
    temperature: float
    k: int
    draft_probs: bool
    source: Source
    confidence_temperature: float | None = Field(gt=0)
    suite: str
    suite_sha256: str
    fitted_blocks: int
    prompts: int
    blocks: int
    positions: list[CalibratedPosition]
    common_temperature: float | None = None
    survival_saving: Saving
    cutoff_saving: Saving
    cutoff: float = Field(ge=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> Calibration:
        if len(self.positions) != self.k:
            raise ValueError(f"expected {self.k} calibrated positions, found {len(self.positions)}")
        own = self.source == "confidence head"
        temperatures = [*(p.temperature for p in self.positions), self.common_temperature]
        if any((t is not None) != own or (t is not None and t <= 0) for t in temperatures):
            raise ValueError(f"expected temperatures above 0 exactly with a {Source.__args__[0]}")
        if (self.confidence_temperature is None) != own:
            raise ValueError(
                f"expected a confidence_temperature exactly with a {Source.__args__[1]}"
            )
        return self
