"""The interface of a drafter, which the engine calls; docs/guide/own_drafter.md has a small one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from draftlab.engine.draft_sampler import Proposal
from draftlab.errors import UserError
from draftlab.kernels.sampling.types import SamplingMetadata

Verification = Literal["token", "block"]
"""Rejection sampling of each draft by itself, or of all drafts of a step together."""
Pools = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [P, S, kv heads, head_dim]."""


@dataclass(frozen=True)
class VerifiedFeatures:
    """Tokens and features of the positions p that the target has just verified, for B rows.

    Each position gives a pair (x_{p+1}, g_p).

    Attributes:
        tokens: int64 [B, M], x_{p+1}; the last one of a row before padding is its newest token.
        features: [B, M, F], g_p.
        positions: int64 [B, M], p, consecutive; −1 is padding, at the end.
        counts: int64 [B], entries of each row before padding (1 if a row is padding only).
        block_table: int32 [B, N], the cache blocks of the rows.
        keys: sampling parameters and noise keys of the rows.
    """

    tokens: Tensor
    features: Tensor
    positions: Tensor
    counts: Tensor
    block_table: Tensor
    keys: SamplingMetadata

    def first_columns(self, width: int) -> VerifiedFeatures:
        """Return a copy with only the first `width` columns."""
        names = "tokens", "features", "positions"
        return replace(self, **{name: getattr(self, name)[:, :width] for name in names})

    def last(self) -> tuple[Tensor, Tensor]:
        """Return token and position of each row's last pair, int64 [B] each."""
        index = self.counts[:, None] - 1
        return self.tokens.gather(1, index)[:, 0], self.positions.gather(1, index)[:, 0]


class Drafter(ABC):
    """Proposes up to K draft tokens for each row.

    The engine calls `start` once and `extend_cache` for each chunk of a prompt, without the
    prompt's last pair. It calls `propose` with that pair, then after each decode step.

    On a GPU the calls are captured in CUDA graphs, which are replayed for other requests: they
    launch work on the device and do not wait for it, shapes depend on those of the arguments alone,
    and what is kept for later steps is written in place. A request has another row in each step;
    what is kept for it belongs to its cache blocks (`VerifiedFeatures.block_table`).

    Attributes:
        k: draft tokens a step.
        boundaries: boundaries of the target whose states are the features; without any F is 0.
        verification: how the drafts are verified.
        draft_vocab: size and dtype of the draft distributions, from which drafts of rows with a
            temperature above 0 are sampled at this temperature; None: every draft is an argmax.
        draft_ids: int64 [W], target ids of the draft vocabulary; draft_index: int32 [V], its
            inverse. Both are read only with `draft_vocab`.
        pools: what is kept for the cache blocks; the engine copies it with the blocks of equal
            prompts.
        confidence: whether proposals state the confidence of each draft.
        dtype: of the features, where they are kept.
    """

    k: int
    boundaries: tuple[int, ...] = ()
    verification: Verification = "token"
    draft_vocab: tuple[int, torch.dtype] | None = None
    draft_ids: Tensor
    draft_index: Tensor
    pools: Pools = ()
    confidence: bool = False
    dtype: torch.dtype = torch.float32

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if hasattr(cls, "sampling"):
            raise UserError(
                "removed: Drafter.sampling; drafts have their rows' temperatures",
                where=cls.__name__,
                do="remove it, and draw drafts at `verified.keys.temperature` in `propose`",
            )

    def start(  # noqa: B027 (a drafter may keep nothing)
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_length: int | None = None,
        cpu_prepacked: bool = False,
    ) -> None:
        """Allocate what is kept for `num_blocks` blocks, as in the target's block tables.

        Args:
            max_length: most positions of a row; None: as many as the blocks hold.
            cpu_prepacked: on a CPU, run on weights prepacked for oneDNN.
        """

    def extend_cache(self, verified: VerifiedFeatures) -> None:  # noqa: B027
        """Keep what later drafts need of verified positions, without drafting."""

    @abstractmethod
    def propose(self, verified: VerifiedFeatures) -> Proposal:
        """Extend the cache like `extend_cache`, and draft K tokens after each row's last pair."""
