"""What can be set about prompts, answers, recording and the draft vocabulary.

Free of torch and transformers, like every room's knobs: a mistyped one is answered at once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from draftlab.base import Knobs, Listed
from draftlab.data.manifest import StoreDtype
from draftlab.decode.knobs import VllmKnobs

NotFinite = Literal["refuse", "skip"]
RecordBackend = Literal["transformers", "vllm"]
AnswerBackend = Literal["paged", "vllm"]


class PromptKnobs(Knobs):
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


class RegenerateKnobs(Knobs):
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
    vllm: VllmKnobs = VllmKnobs()
    """Of the backend "vllm"."""


class RecordKnobs(Knobs):
    """What is recorded, in which pieces."""

    boundaries: Annotated[tuple[int, ...] | None, Listed] = None
    """Boundaries whose states become the features, ascending: the inputs of layers of these numbers
    (vLLM's `eagle_aux_hidden_state_layer_ids`); None: the target's default ones."""
    dtype: StoreDtype = "bfloat16"
    """Of the stored states. fp8: features in 8 bits with a scale for each token and boundary, the
    last state in bfloat16; three fifths of the disk."""
    shard_tokens: Annotated[int, Field(gt=0)] = 32_768
    """Tokens of a shard. Three are held in memory, and are what a killed recording loses."""
    batch_tokens: Annotated[int, Field(gt=0)] = 8_192
    """Most tokens of a forward pass, padding included where a target needs it; a longer sample goes
    alone."""
    max_length: Annotated[int, Field(gt=2)] | None = None
    """Tokens of a sample, at most; None, or more than the target has positions: those positions."""
    overlong: Literal["truncate", "skip"] = "truncate"
    """What happens to samples over max_length: their end is cut off, or they are left out."""
    online: bool = False
    """Stores nothing: the target, loaded beside the training, makes states when they are needed.
    Slower, as every epoch makes them again; features of an 8B target are 33 kB a token."""
    not_finite: NotFinite = "refuse"
    """What happens to samples whose states have NaN or infinity: recording stops and names the
    sample and the layer, or nothing is learned from them and they are counted."""
    backend: RecordBackend = "transformers"
    """What computes the states: transformers, or an installed vLLM in a process of its own, by its
    hidden-state extraction, where it has that for the architecture. The store is the same up to
    rounding; vLLM runs a target over `target.gpus` at once (tensor parallel)."""
    vllm: VllmKnobs = VllmKnobs()
    """Of the backend "vllm"."""


class DraftVocabKnobs(Knobs):
    """How many of the target's tokens a head can draft."""

    size: Annotated[int, Field(gt=0)] | None = None
    """Tokens; None: all of the target's. A token outside is a miss wherever the target wants it."""
