"""Exact probabilities of the first tokens of an answer, in cells that a test can count.

After a context the likeliest tokens are followed, `width` at each step, and any other token ends
the branch in a cell of its own. So every temperature, top-k and top-p has a finite tree, the whole
vocabulary included. The target and the head run on all its prefixes, teacher-forced and without a
cache. The engine, the verifier and the drafter take no part, since they are what is tested.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pkgutil import resolve_name

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.drafter import Verification
from draftlab.heads.head import DraftHead
from draftlab.target_model.model import Target


@dataclass(frozen=True)
class TreeSettings:
    """How tokens are sampled, and the size of the tree.

    Attributes:
        levels: number of tested tokens L.
        width: tokens C that are followed after each prefix.
        temperature, top_k, top_p: sampling parameters of the target; None: no limit.
        k: drafts a step.
        draft_temperature: drafts are sampled from softmax(logits / draft_temperature); 0 means
            argmax drafts.
        verification: of sampled drafts.
    """

    levels: int
    width: int
    temperature: float
    top_k: int | None
    top_p: float | None
    k: int
    draft_temperature: float
    verification: Verification = "token"

    def probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's distribution, float64 [B, V], and its margin [B], from logits.

        The margin is the smallest change, of a logit or of a probability sum, that changes which
        tokens are possible: infinite without limits.
        """
        margin = torch.full_like(logits[:, 0], math.inf, dtype=torch.float64)
        if not self.top_k and (self.top_p or 1.0) == 1:
            return (logits.double() / self.temperature).softmax(-1), margin
        values, order = logits.double().sort(descending=True, stable=True)
        kept = torch.ones_like(values, dtype=torch.bool)
        if self.top_k and self.top_k < values.shape[1]:
            kept[:, self.top_k :] = False
        if self.top_p and self.top_p < 1:
            p = (values / self.temperature).masked_fill(~kept, -math.inf).softmax(-1)
            before = p.cumsum(-1) - p
            margin = (before - self.top_p).abs().amin(-1)
            kept &= before < self.top_p
        count = kept.sum(-1, keepdim=True)
        gaps = values.gather(1, count - 1) - values.gather(1, count.clamp(max=values.shape[1] - 1))
        limited = count < values.shape[1]
        margin = torch.minimum(margin, gaps.where(limited, math.inf)[:, 0])
        p = (values / self.temperature).masked_fill(~kept, -math.inf).softmax(-1)
        return torch.zeros_like(p).scatter_(1, order, p), margin

    def draft_probabilities(self, logits: Tensor) -> Tensor:
        """Return the drafts' distribution, float64 [B, W], from logits."""
        if self.draft_temperature == 0:
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        return (logits.double() / self.draft_temperature).softmax(-1)


