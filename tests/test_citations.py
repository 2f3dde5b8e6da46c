"""Citations of docs/methods.md and docs/servers.md name headings, and Markdown links name files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("methods", "servers")
SUFFIXES = (".py", ".md", ".yaml", ".yml", ".toml")
GENERATED = ("runs", "build", "dist")
"""Folders that git ignores, beside hidden ones."""

SECTION = r"§(\d+(?:\.\d+)*)"
BETWEEN = r"(?:\s*,\s*|\s+and\s+)"
# A line of a comment may end between the name of a document and the section.
CITATION = re.compile(
    rf"\b(methods|servers)[\s#]+({SECTION}(?:{BETWEEN}{SECTION})*)", re.IGNORECASE
)
HEADING = re.compile(r"^#{2,4} (\d+(?:\.\d+)*)\.? \S", re.MULTILINE)
CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def project_files() -> Iterator[Path]:
    """Yield the project's text files, except this one, whose examples cite other sections."""
    pending = [ROOT]
    while pending:
        for path in sorted(pending.pop().iterdir()):
            if path.name.startswith(".") or path.is_symlink():
                continue
            if path.is_dir():
                if path.name not in GENERATED and path.suffix != ".egg-info":
                    pending.append(path)
            elif path.suffix in SUFFIXES and path != Path(__file__):
                yield path


def place(path: Path, text: str, offset: int) -> str:
    """Return "file:line" of an offset in the text of a file."""
    line = text.count("\n", 0, offset) + 1
    return f"{path.relative_to(ROOT)}:{line}"


def headings(document: str) -> list[str]:
    """Return the numbers of a document's headings, in order."""
    return HEADING.findall((ROOT / "docs" / f"{document}.md").read_text())


def cited(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (offset, document, section) for each section that a text cites."""
    for citation in CITATION.finditer(text):
        for section in re.findall(SECTION, citation[2]):
            yield citation.start(), citation[1].lower(), section


@pytest.mark.parametrize("document", DOCUMENTS)
def test_headings_have_one_number_each_in_order(document: str) -> None:
    numbers = headings(document)
    assert len(set(numbers)) == len(numbers)
    assert numbers == sorted(numbers, key=lambda number: [int(part) for part in number.split(".")])


def test_citations_name_headings() -> None:
    """A document's own sections are cited without its name."""
    known = {document: set(headings(document)) for document in DOCUMENTS}
    unknown, count = [], 0
    for path in project_files():
        text = path.read_text()
        citations = list(cited(text))
        count += len(citations)
        if path.stem in DOCUMENTS and path.parent == ROOT / "docs":
            rest = CITATION.sub(lambda citation: " " * len(citation[0]), text)
            citations += [(m.start(), path.stem, m[1]) for m in re.finditer(SECTION, rest)]
        unknown += [
            f"{place(path, text, offset)}: {document} §{section}"
            for offset, document, section in citations
            if section not in known[document]
        ]
    assert not unknown, "no such section or document:\n" + "\n".join(unknown)
    assert count > 50, f"expected the citations of the code, found {count}"


def anchors(page: str) -> set[str]:
    """Return the names under which GitHub links the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", CODE_BLOCK.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_relative_links_name_files_and_headings() -> None:
    missing = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), path.read_text())
        for link in LINK.finditer(text):
            target, _, heading = unquote(link[1]).partition("#")
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue  # an address elsewhere
            named = path.parent / target if target else path
            if not named.exists() or (heading and heading not in anchors(named.read_text())):
                missing.append(f"{place(path, text, link.start())}: {link[1]}")
    assert not missing, "links to nothing:\n" + "\n".join(missing)
