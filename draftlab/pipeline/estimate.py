"""Estimates of the disk, memory and time that a recipe needs, from the target's config.json.

Disk is an upper bound, since answers may end early. Times are 2 to 4 times the least time that the
data sheet of the GPU allows. Of several GPUs that hold a target, one works at a time.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from draftlab.formatting import rounded_text, size_text
from draftlab.pipeline.check_recipe import check_head, check_shapes
from draftlab.pipeline.hardware import GPUS, Gpu
from draftlab.pipeline.head_spec import planned_identity, target_config
from draftlab.pipeline.recipe import Recipe
from draftlab.pipeline.sizes import (
    PROMPT_TOKENS,
    Conversations,
    HeadSize,
    TargetSize,
)
from draftlab.store.manifest import StoreIdentity
from draftlab.target_model.locate import config_folder, shipped_config
from draftlab.train.distributed.ranks import idle_note

TIME_FACTORS = (2, 4)
"""A stage takes this many times the least time."""
REPLAYED_STEP = 2.0
"""Positions between the decode steps that `train.replay` replays: a modest acceptance length."""
CHECKPOINTS = 3
"""Checkpoints on the disk while training writes one and still keeps two (`train/checkpoint.py`)."""
USABLE_MEMORY = 0.9
"""Share of a GPU's memory."""


@dataclass(frozen=True)
class Estimate:
    """What one stage needs.

    Attributes:
        name: the stage, or "target".
        note: the sizes behind the numbers.
        disk, memory: bytes; None: none, or unknown.
        seconds: least time; None: unknown, or no GPU is named.
        known: whether the recipe says enough for an estimate.
    """

    name: str
    note: str
    disk: float | None = None
    memory: float | None = None
    seconds: float | None = None
    known: bool = True


def estimate_stages(recipe: Recipe) -> list[Estimate]:
    """Return what the target and each stage need.

    Raises:
        UserError: the target's config cannot be read, or the recipe does not fit it.
    """
    config = target_config(recipe.target)
    check_shapes(recipe, config.get_text_config())
    gpu = GPUS.get(recipe.hardware.gpu or "")
    target = TargetSize.of(recipe, config)
    conversations = Conversations.of(recipe, target.max_length)
    identity = planned_identity(recipe, config)
    head = HeadSize.of(check_head(recipe, config), recipe)
    active = f", {_count(target.active)} active per token" if target.expert_parameters else ""
    quantised = "; quantised, so that its files are smaller" if target.quantised else ""
    name = (config.architectures or [type(config).__name__])[0]
    return [
        Estimate(
            "target",
            f"{name}: {_count(target.parameters)} parameters{active}{quantised}",
            disk=target.bytes,
            memory=target.bytes / recipe.target.gpus,
        ),
        *_answers_and_store(recipe, identity, target, conversations, gpu),
        _head(recipe, head, target, gpu),
        _evaluation(recipe, target, gpu),
    ]


