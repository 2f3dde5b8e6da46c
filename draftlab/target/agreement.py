"""Whether a decode path of our own computes what transformers computes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from draftlab.base import UserError
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.target.model import States, Target
from draftlab.target.paged import PagedCache


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
    """Compares a path with transformers on random tokens: ragged rows, then more on top of them.

    Args:
        name: what an error calls the path.

    Raises:
        UserError: when states or logits differ by more than rounding.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab_size, (2, 7), generator=generator).to(target.device)
    table = torch.tensor([[2, 1], [3, 4]], dtype=torch.int32, device=target.device)
    boundaries = tuple(range(target.num_layers + 1))
    caches = [target.new_paged_cache(5, 8) for _ in range(2)]
    # Rounding differs from layer to layer at random; 32 random layers gave 0.064 in bfloat16.
    exact = target.dtype == torch.float32
    tolerance = (1e-5 if exact else 2e-2) * max(target.num_layers, 12) ** 0.5
    for first, counts in ((0, (7, 5)), (7, (3, 0)), (10, (1, 2))):
        begin = torch.tensor([first, 5 if first else 0], device=target.device)[:, None]
        depth = torch.arange(7, device=target.device)
        real = depth < torch.tensor(counts, device=target.device)[:, None]
        positions = (begin + depth).where(real, -1)
        slots = slot_mapping(table, positions, 8)
        ours, theirs = (
            run.states(
                ids, boundaries, positions=positions, cache=cache.at(table, positions, slots)
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
                    do="take its architecture off the list in draftlab/target/fused.py, or mend "
                    "the path",
                )
