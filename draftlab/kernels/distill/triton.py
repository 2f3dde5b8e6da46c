"""Triton kernel of `distill.distill_rows`.

One program has one row of D logits and loops over it in tiles, twice: first for log Σ exp, argmax
and the teacher's mass in the draft vocabulary, m = Σ p; then for the loss, α and the gradient,
which overwrites the logits. lk needs a sum in between. Programs of neighbouring rows read the same
teacher, and a row's second reading follows soon after its first: both mostly come from L2.

With S = Σ_{q<p} q (a tie counts half, as in autograd), the gradients by the head's logits are
m·q − p of the cross-entropy and of KL, q·(S − [q < p]) of 1 − α, and q − [label] of −log q(label).

The distance between rows, `stride`, is a multiple of 16, so that loads and stores of whole rows
have full width for any D. The columns between D and the stride are read, ignored and overwritten.

Sums are kept per lane and reduced once, in a fixed order. The loss of a row with a logit that is
not finite is NaN, as the reference's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftlab.kernels.launching import FP_FUSION

TILE = 2048
WARPS = 8
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _draft_logits(pointers, in_row, inside):
    """Return float32 logits of the head, −inf where not `inside`."""
    x = tl.load(pointers, mask=in_row, other=0.0).to(tl.float32)
    return tl.where(inside, x, float("-inf"))


@triton.jit
def _log_p(pointers, in_row, inside, scale, softcap, logsumexp, SOFTCAP: tl.constexpr):
    """Return the log-probabilities of the teacher, −inf where not `inside`."""
    z = tl.load(pointers, mask=in_row, other=0.0).to(tl.float32) * scale
    if SOFTCAP:
        # tanh in a form without infinity over infinity for large logits
        z = softcap * (1.0 - 2.0 / (tl.exp(2.0 * z / softcap) + 1.0))
    return tl.where(inside, z - logsumexp, float("-inf"))


@triton.jit
def _d_min(q, p):
    """Return the derivative of min(p, q) by q."""
    return tl.where(q < p, 1.0, tl.where(q == p, 0.5, 0.0))


@triton.jit(do_not_specialize=["start"])
def distill_kernel(
    logits, teacher_logits, stride, start, size,
    order, teacher_index, positions, logsumexps, weights, kl_weights, labels, losses, alphas, bests,
    scale, softcap, ce_weight, l1_weight,
    SOFTCAP: tl.constexpr, LK: tl.constexpr, CE_L1: tl.constexpr, GRADIENTS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Process one row; grid (n,), rows start … start + n of the plan.

    The first of these rows has the first teacher.
    """
    line = tl.program_id(0)
    row, teacher = tl.load(order + start + line), tl.load(teacher_index + start + line)
    x_row = logits + line.to(tl.int64) * stride
    z_row = teacher_logits + (teacher - tl.load(teacher_index + start)) * stride
    logsumexp = tl.load(logsumexps + tl.load(positions + teacher))
    lane = tl.arange(0, TILE)

    # Per lane: the largest logit so far, Σ exp relative to it, its index; the teacher's mass.
    tops = tl.full([TILE], _LOWEST, tl.float32)
    sums = tl.zeros([TILE], tl.float32)
    indices = tl.zeros([TILE], tl.int32)
    masses = tl.zeros([TILE], tl.float32)
    for begin in range(0, size, TILE):
        at = begin + lane
        in_row, inside = at < stride, at < size
        x = _draft_logits(x_row + at, in_row, inside)
        is_new_max = x > tops
        rescale = tl.exp(-tl.abs(x - tops))
        sums = tl.where(is_new_max, sums * rescale + 1.0, sums + rescale)
        indices = tl.where(is_new_max, at, indices)
        tops = tl.where(is_new_max, x, tops)
        if GRADIENTS:
            masses += tl.exp(_log_p(z_row + at, in_row, inside, scale, softcap, logsumexp, SOFTCAP))
    top = tl.max(tops, 0)
    best = tl.min(tl.where(tops == top, indices, 2147483647), 0)
    log_sum = top + tl.log(tl.sum(sums * tl.exp(tops - top), 0))
    mass = tl.sum(masses, 0)

    sum_below = 0.0  # S
    if (LK or CE_L1) and GRADIENTS:
        sums_below = tl.zeros([TILE], tl.float32)
        for begin in range(0, size, TILE):
            at = begin + lane
            in_row, inside = at < stride, at < size
            q = tl.exp(_draft_logits(x_row + at, in_row, inside) - log_sum)
            p = tl.exp(_log_p(z_row + at, in_row, inside, scale, softcap, logsumexp, SOFTCAP))
            sums_below += q * _d_min(q, p)
        sum_below = tl.sum(sums_below, 0)

    weight = tl.load(weights + row)
    kl_weight = 1.0
    if LK:
        kl_weight = tl.load(kl_weights + row)
    label = -1
    if CE_L1:
        label = tl.load(labels + row)
        ce_weight = tl.where(label >= 0, ce_weight, 0.0)
    loss = tl.zeros([TILE], tl.float32)
    alpha = tl.zeros([TILE], tl.float32)
    for begin in range(0, size, TILE):
        at = begin + lane
        in_row, inside = at < stride, at < size
        log_q = _draft_logits(x_row + at, in_row, inside) - log_sum
        log_p = _log_p(z_row + at, in_row, inside, scale, softcap, logsumexp, SOFTCAP)
        q, p = tl.exp(log_q), tl.exp(log_p)
        if LK:
            loss += tl.where(inside, p * (log_p - log_q), 0.0)
        elif CE_L1:
            loss -= tl.where(at == label, log_q, 0.0)
        else:
            loss -= tl.where(inside, p * log_q, 0.0)
        alpha += tl.minimum(p, q)
        if GRADIENTS:
            gradient = mass * q - p
            if LK:
                gradient = kl_weight * gradient + (1.0 - kl_weight) * q * (sum_below - _d_min(q, p))
            if CE_L1:
                gradient = ce_weight * (q - tl.where(at == label, 1.0, 0.0))
                gradient += 2.0 * l1_weight * q * (sum_below - _d_min(q, p))
            gradient = tl.where(weight != 0, weight * gradient, 0.0)
            tl.store(x_row + at, gradient, mask=in_row)
    value, alpha_sum = tl.sum(loss, 0), tl.sum(alpha, 0)
    if LK:
        value = kl_weight * value + (1.0 - kl_weight) * (1.0 - alpha_sum)
    if CE_L1:
        value = ce_weight * value + 2.0 * l1_weight * (1.0 - alpha_sum)
        value = tl.where(log_sum - log_sum == 0.0, value, float("nan"))
    tl.store(losses + row, value)
    tl.store(alphas + row, alpha_sum)
    tl.store(bests + row, best.to(tl.int64))


def distill_rows(
    logits, teacher_logits, rows, plan, teacher, weight, kl_weight, labels, loss, gradients, out
) -> None:
    """Launch `distill.distill_rows`."""
    distill_kernel[(len(logits),)](
        logits,
        teacher_logits,
        logits.stride(0),
        rows.start,
        logits.shape[1],
        plan.order,
        plan.teacher_index,
        plan.positions,
        teacher.logsumexp.contiguous(),
        weight.contiguous(),
        None if kl_weight is None else kl_weight.contiguous(),
        None if labels is None else labels.ids.contiguous(),
        out.loss,
        out.alpha,
        out.best,
        teacher.scale,
        0.0 if teacher.softcap is None else teacher.softcap,
        0.0 if labels is None else labels.cross_entropy,
        0.0 if labels is None else labels.l1,
        SOFTCAP=teacher.softcap is not None,
        LK=loss == "lk",
        CE_L1=loss == "ce_l1",
        GRADIENTS=gradients,
        TILE=TILE,
        num_warps=WARPS,
        **FP_FUSION,
    )
