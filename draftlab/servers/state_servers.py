"""Hidden states from vLLM servers that run elsewhere and write them to a shared folder.

A server tells where it has written the states of a request. It may be a stranger's: only a file
whose name has the request's id, in the folder that the recipe names, is read and removed.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from shlex import join
from threading import Event
from typing import Any

from safetensors import SafetensorError

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.servers.connection import Connection, in_threads
from draftlab.servers.repeated_requests import NoRoom, RepeatedRequests, completion_body
from draftlab.servers.settings import ServerSettings
from draftlab.servers.vllm_client.loading import generation_override
from draftlab.servers.vllm_state_files import StatesFormat, is_locked
from draftlab.store.settings import StateServerSettings

AT_ONCE = 256
"""Requests under way at a time, at all servers together."""
_APPEAR_S, _POLL_S = 5.0, 0.02
"""Seconds until a file that another machine has written is seen here, and between two looks."""


class StateServers:
    """The servers of a recording, used by `VllmStateSource` in place of a `VllmProcess`.

    Args:
        folder: see `new_folder`; its name begins the ids of all requests.
        format: of the states.

    Attributes:
        connections: to the servers.

    Raises:
        UserError: one of them cannot be reached, or serves several models and none is named.
    """

    def __init__(
        self, settings: StateServerSettings, folder: Path, format: StatesFormat, monitor: Monitor
    ) -> None:
        self._folder, self._format, self._numbers = folder, format, itertools.count()
        self._requests = RepeatedRequests(
            "store", "record.server", ServerSettings(model=settings.model), monitor
        )
        served = [self._requests.connect(url) for url in settings.urls]
        self.connections = [connection for connection, _ in served]
        self._models = {connection: card["id"] for connection, card in served}

    def request(
        self, message: dict[str, Any], connections: Sequence[Connection] = ()
    ) -> dict[str, Any]:
        """Record the states of prompts, as `VllmProcess.request` does, at all servers or at some.

        A request is repeated until its file is whole, so that a server may be restarted.
        """
        servers = list(connections) or self.connections
        answer = partial(self._answer, servers)
        with in_threads(answer, AT_ONCE) as submit:
            answers = [future.result() for future in [*map(submit, message["prompts"])]]
        columns = zip(*answers, strict=True)
        return dict(zip(("files", "tokens", "logprobs"), map(list, columns), strict=True))

    def _answer(
        self, servers: Sequence[Connection], prompt: list[int], stopped: Event
    ) -> tuple[str, Any, Any]:
        place = f"/v1/completions, a sample of {len(prompt):,} tokens"
        id_ = f"{self._folder.name}-{next(self._numbers)}-"
        attempts = itertools.count()

        def body(connection: Connection) -> dict[str, Any]:
            model = self._models[connection]
            own = {"logprobs": 1, "request_id": f"{id_}{next(attempts)}"}
            return completion_body(model, prompt, 1, 0.0) | own

        def read(answer: Any, connection: Connection) -> tuple[str, Any, Any]:
            try:
                (choice,) = answer["choices"]
                (token,) = choice["token_ids"]
                (logprob,) = choice["logprobs"]["token_logprobs"]
                written = str((answer.get("kv_transfer_params") or {})["hidden_states_path"])
            except (KeyError, TypeError, ValueError, AttributeError):
                found = f"expected a token and hidden_states_path, found {json.dumps(answer)[:300]}"
                raise self._requests.failure(connection, place, found, self._format.do) from None
            file = self._folder.parent / Path(written).name
            if id_ not in file.name or file.suffix != ".safetensors":
                found = f"expected a file of states with {id_} in its name, found {written[:300]!r}"
                raise self._requests.failure(connection, place, found, self._format.do)
            try:
                self._wait_for(file, stopped)
                self._format.read(file, prompt)
            except PermissionError as error:
                reason = f"its states cannot be read: {error}"
                do = "run the servers and draftlab as the same user"
                raise self._requests.failure(connection, place, reason, do) from None
            except (FileNotFoundError, SafetensorError) as error:
                raise ValueError(f"no states at {file}; it wrote {written}: {error}") from None
            return str(file), token, logprob

        try:
            return self._requests.post(servers, "/v1/completions", body, read, stopped, place)
        except NoRoom as error:
            raise UserError(
                f"the servers have no room for a sample of {len(prompt):,} tokens: {error}",
                where=servers[0].url,
                do=f"start them with --max-model-len {len(prompt) + 2} or more, or set "
                "record.max_length",
            ) from None

    def _wait_for(self, file: Path, stopped: Event) -> None:
        """Wait until the states of a request are written.

        Raises:
            FileNotFoundError: the server ended before, or the folder is not the one it writes to.
        """
        began = time.monotonic()
        while (locked := is_locked(file)) or not file.exists():
            limit = ServerSettings().timeout_s if locked else _APPEAR_S
            if time.monotonic() - began > limit or stopped.wait(_POLL_S):
                raise FileNotFoundError(f"found none after {limit:.0f} s")


def check_folder(settings: StateServerSettings) -> Path:
    """Return the folder that is shared with the servers.

    Raises:
        UserError: there is none, or no file in it can be removed.
    """
    folder = Path(settings.folder).expanduser().absolute()
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(
            "expected a folder that this machine and the servers can write to, found none",
            where=f"record.server.folder: {folder}",
            do="make it on storage that all of them see, and start the servers with it as their "
            "shared_storage_path",
        )
    return folder


def serve_command(
    path: str, config: Any, dtype: str, boundaries: Sequence[int], tokens: int, positions: int
) -> str:
    """Return the shell command that starts such a server.

    Args:
        path, config, dtype: of the target.
        boundaries: whose states are recorded; the last one is added.
        tokens, positions: most tokens of a forward pass, and of a sample.
    """
    layers = sorted({*boundaries, config.get_text_config().num_hidden_layers})
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
    }
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "FOLDER"},
    }
    positions += 2  # vLLM counts the next token and its draft
    options = {
        "dtype": dtype,
        "max-model-len": positions,
        "max-num-batched-tokens": max(tokens, positions),
        "generation-config": "vllm",
        "speculative-config": json.dumps(speculative),
        "kv-transfer-config": json.dumps(connector),
    }
    if override := generation_override(config.to_dict()):
        options["override-generation-config"] = json.dumps(override)
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    off = ["--no-enable-prefix-caching", "--no-enable-chunked-prefill"]
    return "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 " + join(["vllm", "serve", path, *off, *words])
