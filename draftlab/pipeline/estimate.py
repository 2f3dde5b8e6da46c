"""What a recipe will need: disk, memory and time, from the target's config.json alone.

Disk is an upper bound, since answers may end early. Times are what the machine could do at best,
by its maker's figures, times 2 to times 4; of several GPUs that hold a target one works at a time.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from draftlab.formatting import rounded_text, size_text
from draftlab.pipeline.hardware import GPUS, Gpu
from draftlab.pipeline.head_spec import check_shapes, target_config
from draftlab.pipeline.recipe import Recipe
from draftlab.pipeline.sizes import (
    PROMPT_TOKENS,
    Conversations,
    HeadSize,
    TargetSize,
    check_initial,
    planned_head,
    planned_identity,
)
from draftlab.store.manifest import StoreIdentity

SLOWER = (2, 4)
"""How many times slower than the best a stage may be."""
CHECKPOINTS = 2
"""That training keeps (`train/checkpoint.py`)."""
USABLE = 0.9
"""Of a GPU's memory."""


@dataclass(frozen=True)
class Need:
    """What one stage needs, in bytes and, at best, seconds; None: nothing, or not known."""

    name: str
    about: str
    disk: float | None = None
    memory: float | None = None
    seconds: float | None = None
    known: bool = True


def needs(recipe: Recipe) -> list[Need]:
    """What the target and each stage need.

    Raises:
        UserError: the target's config cannot be read, or the recipe does not fit it.
    """
    config = target_config(recipe.target)
    check_shapes(recipe, config.get_text_config())
    gpu = GPUS.get(recipe.hardware.gpu or "")
    target = TargetSize.of(recipe, config)
    talk = Conversations.of(recipe, target.max_length)
    identity = planned_identity(recipe, config)
    planned = planned_head(recipe, config, identity)
    check_initial(recipe, planned.config)
    head = HeadSize.of(planned, recipe)
    active = f", {_count(target.active)} at work on a token" if target.experts else ""
    quantised = "; quantised, so its files take less" if target.quantised else ""
    name = (config.architectures or [type(config).__name__])[0]
    spread = recipe.target.gpus
    return [
        Need(
            "target",
            f"{name}: {_count(target.parameters)} parameters{active}{quantised}",
            disk=target.bytes,
            memory=target.bytes / spread,
        ),
        *_of_conversations(recipe, identity, target, talk, gpu),
        _head(recipe, head, target, gpu),
        _evaluation(recipe, target, gpu),
    ]


