"""The comparison with transformers' own generate: it must find every kind of difference."""

from __future__ import annotations

import sys

import pytest

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation
from tests.helpers.drivers import load
from tests.helpers.zoo import zoo_config

common, transformers = load("parity/common"), load("parity/parity_transformers")

FOUND = [
    Generation(name, tokens, "length", Counters(3), (), (), 0.1, 0.2)
    for name, tokens in (("a", (5, 6)), ("b", (7, 8, 9)))
]


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ([(5, 6), (7, 8, 9)], None),
        ([(5, 6), (7, 1, 9)], "prompt b, token 1: transformers 1, drafted 8"),
        ([(5,), (7, 8, 9)], "prompt a, token 1: transformers None, drafted 6"),
        ([(5, 6), (7, 8, 9, 9)], "prompt b, token 3: transformers 9, drafted None"),
    ],
)
def test_the_first_difference_is_named(expected: list[tuple[int, ...]], text: str | None) -> None:
    assert transformers.first_difference(expected, FOUND, "drafted") == text


@pytest.mark.parametrize(
    ("kind", "positions"), [("llama", None), ("gpt_oss", 8), ("llama4", 8), ("gemma3_text", 8)]
)
def test_the_border_is_the_windows_or_the_chunks(kind: str, positions: int | None) -> None:
    assert transformers.border(zoo_config(kind).get_text_config()) == positions


def test_the_embedded_target_and_a_target_that_answers_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--head", "reference", "--prompts", "2", "--max-new-tokens", "6"]
    monkeypatch.setattr(sys, "argv", ["parity_transformers", *flags])
    assert transformers.main() == common.EQUAL
    assert "K = 3, 2 prompts, 12 tokens, beyond the first border: no" in capsys.readouterr().out
    generated = transformers.generated
    monkeypatch.setattr(
        transformers, "generated", lambda *a: [(*ids[:-1], 0) for ids in generated(*a)]
    )
    assert transformers.main() == common.DIFFERENT
    printed = capsys.readouterr().out
    assert printed.count("drafted: DIFFERENT at prompt heldout-00000, token 5") == 2
