"""The model card (README.md): the head, its target, the measurements, serving and training.

The text is `card.md.jinja`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from draftlab.evaluate.results import Report, Row
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.hub.upload import TAG
from draftlab.report import formatting
from draftlab.report.section import Section, Table

TEMPLATE = Path(__file__).with_name("card.md.jinja")


def model_card(
    repo: str,
    head: HeadConfig,
    report: Report,
    shown: Sequence[Section],
    *,
    base_model: str | None = None,
    licence: str | None = None,
    launch: str,
    **content: Any,
) -> str:
    """Return README.md: YAML front matter as the Hub reads it, then Markdown.

    Args:
        repo: the repository's id, "org/name".
        report: of this head and of plain decoding.
        shown: the report's sections.
        base_model: the target's Hub id, if it has one.
        licence: the licence's id on the Hub, such as "apache-2.0".
        launch: the text of launch.md, with the repository as the head's path.
        content: `layout`, the title of the export's layout; `recipe`, its text, and
            `removed`, the names of settings that were removed from it; `data`, (name,
            value) pairs about the training data.
    """
    several = len({row.engine for row in report.rows}) > 1
    results = [result for row in report.rows for result in _eval_results(row, several)]
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
        measured="\n\n".join(block for section in shown for block in _blocks(section)),
    )
    return str(card).rstrip() + "\n"


def _eval_results(row: Row, several_engines: bool = False) -> Iterator[EvalResult]:
    if not formatting.has_drafter(row):
        return
    condition = f"K = {row.k}, T = {row.temperature:g}"
    condition += f", {formatting.drafting(row)} drafts" + f", {row.engine}" * several_engines
    for kind, name, value, interval in (
        ("acceptance_length", "Acceptance length", row.acceptance_length, row.acceptance_length_ci),
        ("speedup", "Speed-up over plain decoding", row.speedup, row.speedup_ci),
    ):
        if value is not None and (kind != "speedup" or interval):  # else no verdict has it
            within = "; 95 %: {:.3f} to {:.3f}".format(*interval) if interval else ""
            yield EvalResult(
                task_type="text-generation",
                dataset_type=row.suite.replace(":", "-"),
                dataset_name=row.suite,
                metric_type=kind,
                metric_name=f"{name} ({condition}{within})",
                metric_value=round(value, 3),
            )


def _blocks(section: Section) -> Iterator[str]:
    """Yield a section as blocks of Markdown; figures are PNG files beside it."""
    title = _text(section.title)
    if section.figure:
        yield f"![{title}]({section.figure.name}.png)"
    elif section.kind == "folded":
        yield f"<details><summary>{title}</summary>"
    elif section.kind != "headline":  # the card has its own
        yield f"### {title}"
    bullet = "- " if len(section.text) > 1 else ""
    if section.text:
        yield ("\n" if bullet else "\n\n").join(bullet + _text(text) for text in section.text)
    if section.table:
        yield "\n".join(_lines(section.table))
        meanings = [
            f"{_text(one.name).replace('<br>', ' ')}: {_text(one.meaning)}"
            for one in section.table.columns
            if one.meaning
        ]
        if meanings:
            yield ". ".join(meanings) + "."
    if section.kind == "folded":
        yield "</details>"


def _lines(table: Table) -> Iterator[str]:
    names = [one.name for one in table.columns] or ["", ""]
    yield _row(names)
    yield "|" + "---|" * len(names)
    for line in table.lines:
        yield _row(
            [f"**{text}**" if line.style == "best" and text else text for text in line.cells]
        )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_text(cell) for cell in cells)} |"


def _text(text: str) -> str:
    """Return a text without the characters that would end a cell or begin a tag."""
    escaped = text.replace("<", "&lt;").replace("|", r"\|")
    return escaped.replace("\n", "<br>")
