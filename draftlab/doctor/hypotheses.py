"""All hypotheses about a head.

Each is a mistake that is made between training and serving, with the variant of the head that
corrects it. They are a function of a variant, so a second mistake is found by proposing hypotheses
about the best variant of the first search.
"""

from __future__ import annotations

from draftlab.doctor import input_hypotheses as inputs
from draftlab.doctor import weight_hypotheses as weights
from draftlab.doctor.head_variant import HeadVariant
from draftlab.doctor.hypothesis import Hypothesis, HypothesisContext, Propose

PROPOSALS: tuple[Propose, ...] = (
    inputs.boundaries,
    inputs.features,
    inputs.prompts,
    weights.norms,
    weights.rope,
    weights.layouts,
    weights.vocabularies,
    weights.masks,
)


def hypotheses(variant: HeadVariant, context: HypothesisContext) -> list[Hypothesis]:
    """Return every hypothesis that the head's shapes allow."""
    return [hypothesis for propose in PROPOSALS for hypothesis in propose(variant, context)]
