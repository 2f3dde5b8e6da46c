"""A Ray cluster that runs the stages of a recipe (`--ray ADDRESS`).

The process that the user started is the driver: it plans, hands out tasks and writes what is small.
Actors hold the target, one on each `target.gpus` GPUs of the cluster, or one on each CPU where no
node has a GPU. All nodes see the run folder at the same path. An actor writes its shards there, as
a worker on one machine does; answers go back to the driver (`workers/ray_pool.py`).
`ray_training.py` has the later stages.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._private.services import canonicalize_bootstrap_address

from draftlab.errors import NoClusterError, UserError
from draftlab.formatting import count_text
from draftlab.process_environment import PROCESS_ENVIRONMENT
from draftlab.progress import Monitor
from draftlab.recipe.hardware import GPUS, HardwareSettings
from draftlab.recipe.recipe import Recipe
from draftlab.servers.vllm_process import PYTHON_VARIABLE
from draftlab.workers.ray_nodes import alive_nodes
from draftlab.workers.ray_pool import RayPool

CONNECT_S = 10.0
"""Seconds in which the head node has to answer."""


@dataclass(frozen=True)
class RayCluster:
    """A cluster that this process is connected to.

    Attributes:
        has_gpus: whether a node has a GPU; otherwise CPUs do the work.
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

    Raises:
        UserError: the address has another form.
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
