"""The choice of the tested context: one in which the known faults show with few samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from draftlab.errors import UserError
from draftlab.evaluate.certificate.exact_tree import AnswerTree, TreeSettings, build_trees
from draftlab.evaluate.certificate.gtest import MIN_EXPECTED, samples_for
from draftlab.evaluate.certificate.known_faults import Fault, emitted_distribution, known_faults
from draftlab.heads.head import DraftHead
from draftlab.progress import Monitor
from draftlab.target_model.model import Target

POWER = 0.99
MIN_COMMON_SHARE = 0.25
"""Share of a tree's cells that must be common enough to be tested by themselves. Known faults show
in a context with one likely answer too, but unknown faults could hide there."""
MIN_MARGIN = 1e-3
"""Smallest margin of a tree, far above the rounding of float32."""
MAX_SAMPLES = 10**7
"""More samples than anybody draws."""
MAX_LEAVES = 32
"""Rows of the widest forward pass: small models are faster on many rows, and the distributions over
a large vocabulary must fit in memory."""


def trees(
    target: Target, head: DraftHead, contexts: Sequence[tuple[int, ...]], settings: TreeSettings
) -> Iterator[AnswerTree]:
    """Yield the trees of the contexts in order, at most `MAX_LEAVES` leaves at once."""
    size = max(MAX_LEAVES // settings.width ** (settings.levels - 1), 1)
    for _, same_length in groupby(contexts, len):
        group = list(same_length)
        for start in range(0, len(group), size):
            yield from build_trees(target, head, group[start : start + size], settings)


@dataclass(frozen=True)
class ContextChoice:
    """The tree of a context and the samples that detect each fault; None: over `MAX_SAMPLES`."""

    tree: AnswerTree
    needed: dict[Fault, int | None]

    @property
    def max_needed(self) -> int | None:
        """Samples for the fault that needs the most; None if a fault cannot be detected."""
        counts = [n for n in self.needed.values() if n is not None]
        return max(counts) if len(counts) == len(self.needed) else None


def windows(texts: Sequence[tuple[int, ...]], size: int, count: int) -> list[tuple[int, ...]]:
    """Return at most `count` windows of `size` tokens, spread evenly over the texts.

    A text that is shorter than `size` is one window.
    """
    ends = [(ids, end) for ids in texts for end in range(min(size, len(ids)), len(ids) + 1)]
    picked = np.unique(np.linspace(0, len(ends) - 1, count).astype(int))
    return [ids[max(end - size, 0) : end] for ids, end in (ends[i] for i in picked)]


def choose_context(
    target: Target,
    head: DraftHead,
    contexts: Sequence[tuple[int, ...]],
    settings: TreeSettings,
    *,
    finalists: int,
    enough: int,
    level: float,
    monitor: Monitor,
) -> ContextChoice:
    """Return the context whose hardest fault needs the fewest samples.

    A cheap ranking comes first: how many samples show that a first draft is accepted too often,
    which is usually the hardest fault. The best `finalists` are then examined for every fault.
    Contexts with few common answers (see `MIN_COMMON_SHARE`) are used only if there is no other.

    Args:
        finalists: largest number of contexts to examine for every fault.
        enough: number of samples that ends the search.
        level: level of the test.

    Raises:
        UserError: rounding could change the possible tokens in every context.
    """
    ranked = []
    first_draft = replace(settings, levels=1, k=1)
    for number, tree in enumerate(trees(target, head, contexts, first_draft), 1):
        if tree.margin >= MIN_MARGIN:
            needed = _samples_needed(tree, Fault.OFTEN, level, MAX_SAMPLES)
            ranked.append((MAX_SAMPLES if needed is None else needed, tree.context))
        monitor.progress("certify: contexts", number, len(contexts))
    best_contexts = [context for _, context in sorted(ranked, key=lambda entry: entry[0])]
    best_contexts = best_contexts[:finalists]
    narrow: list[tuple[int, ...]] = []

    def broad() -> Iterator[AnswerTree]:
        for number, tree in enumerate(trees(target, head, best_contexts, settings), 1):
            monitor.progress("certify: best contexts", number, len(best_contexts))
            if tree.margin >= MIN_MARGIN:
                joint = tree.joint()
                if (joint * enough >= MIN_EXPECTED).sum() >= MIN_COMMON_SHARE * (joint > 0).sum():
                    yield tree
                else:
                    narrow.append(tree.context)

    choice = _best(broad(), settings, enough, level) or _best(
        trees(target, head, narrow, settings), settings, enough, level
    )
    if choice is None:
        raise UserError(
            "expected a context whose possible tokens (top-k, top-p) do not depend on rounding, "
            f"found none among {len(contexts)} contexts",
            do="give more prompts, or other limits",
        )
    return choice


def _best(
    candidates: Iterator[AnswerTree], settings: TreeSettings, enough: int, level: float
) -> ContextChoice | None:
    """Return the tree whose hardest fault needs the fewest samples, or the first with `enough`."""
    faults = known_faults(settings)
    best: ContextChoice | None = None
    for tree in candidates:
        limit = (best and best.max_needed) or MAX_SAMPLES
        candidate = ContextChoice(tree, {})
        for fault in faults:
            needed = _samples_needed(tree, fault, level, limit)
            candidate.needed[fault] = needed
            if needed is None and limit < MAX_SAMPLES:
                break  # already worse than the best
        if best is None or candidate.max_needed is not None:
            best = candidate
        if best.max_needed is not None and best.max_needed <= enough:
            break
    return best


def _samples_needed(tree: AnswerTree, fault: Fault, level: float, limit: int) -> int | None:
    faulty = emitted_distribution(tree, fault)
    return samples_for(POWER, tree.joint(), faulty, level, limit=limit)
