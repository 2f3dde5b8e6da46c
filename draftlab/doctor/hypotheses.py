"""The table of hypotheses: mistakes between training and serving, and the heads without them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from draftlab.heads.config import HeadConfig, make_head_config
from draftlab.heads.family import get_family
from draftlab.heads.head import EMBEDDINGS
from draftlab.heads.rope import used_rope
from draftlab.heads.validate import ascending_ids
from draftlab.target_model.hidden_states import default_boundaries

ROPE_BASES = (10_000.0, 500_000.0, 1_000_000.0)
"""The default base of programs, and those of well-known targets."""
FLAGS = {
    "norm_before_residual": "norm flags",
    "norm_output": "norm flags",
    "sample_from_anchor": "slots",
    "is_causal": "slots",
}
"""Flags that no tensor's name or shape shows, with the kind of finding."""


@dataclass(frozen=True)
class HeadVariant:
    """A head, and the inputs that it gets.

    Attributes:
        config: shapes, boundaries and conventions.
        tensors: every tensor by its name in files, including those that a file lacks.
        norm: what is applied to the features. "default": what the family applies; "final": the
            target's final norm, to the state after the last layer; "input": to each state the
            input norm of the layer that it enters; "unnormed": nothing, where an EAGLE head's
            feature is normed.
        lag: positions by which the features are late: 1 pairs x_{t+1} with g_{t−1}.
    """

    config: HeadConfig
    tensors: dict[str, Tensor]
    norm: Literal["default", "final", "input", "unnormed"] = "default"
    lag: int = 0


@dataclass(frozen=True)
class HypothesisContext:
    """The facts about the target and the files that hypotheses need.

    Attributes:
        num_layers: of the target.
        rope: its rope_parameters; None: it has none.
        target_tensors: the target's embeddings and lm_head, which a head may share.
        boundaries_with_norm: boundaries whose input norm is known.
        boundaries: further lists of ids that the files hold.
        own_embeddings: embeddings in a file whose config says that the target's are used.
    """

    num_layers: int
    rope: Mapping[str, Any] | None = None
    target_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    boundaries_with_norm: frozenset[int] = frozenset()
    boundaries: tuple[tuple[int, ...], ...] = ()
    own_embeddings: Tensor | None = None


@dataclass(frozen=True)
class Hypothesis:
    """A row of the table: what a head may have been trained with, and the variant that has it.

    Attributes:
        kind: kind of the finding.
        name: ends the sentence "it was trained with …".
        do: what the user can do.
    """

    kind: str
    name: str
    do: str
    variant: HeadVariant


def hypotheses(stored: HeadVariant, context: HypothesisContext) -> Iterator[Hypothesis]:
    """Yield every row of the table that the head's shapes allow."""
    for kind, name, do, inputs in input_rows(stored, context):
        yield Hypothesis(kind, name, do, replace(stored, **inputs))
    for kind, name, do, config in config_rows(stored, context):
        yield Hypothesis(kind, name, do, replace(stored, config=config))
    for kind, name, do, tensors in weight_rows(stored, context):
        yield Hypothesis(kind, name, do, replace(stored, tensors=stored.tensors | tensors))


Row = tuple[str, str, str, Any]
"""Kind, name and do of a hypothesis, and the inputs, the config or the tensors that change."""


def input_rows(stored: HeadVariant, context: HypothesisContext) -> Iterator[Row]:
    """Yield features before and after norms and of neighbouring positions."""
    ids, last = stored.config.boundaries, context.num_layers
    normed = get_family(stored.config.family).reads_last_state
    rows = [
        (
            normed,
            "features before the final norm",
            "every server gives an EAGLE head the normed state: record and train again",
            "unnormed",
        ),
        (
            not normed and last in ids,
            f"boundary {last} through the final norm",
            f"servers take boundary {last} before the norm: record and train again, without it",
            "final",
        ),
        (
            not normed and context.boundaries_with_norm.issuperset(ids),
            "features through the norms they enter",
            "servers take states before any norm: record and train again, without it",
            "input",
        ),
    ]
    for applies, name, do, norm in rows:
        if applies:
            yield "features", name, do, {"norm": norm}
    do = "no server can pair x_(t+1) with those: train again on pairs (x_(t+1), g_t)"
    for lag, word in ((1, "previous"), (-1, "next")):
        yield "alignment", f"features of the {word} position", do, {"lag": lag}


