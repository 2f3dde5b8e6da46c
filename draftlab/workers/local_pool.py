"""Workers on the GPUs of this machine, in processes that the leader starts (`--gpus N`)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from draftlab.errors import UserError
from draftlab.formatting import exit_text
from draftlab.progress import Monitor
from draftlab.recipe.recipe import Recipe
from draftlab.signals import end_with
from draftlab.target_model.locate import resolve_device
from draftlab.workers.pool import CallHandler, Outcome, Worker, WorkerPool, has_text

_SPAWN = get_context("spawn")  # CUDA does not work in a fork of a process that has used it


class WorkerLostError(Exception):
    """A worker process has ended; the message says how."""


class LocalPool(WorkerPool):
    """Workers on the GPUs of this machine.

    Args:
        recipe, run: as for `TargetWorker`.
        devices: of the workers.
        monitor: receives their lines.
        restarts: number of workers that are started again when they end.
    """

    lost = (WorkerLostError,)

    def __init__(
        self,
        recipe: Recipe,
        run: Path,
        devices: Sequence[str],
        monitor: Monitor,
        *,
        restarts: int = 0,
    ) -> None:
        super().__init__(monitor)
        self.recipe, self.run_folder, self._restarts = recipe, run, restarts
        self._devices = list(enumerate(devices, 1))

    def start_workers(self, num_tasks: int) -> None:
        """Start a worker on each device, and those again that have ended, as far as allowed."""
        for number, device in self._devices:
            log = self.run_folder / f"worker-{number}.log"
            self.workers.append(LocalWorker(self.recipe, self.run_folder, device, number, log))
        self._devices.clear()
        if not self.workers:
            raise UserError(
                "expected worker processes, found that all of them have ended",
                where=self.run_folder,
                do="run the same command again, with fewer GPUs if it fails again",
            )

    def drop(self, worker: Worker, error: BaseException, *, final: bool) -> None:
        if self._restarts and worker in self.workers and isinstance(worker, LocalWorker):
            self._restarts -= 1
            self._devices.append((worker.number, worker.device))
        super().drop(worker, error, final=final)


class LocalWorker(Worker):
    """A worker process on this machine."""

    def __init__(self, recipe: Recipe, run: Path, device: str, number: int, log: Path) -> None:
        self.name, self.log = f"worker {number} on {device}", log
        self.number, self.device = number, device
        self._connection, child = _SPAWN.Pipe()
        target = recipe.target.model_copy(update={"device": device})
        recipe = recipe.model_copy(update={"target": target})
        log.unlink(missing_ok=True)
        arguments = (child, recipe, run, log, os.getpid())
        self._process = _SPAWN.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        child.close()  # so that this process notices when the worker ends
        self._calls = ThreadPoolExecutor(1, "worker")

    def call(self, method: str, *arguments: Any) -> Future[Outcome]:
        return self._calls.submit(self._call, method, arguments)

    def _call(self, method: str, arguments: Sequence[Any]) -> Outcome:
        try:
            self._connection.send((method, arguments))
            return self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise WorkerLostError(exit_text(self._process.exitcode or 0)) from None

    def close(self) -> None:
        """End the process; its log stays if it failed and said something."""
        succeeded = self._process.is_alive()
        self._process.terminate()
        self._process.join()
        self._calls.shutdown(cancel_futures=True)
        self._connection.close()
        if succeeded or not has_text(self.log):
            self.log.unlink(missing_ok=True)


def _serve(connection: Connection, recipe: Recipe, run: Path, log: Path, leader: int) -> None:
    """Answer calls until the leader closes the connection or ends."""
    end_with(leader)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader ends this process
    with open(log, "w", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    device = resolve_device(recipe.target.device)
    if device.type == "cuda":  # streams, events and graphs use the current device
        torch.cuda.set_device(device)
    handler = CallHandler(recipe, run)
    with suppress(EOFError, BrokenPipeError):
        while True:
            connection.send(handler.call(*connection.recv()))
    os._exit(0)  # without waiting for threads


def worker_devices(processes: int, device: str) -> list[str]:
    """Return the devices of so many workers: GPUs from `device` on.

    Raises:
        UserError: the machine has fewer GPUs.
    """
    main = resolve_device(device)
    if main.type == "cpu":
        return ["cpu"] * processes
    first, available = main.index or 0, torch.cuda.device_count()
    if first + processes > available:
        raise UserError(
            f"expected {processes} GPUs from cuda:{first} on, found {available} in all",
            where="--gpus",
            do="use fewer GPUs",
        )
    return [f"cuda:{first + i}" for i in range(processes)]
