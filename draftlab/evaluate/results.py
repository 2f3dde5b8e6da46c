"""The schema of report.json: one row per decoding configuration, with its raw counters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError, model_validator

from draftlab.engine.counters import COUNTER_FIELDS, Counters
from draftlab.errors import UserError
from draftlab.evaluate.calibration.result import Calibration
from draftlab.files import read_fields, write_json
from draftlab.settings import describe_errors

SCHEMA_VERSION = 1


class Lossless(BaseModel, extra="forbid"):
    """The level of evidence that the outputs equal the target's own (methods §6.6).

    `test` says what was tested.
    """

    level: Literal["L1", "LS", "L2", "L3"]
    test: str
    p_value: float | None = None
    n: int


class SelfCheck(BaseModel, extra="forbid"):
    """Result of comparing accepted with expected counts (`evaluate/self_check.py`).

    `z` holds a standard normal score for each draft position. A score is None where no draft was
    reached, and at T = 0, where the check is bookkeeping: accepted and expected counts must be
    equal. `level` is the smallest p-value that passes; None at T = 0.
    """

    z: list[float | None]
    p_value: float
    passed: bool
    level: float | None = None


class Timing(BaseModel, extra="forbid"):
    """Times of a row's configuration at one batch size, in milliseconds.

    `tpot_ms`, `baseline_tpot_ms` (without drafts) and `speedup` are of the whole suite: its own
    tokens a step, with the step times of the timed prompts. `step_ms`, `ttft_ms`,
    `throughput_tok_s` (output tokens over wall time, prefill included), `tokens_per_step`, the
    unconditional `acceptance_at` each position and `timed_speedup` are of the timed prompts.
    `step_ratio_ci` is the interval of `step_ms` over a step of plain decoding.

    Intervals are None for fewer than six prompts. `disturbance` says why there are no speed-ups,
    where the machine was disturbed while the batch was timed (`metrics.without_disturbed`).
    """

    batch: int
    prompts: int
    tpot_ms: float
    tpot_ms_ci: tuple[float, float] | None
    ttft_ms: float
    step_ms: float
    throughput_tok_s: float | None = None
    tokens_per_step: float | None = None
    acceptance_at: list[float] | None = None
    baseline_tpot_ms: float | None = None
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    timed_speedup: float | None = None
    timed_speedup_ci: tuple[float, float] | None = None
    step_ratio_ci: tuple[float, float] | None = None
    disturbance: str | None = None


class CategoryResult(BaseModel, extra="forbid"):
    """A row's counters and metrics over the prompts of one category of its suite.

    The speed-up is made of the category's own tokens a step and the step times of all timed
    prompts. Intervals are None for fewer than six prompts.
    """

    category: str
    prompts: int
    output_tokens: int
    undrafted_steps: int
    truncated_tokens: int
    drafts: int
    draft_tokens: int
    accepted: int
    accepted_at: list[int]
    acceptance_length: float | None
    acceptance_length_ci: tuple[float, float] | None
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None


class Row(BaseModel, extra="forbid"):
    """One self-contained result: its conditions, raw counters and the metrics computed from them.

    `batch` belongs to the pass that counts. Times are in milliseconds and repeat the first entry
    of `timings`. The acceptance fields are None for drafter "none". A field that was not measured
    is None. `categories` divides the prompts of a row with drafts; it is empty where the suite has
    no categories.

    At T = 0 `prompts_equal` is the share of prompts whose answer equals plain decoding token by
    token; in vLLM's rows `prompts_equal_draftlab` is the share whose answer equals draftlab's.
    """

    head: str | None
    engine: str
    engine_version: str
    device: str
    dtype: str
    batch: int
    suite: str
    suite_sha256: str
    template: str
    max_new_tokens: int
    seed: int
    drafter: Literal["chain", "parallel", "none"]
    k: int
    k_trained: int | None
    temperature: float
    top_k: int | None
    top_p: float | None
    draft_probs: bool
    verification: Literal["token", "block"] = "token"
    prompts: int
    output_tokens: int
    undrafted_steps: int
    truncated_tokens: int
    drafts: int
    draft_tokens: int
    accepted: int
    accepted_at: list[int]
    expected_acceptance: list[float] | None = None
    acceptance_length: float | None
    acceptance_length_ci: tuple[float, float] | None
    tpot_ms: float | None = None
    tpot_ms_ci: tuple[float, float] | None = None
    ttft_ms: float | None = None
    step_ms: float | None = None
    throughput_tok_s: float | None = None
    baseline_tpot_ms: float | None = None
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    timings: list[Timing] = []
    categories: list[CategoryResult] = []
    self_check: SelfCheck | None = None
    prompts_equal: float | None = None
    prompts_equal_draftlab: float | None = None
    repetition_rate: float | None
    lossless: Lossless | None = None
    warnings: list[str] = []

    @model_validator(mode="after")
    def _check_identities(self) -> Row:
        if len(self.accepted_at) != self.k or sum(self.accepted_at) != self.accepted:
            raise ValueError(
                f"expected accepted_at to hold {self.k} counts with the sum {self.accepted}, "
                f"found {self.accepted_at}"
            )
        expected = self.counters.acceptance_length
        if self.acceptance_length != expected:
            raise ValueError(
                f"expected the acceptance length {expected} of the counters, "
                f"found {self.acceptance_length}"
            )
        return self

    @property
    def counters(self) -> Counters:
        """A copy of the row's raw counters."""
        return Counters(**self.model_dump(include=set(COUNTER_FIELDS)))

    @property
    def tokens_per_step(self) -> float:
        """Tokens after the first ones over verify steps; AL also counts truncated tokens."""
        steps = self.drafts + self.undrafted_steps
        return (self.output_tokens - self.prompts) / steps if steps else 1.0


