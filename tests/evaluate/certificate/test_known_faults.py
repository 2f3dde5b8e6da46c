"""A broken verifier emits the exact distribution that is computed for its fault.

The broken verifiers are the real one with one piece of its source replaced. Target and head are
tables of next-token logits. A wrong formula would make the certificate draw too few samples.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from draftlab.evaluate.certificate.exact_tree import AnswerTree, TreeSettings
from draftlab.evaluate.certificate.gtest import g_test, samples_for
from draftlab.evaluate.certificate.known_faults import Fault, emitted_distribution, known_faults
from tests.helpers.broken_verifiers import faulty_verifier
from tests.helpers.lossless import (
    DRAFT_IDS,
    HEAD,
    START,
    TARGET,
    VOCAB,
    Case,
    K,
    decode,
    sampling_metadata,
)

TOP_K, LEVELS, ROWS = 4, 3, 100_000
CASES = {
    "sampled": Case(temperature=1.2, top_k=TOP_K),
    "cooler drafts": Case(temperature=1.2, top_k=TOP_K, draft_temperature=0.6),
    "argmax": Case(temperature=1.2, top_k=TOP_K, draft_probs=False),
    "whole vocabulary": Case(temperature=0.9),  # with a cell for the tokens that are not followed
    "top-p": Case(temperature=1.2, top_p=0.8),
    "block": Case(temperature=1.2, top_k=TOP_K, draft_temperature=0.6, verification="block"),
    "block, whole vocabulary": Case(temperature=0.9, verification="block"),
}


def table_tree(case: Case) -> AnswerTree:
    """Return the tree of the tables, whose target and head see the last token only."""
    width = case.top_k or 2
    draft_temperature = (case.draft_temperature or case.temperature) if case.draft_probs else 0.0
    settings = TreeSettings(
        LEVELS,
        width,
        case.temperature,
        case.top_k,
        case.top_p,
        K,
        draft_temperature,
        case.verification,
    )
    p, _ = settings.probabilities(TARGET)
    ids = p.topk(width).indices
    nodes, tokens, logits, draft, last_draft = torch.tensor([START]), [], [], [], []
    parents: Tensor | None = None
    for level in range(LEVELS):
        tokens.append(ids[nodes].numpy())
        logits.append(TARGET[nodes])
        draft.append((HEAD[nodes],) * min(level + 1, K))
        last_draft.append(HEAD[parents] if level >= K else None)
        parents, nodes = nodes.repeat_interleave(width), ids[nodes].flatten()
    first = torch.full((VOCAB,), -1e9)
    first[START] = 0
    levels = (tuple(level) for level in (tokens, logits, draft, last_draft))
    return AnswerTree(settings, (), first, *levels, DRAFT_IDS, 1.0)


def counts(tree: AnswerTree, tokens: Tensor) -> np.ndarray:
    cells = [tree.cell((START, *answer)) for answer in tokens.tolist()]
    return np.bincount(cells, minlength=len(tree.joint()))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_correct_verifier_emits_the_targets_distribution(case: Case) -> None:
    tree = table_tree(case)
    np.testing.assert_allclose(emitted_distribution(tree, None), tree.joint(), atol=1e-12)


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_faulty_verifier_emits_the_computed_distribution(
    case: Case, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not case.draft_probs and fault not in (Fault.OFTEN, Fault.ONE_U):
        pytest.skip("the source that this fault replaces is only used for sampled drafts")
    tree, block = table_tree(case), case.verification == "block"
    if fault not in known_faults(tree.settings):
        pytest.skip("drafts that are verified in this way cannot have the fault")
    verifier = faulty_verifier(fault, VOCAB, DRAFT_IDS.tolist(), monkeypatch, block=block)
    tokens, _ = decode(case, verifier, sampling_metadata(case, ROWS, seed=3))
    observed, faulty = counts(tree, tokens), emitted_distribution(tree, fault)
    assert faulty.sum() == pytest.approx(1)
    assert g_test(observed, faulty).p_value > 1e-4
    # The same counts reject the target's distribution, so the agreement has power.
    needed = samples_for(0.99, tree.joint(), faulty, 1e-6)
    assert needed is not None
    assert needed < ROWS
    assert g_test(observed, tree.joint()).p_value < 1e-6


def test_argmax_drafts_have_no_noise_to_share() -> None:
    tree = table_tree(CASES["argmax"])
    shared = emitted_distribution(tree, Fault.SHARED)
    np.testing.assert_allclose(shared, tree.joint(), atol=1e-12)
