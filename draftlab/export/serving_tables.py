"""What servers read of a report: the calibrated confidence of a head (servers §13)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.evaluate.calibration.result import Calibration
from draftlab.evaluate.results import Report
from draftlab.files import known_sha256
from draftlab.heads.folder import WEIGHTS

REPORT = "report.json"
CALIBRATION = "calibration.json"
"""File of an export with the calibration that its launch command and other files are made of."""
STS = "sts.json"
"""SGLang's file with the temperatures of the confidence (servers §13)."""
SCHEMA = 2


@dataclass(frozen=True)
class ServingTables:
    """What an export gives servers of a report.

    Attributes:
        report_sha256: of report.json.
        calibration: of the exported head, at the exported K.
        baked_temperature: the common temperature that the export's confidence head is divided by.
    """

    report_sha256: str
    calibration: Calibration
    baked_temperature: float | None = None

    @property
    def temperatures(self) -> list[float] | None:
        """The temperatures of a server that divides the logits of the export's own confidence."""
        values = [p.temperature for p in self.calibration.positions]
        known = [t for t in values if t is not None]
        return [t / (self.baked_temperature or 1.0) for t in known] or None

    @property
    def cutoff(self) -> float:
        """The smallest raw confidence, as a server computes it, of a draft that is verified."""
        value, temperature = self.calibration.cutoff, self.baked_temperature
        if not temperature or not value:
            return value
        return 1 / (1 + math.exp(-math.log(value / (1 - value)) / temperature))

    def sts_json(self) -> dict[str, Any]:
        """Return SGLang's calibration file: a temperature for each slot of a block."""
        one = self.calibration
        return {
            "temperatures": self.temperatures,
            "dataset": f"{one.suite}, T = {one.temperature:g}",
            "num_samples": one.fitted_blocks,
            "ece_before": [p.error_before for p in one.positions],
            "ece_after": [p.error_temperature for p in one.positions],
        }

    def as_json(self) -> dict[str, Any]:
        """Return calibration.json, which says what the export's other files were made of."""
        one = self.calibration
        fields = one.model_dump(
            mode="json", exclude={"positions", "survival_saving", "cutoff_saving"}
        )
        positions = [p.model_dump(mode="json") for p in one.positions]
        names = {f"{name}s": name for name in ("slope", "intercept", "beta", "temperature")}
        errors = ("before", "after", "temperature", "common_temperature")
        names |= {f"error_{name}": f"error_{name}" for name in errors}
        return {
            "schema": SCHEMA,
            "report_sha256": self.report_sha256,
            **fields,
            **{key: [p[name] for p in positions] for key, name in names.items()},
            "baked_temperature": self.baked_temperature,
        }


def calibrated_k(path: Path, head_folder: Path) -> int:
    """Return the largest K of a report's calibrations of a head.

    Raises:
        UserError: the report has none.
    """
    report = report_path(path)
    calibrations = Report.read(report).calibrations
    return max(one.k for one in _of_head(calibrations, report, head_folder))


def report_path(path: Path) -> Path:
    """Return the report.json that a user named by its own path or by its folder's."""
    return path / REPORT if path.is_dir() else path


def _of_head(
    calibrations: Sequence[Calibration], path: Path, head_folder: Path
) -> list[Calibration]:
    sha256 = known_sha256(head_folder / WEIGHTS)
    found = [one for one in calibrations if one.head_sha256 == sha256]
    if not found:
        others = ", ".join(dict.fromkeys(one.head for one in calibrations))
        raise UserError(
            "expected a calibration of this head's weights, found "
            + (f"those of other weights ({others})" if others else "none"),
            where=path,
            do="`draftlab eval --calibrate` makes one",
        )
    return found


def read_serving_tables(
    path: Path,
    head_folder: Path,
    k: int,
    *,
    temperature: float | None = None,
    bake: bool = False,
) -> ServingTables:
    """Read what servers need from a report.

    Args:
        path: report.json, or its folder.
        head_folder: the exported head; the calibration must be of its very weights.
        k: drafts a step.
        temperature: whose calibration; None: the first of the report. Argmax drafts, which servers
            draft by default, come before sampled ones.
        bake: whether the confidence head will be divided by the common temperature.

    Raises:
        UserError: the report has no calibration of this head, K and temperature; or `bake` and the
            head has no confidence of its own.
    """
    path = report_path(path)
    report = Report.read(path)
    calibration = _find_calibration(report, path, head_folder, k, temperature)
    if bake and calibration.common_temperature is None:
        raise UserError(
            "expected a head with a confidence of its own, into whose weights a temperature can be "
            "baked; this one's is fitted from draft probabilities",
            where="export.bake_temperature",
            do="leave it out",
        )
    return ServingTables(
        known_sha256(path),
        calibration,
        calibration.common_temperature if bake else None,
    )


def _find_calibration(
    report: Report, path: Path, head_folder: Path, k: int, temperature: float | None
) -> Calibration:
    candidates = _of_head(report.calibrations, path, head_folder)
    conditions: list[tuple[str, str, float | None]] = [
        ("k", "--k", k),
        ("temperature", "--temps", temperature),
    ]
    for field, option, wanted in conditions:
        found = dict.fromkeys(getattr(one, field) for one in candidates)
        if wanted is not None:
            candidates = [one for one in candidates if getattr(one, field) == wanted]
        if not candidates:
            raise UserError(
                f"expected a calibration of this head with {field} {wanted:g}, found "
                + ", ".join(f"{value:g}" for value in found),
                where=path,
                do=f"`draftlab eval --calibrate {option} {wanted:g}` makes one",
            )
    first = candidates[0].temperature
    return min(
        (one for one in candidates if one.temperature == first), key=lambda one: one.draft_probs
    )
