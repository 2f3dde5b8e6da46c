"""Estimates of the disk, memory and time that a recipe needs, from the target's config.json.

Disk is an upper bound, since answers may end early. Times are the least that the data sheet of the
GPU allows. Of several GPUs that hold a target, one works at a time.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from draftlab.formatting import rounded_text, size_text
from draftlab.plan.check_recipe import check_head, check_shapes
from draftlab.plan.sizes import (
    PROMPT_TOKENS,
    Conversations,
    HeadSize,
    TargetSize,
)
from draftlab.recipe.hardware import GPUS, Gpu
from draftlab.recipe.head_spec import planned_identity, target_config
from draftlab.recipe.recipe import Recipe
from draftlab.store.manifest import StoreIdentity
from draftlab.store.shard_cache import DEFAULT_SIZE, SIZE
from draftlab.store.urls import local_folder
from draftlab.target_model.locate import explain_loading
from draftlab.train.checkpoint import MAX_CHECKPOINTS

CHECKPOINTS = MAX_CHECKPOINTS + 1
"""Checkpoints on the disk while training writes one and still keeps the others."""


@dataclass(frozen=True)
class Estimate:
    """What one stage needs.

    Attributes:
        name: the stage, or "target".
        note: the sizes behind the numbers.
        disk, memory: bytes; None: none, or unknown.
        seconds: least time of one GPU, or of `target.gpus`; None: unknown, or no GPU is named.
        known: whether the recipe says enough for an estimate.
    """

    name: str
    note: str
    disk: float | None = None
    memory: float | None = None
    seconds: float | None = None
    known: bool = True


def runs_on_cpu(recipe: Recipe) -> bool:
    """Return whether the plan is of a CPU: no GPU is named, and the target would be on none."""
    device = recipe.target.device
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    return recipe.hardware.gpu is None and on_cpu


def estimate_stages(recipe: Recipe) -> list[Estimate]:
    """Return what the target and each stage need.

    Raises:
        UserError: the target's config cannot be read, or the recipe does not fit it.
    """
    config = target_config(recipe.target)
    check_shapes(recipe, config.get_text_config())
    gpu = GPUS.get(recipe.hardware.gpu or "")
    on_cpu = runs_on_cpu(recipe)
    with explain_loading("the target", recipe.target.path):
        target = TargetSize.of(recipe, config, on_cpu=on_cpu)
    conversations = Conversations.of(recipe, target.max_length)
    identity = planned_identity(recipe, config)
    head = HeadSize.of(check_head(recipe, config), recipe, on_cpu=on_cpu)
    active = f", {as_count(target.active)} active per token" if target.expert_parameters else ""
    quantised = "; quantised, so that its files are smaller" if target.quantised else ""
    name = (config.architectures or [type(config).__name__])[0]
    return [
        Estimate(
            "target",
            f"{name}: {as_count(target.parameters)} parameters{active}{quantised}",
            disk=target.parameters * target.stored_each,
            # A CPU decodes with a second copy, whose layout oneDNN reads faster.
            memory=2 * target.bytes if on_cpu else target.bytes / recipe.target.gpus,
        ),
        *_answers_and_store(recipe, identity, target, conversations, gpu),
        *_window(recipe, identity, target, conversations, gpu),
        _head(recipe, head, target, gpu),
        _evaluation(recipe, target, gpu),
    ]


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
        each = f"{as_bytes(identity.bytes_per_token)} per token"
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
    size = 6 * conversations.count * conversations.length  # text, and token ids in decimal
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
        f"{conversations.count:,} conversations, at most {as_count(tokens)} tokens to generate"
        f"{assumed}; KV cache of {longest:,.0f} positions{states} for each of a batch",
        disk=size,
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
    url, of = recipe.record.url, ""
    at_url = url is not None and local_folder(url) is None
    if recipe.record.rolls:
        of = f"; the held-out records alone, since all {as_count(tokens)} tokens would take "
        of += as_bytes(tokens * identity.bytes_per_token)
        tokens *= recipe.train.validation_share
    if url is not None:
        of += f"; {as_bytes(tokens * identity.bytes_per_token)} at {url}"
    if at_url:
        of += f", and a cache of {os.environ.get(SIZE) or DEFAULT_SIZE} on each machine ({SIZE})"
    return Estimate(
        "store",
        f"up to about {as_count(tokens)} tokens of {as_bytes(identity.bytes_per_token)}, "
        f"{states}{limit}{of}",
        disk=None if at_url else tokens * identity.bytes_per_token,
        seconds=gpu and 2 * target.active * tokens / gpu.products / 1e12,
    )


def _window(
    recipe: Recipe,
    identity: StoreIdentity,
    target: TargetSize,
    conversations: Conversations | None,
    gpu: Gpu | None,
) -> list[Estimate]:
    """Estimate the recording of a window's shards while the head is trained."""
    settings = recipe.train
    if not recipe.record.rolls or recipe.record.window is None:
        return []
    positions = settings.steps * settings.batch_rows * settings.row_tokens
    size, epochs = recipe.record.window, ""
    if conversations is not None:
        length = min(conversations.length, recipe.record.max_length or target.max_length)
        tokens = conversations.count * length * (1 - settings.validation_share)
        size = min(size, tokens * identity.bytes_per_token)
        passes = positions / max(tokens, 1)
        again = ", each computed again" if passes > 1 else ""
        epochs = f", {rounded_text(passes)} epochs{again}"
        if tokens * identity.bytes_per_token <= recipe.record.window:
            positions, epochs = min(positions, tokens), ", which the window holds as a whole"
    return [
        Estimate(
            "window",
            f"{as_count(positions)} positions recorded while the head is trained{epochs}; "
            "record.keep=all records each once, before the training",
            disk=size,
            memory=target.bytes / recipe.target.gpus,
            seconds=gpu and 2 * target.active * positions / gpu.products / 1e12,
        )
    ]


