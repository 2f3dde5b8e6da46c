"""Equal prompts that join together are computed once, and decode as each would alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request, Sampling
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.peagle import PeagleHead
from draftlab.target_model.model import Target
from tests.engine.test_engine import Watched, outcome
from tests.helpers.greedy_answers import requests, run

HOT = Sampling(temperature=1.0, top_k=8, seed=5)


def repeated(lengths: tuple[int, ...], times: int) -> list[Request]:
    """Prompts of some lengths, `times` of each, in turn; each request has noise of its own."""
    made = [
        requests(
            1, seed=n, sampling=HOT, shortest=n, longest=n, stop_ids=frozenset(), max_new_tokens=12
        )[0]
        for n in lengths
    ]
    return [replace(r, id=f"{r.id} {i}") for i in range(times) for r in made]


@pytest.mark.parametrize("kind", ["none", "chain", "parallel"])
@pytest.mark.parametrize("options", [{}, {"block_size": 4}, {"block_size": 4, "num_blocks": 40}])
def test_they_decode_as_alone(
    kind: str, options: dict, target: Target, head: Eagle3Head, parallel_head: PeagleHead
) -> None:
    """Also by blocks that prompts fill to the brim, and where some are evicted."""
    used = {"none": None, "chain": head, "parallel": parallel_head}[kind]

    def engine(batch: int, **options: int) -> Engine:
        return Engine(
            target, new_drafter(used, 3) if used else None, batch=batch, max_length=60, **options
        )

    asked = repeated((1, 16, 17, 34), 3)
    alone = engine(1)
    expected = [run(alone, [request])[0] for request in asked]
    # In chunks of 16: of one prompt the last pair stands alone in its chunk.
    found = run(engine(9, prefill_tokens=30, **options), asked)
    assert outcome(found) == outcome(expected)
    assert len({g.token_ids for g in found}) == len(asked)


def test_they_are_computed_once(target: Target, head: Eagle3Head) -> None:
    asked = [replace(request, max_new_tokens=1) for request in repeated((8, 11), 5)]
    watched = Watched(target)
    run(Engine(watched, new_drafter(head, 3), batch=10, max_length=60), asked)
    assert watched.fed == 8 + 11
