"""Choosing the context that is judged: one in which the known faults would show early."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from draftlab.errors import UserError
from draftlab.evaluate.certificate.exact_tree import Tree, grow
from draftlab.evaluate.certificate.gtest import RARE, samples_for
from draftlab.evaluate.certificate.known_faults import Fault, emitted
from draftlab.heads.head import DraftHead
from draftlab.progress import Monitor
from draftlab.target_model.model import Target

POWER = 0.99
BROAD = 0.25
"""Share of a tree's answers that must be likely enough to be counted one by one: known faults show
in a context with one likely answer too, but faults that nobody has thought of would hide there."""
LIMIT = 10**7  # samples nobody draws
LEAVES = 32
"""Rows of the widest forward pass: small models run much faster on many, and the memory for
distributions over a large vocabulary stays small."""


@dataclass(frozen=True)
class Sampled:
    """How the judged tokens are sampled: the arguments of `tree.grow` of the same names."""

    levels: int
    top_k: int
    temperature: float
    k: int
    draft_temperature: float

    def first_draft(self) -> Sampled:
        """The same, of one judged token, which is a first draft or recovered from one."""
        return Sampled(1, self.top_k, self.temperature, 1, self.draft_temperature)

    def grow(
        self, target: Target, head: DraftHead, contexts: Sequence[tuple[int, ...]]
    ) -> Iterator[Tree]:
        """The trees behind contexts, in their order; as many at once as make `LEAVES` leaves."""
        size = max(LEAVES // self.top_k ** (self.levels - 1), 1)
        for _, alike in groupby(contexts, len):
            group = list(alike)
            for start in range(0, len(group), size):
                yield from grow(target, head, group[start : start + size], **vars(self))


@dataclass(frozen=True)
class Chosen:
    """A context's tree, and by fault the samples that find it; None: more than `LIMIT`."""

    tree: Tree
    needed: dict[Fault, int | None]

    @property
    def hardest(self) -> int | None:
        """Samples for the fault that is hardest to find."""
        known = [n for n in self.needed.values() if n is not None]
        return max(known) if len(known) == len(self.needed) else None


def windows(texts: Sequence[tuple[int, ...]], size: int, count: int) -> list[tuple[int, ...]]:
    """At most `count` pieces of `size` tokens, spread evenly over the texts; short texts whole."""
    ends = [(ids, end) for ids in texts for end in range(min(size, len(ids)), len(ids) + 1)]
    picked = np.unique(np.linspace(0, len(ends) - 1, count).astype(int))
    return [ids[max(end - size, 0) : end] for ids, end in (ends[i] for i in picked)]


def choose(
    target: Target,
    head: DraftHead,
    pieces: Sequence[tuple[int, ...]],
    sampled: Sampled,
    *,
    finalists: int,
    enough: int,
    level: float,
    monitor: Monitor,
) -> Chosen:
    """The context in which the fault that is hardest to find needs the fewest samples.

    All are ranked by how early a first draft accepted too often would show, which is cheap to know
    and mostly the hardest to find; the best `finalists` are looked at in full. Narrow ones (see
    `BROAD`) are taken only where there is no other.

    Args:
        finalists: contexts looked at in full, at most.
        enough: samples that are few enough to stop looking.
        level: of the test.

    Raises:
        UserError: when rounding could change what may be emitted, in every context.
    """
    margin = 1e-3 if target.dtype == torch.float32 else 0.1
    ranked = []
    for number, tree in enumerate(sampled.first_draft().grow(target, head, pieces), 1):
        if tree.margin >= margin:
            needed = _needed(tree, Fault.OFTEN, 1, level, LIMIT)
            ranked.append((LIMIT if needed is None else needed, tree.context))
        monitor.progress("certify: contexts", number, len(pieces))
    ranked = sorted(ranked, key=lambda entry: entry[0])[:finalists]
    narrow: list[Tree] = []

    def broad() -> Iterator[Tree]:
        contexts = [context for _, context in ranked]
        for number, tree in enumerate(sampled.grow(target, head, contexts), 1):
            monitor.progress("certify: best contexts", number, len(contexts))
            if tree.margin >= margin:
                likely = (tree.joint() * enough >= RARE).sum()
                if likely >= BROAD * tree.target[-1].size:
                    yield tree
                else:
                    narrow.append(tree)

    best = _best(broad(), sampled, enough, level) or _best(iter(narrow), sampled, enough, level)
    if best is None:
        raise UserError(
            f"expected a context whose top {sampled.top_k} tokens stand out from the rest, found "
            f"none among {len(pieces)}",
            do="give more prompts, or raise certify's `contexts`",
        )
    return best


def _best(trees: Iterator[Tree], sampled: Sampled, enough: int, level: float) -> Chosen | None:
    """The tree whose hardest fault needs the fewest samples; the first for which they are few."""
    # Argmax drafts use no noise that they could share.
    tried = [f for f in Fault if sampled.draft_temperature > 0 or f is not Fault.SHARED]
    best: Chosen | None = None
    for tree in trees:
        limit = (best and best.hardest) or LIMIT
        found = Chosen(tree, {})
        for fault in tried:
            found.needed[fault] = _needed(tree, fault, sampled.k, level, limit)
            if found.needed[fault] is None and limit < LIMIT:
                break  # already worse than the best
        if best is None or found.hardest is not None:
            best = found
        if best.hardest is not None and best.hardest <= enough:
            break
    return best


def _needed(tree: Tree, fault: Fault, k: int, level: float, limit: int) -> int | None:
    return samples_for(POWER, tree.joint(), emitted(tree, fault, k), level, limit=limit)
