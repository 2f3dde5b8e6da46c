"""A drafter from bigrams of the expected answers, which drafts most tokens right."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from draftlab.engine.draft_sampler import Proposal
from draftlab.engine.drafter import VerifiedFeatures
from draftlab.kernels.sampling_types import SamplingMetadata, draft_index
from tests.helpers.zoo import SHAPE, eager_model

VOCABULARY, NEW_TOKENS = int(str(SHAPE["vocab_size"])), 36


class BigramDrafter:
    """Proposes the successor of a token in some texts, and a wrong token every fifth position."""

    kind, verification = "chain", "token"
    boundaries = ()
    draft_vocab = None
    pools = ()
    settings = SimpleNamespace(confidence=False)

    def __init__(self, texts: list[list[int]], k: int, device: str = "cpu") -> None:
        self.k = k
        self.draft_ids = torch.arange(VOCABULARY, device=device)
        self.draft_index = draft_index(self.draft_ids, VOCABULARY)
        self.follower = torch.arange(VOCABULARY, device=device)
        for text in texts:
            self.follower[text[:-1]] = torch.tensor(text[1:], device=device)

    def start(self, num_blocks: int, block_size: int, **_: object) -> None:
        pass

    def extend_cache(self, verified: VerifiedFeatures) -> None:
        pass

    def propose(self, verified: VerifiedFeatures, k: int | None = None) -> Proposal:
        tokens, last = (
            t.gather(1, verified.counts[:, None] - 1)[:, 0]
            for t in (verified.tokens, verified.positions)
        )
        drafts = []
        for step in range(k or self.k):
            tokens = self.follower[tokens]
            wrong = (last + 2 + step) % 5 == 0
            drafts.append((tokens + wrong) % VOCABULARY)
        return Proposal(torch.stack(drafts, 1))

    def sampling(self, keys: SamplingMetadata) -> tuple[Tensor, Tensor]:
        return keys.temperature, torch.zeros_like(keys.temperature, dtype=torch.bool)


@torch.inference_mode()
def greedy(folder: Path, prompt: tuple[int, ...], device: str = "cpu") -> list[int]:
    """Return transformers' greedy answer to one prompt, with its own attention and cache."""
    model = eager_model(folder).to(device)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt], device=device)
    output = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    return output[0, len(prompt) :].tolist()
