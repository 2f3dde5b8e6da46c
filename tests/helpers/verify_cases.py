"""Cases of verification and sampling: rows of all temperatures, a target and a rough head."""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.kernels import sampling
from draftlab.kernels.sampling.types import DraftDistribution, SamplingMetadata, draft_index

TEMPERATURES = (0.0, 0.7, 1.0, 1.5, 0.01, 5.0)


def make_keys(count: int, *, limited: bool = False, seed: int = 0) -> SamplingMetadata:
    """Return rows of all temperatures in turn; `limited`: some with top-k, some with top-p."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.arange(count)
    return SamplingMetadata(
        torch.tensor(TEMPERATURES)[row % len(TEMPERATURES)],
        row % 3 * 20 * limited,
        1.0 - (row % 4 == 1) * 0.3 * limited,
        torch.randint(0, 99, (count,), generator=generator),
        torch.randint(-(2**62), 2**62, (count,), generator=generator),
    )


def make_batch(
    count: int,
    k: int,
    vocab: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    *,
    limited: bool = False,
    seed: int = 0,
    noise: float = 0.3,
) -> tuple[Tensor, Tensor, Tensor, DraftDistribution | None, Tensor, SamplingMetadata]:
    """Return arguments of `verify` for a target and a head that approximates it.

    Each sixth row drafts its argmax at every temperature. Rows have 0 to K drafts, mostly K.

    Args:
        size: of the draft vocabulary.
        noise: standard deviation of the difference between head and target logits.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(count, k + 1, vocab, generator=generator) * 3).to(dtype)
    ids = torch.randperm(vocab, generator=generator)[:size].sort().values
    head = logits[:, :k, ids].float() + torch.randn(count, k, size, generator=generator) * noise
    keys = make_keys(count, limited=limited, seed=seed)
    positions = torch.randint(1, 999, (count,), generator=generator)
    row = torch.arange(count)
    sampled = (keys.temperature > 0) & (row // len(TEMPERATURES) % 3 > 0)
    number = (row % (2 * k + 1)).clamp(max=k)
    if k == 0:
        return logits, positions.new_empty(count, 0), number, None, positions, keys
    head = head.to(dtype)
    settings = keys.temperature, sampled
    index, log_sums = zip(
        *(sampling.sample_draft(head[:, i], positions + i, keys, *settings) for i in range(k)),
        strict=True,
    )
    distribution = DraftDistribution(
        head, torch.stack(log_sums, 1), *settings, ids, draft_index(ids, vocab)
    )
    return logits, ids[torch.stack(index, 1)], number, distribution, positions, keys
