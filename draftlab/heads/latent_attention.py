"""Multi-head latent attention of a head's layer (MLA, DeepSeek-V2, arXiv:2405.04434).

Queries, keys and values are products of normed latents. Of each head's channels only `rope_size`
turn, in neighbouring pairs, and all heads share their keys. A head caches whole keys and values,
each `head_dim` wide and filled up with zeros, so that kernels of plain attention compute it.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field
from torch import Tensor, nn

from draftlab.heads.layers import Angles, Attention, RMSNorm, rotate

Width = Annotated[int, Field(ge=1, le=2**20)]


class LatentConfig(BaseModel, extra="forbid", frozen=True):
    """Sizes of latent attention.

    Attributes:
        query_rank: width of the queries' latent; None: queries are a product of the input.
        rank: width of the latent of keys and values. value_size: channels of a value.
        plain_size, rope_size: channels of a query and key that do not turn, and that do.
        score_factor: factor of the scores beside (plain_size + rope_size)^−½, of YaRN.
    """

    query_rank: Width | None
    rank: Width
    plain_size: Width
    rope_size: Annotated[int, Field(ge=2, le=2**16, multiple_of=2)]
    value_size: Width
    score_factor: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    @property
    def head_dim(self) -> int:
        """Return the channels of a cached key or value."""
        size = max(self.plain_size + self.rope_size, self.value_size)
        return size + size % 2


class LatentAttention(Attention):
    """Projections of latent attention, with the interface of `Attention`."""

    def __init__(self, size: int, num_heads: int, config: LatentConfig, eps: float) -> None:
        nn.Module.__init__(self)  # its submodules differ from those of its base class
        self.config, self.num_heads, self.num_kv_heads = config, num_heads, num_heads
        self.head_dim, both = config.head_dim, config.plain_size + config.rope_size
        rank, wide = config.query_rank, num_heads * both
        if rank is None:
            self.q_proj = nn.Linear(size, wide, bias=False)
        else:
            self.q_a_proj = nn.Linear(size, rank, bias=False)
            self.q_a_layernorm = RMSNorm(rank, eps)
            self.q_b_proj = nn.Linear(rank, wide, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(size, config.rank + config.rope_size, bias=False)
        self.kv_a_layernorm = RMSNorm(config.rank, eps)
        values = num_heads * config.value_size
        self.kv_b_proj = nn.Linear(config.rank, num_heads * config.plain_size + values, bias=False)
        self.o_proj = nn.Linear(values, size, bias=False)
        # Callers divide scores by the root of the width with zeros.
        self.factor = config.score_factor * (self.head_dim / both) ** 0.5

    def key_value_multiplications(self) -> int:
        return self.kv_a_proj_with_mqa.weight.numel() + self.kv_b_proj.weight.numel()

    def query(self, x: Tensor, angles: Angles) -> Tensor:
        config = self.config
        if config.query_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.unflatten(-1, (self.num_heads, -1))
        plain, turning = query.split([config.plain_size, config.rope_size], -1)
        return self._turned(turning, plain, angles) * self.factor

    def key_value(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        config = self.config
        latent, turning = self.kv_a_proj_with_mqa(x).split([config.rank, config.rope_size], -1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.num_heads, -1))
        plain, value = both.split([config.plain_size, config.value_size], -1)
        turning = turning[..., None, :].expand(*plain.shape[:-1], -1)
        return self._turned(turning, plain, angles), self._padded(value)

    def _turned(self, turning: Tensor, plain: Tensor, angles: Angles) -> Tensor:
        """Return turned channels before plain ones, in an order that scores do not depend on."""
        halves = torch.cat([turning[..., 0::2], turning[..., 1::2]], -1)
        return self._padded(rotate(torch.cat([halves, plain], -1), angles))

    def _padded(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, self.head_dim - x.shape[-1]))
