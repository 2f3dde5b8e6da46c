"""silu(gate) · up and its gradient: the reference against autograd, kernels against it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.swiglu import swiglu, swiglu_backward_
from tests.helpers.gpu import on_devices
from tests.helpers.interpreter import interpreter_test, on_kernels

SHAPES = [(6, 40), (3, 1), (1, 2048), (2, 2100), (0, 8), (5, 14_336)]
test_in_the_interpreter = interpreter_test(__file__)


def case(n: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return gate_up and an output gradient; some gates make exp() 0 or inf."""
    generator = torch.Generator().manual_seed(n + columns)
    gate_up = 3 * torch.randn(n, 2 * columns, generator=generator)
    gate_up[:1, : columns // 2] *= 100
    gradient = torch.randn(n, columns, generator=generator)
    return gate_up.to(device, dtype), gradient.to(device, dtype)


@pytest.mark.parametrize(("n", "columns"), SHAPES)
def test_the_reference_equals_autograd(n: int, columns: int) -> None:
    gate_up, gradient = case(n, columns, torch.float64)
    leaf = gate_up.clone().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    expected = F.silu(gate) * up
    torch.testing.assert_close(swiglu.reference(gate_up), expected.detach())
    (exact,) = torch.autograd.grad(expected, leaf, gradient)
    torch.testing.assert_close(swiglu_backward_.reference(gate_up, gradient), exact)
    assert torch.equal(gradient, swiglu.reference(gate_up))


def test_16_bit_is_rounded_once() -> None:
    gate_up, gradient = case(6, 40, torch.bfloat16)
    exact, exact_gradient = gate_up.double(), gradient.double()
    assert torch.equal(swiglu.reference(gate_up), swiglu.reference(exact.float()).bfloat16())
    actual = swiglu_backward_.reference(gate_up, gradient)
    expected = swiglu_backward_.reference(exact, exact_gradient)
    assert (actual - expected).abs().max() <= 2**-8 * expected.abs().max()
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=1e-30)


@on_devices
def test_float64_is_not_rounded(device: str) -> None:
    gate_up, gradient = case(6, 40, torch.float64, device)
    assert torch.equal(swiglu(gate_up), swiglu.reference(gate_up))
    assert swiglu_backward_(gate_up, gradient).dtype == torch.float64


@on_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "columns"), SHAPES)
def test_the_kernels_equal_the_reference(
    n: int, columns: int, dtype: torch.dtype, device: str
) -> None:
    gate_up, gradient = case(n, columns, dtype, device)
    before, again = gate_up.clone(), gradient.clone()
    # The interpreter truncates bfloat16 where a GPU rounds.
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    product = swiglu.triton(gate_up)
    torch.testing.assert_close(product, swiglu.reference(gate_up), rtol=rtol, atol=1e-30)
    expected = swiglu_backward_.reference(gate_up, again)
    actual = swiglu_backward_.triton(gate_up.T.contiguous().T, gradient)
    assert actual.isfinite().all()
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-5)
    assert torch.equal(gradient, product)  # what the forward pass multiplied, to the bit
    assert torch.equal(gate_up, before)
    assert torch.equal(swiglu.triton(gate_up.T.contiguous().T), product)  # any strides


@on_kernels
def test_a_gradient_that_does_not_fit_is_refused(device: str) -> None:
    gate_up, gradient = case(6, 40, torch.float32, device)
    for wrong in (gradient[:5], gradient[:, :39], gradient.T.contiguous().T):
        with pytest.raises(ValueError, match=r"contiguous gradient \[6, 40\]"):
            swiglu_backward_.triton(gate_up, wrong)
