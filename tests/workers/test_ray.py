"""A Ray cluster of several nodes on this machine makes the files that one process makes."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra draftlab[ray]")
from ray.exceptions import RayActorError
from safetensors.torch import load_file, save_file

from draftlab.errors import UserError
from draftlab.heads.folder import WEIGHTS
from draftlab.recipe.hardware import HardwareSettings
from draftlab.recipe.recipe import load_recipe
from draftlab.workers import ray_cluster as ray_cluster_module
from draftlab.workers.ray_cluster import (
    RayCluster,
    RayPool,
    num_places,
    target_resources,
    wait_for_files,
)
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.ray_nodes import NODE, processes, ray_cluster, start_driver
from tests.helpers.small_run import (
    contents,
    copy_of_finished,
    draftlab,
    finished,
    new_workshop,
    ran,
    write_prompts,
)

TIMEOUT_S = 400
SLOWER = ("regenerate.max_new_tokens=64", "regenerate.piece=1", "regenerate.batch=1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(3) as cluster:
        yield cluster


class Driver:
    """A driver on a cluster, whose console is read while it runs."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.process = start_driver(folder, *arguments)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait(self, until: Callable[[], bool] | None = None) -> int | None:
        """Wait until a condition holds or the driver ends; return its exit code, if it ended."""
        end = time.monotonic() + TIMEOUT_S
        while self.process.poll() is None and not (until and until()):
            if time.monotonic() > end:
                self.process.kill()
                pytest.fail(f"it still runs after {TIMEOUT_S} s:\n{self.text}")
            time.sleep(0.05)
        if self.process.poll() is not None:
            self._reader.join(10)
        return self.process.poll()


def kept(run: Path) -> dict[str, bytes]:
    """Return the bytes of what the expensive stages of a run made."""
    files = {"answers.jsonl": (run / "answers.jsonl").read_bytes()}
    for name in ("store", "head"):
        files |= {f"{name}/{path}": data for path, data in contents(run / name).items()}
    return files


def recorded(folder: Path) -> Path:
    """Return a working directory with a run that has answers and a store, and no head yet."""
    run = copy_of_finished(folder) / "runs/small"
    for part in ("head", "train", "eval", "export"):
        shutil.rmtree(run / part)
        (run / f"stages/{part}.json").unlink(missing_ok=True)
    return folder


@pytest.mark.slow
def test_a_run_equals_that_of_one_process(cluster: Any, tmp_path: Path) -> None:
    driver = Driver(new_workshop(tmp_path), "run", "small.yaml", "--ray", cluster.address)
    assert driver.wait() == 0, driver.text
    run = tmp_path / "runs/small"
    assert kept(run) == kept(finished() / "runs/small")
    assert "ray: 4 nodes with 3 CPUs in all" in driver.text
    nodes = set(re.findall(r"ray: node (\S+) answers and records", driver.text))
    assert nodes
    assert nodes <= {path.stem for path in (run / "logs").iterdir()}
    assert re.search(r"^train: 6/6 ", driver.text, re.MULTILINE)
    assert re.search(r"^ray: node \S+ evaluates$", driver.text, re.MULTILINE)
    assert (run / "eval/report.html").is_file()
    assert not (run / ".ray-train").exists()


@pytest.mark.slow
def test_a_window_is_recorded_on_other_nodes_though_processes_are_killed(
    cluster: Any, tmp_path: Path
) -> None:
    settings = ("record.shard_tokens=128", "record.window=520KB", "train.steps=60")
    texts = [f"def f{i}(use): the user {i}" for i in range(150)]
    for name in ("ray", "full"):
        write_prompts(new_workshop(tmp_path / name) / "prompts.jsonl", texts)
    ran(tmp_path / "full", "train", "small.yaml", *settings, "record.keep=all")
    full, run = (tmp_path / name / "runs/small" for name in ("full", "ray"))
    (run / "stages").mkdir(parents=True)
    for file in ("answers.jsonl", "answers.json", "stages/answers.json"):
        shutil.copy(full / file, run / file)
    command = ("train", "small.yaml", *settings, "--ray", cluster.address)
    driver = Driver(tmp_path / "ray", *command)
    driver.wait((run / "train/metrics.jsonl").exists)
    for process in [p for node in cluster.worker_nodes for p in processes(node)]:
        process.kill()  # ranks and actors
    assert driver.wait() == 0, driver.text
    assert contents(run / "head") == contents(full / "head"), driver.text
    assert "window: recorded " in driver.text


