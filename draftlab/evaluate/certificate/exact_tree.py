"""Every answer of a few tokens that top-k sampling can give, with its exact probability.

The target is run on all prefixes, teacher-forced and without a cache, and so is the head, for what
it would draft there. Engine, verifier and drafter take no part: they are what is on trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.heads.head import DraftHead
from draftlab.heads.peagle import PeagleHead
from draftlab.target_model.model import Target


@dataclass(frozen=True)
class Tree:
    """The L judged tokens behind a context and its first token; C = top_k children a node.

    Level m has C^m nodes; a node's number in base C spells the way to it. The cells of the joint
    are the C^L leaves, then "another first token", then "what top-k cannot give".

    Attributes:
        context: tokens of the prompt.
        firsts: the C tokens that may come first, most likely first. The tree stands behind
            firsts[0], which the prefill emits: verify steps give the judged tokens.
        first_probability: of firsts[0].
        tokens: per level int64 [C^m, C], the children's token ids.
        target: per level float64 [C^m, C], their probabilities.
        draft: draft[m][d], float64 [C^m, C]: their probabilities as draft d of a step, which began
            d tokens earlier; what is missing to one lies on tokens that cannot come.
        stale: per level float64 [C^m, C]: their probabilities in the last draft's distribution of
            a step that ended here with all drafts accepted; None where no step can.
        margin: smallest gap between logits of the last token inside top-k and the first outside;
            rounding must not change who is in.
    """

    context: tuple[int, ...]
    firsts: tuple[int, ...]
    first_probability: float
    tokens: tuple[np.ndarray, ...]
    target: tuple[np.ndarray, ...]
    draft: tuple[tuple[np.ndarray, ...], ...]
    stale: tuple[np.ndarray | None, ...]
    margin: float

    def cells(self, leaves: np.ndarray) -> np.ndarray:
        """The cells of a joint whose leaves, given firsts[0], have these probabilities."""
        known = np.append(self.first_probability * leaves, 1 - self.first_probability)
        return np.append(known, max(1 - known.sum(), 0.0))

    def joint(self) -> np.ndarray:
        """Exact probabilities of the cells, float64 [C^L + 2]; the last is 0."""
        leaves = np.ones(1)
        for p in self.target:
            leaves = (leaves[:, None] * p).ravel()
        return np.append(self.cells(leaves / leaves.sum())[:-1], 0.0)

    def cell(self, answer: tuple[int, ...]) -> int:
        """The cell of a first token and L judged ones."""
        leaves = self.target[-1].size
        if answer[0] != self.firsts[0]:
            return leaves if answer[0] in self.firsts else leaves + 1
        node = 0
        for children, token in zip(self.tokens, answer[1:], strict=True):
            at = np.flatnonzero(children[node] == token)
            if not len(at):
                return leaves + 1
            node = node * children.shape[1] + int(at[0])
        return node


@torch.inference_mode()
def grow(
    target: Target,
    head: DraftHead,
    contexts: Sequence[tuple[int, ...]],
    *,
    levels: int,
    top_k: int,
    temperature: float,
    k: int,
    draft_temperature: float,
) -> list[Tree]:
    """Runs target and head over all prefixes behind N contexts of one length; a tree for each.

    Args:
        levels: judged tokens L.
        top_k, temperature: the target's sampling.
        k: drafts a step.
        draft_temperature: drafts are sampled from softmax(logits / draft_temperature); 0 means
            that each is the argmax.
    """
    ids, count = torch.tensor(contexts, device=target.device), len(contexts)
    firsts, p, margin = _kept(target.logits(target.states(ids).last[:, -1]), top_k, temperature)
    # From here on the nodes of a level lie context by context: [N · C^m, …].
    rows, tokens, probabilities = torch.cat([ids, firsts[:, :1]], 1), [], []
    for level in range(levels):
        if level:
            rows = torch.cat([rows.repeat_interleave(top_k, 0), tokens[-1].reshape(-1, 1)], 1)
        states = target.states(rows, head.config.boundaries)
        inside, among, gap = _kept(target.logits(states.last[:, -1]), top_k, temperature)
        tokens.append(inside)
        probabilities.append(among)
        margin = torch.minimum(margin, gap.view(count, -1).amin(1))
    kind = _Parallel if isinstance(head, PeagleHead) else _Chain
    drafter = kind(head, rows, states.features, draft_temperature)

    def under(level: int, start: int, depth: int) -> Tensor:
        """The children of a level in what draft `depth` of a step from level `start` was drawn."""
        q = drafter.draft(ids.shape[1] + start - 1, depth)
        # Leaves under one node share everything up to it.
        return q[:: top_k ** (levels - 1 - level)].gather(1, tokens[level])

    draft = [[under(m, m - d, d) for d in range(min(m + 1, k))] for m in range(levels)]
    stale = [under(m, m - k, k - 1) if m >= k else None for m in range(levels)]

    def own(found: Tensor, number: int) -> np.ndarray:
        """The part of a context."""
        return found.chunk(count)[number].cpu().numpy()

    return [
        Tree(
            tuple(context),
            tuple(firsts[n].tolist()),
            float(p[n, 0]),
            tuple(own(t, n) for t in tokens),
            tuple(own(t, n) for t in probabilities),
            tuple(tuple(own(q, n) for q in level) for level in draft),
            tuple(None if q is None else own(q, n) for q in stale),
            float(margin[n]),
        )
        for n, context in enumerate(contexts)
    ]


def _kept(logits: Tensor, top_k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k ids of logits [B, V], int64 [B, C], their probabilities, and gaps [B] to the next."""
    values, ids = logits.double().topk(min(top_k + 1, logits.shape[-1]))
    gap = values[:, top_k - 1] - values[:, -1] if values.shape[1] > top_k else values[:, 0] + 1e9
    return ids[:, :top_k], (values[:, :top_k] / temperature).softmax(-1), gap


