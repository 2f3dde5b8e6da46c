"""Rows of a report and the identities that their counters obey (methods §6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from draftlab.engine.counters import Counters
from draftlab.errors import UserError
from draftlab.files import read_json, write_json
from draftlab.settings import complaints

SCHEMA_VERSION = 2
READABLE = (1, 2)  # 2 only adds fields: timings, self_check, speedup_ci


class Lossless(BaseModel):
    """What is known about equality with the target alone (methods §6: L1, L2, L3)."""

    model_config = ConfigDict(extra="forbid")

    level: Literal["L1", "L2", "L3"]
    test: str
    p_value: float | None = None
    n: int


class SelfCheck(BaseModel):
    """Whether the accepted drafts agree with their chances (`evaluate/self_check.py`).

    `z` has a standard normal score for each draft position; None where none was reached, and at
    T = 0, where accepted and expected must be equal.
    """

    model_config = ConfigDict(extra="forbid")

    z: list[float | None]
    p_value: float
    passed: bool


class Timing(BaseModel):
    """Times of a row's setting with `batch` prompts decoded at once, in milliseconds.

    Stop tokens are ignored; `throughput_tok_s` counts output tokens over wall time, prefill
    included. `floor_ms` is the time that reading a step's weights once takes at the device's
    measured copy rate.
    """

    model_config = ConfigDict(extra="forbid")

    batch: int
    prompts: int
    tpot_ms: float
    tpot_ms_ci: tuple[float, float]
    ttft_ms: float
    step_ms: float | None
    floor_ms: float | None = None
    throughput_tok_s: float | None = None
    baseline_tpot_ms: float | None = None
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None


class Row(BaseModel):
    """One result that stands alone: conditions, raw counters, and the figures made from them.

    `batch` is that of the counted pass. Times are milliseconds and belong to the first of
    `timings`. For drafter "none" the acceptance fields are None. Fields that a run did not measure
    are None, never a guess.
    """

    model_config = ConfigDict(extra="forbid")

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
    draft_temperature: float | None
    draft_probs: bool
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
    floor_ms: float | None = None
    throughput_tok_s: float | None = None
    baseline_tpot_ms: float | None = None
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    timings: list[Timing] = []
    self_check: SelfCheck | None = None
    prompts_equal: float | None = None
    repetition_rate: float | None
    lossless: Lossless | None = None
    warnings: list[str] = []

    @model_validator(mode="after")
    def _identities(self) -> Row:
        found = self.counters
        if len(self.accepted_at) != self.k or sum(self.accepted_at) != self.accepted:
            raise ValueError(f"accepted_at {self.accepted_at} does not sum to {self.accepted}")
        if self.acceptance_length != found.acceptance_length:
            raise ValueError(
                f"acceptance length {self.acceptance_length} is not {found.acceptance_length}"
            )
        return self

    @property
    def counters(self) -> Counters:
        """The row's raw counters."""
        return Counters(
            self.k,
            self.drafts,
            self.draft_tokens,
            self.accepted,
            list(self.accepted_at),
            self.undrafted_steps,
            self.truncated_tokens,
        )


class Report(BaseModel):
    """report.json: a public, versioned schema."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
    target: dict[str, Any]
    environment: dict[str, Any]
    adviser: dict[str, Any] | None = None
    rows: list[Row]

    def write(self, path: Path) -> None:
        """Writes the report with the key `schema` first, atomically."""
        fields = self.model_dump(mode="json")
        write_json(path, {"schema": fields.pop("schema_version"), **fields})

    @classmethod
    def read(cls, path: Path) -> Report:
        """Reads a report of a schema version in `READABLE`."""
        fields = read_json(path, kind="report.json of draftlab")
        if not isinstance(fields, dict) or not {"schema", "rows"} <= fields.keys():
            raise UserError("expected a report.json of draftlab, found other JSON", where=path)
        version = fields.pop("schema")
        if version not in READABLE:
            raise UserError(
                f"expected report schema {' or '.join(map(str, READABLE))}, found {version}",
                where=path,
                do="evaluate again with this version of draftlab",
            )
        try:
            return cls.model_validate(fields | {"schema_version": version})
        except ValidationError as error:
            raise UserError(
                f"expected a report.json of schema {version}, found JSON that is none:\n  "
                + complaints(error),
                where=path,
            ) from None
