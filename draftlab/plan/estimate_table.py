"""The table of `--plan`: what the stages need on the GPUs that work together, and warnings."""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from draftlab.formatting import rounded_text
from draftlab.plan.estimate import (
    Estimate,
    as_bytes,
    estimate_stages,
    runs_on_cpu,
)
from draftlab.plan.sizes import Conversations
from draftlab.recipe.hardware import GPUS, Gpu
from draftlab.recipe.head_spec import planned_identity, target_config
from draftlab.recipe.recipe import Recipe
from draftlab.target_model.locate import config_folder, shipped_config
from draftlab.train.distributed.ranks import idle_note

TIME_FACTORS = (2, 4)
"""A stage takes this many times the least time."""
LIBRARIES = 0.7e9
"""Bytes of memory of a process that has imported torch and transformers."""
USABLE_MEMORY = 0.9
"""Share of a GPU's memory."""


def estimate_table(
    recipe: Recipe, runs: Path, stages: Collection[str], num_working: int = 1
) -> Iterator[str]:
    """Yield the lines of a table of estimates, and warnings about the machine.

    Args:
        runs: folder of all runs.
        stages: names of the stages in the table.
        num_working: number of GPUs that work at the same time.
    """
    rows = [
        _shared(row, recipe, num_working)
        for row in estimate_stages(recipe)
        if row.name in ("target", *stages, *["window"] * ("head" in stages))
    ]
    hardware, num_gpus = recipe.hardware, recipe.target.gpus
    gpu = GPUS.get(hardware.gpu or "")
    on_cpu = runs_on_cpu(recipe)
    machine = f"{hardware.gpus} × {hardware.gpu}" if gpu else "set hardware.gpu for times"
    if on_cpu:
        machine = "a CPU, whose times are not estimated; hardware.gpu=H100 is for a GPU"
    if hardware.nodes > 1:
        machine = f"{hardware.nodes} × {machine}"
    if num_working > 1:
        machine += f"; {num_working} work together"
    shipped = config_folder(recipe.target) == shipped_config(recipe.target) is not None
    source = "the shapes of this target in draftlab" if shipped else "the target's config.json"
    yield f"estimate ({machine}), from {source}:"
    yield f"  {'':8}{'disk':>9}  " + ("memory" if on_cpu else f"{'GPU memory':14}  time")
    for row in rows:
        memory = as_bytes(row.memory)
        if row.name in ("target", "answers") and num_gpus > 1 and memory:
            memory += f" × {num_gpus}"
        time = _time(row.seconds)
        yield f"  {row.name:8}{as_bytes(row.disk):>9}  {memory:14}  {time:17}  {row.note}"
    disk = sum(row.disk or 0 for row in rows)
    seconds = _total_seconds(rows, num_working) if gpu else None
    total = f"  {'total':8}{as_bytes(disk):>9}  {'':14}  {_time(seconds)}".rstrip()
    yield total if all(row.known for row in rows) else f"{total}, and what is unknown"
    if gpu and num_working > 1:
        yield from _bottleneck(recipe, rows)
    existing = next(p for p in (runs.resolve(), *runs.resolve().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < disk:
        yield f"  warning: {as_bytes(free)} of disk are free in the folder of runs/"
    if recipe.record.rolls:
        yield from _window_warnings(recipe)
    if "head" in stages:
        yield from _training_warnings(recipe, max(num_working, hardware.gpus))
    if on_cpu:
        yield from _cpu_memory(rows)
    if gpu:
        yield from _memory_warnings(recipe, rows, gpu)


def _shared(row: Estimate, recipe: Recipe, num_working: int) -> Estimate:
    """Return the estimate of a stage whose work so many GPUs share."""
    if row.name in ("answers", "store"):
        share = max(1, num_working // recipe.target.gpus)
    elif row.name in ("head", "window"):
        train = record = num_working
        if recipe.record.rolls and num_working > 1:
            train = max(1, min(num_working // 2, num_working - recipe.target.gpus))
            record = max(1, (num_working - train) // recipe.target.gpus)
        share = record if row.name == "window" else min(train, recipe.train.batch_rows)
    else:
        share = 1
    return row if row.seconds is None else replace(row, seconds=row.seconds / share)


def _total_seconds(rows: list[Estimate], num_working: int) -> float:
    """Return the time of all stages; a window is recorded on other GPUs while the head trains."""
    seconds = {row.name: row.seconds or 0.0 for row in rows}
    beside = 0.0
    if num_working > 1:
        beside = min(seconds.get("window", 0.0), seconds.get("head", 0.0))
    return sum(seconds.values()) - beside


def _bottleneck(recipe: Recipe, rows: list[Estimate]) -> Iterator[str]:
    """Yield which stage takes longest, and what the file system has to carry at most."""
    by_name = {row.name: row for row in rows if row.seconds}
    total = sum(row.seconds or 0 for row in by_name.values())
    if not total:
        return
    longest = max(by_name.values(), key=lambda row: row.seconds or 0)
    yield f"  bottleneck: {longest.name} takes {(longest.seconds or 0) / total:.0%} of the time"
    store = by_name.get("store")
    if store is None or not store.disk:
        return
    fastest, settings = TIME_FACTORS[0], recipe.train
    traffic = f"writing {as_bytes(store.disk / (fastest * (store.seconds or 1)))}/s"
    if head := by_name.get("head"):
        token_bytes = planned_identity(recipe, target_config(recipe.target)).bytes_per_token
        read = settings.steps * settings.batch_rows * settings.row_tokens * token_bytes
        traffic += f", then reading {as_bytes(read / (fastest * (head.seconds or 1)))}/s"
    yield f"  file system: up to {traffic}; a slower one is the bottleneck"


def _training_warnings(recipe: Recipe, num_processes: int) -> Iterator[str]:
    """Yield a warning if GPUs have nothing to do, and if rows may be too short."""
    if note := idle_note(recipe.train.batch_rows, num_processes):
        yield f"  warning: {note}"
    longest = Conversations.longest(recipe)
    if longest > (row_tokens := recipe.train.row_tokens):
        yield (
            f"  warning: the longest conversation may have about {longest:,.0f} tokens, and "
            f"train.row_tokens is {row_tokens:,}: record.max_length={row_tokens} cuts it"
        )


def _window_warnings(recipe: Recipe) -> Iterator[str]:
    """Yield a warning if a window is too small for full shards; the recording would refuse it."""
    window = recipe.record.window or 0
    token_bytes = planned_identity(recipe, target_config(recipe.target)).bytes_per_token
    shard, settings = recipe.record.shard_tokens * token_bytes, recipe.train
    step = settings.batch_rows * settings.row_tokens * token_bytes
    enough = 4 * (step + 2 * shard)
    if window < 4 * shard:
        yield (
            f"  warning: record.window is {as_bytes(window)}, and four shards of "
            f"record.shard_tokens take {as_bytes(4 * shard)}: a window that holds neither four "
            "shards nor twice all states is refused"
        )
    elif window < 2 * (step + 2 * shard):
        yield (
            f"  warning: half of record.window, {as_bytes(window // 2)}, may not hold an optimizer "
            f"step: unless the window holds all states, it is refused; {as_bytes(enough)} are "
            "enough"
        )


def _cpu_memory(rows: list[Estimate]) -> Iterator[str]:
    """Yield the memory that one process on a CPU takes, and a warning if less is available."""
    memory = {row.name: row.memory or 0.0 for row in rows}
    decoding = memory["target"] + memory.get("answers", 0.0)
    needed = LIBRARIES + max(decoding, memory.get("head", 0.0))
    yield (
        f"  memory: about {as_bytes(needed)}, {as_bytes(LIBRARIES)} of them for libraries; the "
        "target is freed before a training that does not need it"
    )
    if (available := psutil.virtual_memory().available) < needed:
        yield f"  warning: {as_bytes(available)} of memory are available on this machine"


def _memory_warnings(recipe: Recipe, rows: list[Estimate], gpu: Gpu) -> Iterator[str]:
    """Yield a warning for each stage that does not fit on the named machine."""
    by_name = {row.name: row.memory or 0.0 for row in rows}
    usable, num_gpus = USABLE_MEMORY * 1e9 * gpu.memory, recipe.target.gpus
    target = by_name["target"] + by_name.get("answers", 0.0)
    if num_gpus > recipe.hardware.gpus:
        yield f"  warning: target.gpus is {num_gpus}, and hardware.gpus {recipe.hardware.gpus}"
    if target > usable:
        yield (
            f"  warning: the target and its KV cache take {as_bytes(target)} of a GPU's "
            f"{gpu.memory:g} GB; target.gpus={math.ceil(target * num_gpus / usable)} is enough"
            + ("; without it fewer prompts are answered at once" * (by_name["target"] <= usable))
        )
    if by_name.get("head", 0.0) > usable:
        yield (
            f"  warning: training takes {as_bytes(by_name['head'])} of a GPU's {gpu.memory:g} GB: "
            "lower train.micro_rows or train.row_tokens"
        )


def _time(least: float | None) -> str:
    """Return the range of times for a least time in seconds."""
    if least is None:
        return ""
    low, high = (least * factor for factor in TIME_FACTORS)
    if high < 60:
        return "< 1 minute"
    if high < 90:
        return "about 1 minute"
    if high < 2 * 3600:
        return f"{max(low / 60, 1):.0f} to {high / 60:.0f} minutes"
    return f"{rounded_text(low / 3600, 2)} to {rounded_text(high / 3600, 2)} hours"
