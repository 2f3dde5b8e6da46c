"""Training by Ray Train and evaluation on a node of a Ray cluster.

The ranks run the loop that torchrun's run. Ray Train places them, and starts them again from the
last checkpoint when a node is lost. What rank 0 reports comes through a queue to the console.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from draftlab.errors import UserError
from draftlab.formatting import count_text
from draftlab.pipeline.recording import Recording
from draftlab.pipeline.training import train_and_save
from draftlab.progress import Monitor
from draftlab.recipe.recipe import Recipe
from draftlab.run.api import evaluate_head
from draftlab.run.stages import STAGES
from draftlab.signals import deliver_ending_signal, on_ending_signal
from draftlab.train.checkpoint import checkpoints
from draftlab.train.distributed.ranks import TIMEOUT, LostRankError, Ranks
from draftlab.workers.ray_cluster import (
    POLL_S,
    RayCluster,
    RayPool,
    alive_nodes,
    cpus_per_gpu,
    enter_node,
    node_log,
    print_to_log,
    target_resources,
    wait_for_files,
)
from draftlab.workers.window.devices import split_gpus

FAILURES = 3
"""Times that training may fail without a new checkpoint before the run ends."""
PROGRESS_S = 0.5
"""Least time between two reports of progress."""


def train(
    cluster: RayCluster, recipe: Recipe, run: Path, monitor: Monitor, num_ranks: int | None
) -> None:
    """Train the head of a recipe and write it into the run folder.

    Args:
        num_ranks: processes that train together; None: one on each GPU, or one on a CPU.

    Raises:
        UserError: as training does, with the name of the node; or it fails again and again.
        SystemExit: this process received SIGTERM or SIGHUP; a checkpoint is written. At a second
            signal it ends without one.
    """
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        if len(received) > 1:
            raise SystemExit(128 + number)

    with on_ending_signal(end):
        _train(cluster.on_cluster(recipe), run, monitor, num_ranks, received)
    if received:
        raise SystemExit(128 + received[0])
    wait_for_files(run / STAGES["head"].artefact, STAGES["head"].files)


def _train(
    recipe: Recipe, run: Path, monitor: Monitor, num_ranks: int | None, received: list[int]
) -> None:
    """Train until the head is written, or until a signal that this process has received."""
    failures, last = 0, None
    while not received:
        found = checkpoints(run / "train" / "checkpoints")
        failures, last = (failures, last) if found[-1:] == last else (0, found[-1:])
        try:
            _fit(recipe, run.resolve(), monitor, num_ranks or _num_gpus(recipe), received)
            return
        except (TrainingFailedError, RayActorError) as error:
            failures += 1
            reason = _first_line(error)
            if failures == FAILURES:
                raise UserError(
                    f"training failed {FAILURES} times without a new checkpoint: {reason}",
                    where=run / "logs",
                    do="the logs of the nodes say why",
                ) from None
            monitor.say(
                f"train: a process was lost ({reason}); it goes on from the last checkpoint"
            )


def _num_gpus(recipe: Recipe) -> int:
    """Return the ranks of a training on all GPUs, without those that record a window meanwhile."""
    if recipe.train.device == "cpu":
        return 1
    total = max(1, sum(int(node["Resources"].get("GPU", 0)) for node in alive_nodes()))
    if not recipe.record.rolls or recipe.target.device == "cpu":
        return total
    return split_gpus(total, recipe.target.gpus, where="--ray")[0]


def _fit(recipe: Recipe, run: Path, monitor: Monitor, num_ranks: int, received: list[int]) -> None:
    """Run Ray Train once; hand it the first signal that this process receives."""
    uses_gpu = recipe.train.device == "cuda"
    kind = "GPU" if uses_gpu else "CPU"
    monitor.say(f"ray: {count_text(num_ranks, 'process')} with a {kind} each will train")
    storage = run / ".ray-train"  # Ray Train's own notes, which nothing reads again
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    queue, signals, sent = new_queue(), new_queue(), []

    def send_signal() -> None:
        if received and not sent:
            sent.append(received[0])
            name = signal.Signals(received[0]).name
            monitor.say(f"{name}: the training writes a checkpoint and ends; again {name} ends now")
            signals.put(received[0])

    trainer = TorchTrainer(
        _train_rank,
        train_loop_config={"task": (recipe, run, os.getcwd(), queue, signals)},
        scaling_config=ScalingConfig(
            num_workers=num_ranks,
            use_gpu=uses_gpu,
            resources_per_worker={"CPU": cpus_per_gpu(), "GPU": 1} if uses_gpu else {"CPU": 1},
        ),
        run_config=RunConfig(
            name=run.name,
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=0),  # `train` decides
        ),
        torch_config=TorchConfig(timeout_s=int(TIMEOUT.total_seconds())),
    )
    try:
        # In another thread Ray Train leaves the signals of this process alone.
        relay(queue, monitor, trainer.fit, send_signal)
    finally:
        shutil.rmtree(storage, ignore_errors=True)


def _train_rank(config: dict[str, Any]) -> None:
    """Train as one rank.

    Args:
        config: "task": the recipe with the devices on the cluster, the run folder, the driver's
            working directory, the queue of its console, and that of a signal which ends the run.
    """
    recipe, run, folder, queue, signals = config["task"]
    node = enter_node(run, folder)
    rank = ray.train.get_context().get_world_rank()
    monitor = QueueMonitor(queue if rank == 0 else None)
    try:
        ranks = Ranks.join(recipe.train.device)
        recording = Recording(recipe, run, monitor)

        def new_pool(_: Ranks) -> RayPool:
            return RayPool(recipe, run, monitor)

        if rank == 0:
            threading.Thread(target=_receive_signal, args=(signals,), daemon=True).start()
        with suppress(SystemExit):  # the driver's signal, at which all ranks end after one step
            train_and_save(recording, run / STAGES["head"].artefact, ranks, new_pool)
        ranks.leave()
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, UserError) and not isinstance(error, LostRankError):
            named = UserError(f"node {node}: {error.what}", where=error.where, do=error.do)
            queue.put(("error", named))
        first = str(error).partition("\n")[0]
        raise RuntimeError(f"node {node}, rank {rank}: {type(error).__name__}: {first}") from None


def _receive_signal(signals: Queue) -> None:
    """Hand the signal that the driver receives to the training, as soon as steps are run."""
    with suppress(RayActorError):  # the driver has ended
        number = signals.get()
        while not deliver_ending_signal(number):
            time.sleep(POLL_S)


def evaluate(
    cluster: RayCluster, recipe: Recipe, run: Path, folder: Path, monitor: Monitor
) -> None:
    """Evaluate the head of a run into a folder, on a node that has room for the target; a
    `UserError` names the node.
    """
    recipe, run = cluster.on_cluster(recipe), run.resolve()
    queue = new_queue()
    remote = ray.remote(**target_resources(recipe))(_evaluate)
    arguments = (recipe, run, os.getcwd(), queue, folder.resolve())
    relay(queue, monitor, lambda: ray.get(remote.remote(*arguments)))
    wait_for_files(folder, STAGES["eval"].files)


def _evaluate(recipe: Recipe, run: Path, working: str, queue: Queue, folder: Path) -> None:
    """Evaluate the head; for a process on a node."""
    node = enter_node(run, working)
    monitor = QueueMonitor(queue)
    monitor.say(f"ray: node {node} evaluates")
    try:
        evaluate_head(
            recipe.target,
            run / STAGES["head"].artefact,
            recipe.eval,
            folder,
            monitor=monitor,
            head_name=recipe.name,
        )
    except Exception as error:
        traceback.print_exc()
        if not isinstance(error, UserError):
            error = UserError(
                f"{type(error).__name__}: {error}",
                where=node_log(run, node),
                do="the node's log has the traceback of this bug or fault of the machine",
            )
        named = UserError(f"node {node}: {error.what}", where=error.where, do=error.do)
        queue.put(("error", named))


def _first_line(error: Exception) -> str:
    """Return the first line of Ray Train's message that says something."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines[1:] if line), lines[0] if lines else "")


