"""Rows added in place: the reference against a loop, the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftlab.kernels.add_rows import add_rows_
from tests.helpers.gpu import on_devices
from tests.helpers.interpreter import interpreter_test, on_kernels

test_in_the_interpreter = interpreter_test(__file__)


def case(
    n: int, columns: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a slice of columns of a tensor of 11 rows, n row numbers, and addends [n, columns]."""
    generator = torch.Generator().manual_seed(n + columns)
    whole = torch.randn(11, columns + 7, generator=generator).to(device, dtype)[:, 3 : columns + 3]
    index = torch.randperm(11, generator=generator)[:n].to(device)
    rows = torch.randn(n, columns + 2, generator=generator).to(device, dtype)[:, 1 : columns + 1]
    return whole, index, rows


def test_the_reference_equals_a_loop() -> None:
    whole, index, rows = case(6, 40, torch.float32)
    expected = whole.clone()
    for place, row in zip(index.tolist(), rows, strict=True):
        expected[place] = expected[place] + row
    add_rows_.reference(whole, index, rows)
    assert torch.equal(whole, expected)


@on_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "columns"), [(6, 40), (11, 1), (1, 5000), (0, 8)])
def test_the_kernel_equals_the_reference(
    n: int, columns: int, dtype: torch.dtype, device: str
) -> None:
    """The gradient of a sum is an expanded number; another one may be transposed."""
    whole, index, rows = case(n, columns, dtype, device)
    before = whole._base.clone()
    others = torch.ones_like(before, dtype=torch.bool)
    others[index, 3 : columns + 3] = False
    # The interpreter truncates bfloat16 where a GPU rounds.
    truncates = device == "cpu" and dtype == torch.bfloat16
    for addends in (rows, rows.T.contiguous().T, rows.new_ones(()).expand(n, columns)):
        expected = whole.clone()
        add_rows_.reference(expected, index, addends)
        add_rows_.triton(whole, index, addends)
        torch.testing.assert_close(whole, expected, rtol=2**-7 if truncates else 0, atol=0)
        assert torch.equal(whole._base[others], before[others])


@on_kernels
def test_shapes_that_do_not_fit_are_refused(device: str) -> None:
    whole, index, rows = case(6, 40, torch.float32, device)
    for wrong in (rows[:5], rows[:, :39]):
        with pytest.raises(ValueError, match=r"expected rows \[6, 40\]"):
            add_rows_.triton(whole, index, wrong)
    with pytest.raises(ValueError, match="columns side by side"):
        add_rows_.triton(whole.T.contiguous().T, index, rows)
    add_rows_.triton(whole, index[:0], rows[:0])


@on_devices
def test_float64_is_not_rounded(device: str) -> None:
    whole = torch.ones(3, 2, dtype=torch.float64, device=device)
    add_rows_(whole, torch.tensor([1], device=device), 1e-10 * whole[:1])
    assert float(whole[1, 0]) == 1 + 1e-10