class _AlongRows:
    """A head along given rows of tokens int64 [B, S], the target's features [B, S, F] beside them.

    `draft` is given by its families.
    """

    def __init__(self, head: Any, rows: Tensor, features: Tensor, temperature: float) -> None:
        self.head, self.rows, self.temperature = head, rows, temperature
        self.hidden = head.fuse(features[:, :-1].to(head.fc.weight.dtype))

    def distribution(self, output: Tensor) -> Tensor:
        """float64 [B, V] over target ids, of pre-norm outputs [B, H]."""
        logits = self.head.logits(output).double()
        if self.temperature == 0:
            q = F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        else:
            q = (logits / self.temperature).softmax(-1)
        ids = self.head.target_ids(torch.arange(logits.shape[-1], device=logits.device))
        return q.new_zeros(len(q), self.head.config.vocab_size).index_copy_(1, ids, q)


class _Parallel(_AlongRows):
    """Drafts from masked slots: what was drafted before plays no part."""

    def draft(self, start: int, depth: int) -> Tensor:
        """Distribution of draft `depth` of a step whose last true pair sits at `start`."""
        pairs, hidden = self.rows[:, 1 : start + 2], self.hidden[:, : start + 1]
        masks = pairs.new_full((len(pairs), depth), self.head.mask_token_id)
        tokens = torch.cat([pairs, masks], 1)
        hidden = torch.cat([hidden, self.head.mask_state().expand(*masks.shape, -1)], 1)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.distribution(self.head.run(tokens, hidden, positions, _causal)[:, -1])


def _causal(_: int, *inputs: Tensor) -> Tensor:
    query, key, value = (t.transpose(1, 2) for t in inputs)
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return found.transpose(1, 2)


Keys = tuple[Tensor, ...]
"""Keys and values of one layer, each [B, kv heads, M, head_dim]."""


class _Chain(_AlongRows):
    """Drafts one behind the other, each from the output of the one before."""

    def __init__(self, head: Any, rows: Tensor, features: Tensor, temperature: float) -> None:
        super().__init__(head, rows, features, temperature)
        self.outputs, self.keys = self._run(rows[:, 1:], self.hidden, 0, None)

    def draft(self, start: int, depth: int) -> Tensor:
        """Distribution of draft `depth` of a step whose last true pair sits at `start`."""
        output = self.outputs[:, start, None]
        keys: list[Keys] = [tuple(t[:, :, : start + 1] for t in layer) for layer in self.keys]
        for at in range(start + 1, start + depth + 1):
            output, keys = self._run(self.rows[:, at + 1, None], output, at, keys)
        return self.distribution(output[:, 0])

    def _run(
        self, tokens: Tensor, hidden: Tensor, start: int, past: Sequence[Keys] | None
    ) -> tuple[Tensor, list[Keys]]:
        """Outputs [B, M, H] of pairs at positions from `start`, and each layer's keys so far."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        reach = torch.arange(start + tokens.shape[1], device=tokens.device)
        made: list[Keys] = []

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys = key.transpose(1, 2), value.transpose(1, 2)
            if past is not None:
                keys = tuple(torch.cat(pair, 2) for pair in zip(past[number], keys, strict=True))
            made.append(keys)
            chunk = self.head.layers[number].chunk or len(reach)
            at = positions[:, None]
            visible = (at // chunk * chunk <= reach) & (reach <= at)
            found = F.scaled_dot_product_attention(
                query.transpose(1, 2), *keys, attn_mask=visible, enable_gqa=True
            )
            return found.transpose(1, 2)

        return self.head.run(tokens, hidden, positions, attend), made
