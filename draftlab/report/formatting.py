"""The words and number formats of a report, shared by the console, the HTML page and the plots.

Nothing is computed here beyond the ratios `results.Row.counters` defines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from draftlab.evaluate.results import Report, Row

NONE = "–"  # not measured, or without meaning for the row
DEFAULT_MARK = "*"
DEFAULT_NOTE = "what vLLM does by default: draft probabilities off (at T = 0 both are the same)"

TIME_DIGITS = 2  # of milliseconds, whatever their size: a column's points then stand in line

HEAD_NOTES = {
    "reference": "the head that ships in draftlab for its embedded model, trained on a GPU on 82 M "
    "tokens: what more training gives"
}
"""What a head's name does not say of itself."""

IN_CONSOLE = ("AL", "expected AL", "speed-up", "repetition")  # the page explains the rest

# name: (one line for the console, what the HTML page adds)
LEGEND: dict[str, tuple[str, str]] = {
    "AL": (
        "acceptance length = 1 + accepted / drafts; [95 % interval over prompts]",
        "The tokens that one verify step of the target wins: the accepted draft tokens and the "
        "target's own next one. The interval is a percentile bootstrap over prompts.",
    ),
    "expected AL": (
        "1 + Σ expected acceptance, from probabilities, not draws; should lie near AL",
        "A self-check: the same counts with each draw replaced by its chance. Accepted − expected "
        "is a sum of terms whose mean is zero, whatever the prompts; z is that sum over its "
        "standard deviation, for each draft position. A row fails below p = 0.001 (at T = 0 both "
        "must be equal): then the sampler or the verifier is at fault.",
    ),
    "acceptance": (
        "accepted_at / drafts: drafts accepted up to each position, unconditional",
        "Conditional acceptance divides by the drafts accepted up to the position before instead. "
        "The unconditional ones sum to AL − 1.",
    ),
    "draft probs": (
        "verification uses the head's probabilities (no part at T = 0)",
        "On: drafts are sampled and accepted with probability min(1, p / q). Off: the draft is the "
        "head's most likely token, accepted with the target's probability of it. Both leave the "
        "target's distribution unchanged; neither is always better.",
    ),
    "TPOT": (
        "ms per output token after the first, mean over prompts; [95 % interval]",
        "(latency − time to first token) / (output tokens − 1) of each prompt.",
    ),
    "speed-up": (
        "TPOT without drafting / TPOT, same prompts and engine; above 1 drafting pays",
        "A ratio of mean TPOT; the TPOT without drafting stands beside it. The interval resamples "
        "prompts, with and without drafting together.",
    ),
    "TTFT": ("ms to the first token", "Drafting has not begun then."),
    "repetition": (
        "share of 4-grams repeating an earlier one of the answer; loops flatter AL",
        "A loop is easy to draft: read an AL with a high repetition as an upper bound.",
    ),
    "accepted": (
        "before a stop token or the token limit cuts the answer; summed over drafts",
        "Drafts are verify steps that had at least one draft token; draft tokens are summed over "
        "them. Output tokens = prompts + drafts + accepted + undrafted steps − truncated tokens.",
    ),
}


def number(value: float | None, digits: int) -> str:
    """A figure with fixed digits; `NONE` for None and NaN."""
    return NONE if value is None or math.isnan(value) else f"{value:.{digits}f}"


def count(value: int) -> str:
    """A counter with thousands separators."""
    return f"{value:,}"


def with_interval(
    value: float | None, interval: tuple[float, float] | None, digits: int = 2
) -> str:
    """ "2.31 [2.20, 2.43]"; without the brackets where no interval was measured."""
    text = number(value, digits)
    if text == NONE or interval is None:
        return text
    return f"{text} [{number(interval[0], digits)}, {number(interval[1], digits)}]"


def milliseconds(value: float | None, interval: tuple[float, float] | None = None) -> str:
    """A time with its interval, in milliseconds."""
    return with_interval(value, interval, TIME_DIGITS)


def times(value: float | None) -> str:
    """A speed-up: "1.62×"."""
    return NONE if value is None else f"{number(value, 2)}×"


