"""The nodes of a Ray cluster: what they have, and how a process starts its work on one."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from draftlab.errors import UserError
from draftlab.recipe.recipe import Recipe

VISIBLE_S = 120.0
"""Longest time until a file system shows what another node wrote, in seconds."""
POLL_S = 0.2


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
    """Prepare a process on a node: from now on it prints into the node's log.

    Args:
        folder: the driver's working directory, to which the paths of a recipe refer.

    Returns:
        The name of the node.

    Raises:
        UserError: the node does not see the run folder.
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
    """Wait until this node sees files that a process on another node has written.

    A network file system may show them late.

    Raises:
        UserError: one does not appear.
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