@pytest.mark.slow
def test_two_ranks_of_ray_train_are_two_of_torchrun(cluster: Any, tmp_path: Path) -> None:
    for name in ("ray", "launched"):
        recorded(tmp_path / name)
    command = ("train", "small.yaml", "--gpus", "2", "train.device=cpu")
    launched = Driver(tmp_path / "launched", *command)
    assert launched.wait() == 0, launched.text
    driver = Driver(tmp_path / "ray", *command, "--ray", cluster.address)
    assert driver.wait() == 0, driver.text
    assert "training on 2 × cpu" in driver.text
    one, two = (kept(tmp_path / name / "runs/small") for name in ("ray", "launched"))
    assert one == two


@pytest.mark.slow
def test_killed_in_every_stage_it_ends_with_the_same_bytes(cluster: Any, workshop: Path) -> None:
    run, command = workshop / "runs/small", ("train", "small.yaml", "--ray", cluster.address)

    def busy() -> list[Any]:
        return [node for node in cluster.worker_nodes if processes(node)]

    def kill_node() -> None:
        cluster.remove_node([*busy(), *cluster.worker_nodes][0], allow_graceful=False)
        cluster.add_node(**NODE)

    driver = Driver(workshop, *command)
    assert driver.wait(lambda: "answers and records" in driver.text) is None, driver.text
    for process in [p for node in cluster.worker_nodes for p in processes(node)][:1]:
        process.kill()
    assert driver.wait((run / "store/manifest.json").exists) is None, driver.text
    kill_node()
    assert driver.wait((run / "train/metrics.jsonl").exists) is None, driver.text
    driver.process.kill()
    assert driver.wait() == -signal.SIGKILL, driver.text
    driver = Driver(workshop, *command)
    assert driver.wait(lambda: "will train" in driver.text and busy()) is None, driver.text
    kill_node()
    assert driver.wait() == 0, driver.text
    assert kept(run) == kept(finished() / "runs/small"), driver.text


@pytest.mark.slow
def test_sigterm_at_the_driver_writes_a_checkpoint(cluster: Any, tmp_path: Path) -> None:
    workshop = recorded(tmp_path)
    run, ranks = workshop / "runs/small", ("--gpus", "2", "train.device=cpu")
    settings = ("train.steps=3000", "train.checkpoint_every=3000")
    command = ("train", "small.yaml", *settings, *ranks, "--ray", cluster.address)
    driver = Driver(workshop, *command)
    driver.wait(lambda: (run / "train/metrics.jsonl").exists())
    driver.process.terminate()
    assert driver.wait() == 128 + signal.SIGTERM, driver.text
    written = re.search(r"SIGTERM: a checkpoint of step (\d+) is written", driver.text)
    assert written, driver.text
    step = int(written[1])
    (checkpoint,) = (run / "train/checkpoints").iterdir()
    assert checkpoint.name == f"step-{step:07d}"
    assert not (run / "head").exists()
    driver = Driver(workshop, *command, f"train.checkpoint_every={step + 1}")
    driver.wait(lambda: f"resuming training after step {step}" in driver.text)
    assert f"resuming training after step {step}" in driver.text
    driver.wait(lambda: len(list((run / "train/checkpoints").iterdir())) > 1)
    driver.process.kill()
    driver.wait()


@pytest.mark.slow
def test_a_node_that_joins_late_works(workshop: Path) -> None:
    write_prompts(workshop / "prompts.jsonl", [f"def f{i}(x): use x" for i in range(200)])
    alone = Driver(workshop, "prepare", "small.yaml", "name=alone", *SLOWER)
    with ray_cluster(1) as cluster:
        command = ("prepare", "small.yaml", *SLOWER, "--ray", cluster.address)
        driver = Driver(workshop, *command)
        driver.wait(lambda: "answers and records" in driver.text)
        cluster.add_node(**NODE)
        assert driver.wait() == 0, driver.text
    assert alone.wait() == 0, alone.text
    assert driver.text.count("answers and records") == 2, driver.text
    one, two = (workshop / "runs" / name / "answers.jsonl" for name in ("alone", "small"))
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.slow
def test_the_first_error_names_its_node(cluster: Any, tmp_path: Path) -> None:
    copy_of_finished(tmp_path)
    command = ("small.yaml", "--force", "--ray", cluster.address)
    wild = tmp_path / "wild"
    shutil.copytree(tmp_path / "runs/small/head", wild)
    weights = load_file(wild / WEIGHTS)
    save_file(weights | {"fc.weight": 1e38 * weights["fc.weight"]}, wild / WEIGHTS)
    diverges = (f"head.init={wild}",)
    driver = Driver(tmp_path, "train", *command, *diverges)
    assert driver.wait() == 2, driver.text
    assert re.search(r"error: node \S+: expected finite numbers", driver.text), driver.text
    assert len(re.findall("will train", driver.text)) == 1  # such an error is not repeated


