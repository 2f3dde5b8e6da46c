"""Compiles the Triton kernels of a function side by side, before the function runs.

Triton compiles a kernel at its first launch, while all that follows waits, and a decode step has
dozens of kernels of a second each. Here the function runs first with fake tensors, which have
shapes and no data (torch's `FakeTensorMode`). A launch then only asks for its kernel, and threads
compile all of them at once. The real run finds them compiled.

Such a function does not read values of tensors, and may run once more than asked: an operation
whose tensors are all real may be done. What it keeps for later calls, it makes under
`real_tensors`. Tests: tests/kernels/test_compile_ahead.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Thread
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

MAX_WASTED_SECONDS = 1.0
"""Time of passes that found nothing to compile, after which no more are made."""
_fake = ContextVar("fake", default=False)  # other threads go on as ever


def hash_triton() -> Thread:
    """Start and return a thread that hashes Triton's own files: the first launch of the process
    would wait for that for half a second.
    """

    def run() -> None:
        with suppress(Exception):  # the first launch shows it
            from triton.runtime.cache import triton_key

            triton_key()  # which keeps it

    thread = Thread(target=run, name="triton", daemon=True)
    thread.start()
    return thread


def is_fake() -> bool:
    """Return whether the tensors of this call have no data, so that none may be kept."""
    return _fake.get()


def real_tensors() -> AbstractContextManager[Any]:
    """Return a context whose new tensors have data also while kernels are compiled ahead."""
    if not is_fake():
        return nullcontext()
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


@dataclass(frozen=True)
class _Pointer:
    """Stands for a tensor in a launch: Triton reads its dtype and the alignment of its address."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def _argument(value: Any) -> Any:
    """Return what a launch's argument is replaced by; allocations are aligned to 512 bytes."""
    if isinstance(value, tuple):
        return tuple(map(_argument, value))
    if not isinstance(value, torch.Tensor):
        return value
    return _Pointer(value.dtype, value.storage_offset() * value.element_size())


def _compile(run: Callable[[], Any]) -> int:
    """Compile the kernels that `run` launches, and return how many there were to compile."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._pytree import tree_leaves
    from triton import AsyncCompileMode
    from triton.runtime._async_compile import FutureKernel, active_mode
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    launch, measure, requested = JITFunction.run, Autotuner._bench, {}

    def launches(args: tuple[Any, ...]) -> bool:
        # A backward pass has fake tensors on threads of its own.
        return not is_fake() and not any(isinstance(x, FakeTensor) for x in tree_leaves(args))

    def refuse(self: Any, *args: Any, **options: Any) -> Any:
        if launches(args):
            return measure(self, *args, **options)
        raise RuntimeError("a kernel of another library would keep the choice of a measurement")

    def request(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if launches(args):
            return launch(self, *args, grid=grid, warmup=warmup, **options)
        options = {name: _argument(value) for name, value in options.items()}
        token = active_mode.set(mode)
        try:
            kernel = launch(self, *map(_argument, args), grid=grid, warmup=True, **options)
        finally:
            active_mode.reset(token)
        if isinstance(kernel, FutureKernel):
            requested[id(kernel)] = kernel
        return kernel

    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        token = _fake.set(True)
        try:
            with (
                AsyncCompileMode(pool) as mode,
                patch.object(JITFunction, "run", request),
                patch.object(Autotuner, "_bench", refuse),
                FakeTensorMode(allow_non_fake_inputs=True),
            ):
                run()
        finally:
            _fake.reset(token)
        # Reading `run` loads a kernel and builds its launcher, for which Triton calls a C compiler.
        list(pool.map(lambda future: future.result().run, requested.values()))
    return len(requested)


class CompileAhead:
    """Compiles the kernels of functions that are about to run.

    If a function cannot run without data, its launches compile them, as without this class. So
    they do for all functions once passes that found nothing new have taken `MAX_WASTED_SECONDS`.

    Args:
        device: that they run on; on a CPU there is nothing to compile.
    """

    def __init__(self, device: torch.device) -> None:
        self._wasted = 0.0 if device.type == "cuda" else MAX_WASTED_SECONDS

    def __call__(self, run: Callable[[], Any]) -> None:
        """Compile the kernels that `run` launches."""
        if self._wasted >= MAX_WASTED_SECONDS:
            return
        start = perf_counter()
        try:
            compiled = _compile(run)
        except Exception as error:
            logging.getLogger(__name__).debug("kernels are compiled one by one: %r", error)
            compiled = 0
        if not compiled:
            self._wasted += perf_counter() - start
