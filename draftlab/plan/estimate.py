"""The disk, memory and time that a recipe needs, from the target's config.json, as a table.

Disk is an upper bound, since answers may end early. Times are the least that the data sheet of the
GPU allows. Of several GPUs that hold a target, one works at a time.
"""

from __future__ import annotations

import math
import os
import shutil
import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from draftlab.engine.kv_pool import RESERVE
from draftlab.errors import UserError
from draftlab.evaluate.decoding_config import more_ks
from draftlab.evaluate.settings import MAX_K
from draftlab.formatting import count_text, rounded_text, size_text
from draftlab.plan.model_sizes import PROMPT_TOKENS, Conversations, HeadSize, TargetSize
from draftlab.plan.preflight import check_head
from draftlab.recipe.hardware import GPUS
from draftlab.recipe.head_spec import planned_identity, target_config
from draftlab.recipe.recipe import LATEST, RECIPE, Recipe, load_recipe
from draftlab.run.held_out_prompts import default_suite
from draftlab.run.stages import STAGES, read_record
from draftlab.store.shard_cache import DEFAULT_SIZE, SIZE
from draftlab.target_model.locate import (
    config_folder,
    explain_loading,
    local_target,
    shipped_config,
)
from draftlab.text.benchmarks import parse_benchmark
from draftlab.text.self_prompts import MAX_TOKENS
from draftlab.text.settings import PromptSettings
from draftlab.train.checkpoint import MAX_CHECKPOINTS
from draftlab.train.distributed.ranks import idle_note

CHECKPOINTS = MAX_CHECKPOINTS + 1
"""Checkpoints on the disk while training writes one and still keeps the others."""
TIME_FACTORS = (2, 4)
"""A stage takes this many times the least time."""
LIBRARIES = 0.7e9
"""Bytes of memory of a process that has imported torch and transformers, as measured."""
USABLE_MEMORY = 0.9
"""Share of a GPU's memory: the rest is for CUDA and fragmentation."""
WIDTH = 80
"""Columns of a line."""


