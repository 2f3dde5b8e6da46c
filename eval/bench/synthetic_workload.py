"""A workload of random prompts on a random target, whose drafts pass with known probability."""

from __future__ import annotations

from typing import Any

import torch
from random_models import passing_runs, synthetic_verify

from draftlab.engine.engine import Engine
from draftlab.evaluate.decoding_config import DecodingConfig, NamedHead
from draftlab.evaluate.measure import new_engine
from draftlab.evaluate.settings import EvalSettings
from draftlab.evaluate.timing import Decoder
from draftlab.evaluate.workload import Workload
from draftlab.heads.head import DraftHead
from draftlab.progress import Monitor
from draftlab.target_model.model import Target
from draftlab.text.suites import Suite


def synthetic_workload(
    target: Target, head: DraftHead, *, prompts: int, prompt_tokens: int, **settings: Any
) -> Workload:
    """Return a workload of random prompts at T = 0, whose answers end at the token limit alone."""
    generator = torch.Generator().manual_seed(0)
    vocab = len(target.parts.embeddings)
    ids = torch.randint(10, vocab, (prompts, prompt_tokens), generator=generator).tolist()
    suite = Suite("random", "", tuple((f"r{i}", tuple(row)) for i, row in enumerate(ids)))
    fixed = {"temperatures": 0.0, "packed": False}
    return Workload(
        target,
        (NamedHead("chain", head),),
        suite,
        frozenset(),
        EvalSettings.model_validate(fixed | settings),
        Monitor(),
    )


def synthetic_engine(
    workload: Workload, config: DecodingConfig, *rest: Any, **options: Any
) -> Decoder:
    """Return the evaluation's engine for a configuration, with synthetic acceptance."""
    passing_runs(workload.target.device)  # not inside a graph's capture
    engine = new_engine(workload, config, *rest, **options)
    assert isinstance(engine, Engine)
    if config.head is not None:
        engine.step.verifier = synthetic_verify
    return engine
