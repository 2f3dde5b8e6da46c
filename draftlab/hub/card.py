"""The model card (README.md): the head, its target, the measurements, serving and training.

The text is `card.md.jinja`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from draftlab.evaluate.certificate.result import Sampled
from draftlab.evaluate.results import Report, Row
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.hub.upload import TAG
from draftlab.report import formatting

TEMPLATE = Path(__file__).with_name("card.md.jinja")


def model_card(
    repo: str,
    head: HeadConfig,
    report: Report,
    rows: list[Row],
    *,
    base_model: str | None = None,
    licence: str | None = None,
    launch: str,
    **content: Any,
) -> str:
    """Return README.md: YAML front matter as the Hub reads it, then Markdown.

    Args:
        repo: the repository's id, "org/name".
        rows: the report's rows of this head and of plain decoding.
        base_model: the target's Hub id, if it has one.
        licence: the licence's id on the Hub, such as "apache-2.0".
        launch: the text of launch.md, with the repository as the head's path.
        content: `layout`, the title of the export's layout; `recipe`, its text, and
            `removed`, the names of settings that were removed from it; `data`, (name,
            value) pairs about the training data; `plots`, the file names of the plots.
    """
    several = {key: len({getattr(row, key) for row in rows}) > 1 for key in ("suite", "engine")}
    results = [result for row in rows for result in _eval_results(row, several["engine"])]
    name = next(row.head for row in rows if row.head)
    certificate = report.environment.get("certificates", {}).get(name)
    metadata = ModelCardData(
        base_model=base_model,
        license=licence,
        library_name=TAG,
        pipeline_tag="text-generation",
        tags=[TAG, "speculative-decoding", "draft-model", head.family],
        # The Hub requires a model name for results.
        model_name=repo.split("/")[-1] if results else None,
        eval_results=results or None,
    )
    card = ModelCard.from_template(
        metadata,
        str(TEMPLATE),
        **content,
        repo=repo,
        head=head,
        family=get_family(head.family),
        report=report,
        base_model=base_model,
        licence=licence,
        launch=launch.split("\n", 1)[1] if launch.startswith("# ") else launch,  # without its title
        cells=[_result_cells(row, several) for row in rows],
        conditions=_conditions(rows, report.environment),
        equality=_equality(rows, certificate),
        certificate=certificate["lines"] if certificate else [],
    )
    return str(card).rstrip() + "\n"


SHOWN = {
    "L1": "rejection sampling and the output of the engine passed tests of their distribution (L1)",
    "LS": "rejection sampling passed a test of its distribution; the engine around it was not "
    "tested (LS)",
}
"""What a passed test at T > 0 shows, by its level; other levels show no equality."""


def _equality(rows: list[Row], certificate: dict[str, Any] | None) -> list[str]:
    """Return what the evaluation shows about the output, as lines of Markdown.

    These are the tokens that its rows at T = 0 compared, and each test of the head's certificate.
    """
    lines = [
        f"T = 0, K = {row.k}, {row.dtype}, {row.engine}: tokens of {row.prompts_equal:.1%} of "
        f"{row.prompts} prompts equal those of decoding without drafts"
        for row in rows
        if formatting.has_drafter(row) and row.prompts_equal is not None
    ]
    if certificate is None:
        lines.append("T > 0: not tested (`draftlab eval --certify` tests it)")
    elif not certificate["passed"]:
        lines.append(f"the certificate **failed**: {'; '.join(certificate['faults'])}")
    else:
        lines += [line for line in certificate["lines"] if line.startswith("T = 0,")]
        for arm in certificate.get("arms", ()):
            shown = SHOWN.get(arm["level"], f"no equality shown ({arm['level']})")
            lines.append(f"{Sampled.of(arm).name}: {shown}")
    return lines


def _eval_results(row: Row, several_engines: bool = False) -> Iterator[EvalResult]:
    if not formatting.has_drafter(row):
        return
    condition = f"K = {row.k}, T = {formatting.temperature(row.temperature)}"
    condition += f", {formatting.drafting(row)} drafts" + f", {row.engine}" * several_engines
    for kind, name, value in (
        ("acceptance_length", "Acceptance length", row.acceptance_length),
        ("speedup", "Speed-up over plain decoding", row.speedup),
    ):
        if value is not None:
            yield EvalResult(
                task_type="text-generation",
                dataset_type=row.suite.replace(":", "-"),
                dataset_name=row.suite,
                metric_type=kind,
                metric_name=f"{name} ({condition})",
                metric_value=round(value, 3),
            )


def _result_cells(row: Row, several: dict[str, bool]) -> dict[str, str]:
    """Return the cells of a row of the results table by column title.

    Args:
        several: whether the rows have several suites, and several engines.
    """
    names = {"engine": row.engine, "suite": formatting.suite_name(row)}
    drafted = formatting.has_drafter(row)
    rates = (row.counters.acceptance_at if drafted else None) or ()
    return {key: name for key, name in names.items() if several[key]} | {
        "T": formatting.temperature(row.temperature),
        "K": str(row.k) if drafted else "no drafting",
        "drafting": formatting.drafting(row),
        "AL [95 %]": formatting.with_interval(row.acceptance_length, row.acceptance_length_ci),
        "accepted at 1 …": " ".join(f"{rate:.2f}" for rate in rates) or formatting.NONE,
        "drafts": formatting.count(row.drafts),
        "draft tokens": formatting.count(row.draft_tokens),
        "accepted": formatting.count(row.accepted),
        "output tokens": formatting.count(row.output_tokens),
        "TPOT ms [95 %]": formatting.milliseconds(row.tpot_ms, row.tpot_ms_ci),
        "plain TPOT ms": formatting.milliseconds(row.baseline_tpot_ms),
        "speed-up [95 %]": formatting.speedup(row.speedup, row.speedup_ci),
        "repeated 4-grams": formatting.number(row.repetition_rate, 2),
    }


def _conditions(rows: list[Row], environment: dict[str, Any]) -> list[tuple[str, str]]:
    row = rows[0]
    conditions = [
        *(
            ("engine", f"{one.engine} {one.engine_version}")
            for one in {row.engine: row for row in rows}.values()
        ),
        ("device, dtype", f"{row.device}, {row.dtype}"),
        *(
            ("prompts", f"{one.prompts} of {one.suite} (sha256 `{one.suite_sha256[:12]}`)")
            for one in {row.suite: row for row in rows}.values()
        ),
        ("chat template", f"`{formatting.short_hash(row.template)}`"),
        ("new tokens at most", str(row.max_new_tokens)),
        ("batch of the counted pass", str(row.batch)),
        ("seed", str(row.seed)),
    ]
    if timing := environment.get("timing"):
        text = ", ".join(f"{key} {value}" for key, value in timing.items() if value is not None)
        conditions.append(("times", text))
    versions = {k: v for k, v in environment.items() if isinstance(v, str) and k != "device"}
    conditions.append(("versions", ", ".join(f"{k} {v}" for k, v in versions.items())))
    warnings = dict.fromkeys(text for row in rows for text in row.warnings)
    return conditions + [("warning", text) for text in warnings]
