"""The folded sections of a report: tables of every figure, definitions, target and environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from draftlab.evaluate.results import CategoryResult, Report, Row, headlines
from draftlab.formatting import p_text
from draftlab.report import formatting as fmt
from draftlab.report.conditions import row_labels
from draftlab.report.section import NONE, Column, Line, Section, Table, facts, filled, grouped

BY_HEAD = ("certificates", "heads")
"""Parts of the environment that have a value for each head."""


def details(report: Report) -> Iterator[Section]:
    """Yield the folded sections of a report that has rows."""
    rows, adviser = report.rows, report.adviser or {}
    if any(row.drafts for row in rows):
        yield _positions(rows)
    best = [id(row) for _, row in headlines(rows)]
    if others := [row for row in rows if row.categories and id(row) not in best]:
        yield categories("By category, other rows", rows, others, kind="folded")
    if adviser.get("advice"):
        yield _advice(rows, adviser)
    labels = row_labels(rows)
    if any(row.tpot_ms is not None for row in rows):
        timed = [(label, row.timings or [row]) for label, row in zip(labels, rows, strict=True)]
        yield Section("Times", [TIMES_TEXT], grouped("row", TIMES, timed, _style), kind="folded")
    counted = [(label, [row]) for label, row in zip(labels, rows, strict=True)]
    table = filled(grouped("row", COUNTERS, counted, _style))
    yield Section("Raw counters and answers", [COUNTERS_TEXT], table, kind="folded")
    terms = ((name, f"{short}. {more}") for name, (short, more) in fmt.LEGEND.items())
    yield Section("Definitions", table=facts(terms), kind="folded")
    environment = {k: v for k, v in report.environment.items() if k not in (*BY_HEAD, "timing")}
    for title, values in (("Target", report.target), ("Environment", environment)):
        if values:
            yield Section(title, table=facts(flatten(values)), kind="folded")


def flatten(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Return nested mappings as (dotted name, text) in their order; a list is one text."""
    if isinstance(value, Mapping):
        return [
            pair
            for key, item in value.items()
            for pair in flatten(item, f"{name}.{key}" if name else str(key))
        ]
    if isinstance(value, list | tuple):
        return [(name, ", ".join(map(str, value)))]
    return [(name, NONE if value is None else str(value))]


def _style(one: Any) -> str:
    """Return the style of a row, or of a row's timing without drafts."""
    return "" if getattr(one, "k", one.baseline_tpot_ms) else "plain"


def _drafted(name: str) -> Callable[[Row], str]:
    return lambda row: f"{getattr(row, name):,}" if fmt.has_drafter(row) else NONE


def _lossless(row: Row) -> str:
    if row.lossless is None:
        return NONE
    p_value = "" if row.lossless.p_value is None else f", {p_text(row.lossless.p_value)}"
    return f"{row.lossless.level}: {row.lossless.test}{p_value}, n = {row.lossless.n:,}"