class QueueMonitor(Monitor):
    """Passes lines and progress to the driver, and lines to the node's log; without a queue, as
    of all ranks but the first, to the log alone.
    """

    def __init__(self, queue: Queue | None) -> None:
        self._queue, self._last = queue, 0.0

    def say(self, line: str) -> None:
        print_to_log(line)
        if self._queue is not None:
            self._queue.put(("say", line))

    def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
        now = time.monotonic()
        if self._queue is not None and (done >= total or now - self._last > PROGRESS_S):
            self._last = now
            self._queue.put(("progress", stage, done, total, detail))


def new_queue() -> Queue:
    """Return a queue on the node of this process, which no other node takes away."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})


def relay(
    queue: Queue,
    monitor: Monitor,
    work: Callable[[], Any],
    on_poll: Callable[[], None] = lambda: None,
) -> None:
    """Show what comes through a queue while some work runs in another thread, and `on_poll` is
    called.

    Raises the first `UserError` that came through the queue, or else what the work raised.
    """
    errors: list[UserError] = []
    future: Future[Any] = Future()
    # Unlike a pool's, this thread does not keep an interrupted process waiting.
    threading.Thread(target=_run_into, args=(future, work), daemon=True).start()
    ended = False
    while not ended:
        on_poll()
        ended = future.done()  # what was sent before is shown below
        with suppress(Empty):
            while True:
                kind, *arguments = queue.get(timeout=POLL_S)
                if kind == "error":
                    errors += arguments
                else:
                    getattr(monitor, kind)(*arguments)
    if errors:
        raise errors[0]
    future.result()


def _run_into(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