@dataclass(frozen=True)
class Estimate:
    """The disk, memory and time that one stage needs.

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


class RecipeSizes:
    """The sizes that a recipe and its target's config give, and estimates from them.

    Attributes:
        gpu: data sheet of the GPU that the recipe names.
        on_cpu: whether the plan is of a CPU: no GPU is named, and the target would be on none.
        conversations: None: their number is not known.
        default_k: drafts a step of an evaluation that names none.
        trained: positions that training reads in all steps.

    Raises:
        UserError: the target's config cannot be read, or the recipe does not fit it.
    """

    def __init__(self, recipe: Recipe) -> None:
        config, device = target_config(recipe.target), recipe.target.device
        self.recipe, self.gpu = recipe, GPUS.get(recipe.hardware.gpu or "")
        no_gpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
        self.on_cpu = self.gpu is None and no_gpu
        with explain_loading("the target", recipe.target.path):
            self.target = TargetSize(recipe, config, on_cpu=self.on_cpu)
        head, _ = check_head(recipe, config)
        self.architecture = (config.architectures or [type(config).__name__])[0]
        self.conversations = Conversations.of(recipe, self.target.max_length)
        self.identity = planned_identity(recipe, config)
        self.token_bytes = self.identity.bytes_per_token
        self.head = HeadSize(head, recipe, self.conversations, on_cpu=self.on_cpu)
        self.default_k = min(head.config.default_k, MAX_K)
        self.trained = recipe.train.steps * recipe.train.batch_rows * recipe.train.row_tokens

    def stages(self) -> list[Estimate]:
        """Return what the target and each stage need."""
        window = [self._window()] if self.recipe.record.rolls else []
        return [
            self._target(),
            self._answers(),
            self._store(),
            *window,
            self._head(),
            self._evaluation(),
        ]

    def _products_seconds(self, flops: float) -> float | None:
        """Return the least time of matrix products."""
        return self.gpu and flops / self.gpu.products / 1e12

    def _prefill_seconds(self, tokens: float) -> float:
        """Return the least time of the target's pass over tokens; 0 if no GPU is named."""
        return self._products_seconds(2 * self.target.active * tokens) or 0.0

    def _target(self) -> Estimate:
        target = self.target
        active = ""
        if target.expert_parameters:
            active = f", {as_count(target.active)} active per token"
        return Estimate(
            "target",
            f"{self.architecture}: {as_count(target.parameters)} parameters{active}"
            f"{target.quantised}",
            disk=target.stored,
            # A CPU decodes with a second copy, whose layout oneDNN reads faster.
            memory=2 * target.bytes if self.on_cpu else target.bytes / self.recipe.target.gpus,
        )

    def _answers(self) -> Estimate:
        recipe, target, conversations = self.recipe, self.target, self.conversations
        source, batch = recipe.prompts.source, recipe.regenerate.batch
        if conversations is None:
            why = f"there is no {source}, and prompts.max_prompts is not set"
            return Estimate("answers", f"unknown: {why}", known=False)
        assumed, prompt_tokens = "", 0
        if written := recipe.prompts.num_self_written:  # in batches of their own
            prompt_tokens = min(MAX_TOKENS, target.max_length)
            assumed = f", and {as_count(written * prompt_tokens)} of prompts"
        elif conversations.assumed:
            assumed = f" (assuming {PROMPT_TOKENS} tokens per prompt: there is no {source})"
        note = count_text(conversations.count, "conversation")
        if not recipe.regenerate.enabled:
            return Estimate("answers", f"{note} with answers{assumed}")
        if not conversations.answer:
            limit = f"no room for answers in {conversations.length:,.0f} positions"
            return Estimate("answers", f"{note} whose prompts leave {limit}{assumed}")
        tokens = conversations.count * conversations.answer
        steps = math.ceil(conversations.count / batch) * conversations.answer
        steps += math.ceil(written / batch) * prompt_tokens
        mean = conversations.prompt + conversations.answer / 2
        states = ""
        if target.state_bytes is None:
            states = " (and recurrent states of unknown size)"
        elif target.state_bytes:
            states = f" and recurrent states of {size_text(target.state_bytes)}"
        each = conversations.length * target.kv_bytes + (target.state_bytes or 0)
        seconds = None
        if self.gpu:
            seconds = steps * target.step_seconds(self.gpu, batch, mean)
            seconds += self._prefill_seconds(conversations.count * conversations.prompt)
        return Estimate(
            "answers",
            f"{note}, at most {as_count(tokens)} tokens to generate{assumed}; KV cache of "
            f"{conversations.length:,.0f} positions on average{states} for each of a batch",
            # text, and token ids in decimal
            disk=6 * conversations.count * conversations.length,
            memory=min(batch, conversations.count) * each / recipe.target.gpus,
            seconds=seconds,
        )

    def least_memory(self) -> float:
        """Return the bytes of each GPU that answering needs: a KV cache that does not fit is made
        smaller, down to one request (`engine/kv_pool.py`), and the others wait.
        """
        target, conversations, cache = self.target, self.conversations, 0.0
        if self.recipe.regenerate.enabled and conversations:
            requests = min(self.recipe.regenerate.batch, conversations.count)
            states = requests * (target.state_bytes or 0)
            cache = (conversations.longest * target.kv_bytes + states) / (1 - RESERVE)
        return (target.bytes + cache) / self.recipe.target.gpus

    def _recorded(self, conversations: Conversations) -> float:
        """Return the number of tokens of all records, at most."""
        limit = self.recipe.record.length_limit(self.target.max_length)
        return conversations.count * min(conversations.length, limit)

    def _store(self) -> Estimate:
        record = self.recipe.record
        if self.conversations is None:
            return Estimate("store", f"{size_text(self.token_bytes)} per token")
        tokens, of = self._recorded(self.conversations), ""
        states = "the last state"
        if self.identity.boundaries:
            states = f"boundaries {list(self.identity.boundaries)} and the last state"
        if record.rolls:
            of = f"; the held-out records alone, since all {as_count(tokens)} tokens would take "
            of += size_text(tokens * self.token_bytes)
            tokens *= self.recipe.train.validation_share
        disk: float | None = tokens * self.token_bytes
        if record.url is not None:
            disk, size = None, os.environ.get(SIZE) or DEFAULT_SIZE
            of += f"; {size_text(tokens * self.token_bytes)} at {record.url}, and a cache of "
            of += f"{size} on each machine ({SIZE})"
        return Estimate(
            "store",
            f"up to about {as_count(tokens)} tokens of {size_text(self.token_bytes)}, {states}{of}",
            disk=disk,
            seconds=self.gpu and self._prefill_seconds(tokens),
        )

    def _window(self) -> Estimate:
        """Estimate the recording of a window's shards while the head is trained."""
        size, positions, epochs = self.recipe.record.window or 0, self.trained, ""
        disk: float = size
        if self.conversations is not None:
            tokens = self._recorded(self.conversations) * (1 - self.recipe.train.validation_share)
            disk, passes = min(size, tokens * self.token_bytes), positions / max(tokens, 1)
            again = ", each computed again" if passes > 1 else ""
            epochs = f", {rounded_text(passes)} epochs{again}"
            if tokens * self.token_bytes <= size:
                positions, epochs = min(positions, tokens), ", which the window holds as a whole"
        return Estimate(
            "window",
            f"{as_count(positions)} positions recorded while the head is trained{epochs}; "
            "record.keep=all records each once, before the training",
            disk=disk,
            memory=self.target.bytes / self.recipe.target.gpus,
            seconds=self.gpu and self._prefill_seconds(positions),
        )

    def _head(self) -> Estimate:
        recipe, head, target = self.recipe, self.head, self.target
        hardware = recipe.hardware
        note = f"{as_count(head.trained)} parameters to train on {as_count(self.trained)} positions"
        records = recipe.record.rolls and hardware.gpus * hardware.nodes <= recipe.target.gpus
        if records:
            note += ", on the device that records the window meanwhile"
        checkpoint = 12 * head.trained  # weights and two moments
        return Estimate(
            "head",
            note,
            disk=CHECKPOINTS * checkpoint + 2 * head.trained,  # 16 bits at the end
            # A target that runs beside it is on the same GPU, unless target.device names another.
            memory=head.memory + records * target.bytes / recipe.target.gpus,
            seconds=self._products_seconds(self.trained * head.flops),
        )

    def _evaluation(self) -> Estimate:
        """Estimate batched and timed decoding, as if each step generated one token."""
        settings = self.recipe.eval
        heads, prompts, about = 1 + len(settings.compare), settings.max_prompts, ""
        variants = 2 if settings.draft_probs == "both" else 1
        ks = settings.k or (self.default_k,)
        drafting = heads * len(ks)
        rows = sum(1 + drafting * (variants if t else 1) for t in settings.temperatures)
        rows += heads * len(more_ks(ks)) * (settings.k is None)
        if self.conversations and not settings.suite and not default_suite(self.recipe.target):
            share = self.recipe.train.validation_share
            held_out = math.ceil(self.conversations.prompts * share)
            prompts, about = min(prompts or held_out, held_out), "about "
        number = "all prompts" if prompts is None else count_text(prompts, "prompt")
        note = f"{rows} rows of {about}{number}"
        if self.gpu is None or prompts is None:
            return Estimate("eval", note)
        length = self._suite_tokens()
        step = {
            batch: self.target.step_seconds(self.gpu, batch, length)
            for batch in (1, settings.batch)
        }
        steps = math.ceil(prompts / settings.batch) * settings.max_new_tokens
        timed = settings.timing_prompts * len(settings.timing_batches) * step[1]
        seconds = steps * step[settings.batch] + settings.timing_tokens * timed
        seconds += self._prefill_seconds(prompts * length)
        return Estimate("eval", note, seconds=rows * seconds)

    def _suite_tokens(self) -> float:
        """Return the mean tokens of the evaluation's prompts: of held-out ones, or of the suites
        that are files; `PROMPT_TOKENS` if there are none.
        """
        sources = self.recipe.eval.suite or default_suite(self.recipe.target)
        suites = [] if sources else [self.conversations]
        for source in sources:
            if parse_benchmark(source) is None:
                prompts = PromptSettings.model_construct(source=source)
                recipe = self.recipe.model_copy(update={"prompts": prompts})
                suites.append(Conversations.of(recipe, self.target.max_length))
        tokens = [suite.asked for suite in suites if suite]
        return sum(tokens) / len(tokens) if tokens else PROMPT_TOKENS


