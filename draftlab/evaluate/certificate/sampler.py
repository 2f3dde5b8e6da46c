"""Rejection sampling by itself: the sampler and the verifier on logits of a known model.

The known model has the vocabularies, the dtype and the device of the real target and head, and its
next-token logits depend on the last token alone. They are scaled by the row's temperatures, so
that every row is tested where drafts are accepted and rejected often: a head that is always right
or always wrong would hide faults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from draftlab.engine.draft_sampler import DraftSampler
from draftlab.engine.drafter import HeadDrafter
from draftlab.engine.sampling import Request, sampling_metadata
from draftlab.evaluate.certificate.exact import MIN_MARGIN, build_tree
from draftlab.evaluate.certificate.result import Sampled
from draftlab.kernels.sampling.types import SamplingMetadata
from draftlab.kernels.verify import verify

COMMON = 4
"""Draft tokens that are likely; one token outside of the draft vocabulary is likely too."""
SPREAD, ERRORS = 1.5, (0.2, 1.2)
"""Standard deviations of the target's logits, and of the head's errors after the first and the last
likely token: after some tokens most drafts are accepted, after others most are rejected."""
TAIL = 0.05
"""Probability of all other tokens together; 0 with limits, whose borders must be clear."""
IMPOSSIBLE = -40.0
MAX_TABLES = 20


class KnownModel:
    """Decoding of the known model with a row's sampling.

    Args:
        drafter: the row's drafter, whose choice of tokens is used.
        vocab_size: the target's.
        dtype: of the target's logits.

    Attributes:
        tree: the exact joint of the tested tokens.
        drafted, accepted: counts of the drafts that were verified so far.
    """

    def __init__(
        self, drafter: HeadDrafter, vocab_size: int, dtype: torch.dtype, row: Sampled
    ) -> None:
        self.drafter, self.row = drafter, row
        self.drafted = self.accepted = 0
        self.device = drafter.draft_ids.device
        ids = drafter.draft_ids.cpu()
        spread = torch.linspace(0, len(ids) - 1, min(COMMON, len(ids))).long()
        drafted = torch.zeros(vocab_size, dtype=torch.bool)
        drafted[ids] = True
        common = torch.cat([ids[spread], (~drafted).nonzero()[:1, 0]])
        self.state = torch.full((vocab_size,), len(common), device=self.device)
        self.state[common.to(self.device)] = torch.arange(len(common), device=self.device)
        context = (int(common[0]),) * 2  # the first step drafts for position 2
        tail = 0.0 if row.top_k or row.top_p else TAIL
        for seed in range(MAX_TABLES):
            base = torch.full((len(common) + 1, vocab_size), -math.inf)
            noise = torch.Generator().manual_seed(seed)
            base[:, common] = torch.randn(len(base), len(common), generator=noise) * SPREAD
            errors = torch.linspace(*ERRORS, len(base))[:, None]
            draft = base + torch.randn(base.shape, generator=noise) * errors
            target = _with_tail(base, tail) * row.temperature
            draft = _with_tail(draft[:, ids], 2 * tail) * row.temperature
            self.target = target.to(self.device, dtype)
            self.draft = draft.to(self.device, drafter.dtype)
            self.tree = build_tree(self._logits_after, context, row.widths, row)
            if self.tree.margin >= MIN_MARGIN:
                break

    def _logits_after(self, sequences: Sequence[tuple[int, ...]]) -> Tensor:
        last = torch.tensor([sequence[-1] for sequence in sequences], device=self.device)
        return self.target[self.state[last]]

    @torch.inference_mode()
    def answers(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the tested tokens of each request, whose prompt is the tree's context."""
        context, levels = self.tree.context, len(self.row.widths)
        rows = sampling_metadata(requests, self.device)
        answers: list[list[int]] = [[] for _ in requests]
        active = torch.arange(len(requests), device=self.device)
        last = torch.full_like(active, context[-1])
        lengths = torch.full_like(active, len(context))
        while len(active):
            drafts, accepted, emitted = self._step(last, lengths, rows[active])
            for number, tokens, count, token in zip(
                active.tolist(), drafts.tolist(), accepted.tolist(), emitted.tolist(), strict=True
            ):
                answers[number] += [*tokens[:count], token]
            self.drafted += drafts.numel()
            self.accepted += int(accepted.sum())
            lengths = lengths + accepted + 1
            unfinished = lengths - len(context) < levels
            active, last, lengths = active[unfinished], emitted[unfinished], lengths[unfinished]
        return [answer[:levels] for answer in answers]

    def _step(
        self, last: Tensor, lengths: Tensor, rows: SamplingMetadata
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the drafts [B, K] behind `last` [B], how many are accepted, and what follows."""
        drafter, k = self.drafter, self.row.k
        logits = self.draft.new_empty(k, len(last), self.draft.shape[1])
        sampler = DraftSampler(drafter, lengths - 2, rows, logits)
        tokens = [last]
        for depth in range(k):
            logits[depth] = self.draft[self.state[tokens[-1]]]
            tokens.append(sampler.draw(depth, logits[depth]))
        proposal = sampler.proposal()
        result = verify(
            self.target[self.state[torch.stack(tokens, 1)]],
            proposal.tokens,
            torch.full_like(lengths, k),
            proposal.distribution,
            lengths,
            rows,
            expect=False,
            block=self.row.verification == "block",
        )
        return proposal.tokens, result.accepted, result.emitted


def _with_tail(logits: Tensor, mass: float) -> Tensor:
    """Give `mass` to the tokens [..., V] whose logits are −∞, in equal shares."""
    rare = logits.isinf()
    share = mass / (1 - mass) / rare.sum(-1, keepdim=True).clamp(min=1)
    log = logits.logsumexp(-1, keepdim=True) + share.log().clamp(min=IMPOSSIBLE)
    return logits.where(~rare, log)
