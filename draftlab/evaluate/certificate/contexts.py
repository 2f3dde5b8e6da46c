"""The choice of the tested context: one in which the known faults show with few samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from draftlab.errors import UserError
from draftlab.evaluate.certificate.exact_tree import AnswerTree, build_trees
from draftlab.evaluate.certificate.gtest import MIN_EXPECTED, samples_for
from draftlab.evaluate.certificate.known_faults import Fault, emitted_distribution
from draftlab.heads.head import DraftHead
from draftlab.progress import Monitor
from draftlab.target_model.model import Target

POWER = 0.99
MIN_COMMON_SHARE = 0.25
"""Share of a tree's answers that must be common enough for cells of their own. Known faults show in
a context with one likely answer too, but unknown faults could hide there."""
MAX_SAMPLES = 10**7
"""More samples than anybody draws."""
MAX_LEAVES = 32
"""Rows of the widest forward pass: small models are faster on many rows, and the distributions over
a large vocabulary must fit in memory."""


@dataclass(frozen=True)
class TreeSettings:
    """How the tested tokens are sampled: the arguments of `build_trees` with the same names."""

    levels: int
    top_k: int
    temperature: float
    k: int
    draft_temperature: float

    def first_draft(self) -> TreeSettings:
        """Return settings for one tested token: a first draft or the token recovered from it."""
        return TreeSettings(1, self.top_k, self.temperature, 1, self.draft_temperature)

    def build(
        self, target: Target, head: DraftHead, contexts: Sequence[tuple[int, ...]]
    ) -> Iterator[AnswerTree]:
        """Yield the trees of the contexts in order, at most `MAX_LEAVES` leaves at once."""
        size = max(MAX_LEAVES // self.top_k ** (self.levels - 1), 1)
        for _, same_length in groupby(contexts, len):
            group = list(same_length)
            for start in range(0, len(group), size):
                yield from build_trees(target, head, group[start : start + size], **vars(self))


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
    margin = 1e-3 if target.dtype == torch.float32 else 0.1
    ranked = []
    for number, tree in enumerate(settings.first_draft().build(target, head, contexts), 1):
        if tree.margin >= margin:
            needed = _samples_needed(tree, Fault.OFTEN, 1, level, MAX_SAMPLES)
            ranked.append((MAX_SAMPLES if needed is None else needed, tree.context))
        monitor.progress("certify: contexts", number, len(contexts))
    best_contexts = [context for _, context in sorted(ranked, key=lambda entry: entry[0])]
    best_contexts = best_contexts[:finalists]
    narrow: list[AnswerTree] = []

    def broad() -> Iterator[AnswerTree]:
        for number, tree in enumerate(settings.build(target, head, best_contexts), 1):
            monitor.progress("certify: best contexts", number, len(best_contexts))
            if tree.margin >= margin:
                common = (tree.joint() * enough >= MIN_EXPECTED).sum()
                if common >= MIN_COMMON_SHARE * tree.target[-1].size:
                    yield tree
                else:
                    narrow.append(tree)

    choice = _best(broad(), settings, enough, level) or _best(iter(narrow), settings, enough, level)
    if choice is None:
        raise UserError(
            f"expected a context whose top {settings.top_k} tokens are clearly likelier than the "
            f"rest, found none among {len(contexts)} contexts",
            do="give more prompts, or raise certify's `contexts`",
        )
    return choice


def _best(
    trees: Iterator[AnswerTree], settings: TreeSettings, enough: int, level: float
) -> ContextChoice | None:
    """Return the tree whose hardest fault needs the fewest samples, or the first with `enough`."""
    # Argmax drafts use no noise that they could share.
    faults = [f for f in Fault if settings.draft_temperature > 0 or f is not Fault.SHARED]
    best: ContextChoice | None = None
    for tree in trees:
        limit = (best and best.max_needed) or MAX_SAMPLES
        candidate = ContextChoice(tree, {})
        for fault in faults:
            needed = _samples_needed(tree, fault, settings.k, level, limit)
            candidate.needed[fault] = needed
            if needed is None and limit < MAX_SAMPLES:
                break  # already worse than the best
        if best is None or candidate.max_needed is not None:
            best = candidate
        if best.max_needed is not None and best.max_needed <= enough:
            break
    return best


def _samples_needed(tree: AnswerTree, fault: Fault, k: int, level: float, limit: int) -> int | None:
    faulty = emitted_distribution(tree, fault, k)
    return samples_for(POWER, tree.joint(), faulty, level, limit=limit)
