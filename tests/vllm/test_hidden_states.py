"""Recording through vLLM: the same store, from files that another program writes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.record import record
from draftlab.store.settings import RecordSettings
from draftlab.store.store import Sample, Store
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target, load_target
from draftlab.target_model.settings import TargetSettings, VllmSettings
from draftlab.vllm import hidden_states as vllm_states
from draftlab.vllm.hidden_states import VllmStates
from draftlab.vllm.process import PYTHON_VARIABLE
from tests.helpers.recordings import Lines, contents, identity_of, make, make_samples
from tests.helpers.toys import toy_target_folder
from tests.helpers.vllm_stand_in import StandIn

SETTINGS = RecordSettings(dtype="float32", shard_tokens=100, batch_tokens=96, backend="vllm")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = toy_target_folder(
        tmp_path_factory.mktemp("target"), layers=4, hidden=32, max_length=64
    )
    return load_target(TargetSettings(path=str(folder), device="cpu"))


@pytest.fixture
def outline(target: Target) -> TargetMetadata:
    return TargetMetadata(TargetSettings(path=str(target.folder), device="cpu"))


@pytest.fixture
def through(
    target: Target, outline: TargetMetadata, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Store, list[dict[str, Any]]]]:
    """Records through the stand-in; the store, and how vLLM was started and ended."""

    def run(
        folder: Path,
        samples: list[Sample] | None = None,
        settings: RecordSettings = SETTINGS,
        monitor: Monitor | None = None,
        **faults: Any,
    ) -> tuple[Store, list[dict[str, Any]]]:
        setups: list[dict[str, Any]] = []
        monkeypatch.setattr(vllm_states, "VllmProcess", StandIn(target, setups, **faults))
        monitor = monitor or Monitor()
        store = record(
            outline,
            make_samples() if samples is None else samples,
            folder,
            settings,
            identity_of(outline, settings.dtype),
            monitor=monitor,
            opened=partial(VllmStates, outline, settings, monitor),
        )
        return store, setups

    return run


def assert_same(found: Store, expected: Store) -> None:
    """The same records, order and plan; states and teachers to rounding."""
    plan = found.manifest.model_dump(exclude={"settings"})
    other = expected.manifest.model_dump(exclude={"settings"})
    for manifest in (plan, other):
        for shard in manifest["shards"]:
            del shard["sha256"]
            shard["fp8_errors"] = [pytest.approx(e, rel=1e-2) for e in shard["fp8_errors"]]
    assert plan == other
    assert found.manifest.settings == {**expected.manifest.settings, "backend": "vllm"}
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.spans, theirs.spans)
        assert (ours.id, ours.temperature) == (theirs.id, theirs.temperature)
        for name in ("features", "last", "logsumexp"):
            a, b = getattr(ours, name), getattr(theirs, name)
            size = float(b.nan_to_num().abs().max())  # the rounding of the largest reaches all
            torch.testing.assert_close(a, b, atol=1e-5 * size, rtol=1e-4, equal_nan=True)
        assert float((ours.argmax == theirs.argmax).float().mean()) > 0.98


def test_the_store_is_that_of_the_other_backend(
    target: Target, tmp_path: Path, through: Any
) -> None:
    full = Sample("full", tuple(range(64)), (0,) * 4 + (1,) * 60)  # the target's last position
    samples = [*make_samples(), full]
    expected = make(target, tmp_path / "one", samples)
    found, (setup, ended) = through(tmp_path / "other", samples)
    assert_same(found, expected)
    assert setup["boundaries"] == [0, 2, 3, 4]
    assert (setup["max_model_len"], setup["dtype"]) == (66, "float32")
    assert ended == {"closed": True}
    assert not Path(setup["states_folder"]).exists()
    assert sorted(contents(tmp_path / "one")) == sorted(contents(tmp_path / "other"))


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_other_dtypes_of_the_store(
    target: Target, tmp_path: Path, through: Any, dtype: str
) -> None:
    found, _ = through(tmp_path / "v", settings=SETTINGS.model_copy(update={"dtype": dtype}))
    expected = make(target, tmp_path / "t", dtype=dtype)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.features, theirs.features, atol=0.02, rtol=0.13)
        assert float((ours.features == theirs.features).float().mean()) > 0.99
        assert ours.features.dtype == theirs.features.dtype


def test_it_goes_on_where_it_stopped_and_a_whole_store_starts_nothing(
    tmp_path: Path, through: Any
) -> None:
    store, _ = through(tmp_path)
    whole = contents(tmp_path)
    (tmp_path / store.manifest.shards[1].file).unlink()
    lines = Lines()
    _, setups = through(tmp_path, monitor=lines)
    assert contents(tmp_path) == whole
    assert setups[-1] == {"closed": True}
    assert "stand-in" in lines.lines
    assert any("2 of them there already" in line for line in lines.lines), lines.lines
    _, setups = through(tmp_path)
    assert setups == []


def test_several_share_a_recording_each_with_a_vllm_of_its_own(
    outline: TargetMetadata,
    target: Target,
    tmp_path: Path,
    through: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, _ = through(tmp_path / "alone")
    started = []

    def start(setup: dict[str, Any], *_: Any) -> StandIn:
        started.append(setup["states_folder"])
        return StandIn(target, [setup])

    monkeypatch.setattr(vllm_states, "VllmProcess", start)

    def share(part: str) -> None:
        opened = partial(VllmStates, outline, SETTINGS, Monitor())
        record(
            outline,
            make_samples(),
            tmp_path / "shared",
            SETTINGS,
            identity_of(outline),
            monitor=Monitor(),
            part=part,
            opened=opened,
        )

    helper = threading.Thread(target=share, args=("help",))
    helper.start()
    share("lead")
    helper.join()
    assert contents(tmp_path / "shared") == contents(expected.folder)
    assert 1 <= len(set(started)) == len(started) <= 2


def test_a_store_of_one_backend_is_not_finished_by_the_other(
    target: Target, tmp_path: Path, through: Any
) -> None:
    through(tmp_path)
    with pytest.raises(UserError, match="backend: expected None, found vllm"):
        make(target, tmp_path)


def test_states_that_are_not_finite_are_named_as_ever(tmp_path: Path, through: Any) -> None:
    with pytest.raises(UserError, match="NaN or infinity at boundary 2, position 0") as error:
        through(tmp_path / "refused", nan=3)  # the first prompt is the check's own
    assert "sample 'c2'" in str(error.value)
    skip = SETTINGS.model_copy(update={"not_finite": "skip"})
    store, _ = through(tmp_path / "skipped", settings=skip, nan=3)
    assert store.manifest.shards[0].not_finite == {"c2": "boundary 2, position 0"}


def test_files_of_a_killed_recording_are_removed_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_states, "IN_MEMORY", tmp_path)
    monkeypatch.setattr(vllm_states, "_LOCKED_AFTER_S", -1)
    killed = tmp_path / "draftlab-states-killed"
    killed.mkdir()
    (killed / "0.safetensors").touch()
    with vllm_states._new_folder(10) as first, vllm_states._new_folder(10) as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert not any(tmp_path.iterdir())
    with vllm_states._new_folder(2**62) as elsewhere:  # more than there is room for
        assert elsewhere.parent != tmp_path


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"chance": 0.01}, r"differ from vLLM's own: log p = -\d"),
        ({"missing": 2}, "expected the states that vLLM was to write, found none"),
        ({"cut": True}, "found those of other tokens"),
    ],
)
def test_what_vllm_does_otherwise_is_refused(
    tmp_path: Path, through: Any, fault: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        through(tmp_path, **fault)
    assert not (tmp_path / "shard-00000.json").exists()  # others may have been whole by then


def test_an_outline_says_of_a_target_what_the_loaded_one_does(
    target: Target, outline: TargetMetadata
) -> None:
    names = ("folder", "name", "num_layers", "hidden_size", "vocab_size", "dtype", "max_length")
    for name in (*names, "fingerprint", "device"):
        assert getattr(outline, name) == getattr(target, name), name
    last = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(outline.logits(last), target.logits(last))
    half = TargetMetadata(TargetSettings(path=str(target.folder), device="cpu", dtype="bfloat16"))
    assert half.logits(last).dtype == torch.float32
    assert half.dtype == half.parts.lm_head.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="expected `opened`"):
        record(outline, [], Path(), SETTINGS, identity_of(outline), monitor=Monitor())


@pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} names no vLLM")
@pytest.mark.slow
def test_a_real_vllm_computes_what_transformers_does(tmp_path: Path) -> None:
    """On the embedded target in float32: an embedding's, a middle and the last boundary."""
    target = load_target(TargetSettings(device="cpu"))
    outline = TargetMetadata(TargetSettings(device="cpu"))
    settings = SETTINGS.model_copy(update={"vllm": VllmSettings(), "shard_tokens": 300})
    samples = [
        replace(sample, token_ids=tuple(5 + token for token in sample.token_ids))
        for sample in make_samples(20)
    ]
    identity = identity_of(target, boundaries=(0, 2, 7, target.num_layers))
    lines = Lines()
    opened = partial(VllmStates, outline, settings, lines)
    found = record(
        outline, samples, tmp_path / "v", settings, identity, monitor=lines, opened=opened
    )
    plain = settings.model_copy(update={"backend": "transformers"})
    expected = record(target, samples, tmp_path / "t", plain, identity, monitor=Monitor())
    assert_same(found, expected)
    print(json.dumps(lines.lines, indent=1))
