"""The words and number formats of a report, shared by the console, the HTML page and the plots.

Nothing is computed here beyond the ratios `results.Row.counters` defines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftlab.results import Report, Row

NONE = "–"  # not measured, or without meaning for the row
DEFAULT_MARK = "*"
DEFAULT_NOTE = "what vLLM does by default: draft probabilities off (at T = 0 both are the same)"

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


def time_digits(milliseconds: float | None) -> int:
    """Digits after the point that keep three significant ones."""
    return 2 if milliseconds is None or milliseconds < 10 else 1 if milliseconds < 100 else 0


def milliseconds(value: float | None, interval: tuple[float, float] | None = None) -> str:
    """A time with its interval, in milliseconds."""
    return with_interval(value, interval, time_digits(value))


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


def _off(value: Any) -> str:
    return "off" if value is None else str(value)


def _of_head(get: Callable[[Row], str]) -> Callable[[Row], str | None]:
    """A condition that rows without a drafter do not have."""
    return lambda row: get(row) if drafted(row) else None


_CONDITIONS: dict[str, Callable[[Row], str | None]] = {
    "head": _of_head(lambda row: row.head or "unnamed"),
    "draft temperature": _of_head(
        lambda row: (
            "as the target's" if row.draft_temperature is None else f"{row.draft_temperature:g}"
        )
    ),
    "engine": lambda row: f"{row.engine} {row.engine_version}".strip(),
    "device": lambda row: row.device,
    "dtype": lambda row: row.dtype,
    "batch": lambda row: str(row.batch),
    "suite": lambda row: f"{row.suite} (sha256 {row.suite_sha256[:12]})",
    "template": lambda row: short_hash(row.template),
    "max tokens": lambda row: count(row.max_new_tokens),
    "top-k": lambda row: _off(row.top_k),
    "top-p": lambda row: _off(row.top_p),
    "seed": lambda row: str(row.seed),
}


@dataclass(frozen=True)
class Conditions:
    """Conditions of a report's rows.

    Attributes:
        shared: name and value of those alike in every row that has them.
        varying: name of the others, with the value of each row.
    """

    shared: dict[str, str]
    varying: dict[str, list[str]]

    def lines(self, width: int) -> list[str]:
        """The shared ones in lines of at most `width` characters, broken between conditions."""
        lines: list[str] = []
        for item in (f"{name} {value}" for name, value in self.shared.items()):
            if lines and len(lines[-1]) + len(item) + 3 <= width:
                lines[-1] += f" · {item}"
            else:
                lines.append(item)
        return lines


def conditions(rows: Sequence[Row]) -> Conditions:
    """Splits the rows' conditions into shared and varying ones."""
    shared, varying = {}, {}
    for name, get in _CONDITIONS.items():
        values = [get(row) for row in rows]
        distinct = {value for value in values if value is not None}
        if len(distinct) > 1:
            varying[name] = [NONE if value is None else value for value in values]
        elif distinct:
            shared[name] = distinct.pop()
    trained = {row.head: row.k_trained for row in rows if row.k_trained is not None}
    if trained:
        several = len(set(trained.values())) > 1
        shared["trained K"] = ", ".join(
            dict.fromkeys(f"{k} ({head})" if several else f"{k}" for head, k in trained.items())
        )
    return Conditions(shared, varying)


def report_conditions(report: Report) -> Conditions:
    """The conditions of its rows, and of the timing pass where `environment.timing` has them.

    A timing pass may differ from the counted one: batch 1, fewer prompts, stop tokens ignored.
    """
    found = conditions(report.rows)
    timing = report.environment.get("timing")
    if not isinstance(timing, Mapping):
        return found
    text = ", ".join(f"{name} {value}" for name, value in timing.items() if value is not None)
    return replace(found, shared=found.shared | {"timed at": text})


def traits(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """What tells each row from the others, temperature and draft probabilities aside."""
    varying = conditions(rows).varying
    several_k = len({row.k for row in rows if drafted(row)}) > 1
    both = several_drafters(rows)
    found = []
    for i, row in enumerate(rows):
        parts = [row.drafter] if both and drafted(row) else []
        parts += [f"K = {row.k}"] if several_k and drafted(row) else []
        parts += [
            values[i] if name == "head" else f"{name} {values[i]}"
            for name, values in varying.items()
            if values[i] != NONE
        ]
        found.append(tuple(parts))
    return found


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


def labels(rows: Sequence[Row]) -> list[str]:
    """A short name of each row: temperature, draft probabilities, and its traits; no two alike."""
    names = []
    for row, parts in zip(rows, traits(rows), strict=True):
        probs = "" if draft_probs(row) == NONE else f"draft probs {draft_probs(row)}"
        state = probs if drafted(row) else "no drafting"
        names.append(
            ", ".join(filter(None, [f"T = {temperature(row.temperature)}", state, *parts]))
        )
    return [name if names.count(name) == 1 else f"{name} (#{i})" for i, name in enumerate(names, 1)]


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
