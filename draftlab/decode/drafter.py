"""Drafters: what proposes tokens for the target to verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from draftlab.decode.fused_head import FusedHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.noise import first_argmax
from draftlab.kernels.paged_attention import attend_paged, write_paged
from draftlab.kernels.verify import DraftDistribution, RowKeys, draft_index, sample_draft
from draftlab.target.paged import slot_mapping


@dataclass(frozen=True)
class Observed:
    """What the target has just established for B rows: pairs (x_{p+1}, g_p) of new positions p.

    Attributes:
        tokens: int64 [B, M], x_{p+1}; the last real one of a row is its newest token.
        features: [B, M, F], g_p.
        positions: int64 [B, M], p, consecutive; −1 is padding, at the end.
        counts: int64 [B], real entries of each row (1 for a row of padding alone).
        block_table: int32 [B, N], where the rows' keys are.
        keys: sampling parameters and noise keys of the rows.
    """

    tokens: Tensor
    features: Tensor
    positions: Tensor
    counts: Tensor
    block_table: Tensor
    keys: RowKeys


@dataclass(frozen=True)
class Proposal:
    """Drafts [B, K] as target ids and what they were drawn from; None: every draft is an argmax."""

    tokens: Tensor
    distribution: DraftDistribution | None = None


class Drafter(Protocol):
    """Proposes K tokens a row.

    The engine calls `start` once, `observe` for each chunk of a prompt and `draft` after the last
    one, then `propose` after each decode step. All of them run on the device without waiting.

    Attributes:
        k: drafts a step.
        boundaries: of the target, whose states it is fed.
        draft_ids: int64 [W], target ids of its vocabulary; draft_index: int32 [V], the inverse.
        draft_vocab: size and dtype of its distributions; None when it drafts greedily only.
    """

    kind: Literal["chain", "parallel"]
    k: int
    boundaries: tuple[int, ...]
    draft_ids: Tensor
    draft_index: Tensor
    draft_vocab: tuple[int, torch.dtype] | None

    def start(self, num_blocks: int, block_size: int) -> None:
        """Makes room for the keys of `num_blocks` blocks, those of the target's tables."""

    def observe(self, observed: Observed) -> Tensor:
        """Takes in true features; returns what `draft` needs of each row's last pair, [B, …]."""

    def draft(
        self, seen: Tensor, positions: Tensor, block_table: Tensor, keys: RowKeys
    ) -> Proposal:
        """Drafts K tokens beyond the last pairs, which sit at `positions` [B]."""

    def propose(self, observed: Observed) -> Proposal:
        """`observe`, then `draft`."""

    def sampling(self, keys: RowKeys) -> tuple[Tensor, Tensor]:
        """Draft temperature float32 [B], and bool [B]: which rows sample their drafts."""


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
        self.draft_index = draft_index(self.draft_ids, len(head.t2d))
        self.fused: FusedHead | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What the head computes in."""
        return self.head.fc.weight.dtype

    @property
    def draft_vocab(self) -> tuple[int, torch.dtype] | None:
        return (len(self.draft_ids), self.dtype) if self.draft_probs else None

    def start(self, num_blocks: int, block_size: int) -> None:
        config = self.head.config
        shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.key_pool = torch.zeros(shape, dtype=self.dtype, device=self.draft_ids.device)
        self.value_pool = torch.zeros_like(self.key_pool)
        if self.fused is None and FusedHead.suits(self.head):
            self.fused = FusedHead(self.head)

    def sampling(self, keys: RowKeys) -> tuple[Tensor, Tensor]:
        sampled = (keys.temperature > 0) & (keys.temperature >= self.greedy_below)
        temperature = keys.temperature
        if self.draft_temperature is not None:
            temperature = torch.full_like(temperature, self.draft_temperature)
        return temperature, sampled

    @torch.inference_mode()
    def propose(self, observed: Observed) -> Proposal:
        last = observed.positions.gather(1, (observed.counts - 1)[:, None])[:, 0]
        return self.draft(self.observe(observed), last, observed.block_table, observed.keys)

    @torch.inference_mode()
    def observe(self, observed: Observed) -> Tensor:
        output = self._forward(
            observed.tokens,
            (self.fused or self.head).fuse(observed.features.to(self.dtype)),
            observed.positions,
            observed.block_table,
        )
        last = (observed.counts - 1)[:, None, None]
        return output.gather(1, last.expand(-1, 1, output.shape[-1]))[:, 0]

    @torch.inference_mode()
    def draft(
        self, seen: Tensor, positions: Tensor, block_table: Tensor, keys: RowKeys
    ) -> Proposal:
        output, drafts, drawn_from, log_sums = seen[:, None], [], [], []
        for step in range(self.k):
            if step:
                # The pair (draft, own output) sits one position on; a row of padding stays one.
                at = (positions + step).where(positions >= 0, -1)[:, None]
                output = self._forward(drafts[-1][:, None], output, at, block_table)
            logits = (self.fused or self.head).logits(output[:, 0])
            token, log_sum = self._choose(logits, positions + 2 + step, keys)
            drafts.append(token)
            drawn_from.append(logits)
            log_sums.append(log_sum)
        return Proposal(torch.stack(drafts, 1), self._distribution(drawn_from, log_sums, keys))

    def _choose(
        self, logits: Tensor, positions: Tensor, keys: RowKeys
    ) -> tuple[Tensor, Tensor | None]:
        """A draft for `positions` [B] from logits [B, W], as target ids, and logsumexp(q's) [B]."""
        if not self.draft_probs:
            return self.head.target_ids(first_argmax(logits)), None
        index, log_sum = sample_draft(logits, positions, keys, *self.sampling(keys))
        return self.head.target_ids(index), log_sum

    def _distribution(
        self, logits: list[Tensor], log_sums: list[Tensor | None], keys: RowKeys
    ) -> DraftDistribution | None:
        """What K calls of `_choose` drew from: their logits [B, W] and what they returned."""
        known = [log_sum for log_sum in log_sums if log_sum is not None]
        if not known:
            return None
        return DraftDistribution(
            torch.stack(logits, 1),
            torch.stack(known, 1),
            *self.sampling(keys),
            self.draft_ids,
            self.draft_index,
        )

    def _forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, block_table: Tensor
    ) -> Tensor:
        """Pre-norm outputs [B, M, H] of pairs at `positions`; their keys enter the cache."""
        slots = slot_mapping(block_table, positions, self.key_pool.shape[1])
        if self.fused is not None:
            return self.fused.forward(
                tokens, hidden, positions, slots, block_table, self.key_pool, self.value_pool
            )
        head, layer = self.head, self.head.layer
        x, residual = layer.inputs(head.embed_tokens(tokens), hidden)
        angles = head.rope.angles(positions.clamp(min=0))
        query = layer.self_attn.query(x, angles)
        key, value = layer.self_attn.key_value(x, angles)
        write_paged(key, value, self.key_pool, self.value_pool, slots)
        attended = attend_paged(
            query,
            self.key_pool,
            self.value_pool,
            block_table,
            positions,
            scale=query.shape[-1] ** -0.5,
        )
        return layer.output(attended, residual)
