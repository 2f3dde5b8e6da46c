"""The results of a diagnosis: findings, scored variants of the head, and their console output."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field
from rich.console import Console
from rich.text import Text

from draftlab.doctor.score import ERROR
from draftlab.report.console import print_table
from draftlab.report.formatting import with_interval
from draftlab.report.section import NONE, Column, Line, Table

SCHEMA = 1
State = Literal["healthy", "weak", "faulty", "undecided"]


class Finding(BaseModel, extra="forbid", frozen=True):
    """One thing that is not as it should be.

    `kind` is a stable word for programs ("missing tensor", "boundaries", "d2t" …). A "fault" makes
    a head worse or unusable somewhere; a "note" is worth knowing.
    """

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


class ScoredVariant(BaseModel, extra="forbid", frozen=True):
    """The scores of one variant of the head: counters of a teacher-forced walk, and a comparison.

    `kind` is that of the hypothesis. Over every position of the answers, `gain` is the number of
    accepted drafts per step above the stored head's, with its interval over prompts, which holds
    for all variants together. These are None for the stored head itself.
    """

    name: str
    kind: str | None
    acceptance_length: float | None
    acceptance_length_ci: tuple[float, float] | None
    drafts: int
    accepted: int
    accepted_at: list[int]
    gain: float | None = None
    gain_ci: tuple[float, float] | None = None
    better: bool = False


class Diagnosis(BaseModel, extra="forbid", frozen=True):
    """A complete diagnosis, which `--json` prints.

    `state` is "weak" for a head whose only fault is that it accepts too few drafts, and "undecided"
    if no fault was found and the prompts are too few for a verdict.
    `readings` holds the variants: the stored head first, then the others, best first.
    """

    schema_version: int = Field(default=SCHEMA, serialization_alias="schema")
    healthy: bool
    state: State
    verdict: str
    head: str
    layout: str
    target: str
    conditions: dict[str, Any]
    findings: list[Finding]
    readings: list[ScoredVariant]


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis; the verdict is the first line. Only a terminal wraps lines."""
    wide = not console.is_terminal
    colour = {"healthy": "green", "faulty": "red"}.get(diagnosis.state, "yellow")
    verdict = Text(f"{diagnosis.state}: {diagnosis.verdict}", style=f"bold {colour}")
    console.print(verdict, soft_wrap=wide)
    subject = f"head {diagnosis.head} ({diagnosis.layout} layout), target {diagnosis.target}"
    console.print(Text(subject, style="dim"), soft_wrap=wide)
    if diagnosis.findings:
        console.print()
    for finding in diagnosis.findings:
        colour = "red" if finding.severity == "fault" else "yellow"
        line = Text(f"{finding.severity}: ", style=colour).append(finding.what, style="default")
        console.print(line, soft_wrap=wide)
        if finding.do:
            do = Text(f"  do: {finding.do}", style="dim")
            console.print(do, soft_wrap=wide)
    if not diagnosis.readings:
        return
    console.print()
    print_table(_table(diagnosis.readings), console, "--json")
    conditions = diagnosis.conditions
    legend = (
        f"K = {conditions['k']}, {conditions['prompts']} prompts of {conditions['suite']}, "
        f"{conditions['answer_tokens']:,} tokens of the target's own greedy answers (repeated "
        f"4-grams {conditions['repetition_rate']:.2f}), {conditions['dtype']} on "
        f"{conditions['device']}; teacher-forced walk. AL has a 95 % interval over prompts. Gain "
        "is over every position of the answers: accepted drafts per step above the stored head's, "
        f"with an interval that holds for all variants together ({1 - 2 * ERROR:.0%}). * marks a "
        "significantly better fit."
    )
    console.print(Text(legend, style="dim"), soft_wrap=wide)


def _table(variants: list[ScoredVariant]) -> Table:
    columns = [
        Column("variant", left=True, room=40),
        Column("AL [95 %]"),
        Column("accepted at 1 …", left=True, leaves=1),
        Column("gain"),
        Column("", left=True),
    ]
    lines = [
        Line(
            [
                variant.name,
                with_interval(variant.acceptance_length, variant.acceptance_length_ci),
                " ".join(f"{n / variant.drafts:.2f}" for n in variant.accepted_at)
                if variant.drafts
                else NONE,
                ""
                if variant.gain is None
                else with_interval(variant.gain, variant.gain_ci, 2, "+"),
                "*" if variant.better else "",
            ],
            "best" if variant.better or variant.gain is None else "plain",
        )
        for variant in variants
    ]
    return Table(columns, lines)
