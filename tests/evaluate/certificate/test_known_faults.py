"""The exact joint of each fault is what a verifier broken in that way really emits.

The broken verifiers are the real one with one piece of its source replaced; the target and the head
are tables of next-token logits. If a formula were wrong, so would be the samples the certificate
asks for.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from draftlab.engine import drafter as drafter_module
from draftlab.evaluate.certificate.exact_tree import Tree
from draftlab.evaluate.certificate.gtest import g_test, samples_for
from draftlab.evaluate.certificate.known_faults import Fault, emitted
from draftlab.kernels import verify as verify_module
from tests.helpers.lossless import (
    DRAFT_IDS,
    FAULTS,
    HEAD,
    START,
    TARGET,
    VOCAB,
    Case,
    K,
    broken,
    decode,
    row_keys,
)

TOP_K, LEVELS, ROWS = 4, 3, 100_000
SOURCE = {
    Fault.OFTEN: FAULTS["accepts 5 % too often"],
    Fault.TARGET: FAULTS["residual is p"],
    Fault.UNCLAMPED: FAULTS["residual is |p − q|"],
    Fault.ONE_U: FAULTS["one u a step"],
    Fault.BONUS: FAULTS["bonus from q"],
    # The noise of a token in both, whatever its place in the draft vocabulary.
    Fault.SHARED: (
        "Purpose.DRAFT, logits.shape[-1])",
        f"Purpose.EMIT, {VOCAB})[..., torch.tensor({DRAFT_IDS.tolist()})]",
    ),
}
CASES = {
    "sampled": Case(temperature=1.2, top_k=TOP_K),
    "cooler drafts": Case(temperature=1.2, top_k=TOP_K, draft_temperature=0.6),
    "argmax": Case(temperature=1.2, top_k=TOP_K, draft_probs=False),
}


def table_tree(case: Case) -> Tree:
    """The tree of the tables: target and head see the last token only."""
    values, ids = TARGET.double().topk(TOP_K)
    p = (values / case.temperature).softmax(-1)
    q = HEAD.double()
    if case.draft_probs:
        q = (q / (case.draft_temperature or case.temperature)).softmax(-1)
    else:
        q = torch.nn.functional.one_hot(q.argmax(-1), len(DRAFT_IDS)).double()
    full = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    full[:, DRAFT_IDS] = q
    nodes, tokens, target, draft, stale = torch.tensor([START]), [], [], [], []
    parents: Tensor | None = None
    for level in range(LEVELS):
        children = ids[nodes]
        tokens.append(children.numpy())
        target.append(p[nodes].numpy())
        draft.append((full[nodes].gather(1, children).numpy(),) * min(level + 1, K))
        stale.append(full[parents].gather(1, children).numpy() if level >= K else None)
        parents, nodes = nodes.repeat_interleave(TOP_K), children.flatten()
    return Tree((), (START,), 1.0, tuple(tokens), tuple(target), tuple(draft), tuple(stale), 1.0)


def counts(tree: Tree, tokens: Tensor) -> np.ndarray:
    cells = [tree.cell((START, *answer)) for answer in tokens.tolist()]
    return np.bincount(cells, minlength=len(tree.joint()))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_right_verifier_emits_the_targets_joint(case: Case) -> None:
    tree = table_tree(case)
    np.testing.assert_allclose(emitted(tree, None, K), tree.joint(), atol=1e-12)


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_fault_emits_its_joint(case: Case, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    if not case.draft_probs and fault not in (Fault.OFTEN, Fault.ONE_U):
        pytest.skip("the pieces replaced for this fault concern sampled drafts")
    verifier, module = verify_module.verify, broken(*SOURCE[fault])
    if fault is Fault.SHARED:
        monkeypatch.setattr(drafter_module, "sample_draft", module.sample_draft)
    else:
        verifier = module.verify
    tree = table_tree(case)
    tokens, _ = decode(case, verifier, row_keys(case, ROWS, seed=3))
    seen, faulty = counts(tree, tokens), emitted(tree, fault, K)
    assert faulty.sum() == pytest.approx(1)
    assert g_test(seen, faulty).p_value > 1e-4
    # … which is told apart from the right joint, so agreement says something.
    needed = samples_for(0.99, tree.joint(), faulty, 1e-6)
    assert needed is not None
    assert needed < ROWS
    assert g_test(seen, tree.joint()).p_value < 1e-6


def test_argmax_drafts_have_no_noise_to_share() -> None:
    tree = table_tree(CASES["argmax"])
    np.testing.assert_allclose(emitted(tree, Fault.SHARED, K), tree.joint(), atol=1e-12)
