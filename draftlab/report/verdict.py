"""The verdict of a report in one sentence for each head: how fast it makes decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftlab.evaluate.headline import headline_rows
from draftlab.evaluate.results import Report, Row
from draftlab.formatting import count_text
from draftlab.intervals import MIN_INTERVAL_PROMPTS
from draftlab.report import formatting as fmt


def title(report: Report) -> str:
    """Return the names of the heads and of the target, without folders."""
    names = [Path(name).name for name in dict.fromkeys(row.head for row in report.rows if row.head)]
    target = Path(str(report.target.get("name") or "unnamed")).name
    if not names:
        return f"Plain decoding of target {target}"
    return f"Draft head{'s' * (len(names) > 1)} {', '.join(names)} for target {target}"


def verdicts(report: Report) -> list[str]:
    """Return a sentence for each head and suite, about its lowest temperature: the speed-up and K.

    "At T = 0 and K = 4 quickstart makes decoding 1.60× as fast [1.52, 1.68] (tokens a step of 64
    prompts, step times of 10 of them); K = 3 would be best (predicted 1.65×)." If the measured K is
    predicted to be the best, it "is best". Where drafting does not pay, no K is. Without times the
    sentence states the acceptance length; there is no verdict from too few prompts, or where the
    machine was disturbed.
    """
    drafted = [row for row in report.rows if fmt.has_drafter(row)]
    suites = dict.fromkeys(row.suite for row in drafted)
    groups: dict[tuple[str | None, str], list[Row]] = {}
    for row in drafted:
        groups.setdefault((row.head, row.suite), []).append(row)
    return [_of_rows(report, rows, several=len(suites) > 1) for rows in groups.values()]


def _of_rows(report: Report, rows: Sequence[Row], *, several: bool) -> str:
    """Return the verdict of a head's rows on one suite, which is named if there are several."""
    rows, row = headline_rows(rows)
    where = f"At {fmt.conditions_text(row.temperature, row.draft_probs, None)} and K = {row.k}"
    name = Path(row.head or "the head").name
    suite = f" of {fmt.suite_name(row)}" if several else ""
    if row.speedup is None or row.speedup_ci is None:
        length = fmt.number(row.acceptance_length, 2)
        return f"{where} {name} has AL {length}{suite and f' on {suite[4:]}'}; {_no_verdict(rows)}."
    low, high = row.speedup_ci
    effect = f"makes decoding{suite}" if row.speedup >= 1 else f"slows decoding{suite} down:"
    sentence = f"{where} {name} {effect} {row.speedup:.2f}× as fast [{low:.2f}, {high:.2f}]"
    return f"{sentence}{_of_prompts(row)}{_best_k(report, row)}."


def _no_verdict(rows: Sequence[Row]) -> str:
    """Return why rows have no speed-up with an interval."""
    timings = [row.timings[0] for row in rows if row.timings]
    if disturbed := [timing.disturbance for timing in timings if timing.disturbance]:
        return f"no verdict: {disturbed[0]}; repeat the evaluation"
    if timings:
        timed = min(timings[0].prompts, rows[0].prompts)
        return (
            f"no verdict from {count_text(timed, 'timed prompt')}: an interval needs "
            f"{MIN_INTERVAL_PROMPTS} (eval.timing_prompts, eval.max_prompts)"
        )
    return "no times were measured"


def _of_prompts(row: Row) -> str:
    """Return of which prompts the speed-up of a row is, in brackets."""
    if not row.timings:
        return ""
    timed = min(row.timings[0].prompts, row.prompts)
    if timed == row.prompts:
        return f" (tokens a step and step times of {timed:,} prompts)"
    return f" (tokens a step of {row.prompts:,} prompts, step times of {timed:,} of them)"


def _best_k(report: Report, row: Row) -> str:
    """Return the end of the verdict, which names the K that the adviser finds to be the best."""
    for one in (report.adviser or {}).get("advice", []):
        keys = ("suite", "engine", "head", "temperature", "draft_probs")
        if all(one[key] == getattr(row, key) for key in keys):
            predicted = {p["k"]: p["speedup"] for p in one["predictions"]}
            break
    else:
        return ""
    best = one["best_k"]
    if predicted[best] <= 1:
        return ""
    if best == row.k:
        return f"; K = {best} is best"
    return f"; K = {best} would be best (predicted {predicted[best]:.2f}×)"
