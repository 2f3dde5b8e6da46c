"""Accepting drafts without changing the target's distribution (METHODS §5): the eager reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.kernels.noise import Purpose, first_argmax, keyed_exponential, keyed_uniform, race


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
class Verdict:
    """What a verify step decided, per row.

    Attributes:
        accepted: int64 [B], drafts accepted.
        emitted: int64 [B], the token after them (argmax, recovered or bonus).
        probability: float32 [B, K], expected acceptance of each draft given that it was reached:
            Σ min(p, q) with draft probabilities, p(draft) without; 0 where nothing was drafted.
    """

    accepted: Tensor
    emitted: Tensor
    probability: Tensor


def target_probabilities(logits: Tensor, rows: RowKeys) -> Tensor:
    """The distribution each row samples from: temperature, then top-k, then top-p.

    Args:
        logits: float32 [B, M, V].
        rows: parameters of the B rows.

    Returns:
        float32 [B, M, V]; one-hot at the argmax (lowest id of ties) for temperature 0.
    """
    greedy = rows.temperature == 0
    scaled = logits / rows.temperature.where(~greedy, 1.0)[:, None, None]
    limited = (~greedy) & ((rows.top_k > 0) | (rows.top_p < 1))
    if bool(limited.any()):
        scaled = scaled.where(~limited[:, None, None], _limit(scaled, rows))
    probabilities = scaled.softmax(-1)
    if bool(greedy.any()):
        hot = torch.zeros_like(logits).scatter_(-1, first_argmax(logits)[..., None], 1.0)
        probabilities = probabilities.where(~greedy[:, None, None], hot)
    return probabilities


def _limit(logits: Tensor, rows: RowKeys) -> Tensor:
    """−inf outside top-k, then outside the smallest set whose mass reaches top-p."""
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    top_k = rows.top_k.where(rows.top_k > 0, logits.shape[-1])[:, None, None]
    values = values.masked_fill(rank >= top_k, float("-inf"))
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # Off is 1, and a running sum may round to 1 before the tail has been seen.
    top_p = rows.top_p.where(rows.top_p < 1, 2.0)[:, None, None]
    values = values.masked_fill(before >= top_p, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, values)


def sample_first(logits: Tensor, positions: Tensor, rows: RowKeys) -> Tensor:
    """Samples one token a row: int64 [B] from logits [B, V] for `positions` [B]."""
    weights = target_probabilities(logits[:, None], rows)[:, 0]
    noise = keyed_exponential(rows.seed, rows.prompt, positions, Purpose.EMIT, logits.shape[-1])
    return race(weights, noise)


def verify(
    logits: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    draft_probs: Tensor | None,
    draft_ids: Tensor | None,
    positions: Tensor,
    rows: RowKeys,
) -> Verdict:
    """Accepts the longest valid prefix of each row's drafts and emits one more token.

    A draft x is accepted iff u · q(x) < p(x), u ∈ [0, 1), where q(x) = 1 without draft
    probabilities (then the draft must be argmax q) and for greedy rows (p is one-hot). After a
    rejection the token is drawn from max(p − q, 0), respectively from p without x; after none, from
    p.

    Args:
        logits: float32 [B, K + 1, V]; entry i is the target's prediction for draft i.
        drafts: int64 [B, K] target ids.
        num_drafts: int64 [B], how many of a row's K drafts are real.
        draft_probs: float32 [B, K, D], what sampled drafts were drawn from; None without.
        draft_ids: int64 [D], target ids of q's entries.
        positions: int64 [B], position that draft 0 would take.
        rows: sampling parameters and noise keys.
    """
    p = target_probabilities(logits, rows)
    num_rows, width, vocab = p.shape
    k = width - 1
    depth = torch.arange(k, device=p.device)
    real = depth < num_drafts[:, None]
    p_draft = p[:, :k].gather(-1, drafts[..., None])[..., 0]
    q_full = None
    q_draft = torch.ones_like(p_draft)
    probability = p_draft
    if draft_probs is not None:
        sampled = (rows.temperature > 0)[:, None]
        q_full = p.new_zeros(num_rows, k, vocab)
        q_full[..., draft_ids] = draft_probs
        q_draft = q_full.gather(-1, drafts[..., None])[..., 0].where(sampled, 1.0)
        probability = torch.minimum(p[:, :k], q_full).sum(-1).where(sampled, p_draft)
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
            without = with_q.where((rows.temperature > 0)[:, None], without)
        # Where p = q up to rounding nothing is left to recover from; p itself is then exact.
        usable = rejected & (without.sum(-1) > 0)
        weights = without.where(usable[:, None], weights)
    noise = keyed_exponential(rows.seed, rows.prompt, positions + accepted, Purpose.EMIT, vocab)
    return Verdict(accepted, race(weights, noise), probability * real)
