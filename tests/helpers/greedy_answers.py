"""Random requests, engines' generations and drafts, and records of the target's greedy answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftlab.engine.counters import Counters
from draftlab.engine.drafter import HeadDrafter, new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.heads.head import DraftHead
from draftlab.store.store import Record
from draftlab.target_model.model import Target

BOUNDARIES = (1, 2, 3)
STOPS = frozenset({282, 285})
GREEDY = Sampling()


def requests(
    count: int,
    *,
    seed: int = 0,
    sampling: Sampling = GREEDY,
    max_new_tokens: int = 24,
    stop_ids: frozenset[int] = STOPS,
    shortest: int = 1,
    longest: int = 20,
) -> list[Request]:
    """Return requests with random prompts of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for i in range(count):
        length = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        ids = torch.randint(0, 281, (length,), generator=generator).tolist()
        result.append(Request(f"{seed}-{i}", tuple(ids), max_new_tokens, sampling, stop_ids))
    return result


def run(engine: Any, prompts: Sequence[Request]) -> list[Generation]:
    """Return the generations in the order of the requests; check each one's accounting."""
    by_id = {g.id: g for g in engine.generate(prompts)}
    assert len(by_id) == len(prompts)
    for generation in by_id.values():
        check_accounting(generation, engine.k)
    return [by_id[request.id] for request in prompts]


def outcomes(generations: Sequence[Generation]) -> list[Any]:
    """Return everything of generations except times and expected acceptance."""
    return [(g.id, g.token_ids, g.finish, g.counters, g.steps) for g in generations]


def check_accounting(generation: Generation, k: int) -> None:
    """Check a request's token accounting (methods §6.3, check 1) and its counters by its steps."""
    counters = Counters(k)
    for drafted, accepted in generation.steps:
        counters.add_step(drafted, accepted)
    counters.truncated_tokens = generation.counters.truncated_tokens
    assert counters == generation.counters
    generation.counters.check_tokens(len(generation.token_ids), 1)
    assert sum(generation.counters.accepted_at) == generation.counters.accepted


def answers(target: Target, count: int, *, seed: int) -> list[tuple[Request, Generation]]:
    """Return requests and the target's greedy answers."""
    prompts = requests(count, seed=seed, shortest=3)
    engine = Engine(target, batch=16, max_length=target.max_length)
    return list(zip(prompts, run(engine, prompts), strict=True))


def greedy_records(
    target: Target,
    pairs: Sequence[tuple[Request, Generation]],
    boundaries: tuple[int, ...] = BOUNDARIES,
) -> list[Record]:
    """Return float32 records of answers, as recording would write them."""
    records = []
    for request, generation in pairs:
        tokens = torch.tensor([*request.prompt_ids, *generation.token_ids])
        states = target.states(tokens[None], boundaries)
        logits = target.logits(states.last[0])
        spans = torch.ones_like(tokens)
        spans[: len(request.prompt_ids)] = 0
        records.append(
            Record(
                request.id,
                tokens,
                spans,
                states.features[0].clone(),
                states.last[0].clone(),
                logits.logsumexp(-1).clone(),
                logits.argmax(-1).clone(),
                0.0,
            )
        )
    return records


Drafts = list[list[int]]
"""The draft tokens of each step of one answer."""


def recording_drafter(head: DraftHead, k: int) -> tuple[HeadDrafter, Drafts]:
    """Return a drafter of the most probable tokens, for a batch of one, and the list of its drafts,
    which grows as it drafts.
    """
    drafter, drafts = new_drafter(head, k, draft_probs=False), []
    propose = drafter.propose

    def recorded(verified: Any) -> Any:
        proposal = propose(verified)
        drafts.append(proposal.tokens[0].tolist())
        return proposal

    drafter.propose = recorded
    return drafter, drafts
