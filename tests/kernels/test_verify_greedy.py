"""Verifying where every row is greedy: a shorter way to the same verdict."""

from __future__ import annotations

from dataclasses import replace

import torch

from draftlab.kernels.sampling_types import SamplingMetadata
from draftlab.kernels.verify import verify


def test_greedy_rows_are_verified_alike_alone_and_beside_a_sampled_one() -> None:
    """One sampled row leads all of them along the general way."""
    generator = torch.Generator().manual_seed(0)
    rows, k, vocab = 60, 4, 11
    logits = torch.randn(rows, k + 1, vocab, generator=generator).round(decimals=1)  # with ties
    drafts = logits[:, :k].argmax(-1)
    wrong = torch.rand(rows, k, generator=generator) < 0.3
    drafts = torch.where(wrong, (drafts + 1) % vocab, drafts)
    num_drafts = torch.randint(0, k + 1, (rows,), generator=generator)
    ints = torch.zeros(rows, dtype=torch.int64)
    keys = SamplingMetadata(torch.zeros(rows), ints, torch.ones(rows), ints, torch.arange(rows))
    temperature = keys.temperature.clone()
    temperature[-1] = 1.0
    alone, beside = (
        verify(logits, drafts, num_drafts, None, torch.arange(rows), found)
        for found in (keys, replace(keys, temperature=temperature))
    )
    assert set(alone.accepted.tolist()) == set(range(k + 1))
    for name in ("accepted", "emitted", "probability"):
        one, other = getattr(alone, name), getattr(beside, name)
        assert one.dtype == other.dtype
        assert torch.equal(one[:-1], other[:-1]), name
