"""Checkpoints, in safetensors and JSON: a killed run resumes and ends with the same bits.

The learning rate and the order of the data are functions of the step, and training keeps no random
state, so weights, the optimizer's moments and the step are the whole state. Tensors are whole, also
of sharded backends: a run can resume with another number of processes.
"""

from __future__ import annotations

import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.files import (
    atomic_path,
    canonical_json,
    read_fields,
    sha256_file,
    sha256_text,
    write_json,
)
from draftlab.heads.config import HeadConfig
from draftlab.store.store import Store
from draftlab.tensor_files import save_tensors
from draftlab.text.draft_vocabulary import DraftVocabulary
from draftlab.train.initial_weights import fingerprint
from draftlab.train.settings import TrainSettings

_NAME = re.compile(r"step-(\d{7})")
STATE, WEIGHTS, MOMENTS = "state.json", "weights.safetensors", "optimizer.safetensors"
_FIELDS = {"step": int, "tokens_seen": int, "key": str, "verified": bool}
"""Fields of a checkpoint in STATE, beside the hashes of its tensors' files."""
MAX_CHECKPOINTS = 2
"""Number of the newest checkpoints that a training keeps."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a training after an optimizer step.

    Attributes:
        step, tokens_seen: optimizer steps, and positions trained on.
        key: `training_key`.
        weights: trained parameters by name. moments: the optimizer's state by parameter/field.
        verified: whether all shards of the store had been hashed when it was written, or are by the
            end of the training (`mark_verified`).
    """

    step: int
    tokens_seen: int
    key: str
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    verified: bool


def training_key(
    settings: TrainSettings,
    config: HeadConfig,
    vocabulary: DraftVocabulary,
    store: Store,
    seed: int,
    initial: nn.Module | None,
) -> str:
    """Return a hash of all that the weights depend on."""
    inputs = [
        settings.identity(),
        config.identity(),
        vocabulary.target_ids.tolist(),
        store.manifest.dump(),
        seed,
        fingerprint(initial) if initial is not None else None,
    ]
    return sha256_text(canonical_json(inputs))


def trainable(head: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that training changes, by name."""
    return {name: p for name, p in head.named_parameters() if p.requires_grad}


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, keep: int = MAX_CHECKPOINTS) -> Path:
    """Write a checkpoint of CPU tensors, `folder`/step-NNNNNNN, which it returns.

    Its files are on the disk before it has its name. `keep` of the newest checkpoints stay.
    """
    final = folder / f"step-{checkpoint.step:07d}"
    building = folder / f".{final.name}.tmp"
    for killed in folder.glob(".step-*.tmp"):  # left by a killed process
        shutil.rmtree(killed)
    building.mkdir(parents=True)
    files = {WEIGHTS: checkpoint.weights, MOMENTS: checkpoint.moments}

    def write(name: str) -> str:
        with atomic_path(building / name) as path:
            return save_tensors(files[name], path)

    with ThreadPoolExecutor() as pool:
        sha256 = dict(zip(files, pool.map(write, files), strict=True))
    state = {name: getattr(checkpoint, name) for name in _FIELDS}
    write_json(building / STATE, state | {"sha256": sha256})
    shutil.rmtree(final, ignore_errors=True)
    building.rename(final)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


class CheckpointWriter:
    """Writes checkpoints on a thread: their hashes and the disk take seconds a gigabyte."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writing: Future[Path] | None = None

    def write(self, checkpoint: Checkpoint) -> None:
        """Begin to write a checkpoint, whose tensors do not change any more."""
        self.finish()
        thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing = thread.submit(save_checkpoint, self.folder, checkpoint)
        thread.shutdown(wait=False)

    def finish(self) -> None:
        """Wait until the last checkpoint is written; raise the error that it met."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait for the thread, and ignore its error: another one ended the training."""
        if self._writing is not None:
            wait([self._writing])


def mark_verified(path: Path) -> None:
    """Note in a checkpoint that all shards that it was trained with have the right hash."""
    write_json(path / STATE, _read_state(path) | {"verified": True})


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name))


def read_checkpoint(path: Path, *, key: str) -> Checkpoint:
    """Read a checkpoint; raise a `UserError` if it is damaged, or not of the training `key`."""
    state = _read_state(path)
    if state["key"] != key:
        raise UserError(
            f"the checkpoint belongs to another recipe or store (key {state['key'][:12]}, "
            f"expected {key[:12]})",
            where=path,
            do="train with --force, or under a new name",
        )
    weights, moments = (
        _read_tensors(path / name, state["sha256"].get(name)) for name in (WEIGHTS, MOMENTS)
    )
    fields = {name: state[name] for name in _FIELDS}
    return Checkpoint(**fields, weights=weights, moments=moments)


_WITHOUT_CHECKPOINT = "remove {}: training then resumes from an older checkpoint, or starts again"


def _read_state(path: Path) -> dict[str, Any]:
    return read_fields(
        path / STATE,
        {**_FIELDS, "sha256": dict},
        kind="checkpoint's state.json",
        do=_WITHOUT_CHECKPOINT.format(path),
    )


def _read_tensors(path: Path, sha256: str | None) -> dict[str, Tensor]:
    try:
        if sha256 is not None and (digest := sha256_file(path)) != sha256:
            raise ValueError(f"expected SHA-256 {sha256}, found {digest}")
        return load_file(path)
    except Exception as error:  # safetensors raises its own types for missing and truncated files
        raise UserError(
            f"the checkpoint is damaged: {error}",
            where=path,
            do=_WITHOUT_CHECKPOINT.format(path.parent),
        ) from None


def set_unverified_aside(folder: Path) -> list[Path]:
    """Rename the checkpoints of a store with unverified shards to step-NNNNNNN.damaged; return
    their new paths. No training resumes from them.
    """
    aside = []
    for path in checkpoints(folder):
        if not _read_state(path)["verified"]:
            aside.append(path.with_name(f"{path.name}.damaged"))
            shutil.rmtree(aside[-1], ignore_errors=True)
            path.rename(aside[-1])
    return aside
