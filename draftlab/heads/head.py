"""What the heads of all families have in common.

Parameter names are those that vLLM and speculators read.

A head at position t is fed (x_{t+1}, g_t) at RoPE position t and predicts x_{t+2}. One pass is:
`fuse` the features (of a chain's later drafts, the state fed back is the hidden state instead),
`inputs`, the layers, `finish`; `logits` reads what `finish` left, and that is also what a chain
feeds back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftlab.heads.config import HeadConfig
from draftlab.heads.layers import Attention, RMSNorm, Rope, SwiGLU

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Layer number, rotated query, rotated key, value → attended values, shaped like the query."""

EMBEDDINGS = "embed_tokens.weight"


class DecoderLayer(nn.Module):
    """A plain decoder layer; `width` times the hidden size is what its attention reads.

    Without `input_norm` (EAGLE's first layer) attention reads its input as it is.

    Attributes:
        chunk: a query at position q sees keys from q // chunk · chunk on; None: all before it.
    """

    chunk: int | None = None

    def __init__(self, config: HeadConfig, *, width: int = 1, input_norm: bool = True) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_layernorm = RMSNorm(size, config.rms_norm_eps) if input_norm else nn.Identity()
        self.self_attn = Attention(
            width * size,
            size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
        )
        self.post_attention_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.mlp = SwiGLU(size, config.intermediate_size)

    def output(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Pre-norm output [..., H] from attended values [..., heads, head_dim]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftHead(nn.Module):
    """fc, layers, norm and lm_head over the draft vocabulary; embeddings are frozen.

    Buffers: `d2t` int64 [D], offsets (target id = draft id + d2t); `t2d` bool [V], membership.

    Args:
        config: of the family that the subclass is.
        layers: the decoder layers, the first of its own kind.
        fc_width: what fc reads.
    """

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
    def layer(self) -> DecoderLayer:
        """The first layer, often the only one."""
        return self.layers[0]

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., H] of token ids [...]."""
        return self.embed_tokens(tokens)

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden state [..., H] of the first draft from the target's features [..., F]."""
        raise NotImplementedError

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer's attention reads, and its residual [..., H].

        Args:
            embedding: [..., H]. hidden: [..., H], of `fuse` or of `finish`.
        """
        raise NotImplementedError

    def finish(self, output: Tensor) -> Tensor:
        """The head's output [..., H], which a chain feeds back, from the last layer's."""
        return self.norm(output) if self.config.norm_output else output

    def normed(self, output: Tensor) -> Tensor:
        """What lm_head reads [..., H], from the head's output."""
        return output if self.config.norm_output else self.norm(output)

    def logits(self, output: Tensor) -> Tensor:
        """Draft-vocabulary logits [..., D] of the head's outputs [..., H]."""
        return F.linear(self.normed(output), self.lm_head.weight.to(output.dtype))

    def run(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Outputs [..., M, H] of a pass whose inputs are all at hand.

        Args:
            tokens: int64 [..., M].
            hidden: [..., M, H], `fuse`d features, or the head's own earlier output.
            positions: int64 [..., M].
            attend: what a slot sees is its business; it is called once a layer, in order.
        """
        angles = self.rope.angles(positions)
        for number, layer in enumerate(self.layers):
            if number == 0:
                x, residual = self.inputs(self.embed(tokens), hidden)
            else:
                x, residual = layer.input_layernorm(hidden), hidden
            key, value = layer.self_attn.key_value(x, angles)
            attended = attend(number, layer.self_attn.query(x, angles), key, value)
            hidden = layer.output(attended, residual)
        return self.finish(hidden)

    def borrowed(self) -> frozenset[str]:
        """Names of those of `tensors` that are the target's own, which its files leave out."""
        return frozenset({EMBEDDINGS} if self.config.embeddings == "target" else ())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by the name it has in files."""
        return self.state_dict()

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Takes in what `tensors` gives, from a file."""
        self.load_state_dict(tensors)

    def take_over(self, embeddings: Tensor, final_norm: Tensor, lm_head: Tensor) -> None:
        """Takes initial values from the target, once the draft vocabulary is set.

        Args:
            embeddings: [V, H]. final_norm: [H], weights. lm_head: [V, H].
        """
        ids = self.target_ids(torch.arange(len(self.d2t), device=self.d2t.device))
        self.embed_tokens.weight.copy_(embeddings)
        self.norm.weight.copy_(final_norm)
        self.lm_head.weight.copy_(lm_head[ids])

    def initialise_masks(self, generator: torch.Generator) -> None:
        """Initial values of what stands in masked slots, of which most families have none."""

    def set_draft_vocabulary(self, target_ids: Tensor) -> None:
        """Sets d2t and t2d from ascending unique target ids, int64 [D]."""
        size = self.config.draft_vocab_size
        if target_ids.shape != (size,) or not bool((target_ids.diff() > 0).all()):
            raise ValueError(f"expected {size} ascending unique target ids")
        self.d2t.copy_(target_ids - torch.arange(size, device=target_ids.device))
        self.t2d.zero_()
        self.t2d[target_ids] = True

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft-vocabulary ids, same shape."""
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
    """Initial values before training (methods §2).

    Embeddings [V, H], final norm [H] and the draft vocabulary's lm_head rows come from the target
    (so logits of a perfect imitation would be the target's); projections are normal with standard
    deviation 1/√fan_in, scaled down where they write into the residual stream.

    Args:
        lm_head: the target's projection, [V, H].
        target_ids: ascending draft vocabulary, int64 [D].
        seed: of a generator local to this call.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2 and not name.startswith(("embed_tokens", "lm_head", "mask_")):
                scale = parameter.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    scale *= 0.5**0.5
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * scale)
        head.set_draft_vocabulary(target_ids)
        head.take_over(embeddings, final_norm, lm_head)
        head.initialise_masks(generator)
