"""Kernels are compiled without being launched, and nothing fake is kept. No GPU is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from draftlab.kernels import compile_ahead
from draftlab.kernels.compile_ahead import CompileAhead, hash_triton, is_fake, real_tensors
from draftlab.kernels.linear.launch import _workspace
from draftlab.target_model.paged_cache import PagedCache, RecurrentStates

GPU = torch.device("cuda")


@triton.jit
def _double(x, out, N: tl.constexpr):
    columns = tl.arange(0, N)
    tl.store(out + columns, 2 * tl.load(x + columns))


def test_the_hash_of_triton_is_computed_on_a_thread() -> None:
    triton_key.cache_clear()
    hash_triton().join(60)
    assert triton_key.cache_info().currsize == 1


CONFIGS = [triton.Config({"N": size}) for size in (16, 32)]


@triton.autotune(CONFIGS, key=[], do_bench=lambda call, **_: call() or [1.0])
@triton.jit
def _tuned(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 1)


class _Hopper:
    """A driver that compiles for a Hopper GPU and launches nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Yield what grows by each compiled kernel: whether it was compiled by another thread."""
    kernels: list[bool] = []
    here = threading.get_ident()
    monkeypatch.setattr(driver, "_active", _Hopper())
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda self: None)
    monkeypatch.setattr(
        triton.knobs.compilation,
        "listener",
        lambda **_: kernels.append(threading.get_ident() != here),
    )
    _double.device_caches.clear()
    yield kernels
    _double.device_caches.clear()


def double(x: Tensor, size: int) -> Tensor:
    out = torch.empty_like(x)
    _double[(1,)](x, out, N=size)
    return out


def test_kernels_are_compiled_by_threads_and_not_launched(compiled: list[bool]) -> None:
    x, launch = torch.ones(64), JITFunction.run
    ahead = CompileAhead(GPU)
    ahead(lambda: [double(x, size) for size in (16, 32, 64, 32)] + [double(x[1:], 16)])
    assert compiled == [True] * 4  # an address that is not aligned has a kernel of its own
    ahead(lambda: double(x, 64))
    assert len(compiled) == 4
    assert JITFunction.run is launch
    assert not is_fake()


def test_only_what_is_marked_is_real(compiled: list[bool]) -> None:
    kept, x = [], torch.ones(64)

    def run() -> None:
        x.copy_(torch.zeros(64))  # into a fake copy
        with real_tensors():
            kept.append(torch.zeros(3))
        double(x, 16)

    CompileAhead(GPU)(run)
    assert kept[0].tolist() == [0, 0, 0]
    assert x.eq(1).all()


def test_what_decoding_keeps_is_real(compiled: list[bool]) -> None:
    cache, states = PagedCache(1, 3, 4), RecurrentStates(2)
    _workspace.cache_clear()

    def run() -> None:
        empty = torch.empty(1, 2, 0, 8)
        cache.layers[0].lazy_initialization(empty, empty)
        states.at(torch.tensor([0]), [1]).write("layer", torch.ones(1, 5))
        _workspace(torch.device("cpu"))

    CompileAhead(GPU)(run)
    kept = [cache.layers[0].keys, cache.layers[0].values, *states.pools]
    kept += _workspace(torch.device("cpu"))
    assert [type(tensor) for tensor in kept] == [Tensor] * 5
    assert all(tensor.eq(0).all() for tensor in kept[:3])


def test_other_threads_launch_unless_their_tensors_are_fake(
    compiled: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, real = [], torch.ones(16)
    monkeypatch.setattr(JITFunction, "run", lambda *_, warmup, **__: launches.append(warmup))

    def run() -> None:
        for x in (real, torch.ones(16)):  # the second one as in a backward pass
            thread = threading.Thread(target=lambda x=x: _double[(1,)](x, x, N=16))
            thread.start()
            thread.join()
        double(real, 16)

    CompileAhead(GPU)(run)
    assert launches == [False, True, True]


def test_a_function_that_reads_values_is_left_to_its_launches(compiled: list[bool]) -> None:
    x, launch = torch.ones(64), JITFunction.run
    CompileAhead(GPU)(lambda: double(x, int(x.sum())))
    assert compiled == []
    assert JITFunction.run is launch
    assert not is_fake()


def test_no_kernel_is_tuned_by_launches_that_do_not_run(compiled: list[bool]) -> None:
    CompileAhead(GPU)(lambda: _tuned[(1,)](torch.ones(64)))
    assert _tuned.cache == {}
    assert compiled == []


def test_passes_end_when_they_find_nothing(
    compiled: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(compile_ahead, "MAX_WASTED_SECONDS", 0.0)
    ahead = CompileAhead(GPU)
    for _ in range(3):
        ahead(lambda: calls.append(0))
    assert calls == []
    monkeypatch.setattr(compile_ahead, "MAX_WASTED_SECONDS", 1e-9)
    for _ in range(3):
        ahead(lambda: calls.append(0))
    assert calls == [0]
