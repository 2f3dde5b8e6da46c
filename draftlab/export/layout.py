"""Layouts: how a program expects the files of one family's heads, and which family has which.

The layouts themselves are in `speculators.py` and `native.py`; a family names its own
(`Family.layouts`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.export.serving_tables import CALIBRATION, ServingTables
from draftlab.export.settings import check_program
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family

VLLM = "0.33.0"
"""The version of vLLM whose targets `WITHOUT_EAGLE3` lists."""
WITHOUT_EAGLE3 = {"gemma3": "Gemma 3", "gemma3_text": "Gemma 3"}
"""Targets (model_type → name) whose class in vLLM has no `SupportsEagle3`, so that vLLM cannot give
their hidden states to a head that reads them at boundaries (servers §1.3)."""
CONFIG, LAUNCH, README = "config.json", "launch.md", "README.md"


@dataclass(frozen=True)
class Export:
    """A head that is being exported.

    Attributes:
        head: the head's draftlab.json.
        target: config.json of the head's target.
        target_name: its Hub id, or its folder.
        k: tokens that a server drafts by default.
        dtype: of floating tensors.
        serving: calibration and step times for servers; None: none were given.
    """

    head: HeadConfig
    target: dict[str, Any]
    target_name: str
    k: int
    dtype: torch.dtype
    serving: ServingTables | None = None

    @property
    def positions(self) -> int:
        """The target's `max_position_embeddings`: servers use the smaller of head and target."""
        text = self.target.get("text_config", self.target)
        return text.get("max_position_embeddings", self.head.max_position_embeddings)

    @property
    def dtype_name(self) -> str:
        """The dtype's name in config.json."""
        return str(self.dtype).removeprefix("torch.")


class Layout(ABC):
    """A program's layout of one family's heads. It renames and fills; it never computes."""

    title: str
    """The layout's name in README.md."""
    ships_embeddings = False
    """True if the target's embeddings are written where the head has none of its own."""
    reads_norm_before_residual = True
    """False if the program ignores the flag and cannot serve a head that has it."""

    def check(self, export: Export) -> None:  # noqa: B027 (most refuse nothing)
        """Check that the program can serve the head.

        Raises:
            UserError: the reason why not, and the layout to use instead.
        """

    @abstractmethod
    def config(self, export: Export) -> dict[str, Any]:
        """Return config.json."""

    def tensors(self, tensors: dict[str, Tensor], export: Export) -> dict[str, Tensor]:
        """Return the head's tensors, with `EMBEDDINGS` if `ships_embeddings`, under its names."""
        return tensors

    def json_files(self, export: Export) -> dict[str, dict[str, Any]]:
        """Return the JSON files beside config.json that servers read, by name."""
        return {CALIBRATION: export.serving.as_json()} if export.serving else {}

    @abstractmethod
    def launch(self, export: Export, path: Path) -> str:
        """Return launch.md: the commands that serve the export at `path`."""


def check_width(export: Export, owner: str) -> None:
    """Check that a Llama config can describe the head; `owner` names the program in the message.

    Raises:
        UserError: the number of attention heads does not divide the hidden size.
    """
    head = export.head
    if not head.options().get("qk_norm") and head.hidden_size % head.num_attention_heads:
        raise UserError(
            f"{owner} Llama layers need num_attention_heads to divide hidden_size; this head "
            f"has {head.num_attention_heads} and {head.hidden_size}",
            do="train with a head.num_attention_heads that divides it, or use another layout",
        )


def layout_for(program: str, family: str) -> Layout:
    """Return a program's layout of a family's heads.

    Raises:
        UserError: the program is unknown or cannot load such heads.
    """
    check_program(program)
    layout = get_family(family).layouts().get(program, "no layout has been written for them")
    if isinstance(layout, Layout):
        return layout
    raise UserError(
        f"{program} cannot hold {get_family(family).title} heads: {layout}",
        do="name another layout; docs/servers.md (section 7) says which program loads which head",
    )


def serving_warnings(program: str, export: Export) -> list[str]:
    """Return warnings about a target that a program cannot serve with such a head."""
    text = export.target.get("text_config") or export.target
    kinds = [WITHOUT_EAGLE3.get(part.get("model_type", "")) for part in (export.target, text)]
    name = next(filter(None, kinds), None)
    if program not in ("vllm", "speculators") or name is None:
        return []
    if get_family(export.head.family).reads_last_state:
        return []
    return [
        f"warning: export: vLLM {VLLM} cannot serve this head: its class of {name} targets has no "
        "SupportsEagle3, and cannot give the head their hidden states"
    ]
