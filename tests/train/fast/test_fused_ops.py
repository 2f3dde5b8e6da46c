"""The backward pass of a norm in 16 bit: what is summed in float32, and rounded once."""

from __future__ import annotations

import torch

from draftlab.train.fast.fused_ops import normed, normed_backward

EPS = 1e-5


def test_a_norms_gradients_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(512, 16, generator=generator).bfloat16() for _ in range(2))
    weight = torch.rand(16, generator=generator) + 0.5
    wide, wide_weight = x.double().requires_grad_(), weight.bfloat16().double().requires_grad_()
    own, exact_d_weight = torch.autograd.grad(
        normed(wide, wide_weight, EPS), (wide, wide_weight), gradient.double()
    )
    # It is nearly the opposite, so that a gradient that is rounded before the sum shows.
    other = (-1.05 * own).bfloat16()
    d_x, d_weight = normed_backward(gradient, x, weight, EPS, other)
    assert (d_x.dtype, d_weight.dtype) == (torch.bfloat16, torch.float32)
    exact = own + other.double()
    assert float((d_x.double() - exact).norm() / exact.norm()) < 2**-8
    torch.testing.assert_close(d_weight.double(), exact_d_weight, rtol=1e-5, atol=1e-4)
