"""A recording's states, computed by an installed vLLM and read from the files it leaves.

vLLM gets a shard's samples at once and batches them itself. It computes the next shard while the
threads that write this one read its states, apply the target's final norm and lm_head to them
(vLLM gives the last state before the norm) and check that they are finite, as
`HiddenStateExtractor` does.
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
from types import TracebackType

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.extraction import (
    ExtractedStates,
    StatesFuture,
    states_to_store,
    teacher_positions,
)
from draftlab.store.manifest import Manifest, Shard
from draftlab.store.receipts import lock_folder
from draftlab.store.settings import RecordSettings
from draftlab.store.shard_writer import SHARDS_AT_ONCE
from draftlab.store.store import Sample
from draftlab.target_model.metadata import TargetMetadata
from draftlab.vllm.process import VllmProcess

IN_MEMORY = Path("/dev/shm")
_PREFIX = "draftlab-states-"
_LOCKED_AFTER_S = 60  # a folder is surely locked so long after it was made
REQUESTS = 256
"""That share a pass, where their tokens are few enough (record.batch_tokens)."""


class VllmStateSource:
    """A `Source`: a context manager that starts vLLM, and ends it.

    Args:
        target: whose norm and lm_head summarise the last states.
        settings: batch_tokens is what a pass of vLLM takes at most; a longer sample goes alone.
        plan: of the recording.
    """

    def __init__(
        self, target: TargetMetadata, settings: RecordSettings, monitor: Monitor, plan: Manifest
    ) -> None:
        self.target, self.settings, self.monitor = target, settings, monitor
        self.identity = plan.identity
        self.boundaries = sorted({*plan.identity.boundaries, plan.identity.num_layers})
        self.longest = max(length for shard in plan.shards for length in shard.lengths)
        tokens = max(shard.tokens for shard in plan.shards)
        width = len(self.boundaries) * target.hidden_size * target.dtype.itemsize
        self._size = (SHARDS_AT_ONCE + 1) * tokens * width  # of files that wait to be read
        self._turn = threading.Lock()  # one batch at a time lies on the target's device

    def __enter__(self) -> VllmStateSource:
        with ExitStack() as stack:
            folder = stack.enter_context(_new_folder(self._size))
            self._process = self._started(folder)
            stack.callback(self._process.close)
            self.monitor.say(self._process.line())
            self._check()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def batches(self, shard: Shard, samples: Sequence[Sample]) -> Iterator[StatesFuture]:
        """See `Source`."""
        answer = self._process.ask({"prompts": [list(s.token_ids) for s in samples]})
        files = [Path(file) for file in answer["files"]]
        for batch in shard.batches:
            members = [samples[i] for i in batch]
            yield partial(self._captured, members, [files[i] for i in batch])

    def _started(self, folder: Path) -> VllmProcess:
        target = self.target
        _ = target.parts  # they take their place before vLLM measures what is free
        positions = self.longest + 2  # vLLM counts the token after the prompt, and its draft
        return VllmProcess(
            {
                "target": str(target.folder.resolve()),
                "dtype": str(target.dtype).removeprefix("torch."),
                "max_model_len": max(positions, 16),
                "max_num_seqs": REQUESTS,
                "boundaries": self.boundaries,
                "states_folder": str(folder),
                "engine_extra": {
                    "max_num_batched_tokens": max(self.settings.batch_tokens, positions, REQUESTS),
                    "trust_remote_code": target.settings.trust_remote_code,
                },
            },
            self.settings.vllm,
            target.device,
            target.settings.gpus,
        )

    @torch.inference_mode()
    def _check(self) -> None:
        """Compares our reading of norm and lm_head with a probability that vLLM itself gives.

        Raises:
            UserError: they differ.
        """
        ids = [i % self.target.vocab_size for i in range(1, 9)]
        answer = self._process.ask({"prompts": [ids]})
        states = _read(Path(answer["files"][0]), ids).to(self.target.device)
        logits = self.target.logits(states[-1, -1])
        found = float(logits.log_softmax(-1)[answer["tokens"][0]])
        error = abs(found - answer["logprobs"][0]) / float(logits.abs().max())
        if not error <= (1e-4 if self.target.dtype == torch.float32 else 3e-2):
            raise UserError(
                "probabilities made of vLLM's states by the target's norm and lm_head differ from "
                f"vLLM's own: log p = {found:.4f} and {answer['logprobs'][0]:.4f}",
                where=self.target.folder,
                do="record with transformers (record.backend=transformers)",
            )

    @torch.inference_mode()
    def _captured(self, samples: Sequence[Sample], files: Sequence[Path]) -> ExtractedStates:
        """The states of a batch, read from its files."""
        pairs = zip(files, samples, strict=True)
        states = torch.cat([_read(file, sample.token_ids) for file, sample in pairs])
        columns = [self.boundaries.index(b) for b in self.identity.boundaries]
        with self._turn:
            states = states.to(self.target.device)
            made, finite = states_to_store(
                self.target,
                self.identity,
                states[:, columns].flatten(1),
                states[:, -1],
                teacher_positions(samples).to(states.device),
            )
            return ExtractedStates(
                {name: values.cpu() for name, values in made.items()}, finite.cpu()
            )


def _read(file: Path, token_ids: Sequence[int]) -> Tensor:
    """The states [tokens, boundaries, Ht] of a prompt, once vLLM has written them all; removed.

    Raises:
        UserError: there are none, or they are of another prompt.
    """
    lock = file.with_name(f"{file.name}.lock")
    if lock.exists():  # older versions write before they answer, without one
        with open(lock) as held:
            fcntl.flock(held, fcntl.LOCK_SH)
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"expected the states that vLLM was to write, found none that can be read: {error}",
            where=file,
            do="is there room left? TMPDIR names another folder; the same command goes on",
        ) from None
    for path in (file, lock):
        path.unlink(missing_ok=True)
    if found["token_ids"].tolist() != list(token_ids):
        raise UserError("expected a prompt's states, found those of other tokens", where=file)
    return found["hidden_states"]


@contextmanager
def _new_folder(size: int) -> Iterator[Path]:
    """A folder for files of `size` bytes in all: in memory, or where there is no room in TMPDIR.

    It is locked, and removed at the end; those that killed recordings left are removed first.
    """
    roomy = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > 2 * size
    place = IN_MEMORY if roomy else Path(tempfile.gettempdir())
    for left in place.glob(f"{_PREFIX}*"):
        with suppress(OSError, UserError):  # gone meanwhile, or in use
            if time.time() - left.stat().st_ctime > _LOCKED_AFTER_S:
                with lock_folder(left, shared=False):
                    shutil.rmtree(left)
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place) as name,
        lock_folder(Path(name), shared=False),
    ):
        yield Path(name)
