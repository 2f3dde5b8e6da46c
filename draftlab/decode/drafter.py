"""Drafters: what proposes tokens for the target to verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from draftlab.decode.fused_head import FusedHead, Pass
from draftlab.decode.packed_head import PackedHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.chain_layout import chain_layout, last_rows
from draftlab.kernels.paged_attention import attend_paged, write_paged
from draftlab.kernels.rope_write import rope_angles
from draftlab.kernels.rows import DraftDistribution, RowKeys, draft_index
from draftlab.kernels.verify import argmax_draft, sample_draft


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
        sampling: what `Drafter.sampling` says of the keys, where it is known already.
    """

    tokens: Tensor
    features: Tensor
    positions: Tensor
    counts: Tensor
    block_table: Tensor
    keys: RowKeys
    sampling: tuple[Tensor, Tensor] | None = None


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

    def start(self, num_blocks: int, block_size: int, *, packed: bool = False) -> None:
        """Makes room for the keys of `num_blocks` blocks, those of the target's tables.

        `packed`: on a CPU, run on weights packed for oneDNN.
        """

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
        self.fused: FusedHead | PackedHead | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What the head computes in."""
        return self.head.fc.weight.dtype

    @property
    def draft_vocab(self) -> tuple[int, torch.dtype] | None:
        return (len(self.draft_ids), self.dtype) if self.draft_probs else None

    def start(self, num_blocks: int, block_size: int, *, packed: bool = False) -> None:
        config = self.head.config
        shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.key_pool = torch.zeros(shape, dtype=self.dtype, device=self.draft_ids.device)
        self.value_pool = torch.zeros_like(self.key_pool)
        if FusedHead.suits(self.head):
            self.fused = self.fused or FusedHead(self.head)
        elif packed and PackedHead.suits(self.head):
            self.fused = PackedHead(self.head)
        else:
            self.fused = None

    def sampling(self, keys: RowKeys) -> tuple[Tensor, Tensor]:
        sampled = (keys.temperature > 0) & (keys.temperature >= self.greedy_below)
        temperature = keys.temperature
        if self.draft_temperature is not None:
            temperature = torch.full_like(temperature, self.draft_temperature)
        return temperature, sampled

    @torch.inference_mode()
    def propose(self, observed: Observed) -> Proposal:
        chain = self._lay_out(
            observed.positions, observed.counts, observed.block_table, later=self.k - 1
        )
        sampling = observed.sampling or self.sampling(observed.keys)
        seen = self._observe(observed, chain)
        return self._draft(seen, chain, observed.block_table, observed.keys, sampling)

    @torch.inference_mode()
    def observe(self, observed: Observed) -> Tensor:
        chain = self._lay_out(observed.positions, observed.counts, observed.block_table, later=0)
        return self._observe(observed, chain)

    @torch.inference_mode()
    def draft(
        self, seen: Tensor, positions: Tensor, block_table: Tensor, keys: RowKeys
    ) -> Proposal:
        one = torch.ones_like(positions)
        chain = self._lay_out(positions[:, None], one, block_table, later=self.k - 1)
        return self._draft(seen, chain, block_table, keys, self.sampling(keys))

    def _lay_out(
        self, positions: Tensor, counts: Tensor, block_table: Tensor, *, later: int
    ) -> list[Pass]:
        """The passes over the pairs at `positions` [B, M], and over `later` pairs behind each row.

        A later pass feeds the pair (draft, own output), one position on.
        """
        block_size = self.key_pool.shape[1]
        chain = chain_layout(positions, counts, block_table, block_size, later)
        if self.fused is None:
            angles = self.head.rope.angles(chain.positions.clamp(min=0))
        else:
            angles = rope_angles(
                chain.positions, self.head.rope.frequencies, 1.0, self.key_pool.dtype
            )
        passes = []
        for number in range(later + 1):
            slots, at = (chain.of_pass(x, number) for x in (chain.slots, chain.positions))
            cos, sin = (chain.of_pass(half, number) for half in angles)
            first = number == 0 and chain.width > 1
            last = at[:, 0] if number else chain.last
            passes.append(Pass(slots, (cos, sin), last, counts if first else None))
        return passes

    def _observe(self, observed: Observed, chain: list[Pass]) -> Tensor:
        """Outputs [B, H] of the rows' last pairs."""
        hidden = (self.fused or self.head).fuse(observed.features.to(self.dtype))
        return self._forward(observed.tokens, hidden, chain[0], observed.block_table)

    def _draft(
        self,
        output: Tensor,
        chain: list[Pass],
        block_table: Tensor,
        keys: RowKeys,
        sampling: tuple[Tensor, Tensor],
    ) -> Proposal:
        """K drafts behind the last pairs of `chain[0]`, whose outputs [B, H] are given."""
        # One pass behind the other, so each writes to one piece of memory.
        shape = self.k, len(output)
        tokens = keys.seed.new_empty(shape)
        logits = log_sum = None
        if self.draft_probs:
            logits = output.new_empty(*shape, len(self.draft_ids))
            log_sum = keys.temperature.new_empty(shape)
        for step in range(self.k):
            if step:
                output = self._forward(
                    tokens[step - 1][:, None], output[:, None], chain[step], block_table
                )
            if logits is None or log_sum is None:
                argmax_draft(self._logits(output), ids=self.draft_ids, out=tokens[step])
                continue
            sample_draft(
                self._logits(output, logits[step]),
                chain[0].last,
                keys,
                *sampling,
                ids=self.draft_ids,
                ahead=2 + step,  # pair p predicts position p + 2
                out=(tokens[step], log_sum[step]),
            )
        if logits is None or log_sum is None:
            return Proposal(tokens.T)
        drawn_from = logits.transpose(0, 1), log_sum.T, *sampling
        return Proposal(tokens.T, DraftDistribution(*drawn_from, self.draft_ids, self.draft_index))

    def _logits(self, output: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [B, W] of outputs [B, H]; `out`: where they go."""
        if self.fused is not None:
            return self.fused.logits(output, out=out)
        found = self.head.logits(output)
        return found if out is None else out.copy_(found)

    def _forward(self, tokens: Tensor, hidden: Tensor, place: Pass, block_table: Tensor) -> Tensor:
        """Pre-norm outputs [B, H] of each row's last pair; the keys of all enter the cache.

        Args:
            tokens: int64 [B, M].
            hidden: [B, M, H].
        """
        pools = self.key_pool, self.value_pool
        if self.fused is not None:
            return self.fused.forward(tokens, hidden, place, block_table, *pools)
        layer, angles = self.head.layer, place.angles
        x, residual = layer.inputs(self.head.embed_tokens(tokens), hidden)
        write_paged(*layer.self_attn.key_value(x, angles), *pools, place.slots)
        if place.counts is not None:
            x, residual, *angles = (
                last_rows(t, place.counts) for t in (x, residual, *place.angles)
            )
        query = layer.self_attn.query(x, angles)
        scale = query.shape[-1] ** -0.5
        attended = attend_paged(query, *pools, block_table, place.last[:, None], scale=scale)
        return layer.output(attended, residual)[:, 0]