def estimate(recipe: Recipe, runs: Path, stages: Collection[str]) -> Iterator[str]:
    """A table of what a recipe needs, and what the named machine or the disk lacks.

    Args:
        runs: folder of all runs.
        stages: names of those that are asked for.
    """
    found = [need for need in needs(recipe) if need.name == "target" or need.name in stages]
    named = recipe.hardware
    gpu, spread = GPUS.get(named.gpu or ""), recipe.target.gpus
    machine = f"{named.gpus} × {named.gpu}" if gpu else "no GPU named: hardware.gpu adds times"
    yield f"estimate ({machine}), from the target's config.json alone:"
    yield f"  {'':8}{'disk':>9}  {'GPU memory':14}  time"
    for need in found:
        memory = _bytes(need.memory)
        if need.name in ("target", "answers") and spread > 1 and memory:
            memory += f" × {spread}"
        yield (
            f"  {need.name:8}{_bytes(need.disk):>9}  {memory:14}  {_time(need.seconds):17}  "
            f"{need.about}"
        )
    disk = sum(need.disk or 0 for need in found)
    unknown = not all(need.known for need in found)
    seconds = sum(need.seconds or 0 for need in found) if gpu else None
    total = f"  {'in all':8}{_bytes(disk):>9}  {'':14}  {_time(seconds)}".rstrip()
    yield f"{total}, and what is unknown" if unknown else total
    place = next(p for p in (runs.resolve(), *runs.resolve().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if free < disk:
        yield f"  warning: {_bytes(free)} of disk are free here, where runs/ lies"
    if gpu:
        yield from _too_much(recipe, found, gpu)


def _too_much(recipe: Recipe, found: list[Need], gpu: Gpu) -> Iterator[str]:
    """What the named machine cannot hold."""
    by_name = {need.name: need.memory or 0.0 for need in found}
    room, spread = USABLE * 1e9 * gpu.memory, recipe.target.gpus
    target = by_name["target"] + by_name.get("answers", 0.0)
    if spread > recipe.hardware.gpus:
        yield f"  warning: target.gpus is {spread}, and hardware.gpus {recipe.hardware.gpus}"
    if target > room:
        yield (
            f"  warning: the target and its keys take {_bytes(target)} of a GPU's {gpu.memory:g} "
            f"GB: target.gpus={math.ceil(target * spread / room)} would do"
        )
    if by_name.get("head", 0.0) > room:
        yield (
            f"  warning: training takes {_bytes(by_name['head'])} of a GPU's {gpu.memory:g} GB: "
            "lower train.micro_rows or train.row_tokens"
        )


def _of_conversations(
    recipe: Recipe,
    identity: StoreIdentity,
    target: TargetSize,
    talk: Conversations | None,
    gpu: Gpu | None,
) -> list[Need]:
    if recipe.record.online:
        stored = Need("store", "nothing is stored: the target runs beside the training")
        unknown = Need("answers", "unknown: as many as there are prompts", known=False)
        return [_answers(recipe, target, talk, gpu) if talk else unknown, stored]
    if talk is None:
        why = f"{recipe.prompts.source} is not there, and prompts.max_prompts not given"
        each = f"{_bytes(identity.bytes_per_token)} a token"
        return [Need("answers", f"unknown: {why}", known=False), Need("store", each)]
    return [_answers(recipe, target, talk, gpu), _store(recipe, identity, target, talk, gpu)]


def _answers(recipe: Recipe, target: TargetSize, talk: Conversations, gpu: Gpu | None) -> Need:
    batch, assumed = recipe.regenerate.batch, ""
    if talk.assumed:
        assumed = f" ({recipe.prompts.source} is not there: {PROMPT_TOKENS} tokens a prompt taken)"
    if not recipe.regenerate.enabled:
        return Need("answers", f"{talk.count:,} conversations, their answers given{assumed}")
    if not talk.answer:
        room = f"no room for answers in {talk.length:,.0f} positions"
        return Need("answers", f"{talk.count:,} conversations whose prompts leave {room}{assumed}")
    written = talk.count * talk.answer
    steps = math.ceil(talk.count / batch) * talk.answer
    mean = talk.prompt + talk.answer / 2
    return Need(
        "answers",
        f"{talk.count:,} conversations, at most {_count(written)} tokens to write{assumed}",
        disk=6 * talk.count * talk.length,  # text, and ids in decimal, prompts included
        memory=min(batch, talk.count) * talk.length * target.kv_bytes / recipe.target.gpus,
        seconds=gpu and steps * target.step_seconds(gpu, batch, mean),
    )


def _store(
    recipe: Recipe,
    identity: StoreIdentity,
    target: TargetSize,
    talk: Conversations,
    gpu: Gpu | None,
) -> Need:
    asked, limit, states = recipe.record.max_length or target.max_length, "", "the last state alone"
    if identity.boundaries:
        states = f"boundaries {list(identity.boundaries)} and the last state"
    if asked > target.max_length:
        limit = f", conversations of at most the target's {target.max_length:,} positions"
    tokens = talk.count * min(talk.length, asked)
    return Need(
        "store",
        f"up to about {_count(tokens)} tokens of {_bytes(identity.bytes_per_token)}, "
        f"{states}{limit}",
        disk=tokens * identity.bytes_per_token,
        seconds=gpu and 2 * target.active * tokens / gpu.products / 1e12,
    )


def _head(recipe: Recipe, head: HeadSize, target: TargetSize, gpu: Gpu | None) -> Need:
    settings, online = recipe.train, recipe.record.online
    seen = settings.steps * settings.batch_rows * settings.row_tokens
    return Need(
        "head",
        f"{_count(head.trained)} parameters to train, {_count(seen)} positions to see",
        disk=(CHECKPOINTS * 12 + 2) * head.trained,  # weights and two moments; then 16 bits
        # Online both are on one GPU, where target.device does not say otherwise.
        memory=head.memory + online * target.bytes / recipe.target.gpus,
        seconds=gpu and seen * (head.flops + online * 2 * target.active) / gpu.products / 1e12,
    )


def _evaluation(recipe: Recipe, target: TargetSize, gpu: Gpu | None) -> Need:
    """Counted passes in batches and timed ones, as if every step yielded one token."""
    settings = recipe.eval
    arms = 2 if settings.draft_probs == "both" else 1
    drafting = (1 + len(settings.compare)) * len(settings.k or "k")
    cells = [1 + drafting * (arms if t else 1) for t in settings.temperatures]
    rows, prompts = sum(cells), settings.max_prompts
    seconds = None
    if gpu and prompts is not None:
        counted = math.ceil(prompts / settings.batch) * settings.max_new_tokens
        seconds = rows * counted * target.step_seconds(gpu, settings.batch, PROMPT_TOKENS)
        timed = settings.timing_prompts * settings.timing_tokens * len(settings.timing_batches)
        seconds += rows * timed * target.step_seconds(gpu, 1, PROMPT_TOKENS)
    asked = f"{prompts:,}" if prompts is not None else "all"
    return Need("eval", f"{rows} rows of {asked} prompts", seconds=seconds)


def _time(best: float | None) -> str:
    """A range of times around the best."""
    if best is None:
        return ""
    low, high = (best * factor for factor in SLOWER)
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
