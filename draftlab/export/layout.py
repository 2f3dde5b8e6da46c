"""One program's layout of one family's heads, and a head that is exported in it.

A family names its table (`Family.layouts_type`, `layout_table.py`): program → layout, or the reason
why there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.export.launch import vllm_text
from draftlab.export.serving_tables import CALIBRATION, STS, ServingTables
from draftlab.export.settings import check_program
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import Family, get_family
from draftlab.heads.vllm_config import native_config
from draftlab.target_model.quantisation import StoredWeights

CONFIG, README = "config.json", "README.md"
USE_VLLM = "use --to vllm"


@dataclass(frozen=True)
class Export:
    """A head that is being exported.

    Attributes:
        head: the head's draftlab.json.
        target: config.json of the head's target.
        target_name: its Hub id, or its folder.
        k: tokens that a server drafts by default.
        dtype: of floating tensors.
        serving: the calibration for servers; None: none was given.
        checkpoint: the target's weights, for an export of changed ones.
    """

    head: HeadConfig
    target: dict[str, Any]
    target_name: str
    k: int
    dtype: torch.dtype
    serving: ServingTables | None = None
    checkpoint: StoredWeights | None = None

    @property
    def text_config(self) -> dict[str, Any]:
        """The config of the target's language model."""
        return self.target.get("text_config") or self.target

    @property
    def positions(self) -> int:
        """The target's `max_position_embeddings`: servers use the smaller of head and target."""
        return self.text_config.get("max_position_embeddings", self.head.max_position_embeddings)

    @property
    def placed_head(self) -> HeadConfig:
        """The head with the target's number of positions (servers §1.0)."""
        return self.head.model_copy(update={"max_position_embeddings": self.positions})

    @property
    def is_gpt_oss(self) -> bool:
        """Whether the target is gpt-oss, for which alone SGLang extracts the last boundary."""
        return self.target.get("model_type") == "gpt_oss"

    @property
    def reads_last_boundary(self) -> bool:
        """Whether the head reads the state after the target's last layer."""
        return self.head.boundaries[-1] == self.head.target_num_layers

    @property
    def family(self) -> Family:
        """The head's family."""
        return get_family(self.head.family)

    def has(self, flag: str) -> bool:
        """Return whether a flag of draftlab.json is set."""
        return bool(getattr(self.head, flag, False))

    @property
    def dtype_name(self) -> str:
        """The dtype's name in config.json."""
        return str(self.dtype).removeprefix("torch.")

    def check_k(self) -> None:
        """Raise a `UserError` unless the target has positions for K drafts."""
        if self.k >= self.positions:
            raise UserError(
                f"expected fewer speculative tokens than the target's {self.positions} positions, "
                f"found {self.k}: a server drafts only if all of them fit",
                where="export.k",
                do="lower export.k",
            )


@dataclass(frozen=True)
class Refusal:
    """What a program cannot serve.

    Attributes:
        find: returns what is found of it in a head and its export; false: nothing.
        what: the message, in which {found}, {head}, {boundaries} and {export} are replaced.
        do: the layout to use instead, or another advice.
    """

    find: Callable[[Any, Export], object]
    what: str
    do: str = USE_VLLM
    where: str = ""


def plain_config(export: Export) -> dict[str, Any]:
    """Return config.json of the head folder, with the target's number of positions."""
    return native_config(export.placed_head, export.dtype_name)


@dataclass(frozen=True)
class Layout:
    """A program's layout of one family's heads. It renames and fills; it never computes.

    Attributes:
        title: the layout's name in README.md.
        launch: returns launch.md, the commands that serve the export at a path.
        config: returns config.json.
        tensors: returns the head's tensors, with `EMBEDDINGS` if `ships_embeddings`, under the
            layout's names.
        refusals: the heads that the program cannot serve.
        ships_embeddings: whether the target's embeddings are written where the head has none.
        reads_norm_before_residual: whether the program reads the flag; else it cannot serve a head
            that has it.
        is_delta: whether the tensors are changed ones of the target's checkpoint, which the folder
            has in a file of their own, with the index of the whole checkpoint.
        reads_confidence: whether the program reads files about a head's confidence.
    """

    title: str
    launch: Callable[[Export, Path], str] = vllm_text
    config: Callable[[Export], dict[str, Any]] = plain_config
    tensors: Callable[[dict[str, Tensor], Export], dict[str, Tensor]] = lambda tensors, _: tensors
    refusals: tuple[Refusal, ...] = ()
    ships_embeddings: bool = False
    reads_norm_before_residual: bool = True
    reads_confidence: bool = False
    is_delta: bool = False

    def check(self, export: Export) -> None:
        """Check that the program can serve the head.

        Raises:
            UserError: the reason why not, and the layout to use instead.
        """
        for one in self.refusals:
            if found := one.find(export.head, export):
                known = {"head": export.head, "boundaries": list(export.head.boundaries)}
                what, do = (
                    text.format(found=found, export=export, **known) for text in (one.what, one.do)
                )
                raise UserError(what, where=one.where, do=do)

    def json_files(self, export: Export) -> dict[str, dict[str, Any]]:
        """Return the JSON files beside config.json that servers read, by name."""
        if (serving := export.serving) is None:
            return {}
        files = {CALIBRATION: serving.as_json()}
        if self.reads_confidence and serving.temperatures is not None:
            files[STS] = serving.sts_json()
        return files


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
