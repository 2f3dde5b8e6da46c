"""A Ray cluster that runs the stages of a recipe (`--ray ADDRESS`), and its actors and nodes.

The process that the user started is the driver: it plans, hands out tasks and writes what is small.
Actors hold the target, one on each `target.gpus` GPUs of the cluster, or one on each CPU where no
node has a GPU. All nodes see the run folder at the same path. An actor writes its shards there, as
a worker on one machine does; answers go back to the driver. `pipeline/ray_training.py` has the
later stages.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import exceptions
from ray._private.services import canonicalize_bootstrap_address

from draftlab.errors import NoClusterError, UserError
from draftlab.formatting import count_text
from draftlab.process_environment import PROCESS_ENVIRONMENT
from draftlab.progress import Monitor
from draftlab.recipe.hardware import GPUS, HardwareSettings
from draftlab.recipe.recipe import Recipe
from draftlab.servers.vllm_process import PYTHON_VARIABLE
from draftlab.version import package_version
from draftlab.workers.pool import CallHandler, Outcome, Worker, WorkerPool
from draftlab.workers.target_worker import TargetDescription

CONNECT_S = 10.0
"""Seconds in which the head node has to answer."""
CHECK_S = 2.0
"""Seconds between two looks at the cluster's nodes."""
FAILED_STARTS = 3
"""Times that all actors that start may fail, before the run ends."""
VISIBLE_S = 120.0
"""Longest time until a file system shows what another node wrote, in seconds."""
POLL_S = 0.2


