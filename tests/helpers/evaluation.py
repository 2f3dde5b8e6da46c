"""A small evaluation."""

from __future__ import annotations

from typing import Any

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation
from draftlab.evaluate.decoding_config import NamedHead
from draftlab.evaluate.evaluator import Evaluator
from draftlab.evaluate.results import Report
from draftlab.evaluate.settings import EvalSettings
from draftlab.heads.head import DraftHead
from draftlab.progress import Monitor
from draftlab.target_model.model import Target
from draftlab.text.suites import Suite
from tests.helpers.greedy_answers import STOPS, requests

HEAD_NAMES = ("a head", "another")


def suite(count: int = 6) -> Suite:
    return Suite("toy", "t", tuple((r.id, r.prompt_ids) for r in requests(count, seed=30)))


def evaluate(
    target: Target, *heads: DraftHead, monitor: Monitor | None = None, **settings: Any
) -> Report:
    """Evaluate the heads on six short prompts, by default with three drafts a step."""
    defaults = {"k": 3, "max_new_tokens": 16, "batch": 4, "timing_prompts": 2, "timing_tokens": 8}
    evaluator = Evaluator(
        target,
        [NamedHead(name, head) for name, head in zip(HEAD_NAMES, heads, strict=False)],
        suite(),
        STOPS,
        EvalSettings.model_validate(defaults | settings),
        monitor=monitor or Monitor(),
    )
    return evaluator.run()


def generation(
    tokens: int, step_s: float, steps: tuple[tuple[int, int], ...], *, k: int = 2, name: str = "p"
) -> Generation:
    """Return an answer whose steps (drafted, accepted) after its first token took `step_s` each."""
    counters = Counters(k)
    for drafted, accepted in steps:
        counters.add_step(drafted, accepted)
    total_s = 0.5 + step_s * len(steps)
    return Generation(name, (1,) * tokens, "stop", counters, (), steps, 0.5, total_s)
