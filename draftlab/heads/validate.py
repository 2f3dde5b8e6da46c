"""Checks of the tensors in a head's file; loading refuses faults and the doctor lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.heads.config import HeadConfig
from draftlab.heads.head import EMBEDDINGS, DraftHead

D2T, T2D = "d2t", "t2d"
Kind = Literal["missing tensor", "unknown tensor", "shape", "dtype", "not finite", "zeros", "d2t"]
_MAY_BE_ZERO = (
    "o_proj.",
    "down_proj.",
    "confidence_head.",
    "markov_head.",
    "mask_",
    "_conv.",
    "mlp.correction",
)
"""Parts of the names of tensors that are zero in a new head or layer, which then adds nothing."""


@dataclass(frozen=True)
class TensorFault:
    """A fault of one tensor in a head's file: what was expected and what was found."""

    kind: Kind
    tensor: str
    message: str


def tensor_faults(
    head: DraftHead, stored: Mapping[str, Tensor], may_be_zero: Iterable[str] = _MAY_BE_ZERO
) -> list[TensorFault]:
    """Return every fault of the tensors that a head's file holds, sorted by tensor.

    Args:
        head: a head of the family and shape that draftlab.json names, with any values.
        may_be_zero: parts of the names of tensors that may be zero; the doctor, which gets
            trained heads, allows none.
    """
    config, shared = head.config, head.shared_tensors()
    expected = {name: tensor.shape for name, tensor in head.tensors().items()}
    # A head over the whole vocabulary needs no maps, and readers refuse them.
    optional = {D2T, T2D} if config.draft_vocab_size == config.vocab_size else set()
    faults = [
        TensorFault(
            "missing tensor",
            name,
            f"missing {name}: expected shape {list(expected[name])}"
            f"{_feature_width(config, name)}, found none",
        )
        for name in expected.keys() - shared - optional - stored.keys()
    ]
    for name, tensor in stored.items():
        if name in shared:
            message = f"draftlab.json says that {name} is shared with the target, but the file "
            advice = ' ("embeddings": "own" if the head was trained with its own)'
            message += f"holds one{advice if name == EMBEDDINGS else ''}"
            faults.append(TensorFault("unknown tensor", name, message))
        elif name not in expected:
            message = f"unknown {name}: no head of this family and options has such a tensor"
            faults.append(TensorFault("unknown tensor", name, message))
        elif expected[name] != tensor.shape:
            message = f"{name}: expected shape {list(expected[name])}, found {list(tensor.shape)}"
            message += _feature_width(config, name)
            faults.append(TensorFault("shape", name, message))
        elif message := _dtype_fault(name, tensor):
            faults.append(TensorFault("dtype", name, message))
        elif name not in (D2T, T2D):
            faults += _value_faults(name, tensor, may_be_zero)
    if message := draft_vocabulary_fault(stored.get(D2T), stored.get(T2D), config):
        faults.append(TensorFault("d2t", D2T, message))
    return sorted(faults, key=lambda fault: fault.message)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite; `Tensor.isfinite` takes a CPU 30 times as long."""
    return all(map(isfinite, _value_range(tensor)))


def _value_range(tensor: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value of a tensor; both are NaN if it has a NaN."""
    least, most = tensor.aminmax()
    return float(least), float(most)


def _value_faults(name: str, tensor: Tensor, may_be_zero: Iterable[str]) -> list[TensorFault]:
    least, most = _value_range(tensor)
    if not (isfinite(least) and isfinite(most)):
        bad = int((~tensor.isfinite()).sum())
        message = f"{name}: not finite: {bad:,} of {tensor.numel():,} values"
        return [TensorFault("not finite", name, message)]
    if least == most == 0 and not any(part in name for part in may_be_zero):
        return [TensorFault("zeros", name, f"{name} holds only zeros")]
    return []


def refuse_faults(faults: Iterable[TensorFault], where: Path) -> None:
    """Raise a `UserError` that lists the faults of a file, if there are any."""
    if messages := [fault.message for fault in faults]:
        raise UserError(
            "the head's tensors do not fit:\n  " + "\n  ".join(messages),
            where=where,
            do="`draftlab doctor HEAD --target TARGET` lists further contradictions in its files",
        )


def draft_vocabulary_readings(
    d2t: Tensor, t2d: Tensor | None, vocab_size: int
) -> dict[Literal["offsets", "ids"], Tensor]:
    """Return the target ids that d2t gives, as offsets (target id − draft id) and as target ids, if
    they are those that t2d [V] marks; without t2d, if they are ascending ids of the vocabulary.
    """
    d2t = d2t.long()
    readings: dict[Literal["offsets", "ids"], Tensor] = {}
    readings["offsets"], readings["ids"] = d2t + torch.arange(len(d2t)), d2t
    members = None if t2d is None else t2d.bool().nonzero().flatten()
    return {
        kind: ids
        for kind, ids in readings.items()
        if (ascending_ids(ids, vocab_size) if members is None else torch.equal(ids, members))
    }


def draft_vocabulary_fault(
    d2t: Tensor | None, t2d: Tensor | None, config: HeadConfig
) -> str | None:
    """Return why d2t does not hold offsets that agree with t2d; None if it does, is missing, or is
    of a wrong shape.
    """
    size = config.vocab_size
    if d2t is None or d2t.shape != (config.draft_vocab_size,) or d2t.is_floating_point():
        return None
    members = t2d if t2d is not None and t2d.shape == (size,) else None
    readings = draft_vocabulary_readings(d2t, members, size)
    if "offsets" in readings:
        return None
    if "ids" in readings:
        return (
            "d2t holds absolute ids where offsets are expected (target id = draft id + "
            "d2t[draft id])"
        )
    if not ascending_ids(d2t.long() + torch.arange(len(d2t)), size):
        return (
            "d2t must hold offsets (target id − draft id); as offsets, its values give ids outside "
            "the vocabulary, or ids that do not ascend"
        )
    return "d2t must hold offsets (target id − draft id) that agree with t2d; it names other tokens"


def ascending_ids(ids: Tensor, vocab_size: int) -> bool:
    """Return whether ids ascend, are unique, and lie in a vocabulary of `vocab_size` tokens."""
    ids = ids.long()
    return bool((ids.diff() > 0).all() and ids[0] >= 0 and ids[-1] < vocab_size)


def _dtype_fault(name: str, tensor: Tensor) -> str | None:
    """Return why a tensor's dtype cannot be computed with; None if it can be."""
    if name in (D2T, T2D):
        wrong = tensor.is_floating_point()
        return f"{name}: expected integers, found {tensor.dtype}" if wrong else None
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return None
    return (
        f"{name}: expected floating numbers of 16 bits or more, found {tensor.dtype}: heads with "
        "quantised weights are not read"
    )


def _feature_width(config: HeadConfig, name: str) -> str:
    """Return an explanation of the expected width, if the tensor's width is that of features."""
    if name not in ("fc.weight", "mask_hidden") or config.reads_last:
        return ""
    count, size = len(config.boundaries), config.target_hidden_size
    return f" ({count} boundaries of {size} are {config.feature_size} wide)"
