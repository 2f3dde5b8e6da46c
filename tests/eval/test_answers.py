"""The timing of answers, on the embedded target."""

from __future__ import annotations

from draftlab.recipe.recipe import load_recipe
from tests.helpers.drivers import EVAL, load

answers = load("lab/answers")


def test_the_same_answers_are_timed_twice() -> None:
    changes = ["prompts.max_prompts=3", "regenerate.max_new_tokens=4", "target.device=cpu"]
    recipe = load_recipe(EVAL.parent / "recipes" / "quickstart.yaml", changes)
    measured = answers.measure(recipe)
    assert (measured["requests"], measured["tokens"]) == (3, 12)
    assert min(measured["first_tokens_s"], measured["again_tokens_s"]) > 0
