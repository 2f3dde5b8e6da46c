"""The distillation loss from hidden states, with no logits left behind (methods §2).

A row's gradient needs no other row, so gradients are made in the forward pass, a chunk of rows at a
time, and the backward pass only scales them. Several unrolled steps learn from the same position of
the target, so rows are taken in the order of their teachers (`RowPlan`) and a teacher's logits are
made once, whichever steps use them.

For one chunk: two products fill two buffers with the teachers' and the head's logits; one kernel
(`distill_triton.py`; on a CPU and in float64 `distill` and autograd) reduces each row and
overwrites the head's logits by the gradient of the weighted loss; two products take it on to the
hidden states and to lm_head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftlab.kernels.distill import (
    Distilled,
    Loss,
    Teacher,
    check_share,
    distill_rows_reference,
    weighted,
    wide_dtype,
)
from draftlab.kernels.distill_plan import RowPlan

_CPU_BUFFER = 8 << 20  # bytes: what stays in a cache
_LEAST_GPU_BUFFER = 64 << 20  # below, launches would cost more than they save


@dataclass(frozen=True)
class DistilledRows(Distilled):
    """As `Distilled`, float32 and without gradients, and `total` = Σ weight · loss, which has them.

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
    share: Tensor | None = None,
    buffer_bytes: int | None = None,
) -> DistilledRows:
    """`distill` of hidden @ lm_headᵀ against the teacher, with no [R, D] left behind.

    Products run in autocast's dtype where it is on, else in those of `hidden` and of
    `teacher.weight`; all else is float32 (float64 for float64), as are the sums that become
    lm_head's gradient. Gradients are scaled in place, so a graph goes backward once. Nothing here
    makes the host wait.

    Args:
        hidden: [R, H], what lm_head reads, normed. lm_head: [D, H], in any dtype.
        plan: of `teacher.last`'s positions that the R rows learn from.
        weight: float [R], the factor of each row's loss in `total`; no gradient.
        share: lk's, float32 [R] (see `lk_share`).
        buffer_bytes: for the logits of a chunk; None: on a GPU as many as lm_head has in the
            products' dtype. Rows of a chunk are then about H, whatever D is, and adding their
            product to lm_head's gradient costs a few percent of making it.

    Raises:
        ValueError: if shapes do not fit together, or `share` is not given just for lk.
    """
    _check(hidden, lm_head, teacher, plan, weight, loss, share)
    wanted = torch.is_grad_enabled()
    options = _Options(
        loss,
        buffer_bytes,
        wanted and hidden.requires_grad,
        wanted and lm_head.requires_grad,
    )
    total, *rows = _DistillLinear.apply(hidden, lm_head, teacher, plan, weight, share, options)
    return DistilledRows(*rows, total)


@dataclass(frozen=True)
class _Options:
    loss: Loss
    buffer_bytes: int | None
    wants_hidden: bool
    wants_lm_head: bool


class _DistillLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lm_head: Tensor,
        teacher: Teacher,
        plan: RowPlan,
        weight: Tensor,
        share: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, ...]:
        wide = wide_dtype(hidden.dtype)
        weight = weight.to(wide)
        out = Distilled(
            hidden.new_empty(len(hidden), dtype=wide),
            hidden.new_empty(len(hidden), dtype=wide),
            hidden.new_empty(len(hidden), dtype=torch.int64),
        )
        # In the plan's order, so that chunks are slices.
        d_hidden = torch.empty_like(hidden) if options.wants_hidden else None
        d_lm_head = torch.zeros_like(lm_head, dtype=wide) if options.wants_lm_head else None
        _go_through(
            hidden, lm_head, teacher, plan, weight, share, options, out, d_hidden, d_lm_head
        )
        if d_lm_head is not None:
            d_lm_head = d_lm_head.to(lm_head.dtype)
        ctx.save_for_backward(d_hidden, d_lm_head, plan.order)
        ctx.mark_non_differentiable(out.loss, out.alpha, out.best)
        return weighted(weight, out.loss), out.loss, out.alpha, out.best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, order = ctx.saved_tensors
        d_hidden, d_lm_head = (g if g is None else g.mul_(scale) for g in gradients)
        if d_hidden is not None:
            places = torch.arange(len(order), device=order.device)
            d_hidden = d_hidden[torch.empty_like(order).scatter_(0, order, places)]
        return d_hidden, d_lm_head, None, None, None, None, None


