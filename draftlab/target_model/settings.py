"""Which target, and how it is loaded."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from draftlab.settings import Settings

EMBEDDED = "embedded"


VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z_0-9]*$")]


class TargetSettings(Settings):
    """Which model, and how it is loaded."""

    path: str = EMBEDDED
    """Folder or Hub id of a causal LM; "embedded" is the small code model in draftlab itself."""
    revision: str | None = None
    """Commit, tag or branch on the Hub; None: the default branch. Local folders ignore it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype; "auto": the checkpoint's on a GPU, float32 on a CPU."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1" …; "auto": a GPU when there is one."""
    gpus: int = Field(default=1, ge=1)
    """GPUs that its layers are spread over, from `device` on, when one alone does not hold them.
    They work in turn. Without any GPU it has no effect."""
    template_arguments: dict[VariableName, bool | int | float | str] = Field(default={})
    """Values of the chat template's variables, such as enable_thinking: false or a date_string, for
    prompts, recording and evaluation alike. A server needs the same (chat_template_kwargs)."""
    trust_remote_code: bool = False
    """Whether code shipped with a checkpoint may run. Off unless you have read it."""
    compile: bool = True
    """On CUDA in 16 bit, torch.compile fuses small operations of layers that have no kernels of our
    own. Off: they run as transformers writes them."""

    def template(self, source: str) -> str:
        """A chat template whose variables have these values; they become part of its hash."""
        values = self.template_arguments.items()
        return "".join(f"{{% set {k} = {json.dumps(v)} %}}" for k, v in values) + source


class VllmSettings(Settings):
    """Where vLLM is, and how it is started."""

    python: str | None = None
    """The Python that has vLLM; None: this one if it has, else DRAFTLAB_VLLM_PYTHON."""
    memory_share: float | None = Field(default=None, gt=0, le=1)
    """Share of the GPU's memory it may take; None: nine tenths of what is free when it starts."""
