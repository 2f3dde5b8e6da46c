"""DFlash2 heads: a block head with convolutions over its slots, and a selector of tokens (methods
§7.5).

In every layer a pair of convolutions surrounds attention, and another one the feed-forward. They
run over the slots of a block alone, so that context keys are those of any block head. Slot i mixes
the input with those of the slots before it:

    conv(y)_i = Σ_tap (base[tap] + delta_i[tap]) ⊙ y_{i − tap}

where delta, a number for each tap and group of channels, comes from the sublayer's normed input;
one product makes it for both convolutions of the pair.

The target's lm_head gives the logits U of each slot. The drafts are drawn from left to right among
the most probable tokens c of U, by the scores U[c] + Σ (A[x′] ⊙ P h)·B[c], where x′ is the token
before and h the normed output. A token that is not among them is never drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from draftlab.heads.block import BlockConfig, BlockHead
from draftlab.heads.config import Size
from draftlab.heads.head import DecoderLayer
from draftlab.heads.layers import convolve_slots

SELECTOR_DEVIATION = 0.02
"""Standard deviation of the selector's initial weights, as in speculators."""
_CODEBOOKS = tuple(f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor"))
"""Names of the codebooks in files; the module's have `.weight` behind them."""
Convolve = Callable[[tuple[Tensor, Tensor], Tensor, int], Tensor]
Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Dflash2Config(BlockConfig):
    """draftlab.json of a DFlash2 head.

    Attributes:
        conv_kernel_size: taps of a convolution, the slot itself included.
        conv_group_size: channels that share the coefficients made from the input.
        selector_rank: width of the selector's factors. selector_top_k: tokens it chooses among.
        embedding_scale: factor of the target's embeddings.
        logit_scale: factor of lm_head's product. logit_softcap: if given, logits then become
            softcap · tanh(logits / softcap).
    """

    conv_kernel_size: Size = 2
    conv_group_size: Size = 16
    selector_rank: Size = 256
    selector_top_k: Size = 16
    embedding_scale: Factor = 1.0
    logit_scale: Factor = 1.0
    logit_softcap: Factor | None = None

    @model_validator(mode="after")
    def _check_selector(self) -> Dflash2Config:
        if self.draft_vocab_size != self.vocab_size:
            raise ValueError(
                f"a DFlash2 head drafts all {self.vocab_size} tokens, found draft_vocab_size "
                f"{self.draft_vocab_size}"
            )
        if self.markov_rank:
            raise ValueError(f"a DFlash2 head has no markov_rank, found {self.markov_rank}")
        if self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"expected a conv_group_size that divides hidden_size {self.hidden_size}, found "
                f"{self.conv_group_size}"
            )
        if self.conv_kernel_size > self.block_size:
            raise ValueError(
                f"expected at most as many taps as the block has slots ({self.block_size}), found "
                f"conv_kernel_size {self.conv_kernel_size}"
            )
        if self.selector_top_k > self.vocab_size:
            raise ValueError(
                f"selector_top_k {self.selector_top_k} exceeds vocab_size {self.vocab_size}"
            )
        return self


