"""The sections of a report in Markdown, for a model card."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from draftlab.report.section import Section, Table


def render_markdown(sections: Iterable[Section]) -> str:
    """Return the sections as Markdown; figures are PNG files beside it."""
    return "\n\n".join(block for section in sections for block in _blocks(section))


def _blocks(section: Section) -> Iterator[str]:
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
