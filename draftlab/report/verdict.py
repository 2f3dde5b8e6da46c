"""The verdict of a report in one sentence for each head: how fast it makes decoding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from draftlab.evaluate.results import Report, Row
from draftlab.report import formatting as fmt


def title(report: Report) -> str:
    """Return the names of the heads and of the target, without folders."""
    names = [Path(name).name for name in dict.fromkeys(row.head for row in report.rows if row.head)]
    target = Path(str(report.target.get("name") or "unnamed")).name
    if not names:
        return f"Plain decoding of target {target}"
    return f"Draft head{'s' * (len(names) > 1)} {', '.join(names)} for target {target}"


def verdicts(report: Report) -> list[str]:
    """Return a sentence for each head, about its lowest temperature: the measured effect and K.

    "At T = 0 and K = 4 quickstart makes decoding 1.60× as fast [1.52, 1.68]; over the whole suite
    K = 3 would be best (predicted 1.65×, K = 4: 1.58×)." If the measured K is predicted to be the
    best, it "is best". Where drafting does not pay, no K is. Without times the sentence states the
    acceptance length.
    """
    heads = dict.fromkeys(row.head for row in report.rows if fmt.has_drafter(row))
    return [sentence for head in heads for sentence in _of_head(report, head)]


def _of_head(report: Report, head: str | None) -> Iterator[str]:
    rows = [row for row in report.rows if row.head == head and fmt.has_drafter(row)]
    lowest = min(row.temperature for row in rows)
    row = max((row for row in rows if row.temperature == lowest), key=speed)
    where = f"At {fmt.conditions_text(row.temperature, row.draft_probs, None)} and K = {row.k}"
    name = Path(head or "the head").name
    if row.speedup is None or row.speedup_ci is None:
        length = fmt.number(row.acceptance_length, 2)
        yield f"{where} {name} has AL {length}; no times were measured."
        return
    low, high = row.speedup_ci
    effect = "makes decoding" if row.speedup >= 1 else "slows decoding down:"
    sentence = f"{where} {name} {effect} {row.speedup:.2f}× as fast [{low:.2f}, {high:.2f}]"
    yield f"{sentence}{_best_k(report, row)}."


def speed(row: Row) -> tuple[float, float]:
    """Return what rows are compared by: the speed-up, or else the acceptance length."""
    return row.speedup or 0.0, row.acceptance_length or 0.0


def _best_k(report: Report, row: Row) -> str:
    """Return the end of the verdict, which names the K that the adviser predicts to be the best.

    The times of the row are those of the timed prompts and the predictions are for the whole suite,
    so the prediction of the row's own K stands beside that of the best.
    """
    for one in (report.adviser or {}).get("advice", []):
        keys = ("engine", "head", "temperature", "draft_probs")
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
    own = f", K = {row.k}: {predicted[row.k]:.2f}×" if row.k in predicted else ""
    return (
        f"; over the whole suite K = {best} would be best (predicted {predicted[best]:.2f}×{own})"
    )
