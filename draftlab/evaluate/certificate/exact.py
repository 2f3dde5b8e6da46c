"""Exact probabilities of the first tokens of an answer, in cells that a test can count.

After a context the likeliest tokens are followed, and any other token ends the branch in a cell of
its own. So every temperature, top-k and top-p has a finite tree, the whole vocabulary included.
The engine, the verifier and the drafter take no part, since they are what is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

from draftlab.evaluate.certificate.result import Sampled

NextLogits = Callable[[list[tuple[int, ...]]], Tensor]
"""Returns the logits [N, V] of the token after each of N sequences of the same length."""

MIN_MARGIN = 1e-3
"""Smallest margin of a tree that is tested, far above the rounding of float32."""


def probabilities(logits: Tensor, row: Sampled) -> tuple[Tensor, float]:
    """Return the distributions float64 [N, V] of logits, and their margin.

    The margin is the smallest change, of a logit or of a probability sum, that changes which
    tokens are possible: infinite without limits.
    """
    if not row.top_k and (row.top_p or 1.0) == 1:
        return (logits.double() / row.temperature).softmax(-1), math.inf
    values, order = logits.double().sort(descending=True, stable=True)
    margin = math.inf
    kept = torch.ones_like(values, dtype=torch.bool)
    if row.top_k:
        kept[:, row.top_k :] = False
    if row.top_p and row.top_p < 1:
        p = (values / row.temperature).masked_fill(~kept, -math.inf).softmax(-1)
        before = p.cumsum(-1) - p
        margin = float((before - row.top_p).abs().min())
        kept &= before < row.top_p
    count = kept.sum(-1, keepdim=True)
    gaps = values.gather(1, count - 1) - values.gather(1, count.clamp(max=values.shape[1] - 1))
    gaps = gaps.where(count < values.shape[1], math.inf)
    p = (values / row.temperature).masked_fill(~kept, -math.inf).softmax(-1)
    return torch.zeros_like(p).scatter_(1, order, p), min(margin, float(gaps.min()))


@dataclass(frozen=True)
class AnswerTree:
    """The first tokens after a context.

    Attributes:
        cells: the cell of each complete path, and of "another token" after each shorter one.
        joint: probabilities of the cells; the last one is "impossible token".
        possible: bool [V] after each path that is not complete.
        margin: smallest margin of `probabilities`. If it is small, rounding can change which
            tokens are possible.
    """

    context: tuple[int, ...]
    cells: dict[tuple[int, ...], int]
    joint: np.ndarray
    possible: dict[tuple[int, ...], np.ndarray]
    margin: float

    @property
    def entropy(self) -> float:
        """The entropy of the cells in nats."""
        p = self.joint[self.joint > 0]
        return float(-(p * np.log(p)).sum())

    def counts(self, answers: Iterable[Sequence[int]]) -> np.ndarray:
        """Return how many answers are in each cell."""
        return np.bincount([self._cell(tuple(a)) for a in answers], minlength=len(self.joint))

    def _cell(self, answer: tuple[int, ...]) -> int:
        path: tuple[int, ...] = ()
        for token in answer:
            if not self.possible[path][token]:
                return len(self.joint) - 1
            if (*path, token) not in self.cells:
                break
            path = (*path, token)
        return self.cells[path]


@torch.inference_mode()
def build_tree(
    next_logits: NextLogits, context: tuple[int, ...], widths: Sequence[int], row: Sampled
) -> AnswerTree:
    """Return the tree of a context.

    Args:
        widths: number of tokens that are followed after each path, by the path's length.
    """
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    cells, joint, possible, margin = {}, [], {}, math.inf
    for width in widths:
        p, gap = probabilities(next_logits([context + path for path in paths]), row)
        margin = min(margin, gap)
        top = p.topk(min(width, p.shape[1]))
        children: dict[tuple[int, ...], float] = {}
        for (path, mass), distribution, shares, ids in zip(
            paths.items(), p, top.values.tolist(), top.indices.tolist(), strict=True
        ):
            rest = 1 - sum(shares)
            cells[path] = len(joint)
            joint.append(mass * rest if rest > 1e-12 else 0.0)
            possible[path] = (distribution > 0).cpu().numpy()
            pairs = zip(ids, shares, strict=True)
            children |= {(*path, token): mass * share for token, share in pairs if share > 0}
        paths = children
    cells |= {path: len(joint) + number for number, path in enumerate(paths)}
    return AnswerTree(context, cells, np.array([*joint, *paths.values(), 0.0]), possible, margin)


MIN_EXPECTED = 5.0
"""Cells with a smaller expected count are pooled, so that the chi-square approximation holds."""


@dataclass(frozen=True)
class GTest:
    """The result of a G-test; the statistic is infinite if an impossible outcome occurred."""

    statistic: float
    freedom: int
    p_value: float


def g_test(counts: np.ndarray, probability: np.ndarray) -> GTest:
    """Test counts against exact probabilities, with rare cells pooled into one.

    Args:
        counts: observed counts, any shape.
        probability: probabilities of the same cells, which sum to one.
    """
    counts, probability = (np.asarray(x, dtype=np.float64) for x in (counts, probability))
    counts, probability = counts.ravel(), probability.ravel()
    if counts[probability == 0].sum() > 0:
        return GTest(math.inf, 1, 0.0)
    total = counts.sum()
    expected = _pool(probability, probability * total) * total
    freedom = max(len(expected) - 1, 1)
    result = stats.power_divergence(
        _pool(counts, probability * total),
        expected,
        ddof=len(expected) - 1 - freedom,
        lambda_="log-likelihood",
    )
    return GTest(float(result.statistic), freedom, float(result.pvalue))


def detectable(samples: int, freedom: int, level: float, power: float = 0.99) -> float:
    """Return the divergence KL(faulty ‖ exact) of the pooled cells that is found with a power.

    G is then close to a noncentral chi-square with noncentrality 2 · samples · KL.
    """
    threshold = stats.chi2.isf(level, freedom)
    return float(special.chndtrinc(threshold, freedom, 1 - power)) / (2 * samples)


def _pool(values: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the values of common cells and the sum over rare ones, without impossible cells."""
    common, rare = expected >= MIN_EXPECTED, (expected < MIN_EXPECTED) & (expected > 0)
    return np.append(values[common], values[rare].sum()) if rare.any() else values[common]
