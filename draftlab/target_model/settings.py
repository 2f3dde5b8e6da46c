"""Settings of the target model and of vLLM."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, FiniteFloat

from draftlab.files import parse_json
from draftlab.settings import Settings

EMBEDDED = "embedded"
ROWS = "draftlab_rows"
"""Attribute of a loaded tokenizer: the number of its target's embeddings."""
FOLDER = "draftlab_folder"
"""Attribute of a loaded tokenizer: the folder of its target."""


def _settable(name: str) -> str:
    if name in ("messages", "tools", "documents", "add_generation_prompt"):
        raise ValueError(
            f"expected a variable of the template's own, found {name}, which draftlab sets"
        )
    return name


VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z_0-9]*$"), AfterValidator(_settable)]
TemplateArguments = dict[VariableName, bool | int | FiniteFloat | str]
"""Values of variables of a chat template, such as enable_thinking."""


def _read_json(value: object) -> object:
    """Return the value of a JSON text, as the command line gives it."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        raise ValueError(
            'expected an object such as {"enable_thinking": false}, or a list of them, found '
            f"{value[:60]!r}"
        ) from None


TemplateMix = Annotated[
    TemplateArguments | Annotated[tuple[TemplateArguments, ...], Field(min_length=1)],
    BeforeValidator(_read_json),
]
"""Template arguments, or several as a mix: each conversation gets one of them, by the seed."""


def template_modes(mix: TemplateMix) -> tuple[TemplateArguments, ...]:
    """Return the template arguments of a mix, one or several."""
    return mix if isinstance(mix, tuple) else (mix,)


class TargetSettings(Settings):
    """The target model and how it is loaded."""

    path: str = EMBEDDED
    """Folder, GGUF file or Hub id of a causal LM; "embedded" is the small code model in draftlab
    itself."""
    adapter: str | None = None
    """Folder of a LoRA adapter (peft) that is merged into the target's weights, once, in the cache;
    None: the target as it is."""
    revision: str | None = None
    """Commit, tag or branch on the Hub; None: the default branch. Folders and files have none."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype; "auto": the checkpoint's on a GPU, float32 on a CPU."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1" …; "auto": a GPU when there is one."""
    gpus: int = Field(default=1, ge=1)
    """Number of GPUs, from `device` on, that hold its layers (pipeline parallel) if one is too
    small. They work in turn. On a CPU it has no effect."""
    template_arguments: TemplateMix = Field(default={})
    """Values of the chat template's variables, such as enable_thinking: false or a date_string, for
    prompts, recording and evaluation. With a list of such objects each conversation gets one of
    them, evenly and by the seed. The own values of a line take precedence. A server needs the same
    (chat_template_kwargs)."""
    trust_remote_code: bool = False
    """Whether code shipped with a checkpoint may run. Turn it on only if you have read the code."""

    @property
    def modes(self) -> tuple[TemplateArguments, ...]:
        """The template arguments of the mix, one or several."""
        return template_modes(self.template_arguments)


class VllmSettings(Settings):
    """How vLLM is started. DRAFTLAB_VLLM_PYTHON names the Python that has it: a recipe, which may
    be a stranger's, names no program. Without the variable it is the Python of draftlab."""

    memory_share: float | None = Field(default=None, gt=0, le=1)
    """Share of the GPU's memory that vLLM may use; None: nine tenths of the free memory."""
