"""The AL of a running server beside that of a draftlab report, and why they may differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from draftlab.errors import UserError
from draftlab.evaluate.results import Report, Row
from draftlab.evaluate.server_bench import Acceptance, ServerBench, ServerPoint
from draftlab.servers.settings import BenchSettings
from draftlab.text.chat_template import served_otherwise

FULL_BITS = 15.0
"""Fewer bits a weight are a quantised model."""
WEAK_START = 0.85
"""A smaller share of the report's acceptance at the first position is more than rounding does."""
ROUNDING = 0.01
"""The share by which rounding changes the AL of the same answers at T = 0."""
_QUANTISED = re.compile(
    r"(?i)(?<![a-z0-9])((i?q[2-8](_[a-z0-9]+)*)|awq|gptq|nvfp4|mxfp4|fp8|int[48]|w[48]a\d+|"
    r"bnb|[48]bit|[48]-bit)(?![a-z0-9])"
)


def drafted_row(report: Report, temperature: float, k: int | None, suite: str | None) -> Row:
    """Return the row of a report that a server is compared with.

    Of the rows with drafts at the temperature it is one of the same suite, with the smallest K from
    the server's on, and with argmax drafts, which servers draft by default.

    Args:
        k: the server's drafts a step; None: unknown.
        suite: `Suite.sha256` of the measured prompts; None: unknown.

    Raises:
        UserError: the report has no row with drafts at the temperature.
    """
    rows = [row for row in report.rows if row.drafts and row.engine.startswith("draftlab")]
    at = [row for row in rows if row.temperature == temperature]
    if not at:
        found = ", ".join(sorted({f"T = {row.temperature:g}" for row in rows})) or "none"
        raise UserError(
            f"expected a row with drafts at T = {temperature:g}, found {found}",
            where="--head",
            do="name another --temperature, or evaluate the head at this one",
        )
    return min(
        at,
        key=lambda row: (
            row.suite_sha256 != suite,
            row.k < (k or 0),
            abs(row.k - (k or row.k)),
            row.draft_probs,
        ),
    )


def settings_of(report: Report, settings: BenchSettings) -> BenchSettings:
    """Return settings with the prompts and answers of a report's row, as far as it names them."""
    row = drafted_row(report, settings.temperature, None, None)
    changes = {"max_prompts": row.prompts, "seed": row.seed, "max_new_tokens": row.max_new_tokens}
    return settings.model_copy(update=changes | {"suite": row.suite.split(" (")[0]})


def compare(bench: ServerBench) -> Iterator[str]:
    """Yield lines with both ALs, and with the causes to check if they differ."""
    report = bench.report
    if report is None or any(point.interrupted for point in bench.points):
        return
    point = next((point for point in bench.points if point.acceptance), None)
    if point is None or (served := point.acceptance) is None:
        yield "report: nothing to compare, since the server shows no drafts"
        return
    settings = bench.settings
    row = drafted_row(report, settings.temperature, served.k or None, bench.suite.sha256)
    k = min(served.k, row.k) if served.k else row.k
    al, own = served.acceptance_length, served.acceptance_length_ci
    if k < served.k and served.acceptance_at:
        al, own = 1 + sum(served.acceptance_at[:k]), None
    expected, interval = 1 + sum(row.accepted_at[:k]) / row.drafts, row.acceptance_length_ci
    if interval is not None and row.acceptance_length:  # of fewer drafts, in proportion
        scale = (expected - 1) / max(row.acceptance_length - 1, 1e-9)
        interval = (1 + (interval[0] - 1) * scale, 1 + (interval[1] - 1) * scale)
    shown = "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    yield (
        f"report: AL {expected:.2f}{shown} of {row.head}, {row.engine}, {row.dtype}, K = {k}; "
        f"server {al:.2f}"
    )
    same = row.suite_sha256 == bench.suite.sha256
    if not same:
        yield "  the report is of other prompts: compare the same --suite and --max-prompts"
    if row.max_new_tokens != settings.max_new_tokens:
        yield f"  the report's answers have up to {row.max_new_tokens:,} tokens"
    # The same prompts vary together, so that the server's AL must lie in the report's interval.
    is_known = interval is not None and interval[0] < interval[1]
    ours = (al, al) if own is None or (same and is_known) else own
    theirs = interval or (expected, expected)
    differs = ours[1] < theirs[0] or theirs[1] < ours[0]
    names = ["interval" if low < high else "AL" for low, high in (ours, theirs)]
    pair = f"the server's {names[0]} and the report's {names[1]}, not prompt by prompt"
    answers = _same_answers(bench, point, row)
    if answers and served.k == row.k:  # the same drafts are then made after the same tokens
        differs = abs(al / expected - 1) > ROUNDING
        pair = f"of the same answers AL is the same within {ROUNDING:.0%}"
    yield f"  they {'differ' if differs else 'agree'} ({pair})" + "; causes to check:" * differs
    if served.k > row.k:
        trained = f" (trained for {row.k_trained})" * bool(row.k_trained)
        yield f"  - found: other K: the server drafts {served.k}, the report {row.k}{trained}"
    served_template = partial(bench.server.connection.template, bench.server.model)
    if not settings.raw and served_otherwise(bench.tokenizer, served_template):
        yield (
            "  - found: template: the server's chat template differs from the target's files (this "
            "measurement sends token ids; chats get the server's)"
        )
    if quantised := _quantised(bench.server.card):
        yield f"  - found: quantised target: {quantised}; the report's is {row.dtype}"
    if answers is not None and point.load is not None:
        each = f"{point.load.output_tokens / point.requests:.1f} tokens each, the report"
        each += f" {row.output_tokens / row.prompts:.1f}"
        same = "the same answers" if answers else "found: other answers than the report's"
        yield f"  - {same} ({each})"
    if differs or answers is False:
        yield from (
            f"  - check: {text}" for text in _to_check(point, served, al > expected, row, answers)
        )