def speedup(value: float | None, interval: tuple[float, float] | None) -> str:
    """ "1.62× [1.50, 1.71]"."""
    if value is None or interval is None:
        return times(value)
    return f"{times(value)} [{number(interval[0], 2)}, {number(interval[1], 2)}]"


def temperature(value: float) -> str:
    """ "0", "0.8": no trailing zeros."""
    return f"{value:g}"


def drafted(row: Row) -> bool:
    """Whether the row has a drafter."""
    return row.drafter != "none"


def draft_probs(row: Row) -> str:
    """ "on", "off", or `NONE` where they play no part (no drafter, T = 0)."""
    if not drafted(row) or row.temperature == 0:
        return NONE
    return "on" if row.draft_probs else "off"


def is_vllm_default(row: Row) -> bool:
    """Whether the row verifies as vLLM does unless asked: without draft probabilities."""
    return drafted(row) and (row.temperature == 0 or not row.draft_probs)


def head_notes(rows: Sequence[Row]) -> dict[str, str]:
    """Of the heads in a report that need one."""
    return {name: note for name, note in HEAD_NOTES.items() if any(r.head == name for r in rows)}


def expected_length(row: Row) -> float | None:
    """1 + Σ expected acceptance (each a mean over drafts); None where it was not measured."""
    return None if row.expected_acceptance is None else 1 + sum(row.expected_acceptance)


def short_hash(text: str) -> str:
    """The first 12 digits of a long hexadecimal hash; other text as it stands."""
    return text[:12] if re.fullmatch(r"[0-9a-f]{32,}", text) else text


def target_name(report: Report) -> str:
    """The target's name, with the start of its fingerprint where it is recorded."""
    name = str(report.target.get("name") or report.target.get("path") or "unnamed target")
    fingerprint = report.target.get("fingerprint")
    return f"{name} ({short_hash(str(fingerprint))})" if fingerprint else name


def advice(report: Report) -> list[tuple[str, str]]:
    """The adviser's line for each head and batch, at the first temperature: (of what, text)."""
    found = (report.adviser or {}).get("advice", [])
    heads = {one["head"] for one in found}
    engines = {one["engine"] for one in found}
    lines: dict[tuple[Any, ...], tuple[str, str]] = {}
    for one in found:
        key = (one["engine"], one["head"], one["batch"])
        parts = [f"T = {temperature(one['temperature'])}"]
        if len(engines) > 1:
            parts.insert(0, one["engine"])
        if len(heads) > 1:
            parts.insert(0, one["head"])
        if one["temperature"] > 0:
            parts.append(f"draft probs {'on' if one['draft_probs'] else 'off'}")
        lines.setdefault(key, (", ".join(parts), one["text"]))
    return list(lines.values())


def several_drafters(rows: Sequence[Row]) -> bool:
    """Whether rows of chains and of parallel heads stand side by side."""
    return len({row.drafter for row in rows if drafted(row)}) > 1


def advice_check(report: Report) -> str:
    """How well the adviser's predictions met the measurements; empty where there are none."""
    check = (report.adviser or {}).get("check")
    if not check:
        return ""
    return (
        f"{check['met']} of {check['timed']} predictions met the measured speed-up (within its "
        f"interval, or 5 %); off by {100 * check['mean_error']:.0f} % on average, "
        f"{100 * check['worst_error']:.0f} % at most"
    )


def certificates(report: Report) -> list[tuple[str, list[str]]]:
    """Each head's name with its certificate's verdict and lines."""
    return [
        (head, [f"{one['level']}, {'passed' if one['passed'] else 'FAILED'}", *one["lines"]])
        for head, one in report.environment.get("certificates", {}).items()
    ]


def warnings(report: Report) -> list[tuple[str, str]]:
    """Each distinct warning with the rows it belongs to: ("rows 1, 3", text)."""
    rows_of: dict[str, list[int]] = {}
    for i, row in enumerate(report.rows, 1):
        for text in dict.fromkeys(row.warnings):
            rows_of.setdefault(text, []).append(i)
    return [
        (f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows))}", text)
        for text, rows in rows_of.items()
    ]
