"""The comparison behind `make parity-speculators`: rows are matched right, faults are found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.drivers import load

driver = load("parity/parity_speculators")

# Three conversations of 4, 3 and 5 tokens in one row; the library keeps 3 + 2 + 4 rows of them.
DOCUMENTS = torch.tensor([0] * 4 + [1] * 3 + [2] * 5)
KEPT = torch.tensor([0, 1, 2, 4, 5, 7, 8, 9, 10])


def library(num_steps: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_steps, len(KEPT), 5, generator=generator)
    output = torch.randn(num_steps, len(KEPT), 3, generator=generator)
    return {"output": output, "logits": logits, "draft_tokens": logits.argmax(-1)}


def same_steps(values: dict[str, Tensor], rows: Tensor) -> list[driver.Step]:
    at = torch.tensor([KEPT.tolist().index(row) for row in rows.tolist()])
    return [
        driver.Step(rows, p[at].clone(), z[at].clone())
        for p, z in zip(values["output"], values["logits"], strict=True)
    ]


def test_flat_positions_map_to_the_rows_that_shift_batch_keeps() -> None:
    assert driver.library_rows(KEPT, DOCUMENTS).tolist() == list(range(len(KEPT)))


def test_equal_values_have_no_fault_and_a_moved_row_has_one() -> None:
    values, rows = library(), torch.tensor([1, 5, 9])
    worst, same, fault = driver.compare(same_steps(values, rows), values, DOCUMENTS, 1e-5)
    assert (fault, same, worst["logits"].difference) == (None, 1.0, 0.0)
    wrong = [driver.Step(rows - 1, s.output, s.logits) for s in same_steps(values, rows)]
    assert driver.compare(wrong, values, DOCUMENTS, 1e-5)[2]


@pytest.mark.parametrize("name", ["output", "logits"])
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


def test_elements_stay_in_their_conversation_and_begin_with_every_row() -> None:
    rows = DOCUMENTS[KEPT]  # 3, 2 and 4 rows
    anchors, depths = driver.elements(rows, 3)
    pairs = list(zip(anchors.tolist(), depths.tolist(), strict=True))
    assert pairs == [(a, 0) for a in range(9)] + [
        *[(0, 1), (1, 1), (3, 1), (5, 1), (6, 1), (7, 1)],
        *[(0, 2), (5, 2), (6, 2)],
    ]


def test_elements_are_compared_as_steps_and_one_that_is_not_there_is_a_fault() -> None:
    values, rows = library(), torch.tensor([0, 7])
    anchors, depths = driver.elements(DOCUMENTS[KEPT], 2)
    flat = {name: values[name][depths, anchors][None] for name in values}
    by_depth = driver.by_depth(flat | {"anchor_pos": anchors, "depth": depths}, 2)
    assert driver.compare(same_steps(values, rows), by_depth, DOCUMENTS, 1e-5)[2] is None
    outside = same_steps(values, torch.tensor([0, 10]))  # no depth 1 of a conversation's last row
    fault = driver.compare(outside, by_depth, DOCUMENTS, 1e-5)[2]
    assert fault is not None
    assert fault.startswith("step 1, output, position 10")
