"""Asks a loaded model whether rows of different lengths may share its passes.

A question is two passes that must give the same states. All but the last compare passes of the same
shapes, where only what must not matter differs, so they need no tolerance worth the name in any
dtype and find a fault of any size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftlab.base import UserError
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.target.cache import RowCache
from draftlab.target.paged import PagedCache

if TYPE_CHECKING:
    from draftlab.target.model import Target

_FAR = 1_000_000  # a cache length that moves every temperature


class _LongCache(RowCache):
    """Claims to hold far more than it does."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return _FAR


def check_rows(target: Target) -> None:
    """Refuses a target whose rows would influence each other, or whose past cannot be taken back.

    Raises:
        UserError: naming what the model does.
    """
    exact = 1e-5 if target.dtype == torch.float32 else 1e-3
    _ask(target, "keeps a state of tokens that were rejected", _rejected, exact)
    _ask(target, "takes positions from the length of the cache", _length, exact)
    _ask(target, "treats a row differently when the row beside it is longer", _neighbour, exact)


def check_pages(target: Target) -> None:
    """Refuses a target that does with its cached keys what only keys in rows allow.

    Models that expand compressed keys after the cache (DeepSeek's latent attention) and models that
    do not attend through transformers' interface (JetMoE) are such.

    Raises:
        UserError: as `check_rows`.
    """
    # Another kernel rounds differently, and in half precision routers may then pick other experts
    # for most of the tokens. A misread cache shows in all of them.
    close, of = (1e-3, torch.amax) if target.dtype == torch.float32 else (0.3, _first_quartile)
    _ask(target, "reads its cache in a way that pages of keys do not serve", _pages, close, of)


def can_capture(target: Target) -> bool:
    """Whether a CUDA graph can hold the target's passes; without a GPU there is none.

    It cannot where the host must look at what the device computes: a loop over the experts that
    were hit, say (`target/experts.py` names those that keep theirs). A warning tells so.
    """
    if target.device.type != "cuda":
        return False
    if target.spread:
        reason = "its layers are on several GPUs"
    elif (waits := _waits(target)) is not None:
        reason = f"the host waits for the device in a pass ({waits})"
    else:
        reason = None
    if reason is not None:
        warnings.warn(
            f"{type(target.decoder).__name__} decodes without CUDA graphs, so more slowly: "
            f"{reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return reason is None


@torch.inference_mode()
def _waits(target: Target) -> str | None:
    """What torch says when a pass makes the host wait; None when nothing does."""
    pages = PagedCache(target.num_layers, 3, 16)
    table = torch.tensor([[1], [2]], dtype=torch.int32, device=target.device)
    ids, positions = (x.repeat(2, 1) for x in _placed(target, [5, 6, 7], 0))
    pages.at(table, positions, slot_mapping(table, positions, 16))
    target.states(ids, positions=positions, cache=pages)  # allocates, compiles, loads libraries
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        target.states(ids, positions=positions, cache=pages)
    except RuntimeError as error:
        return str(error).split("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return None


@torch.inference_mode()
def _ask(
    target: Target,
    fault: str,
    question: Callable[[Target], tuple[Tensor, Tensor]],
    tolerance: float,
    of: Callable[[Tensor], Tensor] = torch.amax,
) -> None:
    """Refuses the target when the two answers of `question` [..., Ht] differ.

    That is, when `of` the tokens' relative differences is more than `tolerance`.
    """
    try:
        one, other = question(target)
    except Exception as error:  # a cache that a model was not made for may break it in any way
        raise _refusal(
            target, f"{fault}: {type(error).__name__}: {str(error).rstrip('.')}"
        ) from error
    sizes = one.float().norm(dim=-1).clamp(min=1e-6)
    difference = float(of((one - other).float().norm(dim=-1) / sizes))
    if not difference <= tolerance:  # NaN is refused too
        raise _refusal(target, f"{fault} (its states change by {difference:.2g})")


def _first_quartile(x: Tensor) -> Tensor:
    return x.quantile(0.25)


def _refusal(target: Target, fault: str) -> UserError:
    return UserError(
        f"{type(target.decoder).__name__} {fault}, so drafts cannot be verified with it",
        where=target.folder,
        do="use another target, or add a replacement to draftlab/target/replacements.py",
    )


def _feed(target: Target, cache: RowCache, tokens: list[int], start: int) -> Tensor:
    """Last states [1, M, Ht] of tokens at positions from `start` of row 0."""
    ids, positions = _placed(target, tokens, start)
    aimed = cache.at(0, positions, start + len(tokens))
    return target.states(ids, positions=positions, cache=aimed).last


def _placed(target: Target, tokens: list[int], start: int) -> tuple[Tensor, Tensor]:
    """Ids and positions [1, M]."""
    ids = torch.tensor([tokens], device=target.device) % target.vocab_size
    return ids, torch.arange(start, start + len(tokens), device=target.device)[None]


def _rejected(target: Target) -> tuple[Tensor, Tensor]:
    """The same continuation, once after two tokens that were fed and rejected."""
    states = []
    for rejected in (False, True):
        cache = RowCache(target.num_layers, 1, 8)
        _feed(target, cache, [5, 6, 7], 0)
        if rejected:
            _feed(target, cache, [8, 9], 3)
        states.append(_feed(target, cache, [10, 11], 3))
    return states[0], states[1]


def _length(target: Target) -> tuple[Tensor, Tensor]:
    """The same tokens on a cache that tells the truth about its length and on one that does not."""
    states = []
    for kind in (RowCache, _LongCache):
        cache = kind(target.num_layers, 1, 8)
        _feed(target, cache, [5, 6, 7], 0)
        states.append(_feed(target, cache, [10, 11], 3))
    return states[0], states[1]


def _neighbour(target: Target) -> tuple[Tensor, Tensor]:
    """A row beside one at the start, and beside one at the end of the target's positions."""
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]], device=target.device) % target.vocab_size
    near = torch.arange(3, device=target.device)
    states = []
    for start in (0, target.max_length - 3):
        # Slots are by order here: the far row needs no cache of its length.
        cache = RowCache(target.num_layers, 2, 3).at(0, near.expand(2, 3), 3)
        positions = torch.stack([near, near + start])
        states.append(target.states(ids, positions=positions, cache=cache).last[0])
    return states[0], states[1]


def _pages(target: Target) -> tuple[Tensor, Tensor]:
    """Tokens after others, read from a row and from scattered pages."""
    start, size = list(range(5, 23)), 16
    rows = RowCache(target.num_layers, 1, 48)
    pages = PagedCache(target.num_layers, 5, size)
    table = torch.tensor([[3, 1, 4]], dtype=torch.int32, device=target.device)
    states = []
    for tokens, first in ((start, 0), (list(range(40, 65)), len(start))):
        ids, positions = _placed(target, tokens, first)
        aimed = pages.at(table, positions, slot_mapping(table, positions, size))
        states = [
            _feed(target, rows, tokens, first),
            target.states(ids, positions=positions, cache=aimed).last,
        ]
    return states[0], states[1]
