"""Float32 products by oneDNN: as precise as torch's, and torch's setting is kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from draftlab.kernels import cpu_float32_products
from draftlab.kernels.cpu_float32_products import onednn_products

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.get_float32_matmul_precision()
    yield
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("shape", [(635, 256, 2048), (256, 768, 256), (33, 47, 129), (1, 256, 6)])
def test_products_stay_float32(shape: tuple[int, int, int]) -> None:
    """Forward and backward; factors in bfloat16 would be a thousand times less precise."""
    m, k, n = shape
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=generator, requires_grad=True)
    w = torch.randn(n, k, generator=generator, requires_grad=True)
    gradient = torch.randn(m, n, generator=generator)
    with onednn_products(CPU):
        product = x @ w.T
        product.backward(gradient)
    for actual, (a, b) in (
        (product, (x, w.T)),
        (x.grad, (gradient, w)),
        (w.grad, (gradient.T, x)),
    ):
        exact = a.detach().double() @ b.detach().double()
        assert float((actual.detach() - exact).abs().max() / exact.abs().max()) < 2e-6


def test_an_imprecise_processor_and_a_gpu_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    with monkeypatch.context() as patch:
        patch.setattr(cpu_float32_products, "_is_precise", lambda: False)
        with onednn_products(CPU):
            assert torch.get_float32_matmul_precision() == before
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        with onednn_products(CPU):
            assert torch.get_float32_matmul_precision() == before
    with onednn_products(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == before


class ExactTensor(torch.Tensor):
    """A tensor whose products are rounded once, as on CPUs without AMX."""

    rounds = False

    def __matmul__(self, other: torch.Tensor) -> torch.Tensor:
        a, b = self.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor)
        dtype = a.dtype
        if self.rounds and dtype == torch.float32:
            assert torch.get_float32_matmul_precision() == "medium"
            a, b = a.bfloat16(), b.bfloat16()
        return (a.double() @ b.double()).to(dtype)


class RoundingTensor(ExactTensor):
    """A tensor whose float32 products round their factors to bfloat16, as on CPUs with AMX."""

    rounds = True


@pytest.mark.parametrize("rounds", [False, True])
def test_a_probe_tells_rounded_factors(rounds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    randn = torch.randn

    def random(*shape: int, generator: torch.Generator) -> torch.Tensor:
        numbers = randn(*shape, generator=generator)
        return numbers.as_subclass(RoundingTensor if rounds else ExactTensor)

    monkeypatch.setattr(torch, "randn", random)
    assert cpu_float32_products._is_precise.__wrapped__() is not rounds


def test_the_setting_returns_after_the_last_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads enter and leave out of order, as a recording beside a training does."""
    monkeypatch.setattr(cpu_float32_products, "_is_precise", lambda: True)
    entered, leave = threading.Event(), threading.Event()
    before = torch.get_float32_matmul_precision()

    def other() -> None:
        with onednn_products(CPU):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with onednn_products(CPU):
        thread.start()
        assert entered.wait(10)
    assert torch.get_float32_matmul_precision() == "medium"
    leave.set()
    thread.join()
    assert torch.get_float32_matmul_precision() == before
