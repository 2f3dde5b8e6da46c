"""Equal prompts that are admitted together are computed once and decode as each would alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request, Sampling
from draftlab.heads.block import BlockHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.peagle import PeagleHead
from draftlab.target_model.model import Target
from tests.helpers.engines import RecordingTarget
from tests.helpers.greedy_answers import outcomes, requests, run

HOT = Sampling(temperature=1.0, top_k=8, seed=5)


def repeated(lengths: tuple[int, ...], times: int) -> list[Request]:
    """Return prompts of some lengths, `times` of each, with different noise."""
    base = [
        requests(
            1, seed=n, sampling=HOT, shortest=n, longest=n, stop_ids=frozenset(), max_new_tokens=12
        )[0]
        for n in lengths
    ]
    return [replace(r, id=f"{r.id} {i}") for i in range(times) for r in base]


@pytest.mark.parametrize("kind", ["none", "chain", "parallel", "dspark"])
@pytest.mark.parametrize("options", [{}, {"block_size": 4}, {"block_size": 4, "num_blocks": 40}])
def test_equal_prompts_decode_as_alone(
    kind: str,
    options: dict,
    target: Target,
    head: Eagle3Head,
    parallel_head: PeagleHead,
    block_heads: dict[str, BlockHead],
) -> None:
    """Some prompts fill their blocks exactly, and the small pool preempts some sequences."""
    draft_head = {"none": None, "chain": head, "parallel": parallel_head, **block_heads}[kind]

    def engine(batch: int, **options: int) -> Engine:
        drafter = new_drafter(draft_head, 3) if draft_head else None
        return Engine(target, drafter, batch=batch, max_length=60, **options)

    prompts = repeated((1, 16, 17, 34), 3)
    alone = engine(1)
    expected = [run(alone, [request])[0] for request in prompts]
    # Chunks have 16 tokens: one prompt's last pair is alone in its chunk.
    generations = run(engine(9, prefill_tokens=30, **options), prompts)
    assert outcomes(generations) == outcomes(expected)
    assert len({g.token_ids for g in generations}) == len(prompts)


def test_equal_prompts_are_computed_once(target: Target, head: Eagle3Head) -> None:
    prompts = [replace(request, max_new_tokens=1) for request in repeated((8, 11), 5)]
    recording = RecordingTarget(target)
    run(Engine(recording, new_drafter(head, 3), batch=10, max_length=60), prompts)
    assert recording.num_tokens == 8 + 11


def test_short_prompts_are_no_padding_of_a_long_one(target: Target, head: Eagle3Head) -> None:
    """A chunk has the prompts that are not computed yet, and then has more tokens of each."""
    prompts = [replace(request, max_new_tokens=1) for request in repeated((3, 9, 50, 5), 1)]
    recording = RecordingTarget(target)
    engine = Engine(recording, new_drafter(head, 3), batch=4, max_length=60, prefill_tokens=64)
    run(engine, prompts)
    assert recording.num_tokens == 3 + 9 + 50 + 5
    assert recording.padding == (16 - 3) + (16 - 9) + (16 - 5)  # of the first chunk alone
