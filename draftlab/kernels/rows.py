"""What the rows of a batch ask for: sampling, noise keys, what their drafts were drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def divisor(temperature: Tensor) -> Tensor:
    """Temperatures to divide by: 1 for greedy rows, whose quotients are not used."""
    return temperature.where(temperature > 0, 1.0)


@dataclass(frozen=True)
class RowKeys:
    """Per row of a batch: sampling parameters and the keys of its noise, each [B].

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

    def __getitem__(self, index: Tensor) -> RowKeys:
        return RowKeys(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.seed[index],
            self.prompt[index],
        )


@dataclass(frozen=True)
class DraftDistribution:
    """What B rows' drafts were drawn from, as logits: q(w) = exp(logits / temperature − log_sum).

    Attributes:
        logits: [B, K, W] over the draft vocabulary, in the head's dtype; [R, K, W] with `rows`.
        log_sum: float32 [B, K], logsumexp of logits / temperature; [R, K] with `rows`.
        temperature: float32 [B], of the drafts; > 0 where `sampled`, not read elsewhere.
        sampled: bool [B]; False: the row's drafts are the argmax and q is one-hot.
        ids: int64 [W], ascending target ids of the draft vocabulary.
        index: int32 [V], the inverse of `ids`, −1 outside; made once a head by `draft_index`. The
            reference does without; the kernels make it anew in every call when it is missing.
        rows: int64 [B], which of R rows of `logits` and `log_sum` is whose; None: their own. It
            spares a copy of what is large.
    """

    logits: Tensor
    log_sum: Tensor
    temperature: Tensor
    sampled: Tensor
    ids: Tensor
    index: Tensor | None = None
    rows: Tensor | None = None

    def __getitem__(self, rows: Tensor | slice) -> DraftDistribution:
        own = self.rows is None
        return DraftDistribution(
            self.logits[rows] if own else self.logits,
            self.log_sum[rows] if own else self.log_sum,
            self.temperature[rows],
            self.sampled[rows],
            self.ids,
            self.index,
            None if own else self.rows[rows],
        )

    def probabilities(self) -> Tensor:
        """q, float32 [B, K, W]; of no meaning in rows that are not `sampled`."""
        logits, log_sum = self.logits, self.log_sum
        if self.rows is not None:
            logits, log_sum = logits[self.rows], log_sum[self.rows]
        temperature = divisor(self.temperature)[:, None, None]
        return (logits.float() / temperature - log_sum[..., None]).exp()


def draft_index(ids: Tensor, vocab: int) -> Tensor:
    """Where each target id sits in the draft vocabulary: int32 [vocab], −1 outside of `ids` [W]."""
    index = torch.full((vocab,), -1, dtype=torch.int32, device=ids.device)
    return index.scatter_(0, ids, torch.arange(len(ids), dtype=torch.int32, device=ids.device))
