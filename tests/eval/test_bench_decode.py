"""What the decoding benchmark measures, on a tiny target, and the file that it appends to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftlab.engine.drafter import new_drafter
from draftlab.errors import UserError
from draftlab.target_model.loading import load_target
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from tests.helpers.decoding import PARALLEL, untrained_head
from tests.helpers.drivers import load
from tests.helpers.toys import toy_target_folder

bench = load("bench/bench_decode")
ROW = bench.Bench(1, 3, False, 5.0, 4.0, None, 0.9, 400.0, 21.5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = toy_target_folder(
        tmp_path_factory.mktemp("target"), layers=4, hidden=32, max_length=128
    )
    return load_target(TargetSettings(path=str(folder), device="cpu"))


@pytest.mark.parametrize("family", [None, {}, PARALLEL])
def test_a_batch_is_measured(target: Target, family: dict[str, Any] | None) -> None:
    drafter = None
    if family is not None:
        head = untrained_head(target, 3, target.vocab_size - 20, **family)
        drafter = new_drafter(head, 3, draft_probs=False)
    measured = bench.measure(target, drafter, 4, prompt=24, new=40)
    assert measured.step_ms > 0
    assert measured.tokens_s > 0
    # A prompt of 24 tokens is a pass like a step's, of more tokens.
    assert measured.step_ms / 20 < measured.ttft_ms < 20 * measured.step_ms
    # Acceptance is synthetic: 0.6 + 0.6² + 0.6³ drafts of three, whatever the head.
    expected = 1 if drafter is None else 1 + 0.6 + 0.6**2 + 0.6**3
    assert measured.tokens_a_step == pytest.approx(expected, abs=0 if drafter is None else 0.5)


def test_rows_are_appended_under_their_own_columns(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    for row in (ROW, replace(ROW, batch=8)):
        bench.write(path, [row], "a GPU", 4.3e12)
    first, *rows = [line.split(",") for line in path.read_text().splitlines()]
    assert [dict(zip(first, row, strict=True))["ttft_ms"] for row in rows] == ["21.5000"] * 2
    path.write_text("date,gpu\n")
    with pytest.raises(UserError, match="expected the columns date,gpu,torch"):
        bench.write(path, [ROW], "a GPU", 4.3e12)
    assert path.read_text() == "date,gpu\n"


def test_the_committed_figures_have_those_columns() -> None:
    file = Path(__file__).resolve().parents[2] / "docs" / "data" / "decode_steps.csv"
    first, *rows = file.read_text().splitlines()
    assert first.split(",")[4:] == [*bench.Bench.__dataclass_fields__]
    assert {row.count(",") for row in rows} == {first.count(",")}
