"""Helpers of the engine's tests: a recording target, a joint distribution test, ragged pairs."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftlab.engine.base_drafter import VerifiedFeatures
from draftlab.engine.drafter import HeadDrafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request, Sampling, sampling_metadata
from draftlab.engine.step import Verifier
from draftlab.evaluate.certificate.exact import g_test
from draftlab.kernels.sampling import target_probabilities
from draftlab.kernels.sampling.types import SamplingMetadata
from draftlab.kernels.verify import verify
from draftlab.target_model.model import Target

CPU = torch.device("cpu")


class RecordingTarget:
    """A target that records the highest position of its passes, and their tokens and padding."""

    def __init__(self, target: Target) -> None:
        self.target, self.highest, self.num_tokens, self.padding = target, -1, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def states(self, token_ids, boundaries=(), *, positions, cache):
        self.highest = max(self.highest, int(positions.max()))
        self.num_tokens += int((positions >= 0).sum())
        self.padding += int((positions < 0).sum())
        assert bool((cache.slot_mapping[positions < 0] == -1).all())
        return self.target.states(token_ids, boundaries, positions=positions, cache=cache)


JOINT_PROMPT, JOINT_TOKENS, JOINT_VOCAB = (3, 1), 4, 5
JOINT_SAMPLING = Sampling(temperature=1.3, top_k=3, seed=1)


def joint_p_value(
    target: Target,
    drafter: HeadDrafter | None,
    verifier: Verifier = verify,
    rows: int = 6000,
) -> float:
    """Return the G-test's p value of the engine's answers against the exact distribution.

    Args:
        target: a target with a vocabulary of `JOINT_VOCAB`.
        rows: number of answers; a coarse fault shows in few.
    """

    def request(name: str) -> Request:
        return Request(name, JOINT_PROMPT, JOINT_TOKENS, JOINT_SAMPLING)

    engine = Engine(target, drafter, batch=1500, max_length=16, verifier=verifier)
    counts = Counter(
        generation.token_ids
        for generation in engine.generate([request(str(i)) for i in range(rows)])
    )
    # The probability of every answer, from one forward pass over all of them.
    answers = list(itertools.product(range(JOINT_VOCAB), repeat=JOINT_TOKENS))
    ids = torch.tensor([[*JOINT_PROMPT, *answer] for answer in answers])
    logits = target.logits(target.states(ids).last[:, len(JOINT_PROMPT) - 1 : -1])
    metadata = sampling_metadata([request("")] * len(answers), ids.device)
    p = target_probabilities(logits, metadata).double()
    p = p.gather(-1, ids[:, len(JOINT_PROMPT) :, None])[..., 0].prod(-1)
    observed = np.array([float(counts[answer]) for answer in answers])
    result = g_test(observed, (p / p.sum()).numpy())
    assert result.freedom >= 30 or result.p_value == 0
    return result.p_value


def sampled_metadata(rows: int) -> SamplingMetadata:
    """Return the sampling metadata of rows at temperature 1."""
    hot = Sampling(temperature=1.0)
    return sampling_metadata([Request(str(i), (1,), 1, hot) for i in range(rows)], CPU)


class RaggedPairs:
    """Rows of random pairs (x_{p+1}, g_p), handed out in chunks of ragged lengths."""

    def __init__(self, totals: list[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = [torch.randint(0, 281, (n,), generator=generator) for n in totals]
        self.features = [torch.randn(n, 96, generator=generator) for n in totals]
        self.done = [0] * len(totals)

    def next(self, counts: list[int], table: Tensor) -> VerifiedFeatures:
        """Return the next `counts` pairs of each row."""
        rows, width = len(counts), max(counts)
        tokens = torch.zeros(rows, width, dtype=torch.int64)
        features = torch.zeros(rows, width, 96)
        positions = torch.full((rows, width), -1)
        for row, n in enumerate(counts):
            columns = slice(self.done[row], self.done[row] + n)
            tokens[row, :n] = self.tokens[row][columns]
            features[row, :n] = self.features[row][columns]
            positions[row, :n] = torch.arange(columns.start, columns.stop)
            self.done[row] += n
        real = torch.tensor(counts).clamp(min=1)
        return VerifiedFeatures(tokens, features, positions, real, table, sampled_metadata(rows))
