"""An operator's two implementations under one name: the eager reference and its Triton launcher.

A function decorated with `triton_operator` states an operator once: its signature, its contract
and, as its body, the eager reference, which runs on a CPU and defines the result. CUDA tensors go
to the function of the same name in the named Triton module. That module is imported at the first
such call, because machines without a GPU need no triton. The launcher has the same parameters;
their types and meaning are those of the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def on_cuda(x: Tensor, *_: Any, **__: Any) -> bool:
    """Return whether an operator's first argument is on a GPU."""
    return x.is_cuda


def on_cuda_below_float64(x: Tensor, *_: Any, **__: Any) -> bool:
    """Return whether it is on a GPU and not float64, for kernels that compute in float32."""
    return x.is_cuda and x.dtype != torch.float64


def triton_operator(
    module: str, when: Callable[..., bool] = on_cuda
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that sends CUDA tensors to a Triton launcher.

    The operator has two attributes, for tests and measurements: `reference` is the decorated
    function and `triton` the launcher, each called whatever the device.

    Args:
        module: the module of `draftlab.kernels` that has a function of the operator's name.
        when: takes the operator's arguments; whether the launcher takes this call.
    """

    def decorate(reference: Callable[..., Any]) -> Callable[..., Any]:
        @cache
        def launcher() -> Callable[..., Any]:
            return getattr(import_module(f"draftlab.kernels.{module}"), reference.__name__)

        def launch(*args: Any, **options: Any) -> Any:
            return launcher()(*args, **options)

        @wraps(reference)
        def operator(*args: Any, **options: Any) -> Any:
            run = launch if when(*args, **options) else reference
            return run(*args, **options)

        operator.reference, operator.triton = reference, launch
        return operator

    return decorate
