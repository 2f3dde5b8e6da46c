"""The AL of a running server beside that of a draftlab report, and why they may differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.evaluate.results import Report, Row
from draftlab.evaluate.server_bench import Acceptance, ServerBench, ServerPoint
from draftlab.files import read_json
from draftlab.servers.connection import is_here
from draftlab.servers.settings import BenchSettings
from draftlab.target_model.fingerprint import fingerprint
from draftlab.text.chat_template import served_otherwise

FULL_BITS = 15.0
"""Fewer bits a weight are a quantised model."""
AS_MUCH = 0.9
"""A growth of failures above this share of another is as much as that."""
_PARTS = {
    "layers": "aux layers, in the head's config",
    "weights": "other weights of the head: its revision, a converted vocabulary",
    "positions": "RoPE and context of the head, and the K that it was trained for",
}
ROUNDING, ROUNDING_16 = 0.01, 0.03
"""The share by which rounding changes the AL of the same answers at T = 0, and the most of AL that
a server in 16 bits may lose of a report's in float32."""
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
    card = bench.server.card
    other = _other_target(card, report, is_here(bench.server.url))
    if quantised := _quantised(card):
        yield f"  - found: quantised target: {quantised}; the report's is {row.dtype}"
    if other:
        yield f"  - found: another target: {other}"
    if bench.server.cache_dtype not in ("", "auto", row.dtype):
        yield f"  - found: a KV cache of {bench.server.cache_dtype}; the report's is {row.dtype}"
    if answers is not None and point.load is not None:
        each = f"{point.load.output_tokens / point.requests:.1f} tokens each, the report"
        each += f" {row.output_tokens / row.prompts:.1f}"
        same = "the same answers" if answers else "found: other answers than the report's"
        yield f"  - {same} ({each})"
    if differs or answers is False:
        yield from _to_check(point, served, 1 - al / expected, row, answers, other)


def _to_check(
    point: ServerPoint,
    served: Acceptance,
    loss: float,
    row: Row,
    answers: bool | None,
    other: str | None,
) -> Iterator[str]:
    """Yield the causes that the answers and the acceptance by position suggest.

    Args:
        loss: the share of the report's AL that the server lacks; negative: it has more.
        answers: whether they are the report's; None: unknown.
        other: of `_other_target`.
    """
    if point.warnings:
        yield "  - check: the warnings above"
    if point.concurrency != 1:
        yield "  - check: --concurrency 1; a server may accept less of requests that run together"
    target = f"the target: other weights or an adapter, quantised, dtype (the report: {row.dtype})"
    if other == "":
        target = f"the server's options for dtype (the report: {row.dtype}), quantisation, KV cache"
    if answers is False:
        if not other:
            yield f"  - check: {target}"
        yield "  - check: the tokens that end an answer, and the server's limits"
        return
    if loss < 0:
        cause = "suite and its template arguments" if answers is None else "head, of other weights"
        yield f"  - check: the {cause}"
    elif not other:
        shares = [n / row.drafts for n in row.accepted_at] if row.drafter == "chain" else []
        likely, why = _weak_part(served.acceptance_at, shares)
        if row.dtype == "float32" and loss < ROUNDING_16:
            yield "  - check: dtype first: the report's is float32, and 16 bits can lose this much"
            why = ""
        if why:
            known = answers or other == ""
            yield f"  - likely{', if the target is right' * (not known)}: {_PARTS[likely]}: {why}"
        rest = [_PARTS[part] for part in _PARTS if not (why and part == likely)]
        yield f"  - {'else' if why else 'check'}: {'; '.join(rest)}"
    if answers is None and not other:
        yield f"  - check: {target}"


def _weak_part(served: Sequence[float], expected: Sequence[float]) -> tuple[str, str]:
    """Return the part of a head that fails on a server, and what shows it; "": nothing does.

    A chain reads the target's aux layers for the first draft of a step, and its own states for
    later ones. So a fault in the layers weighs on the first, one in the head on each, and one in
    its positions the more, the further a draft is from the last verified token.

    Args:
        served, expected: share of steps that accept each position, on the server and in the report.
    """
    k = min(len(served), len(expected))
    if k < 2:
        return "", ""
    misses = [
        [1 - after / max(before, 1e-9) for before, after in zip([1.0, *at], at[:k], strict=False)]
        for at in (served, expected)
    ]
    growth = [ours / max(theirs, 1e-3) for ours, theirs in zip(*misses, strict=True)]
    later = [(at[0] - at[k - 1]) / max(sum(at[: k - 1]), 1e-9) for at in (served, expected)]
    of_later = later[0] / max(later[1], 1e-3)
    likely = "weights"
    if growth[0] > AS_MUCH * of_later:
        likely = "layers"
    elif growth[0] < 1.5 and growth[-1] > growth[1] / AS_MUCH:
        likely = "positions"
    shown = f"the first draft of a step fails {growth[0]:.2f} times as often as in the report"
    return likely, f"{shown}, later ones {of_later:.2f} times"


def _same_answers(bench: ServerBench, point: ServerPoint, row: Row) -> bool | None:
    """Return whether the server's answers have as many tokens as the report's; None: unknown.

    At T = 0 they depend on the target alone, and in 16 bits on rounding, too. A server may count no
    token that ends an answer. Answers that are all cut have as many of any target.
    """
    settings = bench.settings
    limits = settings.temperature, settings.max_new_tokens, bench.suite.sha256
    alike = limits == (0.0, row.max_new_tokens, row.suite_sha256)
    if not alike or point.load is None or point.failures or len(bench.prompts) != row.prompts:
        return None
    fewer = row.output_tokens * point.requests / row.prompts - point.load.output_tokens
    if fewer == 0:
        return True if row.output_tokens < row.prompts * row.max_new_tokens else None
    is_rounding = row.dtype != "float32" or 0 < fewer <= point.requests
    return None if is_rounding else False


def _other_target(card: dict[str, Any], report: Report, is_here: bool) -> str | None:
    """Return how the served target differs from the report's; "": it does not; None: unknown.

    A server on this machine names the folder that it has loaded, which is compared.
    """
    root, parent = card.get("root"), card.get("parent")
    if isinstance(parent, str) and parent:
        return f"an adapter of {parent}"
    folder = Path(root) if isinstance(root, str) else Path()
    try:
        if not is_here or not folder.is_absolute() or not (folder / "config.json").is_file():
            return None
        if fingerprint(folder) == report.target.get("fingerprint"):
            return ""
        kind = "quantised, " * ("quantization_config" in read_json(folder / "config.json"))
    except (OSError, ValueError, UserError):
        return None
    return f"{folder} has {kind}other weights, or another config, than the report's target"


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
