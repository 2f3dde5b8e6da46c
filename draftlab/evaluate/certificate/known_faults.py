"""Known faults of speculative decoders, as exact distributions (methods §5).

For a tree with known target and draft probabilities, `emitted_distribution` returns the joint
distribution of the tested tokens under the correct verifier (the target's own, for any drafts) and
under each fault. The certificate computes from it how many samples detect the fault.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

import numpy as np

from draftlab.evaluate.certificate.exact_tree import AnswerTree


class Fault(StrEnum):
    """Faults that every certificate must be able to detect."""

    OFTEN = "accepts 5 % too often"
    TARGET = "residual = p"
    UNCLAMPED = "residual not clamped"
    SHARED = "draft and residual share noise"
    ONE_U = "one u per step"
    BONUS = "bonus from the draft"


def emitted_distribution(tree: AnswerTree, fault: Fault | None) -> np.ndarray:
    """Return the probabilities of the tree's cells under a verifier.

    Args:
        fault: None is the correct verifier, whose joint distribution is the target's.
    """
    settings = tree.settings
    levels, width, k = settings.levels, settings.width, settings.k
    leaves, others = np.zeros(width**levels), [np.zeros(width**m) for m in range(levels)]
    impossible = 0.0

    @cache
    def outcome(
        level: int, node: int, depth: int, cap: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, float, float]:
        """Return what one verified position of a node emits.

        Returns:
            For each child the probabilities [C] that the accepted draft is it, and that another
            emitted token is; the largest u of an accepted draft [C], if a step has one u; the
            probabilities of another possible token and of an impossible one.
        """
        p, children = tree.target[level][node], tree.tokens[level][node]
        drafted, caps = np.zeros_like(p), np.ones_like(p)
        if depth < k:
            q = tree.draft[level][depth][node]
            accept, emitted = draft_outcome(p, q, fault, cap)
            drafted = q * accept
            if fault is Fault.ONE_U:
                caps = np.minimum(cap, np.divide(p, q, out=caps, where=q > 0))
        else:
            last_draft = tree.last_draft[level] if fault is Fault.BONUS else None
            emitted = p if last_draft is None else last_draft[node]
        total = drafted + emitted
        other = float(total[p > 0].sum() - total[children][p[children] > 0].sum())
        impossible = float(total[p == 0].sum())
        return drafted[children], emitted[children], caps[children], max(other, 0.0), impossible

    def visit(level: int, node: int, depth: int, weight: float, cap: float) -> None:
        """Add what follows a node that is reached with probability `weight`.

        Args:
            depth: drafts of the current step so far.
            cap: with one u per step, the accepted drafts imply u < cap.
        """
        nonlocal impossible
        if level == levels:
            leaves[node] += weight
            return
        drafted, emitted, caps, other, never = outcome(level, node, depth, cap)
        others[level][node] += weight * other
        impossible += weight * never
        for i in range(width):
            child = node * width + i
            if drafted[i] > 0:
                visit(level + 1, child, depth + 1, weight * drafted[i], caps[i])
            if emitted[i] > 0:
                visit(level + 1, child, 0, weight * emitted[i], 1.0)

    visit(0, 0, 0, 1.0, 1.0)
    return tree.cells(leaves, others, impossible)


def draft_outcome(
    p: np.ndarray, q: np.ndarray, fault: Fault | None, cap: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return P(draft i is accepted) and P(the draft is rejected and i is emitted), each [V].

    Args:
        p: the target's probabilities.
        q: the draft's probabilities.
        cap: see `emitted_distribution`.
    """
    ratio = np.divide(p, q, out=np.full(len(p), np.inf), where=q > 0)
    factor = 1.05 if fault is Fault.OFTEN else 1.0
    accept = np.minimum(factor * ratio / (cap if fault is Fault.ONE_U else 1.0), 1.0)
    rejected = 1 - float((q * accept).sum())
    residual = np.maximum(p - q, 0)
    if fault is Fault.TARGET:
        residual = p
    elif fault is Fault.UNCLAMPED:
        residual = np.abs(p - q)  # it also emits tokens that the target cannot
    elif fault is Fault.SHARED:
        residual = _shared_noise_residual(residual, q)
    total = residual.sum()
    if total <= 0 or rejected <= 0:
        return accept, np.zeros(len(p))
    return accept, rejected * residual / total


def _shared_noise_residual(residual: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return who wins argmin E/r after a token outside r's support has won argmin E/q, same E.

    With r_k > 0 exactly where the draft is never rejected, Q the rest of q's mass, and v the ratio
    of the two winning times: P(j) = r_j · Q ∫_{v > q_j/r_j} dv / (Q + Σ_k max(q_k, r_k v))², up to
    a constant. The sum is linear in v between the borders q_k/r_k, so each interval integrates in
    closed form.
    """
    inside = residual > 0
    r, b = residual[inside], q[inside]
    rest = max(1 - b.sum(), 0.0)
    probability = np.zeros(len(residual))
    if not len(r) or rest <= 0:
        return probability
    order = np.argsort(b / r)
    r_sorted, b_sorted = r[order], b[order]
    slope, constant = r_sorted.cumsum(), rest + b_sorted.sum() - b_sorted.cumsum()
    borders = b_sorted / r_sorted
    start = 1 / (constant + slope * borders)
    end = np.append(1 / (constant[:-1] + slope[:-1] * borders[1:]), 0.0)
    # The integral of j runs over its own interval and all later ones.
    integral = np.empty(len(r))
    integral[order] = ((start - end) / slope)[::-1].cumsum()[::-1]
    probability[inside] = r * integral
    return probability
