"""Adaptive verification: the same tokens and distributions whatever the shapes of steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from draftlab.engine.adaptive import AdaptiveVerification, Decision
from draftlab.engine.base_drafter import VerifiedFeatures
from draftlab.engine.draft_sampler import DraftSampler, Proposal
from draftlab.engine.drafter import ChainDrafter, new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request, Sampling
from draftlab.engine.step import StepShape
from draftlab.engine.step_costs import ShapeFamily
from draftlab.kernels.draft_allocation import row_index
from draftlab.kernels.step_layout import unpack_results
from draftlab.target_model.fused_decoder import FusedDecoder
from draftlab.target_model.model import Target
from tests.engine.test_lossless_engine import poor_drafter
from tests.helpers.decoding import DFLASH, DSPARK, EAGLE, PARALLEL, untrained_head
from tests.helpers.engines import JOINT_VOCAB, ScriptedPolicy, joint_p_value
from tests.helpers.zoo import zoo_target

OPTIONS = {"confidence": True, "fresh_noise": True}
SCRIPT = [
    *((3, 1), (3, 0.5), (3, 0.5), (0, 1), (0, 1), (0, 1), (1, 1)),
    *((2, 0.75), (2, 0.75), (3, 0.3), (0, 1), (3, 1)),
]
"""K and share of each step. A share is taken of the drafts that the step before proposed."""


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("tiny")
    return zoo_target(path, "llama", vocab_size=JOINT_VOCAB, num_hidden_layers=3, seed=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return zoo_target(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=4, seed=1)


FAMILIES = {
    "chain": {},
    "eagle": EAGLE,
    "parallel": PARALLEL,
    "dflash": DFLASH,
    "dspark": DSPARK,
}


def drafter_of(target: Target, kind: str, **options: Any) -> Any:
    family = FAMILIES[kind]
    if "mask_token_id" in family:
        family = family | {"mask_token_id": target.vocab_size - 1}
    head = untrained_head(target, 3, target.vocab_size, **family)
    return new_drafter(head.eval().requires_grad_(False), 3, **options)


def requests(count: int = 7, temperature: float = 0.0) -> list[Request]:
    return [
        Request(str(i), tuple(range(2, 5 + i)), 20 + i, Sampling(temperature, seed=3))
        for i in range(count)
    ]


def decode(engine: Engine, prompts: list[Request]) -> dict[str, tuple[int, ...]]:
    return {g.id: g.token_ids for g in engine.generate(prompts)}


def adaptive_engine(target: Target, drafter: Any, *, compact: bool, **options: Any) -> Engine:
    engine = Engine(
        target, drafter, batch=4, max_length=64, adaptive=AdaptiveVerification(), **options
    )
    if compact:
        engine.step.decoder = FusedDecoder(target)
    engine.adaptive.policy = ScriptedPolicy(SCRIPT, 3)
    return engine


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_do_not_depend_on_the_shapes(kind: str, compact: bool, target: Target) -> None:
    """Greedy tokens are plain decoding's, with steps of every shape, evictions included."""
    plain = decode(Engine(target, batch=4, max_length=64), requests())
    for blocks in ({}, {"block_size": 4, "num_blocks": 33}):
        engine = adaptive_engine(
            target, drafter_of(target, kind, **OPTIONS), compact=compact, **blocks
        )
        assert engine.step.compacts == compact
        assert decode(engine, requests()) == plain
        assert engine.adaptive.policy.steps > len(SCRIPT)


