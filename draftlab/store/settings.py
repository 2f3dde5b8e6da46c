"""Settings of the recording. This module imports neither torch nor transformers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from draftlab.settings import Listed, Settings
from draftlab.store.manifest import StoreDtype
from draftlab.target_model.settings import VllmSettings

NotFinite = Literal["refuse", "skip"]
RecordBackend = Literal["transformers", "vllm"]


class RecordSettings(Settings):
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
    vllm: VllmSettings = VllmSettings()
    """Of the backend "vllm"."""
