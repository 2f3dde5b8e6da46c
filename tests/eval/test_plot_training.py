"""AL of training runs by time and by tokens, from their metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.drivers import load

plot = load("lab/plot_training")


def trained(step: int, speed: float) -> dict[str, Any]:
    """A row of training at 1,000 tokens a step."""
    return {"step": step, "tokens_seen": 1_000 * step, "tokens_per_s": speed}


def validated(step: int, length: float, k: int = 2) -> dict[str, Any]:
    validation = {"alpha": [0.5] * k, "walk_al": length}
    return {"step": step, "tokens_seen": 1_000 * step, "validation": validation}


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


CHAIN = [trained(10, 1_000.0), validated(10, 2.0), trained(30, 4_000.0), validated(30, 3.0)]
SLOWER = [trained(20, 1_000.0), validated(15, 2.0), validated(20, 2.4)]


def test_times_are_those_of_the_rows_and_shares_those_of_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run" / "train" / "metrics.jsonl", CHAIN)
    other = write(tmp_path / "other.jsonl", SLOWER)
    chain = plot.Curve.read("chain", tmp_path / "run")
    assert chain.seconds.tolist() == [10.0, 15.0]  # 10,000 / 1,000, then 20,000 / 4,000
    assert chain.reached("seconds", np.array([12.5, 16.0])).tolist()[0] == 2.5
    picture = tmp_path / "plot.png"
    runs = [f"chain={tmp_path / 'run'}", f"2 layers={other}"]
    assert plot.main([*runs, "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        # after 15 s the chain had 3.0, after 15,000 tokens 2.25
        "| 2 layers | 15 | 0.0 | 15 | 2.000 | 0.667 | 0.889 | 0.667 |",
        "| 2 layers | 20 | 0.0 | 20 | 2.400 |  | 0.960 | 0.800 |",
    ]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, "expected a run's folder or its metrics.jsonl"),
        ([trained(10, 1.0)], "found 1 and 0"),
        ([trained(10, 1.0), validated(10, 2.0, k=4)], "found 2 (chain), 4 (other)"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rows: list[dict[str, Any]] | None,
    words: str,
) -> None:
    chain, other = write(tmp_path / "chain.jsonl", CHAIN), tmp_path / "other.jsonl"
    if rows is not None:
        write(other, rows)
    picture = tmp_path / "plot.png"
    assert plot.main([f"chain={chain}", f"other={other}", "--out", str(picture)]) == 2
    assert words in capsys.readouterr().err
    assert not picture.exists()
