"""The distillation loss from hidden states, without a tensor of all logits (docs/methods.md §2).

A row's gradient needs no other row, so gradients are computed in the forward pass, a chunk of rows
at a time, and the backward pass only scales them (as Liger-Kernel's fused linear cross-entropy,
arXiv:2410.10989). Several unrolled steps learn from the same position of the target, so rows are
sorted by teacher (`RowPlan`) and a teacher's logits are computed once for all steps.

For one chunk: two products fill two buffers with the teachers' and the head's logits;
`distill_rows` (one kernel on a GPU) reduces each row and overwrites the head's logits by the
gradient of the weighted loss; two products propagate it to the hidden states and to lm_head. With
`fp8` the products that give the head's logits and the hidden states' gradient are in 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftlab.kernels.compile_ahead import is_fake
from draftlab.kernels.distill import (
    Distilled,
    Labels,
    Loss,
    Teacher,
    check_loss_arguments,
    distill_rows,
    sum_dtype,
    weighted,
)
from draftlab.kernels.distill.plan import RowPlan
from draftlab.kernels.fp8_linear import input_gradient, linear, quantise_weight
from draftlab.kernels.fp8_rows import quantise_rows

_CPU_BUFFER = 8 << 20  # bytes that stay in a cache
MIN_GPU_BUFFER = 1 << 30
"""Bytes of a chunk's logits, at least, on a GPU: below, launches would cost more than they save."""


@dataclass(frozen=True)
class DistilledRows(Distilled):
    """The values of `Distilled`, without gradients, and `total` = Σ weight · loss, which has them.

    A row of weight 0 adds nothing to `total` and to gradients, even where it is not finite.
    """

    total: Tensor


def distill_linear(
    hidden: Tensor,
    lm_head: Tensor,
    teacher: Teacher,
    plan: RowPlan,
    weight: Tensor,
    *,
    loss: Loss = "soft_ce",
    kl_weight: Tensor | None = None,
    labels: Labels | None = None,
    frozen: Tensor | None = None,
    fp8: bool = False,
    buffer_bytes: int | None = None,
) -> DistilledRows:
    """Return `distill` of hidden @ lm_headᵀ against the teacher, without a tensor [R, D].

    With `frozen` the logits are hidden @ [frozen | lm_head]ᵀ, one product.

    Products run in autocast's dtype where it is on, else in those of `hidden` and of
    `teacher.weight`; all else is float32 (float64 for float64), as are the sums that become
    lm_head's gradient. Gradients are scaled in place, so a graph runs backward once. The host never
    waits.

    Args:
        hidden: [R, H], what lm_head reads, normed. lm_head: [D, H], in any dtype.
        plan: of `teacher.last`'s positions that the R rows learn from.
        weight: float [R], the factor of each row's loss in `total`; no gradient.
        kl_weight: λ of lk, float32 [R] (see `lk_weight`).
        labels: of ce_l1.
        frozen: [D, F], weights without gradient of hidden's first F columns; hidden is then
            [R, F + H].
        fp8: whether the head's logits and the gradient of `hidden` are products in e4m3
            (`fp8_linear`), for an H that is a multiple of `SIZE_MULTIPLE`.
        buffer_bytes: for the logits of a chunk; None: on a GPU the size of lm_head in the products'
            dtype, but at least 1 GiB. A chunk then has about H rows or more for any D, and adding
            its product to lm_head's gradient costs a few percent of computing it.

    Raises:
        ValueError: if shapes do not fit together, or `kl_weight` or `labels` are not those that the
            loss needs.
    """
    num_rows = len(plan.order)
    width = lm_head.shape[1] + (0 if frozen is None else frozen.shape[1])
    expected = {
        "hidden": (hidden, (num_rows, width)),
        "teacher.weight": (teacher.weight, (len(lm_head), teacher.last.shape[1])),
        "teacher.logsumexp": (teacher.logsumexp, (len(teacher.last),)),
        "weight": (weight, (num_rows,)),
    }
    if kl_weight is not None:
        expected["kl_weight"] = (kl_weight, (num_rows,))
    if labels is not None:
        expected["labels"] = (labels.ids, (num_rows,))
    if frozen is not None:
        expected["frozen"] = (frozen, (len(lm_head), frozen.shape[1]))
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"expected {name} {list(shape)}, found {list(tensor.shape)}")
    check_loss_arguments(loss, kl_weight, labels)
    needs_gradient = [torch.is_grad_enabled() and x.requires_grad for x in (hidden, lm_head)]
    total, *values = _DistillLinear.apply(
        hidden, lm_head, teacher, plan, weight, kl_weight, labels, frozen, loss, fp8, buffer_bytes,
        *needs_gradient,
    )  # fmt: skip
    return DistilledRows(*values, total)


