"""A small evaluation."""

from __future__ import annotations

from typing import Any

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
