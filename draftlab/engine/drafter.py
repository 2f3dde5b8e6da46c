"""Drafters: what proposes tokens for the target to verify."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from draftlab.engine.eager_head import HeadPasses, Pass, PlainHead, Pools
from draftlab.engine.fused_head import FusedHead
from draftlab.engine.prepacked_head import PackedHead
from draftlab.heads.head import DraftHead
from draftlab.kernels.chain_layout import chain_layout
from draftlab.kernels.sampling import argmax_draft, sample_draft
from draftlab.kernels.sampling_types import DraftDistribution, SamplingMetadata, draft_index


@dataclass(frozen=True)
class VerifiedFeatures:
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
    keys: SamplingMetadata
    sampling: tuple[Tensor, Tensor] | None = None

    def first_columns(self, width: int) -> VerifiedFeatures:
        """Without the columns behind the first `width`."""
        cut = {n: getattr(self, n)[:, :width] for n in ("tokens", "features", "positions")}
        return replace(self, **cut)


@dataclass(frozen=True)
class Proposal:
    """Drafts [B, K] as target ids and what they were drawn from; None: every draft is an argmax."""

    tokens: Tensor
    distribution: DraftDistribution | None = None


class Drafter(Protocol):
    """Proposes K tokens a row.

    The engine calls `start` once, `extend_cache` for each chunk of a prompt but its last pair, then
    `propose` with that pair and after each decode step. All run on the device without waiting.

    Attributes:
        kind: how it drafts.
        k: drafts a step.
        boundaries: of the target, whose states it is fed.
        draft_ids: int64 [W], target ids of its vocabulary; draft_index: int32 [V], the inverse.
        draft_vocab: size and dtype of its distributions; None when it drafts greedily only.
        pools: its keys and values of each layer, in the blocks of the target's tables.
    """

    kind: Literal["chain", "parallel"]
    k: int
    boundaries: tuple[int, ...]
    draft_ids: Tensor
    draft_index: Tensor
    draft_vocab: tuple[int, torch.dtype] | None
    pools: Pools

    def start(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_length: int | None = None,
        cpu_prepacked: bool = False,
    ) -> None:
        """Makes room for the keys of `num_blocks` blocks, those of the target's tables.

        Args:
            max_length: positions a row may take; None: as many as its blocks hold.
            cpu_prepacked: on a CPU, run on weights prepacked for oneDNN.
        """

    def extend_cache(self, verified: VerifiedFeatures) -> None:
        """Takes in true features."""

    def propose(self, verified: VerifiedFeatures) -> Proposal:
        """Takes in true features and drafts K tokens beyond each row's last pair."""

    def sampling(self, keys: SamplingMetadata) -> tuple[Tensor, Tensor]:
        """Draft temperature float32 [B], and bool [B]: which rows sample their drafts."""


