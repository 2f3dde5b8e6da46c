"""Accepting drafts without changing the target's distribution (methods §5).

This file is the eager reference, for a CPU. CUDA tensors go to `verify_triton.py` and
`sampling_triton.py`, which decide alike, with the same noise, and write no table of probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.kernels.noise import Purpose, first_argmax, keyed_exponential, keyed_uniform, race
from draftlab.kernels.rows import DraftDistribution, RowKeys, divisor


@dataclass(frozen=True)
class Verdict:
    """What a verify step decided, per row.

    Attributes:
        accepted: int64 [B], drafts accepted.
        emitted: int64 [B], the token after them (argmax, recovered or bonus).
        probability: float32 [B, K], expected acceptance of each draft given that it was reached:
            Σ min(p, q) for sampled drafts, p(draft) for others; 0 where nothing was drafted.
    """

    accepted: Tensor
    emitted: Tensor
    probability: Tensor


def target_probabilities(logits: Tensor, rows: RowKeys, *, limited: bool | None = None) -> Tensor:
    """The distribution each row samples from: temperature, then top-k, then top-p.

    Args:
        logits: [B, M, V], bfloat16, float16 or float32.
        rows: parameters of the B rows.
        limited: whether any row has top-k or top-p; None looks.

    Returns:
        float32 [B, M, V]; one-hot at the argmax (lowest id of ties) for temperature 0.
    """
    greedy = rows.temperature == 0
    logits = limit_logits(logits, rows) if has_limits(rows, limited) else logits.float()
    # Less the maximum first: quotients near 0 keep their precision however low the temperature.
    relative = logits - logits.amax(-1, keepdim=True)
    probabilities = (relative / divisor(rows.temperature)[:, None, None]).softmax(-1)
    if bool(greedy.any()):
        hot = torch.zeros_like(logits).scatter_(-1, first_argmax(logits)[..., None], 1.0)
        probabilities = probabilities.where(~greedy[:, None, None], hot)
    return probabilities


def has_limits(rows: RowKeys, limited: bool | None) -> bool:
    """`limited` if given; else whether any row has top-k or top-p, which waits for a device."""
    return bool(_bounded(rows).any()) if limited is None else limited


def _bounded(rows: RowKeys) -> Tensor:
    """Which rows top-k or top-p bounds, bool [B]."""
    return (rows.temperature > 0) & ((rows.top_k > 0) | (rows.top_p < 1))


def limit_logits(logits: Tensor, rows: RowKeys) -> Tensor:
    """float32 logits [B, M, V], −inf outside of top-k, then of the least set with mass ≥ top-p."""
    logits = logits.float()
    if not logits.is_cuda and bool((rows.top_p >= 1).all()):
        return _limit_top_k(logits, rows)
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    top_k = rows.top_k.where(rows.top_k > 0, logits.shape[-1])[:, None, None]
    values = values.masked_fill(rank >= top_k, float("-inf"))
    relative = values - values[..., :1]
    probabilities = (relative / divisor(rows.temperature)[:, None, None]).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # Off is 1, and a running sum may round to 1 before the tail has been seen.
    top_p = rows.top_p.where(rows.top_p < 1, 2.0)[:, None, None]
    values = values.masked_fill(before >= top_p, float("-inf"))
    kept = torch.empty_like(logits).scatter_(-1, order, values)
    return kept.where(_bounded(rows)[:, None, None], logits)


def _limit_top_k(logits: Tensor, rows: RowKeys) -> Tensor:
    """`limit_logits` where nothing has top-p: without sorting, but the host looks at the counts."""
    vocab = logits.shape[-1]
    count = rows.top_k.clamp(max=vocab)[:, None, None]
    highest = logits.topk(max(1, int(count.max())), -1).values
    last = highest.gather(-1, (count - 1).clamp(min=0).expand(*logits.shape[:2], 1))
    above, equal = logits > last, logits == last
    # Of equals the first by id, as a stable sort has them.
    room = count - above.sum(-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(-1) <= room))
    kept |= ~_bounded(rows)[:, None, None]
    return logits.masked_fill(~kept, float("-inf"))


def sample_first(
    logits: Tensor, positions: Tensor, rows: RowKeys, *, limited: bool | None = None
) -> Tensor:
    """Samples one token a row: int64 [B] from logits [B, V] for `positions` [B]."""
    if logits.is_cuda:
        from draftlab.kernels import sampling_triton

        return sampling_triton.sample_first(logits, positions, rows, limited=limited)
    weights = target_probabilities(logits[:, None], rows, limited=limited)[:, 0]
    noise = keyed_exponential(rows.seed, rows.prompt, positions, Purpose.EMIT, logits.shape[-1])
    return race(weights, noise)


def sample_draft(
    logits: Tensor,
    positions: Tensor,
    rows: RowKeys,
    temperature: Tensor,
    sampled: Tensor,
    *,
    ids: Tensor | None = None,
    ahead: int = 0,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Draws one draft a row from q = softmax(logits / temperature), or takes the argmax.

    Args:
        logits: [B, W] over the draft vocabulary, bfloat16, float16 or float32.
        positions: int64 [B]; the drafts would take the positions `ahead` further on.
        rows: noise keys; their sampling parameters are the target's and not looked at.
        temperature: float32 [B], of the drafts; 0 takes the argmax (ties: lowest index).
        sampled: bool [B]; False takes the argmax too.
        ids: int64 [W], what the entries of the vocabulary are called; None: by their index.
        ahead: see `positions`.
        out: two contiguous tensors that the results are written to.

    Returns:
        Tokens by `ids`, int64 [B]; logsumexp(logits / temperature), float32 [B] (of logits where
        the temperature is 0).
    """
    if logits.is_cuda:
        from draftlab.kernels import sampling_triton

        return sampling_triton.sample_draft(
            logits, positions, rows, temperature, sampled, ids=ids, ahead=ahead, out=out
        )
    scaled = logits.float() / divisor(temperature)[:, None]
    log_sum, index = scaled.logsumexp(-1), first_argmax(logits)
    sampled = sampled & (temperature > 0)
    if bool(sampled.any()):
        at = positions + ahead
        noise = keyed_exponential(rows.seed, rows.prompt, at, Purpose.DRAFT, logits.shape[-1])
        drawn = race((scaled - scaled.amax(-1, keepdim=True)).exp(), noise)
        index = drawn.where(sampled, index)
    tokens = index if ids is None else ids[index]
    if out is None:
        return tokens, log_sum
    return out[0].copy_(tokens), out[1].copy_(log_sum)