def config_rows(stored: HeadVariant, context: HypothesisContext) -> Iterator[Row]:
    """Yield the other configs that a head of the family can have, each once."""
    tables = boundary_rows, flag_rows, rope_rows
    fields = stored.config.model_dump(by_alias=True)
    rope = {"rope_type": "default", **stored.config.rope_parameters}
    tried = [stored.config, make_head_config(**fields | {"rope_parameters": rope})]
    for kind, name, do, changes in (row for table in tables for row in table(stored, context)):
        try:
            config = make_head_config(**fields | changes)
        except ValidationError:  # no head of the family has such a config
            continue
        if config not in tried:
            tried.append(config)
            yield kind, name, do, config


def boundary_rows(stored: HeadVariant, context: HypothesisContext) -> Iterator[Row]:
    """Yield ids that count outputs of layers or from one, those of the files, and the default."""
    ids = stored.config.boundaries
    candidates = {
        "boundaries + 1": tuple(b + 1 for b in ids),
        "boundaries − 1": tuple(b - 1 for b in ids),
        **{f"boundaries {list(named)}": named for named in context.boundaries},
        "the default boundaries": default_boundaries(context.num_layers),
    }
    for name, other in candidates.items():
        if len(other) == len(ids):
            do = f"write boundaries {list(other)}: boundary i enters layer i, the output of i − 1"
            yield "boundaries", name, do, {"boundaries": other}


def flag_rows(stored: HeadVariant, context: HypothesisContext) -> Iterator[Row]:
    """Yield the other value of each flag that the head has."""
    config = stored.config
    for flag in (flag for flag in FLAGS if flag in config.options()):
        other = not getattr(config, flag)
        changes: dict[str, Any] = {flag: other}
        if flag == "sample_from_anchor":
            # The number of slots stays: slot 0 predicts a token in the anchor layout only.
            changes["k_trained"] = config.k_trained + (1 if other else -1)
        name = f"{flag}: {str(other).lower()}"
        do = f"write {name} (programs differ in their defaults, so it must be there)"
        yield FLAGS[flag], name, do, changes


def rope_rows(stored: HeadVariant, context: HypothesisContext) -> Iterator[Row]:
    """Yield the target's RoPE, usual bases, and the base without scaling."""
    bases = [float(stored.config.rope_parameters["rope_theta"]), *ROPE_BASES]
    candidates: dict[str, Mapping[str, Any]] = {}
    if context.rope is not None and "rope_theta" in context.rope:
        candidates["the target's RoPE"] = context.rope
        bases.insert(0, float(context.rope["rope_theta"]))
    candidates |= {f"RoPE base {base:,.0f}": {"rope_theta": base} for base in bases}
    for name, fields in candidates.items():
        parameters = {"rope_type": "default", **used_rope(fields)}
        do = f"write rope_parameters {parameters} (programs take base 10,000 where it is missing)"
        yield "rope", name, do, {"rope_parameters": parameters}


