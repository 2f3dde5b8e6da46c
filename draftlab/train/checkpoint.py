"""Checkpoints: everything a killed run needs to end with the same bits, in safetensors and JSON.

The learning rate and the order of the data are functions of the step, and training keeps no random
state, so weights, the optimizer's moments and the step are the whole state. Tensors are whole,
however many processes hold them in shards: a run goes on with another number of them.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.files import read_json, save_tensors, write_json

_NAME = re.compile(r"step-(\d{7})")
STATE, WEIGHTS, MOMENTS = "state.json", "weights.safetensors", "optimizer.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training behind a step.

    Attributes:
        step, tokens_seen: how far it is.
        key: identifies recipe and store.
        weights: trained parameters by name.
        moments: the optimizer's state by parameter/field.
    """

    step: int
    tokens_seen: int
    key: str
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


def trainable(head: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: p for name, p in head.named_parameters() if p.requires_grad}


def save_checkpoint(folder: Path, kept: Checkpoint, *, keep: int = 2) -> None:
    """Writes `folder`/step-NNNNNNN whole (built under another name, then renamed).

    Args:
        kept: tensors on the CPU.
        keep: newest checkpoints that stay.
    """
    final = folder / f"step-{kept.step:07d}"
    building = folder / f".{final.name}.tmp"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    save_tensors(kept.weights, building / WEIGHTS)
    save_tensors(kept.moments, building / MOMENTS)
    state = {"step": kept.step, "tokens_seen": kept.tokens_seen, "key": kept.key}
    write_json(building / STATE, state)
    shutil.rmtree(final, ignore_errors=True)
    building.rename(final)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name))


def read_checkpoint(path: Path, *, key: str) -> Checkpoint:
    """Reads a checkpoint.

    Raises:
        UserError: for one of another recipe or store, or one that is damaged.
    """
    state = read_json(path / STATE, kind="checkpoint's state.json")
    if state["key"] != key:
        raise UserError(
            f"the checkpoint belongs to another recipe or store (key {state['key'][:12]}, "
            f"expected {key[:12]})",
            where=path,
            do="train with --force, or under a new name",
        )
    try:
        weights, moments = load_file(path / WEIGHTS), load_file(path / MOMENTS)
    except Exception as error:  # safetensors raises its own types for missing and truncated files
        raise UserError(
            f"the checkpoint is damaged: {error}",
            where=path,
            do="remove it to resume from an older one",
        ) from None
    return Checkpoint(state["step"], state["tokens_seen"], key, weights, moments)
