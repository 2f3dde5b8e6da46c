"""The class of transformers that runs the text model of a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from draftlab.errors import UserError

_MAPPINGS = (
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
)


_REFUSED = {"paligemma": "attends to its prompts in both directions, and drafts need a causal mask"}


def auto_class(config: Any, *, whole: bool = False) -> Any:
    """Return the auto class that loads a checkpoint: of causal LMs, or else of multimodal models.

    Args:
        whole: whether a multimodal model is preferred where transformers has both.

    Raises:
        UserError: transformers knows the architecture as neither, or its text model is not causal.
    """
    if reason := _REFUSED.get(config.model_type):
        raise UserError(f"{config.model_type} {reason}", do="use another target")
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return AutoModelForCausalLM  # of the checkpoint's own code, if the user trusts it
    for auto, mapping in reversed(_MAPPINGS) if whole else _MAPPINGS:
        if type(config) in mapping:
            return auto
    raise UserError(
        f"expected a causal language model, or a model of images and text, found "
        f"{config.model_type!r}",
        do="name the checkpoint of a language model that transformers can generate text with",
    )


def model_class(config: Any) -> type[PreTrainedModel]:
    """Return the class that `auto_class` chooses; raise a `UserError` if it is none of
    transformers' own.
    """
    auto = auto_class(config)
    mapping = dict(_MAPPINGS)[auto]
    if type(config) not in mapping:
        raise UserError(
            f"expected an architecture of transformers' own, found {config.model_type}: draftlab "
            "dequantises the weights of no other",
            do="use the checkpoint in 16 bits",
        )
    found: type[PreTrainedModel] = mapping[type(config)]
    return found


def meta_model(config: Any, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return a model of a config on torch's "meta" device; raises as `auto_class` does."""
    auto = auto_class(config)
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=trust_remote_code)


def drop_other_modules(model: PreTrainedModel, decoder: nn.Module) -> dict[str, int]:
    """Take what is neither the decoder nor the lm_head, such as a vision tower, out of a model;
    return the number of tensors of each module that was taken out, by its name.
    """
    kept = {id(decoder), id(model.get_output_embeddings())}
    dropped: dict[str, int] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in list(module.named_children()):
            if id(child) in kept:
                continue
            if any(id(inner) in kept for inner in child.modules()):
                visit(child, f"{prefix}{name}.")
            elif count := sum(1 for _ in child.parameters()):
                setattr(module, name, None)
                dropped[prefix + name] = count

    visit(model, "")
    return dropped
