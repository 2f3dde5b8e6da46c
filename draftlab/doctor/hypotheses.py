"""Hypotheses: mistakes between training and serving, each with the variant that corrects it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from draftlab.heads.config import HeadConfig, make_head_config
from draftlab.heads.family import get_family
from draftlab.heads.head import EMBEDDINGS
from draftlab.heads.rope import used_rope
from draftlab.heads.validate import ascending_ids
from draftlab.target_model.boundaries import default_boundaries

Norm = Literal["default", "final", "input", "unnormed"]


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
        template: whether prompts are chats; else they are plain text.
    """

    config: HeadConfig
    tensors: dict[str, Tensor]
    norm: Norm = "default"
    lag: int = 0
    template: bool = True

    def with_config(self, **changes: Any) -> HeadVariant | None:
        """Return a variant with a changed config; None: no head of the family has such a one."""
        fields = self.config.model_dump(by_alias=True) | changes
        try:
            return replace(self, config=make_head_config(**fields))
        except ValidationError:
            return None


@dataclass(frozen=True)
class HypothesisContext:
    """The facts about the target and the files that hypotheses need.

    Attributes:
        num_layers: of the target. rope: its rope_parameters; None: it has none.
        target_tensors: the target's embeddings and lm_head, which a head may share.
        boundaries_with_norm: boundaries whose input norm is known.
        templates: which prompts there are: chats (True), plain text (False).
        boundaries: further lists of ids that the files hold.
        own_embeddings: embeddings in a file whose config says that the target's are used.
    """

    num_layers: int
    rope: Mapping[str, Any] | None
    target_tensors: Mapping[str, Tensor]
    boundaries_with_norm: frozenset[int]
    templates: frozenset[bool]
    boundaries: tuple[tuple[int, ...], ...] = ()
    own_embeddings: Tensor | None = None


MARGIN = 0.05  # the least gain in accepted drafts per step that is reported


@dataclass(frozen=True)
class Hypothesis:
    """A mistake that may have been made, and the variant of the head that corrects it.

    Attributes:
        kind: kind of the finding; two hypotheses of one kind exclude each other.
        name: row of the table.
        mistake: a sentence for the verdict.
        correction: how the variant corrects it ("AL 2.8 {correction}").
        do: what the user can do.
        margin: accepted drafts per step that the variant must gain.
    """

    kind: str
    name: str
    mistake: str
    correction: str
    do: str
    variant: HeadVariant
    margin: float = MARGIN


NEXT_POSITION_MARGIN = 0.5
"""Accepted drafts per step that features of the next position must gain. They determine the first
draft nearly, so that a head trained on them is nearly always right, and any other gains a little.
"""


def boundaries(variant: HeadVariant, context: HypothesisContext) -> Iterator[Hypothesis]:
    """Yield boundaries that count outputs of layers or from one, other lists, the defaults."""
    stored = variant.config.boundaries
    up, down = (tuple(b + shift for b in stored) for shift in (1, -1))
    default = default_boundaries(context.num_layers)
    candidates = [
        (up, "boundaries + 1", "the boundary ids look like outputs of layers", "shifted by one"),
        (down, "boundaries − 1", "the boundary ids look one too high", "shifted back by one"),
    ]
    for listed in context.boundaries:
        mistake = f"the head was trained with boundaries {list(listed)}, which its files also name"
        candidates.append((listed, f"boundaries {list(listed)}", mistake, "with those"))
    mistake = "the head has the default boundaries"
    candidates.append((default, "default boundaries", mistake, f"with {list(default)}"))
    proposed = {stored}
    for ids, name, mistake, correction in candidates:
        if ids in proposed or len(ids) != len(stored):
            continue
        changed = variant.with_config(boundaries=ids)
        if changed is None:  # outside the target, or not this family's
            continue
        proposed.add(ids)
        do = f"the head's boundaries are {list(ids)}: write those (boundary i enters layer i)"
        yield Hypothesis("boundaries", name, mistake, correction, do, changed)


