"""A diagnosis for people: the verdict, what was found, the table of readings."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftlab.doctor.findings import Diagnosis, ScoredReading
from draftlab.doctor.score import LEVEL

PAIRS = 3  # shown of two changes at once


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Prints it; the verdict is the first line."""
    mark, style = ("healthy", "bold green") if diagnosis.healthy else ("sick", "bold red")
    console.print(Text(f"{mark}: {diagnosis.verdict}", style=style), soft_wrap=True)
    said = f"head {diagnosis.head} ({diagnosis.layout} layout), target {diagnosis.target}"
    console.print(Text(said, style="dim"), soft_wrap=True)
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
    shown = _shown(diagnosis.readings)
    console.print()
    console.print(_table(shown))
    if hidden := len(diagnosis.readings) - len(shown):
        console.print(Text(f"{hidden} more pairs of changes fit worse (--json)", style="dim"))
    given = diagnosis.conditions
    legend = (
        f"K = {given['k']}, {given['prompts']} prompts of {given['suite']}, "
        f"{given['answer_tokens']:,} tokens of the target's own greedy answers (repeated 4-grams "
        f"{given['repetition_rate']:.2f}), {given['dtype']} on {given['device']}; teacher-forced "
        "walk. AL with its 95 % interval over prompts. At every position of the answers, gain: "
        "accepted drafts a step more than as stored; nats: how much likelier the head finds the "
        f"target's tokens, with its {LEVEL:.1%} interval. * fits better, beyond chance."
    )
    console.print(Text(legend, style="dim"), soft_wrap=not console.is_terminal)


def _shown(readings: list[ScoredReading]) -> list[ScoredReading]:
    """As stored, every single change, and the best pairs of them."""
    pairs = [reading for reading in readings if len(reading.changes) > 1][:PAIRS]
    return [reading for reading in readings if len(reading.changes) < 2 or reading in pairs]


def _table(readings: list[ScoredReading]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("read", overflow="fold")
    for name in ("AL [95 %]", "accepted at 1 …", "gain", "nats", ""):
        numbers = name in ("gain", "nats")
        table.add_column(name, justify="right" if numbers else "left", no_wrap=True)
    for reading in readings:
        rates = " ".join(f"{n / reading.drafts:.2f}" for n in reading.accepted_at)
        table.add_row(
            Text(reading.name),
            _with_interval(reading.acceptance_length, reading.acceptance_length_ci),
            rates if reading.drafts else "–",
            _with_interval(reading.gain, None, sign=True),
            _with_interval(reading.likelier, reading.likelier_ci, sign=True),
            "*" if reading.better else "",
            style="bold" if reading.better or reading.gain is None else "dim",
        )
    return table


def _with_interval(
    value: float | None, interval: tuple[float, float] | None, *, sign: bool = False
) -> str:
    if value is None:
        return "" if sign else "–"
    form = "+.2f" if sign else ".2f"
    between = f" [{interval[0]:{form}}, {interval[1]:{form}}]" if interval else ""
    return f"{value:{form}}{between}"
