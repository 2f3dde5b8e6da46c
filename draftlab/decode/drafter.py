"""Drafters: what proposes tokens for the target to verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.noise import Purpose, first_argmax, keyed_exponential, race
from draftlab.kernels.verify import RowKeys
from draftlab.target.cache import RowCache


@dataclass(frozen=True)
class Observed:
    """What the target has just established for B rows: pairs (x_{p+1}, g_p) of new positions p.

    Attributes:
        start: first cache row; the B rows are a range.
        tokens: int64 [B, M], x_{p+1}; the last real one of a row is its newest token.
        features: [B, M, F], g_p.
        positions: int64 [B, M], p; −1 is padding, at the end.
        counts: int64 [B], real entries of each row.
        visible: one more than the highest p.
        keys: sampling parameters and noise keys of the rows.
    """

    start: int
    tokens: Tensor
    features: Tensor
    positions: Tensor
    counts: Tensor
    visible: int
    keys: RowKeys


@dataclass(frozen=True)
class Proposal:
    """Drafts [B, K] as target ids and, for sampled drafts, what they were drawn from [B, K, D]."""

    tokens: Tensor
    probs: Tensor | None


class Drafter(Protocol):
    """Proposes K tokens a row. The engine calls `start` once, then `propose` after each step."""

    kind: Literal["chain", "parallel"]
    k: int
    boundaries: tuple[int, ...]
    draft_ids: Tensor | None

    def start(self, num_rows: int, max_length: int) -> None:
        """Makes room for `num_rows` sequences of at most `max_length` positions."""

    def propose(self, observed: Observed) -> Proposal:
        """Takes in true features of new positions, then drafts K tokens beyond them."""

    def move(self, source: int, destination: int) -> None:
        """A row changes its place."""


class ChainDrafter:
    """An EAGLE3 head that drafts one token a pass, each from its own last output.

    Accepted positions are run again with the target's true features before the next chain starts,
    so the cache never keeps the head's own guesses (METHODS §5).

    Args:
        head: the head.
        k: drafts a step.
        draft_probs: sample drafts from q = softmax(logits / temperature) for rows with temperature
            > 0; without, every draft is the argmax.
        draft_temperature: temperature of q; None takes each row's own.
        greedy_below: rows whose temperature is lower draft greedily (q one-hot).
    """

    kind: Literal["chain"] = "chain"

    def __init__(
        self,
        head: Eagle3Head,
        k: int,
        *,
        draft_probs: bool = True,
        draft_temperature: float | None = None,
        greedy_below: float = 0.0,
    ) -> None:
        self.head, self.k, self.draft_probs = head, k, draft_probs
        self.draft_temperature, self.greedy_below = draft_temperature, greedy_below
        self.boundaries = head.config.boundaries
        self.draft_ids = head.target_ids(torch.arange(len(head.d2t), device=head.d2t.device))
        self.cache = RowCache(1, 0, 0)

    def start(self, num_rows: int, max_length: int) -> None:
        # The chain runs up to K − 1 positions past the last pair.
        self.cache = RowCache(1, num_rows, max_length + self.k)

    def move(self, source: int, destination: int) -> None:
        self.cache.move(source, destination)

    @torch.inference_mode()
    def propose(self, observed: Observed) -> Proposal:
        last = (observed.counts - 1)[:, None]
        dtype = self.head.fc.weight.dtype
        output = self._forward(
            observed.tokens,
            self.head.fuse(observed.features.to(dtype)),
            observed.start,
            observed.positions,
            observed.visible,
        )
        output = output.gather(1, last[..., None].expand(-1, 1, output.shape[-1]))
        position = observed.positions.gather(1, last)
        drafts, probs = [], []
        for step in range(self.k):
            if step:
                output = self._forward(
                    drafts[-1], output, observed.start, position, observed.visible + step
                )
                # From here on `position` is where the pair just run sits.
            token, q = self._choose(
                self.head.logits(output)[:, 0].float(), position[:, 0] + 2, observed.keys
            )
            drafts.append(token[:, None])
            probs.append(q)
            position = position + 1
        stacked = (
            torch.stack([q for q in probs if q is not None], 1) if probs[0] is not None else None
        )
        return Proposal(torch.cat(drafts, 1), stacked)

    def _choose(
        self, logits: Tensor, positions: Tensor, keys: RowKeys
    ) -> tuple[Tensor, Tensor | None]:
        """A draft for `positions` [B] from logits [B, D], as target ids, and q when sampled."""
        best = first_argmax(logits)
        if not self.draft_probs or not bool((keys.temperature > 0).any()):
            return self.head.target_ids(best), None
        temperature = keys.temperature
        greedy = (temperature == 0) | (temperature < self.greedy_below)
        if self.draft_temperature is not None:
            temperature = torch.full_like(temperature, self.draft_temperature)
        hot = torch.zeros_like(logits).scatter_(-1, best[:, None], 1.0)
        q = (logits / temperature.where(~greedy, 1.0)[:, None]).softmax(-1)
        q = q.where(~greedy[:, None], hot)
        noise = keyed_exponential(
            keys.seed, keys.prompt, positions, Purpose.DRAFT, logits.shape[-1]
        )
        return self.head.target_ids(race(q, noise)), q

    def _forward(
        self, tokens: Tensor, hidden: Tensor, start: int, positions: Tensor, visible: int
    ) -> Tensor:
        """Pre-norm outputs [B, M, H] of pairs at `positions`; their keys enter the cache."""
        head, layer = self.head, self.head.layer
        at = positions.clamp(min=0)
        x, residual = layer.inputs(head.embed_tokens(tokens), hidden)
        angles = head.rope.angles(at)
        query = layer.self_attn.query(x, angles).transpose(1, 2)
        key, value = layer.self_attn.key_value(x, angles)
        keys, values = self.cache.at(start, positions, visible).update(
            key.transpose(1, 2), value.transpose(1, 2), 0
        )
        slots = torch.arange(keys.shape[2], device=keys.device)
        mask = slots <= at[:, None, :, None]
        attended = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, enable_gqa=True
        )
        return layer.output(attended.transpose(1, 2), residual)
