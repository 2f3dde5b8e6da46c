"""The table of targets: a part of its cells, another one at each commit, is made anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftlab.export.refusals import WITHOUT_EAGLE3
from draftlab.version import git_commit
from tests.helpers.drivers import load

matrix = load("parity/target_matrix")

PARTS = 8
PART = int(git_commit() or "0", 16) % PARTS


@pytest.mark.slow
@pytest.mark.parametrize("kind", matrix.TYPES[PART::PARTS])
def test_a_type_has_the_cells_of_the_page(kind: str) -> None:
    assert list(matrix.differences([kind])) == []


def test_the_page_has_every_type_and_is_read_as_it_is_written() -> None:
    page = matrix.PAGE.read_text()
    rows = matrix.read(page)
    assert set(rows) == set(matrix.TYPES)
    warned = {kind for kind, cells in rows.items() if any("SupportsEagle3" in x for x in cells)}
    assert warned == WITHOUT_EAGLE3
    assert page.partition(matrix.BEGIN)[2] == matrix.table(
        {kind: rows[kind] for kind in matrix.TYPES}
    )


def test_other_cells_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = matrix.read(matrix.PAGE.read_text())
    changed = ["why", *rows["llama"][1:]]
    monkeypatch.setattr(matrix.Targets, "cells", lambda targets, kind: changed)
    (line,) = matrix.differences(["llama"])
    assert line == "llama, answer: why, the page has whole"


def test_what_fails_after_its_plan_is_no_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a shape")

    monkeypatch.setattr(matrix.Targets, "planned", lambda *_, **__: matrix.WHOLE)
    monkeypatch.setattr(matrix.Pipeline, "make", fail)
    with pytest.raises(RuntimeError, match="a shape"):
        matrix.Targets(tmp_path).cells("llama")
    monkeypatch.setattr(matrix.Pipeline, "make", lambda *_, **__: None)
    monkeypatch.setattr(matrix.parity_transformers, "run", lambda _: print("token 5") or 1)
    with pytest.raises(SystemExit, match="llama: token 5"):
        matrix.Targets(tmp_path).cells("llama")


def test_a_sentence_says_the_same_of_each_type() -> None:
    text = "AModel reads its cache in a way that pages do not serve (by 1.8 (or 2)), so no drafts"
    assert matrix.sentence(text) == text.replace("AModel", "…").replace(" (by 1.8 (or 2))", "")
