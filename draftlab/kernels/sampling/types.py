"""Per-row inputs and results of sampling and verification, shared by references and kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingMetadata:
    """Sampling parameters and noise keys of a batch's rows, each [B].

    Attributes:
        temperature: float32; 0 means greedy.
        top_k: int64; 0 means off.
        top_p: float32; 1 means off.
        seed: int64.
        prompt: int64, from `prompt_key`.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    prompt: Tensor

    def __getitem__(self, index: Tensor | slice) -> SamplingMetadata:
        return SamplingMetadata(*(values[index] for values in vars(self).values()))


@dataclass(frozen=True)
class DraftDistribution:
    """The distribution q of B rows' drafts: q(w) = exp(logits / temperature − log_sum).

    At temperature 0 a row's drafts are the argmax, and q is one-hot.

    Attributes:
        logits: [B, K, W] over the draft vocabulary, in the head's dtype; [R, K, W] with `rows`.
        log_sum: float32 [B, K], logsumexp of logits / temperature; [R, K] with `rows`.
        temperature: float32 [B], of the rows.
        ids: int64 [W], ascending target ids of the draft vocabulary.
        index: int32 [V], the inverse of `ids`, −1 outside; computed once a head by `draft_index`.
            The reference does not need it; the kernels compute it in every call if it is missing.
        rows: int64 [B], the row of `logits` and `log_sum` (R rows) that belongs to each row of the
            batch; None: the same row. It saves a copy of the logits.
    """

    logits: Tensor
    log_sum: Tensor
    temperature: Tensor
    ids: Tensor
    index: Tensor | None = None
    rows: Tensor | None = None

    def __getitem__(self, rows: Tensor | slice) -> DraftDistribution:
        some = replace(self, temperature=self.temperature[rows])
        if self.rows is None:
            return replace(some, logits=self.logits[rows], log_sum=self.log_sum[rows])
        return replace(some, rows=self.rows[rows])

    def probabilities(self) -> Tensor:
        """Return q, float32 [B, K, W]; undefined in rows of temperature 0."""
        logits, log_sum = self.logits, self.log_sum
        if self.rows is not None:
            logits, log_sum = logits[self.rows], log_sum[self.rows]
        temperature = divisor(self.temperature)[:, None, None]
        return (logits.float() / temperature - log_sum[..., None]).exp()


@dataclass(frozen=True)
class VerifyResult:
    """The outcome of verification, per row.

    Attributes:
        accepted: int64 [B], number of accepted drafts.
        emitted: int64 [B], the token after them: the argmax, the recovered or the bonus token.
        probability: float32 [B, K], expected acceptance of each draft given that it was reached:
            Σ min(p, q) for sampled drafts, p(draft) for others; 0 where nothing was drafted.
    """

    accepted: Tensor
    emitted: Tensor
    probability: Tensor


def divisor(temperature: Tensor) -> Tensor:
    """Return temperatures to divide by: 1 for greedy rows, whose quotients are not used."""
    return temperature.where(temperature > 0, 1.0)


def draft_index(ids: Tensor, vocab: int) -> Tensor:
    """Return each target id's index in the draft vocabulary `ids` [W], else −1: int32 [vocab]."""
    index = torch.full((vocab,), -1, dtype=torch.int32, device=ids.device)
    return index.scatter_(0, ids, torch.arange(len(ids), dtype=torch.int32, device=ids.device))
