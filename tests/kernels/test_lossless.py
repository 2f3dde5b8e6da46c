"""The certificate: the joint of three emitted tokens is the target's, and the test has power.

A small known target (a table of next-token logits) is decoded by the real drafter's choice and the
real verifier, one row a prompt; a G-test compares the joint with the exact one (methods §5). The
same test must reject each fault that speculative decoders have had.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from draftlab.engine import drafter as drafter_module
from draftlab.engine.drafter import ChainDrafter, Observed, Proposal
from draftlab.engine.eager_head import Pass
from draftlab.kernels import verify as verify_module
from draftlab.kernels.rows import RowKeys
from draftlab.kernels.verify import Verdict, sample_first
from tests.kernels.test_limits import by_definition

VOCAB, K, ROWS, START = 5, 2, 100_000, 0
DRAFT_IDS = torch.tensor([0, 1, 3, 4])  # token 2 can only come from the target


@dataclass(frozen=True)
class Case:
    """How the small model is decoded."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    draft_probs: bool = True
    draft_temperature: float | None = None


CASES = {
    "draft probabilities": Case(),
    "hotter": Case(temperature=1.4),
    "another draft temperature": Case(draft_temperature=0.6),
    "top-k": Case(top_k=3),
    "top-p": Case(temperature=1.3, top_p=0.8),
    "argmax drafts": Case(draft_probs=False),
    "argmax drafts, limits": Case(temperature=1.2, top_k=4, top_p=0.9, draft_probs=False),
}


def tables() -> tuple[Tensor, Tensor]:
    """Logits of the target [V, V] and of a mismatched head [V, D], by last token."""
    generator = torch.Generator().manual_seed(29)
    target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.1
    head = target[:, DRAFT_IDS] + torch.randn(VOCAB, len(DRAFT_IDS), generator=generator)
    return target, head


TARGET, HEAD = tables()


def row_keys(case: Case, count: int = ROWS, seed: int = 0) -> RowKeys:
    return RowKeys(
        torch.full((count,), case.temperature),
        torch.full((count,), case.top_k),
        torch.full((count,), case.top_p),
        torch.full((count,), seed),
        torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(5)),
    )


def make_drafter(case: Case) -> ChainDrafter:
    """The real drafter around a stub head: only its choice of tokens is used."""
    offsets = DRAFT_IDS - torch.arange(len(DRAFT_IDS))
    head: Any = SimpleNamespace(
        config=SimpleNamespace(boundaries=(0,)),
        d2t=offsets,
        t2d=torch.zeros(VOCAB, dtype=torch.bool),
        target_ids=lambda ids: ids + offsets[ids],
    )
    drafter: Any = ChainDrafter(
        head, K, draft_probs=case.draft_probs, draft_temperature=case.draft_temperature
    )
    # A pass's output is its token, and the logits are the token's entry in a table.
    drafter._forward = lambda tokens, *_: tokens[..., None].float()
    drafter.passes.logits = lambda output, out=None: (
        HEAD[output[:, 0].long()] if out is None else out.copy_(HEAD[output[:, 0].long()])
    )
    return drafter


def propose(drafter: Any, last: Tensor, positions: Tensor, keys: RowKeys) -> Proposal:
    """The chain of drafts behind tokens `last` [B], the first of them for `positions` [B]."""
    at = (positions - 2)[:, None]
    drafter._lay_out = lambda *_, **__: [Pass(at, (at, at), at, at)] * K
    drafter._observe = lambda observed, _: observed.tokens[..., None].float()
    tokens, none = last[:, None], torch.empty(len(last), 0)
    return drafter.propose(Observed(tokens, none, at, torch.ones_like(last), none, keys))


def decode(
    case: Case, verify: Callable[..., Verdict], keys: RowKeys
) -> tuple[Tensor, list[tuple[Tensor, Verdict]]]:
    """Decodes every row from START until all have three tokens.

    Returns:
        Tokens [B, 3], and of every step the rows that took part and what was decided.
    """
    drafter = make_drafter(case)
    count = len(keys.seed)
    tokens = torch.full((count, 3 + K + 1), START)
    length = torch.zeros(count, dtype=torch.int64)
    log = []
    while bool((length < 3).any()):
        rows = (length < 3).nonzero()[:, 0]
        part, at = keys[rows], length[rows] + 1  # the prompt is START, at position 0
        last = torch.where(length[rows] > 0, tokens[rows, (length[rows] - 1).clamp(min=0)], START)
        proposal = propose(drafter, last, at, part)
        chain = torch.cat([last[:, None], proposal.tokens], 1)
        verdict = verify(
            TARGET[chain],
            chain[:, 1:],
            torch.full((len(rows),), K),
            proposal.distribution,
            at,
            part,
        )
        log.append((rows, verdict))
        for depth in range(K + 1):
            put = verdict.accepted >= depth
            token = verdict.emitted
            if depth < K:
                token = chain[:, depth + 1].where(verdict.accepted > depth, token)
            tokens[rows[put], length[rows[put]] + depth] = token[put]
        length[rows] += verdict.accepted + 1
    return tokens[:, :3], log


