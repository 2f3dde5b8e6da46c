"""The parallel draft head (PTD, P-EAGLE; methods §4, servers §1.5): K drafts in one pass.

Slot 0 is the pair (x_{t+1}, g_t), as in EAGLE3; the slots of depth d ≥ 1, at positions t + d, all
hold the same mask token and the same learned feature `mask_hidden`. Attention is plainly causal.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftlab.heads.config import HeadConfig
from draftlab.heads.eagle3 import Eagle3Head


class PeagleHead(Eagle3Head):
    """An EAGLE3 head of one to four layers with a learned feature and embedding of masked slots.

    Parameters: `mask_hidden` [1, F], before fc; `mask_embedding` [H], the mask token's embedding,
    the only one that is trained. In files `mask_embedding` is that token's row of
    `embed_tokens.weight`, which ships whole: a server sees that it differs from the target's table
    and keeps it.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        assert config.mask_token_id is not None  # HeadConfig sees to it
        self.mask_token_id = config.mask_token_id
        self.mask_hidden = nn.Parameter(torch.zeros(1, config.feature_size))
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))

    def embed(self, tokens: Tensor) -> Tensor:
        masked = (tokens == self.mask_token_id)[..., None]
        known = self.embed_tokens(tokens)
        return torch.where(masked, self.mask_embedding.to(known.dtype), known)

    def mask_state(self) -> Tensor:
        """The hidden state [H] of every masked slot, where `fuse` gives the others'."""
        return self.fuse(self.mask_hidden)[0]

    def initialise_masks(self, generator: torch.Generator) -> None:
        """A feature of standard normals, and an embedding as loud as the others."""
        loudness = self.embed_tokens.weight.std()
        with torch.no_grad():
            self.mask_hidden.copy_(torch.randn(self.mask_hidden.shape, generator=generator))
            noise = torch.randn(self.mask_embedding.shape, generator=generator)
            self.mask_embedding.copy_(noise.to(loudness.device) * loudness)

    def tensors(self) -> dict[str, Tensor]:
        tensors = self.state_dict()
        table = tensors["embed_tokens.weight"].clone()
        table[self.mask_token_id] = tensors.pop("mask_embedding")
        return tensors | {"embed_tokens.weight": table}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        row = tensors["embed_tokens.weight"][self.mask_token_id]
        self.load_state_dict(tensors | {"mask_embedding": row})