TIMES: dict[str, Callable[[Any], str]] = {
    "at once": lambda t: str(t.batch) if hasattr(t, "timed_speedup") else NONE,
    "TPOT": lambda t: fmt.with_interval(t.tpot_ms, t.tpot_ms_ci),
    "TPOT without drafting": lambda t: fmt.with_interval(t.baseline_tpot_ms),
    "speed-up": lambda t: fmt.speedup(t.speedup, t.speedup_ci),
    "TTFT": lambda t: fmt.with_interval(t.ttft_ms),
    "step": lambda t: fmt.with_interval(t.step_ms),
    "tokens / s": lambda t: fmt.number(t.throughput_tok_s, 1),
}
TIMES_TEXT = (
    "Milliseconds by the number of prompts decoded at once (batch). Tokens per second are over the "
    "wall time of the timed prompts, prefill included. A dash means not measured."
)
COUNTERS: dict[str, Callable[[Row], str]] = {
    "prompts": lambda row: f"{row.prompts:,}",
    "output tokens": lambda row: f"{row.output_tokens:,}",
    "drafts": _drafted("drafts"),
    "draft tokens": _drafted("draft_tokens"),
    "accepted": _drafted("accepted"),
    "undrafted steps": lambda row: f"{row.undrafted_steps:,}",
    "truncated tokens": lambda row: f"{row.truncated_tokens:,}",
    "prompts equal": lambda row: fmt.number(row.prompts_equal, 3),
    "equal to draftlab": lambda row: fmt.number(row.prompts_equal_draftlab, 3),
    "losslessness": _lossless,
}
COUNTERS_TEXT = (
    "Prompts equal: share of prompts whose answer equals plain decoding token by token. Equal to "
    "draftlab, beside other engines: those whose answer equals that of draftlab's engine."
)
CATEGORY: dict[str, Callable[[CategoryResult], str]] = {
    "category": lambda one: one.category,
    "prompts": lambda one: f"{one.prompts:,}",
    "AL": lambda one: fmt.with_interval(one.acceptance_length, one.acceptance_length_ci),
    "speed-up": lambda one: fmt.speedup(one.speedup, one.speedup_ci),
}


def categories(
    title: str, rows: Sequence[Row], shown: Sequence[Row], kind: Any, *, every_k: bool = False
) -> Section:
    """Return the results of some of the rows by the categories of their suite.

    Args:
        every_k: whether each other K that was measured has a column.
    """
    labels = dict(zip(map(id, rows), row_labels(rows), strict=True))
    groups = []
    for row in shown:
        label = labels[id(row)]
        label = label if "K = " in label else f"{label}, K = {row.k}"
        groups.append((label, [(row, one) for one in row.categories]))
    timed = any(one.speedup for row in shown for one in row.categories)
    text = [
        "The speed-up is made of the category's own tokens a step and the step times of all timed "
        "prompts."
    ] * timed
    columns: dict[str, Callable[[Any], str]] = {
        name: lambda pair, text=text: text(pair[1]) for name, text in CATEGORY.items()
    }
    ks = {
        other.k
        for row in shown
        for other in rows
        if every_k and other.k != row.k and other.categories and _differ_in_k(row, other)
    }
    of_k = {f"K = {k}": partial(_of_k, rows, timed, k) for k in sorted(ks)}
    if of_k:
        text.append(f"Columns K = …: the {'speed-up' if timed else 'AL'} with so many drafts.")
    leaves = {"prompts": 2, **dict.fromkeys(of_k, 3)}
    table = filled(grouped("row", columns | of_k, groups))
    named = [column._replace(leaves=leaves.get(column.name, 0)) for column in table.columns]
    return Section(title, text, Table(named, table.lines), kind=kind)


def _differ_in_k(row: Row, other: Row) -> bool:
    """Return whether two rows differ at most in K."""
    return fmt.belongs_to(vars(row), other) and other.verification == row.verification


def _of_k(rows: Sequence[Row], timed: bool, k: int, pair: tuple[Row, CategoryResult]) -> str:
    """Return the speed-up, or else the AL, of a row's category at another K."""
    row, own = pair
    for other in rows:
        for one in other.categories:
            if other.k == k and one.category == own.category and _differ_in_k(row, other):
                return fmt.speedup(one.speedup) if timed else fmt.number(one.acceptance_length, 2)
    return NONE