def estimate_table(
    recipe: Recipe, runs: Path, stages: Collection[str], num_processes: int = 1
) -> Iterator[str]:
    """Yield the lines of a table of estimates, and warnings about the machine.

    Args:
        runs: folder of all runs.
        stages: names of the stages in the table.
        num_processes: how many train together, if they are more than `hardware.gpus`.
    """
    rows = [row for row in estimate_stages(recipe) if row.name in ("target", *stages)]
    hardware, num_gpus = recipe.hardware, recipe.target.gpus
    gpu = GPUS.get(hardware.gpu or "")
    machine = f"{hardware.gpus} × {hardware.gpu}" if gpu else "set hardware.gpu for times"
    shipped = config_folder(recipe.target) == shipped_config(recipe.target) is not None
    source = "the shapes of this target in draftlab" if shipped else "the target's config.json"
    yield f"estimate ({machine}), from {source}:"
    yield f"  {'':8}{'disk':>9}  {'GPU memory':14}  time"
    for row in rows:
        memory = _bytes(row.memory)
        if row.name in ("target", "answers") and num_gpus > 1 and memory:
            memory += f" × {num_gpus}"
        yield (
            f"  {row.name:8}{_bytes(row.disk):>9}  {memory:14}  {_time(row.seconds):17}  {row.note}"
        )
    disk = sum(row.disk or 0 for row in rows)
    seconds = sum(row.seconds or 0 for row in rows) if gpu else None
    total = f"  {'total':8}{_bytes(disk):>9}  {'':14}  {_time(seconds)}".rstrip()
    yield total if all(row.known for row in rows) else f"{total}, and what is unknown"
    existing = next(p for p in (runs.resolve(), *runs.resolve().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < disk:
        yield f"  warning: {_bytes(free)} of disk are free in the folder of runs/"
    if "head" in stages:
        yield from _training_warnings(recipe, max(num_processes, hardware.gpus))
    if gpu:
        yield from _memory_warnings(recipe, rows, gpu)


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


def _memory_warnings(recipe: Recipe, rows: list[Estimate], gpu: Gpu) -> Iterator[str]:
    """Yield a warning for each stage that does not fit on the named machine."""
    by_name = {row.name: row.memory or 0.0 for row in rows}
    usable, num_gpus = USABLE_MEMORY * 1e9 * gpu.memory, recipe.target.gpus
    target = by_name["target"] + by_name.get("answers", 0.0)
    if num_gpus > recipe.hardware.gpus:
        yield f"  warning: target.gpus is {num_gpus}, and hardware.gpus {recipe.hardware.gpus}"
    if target > usable:
        yield (
            f"  warning: the target and its KV cache take {_bytes(target)} of a GPU's "
            f"{gpu.memory:g} GB; target.gpus={math.ceil(target * num_gpus / usable)} is enough"
            + ("; without it fewer prompts are answered at once" * (by_name["target"] <= usable))
        )
    if by_name.get("head", 0.0) > usable:
        yield (
            f"  warning: training takes {_bytes(by_name['head'])} of a GPU's {gpu.memory:g} GB: "
            "lower train.micro_rows or train.row_tokens"
        )


def _answers_and_store(
    recipe: Recipe,
    identity: StoreIdentity,
    target: TargetSize,
    conversations: Conversations | None,
    gpu: Gpu | None,
) -> list[Estimate]:
    if recipe.record.online:
        stored = Estimate("store", "nothing is stored: the target runs while the head is trained")
        unknown = Estimate("answers", "unknown: as many as there are prompts", known=False)
        return [_answers(recipe, target, conversations, gpu) if conversations else unknown, stored]
    if conversations is None:
        why = f"there is no {recipe.prompts.source}, and prompts.max_prompts is not set"
        each = f"{_bytes(identity.bytes_per_token)} per token"
        return [Estimate("answers", f"unknown: {why}", known=False), Estimate("store", each)]
    return [
        _answers(recipe, target, conversations, gpu),
        _store(recipe, identity, target, conversations, gpu),
    ]


def _answers(
    recipe: Recipe, target: TargetSize, conversations: Conversations, gpu: Gpu | None
) -> Estimate:
    batch, assumed = recipe.regenerate.batch, ""
    if conversations.assumed:
        assumed = (
            f" (assuming {PROMPT_TOKENS} tokens per prompt: there is no {recipe.prompts.source})"
        )
    if not recipe.regenerate.enabled:
        return Estimate("answers", f"{conversations.count:,} conversations with answers{assumed}")
    if not conversations.answer:
        limit = f"no room for answers in {conversations.length:,.0f} positions"
        return Estimate(
            "answers", f"{conversations.count:,} conversations whose prompts leave {limit}{assumed}"
        )
    tokens = conversations.count * conversations.answer
    steps = math.ceil(conversations.count / batch) * conversations.answer
    mean = conversations.prompt + conversations.answer / 2
    # A KV cache that does not fit in memory is made smaller (`engine/kv_pool.py`), and answers
    # take longer.
    longest = min(conversations.long_prompt + conversations.answer, target.max_length)
    states, each = "", longest * target.kv_bytes
    if target.state_bytes is None:
        states = " (and recurrent states of unknown size)"
    elif target.state_bytes:
        states = f" and recurrent states of {size_text(target.state_bytes)}"
        each += target.state_bytes
    return Estimate(
        "answers",
        f"{conversations.count:,} conversations, at most {_count(tokens)} tokens to generate"
        f"{assumed}; KV cache of {longest:,.0f} positions{states} for each of a batch",
        disk=6 * conversations.count * conversations.length,  # text, and token ids in decimal
        memory=min(batch, conversations.count) * each / recipe.target.gpus,
        seconds=gpu and steps * target.step_seconds(gpu, batch, mean),
    )


def _store(
    recipe: Recipe,
    identity: StoreIdentity,
    target: TargetSize,
    conversations: Conversations,
    gpu: Gpu | None,
) -> Estimate:
    max_length, limit = recipe.record.max_length or target.max_length, ""
    states = "the last state"
    if identity.boundaries:
        states = f"boundaries {list(identity.boundaries)} and the last state"
    if max_length > target.max_length:
        limit = f", conversations of at most the target's {target.max_length:,} positions"
    tokens = conversations.count * min(conversations.length, max_length)
    return Estimate(
        "store",
        f"up to about {_count(tokens)} tokens of {_bytes(identity.bytes_per_token)}, "
        f"{states}{limit}",
        disk=tokens * identity.bytes_per_token,
        seconds=gpu and 2 * target.active * tokens / gpu.products / 1e12,
    )


def _head(recipe: Recipe, head: HeadSize, target: TargetSize, gpu: Gpu | None) -> Estimate:
    settings, online = recipe.train, recipe.record.online
    positions = settings.steps * settings.batch_rows * settings.row_tokens
    flops = positions * (head.flops + online * 2 * target.active)
    if (replay := settings.replay) is not None:
        replayed = positions * (1 - replay.start) * replay.share
        # The head drafts, and the target reads the conversation with the drafts of each step.
        tokens = replayed * (1 + (settings.ttt_steps - 1) / REPLAYED_STEP)
        flops += replayed * head.flops / 3 + tokens * 2 * target.active
    return Estimate(
        "head",
        f"{_count(head.trained)} parameters to train on {_count(positions)} positions",
        disk=(CHECKPOINTS * 12 + 2) * head.trained,  # weights, two moments; 16 bits at the end
        # Both are on one GPU then, unless target.device names another.
        memory=head.memory + (online or replay is not None) * target.bytes / recipe.target.gpus,
        seconds=gpu and flops / gpu.products / 1e12,
    )


def _evaluation(recipe: Recipe, target: TargetSize, gpu: Gpu | None) -> Estimate:
    """Estimate batched and timed decoding, as if each step generated one token."""
    settings = recipe.eval
    variants = 2 if settings.draft_probs == "both" else 1
    drafting = (1 + len(settings.compare)) * len(settings.k or "k")
    configs = [1 + drafting * (variants if t else 1) for t in settings.temperatures]
    rows, prompts = sum(configs), settings.max_prompts
    seconds = None
    if gpu and prompts is not None:
        steps = math.ceil(prompts / settings.batch) * settings.max_new_tokens
        seconds = rows * steps * target.step_seconds(gpu, settings.batch, PROMPT_TOKENS)
        timed = [(1, float(settings.timing_prompts))] * len(settings.timing_batches)
        timed += [(c, settings.answers_under_load(c)) for c in settings.concurrency]
        answers = sum(n * target.step_seconds(gpu, c, PROMPT_TOKENS) for c, n in timed)
        seconds += rows * settings.timing_tokens * answers
    number = f"{prompts:,}" if prompts is not None else "all"
    return Estimate("eval", f"{rows} rows of {number} prompts", seconds=seconds)


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


def _count(number: float) -> str:
    for unit, name in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if number >= unit:
            return f"{rounded_text(number / unit)}{name}"
    return f"{number:,.0f}"


def _bytes(number: float | None) -> str:
    return "" if number is None else size_text(number)
