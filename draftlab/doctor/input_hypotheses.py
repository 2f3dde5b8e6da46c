"""Hypotheses about the inputs of a head: boundaries, norms, alignment, prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pydantic import ValidationError

from draftlab.doctor.head_variant import HeadVariant
from draftlab.doctor.hypothesis import MARGIN, Hypothesis, HypothesisContext
from draftlab.heads.family import get_family
from draftlab.target_model.boundaries import default_boundaries

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
        try:
            changed = variant.with_config(boundaries=ids)
        except ValidationError:  # outside the target, or not this family's
            continue
        proposed.add(ids)
        do = f"the head's boundaries are {list(ids)}: write those (boundary i enters layer i)"
        yield Hypothesis("boundaries", name, mistake, correction, do, changed)


def features(variant: HeadVariant, context: HypothesisContext) -> Iterator[Hypothesis]:
    """Yield features before and after norms, and features of the neighbouring positions."""
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


def prompts(variant: HeadVariant, context: HypothesisContext) -> Iterator[Hypothesis]:
    """Yield plain text instead of chats."""
    if variant.template and False in context.templates:
        yield Hypothesis(
            "template",
            "without the chat template",
            "the head was trained on plain text, not on chats",
            "without the chat template",
            "serve it without the template, or train it on the target's chats",
            replace(variant, template=False),
        )
