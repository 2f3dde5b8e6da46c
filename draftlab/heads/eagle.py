"""The EAGLE head of the first generation, for Llama-style targets (methods §3; servers §1.1).

Its feature is the target's last state after the final norm, and its output imitates this state: the
output is fed back as the next draft's feature, and the target's lm_head reads it. The head has
neither a norm nor an lm_head of its own, and its vocabulary is the target's.
"""

from __future__ import annotations

import torch
from pydantic import model_validator
from torch import Tensor, nn

from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.head import LM_HEAD, TARGET_NORM, DecoderLayer, DraftHead
from draftlab.heads.layers import RMSNorm


class EagleConfig(HeadConfig):
    """draftlab.json of a head that reads and imitates the target's last state."""

    @model_validator(mode="after")
    def _check_eagle(self) -> EagleConfig:
        title = get_family(self.family).title
        if self.boundaries != (self.target_num_layers,):
            raise ValueError(
                f"{title} heads read the last state, boundaries [{self.target_num_layers}], found "
                f"{list(self.boundaries)}"
            )
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"{title} heads are as wide as their target ({self.target_hidden_size}), whose "
                f"states they imitate; found hidden_size {self.hidden_size}"
            )
        if self.draft_vocab_size != self.vocab_size:
            raise ValueError(
                f"{title} heads draft with their target's lm_head, all {self.vocab_size} tokens, "
                f"found draft_vocab_size {self.draft_vocab_size}"
            )
        return self


class EagleHead(DraftHead):
    """fc over cat[embedding, feature], then plain layers, the first without an input norm. The
    target's `lm_head` [V, H] and `target_norm` [H] are frozen and not stored.
    """

    fc_in_every_pass = True
    has_fused_passes = True

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, self.new_layers(config), fc_width=2 * config.hidden_size)
        self.norm = nn.Identity()
        self.target_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.target_norm.requires_grad_(False)
        self.lm_head.requires_grad_(False)

    @staticmethod
    def new_layers(config: EagleConfig) -> list[DecoderLayer]:
        """Return the decoder layers."""
        return [DecoderLayer(config, input_norm=n > 0) for n in range(config.num_layers)]

    def project_features(self, features: Tensor) -> Tensor:
        return self.target_norm(features)

    def logits_norm_weight(self) -> Tensor | None:
        return None

    def layer_inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        residual = self.fc(torch.cat([embedding, hidden], -1))
        return self.layer.input_layernorm(residual), residual

    def shared_tensors(self) -> frozenset[str]:
        return super().shared_tensors() | {LM_HEAD, TARGET_NORM}

    def init_from_target(self, embeddings: Tensor, final_norm: Tensor, lm_head: Tensor) -> None:
        self.embed_tokens.weight.copy_(embeddings)
        self.target_norm.weight.copy_(final_norm)
        self.lm_head.weight.copy_(lm_head)
