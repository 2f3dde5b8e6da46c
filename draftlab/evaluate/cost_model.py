"""The time of a step by its shape: a cost model fitted to measured steps, and its outliers.

A step of B requests with K drafts each verifies B·(K + 1) rows and runs the head for K drafts. The
model is additive, with coefficients that are not negative, so that more rows or drafts never cost
less:

    ms = bias + row · rows + Σ_j knee_j · max(0, rows − r_j) + draft · K + pair · K·B
         + Σ_j step_j · [rows > r_j]

Plain decoding has a bias of its own. `knee_j` lets a row cost more once products are bound by
arithmetic, `step_j` once kernels need another tile. Under load a step that emits more tokens holds
more prefills of other requests: `prefill · (B − 1) · tokens(K)` is added. The fit minimises
relative errors (non-negative least squares).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from draftlab.formatting import count_text

Shape = tuple[int, int]
"""(batch, K); K = 0 is plain decoding."""
Steps = Mapping[Shape, float]
"""Milliseconds of a step, by its shape."""

KNEES = (64, 128, 256)
TILES = (*(2**i for i in range(13)), 192, 384)
PENALTY = 0.1
"""Weight of the coefficients of tiles: none is fitted without need."""
CLIFF = 1.25
"""A step that takes this multiple of the cost model's time is a cliff."""
CLIFF_BEYOND = 1.6
"""The same for the step with the most rows or drafts, which the model must extrapolate to."""
UNDERCUT = 0.8
"""A step of a larger batch that takes less than this share of a smaller one's shows a cliff."""
MIN_SHAPES = 6
"""Fewer measured shapes do not show what a step should cost."""


@dataclass(frozen=True)
class CostModel:
    """A fitted cost model.

    Attributes:
        coefficients: one of each feature.
        tokens: of a step under load, by K; empty: no requests are prefilled in steps.
    """

    coefficients: np.ndarray
    tokens: Mapping[int, float]

    def ms(self, batch: int, k: int) -> float:
        """Return the milliseconds of a step."""
        features = _features([(batch, k)], self.tokens)
        return float(features[0] @ self.coefficients)


@dataclass(frozen=True)
class Cliff:
    """A measured step that takes far longer than others suggest.

    Attributes:
        expected_ms: what the other steps suggest, or the time of `larger`.
        larger: a larger batch with the same K whose step is faster; None if the model tells.
    """

    batch: int
    k: int
    step_ms: float
    expected_ms: float
    larger: int | None = None

    @property
    def text(self) -> str:
        """The cliff as a warning."""
        rows = count_text(self.batch * (self.k + 1), "row")
        what = f"K = {self.k}" if self.k else "no drafts"
        text = f"a step with {what} at batch {self.batch} ({rows}) takes {self.step_ms:.2f} ms"
        if self.larger is not None:
            return f"{text}, longer than one at batch {self.larger} ({self.expected_ms:.2f} ms)"
        ratio = self.step_ms / self.expected_ms
        return (
            f"{text}, {ratio:.2f} × the {self.expected_ms:.2f} ms that the other steps suggest: a "
            "kernel is slow at this shape, or the machine was busy"
        )


def fit_cost_model(steps: Steps, tokens: Mapping[int, float] | None = None) -> CostModel:
    """Return the cost model of measured steps.

    Args:
        tokens: of a step by K, if other requests are prefilled in the steps.
    """
    times = np.array([*steps.values()])
    features = _features([*steps], tokens or {}) / times[:, None]
    penalty = PENALTY / times.mean() * np.eye(features.shape[1])[-len(TILES) :]
    errors = np.append(np.ones(len(times)), np.zeros(len(penalty)))
    features = np.vstack([features, penalty])
    return CostModel(nnls(features, errors)[0], tokens or {})


def _features(shapes: Sequence[Shape], tokens: Mapping[int, float]) -> np.ndarray:
    """Return the features of shapes, float64 [N, F]."""
    batch, k = np.array(shapes, dtype=float).T
    rows = batch * (k + 1)
    columns = [k > 0, k == 0, rows, k, k * batch]
    columns += [np.maximum(0, rows - knee) for knee in KNEES]
    columns += [(batch - 1) * [tokens.get(int(i), 0.0) for i in k]]
    columns += [rows > tile for tile in TILES]
    return np.stack(columns, axis=1).astype(float)


def find_cliffs(steps: Steps, tokens: Mapping[int, float] | None = None) -> list[Cliff]:
    """Return the steps that take far longer than the others suggest, the farthest first.

    Each step is compared with all others; the farthest is then set aside, so that it does not spoil
    the comparison of the rest.

    Args:
        tokens: of a step by K, if other requests are prefilled in the steps.
    """
    cliffs: list[Cliff] = []
    rest = dict(steps)
    while len(rest) >= MIN_SHAPES:
        # Plain decoding has a bias of its own, which takes other steps of it to know.
        judged = [shape for shape in rest if sum((k > 0) == (shape[1] > 0) for _, k in rest) > 2]
        expected = {shape: _expected_ms(shape, rest, tokens) for shape in judged}
        excess = {
            shape: rest[shape] / ms / _limit(shape, rest)
            for shape, ms in expected.items()
            if ms > 0
        }
        shape = max(excess, key=excess.__getitem__, default=None)
        if shape is None or excess[shape] < 1:
            break
        cliffs.append(Cliff(*shape, rest.pop(shape), expected[shape]))
    cliffs += _undercut(rest)
    return sorted(cliffs, key=lambda cliff: cliff.expected_ms / cliff.step_ms)


def _expected_ms(shape: Shape, steps: Steps, tokens: Mapping[int, float] | None) -> float:
    """Return the milliseconds that the other steps suggest; 0 if none of them is smaller.

    A step takes at least as long as any with no larger batch and no more drafts. (One with drafts
    does all that one of plain decoding does.) Below all others the model would extrapolate.
    """
    others = {one: ms for one, ms in steps.items() if one != shape}
    smaller = [ms for (b, k), ms in others.items() if b <= shape[0] and k <= shape[1]]
    if not smaller:
        return 0.0
    return max(fit_cost_model(others, tokens).ms(*shape), *smaller)


def _limit(shape: Shape, steps: Steps) -> float:
    """Return the allowed ratio, which is larger where all other shapes are smaller."""
    batch, k = shape
    others = [one for one in steps if one != shape]
    rows = max(b * (i + 1) for b, i in others)
    beyond = batch * (k + 1) > rows or batch > max(b for b, _ in others)
    return CLIFF_BEYOND if beyond or k > max(i for _, i in others) else CLIFF


def _undercut(steps: Steps) -> list[Cliff]:
    """Return the steps that a larger batch with the same K undercuts."""
    cliffs = []
    for (batch, k), ms in steps.items():
        larger = {b: other for (b, i), other in steps.items() if i == k and b > batch}
        fastest = min(larger, key=larger.__getitem__, default=None)
        if fastest is not None and larger[fastest] < UNDERCUT * ms:
            cliffs.append(Cliff(batch, k, ms, larger[fastest], fastest))
    return cliffs
