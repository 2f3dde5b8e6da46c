"""Exact probabilities of every short answer that top-k sampling can give.

The target and the head run on all prefixes, teacher-forced and without a cache. The engine, the
verifier and the drafter take no part, since they are what the certificate tests.
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
from draftlab.target_model.model import Target


@dataclass(frozen=True)
class AnswerTree:
    """The L tested tokens after a context, with C = top_k children per node.

    Level m has C^m nodes; the digits of a node's number in base C are the path to it. The cells of
    the joint distribution are the C^L leaves, then "another first token", then "impossible token".

    Attributes:
        context: tokens of the prompt.
        first_tokens: the C possible first tokens, most likely first. The tree follows
            first_tokens[0], which the prefill emits; verify steps emit the tested tokens.
        first_probability: probability of first_tokens[0].
        tokens: int64 [C^m, C] per level, token ids of the children.
        target: float64 [C^m, C] per level, the target's probabilities of the children.
        draft: draft[m][d], float64 [C^m, C]: the children's probabilities as draft d of a step that
            began d tokens earlier. The rest of the mass lies on impossible tokens.
        last_draft: float64 [C^m, C] per level: the children's probabilities in the last draft's
            distribution of a step that ends here with all drafts accepted; None if no step can.
        margin: smallest gap between the logits of the last top-k token and the next one. If it is
            small, rounding can change the top-k tokens.
    """

    context: tuple[int, ...]
    first_tokens: tuple[int, ...]
    first_probability: float
    tokens: tuple[np.ndarray, ...]
    target: tuple[np.ndarray, ...]
    draft: tuple[tuple[np.ndarray, ...], ...]
    last_draft: tuple[np.ndarray | None, ...]
    margin: float

    def cell_probabilities(self, leaves: np.ndarray) -> np.ndarray:
        """Return the probabilities of all cells.

        Args:
            leaves: probabilities of the leaves, given first_tokens[0].
        """
        possible = np.append(self.first_probability * leaves, 1 - self.first_probability)
        return np.append(possible, max(1 - possible.sum(), 0.0))

    def joint(self) -> np.ndarray:
        """Return the target's probabilities of the cells, float64 [C^L + 2]; the last is 0."""
        leaves = np.ones(1)
        for p in self.target:
            leaves = (leaves[:, None] * p).ravel()
        return np.append(self.cell_probabilities(leaves / leaves.sum())[:-1], 0.0)

    def cell(self, answer: tuple[int, ...]) -> int:
        """Return the cell of an answer: the first token and L tested tokens."""
        num_leaves = self.target[-1].size
        if answer[0] != self.first_tokens[0]:
            return num_leaves if answer[0] in self.first_tokens else num_leaves + 1
        node = 0
        for children, token in zip(self.tokens, answer[1:], strict=True):
            index = np.flatnonzero(children[node] == token)
            if not len(index):
                return num_leaves + 1
            node = node * children.shape[1] + int(index[0])
        return node


@torch.inference_mode()
def build_trees(
    target: Target,
    head: DraftHead,
    contexts: Sequence[tuple[int, ...]],
    *,
    levels: int,
    top_k: int,
    temperature: float,
    k: int,
    draft_temperature: float,
) -> list[AnswerTree]:
    """Return the trees of N contexts with the same length.

    Args:
        levels: number of tested tokens L.
        top_k, temperature: sampling parameters of the target.
        k: drafts a step.
        draft_temperature: drafts are sampled from softmax(logits / draft_temperature); 0 means
            argmax drafts.
    """
    ids, count = torch.tensor(contexts, device=target.device), len(contexts)
    first_tokens, p, margin = _top_k(
        target.logits(target.states(ids).last[:, -1]), top_k, temperature
    )
    # From here on the nodes of a level are grouped by context: [N · C^m, …].
    rows, tokens, probabilities = torch.cat([ids, first_tokens[:, :1]], 1), [], []
    for level in range(levels):
        if level:
            rows = torch.cat([rows.repeat_interleave(top_k, 0), tokens[-1].reshape(-1, 1)], 1)
        states = target.states(rows, head.config.boundaries)
        top_tokens, top_p, gap = _top_k(target.logits(states.last[:, -1]), top_k, temperature)
        tokens.append(top_tokens)
        probabilities.append(top_p)
        margin = torch.minimum(margin, gap.view(count, -1).amin(1))
    drafts = ParallelDrafts if head.family.drafting == "parallel" else ChainDrafts
    drafter = drafts(head, rows, states.features, draft_temperature)

    def draft_probabilities(level: int, start: int, depth: int) -> Tensor:
        """Return the probabilities of a level's children as draft `depth` of a step.

        Args:
            start: level at which the step begins.
        """
        q = drafter.draft(ids.shape[1] + start - 1, depth)
        # Leaves below one node share everything up to it.
        return q[:: top_k ** (levels - 1 - level)].gather(1, tokens[level])

    draft = [
        [draft_probabilities(m, m - d, d) for d in range(min(m + 1, k))] for m in range(levels)
    ]
    last_draft = [draft_probabilities(m, m - k, k - 1) if m >= k else None for m in range(levels)]

    def of_context(tensor: Tensor, number: int) -> np.ndarray:
        return tensor.chunk(count)[number].cpu().numpy()

    return [
        AnswerTree(
            context=tuple(context),
            first_tokens=tuple(first_tokens[n].tolist()),
            first_probability=float(p[n, 0]),
            tokens=tuple(of_context(t, n) for t in tokens),
            target=tuple(of_context(t, n) for t in probabilities),
            draft=tuple(tuple(of_context(q, n) for q in level) for level in draft),
            last_draft=tuple(None if q is None else of_context(q, n) for q in last_draft),
            margin=float(margin[n]),
        )
        for n, context in enumerate(contexts)
    ]


