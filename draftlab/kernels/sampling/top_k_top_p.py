"""Top-k and top-p (nucleus) sampling as masks on logits; tests in tests/kernels/test_limits.py."""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.kernels.sampling.types import SamplingMetadata, divisor


def uses_top_k_top_p(rows: SamplingMetadata, limited: bool | None) -> bool:
    """Return `limited` if given, else whether any row has top-k or top-p (the host then waits)."""
    return bool(_is_limited(rows).any()) if limited is None else limited


def apply_top_k_top_p(logits: Tensor, rows: SamplingMetadata) -> Tensor:
    """Mask logits outside top-k, then outside the smallest set whose mass is at least top-p.

    Args:
        logits: [B, M, V], bfloat16, float16 or float32.
        rows: parameters of the B rows.

    Returns:
        float32 [B, M, V], −inf where masked.
    """
    logits = logits.float()
    if not logits.is_cuda and bool((rows.top_p >= 1).all()):
        return _apply_top_k(logits, rows)
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    top_k = rows.top_k.where(rows.top_k > 0, logits.shape[-1])[:, None, None]
    values = values.masked_fill(rank >= top_k, float("-inf"))
    relative = values - values[..., :1]
    probabilities = (relative / divisor(rows.temperature)[:, None, None]).softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    # top_p = 1 is off; a running sum may round to 1 before the tail, hence 2.
    top_p = rows.top_p.where(rows.top_p < 1, 2.0)[:, None, None]
    values = values.masked_fill(mass_before >= top_p, float("-inf"))
    masked = torch.empty_like(logits).scatter_(-1, order, values)
    return masked.where(_is_limited(rows)[:, None, None], logits)


def _is_limited(rows: SamplingMetadata) -> Tensor:
    """Return which rows sample with top-k or top-p, bool [B]."""
    return (rows.temperature > 0) & ((rows.top_k > 0) | (rows.top_p < 1))


def _apply_top_k(logits: Tensor, rows: SamplingMetadata) -> Tensor:
    """Mask as `apply_top_k_top_p` where no row has top-p: no sort, but the host reads top_k."""
    vocab = logits.shape[-1]
    count = rows.top_k.clamp(max=vocab)[:, None, None]
    highest = logits.topk(max(1, int(count.max())), -1).values
    threshold = highest.gather(-1, (count - 1).clamp(min=0).expand(*logits.shape[:2], 1))
    above, equal = logits > threshold, logits == threshold
    # Among equal logits the lowest ids stay, as in a stable sort.
    num_equal = count - above.sum(-1, keepdim=True)
    stays = above | (equal & (equal.cumsum(-1) <= num_equal))
    stays |= ~_is_limited(rows)[:, None, None]
    return logits.masked_fill(~stays, float("-inf"))
