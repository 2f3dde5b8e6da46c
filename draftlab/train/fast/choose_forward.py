"""How a head is unrolled in training: which way, compiled or not, kept or computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic

from draftlab.heads.head import DraftHead
from draftlab.store.store import Record
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.fast import parallel as fast_parallel
from draftlab.train.fast import ttt as fast_unroll
from draftlab.train.fast.layers import PIECES, Pieces
from draftlab.train.fast.parallel import FastParallel
from draftlab.train.fast.ttt import FastUnroll
from draftlab.train.flops import kept_bytes
from draftlab.train.objectives.loss import StepOutput
from draftlab.train.settings import TrainSettings

Unrolling = Callable[[Any, Batch], Iterable[StepOutput]]
"""(head, batch of one pass) → the output of each step or depth that has rows."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Relative. Roundings to bfloat16 at other places add up over steps; a mistake is as large as 1."""
_ROOM = 0.8  # of the memory that is free once weights, gradients and moments are there


class _Compiled:
    """A piece compiled for any number of rows.

    Args:
        piece: of `fast_layers.PIECES`.
        backend: of torch.compile.
    """

    def __init__(self, piece: Callable[..., Any], backend: str) -> None:
        self.compiled = torch.compile(piece, backend=backend)

    def __call__(self, rows: tuple[Tensor, ...], *rest: Any) -> Any:
        for tensor in rows:
            maybe_mark_dynamic(tensor, 0)
        return self.compiled(rows, *rest)


def compiled_pieces(backend: str = "inductor") -> Pieces:
    """`PIECES`, compiled: norms and rotations in few kernels."""
    return Pieces(*(_Compiled(piece, backend) for piece in PIECES))


def unrolling(
    head: DraftHead,
    plain: Unrolling,
    settings: TrainSettings,
    dtype: torch.dtype,
) -> tuple[Unrolling, str]:
    """How this head is run on its device, and that in words.

    Args:
        head: on its device.
        plain: its family's way.
        dtype: of products.
    """
    on_gpu, recompute = head.fc.weight.is_cuda, settings.recompute
    idle = ["recompute"] if recompute is True else []
    if fast_unroll.fits(head):
        if recompute == "auto":
            recompute = on_gpu and not _has_room(head, settings, dtype)
        new: Callable[..., Unrolling] = partial(FastUnroll, dtype, recompute=recompute)
        said = ["the embeddings' part of a step made once a token"]
        said += ["steps computed again in the backward pass"] * recompute
    elif fast_parallel.fits(head):
        new, said = partial(FastParallel, dtype), ["all depths side by side", *_idle(idle)]
    else:
        idle = ["compile"] * (settings.compile is True) + idle
        return plain, ", ".join(["as they are written", *_idle(idle)])
    made = new()
    if settings.compile is True or (settings.compile == "auto" and on_gpu):
        fast = new(pieces=compiled_pieces())
        try:
            _rehearse(head, fast, made)
        except Exception as error:  # compilers raise many types
            reason = " ".join(str(error).split())[:200]
            said.append(f"uncompiled, since torch.compile failed: {type(error).__name__}: {reason}")
        else:
            made, said = fast, [*said, "small operations compiled"]
    return made, ", ".join(said)


def _idle(settings: list[str]) -> list[str]:
    """What is said of settings that a head has no use for."""
    does = "does" if len(settings) == 1 else "do"
    return (
        [f"train.{' and train.'.join(settings)} {does} nothing for such heads"] if settings else []
    )


def _has_room(head: DraftHead, settings: TrainSettings, dtype: torch.dtype) -> bool:
    """Whether a GPU holds what all steps of the largest batch keep for the backward pass."""
    rows = (
        settings.row_tokens * (settings.micro_rows or settings.batch_rows) / settings.anchor_parts
    )
    kept = rows * settings.ttt_steps * kept_bytes(head.config, dtype)
    # Gradients and two moments, as wide as the weights, are yet to come.
    coming = 3 * sum(p.numel() * p.element_size() for p in head.parameters() if p.requires_grad)
    free, _ = torch.cuda.mem_get_info(head.fc.weight.device)
    return kept < _ROOM * (free - coming)


def _rehearse(head: DraftHead, fast: Any, plain: Any) -> None:
    """Runs a tiny batch both ways, forward and backward.

    Raises:
        ValueError: if outputs or gradients differ by more than rounding.
    """
    batch = _tiny_batch(head).to(head.fc.weight.device)
    trained = [
        p
        for name, p in head.named_parameters()
        if name.startswith(("fc.", "layers.", "mask_")) and p.requires_grad
    ]
    found = []
    for unroll in (fast, plain):
        outputs = unroll(head, batch)
        total = sum(o.output.float().square().mean() for o in outputs)
        gradients = torch.autograd.grad(total, trained)
        found.append([*(o.output.detach() for o in outputs), *gradients])
    for one, other in zip(*found, strict=True):
        error = float((one - other).float().norm() / other.float().norm().clamp(min=1e-6))
        if not error <= _TOLERANCE[plain.dtype]:  # NaN is refused too
            raise ValueError(f"compiled and plain steps differ by {error:.2g} (relative)")


def _tiny_batch(head: DraftHead) -> Batch:
    """A conversation of random tokens and features, half of it an answer."""
    config, length = head.config, 32
    generator = torch.Generator().manual_seed(0)
    spans = (torch.arange(length) >= length // 2).long()
    record = Record(
        "rehearsal",
        torch.randint(config.vocab_size, (length,), generator=generator),
        spans,
        torch.randn(length, config.feature_size, generator=generator),
        torch.zeros(length, config.target_hidden_size),
        torch.zeros(length),
        torch.zeros(length, dtype=torch.int64),
        None,
    )
    return pack([[record]], length, 3)
