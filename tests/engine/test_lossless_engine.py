"""The certificate on the whole engine: a real target of a few tokens, a head, ragged batches."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request, Sampling, row_keys
from draftlab.engine.step import Step
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.verify import target_probabilities
from draftlab.target_model.model import Target, TargetSettings, load_target
from tests.helpers.decoding import untrained_head
from tests.helpers.zoo import zoo_folder

PROMPT, NEW, ROWS, VOCAB = (3, 1), 4, 6000, 5
SAMPLING = Sampling(temperature=1.3, top_k=3, seed=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = zoo_folder(
        tmp_path_factory.mktemp("small"), "llama", vocab_size=VOCAB, num_hidden_layers=3, seed=4
    )
    return load_target(TargetSettings(path=str(folder), device="cpu"))


@pytest.fixture(scope="module")
def poor_head(small: Target) -> Eagle3Head:
    """Untrained, and without the target's token 0: a good head would hide faults."""
    return untrained_head(small, 2, VOCAB - 1).eval().requires_grad_(False)


def ask(name: str) -> Request:
    return Request(name, PROMPT, NEW, SAMPLING)


def exact_joint(target: Target) -> dict[tuple[int, ...], float]:
    """P of every answer, from one forward pass over all of them."""
    answers = list(itertools.product(range(VOCAB), repeat=NEW))
    ids = torch.tensor([[*PROMPT, *answer] for answer in answers])
    logits = target.logits(target.states(ids).last[:, len(PROMPT) - 1 : -1])
    p = target_probabilities(logits, row_keys([ask("")] * len(answers), ids.device)).double()
    picked = p.gather(-1, ids[:, len(PROMPT) :, None])[..., 0].prod(-1)
    return dict(zip(answers, (picked / picked.sum()).tolist(), strict=True))


def p_value(target: Target, head: Eagle3Head | None, *, draft_probs: bool = True) -> float:
    drafter = ChainDrafter(head, 2, draft_probs=draft_probs) if head else None
    engine = Engine(target, drafter, batch=1500, max_length=16)
    seen: dict[tuple[int, ...], int] = {}
    for generation in engine.generate([ask(str(i)) for i in range(ROWS)]):
        seen[generation.token_ids] = seen.get(generation.token_ids, 0) + 1
    joint = exact_joint(target)
    if any(joint[answer] == 0 for answer in seen):
        return 0.0
    possible = [answer for answer, p in joint.items() if p > 0]
    expected = np.array([joint[answer] * ROWS for answer in possible])
    observed = np.array([seen.get(answer, 0) for answer in possible], dtype=float)
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(observed[~rare], observed[rare].sum())
    assert len(expected) > 30
    return float(stats.power_divergence(observed, expected, lambda_="log-likelihood").pvalue)


def test_plain_sampling(small: Target) -> None:
    assert p_value(small, None) > 1e-3


@pytest.mark.parametrize("draft_probs", [True, False])
def test_drafted_sampling(draft_probs: bool, small: Target, poor_head: Eagle3Head) -> None:
    assert p_value(small, poor_head, draft_probs=draft_probs) > 1e-3


def test_another_rows_draft_probabilities_are_noticed(
    small: Target, poor_head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = Step._distribution

    def shuffled(self, layout):
        found = true(self, layout)
        return found if found is None else found[torch.arange(len(layout.index)).roll(1)]

    monkeypatch.setattr(Step, "_distribution", shuffled)
    assert p_value(small, poor_head) < 1e-6
