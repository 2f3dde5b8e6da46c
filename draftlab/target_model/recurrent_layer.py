"""A recurrent layer over rows of different lengths, whose state follows each row's accepted tokens.

Linear attention, state-space models and short convolutions keep a state in place of keys and
values, and a state cannot be rolled back. In transformers such a layer does two things that look
beyond a token: a causal convolution, and a recurrence (a gated delta rule or a selective scan).
Both are functions with the interface of the kernel libraries, which the layer calls by a global
name. A copy of its forward pass calls the functions here in their place. It runs without a cache:

- prompts, right-padded, from empty states: the layer's own functions; padding changes no state,
- a verify step: the operators of `kernels/recurrent_step/`, once for the outputs of all tokens;
  `RecurrentStates.keep` runs them again for the state after the accepted ones,
- conversations packed into a row: the layer's own functions, on the conversations as rows.

Everything else in a layer (projections, norms, gates) works on tokens alone and runs as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from draftlab.kernels.recurrent_step import (
    convolution_step,
    delta_rule_step,
    selective_scan_step,
)
from draftlab.target_model.attention import current_inputs
from draftlab.target_model.packed_rows import PackedRow
from draftlab.target_model.paged_cache import CACHE_NAMES, RecurrentStates, row_bytes

_NO_TIME = -1e4  # softplus of it is 0: such a token changes no state


class RecurrentLayer:
    """The forward pass of a recurrent layer over a `PagedCache`'s states or over packed rows, if
    its convolutions and recurrences are known and `replaced`.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name, self._module = name, module
        own = inspect.unwrap(type(module).forward)
        self._signature = inspect.signature(own)
        known = {
            "causal_conv1d_fn": self._convolution,
            "torch_chunk_gated_delta_rule": self._delta_rule,
            "chunk_kimi_delta_attention": self._delta_rule,
            "mamba2_chunk_scan": self._mamba2_scan,
            "mamba_selective_scan": self._mamba_scan,
        }
        global_names = own.__globals__
        replaced = {
            function: partial(method, global_names[function])
            for function, method in known.items()
            if function in own.__code__.co_names
        }
        self.replaced = bool(replaced)
        self._forward = copy_function(own, global_names | replaced)
        self._states: RecurrentStates | None = None
        self._packed_row: PackedRow | None = None
        self._calls = 0  # of functions with a state, in this pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer as its own forward pass does, or `run` it if a pass set inputs."""
        inputs = current_inputs()
        states = inputs.paged_cache.states if inputs.paged_cache else None
        if not self.replaced or (states is None and inputs.packed_row is None):
            return type(self._module).forward(self._module, *args, **kwargs)
        bound = self._signature.bind(self._module, *args, **kwargs).arguments
        del bound["self"]
        bound |= bound.pop("kwargs", {})
        return self.run(states, inputs.packed_row, **bound)

    def run(
        self, states: RecurrentStates | None, packed_row: PackedRow | None, **arguments: Any
    ) -> Any:
        """Run the layer with the states of rows, or over a packed row; it gets no cache or mask."""
        self._states, self._packed_row, self._calls = states, packed_row, 0
        names = {*CACHE_NAMES, "attention_mask"} & arguments.keys()
        return self._forward(self._module, **arguments | dict.fromkeys(names))

    def _next_state(self) -> tuple[str, int]:
        """Return the key of the next function's state."""
        self._calls += 1
        return self.name, self._calls

    def _convolution(
        self,
        function: Callable[..., Tensor],
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **options: Any,
    ) -> Tensor:
        """Return a causal convolution [B, C, M] of the same [B, C, M], as `causal_conv1d_fn`."""
        if self._packed_row is not None:
            own = partial(function, weight=weight, bias=bias, activation=activation, **options)
            return self._packed_row.by_conversation(
                lambda x: own(x.transpose(1, 2)).transpose(1, 2), hidden_states.transpose(1, 2)
            ).transpose(1, 2)
        if activation not in (None, "silu", "swish"):
            raise NotImplementedError(f"a convolution followed by {activation}")
        states, key, width = self._states, self._next_state(), weight.shape[-1]
        if not states.is_prompt:
            silu = activation is not None
            operator = partial(convolution_step, hidden_states, weight, bias, silu=silu)
            return states.step(key, hidden_states.shape[-1], operator)
        ends = states.lengths(hidden_states.device)
        columns = ends[:, None] + torch.arange(width - 1, device=ends.device)
        inputs = F.pad(hidden_states, (width - 1, 0))
        last = inputs.gather(2, columns[:, None].expand(-1, inputs.shape[1], -1))
        states.write(key, last)
        return function(hidden_states, weight, bias, activation=activation, **options)

    def _delta_rule(
        self,
        function: Callable[..., tuple[Tensor, Tensor]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return outputs [B, M, H, V] of a gated delta rule, and no state."""
        tensors, normalise = [query, key, value, g, beta], use_qk_l2norm_in_kernel
        options |= {"use_qk_l2norm_in_kernel": normalise, "initial_state": None}

        def own(*rows: Tensor, keep: bool = False) -> tuple[Tensor, Tensor]:
            q, k, v, decay, rate = rows
            return function(q, k, v, g=decay, beta=rate, **options | {"output_final_state": keep})

        if self._packed_row is not None:
            return self._packed_row.by_conversation(lambda *x: own(*x)[0], *tensors), None
        states, name = self._states, self._next_state()
        if not states.is_prompt:
            operator = partial(delta_rule_step, *tensors, normalise=normalise)
            return states.step(name, query.shape[1], operator), None
        if (padding := states.padding(query.shape[1], query.device)) is not None:
            tensors[3:] = (_masked(tensor, padding, 0) for tensor in (g, beta))
        outputs, last = own(*tensors, keep=True)
        states.write(name, last.float().mT)
        return outputs, None

    def _mamba2_scan(
        self,
        function: Callable[..., tuple[Tensor, Tensor]],
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **options: Any,
    ) -> Tensor:
        """Return outputs [B, M, H, V] of Mamba 2's selective scan."""
        options |= {"D": D, "dt_bias": dt_bias, "dt_limit": dt_limit}
        x, bias, skip = hidden_states, dt_bias, D
        if self._packed_row is not None:
            return self._packed_row.by_conversation(
                lambda x, dt, B, C: function(x, dt, A, B, C, **options), x, dt, B, C
            )
        states, name = self._states, self._next_state()
        if not states.is_prompt:
            shape = (x.shape[2], x.shape[3], B.shape[-1])
            per_value = (v if v is None else v[:, None].expand(shape[:2]) for v in (skip, bias))
            operator = partial(
                selective_scan_step,
                x,
                dt[..., None].expand_as(x),
                A[:, None, None].expand(shape),
                B,
                C,
                *per_value,
                limits=tuple(dt_limit),
            )
            return states.step(name, x.shape[1], operator)
        if (padding := states.padding(x.shape[1], x.device)) is not None:
            # Padding takes no time; a lower limit of the function's own would give it some.
            dt = F.softplus(dt if bias is None else dt + bias.to(dt.dtype)).clamp(*dt_limit)
            dt = _masked(dt, padding, 0)
            options |= {"dt_bias": None, "dt_softplus": False, "dt_limit": (0.0, float("inf"))}
        outputs, last = function(x, dt, A, B, C, **options | {"return_final_states": True})
        states.write(name, last.float())
        return outputs

    def _mamba_scan(
        self,
        function: Callable[..., tuple[Tensor, Tensor]],
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return outputs [B, channels, M] of Mamba's selective scan."""
        options |= {"D": D, "delta_bias": delta_bias}
        tensors = hidden_states, dt, B, C, *(() if z is None else (z,))

        def own(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None = None) -> Any:
            return function(x, dt, A, B, C, z=z, **options)

        if self._packed_row is not None:
            return self._packed_row.by_conversation(
                lambda *rows: own(*(x.mT for x in rows)).mT, *(x.mT for x in tensors)
            ).mT
        states, name = self._states, self._next_state()
        if not states.is_prompt:
            x, dt, b, c = (tensor.mT[:, :, None] for tensor in tensors[:4])
            per_value = (v if v is None else v[None] for v in (D, delta_bias))
            operator = partial(selective_scan_step, x, dt, A[None], b, c, *per_value)
            y = states.step(name, x.shape[1], operator)[:, :, 0].mT
            return y if z is None else y * F.silu(z)
        if (padding := states.padding(dt.shape[-1], dt.device)) is not None:
            dt = dt.masked_fill(padding[:, None], _NO_TIME)
        options["return_last_state"] = True
        outputs, last = own(hidden_states, dt, *tensors[2:])
        states.write(name, last.float()[:, None])
        return outputs


def _masked(tensor: Tensor, padding: Tensor, value: float) -> Tensor:
    """Return [B, M, …] with a value where `padding` [B, M] is True."""
    return tensor.masked_fill(padding.view(*padding.shape, *[1] * (tensor.ndim - 2)), value)


def copy_function(
    function: FunctionType, global_names: dict[str, Any], code: CodeType | None = None
) -> FunctionType:
    """Return a copy of the function with other globals, or with other code."""
    copied = FunctionType(
        code or function.__code__,
        global_names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    return copied


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
    None: a layer must run to tell, and takes other inputs than the decoder's hidden states.
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
    return sum(row_bytes(states.pools).values())
