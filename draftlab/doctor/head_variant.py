"""A variant of a head: its config, its tensors and its inputs, as values that a change copies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from draftlab.heads.config import HeadConfig, make_head_config

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

    def with_config(self, **changes: Any) -> HeadVariant:
        """Return a variant with a changed config.

        Raises:
            ValidationError: the config contradicts itself.
        """
        fields = self.config.model_dump(by_alias=True) | changes
        return replace(self, config=make_head_config(**fields))
