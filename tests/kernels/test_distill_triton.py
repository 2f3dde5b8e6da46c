"""The distillation kernel: in Triton's interpreter equal to the reference; compiled for an H200."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftlab.kernels.distill import Distilled, Labels, Loss, Teacher, distill_rows
from draftlab.kernels.distill import linear as distill_linear
from draftlab.kernels.distill.plan import plan_rows
from tests.helpers.distill_cases import LOSSES, in_chunks, make_case
from tests.helpers.interpreter import compiles, inside, interpreter_test

test_in_the_interpreter = interpreter_test(__file__)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set several tiles a row, for a vocabulary of a hundred."""
    from draftlab.kernels.distill import triton as distill_triton

    monkeypatch.setattr(distill_triton, "TILE", 32)


def distill_all(case: dict[str, Any], kernel: bool, gradients: bool = True) -> dict[str, Tensor]:
    """Return losses and gradients of all rows as one chunk, by the kernel or its reference."""
    plan, teacher = plan_rows(case["row"]), case["teacher"]
    vocab = len(case["lm_head"])
    pitch = -(-vocab // 16) * 16
    buffers = []
    for left, right in (
        (case["hidden"].detach()[plan.order], case["lm_head"].detach()),
        (teacher.last[plan.positions], teacher.weight),
    ):
        buffer = torch.full((len(left), pitch), float("nan"), dtype=left.dtype)
        buffers.append(buffer)
        buffer[:, :vocab] = left @ right.t()
    num_rows = len(plan.order)
    out = Distilled(*torch.full((2, num_rows), -7.0), torch.full((num_rows,), -7))
    run = distill_rows.triton if kernel else distill_rows.reference
    logits, z = (buffer[:, :vocab] for buffer in buffers)
    run(logits, z, slice(0, num_rows), plan, teacher, case["weight"], case["kl_weight"],
        case["labels"], case["loss"], gradients, out)  # fmt: skip
    return vars(out) | {"logits": logits}


def close(actual: dict[str, Tensor], expected: dict[str, Tensor], gradient: float) -> None:
    for name, tolerance in (("loss", 1e-5), ("alpha", 2e-6), ("logits", gradient)):
        torch.testing.assert_close(actual[name], expected[name], atol=tolerance, rtol=tolerance)
    assert torch.equal(actual["best"], expected["best"])


@inside
@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=12, deadline=None)
@given(
    num_rows=st.integers(1, 9),
    positions=st.integers(1, 5),
    vocab=st.sampled_from([1, 2, 31, 32, 33, 64, 100]),
    softcap=st.sampled_from([None, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 99),
)
def test_kernel_equals_reference(
    loss: Loss,
    num_rows: int,
    positions: int,
    vocab: int,
    softcap: float | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    from draftlab.kernels.distill import triton as distill_triton

    case = make_case(
        num_rows, positions, vocab, loss=loss, softcap=softcap, scale=0.8, dtype=dtype, seed=seed
    )
    case["weight"][::3] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill_triton, "TILE", 32)
        actual = distill_all(case, kernel=True)
    close(actual, distill_all(case, kernel=False), 2e-6 if dtype == torch.float32 else 2e-3)


@inside
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("loss", LOSSES)
def test_hard_rows(loss: Loss) -> None:
    """Ties of the largest logit, ties of p and q, logits far apart, no mass, a row that is NaN."""
    case = make_case(6, 6, 70, loss=loss, dtype=torch.float32)
    case["row"] = torch.arange(6)
    teacher = case["teacher"]
    logsumexp = (teacher.last @ teacher.weight.t()).logsumexp(-1)
    logsumexp[5] = 1e4  # nothing of it in the draft vocabulary
    case["teacher"] = Teacher(teacher.last, None, teacher.weight, logsumexp)
    rows = case["hidden"].detach() @ case["lm_head"].detach().t()
    rows[0] = rows[0].round()
    rows[1] = 0.5  # every token is the largest
    rows[2] = (teacher.last @ teacher.weight.t())[2]
    rows[3] *= 300
    rows[4, 69] = 50
    case["lm_head"], case["hidden"] = torch.eye(70), rows
    actual, expected = distill_all(case, kernel=True), distill_all(case, kernel=False)
    # Whether p and q are equal, to the last bit, is a matter of rounding where they nearly are.
    ties = actual["logits"][2].clone(), expected["logits"][2].clone()
    actual["logits"][2], expected["logits"][2] = 0, 0
    close(actual, expected, 3e-6)
    factor = 1.4 if loss == "ce_l1" else 1.0  # of 1 − α
    torch.testing.assert_close(*ties, atol=0.02 * factor, rtol=0)
    assert int(actual["best"][1]) == 0
    rows[0, 40] = float("nan")
    assert torch.isnan(distill_all(case, kernel=True)["loss"][0])
    case["weight"][0] = 0
    assert not distill_all(case, kernel=True)["logits"][0].any()


@inside
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("loss", LOSSES)
def test_in_chunks(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """`distill_linear` on the kernel equals itself on the reference, gradients and all."""
    case = make_case(30, 8, 50, loss=loss, dtype=torch.float32)
    expected = in_chunks(case, height=11)
    monkeypatch.setattr(distill_linear, "distill_rows", distill_rows.triton)
    actual = in_chunks(case, height=11)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        plain = {name: case[name].detach() for name in ("hidden", "lm_head")}
        without = in_chunks(case | plain, height=11)
    for name in ("loss", "alpha", "best", "total"):
        torch.testing.assert_close(without[name], actual[name].detach(), atol=1e-6, rtol=1e-6)


@inside
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("labels", [-1, 3, None])  # of all rows; None: different ones
def test_a_product_with_frozen_columns(labels: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a DSpark head has it, with a row of weight 0 that is NaN."""
    case = make_case(30, 8, 50, size=9, loss="ce_l1", dtype=torch.float32)
    if labels is not None:
        case["labels"] = replace(case["labels"], ids=torch.full((30,), labels))
    case["weight"][7] = 0
    with torch.no_grad():
        case["hidden"][7] = float("nan")
    frozen, trained = case["lm_head"].detach().split([6, 3], 1)
    case |= {"frozen": frozen.contiguous(), "lm_head": trained.clone().requires_grad_()}
    expected = in_chunks(case, height=11)
    monkeypatch.setattr(distill_linear, "distill_rows", distill_rows.triton)
    actual = in_chunks(case, height=11)
    assert expected["d_lm_head"].shape == (50, 3)
    assert expected["loss"].isnan().nonzero().tolist() == [[7]]
    for name, value in expected.items():
        if name.startswith("d_") or name == "total":
            assert actual[name].isfinite().all(), name
        if name in ("alpha", "best"):  # without a meaning where logits are NaN
            value[7] = actual[name][7]
        torch.testing.assert_close(actual[name], value, atol=1e-5, rtol=1e-5, equal_nan=True)


@inside
@pytest.mark.parametrize("vocab", [2049, 4100])
def test_tiles_of_the_size_that_runs(vocab: int) -> None:
    case = make_case(3, 2, vocab, dtype=torch.float32)
    close(distill_all(case, kernel=True), distill_all(case, kernel=False), 2e-6)
    without = distill_all(case, kernel=True, gradients=False)
    logits = case["hidden"].detach()[plan_rows(case["row"]).order] @ case["lm_head"].detach().t()
    torch.testing.assert_close(without["logits"], logits)  # left as they are


@compiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("loss", LOSSES)
def test_compiles(loss: Loss, dtype: torch.dtype) -> None:
    """One variant for every chunk, wherever it starts; wide loads; no registers spilled."""
    pytest.importorskip("triton")
    from tests.helpers.hopper import compiled, on_gpu

    rows, vocab, pitch = 3000, 32_003, 32_016
    reals = {"dtype": torch.float32}
    for softcap, gradients in ((None, True), (30.0, True), (None, False)):
        teacher = Teacher(on_gpu(9, 8), None, on_gpu(8, 8), on_gpu(9, **reals), 1.0, softcap)
        plan = plan_rows(torch.zeros(rows, dtype=torch.int64))
        out = Distilled(on_gpu(rows, **reals), on_gpu(rows, **reals), on_gpu(rows).long())
        kl_weight = on_gpu(rows, **reals) if loss == "lk" else None
        labels = Labels(on_gpu(rows).long(), 0.1, 0.9) if loss == "ce_l1" else None
        logits, z = (on_gpu(4, pitch, dtype=dtype)[:, :vocab] for _ in range(2))
        with compiled() as kernels:
            for start in (0, 1, 17, 1600):
                rows_slice = slice(start, start + 4)
                distill_rows.triton(logits, z, rows_slice, plan, teacher, on_gpu(rows, **reals),
                                    kl_weight, labels, loss, gradients, out)  # fmt: skip
        variants = kernels["distill_kernel"]
        assert len({kernel.hash for kernel in variants}) == 1
        kernel = variants[0]
        assert len(kernel.asm["cubin"]) > 0
        ptx = kernel.asm["ptx"]
        assert re.search(r"ld\.global\S*\.v4\.b32", ptx)
        assert not re.search(r"ld\.global\S*\.(b16|f16|bf16)", ptx)
        # Gradients leave by 16 bytes, too.
        assert bool(re.search(r"st\.global\S*\.v4", ptx)) == gradients
        assert ".local" not in ptx