@dataclass(frozen=True)
class AnswerTree:
    """The L tested tokens after a context.

    Level m has C^m nodes; the digits of a node's number in base C are the path to it. The cells of
    the joint distribution are the C^L leaves, then "another token" for each node in the order of
    the levels, then "another first token", then "impossible token".

    Attributes:
        context: tokens of the prompt.
        first_logits: [V], the target's logits, in its dtype, of the first token, which the prefill
            emits. The tree follows the likeliest one; verify steps emit the tested tokens.
        tokens: int64 [C^m, C] per level, token ids of the children.
        logits: [C^m, V] per level, the target's logits.
        draft_logits: [m][d], [C^m, W]: the head's logits as draft d of a step that began d tokens
            earlier.
        last_draft_logits: [C^m, W] per level: the head's logits of the last draft of a step that
            ends here with all drafts accepted; None if no step can.
        draft_ids: int64 [W], target ids of the draft vocabulary.
        margin: smallest margin of `TreeSettings.probabilities`. If it is small, rounding can change
            which tokens are possible.
    """

    settings: TreeSettings
    context: tuple[int, ...]
    first_logits: Tensor
    tokens: tuple[np.ndarray, ...]
    logits: tuple[Tensor, ...]
    draft_logits: tuple[tuple[Tensor, ...], ...]
    last_draft_logits: tuple[Tensor | None, ...]
    draft_ids: Tensor
    margin: float

    @cached_property
    def first(self) -> np.ndarray:
        """The target's distribution of the first token, float64 [V]."""
        return self._target(self.first_logits[None])[0]

    @cached_property
    def target(self) -> tuple[np.ndarray, ...]:
        """The target's distributions, float64 [C^m, V] per level."""
        return tuple(self._target(logits) for logits in self.logits)

    @cached_property
    def draft(self) -> tuple[tuple[np.ndarray, ...], ...]:
        """The drafts' distributions, [m][d] float64 [C^m, V]."""
        return tuple(tuple(self._draft(one) for one in level) for level in self.draft_logits)

    @cached_property
    def last_draft(self) -> tuple[np.ndarray | None, ...]:
        """The last drafts' distributions, float64 [C^m, V] per level."""
        return tuple(None if x is None else self._draft(x) for x in self.last_draft_logits)

    def _target(self, logits: Tensor) -> np.ndarray:
        return self.settings.probabilities(logits)[0].cpu().numpy()

    def _draft(self, logits: Tensor) -> np.ndarray:
        q = self.settings.draft_probabilities(logits)
        full = q.new_zeros(len(q), self.first_logits.shape[-1])
        return full.index_copy_(1, self.draft_ids, q).cpu().numpy()

    def cells(
        self, leaves: np.ndarray, others: Sequence[np.ndarray], impossible: float
    ) -> np.ndarray:
        """Return the probabilities of all cells from those given the followed first token.

        Args:
            leaves: float64 [C^L].
            others: float64 [C^m] per level, "another token" after each node.
        """
        share = float(self.first.max())
        given_first = share * np.concatenate([leaves, *others])
        return np.append(given_first, [1 - share, share * impossible])

    def joint(self) -> np.ndarray:
        """Return the target's probabilities of the cells; the last one is 0."""
        mass, others = np.ones(1), []
        for p, tokens in zip(self.target, self.tokens, strict=True):
            followed = np.take_along_axis(p, tokens, 1)
            rest = 1 - followed.sum(1)
            others.append(mass * np.where(rest > 1e-12, rest, 0.0))
            mass = (mass[:, None] * followed).ravel()
        return self.cells(mass, others, 0.0)

    def cell(self, answer: tuple[int, ...]) -> int:
        """Return the cell of an answer: the first token and L tested tokens."""
        width, levels = self.settings.width, self.settings.levels
        num_leaves, node, before = width**levels, 0, 0
        first = num_leaves + sum(width**m for m in range(levels))
        if answer[0] != self.first.argmax():
            return first + (self.first[answer[0]] == 0)
        for level, token in enumerate(answer[1:]):
            index = np.flatnonzero(self.tokens[level][node] == token)
            if not len(index):
                possible = self.target[level][node, token] > 0
                return num_leaves + before + node if possible else first + 1
            before += width**level
            node = node * width + int(index[0])
        return node


@torch.inference_mode()
def build_trees(
    target: Target, head: DraftHead, contexts: Sequence[tuple[int, ...]], settings: TreeSettings
) -> list[AnswerTree]:
    """Return the trees of N contexts with the same length."""
    ids, count = torch.tensor(contexts, device=target.device), len(contexts)
    first_logits = target.logits(target.states(ids).last[:, -1]).to(target.dtype)
    width, levels, k = min(settings.width, first_logits.shape[-1]), settings.levels, settings.k
    p, margin = settings.probabilities(first_logits)
    # From here on the nodes of a level are grouped by context: [N · C^m, …].
    rows, tokens, logits = torch.cat([ids, p.argmax(-1, keepdim=True)], 1), [], []
    for level in range(levels):
        if level:
            rows = torch.cat([rows.repeat_interleave(width, 0), tokens[-1].reshape(-1, 1)], 1)
        states = target.states(rows, head.config.boundaries)
        logits.append(target.logits(states.last[:, -1]).to(target.dtype))
        p, gap = settings.probabilities(logits[-1])
        tokens.append(p.topk(width).indices)
        margin = torch.minimum(margin, gap.view(count, -1).amin(1))
    drafter = resolve_name(head.family.forced_drafts_type)(head, rows, states.features, k)

    def draft_logits(level: int, start: int, depth: int) -> Tensor:
        """Return the head's logits at a level's nodes, as draft `depth` of a step.

        Args:
            start: level at which the step begins.
        """
        # Leaves below one node share everything up to it.
        every = width ** (levels - 1 - level)
        return drafter.draft(ids.shape[1] + start - 1, depth)[::every]

    draft = [[draft_logits(m, m - d, d) for d in range(min(m + 1, k))] for m in range(levels)]
    last_draft = [draft_logits(m, m - k, k - 1) if m >= k else None for m in range(levels)]
    draft_ids = head.target_ids(torch.arange(len(head.d2t), device=head.d2t.device))

    def of_context(tensor: Tensor, number: int) -> Tensor:
        return tensor.chunk(count)[number]

    return [
        AnswerTree(
            settings=replace(settings, width=width),
            context=tuple(context),
            first_logits=first_logits[n],
            tokens=tuple(of_context(t, n).cpu().numpy() for t in tokens),
            logits=tuple(of_context(t, n) for t in logits),
            draft_logits=tuple(tuple(of_context(q, n) for q in level) for level in draft),
            last_draft_logits=tuple(None if q is None else of_context(q, n) for q in last_draft),
            draft_ids=draft_ids,
            margin=float(margin[n]),
        )
        for n, context in enumerate(contexts)
    ]
