"""An operator's two implementations under one name: the eager reference and its Triton launcher.

A function decorated with `triton_operator` states an operator once: its signature, its contract
and, as its body, the eager reference, which runs on a CPU and defines the result. CUDA tensors go
to the function of the same name in the named Triton module, but for those in float64: kernels
compute in float32. That module is imported at the first such call, because machines without a GPU
need no triton. The launcher has the same parameters; their types and meaning are the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def triton_operator(
    module: str, tensor: Callable[[Any], Tensor] = lambda x: x
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that sends CUDA tensors to a Triton launcher, with their GPU as the
    current one.

    The operator has two attributes, for tests and measurements: `reference` is the decorated
    function and `triton` the launcher, each called whatever the device.

    Args:
        module: the module of `draftlab.kernels` that has a function of the operator's name.
        tensor: returns the tensor that decides, from the operator's first argument.
    """

    def decorate(reference: Callable[..., Any]) -> Callable[..., Any]:
        @cache
        def launcher() -> Callable[..., Any]:
            return getattr(import_module(f"draftlab.kernels.{module}"), reference.__name__)

        def launch(*args: Any, **options: Any) -> Any:
            with torch.cuda.device_of(tensor(args[0])):  # Triton launches on the current GPU
                return launcher()(*args, **options)

        @wraps(reference)
        def operator(*args: Any, **options: Any) -> Any:
            x = tensor(args[0])
            run = launch if x.is_cuda and x.dtype != torch.float64 else reference
            return run(*args, **options)

        operator.reference, operator.triton = reference, launch
        return operator

    return decorate
