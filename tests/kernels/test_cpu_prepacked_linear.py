"""Packed products and the norm beside them: torch's own, within rounding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.cpu_prepacked_linear import (
    PrepackedLinear,
    PrepackedSwiGLU,
    RowNorm,
    why_no_prepacking,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SHAPES = [(1, 1), (7, 5), (33, 47), (256, 128), (123, 300)]
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    why_no_prepacking(CPU, torch.float32) is not None, reason="no packed products here"
)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Within rounding of the largest entry; `expected` in float64."""
    assert actual.shape == expected.shape
    scale = float(expected.abs().max().clamp(min=1e-3))
    error = float((actual.double() - expected).abs().max()) / scale
    assert error <= TOLERANCE[actual.dtype], error


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if (reason := why_no_prepacking(CPU, request.param)) is not None:
        pytest.skip(reason)
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_equal_linear(shape: tuple[int, int], biased: bool, dtype: torch.dtype) -> None:
    weight = random(*shape, dtype=dtype)
    bias = random(shape[0], dtype=dtype) if biased else None
    packed, gate = PrepackedLinear(weight, bias), PrepackedLinear(weight, bias, activation="swish")
    assert packed.num_bytes == weight.numel() * weight.element_size()
    wide = weight.double(), None if bias is None else bias.double()
    for rows in (1, 2, 3, 5, 8, 9, 16, 17, 63, 64):
        x = random(rows, shape[1], dtype=dtype, seed=1)
        other = random(rows, shape[0], dtype=dtype, seed=2)
        before, exact = other.clone(), F.linear(x.double(), *wide)
        with torch.inference_mode():
            assert_close(packed(x), exact)
            assert_close(gate(x), F.silu(exact))
            assert_close(packed.add_to(other, x), other.double() + exact)
            assert_close(packed.multiply(other, x), other.double() * exact)
        assert torch.equal(other, before)


def test_the_feed_forward(dtype: torch.dtype) -> None:
    gate, up = random(48, 33, dtype=dtype), random(48, 33, dtype=dtype, seed=1)
    down = random(33, 48, dtype=dtype, seed=2)
    x, residual = random(5, 33, dtype=dtype, seed=3), random(5, 33, dtype=dtype, seed=4)
    wide = [t.double() for t in (x, gate, up, down, residual)]
    inner = F.silu(wide[0] @ wide[1].T) * (wide[0] @ wide[2].T)
    with torch.inference_mode():
        actual = PrepackedSwiGLU(gate, up, down).add_to(residual, x)
    assert_close(actual, wide[4] + inner @ wide[3].T)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_norm_equals_torch(scale: float, dtype: torch.dtype) -> None:
    weight, x = random(33, dtype=dtype), random(4, 3, 33, dtype=dtype, seed=1) * scale
    x[0, 0] = 0
    expected = F.rms_norm(x.double(), (33,), weight.double(), 1e-5)
    actual = RowNorm(weight, 1e-5)(x)
    assert actual.dtype == dtype
    assert_close(actual, expected)


def test_packing_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not for cuda" in (why_no_prepacking(torch.device("cuda"), torch.float32) or "")
    assert "float16" in (why_no_prepacking(CPU, torch.float16) or "")
    with monkeypatch.context() as patch:
        patch.setattr(torch.ops, "mkldnn", SimpleNamespace())
        assert "release" in (why_no_prepacking(CPU, torch.float32) or "")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "no oneDNN" in (why_no_prepacking(CPU, torch.float32) or "")
