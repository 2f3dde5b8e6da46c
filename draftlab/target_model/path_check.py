"""Check that a decode path of draftlab computes what transformers computes."""

from __future__ import annotations

import torch

from draftlab.errors import UserError
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.target_model.model import DecodePath, Target

_PROMPT, _BLOCK = 40, 8
"""Tokens of the longer prompt (two such rows exceed `kernels.linear.MAX_ROWS`, so other kernels
run); positions in a block."""


@torch.inference_mode()
def check_decode_path(target: Target, path: DecodePath, name: str) -> None:
    """Compare a path with transformers on random tokens: two prompts, then steps of ragged rows.

    Args:
        name: the path's name in an error.

    Raises:
        UserError: the target has too few positions for the comparison, or states or logits differ
            by more than rounding.
    """
    steps = ((7, 5), (3, 0), (1, 2))
    decoded = sum(max(counts) for counts in steps)
    prompt = min(_PROMPT, target.max_length - decoded)
    if prompt < 5:
        raise UserError(
            f"expected a target of at least {decoded + 5} positions, with which {name} is compared "
            f"with transformers, found {target.max_length}",
            where=target.folder / "config.json",
            do="check max_position_embeddings, or fetch the file again",
        )
    blocks = -(-(prompt + decoded) // _BLOCK)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, target.vocab_size, (2, prompt), generator=generator).to(target.device)
    table = torch.arange(2 * blocks, 0, -1, dtype=torch.int32, device=target.device)
    table = table.view(2, blocks)
    boundaries = tuple(range(target.num_layers + 1))
    caches = [target.new_paged_cache(2 * blocks + 1, _BLOCK) for _ in range(2)]
    # Rounding differs from layer to layer at random; 32 random layers gave 0.064 in bfloat16.
    exact = target.dtype == torch.float32
    tolerance = (1e-5 if exact else 2e-2) * max(target.num_layers, 12) ** 0.5
    lengths = torch.zeros(2, 1, dtype=torch.int64, device=target.device)
    for counts in ((prompt, 5), *steps):
        count = torch.tensor(counts, device=target.device)[:, None]
        column = torch.arange(max(counts), device=target.device)
        real = column < count
        positions = (lengths + column).where(real, -1)
        slots = slot_mapping(table, positions, _BLOCK)
        lengths += count
        states, expected = (
            run.states(
                ids[:, : len(column)],
                boundaries,
                positions=positions,
                cache=cache.at(table, positions, slots),
            )
            for run, cache in zip((path, target), caches, strict=True)
        )
        for kind, one, other in (
            ("states", states.features, expected.features),
            ("logits", path.logits(states.last), target.logits(expected.last)),
        ):
            one, other = one[real].float(), other[real].float()
            error = float((one - other).norm() / other.norm().clamp(min=1e-6))
            if not error <= tolerance:  # NaN is refused too
                raise UserError(
                    f"{name} and transformers differ in their {kind} by {error:.3g} (relative; "
                    f"expected at most {tolerance:.3g}): {type(target.layers[0]).__name__} "
                    "computes something that draftlab does not know",
                    where=target.folder,
                    do="remove its architecture from the list in known_layers.py, or fix the path",
                )