def _top_k(logits: Tensor, top_k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return top-k ids of logits [B, V], int64 [B, C], their probabilities and gaps [B]."""
    values, ids = logits.double().topk(min(top_k + 1, logits.shape[-1]))
    gap = values[:, top_k - 1] - values[:, -1] if values.shape[1] > top_k else values[:, 0] + 1e9
    return ids[:, :top_k], (values[:, :top_k] / temperature).softmax(-1), gap


class _Drafts:
    """Teacher-forced drafts of a head along rows of tokens int64 [B, S].

    Args:
        features: features of the target [B, S, F].
        temperature: temperature of the drafts; 0 means argmax.
    """

    def __init__(self, head: Any, rows: Tensor, features: Tensor, temperature: float) -> None:
        self.head, self.rows, self.temperature = head, rows, temperature
        self.hidden = head.project_features(features[:, :-1].to(head.fc.weight.dtype))

    def draft(self, start: int, depth: int) -> Tensor:
        """Return the distribution, float64 [B, V], of draft `depth` of a step.

        Args:
            start: position of the last pair before the drafts.
        """
        raise NotImplementedError

    def distribution(self, output: Tensor) -> Tensor:
        """Return the distribution, float64 [B, V] over target ids, of pre-norm outputs [B, H]."""
        logits = self.head.logits(output).double()
        if self.temperature == 0:
            q = F.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        else:
            q = (logits / self.temperature).softmax(-1)
        ids = self.head.target_ids(torch.arange(logits.shape[-1], device=logits.device))
        return q.new_zeros(len(q), self.head.config.vocab_size).index_copy_(1, ids, q)


class ParallelDrafts(_Drafts):
    """Drafts of a parallel head: masked positions that do not depend on earlier drafts."""

    def draft(self, start: int, depth: int) -> Tensor:
        pairs, hidden = self.rows[:, 1 : start + 2], self.hidden[:, : start + 1]
        masks = pairs.new_full((len(pairs), depth), self.head.mask_token_id)
        tokens = torch.cat([pairs, masks], 1)
        hidden = torch.cat([hidden, self.head.mask_state().expand(*masks.shape, -1)], 1)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.distribution(self.head.run(tokens, hidden, positions, _causal)[:, -1])


def _causal(_: int, *inputs: Tensor) -> Tensor:
    query, key, value = (t.transpose(1, 2) for t in inputs)
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2)


LayerCache = tuple[Tensor, ...]
"""Keys and values of one layer, each [B, kv heads, M, head_dim]."""


class ChainDrafts(_Drafts):
    """Drafts of a chain head, each from the output of the one before."""

    def __init__(self, head: Any, rows: Tensor, features: Tensor, temperature: float) -> None:
        super().__init__(head, rows, features, temperature)
        self.outputs, self.keys = self._run(rows[:, 1:], self.hidden, 0, None)

    def draft(self, start: int, depth: int) -> Tensor:
        output = self.outputs[:, start, None]
        keys: list[LayerCache] = [tuple(t[:, :, : start + 1] for t in layer) for layer in self.keys]
        for position in range(start + 1, start + depth + 1):
            token = self.rows[:, position + 1, None]
            output, keys = self._run(token, output, position, keys)
        return self.distribution(output[:, 0])

    def _run(
        self, tokens: Tensor, hidden: Tensor, start: int, past: Sequence[LayerCache] | None
    ) -> tuple[Tensor, list[LayerCache]]:
        """Return outputs [B, M, H] of pairs at positions from `start`, and the KV cache."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        key_positions = torch.arange(start + tokens.shape[1], device=tokens.device)
        caches: list[LayerCache] = []

        def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys = key.transpose(1, 2), value.transpose(1, 2)
            if past is not None:
                keys = tuple(torch.cat(pair, 2) for pair in zip(past[number], keys, strict=True))
            caches.append(keys)
            chunk = self.head.layers[number].chunk or len(key_positions)
            at = positions[:, None]
            visible = (at // chunk * chunk <= key_positions) & (key_positions <= at)
            output = F.scaled_dot_product_attention(
                query.transpose(1, 2), *keys, attn_mask=visible, enable_gqa=True
            )
            return output.transpose(1, 2)

        return self.head.run(tokens, hidden, positions, attend), caches
