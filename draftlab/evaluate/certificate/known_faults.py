"""Known faults of speculative decoders, as exact distributions (methods §5).

For a tree with known target and draft probabilities, `emitted_distribution` returns the joint
distribution of the tested tokens under the correct verifier (the target's own, for any drafts) and
under each fault. The certificate computes from it how many samples detect the fault.
"""

from __future__ import annotations

from enum import StrEnum

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


def emitted_distribution(tree: AnswerTree, fault: Fault | None, k: int) -> np.ndarray:
    """Return the probabilities of the tree's cells under a verifier of k drafts a step.

    Args:
        fault: None is the correct verifier, whose joint distribution is the target's.
    """
    levels, width = len(tree.target), tree.target[0].shape[1]
    leaves = np.zeros(width**levels)

    def visit(level: int, node: int, depth: int, weight: float, cap: float) -> None:
        """Add what follows a node that is reached with probability `weight`.

        Args:
            depth: drafts of the current step so far.
            cap: with one u per step, the accepted drafts imply u < cap.
        """
        if level == levels:
            leaves[node] += weight
            return
        p = tree.target[level][node]
        if depth == k:
            last_draft = tree.last_draft[level] if fault is Fault.BONUS else None
            for i, mass in enumerate(p if last_draft is None else last_draft[node]):
                if mass > 0:
                    visit(level + 1, node * width + i, 0, weight * mass, 1.0)
            return
        q = tree.draft[level][depth][node]
        accept, recovered = draft_outcome(p, q, fault, cap)
        ratio = np.divide(p, q, out=np.full(width, np.inf), where=q > 0)
        for i in range(width):
            child = node * width + i
            if q[i] * accept[i] > 0:
                next_cap = min(cap, ratio[i]) if fault is Fault.ONE_U else 1.0
                visit(level + 1, child, depth + 1, weight * q[i] * accept[i], next_cap)
            if recovered[i] > 0:
                visit(level + 1, child, 0, weight * recovered[i], 1.0)

    visit(0, 0, 0, 1.0, 1.0)
    return tree.cell_probabilities(leaves)


def draft_outcome(
    p: np.ndarray, q: np.ndarray, fault: Fault | None, cap: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return P(draft i is accepted) and P(the draft is rejected and i is emitted), each [C].

    Args:
        p: the target's probabilities of its C possible tokens.
        q: the draft's probabilities of the same tokens; a draft of any other is always rejected.
        cap: see `emitted_distribution`.
    """
    ratio = np.divide(p, q, out=np.full(len(p), np.inf), where=q > 0)
    factor = 1.05 if fault is Fault.OFTEN else 1.0
    accept = np.minimum(factor * ratio / (cap if fault is Fault.ONE_U else 1.0), 1.0)
    rejected = 1 - float((q * accept).sum())
    residual = np.maximum(p - q, 0)
    outside = 1 - float(q.sum())
    if fault is Fault.TARGET:
        residual = p
    elif fault is Fault.UNCLAMPED:
        # |p − q| also emits tokens that the target cannot
        residual = np.abs(p - q)
    elif fault is Fault.SHARED:
        residual = _shared_noise_residual(residual, q)
    total = residual.sum() + (outside if fault is Fault.UNCLAMPED else 0)
    if total <= 0 or rejected <= 0:
        return accept, np.zeros(len(p))
    return accept, max(rejected, 0) * residual / total


def _shared_noise_residual(residual: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return who wins argmin E/r after a token outside r's support has won argmin E/q, same E.

    With r_k > 0 exactly where the draft is never rejected, Q the rest of q's mass, and v the ratio
    of the two winning times: P(j) = r_j · Q ∫_{v > q_j/r_j} dv / (Q + Σ_k max(q_k, r_k v))², up to
    a constant. The sum is linear in v between the borders q_k/r_k, so each interval integrates in
    closed form.
    """
    inside = residual > 0
    r, b = residual[inside], q[inside]
    rest = 1 - b.sum()
    probability = np.zeros(len(residual))
    if not len(r) or rest <= 0:
        return probability
    borders = np.sort(b / r)
    integral = np.zeros(len(r))
    for low, high in zip(borders, np.append(borders[1:], np.inf), strict=True):
        rising = b / r <= low
        slope, constant = r[rising].sum(), rest + b[~rising].sum()
        end = 0.0 if np.isinf(high) else 1 / (constant + slope * high)
        integral[rising] += (1 / (constant + slope * low) - end) / slope
    probability[inside] = r * integral
    return probability
