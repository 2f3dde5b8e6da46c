"""Every architecture of the zoo decodes with drafts as transformers does without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftlab.engine.drafter import Proposal, VerifiedFeatures
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request
from draftlab.engine.scheduler import Scheduler
from draftlab.kernels.sampling_types import SamplingMetadata, draft_index
from draftlab.target_model.recurrent import RecurrentStates
from tests.helpers.greedy_answers import run
from tests.helpers.hybrid_zoo import HYBRID
from tests.helpers.zoo import SHAPE, ZOO, eager_model, load_on_cpu, random_texts, zoo_folder

VOCABULARY, NEW_TOKENS = int(str(SHAPE["vocab_size"])), 36


class BigramDrafter:
    """Proposes the successor of a token in some texts, and a wrong token every fifth position."""

    kind = "chain"
    boundaries = ()
    draft_vocab = None
    pools = ()

    def __init__(self, texts: list[list[int]], k: int) -> None:
        self.k = k
        self.draft_ids = torch.arange(VOCABULARY)
        self.draft_index = draft_index(self.draft_ids, VOCABULARY)
        self.follower = torch.arange(VOCABULARY)
        for text in texts:
            self.follower[text[:-1]] = torch.tensor(text[1:])

    def start(self, num_blocks: int, block_size: int, **_: object) -> None:
        pass

    def extend_cache(self, verified: VerifiedFeatures) -> None:
        pass

    def propose(self, verified: VerifiedFeatures) -> Proposal:
        tokens, last = (
            t.gather(1, verified.counts[:, None] - 1)[:, 0]
            for t in (verified.tokens, verified.positions)
        )
        drafts = []
        for step in range(self.k):
            tokens = self.follower[tokens]
            wrong = (last + 2 + step) % 5 == 0
            drafts.append((tokens + wrong) % VOCABULARY)
        return Proposal(torch.stack(drafts, 1))

    def sampling(self, keys: SamplingMetadata) -> tuple[Tensor, Tensor]:
        return keys.temperature, torch.zeros_like(keys.temperature, dtype=torch.bool)


@torch.inference_mode()
def greedy(folder: Path, prompt: tuple[int, ...]) -> list[int]:
    """Return transformers' greedy answer to one prompt, with its own attention and cache."""
    model = eager_model(folder)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    output = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("kind", "k"),
    [(kind, 3) for kind in ZOO]
    + [(kind, 11) for kind in ("llama4", "llama4_text", "gpt_oss", "mistral", "gemma2")]
    + [(kind, k) for kind in HYBRID for k in (1, 3, 8)],
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


@pytest.mark.parametrize("kind", HYBRID)
def test_recurrent_states_survive_evictions_and_shared_prompts(kind: str, tmp_path: Path) -> None:
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


def test_a_state_after_rejected_drafts_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo_folder(tmp_path, "qwen3_next")
    prompt = tuple(random_texts((11,))[0].tolist())
    expected = greedy(folder, prompt)
    engine = Engine(load_on_cpu(folder), BigramDrafter([expected], 3), batch=1, max_length=72)
    keep = RecurrentStates.keep
    monkeypatch.setattr(
        RecurrentStates, "keep", lambda states, counts: keep(states, torch.full_like(counts, 4))
    )
    (generation,) = run(engine, [Request("0", prompt, NEW_TOKENS)])
    assert list(generation.token_ids) != expected
