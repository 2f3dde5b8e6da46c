"""Buffers and layouts of a decode step, shared by references, kernels and the engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.sampling.types import SamplingMetadata


@dataclass(eq=False)
class SlotBuffers:
    """Static device buffers with the state of R requests, and of a dummy that pads batches.

    Attributes:
        length: int64 [R + 1], known tokens (prompt and answer); the newest has no cached key yet.
            0 for an empty slot, whose rows compute nothing that is read.
        newest: int64 [R + 1], the last known token.
        stored: int64 [R + 1], how many drafts follow it.
        drafts: int64 [R + 1, K], the drafts.
        block_table: int32 [R + 1, N], the request's blocks; 0 where it has none.
        keys: sampling parameters and noise keys, each [R + 1].
        draft_logits: [R + 1, K, W], what sampled drafts were drawn from; None without.
        draft_log_sum: float32 [R + 1, K], logsumexp of those over the temperature.
        confidence: float32 [R + 1, K], the logits of the drafts' confidence; None without.
    """

    length: Tensor
    newest: Tensor
    stored: Tensor
    drafts: Tensor
    block_table: Tensor
    keys: SamplingMetadata
    draft_logits: Tensor | None = None
    draft_log_sum: Tensor | None = None
    confidence: Tensor | None = None


@dataclass(frozen=True)
class StepLayout:
    """The input batch of a decode step that verifies up to K drafts a row.

    Attributes:
        index: int64 [B], the rows' slots in `SlotBuffers`.
        length: int64 [B], known tokens of each row.
        tokens: int64 [B, K + 1], its newest token and its drafts.
        positions: int64 [B, K + 1] of these; −1 for drafts that are not verified and empty slots.
        slots: int64 [B, K + 1], the slot mapping of their keys; −1 writes nothing.
        num_drafts: int64 [B], how many drafts are verified.
        block_table: int32 [B, N].
        keys: each [B].
    """

    index: Tensor
    length: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    num_drafts: Tensor
    block_table: Tensor
    keys: SamplingMetadata


@dataclass(frozen=True)
class StepOutput:
    """The result of a decode step.

    Attributes:
        tokens: int64 [B, K + 1], the accepted drafts, the emitted token, then the rejected drafts.
        positions: int64 [B, K + 1] of the verified pairs (x_{p+1}, g_p): those of the tokens fed
            before the accepted and emitted ones; −1 behind them and in empty slots.
        counts: int64 [B], tokens emitted: accepted + 1.
        packed_results: int32, for one copy to the host; see `pack_results`.
    """

    tokens: Tensor
    positions: Tensor
    counts: Tensor
    packed_results: Tensor


@dataclass(frozen=True)
class ChainLayout:
    """Pairs of B rows, flat: B · M verified ones row by row, then B of each later pass.

    Attributes:
        width: M.
        last: int64 [B], position of each row's last verified pair; −1 for a row of padding.
        positions: int64 [B · (M + later passes)]; −1 is padding.
        slots: the slot mapping of their keys, of the same shape; −1 writes nothing.
    """

    width: int
    last: Tensor
    positions: Tensor
    slots: Tensor

    def select_pass(self, flat: Tensor, number: int) -> Tensor:
        """Return a pass of a flat tensor [B · (M + later), …]: [B, M, …] of pass 0, [B, 1, …]."""
        rows = len(self.last)
        if number == 0:
            return flat[: rows * self.width].view(rows, self.width, *flat.shape[1:])
        start = rows * (self.width + number - 1)
        return flat[start : start + rows].unsqueeze(1)


@dataclass(frozen=True)
class ParallelLayout:
    """The input batch of a head that drafts in parallel, [B, M].

    Attributes:
        tokens: int64, x_{p+1}, the mask token, or 0.
        positions: int64, consecutive from a row's start; −1 for padding, at the row's end.
        slots: int64, the slot mapping; −1 writes nothing.
        is_mask: bool, where `mask_hidden` takes the place of a feature.
        sample_index: int64 [B, K], the column that each draft is sampled from.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    is_mask: Tensor
    sample_index: Tensor


@dataclass(frozen=True)
class MaskedColumns:
    """The mask columns of a parallel head's pass.

    Attributes:
        is_mask: bool [B, M], contiguous.
        hidden: [H], the hidden state of all of them.
    """

    is_mask: Tensor
    hidden: Tensor

    def fill(self, hidden: Tensor) -> Tensor:
        """Return hidden states [B, M, H] from those of the first columns, [B, ≤ M, H].

        Columns that are neither given nor masked are padding.
        """
        missing = self.is_mask.shape[1] - hidden.shape[1]
        padded = F.pad(hidden, (0, 0, 0, missing))
        return torch.where(self.is_mask[..., None], self.hidden, padded)
