"""The console output of a diagnosis: the verdict, the findings, the table of variants."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from draftlab.doctor.findings import Diagnosis, ScoredVariant
from draftlab.doctor.score import ERROR

ACCEPTED_AT = "accepted at 1 …"
MAX_PAIRS = 3  # variants with two changes that the table shows


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis; the verdict is the first line."""
    colour = {"healthy": "green", "faulty": "red"}.get(diagnosis.state, "yellow")
    verdict = Text(f"{diagnosis.state}: {diagnosis.verdict}", style=f"bold {colour}")
    console.print(verdict, soft_wrap=True)
    subject = f"head {diagnosis.head} ({diagnosis.layout} layout), target {diagnosis.target}"
    console.print(Text(subject, style="dim"), soft_wrap=True)
    if diagnosis.findings:
        console.print()
    for finding in diagnosis.findings:
        colour = "red" if finding.severity == "fault" else "yellow"
        line = Text(f"{finding.severity}: ", style=colour).append(finding.what, style="default")
        console.print(line, soft_wrap=not console.is_terminal)
        if finding.do:
            do = Text(f"  do: {finding.do}", style="dim")
            console.print(do, soft_wrap=not console.is_terminal)
    if not diagnosis.readings:
        return
    pairs = [variant for variant in diagnosis.readings if len(variant.changes) > 1][:MAX_PAIRS]
    shown = [v for v in diagnosis.readings if len(v.changes) < 2 or v in pairs]
    console.print()
    wide, narrow = _table(shown, ""), _table(shown, ACCEPTED_AT)
    fits = Measurement.get(console, console.options.update(max_width=10_000), wide)
    console.print(wide if fits.maximum <= console.width else narrow)
    if hidden := len(diagnosis.readings) - len(shown):
        console.print(Text(f"{hidden} more pairs of changes fit worse (--json)", style="dim"))
    conditions = diagnosis.conditions
    legend = (
        f"K = {conditions['k']}, {conditions['prompts']} prompts of {conditions['suite']}, "
        f"{conditions['answer_tokens']:,} tokens of the target's own greedy answers (repeated "
        f"4-grams {conditions['repetition_rate']:.2f}), {conditions['dtype']} on "
        f"{conditions['device']}; teacher-forced walk. AL has a 95 % interval over prompts. Gain "
        "and nats are over every position of the answers: accepted drafts per step above the "
        f"stored head's, with an interval that holds for all variants together ({1 - 2 * ERROR:.0%}"
        "), and how much likelier the head finds the target's tokens. * marks a significantly "
        "better fit."
    )
    console.print(Text(legend, style="dim"), soft_wrap=not console.is_terminal)


def _table(variants: list[ScoredVariant], without: str) -> Table:
    """Return the table, of which a narrow console leaves out the columns that say least."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("variant", overflow="fold")
    names = [name for name in ("AL [95 %]", ACCEPTED_AT, "gain", "nats", "") if name != without]
    for name in names:
        numbers = name in ("gain", "nats")
        table.add_column(name, justify="right" if numbers else "left", no_wrap=True)
    for variant in variants:
        rates = " ".join(f"{n / variant.drafts:.2f}" for n in variant.accepted_at)
        table.add_row(
            Text(variant.name),
            _with_interval(variant.acceptance_length, variant.acceptance_length_ci),
            *([rates if variant.drafts else "–"] if ACCEPTED_AT in names else []),
            _with_interval(variant.gain, variant.gain_ci, sign=True),
            _with_interval(variant.likelier, None, sign=True),
            "*" if variant.better else "",
            style="bold" if variant.better or variant.gain is None else "dim",
        )
    return table


def _with_interval(
    value: float | None, interval: tuple[float, float] | None, *, sign: bool = False
) -> str:
    if value is None:
        return "" if sign else "–"
    form = "+.2f" if sign else ".2f"
    shown = f" [{interval[0]:{form}}, {interval[1]:{form}}]" if interval else ""
    return f"{value:{form}}{shown}"
