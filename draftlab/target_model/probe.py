"""Asks a loaded model whether rows of different lengths, or conversations, may share its passes.

A question is two passes that must give the same states. All but two (`_pages`, `_alone`) compare
passes of the same shapes, where only what must not matter differs, so they need no tolerance worth
the name in any dtype and find a fault of any size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.target_model.cache import RowCache
from draftlab.target_model.packed_rows import Documents
from draftlab.target_model.paged_cache import PagedCache

if TYPE_CHECKING:
    from draftlab.target_model.model import Target

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
    exact = _exact(target)
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
    _ask(
        target,
        "reads its cache in a way that pages of keys do not serve",
        _pages,
        *_close(target),
    )


def why_padded(target: Target) -> str | None:
    """What keeps conversations from lying side by side in a row; None: nothing does.

    Recurrent layers, say, or attention that does not go through transformers' interface.
    """
    questions = (
        (
            "mixes conversations that lie side by side in a row",
            _beside_others,
            _exact(target),
            torch.amax,
        ),
        ("treats conversations side by side otherwise than alone", _alone, *_close(target)),
    )
    if target.device.type == "cuda":  # a small kernel a conversation and layer costs more there
        slow = "attends to conversations side by side one by one on this device"
        questions += ((slow, _at_once, *_close(target)),)
    return next((found for asked in questions if (found := _fault(target, *asked))), None)


def can_capture(target: Target) -> bool:
    """Whether a CUDA graph can hold the target's passes; without a GPU there is none.

    It cannot where the host must look at what the device computes: a loop over the experts that
    were hit, say (`target_model/experts.py` names those that keep theirs). A warning tells so.
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


def _exact(target: Target) -> float:
    """The tolerance of passes of the same shapes."""
    return 1e-5 if target.dtype == torch.float32 else 1e-3


def _close(target: Target) -> tuple[float, Callable[[Tensor], Tensor]]:
    """The tolerance where another kernel rounds differently, and of which tokens.

    In half precision routers may then pick other experts for most of the tokens. What is misread
    shows in all of them.
    """
    return (1e-3, torch.amax) if target.dtype == torch.float32 else (0.3, _first_quartile)


def _ask(
    target: Target,
    fault: str,
    question: Callable[[Target], tuple[Tensor, Tensor]],
    tolerance: float,
    of: Callable[[Tensor], Tensor] = torch.amax,
) -> None:
    """Refuses the target when the two answers of `question` differ."""
    if found := _fault(target, fault, question, tolerance, of):
        raise UserError(
            f"{type(target.decoder).__name__} {found}, so drafts cannot be verified with it",
            where=target.folder,
            do="use another target, or add a replacement to draftlab/target_model/replacements.py",
        )


@torch.inference_mode()
def _fault(
    target: Target,
    fault: str,
    question: Callable[[Target], tuple[Tensor, Tensor]],
    tolerance: float,
    of: Callable[[Tensor], Tensor],
) -> str | None:
    """The fault, and how it shows, when the two answers of `question` [..., Ht] differ.

    That is, when `of` the tokens' relative differences is more than `tolerance`.
    """
    try:
        one, other = question(target)
    except torch.OutOfMemoryError:  # which says nothing of the model
        raise
    except Exception as error:  # what a model was not made for may break it in any way
        return f"{fault}: {type(error).__name__}: {_first_line(error)}"
    sizes = one.float().norm(dim=-1).clamp(min=1e-6)
    difference = float(of((one - other).float().norm(dim=-1) / sizes))
    if difference <= tolerance:  # NaN is a fault too
        return None
    return f"{fault} (its states change by {difference:.2g})"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _first_quartile(x: Tensor) -> Tensor:
    return x.quantile(0.25)


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


def _beside_others(target: Target) -> tuple[Tensor, Tensor]:
    """A text between others, and between others yet that lie far from the start of theirs."""
    size = 16
    texts = [list(range(first, first + size)) for first in (5, 21, 37, 53, 69)]
    far = torch.arange(size, device=target.device) + max(target.max_length - size, 0)
    near = _beside(target, [texts[0], texts[1], texts[2]])
    other = _beside(target, [texts[3], texts[1], texts[4]], {0: far, 2: far})
    return near[size : 2 * size], other[size : 2 * size]


def _alone(target: Target) -> tuple[Tensor, Tensor]:
    """Texts in rows of their own, and side by side behind another."""
    texts = [list(range(5, 23)), list(range(40, 65)), list(range(70, 75))]
    alone = [target.states(_placed(target, text, 0)[0]).last[0] for text in texts[1:]]
    return torch.cat(alone), _beside(target, texts)[len(texts[0]) :]


def _at_once(target: Target) -> tuple[Tensor, Tensor]:
    """Texts side by side, where attention takes them in one kernel, against themselves."""
    texts = [list(range(5, 23)), list(range(40, 65))]
    states = _beside(target, texts, at_once=True)
    return states, states


def _beside(
    target: Target,
    texts: list[list[int]],
    placed: dict[int, Tensor] | None = None,
    *,
    at_once: bool = False,
) -> Tensor:
    """Last states [T, Ht] of texts side by side, some of which are `placed` at other positions."""
    ids, _ = _placed(target, [token for text in texts for token in text], 0)
    documents = Documents.of([len(text) for text in texts], target.device)
    documents = replace(documents, at_once=at_once)
    for number, positions in (placed or {}).items():
        documents.positions[0, documents.slices[number]] = positions
    return target.states(ids, documents=documents).last[0]
