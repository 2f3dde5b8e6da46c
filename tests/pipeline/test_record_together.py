"""Several processes record one run from the command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.pipeline import recording
from draftlab.pipeline.gpu_workers import (
    launched_worker_overrides,
    recording_workers,
    worker_devices,
)
from draftlab.progress import Monitor
from draftlab.store.store import Store
from draftlab.target_model.loading import load_target
from draftlab.target_model.settings import TargetSettings
from draftlab.text.answer_workers import Decode, engine_decode
from draftlab.vllm import hidden_states as vllm_states
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import contents, copy_of_finished, draftlab
from tests.helpers.vllm_stand_in import StandIn


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    """Return a working directory whose run has answers and no store."""
    copy_of_finished(tmp_path)
    shutil.rmtree(tmp_path / "runs/small/store")
    return tmp_path


def test_a_worker_process_shares_the_recording(workshop: Path) -> None:
    expected = contents(copy_of_finished(workshop / "other") / "runs/small/store")
    result = draftlab(workshop, "record", "small.yaml", "--gpus", "2")
    assert result.exit_code == 0, result.output
    assert contents(workshop / "runs/small/store") == expected
    assert not list((workshop / "runs/small").glob("record-*.log")), result.output


@pytest.mark.parametrize("verb", ["prepare", "record"])
def test_answers_are_computed_on_all_devices(
    verb: str, workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = workshop / "runs/small/answers.jsonl"
    expected, calls = answers.read_bytes(), []

    @contextmanager
    def start_answer_workers(
        settings: TargetSettings, devices: list[str], batch: int, monitor: Monitor
    ) -> Iterator[list[Decode]]:
        calls.append((devices, batch))
        yield [engine_decode(load_target(settings), batch) for _ in devices]

    monkeypatch.setattr(recording, "start_answer_workers", start_answer_workers)
    monkeypatch.setattr(recording.Recording, "record", lambda *_: None)
    shutil.rmtree(workshop / "runs")
    result = draftlab(workshop, verb, "small.yaml", "--gpus", "3")
    assert calls == [(["cpu", "cpu"], 8)], result.output
    assert answers.read_bytes() == expected


def test_the_second_process_of_a_launcher_is_a_worker(workshop: Path) -> None:
    """It waits for the plan, records free shards, and the first process completes the manifest."""
    worker = os.fork()
    if worker == 0:
        os.environ["RANK"] = "1"
        os._exit(draftlab(workshop, "record", "small.yaml").exit_code)
    result = draftlab(workshop, "record", "small.yaml")
    status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    assert (result.exit_code, status) == (0, 0), result.output
    Store.open(workshop / "runs/small/store").verify()


def test_record_backend_vllm_computes_the_states(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(TargetSettings(path=str(workshop / "toy"), device="cpu"))
    monkeypatch.setattr(vllm_states, "VllmProcess", StandIn(target, []))
    settings = ("record.backend=vllm", f"record.vllm.python={sys.executable}")
    refused = draftlab(workshop, "record", "small.yaml", *settings)
    assert "record.backend: 'transformers' in the run, 'vllm' now" in refused.output
    result = draftlab(workshop, "record", "small.yaml", *settings, "--force")
    assert result.exit_code == 0, result.output
    assert "stand-in" in result.output
    assert "loading target" not in result.output
    store = Store.open(workshop / "runs/small/store")
    store.verify()
    assert store.manifest.settings["backend"] == "vllm"
    both = ("record.online=true", *settings)
    assert "by transformers alone" in draftlab(workshop, "record", "small.yaml", *both).output


@pytest.mark.parametrize(
    ("program", "line", "logs"),
    [
        ("", None, []),
        ("echo loading; ", None, []),
        ("kill -9 $$", "a recording worker failed (killed by SIGKILL); the others recorded its "
         "shards; it printed nothing", []),
        ("echo loading; kill -9 $$", "a recording worker failed (killed by SIGKILL); the others "
         "recorded its shards; its log: {}/record-1.log", ["record-1.log"]),
    ],
)  # fmt: skip
def test_the_log_of_a_failed_worker_stays_if_it_says_something(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    line: str | None,
    logs: list[str],
) -> None:
    start = subprocess.Popen
    monkeypatch.setattr(
        "draftlab.pipeline.gpu_workers.subprocess.Popen",
        lambda command, **options: start(["sh", "-c", program], **options),
    )
    monitor = RecordingMonitor()
    with recording_workers(tmp_path, ["cpu"], monitor):
        pass
    assert monitor.lines == ([] if line is None else [line.format(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == logs


def test_a_worker_with_another_recipe_is_refused(workshop: Path) -> None:
    result = draftlab(workshop, "record", "small.yaml", "seed=7", "--join")
    assert result.exit_code == 2
    assert "seed: 0 in the run, 7 now" in result.output


def test_worker_devices_and_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert launched_worker_overrides() is None
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launched_worker_overrides() == []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert launched_worker_overrides() == ["target.device=cuda:1"]
    assert worker_devices(1, "auto") == []
    assert worker_devices(3, "cuda:1") == ["cuda:2", "cuda:3"]
    assert worker_devices(3, "cpu") == ["cpu", "cpu"]
    with pytest.raises(UserError, match="expected 4 GPUs from cuda:1 on, found 4"):
        worker_devices(4, "cuda:1")