def inputs(variant: HeadVariant, context: HypothesisContext) -> Iterator[Hypothesis]:
    """Yield features before and after norms and of neighbouring positions, and plain text."""
    ids = variant.config.boundaries
    last_state = get_family(variant.config.family).reads_last_state
    if last_state:
        yield Hypothesis(
            "features",
            "features before the final norm",
            "the head was trained on states before the target's final norm",
            "with those",
            "every server gives an EAGLE head the normed state: record and train again",
            replace(variant, norm="unnormed"),
        )
    elif context.num_layers in ids:
        yield Hypothesis(
            "features",
            f"boundary {context.num_layers} through the final norm",
            "the head was trained on the last boundary's states after the final norm",
            "with the norm applied",
            f"servers take boundary {context.num_layers} before the norm: record and train "
            "again, without it",
            replace(variant, norm="final"),
        )
    if not last_state and context.boundaries_with_norm.issuperset(ids):
        yield Hypothesis(
            "features",
            "features through the norms they enter",
            "the head was trained on states after the input norms of the layers they enter",
            "with these norms applied",
            "servers take states before any norm: record and train again, without it",
            replace(variant, norm="input"),
        )
    for lag, word, margin in ((1, "previous", MARGIN), (-1, "next", NEXT_POSITION_MARGIN)):
        yield Hypothesis(
            "alignment",
            f"features of the {word} position",
            f"training paired x_(t+1) with the features of position t {'−' if lag > 0 else '+'} 1, "
            "not t",
            f"with the {word} position's",
            "no server can pair them so: train again on pairs (x_(t+1), g_t)",
            replace(variant, lag=variant.lag + lag),
            margin,
        )
    if variant.template and False in context.templates:
        yield Hypothesis(
            "template",
            "without the chat template",
            "the head was trained on plain text, not on chats",
            "without the chat template",
            "serve it without the template, or train it on the target's chats",
            replace(variant, template=False),
        )


ROPE_BASES = (10_000.0, 500_000.0, 1_000_000.0)
"""The default base of programs, and those of well-known targets."""


FLAGS = {
    "norm_before_residual": "norm flags",
    "norm_output": "norm flags",
    "sample_from_anchor": "slots",
    "is_causal": "slots",
}
"""Flags that no tensor's name or shape shows, with the kind of finding."""


def flags(variant: HeadVariant, context: HypothesisContext) -> Iterator[Hypothesis]:
    """Yield the other value of each flag that the head has."""
    config = variant.config
    for flag, kind in FLAGS.items():
        if flag not in config.options():
            continue
        other = not getattr(config, flag)
        changes: dict[str, Any] = {flag: other}
        if flag == "sample_from_anchor":
            # The number of slots stays: slot 0 predicts a token in the anchor layout only.
            changes["k_trained"] = config.k_trained + (1 if other else -1)
        changed = variant.with_config(**changes)
        if changed is None:  # parallel heads have no norm_output
            continue
        value = str(other).lower()
        yield Hypothesis(
            kind,
            f"{flag}: {value}",
            f"{flag} is not what the head was trained with",
            f"with {flag}: {value}",
            f"write {flag}: {value} (programs differ in their defaults, so it must be there)",
            changed,
        )


def rope(variant: HeadVariant, context: HypothesisContext) -> Iterator[Hypothesis]:
    """Yield the target's RoPE, usual bases, and the base without scaling."""
    stored = {"rope_type": "default", **variant.config.rope_parameters}
    bases = [float(stored["rope_theta"]), *ROPE_BASES]
    candidates: list[tuple[Mapping[str, Any], str, str]] = []
    if context.rope is not None and "rope_theta" in context.rope:
        candidates.append((context.rope, "the target's RoPE", "with the target's"))
        bases.insert(0, float(context.rope["rope_theta"]))
    for base in bases:
        text = f"base {base:,.0f}"
        candidates.append(({"rope_theta": base}, f"RoPE {text}", f"with {text}"))
    proposed = [stored]
    for fields, name, correction in candidates:
        parameters = {"rope_type": "default", **used_rope(fields)}
        if parameters in proposed:
            continue
        changed = variant.with_config(rope_parameters=parameters)
        if changed is None:  # a type that heads do not compute
            continue
        proposed.append(parameters)
        yield Hypothesis(
            "rope",
            name,
            "the RoPE parameters are not those that the head was trained with",
            correction,
            f"write rope_parameters {parameters} (programs take base 10,000 where it is missing)",
            changed,
        )


