"""Checks of a recipe against the config of its target; preflight.py lists all checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from draftlab.errors import UserError
from draftlab.export.layout import Export, layout_for
from draftlab.heads.family import get_family
from draftlab.heads.folder import load_config
from draftlab.heads.head import DraftHead
from draftlab.heads.initial import check_start
from draftlab.recipe.head_spec import planned_head, planned_identity
from draftlab.recipe.recipe import Recipe
from draftlab.run.resolve import find_head
from draftlab.target_model.boundaries import check_boundaries, default_boundaries
from draftlab.text.mask_token import check_mask_id
from draftlab.train.fast.check_fp8 import check_fp8_sizes


@contextmanager
def at(where: str, do: str = "") -> Iterator[None]:
    """Name the setting that a `UserError` of this block is about."""
    try:
        yield
    except UserError as error:
        raise UserError(error.what, where=where, do=do or error.do) from None


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
        with at("export.formats", formats):
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
    with at("record.boundaries", f"record.boundaries=null {effect}"):
        check_boundaries(recipe.record.boundaries, num_layers)


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
    export = planned_export(recipe, config, head)
    for program in recipe.export.formats:
        with at("export.formats"):
            layout_for(program, recipe.head.family).check(export)
    return head


def planned_export(recipe: Recipe, config: Any, head: DraftHead) -> Export:
    """Return the export of a head that the recipe would train.

    Args:
        config: the target's config.
    """
    k = recipe.export.k or head.config.k_trained
    return Export(head.config, config.to_dict(), recipe.target.path, k, torch.bfloat16)
