"""Hypotheses about a head itself: flags, RoPE, the order of its weights, its vocabularies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from draftlab.doctor.head_variant import HeadVariant
from draftlab.doctor.hypothesis import Hypothesis, HypothesisContext
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.head import EMBEDDINGS
from draftlab.heads.rope import used_rope
from draftlab.heads.validate import ascending_ids

ROPE_BASES = (10_000.0, 500_000.0, 1_000_000.0)
"""The default base of programs, and those of well-known targets."""


def norms(variant: HeadVariant, context: HypothesisContext) -> Iterator[Hypothesis]:
    """Yield other values of flags that no tensor's name or shape shows."""
    yield from flags(variant, "norm flags", {"norm_before_residual": {}, "norm_output": {}})


def slots(variant: HeadVariant, context: HypothesisContext) -> Iterator[Hypothesis]:
    """Yield the other layout of a block's slots, and the other order of attention in a block."""
    options = variant.config.options()
    if "sample_from_anchor" in options:
        # The number of slots stays: slot 0 predicts a token in the anchor layout only.
        shift = -1 if options["sample_from_anchor"] else 1
        drafts = {"k_trained": variant.config.k_trained + shift}
        yield from flags(variant, "slots", {"sample_from_anchor": drafts, "is_causal": {}})


def flags(
    variant: HeadVariant, kind: str, changes: Mapping[str, dict[str, Any]]
) -> Iterator[Hypothesis]:
    """Yield the other value of each flag that the head has, with the changes that go with it."""
    for flag, others in changes.items():
        if flag not in variant.config.options():
            continue
        other = not getattr(variant.config, flag)
        try:
            changed = variant.with_config(**{flag: other}, **others)
        except ValidationError:  # parallel heads have no norm_output
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
        try:
            changed = variant.with_config(rope_parameters=parameters)
        except ValidationError:  # a type that heads do not compute
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


def masks(variant: HeadVariant, context: HypothesisContext) -> Iterator[Hypothesis]:
    """Yield `mask_hidden` as the output of fc, where both have the same width."""
    config = variant.config
    if config.feature_size == config.hidden_size and can_unproject_mask(config, variant.tensors):
        unprojected = unproject_mask(variant.tensors["mask_hidden"], variant.tensors["fc.weight"])
        yield Hypothesis(
            "mask_hidden",
            "mask_hidden already projected",
            "mask_hidden was projected by fc before it was stored",
            "with the vector before fc",
            "store the vector before fc: servers project it once, when they load it",
            replace(variant, tensors=variant.tensors | {"mask_hidden": unprojected}),
        )


def can_unproject_mask(config: HeadConfig, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether fc can be inverted for `mask_hidden`: not where there are norms before it."""
    if not get_family(config.family).trains_mask or "fc.weight" not in tensors:
        return False
    return not (config.norm_before_fc or config.fc_norm)


def unproject_mask(projected: Tensor, fc: Tensor) -> Tensor:
    """Return the shortest vector [1, F] that fc [H, F] maps to `projected` (H values)."""
    fc, output = fc.double(), projected.double().flatten()[:, None]
    solution = fc.T @ torch.linalg.lstsq(fc @ fc.T, output).solution
    return solution.T.to(projected.dtype)
