"""The small operations of transformers' layers in fewer kernels: torch.compile (CUDA, 16 bit).

transformers writes a norm as six kernels, a rotation as ten and an expert's gate as up to nine; at
one token a row each takes as long as reading megabytes of weights. What is compiled are pure
functions of rows: norms, feed-forwards, gates of experts and rotations. Whole layers are not: they
hold their number and a cache, so each would be traced and compiled anew.

A function is compiled twice, for one row and for any number, whatever the number of layers, and
compared with the eager one when the target is loaded. Targets whose layers run on our own kernels
(`target_model/fused_decoder.py`) need none of this; in float32 layers stay as transformers wrote
them, which is what parity is measured on.
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

from draftlab.target_model.fused_decoder import knows
from draftlab.target_model.model import Target

_ROTATE = "apply_rotary_pos_emb"  # what attention modules call, found among their globals
_TOLERANCE = 2e-2  # relative; one rounding to bfloat16 more or less gives 0.004


def compile_small(target: Target) -> None:
    """Compiles the small operations of a target that gains by it: CUDA, 16 bit, not fused.

    Not of one that is spread over GPUs: each would need variants of its own.
    """
    half = target.dtype in (torch.bfloat16, torch.float16)
    if target.device.type == "cuda" and half and not target.spread and not knows(target):
        compile_layers(target)


def compile_layers(target: Target, backend: str | Callable[..., Any] = "inductor") -> bool:
    """Compiles the small operations of a target's layers, in place, and tries them out.

    Args:
        target: no weight of it changes, only methods of module instances.
        backend: of torch.compile.

    Returns:
        Whether they run compiled. When anything fails they are as before, and a warning says why.
    """
    pieces: dict[Any, _Piece] = {}
    placed = list(_places(target.layers, pieces, backend))
    for module, name, method in placed:
        setattr(module, name, MethodType(method, module))
    ids = torch.arange(1, 9, device=target.device)[None] % target.vocab_size
    try:
        for length in (8, 1):
            target.states(ids[:, :length])
    except Exception as error:  # compilers raise many types
        for module, name, _ in placed:
            delattr(module, name)
        reason = " ".join(str(error).splitlines()[:2])
        warnings.warn(
            f"the small operations of {type(target.decoder).__name__} run uncompiled: "
            f"{type(error).__name__}: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    for piece in pieces.values():
        piece.on_trial = False
    return True


class _Piece:
    """A function of rows, compiled; while on trial, compared with the eager one at every call.

    Args:
        function: takes tensors whose first dimension is the number of rows, and modules.
        backend: of torch.compile.
    """

    def __init__(self, function: FunctionType, backend: str | Callable[..., Any]) -> None:
        self.eager, self.on_trial = function, True
        # torch.compile stops after eight variants of a code object. With code of its own, no piece
        # uses up what others (another model's, or norms of another width) are allowed.
        own = _copy(function, function.__globals__, function.__code__.replace())
        self.compiled = torch.compile(own, backend=backend)

    def __call__(self, *arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, Tensor):
                maybe_mark_dynamic(argument, 0)
        found = self.compiled(*arguments)
        if self.on_trial:
            self._compare(found, self.eager(*arguments))
        return found

    def _compare(self, found: Any, expected: Any) -> None:
        """Raises a `ValueError` when they differ by more than rounding."""
        if isinstance(found, Tensor):
            found, expected = (found,), (expected,)
        for one, other in zip(found, expected, strict=True):
            error = float((one - other).float().norm() / other.float().norm().clamp(min=1e-6))
            if not error <= _TOLERANCE:  # NaN is refused too
                raise ValueError(f"{self.eager.__qualname__} differs by {error:.2g} (relative)")


def _copy(function: FunctionType, names: dict[str, Any], code: Any = None) -> FunctionType:
    """The function over other globals, or with other code."""
    copied = FunctionType(
        code or function.__code__,
        names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    return copied


def _places(
    layers: nn.ModuleList, pieces: dict[Any, _Piece], backend: str | Callable[..., Any]
) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
    """Modules with the name and the function of the method that each is to get.

    Args:
        pieces: filled; modules of one class and shape share them.
    """

    def piece(function: FunctionType, module: nn.Module) -> _Piece:
        key = function, *(parameter.shape for parameter in module.parameters())
        if key not in pieces:
            pieces[key] = _Piece(function, backend)
        return pieces[key]

    for module in layers.modules():
        kind: Any = type(module)
        forward, gate = kind.forward, getattr(kind, "_apply_gate", None)
        if "forward" in vars(module) or not isinstance(forward, FunctionType):
            continue  # somebody has replaced it already
        if _is_norm(module) or _is_feed_forward(module):
            yield module, "forward", _by_rows(piece(forward, module))
        elif isinstance(gate, FunctionType):
            yield module, "_apply_gate", _gate(piece(gate, module))
        elif _ROTATE in forward.__code__.co_names:
            rotate = forward.__globals__[_ROTATE]
            if isinstance(rotate, FunctionType):
                rotation = _rotation(piece(rotate, module))
                yield module, "forward", _copy(forward, forward.__globals__ | {_ROTATE: rotation})


def _takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


def _is_norm(module: nn.Module) -> bool:
    """A norm over the last dimension that its model writes out (torch's own are one kernel)."""
    kind = type(module)
    return (
        "Norm" in kind.__name__
        and not kind.__module__.startswith("torch.")
        and not list(module.children())
        and all(parameter.ndim == 1 for parameter in module.parameters())
        and _takes_one(module)
    )


def _is_feed_forward(module: nn.Module) -> bool:
    """Linear products and activations, and nothing else."""
    children = list(module.children())
    linear = [child for child in children if type(child) is nn.Linear]
    rest = [child for child in children if type(child) is not nn.Linear]
    plain = not any(list(child.parameters()) or list(child.children()) for child in rest)
    own = list(module.parameters(recurse=False))
    return len(linear) > 1 and plain and not own and _takes_one(module)


def _by_rows(piece: _Piece) -> Callable[..., Any]:
    """A `forward` for any shape [..., H]."""

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        # Queries [B, heads, M, D] lie in memory as [B, M, heads, D]: rows in that order are a view.
        if x.ndim == 4 and x.stride(1) < x.stride(2):
            return forward(module, x.transpose(1, 2)).transpose(1, 2)
        return piece(module, x.flatten(0, -2)).view(*x.shape[:-1], -1)

    return forward


def _gate(piece: _Piece) -> Callable[..., Any]:
    """An `_apply_gate` of experts, whose rows are pairs [S, 2 · I]."""

    def gate(module: nn.Module, gate_up: Tensor) -> Tensor:
        return piece(module, gate_up)

    return gate


def _rotation(piece: _Piece) -> Callable[..., Any]:
    """An `apply_rotary_pos_emb` for queries and keys [B, heads, M, D], angles [B or 1, M, D]."""

    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim != 1 or cos.ndim != 3:
            return piece.eager(q, k, cos, sin, unsqueeze_dim)
        rows = q.shape[0], q.shape[2]
        heads = [states.transpose(1, 2).flatten(0, 1) for states in (q, k)]
        angles = [angle.expand(rows[0], -1, -1).flatten(0, 1) for angle in (cos, sin)]
        found = piece(*heads, *angles)  # the heads of a row in dimension 1
        query, key = (states.unflatten(0, rows).transpose(1, 2) for states in found)
        return query, key

    return rotate
