"""The engine: the target's own tokens, whatever the batch, the order and the drafter."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.errors import UserError
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.target_model.model import Target, TargetSettings, load_target
from tests.helpers.greedy_answers import requests, run

HOT = Sampling(temperature=1.0, top_p=0.95, seed=7)


def make_engine(
    target: Target,
    head: Eagle3Head | None,
    batch: int,
    *,
    k: int = 3,
    draft_probs: bool = True,
    max_length: int = 128,
) -> Engine:
    drafter = ChainDrafter(head, k, draft_probs=draft_probs) if head else None
    return Engine(target, drafter, batch=batch, max_length=max_length)


def outcome(generations: list[Generation]) -> list[Any]:
    """All of it but times."""
    return [(g.id, g.token_ids, g.finish, g.counters, g.steps) for g in generations]


@pytest.fixture(scope="module")
def greedy(target: Target) -> tuple[list[Request], list[tuple[int, ...]]]:
    """Requests, and what transformers generates for them."""
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype="float32").eval()
    # Half of them the head was trained on, so that long runs are accepted too.
    asked = requests(5, seed=1) + requests(5, seed=100, shortest=3)
    expected = []
    for request in asked:
        ids = torch.tensor([request.prompt_ids])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request.max_new_tokens,
            eos_token_id=sorted(request.stop_ids),
        )
        expected.append(tuple(found[0, ids.shape[1] :].tolist()))
    return asked, expected


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("drafted", [False, True])
def test_greedy_tokens_are_transformers_own(
    batch: int, drafted: bool, target: Target, head: Eagle3Head, greedy
) -> None:
    asked, expected = greedy
    engine = make_engine(target, head if drafted else None, batch)
    found = run(engine, asked)
    assert [g.token_ids for g in found] == expected
    backwards = run(engine, asked[::-1])
    assert outcome(backwards[::-1]) == outcome(found)
    if drafted:  # drafts of all fates, or the test says little
        fates = {accepted for g in found for drafts, accepted in g.steps if drafts == 3}
        assert fates >= {0, 1, 3}


@pytest.mark.parametrize("draft_probs", [None, False, True])
def test_sampling_does_not_depend_on_batch_or_order(
    draft_probs: bool | None, target: Target, head: Eagle3Head
) -> None:
    asked = requests(11, seed=2, sampling=HOT)
    used = None if draft_probs is None else head
    expected = run(make_engine(target, used, 1, draft_probs=bool(draft_probs)), asked)
    engine = make_engine(target, used, 5, draft_probs=bool(draft_probs))
    for order in (asked, asked[6:] + asked[5::-1]):
        found = {g.id: g for g in run(engine, order)}
        assert outcome([found[r.id] for r in asked]) == outcome(expected)
    other = run(engine, [replace(r, sampling=replace(HOT, seed=8)) for r in asked])
    assert [g.token_ids for g in other] != [g.token_ids for g in expected]


def test_greedy_and_sampled_rows_share_a_batch(target: Target, head: Eagle3Head) -> None:
    kinds = [Sampling(), HOT, Sampling(0.7, top_k=4, seed=3)]
    asked = [replace(r, sampling=kinds[i % 3]) for i, r in enumerate(requests(12, seed=3))]
    mixed = run(make_engine(target, head, 6), asked)
    alone = make_engine(target, head, 1)
    assert outcome(mixed) == outcome([run(alone, [r])[0] for r in asked])


def test_an_id_names_its_noise(target: Target) -> None:
    request = replace(requests(1, sampling=HOT)[0], prompt_ids=(5, 6, 7))
    engine = make_engine(target, None, 4)
    found = run(engine, [replace(request, id=str(i)) for i in range(4)])
    assert len({g.token_ids for g in found}) == 4


@pytest.mark.parametrize("sampling", [Sampling(), HOT])
def test_torchs_global_generator_is_neither_read_nor_written(
    sampling: Sampling, target: Target, head: Eagle3Head
) -> None:
    asked, results = requests(4, seed=4, sampling=sampling), []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            results.append(outcome(run(make_engine(target, head, 4), asked)))
            assert torch.equal(torch.get_rng_state(), before)
    assert results[0] == results[1]


@pytest.mark.parametrize("sampling", [Sampling(), HOT])
def test_what_earlier_requests_leave_behind_does_not_matter(
    sampling: Sampling, target: Target, head: Eagle3Head
) -> None:
    engine = make_engine(target, head, 3)
    asked = requests(6, seed=5, sampling=sampling)
    expected = outcome(run(engine, asked))
    stream = engine.generate(requests(9, seed=6, sampling=sampling))
    next(stream)
    stream.close()  # abandoned in the middle
    assert outcome(run(engine, asked)) == expected


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), HOT])
def test_a_stop_token_ends_the_answer_and_is_kept(
    drafted: bool, sampling: Sampling, target: Target, head: Eagle3Head
) -> None:
    engine = make_engine(target, head if drafted else None, 4)
    asked = [replace(r, stop_ids=frozenset()) for r in requests(12, seed=7, sampling=sampling)]
    whole = run(engine, asked)
    assert {(len(g.token_ids), g.finish) for g in whole} == {(24, "length")}
    # A token from the middle of each answer becomes its stop token.
    stopping = [
        replace(r, stop_ids=frozenset({g.token_ids[5 + i]}))
        for i, (r, g) in enumerate(zip(asked, whole, strict=True))
    ]
    truncated = 0
    for request, long, short in zip(stopping, whole, run(engine, stopping), strict=True):
        end = next(i for i, t in enumerate(long.token_ids) if t in request.stop_ids)
        assert (short.token_ids, short.finish) == (long.token_ids[: end + 1], "stop")
        truncated += short.counters.truncated_tokens
        # Accepted drafts count before truncation.
        assert short.steps == long.steps[: len(short.steps)]
    assert (truncated > 0) == drafted


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_max_new_tokens(count: int, target: Target, head: Eagle3Head) -> None:
    asked = requests(6, seed=8, stop_ids=frozenset())
    long = run(make_engine(target, head, 3), asked)
    short = run(make_engine(target, head, 3), [replace(r, max_new_tokens=count) for r in asked])
    assert [g.token_ids for g in short] == [g.token_ids[:count] for g in long]
    assert {g.finish for g in short} == {"length"}
    if count == 1:
        assert {(g.counters.drafts, g.steps, g.tpot_s) for g in short} == {(0, (), None)}
    for generation in short:
        assert 0 < generation.first_token_s <= generation.total_s


class Watched:
    """A target that notes every position it is fed."""

    def __init__(self, target: Target) -> None:
        self.target, self.highest, self.fed = target, -1, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def states(self, token_ids, boundaries=(), *, positions, cache):
        self.highest = max(self.highest, int(positions.max()))
        self.fed += int((positions >= 0).sum())
        assert bool((cache.slots[positions < 0] == -1).all())
        return self.target.states(token_ids, boundaries, positions=positions, cache=cache)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("limit", [21, 24])
def test_no_position_beyond_the_limit_is_fed(
    drafted: bool, limit: int, target: Target, head: Eagle3Head
) -> None:
    asked = requests(10, seed=9, stop_ids=frozenset(), max_new_tokens=30)
    asked.append(replace(asked[0], id="full", prompt_ids=tuple(range(limit - 1))))
    watched: Any = Watched(target)
    engine = make_engine(watched, head if drafted else None, 4, max_length=limit)
    found = run(engine, asked)
    assert watched.highest == limit - 2
    roomy = run(make_engine(target, None, 4), asked)
    for request, generation, more in zip(asked, found, roomy, strict=True):
        room = limit - len(request.prompt_ids)
        assert (len(generation.token_ids), generation.finish) == (room, "length")
        assert generation.token_ids == more.token_ids[:room]
    if drafted:  # near the limit steps draft fewer, at it nothing
        assert {drafts for g in found for drafts, _ in g.steps} >= {1, 2, 3}


def test_one_token_prompts(target: Target, head: Eagle3Head) -> None:
    asked = requests(5, seed=10, longest=1)
    assert {len(r.prompt_ids) for r in asked} == {1}
    drafted, plain = (run(make_engine(target, h, 5), asked) for h in (head, None))
    assert [g.token_ids for g in drafted] == [g.token_ids for g in plain]


@pytest.mark.parametrize("length", [0, 128, 300])
def test_prompts_that_do_not_fit_are_refused(length: int, target: Target) -> None:
    good = requests(1)[0]
    bad = replace(good, id="the long one", prompt_ids=(5,) * length)
    with pytest.raises(UserError, match="expected a prompt of 1 to 127 tokens") as caught:
        list(make_engine(target, None, 2).generate([good, bad]))
    assert "the long one" in caught.value.where


def test_nothing_asked(target: Target, head: Eagle3Head) -> None:
    assert run(make_engine(target, head, 2), []) == []


@pytest.mark.parametrize(
    "settings", [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 1.5}, {"top_p": -0.2}]
)
def test_impossible_sampling_is_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="expected temperature"):
        Sampling(**settings)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are asked for")
def test_a_gpu_that_is_not_the_current_one(target: Target, head: Eagle3Head, greedy) -> None:
    """Graphs, events and copies are of its streams, or results are read before they are there."""
    asked, expected = greedy
    there = load_target(TargetSettings(path=str(target.folder), dtype="float32", device="cuda:1"))
    engine = make_engine(there, deepcopy(head).to("cuda:1"), 3)
    assert torch.cuda.current_device() == 0
    assert [g.token_ids for g in run(engine, asked)] == expected
    assert torch.cuda.current_device() == 0