def _head(recipe: Recipe, head: HeadSize, target: TargetSize, gpu: Gpu | None) -> Estimate:
    settings, online = recipe.train, recipe.record.online
    positions = settings.steps * settings.batch_rows * settings.row_tokens
    flops = positions * (head.flops + online * 2 * target.active)
    note = f"{as_count(head.trained)} parameters to train on {as_count(positions)} positions"
    hardware = recipe.hardware
    records = recipe.record.rolls and hardware.gpus * hardware.nodes <= recipe.target.gpus
    if records:
        note += ", on the GPU that records the window meanwhile"
    targets = online + records  # which share the GPU with the head
    checkpoint = 12 * head.trained  # weights and two moments
    return Estimate(
        "head",
        note,
        disk=CHECKPOINTS * checkpoint + 2 * head.trained,  # 16 bits at the end
        # They are on one GPU, unless target.device names another.
        memory=head.memory + targets * target.bytes / recipe.target.gpus,
        seconds=gpu and flops / gpu.products / 1e12,
    )


def _evaluation(recipe: Recipe, target: TargetSize, gpu: Gpu | None) -> Estimate:
    """Estimate batched and timed decoding, as if each step generated one token."""
    settings = recipe.eval
    variants = 2 if settings.draft_probs == "both" else 1
    drafting = (1 + len(settings.compare)) * len(settings.k or "k")
    configs = [1 + drafting * (variants if t else 1) for t in settings.temperatures]
    configs[0] += 2 * (1 + len(settings.compare)) * (settings.k is None)  # smaller K's
    rows, prompts = sum(configs), settings.max_prompts
    seconds = None
    if gpu and prompts is not None:
        steps = math.ceil(prompts / settings.batch) * settings.max_new_tokens
        seconds = rows * steps * target.step_seconds(gpu, settings.batch, PROMPT_TOKENS)
        timed = settings.timing_prompts * len(settings.timing_batches)
        batch_1 = target.step_seconds(gpu, 1, PROMPT_TOKENS)
        loaded = sum(
            settings.answers_under_load(c) * target.step_seconds(gpu, c, PROMPT_TOKENS)
            for c in settings.concurrency
        )
        seconds += settings.timing_tokens * rows * (timed * batch_1 + loaded)
    number = f"{prompts:,}" if prompts is not None else "all"
    return Estimate("eval", f"{rows} rows of {number} prompts", seconds=seconds)


def as_count(number: float) -> str:
    """Return a number with a unit: "8.03 B"."""
    for unit, name in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if number >= unit:
            return f"{rounded_text(number / unit)}{name}"
    return f"{number:,.0f}"


def as_bytes(number: float | None) -> str:
    """Return a size, or "" for none."""
    return "" if number is None else size_text(number)
