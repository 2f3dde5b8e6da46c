"""Checks of a recipe against its target and this machine, before a run computes anything."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from draftlab.errors import UserError
from draftlab.evaluate.vllm_compare import check_settings
from draftlab.export.layout import Export, layout_for
from draftlab.heads.family import get_family
from draftlab.heads.folder import load_config
from draftlab.heads.head import DraftHead
from draftlab.heads.initial import check_start
from draftlab.pipeline.head_spec import (
    planned_head,
    planned_identity,
    target_config,
)
from draftlab.pipeline.head_workspace import input_files
from draftlab.pipeline.held_out_prompts import check_suite
from draftlab.pipeline.recipe import Recipe
from draftlab.pipeline.resolve import find_head
from draftlab.pipeline.window_training import check_memory_for_vllm
from draftlab.store.shard_cache import machine_cache
from draftlab.store.shard_files import open_shard_files
from draftlab.target_model.boundaries import check_boundaries, default_boundaries
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.locate import local_target, resolve_device, resolve_target
from draftlab.target_model.parts import check_llama_style
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import stop_ids, tokenizer_sha256
from draftlab.text.mask_token import check_mask_id, choose_mask_token
from draftlab.text.prompts import prompt_file
from draftlab.text.tokenizer_check import check_tokenizer
from draftlab.train.distributed.ranks import num_launched
from draftlab.train.fast.check_fp8 import check_fp8_device, check_fp8_sizes
from draftlab.train.trackers import check_trackers
from draftlab.vllm.process import find_python


def _check_url(url: str) -> None:
    """Check that shards can be at a URL: its package, server and credentials, and the cache."""
    open_shard_files(Path(), url).read_manifest()
    machine_cache()


def check_before_run(
    recipe: Recipe, stages: Collection[str], *, plan: bool = False, here: bool = True
) -> list[str]:
    """Check what would otherwise fail after hours of work.

    Args:
        stages: names of the stages that run.
        plan: whether only files of this machine are read, and nothing is downloaded.
        here: whether this machine's devices and packages do the work.

    Returns:
        Warnings of `check_tokenizer`, if one of the stages renders text.

    Raises:
        UserError: as `check_shapes`, `check_tokenizer` and `check_head`; an input file, a device or
            a package is missing, the family cannot use the target's lm_head, or the mask token is
            not usable.
    """
    for stage in stages:
        if error := input_error(recipe, stage):
            raise error
    if (recipe.record.url or "").lower().startswith("memory://"):
        raise UserError(
            "expected a URL whose files outlive this process, found memory://",
            where="record.url",
            do="name a bucket, such as s3://bucket/folder, or a folder, file:///folder",
        )
    if here:
        _check_machine(recipe, stages)
    if recipe.record.url is not None and not plan and not {"store", "head"}.isdisjoint(stages):
        _check_url(recipe.record.url)
    config = target_config(recipe.target)
    check_shapes(recipe, config.get_text_config())
    family, rows = get_family(recipe.head.family), config.get_text_config().vocab_size
    warnings: list[str] = []
    if plan and not _has_tokenizer(recipe.target):
        return warnings
    folder = resolve_target(recipe.target)
    if family.uses_target_lm_head and not plan:
        check_llama_style(folder, trust_remote_code=recipe.target.trust_remote_code)
    tokenizer = load_tokenizer(recipe.target)
    if not {"answers", "store", "eval"}.isdisjoint(stages):
        arguments = recipe.target.template_arguments
        warnings = check_tokenizer(tokenizer, folder, rows, arguments)
    if family.has_mask_token:
        with _at("head.mask_token"):
            stops = stop_ids(tokenizer, folder)
            choose_mask_token(recipe.head.mask_token, tokenizer, rows, stops, None)
    check_head(recipe, config, tokenizer_sha256(tokenizer))
    return warnings


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


def _check_machine(recipe: Recipe, stages: Collection[str]) -> None:
    """Check devices and packages that the stages need."""
    _check_vllm(recipe)
    if "head" in stages:
        with _at("train.device"):
            device = resolve_device(recipe.train.device)
        if recipe.train.precision == "fp8":
            check_fp8_device(device)
        check_trackers(recipe.train)
        check_target_of_ranks(recipe, num_launched())
        if recipe.record.rolls and recipe.record.backend == "vllm":
            check_memory_for_vllm(recipe, device)
    if not {"answers", "store", "eval"}.isdisjoint(stages):
        with _at("target.device"):
            resolve_device(recipe.target.device)
    if "eval" in stages:
        check_suite(recipe)
        if recipe.eval.engine == "vllm":
            check_settings(recipe.eval)


def check_target_of_ranks(recipe: Recipe, num_ranks: int) -> None:
    """Check that each of several processes that train can hold a target, if training needs it.

    Raises:
        UserError: the target is on a named device or on several GPUs.
    """
    settings = recipe.target
    named = settings.device not in ("auto", "cuda", "cpu")
    if recipe.record.online and num_ranks > 1 and (settings.gpus > 1 or named):
        raise UserError(
            f"record.online gives each of {num_ranks} processes the whole target on its own GPU; "
            f"found target.gpus {settings.gpus}, target.device {settings.device}",
            where="target",
            do="leave both at their defaults, train with one process, or leave record.online out",
        )


def _has_tokenizer(target: TargetSettings) -> bool:
    """Return whether the target is a local folder with a tokenizer."""
    folder = local_target(target)
    return folder is not None and any(map(Path.is_file, folder.glob("tokenizer.*")))


@contextmanager
def _at(where: str, do: str = "") -> Iterator[None]:
    """Name the setting that a `UserError` of this block is about."""
    try:
        yield
    except UserError as error:
        raise UserError(error.what, where=where, do=do or error.do) from None


def check_shapes(recipe: Recipe, config: Any) -> None:
    """Check that a recipe fits its target, as far as the target's config.json can show.

    Args:
        config: the config of the target's text model.

    Raises:
        UserError: boundaries, a mask token or a draft vocabulary outside the target, an
            export format without such heads, record.dtype=fp8 without boundaries, or data workers
            with record.online.
    """
    family = get_family(recipe.head.family)
    _check_boundaries(recipe, config.num_hidden_layers)
    formats = "in a recipe --to vllm is export.formats=[vllm]; export.formats=[] exports nothing"
    for program in recipe.export.formats:
        with _at("export.formats", formats):
            layout_for(program, recipe.head.family)
    if family.has_mask_token:
        check_mask_id(recipe.head.mask_token, config.vocab_size)
    if family.has_own_loss and "loss" in recipe.train.model_fields_set:
        raise UserError(
            f"{family.title} heads have a loss of their own, found {recipe.train.loss}",
            where="train.loss",
            do="leave it out",
        )
    if recipe.train.dpace is not None and not family.has_own_loss:
        raise UserError(
            f"{family.title} heads have no D-PACE weights, found {recipe.train.dpace}",
            where="train.dpace",
            do="leave it out; train.acceptance_weighting weighs drafts by how often they are "
            "reached",
        )
    if recipe.train.dpace is not None and recipe.train.acceptance_weighting:
        raise UserError(
            "expected D-PACE's weights or acceptance weighting, found both",
            where="train.dpace",
            do="leave one of train.dpace and train.acceptance_weighting out",
        )
    if (recipe.draft_vocab.size or 0) > config.vocab_size:
        raise UserError(
            f"expected at most the target's {config.vocab_size:,} tokens, found "
            f"{recipe.draft_vocab.size:,}",
            where="draft_vocab.size",
            do="lower it, or leave it out for all of the target's tokens",
        )
    if (
        family.reads_last_state
        and recipe.record.dtype == "fp8"
        and recipe.record.boundaries is None
    ):
        raise UserError(
            f"fp8 is for features at boundaries, and {recipe.head.family} heads need none",
            where="record.dtype",
            do="leave it at bfloat16: the store then holds the last state only, which is never "
            "quantised",
        )
    if recipe.record.online and recipe.train.data_workers:
        raise UserError(
            "expected no data workers with record.online, since the training process computes the "
            f"states and no other process can pack them, found {recipe.train.data_workers}",
            where="train.data_workers",
            do="set it to 0, or leave it out",
        )


def _check_boundaries(recipe: Recipe, num_layers: int) -> None:
    if recipe.record.boundaries is None:
        return
    effect = f"takes this target's default ones, {list(default_boundaries(num_layers))}"
    if get_family(recipe.head.family).reads_last_state:
        effect = f"records none, which is enough for {recipe.head.family} heads"
    with _at("record.boundaries", f"record.boundaries=null {effect}"):
        check_boundaries(recipe.record.boundaries, num_layers)


def _check_vllm(recipe: Recipe) -> None:
    for settings in (recipe.regenerate, recipe.record):
        if settings.backend == "vllm":
            find_python(settings.vllm)
    if recipe.record.online and recipe.record.backend == "vllm":
        raise UserError(
            "record.online computes states by transformers alone, found record.backend=vllm",
            where="record",
            do="leave one of the two out",
        )


def check_head(recipe: Recipe, config: Any, tokenizer_hash: str = "") -> DraftHead:
    """Return the head that the recipe would train, on the meta device.

    Args:
        config: the target's config.
        tokenizer_hash: the target's tokenizer_sha256, if it is available.

    Raises:
        UserError: such a head cannot be, cannot start from the recipe's head.init, or cannot be
            trained or exported as the recipe says; the message names the fields.
    """
    head = planned_head(recipe, config, planned_identity(recipe, config, tokenizer_hash))
    if recipe.head.init is not None:
        folder = find_head(recipe.head.init)
        check_start(head.config, load_config(folder), folder)
    fast = head.family.objective().fast_forward
    if recipe.train.precision == "fp8" and fast is not None and fast.supports(head):
        check_fp8_sizes(head)
    k = recipe.export.k or head.config.k_trained
    export = Export(head.config, config.to_dict(), recipe.target.path, k, torch.bfloat16)
    for program in recipe.export.formats:
        with _at("export.formats"):
            layout_for(program, recipe.head.family).check(export)
    return head
