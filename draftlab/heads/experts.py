"""A mixture of SwiGLU experts as the feed-forward of a head's layer (heads/mtp.py).

A router scores the experts of each token, by a softmax (Qwen3-Next) or by sigmoids that a bias
corrects for the choice alone (DeepSeek-V3, arXiv:2412.19437, and GLM-4.5); a shared expert reads
every token.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn

from draftlab.heads.layers import SwiGLU, at_least_float32

Count = Annotated[int, Field(ge=1, le=2**16)]


class ExpertsConfig(BaseModel, extra="forbid", frozen=True):
    """Shape and routing of a mixture.

    Attributes:
        per_token: experts of a token.
        intermediate_size: width of each expert; shared_size: of the shared expert.
        normalised: whether the weights of a token's experts add up to `scaling`.
        scaling: factor of the weights.
        sigmoid: whether scores are sigmoids, with a bias for the choice; they are a softmax if not.
        groups: of the experts, in order; a token's experts are in the `chosen_groups` with the
            largest sum of two scores.
        gated: whether the shared expert's output is multiplied by σ(gate).
    """

    num_experts: Count
    per_token: Count
    intermediate_size: Annotated[int, Field(ge=1, le=2**28)]
    shared_size: Annotated[int, Field(ge=1, le=2**28)]
    normalised: bool
    scaling: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    sigmoid: bool
    groups: Count = 1
    chosen_groups: Count = 1
    gated: bool

    @property
    def width_of_token(self) -> int:
        """Return the width of all experts of a token together."""
        return self.per_token * self.intermediate_size

    @model_validator(mode="after")
    def _check(self) -> ExpertsConfig:
        size = self.num_experts // self.groups
        fits = self.chosen_groups <= self.groups and self.per_token <= self.chosen_groups * size
        if size * self.groups != self.num_experts or not fits:
            raise ValueError(
                f"{self.per_token} of {self.num_experts} experts cannot be chosen from "
                f"{self.chosen_groups} of {self.groups} equal groups"
            )
        if self.groups > 1 and size < 2:
            raise ValueError(f"expected groups of two experts or more, found {size}")
        return self


class Experts(nn.Module):
    """The experts of a layer: parameters [E, …] of all experts, a router and a shared expert.

    The router's bias for the choice has no gradient, since training balances it otherwise. It is
    the sum of the rows of `correction` [3, E], which are bfloat16 numbers, so that no dtype of the
    head rounds it: choices depend on small differences.
    """

    def __init__(self, size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config, count, width = config, config.num_experts, config.intermediate_size
        self.router = nn.Linear(size, count, bias=False)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, size))
        self.down = nn.Parameter(torch.empty(count, size, width))
        if config.sigmoid:
            self.register_buffer("correction", torch.zeros(3, count))
        self.shared = SwiGLU(size, config.shared_size)
        if config.gated:
            self.shared_gate = nn.Linear(size, 1, bias=False)

    def set_correction(self, bias: Tensor) -> None:
        """Set the router's bias, float32 [E] or narrower."""
        left = bias.float()
        for row in self.correction:
            row.copy_(left.bfloat16())
            left = left - left.bfloat16().float()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weights, chosen = self.route(rows)
        shared = self.shared(rows)
        if self.config.gated:
            shared = torch.sigmoid(self.shared_gate(rows)) * shared
        # Each token once for each of its experts, sorted by expert.
        expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(
            expert, torch.arange(len(self.gate_up), device=x.device), right=True
        )
        sorted_rows = rows[order // self.config.per_token]
        gate, up = product_by_expert(sorted_rows, self.gate_up, ends).chunk(2, -1)
        outputs = product_by_expert(F.silu(gate) * up, self.down, ends)
        by_token = torch.empty_like(outputs).index_copy(0, order, outputs)
        by_token = by_token.unflatten(0, chosen.shape) * weights.to(outputs.dtype)[..., None]
        return (by_token.sum(1) + shared).view(x.shape)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [T, per_token], in float32 or wider, and the experts of rows [T, H].

        Experts have a gradient by the weights alone.
        """
        config = self.config
        if not config.sigmoid:
            scores = at_least_float32(self.router(rows)).softmax(-1)
            weights, chosen = scores.topk(config.per_token, -1)
        else:
            with torch.autocast(rows.device.type, enabled=False):
                scores = at_least_float32(rows) @ at_least_float32(self.router.weight).T
            scores = scores.sigmoid()
            ranked = scores.detach() + self.correction.float().sum(0)
            if config.chosen_groups < config.groups:
                by_group = ranked.unflatten(1, (config.groups, -1))
                best = by_group.topk(2, -1).values.sum(-1).topk(config.chosen_groups, -1).indices
                open_groups = torch.zeros_like(by_group[..., 0], dtype=torch.bool)
                open_groups.scatter_(1, best, True)
                ranked = by_group.masked_fill(~open_groups[..., None], float("-inf")).flatten(1)
            chosen = ranked.topk(config.per_token, -1).indices
            weights = scores.gather(1, chosen)
        if config.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20 * config.sigmoid)
        return weights * config.scaling, chosen


def product_by_expert(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the products [R, n] of rows [R, k], sorted by expert, with the experts' [E, n, k];
    ends: int64 [E], of each expert's rows.
    """
    if torch.is_autocast_enabled(rows.device.type):
        return _CastProduct.apply(rows.to(torch.get_autocast_dtype(rows.device.type)), weight, ends)
    return _product(rows, weight, ends)


class _CastProduct(torch.autograd.Function):
    """`_product` with weights in the rows' dtype, which are cast again for the backward pass: else
    every step of an unroll would keep a copy of all experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        return _product(rows, weight.to(rows.dtype), ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        d_rows = _product(gradient, weight.to(rows.dtype).mT, ends)
        if (grouped := _grouped_product(rows, weight)) is not None:
            d_weight = grouped(gradient.mT, rows, offs=ends.int())
        else:
            parts = pairwise([0, *ends.tolist()])
            d_weight = torch.stack(
                [gradient[start:end].T @ rows[start:end] for start, end in parts]
            )
        return d_rows, d_weight.to(weight.dtype), None


def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return `product_by_expert` of rows and weights in one dtype."""
    if (grouped := _grouped_product(rows, weight)) is not None:
        return grouped(rows, weight.mT, offs=ends.int())
    if rows.is_cuda and torch.cuda.is_current_stream_capturing():
        return copied_product(rows, weight, ends)
    parts = zip(pairwise([0, *ends.tolist()]), weight, strict=True)
    return torch.cat([rows[start:end] @ one.T for (start, end), one in parts])


def copied_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return `product_by_expert` of a few rows, each with a copy of its expert; a graph can capture
    it."""
    numbers = torch.arange(len(rows), device=rows.device)
    expert = torch.searchsorted(ends, numbers, right=True)
    return (weight[expert] @ rows[..., None])[..., 0]


def _grouped_product(rows: Tensor, weight: Tensor) -> Callable[..., Tensor] | None:
    """Return torch's grouped product if it computes these without waiting for the device."""
    grouped = getattr(F, "grouped_mm", None)  # from torch 2.10 on
    if any(size * rows.element_size() % 16 for size in weight.shape[1:]):
        return None  # rows or their gradients are not aligned
    if not rows.is_cuda:
        return grouped if rows.dtype in (torch.bfloat16, torch.float32) else None
    hopper = torch.cuda.get_device_capability(rows.device) >= (9, 0)
    return grouped if rows.dtype == torch.bfloat16 and hopper else None
