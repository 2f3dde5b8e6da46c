"""Every architecture of the zoo decodes, with drafts, as transformers alone does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftlab.engine.drafter import Observed, Proposal
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request
from draftlab.kernels.rows import RowKeys, draft_index
from draftlab.target_model.model import TargetSettings, load_target
from tests.helpers.greedy_answers import run
from tests.helpers.zoo import SHAPE, ZOO, eager_model, zoo_folder

VOCABULARY, NEW_TOKENS = int(str(SHAPE["vocab_size"])), 36


class BigramDrafter:
    """Proposes what followed a token in some texts, and nonsense at every fifth position."""

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

    def observe(self, observed: Observed) -> None:
        pass

    def propose(self, observed: Observed) -> Proposal:
        tokens, last = (
            t.gather(1, observed.counts[:, None] - 1)[:, 0]
            for t in (observed.tokens, observed.positions)
        )
        drafts = []
        for step in range(self.k):
            tokens = self.follower[tokens]
            nonsense = (last + 2 + step) % 5 == 0
            drafts.append((tokens + nonsense) % VOCABULARY)
        return Proposal(torch.stack(drafts, 1))

    def sampling(self, keys: RowKeys) -> tuple[Tensor, Tensor]:
        return keys.temperature, torch.zeros_like(keys.temperature, dtype=torch.bool)


@torch.inference_mode()
def greedy(folder: Path, prompt: tuple[int, ...]) -> list[int]:
    """transformers' own greedy answer to one prompt alone, with its own attention and cache."""
    model = eager_model(folder)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    produced = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    return produced[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("kind", "k"),
    [(kind, 3) for kind in ZOO]
    + [(kind, 11) for kind in ("llama4", "llama4_text", "gpt_oss", "mistral", "gemma2")],
)
def test_decoding_equals_generate(kind: str, k: int, tmp_path: Path) -> None:
    """Prompts of different lengths, two at a time, over several windows, chunks and pages.

    11 drafts reach over a whole window or chunk of 8.
    """
    folder = zoo_folder(tmp_path, kind)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        tuple(torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()) for n in (23, 2, 11)
    ]
    expected = [greedy(folder, prompt) for prompt in prompts]
    target = load_target(TargetSettings(path=str(folder), device="cpu"))
    drafter = BigramDrafter(expected, k)
    engine = Engine(target, drafter, batch=2, max_length=72, block_size=16, prefill_tokens=13)
    asked = [Request(str(i), prompt, NEW_TOKENS) for i, prompt in enumerate(prompts)]
    done = run(engine, asked)
    assert [list(generation.token_ids) for generation in done] == expected
    accepted = sum(generation.counters.accepted for generation in done)
    assert 0 < accepted < sum(generation.counters.draft_tokens for generation in done)
