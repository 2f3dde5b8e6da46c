"""The settings of exports. This module does not import torch."""

from __future__ import annotations

import difflib
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from draftlab.errors import UserError
from draftlab.settings import Settings, SingleOrList

PROGRAMS = ("speculators", "vllm", "sglang", "llamacpp")
"""Programs whose layouts are known; each family says which of them can load its heads."""


def check_program(name: str) -> None:
    """Raise a `UserError` for an unknown program, with the nearest known name."""
    if name in PROGRAMS:
        return
    meant = {"gguf": "llamacpp"}.get(name.lower(), name.lower())
    near = difflib.get_close_matches(meant, PROGRAMS, n=1, cutoff=0.5)
    raise UserError(
        f"expected a layout out of {', '.join(sorted(PROGRAMS))}; found {name!r}",
        do=f"did you mean {near[0]!r}?" if near else "name one of these layouts",
    )


class ExportSettings(Settings):
    """Which layouts a head is exported to, and how."""

    formats: Annotated[tuple[str, ...], SingleOrList] = ("speculators",)
    """Layouts to write, each into a folder of its own name: speculators, vllm, sglang, llamacpp. An
    empty list: a run exports nothing."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Dtype of floating tensors; None: the dtype the head is stored in."""
    k: int | None = Field(default=None, ge=1)
    """Speculative tokens a server drafts by default; None: as many as it was calibrated for, else
    the fastest K that the run's report measured, else as many as it was trained for."""
    calibration: str | None = None
    """A report of `draftlab eval --calibrate` of this head, or its folder: its temperatures and
    cutoff go into launch commands and files. None: no report."""
    calibration_temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature whose calibration is written; None: the first of the report."""
    bake_temperature: bool = False
    """Divide the weights of a DSpark head's confidence by the common temperature of `calibration`,
    for servers that read no temperatures (vLLM, llama.cpp)."""
    gguf: bool = False
    """Also run llama.cpp's converter on the llamacpp layout, for head.gguf. The environment
    variable LLAMA_CPP names llama.cpp's folder."""

    @field_validator("formats")
    @classmethod
    def _known(cls, formats: tuple[str, ...]) -> tuple[str, ...]:
        for name in formats:
            try:
                check_program(name)
            except UserError as error:
                raise ValueError("; ".join(filter(None, (error.what, error.do)))) from None
        return formats

    @field_validator("bake_temperature")
    @classmethod
    def _calibrated(cls, bake: bool, info: ValidationInfo) -> bool:
        if bake and info.data.get("calibration") is None:
            raise ValueError(
                "expected export.calibration too, whose report has the temperature; found none"
            )
        return bake

    @field_validator("gguf")
    @classmethod
    def _converted(cls, gguf: bool, info: ValidationInfo) -> bool:
        formats = info.data.get("formats")
        if gguf and formats is not None and "llamacpp" not in formats:
            raise ValueError(f"expected llamacpp among the layouts, found {', '.join(formats)}")
        return gguf
