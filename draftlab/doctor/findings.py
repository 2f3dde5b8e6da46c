"""What an examination says: findings, scored readings, and the diagnosis made of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

SCHEMA = 1


class Finding(BaseModel):
    """One thing that is not as it should be.

    `kind` is a stable word for programs ("missing tensor", "boundaries", "d2t" …). A "fault" makes
    a head worse or unusable somewhere; a "note" is worth knowing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    what: str
    do: str = ""
    severity: Literal["fault", "note"] = "fault"


class ScoredReading(BaseModel):
    """The head under one reading: the counters of a teacher-forced walk, and how it compares.

    Over every position of the answers, `gain` is accepted drafts a step more than as stored, and
    `likelier` by how many nats the target's tokens are likelier, with its interval over prompts;
    None for the stored reading itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    changes: list[str]
    acceptance_length: float | None
    acceptance_length_ci: tuple[float, float] | None
    drafts: int
    accepted: int
    accepted_at: list[int]
    gain: float | None = None
    likelier: float | None = None
    likelier_ci: tuple[float, float] | None = None
    better: bool = False


class Diagnosis(BaseModel):
    """All of it; `--json` prints it. `readings` has the stored one first, then best ones first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA
    healthy: bool
    verdict: str
    head: str
    layout: str
    target: str
    conditions: dict[str, Any]
    findings: list[Finding]
    readings: list[ScoredReading]

    def dump(self) -> dict[str, Any]:
        """For JSON, the key `schema` first."""
        fields = self.model_dump(mode="json")
        return {"schema": fields.pop("schema_version"), **fields}