class Report(BaseModel, extra="forbid"):
    """The content of report.json, a public and versioned schema."""

    schema_version: int = SCHEMA_VERSION
    target: dict[str, Any]
    environment: dict[str, Any]
    adviser: dict[str, Any] | None = None
    rows: list[Row]
    calibrations: list[Calibration] = []

    def write(self, path: Path) -> None:
        """Write the report atomically, with the key `schema` first."""
        fields = self.model_dump(mode="json")
        write_json(path, {"schema": fields.pop("schema_version"), **fields})

    def heads_with(self, sha256: str) -> set[str]:
        """Return the names of the heads whose weights have this hash."""
        heads = self.environment.get("heads", {})
        return {name for name, known in heads.items() if known == sha256}

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read a report of the present schema version.

        Raises:
            UserError: the file is missing, no report, or of another version.
        """
        again = "`draftlab eval` writes the report again"
        fields = read_fields(path, {"rows": list}, kind="report.json of draftlab", do=again)
        version = fields.pop("schema", None)
        if version != SCHEMA_VERSION:
            raise UserError(
                f"expected report schema {SCHEMA_VERSION}, found {version}",
                where=path,
                do="evaluate again with this version of draftlab",
            )
        try:
            return cls.model_validate(fields | {"schema_version": version})
        except ValidationError as error:
            raise UserError(
                f"expected a report.json of schema {version}, but the file does not match it:\n  "
                + describe_errors(error),
                where=path,
                do=again,
            ) from None


def speed(row: Row) -> tuple[float, float]:
    """Return what rows are compared by: the speed-up, or else the acceptance length."""
    return row.speedup or 0.0, row.acceptance_length or 0.0


def drafting_pays(interval: tuple[float, float] | None) -> bool | None:
    """Return whether a speed-up is above 1; None if its interval, as it is printed, contains 1."""
    if interval is None:
        return None
    low, high = (round(end, 2) for end in interval)
    return None if low <= 1 <= high else low > 1


def headlines(rows: Sequence[Row]) -> list[tuple[list[Row], Row]]:
    """Return the rows at the lowest temperature of each engine, head and suite, with their best.

    The best one is the fastest, or that with the largest AL if there is no speed-up. Rows without
    drafts are left out.
    """
    groups: dict[tuple[str, str | None, str], list[Row]] = {}
    for row in rows:
        if row.drafter != "none":
            groups.setdefault((row.engine, row.head, row.suite), []).append(row)
    found = []
    for members in groups.values():
        lowest = min(row.temperature for row in members)
        here = [row for row in members if row.temperature == lowest]
        found.append((here, max(here, key=speed)))
    return found


class FastestK(NamedTuple):
    """The fastest K of a head on one engine, at the lowest temperature.

    Attributes:
        speedup: over several suites the geometric mean of theirs.
        measured: number of K's that have a speed-up on every suite.
    """

    k: int
    speedup: float
    temperature: float
    engine: str
    measured: int


def fastest_k(rows: Sequence[Row]) -> FastestK | None:
    """Return the fastest measured K, on vLLM if that measured any; None without an interval.

    Args:
        rows: of one head, with drafts.
    """
    engines = sorted({row.engine for row in rows}, key=lambda name: not name.startswith("vllm"))
    for engine in engines:
        suites = headlines([row for row in rows if row.engine == engine])
        logs: dict[int, dict[str, float]] = {}
        for row in (row for here, _ in suites for row in here):
            if row.speedup and row.speedup_ci:
                best = logs.setdefault(row.k, {})
                best[row.suite] = max(best.get(row.suite, -math.inf), math.log(row.speedup))
        means = {k: sum(v.values()) / len(v) for k, v in logs.items() if len(v) == len(suites)}
        if means:
            k = max(means, key=lambda one: means[one])
            temperature = suites[0][1].temperature
            return FastestK(k, math.exp(means[k]), temperature, engine, len(means))
    return None