def _positions(rows: Sequence[Row]) -> Section:
    """Return the acceptance at each position with its counters and the self-check."""
    lines, most = [], max(row.k for row in rows if row.drafts)
    for row, label in zip(rows, row_labels(rows), strict=True):
        if not row.drafts:
            continue
        counters = row.counters
        own = {
            "unconditional": [
                f"{fmt.number(share, 3)}\n{accepted:,} / {row.drafts:,}"
                for share, accepted in zip(
                    counters.acceptance_at or (), row.accepted_at, strict=True
                )
            ],
            "conditional": [fmt.number(one, 3) for one in counters.conditional_acceptance_at],
        }
        if row.expected_acceptance:
            z = row.self_check.z if row.self_check else [None] * row.k
            own[f"expected{_self_check(row)}"] = [
                fmt.number(share, 3) + ("" if score is None else f"\nz = {score:.1f}")
                for share, score in zip(row.expected_acceptance, z, strict=True)
            ]
        for name, cells in own.items():
            first = label if name == "unconditional" else ""
            lines.append(Line([first, name, *cells, *[""] * (most - row.k)]))
    columns = [Column("row", True), Column("share", True)]
    columns += [Column(str(k + 1)) for k in range(most)]
    text = (
        "Unconditional: accepted_at / drafts, with these counters below it. Conditional: "
        "accepted at the position / accepted at the position before."
    )
    return Section("Acceptance by draft position", [text], Table(columns, lines), kind="folded")


def _self_check(row: Row) -> str:
    """Return a line with the result and the p-value; an empty text without a self-check."""
    if row.self_check is None:
        return ""
    verdict = "passed" if row.self_check.passed else "FAILED"
    if all(z is None for z in row.self_check.z):  # T = 0: the counts must be equal
        return f"\nbookkeeping {verdict}, accepted {'=' if row.self_check.passed else '≠'} expected"
    return f"\nself-check {verdict}, {p_text(row.self_check.p_value)}"


ADVICE: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "K": lambda p: f"{p['k']}{' (best)' * p['best']}",
    "AL": lambda p: fmt.number(p["acceptance_length"], 2),
    "step ms": lambda p: fmt.with_interval(p["step_ms"]),
    "TPOT ms": lambda p: fmt.with_interval(p["tpot_ms"]),
    "speed-up": lambda p: (
        "predicted " * (not p["measured"]) + fmt.speedup(p["speedup"], p["speedup_ci"])
    ),
    "on the timed prompts": lambda p: fmt.speedup(p["timed_speedup"]),
    "from the other K's": lambda p: fmt.speedup(p["left_out_speedup"]),
    "error": lambda p: NONE if p["error"] is None else f"{100 * p['error']:+.1f} %",
}


def _advice(rows: Sequence[Row], adviser: Mapping[str, Any]) -> Section:
    """Return the adviser's predictions of each K, and how well they agree with measurements."""
    several_suites, groups = len({row.suite for row in rows}) > 1, []
    for one in adviser["advice"]:
        names = [f"{one['head']} ({one['engine']})"] + [one["suite"]] * several_suites
        keys = one["temperature"], one["draft_probs"], one["batch"]
        none = dict.fromkeys(("speedup_ci", "left_out_speedup", "error"))
        plain = {"k": 0, "acceptance_length": 1.0, "speedup": 1.0, "timed_speedup": 1.0}
        times = {"step_ms": one["plain_ms"], "tpot_ms": one["plain_ms"], "measured": True}
        own = [none | plain | times, *one["predictions"]]
        own = [p | {"best": p["k"] == one["best_k"]} for p in own]
        groups.append((fmt.conditions_text(*keys, *names), own))
    text = [
        "Of the whole suite: speed-up(K) = TPOT without drafting × tokens a step(K) / step(K). It "
        "is measured where the suite was decoded and timed with K drafts, and otherwise "
        "predicted. On the timed prompts: their own speed-up. From the other K's: what the timed "
        "prompts' step times and acceptance at all other K's predict for them; the error compares "
        "it with their own.",
        f"{adviser['check']['text']}.",
    ]
    table = grouped("conditions", ADVICE, groups, lambda p: "best" if p["best"] else "")
    return Section("Predictions of every K", text, table, kind="folded")


def pair_name(rows: Sequence[Row], pair: Mapping[str, Any]) -> str:
    """Return "head against peagle, T = 0, batch 1", with the suite if there are several."""
    names = [f"{pair['chain']} against {pair['parallel']}"]
    if len({row.suite for row in rows}) > 1:
        names.append(pair["suite"].rpartition("/")[2])
    return fmt.conditions_text(pair["temperature"], pair["draft_probs"], pair["batch"], *names)