class DraftRecorder:
    """Records the drafts that are proposed after each prefix of each request."""

    def __init__(self, engine: Engine) -> None:
        self.drafts: dict[tuple[int, int], list[int]] = {}
        store, batch = engine.step.store_drafts, engine.input_batch

        def recorded(index: Tensor, proposal: Any) -> None:
            store(index, proposal)
            lengths, prompts = batch.length[index].tolist(), batch.keys.prompt[index].tolist()
            rows = zip(lengths, prompts, proposal.tokens.tolist(), strict=True)
            self.drafts |= {(prompt, length): drafts for length, prompt, drafts in rows if length}

        engine.step.store_drafts = recorded


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("fault", [None, "nothing catches up"])
def test_drafts_after_steps_without_the_head(
    kind: str, fault: str | None, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft KV cache catches up: drafts are those of steps that always run the head."""
    always = Engine(target, drafter_of(target, kind), batch=4, max_length=64)
    expected = DraftRecorder(always)
    decode(always, requests())
    engine = adaptive_engine(target, drafter_of(target, kind, **OPTIONS), compact=True)
    engine.adaptive.policy = ScriptedPolicy([(0, 1)] * 6 + [(3, 1)] * 2, 3)
    if fault:
        monkeypatch.setattr(Engine, "_catch_up", lambda *_: iter(()))
    recorder = DraftRecorder(engine)
    decode(engine, requests())
    common = recorder.drafts.keys() & expected.drafts.keys()
    assert len(common) > 20
    equal = all(recorder.drafts[key] == expected.drafts[key] for key in common)
    assert equal == (fault is None)


class TrialPolicy(ScriptedPolicy):
    """Suspends drafting, and tries it with one row."""

    def __init__(self) -> None:
        super().__init__([(0, 1), (0, 1), (0, 1), (3, 1), (3, 1)], 3)
        self.drafted: list[int] = []

    def decide(self, rows: int) -> Decision:
        decision = super().decide(rows)
        return replace(decision, most_rows=1 if decision.family.k else None)

    def observe(self, accepted: np.ndarray, num_drafts: np.ndarray) -> None:
        self.drafted.append(int((num_drafts > 0).sum()))


def test_suspended_steps_are_those_of_plain_decoding(target: Target) -> None:
    """They take no features; a trial computes one row again, and its results alone are shown."""
    plain = decode(Engine(target, batch=4, max_length=64), requests(4))
    engine = adaptive_engine(target, drafter_of(target, "chain", **OPTIONS), compact=False)
    policy = engine.adaptive.policy = TrialPolicy()
    behind, catch_up = [], engine._catch_up
    boundaries, states = [], engine.step.decoder.states

    def recorded_catch_up(sequences: list[Any], *rest: Any) -> Any:
        behind.append(len(sequences))
        yield from catch_up(sequences, *rest)

    def recorded_states(tokens: Tensor, names: Any = (), **options: Any) -> Any:
        if engine.adaptive.shape.k == 0:
            boundaries.append(tuple(names))
        return states(tokens, names, **options)

    engine._catch_up = recorded_catch_up
    engine.step.decoder = SimpleNamespace(states=recorded_states, logits=engine.step.decoder.logits)
    assert decode(engine, requests(4)) == plain
    assert set(boundaries) == {()}
    assert set(behind) == {1}
    assert set(policy.drafted) >= {1}
    assert max(policy.drafted) <= 2  # one row, in one or two steps


JOINT_SCRIPT = [(2, 0.5), (2, 0.25), (0, 1), (2, 0.5), (2, 0.75), (1, 1)]


@pytest.mark.parametrize("draft_probs", [True, False])
@pytest.mark.parametrize("kind", ["chain", "parallel", "dspark"])
def test_adaptive_verification_is_exact(kind: str, draft_probs: bool, tiny_target: Target) -> None:
    drafter = poor_drafter(tiny_target, kind, draft_probs=draft_probs, **OPTIONS)
    assert joint_p_value(tiny_target, drafter, policy=ScriptedPolicy(JOINT_SCRIPT, 2)) > 1e-3


@pytest.mark.parametrize("kind", ["chain", "parallel"])
def test_adaptive_block_verification_is_exact(kind: str, tiny_target: Target) -> None:
    drafter = poor_drafter(tiny_target, kind, verification="block", **OPTIONS)
    assert joint_p_value(tiny_target, drafter, policy=ScriptedPolicy(JOINT_SCRIPT, 2)) > 1e-3


@pytest.mark.parametrize("fault", [None, "logits of the next token"])
def test_tokens_without_gaps_are_exact(
    fault: str | None, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused decoder computes verified drafts alone; the verifier must read the right rows."""
    if fault:
        monkeypatch.setattr(
            "draftlab.kernels.verify.row_index",
            lambda start, width, count: row_index(start + 1, width, count),
        )
    drafter = poor_drafter(tiny_target, "chain", **OPTIONS)
    policy, decoder = ScriptedPolicy(JOINT_SCRIPT, 2), FusedDecoder(tiny_target)
    p_value = joint_p_value(tiny_target, drafter, policy=policy, decoder=decoder)
    assert p_value < 1e-6 if fault else p_value > 1e-3


def test_a_choice_that_looks_at_the_draft_is_noticed(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify a draft only if it is likely: the tokens that follow are no longer the target's."""
    right = DraftSampler.draw

    def peeking(self: DraftSampler, depth: int, logits: Tensor, *rest: Any) -> Tensor:
        tokens = right(self, depth, logits, *rest)
        q = (logits / 1.3).softmax(-1)
        drawn = self.settings.index[tokens].long()
        self.confidence[depth] = q.gather(-1, drawn[:, None])[:, 0].logit()
        return tokens

    monkeypatch.setattr(DraftSampler, "draw", peeking)
    drafter, halves = poor_drafter(tiny_target, "chain", **OPTIONS), [(2, 0.5)]
    assert joint_p_value(tiny_target, drafter, policy=ScriptedPolicy(halves, 2)) < 1e-6
    monkeypatch.undo()
    assert joint_p_value(tiny_target, drafter, policy=ScriptedPolicy(halves, 2)) > 1e-3


def test_a_drafter_without_confidence_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="confidence"):
        Engine(
            target,
            drafter_of(target, "chain"),
            batch=1,
            max_length=64,
            adaptive=AdaptiveVerification(),
        )


def test_costs_are_those_of_different_tokens(target: Target) -> None:
    """Equal tokens would all visit the same experts of a mixture."""
    engine = Engine(
        target,
        drafter_of(target, "chain", **OPTIONS),
        batch=4,
        max_length=64,
        adaptive=AdaptiveVerification(),
    )
    run, batch, fed = engine.adaptive.run, engine.input_batch, []

    def recorded(slots: tuple[int, ...], shape: StepShape) -> Tensor:
        index = batch.index(slots)
        fed.append(
            [*batch.newest[index].tolist(), *batch.drafts[index, : shape.k].flatten().tolist()]
        )
        return run(slots, shape)

    engine.adaptive.run = recorded
    engine.adaptive.measure(requests())
    assert all(len(set(tokens)) >= min(len(tokens), 6) for tokens in fed)


@pytest.mark.parametrize("scripted", [False, True])
def test_recurrent_targets(scripted: bool, tmp_path: Path) -> None:
    """Costs are measured before any prompt has allocated the recurrent states."""
    target = zoo_target(tmp_path, "qwen3_next")
    plain = decode(Engine(target, batch=4, max_length=64), requests(3))
    engine = Engine(
        target,
        drafter_of(target, "chain", **OPTIONS),
        batch=4,
        max_length=64,
        adaptive=AdaptiveVerification(),
    )
    if scripted:
        engine.adaptive.policy = ScriptedPolicy(SCRIPT, 3)
    assert decode(engine, requests(3)) == plain


class FixedDrafter(ChainDrafter):
    """A drafter of another package, written before `propose` took the number of drafts."""

    def propose(self, verified: VerifiedFeatures) -> Proposal:
        return super().propose(verified)


def test_a_drafter_without_a_choice_of_k_still_decodes(target: Target) -> None:
    drafter = FixedDrafter(drafter_of(target, "chain").head, 3)
    plain = decode(Engine(target, batch=4, max_length=64), requests())
    assert decode(Engine(target, drafter, batch=4, max_length=64), requests()) == plain


def test_costs_are_measured_and_leave_nothing_behind(target: Target) -> None:
    engine = Engine(
        target,
        drafter_of(target, "chain", **OPTIONS),
        batch=4,
        max_length=64,
        adaptive=AdaptiveVerification(),
    )
    plain = decode(Engine(target, batch=4, max_length=64), requests())
    assert decode(engine, []) == {}
    assert decode(engine, requests()) == plain
    costs = engine.adaptive.policy.costs
    assert set(costs.measured) == {ShapeFamily(k) for k in (0, 1, 2, 3)}
    assert all(set(by_rows) == {1, 2, 4} for by_rows in costs.measured.values())
    admissions = engine.adaptive.policy.admissions.device
    assert {k: set(by_requests) for k, by_requests in admissions.items()} == {
        k: {1, 4} for k in (0, 1, 2, 3)
    }
    assert admissions[3][4] > admissions[3][1] > 1.2 * admissions[0][1] > 0
    lengths = [len(tokens) for tokens in plain.values()]
    assert engine.adaptive.policy.answer_tokens == pytest.approx(np.mean(lengths))
    assert decode(engine, requests(3)) == {name: plain[name] for name in ("0", "1", "2")}


def test_every_step_states_the_confidence_of_its_drafts(target: Target) -> None:
    """Also steps with fewer drafts near the length limit."""
    drafter = drafter_of(target, "chain", **OPTIONS)
    for generation in Engine(target, drafter, batch=4, max_length=24).generate(requests(3)):
        assert min(generation.steps)[0] < 3
        assert [len(c) for c in generation.confidence] == [n for n, _ in generation.steps]


def test_a_cycle_verifies_all_drafts_of_every_shape(target: Target) -> None:
    """A step can verify no more than the step before has proposed."""
    engine = Engine(
        target,
        drafter_of(target, "chain", **OPTIONS),
        batch=4,
        max_length=128,
        adaptive=AdaptiveVerification(cycle=True),
    )
    steps: list[tuple[StepShape, Tensor]] = []
    run = engine._run_step

    def recorded(slots: tuple[int, ...], shape: StepShape, *, limited: bool) -> Tensor:
        result = run(slots, shape, limited=limited)
        steps.append((shape, unpack_results(result, confidence=shape.confidence)[2]))
        return result

    engine._run_step = recorded
    decode(engine, [Request(str(i), (2, 3, 4), 100) for i in range(4)])
    shapes = {family.shape(4) for family in engine.adaptive.policy.families}
    most = {shape: 4 * shape.k if shape.budget is None else shape.budget for shape in shapes}
    verified = {shape: max(int(n.sum()) for s, n in steps if s == shape) for shape in shapes}
    assert verified == most


def test_a_drafter_with_a_fixed_number_of_drafts_is_refused(target: Target) -> None:
    class FixedDrafter(ChainDrafter):
        def propose(self, verified):
            return super().propose(verified)

    drafter = FixedDrafter(drafter_of(target, "chain").head, 3, **OPTIONS)
    with pytest.raises(ValueError, match="propose takes no `k`"):
        adaptive_engine(target, drafter, compact=False)
