"""One way to read a head: all that decides its drafts, as plain values that a change copies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from draftlab.heads.config import HeadConfig, make_head_config

Norm = Literal["usual", "last", "entered", "before"]


@dataclass(frozen=True)
class Reading:
    """A head, and what it is fed.

    Attributes:
        config: shapes, boundaries and conventions.
        tensors: every tensor by its name in files; what a file lacks is filled in.
        norm: of the features: "usual", as the family says; "last", the state before the target's
            final norm goes through it; "entered", each goes through the norm of the layer that it
            enters; "before", of an EAGLE head, whose feature is normed, not normed.
        lag: positions by which the features come late: 1 pairs x_{t+1} with g_{t−1}.
        template: prompts are chats; else plain text.
    """

    config: HeadConfig
    tensors: dict[str, Tensor]
    norm: Norm = "usual"
    lag: int = 0
    template: bool = True

    def with_config(self, **changes: Any) -> Reading:
        """A reading whose config differs; checked as any other."""
        fields = self.config.model_dump(by_alias=True) | changes
        return replace(self, config=make_head_config(**fields))
