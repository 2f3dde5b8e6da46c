"""What can be set about prompts, answers, recording and the draft vocabulary.

Free of torch and transformers, like every room's settings: a mistyped one is answered at once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from draftlab.settings import Listed, Settings
from draftlab.target_model.settings import VllmSettings

AnswerBackend = Literal["paged", "vllm"]


class PromptSettings(Settings):
    """Which prompts the target answers."""

    source: str = "embedded"
    """A JSONL file of conversations, or "embedded" (Python functions to write, for training a
    head), or "embedded:heldout" (the same from other files, for evaluation)."""
    max_prompts: Annotated[int, Field(ge=1)] | None = None
    """Conversations taken from the source, the first ones; None: all."""
    deduplicate: bool = True
    """Whether conversations that say the same as an earlier one are left out."""
    per_source: Annotated[int, Field(ge=1)] | None = None
    """Conversations taken of each data set that lines name as their `source`, the first ones; None:
    all."""


class RegenerateSettings(Settings):
    """How the target answers the prompts."""

    enabled: bool = True
    """Whether the target writes the answers; False keeps the given ones (off-policy)."""
    temperatures: Annotated[
        tuple[Annotated[float, Field(ge=0)], ...], Listed, Field(min_length=1)
    ] = (0.0, 0.8)
    """Answer s of prompt i is sampled at temperatures[(i + s) modulo their number]; 0 is greedy."""
    samples: Annotated[int, Field(ge=1)] = 1
    """Answers to each prompt; further ones get ids such as `prompt-7~1`."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """How many of the most probable tokens are sampled from; None: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Probability mass that is sampled from; None: all."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    """Longest answer, in tokens."""
    batch: Annotated[int, Field(ge=1)] = 64
    """Prompts decoded at once."""
    piece: Annotated[int, Field(ge=1)] = 256
    """Conversations written at a time; a restart repeats less than one piece. Each piece is
    decoded on its own: vLLM wants several times `batch`."""
    backend: AnswerBackend = "paged"
    """What decodes: draftlab's device engine, or an installed vLLM in a process of its own, over
    `target.gpus` at once (tensor parallel)."""
    vllm: VllmSettings = VllmSettings()
    """Of the backend "vllm"."""


class DraftVocabSettings(Settings):
    """How many of the target's tokens a head can draft."""

    size: Annotated[int, Field(gt=0)] | None = None
    """Tokens; None: all of the target's. A token outside is a miss wherever the target wants it."""
