"""silu(gate) · up and its gradient: the reference is autograd's, the kernels are as it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.gated import (
    gated,
    gated_backward_,
    gated_backward_reference_,
    gated_reference,
)
from tests.helpers.interpreter import DEVICE, on_kernels, run_in_the_interpreter, runs_the_others

SHAPES = [(6, 40), (3, 1), (1, 2048), (2, 2100), (0, 8)]


@runs_the_others
def test_in_the_interpreter() -> None:
    run_in_the_interpreter(__file__)


def case(n: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gate_up and a gradient of what is gated; gates so large, too, that exp() is 0 or inf."""
    generator = torch.Generator().manual_seed(n + columns)
    gate_up = 3 * torch.randn(n, 2 * columns, generator=generator)
    gate_up[:1, : columns // 2] *= 100
    given = torch.randn(n, columns, generator=generator)
    return gate_up.to(DEVICE, dtype), given.to(DEVICE, dtype)


@pytest.mark.parametrize(("n", "columns"), SHAPES)
def test_the_reference_is_autograds(n: int, columns: int) -> None:
    gate_up, given = case(n, columns, torch.float64)
    leaf = gate_up.clone().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    expected = F.silu(gate) * up
    torch.testing.assert_close(gated_reference(gate_up), expected.detach())
    (gradient,) = torch.autograd.grad(expected, leaf, given)
    torch.testing.assert_close(gated_backward_reference_(gate_up, given), gradient)
    assert torch.equal(given, gated_reference(gate_up))


def test_16_bit_is_rounded_once() -> None:
    gate_up, given = case(6, 40, torch.bfloat16)
    exact, owed = gate_up.double(), given.double()
    assert torch.equal(gated_reference(gate_up), gated_reference(exact.float()).bfloat16())
    found = gated_backward_reference_(gate_up, given)
    expected = gated_backward_reference_(exact, owed)
    assert (found - expected).abs().max() <= 2**-8 * expected.abs().max()
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-30)


def test_float64_is_not_rounded() -> None:
    gate_up, given = case(6, 40, torch.float64)
    assert torch.equal(gated(gate_up), gated_reference(gate_up))
    assert gated_backward_(gate_up, given).dtype == torch.float64


@on_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "columns"), SHAPES)
def test_the_kernels_make_the_same(n: int, columns: int, dtype: torch.dtype) -> None:
    from draftlab.kernels.gated import launch, launch_backward_

    gate_up, given = case(n, columns, dtype)
    before, again = gate_up.clone(), given.clone()
    # The interpreter cuts bfloat16 off where a GPU rounds.
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    made = launch(gate_up)
    torch.testing.assert_close(made, gated_reference(gate_up), rtol=rtol, atol=1e-30)
    expected = gated_backward_reference_(gate_up, again)
    found = launch_backward_(gate_up, given)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-5)
    assert torch.equal(given, made)  # what the forward pass multiplied, to the bit
    assert torch.equal(gate_up, before)


@on_kernels
def test_a_gradient_that_does_not_fit_is_refused() -> None:
    from draftlab.kernels.gated import launch_backward_

    gate_up, given = case(6, 40, torch.float32)
    for wrong in (given[:5], given[:, :39], given.T.contiguous().T):
        with pytest.raises(ValueError, match=r"contiguous gradient \[6, 40\]"):
            launch_backward_(gate_up, wrong)


@on_kernels
def test_gates_and_ups_of_any_strides() -> None:
    from draftlab.kernels.gated import launch, launch_backward_

    gate_up, given = case(6, 40, torch.float32)
    other = gate_up.T.contiguous().T
    assert torch.equal(launch(other), launch(gate_up))
    assert torch.equal(launch_backward_(other, given.clone()), launch_backward_(gate_up, given))