def _go_through(
    hidden: Tensor,
    lm_head: Tensor,
    teacher: Teacher,
    plan: RowPlan,
    weight: Tensor,
    share: Tensor | None,
    options: _Options,
    out: Distilled,
    d_hidden: Tensor | None,
    d_lm_head: Tensor | None,
) -> None:
    """Fills `out` and `d_hidden` (in the plan's order), adds to `d_lm_head`, chunk by chunk."""
    dtype, teacher_dtype = _product_dtype(hidden), _product_dtype(teacher.weight)
    factors, teachings = lm_head.to(dtype), teacher.weight.to(teacher_dtype)
    vocab, size = lm_head.shape
    pitch = -(-vocab // 16) * 16  # rows start where the widest loads may
    line = pitch * max(dtype.itemsize, teacher_dtype.itemsize)
    budget = options.buffer_bytes or _CPU_BUFFER
    if options.buffer_bytes is None and hidden.is_cuda:
        budget = max(_LEAST_GPU_BUFFER, vocab * size * dtype.itemsize)
    chunks = plan.chunks(budget // line)
    most_rows = max((c.num_rows for c in chunks), default=0)
    most_teachers = max((c.num_teachers for c in chunks), default=0)
    drafted = hidden.new_empty(most_rows, pitch, dtype=dtype)[:, :vocab]
    taught = hidden.new_empty(most_teachers, pitch, dtype=teacher_dtype)[:, :vocab]
    gradients = d_hidden is not None or d_lm_head is not None
    judge = _judge(hidden.is_cuda, weight.dtype)
    ordered = hidden[plan.order].to(dtype)
    for chunk in chunks:
        z = taught[: chunk.num_teachers]
        last = teacher.last[plan.positions[chunk.teachers]].to(teacher.weight.dtype)
        normed = last if teacher.norm is None else teacher.norm(last)
        torch.mm(normed.to(teacher_dtype), teachings.t(), out=z)
        x = drafted[: chunk.num_rows]
        states = ordered[chunk.rows]
        torch.mm(states, factors.t(), out=x)
        judge(x, z, chunk.rows, plan, teacher, weight, share, options.loss, gradients, out)
        if d_hidden is not None:
            if hidden.dtype == dtype:
                torch.mm(x, factors, out=d_hidden[chunk.rows])
            else:
                d_hidden[chunk.rows] = x @ factors
        if d_lm_head is not None:
            # 0 · NaN is NaN: what a row without weight holds must not reach the product.
            states.masked_fill_((weight[plan.order[chunk.rows]] == 0)[:, None], 0)
            _add_product(d_lm_head, x.t(), states)


def _judge(on_gpu: bool, wide: torch.dtype) -> Callable[..., None]:
    if on_gpu and wide == torch.float32:
        from draftlab.kernels.distill_triton import distill_rows

        return distill_rows
    return distill_rows_reference


def _product_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in total's dtype.

    A product of 16-bit factors has float32 sums on a GPU, where they can be added as they are.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif not total.is_cuda:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
    elif _adds_wide(total.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        for rows, part in zip(total.split(4096), left.split(4096), strict=True):
            rows += torch.mm(part, right, out_dtype=total.dtype)


@cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether 16-bit products can be added to float32 in one call: from torch 2.10 on."""
    total = torch.zeros(16, 16, device=device)
    factor = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, factor, factor, out_dtype=total.dtype, out=total)
    except RuntimeError:
        return False
    return True


def _check(
    hidden: Tensor,
    lm_head: Tensor,
    teacher: Teacher,
    plan: RowPlan,
    weight: Tensor,
    loss: Loss,
    share: Tensor | None,
) -> None:
    rows = len(plan.order)
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "hidden": (hidden, (rows, lm_head.shape[1])),
        "teacher.weight": (teacher.weight, (len(lm_head), teacher.last.shape[1])),
        "teacher.logsumexp": (teacher.logsumexp, (len(teacher.last),)),
        "weight": (weight, (rows,)),
    }
    if share is not None:
        expected["share"] = (share, (rows,))
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"expected {name} {list(shape)}, found {list(tensor.shape)}")
    check_share(loss, share)