class _DistillLinear(torch.autograd.Function):
    """The autograd function of `distill_linear`; it saves gradients instead of inputs."""

    @staticmethod
    def forward(
        ctx: Any, hidden, lm_head, teacher, plan, weight, kl_weight, labels, frozen, loss, fp8,
        buffer_bytes, needs_d_hidden, needs_d_lm_head,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        dtype = sum_dtype(hidden.dtype)
        weight = weight.to(dtype)
        out = Distilled(
            hidden.new_empty(len(hidden), dtype=dtype),
            hidden.new_empty(len(hidden), dtype=dtype),
            hidden.new_empty(len(hidden), dtype=torch.int64),
        )
        # Rows are in the plan's order, so that chunks are slices.
        d_hidden = torch.empty_like(hidden) if needs_d_hidden else None
        d_lm_head = torch.zeros_like(lm_head, dtype=dtype) if needs_d_lm_head else None
        product_dtype, teacher_dtype = _product_dtype(hidden), _product_dtype(teacher.weight)
        weights, teacher_weights = lm_head.to(product_dtype), teacher.weight.to(teacher_dtype)
        trained_from = 0 if frozen is None else frozen.shape[1]
        if frozen is not None:
            weights = torch.cat([frozen.to(product_dtype), weights], 1)
        vocab, size = weights.shape
        pitch = -(-vocab // 16) * 16  # rows are aligned to the widest loads
        if fp8:
            padded = F.pad(weights, (0, 0, 0, pitch - vocab)) if pitch > vocab else weights
            weights = quantise_weight(padded, quantise_rows)
            del padded
        row_bytes = pitch * max(product_dtype.itemsize, teacher_dtype.itemsize)
        budget = buffer_bytes or _CPU_BUFFER
        if buffer_bytes is None and hidden.is_cuda:
            budget = max(MIN_GPU_BUFFER, vocab * size * product_dtype.itemsize)
        chunks = plan.chunks(budget // row_bytes)
        max_rows = max((c.num_rows for c in chunks), default=0)
        max_teachers = max((c.num_teachers for c in chunks), default=0)
        # On CPUs torch's 16-bit products read a column beyond an odd width: it must be finite.
        draft_buffer = hidden.new_zeros(0 if fp8 else max_rows, pitch, dtype=product_dtype)
        teacher_buffer = hidden.new_zeros(max_teachers, pitch, dtype=teacher_dtype)[:, :vocab]
        gradients = d_hidden is not None or d_lm_head is not None
        ordered = hidden[plan.order].to(product_dtype)
        without_weight = (weight[plan.order] == 0)[:, None]
        for chunk in chunks:
            z = teacher_buffer[: chunk.num_teachers]
            last = teacher.last[plan.positions[chunk.teachers]].to(sum_dtype(teacher.weight.dtype))
            normed = last if teacher.norm is None else teacher.norm(last)
            torch.mm(normed.to(teacher_dtype), teacher_weights.t(), out=z)
            states = ordered[chunk.rows]
            if fp8:
                rows = linear(states, weights, quantise_rows)
            else:
                rows = draft_buffer[: chunk.num_rows]
                torch.mm(states, weights.t(), out=rows[:, :vocab])
            x = rows[:, :vocab]
            distill_rows(
                x, z, chunk.rows, plan, teacher, weight, kl_weight, labels, loss, gradients, out
            )
            if d_hidden is not None:
                if fp8:
                    rows[:, vocab:] = 0
                    d_hidden[chunk.rows] = input_gradient(rows, weights, quantise_rows)
                elif hidden.dtype == product_dtype:
                    torch.mm(x, weights, out=d_hidden[chunk.rows])
                else:
                    d_hidden[chunk.rows] = x @ weights
            if d_lm_head is not None:
                # 0 · NaN is NaN: the states of a row without weight must not reach the product.
                states.masked_fill_(without_weight[chunk.rows], 0)
                _add_product(d_lm_head, x.t(), states[:, trained_from:])
            del rows, x  # in fp8 the next chunk has a tensor of its own
        if d_lm_head is not None:
            d_lm_head = d_lm_head.to(lm_head.dtype)
        ctx.save_for_backward(d_hidden, d_lm_head, plan.order)
        ctx.mark_non_differentiable(out.loss, out.alpha, out.best)
        ctx.set_materialize_grads(False)
        return weighted(weight, out.loss), out.loss, out.alpha, out.best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, order = ctx.saved_tensors
        d_hidden, d_lm_head = (g if g is None else g.mul_(scale) for g in gradients)
        if d_hidden is not None:
            d_hidden = torch.empty_like(d_hidden).index_copy_(0, order, d_hidden)
        return d_hidden, d_lm_head, *[None] * 11


def _product_dtype(x: Tensor) -> torch.dtype:
    """Return autocast's dtype where it is on, else x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to total, summed in total's dtype.

    A GPU sums a product of 16-bit factors in float32, so it can add them without rounding first.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif not total.is_cuda:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
    elif is_fake():
        pass  # torch's fake tensors know no out_dtype, and there is no kernel to compile
    elif _can_add_float32(total.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        for rows, part in zip(total.split(4096), left.split(4096), strict=True):
            rows += torch.mm(part, right, out_dtype=total.dtype)


@cache
def _can_add_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether one call adds 16-bit products to float32: from torch 2.10 on."""
    total = torch.zeros(16, 16, device=device)
    factor = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, out=total)
    except RuntimeError:
        return False
    return True
