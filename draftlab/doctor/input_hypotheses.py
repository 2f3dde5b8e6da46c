"""Hypotheses about what a head is fed: boundaries, norms, alignment, prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pydantic import ValidationError

from draftlab.doctor.head_variant import Reading
from draftlab.doctor.hypothesis import MARGIN, About, Hypothesis
from draftlab.heads.family import get_family
from draftlab.target_model.boundaries import default_boundaries

FORETOLD = 0.5
"""Accepted drafts a step that features of the next position must gain. They foretell the first
draft: a head trained on them has it right nearly always, and one hardly trained gains a little."""


def boundaries(reading: Reading, about: About) -> Iterator[Hypothesis]:
    """Ids that count outputs of layers, or from one; a reader's default; another list of a file."""
    ids = reading.config.boundaries
    known = {ids}

    def read(other: tuple[int, ...], name: str, says: str, so: str) -> Iterator[Hypothesis]:
        if other in known or len(other) != len(ids):
            return
        try:
            changed = reading.with_config(boundaries=other)
        except ValidationError:  # outside the target, or not this family's
            return
        known.add(other)
        do = f"the head's boundaries are {list(other)}: write those (boundary i enters layer i)"
        yield Hypothesis("boundaries", name, says, so, do, changed)

    up, down = (tuple(b + shift for b in ids) for shift in (1, -1))
    yield from read(
        up, "boundaries + 1", "the boundary ids look like outputs of layers", "shifted by one"
    )
    yield from read(
        down, "boundaries − 1", "the boundary ids look one too high", "shifted back by one"
    )
    for other in about.boundaries:
        says = f"the head was trained with boundaries {list(other)}, which its files name too"
        yield from read(other, f"boundaries {list(other)}", says, "read so")
    usual = default_boundaries(about.num_layers)
    yield from read(
        usual, "default boundaries", "the head has the default boundaries", f"with {list(usual)}"
    )


def features(reading: Reading, about: About) -> Iterator[Hypothesis]:
    """States before and after norms, and the shift against tokens."""
    ids = reading.config.boundaries
    last_state = get_family(reading.config.family).reads_last_state
    if last_state:
        yield Hypothesis(
            "features",
            "features before the final norm",
            "the features of training are states before the target's final norm",
            "fed those",
            "an EAGLE head is fed the normed state by every server: record and train again",
            replace(reading, norm="before"),
        )
    elif about.num_layers in ids:
        yield Hypothesis(
            "features",
            f"boundary {about.num_layers} through the final norm",
            "the last boundary's features of training are states after the final norm",
            "with the norm applied",
            f"servers hand over boundary {about.num_layers} before the norm: record and train "
            "again, without it",
            replace(reading, norm="last"),
        )
    if not last_state and about.entered.issuperset(ids):
        yield Hypothesis(
            "features",
            "features through the norms they enter",
            "the features of training went through the input norms of the layers they enter",
            "with these norms applied",
            "servers hand over states before any norm: record and train again, without it",
            replace(reading, norm="entered"),
        )
    for lag, word, margin in ((1, "previous", MARGIN), (-1, "next", FORETOLD)):
        yield Hypothesis(
            "alignment",
            f"features of the {word} position",
            f"in training x_(t+1) stood beside the features of position t {'−' if lag > 0 else '+'}"
            " 1, not t",
            f"fed the {word} position's",
            "no server can feed it so: train again on pairs (x_(t+1), g_t)",
            replace(reading, lag=reading.lag + lag),
            margin,
        )


def prompts(reading: Reading, about: About) -> Iterator[Hypothesis]:
    """With the chat template, and without."""
    if reading.template and False in about.templates:
        yield Hypothesis(
            "template",
            "without the chat template",
            "the head was trained on plain text, not on chats",
            "without the chat template",
            "serve it without the template, or train it on the target's chats",
            replace(reading, template=False),
        )