class HeadDrafter:
    """What the drafters of heads have in common: the head's cache, prompts, and how drafts are
    drawn.

    Args:
        head: the head.
        k: drafts a step.
        draft_probs: sample drafts from q = softmax(logits / temperature) for rows with temperature
            > 0; without, every draft is the argmax.
        draft_temperature: temperature of q; None takes each row's own.
        greedy_below: rows whose temperature is lower draft greedily (q one-hot).
    """

    def __init__(
        self,
        head: DraftHead,
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
        self.passes: HeadPasses = PlainHead(head)

    @property
    def dtype(self) -> torch.dtype:
        """What the head computes in."""
        return self.head.fc.weight.dtype

    @property
    def draft_vocab(self) -> tuple[int, torch.dtype] | None:
        return (len(self.draft_ids), self.dtype) if self.draft_probs else None

    @property
    def pools(self) -> Pools:
        """Keys and values of each layer."""
        return list(zip(self.key_pools, self.value_pools, strict=True))

    def start(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_length: int | None = None,
        cpu_prepacked: bool = False,
    ) -> None:
        config = self.head.config
        shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.block_size, self.max_length = block_size, max_length or num_blocks * block_size
        self.key_pools, self.value_pools = (
            tuple(
                torch.zeros(shape, dtype=self.dtype, device=self.draft_ids.device)
                for _ in range(config.num_layers)
            )
            for _ in range(2)
        )
        if FusedHead.suits(self.head):
            if not isinstance(self.passes, FusedHead):  # its copies serve every engine
                self.passes = FusedHead(self.head)
        elif cpu_prepacked and PackedHead.suits(self.head):
            self.passes = PackedHead(self.head)
        else:
            self.passes = PlainHead(self.head)

    def sampling(self, keys: SamplingMetadata) -> tuple[Tensor, Tensor]:
        sampled = (keys.temperature > 0) & (keys.temperature >= self.greedy_below)
        temperature = keys.temperature
        if self.draft_temperature is not None:
            temperature = torch.full_like(temperature, self.draft_temperature)
        return temperature, sampled

    @torch.inference_mode()
    def extend_cache(self, verified: VerifiedFeatures) -> None:
        place = self._lay_out(verified.positions, verified.counts, verified.block_table, later=0)
        self._run_verified(verified, place[0])

    def _lay_out(
        self, positions: Tensor, counts: Tensor, block_table: Tensor, *, later: int
    ) -> list[Pass]:
        """The passes over the pairs at `positions` [B, M], and over `later` pairs behind each row.

        Of the first, the last pairs' outputs are asked for; a later one holds one pair a row, one
        position on.
        """
        chain = chain_layout(positions, counts, block_table, self.block_size, later)
        angles = self.passes.angles(chain.positions)
        passes = []
        for number in range(later + 1):
            slots, at = (chain.select_pass(x, number) for x in (chain.slots, chain.positions))
            here = tuple(chain.select_pass(part, number) for part in angles)
            first = number == 0 and chain.width > 1
            asked = chain.last[:, None] if first else at
            passes.append(Pass(slots, here, at, asked, counts if first else None))
        return passes

    def _run_verified(self, verified: VerifiedFeatures, place: Pass) -> Tensor:
        """Outputs [B, A, H] that a pass over what was verified is asked for."""
        hidden = self.passes.project_features(verified.features.to(self.dtype))
        return self._forward(verified.tokens, hidden, place, verified.block_table)

    def _forward(self, tokens: Tensor, hidden: Tensor, place: Pass, block_table: Tensor) -> Tensor:
        return self.passes.forward(tokens, hidden, place, block_table, self.pools)

    def _proposal(
        self,
        tokens: Tensor,
        logits: Tensor | None,
        log_sum: Tensor | None,
        sampling: tuple[Tensor, Tensor],
    ) -> Proposal:
        """The proposal of tokens and log sums [K, B] and logits [K, B, W]."""
        if logits is None or log_sum is None:
            return Proposal(tokens.T)
        drawn_from = logits.transpose(0, 1), log_sum.T, *sampling
        return Proposal(tokens.T, DraftDistribution(*drawn_from, self.draft_ids, self.draft_index))


class ChainDrafter(HeadDrafter):
    """An EAGLE3 head that drafts one token a pass, each from its own last output.

    Accepted positions are run again with the target's true features before the next chain starts,
    so the cache never keeps the head's own guesses (methods §5).

    Args: those of `HeadDrafter`.
    """

    kind: Literal["chain"] = "chain"

    @torch.inference_mode()
    def propose(self, verified: VerifiedFeatures) -> Proposal:
        chain = self._lay_out(
            verified.positions, verified.counts, verified.block_table, later=self.k - 1
        )
        keys, sampling = verified.keys, verified.sampling or self.sampling(verified.keys)
        output = self._run_verified(verified, chain[0])
        # One pass behind the other, so each writes to one piece of memory.
        shape = self.k, len(output)
        tokens = keys.seed.new_empty(shape)
        logits = log_sum = None
        if self.draft_probs:
            logits = output.new_empty(*shape, len(self.draft_ids))
            log_sum = keys.temperature.new_empty(shape)
        last = chain[0].asked[:, 0]
        for step in range(self.k):
            if step:
                drafted = tokens[step - 1][:, None]
                output = self._forward(drafted, output, chain[step], verified.block_table)
            if logits is None or log_sum is None:
                argmax_draft(self.passes.logits(output[:, 0]), ids=self.draft_ids, out=tokens[step])
                continue
            sample_draft(
                self.passes.logits(output[:, 0], out=logits[step]),
                last,
                keys,
                *sampling,
                ids=self.draft_ids,
                offset=2 + step,  # pair p predicts position p + 2
                out=(tokens[step], log_sum[step]),
            )
        return self._proposal(tokens, logits, log_sum, sampling)


def new_drafter(head: DraftHead, k: int, **options: Any) -> HeadDrafter:
    """Return the drafter of a head's family; `options` are those of `HeadDrafter`."""
    return head.family.new_drafter(head, k, **options)
