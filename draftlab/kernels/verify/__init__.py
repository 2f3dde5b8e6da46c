"""Speculative decoding's verification by rejection sampling (docs/methods.md §5).

Let p be the target's distribution at a position and q the one that its draft x was drawn from.

    accept x                with probability min(1, p(x) / q(x))
    after a rejection       emit a sample of the residual max(p − q, 0), normalized
    after all K drafts      emit a bonus token sampled from p

Every emitted token is then distributed as p, whatever q is: P(x) = min(p(x), q(x)) from acceptance
plus max(p(x) − q(x), 0) from the residual (Leviathan et al., arXiv:2211.17192, appendix A.1; Chen
et al., arXiv:2302.01318). Block verification judges all drafts of a step together, and accepts at
least as many of them in expectation (Sun et al., arXiv:2403.10444). This file is the eager
reference; `verify/triton.py` emits the same tokens from the same noise without a table of
probabilities. Tests: tests/kernels/test_lossless.py (the joint of the emitted tokens, and broken
verifiers), tests/kernels/test_verify_triton.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.kernels.dispatch import triton_operator
from draftlab.kernels.noise import (
    BLOCK_STRIDE,
    Purpose,
    exponential_race,
    keyed_uniform,
)
from draftlab.kernels.sampling import emission_noise, sample_token, target_probabilities
from draftlab.kernels.sampling.types import DraftDistribution, SamplingMetadata, VerifyResult


@triton_operator("verify.launch")
def verify(
    logits: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    distribution: DraftDistribution | None,
    positions: Tensor,
    rows: SamplingMetadata,
    *,
    limited: bool | None = None,
    expect: bool = True,
    block: bool = False,
) -> VerifyResult:
    """Accept the longest valid prefix of each row's drafts and emit one more token.

    Args:
        logits: [B, K + 1, V], bfloat16, float16 or float32; entry i is the target's prediction for
            draft i.
        drafts: int64 [B, K] target ids.
        num_drafts: int64 [B], how many of a row's K drafts are real.
        distribution: q of sampled drafts; None when every draft is an argmax, whose q is one-hot.
        positions: int64 [B], position that draft 0 would take.
        rows: sampling parameters and noise keys. In greedy rows p is one-hot.
        limited: whether any row has top-k or top-p; None looks, which waits for a device.
        expect: False saves Σ min(p, q) and leaves `probability` 0 where it would stand,
            except with block verification, which needs such sums itself.
        block: judge the drafts of rows that sample them by block verification. Their drafts must
            have been drawn with noise of their own for every step (`engine/draft_sampler.py`).
            Rows of argmax drafts are the same in both: with a one-hot q the accepted length has
            one distribution, and the residual is p without the draft.
    """
    if not bool((rows.temperature > 0).any()):
        return _verify_greedy(logits, drafts, num_drafts)
    if logits.shape[1] == 1:
        emitted = sample_token.reference(logits[:, 0], positions, rows, limited=limited)
        return VerifyResult(
            torch.zeros_like(num_drafts), emitted, torch.empty_like(drafts, dtype=torch.float32)
        )
    p = target_probabilities(logits, rows, limited=limited)
    num_rows, width, vocab = p.shape
    k = width - 1
    depth = torch.arange(k, device=p.device)
    is_draft = depth < num_drafts[:, None]
    p_draft = p[:, :k].gather(-1, drafts[..., None])[..., 0]
    q, q_draft, probability = None, torch.ones_like(p_draft), p_draft
    if distribution is not None and k:
        sampled = (rows.temperature > 0)[:, None]
        q = p.new_zeros(num_rows, k, vocab)
        q[..., distribution.ids] = distribution.probabilities()
        q_draft = q.gather(-1, drafts[..., None])[..., 0].where(sampled, 1.0)
        overlap = torch.minimum(p[:, :k], q).sum(-1) if expect else torch.zeros_like(p_draft)
        probability = overlap.where(sampled, p_draft)

    # Accept draft x iff u · q(x) < p(x) with u uniform in [0, 1): where q(x) ≤ p(x), always.
    u = keyed_uniform(
        rows.seed[:, None], rows.prompt[:, None], positions[:, None] + depth, Purpose.ACCEPT
    )
    is_accepted = (u * q_draft < p_draft) & is_draft
    accepted = is_accepted.long().cumprod(-1).sum(-1)
    scale = torch.ones_like(p[:, 0, :1])
    if block and q is not None:
        in_block, probability_in_block, reach = _accept_block(
            p, q, p_draft, q_draft, is_draft, positions, rows
        )
        accepted = in_block.where(sampled[:, 0], accepted)
        probability = probability_in_block.where(sampled, probability)
        scale = reach.gather(1, accepted[:, None])

    # After K acceptances sample the bonus token from p; on rejection, from the residual.
    p_next = p.gather(1, accepted[:, None, None].expand(-1, 1, vocab))[:, 0]
    weights = p_next
    if k:
        # The residual is max(p − q, 0); for the one-hot q of an argmax draft, p without the draft.
        rejected = accepted.clamp(max=k - 1)
        residual = p_next.scatter(-1, drafts.gather(1, rejected[:, None]), 0.0)
        if q is not None:
            q_next = q.gather(1, rejected[:, None, None].expand(-1, 1, vocab))[:, 0]
            residual = (scale * p_next - q_next).clamp(min=0).where(sampled, residual)
        # Where p = q up to rounding the residual is empty; p itself is then exact.
        use_residual = (accepted < num_drafts) & (residual.sum(-1) > 0)
        weights = residual.where(use_residual[:, None], p_next)
    noise = emission_noise(rows, positions + accepted, vocab)
    return VerifyResult(accepted, exponential_race(weights, noise), probability * is_draft)


def _accept_block(
    p: Tensor,
    q: Tensor,
    p_draft: Tensor,
    q_draft: Tensor,
    is_draft: Tensor,
    positions: Tensor,
    rows: SamplingMetadata,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept a prefix of each row's drafts by block verification.

    With r_0 = 1 and r_i = min(r_{i−1} · p(x_i) / q(x_i), 1), a prefix of i drafts is accepted with
    probability r_i. With O_i = Σ min(r_i · p, q) at the position after it, and 0 after the last
    draft, the longest i with u_i · (1 − O_i) < r_i − O_i is taken, or 0.

    Returns:
        The number accepted [B]; the probability O_i / r_i that a draft is accepted where it is
        reached [B, K]; r_0 … r_K [B, K + 1].
    """
    reach = [torch.ones_like(p_draft[:, 0])]
    for depth in range(p_draft.shape[1]):
        reach.append((reach[-1] * p_draft[:, depth] / q_draft[:, depth]).clamp(max=1))
    reach = torch.stack(reach, 1)
    overlap = torch.minimum(reach[:, :-1, None] * p[:, :-1], q).sum(-1).where(is_draft, 0.0)
    depth = torch.arange(p_draft.shape[1], device=p.device)
    starts = positions[:, None] * BLOCK_STRIDE
    u = keyed_uniform(rows.seed[:, None], rows.prompt[:, None], starts + depth, Purpose.ACCEPT)
    after = torch.cat([overlap[:, 1:], torch.zeros_like(overlap[:, :1])], 1).double()
    # Where r_i is 1 a longer prefix or this one is certain, also if O_i is 1 up to rounding.
    passes = (u * (1 - after) < reach[:, 1:] - after) | (reach[:, 1:] >= 1)
    accepted = ((passes & is_draft) * (depth + 1)).amax(-1)
    return accepted, overlap / reach[:, :-1].clamp(min=torch.finfo(p.dtype).tiny), reach


def _verify_greedy(logits: Tensor, drafts: Tensor, num_drafts: Tensor) -> VerifyResult:
    """Verify greedy rows only: a draft is accepted iff it is the target's argmax."""
    best = logits.argmax(-1)
    depth = torch.arange(drafts.shape[1], device=drafts.device)
    hits = (best[:, :-1] == drafts) & (depth < num_drafts[:, None])
    accepted = hits.long().cumprod(-1).sum(-1)
    return VerifyResult(accepted, best.gather(1, accepted[:, None])[:, 0], hits.float())
