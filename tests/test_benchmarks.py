"""docs/benchmarks.md follows from the counters, has conditions beside claims, and is short."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "benchmarks.md").read_text()
README = (DOCS.parent / "README.md").read_text()


def rows(name: str) -> list[dict[str, str]]:
    with (DOCS / "data" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def grouped(name: str, *keys: str) -> list[list[dict[str, str]]]:
    """Return the rows of a file of counters in groups of the same values, each by seed."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows(name):
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [sorted(group, key=lambda row: int(row["seed"])) for group in groups.values()]


def values(group: list[dict[str, str]], temperature: str) -> list[float]:
    """Return the acceptance lengths of a group's seeds."""
    return [1 + int(r[f"accepted_{temperature}"]) / int(r[f"drafts_{temperature}"]) for r in group]


def lengths(group: list[dict[str, str]], temperature: str) -> str:
    """Return the acceptance lengths of a group's seeds, as a table shows them."""
    return " ".join(f"{al:.3f}" for al in values(group, temperature))


@pytest.mark.parametrize(
    "group",
    [
        g
        for g in grouped("acceptance_peers.csv", "gpu", "family", "trainer")
        if g[0]["gpu"] == "H100"
    ],
    ids=lambda group: "-".join(group[0][key] for key in ("family", "trainer")),
)
def test_all_seeds_of_a_trainer_are_in_one_row(group: list[dict[str, str]]) -> None:
    cells = f"| {lengths(group, 't0')} | {lengths(group, 't08')} |"
    assert cells in PAGE, cells


@pytest.mark.parametrize("recipe", ["reference", "quickstart_dspark", "quickstart_peagle"])
def test_the_differences_of_fp8_are_means_over_all_seeds(recipe: str) -> None:
    plain, fp8 = (
        next(
            g
            for g in grouped("fp8_training.csv", "recipe", "precision")
            if g[0]["recipe"] == recipe and g[0]["precision"] == precision
        )
        for precision in ("bfloat16", "fp8")
    )
    for temperature in ("t0", "t08"):
        means = [np.mean(values(group, temperature)) for group in (fp8, plain)]
        assert re.search(rf"\| (\*\*)?{re.escape(f'{np.subtract(*means):+.3f}')}", PAGE)


def test_the_lengths_beside_vllm_follow_from_the_counters() -> None:
    for row in rows("vllm_0.33.csv"):
        here, there = (
            f"{1 + int(row[f'accepted_{who}']) / int(row[f'drafts_{who}']):.3f}"
            for who in ("here", "vllm")
        )
        assert f" {here}, {there}, " in PAGE, row


def test_every_file_of_counters_is_linked() -> None:
    files = {path.name for path in (DOCS / "data").iterdir()}
    assert set(re.findall(r"\(data/([^)]+)\)", PAGE)) == files


def test_the_page_is_short_and_has_ten_summary_rows() -> None:
    assert len(PAGE.encode()) <= 14 * 1024
    summary = PAGE.split("## Summary\n")[1].split("\n## ")[0]
    assert len(re.findall(r"^\| \[", summary, re.MULTILINE)) == 10


@pytest.mark.parametrize(
    ("claim", "condition"),
    [
        (r"1\.[58]0? (×|times)", r"30 % (of the positions|prompt positions)"),
        (r"1\.[58]0? (×|times)", r"1\.10 ×? ?(and|times)"),
        (r"1\.25 (×|times)", r"AL -0\.3 %"),
        (r"1\.(3[0-9]?|5[0-9]) times", r"K = 3"),
    ],
)
def test_a_claim_has_its_condition_in_the_same_sentence(claim: str, condition: str) -> None:
    """A row of a table counts as a sentence."""
    pieces = [
        piece.replace("\n", " ")
        for text in (README, PAGE.split("\n## Acceptance")[0])
        for piece in re.split(r"(?<=[a-z)])\.\s|\n\n|\n\|", text)
    ]
    claims = [piece for piece in pieces if re.search(claim, piece)]
    assert claims
    assert [piece for piece in claims if not re.search(condition, piece)] == []
