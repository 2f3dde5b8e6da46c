"""What servers read of a report: the calibrated confidence of a head (servers §13)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.evaluate.calibration.result import Calibration
from draftlab.evaluate.results import Report
from draftlab.export.settings import ExportSettings
from draftlab.files import known_sha256
from draftlab.heads.folder import WEIGHTS

REPORT = "report.json"
CALIBRATION = "calibration.json"
"""File of an export with the calibration that its launch command and other files are made of."""
STS = "sts.json"
"""SGLang's file with the temperatures of the confidence (servers §13)."""
SCHEMA = 3


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
        measured = {"positions", "survival_saving", "cutoff_saving"}
        return {
            "schema": SCHEMA,
            "report_sha256": self.report_sha256,
            **self.calibration.model_dump(mode="json", exclude=measured),
            "baked_temperature": self.baked_temperature,
        }


def report_path(path: Path) -> Path:
    """Return the report.json that a user named by its own path or by its folder's."""
    return path / REPORT if path.is_dir() else path


def read_serving_tables(settings: ExportSettings, head_folder: Path) -> ServingTables | None:
    """Read what servers need from the report that settings name; None: they name none.

    Without a K in the settings it is the most of the head's calibrations. Argmax drafts, which
    servers draft by default, come before sampled ones.

    Args:
        head_folder: the exported head; the calibration must be of its very weights.

    Raises:
        UserError: the report has no calibration of this head, K and temperature; or a temperature
            is to be baked and the head has no confidence of its own.
    """
    if settings.calibration is None:
        return None
    path = report_path(Path(settings.calibration).expanduser())
    calibrations, sha256 = Report.read(path).calibrations, known_sha256(head_folder / WEIGHTS)
    found = [one for one in calibrations if one.head_sha256 == sha256]
    if not found:
        others = ", ".join(dict.fromkeys(one.head for one in calibrations))
        raise UserError(
            "expected a calibration of this head's weights, found "
            + (f"those of other weights ({others})" if others else "none"),
            where=path,
            do="`draftlab eval --calibrate` makes one",
        )
    wanted = {"k": ("--k", settings.k or max(one.k for one in found))}
    if settings.calibration_temperature is not None:
        wanted["temperature"] = "--temps", settings.calibration_temperature
    for field, (option, value) in wanted.items():
        there = dict.fromkeys(getattr(one, field) for one in found)
        found = [one for one in found if getattr(one, field) == value]
        if not found:
            raise UserError(
                f"expected a calibration of this head with {field} {value:g}, found "
                + ", ".join(f"{other:g}" for other in there),
                where=path,
                do=f"`draftlab eval --calibrate {option} {value:g}` makes one",
            )
    first = [one for one in found if one.temperature == found[0].temperature]
    calibration = min(first, key=lambda one: one.draft_probs)
    if settings.bake_temperature and calibration.common_temperature is None:
        raise UserError(
            "expected a head with a confidence of its own, into whose weights a temperature can be "
            "baked; this one's is fitted from draft probabilities",
            where="export.bake_temperature",
            do="leave it out",
        )
    baked = calibration.common_temperature if settings.bake_temperature else None
    return ServingTables(known_sha256(path), calibration, baked)
