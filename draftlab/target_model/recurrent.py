"""The recurrent layers of a decoder: which they are, what runs them, and what their states take."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from draftlab.target_model.recurrent_layer import RecurrentLayer
from draftlab.target_model.recurrent_states import RecurrentStates

_UPDATES = {"update_conv_state", "update_recurrent_state"}
"""Methods of transformers' caches that only recurrent layers call."""


def recurrent_layers(decoder: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a decoder that write recurrent states to a cache, by their names."""
    return {name: m for name, m in decoder.named_modules() if _UPDATES & _names_in(type(m))}


def _names_in(cls: type) -> set[str]:
    """Return the attribute names that the methods of a class use, without its bases' methods."""
    methods = (inspect.unwrap(value) for value in vars(cls).values() if callable(value))
    return {name for f in methods if hasattr(f, "__code__") for name in f.__code__.co_names}


def attention_layers(decoder: nn.Module) -> int:
    """Return the number of a decoder's layers that keep keys and values."""
    if not recurrent_layers(decoder):
        return len(decoder.layers)
    layers = DynamicCache(config=decoder.config).layers
    return sum(isinstance(layer, CacheLayerMixin) for layer in layers)


def replace_recurrences(decoder: nn.Module) -> None:
    """Give the recurrent layers of a decoder the forward pass of `RecurrentLayer`, in place."""
    for name, module in recurrent_layers(decoder).items():
        module.forward = RecurrentLayer(module, name)


def unknown_recurrence(decoder: nn.Module) -> str | None:
    """Return the name and class of a layer whose states cannot be kept; None: there is none."""
    for name, module in recurrent_layers(decoder).items():
        if not RecurrentLayer(module, name).replaced:
            return f"{name} ({type(module).__name__})"
    return None


def planned_state_bytes(decoder: nn.Module) -> int | None:
    """Return the bytes of one request's recurrent states; the decoder may be on the meta device.

    Returns:
        None if a layer must run to tell, and takes other inputs than the decoder's hidden states.
    """
    if unknown_recurrence(decoder):
        return None
    states = RecurrentStates(1).at(torch.zeros(1, dtype=torch.int64), [1])
    for name, module in recurrent_layers(decoder).items():
        hidden = next(module.parameters()).new_empty(1, 1, decoder.config.hidden_size)
        try:
            RecurrentLayer(module, name).run(states, None, hidden_states=hidden)
        except (RuntimeError, TypeError):  # other shapes, other arguments
            return None
    return sum(states.row_bytes().values())
