"""A part of a suite represents all of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftlab.progress import Monitor
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text.suites import Suite, even_order, load_suite


@pytest.fixture(scope="module")
def embedded_tokenizer() -> Any:
    return load_tokenizer(TargetSettings())


CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "arts")


def sorted_suite() -> Suite:
    """Return eight categories of ten prompts, one category after the other, as in MT-Bench."""
    prompts = tuple((f"q{i}", (i,)) for i in range(80))
    return Suite("toy", "t", prompts, {f"q{i}": CATEGORIES[i // 10] for i in range(80)})


def counts(suite: Suite) -> Counter[str]:
    return Counter(suite.categories[id_] for id_, _ in suite.prompts)


@pytest.mark.parametrize("seed", range(5))
def test_each_category_has_its_share_of_a_sample_and_of_the_timed_prompts(seed: int) -> None:
    drawn = sorted_suite().sample(64, seed)
    assert counts(drawn) == dict.fromkeys(CATEGORIES, 8)
    assert drawn.prompts == tuple(sorted(drawn.prompts, key=lambda one: one[1]))  # still in order
    timed = drawn.evenly_ordered(seed)[:10]
    by_category = Counter(drawn.categories[id_] for id_, _ in timed)
    assert sorted(by_category.values()) == [1] * 6 + [2] * 2
    assert set(timed) <= set(drawn.prompts)


def test_unequal_categories_keep_their_proportions() -> None:
    strata = ["long"] * 60 + ["middle"] * 30 + ["short"] * 10
    for seed in range(20):
        beginning = Counter(strata[i] for i in even_order(strata, seed)[:50])
        assert abs(beginning["long"] - 30) <= 1
        assert abs(beginning["middle"] - 15) <= 1
        assert abs(beginning["short"] - 5) <= 1


def test_the_seed_decides_the_sample_and_every_prompt_is_as_likely() -> None:
    suite = sorted_suite()
    assert suite.sample(20, 1) == suite.sample(20, 1)
    assert suite.sample(20, 1) != suite.sample(20, 2)
    assert suite.sample(None, 1) == suite.sample(80, 2) == suite
    drawn = Counter(id_ for seed in range(400) for id_, _ in suite.sample(20, seed).prompts)
    assert len(drawn) == 80
    assert min(drawn.values()) > 60  # 100 expected, with a standard deviation of 9
    assert max(drawn.values()) < 140


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([{"category": "a"}, {"category": "b"}, {"category": "b"}], ["a", "b", "b"]),
        ([{"source": "a"}, {"source": "b"}, {"source": "b"}], ["a", "b", "b"]),
        ([{"source": "x", "category": c} for c in "abb"], ["a", "b", "b"]),
        ([{"source": "x"}] * 3, []),
        ([{}] * 3, []),
    ],
)
def test_a_file_of_conversations_has_the_categories_of_its_lines(
    embedded_tokenizer: Any, tmp_path: Path, fields: list[dict[str, str]], expected: list[str]
) -> None:
    path = tmp_path / "suite.jsonl"
    lines = [
        {"id": f"p{i}", "messages": [{"role": "user", "content": f"Write f{i}."}], **one}
        for i, one in enumerate(fields)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    suite = load_suite(str(path), embedded_tokenizer, Monitor())
    assert [suite.categories[id_] for id_, _ in suite.prompts if suite.categories] == expected
