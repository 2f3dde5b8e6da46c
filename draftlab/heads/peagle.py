"""The parallel draft head (P-EAGLE, formerly PTD; methods §4, servers §1.5): K drafts in one pass.

Slot 0 is the pair (x_{t+1}, g_t), as in EAGLE3. The slots of depth d ≥ 1, at positions t + d, all
have the same mask token and the same learned feature `mask_hidden`. Attention is causal.
"""

from __future__ import annotations

import torch
from pydantic import model_validator
from torch import Tensor, nn

from draftlab.heads.config import embedding_row_fault
from draftlab.heads.eagle3 import Eagle3Config, Eagle3Head


class PeagleConfig(Eagle3Config):
    """draftlab.json of a parallel head. The embedding of the masked slots' token is trained, so the
    head stores embeddings of its own.
    """

    mask_token_id: int

    @model_validator(mode="after")
    def _check_peagle(self) -> PeagleConfig:
        if self.norm_output:
            raise ValueError("a parallel head feeds no output back, so norm_output has no effect")
        if self.sliding_window is not None:
            raise ValueError("the attention of a parallel head has no sliding_window")
        if fault := embedding_row_fault(self.mask_token_id, self.vocab_size):
            raise ValueError(f"mask_token_id {self.mask_token_id} {fault}")
        if self.embeddings != "own":
            raise ValueError(
                'a parallel head has "embeddings": "own" (the mask token\'s row is trained), found '
                f'"{self.embeddings}"'
            )
        return self


class PeagleHead(Eagle3Head):
    """An EAGLE3 head of one to four layers with a learned feature and embedding of masked slots.

    Parameters: `mask_hidden` [1, F], before fc; `mask_embedding` [H], the mask token's embedding,
    the only embedding that is trained. Files store it as that token's row of `embed_tokens.weight`,
    which is stored whole: servers see that the table differs from the target's and keep it.
    """

    config: PeagleConfig

    def __init__(self, config: PeagleConfig) -> None:
        super().__init__(config)
        self.mask_token_id = config.mask_token_id
        self.mask_hidden = nn.Parameter(torch.zeros(1, config.feature_size))
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))

    def embed(self, tokens: Tensor) -> Tensor:
        masked = (tokens == self.mask_token_id)[..., None]
        embeddings = self.embed_tokens(tokens)
        return torch.where(masked, self.mask_embedding.to(embeddings.dtype), embeddings)

    def embedding_table(self) -> Tensor:
        table, row = super().embedding_table(), self.mask_embedding.detach()
        row = row.to(table.dtype)
        if not torch.equal(table[self.mask_token_id], row):  # they are equal in a loaded head
            table = table.clone()
            table[self.mask_token_id] = row
        return table

    def mask_state(self) -> Tensor:
        """Return the hidden state [H] that every masked slot starts from."""
        return self.project_features(self.mask_hidden)[0]

    def initialise_extra(self, generator: torch.Generator) -> None:
        """Draw a standard normal feature, and an embedding with the table's standard deviation."""
        deviation = self.embed_tokens.weight.std()
        with torch.no_grad():
            self.mask_hidden.copy_(torch.randn(self.mask_hidden.shape, generator=generator))
            noise = torch.randn(self.mask_embedding.shape, generator=generator)
            self.mask_embedding.copy_(noise.to(deviation.device) * deviation)

    def tensors(self) -> dict[str, Tensor]:
        tensors = self.state_dict()
        table = tensors["embed_tokens.weight"].clone()
        table[self.mask_token_id] = tensors.pop("mask_embedding")
        return tensors | {"embed_tokens.weight": table}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        row = tensors["embed_tokens.weight"][self.mask_token_id]
        self.load_state_dict(tensors | {"mask_embedding": row})
