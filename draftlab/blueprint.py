"""What a new head is to be: its boundaries, draft vocabulary and shapes, from recipe and target."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from draftlab.base import Monitor, UserError
from draftlab.chat.render import stop_ids
from draftlab.data.draft_vocab import DraftVocabulary, build_draft_vocabulary
from draftlab.data.manifest import StoreIdentity
from draftlab.data.mask_token import MASK, choose_mask_token, token_counts
from draftlab.data.store import Store
from draftlab.decode.beside import check_knobs
from draftlab.heads.config import HeadConfig, TargetIdentity
from draftlab.heads.layers import ROPE_TYPES
from draftlab.recipe import Recipe
from draftlab.target.model import (
    TargetKnobs,
    check_boundaries,
    default_boundaries,
    load_tokenizer,
    resolve_target,
)


def target_config(target: TargetKnobs) -> Any:
    """The target's whole config, as transformers reads it."""
    folder = resolve_target(target)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=target.trust_remote_code)
    except Exception as error:  # OSError, ValueError, and what remote code raises
        raise UserError(f"the target's config does not load: {error}", where=folder) from None


def choose_boundaries(recipe: Recipe, num_layers: int, monitor: Monitor) -> tuple[int, ...]:
    """The recipe's boundaries, or the target's default ones, said."""
    chosen = recipe.record.boundaries
    if chosen is None:
        chosen = default_boundaries(num_layers)
        usual = [2, num_layers // 2, num_layers - 3]
        note = "" if list(chosen) == usual else f" (the usual {usual} collide or fall outside)"
        monitor.say(f"boundaries {list(chosen)} of {num_layers} layers, by default{note}")
    check_boundaries(chosen, num_layers)
    return chosen


def check_early(recipe: Recipe) -> None:
    """Refuses what would otherwise fail after hours of answering or recording.

    Raises:
        UserError: boundaries outside the target, position encodings that cannot be lent, a mask
            token that will not do, an evaluation by a vLLM that is not there.
    """
    config = target_config(recipe.target).get_text_config()
    if recipe.record.boundaries is not None:
        try:
            check_boundaries(recipe.record.boundaries, config.num_hidden_layers)
        except UserError as error:
            raise UserError(error.what, where="record.boundaries", do=error.do) from None
    _rope(recipe.target, config)
    if recipe.head.family == "ptd":
        tokenizer = load_tokenizer(recipe.target)
        stops = stop_ids(tokenizer, resolve_target(recipe.target))
        choose_mask_token(recipe.head.mask_token, tokenizer, config.vocab_size, stops, None)
    if recipe.eval.engine == "vllm":
        check_knobs(recipe.eval)


def mask_token(recipe: Recipe, store: Store, tokenizer: Any, monitor: Monitor) -> int | None:
    """The token of a parallel head's masked slots, which the store never holds, said; else None."""
    if recipe.head.family != "ptd":
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
) -> HeadConfig:
    """The head's draftlab.json: the target's shapes where the recipe names none.

    Args:
        mask: of `mask_token`.
    """
    knobs = recipe.head
    whole = target_config(recipe.target)
    config = whole.get_text_config()
    heads = knobs.num_attention_heads or config.num_attention_heads
    size = config.hidden_size
    rope = _rope(recipe.target, config)
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        # Stretching by blocks of frequencies lets a target read past its training length. A head
        # is trained at the positions it is given, and servers raise its limit only for these types.
        monitor.say(
            f"rope: of the target's {rope['rope_type']} the head takes the base alone "
            f"(rope_theta {rope['rope_theta']:g})"
        )
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return HeadConfig(
        family=knobs.family,
        num_layers=knobs.num_layers,
        qk_norm=knobs.qk_norm,
        mask_token_id=mask,
        embeddings="target" if mask is None else "own",
        boundaries=identity.boundaries,
        target_num_layers=identity.num_layers,
        target_hidden_size=identity.hidden_size,
        hidden_size=size,
        intermediate_size=knobs.intermediate_size or config.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=knobs.num_key_value_heads or config.num_key_value_heads,
        head_dim=knobs.head_dim or getattr(config, "head_dim", None) or size // heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope,
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=identity.vocab_size,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=knobs.norm_before_residual,
        k_trained=recipe.train.ttt_steps,
        target=TargetIdentity(
            name=identity.target_name,
            fingerprint=identity.target_fingerprint,
            architecture=(whole.architectures or [type(whole).__name__])[0],
            tokenizer_sha256=identity.tokenizer_sha256,
            template_sha256=identity.template_sha256,
        ),
    )


def _rope(target: TargetKnobs, config: Any) -> dict[str, Any]:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_theta" not in rope:
        raise UserError(
            f"expected rope_parameters with rope_theta in the target's config, found {rope}",
            where=resolve_target(target),
            do="targets with other position encodings cannot lend theirs to the head",
        )
    return rope