def argmax_draft(logits: Tensor, *, ids: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Takes the argmax of each row (ties: lowest index): what `sample_draft` does without sampling.

    Args:
        logits, ids: as `sample_draft` has them.
        out: contiguous int64 [B]; where the tokens go.
    """
    if logits.is_cuda:
        from draftlab.kernels import sampling_triton

        return sampling_triton.argmax_draft(logits, ids=ids, out=out)
    index = first_argmax(logits)
    tokens = index if ids is None else ids[index]
    return tokens if out is None else out.copy_(tokens)


def verify(
    logits: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    distribution: DraftDistribution | None,
    positions: Tensor,
    rows: RowKeys,
    *,
    limited: bool | None = None,
    expect: bool = True,
) -> Verdict:
    """Accepts the longest valid prefix of each row's drafts and emits one more token.

    A draft x is accepted iff u · q(x) < p(x), u ∈ [0, 1), where q(x) = 1 for argmax drafts and for
    greedy rows (p is one-hot). After a rejection the token is drawn from max(p − q, 0),
    respectively from p without x; after none, from p.

    Args:
        logits: [B, K + 1, V], bfloat16, float16 or float32; entry i is the target's prediction for
            draft i.
        drafts: int64 [B, K] target ids.
        num_drafts: int64 [B], how many of a row's K drafts are real.
        distribution: what sampled drafts were drawn from; None when every draft is an argmax.
        positions: int64 [B], position that draft 0 would take.
        rows: sampling parameters and noise keys.
        limited: whether any row has top-k or top-p; None looks, which waits for a device.
        expect: False saves Σ min(p, q) and leaves `probability` 0 where it would stand.
    """
    if logits.is_cuda:
        from draftlab.kernels import verify_launch

        return verify_launch.verify(
            logits,
            drafts,
            num_drafts,
            distribution,
            positions,
            rows,
            limited=limited,
            expect=expect,
        )
    if not bool((rows.temperature > 0).any()):
        return _verify_greedy(logits, drafts, num_drafts)
    p = target_probabilities(logits, rows, limited=limited)
    num_rows, width, vocab = p.shape
    k = width - 1
    depth = torch.arange(k, device=p.device)
    real = depth < num_drafts[:, None]
    p_draft = p[:, :k].gather(-1, drafts[..., None])[..., 0]
    q_full = None
    q_draft = torch.ones_like(p_draft)
    probability = p_draft
    if distribution is not None and k:
        drawn = (distribution.sampled & (rows.temperature > 0))[:, None]
        q_full = p.new_zeros(num_rows, k, vocab)
        q_full[..., distribution.ids] = distribution.probabilities()
        q_draft = q_full.gather(-1, drafts[..., None])[..., 0].where(drawn, 1.0)
        overlap = torch.minimum(p[:, :k], q_full).sum(-1) if expect else torch.zeros_like(p_draft)
        probability = overlap.where(drawn, p_draft)
    u = keyed_uniform(
        rows.seed[:, None], rows.prompt[:, None], positions[:, None] + depth, Purpose.ACCEPT
    )
    passed = (u * q_draft < p_draft) & real
    accepted = passed.long().cumprod(-1).sum(-1)

    weights = p.gather(1, accepted[:, None, None].expand(-1, 1, vocab))[:, 0]
    rejected = accepted < num_drafts
    if k:
        at = accepted.clamp(max=k - 1)
        without = weights.scatter(-1, drafts.gather(1, at[:, None]), 0.0)
        if q_full is not None:
            q_at = q_full.gather(1, at[:, None, None].expand(-1, 1, vocab))[:, 0]
            with_q = (weights - q_at).clamp(min=0)
            without = with_q.where(drawn, without)
        # Where p = q up to rounding nothing is left to recover from; p itself is then exact.
        usable = rejected & (without.sum(-1) > 0)
        weights = without.where(usable[:, None], weights)
    noise = keyed_exponential(rows.seed, rows.prompt, positions + accepted, Purpose.EMIT, vocab)
    return Verdict(accepted, race(weights, noise), probability * real)


def _verify_greedy(logits: Tensor, drafts: Tensor, num_drafts: Tensor) -> Verdict:
    """`verify` where every row is greedy: p is one-hot, so nothing is left to chance."""
    best = first_argmax(logits)
    depth = torch.arange(drafts.shape[1], device=drafts.device)
    hits = (best[:, :-1] == drafts) & (depth < num_drafts[:, None])
    accepted = hits.long().cumprod(-1).sum(-1)
    return Verdict(accepted, best.gather(1, accepted[:, None])[:, 0], hits.float())
