"""The EAGLE3 head (methods §2; servers §1.3).

fc reads the target's states at the head's boundaries, as they are or normed (`norm_before_fc` over
all of them, `fc_norm` one by one); the layer reads a token's embedding and the hidden state, normed
side by side. What is fed back is the pre-norm output, with `norm_output` the normed one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftlab.heads.config import HeadConfig
from draftlab.heads.head import DecoderLayer, DraftHead
from draftlab.heads.layers import RMSNorm


class Eagle3Layer(DecoderLayer):
    """A first layer; its attention reads cat[norm(embedding), norm(hidden)], in that order."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, width=2)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [..., 2H], and the residual [..., H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat([self.input_layernorm(embedding), normed], dim=-1), residual


class Eagle3Head(DraftHead):
    """An EAGLE3 head: `DraftHead` whose fc reads features, and whose layers read 2H, H, H, …."""

    def __init__(self, config: HeadConfig) -> None:
        later = (DecoderLayer(config) for _ in range(config.num_layers - 1))
        super().__init__(config, [Eagle3Layer(config), *later], fc_width=config.feature_size)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.feature_size, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.boundaries
            )

    def normed_features(self, features: Tensor) -> Tensor:
        """What fc reads, from the target's features [..., F]."""
        if self.config.norm_before_fc:
            return self.input_norm(features)
        if self.config.fc_norm:
            parts = features.split(self.config.target_hidden_size, -1)
            normed = (norm(part) for norm, part in zip(self.fc_norm, parts, strict=True))
            return torch.cat([*normed], -1)
        return features

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(self.normed_features(features))

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.inputs(embedding, hidden)
