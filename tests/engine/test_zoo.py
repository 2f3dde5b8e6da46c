"""Every architecture of the zoo decodes with drafts as transformers does without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draftlab.engine.engine import Engine
from draftlab.engine.kv_pool import new_kv_pool
from draftlab.engine.sampling import Request
from draftlab.engine.scheduler import Scheduler
from tests.helpers.bigrams import NEW_TOKENS, BigramDrafter, greedy
from tests.helpers.greedy_answers import run
from tests.helpers.hybrid_zoo import HYBRID
from tests.helpers.zoo import ZOO, load_on_cpu, random_texts, zoo_folder


@pytest.mark.parametrize(
    ("kind", "k"),
    [(kind, 3) for kind in ZOO]
    + [(kind, 11) for kind in ("llama4", "llama4_text", "gpt_oss", "mistral", "gemma2")]
    + [(kind, k) for kind in HYBRID for k in (3, 8)],
)
def test_decoding_equals_generate(kind: str, k: int, tmp_path: Path) -> None:
    """Prompts of different lengths, two at a time, over several windows, chunks and pages.

    11 drafts are longer than a window or chunk of 8.
    """
    folder = zoo_folder(tmp_path, kind)
    prompts = [tuple(text.tolist()) for text in random_texts((23, 2, 11))]
    expected = [greedy(folder, prompt) for prompt in prompts]
    drafter = BigramDrafter(expected, k)
    engine = Engine(
        load_on_cpu(folder), drafter, batch=2, max_length=72, block_size=16, prefill_tokens=13
    )
    requests = [Request(str(i), prompt, NEW_TOKENS) for i, prompt in enumerate(prompts)]
    generations = run(engine, requests)
    assert [list(generation.token_ids) for generation in generations] == expected
    accepted = sum(generation.counters.accepted for generation in generations)
    assert 0 < accepted < sum(generation.counters.draft_tokens for generation in generations)


@pytest.mark.parametrize("kind", [*HYBRID, "deepseek_v3"])
def test_caches_survive_evictions_and_shared_prompts(kind: str, tmp_path: Path) -> None:
    """Eight requests share a pool for three or four; some have the same prompt."""
    folder = zoo_folder(tmp_path, kind)
    prompts = [tuple(text.tolist()) for text in random_texts((23, 2, 11, 30))]
    answers = [greedy(folder, prompt) for prompt in prompts]
    pairs = list(zip(prompts, answers, strict=True))
    chosen = [pairs[i] for i in (0, 1, 0, 2, 3, 1, 0, 3)]
    engine = Engine(
        load_on_cpu(folder),
        BigramDrafter(answers, 4),
        batch=8,
        max_length=72,
        block_size=16,
        num_blocks=16,
        prefill_tokens=40,
    )
    requests = [Request(str(i), prompt, NEW_TOKENS) for i, (prompt, _) in enumerate(chosen)]
    evictions = 0
    preempt = Scheduler.preempt

    def counted(scheduler: Scheduler) -> None:
        nonlocal evictions
        evictions += 1
        preempt(scheduler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "preempt", counted)
        generations = run(engine, requests)
    assert [list(generation.token_ids) for generation in generations] == [a for _, a in chosen]
    assert evictions > 0


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "lfm2"])
def test_engines_take_turns_with_a_pool_of_states(kind: str, tmp_path: Path) -> None:
    """Engines of other K and batch, and without drafts, find nothing of each other's states."""
    folder, max_length = zoo_folder(tmp_path, kind), 60
    target = load_on_cpu(folder)
    prompts = [tuple(text.tolist()) for text in random_texts((1, 23, 2, 11))]
    answers = [greedy(folder, prompt) for prompt in prompts]
    pool = new_kv_pool(target, batch=4, max_length=max_length, block_size=16)
    engines = [
        Engine(
            target,
            BigramDrafter(answers, k) if k else None,
            batch=batch,
            max_length=max_length,
            cache=pool,
        )
        for k, batch in ((0, 4), (8, 2), (3, 1))
    ]
    requests = [Request(str(i), prompt, NEW_TOKENS) for i, prompt in enumerate(prompts)]
    room = [max_length - len(prompt) for prompt in prompts]
    expected = [answer[:n] for answer, n in zip(answers, room, strict=True)]
    for engine in engines * 2:
        assert [list(one.token_ids) for one in run(engine, requests)] == expected
    stops = frozenset([answers[1][7]])
    stopped = replace(requests[1], stop_ids=stops)
    first, second = run(engines[1], [stopped, requests[3]])
    end = answers[1].index(*stops) + 1
    assert (first.finish, list(first.token_ids)) == ("stop", answers[1][:end])
    assert list(second.token_ids) == answers[3]
