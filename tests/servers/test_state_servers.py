"""Recording from servers that write hidden states: the store of the present path, faults named."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftlab.errors import UserError
from draftlab.servers import repeated_requests, state_servers
from draftlab.servers.vllm_hidden_states import VllmStateSource
from draftlab.store.record import record
from draftlab.store.settings import RecordSettings
from draftlab.store.store import Store
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target
from tests.helpers.http_server import Handler, Server, running
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.recordings import file_hashes, identity_of, make_samples, record_store
from tests.helpers.small_run import draftlab, ran
from tests.helpers.vllm_stand_in import StandIn

BOUNDARIES = [0, 2, 3, 4]


class StateServer(Server):
    """A stand-in for a vLLM with its hidden-state connector.

    Attributes:
        failures: one for each of the next requests after the checks': an HTTP status, or "drop".
        changes: what is wrong with all of its answers.
        num_requests: completions asked for.
    """

    def __init__(self, target: Target, folder: Path, changes: dict[str, Any]) -> None:
        super().__init__(_Handler)
        self.target, self.folder, self.changes = target, folder, changes
        self.failures: list[int | str] = []
        self.num_requests = 0

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, changes = body["prompt"], self.changes
        boundaries = tuple(changes.get("boundaries", BOUNDARIES))
        with StandIn.target_lock:  # also of the logits: their norm has the hook of the last state
            states = self.target.states(torch.tensor([ids]), boundaries)
            logprobs = self.target.logits(states.last[0, -1]).log_softmax(-1)
        features = states.features[0].view(len(ids), -1, self.target.hidden_size)
        token = int(logprobs.argmax())
        tensors = {
            "hidden_states": features.to(changes.get("dtype", torch.float32)),
            "token_ids": torch.tensor(ids[::-1] if "wrong ids" in changes else ids),
        }
        file = self.folder / f"cmpl-{body['request_id']}-0-abcd.safetensors"
        if "missing" not in changes:
            save_file({name: values.contiguous() for name, values in tensors.items()}, file)
        choice = {"token_ids": [token], "logprobs": {"token_logprobs": [float(logprobs[token])]}}
        transfer = {"hidden_states_path": changes.get("path", f"/elsewhere/{file.name}")}
        return {"choices": [choice], "kv_transfer_params": transfer} | changes.get("answer", {})


class _Handler(Handler):
    server: StateServer

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "target"}]})

    def do_POST(self) -> None:
        body, server = json.loads(self.body()), self.server
        server.num_requests += 1
        failure = server.failures.pop(0) if server.failures and server.num_requests > 3 else None
        if failure == "drop":
            server.complete(body)  # its file is nobody's
            self.close_connection = True
        elif failure is not None:
            self.answer(int(failure), {"error": f"failure {failure}"})
        elif room := server.changes.get("no room"):
            self.answer(400, {"error": room})
        else:
            self.answer(200, server.complete(body))


def serve(target: Target, folder: Path, **changes: Any) -> AbstractContextManager[StateServer]:
    folder.mkdir(exist_ok=True)
    return running(StateServer(target, folder, changes))


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_requests, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(state_servers, "_APPEAR_S", 0.01)


def record_from(
    metadata: TargetMetadata, folder: Path, servers: list[StateServer]
) -> tuple[Store, str]:
    shared = {"urls": [server.url for server in servers], "folder": str(servers[0].folder)}
    settings = RecordSettings.model_validate(
        {"dtype": "float32", "shard_tokens": 100, "batch_tokens": 96}
        | {"backend": "server", "server": shared}
    )
    monitor = RecordingMonitor()
    source = partial(VllmStateSource, metadata, settings, monitor)
    identity = identity_of(metadata, "float32")
    arguments = (metadata, make_samples(), folder, settings, identity)
    return record(*arguments, monitor=monitor, open_source=source), monitor.text


def test_the_store_is_that_of_one_process_whatever_fails_on_the_way(
    target: Target, metadata: TargetMetadata, tmp_path: Path
) -> None:
    expected = record_store(target, tmp_path / "one")
    shared = tmp_path / "shared"
    with serve(target, shared) as first, serve(target, shared) as second:
        first.failures = [429, "drop", 500, "drop", 503]
        second.failures = ["drop", 500]
        store, said = record_from(metadata, tmp_path / "other", [first, second])
        assert min(first.num_requests, second.num_requests) > 6, "both of them work"
    assert "2 servers" in said
    assert "boundary 2 and the last one are the target's" in said
    assert said.count("requests are repeated: ") == 1, "not a line for each of them"
    assert not any(shared.iterdir()), "files of requests that broke off are removed, too"
    assert store.manifest.settings["backend"] == "server"
    assert [s.lengths for s in store.manifest.shards] == [
        s.lengths for s in expected.manifest.shards
    ]
    for one, two in zip(store, expected, strict=True):
        assert torch.equal(one.tokens, two.tokens)
        torch.testing.assert_close(one.features, two.features, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one.last, two.last, atol=1e-4, rtol=1e-4)


def test_a_server_that_is_gone_stops_nothing_and_a_restart_goes_on(
    target: Target, metadata: TargetMetadata, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    with serve(target, shared) as server:
        server.failures = [500] * 8 * 12
        with pytest.raises(UserError, match=r"HTTP 500.*\(8 attempts\)"):
            record_from(metadata, tmp_path / "store", [server])
        assert not any(shared.iterdir())
        server.failures = []
        record_from(metadata, tmp_path / "store", [server])
    with serve(target, shared) as other:
        record_from(metadata, tmp_path / "again", [other])
    assert file_hashes(tmp_path / "store") == file_hashes(tmp_path / "again")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wrong ids": True}, "found those of other tokens"),
        ({"boundaries": [0, 2, 4]}, r"states \[8, 4, 32\].*found \[8, 3, 32\]"),
        ({"boundaries": [0, 1, 3, 4]}, "states of boundary 2, found.* boundary 1, "),
        ({"boundaries": [0, 3, 2, 4]}, "states of boundary 2, found.* boundary 3, "),
        ({"boundaries": [0, 2, 3, 3]}, "other probabilities than vLLM"),
        ({"dtype": torch.float16}, "in torch.float32, found .* in torch.float16"),
        ({"answer": {"kv_transfer_params": None}}, "expected a token and hidden_states_path"),
        ({"answer": {"choices": []}}, "expected a token and hidden_states_path"),
        ({"path": "/home/user/mine.safetensors"}, "expected a file of states with draftlab-"),
        ({"missing": True}, "no states at .*; it wrote /elsewhere/cmpl-draftlab-states"),
        ({"no room": "maximum context length is 64"}, "no room for a sample of 8 tokens"),
    ],
)
def test_faults_are_named(
    target: Target, metadata: TargetMetadata, tmp_path: Path, changes: Any, words: str
) -> None:
    started = time.monotonic()
    with (
        serve(target, tmp_path / "shared", **changes) as server,
        pytest.raises(UserError, match=words) as caught,
    ):
        record_from(metadata, tmp_path / "store", [server])
    assert time.monotonic() - started < 20
    assert "http://127.0.0.1" in str(caught.value) or str(server.folder) in str(caught.value)


def test_servers_of_other_weights_are_refused(
    target: Target, metadata: TargetMetadata, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    with (
        serve(target, shared) as first,
        serve(target, shared, boundaries=[0, 1, 3, 4]) as other,
        pytest.raises(UserError, match="expected equal states of a prompt") as caught,
    ):
        record_from(metadata, tmp_path / "store", [first, other])
    assert caught.value.where == other.url


def test_the_plan_prints_how_a_server_is_started(workshop: Path) -> None:
    server = "record.server={urls: ['http://localhost:1'], folder: shared}"
    plan = ("run", "small.yaml", "record.backend=server", "--plan")
    result = draftlab(workshop, *plan)
    assert "expected server.urls and server.folder" in " ".join(result.output.split())
    result = draftlab(workshop, *plan, server)
    assert "expected a folder that this machine and the servers can write to" in " ".join(
        result.output.split()
    )
    (workshop / "shared").mkdir()
    result = ran(workshop, *plan, server)
    assert "vllm serve" in result.output
    assert "eagle_aux_hidden_state_layer_ids" in result.output
