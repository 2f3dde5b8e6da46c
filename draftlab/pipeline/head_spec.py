"""What a new head is to be: its boundaries, draft vocabulary and shapes, from recipe and target."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig

from draftlab.errors import UserError
from draftlab.evaluate.vllm_compare import check_settings
from draftlab.export.layouts import layout_for
from draftlab.heads.config import HeadConfig, TargetIdentity, make_head_config
from draftlab.heads.family import get_family
from draftlab.heads.layers import ROPE_TYPES
from draftlab.pipeline.recipe import Recipe
from draftlab.progress import Monitor
from draftlab.store.manifest import StoreIdentity
from draftlab.store.store import Store
from draftlab.target_model.boundaries import check_boundaries, default_boundaries
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.locate import local_target, resolve_target
from draftlab.target_model.parts import check_llama_style
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import stop_ids
from draftlab.text.draft_vocabulary import DraftVocabulary, build_draft_vocabulary
from draftlab.text.mask_token import MASK, check_mask_id, choose_mask_token, token_counts
from draftlab.vllm.process import find_python


def target_config(target: TargetSettings) -> Any:
    """The target's whole config, as transformers reads it; nothing else of it is downloaded."""
    folder = local_target(target)
    place = str(folder or target.path)
    try:
        return AutoConfig.from_pretrained(
            place, revision=target.revision, trust_remote_code=target.trust_remote_code
        )
    except Exception as error:  # OSError, ValueError, and what remote code raises
        do = "check the id, your network and your login; a folder with its config.json will do, too"
        raise UserError(
            f"the target's config does not load: {error}", where=place, do="" if folder else do
        ) from None


