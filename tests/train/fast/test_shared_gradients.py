"""Shared gradients are autograd's, whatever is used, and however often."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftlab.train.fast.shared_gradients import Shared, branch_gradient, select_rows

ROWS, SIZE, WIDTH = 7, 5, 6
USES = st.lists(st.integers(0, ROWS), min_size=1, max_size=6)  # rows of each product


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(weight: Tensor, x: Tensor, uses: list[int], shared: bool) -> Tensor:
    """Something of a chain of products."""
    owner = Shared(weight) if shared else None
    total = x.new_zeros(())
    for seed, n in enumerate(uses):
        read = x[:n]
        result = owner.product(read) if shared else read @ weight.T
        x = torch.cat([(result @ drawn(99, WIDTH, SIZE)).tanh(), x[n:]])  # the next ones read it
        total = total + (result * drawn(seed, *result.shape)).sum() + result.square().sum()
    return total


@given(uses=USES, frozen=st.sampled_from([None, "weight", "x"]))
def test_gradients_are_those_of_plain_uses(uses: list[int], frozen: str | None) -> None:
    actual = []
    for shared in (True, False):
        weight = drawn(1, WIDTH, SIZE).requires_grad_(frozen != "weight")
        x = drawn(2, ROWS, SIZE).requires_grad_(frozen != "x")
        loss = loss_of(weight * 2, x, uses, shared)
        if loss.requires_grad:
            loss.backward()
        none = torch.zeros(())
        actual.append([none if t.grad is None else t.grad for t in (weight, x)])
    for gradient, plain in zip(*actual, strict=True):
        left, right = gradient.expand_as(plain), plain.expand_as(gradient)
        assert torch.allclose(left, right, rtol=1e-10, atol=1e-12)


def test_a_graph_may_go_backward_again_in_parts_and_recomputed() -> None:
    weight, x = drawn(1, WIDTH, SIZE).requires_grad_(), drawn(2, ROWS, SIZE)
    shared = Shared(weight)
    first, second = shared.product(x).square().sum(), shared.product(x[:2]).sum()
    (alone,) = torch.autograd.grad(first, weight, retain_graph=True)
    torch.testing.assert_close(alone, 2 * (x @ weight.detach().T).T @ x)
    (both,) = torch.autograd.grad(first + second, weight, retain_graph=True)
    expected = alone + x[:2].sum(0)
    torch.testing.assert_close(both, expected)
    # Somebody who reads the tensor itself takes part.
    (all_three,) = torch.autograd.grad(first + second + shared.tensor.sum(), weight)
    torch.testing.assert_close(all_three, expected + 1)

    # A pass that asks for something else leaves nothing for the next one.
    read = x.clone().requires_grad_()
    shared = Shared(weight)
    loss = shared.product(read).square().sum() + shared.product(x[:2]).sum()
    torch.autograd.grad(loss, read, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, weight), (expected,))

    shared = Shared(weight)
    again = sum(
        checkpoint(lambda y: shared.product(y).square().sum(), x * k, use_reentrant=False)
        for k in (1.0, 2.0)
    )
    (actual,) = torch.autograd.grad(again, weight)
    torch.testing.assert_close(actual, alone * 5)


def test_tensors_become_one_matrix_of_another_dtype() -> None:
    """Each one's gradient is its rows of the matrix's, in its own dtype."""
    parts = [drawn(seed, size, SIZE).float().requires_grad_() for seed, size in ((1, 2), (2, 4))]
    shared = Shared(*parts, dtype=torch.float64)
    assert torch.equal(shared.tensor, torch.cat(parts).double())
    x, weight = drawn(3, ROWS, SIZE), drawn(4, ROWS, 6)
    gradients = torch.autograd.grad((shared.product(x) * weight).sum(), parts)
    assert torch.equal(torch.cat(gradients), (weight.T @ x).float())


def test_selected_rows_have_autograds_gradient() -> None:
    x, index = drawn(1, ROWS, SIZE).requires_grad_(), torch.tensor([5, 0, 3])
    weight = drawn(2, 3, SIZE)
    rows = select_rows(x * 1, index)
    assert torch.equal(rows, x[index])
    actual, expected = (
        torch.autograd.grad((selected * weight).sum(), x) for selected in (rows, x[index])
    )
    assert torch.equal(*actual, *expected)


@pytest.mark.parametrize("whole", [torch.ones(()).expand(ROWS, SIZE), torch.ones(ROWS, SIZE), None])
def test_gradients_of_rows_are_added_to_a_copy(whole: Tensor | None) -> None:
    """Autograd may give the whole's gradient to others, or expand one number."""
    index, rows = torch.tensor([5, 0, 3]), drawn(2, 3, SIZE).float()
    actual = branch_gradient(whole, index, rows, ROWS)
    expected = torch.zeros(ROWS, SIZE) if whole is None else torch.ones(ROWS, SIZE)
    expected[index] += rows
    assert torch.equal(actual, expected)
    assert whole is None or (whole == 1).all()