class SlotConvolutions(nn.Module):
    """The convolutions at the input and at the output of a sublayer."""

    def __init__(self, config: Dflash2Config) -> None:
        super().__init__()
        self.groups = config.hidden_size // config.conv_group_size
        self.taps = config.conv_kernel_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(
            config.hidden_size, 2 * self.taps * self.groups, bias=False
        )

    def begin(
        self, x: Tensor, dim: int, convolve: Convolve
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the convolved input [..., H], and the convolution of the output; `dim`, which is
        not negative, is slots.
        """
        delta = F.linear(x, self.kernel_projection.weight.to(x.dtype))
        delta = delta.unflatten(-1, (2, self.taps, self.groups)).unbind(-3)
        first, second = self.base_kernel
        return convolve((x, delta[0]), first, dim), lambda y: convolve((y, delta[1]), second, dim)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with convolutions around attention and around the feed-forward."""

    def __init__(self, config: Dflash2Config, *, qk_norm: bool) -> None:
        super().__init__(config, qk_norm=qk_norm)
        self.attention_conv = SlotConvolutions(config)
        self.mlp_conv = SlotConvolutions(config)

    def begin(self, hidden: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        dim, project = hidden.ndim - 2, self.self_attn.o_proj
        return self.begin_by(hidden, dim, convolve_slots, project, self.mlp)

    def begin_by(
        self,
        hidden: Tensor,
        dim: int,
        convolve: Convolve,
        project: Callable[[Tensor], Tensor],
        feed_forward: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return `begin` of a hidden state whose dimension `dim` is slots, by these functions in
        place of `convolve_slots`, of `o_proj` and of `mlp`.
        """
        x, of_attention = self.attention_conv.begin(self.input_layernorm(hidden), dim, convolve)

        def finish(attended: Tensor) -> Tensor:
            between = hidden + of_attention(project(attended.flatten(-2)))
            normed = self.post_attention_layernorm(between)
            y, of_mlp = self.mlp_conv.begin(normed, dim, convolve)
            return between + of_mlp(feed_forward(y))

        return x, finish


class CandidateSelector(nn.Module):
    """A score of a slot's most probable tokens by the token before it."""

    def __init__(self, config: Dflash2Config) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.successor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def scores(self, normed: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """Return what the selector adds to the logits of candidates, int64 [..., C], from normed
        outputs [..., H] and previous tokens [...].
        """
        context = self.predecessor_codebook(previous) * self.hidden_projection(normed)
        return transition_scores(context, self.successor_codebook(candidates))


def transition_scores(context: Tensor, successors: Tensor) -> Tensor:
    """Return the products [..., C] of contexts [..., r] and factors of candidates [..., C, r]."""
    context = context.to(successors.dtype)
    return (successors @ context[..., None])[..., 0]


class Dflash2Head(BlockHead):
    """A block head with convolutions over its slots, and a candidate selector."""

    config: Dflash2Config
    layer_type = ConvolvedLayer

    def __init__(self, config: Dflash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def embed(self, tokens: Tensor) -> Tensor:
        embeddings, scale = super().embed(tokens), self.config.embedding_scale
        return embeddings if scale == 1 else embeddings * scale

    def embedding_table(self) -> Tensor:
        table, scale = super().embedding_table(), self.config.embedding_scale
        return table if scale == 1 else table * scale

    def shaped(self, products: Tensor) -> Tensor:
        """Return logits from the products of lm_head, an increasing function of each."""
        scale, cap = self.config.logit_scale, self.config.logit_softcap
        logits = products if scale == 1 else products * scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def logits(self, output: Tensor, previous: Tensor | None = None) -> Tensor:
        return self.shaped(super().logits(output, previous))

    def drawn_logits(self, logits: Tensor, output: Tensor, previous: Tensor) -> Tensor:
        selector = self.candidate_selector
        values, candidates = logits.topk(selector.top_k, -1)
        added = selector.scores(self.normed(output), previous, candidates)
        drawn = torch.full_like(logits, never_drawn(logits.dtype))
        return drawn.scatter_(-1, candidates, (values + added).to(logits.dtype))

    def loss_product(self, normed: Tensor, previous: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.config.logit_softcap is not None:
            raise ValueError("a head with logit_softcap is evaluated and exported, not trained")
        return super().loss_product(normed * self.config.logit_scale, previous)

    def channel_weights(self) -> list[nn.Parameter]:
        convolutions = (m for m in self.modules() if isinstance(m, SlotConvolutions))
        return [one.base_kernel for one in convolutions]

    def tensors(self) -> dict[str, Tensor]:
        weights = {f"{name}.weight": name for name in _CODEBOOKS}
        return {weights.get(name, name): tensor for name, tensor in super().tensors().items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        names = {name: f"{name}.weight" for name in _CODEBOOKS}
        super().load_tensors({names.get(name, name): tensor for name, tensor in tensors.items()})

    def initialise_extra(self, generator: torch.Generator) -> None:
        """Start convolutions as the identity, and the selector with small factors."""
        super().initialise_extra(generator)
        with torch.no_grad():
            for layer in self.layers:
                for conv in (layer.attention_conv, layer.mlp_conv):
                    conv.base_kernel.zero_()
                    conv.base_kernel[:, 0] = 1
                    conv.kernel_projection.weight.zero_()
            for weight in self.candidate_selector.parameters():
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(noise * SELECTOR_DEVIATION)


def never_drawn(dtype: torch.dtype) -> float:
    """Return a logit whose probability is 0. It is finite, since kernels subtract maxima."""
    return max(-1e30, torch.finfo(dtype).min)
