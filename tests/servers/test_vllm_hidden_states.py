"""Recording through vLLM gives the store of the other backend, from files that vLLM writes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.servers import vllm_hidden_states as hidden_states
from draftlab.servers import vllm_state_files
from draftlab.servers.vllm_hidden_states import VllmStateSource
from draftlab.servers.vllm_process import PYTHON_VARIABLE, VllmProcess
from draftlab.store.record import record
from draftlab.store.sample_table import Sample
from draftlab.store.settings import RecordSettings
from draftlab.store.store import Store
from draftlab.target_model.loading import load_target
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings, VllmSettings
from tests.helpers.fake_vllm import read_log
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.recordings import file_hashes, identity_of, make_samples, record_store
from tests.helpers.vllm_stand_in import StandIn

SETTINGS = RecordSettings(dtype="float32", shard_tokens=100, batch_tokens=96, backend="vllm")


def record_with_vllm(
    metadata: TargetMetadata,
    folder: Path,
    samples: list[Sample] | None = None,
    monitor: Monitor | None = None,
    settings: RecordSettings = SETTINGS,
    **identity: Any,
) -> Store:
    monitor = monitor or Monitor()
    return record(
        metadata,
        make_samples() if samples is None else samples,
        folder,
        settings,
        identity_of(metadata, settings.dtype, **identity),
        monitor=monitor,
        open_source=partial(VllmStateSource, metadata, settings, monitor),
    )


@pytest.fixture
def record_with_stand_in(
    target: Target, metadata: TargetMetadata, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Store, list[dict[str, Any]]]]:
    """Return a function that records through the stand-in and returns the store and its setups."""

    def run(
        folder: Path,
        *arguments: Any,
        faults: dict[str, Any] | None = None,
        **settings: Any,
    ) -> tuple[Store, list[dict[str, Any]]]:
        setups: list[dict[str, Any]] = []
        stand_in = StandIn(target, setups, **faults or {})
        monkeypatch.setattr(hidden_states, "VllmProcess", stand_in)
        settings_ = SETTINGS.model_copy(update=settings)
        return record_with_vllm(metadata, folder, *arguments, settings=settings_), setups

    return run


def assert_same(store: Store, expected: Store) -> None:
    """Compare records and plans exactly, and states and teachers up to rounding."""
    manifests = [
        s.manifest.model_dump(exclude={"settings", "shards_sha256"}) for s in (store, expected)
    ]
    assert manifests[0] == manifests[1]
    for one, two in zip(store.manifest.shards, expected.manifest.shards, strict=True):
        assert (one.file, one.bytes) == (two.file, two.bytes)
        assert one.fp8_errors == [pytest.approx(e, rel=1e-2) for e in two.fp8_errors]
    assert store.manifest.settings == {**expected.manifest.settings, "backend": "vllm"}
    for one, two in zip(store, expected, strict=True):
        assert torch.equal(one.tokens, two.tokens)
        assert torch.equal(one.spans, two.spans)
        assert (one.id, one.temperature) == (two.id, two.temperature)
        for name in ("features", "last", "logsumexp"):
            a, b = getattr(one, name), getattr(two, name)
            size = float(b.nan_to_num().abs().max())  # the largest one's rounding reaches all
            torch.testing.assert_close(a, b, atol=1e-5 * size, rtol=1e-4, equal_nan=True)
        assert float((one.argmax == two.argmax).float().mean()) > 0.98


def test_the_store_equals_that_of_the_other_backend(
    target: Target, tmp_path: Path, record_with_stand_in: Any
) -> None:
    last_position = Sample("full", tuple(range(64)), (0,) * 4 + (1,) * 60)
    samples = [*make_samples(), last_position]
    expected = record_store(target, tmp_path / "one", samples)
    store, (setup, end) = record_with_stand_in(tmp_path / "other", samples)
    assert_same(store, expected)
    assert setup["boundaries"] == [0, 2, 3, 4]
    assert (setup["max_model_len"], setup["dtype"]) == (66, "float32")
    assert setup["max_num_seqs"] == hidden_states.BATCH_SIZE
    assert end == {"closed": True}
    assert not Path(setup["states_folder"]).exists()
    assert sorted(file_hashes(tmp_path / "one")) == sorted(file_hashes(tmp_path / "other"))


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_other_dtypes_of_the_store(
    target: Target, tmp_path: Path, record_with_stand_in: Any, dtype: str
) -> None:
    store, _ = record_with_stand_in(tmp_path / "v", dtype=dtype)
    expected = record_store(target, tmp_path / "t", dtype=dtype)
    for one, two in zip(store, expected, strict=True):
        torch.testing.assert_close(one.features, two.features, atol=0.02, rtol=0.13)
        assert float((one.features == two.features).float().mean()) > 0.99
        assert one.features.dtype == two.features.dtype


def test_a_recording_is_resumed_with_vllm_and_not_with_transformers(
    target: Target, tmp_path: Path, record_with_stand_in: Any
) -> None:
    store, _ = record_with_stand_in(tmp_path)
    expected_hashes = file_hashes(tmp_path)
    (tmp_path / store.manifest.shards[1].file).unlink()
    monitor = RecordingMonitor()
    _, setups = record_with_stand_in(tmp_path, None, monitor)
    assert file_hashes(tmp_path) == expected_hashes
    assert setups[-1] == {"closed": True}
    assert "stand-in" in monitor.lines
    assert "2 of them there already" in monitor.text
    _, setups = record_with_stand_in(tmp_path)
    assert setups == []  # a complete store starts no vLLM
    with pytest.raises(UserError, match="backend: expected None, found vllm"):
        record_store(target, tmp_path)


def test_states_that_are_not_finite_are_refused(tmp_path: Path, record_with_stand_in: Any) -> None:
    faults = {"nan": 3}  # prompt 0 is the check's own
    with pytest.raises(UserError, match="NaN or infinity at boundary 2, position 0") as error:
        record_with_stand_in(tmp_path, faults=faults)
    assert error.value.where == "sample 'c2'"
    assert "leave this conversation out of the prompts" in error.value.do


def test_folders_of_killed_recordings_are_removed_and_those_in_use_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_state_files, "_LOCKED_AFTER_S", -1)
    killed = tmp_path / "draftlab-states-killed"
    killed.mkdir()
    (killed / "0.safetensors").touch()
    (tmp_path / "cmpl-draftlab-states-killed-7-0.safetensors.lock").touch()  # by a server
    (tmp_path / "other.safetensors").touch()
    with (
        vllm_state_files.new_folder(tmp_path) as first,
        vllm_state_files.new_folder(tmp_path) as second,
    ):
        in_use = tmp_path / f"cmpl-{first.name}-7-0.safetensors"
        in_use.touch()
        with vllm_state_files.new_folder(tmp_path):
            pass
        assert set(tmp_path.iterdir()) == {first, second, in_use, tmp_path / "other.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["other.safetensors"]
    monkeypatch.setattr(vllm_state_files, "SHARED_MEMORY", tmp_path)
    assert vllm_state_files.folder_for(10) == tmp_path
    assert vllm_state_files.folder_for(2**62) != tmp_path, "more than there is room for"


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"logprob_error": 0.01}, r"other probabilities than vLLM: log p = -\d"),
        ({"missing": 2}, "states that vLLM should write, found none"),
        ({"truncated": True}, "found those of other tokens"),
    ],
)
def test_wrong_files_and_probabilities_are_refused(
    tmp_path: Path, record_with_stand_in: Any, faults: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        record_with_stand_in(tmp_path, faults=faults)
    assert not (tmp_path / "shard-00000.json").exists()  # other shards may be complete by then


def test_states_come_from_vllms_hidden_state_extraction(folder: Path, install_fake: Any) -> None:
    log = install_fake()
    setup = {"target": str(folder), "boundaries": [0, 2, 4], "max_model_len": 9}
    setup |= {"states_folder": str(folder), "max_num_seqs": 3, "engine_extra": {"extra": 1}}
    process = VllmProcess(setup, VllmSettings())
    try:
        answer = process.request({"prompts": [[5, 6], [7]]})
    finally:
        process.close()
    assert (answer["tokens"], answer["logprobs"]) == ([5, 7], [-0.5, -0.5])
    assert load_file(answer["files"][0])["hidden_states"][1].tolist() == [[6.0] * 4] * 3
    assert "copies without CUDA streams" in process.describe()
    (options,) = read_log(log)
    speculative = options["speculative_config"]
    assert speculative["method"] == "extract_hidden_states"
    assert speculative["draft_model_config"] == {
        "hf_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    }
    assert options["kv_transfer_config"] == {
        "kv_connector": "CpuHiddenStatesConnector",
        "kv_connector_module_path": "vllm_client.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    # Older versions write wrong states of a chunked prompt.
    assert options["enable_chunked_prefill"] is False
    assert options["enable_prefix_caching"] is False
    assert (options["max_num_batched_tokens"], options["extra"]) == (9, 1)


def test_metadata_equals_the_loaded_targets(target: Target, metadata: TargetMetadata) -> None:
    names = ("folder", "name", "num_layers", "hidden_size", "vocab_size", "dtype", "max_length")
    for name in (*names, "fingerprint", "device"):
        assert getattr(metadata, name) == getattr(target, name), name
    last = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(metadata.logits(last), target.logits(last))
    half = TargetMetadata(TargetSettings(path=str(target.folder), device="cpu", dtype="bfloat16"))
    assert half.logits(last).dtype == torch.float32
    assert half.dtype == half.parts.lm_head.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="expected `open_source`"):
        record(metadata, [], Path(), SETTINGS, identity_of(metadata), monitor=Monitor())


@pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} names no vLLM")
@pytest.mark.slow
def test_states_of_a_real_vllm_equal_those_of_transformers(tmp_path: Path) -> None:
    """The embedded target in float32, with the embedding's, a middle and the last boundary."""
    target = load_target(TargetSettings(device="cpu"))
    metadata = TargetMetadata(TargetSettings(device="cpu"))
    samples = [
        replace(sample, token_ids=tuple(5 + token for token in sample.token_ids))
        for sample in make_samples(20)
    ]
    boundaries = (0, 2, 7, target.num_layers)
    settings = SETTINGS.model_copy(update={"shard_tokens": 300, "vllm": VllmSettings()})
    monitor = RecordingMonitor()
    store = record_with_vllm(
        metadata,
        tmp_path / "v",
        samples,
        monitor,
        settings=settings,
        boundaries=boundaries,
    )
    identity = identity_of(target, boundaries=boundaries)
    plain = settings.model_copy(update={"backend": "transformers"})
    expected = record(target, samples, tmp_path / "t", plain, identity, monitor=Monitor())
    assert_same(store, expected)
    print(json.dumps(monitor.lines, indent=1))