def choose_boundaries(recipe: Recipe, num_layers: int, monitor: Monitor) -> tuple[int, ...]:
    """The boundaries to record: the recipe's, or the target's default ones, said.

    For a head of the last state there need be none: every store holds that.
    """
    chosen = recipe.record.boundaries
    if chosen is None and get_family(recipe.head.family).reads_last_state:
        monitor.say(f"boundaries: none, {recipe.head.family} heads read the last state alone")
        return ()
    if chosen is None:
        chosen = default_boundaries(num_layers)
        usual = [2, num_layers // 2, num_layers - 3]
        note = "" if list(chosen) == usual else f" (the usual {usual} collide or fall outside)"
        monitor.say(f"boundaries {list(chosen)} of {num_layers} layers, by default{note}")
    elif chosen != (usual := default_boundaries(num_layers)):
        monitor.say(
            f"boundaries {list(chosen)} of {num_layers} layers, as the recipe says (by default "
            f"{list(usual)}); each is the input of the layer of that number"
        )
    check_boundaries(chosen, num_layers)
    return chosen


def check_early(recipe: Recipe) -> None:
    """Refuses what would otherwise fail after hours of answering or recording.

    Raises:
        UserError: as `check_shapes`; a target whose weights will not do, a mask token that will
            not, a stage whose vLLM is not there.
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
    """Refuses a recipe that does not fit its target; needs nothing of it but its config.

    Args:
        config: of the target's text tower.

    Raises:
        UserError: boundaries or a mask token outside the target, position encodings that cannot be
            lent, a program that cannot hold such a head, a dtype that the store has no use for,
            processes that pack states which only the one that trains has.
    """
    family, layers = get_family(recipe.head.family), config.num_hidden_layers
    if recipe.record.boundaries is not None:
        try:
            check_boundaries(recipe.record.boundaries, layers)
        except UserError as error:
            usual = f"takes this target's default ones, {list(default_boundaries(layers))}"
            if family.reads_last_state:
                usual = f"records none, which is enough for {recipe.head.family} heads"
            raise UserError(
                error.what, where="record.boundaries", do=f"record.boundaries=null {usual}"
            ) from None
    _rope(recipe.target, config)
    for program in recipe.export.formats:
        try:
            layout_for(program, recipe.head.family)
        except UserError as error:
            raise UserError(
                error.what,
                where="export.formats",
                do="in a recipe --to vllm is export.formats=[vllm]; export.formats=[] exports nothing",
            ) from None
    if family.has_mask_token:
        check_mask_id(recipe.head.mask_token, config.vocab_size)
    if (
        family.reads_last_state
        and recipe.record.dtype == "fp8"
        and recipe.record.boundaries is None
    ):
        raise UserError(
            f"fp8 is for features at boundaries, of which {recipe.head.family} heads need none",
            where="record.dtype",
            do="leave it at bfloat16: the last state is all there is, and is never quantised",
        )
    if recipe.record.online and recipe.train.data_workers:
        raise UserError(
            "with record.online the process that trains makes the states, and no other can pack "
            f"them, found {recipe.train.data_workers}",
            where="train.data_workers",
            do="set it to 0, or leave it out",
        )


def _check_vllm(recipe: Recipe) -> None:
    for settings in (recipe.regenerate, recipe.record):
        if settings.backend == "vllm":
            find_python(settings.vllm)
    if recipe.record.online and recipe.record.backend == "vllm":
        raise UserError(
            "record.online makes states by transformers alone, found record.backend=vllm",
            where="record",
            do="leave one of the two out",
        )


def mask_token(recipe: Recipe, store: Store, tokenizer: Any, monitor: Monitor) -> int | None:
    """The token of a parallel head's masked slots, which the store never holds, said; else None."""
    if not get_family(recipe.head.family).has_mask_token:
        return None
    stops = stop_ids(tokenizer, resolve_target(recipe.target))
    rows = store.identity.vocab_size
    token = choose_mask_token(recipe.head.mask_token, tokenizer, rows, stops, token_counts(store))
    name = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    monitor.say(f"mask token: {name or 'an embedding that no token has'} (id {token})")
    return token


def draft_vocabulary(
    recipe: Recipe, store: Store, tokenizer: Any, monitor: Monitor, *, mask: int | None = None
) -> DraftVocabulary:
    """The store's draft vocabulary under the recipe, without the mask token; coverage said."""
    if get_family(recipe.head.family).uses_target_lm_head:
        rows = store.identity.vocab_size
        monitor.say(f"draft vocabulary: all {rows:,} tokens, drafted by the target's lm_head")
        return DraftVocabulary(torch.arange(rows), 1.0)
    special = set(tokenizer.all_special_ids)
    stops = stop_ids(tokenizer, resolve_target(recipe.target))
    usual = tokenizer.convert_tokens_to_ids(MASK)
    never = {usual} if usual in special else set()
    never |= {mask} if mask is not None else set()
    size = store.identity.vocab_size
    vocabulary = build_draft_vocabulary(
        store, recipe.draft_vocab.size, (special | stops) - never, never, size
    )
    monitor.say(
        f"draft vocabulary: {len(vocabulary.target_ids):,} of {size:,} tokens, covering "
        f"{vocabulary.coverage:.2%} of predicted tokens"
    )
    return vocabulary


def head_config(
    recipe: Recipe,
    identity: StoreIdentity,
    draft_vocab_size: int,
    monitor: Monitor,
    *,
    mask: int | None = None,
    target: Any = None,
) -> HeadConfig:
    """The head's draftlab.json: the target's shapes where the recipe names none.

    Args:
        mask: of `mask_token`. target: of `target_config`, where it has been read.
    """
    settings, family = recipe.head, get_family(recipe.head.family)
    if not identity.boundaries and not family.reads_last_state:
        raise UserError(
            f"the store holds the last state alone, and {settings.family} heads read states at "
            "boundaries",
            where="store",
            do="name=other starts a run beside this one, with a store of its own",
        )
    whole = target or target_config(recipe.target)
    config = whole.get_text_config()
    heads = settings.num_attention_heads or config.num_attention_heads
    size = config.hidden_size
    rope = _rope(recipe.target, config)
    last = (identity.num_layers,)
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        # Stretching by blocks of frequencies lets a target read past its training length. A head
        # is trained at the positions it is given, and servers raise its limit only for these types.
        monitor.say(
            f"rope: of the target's {rope['rope_type']} the head takes the base alone "
            f"(rope_theta {rope['rope_theta']:g})"
        )
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return make_head_config(
        **family.config_fields(settings, config),
        family=family.name,
        num_layers=settings.num_layers,
        mask_token_id=mask,
        embeddings="target" if mask is None else "own",
        boundaries=last if family.reads_last_state else identity.boundaries,
        target_num_layers=identity.num_layers,
        target_hidden_size=identity.hidden_size,
        hidden_size=size,
        intermediate_size=settings.intermediate_size or family.default_intermediate_size(config),
        num_attention_heads=heads,
        num_key_value_heads=settings.num_key_value_heads or config.num_key_value_heads,
        head_dim=settings.head_dim or getattr(config, "head_dim", None) or size // heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope,
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=identity.vocab_size,
        draft_vocab_size=draft_vocab_size,
        k_trained=recipe.train.ttt_steps,
        target=TargetIdentity(
            name=identity.target_name,
            fingerprint=identity.target_fingerprint,
            architecture=(whole.architectures or [type(whole).__name__])[0],
            tokenizer_sha256=identity.tokenizer_sha256,
            template_sha256=identity.template_sha256,
        ),
    )


def _rope(target: TargetSettings, config: Any) -> dict[str, Any]:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_theta" not in rope:
        raise UserError(
            f"expected rope_parameters with rope_theta in the target's config, found {rope}",
            where=target.path,
            do="targets with other position encodings cannot lend theirs to the head",
        )
    return rope
