"""Helpers of the tests marked `gpu`: moving cases to a device, CUDA graphs, host waits."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
"""Runs a test with device="cpu" and, marked `gpu`, with device="cuda"."""
on_gpu = pytest.mark.parametrize("device", DEVICES[1:])
"""Runs a test, marked `gpu`, with device="cuda"."""


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """Turn TF32 off: it rounds float32 products to 10 bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def to_device(value: Any, device: str | torch.device) -> Any:
    """Return `value` with every tensor in it on `device`; containers and dataclasses are copied."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: to_device(each, device) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(to_device(each, device) for each in value)
    if is_dataclass(value):
        return type(value)(*(to_device(getattr(value, f.name), device) for f in fields(value)))
    return value


def capture(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a CUDA graph of one call of `work` and the tensors that its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = work()
    return graph, result


@contextmanager
def kernels_compiled_ahead() -> Iterator[list[bool]]:
    """Forget compiled kernels; yield a list that grows by each one: whether another thread than
    that of its launch compiled it. Nothing fake is left at the end.
    """
    from triton import knobs
    from triton.runtime.jit import JITFunction

    gc.unfreeze()  # what is frozen is not among `get_objects`
    for kernel in [each for each in gc.get_objects() if type(each) is JITFunction]:
        kernel.device_caches.clear()
    # torch.compile keeps some.
    known = {id(each) for each in gc.get_objects() if type(each) is FakeTensor}
    ahead: list[bool] = []

    def listener(**_: Any) -> None:
        ahead.append(threading.current_thread().name.startswith("ThreadPoolExecutor"))

    with patch.object(knobs.compilation, "listener", listener):
        yield ahead
    gc.collect()
    left = [each for each in gc.get_objects() if type(each) is FakeTensor]
    assert not [each for each in left if id(each) not in known]


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raise RuntimeError where the host waits for the device inside the block."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_same(actual: Any, expected: Any) -> None:
    """Assert that two values hold equal tensors of equal dtypes, nested tensors included."""
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    elif is_dataclass(expected):
        for field in fields(expected):
            assert_same(getattr(actual, field.name), getattr(expected, field.name))
    elif isinstance(expected, tuple | list):
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return ‖actual − expected‖ / ‖expected‖, computed in float64."""
    exact = expected.detach().double()
    return float((actual.detach().double() - exact).norm() / exact.norm().clamp(min=1e-9))
