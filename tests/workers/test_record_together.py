"""Several processes answer and record one run from the command line."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from draftlab.errors import UserError
from draftlab.recipe.recipe import load_recipe
from draftlab.servers import vllm_hidden_states as vllm_states
from draftlab.servers.vllm_process import PYTHON_VARIABLE
from draftlab.store.store import Store
from draftlab.target_model.loading import load_target
from draftlab.target_model.settings import TargetSettings
from draftlab.workers.pool import LocalPool, worker_devices
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import contents, copy_of_finished, draftlab, ran
from tests.helpers.vllm_stand_in import StandIn


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    """Return a working directory whose run has answers and no store."""
    copy_of_finished(tmp_path)
    shutil.rmtree(tmp_path / "runs/small/store")
    return tmp_path


def test_two_processes_answer_and_record_the_same_bytes(workshop: Path) -> None:
    other = copy_of_finished(workshop / "other") / "runs/small"
    shutil.rmtree(workshop / "runs")
    result = ran(workshop, "record", "small.yaml", "--gpus", "2")
    assert "worker 1 on cpu: loading target" in result.output
    run = workshop / "runs/small"
    assert contents(run / "store") == contents(other / "store")
    assert (run / "answers.jsonl").read_bytes() == (other / "answers.jsonl").read_bytes()
    assert not list(run.glob("worker-*.log")), result.output
    assert not [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


def test_record_backend_vllm_computes_the_states(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(TargetSettings(path=str(workshop / "toy"), device="cpu"))
    monkeypatch.setattr(vllm_states, "VllmProcess", StandIn(target, []))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    settings = ("record.backend=vllm",)
    refused = draftlab(workshop, "record", "small.yaml", *settings)
    assert "record.backend: 'transformers' in the run, 'vllm' now" in refused.output
    result = ran(workshop, "record", "small.yaml", *settings, "--force")
    assert "stand-in" in result.output
    assert "loading target" not in result.output
    store = Store.open(workshop / "runs/small/store")
    store.verify()
    assert store.manifest.settings["backend"] == "vllm"


@pytest.fixture
def pool(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> LocalPool:
    monkeypatch.chdir(workshop)
    recipe = load_recipe(Path("small.yaml"))
    return LocalPool(recipe, workshop / "runs/small", ["cpu"], RecordingMonitor())


def test_the_log_of_a_killed_worker_stays(pool: LocalPool, workshop: Path) -> None:
    log = workshop / "runs/small/worker-1.log"
    with pool:
        assert pool.describe("store").dtype == "float32"
        log.write_text("out of memory")
        os.kill(pool.workers[0]._process.pid, signal.SIGKILL)
        with pytest.raises(UserError, match="all of them have ended"):
            list(pool.run("describe", ["store"]))
    line = f"worker 1 on cpu ended (killed by SIGKILL); its log: {log}; its work is done by others"
    assert pool.monitor.lines[-1] == line
    assert log.exists()


def test_an_error_of_a_worker_names_it_and_says_what_to_do(pool: LocalPool, workshop: Path) -> None:
    shutil.rmtree(workshop / "toy")
    with (
        pool,
        pytest.raises(UserError, match="worker 1 on cpu: expected a checkpoint folder") as caught,
    ):
        pool.describe("store")
    assert caught.value.do


def test_processes_that_were_launched_together_do_not_record(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = ran(workshop, "record", "small.yaml", code=2)
    assert "--gpus N" in result.output
    assert "--ray ADDRESS" in result.output


def test_worker_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert worker_devices(1, "auto") == ["cuda:0"]
    assert worker_devices(2, "cuda:1") == ["cuda:1", "cuda:2"]
    assert worker_devices(2, "cpu") == ["cpu", "cpu"]
    with pytest.raises(UserError, match="expected 4 GPUs from cuda:1 on, found 4"):
        worker_devices(4, "cuda:1")
