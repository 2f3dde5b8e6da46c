"""Block-parallel draft heads: DFlash, and DSpark, which adds a Markov bias (methods §7).

A block at anchor p has the target's newest token x_p in slot 0 and the mask token in the others, at
positions p, p + 1, …. Its queries attend to the keys of the context and to those of the whole
block; in a sliding layer the slot at position s sees keys from s − window + 1 on. A context key of
position t < p comes from c_t = hidden_norm(fc(features of t)), the same for all layers; nothing
else runs at context positions. In draftlab's alignment the anchor is the pair at t = p − 1, whose
token is x_{t+1} = x_p.

In the anchor layout (DSpark) slot i predicts x_{p+i+1}; in the fill-in layout (DFlash) slot i
predicts x_{p+i} and slot 0 predicts nothing. A Markov head adds a bias W2 · W1[previous token] to
the logits, so that each draft depends on the one before it. A confidence head predicts the
probability that a draft is accepted if those before it were.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.heads.config import HeadConfig, embedding_row_fault
from draftlab.heads.head import LM_HEAD, DecoderLayer, DraftHead
from draftlab.heads.layers import RMSNorm

LayerType = Literal["full_attention", "sliding_attention"]
MARKOV_DEVIATION = 0.02
"""Standard deviation of the initial Markov weights (speculators and DeepSpec use 0.01 and 0.02)."""


class BlockConfig(HeadConfig):
    """draftlab.json of a block-parallel head.

    Attributes:
        mask_token_id: the token of masked slots.
        sample_from_anchor: whether slot 0 predicts a token (the anchor layout).
        markov_rank: width of the Markov head's factors; 0: there is none.
        confidence: whether there is a confidence head.
        is_causal: whether a slot sees only its own key and those before it in its block.
        sliding_window: number of keys that a slot of a sliding layer sees up to its own, more than
            a block has. Without `is_causal` a slot also sees the later ones of its block.
        layer_types: of each layer; None: all slide if there is a window, and none otherwise.
    """

    mask_token_id: int
    sample_from_anchor: bool
    markov_rank: int = Field(default=0, ge=0)
    confidence: bool = False
    is_causal: bool = False
    sliding_window: int | None = None
    layer_types: tuple[LayerType, ...] | None = None

    @model_validator(mode="after")
    def _check_block(self) -> BlockConfig:
        slides = self.layer_types and "sliding_attention" in self.layer_types
        if slides and self.sliding_window is None:
            raise ValueError("layer_types has sliding layers: sliding_window is missing")
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"expected layer_types of {self.num_layers} layers, found {len(self.layer_types)}"
            )
        if self.sliding_window is not None and self.sliding_window <= self.block_size:
            raise ValueError(
                f"expected a sliding_window larger than the block of {self.block_size} slots, "
                f"found {self.sliding_window}"
            )
        if fault := embedding_row_fault(self.mask_token_id, self.vocab_size):
            raise ValueError(f"mask_token_id {self.mask_token_id} {fault}")
        if self.embeddings != "target":
            raise ValueError('a block head has "embeddings": "target", found "own"')
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"a block head is as wide as its target ({self.target_hidden_size}), whose "
                f"embeddings and lm_head it uses; found hidden_size {self.hidden_size}"
            )
        if self.confidence and not self.markov_rank:
            raise ValueError("a confidence head reads the Markov head's factors: markov_rank is 0")
        return self

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return each layer's sliding window; None: it sees all keys."""
        types = self.layer_types or ("sliding_attention",) * self.num_layers
        return tuple(self.sliding_window if t == "sliding_attention" else None for t in types)

    @property
    def first_slot(self) -> int:
        """Return the first slot that predicts a token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def block_size(self) -> int:
        """Return the number of slots of a whole block."""
        return self.k_trained + self.first_slot


class MarkovHead(nn.Module):
    """A bias of the logits by the token before a draft, of low rank."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """The logit of a draft's acceptance, from the head's output and the previous token's factor."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)


class BlockHead(DraftHead):
    """A head of Qwen3-shaped layers whose context keys come from the target's features. Its lm_head
    is the target's, frozen, and stored for a draft vocabulary alone.
    """

    config: BlockConfig
    layer_type: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, config: BlockConfig) -> None:
        layers = [self.layer_type(config, qk_norm=True) for _ in range(config.num_layers)]
        super().__init__(config, layers, fc_width=config.feature_size)
        for layer, window in zip(self.layers, config.windows, strict=True):
            layer.window = window
        self.mask_token_id = config.mask_token_id
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head.requires_grad_(False)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None

    def project_features(self, features: Tensor) -> Tensor:
        """Return the context vectors c_t [..., H]."""
        return self.hidden_norm(super().project_features(features))

    def block_tokens(self, newest: Tensor, num_slots: int) -> Tensor:
        """Return the token ids of blocks, int64 [..., num_slots], from their newest tokens."""
        masks = newest[..., None].repeat_interleave(num_slots, -1).fill_(self.mask_token_id)
        masks[..., 0] = newest
        return masks

    def markov_factors(self, previous: Tensor) -> Tensor:
        """Return the factors W1[previous], [..., r] of token ids [...]; r = 0 without the head."""
        if self.markov_head is None:
            return self.fc.weight.new_empty(*previous.shape, 0)
        return self.markov_head.markov_w1(previous)

    def logits(self, output: Tensor, previous: Tensor | None = None) -> Tensor:
        logits = super().logits(output)
        if self.markov_head is None:
            return logits
        factors = self.markov_factors(previous).to(logits.dtype)
        return logits + F.linear(factors, self.markov_head.markov_w2.weight.to(logits.dtype))

    def confidence_logits(self, normed: Tensor, factors: Tensor) -> Tensor:
        """Return the logits of acceptance [...], from normed outputs and `markov_factors`."""
        proj = self.confidence_head.proj
        inputs = torch.cat([normed, factors.to(normed.dtype)], -1)
        return F.linear(inputs, proj.weight.to(inputs.dtype), proj.bias.to(inputs.dtype))[..., 0]

    def loss_product(self, normed: Tensor, previous: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the factors of the logits as one product of width H + r (methods §7)."""
        factors = self.markov_factors(previous).to(normed.dtype)
        trained = self.fc.weight.new_empty(len(self.d2t), 0)
        if self.markov_head is not None:
            trained = self.markov_head.markov_w2.weight
        return torch.cat([normed, factors], -1), trained, self.lm_head.weight

    def check_drafts(self, k: int) -> None:
        if k > self.config.k_trained:
            raise UserError(
                f"expected at most {self.config.k_trained} draft tokens, all slots of the head's "
                f"block, found {k}",
                where="eval.k",
                do=f"lower K to {self.config.k_trained}",
            )

    def draft_tables(self) -> list[nn.Module]:
        own = [] if self.markov_head is None else [self.markov_head.markov_w2]
        return [*super().draft_tables(), *own]

    def shared_tensors(self) -> frozenset[str]:
        whole = self.config.draft_vocab_size == self.config.vocab_size
        return super().shared_tensors() | ({LM_HEAD} if whole else frozenset())

    def initialise_extra(self, generator: torch.Generator) -> None:
        """Draw small Markov factors; the confidence head starts at a probability of one half."""
        with torch.no_grad():
            if self.markov_head is not None:
                for weight in self.markov_head.parameters():
                    noise = torch.randn(weight.shape, generator=generator)
                    weight.copy_(noise * MARKOV_DEVIATION)
            if self.confidence_head is not None:
                for parameter in self.confidence_head.parameters():
                    parameter.zero_()
