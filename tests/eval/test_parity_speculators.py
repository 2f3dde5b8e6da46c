"""The comparison behind `make parity-speculators`: rows are matched right, faults are found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.eval.drivers import speculators as driver

# Three conversations of 4, 3 and 5 tokens in one row; the library keeps 3 + 2 + 4 rows of them.
DOCUMENTS = torch.tensor([0] * 4 + [1] * 3 + [2] * 5)
KEPT = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9, 10])


def library(num_steps: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_steps, len(KEPT), 5, generator=generator)
    prenorm = torch.randn(num_steps, len(KEPT), 3, generator=generator)
    return {"prenorm": prenorm, "logits": logits, "draft_tokens": logits.argmax(-1)}


def same_steps(values: dict[str, Tensor], rows: Tensor) -> list[driver.Step]:
    at = torch.tensor([KEPT.tolist().index(row) for row in rows.tolist()])
    return [
        driver.Step(rows, p[at].clone(), z[at].clone())
        for p, z in zip(values["prenorm"], values["logits"], strict=True)
    ]


def test_flat_positions_map_to_the_rows_that_shift_batch_keeps() -> None:
    assert driver.library_rows(KEPT, DOCUMENTS).tolist() == list(range(len(KEPT)))


def test_equal_values_have_no_fault_and_a_moved_row_has_one() -> None:
    values, rows = library(), torch.tensor([1, 5, 9])
    worst, same, fault = driver.compare(same_steps(values, rows), values, DOCUMENTS, 1e-5)
    assert (fault, same, worst["logits"].difference) == (None, 1.0, 0.0)
    wrong = [driver.Step(rows - 1, s.prenorm, s.logits) for s in same_steps(values, rows)]
    assert driver.compare(wrong, values, DOCUMENTS, 1e-5)[2]


@pytest.mark.parametrize("name", ["prenorm", "logits"])
@pytest.mark.parametrize("off", [1e-3, float("nan")])
def test_a_fault_names_step_quantity_position_and_conversation(name: str, off: float) -> None:
    values, rows = library(), torch.tensor([1, 5, 9])
    steps = same_steps(values, rows)
    getattr(steps[1], name)[2, 1] += off
    worst, _, fault = driver.compare(steps, values, DOCUMENTS, 1e-5)
    assert fault is not None
    assert fault.startswith(f"step 1, {name}, position 9 of the packed row (conversation 2)")
    assert not worst[name].relative <= 1e-5


def test_rounding_below_the_tolerance_is_equal() -> None:
    values, rows = library(), torch.tensor([0, 4])
    steps = same_steps(values, rows)
    steps[0].logits[0, 0] += 1e-6
    worst, _, fault = driver.compare(steps, values, DOCUMENTS, 1e-5)
    assert fault is None
    assert 0 < worst["logits"].relative < 1e-5


def test_nothing_to_compare_is_no_success() -> None:
    with pytest.raises(ValueError, match="with rows"):
        driver.deviation(torch.zeros(0, 3), torch.zeros(0, 3))


def test_a_head_the_library_did_not_load_whole_is_a_fault() -> None:
    whole = {"tensors": {"missing": [], "unexpected": [], "mismatched": []}}
    assert driver.loading_fault(whole) is None
    assert "fc.weight" in driver.loading_fault(
        {"tensors": {**whole["tensors"], "missing": ["fc.weight"]}}
    )
