"""Known faults of speculative decoders, as exact distributions (methods §5).

For a tree with known target and draft probabilities, `emitted_distribution` returns the joint
distribution of the tested tokens under the correct verifier (the target's own, for any drafts) and
under each fault. The certificate computes from it how many samples detect the fault.

Block verification keeps i drafts or more with probability r_i, given these drafts. Where they are
kept, it therefore emits what token verification would for drafts with the probabilities q / r_i.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

import numpy as np

from draftlab.evaluate.certificate.exact_tree import AnswerTree, TreeSettings


class Fault(StrEnum):
    """Faults that a certificate must be able to detect (`known_faults`)."""

    OFTEN = "accepts 5 % too often"
    """With block verification the first draft of a step only: what is kept of later ones after
    that depends on drafts outside the tree."""
    TARGET = "residual = p"
    UNCLAMPED = "residual not clamped"
    SHARED = "draft and residual share noise"
    ONE_U = "one u per step"
    BONUS = "bonus from the draft"
    PREFIX = "residual of token verification"
    """Of block verification: max(p − q, 0) in place of max(r_i · p − q, 0)."""


def known_faults(settings: TreeSettings) -> list[Fault]:
    """Return the faults that decoding with these settings can have."""
    block, several = settings.verification == "block", settings.k > 1
    possible = {
        Fault.SHARED: settings.draft_temperature > 0,  # argmax drafts use no noise
        Fault.ONE_U: several and not block,  # blocks: its effect depends on drafts outside the tree
        Fault.PREFIX: several and block,
    }
    return [fault for fault in Fault if possible.get(fault, True)]


def emitted_distribution(tree: AnswerTree, fault: Fault | None) -> np.ndarray:
    """Return the probabilities of the tree's cells under a verifier.

    Args:
        fault: None is the correct verifier, whose joint distribution is the target's.
    """
    settings = tree.settings
    levels, width, k = settings.levels, settings.width, settings.k
    block = settings.verification == "block"
    leaves, others = np.zeros(width**levels), [np.zeros(width**m) for m in range(levels)]
    impossible = 0.0

    @cache
    def outcome(
        level: int, node: int, depth: int, cap: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, float, float]:
        """Return what one verified position of a node emits.

        Returns:
            For each child the probabilities [C] that the accepted draft is it, and that another
            emitted token is; its cap [C]; the probabilities of another possible token and of an
            impossible one.
        """
        p, children = tree.target[level][node], tree.tokens[level][node]
        drafted, caps = np.zeros_like(p), np.ones_like(p)
        if depth < k:
            q = tree.draft[level][depth][node]
            if block:
                first_only = None if fault is Fault.OFTEN and depth else fault
                accept, emitted = draft_outcome(p, q, first_only, reach=cap)
                drafted, caps = q / cap * accept, accept
            else:
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
            cap: with one u per step, the accepted drafts imply u < cap. With block verification
                it is r_depth, the probability that they are kept.
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
    p: np.ndarray, q: np.ndarray, fault: Fault | None, cap: float = 1.0, reach: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return P(draft i is accepted) and P(the draft is rejected and i is emitted), each [V].

    With block verification, given that the drafts before it are kept, the first is r_{i+1} and its
    draft counts q / r_i times.

    Args:
        p: the target's probabilities.
        q: the draft's probabilities.
        cap: with one u per step, the upper bound of u.
        reach: with block verification, r_i.
    """
    drafted, q = q, q / reach
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
        residual = _shared_noise_residual(residual, drafted)
    elif fault is Fault.PREFIX:
        residual = np.maximum(p - drafted, 0)
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
