"""Judging rows of a head's logits on a GPU: `distill.distill_rows_reference` in one launch.

One program has one row of D logits and goes over it in tiles, twice: first for log Σ exp, argmax
and the teacher's mass in the draft vocabulary, m = Σ p; then for the loss, α and the gradient,
which takes the logits' place. lk needs a sum between the two. Programs of neighbouring rows read
the same teacher, and a row's second reading follows closely on its first: both mostly come from L2.

With S = Σ_{q<p} q (a tie counts half, as autograd has it), the gradients by the head's logits are
m·q − p of soft_ce and kl, and q·(S − [q < p]) of 1 − α.

Rows lie `stride` apart, a multiple of 16: loads and stores of whole rows are as wide as can
be for any D. What lies between D and the stride is read in vain and overwritten.

Sums are kept per lane and joined once, in a fixed order. The loss of a row with a logit that is not
finite is NaN, as the reference's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftlab.kernels.dependent_launch import FP_FUSION
from draftlab.kernels.distill import Distilled, Loss, Teacher
from draftlab.kernels.distill_plan import RowPlan

TILE = 2048
WARPS = 8
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _draft_logits(pointers, held, inside):
    x = tl.load(pointers, mask=held, other=0.0).to(tl.float32)
    return tl.where(inside, x, float("-inf"))


@triton.jit
def _log_p(pointers, held, inside, scale, softcap, logsumexp, SOFTCAP: tl.constexpr):
    """−inf where masked."""
    z = tl.load(pointers, mask=held, other=0.0).to(tl.float32) * scale
    if SOFTCAP:
        # tanh, with no infinity over infinity for large logits
        z = softcap * (1.0 - 2.0 / (tl.exp(2.0 * z / softcap) + 1.0))
    return tl.where(inside, z - logsumexp, float("-inf"))


@triton.jit
def _below(q, p):
    """By what part of q min(p, q) grows with it."""
    return tl.where(q < p, 1.0, tl.where(q == p, 0.5, 0.0))


@triton.jit(do_not_specialize=["start"])
def distill_kernel(
    logits, teacher_logits, stride, start, size,
    order, place, positions, logsumexps, weights, shares, losses, alphas, bests, scale, softcap,
    SOFTCAP: tl.constexpr, KL: tl.constexpr, LK: tl.constexpr, GRADIENTS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (n,): rows start … start + n of the plan, the first of which has the first teacher."""
    line = tl.program_id(0)
    row, own = tl.load(order + start + line), tl.load(place + start + line)
    x_row = logits + line.to(tl.int64) * stride
    z_row = teacher_logits + (own - tl.load(place + start)) * stride
    logsumexp = tl.load(logsumexps + tl.load(positions + own))
    lane = tl.arange(0, TILE)

    # Per lane: the largest logit so far, Σ exp relative to it, where it was; the teacher's mass.
    tops = tl.full([TILE], _LOWEST, tl.float32)
    sums = tl.zeros([TILE], tl.float32)
    where = tl.zeros([TILE], tl.int32)
    masses = tl.zeros([TILE], tl.float32)
    for begin in range(0, size, TILE):
        at = begin + lane
        held, inside = at < stride, at < size
        x = _draft_logits(x_row + at, held, inside)
        rises = x > tops
        shrunk = tl.exp(-tl.abs(x - tops))
        sums = tl.where(rises, sums * shrunk + 1.0, sums + shrunk)
        where = tl.where(rises, at, where)
        tops = tl.where(rises, x, tops)
        if GRADIENTS:
            masses += tl.exp(_log_p(z_row + at, held, inside, scale, softcap, logsumexp, SOFTCAP))
    top = tl.max(tops, 0)
    best = tl.min(tl.where(tops == top, where, 2147483647), 0)
    log_sum = top + tl.log(tl.sum(sums * tl.exp(tops - top), 0))
    mass = tl.sum(masses, 0)

    low = 0.0  # S
    if LK and GRADIENTS:
        lows = tl.zeros([TILE], tl.float32)
        for begin in range(0, size, TILE):
            at = begin + lane
            held, inside = at < stride, at < size
            q = tl.exp(_draft_logits(x_row + at, held, inside) - log_sum)
            p = tl.exp(_log_p(z_row + at, held, inside, scale, softcap, logsumexp, SOFTCAP))
            lows += q * _below(q, p)
        low = tl.sum(lows, 0)

    weight = tl.load(weights + row)
    share = 1.0
    if LK:
        share = tl.load(shares + row)
    loss = tl.zeros([TILE], tl.float32)
    alpha = tl.zeros([TILE], tl.float32)
    for begin in range(0, size, TILE):
        at = begin + lane
        held, inside = at < stride, at < size
        log_q = _draft_logits(x_row + at, held, inside) - log_sum
        log_p = _log_p(z_row + at, held, inside, scale, softcap, logsumexp, SOFTCAP)
        q, p = tl.exp(log_q), tl.exp(log_p)
        if KL:
            loss += tl.where(inside, p * (log_p - log_q), 0.0)
        else:
            loss -= tl.where(inside, p * log_q, 0.0)
        alpha += tl.minimum(p, q)
        if GRADIENTS:
            gradient = mass * q - p
            if LK:
                gradient = share * gradient + (1.0 - share) * q * (low - _below(q, p))
            gradient = tl.where(weight != 0, weight * gradient, 0.0)
            tl.store(x_row + at, gradient, mask=held)
    value, accepted = tl.sum(loss, 0), tl.sum(alpha, 0)
    if LK:
        value = share * value + (1.0 - share) * (1.0 - accepted)
    tl.store(losses + row, value)
    tl.store(alphas + row, accepted)
    tl.store(bests + row, best.to(tl.int64))


def distill_rows(
    logits: Tensor,
    teacher_logits: Tensor,
    rows: slice,
    plan: RowPlan,
    teacher: Teacher,
    weight: Tensor,
    share: Tensor | None,
    loss: Loss,
    gradients: bool,
    out: Distilled,
) -> None:
    """As `distill.distill_rows_reference`.

    Both logits are columns [:D] of contiguous buffers of one width; other columns are nobody's.
    """
    with torch.cuda.device_of(logits):
        distill_kernel[(len(logits),)](
            logits,
            teacher_logits,
            logits.stride(0),
            rows.start,
            logits.shape[1],
            plan.order,
            plan.place,
            plan.positions,
            teacher.logsumexp.contiguous(),
            weight.contiguous(),
            None if share is None else share.contiguous(),
            out.loss,
            out.alpha,
            out.best,
            teacher.scale,
            0.0 if teacher.softcap is None else teacher.softcap,
            SOFTCAP=teacher.softcap is not None,
            KL=loss != "soft_ce",
            LK=loss == "lk",
            GRADIENTS=gradients,
            TILE=TILE,
            num_warps=WARPS,
            **FP_FUSION,
        )
