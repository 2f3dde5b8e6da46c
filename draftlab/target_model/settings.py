"""Settings of the target model and of vLLM."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from draftlab.settings import Settings

EMBEDDED = "embedded"
ROWS = "draftlab_rows"
"""Attribute of a loaded tokenizer: the number of its target's embeddings."""
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z_0-9]*$")]


class TargetSettings(Settings):
    """The target model and how it is loaded."""

    path: str = EMBEDDED
    """Folder, GGUF file or Hub id of a causal LM; "embedded" is the small code model in draftlab
    itself."""
    adapter: str | None = None
    """Folder of a LoRA adapter (peft) that is merged into the target's weights, once, in the cache;
    None: the target as it is."""
    revision: str | None = None
    """Commit, tag or branch on the Hub; None: the default branch. Local folders ignore it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype; "auto": the checkpoint's on a GPU, float32 on a CPU."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1" …; "auto": a GPU when there is one."""
    gpus: int = Field(default=1, ge=1)
    """Number of GPUs, from `device` on, that hold its layers (pipeline parallel) if one is too
    small. They work in turn. On a CPU it has no effect."""
    template_arguments: dict[VariableName, bool | int | float | str] = Field(default={})
    """Values of the chat template's variables, such as enable_thinking: false or a date_string, for
    prompts, recording and evaluation. A server needs the same (chat_template_kwargs)."""
    trust_remote_code: bool = False
    """Whether code shipped with a checkpoint may run. Turn it on only if you have read the code."""

    def template(self, source: str) -> str:
        """Return a chat template with these values set; they become part of its hash."""
        values = self.template_arguments.items()
        return "".join(f"{{% set {k} = {json.dumps(v)} %}}" for k, v in values) + source


class VllmSettings(Settings):
    """How vLLM is started. DRAFTLAB_VLLM_PYTHON names the Python that has it: a recipe, which may
    be a stranger's, names no program. Without the variable it is the Python of draftlab."""

    memory_share: float | None = Field(default=None, gt=0, le=1)
    """Share of the GPU's memory that vLLM may use; None: nine tenths of the free memory."""