def _to_check(
    point: ServerPoint, served: Acceptance, more: bool, row: Row, answers: bool | None
) -> Iterator[str]:
    """Yield the causes that the answers and the acceptance by position suggest.

    Args:
        more: whether the server accepts more than the report.
        answers: whether they are the report's; None: unknown.
    """
    if point.warnings:
        yield "the warnings above"
    if point.concurrency != 1:
        yield "--concurrency 1; a server may accept less of requests that run together"
    if answers is False:
        yield f"the target: other weights or an adapter, quantised, dtype (the report: {row.dtype})"
        yield "the tokens that end an answer, and the server's own limits and sampling defaults"
        return
    expected = row.accepted_at[0] / row.drafts
    first = served.acceptance_at[0] if served.acceptance_at else None  # as of SGLang
    if more:
        yield (
            "the suite and its template arguments"
            if answers is None
            else "other weights of the head"
        )
    else:
        weak = first is None or first < (1 - ROUNDING if answers else WEAK_START) * expected
        if weak:
            shown = f" (the first draft: {first:.2f}, report {expected:.2f})" if first else ""
            yield f"aux layers{shown}, in the head's config"
            yield "other weights of the head: its revision, a converted vocabulary"
        if answers or not weak:
            yield "RoPE and context of the head, and the K that it was trained for"
    if answers is None:
        yield f"the target: other weights, quantised, dtype (the report: {row.dtype}), KV cache"


def _same_answers(bench: ServerBench, point: ServerPoint, row: Row) -> bool | None:
    """Return whether the server's answers have as many tokens as the report's; None: unknown.

    At T = 0 they depend on the target alone, and in 16 bits on rounding, too. A server may count no
    token that ends an answer.
    """
    settings = bench.settings
    limits = settings.temperature, settings.max_new_tokens, bench.suite.sha256
    alike = limits == (0.0, row.max_new_tokens, row.suite_sha256)
    if not alike or point.load is None or point.failures or len(bench.prompts) != row.prompts:
        return None
    fewer = row.output_tokens * point.requests / row.prompts - point.load.output_tokens
    if fewer == 0:
        return True
    is_rounding = row.dtype != "float32" or 0 < fewer <= point.requests
    return None if is_rounding else False


def _quantised(card: dict[str, Any]) -> str:
    """Return what shows that the served model is quantised; "": nothing does."""
    meta = card.get("meta")  # of llama.cpp
    if isinstance(meta, dict):
        size, parameters = meta.get("size"), meta.get("n_params")
        if type(size) is int and type(parameters) is int and 0 < 8 * size < FULL_BITS * parameters:
            return f"{8 * size / parameters:.1f} bits a weight"
    names = [card["id"], card.get("root")]
    found = next(filter(None, (_QUANTISED.search(n) for n in names if isinstance(n, str))), None)
    return f"its name has {json.dumps(found[0])}" if found else ""
