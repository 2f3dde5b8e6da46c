"""Compiling our Triton kernels for an H200 on a machine without one.

The interpreter accepts programs that the compiler refuses. Triton's compiler and ptxas need no GPU,
so the launch functions are called with tensors that say they are on one, and every launch stops
after compiling: what comes back is the machine code that a Hopper GPU would be given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


class _NoDevice:
    """A driver of a GPU that is not there; compiling asks it for the target only."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class OnGpu(Tensor):
    """A CPU tensor that claims to be on a GPU, as do results computed from it."""

    is_cuda = True


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Zeros that claim to be on a GPU."""
    return torch.zeros(*shape, dtype=dtype).as_subclass(OnGpu)


def pretend(owner: Any) -> None:
    """All tensors that are attributes of `owner` claim to be on a GPU."""
    for name, value in vars(owner).items():
        if isinstance(value, Tensor):
            object.__setattr__(owner, name, value.as_subclass(OnGpu))
        elif isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            object.__setattr__(owner, name, tuple(t.as_subclass(OnGpu) for t in value))


@contextmanager
def compiled() -> Iterator[dict[str, list[Any]]]:
    """Inside, launches only compile; gives the compiled kernels by the name of their function."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from draftlab.kernels import launching
    from draftlab.kernels.paged_attention import launch as paged_attention_launch

    kernels: dict[str, list[Any]] = {}
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels.setdefault(self.__name__, []).append(kernel)
        return kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", only_compile)
        patch.setattr(launching, "supported", lambda device: True)
        patch.setattr(paged_attention_launch, "_multiprocessors", lambda device: 132)
        patch.setattr(driver, "_active", _NoDevice())
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # Triton 3.10's: kernels have to ask for it
        yield kernels
    for name, variants in kernels.items():
        assert all(kernel.metadata.enable_fp_fusion for kernel in variants), name


def most_shared(kernels: list[Any]) -> int:
    """Bytes of shared memory of the hungriest."""
    return max(kernel.metadata.shared for kernel in kernels)
