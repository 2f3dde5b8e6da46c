"""Hidden states for a recording, computed by an installed vLLM and read from its files.

vLLM gets all samples of a shard in one request, and batches them itself unless the store is a
window. While it computes the next shard, the threads that write this one read its states, apply the
target's final norm and lm_head to them (vLLM returns the last state before the norm) and check them
for NaN and infinity, as `HiddenStateExtractor` does.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.servers.connection import is_token_id
from draftlab.servers.vllm_process import VllmProcess
from draftlab.store.extraction import (
    ExtractedStates,
    StatesFuture,
    states_to_store,
    teacher_positions,
)
from draftlab.store.manifest import Manifest, Shard
from draftlab.store.recording_plan import batches_of
from draftlab.store.resume import lock_folder
from draftlab.store.sample_table import Sample
from draftlab.store.settings import RecordSettings
from draftlab.store.shard_writer import SHARDS_AT_ONCE
from draftlab.target_model.metadata import TargetMetadata

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "draftlab-states-"
_LOCKED_AFTER_S = 60  # every folder in use is locked so long after it was made
BATCH_SIZE = 256
"""Maximum number of requests in a forward pass, as far as record.batch_tokens allows."""


class VllmStateSource:
    """A `StateSource`: a context manager that starts and ends vLLM.

    Args:
        target: whose norm and lm_head are applied to the last states.
        settings: batch_tokens limits a forward pass of vLLM; a longer sample has one of its own, as
            has every sample of a window.
        plan: of the recording.
    """

    def __init__(
        self, target: TargetMetadata, settings: RecordSettings, monitor: Monitor, plan: Manifest
    ) -> None:
        self.target, self.settings, self.monitor = target, settings, monitor
        self.plan, self.identity = plan, plan.identity
        self.boundaries = sorted({*plan.identity.boundaries, plan.identity.num_layers})
        self.max_sample_tokens = int(plan.index.lengths.max())
        shard_tokens = int(plan.index.shard_tokens.max())
        bytes_per_token = len(self.boundaries) * target.hidden_size * target.dtype.itemsize
        self._unread_bytes = (SHARDS_AT_ONCE + 1) * shard_tokens * bytes_per_token
        self._shape = len(self.boundaries), target.hidden_size
        self._lock = threading.Lock()  # one batch at a time is on the target's device

    def __enter__(self) -> VllmStateSource:
        with ExitStack() as stack:
            folder = stack.enter_context(_new_folder(self._unread_bytes))
            self._process = self._start(folder)
            stack.callback(self._process.close)
            self.monitor.say(self._process.describe())
            self._check()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def batches(self, shard: Shard, samples: Sequence[Sample]) -> Iterator[StatesFuture]:
        """Yield the states of each batch (see `StateSource`), after one request for the shard."""
        answer = self._process.request(
            {"prompts": [np.asarray(s.token_ids).tolist() for s in samples]}
        )
        files = [Path(file) for file in answer["files"]]
        for batch in batches_of(self.plan, shard):
            yield partial(self._load, [samples[i] for i in batch], [files[i] for i in batch])

    def _start(self, folder: Path) -> VllmProcess:
        target = self.target
        _ = target.parts  # loaded before vLLM measures the free memory
        positions = self.max_sample_tokens + 2  # vLLM counts the next token and its draft
        tokens = max(self.settings.batch_tokens, positions, BATCH_SIZE)
        return VllmProcess(
            {
                "target": str(target.folder.resolve()),
                "dtype": str(target.dtype).removeprefix("torch."),
                "max_model_len": max(positions, 16),
                # Rounding depends on the requests that share a pass, and these on when vLLM
                # receives them. A window's shards are recorded again, and should be the same.
                "max_num_seqs": BATCH_SIZE if self.settings.window is None else 1,
                "boundaries": self.boundaries,
                "states_folder": str(folder),
                "engine_extra": {
                    "max_num_batched_tokens": tokens,
                    "trust_remote_code": target.settings.trust_remote_code,
                },
            },
            self.settings.vllm,
            target.device,
            target.settings.gpus,
        )

    @torch.inference_mode()
    def _check(self) -> None:
        """Compare a log probability computed here by norm and lm_head with vLLM's.

        Raises:
            UserError: they differ.
        """
        ids = [i % self.target.vocab_size for i in range(1, 9)]
        answer = self._process.request({"prompts": [ids]})
        token = answer["tokens"][0]
        if not is_token_id(token, self.target.vocab_size):
            raise UserError(
                f"expected a token id from 0 to {self.target.vocab_size - 1:,}, found {token!r}",
                where=self._process.python,
                do="record with record.backend=transformers",
            )
        states = _read_states(Path(answer["files"][0]), ids, self._shape).to(self.target.device)
        logits = self.target.logits(states[-1, -1])
        logprob = float(logits.log_softmax(-1)[token])
        error = abs(logprob - answer["logprobs"][0]) / float(logits.abs().max())
        if not error <= (1e-4 if self.target.dtype == torch.float32 else 3e-2):
            raise UserError(
                "the target's norm and lm_head, applied to vLLM's states, give other probabilities "
                f"than vLLM: log p = {logprob:.4f} and {answer['logprobs'][0]:.4f}",
                where=self.target.folder,
                do="record with transformers (record.backend=transformers)",
            )

    @torch.inference_mode()
    def _load(self, samples: Sequence[Sample], files: Sequence[Path]) -> ExtractedStates:
        """Return the states of a batch from its files."""
        pairs = zip(files, samples, strict=True)
        states = torch.cat(
            [_read_states(file, sample.token_ids, self._shape) for file, sample in pairs]
        )
        columns = [self.boundaries.index(b) for b in self.identity.boundaries]
        with self._lock:
            states = states.to(self.target.device)
            tensors, finite = states_to_store(
                self.target,
                self.identity,
                states[:, columns].flatten(1),
                states[:, -1],
                teacher_positions(samples).to(states.device),
            )
            host = {name: values.cpu() for name, values in tensors.items()}
            return ExtractedStates(host, finite.cpu())


def _read_states(
    file: Path, token_ids: Sequence[int] | np.ndarray, shape: tuple[int, int]
) -> Tensor:
    """Wait for the states [tokens, boundaries, Ht] of a prompt, read them and remove the file.

    Args:
        shape: boundaries and Ht.

    Raises:
        UserError: there are none, they are another prompt's, or they have another shape.
    """
    lock = file.with_name(f"{file.name}.lock")
    if lock.exists():  # older versions write before they answer, without a lock
        with open(lock) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"expected the states that vLLM should write, found none that can be read: {error}",
            where=file,
            do="check the free disk space; TMPDIR names another folder. The same command goes on",
        ) from None
    for path in (file, lock):
        path.unlink(missing_ok=True)
    if not np.array_equal(tensors["token_ids"], token_ids):
        raise UserError(
            "expected the states of a prompt, found those of other tokens",
            where=file,
            do="repeat the command; if it happens again, record with record.backend=transformers",
        )
    states = tensors["hidden_states"]
    if tuple(states.shape) != (expected := (len(token_ids), *shape)):
        raise UserError(
            f"expected states in shape {list(expected)} (tokens, boundaries, hidden size), found "
            f"{list(states.shape)}",
            where=file,
            do="record with record.backend=transformers",
        )
    return states


@contextmanager
def _new_folder(size: int) -> Iterator[Path]:
    """Yield a locked folder for `size` bytes: in shared memory, or in TMPDIR if that is too small.

    The folder is removed at the end. Folders of killed recordings are removed first.
    """
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * size
    parent = SHARED_MEMORY if fits else Path(tempfile.gettempdir())
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError, UserError):  # it was removed meanwhile, or is in use
            if time.time() - folder.stat().st_ctime > _LOCKED_AFTER_S:
                with lock_folder(folder):
                    shutil.rmtree(folder)
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent) as name,
        lock_folder(Path(name)),
    ):
        yield Path(name)
