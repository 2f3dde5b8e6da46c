"""Boundaries, mask token, draft vocabulary and shapes of a new head, from recipe and target."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import ValidationError

from draftlab.errors import UserError
from draftlab.formatting import count_text
from draftlab.heads.config import HeadConfig, TargetIdentity, make_head_config
from draftlab.heads.family import Family, get_family
from draftlab.heads.folder import meta_head
from draftlab.heads.head import DraftHead
from draftlab.heads.rope import ROPE_KEYS
from draftlab.progress import Monitor
from draftlab.recipe.recipe import Recipe
from draftlab.settings import describe_errors
from draftlab.store.manifest import StoreIdentity
from draftlab.store.store import Store
from draftlab.target_model.hidden_states import check_boundaries, default_boundaries
from draftlab.target_model.locate import (
    CONFIG_FILES,
    config_folder,
    load_config,
    max_positions,
    resolve_target,
)
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import stop_ids
from draftlab.text.draft_vocabulary import (
    DraftVocabulary,
    build_draft_vocabulary,
    predicted_counts,
)
from draftlab.text.mask_token import MASK, choose_mask_token
from draftlab.train.validation import split_records


def target_config(target: TargetSettings) -> Any:
    """Return the target's config.json as transformers reads it, without downloading weights.

    Raises a `UserError` if it cannot be read.
    """
    folder = config_folder(target) or resolve_target(target, CONFIG_FILES)
    return load_config(folder, trust_remote_code=target.trust_remote_code)


def choose_boundaries(recipe: Recipe, num_layers: int, monitor: Monitor) -> tuple[int, ...]:
    """Return the boundaries to record: the recipe's or the target's default ones.

    Heads that read the last state need none, since every store holds the last state.
    """
    chosen = recipe.record.boundaries
    if chosen is None and get_family(recipe.head.family).reads_last_state:
        monitor.say(f"boundaries: none, {recipe.head.family} heads read only the last state")
        return ()
    if chosen is None:
        chosen = default_boundaries(num_layers)
        formula = [2, num_layers // 2, num_layers - 3]
        note = "" if list(chosen) == formula else f" ({formula} coincide or are outside)"
        monitor.say(f"boundaries {list(chosen)} of {num_layers} layers, by default{note}")
    elif chosen != (default := default_boundaries(num_layers)):
        monitor.say(
            f"boundaries {list(chosen)} of {num_layers} layers, as the recipe says (by default "
            f"{list(default)}); each is the input of the layer of that number"
        )
    check_boundaries(chosen, num_layers)
    return chosen


def mask_token(
    recipe: Recipe, store: Store, tokenizer: Any, monitor: Monitor, trained: int | None = None
) -> int | None:
    """Return the token for masked slots, which the store must not contain; None: needs no token.
    "auto" prefers that of the trained head that training starts from.
    """
    if not get_family(recipe.head.family).has_mask_token:
        return None
    stops = stop_ids(tokenizer, resolve_target(recipe.target))
    rows = store.identity.vocab_size
    counts = sum(predicted_counts(store, rows, range(len(store))))
    token = choose_mask_token(recipe.head.mask_token, tokenizer, rows, stops, counts, trained)
    name = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    monitor.say(f"mask token: {name or 'an embedding that no token has'} (id {token})")
    return token


def draft_vocabulary(
    recipe: Recipe, store: Store, tokenizer: Any, monitor: Monitor, *, mask: int | None = None
) -> DraftVocabulary:
    """Return the draft vocabulary that the recipe chooses from a store, without the mask token."""
    family, rows = get_family(recipe.head.family), store.identity.vocab_size
    whole = recipe.draft_vocab.size is None or recipe.draft_vocab.size >= rows
    if family.whole_vocabulary or (family.freezes_lm_head and whole):
        monitor.say(f"draft vocabulary: all {rows:,} tokens, predicted by the target's lm_head")
        return DraftVocabulary(torch.arange(rows), 1.0)
    # Gemma 3 has a token for images beyond the embeddings of its text model.
    special = {i for i in tokenizer.all_special_ids if i < rows}
    stops = stop_ids(tokenizer, resolve_target(recipe.target))
    default_mask = tokenizer.convert_tokens_to_ids(MASK)
    never = {default_mask} & special
    never |= {mask} if mask is not None else set()
    size = store.identity.vocab_size
    training, held_out = split_records(store, recipe.train, recipe.seed, Monitor())
    vocabulary = build_draft_vocabulary(
        store,
        recipe.draft_vocab.size,
        (special | stops) - never,
        never,
        size,
        training=training,
        held_out=held_out,
    )
    coverage = "; what it covers is not known, since no records are held out"
    if vocabulary.coverage is not None:
        coverage = (
            f", covering {vocabulary.coverage:.2%} of the {vocabulary.held_out:,} predicted "
            f"tokens of {count_text(len(held_out), 'held-out record')}"
        )
    monitor.say(f"draft vocabulary: {len(vocabulary.target_ids):,} of {size:,} tokens{coverage}")
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
    """Return the head's draftlab.json, with the target's shapes unless the recipe names others.

    The target's config is read if it is not given.
    """
    settings, family = recipe.head, get_family(recipe.head.family)
    if not identity.boundaries and not family.reads_last_state:
        raise UserError(
            f"the store holds only the last state, and {settings.family} heads read states at "
            "boundaries",
            where="store",
            do="name=other starts a run beside this one, with a store of its own",
        )
    full_config = target or target_config(recipe.target)
    config = full_config.get_text_config().per_layer_config[0]  # layers of Gemma 4 differ in width
    names, size = family.intermediate_size_names, config.hidden_size
    heads = settings.num_attention_heads or _number(config, "num_attention_heads")
    kv_heads = settings.num_key_value_heads or getattr(config, "num_key_value_heads", None)
    last = (identity.num_layers,)
    fields = {
        "family": family.name,
        "num_layers": settings.num_layers,
        "mask_token_id": mask,
        "embeddings": "own" if family.trains_mask else "target",
        "boundaries": last if family.reads_last_state else identity.boundaries,
        "target_num_layers": identity.num_layers,
        "target_hidden_size": identity.hidden_size,
        "hidden_size": size,
        "intermediate_size": settings.intermediate_size or _number(config, *names),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,  # a config without the name has as many as heads
        "head_dim": settings.head_dim or getattr(config, "head_dim", None) or size // heads,
        "rms_norm_eps": norm_epsilon(config, monitor),
        "rope_parameters": head_rope(config, family, monitor),
        "max_position_embeddings": max_positions(config),
        "vocab_size": identity.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "k_trained": recipe.train.ttt_steps,
        "target": TargetIdentity(
            name=identity.target_name,
            fingerprint=identity.target_fingerprint,
            architecture=(full_config.architectures or [type(full_config).__name__])[0],
            tokenizer_sha256=identity.tokenizer_sha256,
            template_sha256=identity.template_sha256,
        ),
    }
    try:
        return make_head_config(**fields | family.config_fields(settings, config))
    except ValidationError as error:
        raise UserError(
            f"such a head cannot be: {describe_errors(error)}",
            where="head",
            do="change these settings, or leave them out for the target's shape",
        ) from None


def _number(config: Any, *names: str) -> int:
    """Return the number that the target's config has under the first of `names` that is set."""
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return int(value[0] if isinstance(value, list) else value)  # Gemma 3n has one a layer
    raise UserError(
        f"expected {names[-1]} in the target's config, found none ({config.model_type})",
        where=f"head.{names[-1]}",
        do="set it in the recipe: the head has a shape of its own",
    )


