"""Whether a decode path of our own computes what transformers computes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.target_model.model import States, Target
from draftlab.target_model.paged_cache import PagedCache

_PROMPT, _BLOCK = 40, 8
"""Tokens of the longer prompt, two rows of which are more than kernels of few rows take
(`kernels.linear.MAX_ROWS`); positions of a block."""


class DecodePath(Protocol):
    """A way of running a target's decoder over a paged cache."""

    def states(
        self,
        token_ids: Tensor,
        boundaries: tuple[int, ...] = (),
        *,
        positions: Tensor,
        cache: PagedCache,
    ) -> States:
        """`Target.states`."""

    def logits(self, last: Tensor) -> Tensor:
        """`Target.logits`."""


@torch.inference_mode()
def check_agreement(target: Target, path: DecodePath, name: str) -> None:
    """Compares a path with transformers on random tokens: a prompt whose products are cuBLAS's on a
    GPU beside a short one, then steps of ragged rows on top of them.

    Args:
        name: what an error calls the path.

    Raises:
        UserError: when states or logits differ by more than rounding.
    """
    steps = ((7, 5), (3, 0), (1, 2))
    later = sum(max(counts) for counts in steps)
    prompt = max(min(_PROMPT, target.max_length - later), 5)
    blocks = -(-(prompt + later) // _BLOCK)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab_size, (2, prompt), generator=generator).to(target.device)
    table = torch.arange(2 * blocks, 0, -1, dtype=torch.int32, device=target.device)
    table = table.view(2, blocks)
    boundaries = tuple(range(target.num_layers + 1))
    caches = [target.new_paged_cache(2 * blocks + 1, _BLOCK) for _ in range(2)]
    # Rounding differs from layer to layer at random; 32 random layers gave 0.064 in bfloat16.
    exact = target.dtype == torch.float32
    tolerance = (1e-5 if exact else 2e-2) * max(target.num_layers, 12) ** 0.5
    done = torch.zeros(2, 1, dtype=torch.int64, device=target.device)
    for counts in ((prompt, 5), *steps):
        count = torch.tensor(counts, device=target.device)[:, None]
        depth = torch.arange(max(counts), device=target.device)
        real = depth < count
        positions = (done + depth).where(real, -1)
        slots = slot_mapping(table, positions, _BLOCK)
        done += count
        ours, theirs = (
            run.states(
                ids[:, : len(depth)],
                boundaries,
                positions=positions,
                cache=cache.at(table, positions, slots),
            )
            for run, cache in zip((path, target), caches, strict=True)
        )
        for what, one, other in (
            ("states", ours.features, theirs.features),
            ("logits", path.logits(ours.last), target.logits(theirs.last)),
        ):
            one, other = one[real].float(), other[real].float()
            error = float((one - other).norm() / other.norm().clamp(min=1e-6))
            if not error <= tolerance:  # NaN is refused too
                raise UserError(
                    f"{name} and transformers differ in their {what} by {error:.3g} (relative; "
                    f"expected at most {tolerance:.3g}): {type(target.layers[0]).__name__} "
                    "computes something draftlab does not know",
                    where=target.folder,
                    do="take its architecture off the list in fused_decoder.py, or mend the path",
                )
