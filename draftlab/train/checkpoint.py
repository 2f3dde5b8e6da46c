"""Checkpoints: everything a killed run needs to end with the same bits, in safetensors and JSON."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from draftlab.base import UserError, read_json, save_tensors, write_json

_NAME = re.compile(r"step-(\d{7})")
STATE = "state.json"


def trainable(head: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: p for name, p in head.named_parameters() if p.requires_grad}


def save_checkpoint(
    folder: Path,
    head: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    tokens_seen: int,
    key: str,
    keep: int = 2,
) -> Path:
    """Writes `folder`/step-NNNNNNN whole (built under another name, then renamed).

    The learning rate and the order of the data are functions of the step, and training draws no
    random numbers, so weights, optimizer moments and the step are the whole state.

    Args:
        key: identifies recipe and store; a resume with another key is refused.
        keep: newest checkpoints that stay.
    """
    final = folder / f"step-{step:07d}"
    building = folder / f".{final.name}.tmp"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    weights = {name: p.detach().cpu().contiguous() for name, p in trainable(head).items()}
    save_tensors(weights, building / "weights.safetensors")
    moments = {}
    for name, parameter in trainable(head).items():
        for field, value in optimizer.state[parameter].items():
            moments[f"{name}/{field}"] = torch.as_tensor(value).detach().cpu().clone()
    save_tensors(moments, building / "optimizer.safetensors")
    write_json(building / STATE, {"step": step, "tokens_seen": tokens_seen, "key": key})
    shutil.rmtree(final, ignore_errors=True)
    building.rename(final)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name))


def load_checkpoint(
    path: Path, head: nn.Module, optimizer: torch.optim.Optimizer, *, key: str
) -> tuple[int, int]:
    """Restores weights and optimizer in place.

    Returns:
        Step and tokens seen.

    Raises:
        UserError: for a checkpoint of another recipe or store, or one that is damaged.
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
        weights = load_file(path / "weights.safetensors")
        moments = load_file(path / "optimizer.safetensors")
    except Exception as error:  # safetensors raises its own types for missing and truncated files
        raise UserError(
            f"the checkpoint is damaged: {error}",
            where=path,
            do="remove it to resume from an older one",
        ) from None
    with torch.no_grad():
        for name, parameter in trainable(head).items():
            parameter.copy_(weights[name])
            fields = {
                key.rpartition("/")[2]: value
                for key, value in moments.items()
                if key.rpartition("/")[0] == name
            }
            optimizer.state[parameter] = {
                field: value if field == "step" else value.to(parameter.device)
                for field, value in fields.items()
            }
    return state["step"], state["tokens_seen"]
