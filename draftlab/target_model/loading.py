"""Reading a target's weights: only its text tower, complete, on one GPU or spread over several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from draftlab.errors import UserError
from draftlab.target_model.attention import ATTENTION
from draftlab.target_model.parts import shard_files
from draftlab.target_model.pipeline_parallel import layer_places, place_layers

if TYPE_CHECKING:
    from draftlab.target_model.model import TargetSettings


def load_model(
    folder: Path, settings: TargetSettings, device: torch.device
) -> tuple[PreTrainedModel, list[str]]:
    """The causal language model of a checkpoint, on its device or devices.

    Of a multimodal checkpoint that is its text tower; the others are not read.

    Returns:
        The model, and lines on what was left out and what lies where.

    Raises:
        UserError: weights that are missing, corrupt or of another shape.
    """
    dtype: Any = settings.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "auto"
    shard_files(folder)
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        places = layer_places(config, settings.gpus, device, **options)
        if places is not None:
            options["device_map"] = places.by_module
        elif getattr(config, "quantization_config", None) is not None:
            options["device_map"] = {"": device}  # some quantised weights cannot be moved later
        with _quiet():
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=ATTENTION,
                output_loading_info=True,
                **options,
            )
    except UserError:
        raise
    except Exception as error:  # transformers and safetensors raise many types for a bad checkpoint
        raise UserError(
            f"the target does not load: {type(error).__name__}: {error}", where=folder
        ) from None
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"the checkpoint lacks {len(missing)} tensors of {type(model).__name__}, such as "
            + ", ".join(missing[:3]),
            where=folder,
            do="fetch it again; without them the target would run on random weights",
        )
    lines = [*_left_out(model, found["unexpected_keys"]), *_quantised(model)]
    if "device_map" not in options:
        return model.to(device), lines
    if places is None:
        return model, lines
    return place_layers(model, places), [*lines, places.line()]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar, and without its table of tensors, which we read."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _quantised(model: PreTrainedModel) -> Iterator[str]:
    """That the weights are quantised, and how."""
    if getattr(model, "is_quantized", False):
        method = str(getattr(model, "quantization_method", None) or "").rpartition(".")[2].lower()
        yield (
            f"target: its weights are quantised ({method.replace('_', '-')}): answers, states and "
            f"tokens are those of the quantised model, computed in {_name(model.dtype)}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _left_out(model: PreTrainedModel, unexpected: Iterable[str]) -> Iterator[str]:
    """What the checkpoint holds beside the model: the towers of a multimodal one, by name."""
    groups = Counter(name.split(".")[0] for name in unexpected)
    if groups:
        parts = ", ".join(f"{name} ({count:,})" for name, count in sorted(groups.items()))
        yield (
            f"target: {type(model).__name__} alone drafts and verifies, from text; tensors of the "
            f"checkpoint that are not its own: {parts}"
        )
