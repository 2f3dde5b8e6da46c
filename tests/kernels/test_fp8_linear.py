"""Products in 8 bits: codes and scales against their definition, products against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftlab.kernels.fp8_linear import (
    E4M3,
    LARGEST_E4M3,
    input_gradient,
    linear,
    quantise_rows,
    quantise_weight,
)
from draftlab.kernels.fp8_rows import quantise_rows as fp8_rows
from tests.helpers.gpu import on_devices
from tests.helpers.interpreter import interpreter_test, on_kernels

test_in_the_interpreter = interpreter_test(__file__)

HALF_STEP = 2**-4
"""Half a step of a mantissa of three bits, relative to the number."""


def random_rows(n: int, size: int, seed: int, device: str = "cpu") -> Tensor:
    """Return bfloat16 rows whose sizes differ by factors of up to e⁸."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, size, generator=generator)
    sizes = torch.exp(2 * torch.randn(n, 1, generator=generator).clamp(-2, 2))
    return (sizes * rows).to(device, torch.bfloat16)


def relative(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def test_a_number_is_off_by_half_a_step_of_its_row_at_most() -> None:
    x = random_rows(8, 48, seed=0)
    codes, scales = quantise_rows(x)
    assert (codes.dtype, scales.dtype, scales.shape) == (E4M3, torch.float32, (8, 1))
    assert torch.equal(codes.float().abs().amax(1), torch.full((8,), LARGEST_E4M3))
    exact, value = x.double(), codes.double() * scales.double()
    smallest_normal = 2**-6 * scales.double()
    bound = HALF_STEP * torch.maximum(exact.abs(), smallest_normal) * 1.0001
    assert ((value - exact).abs() <= bound).all()
    assert ((value - exact).abs() > 0.9 * bound).any()


def test_zeros_stay_zeros_and_other_rows_do_not_matter() -> None:
    x = random_rows(4, 32, seed=1)
    x[1] = 0
    codes, scales = quantise_rows(x)
    assert not codes[1].float().any()
    assert scales[1] > 0
    for row in range(4):
        assert torch.equal(quantise_rows(x[row : row + 1])[0].float(), codes[row : row + 1].float())


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**100])
def test_the_size_of_a_row_does_not_change_its_codes(factor: float) -> None:
    x = random_rows(4, 32, seed=9)
    (codes, scales), (expected, others) = quantise_rows(factor * x), quantise_rows(x)
    assert torch.equal(codes.float(), expected.float())
    assert torch.equal(scales, factor * others)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_shows_in_the_product(value: float) -> None:
    x, weight = random_rows(3, 32, seed=2), quantise_weight(random_rows(16, 32, seed=3))
    x[1, 5] = value
    finite = linear(x, weight).isfinite().all(1)
    assert finite.tolist() == [True, False, True]


@on_devices
@pytest.mark.parametrize(("n", "size", "out"), [(1, 16, 32), (7, 48, 16), (300, 256, 512)])
def test_products_are_those_of_the_dequantised_rows(
    n: int, size: int, out: int, device: str
) -> None:
    x, weight = random_rows(n, size, 4, device), random_rows(out, size, 5, device)
    gradient, fp8 = random_rows(n, out, 6, device), quantise_weight(weight)
    forward = dequantised(x) @ (fp8.codes.double() * fp8.scale.T.double()).T
    backward = dequantised(gradient) @ (fp8.transposed.double() * fp8.transposed_scale.T.double()).T
    for actual, expected in (
        (linear(x, fp8), forward),
        (input_gradient(gradient, fp8), backward),
    ):
        assert (actual.dtype, actual.shape) == (torch.bfloat16, expected.shape)
        # A sum of fast accumulation has some bits less than float32.
        assert relative(actual, expected) < 2**-8
    assert relative(forward, x.double() @ weight.double().T) < 2 * HALF_STEP
    assert relative(backward, gradient.double() @ weight.double()) < 2 * HALF_STEP


def dequantised(x: Tensor) -> Tensor:
    """Return what the codes of rows stand for, in float64."""
    codes, scales = quantise_rows(x)
    return codes.double() * scales.double()


def test_a_large_row_or_column_does_not_cost_the_others_their_precision() -> None:
    """One scale for the matrix would leave the small ones in subnormal codes."""
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(7)).bfloat16()
    weight[0] *= 1e5
    x = random_rows(50, 64, seed=8)
    exact = x.double() @ weight.double().T
    assert relative(linear(x, quantise_weight(weight))[:, 1:], exact[:, 1:]) < HALF_STEP
    gradient = input_gradient(x, quantise_weight(weight.T))
    assert relative(gradient[:, 1:], exact[:, 1:]) < HALF_STEP


def test_weights_in_16_bits_are_multiplied_as_they_are() -> None:
    x, weight, gradient = random_rows(5, 8, 0), random_rows(6, 8, 1), random_rows(5, 6, 2)
    assert torch.equal(linear(x, weight), x @ weight.T)
    assert torch.equal(input_gradient(gradient, weight), gradient @ weight)


@on_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "size"), [(5, 48), (3, 5000), (1, 1), (0, 16)])
def test_the_kernel_equals_the_reference(
    n: int, size: int, dtype: torch.dtype, device: str
) -> None:
    """Columns of a wider tensor, a row of zeros, the smallest numbers."""
    x = random_rows(n, size + 3, 7, device).to(dtype)[:, :size]
    x[1:2] = 0
    x[2:3] *= 2.0**-100 if device == "cpu" else 2.0**-126
    (codes, scales), (expected, other_scales) = fp8_rows.triton(x), fp8_rows.reference(x)
    assert (codes.dtype, codes.shape) == (expected.dtype, expected.shape)
    # torch multiplies by the reciprocal of 448 on a GPU.
    torch.testing.assert_close(scales, other_scales, rtol=2**-22, atol=0)
    expected = (x.float() / scales).to(E4M3)
    differences, sizes = (codes.float() - expected.float()).abs(), expected.float().abs()
    if device == "cuda":
        assert not differences.any()
    else:  # Triton's interpreter errs next to powers of two and on subnormal numbers
        differences, sizes = differences[sizes > 2**-6], sizes[sizes > 2**-6]
        assert bool((differences <= sizes / 2).all())
        assert float(differences.count_nonzero()) <= 0.1 * differences.numel()


@on_kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_kernel_shows_a_number_that_is_not_finite(value: float, device: str) -> None:
    x = random_rows(3, 32, 2, device)
    x[1, 5] = value
    codes, scales = fp8_rows.triton(x)
    assert (codes.float() * scales).isfinite().all(1).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="side by side"):
        fp8_rows.triton(x.T)
