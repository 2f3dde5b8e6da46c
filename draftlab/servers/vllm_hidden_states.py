"""Hidden states for a recording, computed by an installed vLLM or by vLLM servers elsewhere.

vLLM gets all samples of a shard in one request, and batches them itself unless the store is a
window. While it computes the next shard, the threads that write this one read its states, apply the
target's final norm and lm_head to them (vLLM returns the last state before the norm) and check them
for NaN and infinity, as `HiddenStateExtractor` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from draftlab.errors import UserError
from draftlab.formatting import count_text
from draftlab.progress import Monitor
from draftlab.servers.connection import is_token_id
from draftlab.servers.state_servers import AT_ONCE, StateServers, check_folder
from draftlab.servers.vllm_process import VllmProcess
from draftlab.servers.vllm_state_files import StatesFormat, folder_for, new_folder, remove_states
from draftlab.store.extraction import (
    ExtractedStates,
    StatesFuture,
    states_to_store,
    teacher_positions,
)
from draftlab.store.manifest import Manifest, Shard
from draftlab.store.recording_plan import batches_of
from draftlab.store.sample_table import Sample
from draftlab.store.settings import RecordSettings
from draftlab.store.shard_writer import SHARDS_AT_ONCE
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.stand_in import load_first_layers

BATCH_SIZE = 256
"""Maximum number of requests in a forward pass, as far as record.batch_tokens allows."""
_PROBE = 8
"""Tokens of the prompt whose states are checked first."""
Ask = Callable[[dict[str, Any]], dict[str, Any]]


class VllmStateSource:
    """A `StateSource`: a context manager that starts and ends vLLM, or finds the servers.

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
        do = "record with record.backend=transformers"
        if settings.backend == "server":
            do = "start the servers by the command that --plan prints"
        self._format = StatesFormat((len(self.boundaries), target.hidden_size), target.dtype, do)
        self._tolerance = 1e-3 if target.dtype == torch.float32 else 0.1
        self._lock = threading.Lock()  # one batch at a time is on the target's device

    def __enter__(self) -> VllmStateSource:
        server = self.settings.server if self.settings.backend == "server" else None
        parent = folder_for(self._unread_bytes) if server is None else check_folder(server)
        with ExitStack() as stack:
            folder = stack.enter_context(new_folder(parent))
            self._ask: Ask
            if server is not None:
                servers = StateServers(server, folder, self._format, self.monitor)
                self._check_servers(servers)
                self._ask = servers.request
            else:
                process = self._start(folder)
                stack.callback(process.close)
                self.monitor.say(process.describe())
                self._ask = process.request
                self._check(self._ask, _probe(_PROBE, self.target), process.python)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def batches(self, shard: Shard, samples: Sequence[Sample]) -> Iterator[StatesFuture]:
        """Yield the states of each batch (see `StateSource`), after one request for the shard."""
        answer = self._ask({"prompts": [np.asarray(s.token_ids).tolist() for s in samples]})
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

    def _check_servers(self, servers: StateServers) -> None:
        """Check the states of every server: a prompt twice, and a longest one that begins with it.

        Raises:
            UserError: they differ, at one server or between servers, or `_check` refuses them.
        """
        expected: Tensor | None = None
        for connection in servers.connections:
            ask = partial(servers.request, connections=[connection])
            for length in (_PROBE, _PROBE, max(_PROBE, self.max_sample_tokens)):
                prompt = _probe(length, self.target)
                states = self._check(ask, prompt, connection.url)[:_PROBE].float()
                expected = states if expected is None else expected
                error = float(((states - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
                if not error <= self._tolerance:
                    raise UserError(
                        f"expected equal states of a prompt's first {_PROBE} tokens, found that "
                        f"they differ by {error:.2g} of their size from those at "
                        f"{servers.connections[0].url}, in a prompt of {length:,} tokens",
                        where=connection.url,
                        do="serve the same weights at all urls, and " + self._format.do,
                    )
        assert expected is not None
        checked = self._check_first_layers(expected, servers.connections[0].url)
        self.monitor.say(
            f"store: {count_text(len(servers.connections), 'server')} for the hidden states, up to "
            f"{AT_ONCE} requests at once; {checked}. The servers must have been started with "
            f"{self.boundaries}"
        )

    @torch.inference_mode()
    def _check_first_layers(self, states: Tensor, where: str) -> str:
        """Compare servers' states of a prompt with those of the target's first layers.

        Returns:
            What is known of the servers' layers.

        Raises:
            UserError: the states are not those of the first boundary.
        """
        last = self.identity.num_layers
        first = next(b for b in self.boundaries if b > 0)
        if first == last:
            return "the probabilities show that their states are the last ones"
        try:
            known = self._first_states(first + 1, len(states))
        except UserError as error:  # transformers cannot load all that vLLM can
            return f"warning: which layers they record is not checked: {error.what}"
        own = states[:, self.boundaries.index(first), None]
        errors = ((own - known).norm(dim=-1) / known.norm(dim=-1)).amax(0)
        nearest = int(errors.argmin())
        if nearest == first:
            size = "" if errors[first] <= self._tolerance else f" but for {errors[first]:.2g}"
            return f"boundary {first} and the last one are the target's{size}"
        raise UserError(
            f"expected the states of boundary {first}, found those of another, most likely of "
            f"boundary {nearest}, from whose they differ by {errors[nearest]:.2g} of their size",
            where=where,
            do=self._format.do,
        )

    def _first_states(self, layers: int, length: int) -> Tensor:
        """Return the states [length, layers + 1, Ht] of the first boundaries, on the CPU."""
        target = load_first_layers(self.target.settings, layers)
        ids = torch.tensor([_probe(length, self.target)], device=target.device)
        found = target.states(ids, tuple(range(layers)))
        features = found.features[0].unflatten(-1, (layers, -1))
        return torch.cat([features, found.last[0, :, None]], 1).float().cpu()

    @torch.inference_mode()
    def _check(self, ask: Ask, prompt: list[int], where: Any) -> Tensor:
        """Compare a log probability computed here by norm and lm_head with vLLM's.

        Returns:
            The states of the prompt.

        Raises:
            UserError: they differ.
        """
        answer = ask({"prompts": [prompt]})
        token, own = answer["tokens"][0], answer["logprobs"][0]
        if not is_token_id(token, self.target.vocab_size) or not isinstance(own, float):
            raise UserError(
                f"expected a token id from 0 to {self.target.vocab_size - 1:,} and its log "
                f"probability, found {token!r} and {own!r}",
                where=where,
                do=self._format.do,
            )
        states = self._read(Path(answer["files"][0]), prompt)
        logits = self.target.logits(states[-1, -1].to(self.target.device))
        logprob = float(logits.log_softmax(-1)[token])
        error = abs(logprob - own) / float(logits.abs().max())
        if not error <= (1e-4 if self.target.dtype == torch.float32 else 3e-2):
            raise UserError(
                "the target's norm and lm_head, applied to vLLM's states, give other probabilities "
                f"than vLLM: log p = {logprob:.4f} and {own:.4f}",
                where=where,
                do=self._format.do,
            )
        return states

    @torch.inference_mode()
    def _load(self, samples: Sequence[Sample], files: Sequence[Path]) -> ExtractedStates:
        """Return the states of a batch from its files."""
        pairs = zip(files, samples, strict=True)
        states = torch.cat([self._read(file, sample.token_ids) for file, sample in pairs])
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

    def _read(self, file: Path, token_ids: Sequence[int] | np.ndarray) -> Tensor:
        """Read the states of a prompt, and remove their file."""
        try:
            states = self._format.read(file, token_ids)
            remove_states(file)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"expected the states that vLLM should write, found none that can be read: {error}",
                where=file,
                do="check the free disk space; TMPDIR names another folder. The same command goes "
                "on",
            ) from None
        return states


def _probe(length: int, target: TargetMetadata) -> list[int]:
    """Return a prompt of some tokens."""
    return [i % target.vocab_size for i in range(1, length + 1)]
