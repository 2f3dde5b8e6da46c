"""Hypotheses about what a head is: flags, RoPE, the order of its weights, its vocabularies."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from draftlab.doctor.head_variant import Reading
from draftlab.doctor.hypothesis import About, Hypothesis
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.heads.head import EMBEDDINGS
from draftlab.heads.validate import ascending_ids

ROPE_BASES = (10_000.0, 500_000.0, 1_000_000.0)
"""Bases that readers fall back to, or that the families of public targets have."""


def norms(reading: Reading, about: About) -> Iterator[Hypothesis]:
    """Flags that no tensor gives away."""
    for flag in ("norm_before_residual", "norm_output"):
        if flag not in reading.config.options():
            continue
        other = not getattr(reading.config, flag)
        try:
            changed = reading.with_config(**{flag: other})
        except ValidationError:  # parallel heads have no norm_output
            continue
        value = str(other).lower()
        yield Hypothesis(
            "norm flags",
            f"{flag}: {value}",
            f"{flag} is not what the head was trained with",
            f"with {flag}: {value}",
            f"write {flag}: {value} (programs differ in their defaults, so it must stand there)",
            changed,
        )


def rope(reading: Reading, about: About) -> Iterator[Hypothesis]:
    """The target's RoPE, usual bases, and no scaling."""
    stored = {"rope_type": "default", **reading.config.rope_parameters}
    known = [stored]

    def read(parameters: dict[str, Any], name: str, so: str) -> Iterator[Hypothesis]:
        parameters = {"rope_type": "default", **parameters}
        if parameters in known:
            return
        try:
            changed = reading.with_config(rope_parameters=parameters)
        except ValidationError:  # a type that heads do not compute
            return
        known.append(parameters)
        yield Hypothesis(
            "rope",
            name,
            "the RoPE parameters are not those that the head was trained with",
            so,
            f"write rope_parameters {parameters} (readers take base 10,000 where it is missing)",
            changed,
        )

    if about.rope is not None and "rope_theta" in about.rope:
        theta = float(about.rope["rope_theta"])
        yield from read(dict(about.rope), "the target's RoPE", "with the target's")
        plain = {"rope_theta": theta}
        yield from read(plain, f"RoPE base {theta:,.0f}", f"with base {theta:,.0f}")
    for base in (float(stored["rope_theta"]), *ROPE_BASES):
        yield from read({"rope_theta": base}, f"RoPE base {base:,.0f}", f"with base {base:,.0f}")


def layouts(reading: Reading, about: About) -> Iterator[Hypothesis]:
    """Rows and columns of weights in another order."""
    config, tensors = reading.config, reading.tensors
    first = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    if all(name in tensors and tensors[name].shape[1] == 2 * config.hidden_size for name in first):
        swapped = {n: torch.cat(tensors[n].chunk(2, 1)[::-1], 1) for n in first}
        yield Hypothesis(
            "concatenation",
            "hidden state before embedding",
            "attention was trained to read the hidden state before the embedding",
            "with the halves exchanged",
            "exchange the halves of the columns of layers.0.self_attn.{q,k,v}_proj.weight",
            replace(reading, tensors=tensors | swapped),
        )
    if not get_family(config.family).rotates_pairs:
        wrong, right, order, program = "interleaved", "half-split", half_split, "Llama"
    else:  # rotates neighbouring pairs
        wrong, right, order, program = "half-split", "interleaved", interleaved, "Llama 4"
    turned = {
        name: order(tensor, config.head_dim)
        for name, tensor in tensors.items()
        if name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight"))
    }
    yield Hypothesis(
        "rope layout",
        f"q and k in {wrong} RoPE layout",
        f"the rows of q_proj and k_proj lie in the {wrong} RoPE layout",
        f"brought into the {right} one",
        f"permute the rows of q_proj and k_proj to the {right} layout (transformers' {program})",
        replace(reading, tensors=tensors | turned),
    )
    if not get_family(config.family).reads_last_state:
        yield from orders(reading)