def planned_identity(recipe: Recipe, config: Any, tokenizer_sha256: str = "") -> StoreIdentity:
    """Return the identity that a store of the target would have, from the target's config, and its
    tokenizer's hash if it is available.
    """
    text = config.get_text_config()
    return StoreIdentity(
        recipe.target.path,
        "",
        tokenizer_sha256,
        "",
        choose_boundaries(recipe, text.num_hidden_layers, Monitor()),
        text.num_hidden_layers,
        text.hidden_size,
        text.vocab_size,
        recipe.record.dtype,
    )


def planned_head(recipe: Recipe, config: Any, identity: StoreIdentity) -> DraftHead:
    """Return the head that the recipe would train, on the meta device."""
    rows = identity.vocab_size
    family = get_family(recipe.head.family)
    size = min(recipe.draft_vocab.size or rows, rows)
    if family.whole_vocabulary:
        size = rows
    mask = recipe.head.mask_token if isinstance(recipe.head.mask_token, int) else 0
    mask = mask if family.has_mask_token else None
    head = head_config(recipe, identity, size, Monitor(), mask=mask, target=config)
    return meta_head(head)


_DEFAULT_THETA = 10_000.0
_EPSILONS = (
    "rms_norm_eps",
    "norm_eps",
    "norm_epsilon",
    "layer_norm_epsilon",
    "layer_norm_eps",
    "layernorm_epsilon",
)
_DEFAULT_EPSILON = 1e-5


def head_rope(config: Any, family: Family, monitor: Monitor) -> dict[str, Any]:
    """Return the `rope_parameters` of a head: the target's, as far as heads and servers know them.

    A head rotates all channels of a head of attention, unless its family has the target's RoPE.
    What it leaves out of the target's is said.
    """
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if kinds := {name: one for name, one in rope.items() if isinstance(one, dict)}:
        name = "full_attention" if "full_attention" in kinds else next(iter(kinds))
        monitor.say(f"rope: of the target's ({', '.join(kinds)}) the head has that of {name}")
        rope = kinds[name]
    if "rope_theta" not in rope:
        monitor.say(
            "rope: the target's attention does not rotate; the head does, with rope_theta "
            f"{_DEFAULT_THETA:g}"
        )
        return {"rope_type": "default", "rope_theta": _DEFAULT_THETA}
    if family.has_target_rope:
        return rope
    if (share := rope.get("partial_rotary_factor", 1.0)) != 1:
        monitor.say(f"rope: the target rotates {share:.0%} of the channels, and the head all")
    kind = rope.get("rope_type", "default")
    if kind == "yarn" or kind not in (("default",) if family.default_rope else ROPE_KEYS):
        # Other types extend a target beyond its training length. A head is trained at the
        # positions that it serves, and not all servers know them for heads.
        monitor.say(
            f"rope: the head uses only rope_theta {rope['rope_theta']:g} of the target's {kind}"
        )
        kind = "default"
    return {"rope_type": kind} | {key: rope[key] for key in ("rope_theta", *ROPE_KEYS[kind])}


def norm_epsilon(config: Any, monitor: Monitor) -> float:
    """Return the epsilon of the target's norms, which configs spell differently."""
    for name in _EPSILONS:
        if (value := getattr(config, name, None)) is not None:
            return float(value)
    monitor.say(f"norms: the target's config names no epsilon; the head's is {_DEFAULT_EPSILON:g}")
    return _DEFAULT_EPSILON
