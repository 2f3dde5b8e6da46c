"""Decode with recurrent layers, whose state follows the accepted tokens of each request.

Linear attention, state-space models and short convolutions keep a state in place of keys and
values, and a state cannot be rolled back. A prompt runs at once and without padding, from an empty
state. A verify step runs a recurrent layer one token at a time and keeps the state after each of
its K + 1 tokens; `RecurrentStates.keep` then takes the one after the last accepted token. The
layers' own code does the arithmetic: each call gets a transformers cache of this layer alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

_UPDATES = {"update_conv_state", "update_recurrent_state"}
"""Methods of transformers' caches that only recurrent layers call."""

State = dict[tuple[str, Any], Tensor]
"""Tensors [B, …] of a cache layer, by the attribute's name and the key in it."""


def recurrent_layers(decoder: nn.Module) -> list[nn.Module]:
    """Return the modules of a decoder that write recurrent states to a cache."""
    return [module for module in decoder.modules() if _UPDATES & _names_in(type(module))]


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


def planned_state_bytes(decoder: nn.Module) -> int:
    """Return the bytes of one request's recurrent states; the decoder may be on the meta device."""
    total = 0
    for module in recurrent_layers(decoder):
        layer = DynamicCache(config=decoder.config).layers[module.layer_idx]
        names = inspect.signature(module.forward).parameters
        (cache_name,) = names.keys() & {"cache_params", "past_key_values"}
        cache = Cache(layers=[layer] * (module.layer_idx + 1))
        hidden = next(module.parameters()).new_empty(1, 1, decoder.config.hidden_size)
        module(hidden_states=hidden, **{cache_name: cache})
        total += sum(tensor.nbytes for tensor in _tensors(layer).values())
    return total


def decode_with_states(decoder: nn.Module) -> bool:
    """Make a decoder's recurrent layers use the `RecurrentStates` of a pass's cache, if it has any.

    Returns:
        Whether there are such layers.
    """
    layers = recurrent_layers(decoder)
    for module in layers:
        module.forward = _with_states(module, decoder.config)
    return bool(layers)


def _with_states(module: nn.Module, config: Any) -> Callable[..., Any]:
    """Return a recurrent layer's forward pass that knows caches with `RecurrentStates`."""
    forward, signature = module.forward, inspect.signature(module.forward)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            states = getattr(value, "states", None)
            if isinstance(states, RecurrentStates):
                return states.run(module, config, forward, bound.arguments, name)
        return forward(*args, **kwargs)

    return run