def half_split(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of every head from (0, 1), (2, 3), … to 0, 2, …, 1, 3, …."""
    pairs = weight.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)


def interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """The way back."""
    halves = weight.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).reshape(weight.shape)


def orders(reading: Reading) -> Iterator[Hypothesis]:
    """fc's blocks in another order than ascending boundaries; of many boundaries the reverse."""
    ids = range(len(reading.config.boundaries))
    others = [*itertools.permutations(ids)][1:] if len(ids) <= 3 else [tuple(reversed(ids))]
    for order in others if len(ids) > 1 else ():
        names = [reading.config.boundaries[i] for i in order]
        yield Hypothesis(
            "feature order",
            f"features in the order {names}",
            f"fc was trained on features in the order {names}",
            "read in that order",
            "sort the blocks of fc.weight's columns by boundary: servers concatenate ascending",
            replace(reading, tensors=reading.tensors | sorted_blocks(reading.tensors, order)),
        )


def sorted_blocks(tensors: Mapping[str, Tensor], order: tuple[int, ...]) -> dict[str, Tensor]:
    """What reads features whose i-th block belongs to boundary order[i], with blocks ascending."""
    place = sorted(range(len(order)), key=lambda i: order[i])
    found = {
        name: torch.cat([tensors[name].chunk(len(order), -1)[i] for i in place], -1)
        for name in ("fc.weight", "input_norm.weight", "mask_hidden")
        if name in tensors
    }
    each = [f"fc_norm.{i}.weight" for i in range(len(order))]
    if all(name in tensors for name in each):
        found |= {each[n]: tensors[each[i]] for n, i in enumerate(place)}
    return found


def vocabularies(reading: Reading, about: About) -> Iterator[Hypothesis]:
    """d2t as absolute ids; the target's embeddings, or the file's own."""
    d2t = reading.tensors["d2t"]
    ids = torch.arange(len(d2t))
    if bool((d2t != 0).any()) and ascending_ids(d2t, reading.config.vocab_size):
        yield Hypothesis(
            "d2t",
            "d2t as absolute ids",
            "d2t holds absolute ids where offsets are expected",
            "read as absolute ids",
            "store d2t − arange(len(d2t)): target id = draft id + d2t[draft id]",
            replace(reading, tensors=reading.tensors | {"d2t": d2t.long() - ids}),
        )
    own, of_target = reading.tensors[EMBEDDINGS], about.target_tensors.get(EMBEDDINGS)
    others = [
        (
            of_target,
            "the target's embeddings",
            "the head's own embeddings are not the trained ones",
        ),
        (about.own_embeddings, "the file's embeddings", "the head was trained with its own"),
    ]
    for other, name, says in others:
        if other is None or other.shape != own.shape:
            continue
        table = with_mask_row(other, reading)
        if torch.equal(table.to(own), own):
            continue
        yield Hypothesis(
            "embeddings",
            name,
            says,
            f"with {name}",
            'drop embed_tokens.weight ("embeddings": "target"), or ship the right ones ("own")',
            replace(reading, tensors=reading.tensors | {EMBEDDINGS: table}),
        )


def with_mask_row(table: Tensor, reading: Reading) -> Tensor:
    """Embeddings that keep a parallel head's own row of the mask token."""
    if not get_family(reading.config.family).has_mask_token:
        return table
    mask = reading.config.mask_token_id
    table = table.clone()
    table[mask] = reading.tensors[EMBEDDINGS][mask].to(table)
    return table


def masks(reading: Reading, about: About) -> Iterator[Hypothesis]:
    """`mask_hidden` behind fc, where shapes leave it open."""
    config = reading.config
    if config.feature_size == config.hidden_size and can_lift(config, reading.tensors):
        lifted = lifted_mask(reading.tensors["mask_hidden"], reading.tensors["fc.weight"])
        yield Hypothesis(
            "mask_hidden",
            "mask_hidden already projected",
            "mask_hidden was projected by fc before it was stored",
            "read so",
            "store the vector before fc: servers project it once, when they load it",
            replace(reading, tensors=reading.tensors | {"mask_hidden": lifted}),
        )


def can_lift(config: HeadConfig, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a vector before fc can be found for one behind it: not where norms lie between."""
    if not get_family(config.family).has_mask_token or "fc.weight" not in tensors:
        return False
    return not (config.norm_before_fc or config.fc_norm)


def lifted_mask(projected: Tensor, fc: Tensor) -> Tensor:
    """The shortest vector [1, F] that fc [H, F] maps to `projected` (H values)."""
    wide = fc.double()
    behind = projected.double().flatten()[:, None]
    found = wide.T @ torch.linalg.lstsq(wide @ wide.T, behind).solution
    return found.T.to(projected.dtype)
