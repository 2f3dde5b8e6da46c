"""Worker processes that record on this machine's other GPUs."""

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
from draftlab.signals import worker_environment
from draftlab.target_model.locate import resolve_device


def worker_devices(processes: int, device: str) -> list[str]:
    """Return the devices of a process's workers: the GPUs after its own `device`.

    Raises:
        UserError: the machine has fewer GPUs.
    """
    main = resolve_device(device)
    if main.type == "cpu":
        return ["cpu"] * (processes - 1)
    first, available = main.index or 0, torch.cuda.device_count()
    if first + processes > available:
        raise UserError(
            f"expected {processes} GPUs from cuda:{first} on, found {available} in all",
            where="--gpus",
            do="use fewer GPUs",
        )
    return [f"cuda:{first + i}" for i in range(1, processes)]


def launched_worker_overrides() -> list[str] | None:
    """Return recipe overrides for a worker that `torchrun` or `accelerate launch` started.

    Returns:
        None: this is the first process, or no launcher started it.
    """
    if int(os.environ.get("RANK", "0")) == 0:
        return None
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return [f"target.device=cuda:{local}"] if torch.cuda.is_available() else []


@contextmanager
def recording_workers(run: Path, devices: list[str], monitor: Monitor) -> Iterator[None]:
    """Run `draftlab record --join` on each device while the block records.

    Each worker writes a log into the run folder. If a worker fails, its failure is reported, and
    the other processes record its shards.
    """
    with ExitStack() as stack:
        workers = []
        for number, device in enumerate(devices, 1):
            log = run / f"record-{number}.log"
            file = stack.enter_context(open(log, "w", encoding="utf-8"))
            command = (sys.executable, "-m", "draftlab.cli", "record", str(run / "recipe.yaml"))
            process = subprocess.Popen(
                [*command, f"target.device={device}", "--join"],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | worker_environment(),
            )
            workers.append((log, process))
        try:
            yield
        except BaseException:
            for _, process in workers:
                process.terminate()
            raise
        for log, process in workers:
            code, printed = process.wait(), bool(log.stat().st_size)
            if code:
                monitor.say(
                    f"a recording worker failed ({exit_text(code)}); the others recorded its "
                    f"shards; {f'its log: {log}' if printed else 'it printed nothing'}"
                )
            if not (code and printed):
                log.unlink()
