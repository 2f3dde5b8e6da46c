"""Sampling one token a row: from the target's distribution p, and drafts from q.

    p = softmax(top_p(top_k(logits)) / temperature),  one-hot at the argmax for temperature 0
    q = softmax(draft logits / temperature)

A token is drawn by an exponential race over keyed noise (`noise/`), so the same key draws the
same token on every device. Tests: tests/kernels/test_limits.py (p by its definition),
tests/kernels/test_verify_triton.py (the kernels of `sampling/triton.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.kernels.dispatch import triton_operator
from draftlab.kernels.noise import Purpose, exponential_race, keyed_exponential
from draftlab.kernels.sampling.types import SamplingMetadata, divisor

SMALLEST_DOUBT = 2.0**-23
"""Least (1 − m) / m of a draft's largest probability m that a confidence states."""


def target_probabilities(
    logits: Tensor, rows: SamplingMetadata, *, limited: bool | None = None
) -> Tensor:
    """Return the distribution each row samples from: temperature, then top-k, then top-p.

    Args:
        logits: [B, M, V], bfloat16, float16 or float32.
        rows: parameters of the B rows.
        limited: whether any row has top-k or top-p; None looks.

    Returns:
        float32 [B, M, V]; one-hot at the argmax (lowest id of ties) for temperature 0.
    """
    greedy = rows.temperature == 0
    limited = uses_top_k_top_p(rows, limited)
    logits = apply_top_k_top_p(logits, rows) if limited else logits.float()
    # The maximum is subtracted first: quotients near 0 stay precise at any low temperature.
    relative = logits - logits.amax(-1, keepdim=True)
    probabilities = (relative / divisor(rows.temperature)[:, None, None]).softmax(-1)
    if bool(greedy.any()):
        one_hot = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1)[..., None], 1.0)
        probabilities = probabilities.where(~greedy[:, None, None], one_hot)
    return probabilities


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


@triton_operator("sampling.triton")
def sample_token(
    logits: Tensor, positions: Tensor, rows: SamplingMetadata, *, limited: bool | None = None
) -> Tensor:
    """Sample one token a row from p: int64 [B] from logits [B, V] for `positions` int64 [B]."""
    tokens = logits.argmax(-1)
    sampled = (rows.temperature > 0).nonzero().squeeze(1)
    if len(sampled):
        rows = rows[sampled]
        weights = target_probabilities(logits[sampled, None], rows, limited=limited)[:, 0]
        noise = emission_noise(rows, positions[sampled], logits.shape[-1])
        tokens[sampled] = exponential_race(weights, noise)
    return tokens


def emission_noise(rows: SamplingMetadata, positions: Tensor, num_tokens: int) -> Tensor:
    """Return the noise of the tokens emitted at `positions` int64 [B], float32 [B, num_tokens].

    It is 1 in greedy rows, whose p is one-hot, so that any noise draws the same token.
    """
    sampled = (rows.temperature > 0).nonzero().squeeze(1)
    noise = torch.ones(len(positions), num_tokens, device=positions.device)
    seeds, prompts, at = (x[sampled] for x in (rows.seed, rows.prompt, positions))
    noise[sampled] = keyed_exponential(seeds, prompts, at, Purpose.EMIT, num_tokens)
    return noise


@triton_operator("sampling.triton")
def sample_draft(
    logits: Tensor,
    positions: Tensor,
    rows: SamplingMetadata,
    *,
    ids: Tensor | None = None,
    offset: int = 0,
    out: tuple[Tensor, Tensor] | None = None,
    confidence: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one draft a row from q = softmax(logits / temperature), at temperature 0 its argmax.

    Args:
        logits: [B, W] over the draft vocabulary, bfloat16, float16 or float32.
        positions: int64 [B]; the drafts are for positions + offset.
        rows: noise keys and temperatures; other limits of the target's distribution are not read.
        ids: int64 [W], token ids of the draft vocabulary; None returns indices.
        offset: added to `positions`.
        out: two contiguous tensors that the results are written to.
        confidence: contiguous float32 [B] that the logit of q's largest probability is written to,
            log m − log(1 − m); at most 16, where 1 − m is below float32's resolution. It does not
            depend on the token that is drawn.

    Returns:
        Token ids, int64 [B]; logsumexp(logits / temperature), float32 [B] (of logits where the
        temperature is 0).
    """
    scaled = logits.float() / divisor(rows.temperature)[:, None]
    log_sum, index = scaled.logsumexp(-1), logits.argmax(-1)
    if confidence is not None:
        others = (scaled - scaled.amax(-1, keepdim=True)).exp().sum(-1) - 1
        confidence.copy_(-others.clamp(min=SMALLEST_DOUBT).log())
    sampled = rows.temperature > 0
    if bool(sampled.any()):
        at = positions + offset
        noise = keyed_exponential(rows.seed, rows.prompt, at, Purpose.DRAFT, logits.shape[-1])
        drawn = exponential_race((scaled - scaled.amax(-1, keepdim=True)).exp(), noise)
        index = drawn.where(sampled, index)
    tokens = index if ids is None else ids[index]
    if out is None:
        return tokens, log_sum
    return out[0].copy_(tokens), out[1].copy_(log_sum)


@triton_operator("sampling.triton")
def argmax_draft(logits: Tensor, *, ids: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return the argmax of each row as a draft: `sample_draft` for rows that do not sample.

    Args:
        logits, ids: as in `sample_draft`.
        out: contiguous int64 [B] that the tokens are written to.
    """
    index = logits.argmax(-1)
    tokens = index if ids is None else ids[index]
    return tokens if out is None else out.copy_(tokens)
