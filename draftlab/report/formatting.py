"""Texts and number formats of a report, shared by the console, the HTML page and the plots.

This module computes nothing but the ratios that `results.Row.counters` defines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from draftlab.evaluate.results import Report, Row
from draftlab.report.section import NONE

HEAD_NOTES = {
    "reference": "the head that ships in draftlab for its embedded model, trained on a GPU on 82 M "
    "tokens; it shows what more training gives"
}
"""Notes on heads, by name."""

# name: (one line, what the HTML page adds)
LEGEND: dict[str, tuple[str, str]] = {
    "AL": (
        "acceptance length = 1 + accepted / drafts; in brackets a 95 % interval over prompts",
        "The number of tokens that one verify step of the target emits: the accepted draft tokens "
        "and one token of the target. The interval is a bootstrap over prompts. The "
        "predicted AL of a training is another figure: it is of stored answers to held-out prompts "
        "and of as many drafts as the head was trained for, without the last steps of an answer.",
    ),
    "expected": (
        "acceptance from probabilities instead of draws; should be close to the measured one",
        "A self-check: the same counts with each draw replaced by its probability. Accepted − "
        "expected is a sum of terms with mean zero for any prompts; z is that sum over its "
        "standard deviation, for each draft position. All rows of a report share the level 0.001. "
        "A failure means that the sampler or the verifier is faulty. At T = 0 both counts are made "
        "of the same comparisons, so their equality only checks the bookkeeping.",
    ),
    "acceptance": (
        "accepted_at / drafts: share of drafts accepted up to each position, unconditional",
        "Conditional acceptance divides by the drafts accepted up to the position before instead. "
        "The unconditional values sum to AL − 1.",
    ),
    "drafting": (
        "argmax (vLLM's default): drafts are the head's most likely tokens; sampled: drawn from it",
        "The option --draft-probs off drafts the argmax, which is accepted with the target's "
        "probability of it; --draft-probs on samples drafts, which are accepted with probability "
        "min(1, p / q). Rejection sampling allows for both, and neither is always better. At T = 0 "
        "all drafts are the argmax.",
    ),
    "TPOT": (
        "milliseconds per output token after the first",
        "The time of a step over the tokens that it emits. The time is measured on the timed "
        "prompts, Σ (latency − time to first token) / Σ steps, and counts as no shorter than that "
        "of a step without drafts; the tokens are counted on all prompts of the suite, "
        "Σ (output tokens − 1) / Σ steps.",
    ),
    "speed-up": (
        "TPOT without drafting / TPOT, of the whole suite; drafting pays above 1",
        "A step with drafts does all that one without does, so the speed-up cannot exceed the "
        "tokens of a step. The interval resamples the counted and the timed prompts, these with "
        "and without drafting together. Fewer than six have none.",
    ),
    "TTFT": ("milliseconds to the first token", "Drafting begins after it."),
    "repetition": (
        "share of 4-grams that repeat an earlier one of the answer; loops raise AL",
        "A loop is easy to draft: read an AL with a high repetition as an upper bound.",
    ),
    "accepted": (
        "counted before a stop token or the token limit cuts the answer; summed over drafts",
        "Drafts are verify steps with at least one draft token; draft tokens are summed over "
        "them. Output tokens = prompts + drafts + accepted + undrafted steps − truncated tokens.",
    ),
}


def number(value: float | None, digits: int, sign: str = "") -> str:
    """Return a number with fixed digits, or `NONE` for None and NaN; `sign` "+" shows a plus."""
    return NONE if value is None or math.isnan(value) else f"{value:{sign}.{digits}f}"


def with_interval(
    value: float | None,
    interval: tuple[float, float] | None = None,
    digits: int = 2,
    sign: str = "",
) -> str:
    """Return "2.31 [2.20, 2.43]", or the number alone without an interval."""
    text = number(value, digits, sign)
    if text == NONE or interval is None:
        return text
    return f"{text} [{', '.join(number(end, digits, sign) for end in interval)}]"


def speedup(value: float | None, interval: tuple[float, float] | None = None) -> str:
    """Return a factor with its interval: "1.62× [1.50, 1.71]"."""
    return re.sub(r"^[\d.]+", r"\g<0>×", with_interval(value, interval))


def has_drafter(row: Row) -> bool:
    """Return whether the row has a drafter."""
    return row.drafter != "none"


def drafting(row: Row) -> str:
    """Return "argmax" or "sampled", how drafts are chosen; an empty string without a drafter."""
    if not has_drafter(row):
        return ""
    return "sampled" if row.draft_probs and row.temperature else "argmax"


def suite_name(row: Row) -> str:
    """Return the name of the row's suite, of a file without its folders and ending."""
    return re.sub(r"\.(jsonl?|parquet)$", "", row.suite.rpartition("/")[2])


def short_hash(text: str) -> str:
    """Return the first 12 characters of long hexadecimal hashes, and other text unchanged."""
    return text[:12] if re.fullmatch(r"[0-9a-f-]{32,}", text) else text


def target_name(report: Report) -> str:
    """Return the target's name, with the start of its fingerprint if it is recorded."""
    name = str(report.target.get("name") or report.target.get("path") or "unnamed target")
    if adapter := report.target.get("adapter"):
        name += f" with adapter {adapter}"
    fingerprint = report.target.get("fingerprint")
    return f"{name} ({short_hash(str(fingerprint))})" if fingerprint else name


def conditions_text(temperature: float, draft_probs: bool, batch: int | None, *names: str) -> str:
    """Return "head, T = 0.8, sampled drafts, batch 1"; `names` come first."""
    parts = [*names, f"T = {temperature:g}"]
    if temperature > 0:
        parts.append(f"{'sampled' if draft_probs else 'argmax'} drafts")
    if batch is not None:
        parts.append(f"batch {batch}")
    return ", ".join(parts)


def belongs_to(one: Mapping[str, Any], row: Row) -> bool:
    """Return whether an advice is about the row's conditions, at any K and batch."""
    keys = ("suite", "engine", "head", "temperature", "draft_probs")
    return all(one[key] == getattr(row, key) for key in keys)
