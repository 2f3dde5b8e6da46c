"""The results of a diagnosis: findings, scored variants of the head, and the diagnosis itself."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

SCHEMA = 1
State = Literal["healthy", "weak", "faulty", "undecided"]


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


def fault(kind: str, what: str, do: str = "") -> Finding:
    """Return a finding that is a fault."""
    return Finding(kind=kind, what=what, do=do)


def note(kind: str, what: str, do: str = "") -> Finding:
    """Return a finding that is a note."""
    return Finding(kind=kind, what=what, do=do, severity="note")


class ScoredVariant(BaseModel):
    """The scores of one variant of the head: counters of a teacher-forced walk, and a comparison.

    Over every position of the answers, `gain` is the number of accepted drafts per step above the
    stored head's, with its interval over prompts, which holds for all variants together.
    `likelier` is by how many nats the target's tokens are likelier. All three are None for the
    stored head itself.
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
    gain_ci: tuple[float, float] | None = None
    likelier: float | None = None
    better: bool = False


class Diagnosis(BaseModel):
    """A complete diagnosis, which `--json` prints.

    `state` is "weak" for a head whose only fault is that it accepts too few drafts, and "undecided"
    if no fault was found and the prompts are too few for a verdict.
    `readings` holds the variants: the stored head first, then the others, best first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA
    healthy: bool
    state: State
    verdict: str
    head: str
    layout: str
    target: str
    conditions: dict[str, Any]
    findings: list[Finding]
    readings: list[ScoredVariant]

    def dump(self) -> dict[str, Any]:
        """Return the JSON object, with the key `schema` first."""
        fields = self.model_dump(mode="json")
        return {"schema": fields.pop("schema_version"), **fields}
