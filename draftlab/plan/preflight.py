"""What a run and its plan check before anything is computed: one list, `CHECKS`.

The plan downloads nothing and loads no weights, so that two checks are left to the run: whether a
URL answers, and the files of a target on the Hub that this machine does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftlab.errors import UserError
from draftlab.evaluate.vllm_compare import check_settings
from draftlab.export.layout import serving_warnings
from draftlab.heads.family import Family, get_family
from draftlab.plan.check_recipe import (
    at,
    check_head,
    check_shapes,
    check_target_of_ranks,
    planned_export,
)
from draftlab.recipe.head_spec import target_config
from draftlab.recipe.recipe import Recipe
from draftlab.run.head_workspace import input_files
from draftlab.run.held_out_prompts import check_suite
from draftlab.run.resolve import find_head
from draftlab.servers.vllm_process import find_python
from draftlab.store.object_store import check_scheme
from draftlab.store.shard_cache import machine_cache
from draftlab.store.shard_files import open_shard_files
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.locate import local_target, resolve_device, resolve_target
from draftlab.target_model.parts import check_llama_style
from draftlab.text.chat_template import stop_ids, tokenizer_sha256
from draftlab.text.mask_token import choose_mask_token
from draftlab.text.prompts import prompt_file
from draftlab.text.tokenizer_check import check_tokenizer
from draftlab.train.distributed.ranks import num_launched
from draftlab.train.fast.check_fp8 import check_fp8_device
from draftlab.train.trackers import check_trackers
from draftlab.workers.window.training import check_memory_for_vllm


@dataclass(frozen=True)
class Planned:
    """A recipe whose stages are to run.

    Attributes:
        stages: names of the stages that run.
        plan: whether nothing is downloaded, and no weights are read.
        here: whether this machine's devices and packages do the work.
    """

    recipe: Recipe
    stages: Collection[str]
    plan: bool
    here: bool

    def runs(self, *names: str) -> bool:
        """Return whether one of these stages runs."""
        return not set(names).isdisjoint(self.stages)

    @property
    def family(self) -> Family:
        """The family of the head."""
        return get_family(self.recipe.head.family)

    @cached_property
    def config(self) -> Any:
        """The target's config."""
        return target_config(self.recipe.target)

    @cached_property
    def folder(self) -> Path | None:
        """The target's folder; None: a plan of a target that this machine does not have."""
        if not self.plan:
            return resolve_target(self.recipe.target)
        folder = local_target(self.recipe.target)
        has_tokenizer = folder and any(map(Path.is_file, folder.glob("tokenizer.*")))
        return folder if has_tokenizer else None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The target's tokenizer; None: as `folder`."""
        return None if self.folder is None else load_tokenizer(self.recipe.target)


def check_before_run(
    recipe: Recipe, stages: Collection[str], *, plan: bool = False, here: bool = True
) -> list[str]:
    """Check what would otherwise fail after hours of work, by the list `CHECKS`.

    Args:
        stages, plan, here: see `Planned`.

    Returns:
        Warnings, for the console.

    Raises:
        UserError: the first fault.
    """
    planned = Planned(recipe, stages, plan, here)
    return [warning for check in CHECKS for warning in check(planned) or ()]


def input_error(recipe: Recipe, stage: str) -> UserError | None:
    """Return the error of an input file that a stage reads and that does not exist."""
    read: dict[str, Callable[[], object]] = {
        "answers": lambda: prompt_file(recipe.prompts.source),
        "head": lambda: recipe.head.init and find_head(recipe.head.init),
        "eval": lambda: input_files(recipe.eval),
    }
    try:
        read.get(stage, lambda: None)()
    except UserError as error:
        return error
    return None


def missing_input(recipe: Recipe, stage: str) -> str:
    """Return the path of an input file that a stage reads and that does not exist, or "".

    Raises:
        UserError: the file exists and has another fault.
    """
    error = input_error(recipe, stage)
    if error and Path(error.where).exists():
        raise error
    return error.where if error else ""


def _check_inputs(planned: Planned) -> None:
    """Check that the input files exist."""
    for stage in planned.stages:
        if error := input_error(planned.recipe, stage):
            raise error


def _check_url(planned: Planned) -> None:
    """Check that shards can be at a URL: its scheme and package, then its server and the cache."""
    if (url := planned.recipe.record.url) is None or not planned.runs("store", "head"):
        return
    with at("record.url"):
        check_scheme(url)
    if not planned.plan:
        open_shard_files(Path(), url).read_manifest()
        machine_cache()


def _check_machine(planned: Planned) -> None:
    """Check the devices and packages of this machine that the stages need."""
    recipe = planned.recipe
    if not planned.here:
        return
    _check_vllm(recipe)
    if planned.runs("head"):
        with at("train.device"):
            device = resolve_device(recipe.train.device)
        if recipe.train.precision == "fp8":
            check_fp8_device(device)
        check_trackers(recipe.train)
        check_target_of_ranks(recipe, num_launched())
        if recipe.record.rolls and recipe.record.backend == "vllm":
            check_memory_for_vllm(recipe, device)
    if planned.runs("answers", "store", "eval"):
        with at("target.device"):
            resolve_device(recipe.target.device)
    if planned.runs("eval"):
        check_suite(recipe)
        if recipe.eval.engine == "vllm":
            check_settings(recipe.eval)


def _check_vllm(recipe: Recipe) -> None:
    for settings in (recipe.regenerate, recipe.record):
        if settings.backend == "vllm":
            find_python()
    if recipe.record.online and recipe.record.backend == "vllm":
        raise UserError(
            "record.online computes states by transformers alone, found record.backend=vllm",
            where="record",
            do="leave one of the two out",
        )


def _check_shapes(planned: Planned) -> None:
    """Check that the recipe fits the target's config."""
    check_shapes(planned.recipe, planned.config.get_text_config())


def _check_tokenizer(planned: Planned) -> Iterable[str]:
    """Check tokenizer, chat template, stop tokens and the mask token."""
    recipe, tokenizer, folder = planned.recipe, planned.tokenizer, planned.folder
    if tokenizer is None or folder is None:
        yield (
            f"the run checks the tokenizer and the chat template of {recipe.target.path}, which "
            "are not on this machine"
        )
        return
    if planned.family.uses_target_lm_head and not planned.plan:
        check_llama_style(folder, trust_remote_code=recipe.target.trust_remote_code)
    rows = planned.config.get_text_config().vocab_size
    if planned.runs("answers", "store", "eval"):
        yield from check_tokenizer(tokenizer, folder, rows, recipe.target.template_arguments)
    if planned.family.has_mask_token:
        with at("head.mask_token"):
            stops = stop_ids(tokenizer, folder)
            choose_mask_token(recipe.head.mask_token, tokenizer, rows, stops, None)


def _check_head(planned: Planned) -> Iterable[str]:
    """Check that the head can be trained, and served by the programs of its exports."""
    recipe, tokenizer = planned.recipe, planned.tokenizer
    digest = "" if tokenizer is None else tokenizer_sha256(tokenizer)
    head = check_head(recipe, planned.config, digest)
    if planned.runs("export"):
        export = planned_export(recipe, planned.config, head)
        for program in recipe.export.formats:
            yield from serving_warnings(program, export)


CHECKS: tuple[Callable[[Planned], Iterable[str] | None], ...] = (
    _check_inputs,
    _check_url,
    _check_machine,
    _check_shapes,
    _check_tokenizer,
    _check_head,
)
"""Each yields warnings or raises a `UserError`; the first fault in this order is reported."""
