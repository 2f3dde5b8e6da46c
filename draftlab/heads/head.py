"""The base class of all draft heads.

Parameter names are those that vLLM and speculators read.

At position t a head reads (x_{t+1}, g_t) at RoPE position t and predicts x_{t+2}. One pass is
`project_features` (replaced by the head's previous output for later drafts of a chain),
`layer_inputs`, the decoder layers, and `output_norm`. `logits` reads the output, which a chain also
feeds back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftlab.heads.config import HeadConfig
from draftlab.heads.family import Family, get_family
from draftlab.heads.layers import Attention, RMSNorm, Rope, SwiGLU

EMBEDDINGS, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
TARGET_NORM = "target_norm.weight"
"""Names of the tensors that a head may share with its target."""


class DecoderLayer(nn.Module):
    """A pre-norm decoder layer with grouped-query attention and a SwiGLU feed-forward.

    Args:
        width: input width of attention, as a multiple of the hidden size.
        input_norm: whether a norm precedes attention; EAGLE's first layer has none.
        qk_norm: whether queries and keys are normed, as in Qwen3.

    Attributes:
        chunk, window: a query at position q attends to keys from q // chunk · chunk on, or from q −
            window + 1 on, up to q; None: to all keys up to q.
    """

    chunk: int | None = None
    window: int | None = None

    def __init__(
        self,
        config: HeadConfig,
        *,
        width: int = 1,
        input_norm: bool = True,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_layernorm = RMSNorm(size, config.rms_norm_eps) if input_norm else nn.Identity()
        self.self_attn = Attention(
            width * size,
            size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            qk_norm_eps=config.rms_norm_eps if qk_norm else None,
        )
        self.post_attention_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.mlp = SwiGLU(size, config.intermediate_size)

    def begin(self, hidden: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the input of attention [..., H], and the function that gives the layer's output
        from attended values [..., heads, head_dim].
        """
        return self.input_layernorm(hidden), partial(self.output, residual=hidden)

    def multiplications(self) -> int:
        """Return the multiplications of all products for a row."""
        return sum(weight.numel() for weight in self.parameters() if weight.ndim == 2)

    def output(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Return the pre-norm output [..., H] from attended values [..., heads, head_dim]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftHead(nn.Module):
    """A draft head: fc, decoder layers, norm and lm_head over the draft vocabulary.

    Embeddings are frozen. Buffers: `d2t` int64 [D], offsets (target id = draft id + d2t); `t2d`
    bool [V], membership. The first layer may be of another class than the others.

    Attributes:
        fc_in_every_pass: whether fc also reads the token's embedding, so that a chain runs it in
            every pass and not only for the target's features.
        has_fused_passes: whether `FusedHead` and `PrepackedHead` (`engine/head_pass.py`) can
            compute `layer_inputs` and the layers; otherwise the engine runs the modules.
    """

    fc_in_every_pass: ClassVar[bool] = False
    has_fused_passes: ClassVar[bool] = False

    def __init__(
        self, config: HeadConfig, layers: Sequence[DecoderLayer], *, fc_width: int
    ) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(fc_width, size, bias=False)
        self.layers = nn.ModuleList(layers)
        self.norm: nn.Module = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rope = Rope(config.head_dim, config.rope_parameters)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    @property
    def family(self) -> Family:
        """Return the head's family."""
        return get_family(self.config.family)

    @property
    def layer(self) -> DecoderLayer:
        """Return the first layer, often the only one."""
        return self.layers[0]

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [..., H] of token ids [...]."""
        return self.embed_tokens(tokens)

    def embed_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the embeddings [..., H] that a chain reads at RoPE positions [...]."""
        return self.embed(tokens)

    def embedding_table(self) -> Tensor:
        """Return the embeddings [V, H] that `embed` looks up, without a gradient."""
        return self.embed_tokens.weight.detach()

    def normed_features(self, features: Tensor) -> Tensor:
        """Return the input of fc (without fc: of the first layer) from features [..., F]."""
        return features

    def project_features(self, features: Tensor) -> Tensor:
        """Return the hidden state [..., H] from the target's features [..., F]."""
        return self.fc(self.normed_features(features))

    def layer_inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first layer's input of attention, and its residual [..., H].

        Its hidden state [..., H] is of `project_features`, or the output that is fed back.
        """
        raise NotImplementedError

    def output_norm(self, output: Tensor) -> Tensor:
        """Return the head's output [..., H], which a chain feeds back, from the last layer's."""
        return output

    def normed(self, output: Tensor) -> Tensor:
        """Return the input of lm_head [..., H] from the head's output."""
        return self.norm(output)

    def logits_norm_weight(self) -> Tensor | None:
        """Return the weight of the RMSNorm in `normed`; None: lm_head reads the output itself."""
        return self.norm.weight

    def logits(self, output: Tensor, previous: Tensor | None = None) -> Tensor:
        """Return draft-vocabulary logits [..., D] of the head's outputs [..., H]; a Markov head
        reads the token before each draft, int64 [...].
        """
        return F.linear(self.normed(output), self.lm_head.weight.to(output.dtype))

    def drawn_logits(self, logits: Tensor, output: Tensor, previous: Tensor) -> Tensor:
        """Return the logits [..., D] that drafts are drawn from: those of `logits`, unless the head
        chooses among few tokens.
        """
        return logits

    def loss_product(
        self, normed: Tensor, previous: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what the logits of R rows are a product of, for the training loss.

        They are made of lm_head's input [R, H] and the tokens before, int64 [R].

        Returns:
            The rows [R, W], and the weights of their last columns, which are trained, and of their
            first columns, which are frozen (None: there are no such columns).
        """
        return normed, self.lm_head.weight, None

    def check_drafts(self, k: int) -> None:
        """Raise a `UserError` if the head cannot draft `k` tokens a step."""

    def draft_tables(self) -> list[nn.Module]:
        """Return the modules whose `weight` [D, …] has a row for each draft-vocabulary token."""
        return [self.lm_head]

    def channel_weights(self) -> list[nn.Parameter]:
        """Return the weights of several dimensions that scale channels, as those of norms do."""
        return []

    def shared_tensors(self) -> frozenset[str]:
        """Return the names of the tensors that are the target's; the head's files lack them."""
        return frozenset({EMBEDDINGS} if self.config.embeddings == "target" else ())

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by the name it has in files."""
        return self.state_dict()

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load `tensors`, by the names they have in files.

        The memory of `shared_tensors` may be the target's already, so that nothing else may write
        to it.
        """
        self.load_state_dict(tensors)

    def init_from_target(self, embeddings: Tensor, final_norm: Tensor, lm_head: Tensor) -> None:
        """Copy embeddings [V, H], final norm [H] and lm_head [V, H], once the draft vocabulary is
        set.
        """
        ids = self.target_ids(torch.arange(len(self.d2t), device=self.d2t.device))
        self.embed_tokens.weight.copy_(embeddings)
        self.norm.weight.copy_(final_norm)
        self.lm_head.weight.copy_(lm_head[ids])

    def initialise_extra(self, generator: torch.Generator) -> None:
        """Set the initial values of parameters that only this family has."""

    def set_draft_vocabulary(self, target_ids: Tensor) -> None:
        """Set d2t and t2d from ascending unique target ids, int64 [D]."""
        size = self.config.draft_vocab_size
        if target_ids.shape != (size,) or not bool((target_ids.diff() > 0).all()):
            raise ValueError(f"expected {size} ascending unique target ids")
        self.d2t.copy_(target_ids - torch.arange(size, device=target_ids.device))
        self.t2d.zero_()
        self.t2d[target_ids] = True

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the target token ids of draft-vocabulary ids, in the same shape."""
        return draft_ids + self.d2t[draft_ids]


def initialise_head(
    head: DraftHead,
    *,
    embeddings: Tensor,
    final_norm: Tensor,
    lm_head: Tensor,
    target_ids: Tensor,
    seed: int,
) -> None:
    """Set the initial values of training (methods §2), random ones by a generator of this call.

    Embeddings [V, H], final norm [H] and the rows of the ascending draft vocabulary, int64 [D], of
    lm_head [V, H] come from the target, so that the target's last state as output gives the
    target's logits. Projections are normal with standard deviation 1/√fan_in, times √½ if they
    write into the residual stream.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: parameter.data
        for name, parameter in head.named_parameters()
        if parameter.ndim == 2 and not name.startswith(("embed_tokens", "lm_head", "mask_"))
    }

    def draw(name: str, seed: int) -> None:
        scale = drawn[name].shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale *= 0.5**0.5
        drawn[name].normal_(0, scale, generator=torch.Generator().manual_seed(seed))

    # A generator draws with one core, so that each projection has its own.
    seeds = torch.randint(2**63 - 1, (len(drawn),), generator=generator)
    with ThreadPoolExecutor() as pool:
        list(pool.map(draw, drawn, seeds.tolist()))
    with torch.no_grad():
        head.set_draft_vocabulary(target_ids)
        head.init_from_target(embeddings, final_norm, lm_head)
        head.initialise_extra(generator)
