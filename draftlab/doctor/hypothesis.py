"""A hypothesis about a head, and the facts about target and files that hypotheses need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftlab.doctor.head_variant import HeadVariant


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


Propose = Callable[[HeadVariant, HypothesisContext], Iterator[Hypothesis]]