def weight_rows(stored: HeadVariant, context: HypothesisContext) -> Iterator[Row]:
    """Yield other orders of the rows and columns of weights, d2t as ids, and other embeddings."""
    config, tensors = stored.config, stored.tensors
    names = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    if all(name in tensors and tensors[name].shape[1] == 2 * config.hidden_size for name in names):
        yield (
            "concatenation",
            "hidden state before embedding",
            "exchange the halves of the columns of layers.0.self_attn.{q,k,v}_proj.weight",
            {n: torch.cat(tensors[n].chunk(2, 1)[::-1], 1) for n in names},
        )
    wrong, right, order, program = "interleaved", "half-split", half_split, "Llama"
    if get_family(config.family).rotates_pairs:  # neighbouring ones
        wrong, right, order, program = "half-split", "interleaved", interleaved, "Llama 4"
    yield (
        "rope layout",
        f"q and k in {wrong} RoPE layout",
        f"permute the rows of q_proj and k_proj to the {right} layout (transformers' {program})",
        {
            name: order(tensor, config.head_dim)
            for name, tensor in tensors.items()
            if name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight"))
        },
    )
    for order_of_blocks in feature_orders(config):
        ids = [config.boundaries[i] for i in order_of_blocks]
        yield (
            "feature order",
            f"features in the order {ids}",
            "sort the blocks of fc.weight's columns by boundary: servers concatenate ascending",
            sorted_blocks(tensors, order_of_blocks),
        )
    yield from block_weight_rows(tensors)
    d2t = tensors["d2t"]
    if bool((d2t != 0).any()) and ascending_ids(d2t, config.vocab_size):
        yield (
            "d2t",
            "d2t as absolute ids",
            "store d2t − arange(len(d2t)): target id = draft id + d2t[draft id]",
            {"d2t": d2t.long() - torch.arange(len(d2t))},
        )
    for name, table in (
        ("the target's embeddings", context.target_tensors.get(EMBEDDINGS)),
        ("the file's embeddings", context.own_embeddings),
    ):
        used = tensors[EMBEDDINGS]
        if table is None or table.shape != used.shape:
            continue
        if get_family(config.family).trains_mask:  # the mask token's row is the head's own
            table = table.clone()
            table[config.mask_token_id] = used[config.mask_token_id].to(table)
        if not torch.equal(table.to(used), used):
            do = 'drop embed_tokens.weight ("embeddings": "target"), or ship the right ones ("own")'
            yield "embeddings", name, do, {EMBEDDINGS: table}


def block_weight_rows(tensors: Mapping[str, Tensor]) -> Iterator[Row]:
    """Yield exchanged codebooks of a selector, and convolutions with taps or sides exchanged."""
    names = [f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor")]
    if all(name in tensors for name in names):
        do = f"exchange {names[0]} and {names[1]}: the first has the token before"
        first, second = names
        exchanged = {first: tensors[second], second: tensors[first]}
        yield "selector", "the selector's codebooks exchanged", do, exchanged
    kernels = [name for name in tensors if name.endswith("_conv.base_kernel")]
    for axis, what, order in ((0, "sides", "the input's first"), (1, "taps", "the slot's first")):
        changed = {}
        for name in kernels:
            weight = f"{name.removesuffix('base_kernel')}kernel_projection.weight"
            shape = (*tensors[name].shape[:2], -1)
            changed[name] = tensors[name].flip(axis)
            changed[weight] = tensors[weight].unflatten(0, shape).flip(axis).flatten(0, 2)
        if kernels:
            do = f"order the {what} of *_conv.base_kernel and of the rows of *_conv."
            do += f"kernel_projection.weight: {order}"
            yield "convolutions", f"the {what} of convolutions in the other order", do, changed


def half_split(weight: Tensor, head_dim: int) -> Tensor:
    """Permute the rows of every attention head from 0, 1, 2, 3, … to 0, 2, …, 1, 3, …."""
    pairs = weight.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)


def interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Return the inverse permutation of `half_split`."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).reshape(weight.shape)


def feature_orders(config: HeadConfig) -> list[tuple[int, ...]]:
    """Return other orders of fc's blocks than ascending boundaries: all of them of up to three
    boundaries, else the reverse."""
    ids = range(len(config.boundaries))
    if get_family(config.family).reads_last_state or len(ids) < 2:
        return []
    return [*itertools.permutations(ids)][1:] if len(ids) <= 3 else [tuple(reversed(ids))]


def sorted_blocks(tensors: Mapping[str, Tensor], order: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the tensors whose i-th block belongs to boundary order[i], with blocks ascending."""
    ascending = sorted(range(len(order)), key=lambda i: order[i])
    changed = {
        name: torch.cat([tensors[name].chunk(len(order), -1)[i] for i in ascending], -1)
        for name in ("fc.weight", "input_norm.weight", "mask_hidden")
        if name in tensors
    }
    norms = [f"fc_norm.{i}.weight" for i in range(len(order))]
    if all(name in tensors for name in norms):
        changed |= {norms[n]: tensors[norms[i]] for n, i in enumerate(ascending)}
    return changed
