"""A Ray cluster of several nodes on this machine, and draftlab as its driver."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}
HEAD = {
    **NODE,
    "num_cpus": 0,
    "include_dashboard": False,
    "_system_config": {"health_check_timeout_ms": 60_000},  # nodes of a busy machine are slow
}
TITLES = ("ray::_TargetActor", "ray::RayTrainWorker", "ray::_evaluate")
"""How the processes of draftlab call themselves; Ray's own end their node with them."""
ROOT = Path(__file__).parents[2]


@contextmanager
def ray_cluster(num_nodes: int) -> Iterator[Cluster]:
    """Start a head node without CPUs, and nodes with one CPU each."""
    cluster = Cluster(initialize_head=True, head_node_args=HEAD, shutdown_at_exit=False)
    try:
        for _ in range(num_nodes):
            cluster.add_node(**NODE)
        yield cluster
    finally:
        cluster.shutdown()


def start_driver(
    folder: Path, *arguments: str, output: Any = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Start the command line in a process of its own, in a working directory."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "draftlab", *arguments],
        cwd=folder,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
    )


def processes(node: Any) -> list[psutil.Process]:
    """Return the processes of draftlab's actors and tasks on a node."""
    found = []
    for process in node.all_processes.get("raylet", ()):
        with suppress(psutil.Error):
            children = psutil.Process(process.process.pid).children(recursive=True)
            found += [child for child in children if _is_busy(child)]
    return found


def _is_busy(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "".join(process.cmdline()[:1]).startswith(TITLES)  # a process that ends has none
    return False