def exact_joint(case: Case) -> np.ndarray:
    """P(x1, x2, x3) from the definition in float64, [V, V, V]."""
    p = np.array(
        [by_definition(z, case.temperature, case.top_k, case.top_p) for z in TARGET.tolist()]
    )
    return p[START][:, None, None] * p[:, :, None] * p[None]


def g_statistic(tokens: Tensor, joint: np.ndarray) -> tuple[float, int]:
    """G and its degrees of freedom; infinite when an impossible outcome occurred."""
    code = (tokens[:, 0] * VOCAB + tokens[:, 1]) * VOCAB + tokens[:, 2]
    seen = code.bincount(minlength=VOCAB**3).double().numpy()
    expected = joint.flatten() * len(tokens)
    if seen[expected == 0].sum():
        return float("inf"), 1
    seen, expected = seen[expected > 0], expected[expected > 0]
    rare = expected < 5
    if rare.any():
        seen = np.append(seen[~rare], seen[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    terms = seen * np.log(np.where(seen > 0, seen, 1) / expected)
    return float(2 * terms.sum()), len(seen) - 1


def g_test(tokens: Tensor, joint: np.ndarray) -> float:
    """p-value that the tokens come from the joint."""
    return float(stats.chi2.sf(*g_statistic(tokens, joint)))


def samples_for_power(tokens: Tensor, joint: np.ndarray, level: float = 1e-6) -> int:
    """Samples (within 5 %) with which such a fault is rejected at `level` 99 times in 100."""
    g, freedom = g_statistic(tokens, joint)
    per_sample = (g - freedom) / len(tokens)
    border = stats.chi2.isf(level, freedom)
    noncentrality = 1.0
    while stats.ncx2.sf(border, freedom, noncentrality) < 0.99:
        noncentrality *= 1.05
    return round(noncentrality / per_sample)


def reject(tokens: Tensor, joint: np.ndarray) -> None:
    """The fault is found, and not by luck: the samples needed are fewer than were drawn."""
    needed = samples_for_power(tokens, joint)
    print(f"99 % power at p < 1e-6 needs {needed:,} samples")
    assert g_test(tokens, joint) < 1e-6
    assert needed < ROWS


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_joint_of_three_tokens_is_the_targets(case: Case) -> None:
    tokens, log = decode(case, verify_module.verify, row_keys(case))
    assert g_test(tokens, exact_joint(case)) > 1e-3
    first = log[0][1]
    if case.draft_probs:
        # A good head would hide faults.
        assert 0.5 < float(first.probability[:, 0].mean()) < 0.75
    # All ways to end a step occur, so recovered and bonus tokens are in the joint.
    assert first.accepted.unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_expected_acceptance_is_observed(case: Case) -> None:
    """Where a draft was reached, acceptances minus their probabilities are fair coins' noise."""
    _, log = decode(case, verify_module.verify, row_keys(case, 30_000, seed=1))
    for depth in range(K):
        surplus, variance = 0.0, 0.0
        for _, verdict in log:
            reached = verdict.accepted >= depth
            chance = verdict.probability[reached, depth].double()
            surplus += float((verdict.accepted[reached] > depth).sum() - chance.sum())
            variance += float((chance * (1 - chance)).sum())
        assert abs(surplus) < 4 * variance**0.5


def test_greedy_is_the_chain_of_argmaxes() -> None:
    case = Case(temperature=0.0)
    tokens, _ = decode(case, verify_module.verify, row_keys(case, 50))
    chain = [START]
    for _ in range(3):
        chain.append(int(TARGET[chain[-1]].argmax()))
    assert tokens.tolist() == [chain[1:]] * 50


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_first_tokens_follow_p(case: Case) -> None:
    keys = row_keys(case, 30_000, seed=2)
    for context in range(VOCAB):
        logits = TARGET[context].expand(30_000, VOCAB)
        found = sample_first(logits, torch.full((30_000,), 9 + context), keys)
        p = np.array(
            by_definition(TARGET[context].tolist(), case.temperature, case.top_k, case.top_p)
        )
        seen = found.bincount(minlength=VOCAB).double().numpy()
        assert seen[p == 0].sum() == 0
        assert stats.chisquare(seen[p > 0], p[p > 0] * 30_000).pvalue > 1e-4


@pytest.mark.parametrize("draft_temperature", [None, 0.6])
def test_sampled_drafts_follow_q(draft_temperature: float | None) -> None:
    case = Case(temperature=1.3, draft_temperature=draft_temperature)
    keys, drafter = row_keys(case, 30_000), make_drafter(case)
    for context in range(VOCAB):
        last, positions = torch.full((30_000,), context), torch.full((30_000,), 3 + context)
        proposal = propose(drafter, last, positions, keys)
        tokens, distribution = proposal.tokens[:, 0], proposal.distribution
        expected = (HEAD[context].double() / (draft_temperature or 1.3)).softmax(-1)
        assert distribution is not None
        q = distribution.probabilities()[:, 0]
        torch.testing.assert_close(q, expected.float().expand_as(q))
        seen = tokens.bincount(minlength=VOCAB)[DRAFT_IDS].double()
        assert int(seen.sum()) == 30_000
        assert stats.chisquare(seen.numpy(), (expected * 30_000).numpy()).pvalue > 1e-4


def test_rows_below_greedy_below_draft_their_argmax() -> None:
    case = Case(temperature=0.5)
    drafter = make_drafter(case)
    drafter.greedy_below = 0.8
    keys = row_keys(case, 100)
    keys = replace(keys, temperature=torch.tensor([0.5, 1.0]).repeat(50))
    proposal = propose(drafter, torch.zeros(100, dtype=torch.int64), torch.full((100,), 3), keys)
    tokens, distribution = proposal.tokens[:, 0], proposal.distribution
    assert set(tokens[::2].tolist()) == {int(DRAFT_IDS[HEAD[0].argmax()])}
    assert distribution is not None
    assert distribution.sampled.tolist() == [False, True] * 50
    assert len(set(tokens[1::2].tolist())) > 1


def broken(old: str, new: str) -> ModuleType:
    """verify.py with one piece of its source replaced."""
    source = inspect.getsource(verify_module)
    assert source.count(old) == 1, f"verify.py no longer reads {old!r}: mend this fault"
    module = ModuleType(verify_module.__name__)
    exec(compile(source.replace(old, new), "broken verify", "exec"), module.__dict__)
    return module


FAULTS = {
    "accepts 5 % too often": ("u * q_draft < p_draft", "u * q_draft < 1.05 * p_draft"),
    "residual is p": ("with_q = (weights - q_at).clamp(min=0)", "with_q = weights"),
    "residual not clamped": ("(weights - q_at).clamp(min=0)", "(weights - q_at)"),
    "residual is |p − q|": ("(weights - q_at).clamp(min=0)", "(weights - q_at).abs()"),
    "one u a step": (
        "positions[:, None] + depth, Purpose",
        "positions[:, None] + 0 * depth, Purpose",
    ),
    "bonus from q": (
        "    weights = p.gather(",
        "    p = torch.cat([p[:, :k], q_full[:, -1:]], 1)\n    weights = p.gather(",
    ),
    "bonus from the row before": (
        "    weights = p.gather(1, accepted[",
        "    weights = p.gather(1, accepted.clamp(max=k - 1)[",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_broken_verifiers_are_rejected(fault: tuple[str, str]) -> None:
    case = CASES["draft probabilities"]
    tokens, _ = decode(case, broken(*fault).verify, row_keys(case))
    reject(tokens, exact_joint(case))


FAULTS_WITHOUT = {
    "accepts 5 % too often": FAULTS["accepts 5 % too often"],
    "recovers the rejected token": (
        "= weights.scatter(-1, drafts.gather(1, at[:, None]), 0.0)",
        "= weights",
    ),
    "one u a step": FAULTS["one u a step"],
}


@pytest.mark.parametrize("fault", FAULTS_WITHOUT.values(), ids=FAULTS_WITHOUT.keys())
def test_broken_verifiers_of_argmax_drafts_are_rejected(fault: tuple[str, str]) -> None:
    case = CASES["argmax drafts"]
    tokens, _ = decode(case, broken(*fault).verify, row_keys(case))
    reject(tokens, exact_joint(case))


def test_a_draft_that_shares_its_noise_with_the_verifier_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = broken("Purpose.DRAFT", "Purpose.EMIT").sample_draft
    monkeypatch.setattr(drafter_module, "sample_draft", shared)
    case = CASES["draft probabilities"]
    tokens, _ = decode(case, verify_module.verify, row_keys(case))
    reject(tokens, exact_joint(case))