def layouts(variant: HeadVariant, context: HypothesisContext) -> Iterator[Hypothesis]:
    """Yield other orders of the rows and columns of weights."""
    config, tensors = variant.config, variant.tensors
    names = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    if all(name in tensors and tensors[name].shape[1] == 2 * config.hidden_size for name in names):
        swapped = {n: torch.cat(tensors[n].chunk(2, 1)[::-1], 1) for n in names}
        yield Hypothesis(
            "concatenation",
            "hidden state before embedding",
            "attention was trained to read the hidden state before the embedding",
            "with the halves exchanged",
            "exchange the halves of the columns of layers.0.self_attn.{q,k,v}_proj.weight",
            replace(variant, tensors=tensors | swapped),
        )
    if not get_family(config.family).rotates_pairs:
        wrong, right, order, program = "interleaved", "half-split", half_split, "Llama"
    else:  # rotates neighbouring pairs
        wrong, right, order, program = "half-split", "interleaved", interleaved, "Llama 4"
    permuted = {
        name: order(tensor, config.head_dim)
        for name, tensor in tensors.items()
        if name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight"))
    }
    yield Hypothesis(
        "rope layout",
        f"q and k in {wrong} RoPE layout",
        f"the rows of q_proj and k_proj are in the {wrong} RoPE layout",
        f"in the {right} one",
        f"permute the rows of q_proj and k_proj to the {right} layout (transformers' {program})",
        replace(variant, tensors=tensors | permuted),
    )
    if not get_family(config.family).reads_last_state:
        yield from feature_orders(variant)


def half_split(weight: Tensor, head_dim: int) -> Tensor:
    """Permute the rows of every attention head from 0, 1, 2, 3, … to 0, 2, …, 1, 3, …."""
    pairs = weight.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)


def interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Return the inverse permutation of `half_split`."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).reshape(weight.shape)


def feature_orders(variant: HeadVariant) -> Iterator[Hypothesis]:
    """Yield other orders of fc's blocks than ascending boundaries: all of them of up to three
    boundaries, else the reverse."""
    ids = range(len(variant.config.boundaries))
    others = [*itertools.permutations(ids)][1:] if len(ids) <= 3 else [tuple(reversed(ids))]
    for order in others if len(ids) > 1 else ():
        names = [variant.config.boundaries[i] for i in order]
        yield Hypothesis(
            "feature order",
            f"features in the order {names}",
            f"fc was trained on features in the order {names}",
            "with the blocks sorted",
            "sort the blocks of fc.weight's columns by boundary: servers concatenate ascending",
            replace(variant, tensors=variant.tensors | sorted_blocks(variant.tensors, order)),
        )


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


def vocabularies(variant: HeadVariant, context: HypothesisContext) -> Iterator[Hypothesis]:
    """Yield d2t as absolute ids, the target's embeddings, and the file's own."""
    d2t = variant.tensors["d2t"]
    ids = torch.arange(len(d2t))
    if bool((d2t != 0).any()) and ascending_ids(d2t, variant.config.vocab_size):
        yield Hypothesis(
            "d2t",
            "d2t as absolute ids",
            "d2t holds absolute ids where offsets are expected",
            "read as absolute ids",
            "store d2t − arange(len(d2t)): target id = draft id + d2t[draft id]",
            replace(variant, tensors=variant.tensors | {"d2t": d2t.long() - ids}),
        )
    used, target_table = variant.tensors[EMBEDDINGS], context.target_tensors.get(EMBEDDINGS)
    mistake = "the head's own embeddings are not the trained ones"
    others = [
        (target_table, "the target's embeddings", mistake),
        (context.own_embeddings, "the file's embeddings", "the head was trained with its own"),
    ]
    for other, name, mistake in others:
        if other is None or other.shape != used.shape:
            continue
        table = with_mask_row(other, variant)
        if torch.equal(table.to(used), used):
            continue
        yield Hypothesis(
            "embeddings",
            name,
            mistake,
            f"with {name}",
            'drop embed_tokens.weight ("embeddings": "target"), or ship the right ones ("own")',
            replace(variant, tensors=variant.tensors | {EMBEDDINGS: table}),
        )


def with_mask_row(table: Tensor, variant: HeadVariant) -> Tensor:
    """Return embeddings with the head's own row of the mask token, if it has one."""
    if not get_family(variant.config.family).trains_mask:
        return table
    mask = variant.config.mask_token_id
    table = table.clone()
    table[mask] = variant.tensors[EMBEDDINGS][mask].to(table)
    return table


def hypotheses(variant: HeadVariant, context: HypothesisContext) -> list[Hypothesis]:
    """Return every hypothesis that the head's shapes allow."""
    proposals = boundaries, inputs, flags, rope, layouts, vocabularies
    return [hypothesis for propose in proposals for hypothesis in propose(variant, context)]
