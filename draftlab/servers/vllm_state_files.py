"""The files of hidden states that vLLM writes: one a prompt, in a folder that is cleaned up."""

from __future__ import annotations

import fcntl
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftlab.errors import UserError
from draftlab.store.resume import lock_folder

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "draftlab-states-"
_LOCKED_AFTER_S = 60  # every folder in use is locked so long after it was made


@dataclass(frozen=True)
class StatesFormat:
    """What a file of states must have.

    Attributes:
        shape: boundaries and Ht.
        do: what the user can do about other files.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    do: str

    def read(self, file: Path, token_ids: Sequence[int] | np.ndarray) -> Tensor:
        """Wait for the states [tokens, boundaries, Ht] of a prompt, and read them.

        Raises:
            UserError: they are another prompt's, or have another shape or dtype.
            OSError, SafetensorError: there are none.
        """
        is_locked(file, wait=True)
        tensors = load_file(file)
        if missing := {"token_ids", "hidden_states"} - tensors.keys():
            raise UserError(
                f"expected states with their tokens, found a file without {min(missing)}",
                where=file,
                do=self.do,
            )
        if not np.array_equal(tensors["token_ids"], token_ids):
            raise UserError(
                "expected the states of a prompt, found those of other tokens",
                where=file,
                do=f"repeat the command; if it happens again, {self.do}",
            )
        states, shape = tensors["hidden_states"], [len(token_ids), *self.shape]
        if (list(states.shape), states.dtype) != (shape, self.dtype):
            raise UserError(
                f"expected states {shape} (tokens, boundaries, hidden size) in {self.dtype}, "
                f"found {list(states.shape)} in {states.dtype}",
                where=file,
                do=self.do,
            )
        return states


def lock_of(file: Path) -> Path:
    """Return the file that vLLM locks until the states are complete."""
    return file.with_name(f"{file.name}.lock")


def is_locked(file: Path, *, wait: bool = False) -> bool:
    """Return whether vLLM is writing a file, or `wait` for its end.

    Older versions write before they answer, without a lock. A killed vLLM leaves no whole file.
    """
    try:
        with open(lock_of(file)) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | (0 if wait else fcntl.LOCK_NB))
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def remove_states(file: Path) -> None:
    """Remove a file of states, and its lock."""
    for path in (file, lock_of(file)):
        path.unlink(missing_ok=True)


def folder_for(size: int) -> Path:
    """Return where this machine keeps `size` bytes of states: shared memory, or TMPDIR."""
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * size
    return SHARED_MEMORY if fits else Path(tempfile.gettempdir())


@contextmanager
def new_folder(parent: Path) -> Iterator[Path]:
    """Yield a locked folder whose name is its recording's alone.

    At the end the folder is removed, and so are files in `parent` with its name. Those of killed
    recordings are removed first.
    """
    _remove_abandoned(parent)
    try:
        with (
            tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent) as name,
            lock_folder(Path(name)),
        ):
            yield Path(name)
    finally:
        _remove_abandoned(parent)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError, UserError):  # it was removed meanwhile, or is in use
            if time.time() - folder.stat().st_ctime > _LOCKED_AFTER_S:
                with lock_folder(folder):
                    shutil.rmtree(folder)
    for file in parent.glob(f"*?{PREFIX}*.safetensors*"):
        owner = re.search(PREFIX + r"\w+", file.name)
        if owner and not (parent / owner[0]).exists():
            with suppress(OSError):
                file.unlink()
