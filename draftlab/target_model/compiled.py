"""Fuse the small operations of transformers' layers by torch.compile (CUDA, 16 bit).

transformers writes a norm as six kernels, a rotation as ten and an expert's gate as up to nine; at
one token a row each takes as long as reading megabytes of weights. Compiled are pure functions of
rows: norms, feed-forwards, gates of experts and rotations. Whole layers hold their number and a
cache, so each of them would be traced and compiled anew.

A function is compiled twice, for one row and for any number, whatever the number of layers, and
compared with the eager one when the target is loaded. Targets with a fast path
(`target_model/fused_decoder.py`) need none of this; in float32 the others' layers run as
transformers writes them.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic

from draftlab.target_model.function_copy import copy_function
from draftlab.target_model.known_layers import has_known_layers
from draftlab.target_model.model import Target

_ROTATE = "apply_rotary_pos_emb"  # a global of the modules of attention
_TOLERANCE = 2e-2  # relative; one bfloat16 rounding more or less gives 0.004


def compile_target(target: Target) -> None:
    """Compile the small operations of a target on CUDA, in 16 bit, without a fast path.

    A pipeline-parallel target is left alone: each GPU would need variants of its own.
    """
    half = target.dtype in (torch.bfloat16, torch.float16)
    single_gpu = target.device.type == "cuda" and not target.pipeline_parallel
    if single_gpu and half and not has_known_layers(target):
        compile_layers(target)


def compile_layers(target: Target, backend: str | Callable[..., Any] = "inductor") -> bool:
    """Compile the small operations of a target's layers, in place, and check them.

    Args:
        target: only methods of its module instances change.
        backend: of torch.compile.

    Returns:
        Whether they run compiled. If anything fails, they are restored and a warning says why.
    """
    functions: dict[Any, _CompiledFunction] = {}
    replaced = list(_replacements(target.layers, functions, backend))
    for module, name, method in replaced:
        setattr(module, name, MethodType(method, module))
    ids = torch.arange(1, 9, device=target.device)[None] % target.vocab_size
    try:
        for length in (8, 1):
            target.states(ids[:, :length])
    except Exception as error:  # compilers raise many types
        for module, name, _ in replaced:
            delattr(module, name)
        reason = " ".join(str(error).splitlines()[:2])
        warnings.warn(
            f"the small operations of {type(target.decoder).__name__} run uncompiled: "
            f"{type(error).__name__}: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    for function in functions.values():
        function.checking = False
    return True


class _CompiledFunction:
    """A compiled function of rows; while `checking`, each call is compared with the eager one.

    Args:
        function: takes tensors whose first dimension is the number of rows, and modules.
        backend: of torch.compile.
    """

    def __init__(self, function: FunctionType, backend: str | Callable[..., Any]) -> None:
        self.eager, self.checking = function, True
        # torch.compile allows eight variants of a code object. A copied code object leaves other
        # models' functions, and norms of other widths, their variants.
        copied = copy_function(function, function.__globals__, function.__code__.replace())
        self.compiled = torch.compile(copied, backend=backend)

    def __call__(self, *arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, Tensor):
                maybe_mark_dynamic(argument, 0)
        result = self.compiled(*arguments)
        if self.checking:
            self._compare(result, self.eager(*arguments))
        return result

    def _compare(self, actual: Any, expected: Any) -> None:
        """Raise a `ValueError` if the results differ by more than rounding."""
        if isinstance(actual, Tensor):
            actual, expected = (actual,), (expected,)
        for one, other in zip(actual, expected, strict=True):
            error = float((one - other).float().norm() / other.float().norm().clamp(min=1e-6))
            if not error <= _TOLERANCE:  # NaN is refused too
                raise ValueError(f"{self.eager.__qualname__} differs by {error:.2g} (relative)")


def _replacements(
    layers: nn.ModuleList,
    functions: dict[Any, _CompiledFunction],
    backend: str | Callable[..., Any],
) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
    """Yield modules with the name and the function of the method to replace.

    Args:
        functions: is filled; modules of one class and shape share a compiled function.
    """

    def compiled(function: FunctionType, module: nn.Module) -> _CompiledFunction:
        key = function, *(parameter.shape for parameter in module.parameters())
        if key not in functions:
            functions[key] = _CompiledFunction(function, backend)
        return functions[key]

    for module in layers.modules():
        cls: Any = type(module)
        forward, gate = cls.forward, getattr(cls, "_apply_gate", None)
        if "forward" in vars(module) or not isinstance(forward, FunctionType):
            continue  # it has been replaced already
        if _is_norm(module) or _is_feed_forward(module):
            yield module, "forward", _forward_by_rows(compiled(forward, module))
        elif isinstance(gate, FunctionType):
            # its rows are token-expert pairs [S, 2 · I]
            yield module, "_apply_gate", compiled(gate, module)
        elif _ROTATE in (own := inspect.unwrap(forward)).__code__.co_names:
            rotate = own.__globals__[_ROTATE]
            if isinstance(rotate, FunctionType):
                rotation = _apply_rotary(compiled(rotate, module))
                copied = copy_function(own, own.__globals__ | {_ROTATE: rotation})
                yield module, "forward", copied


def _has_one_input(module: nn.Module) -> bool:
    """Return whether the module's forward takes one argument."""
    return len(inspect.signature(module.forward).parameters) == 1


def _is_norm(module: nn.Module) -> bool:
    """Return whether this is a norm written out in the model (torch's own norms are one kernel)."""
    cls = type(module)
    return (
        "Norm" in cls.__name__
        and not cls.__module__.startswith("torch.")
        and not list(module.children())
        and all(parameter.ndim == 1 for parameter in module.parameters())
        and _has_one_input(module)
    )


def _is_feed_forward(module: nn.Module) -> bool:
    """Return whether the module consists of linear layers and activations only."""
    children = list(module.children())
    others = [child for child in children if type(child) is not nn.Linear]
    if any(list(child.parameters()) or list(child.children()) for child in others):
        return False
    direct_parameters = list(module.parameters(recurse=False))
    return len(children) - len(others) > 1 and not direct_parameters and _has_one_input(module)


def _forward_by_rows(function: _CompiledFunction) -> Callable[..., Any]:
    """Return a `forward` for any shape [..., H]."""

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        # Queries [B, heads, M, D] lie in memory as [B, M, heads, D]: rows in that order are a view.
        if x.ndim == 4 and x.stride(1) < x.stride(2):
            return forward(module, x.transpose(1, 2)).transpose(1, 2)
        return function(module, x.flatten(0, -2)).view(*x.shape[:-1], -1)

    return forward


def _apply_rotary(function: _CompiledFunction) -> Callable[..., Any]:
    """Return an `apply_rotary_pos_emb`: heads [B, heads, M, D], angles [B or 1, M, D]."""

    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim != 1 or cos.ndim != 3:
            return function.eager(q, k, cos, sin, unsqueeze_dim)
        rows = q.shape[0], q.shape[2]
        heads = [states.transpose(1, 2).flatten(0, 1) for states in (q, k)]
        angles = [angle.expand(rows[0], -1, -1).flatten(0, 1) for angle in (cos, sin)]
        rotated = function(*heads, *angles)  # the heads of a row are dimension 1
        query, key = (states.unflatten(0, rows).transpose(1, 2) for states in rotated)
        return query, key

    return rotate
