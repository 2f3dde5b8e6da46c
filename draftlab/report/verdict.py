"""The verdict of a report in one sentence for each head: how fast it makes decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftlab.evaluate.results import Report, Row, drafting_pays, headlines
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
    """Return a sentence for each engine, head and suite, about its lowest temperature.

    "At T = 0, batch 1 and K = 4, my-head makes decoding 1.60× as fast [1.52, 1.68] (tokens a step
    of 64 prompts, step times of 10 of them); K = 3 would be faster (predicted 1.85×)." It claims no
    more than the intervals show. Without times it states the acceptance length; there is no verdict
    from too few prompts, or where the machine was disturbed. Engine and suite are named if there
    are several.
    """
    found = headlines(report.rows)
    engines, suites = ({getattr(row, key) for _, row in found} for key in ("engine", "suite"))
    return [
        _of_rows(
            report,
            rows,
            row,
            f"With {row.engine} at" if len(engines) > 1 else "At",
            f" of {fmt.suite_name(row)}" if len(suites) > 1 else "",
        )
        for rows, row in found
    ]


def _of_rows(report: Report, rows: Sequence[Row], row: Row, at: str, suite: str) -> str:
    """Return the verdict about the best of rows that differ in K and kind of drafting."""
    conditions = fmt.conditions_text(row.temperature, row.draft_probs, _batch(row))
    where, name = f"{at} {conditions} and K = {row.k}", Path(row.head or "the head").name
    if row.speedup is None or row.speedup_ci is None:
        length = fmt.with_interval(row.acceptance_length, row.acceptance_length_ci)
        return (
            f"{where}, {name} has AL {length}{suite and f' on {suite[4:]}'}; {_no_verdict(rows)}."
        )
    low, high = row.speedup_ci
    effect = {
        True: f"makes decoding{suite}",
        False: f"slows decoding{suite} down:",
        None: f"has no clear effect on the speed of decoding{suite}:",
    }[drafting_pays(row.speedup_ci)]
    sentence = f"{where}, {name} {effect} {row.speedup:.2f}× as fast [{low:.2f}, {high:.2f}]"
    return f"{sentence}{_of_prompts(row)}{_best_k(report, row)}."


def _batch(row: Row) -> int | None:
    return row.timings[0].batch if row.timings else None


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
    """Return the end of the verdict: whether the adviser finds another K to be clearly faster."""
    for one in (report.adviser or {}).get("advice", []):
        if fmt.belongs_to(one, row) and one["batch"] == _batch(row):
            break
    else:
        return ""
    best, predicted = one["best_k"], {p["k"]: p["speedup"] for p in one["predictions"]}
    if best != row.k:
        return f"; K = {best} would be faster (predicted {predicted[best]:.2f}×)"
    others = [k for k in predicted if k != best]
    return f"; no other K up to {max(predicted)} is clearly faster" if others else ""