class RecurrentStates:
    """The states of all recurrent layers, a row for each request.

    Args:
        num_rows: rows of the pool.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._pools: dict[int, State] = {}  # by layer; tensors [num_rows, …]
        self._layers: dict[int, Any] = {}  # cache layers after a prompt, for their flags
        self._steps: dict[int, list[State]] = {}  # after each token of a verify step
        self._rows = torch.empty(0, dtype=torch.int64)
        self._lengths: Sequence[int] | None = None

    def at(self, rows: Tensor, lengths: Sequence[int] | None) -> None:
        """Set the next forward pass.

        Args:
            rows: int64 [B], the rows of the pool.
            lengths: tokens of each row, which begins anew at the first column; None: a verify step.
        """
        self._rows, self._lengths = rows, lengths
        self._steps.clear()

    def run(
        self,
        module: nn.Module,
        config: Any,
        forward: Callable[..., Any],
        arguments: dict[str, Any],
        cache_name: str,
    ) -> Tensor:
        """Run a recurrent layer; return its outputs [B, M, H].

        Args:
            forward: the layer's own.
            arguments: of `forward`; its "hidden_states" are [B, M, H].
            cache_name: the argument that is the cache.
        """
        number = module.layer_idx
        hidden, options = arguments["hidden_states"], dict(arguments.pop("kwargs", {}))
        others = dict(arguments)
        for name in ("hidden_states", "attention_mask"):  # a mask is for padding; there is none
            others.pop(name, None)

        def call(tokens: Tensor, layer: Any) -> Tensor:
            cache = Cache(layers=[layer] * (number + 1))
            return forward(hidden_states=tokens, **others | {cache_name: cache}, **options)

        if self._lengths is None:
            return self._run_step(number, hidden, call)
        return self._run_prompts(number, hidden, call, config, self._lengths)

    def _run_prompts(
        self,
        number: int,
        hidden: Tensor,
        call: Callable[[Tensor, Any], Tensor],
        config: Any,
        lengths: Sequence[int],
    ) -> Tensor:
        """Run rows from an empty state, those of one length together; save their last states."""
        outputs = torch.zeros_like(hidden)
        for length in sorted(set(lengths)):
            index = [row for row, other in enumerate(lengths) if other == length]
            layer = DynamicCache(config=config).layers[number]
            outputs[index, :length] = call(hidden[index, :length], layer)
            self._layers.setdefault(number, layer)
            self._save(number, self._rows[index], _tensors(layer))
        return outputs

    def _run_step(
        self, number: int, hidden: Tensor, call: Callable[[Tensor, Any], Tensor]
    ) -> Tensor:
        """Run tokens one after the other; remember the state after each."""
        rows = self._rows.to(hidden.device)
        state = {key: pool[rows] for key, pool in self._pools[number].items()}
        layer, outputs = _with_tensors(self._layers[number], state), []
        steps = self._steps[number] = []
        for token in hidden.split(1, 1):
            outputs.append(call(token, layer))
            steps.append({key: tensor.clone() for key, tensor in _tensors(layer).items()})
        return torch.cat(outputs, 1)

    def _save(self, number: int, rows: Tensor, state: State) -> None:
        """Write states [B, …] to rows of a layer's pool."""
        pools = self._pools.setdefault(
            number, {key: x.new_zeros(self.num_rows, *x.shape[1:]) for key, x in state.items()}
        )
        for key, tensor in state.items():
            pools[key][rows.to(tensor.device)] = tensor

    def keep(self, counts: Tensor) -> None:
        """Keep each row's state after the first `counts` [B] tokens of the verify step."""
        for number, steps in self._steps.items():
            for key, pool in self._pools[number].items():
                stacked = torch.stack([state[key] for state in steps])
                batch = torch.arange(len(counts), device=pool.device)
                pool[self._rows.to(pool.device)] = stacked[counts.to(pool.device) - 1, batch]
        self._steps.clear()

    def copy_rows(self, index_from: Tensor, index_to: Tensor) -> None:
        """Copy the states of rows to other rows."""
        for pools in self._pools.values():
            for pool in pools.values():
                pool[index_to.to(pool.device)] = pool[index_from.to(pool.device)]

    def row_bytes(self) -> dict[torch.device, int]:
        """Return the bytes of one request's states on each device; there are some after a pass."""
        sizes: dict[torch.device, int] = {}
        for pools in self._pools.values():
            for pool in pools.values():
                sizes[pool.device] = sizes.get(pool.device, 0) + pool[0].nbytes
        return sizes


def _tensors(layer: Any) -> State:
    """Return the tensors of a cache layer; transformers keeps some of them in dictionaries."""
    state: State = {}
    for name, value in vars(layer).items():
        items = value.items() if isinstance(value, dict) else [(None, value)]
        state |= {(name, key): x for key, x in items if isinstance(x, Tensor)}
    return state


def _with_tensors(layer: Any, state: State) -> Any:
    """Return a copy of a cache layer with other tensors."""
    layer = copy.copy(layer)
    for name, value in list(vars(layer).items()):
        if isinstance(value, dict):
            setattr(layer, name, dict(value))
    for (name, key), tensor in state.items():
        if key is None:
            setattr(layer, name, tensor)
        else:
            getattr(layer, name)[key] = tensor
    return layer
