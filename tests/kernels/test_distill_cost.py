"""What the distillation loss costs: memory for logits and gradients, and matrix products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftlab.kernels.distill.linear import distill_linear
from tests.helpers.distill_cases import arguments_of, at_once, in_chunks, make_case


class Operations(TorchDispatchMode):
    """The number of matrix products, and the most elements that an operation returned."""

    products = elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def test_there_are_never_all_logits() -> None:
    case = make_case(400, 60, 200)
    with Operations() as in_parts:
        in_chunks(case, height=20)
    assert in_parts.elements <= max(20 * 200, 400 * 7)  # a chunk of logits, or hidden states
    with Operations() as whole:
        at_once(case)
    assert whole.elements == 400 * 200


def test_frozen_parameters_cost_no_product() -> None:
    """No product for lm_head's gradient when it is frozen, none at all without gradients."""
    case = make_case()

    def products() -> int:
        with Operations() as operations:
            distill_linear(**arguments_of(case))
        return operations.products

    assert products() == 4
    with torch.no_grad():
        assert products() == 2
    case["lm_head"].requires_grad_(False)
    assert products() == 3
    case["hidden"].requires_grad_(False)
    assert products() == 2


def test_gradients_are_handed_out_once() -> None:
    """They are scaled where they lie, and become a parameter's `.grad` without a copy."""
    case = make_case()
    out = distill_linear(**arguments_of(case))
    address = out.total.grad_fn.saved_tensors[1].data_ptr()
    out.total.backward(retain_graph=True)
    assert case["lm_head"].grad.data_ptr() != address  # the graph still holds them
    with pytest.raises(RuntimeError, match="inplace"):
        out.total.backward()
    case["lm_head"].grad = None
    out = distill_linear(**arguments_of(case))
    address = out.total.grad_fn.saved_tensors[1].data_ptr()
    out.total.backward()
    assert case["lm_head"].grad.data_ptr() == address