@pytest.mark.timeout(60)
def test_a_cluster_that_has_ended_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray remembers the last cluster of a machine, and would try to connect for minutes."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text("127.0.0.1:9")
    result = ran(new_workshop(tmp_path), "run", "small.yaml", "--ray", "auto", code=2)
    assert re.search(r"where: --ray auto, which is [\d.]+:9\n", result.output)
    assert "expected a Ray cluster, found none that can be used" in result.output
    assert "`ray stop` forgets one" in result.output


@pytest.mark.parametrize("address", ["head", "head:port", ":6379", "head:0"])
def test_an_address_of_another_form_is_refused(address: str, tmp_path: Path) -> None:
    result = ran(new_workshop(tmp_path), "run", "small.yaml", "--ray", address, code=2)
    assert f"expected auto, or HOST:PORT such as 10.0.0.1:6379; found '{address}'" in result.output


def test_options_that_a_cluster_cannot_have_are_refused(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("small.yaml", "--ray", "auto")
    assert "found both" in draftlab(workshop, "prepare", *command, "--gpus", "2").output
    client = draftlab(workshop, "run", "small.yaml", "--ray", "ray://head:10001")
    assert "a node of the cluster, which sees the run folder" in client.output
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "Ray starts the processes" in draftlab(workshop, "run", *command).output
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install 'ray[train]>=2.60'" in draftlab(workshop, "run", *command).output


def test_devices_are_those_of_the_cluster(tmp_path: Path) -> None:
    recipe = load_recipe(new_workshop(tmp_path) / "small.yaml")
    for has_gpus, device in ((True, "cuda"), (False, "cpu")):
        there = RayCluster(has_gpus).on_cluster(recipe)
        assert there.target.device == there.train.device == device
    named = load_recipe(tmp_path / "small.yaml", ["target.device=cuda:1"])
    with pytest.raises(UserError, match=r"expected target\.device auto, cpu or cuda"):
        RayCluster(True).on_cluster(named)


def test_processes_fit_into_single_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0}},
        {"Alive": True, "Resources": {"CPU": 33.0, "GPU": 7.0}},
        {"Alive": True, "Resources": {"CPU": 16.0}},
        {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    recipe = load_recipe(new_workshop(tmp_path) / "small.yaml", ["target.gpus=4"])
    resources = target_resources(RayCluster(True).on_cluster(recipe))
    assert resources == {"num_cpus": 16, "num_gpus": 4}  # of 33 CPUs for 7 GPUs: 4 for each
    assert num_places(resources) == 3
    assert num_places(target_resources(RayCluster(False).on_cluster(recipe))) == 64 + 33 + 16


def test_nodes_without_draftlab_end_the_run_and_a_lost_node_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.nodes", list)
    recipe = load_recipe(new_workshop(tmp_path) / "small.yaml", ["target.device=cpu"])
    pool = RayPool(recipe, tmp_path, RecordingMonitor())

    def fail(count: int) -> None:
        for _ in range(count):
            future: Future[Any] = Future()
            future.set_exception(RayActorError(error_msg="no module draftlab"))
            pool._starting[future] = None

    fail(8)
    pool.start_workers(1)
    assert pool.monitor.lines == ["ray: waiting for a node with num_cpus 1, num_gpus 0"]
    fail(1)
    pool.start_workers(1)
    fail(1)
    with pytest.raises(UserError, match="no module draftlab"):
        pool.start_workers(1)


def test_files_of_other_nodes_may_appear_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = threading.Timer(0.3, (tmp_path / "report.json").touch)
    writer.start()
    wait_for_files(tmp_path, ["report.json"])
    writer.join()
    monkeypatch.setattr("draftlab.workers.ray_cluster.VISIBLE_S", 0.1)
    with pytest.raises(UserError, match=r"expected the file head\.json"):
        wait_for_files(tmp_path, ["report.json", "head.json"])


def test_draftlab_needs_no_ray() -> None:
    code = "import sys; sys.modules['ray'] = None; import draftlab.cli, draftlab.pipeline.pipeline"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_kind_of_a_plans_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes(*kinds: str) -> None:
        resources = [{"CPU": 8.0, "GPU": 8.0, f"accelerator_type:{kind}": 1.0} for kind in kinds]
        alive = [{"Resources": one} for one in (*resources, {"CPU": 64.0})]
        monkeypatch.setattr(ray_cluster_module, "alive_nodes", lambda: alive)

    planned = HardwareSettings(gpu="L40S", gpus=2, nodes=5)
    for kinds, expected in (
        (("H200", "H200"), ("H200", 8, 2)),
        (("A100-80G",), ("A100", 8, 1)),
        (("H200", "H100"), ("L40S", 8, 2)),
        (("V100",), ("L40S", 8, 1)),
    ):
        nodes(*kinds)
        found = RayCluster(has_gpus=True).hardware(planned)
        assert (found.gpu, found.gpus, found.nodes) == expected
