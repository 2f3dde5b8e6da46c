"""A broken verifier emits the exact distribution that is computed for its fault.

The broken verifiers are the real one with one piece of its source replaced. Target and head are
tables of next-token logits. A wrong formula would make the certificate draw too few samples.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from draftlab.evaluate.certificate.exact_tree import AnswerTree
from draftlab.evaluate.certificate.gtest import g_test, samples_for
from draftlab.evaluate.certificate.known_faults import Fault, emitted_distribution
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
}


def table_tree(case: Case) -> AnswerTree:
    """Return the tree of the tables, whose target and head see the last token only."""
    values, ids = TARGET.double().topk(TOP_K)
    p = (values / case.temperature).softmax(-1)
    q = HEAD.double()
    if case.draft_probs:
        q = (q / (case.draft_temperature or case.temperature)).softmax(-1)
    else:
        q = torch.nn.functional.one_hot(q.argmax(-1), len(DRAFT_IDS)).double()
    full = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    full[:, DRAFT_IDS] = q
    nodes, tokens, target, draft, last_draft = torch.tensor([START]), [], [], [], []
    parents: Tensor | None = None
    for level in range(LEVELS):
        children = ids[nodes]
        tokens.append(children.numpy())
        target.append(p[nodes].numpy())
        draft.append((full[nodes].gather(1, children).numpy(),) * min(level + 1, K))
        last_draft.append(full[parents].gather(1, children).numpy() if level >= K else None)
        parents, nodes = nodes.repeat_interleave(TOP_K), children.flatten()
    levels = (tuple(level) for level in (tokens, target, draft, last_draft))
    return AnswerTree((), (START,), 1.0, *levels, 1.0)


def counts(tree: AnswerTree, tokens: Tensor) -> np.ndarray:
    cells = [tree.cell((START, *answer)) for answer in tokens.tolist()]
    return np.bincount(cells, minlength=len(tree.joint()))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_correct_verifier_emits_the_targets_distribution(case: Case) -> None:
    tree = table_tree(case)
    np.testing.assert_allclose(emitted_distribution(tree, None, K), tree.joint(), atol=1e-12)


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_faulty_verifier_emits_the_computed_distribution(
    case: Case, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not case.draft_probs and fault not in (Fault.OFTEN, Fault.ONE_U):
        pytest.skip("the source that this fault replaces is only used for sampled drafts")
    verifier = faulty_verifier(fault, VOCAB, DRAFT_IDS.tolist(), monkeypatch)
    tree = table_tree(case)
    tokens, _ = decode(case, verifier, sampling_metadata(case, ROWS, seed=3))
    observed, faulty = counts(tree, tokens), emitted_distribution(tree, fault, K)
    assert faulty.sum() == pytest.approx(1)
    assert g_test(observed, faulty).p_value > 1e-4
    # The same counts reject the target's distribution, so the agreement has power.
    needed = samples_for(0.99, tree.joint(), faulty, 1e-6)
    assert needed is not None
    assert needed < ROWS
    assert g_test(observed, tree.joint()).p_value < 1e-6


def test_argmax_drafts_have_no_noise_to_share() -> None:
    tree = table_tree(CASES["argmax"])
    shared = emitted_distribution(tree, Fault.SHARED, K)
    np.testing.assert_allclose(shared, tree.joint(), atol=1e-12)
