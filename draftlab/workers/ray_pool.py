"""Actors on the nodes of a Ray cluster that hold the target.

Ray could restart an actor and repeat its task. That task would wait until the cluster has room for
the actor again, while others have nothing to do; so the pool gives it to another actor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import exceptions

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.recipe.recipe import Recipe
from draftlab.version import package_version
from draftlab.workers.pool import CallHandler, Outcome, Worker, WorkerPool
from draftlab.workers.ray_nodes import (
    enter_node,
    node_log,
    node_name,
    num_places,
    print_to_log,
    target_resources,
)
from draftlab.workers.target_worker import TargetDescription

CHECK_S = 2.0
"""Seconds between two looks at the cluster's nodes."""
FAILED_STARTS = 3
"""Times that all actors that start may fail, before the run ends."""


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
    """An actor on a node of the cluster.

    Args:
        node: the node's name.
        log: the node's log.
    """

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

    Nodes that join later get actors, and so do the places of actors that ended.

    Args:
        recipe: with the devices on the cluster.
        run: the run folder.
        monitor: receives the workers' lines.
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
