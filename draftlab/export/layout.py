"""What an exporter knows of a program: a layout is how that program wants heads of one family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.heads.config import HeadConfig

CONFIG, LAUNCH, README = "config.json", "launch.md", "README.md"


@dataclass(frozen=True)
class Export:
    """A head on its way out, as every layout is given it.

    Attributes:
        head: the head's draftlab.json.
        target: the target's config.json, known to be the head's own target.
        target_name: its Hub id, or its folder.
        k: tokens a server drafts by default.
        dtype: of floating tensors.
    """

    head: HeadConfig
    target: dict[str, Any]
    target_name: str
    k: int
    dtype: torch.dtype

    @property
    def positions(self) -> int:
        """The target's `max_position_embeddings`.

        Servers stop drafting, or shorten the target, at the smaller of the head's and the target's.
        """
        text = self.target.get("text_config", self.target)
        return text.get("max_position_embeddings", self.head.max_position_embeddings)

    @property
    def dtype_name(self) -> str:
        """As config.json calls it."""
        return str(self.dtype).removeprefix("torch.")


class Layout(ABC):
    """A program's layout of one family's heads: renames, fills, never computes."""

    ships_embeddings = False
    """Whether the target's embeddings are written where the head has none of its own."""

    @abstractmethod
    def title(self) -> str:
        """What README.md calls the layout."""

    def check(self, export: Export) -> None:  # noqa: B027 (most refuse nothing)
        """Refuses a head that the program would serve wrong, or not at all.

        Raises:
            UserError: with the reason, and the layout to use instead.
        """

    @abstractmethod
    def config(self, export: Export) -> dict[str, Any]:
        """config.json, a pure function of `export`."""

    def tensors(self, tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
        """The head's tensors (names of its file; `EMBEDDINGS` too with `ships_embeddings`)."""
        return tensors

    @abstractmethod
    def launch(self, export: Export, place: Path) -> str:
        """launch.md: the command lines that serve the export lying at `place`."""

    def stated(self, config: dict[str, Any]) -> dict[str, Any]:
        """Those of `Export`'s k and target_name that the layout's config.json says."""
        return {}


def check_width(export: Export, what: str) -> None:
    """Refuses what a Llama config cannot say.

    Args:
        what: whose layers they are, for the message.

    Raises:
        UserError: the heads of attention do not divide the hidden size.
    """
    head = export.head
    if not head.options().get("qk_norm") and head.hidden_size % head.num_attention_heads:
        raise UserError(
            f"{what} Llama layers need num_attention_heads to divide hidden_size; this head "
            f"has {head.num_attention_heads} and {head.hidden_size}"
        )
