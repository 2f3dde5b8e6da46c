"""A drafter from bigrams of the expected answers, which drafts most tokens right."""

from __future__ import annotations

from pathlib import Path

import torch

from draftlab.engine.base_drafter import Drafter, VerifiedFeatures
from draftlab.engine.draft_sampler import Proposal
from tests.helpers.zoo import SHAPE, eager_model

VOCABULARY, NEW_TOKENS = int(str(SHAPE["vocab_size"])), 36


class BigramDrafter(Drafter):
    """Proposes the successor of a token in some texts, and a wrong token every fifth position."""

    def __init__(self, texts: list[list[int]], k: int, device: str = "cpu") -> None:
        self.k = k
        self.follower = torch.arange(VOCABULARY, device=device)
        for text in texts:
            self.follower[text[:-1]] = torch.tensor(text[1:], device=device)

    def propose(self, verified: VerifiedFeatures) -> Proposal:
        tokens, last = verified.last()
        drafts = []
        for step in range(self.k):
            tokens = self.follower[tokens]
            wrong = (last + 2 + step) % 5 == 0
            drafts.append((tokens + wrong) % VOCABULARY)
        return Proposal(torch.stack(drafts, 1))


@torch.inference_mode()
def greedy(
    folder: Path, prompt: tuple[int, ...], device: str = "cpu", tokens: int = NEW_TOKENS
) -> list[int]:
    """Return transformers' greedy answer to one prompt, with its own attention and cache."""
    model = eager_model(folder).to(device)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt], device=device)
    output = model.generate(ids, max_new_tokens=tokens, do_sample=False)
    return output[0, len(prompt) :].tolist()
