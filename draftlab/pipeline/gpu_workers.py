"""Processes that help a recording on this machine's other GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from draftlab.errors import UserError
from draftlab.formatting import exit_text
from draftlab.progress import Monitor
from draftlab.target_model.locate import resolve_device


def helper_devices(processes: int, device: str) -> list[str]:
    """Where the helpers of a process on `device` compute: the GPUs after its own.

    Raises:
        UserError: there are fewer GPUs.
    """
    own = resolve_device(device)
    if own.type == "cpu":
        return ["cpu"] * (processes - 1)
    first, there = own.index or 0, torch.cuda.device_count()
    if first + processes > there:
        raise UserError(
            f"expected {processes} GPUs from cuda:{first} on, found {there} in all",
            where="--gpus",
            do="ask for fewer",
        )
    return [f"cuda:{first + i}" for i in range(1, processes)]


def launched_helper() -> list[str] | None:
    """The recipe's overrides for a process that `torchrun` or `accelerate launch` started.

    Returns:
        None: for the first process, which leads, and for those that no launcher started.
    """
    if int(os.environ.get("RANK", "0")) == 0:
        return None
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return [f"target.device=cuda:{local}"] if torch.cuda.is_available() else []


@contextmanager
def helpers(run: Path, devices: list[str], monitor: Monitor) -> Iterator[None]:
    """Runs `draftlab record --join` on each device while the block records; logs lie in the run.

    A helper that fails is told of and not missed: the others take its shards.
    """
    with ExitStack() as stack:
        started = []
        for number, device in enumerate(devices, 1):
            log = run / f"record-{number}.log"
            file = stack.enter_context(open(log, "w", encoding="utf-8"))
            command = (sys.executable, "-m", "draftlab.cli", "record", str(run / "recipe.yaml"))
            process = subprocess.Popen(
                [*command, f"target.device={device}", "--join"],
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            started.append((log, process))
        try:
            yield
        except BaseException:
            for _, process in started:
                process.terminate()
            raise
        for log, process in started:
            if process.wait():
                monitor.say(
                    f"a helper ended ({exit_text(process.returncode)}); its shards were recorded "
                    f"by the others; its log: {log}"
                )
            else:
                log.unlink()
