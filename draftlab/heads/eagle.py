"""The EAGLE head of the first generation, for Llama-style targets (methods §3; servers §1.1).

Its feature is the target's last state behind the final norm, and that is what its output imitates:
the output is fed back as the next draft's feature, and the target's own lm_head reads it. So the
head has neither a norm nor an lm_head of its own, and its vocabulary is the target's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftlab.heads.config import HeadConfig
from draftlab.heads.head import DecoderLayer, DraftHead
from draftlab.heads.layers import RMSNorm

LM_HEAD, TARGET_NORM = "lm_head.weight", "target_norm.weight"


class EagleHead(DraftHead):
    """fc over cat[embedding, feature], then plain layers, the first without an input norm.

    Parameters: `lm_head` [V, H] and `target_norm` [H] are the target's, frozen, and in no file.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, self.new_layers(config), fc_width=2 * config.hidden_size)
        self.norm = nn.Identity()
        self.target_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.target_norm.requires_grad_(False)
        self.lm_head.requires_grad_(False)

    @staticmethod
    def new_layers(config: HeadConfig) -> list[DecoderLayer]:
        """The decoder layers."""
        return [DecoderLayer(config, input_norm=n > 0) for n in range(config.num_layers)]

    def fuse(self, features: Tensor) -> Tensor:
        return self.target_norm(features)

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        residual = self.fc(torch.cat([embedding, hidden], -1))
        return self.layer.input_layernorm(residual), residual

    def borrowed(self) -> frozenset[str]:
        return super().borrowed() | {LM_HEAD, TARGET_NORM}

    def take_over(self, embeddings: Tensor, final_norm: Tensor, lm_head: Tensor) -> None:
        self.embed_tokens.weight.copy_(embeddings)
        self.target_norm.weight.copy_(final_norm)
        self.lm_head.weight.copy_(lm_head)