@dataclass(frozen=True)
class RayCluster:
    """A cluster that this process is connected to; without a GPU in any node (has_gpus) CPUs do
    the work.
    """

    has_gpus: bool

    @classmethod
    @contextmanager
    def connect(cls, address: str) -> Iterator[RayCluster]:
        """Connect this process to the cluster for the duration of the block.

        Args:
            address: "auto", the cluster of this machine; or HOST:PORT of its head node.

        Raises:
            NoClusterError: there is none, or another version of Ray or Python runs there.
            UserError: the address has another form.
        """
        if address.startswith("ray://"):
            raise UserError(
                f"expected the address of a head node such as 10.0.0.1:6379, found {address}",
                where="--ray",
                do="run draftlab on a node of the cluster, which sees the run folder",
            )
        found = address
        try:
            if address == "auto":  # Ray remembers clusters that have ended
                found = canonicalize_bootstrap_address(address) or address
            _check_address(found)
            with _kept_signals():
                ray.init(
                    found,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    runtime_env={"env_vars": _environment()},
                )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            # Ray's own words for this case name options that draftlab does not have.
            absent = found == "auto" and isinstance(error, ConnectionError)
            reason = "no Ray runs on this machine" if absent else error
            raise NoClusterError(
                f"expected a Ray cluster, found none that can be used: {reason}",
                where=f"--ray {address}" + f", which is {found}" * (found != address),
                do="start one with `ray start --head`, and `ray start --address HOST:6379` on each "
                "other node; `ray stop` forgets one of this machine that has ended",
            ) from None
        try:
            with redirect_stdout(sys.stderr):  # Ray prints what ends nodes and processes
                yield cls(bool(ray.cluster_resources().get("GPU")))
        finally:
            ray.shutdown()

    def on_cluster(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the devices that its processes on the cluster see.

        Raises:
            UserError: a setting names a device by its number, or a GPU where there is none.
        """
        devices = {"target": recipe.target.device, "train": recipe.train.device}
        for section, device in devices.items():
            if device not in ("auto", "cpu", "cuda") or (device == "cuda" and not self.has_gpus):
                raise UserError(
                    f"expected {section}.device auto, cpu or cuda on a Ray cluster"
                    f"{'' if self.has_gpus else ' without GPUs'}, found {device}",
                    do="use auto: Ray gives each process its own GPU",
                )
            devices[section] = "cuda" if self.has_gpus and device != "cpu" else "cpu"
        target = recipe.target.model_copy(update={"device": devices["target"]})
        train = recipe.train.model_copy(update={"device": devices["train"]})
        return recipe.model_copy(update={"target": target, "train": train})

    def describe(self) -> str:
        """Return a line with the nodes and what they have."""
        nodes = alive_nodes()
        kind = "GPU" if self.has_gpus else "CPU"
        total = sum(int(node["Resources"].get(kind, 0)) for node in nodes)
        return f"ray: {count_text(len(nodes), 'node')} with {count_text(total, kind)} in all"

    def hardware(self, planned: HardwareSettings) -> HardwareSettings:
        """Return the GPUs of the cluster, which has some, for a plan.

        Args:
            planned: those of the recipe, of whose kind they are if Ray does not know it.
        """
        nodes = [node["Resources"] for node in alive_nodes() if node["Resources"].get("GPU")]
        types = {name for node in nodes for name in node if name.startswith("accelerator_type:")}
        known = {name.partition(":")[2].partition("-")[0] for name in types} & GPUS.keys()
        kind = known.pop() if len(known) == 1 else planned.gpu
        gpus = int(sum(node["GPU"] for node in nodes)) // len(nodes)
        return HardwareSettings(gpu=kind, gpus=max(1, gpus), nodes=len(nodes))

    def new_pool(self, recipe: Recipe, run: Path, monitor: Monitor) -> RayPool:
        """Return a pool of actors that hold the target."""
        return RayPool(self.on_cluster(recipe), run, monitor)


def _check_address(address: str) -> None:
    """Raise an `OSError` at once if nothing answers at HOST:PORT; Ray would try for minutes.
    Another form of address raises a `UserError`.
    """
    host, _, port = address.rpartition(":")
    if address != "auto":
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise UserError(
                f"expected auto, or HOST:PORT such as 10.0.0.1:6379; found {address!r}",
                where="--ray",
                do="name the head node of a running cluster; `ray start --head` starts one",
            )
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()


@contextmanager
def _kept_signals() -> Iterator[None]:
    """Put back this process's handler of SIGTERM, which Ray replaces by its own."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _environment() -> dict[str, str]:
    """Return the variables of the cluster's processes: draftlab's own, and where vLLM is."""
    own = {PYTHON_VARIABLE: os.environ[PYTHON_VARIABLE]} if PYTHON_VARIABLE in os.environ else {}
    return PROCESS_ENVIRONMENT | own


@ray.remote(max_restarts=0)
class _TargetActor:
    """A `TargetWorker` on a node of the cluster."""

    def __init__(self, recipe: Recipe, run: Path, folder: str) -> None:
        self._recipe, self._run, self._folder = recipe, run, folder

    def start(self) -> tuple[str, str, UserError | None]:
        """Return the node's name and its version of draftlab, and what is wrong with it."""
        try:
            node, error = enter_node(self._run, self._folder), None
        except UserError as found:
            node, error = node_name(), found
        self._handler = CallHandler(self._recipe, self._run)
        print_to_log("started to answer and record")
        return node, package_version(), error

    def call(self, method: str, arguments: Sequence[Any]) -> Outcome:
        """Call a method of the `TargetWorker`."""
        outcome = self._handler.call(method, arguments)
        for line in outcome.lines:
            print_to_log(line)
        return outcome


class RayWorker(Worker):
    """An actor on a node of the cluster, whose log is the node's."""

    def __init__(self, actor: Any, node: str, log: Path) -> None:
        self._actor, self.name, self.log = actor, f"node {node}", log

    def call(self, method: str, *arguments: Any) -> Future[Outcome]:
        return self._actor.call.remote(method, arguments).future()

    def close(self) -> None:
        """End the actor."""
        with suppress(exceptions.RayError):
            ray.kill(self._actor)


class RayPool(WorkerPool):
    """Actors that hold the target, as many as the cluster has room for.

    Nodes that join later get actors, and so do the places of actors that ended. Ray could restart
    an actor and repeat its task. That task would wait until the cluster has room for the actor
    again, while others have nothing to do; so the pool gives it to another actor.
    """

    lost = (
        exceptions.RayActorError,
        exceptions.ObjectLostError,
        exceptions.NodeDiedError,
        exceptions.WorkerCrashedError,
    )

    def __init__(self, recipe: Recipe, run: Path, monitor: Monitor) -> None:
        super().__init__(monitor)
        self._recipe, self._run = recipe, run.resolve()
        self._resources = target_resources(recipe)
        self._starting: dict[Future[tuple[str, str, UserError | None]], Any] = {}
        self._next_check, self._failed_starts, self._waits = 0.0, 0, False

    def describe(self, stage: str) -> TargetDescription:
        """Return what the leader needs to know; meanwhile all places of the cluster load."""
        self.start_workers(num_places(self._resources))
        return super().describe(stage)

    def start_workers(self, num_tasks: int) -> None:
        """Start actors where the cluster has room, if there is work for them."""
        self._add_started()
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + CHECK_S
        places = num_places(self._resources)
        wanted = min(num_tasks, places) - len(self.workers) - len(self._starting)
        for _ in range(wanted):
            # Without the placement group of this process, which a rank of a training has.
            options = _TargetActor.options(**self._resources, placement_group=None)
            actor = options.remote(self._recipe, self._run, os.getcwd())
            self._starting[actor.start.remote().future()] = actor
        if not places and not self._waits:
            self._waits = True
            needs = ", ".join(f"{name} {value:g}" for name, value in self._resources.items())
            self.monitor.say(f"ray: waiting for a node with {needs}")

    def _add_started(self) -> None:
        """Add the actors that have started.

        Raises:
            UserError: none can start, or a node is not as it should be.
        """
        done = [future for future in self._starting if future.done()]
        errors = []
        for future in done:
            actor = self._starting.pop(future)
            try:
                self._add(actor, *future.result())
            except self.lost as error:
                errors.append(error)
        if len(errors) < len(done):
            self._failed_starts, self._waits = 0, False
        elif errors:  # those of a node that is lost fail together
            self._failed_starts += 1
        if self._failed_starts == FAILED_STARTS:
            raise UserError(
                f"expected processes on the cluster to start, found that they end: {errors[0]}",
                where="--ray",
                do="install draftlab and its packages on all nodes; Ray's own logs, in "
                "/tmp/ray/session_latest/logs of the node, say more",
            )

    def _add(self, actor: Any, node: str, version: str, problem: UserError | None) -> None:
        if problem is None and version != package_version():
            problem = UserError(
                f"expected draftlab {package_version()} on node {node}, found {version}",
                where="--ray",
                do="install the same version on all nodes",
            )
        if problem is not None:
            raise problem
        self.workers.append(RayWorker(actor, node, node_log(self._run, node)))
        self.monitor.say(f"ray: node {node} answers and records")

    def close(self) -> None:
        """End all actors, also those that are starting."""
        for actor in self._starting.values():
            with suppress(exceptions.RayError):
                ray.kill(actor)
        self._starting.clear()
        super().close()


def alive_nodes() -> list[dict[str, Any]]:
    """Return the nodes of the cluster that are alive, as `ray.nodes` describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def target_resources(recipe: Recipe) -> dict[str, float]:
    """Return the resources of a process that holds the target, as options of Ray.

    Ray gives a process as many threads as CPUs. Without a GPU it has one, so that the rounding of
    its sums is the same on every cluster.
    """
    if recipe.target.device == "cpu":
        return {"num_cpus": 1, "num_gpus": 0}
    gpus = recipe.target.gpus
    return {"num_cpus": gpus * cpus_per_gpu(), "num_gpus": gpus}


def cpus_per_gpu() -> int:
    """Return how many CPUs every node has for each of its GPUs; 0: a node has fewer than GPUs."""
    resources = [node["Resources"] for node in alive_nodes()]
    return min((int(r.get("CPU", 0) // r["GPU"]) for r in resources if r.get("GPU")), default=0)


def num_places(resources: dict[str, float]) -> int:
    """Return how many processes with such resources the nodes hold when nothing else runs."""
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    return sum(
        min(
            int(node["Resources"].get(names[option], 0) // amount)
            for option, amount in resources.items()
            if amount
        )
        for node in alive_nodes()
    )


def node_name() -> str:
    """Return the name of the node that this process runs on."""
    return f"{socket.gethostname()}-{ray.get_runtime_context().get_node_id()[:6]}"


def node_log(run: Path, node: str) -> Path:
    """Return the log of a node in a run folder."""
    return run / "logs" / f"{node}.log"


def enter_node(run: Path, folder: str) -> str:
    """Prepare a process on a node, which from now on prints into the node's log; return the node's
    name.

    It works in the driver's folder, to which the paths of a recipe refer. Raises a `UserError` if
    the node does not see the run folder.
    """
    node = node_name()
    if not (run / "recipe.yaml").is_file():
        raise UserError(
            f"expected node {node} to see the run folder, found nothing there",
            where=run,
            do="run in a folder of a file system that all nodes mount at the same path",
        )
    os.chdir(folder)
    log = node_log(run, node)
    log.parent.mkdir(exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:  # all processes of the node append
        sys.stdout.flush()
        sys.stderr.flush()
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    return node


def wait_for_files(folder: Path, names: Sequence[str]) -> None:
    """Wait until this node sees files of a process on another node, or raise a `UserError`.

    A network file system may show them late.
    """
    end = time.monotonic() + VISIBLE_S
    while hidden := [name for name in names if not (folder / name).is_file()]:
        if time.monotonic() > end:
            raise UserError(
                f"expected the file {hidden[0]}, which another node has written, found nothing "
                f"after {VISIBLE_S:g} s",
                where=folder,
                do="run in a folder of a file system that all nodes mount at the same path",
            )
        time.sleep(POLL_S)


def print_to_log(line: str) -> None:
    """Print a line with the time and the process into the log of this node."""
    text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {os.getpid()} {line}\n"
    os.write(1, text.encode())  # Ray Train replaces `print`
