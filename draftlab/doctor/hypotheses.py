"""Other ways to read a head, each a pure change of what it is or of what it is fed.

A hypothesis is a mistake that somebody makes between training and serving; it carries the reading
that undoes it. The list is a function of a reading, so a second mistake is found by asking again
from the best reading of the first.
"""

from __future__ import annotations

from draftlab.doctor import input_hypotheses as feeding
from draftlab.doctor import weight_hypotheses as weights
from draftlab.doctor.head_variant import Reading
from draftlab.doctor.hypothesis import About, Hypothesis, Propose

PROPOSALS: tuple[Propose, ...] = (
    feeding.boundaries,
    feeding.features,
    feeding.prompts,
    weights.norms,
    weights.rope,
    weights.layouts,
    weights.vocabularies,
    weights.masks,
)


def hypotheses(reading: Reading, about: About) -> list[Hypothesis]:
    """Every other way to read the head that its shapes allow."""
    return [found for propose in PROPOSALS for found in propose(reading, about)]
