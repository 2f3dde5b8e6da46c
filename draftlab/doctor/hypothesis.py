"""What a hypothesis about a head is, and what is known of its target to make some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftlab.doctor.head_variant import Reading


@dataclass(frozen=True)
class About:
    """What hypotheses need to know of the target and the files.

    Attributes:
        num_layers: of the target. rope: its rope_parameters; None: it has none.
        target_tensors: the target's embeddings and lm_head, as a head may borrow them.
        entered: boundaries whose states go through a norm that is known.
        templates: which prompts there are: chats (True), plain text (False).
        boundaries: further lists of ids that the files hold.
        own_embeddings: embeddings in a file whose config says that the target's are used.
    """

    num_layers: int
    rope: Mapping[str, Any] | None
    target_tensors: Mapping[str, Tensor]
    entered: frozenset[int]
    templates: frozenset[bool]
    boundaries: tuple[tuple[int, ...], ...] = ()
    own_embeddings: Tensor | None = None


MARGIN = 0.05  # accepted drafts a step that are worth a word


@dataclass(frozen=True)
class Hypothesis:
    """A mistake, and the reading that undoes it.

    Attributes:
        kind: two of one kind exclude each other; also the kind of the finding.
        name: of the row in the table.
        says: the mistake, if this reading fits. so: how it is read then ("AL 2.8 {so}").
        do: what to do about it.
        margin: accepted drafts a step that it must gain.
    """

    kind: str
    name: str
    says: str
    so: str
    do: str
    reading: Reading
    margin: float = MARGIN


Propose = Callable[[Reading, About], Iterator[Hypothesis]]
