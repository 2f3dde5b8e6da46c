"""Assign devices to training and to the recording of a window, and end both together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.recipe.recipe import Recipe
from draftlab.store.store import Store
from draftlab.target_model.locate import resolve_device
from draftlab.train.distributed.ranks import Ranks, num_launched_here
from draftlab.workers.pool import LocalPool, WorkerPool
from draftlab.workers.window.recorder import WindowFollower, WindowRecorder, shared_store

RESTARTS = 10
"""Workers that are started again when they end: a training may last for days."""
NewPool = Callable[[Ranks], WorkerPool]
"""Returns the workers that record a window beside the training of some ranks."""
RECORDERS = "DRAFTLAB_RECORDERS"
"""Environment variable of launched ranks: number of this machine's GPUs that record."""


@contextmanager
def window_recording(
    recipe: Recipe,
    store: Store,
    ranks: Ranks,
    new_pool: NewPool,
    monitor: Monitor,
) -> Iterator[None]:
    """Record the shards of a window in the block, by workers of rank 0's `new_pool`, and delete
    them when it has succeeded.
    """
    if store.window is None or not store.window.rolls:
        yield
        return
    shared = shared_store(ranks) if ranks.size > 1 else None
    if shared is not None and not ranks.is_main:
        with WindowFollower(shared) as store.feed:
            yield
        return
    open_pool = partial(new_pool, ranks)
    recorder = WindowRecorder(store, recipe.train, recipe.seed, open_pool, shared, monitor)
    with recorder:
        store.feed = recorder
        yield
    monitor.say(recorder.line())
    recorder.clear()


def local_window_pool(recipe: Recipe, run: Path, monitor: Monitor, ranks: Ranks) -> LocalPool:
    """Return the workers that record a window on this machine, and say where they do."""
    devices = recording_devices(recipe, ranks.device, ranks.local_gpus)
    monitor.say(devices_line(devices, ranks))
    return LocalPool(recipe, run, devices, monitor, restarts=RESTARTS)


def split_gpus(total: int, target_gpus: int, where: str = "--gpus") -> tuple[int, int]:
    """Return how many of some GPUs train, and how many record the window meanwhile; raise a
    `UserError` if they are too few.

    Half of them train, since a target's forward pass costs about what a head's training does.
    """
    train = min(total // 2, total - target_gpus)
    if train < 1:
        raise UserError(
            f"expected at least {target_gpus + 1} GPUs, one to train and {target_gpus} to record, "
            f"found {total}",
            where=where,
            do="use more, or train on one GPU without --gpus and --ray, which then records, too",
        )
    return train, total - train


def num_recorders() -> int:
    """Return how many GPUs of this machine record the window, as `--gpus N` has chosen; or 0."""
    return int(os.environ.get(RECORDERS, "0"))


def recording_devices(recipe: Recipe, train_device: torch.device, num_train: int) -> list[str]:
    """Return the devices of the workers that record a window on this machine, where so many
    ranks train, rank 0 on `train_device`.
    """
    device, per_target = resolve_device(recipe.target.device), recipe.target.gpus
    if device.type == "cpu":
        return ["cpu"] * (num_recorders() or 1)
    available = torch.cuda.device_count()
    count = max(1, (num_recorders() or 1) // per_target)
    if device.index is not None:
        return [f"cuda:{device.index + i * per_target}" for i in range(count)]
    first = num_train if train_device.type == "cuda" else 0
    if train_device.type == "cuda" and num_train == 1 and train_device.index:
        first = 0 if train_device.index >= per_target else train_device.index + 1
    if first + per_target > available:
        return [f"cuda:{train_device.index or 0}"]  # one GPU does both
    return [f"cuda:{first + i * per_target}" for i in range(count)]


def check_memory_for_vllm(recipe: Recipe, train_device: torch.device) -> None:
    """Raise a `UserError` if a vLLM that records a window would take nearly all free memory of
    the GPU of the training (`train.device`, resolved).
    """
    if train_device.type != "cuda" or recipe.record.vllm.memory_share is not None:
        return
    num_train = num_launched_here()
    train = range(num_train) if num_train > 1 else [train_device.index or 0]
    for name in recording_devices(recipe, train_device, num_train):
        device = torch.device(name)
        first = device.index or 0
        gpus = range(first, first + recipe.target.gpus)
        if device.type == "cuda" and (shared := {*gpus} & {*train}):
            raise UserError(
                f"cuda:{min(shared)} trains and records the window by vLLM, which takes nine "
                "tenths of the free memory",
                where="record.vllm.memory_share",
                do="set it, such as record.vllm.memory_share=0.4, or let another GPU record",
            )


def devices_line(devices: list[str], ranks: Ranks) -> str:
    """Return a line that says which devices train and which record."""
    name = str(ranks.device) if ranks.device.index is not None else f"{ranks.device.type}:0"
    trains = name if ranks.local_gpus == 1 else f"cuda:0 to cuda:{ranks.local_gpus - 1}"
    if ranks.device.type == "cpu":
        trains = "the CPU"
    if ranks.device.type == "cpu" and devices == ["cpu"]:
        return "window: the CPU trains, and a process beside it records meanwhile"
    line = f"window: {trains} trains, and {', '.join(devices)} records meanwhile"
    return line + ("; both share the GPU" if devices == [name] else "")
