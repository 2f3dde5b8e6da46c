"""What servers read of a report: calibrated confidence, drafts by batch size, rates of steps.

Confidence belongs to the head and holds in every server. The time of a step belongs to a server on
its machine: a table of steps that were timed in another engine names that engine, and no launch
command uses it (servers §13).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from draftlab.errors import UserError
from draftlab.evaluate.calibration.result import Calibration
from draftlab.evaluate.results import Report, Timing
from draftlab.files import known_sha256
from draftlab.heads.folder import WEIGHTS

REPORT = "report.json"
CALIBRATION = "calibration.json"
"""File of an export with the calibration that its launch command and other files are made of."""
STS, SPS = "sts.json", "sps.json"
"""SGLang's files: temperatures of the confidence, and rates of steps (servers §13)."""
SCHEMA = 1


VLLM = "vllm"
"""The start of the engine name in rows that were measured in vLLM."""


@dataclass(frozen=True)
class Source:
    """The engine, its version and the device that steps were timed on."""

    engine: str
    version: str
    device: str

    @property
    def is_vllm(self) -> bool:
        """Return whether vLLM itself was timed."""
        return self.engine.startswith(VLLM)

    def __str__(self) -> str:
        """Return the words for a table, which say whose engine it was."""
        name = f"{self.engine} {self.version} on {self.device}"
        return name if self.is_vllm else f"draftlab's engine, not yours ({name})"


Steps = list[tuple[int, Timing]]
"""Drafts a step (0: none), and what was timed with them."""


@dataclass(frozen=True)
class ServingTables:
    """What an export gives servers of a report.

    Attributes:
        report_sha256: of report.json.
        calibration: of the exported head, at the exported K.
        source: where the steps were timed; None: at fewer than two batch sizes.
        schedule: (first, last batch size, drafts a step), in vLLM's form.
        step_rates: the rate of steps by the tokens of a step, in SGLang's form; None: the report
            has fewer than two points.
        baked_temperature: the common temperature that the export's confidence head is divided by.
    """

    report_sha256: str
    calibration: Calibration
    source: Source | None = None
    schedule: tuple[tuple[int, int, int], ...] = ()
    step_rates: dict[str, Any] | None = None
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

    def sps_json(self) -> dict[str, Any]:
        """Return SGLang's table of steps per second; SGLang skips the key `measured_in`."""
        return (self.step_rates or {}) | {"measured_in": str(self.source)}

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
            "schedule": [list(entry) for entry in self.schedule],
            "steps_measured_in": self.source and str(self.source),
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
    source, steps = measured_steps(report, calibration)
    return ServingTables(
        known_sha256(path),
        calibration,
        source,
        batch_schedule(steps, k),
        step_rates(steps),
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


def measured_steps(report: Report, calibration: Calibration) -> tuple[Source | None, Steps]:
    """Return the steps of the calibrated head, temperature and drafter setting, and their source.

    vLLM's come first. Without two timed batch sizes there are none.
    """
    names = ("head", "temperature", "draft_probs")
    timed: dict[Source, Steps] = defaultdict(list)
    for row in report.rows:
        if all(getattr(row, name) == getattr(calibration, name) for name in names):
            source = Source(row.engine, row.engine_version, row.device)
            timed[source] += [(row.k, timing) for timing in row.timings]
    several = [one for one in timed.items() if len({timing.batch for _, timing in one[1]}) > 1]
    return next((one for one in several if one[0].is_vllm), several[0] if several else (None, []))


def batch_schedule(steps: Steps, k: int) -> tuple[tuple[int, int, int], ...]:
    """Return ranges of batch sizes with the fastest number of drafts, at most `k`; 0: none.

    A batch size between two measured ones has the drafts of the nearer one, by their ratio. The
    result is empty if fewer than two batch sizes were measured.
    """
    speedups: dict[int, dict[int, float]] = defaultdict(lambda: {0: 1.0})
    for drafts, timing in sorted(steps, key=lambda step: (step[1].batch, step[0])):
        if 0 < drafts <= k and timing.speedup is not None:
            speedups[timing.batch][drafts] = timing.speedup
    if len(speedups) < 2:
        return ()
    best = {batch: max(known, key=known.__getitem__) for batch, known in speedups.items()}
    batches = list(best)
    ends = [math.isqrt(a * b) for a, b in pairwise(batches)] + batches[-1:]
    schedule: list[tuple[int, int, int]] = []
    start = 1
    for batch, end in zip(batches, ends, strict=True):
        if schedule and schedule[-1][2] == best[batch]:
            start = schedule.pop()[0]
        schedule.append((start, end, best[batch]))
        start = end + 1
    return tuple(schedule)


def step_rates(steps: Steps) -> dict[str, Any] | None:
    """Return the steps per second by the tokens that a step verifies, batch · (K + 1).

    Equal numbers of tokens have the median of their times. Steps without drafts are left out, since
    their time lacks the head's. None with fewer than two points.
    """
    times: dict[int, list[float]] = defaultdict(list)
    for drafts, timing in steps:
        if drafts and timing.step_ms:
            times[timing.batch * (drafts + 1)].append(timing.step_ms)
    if len(times) < 2:
        return None
    tokens = sorted(times)
    return {
        "sample_batch_tokens": tokens,
        "sample_steps_per_sec": [1e3 / median(times[n]) for n in tokens],
        "max_batch_tokens": tokens[-1],
    }
