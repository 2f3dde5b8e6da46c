"""What speculative decoders have got wrong, as exact distributions (methods §5).

For a tree whose target and draft probabilities are known, `emitted` gives the joint distribution of
the judged tokens under the right verifier (the target's own, whatever the drafts) and under each
fault. That tells how many samples the certificate needs to find it.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from draftlab.evaluate.certificate.exact_tree import Tree


class Fault(StrEnum):
    """The faults every certificate must have the power to find."""

    OFTEN = "accepts 5 % too often"
    TARGET = "residual = p"
    UNCLAMPED = "residual not clamped"
    SHARED = "draft and residual share noise"
    ONE_U = "one u per step"
    BONUS = "bonus from the draft"


def emitted(tree: Tree, fault: Fault | None, k: int) -> np.ndarray:
    """Probabilities of the tree's cells under a verifier of k drafts a step.

    Args:
        fault: None is the right verifier, whose joint is the target's.
    """
    levels, width = len(tree.target), tree.target[0].shape[1]
    cells = np.zeros(width**levels)

    def walk(level: int, node: int, depth: int, weight: float, cap: float) -> None:
        """Adds what follows a node with probability `weight`, `depth` drafts into a step.

        `cap`: with one u a step, the accepted drafts have shown that u < cap.
        """
        if level == levels:
            cells[node] += weight
            return
        p = tree.target[level][node]
        if depth == k:
            stale = tree.stale[level] if fault is Fault.BONUS else None
            for i, mass in enumerate(p if stale is None else stale[node]):
                if mass > 0:
                    walk(level + 1, node * width + i, 0, weight * mass, 1.0)
            return
        q = tree.draft[level][depth][node]
        chance, recovered = one_draft(p, q, fault, cap)
        ratio = np.divide(p, q, out=np.full(width, np.inf), where=q > 0)
        for i in range(width):
            child = node * width + i
            if q[i] * chance[i] > 0:
                below = min(cap, ratio[i]) if fault is Fault.ONE_U else 1.0
                walk(level + 1, child, depth + 1, weight * q[i] * chance[i], below)
            if recovered[i] > 0:
                walk(level + 1, child, 0, weight * recovered[i], 1.0)

    walk(0, 0, 0, 1.0, 1.0)
    return tree.cells(cells)


def one_draft(
    p: np.ndarray, q: np.ndarray, fault: Fault | None, cap: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """One draft's fate: P(accepted | it is i) and P(it is rejected and i is emitted), each [C].

    Args:
        p: the target's probabilities of its C possible tokens.
        q: the draft's of the same; the rest of its mass is always rejected.
        cap: see `emitted`.
    """
    ratio = np.divide(p, q, out=np.full(len(p), np.inf), where=q > 0)
    often = 1.05 if fault is Fault.OFTEN else 1.0
    chance = np.minimum(often * ratio / (cap if fault is Fault.ONE_U else 1.0), 1.0)
    rejected = 1 - float((q * chance).sum())
    residual = np.maximum(p - q, 0)
    outside = 1 - float(q.sum())
    if fault is Fault.TARGET:
        residual = p
    elif fault is Fault.UNCLAMPED:
        # Taken as |p − q|, which also emits what the target cannot.
        residual = np.abs(p - q)
    elif fault is Fault.SHARED:
        residual = _race_after(residual, q)
    total = residual.sum() + (outside if fault is Fault.UNCLAMPED else 0)
    if total <= 0 or rejected <= 0:
        return chance, np.zeros(len(p))
    return chance, max(rejected, 0) * residual / total


def _race_after(residual: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Who wins argmin E/r after a token outside r's support has won argmin E/q, the same E.

    With r_k > 0 exactly where the draft is never rejected, Q the rest of q's mass, and v the ratio
    of the two winning times: P(j) = r_j · Q ∫_{v > q_j/r_j} dv / (Q + Σ_k max(q_k, r_k v))², up to
    a constant; linear in v between the borders q_k/r_k, so each piece integrates in closed form.
    """
    inside = residual > 0
    r, b = residual[inside], q[inside]
    rest = 1 - b.sum()
    won = np.zeros(len(residual))
    if not len(r) or rest <= 0:
        return won
    borders = np.sort(b / r)
    wins = np.zeros(len(r))
    for low, high in zip(borders, np.append(borders[1:], np.inf), strict=True):
        rising = b / r <= low
        slope, level = r[rising].sum(), rest + b[~rising].sum()
        end = 0.0 if np.isinf(high) else 1 / (level + slope * high)
        wins[rising] += (1 / (level + slope * low) - end) / slope
    won[inside] = r * wins
    return won
