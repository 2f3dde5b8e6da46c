"""Checks of a recipe against its target and this machine, before a run computes anything."""

from __future__ import annotations

from typing import Any

from draftlab.errors import UserError
from draftlab.evaluate.vllm_compare import check_settings
from draftlab.export.layout import layout_for
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.folder import load_config
from draftlab.heads.initial import check_start
from draftlab.pipeline.head_spec import rope_parameters, target_config
from draftlab.pipeline.recipe import Recipe
from draftlab.pipeline.resolve import find_head
from draftlab.target_model.boundaries import check_boundaries, default_boundaries
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.locate import resolve_target
from draftlab.target_model.parts import check_llama_style
from draftlab.text.chat_template import stop_ids
from draftlab.text.mask_token import check_mask_id, choose_mask_token
from draftlab.vllm.process import find_python


def check_before_run(recipe: Recipe) -> None:
    """Check what would otherwise fail after hours of work; reads the target's files.

    Raises:
        UserError: as `check_shapes`; the family cannot use the target's lm_head, the mask token
            is not usable, or a stage needs vLLM, which is not installed.
    """
    _check_vllm(recipe)
    config = target_config(recipe.target).get_text_config()
    check_shapes(recipe, config)
    family = get_family(recipe.head.family)
    if family.uses_target_lm_head:
        check_llama_style(
            resolve_target(recipe.target), trust_remote_code=recipe.target.trust_remote_code
        )
    if family.has_mask_token:
        tokenizer = load_tokenizer(recipe.target)
        stops = stop_ids(tokenizer, resolve_target(recipe.target))
        choose_mask_token(recipe.head.mask_token, tokenizer, config.vocab_size, stops, None)
    if recipe.eval.engine == "vllm":
        check_settings(recipe.eval)


def check_shapes(recipe: Recipe, config: Any) -> None:
    """Check that a recipe fits its target, as far as the target's config.json can show.

    Args:
        config: the config of the target's text model.

    Raises:
        UserError: boundaries or a mask token outside the target, a position encoding that heads
            do not have, an export format without such heads, record.dtype=fp8 without boundaries,
            or data workers with record.online.
    """
    family = get_family(recipe.head.family)
    _check_boundaries(recipe, config.num_hidden_layers)
    rope_parameters(recipe.target, config)
    for program in recipe.export.formats:
        try:
            layout_for(program, recipe.head.family)
        except UserError as error:
            raise UserError(
                error.what,
                where="export.formats",
                do="in a recipe --to vllm is export.formats=[vllm]; "
                "export.formats=[] exports nothing",
            ) from None
    if family.has_mask_token:
        check_mask_id(recipe.head.mask_token, config.vocab_size)
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
    try:
        check_boundaries(recipe.record.boundaries, num_layers)
    except UserError as error:
        effect = f"takes this target's default ones, {list(default_boundaries(num_layers))}"
        if get_family(recipe.head.family).reads_last_state:
            effect = f"records none, which is enough for {recipe.head.family} heads"
        raise UserError(
            error.what, where="record.boundaries", do=f"record.boundaries=null {effect}"
        ) from None


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


def check_initial(recipe: Recipe, planned: HeadConfig) -> None:
    """Check that a planned head can start from the recipe's head.init.

    Raises:
        UserError: there is no such head, or its config differs; the message names the fields.
    """
    if recipe.head.init is not None:
        folder = find_head(recipe.head.init)
        check_start(planned, load_config(folder), folder)
