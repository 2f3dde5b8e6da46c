"""The EAGLE3 head (methods §2; servers §1.3).

fc reads the target's states at the head's boundaries, optionally normed (`norm_before_fc`: one norm
over all of them; `fc_norm`: one norm for each). The first layer reads the concatenation of the
normed embedding and the normed hidden state. A chain feeds back the output before its norm, or with
`norm_output` after it.
"""

from __future__ import annotations

import torch
from pydantic import model_validator
from torch import Tensor, nn

from draftlab.heads.config import HeadConfig
from draftlab.heads.head import DecoderLayer, DraftHead
from draftlab.heads.layers import RMSNorm


class Eagle3Config(HeadConfig):
    """draftlab.json of an EAGLE3 head.

    Attributes:
        norm_before_residual: the first layer's residual is the normed hidden state.
        norm_before_fc: one RMSNorm over all features. fc_norm: one RMSNorm for each boundary.
        norm_output: the normed output is fed back.
        qk_norm: queries and keys are normed.
        sliding_window: keys that a position sees up to its own, more than drafts; None: all.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    @model_validator(mode="after")
    def _check_eagle3(self) -> Eagle3Config:
        if self.sliding_window is not None and self.sliding_window <= self.k_trained:
            raise ValueError(
                f"expected a sliding_window larger than the {self.k_trained} drafts that the head "
                f"is trained for, found {self.sliding_window}"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other, found both")
        return self


class Eagle3Layer(DecoderLayer):
    """The first layer: its attention reads cat[norm(embedding), norm(hidden)], in that order."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, width=2, qk_norm=config.qk_norm)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention [..., 2H], and the residual [..., H]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        return torch.cat([self.input_layernorm(embedding), normed], dim=-1), residual


class Eagle3Head(DraftHead):
    """An EAGLE3 head: fc reads the features; the layers have input widths 2H, H, H, …."""

    has_fused_passes = True
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        later = (DecoderLayer(config, qk_norm=config.qk_norm) for _ in range(config.num_layers - 1))
        super().__init__(config, [Eagle3Layer(config), *later], fc_width=config.feature_size)
        for layer in self.layers:
            layer.window = config.sliding_window
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.feature_size, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.boundaries
            )

    def normed_features(self, features: Tensor) -> Tensor:
        if self.config.norm_before_fc:
            return self.input_norm(features)
        if self.config.fc_norm:
            states = features.split(self.config.target_hidden_size, -1)
            normed = (norm(state) for norm, state in zip(self.fc_norm, states, strict=True))
            return torch.cat([*normed], -1)
        return features

    def output_norm(self, output: Tensor) -> Tensor:
        return self.norm(output) if self.config.norm_output else output

    def normed(self, output: Tensor) -> Tensor:
        return output if self.config.norm_output else self.norm(output)

    def logits_norm_weight(self) -> Tensor | None:
        return None if self.config.norm_output else self.norm.weight

    def layer_inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.inputs(embedding, hidden)