def as_count(number: float) -> str:
    """Return a number with a unit: "8.03 B"."""
    for unit, name in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if number >= unit:
            return f"{rounded_text(number / unit)}{name}"
    return f"{number:,.0f}"


def estimate_table(
    recipe: Recipe, runs: Path, stages: Collection[str], num_working: int = 1
) -> Iterator[str]:
    """Yield the lines of a table of estimates of stages, at which so many GPUs work at a time,
    and warnings about the machine.
    """
    wrapper = textwrap.TextWrapper(
        WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    for line in _table(recipe, runs, stages, num_working):
        yield from wrapper.wrap(line)


def _table(recipe: Recipe, runs: Path, stages: Collection[str], num_working: int) -> Iterator[str]:
    """Yield the lines of `estimate_table`, of any length."""
    sizes, hardware = RecipeSizes(recipe), recipe.hardware
    rows = _rows(sizes, stages, num_working)
    machine = f"{hardware.gpus} × {hardware.gpu}" if sizes.gpu else "set hardware.gpu for times"
    if sizes.on_cpu:
        machine = "a CPU"
    if hardware.nodes > 1:
        machine = f"{hardware.nodes} × {machine}"
    if num_working > 1:
        machine += f"; {num_working} work together"
    shipped = config_folder(recipe.target) == shipped_config(recipe.target) is not None
    source = "the shapes of this target in draftlab" if shipped else "the target's config.json"
    yield f"estimate ({machine}), from {source}:"
    yield f"  {'':8}{'disk':>9}  " + ("memory" if sizes.on_cpu else f"{'GPU memory':14}  time")
    for name, row in rows.items():
        memory = size_text(row.memory) if row.memory else ""
        if name in ("target", "answers") and recipe.target.gpus > 1 and memory:
            memory += f" × {recipe.target.gpus}"
        row_disk = size_text(row.disk) if row.disk else ""
        yield f"  {name:8}{row_disk:>9}  {memory:14}  {_time(row.seconds)}"
    disk = sum(row.disk or 0 for row in rows.values())
    seconds = {name: row.seconds or 0.0 for name, row in rows.items()}
    total = sum(seconds.values())
    if num_working > 1:  # other GPUs record the window while the head is trained
        total -= min(seconds.get("window", 0.0), seconds.get("head", 0.0))
    unknown = "" if all(row.known for row in rows.values()) else ", and what is unknown"
    time = _time(total if sizes.gpu else None)
    yield f"  {'total':8}{size_text(disk):>9}  {'':14}  {time}".rstrip() + unknown
    for name, row in rows.items():
        yield f"  {name}: {row.note}"
    if sizes.on_cpu:
        needed, libraries = size_text(_cpu_memory(rows)), size_text(LIBRARIES)
        yield (
            f"  memory: about {needed}, {libraries} of them for libraries; the target is freed "
            "before a training that does not need it"
        )
        yield "  a CPU's times are not estimated; hardware.gpu=H100 plans for a GPU"
    note = idle_note(recipe.train.batch_rows, max(num_working, hardware.gpus))
    if "head" in rows and note:  # a training says it itself
        yield f"  warning: {note}"
    yield from (f"  {line}" for line in _warnings(sizes, rows, runs.resolve()))


def estimate_warnings(
    recipe: Recipe, runs: Path, stages: Collection[str], num_working: int = 1
) -> Iterator[str]:
    """Yield the warnings of `estimate_table`, each as one line."""
    sizes = RecipeSizes(recipe)
    yield from _warnings(sizes, _rows(sizes, stages, num_working), runs.resolve())


def predicted_seconds(
    recipe: Recipe, runs: Path, stages: Sequence[str], devices: str
) -> tuple[float, str] | None:
    """Return how long stages will take in one process, and the run that tells it; None: none does.

    It is the latest run of this target, loaded as this recipe says, with the same backends and such
    devices. The times of its stages are scaled by what the data sheet of a GPU, any one, says of
    both recipes; a stage of which it says nothing must have the same settings.
    """

    def least(recipe: Recipe) -> dict[str, float | None]:
        gpu = recipe.hardware.model_copy(update={"gpu": "H100"})
        sizes = RecipeSizes(recipe.model_copy(update={"hardware": gpu}))
        return {row.name: row.seconds for row in sizes.stages()}

    def way(recipe: Recipe) -> tuple[object, ...]:
        backends = recipe.regenerate.backend, recipe.record.backend
        return recipe.target, *backends, recipe.record.rolls, recipe.train.device

    records = runs.glob(f"*/stages/{stages[-1]}.json")
    for record in sorted(records, key=lambda path: path.stat().st_mtime, reverse=True):
        folder, total = record.parents[1], 0.0
        if folder.name == LATEST:
            continue
        with suppress(UserError, KeyError, TypeError):
            made = {name: read_record(folder / "stages" / f"{name}.json") for name in stages}
            earlier = load_recipe(folder / RECIPE)
            alike = all(one["devices"] == devices for one in made.values())
            if not alike or way(earlier) != way(recipe):
                continue
            now, then = least(recipe), least(earlier)
            for name in stages:
                known, sections = now.get(name) and then.get(name), STAGES[name].settings
                if not known and any(getattr(recipe, s) != getattr(earlier, s) for s in sections):
                    break
                total += (now[name] / then[name] if known else 1.0) * made[name]["seconds"]
            else:
                if 0 < total < 1e9:
                    return total, folder.name
    return None


def _rows(sizes: RecipeSizes, stages: Collection[str], num_working: int) -> dict[str, Estimate]:
    """Return the estimates of the target and of stages, by name."""
    shown = {"target", *stages, *["window"] * ("head" in stages)}
    rows = [row for row in sizes.stages() if row.name in shown]
    return {row.name: _shared(row, sizes.recipe, num_working) for row in rows}


def _memory(rows: dict[str, Estimate]) -> tuple[float, float]:
    """Return the bytes of memory that the target with its KV cache takes, and the training."""
    memory = {name: row.memory or 0.0 for name, row in rows.items()}
    return memory["target"] + memory.get("answers", 0.0), memory.get("head", 0.0)


def _cpu_memory(rows: dict[str, Estimate]) -> float:
    """Return the bytes of memory that a run on a CPU takes."""
    return LIBRARIES + max(_memory(rows))


def _shared(row: Estimate, recipe: Recipe, num_working: int) -> Estimate:
    """Return the estimate of a stage whose work so many GPUs share."""
    share, each = 1, recipe.target.gpus
    if row.name in ("answers", "store"):
        share = max(1, num_working // each)
    elif row.name in ("head", "window"):
        train = record = num_working
        if recipe.record.rolls and num_working > 1:
            train = max(1, min(num_working // 2, num_working - each))
            record = max(1, (num_working - train) // each)
        share = record if row.name == "window" else min(train, recipe.train.batch_rows)
    return row if row.seconds is None else replace(row, seconds=row.seconds / share)


def _warnings(sizes: RecipeSizes, rows: dict[str, Estimate], runs: Path) -> Iterator[str]:
    """Yield what does not fit: disk, window, rows of the training, and memory."""
    recipe, record, train = sizes.recipe, sizes.recipe.record, sizes.recipe.train
    free = shutil.disk_usage(next(p for p in (runs, *runs.parents) if p.exists())).free
    there = {"target"} if local_target(recipe.target) else set()
    if free < (needed := sum(row.disk or 0 for name, row in rows.items() if name not in there)):
        yield (
            f"warning: {size_text(free)} of disk are free in the folder of runs/, and up to "
            f"{size_text(needed)} are needed"
        )
    # Half of a window has to hold an optimizer step, and a shard before and after it.
    step = train.batch_rows * train.row_tokens + 2 * record.shard_tokens
    if record.rolls and record.window and record.window < (enough := 2 * step * sizes.token_bytes):
        yield (
            f"warning: record.window is {size_text(record.window)}, which may be too small for "
            "record.shard_tokens and the optimizer step: unless it holds twice all states, it is "
            f"then refused; {size_text(2 * enough)} are enough"
        )
    if "head" in rows:
        conversations, longest = sizes.conversations, 0.0
        if conversations and not conversations.assumed:
            longest = min(conversations.longest, record.length_limit(sizes.target.max_length))
        if longest > train.row_tokens:
            yield (
                f"warning: the longest conversation may have about {longest:,.0f} tokens, and "
                f"train.row_tokens is {train.row_tokens:,}: record.max_length={train.row_tokens} "
                "cuts it"
            )
    target, head = _memory(rows)
    available = psutil.virtual_memory().available
    if sizes.on_cpu and available < (memory := _cpu_memory(rows)):
        yield (
            f"warning: {size_text(available)} of memory are available on this machine, and about "
            f"{size_text(memory)} are needed"
        )
    if sizes.gpu is None:
        return
    usable, num_gpus = USABLE_MEMORY * 1e9 * sizes.gpu.memory, recipe.target.gpus
    if num_gpus > recipe.hardware.gpus:
        yield f"warning: target.gpus is {num_gpus}, and hardware.gpus {recipe.hardware.gpus}"
    least = sizes.least_memory() if "answers" in rows else rows["target"].memory or 0.0
    if least > usable:
        packed = ""
        if sizes.target.is_dequantised:
            packed = (
                "; vLLM leaves the weights quantised (regenerate.backend=vllm record.backend=vllm)"
            )
        yield (
            f"warning: the target and the KV cache of its longest request take {size_text(least)} "
            f"of a GPU's {sizes.gpu.memory:g} GB; "
            f"target.gpus={math.ceil(least * num_gpus / usable)} is enough{packed}"
        )
    elif target > usable:
        yield (
            "the KV cache of a whole batch (regenerate.batch) does not fit beside the target: some "
            "of its requests wait for others to end"
        )
    if head > usable:
        yield (
            f"warning: training takes {size_text(head)} of a GPU's {sizes.gpu.memory:g} GB: "
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
