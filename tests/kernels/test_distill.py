"""The distillation loss: finite differences; chunks equal all rows at once; real sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftlab.kernels.distill import Labels, Loss, Teacher, distill, lk_weight
from draftlab.kernels.distill.linear import distill_linear
from draftlab.kernels.distill.plan import plan_rows
from draftlab.kernels.fp8_linear import quantise_rows
from tests.helpers.distill_cases import (
    LOSSES,
    arguments_of,
    assert_close,
    at_once,
    gradients,
    in_chunks,
    make_case,
)
from tests.helpers.gpu import no_host_sync, on_devices, on_gpu


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_finite_differences(loss: Loss) -> None:
    case = make_case(5, 3, 11, loss=loss)
    teacher, row = case["teacher"], case["row"]
    z = teacher.to_logits(teacher.last @ teacher.weight.t())[row]

    def losses(hidden: Tensor, lm_head: Tensor) -> Tensor:
        logits = F.linear(hidden, lm_head)
        options = {name: case[name] for name in ("loss", "kl_weight", "labels")}
        return distill(logits, z, teacher.logsumexp[row], **options).loss

    assert torch.autograd.gradcheck(losses, (case["hidden"], case["lm_head"]))


def dequantised(x: Tensor) -> Tensor:
    codes, scales = quantise_rows(x)
    return codes.double() * scales.double()


@on_devices
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("vocab", [32, 37])
def test_in_fp8_two_products_are_those_of_the_codes(loss: Loss, vocab: int, device: str) -> None:
    """lm_head's gradient is a product of numbers that are not rounded to 8 bits."""
    case = make_case(40, 9, vocab, 16, loss=loss, dtype=torch.float32, device=device)
    with torch.no_grad():
        case["hidden"][3] = torch.nan  # a row without weight reaches no gradient
        case["weight"][3] = 0
    out = distill_linear(**arguments_of(case), fp8=True, buffer_bytes=6 * 48 * 4)
    actual = vars(out) | gradients(case, out.total, 1.0)

    hidden, lm_head = case["hidden"].detach(), case["lm_head"].detach()
    teacher, row = case["teacher"], case["row"]
    options = {name: case[name] for name in ("loss", "kl_weight", "labels")}
    logits = (dequantised(hidden) @ dequantised(lm_head).T).float().requires_grad_()
    z = teacher.to_logits(teacher.last @ teacher.weight.t())[row]
    expected = distill(logits, z, teacher.logsumexp[row], **options)
    total = (case["weight"] * expected.loss)[case["weight"] != 0].sum()
    (gradient,) = torch.autograd.grad(total, logits)
    gradient[3], hidden[3] = 0, 0
    products = {
        "d_hidden": dequantised(gradient) @ dequantised(lm_head.T.contiguous()).T,
        "d_lm_head": gradient.double().T @ hidden.double(),
    }
    has_weight = case["weight"] != 0
    # A GPU adds up products of codes with fewer bits (`fp8_linear`).
    bound = 1e-5 if device == "cpu" else 1e-3
    assert float((out.total - total).detach().abs() / total.detach().abs()) < bound
    torch.testing.assert_close(
        out.alpha[has_weight], expected.alpha[has_weight], rtol=bound, atol=bound
    )
    for name, product in products.items():
        # A code may be the next one where the gradient's last bits differ.
        error = float((actual[name].double() - product).norm() / product.norm())
        assert error < (bound if name == "d_lm_head" else bound + 2e-3), name
    exact = vars(plain := distill_linear(**arguments_of(case))) | gradients(case, plain.total, 1.0)
    for name in products:
        error = float((actual[name] - exact[name]).norm() / exact[name].norm())
        assert 1e-3 < error < 0.2, name


def test_definitions() -> None:
    """The losses, written down a second time, token by token."""
    case = make_case(1, 1, 6, loss="lk")
    teacher = case["teacher"]
    x = F.linear(case["hidden"], case["lm_head"])[0].tolist()
    z = (teacher.last @ teacher.weight.t())[0].tolist()
    q = [math.exp(v) / sum(map(math.exp, x)) for v in x]
    p = [math.exp(v - float(teacher.logsumexp[0])) for v in z]
    assert sum(p) < 0.99  # the rest is outside the draft vocabulary
    cross = -sum(a * math.log(b) for a, b in zip(p, q, strict=True))
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    alpha = sum(min(a, b) for a, b in zip(p, q, strict=True))
    kl_weight = float(case["kl_weight"][0])
    expected = {"soft_ce": cross, "lk": kl_weight * kl + (1 - kl_weight) * (1 - alpha)}
    label, outside = (Labels(torch.tensor([i]), 0.3, 0.7) for i in (4, -1))
    l1 = sum(abs(a - b) for a, b in zip(p, q, strict=True)) + 1 - sum(p)
    hard = -0.3 * math.log(q[4])
    for loss, labels, value in (
        *((loss, None, value) for loss, value in expected.items()),
        ("ce_l1", label, hard + 0.7 * l1),
        ("ce_l1", outside, 0.7 * l1),
    ):
        values = at_once(
            case
            | {"loss": loss, "labels": labels}
            | {"kl_weight": case["kl_weight"] if loss == "lk" else None}
        )
        assert values["loss"].item() == pytest.approx(value, abs=1e-5)
        assert float(values["alpha"]) == pytest.approx(alpha, abs=1e-5)
        assert int(values["best"]) == x.index(max(x))


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(1, 35), st.integers(1, 9)),
    height=st.integers(1, 60),
    requires_grad=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    softcap=st.sampled_from([None, 1.5]),
    seed=st.integers(0, 99),
)
def test_chunks_equal_all_at_once(
    loss: Loss,
    shape: tuple[int, int, int, int],
    height: int,
    requires_grad: tuple[bool, bool],
    softcap: float | None,
    seed: int,
) -> None:
    case = make_case(*shape, loss=loss, softcap=softcap, scale=0.7, seed=seed)
    case["hidden"].requires_grad_(requires_grad[0])
    case["lm_head"].requires_grad_(requires_grad[1])
    if seed % 3 == 0:
        case["weight"][::2] = 0
    assert_close(in_chunks(case, height), at_once(case))


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.integers(0, 25), max_size=60),
    height=st.integers(-1, 70),
)
def test_plan(rows: list[int], height: int) -> None:
    """Every row once, with its own teacher among the chunk's, within the height; few chunks."""
    plan = plan_rows(torch.tensor(rows, dtype=torch.int64))
    chunks = plan.chunks(height)
    assert sorted(plan.order.tolist()) == list(range(len(rows)))
    assert [c.rows.start for c in chunks] == [0, *(c.rows.stop for c in chunks)][:-1]
    assert (chunks[-1].rows.stop if chunks else 0) == len(rows)
    for chunk in chunks:
        assert chunk.num_rows + chunk.num_teachers <= max(2, height)
        assert chunk.num_rows >= 1
        teachers = plan.positions[chunk.teachers].tolist()
        places = plan.teacher_index[chunk.rows].tolist()
        assert (places[0], places[-1]) == (chunk.teachers.start, chunk.teachers.stop - 1)
        for row, place in zip(plan.order[chunk.rows].tolist(), places, strict=True):
            assert teachers[place - chunk.teachers.start] == rows[row]
    lines = len(rows) + len(set(rows))
    assert len(chunks) <= -(-lines // (max(2, height) - 1))


def test_rows_without_mass_in_the_draft_vocabulary() -> None:
    """There the loss is 0, no token is expected to be accepted and nothing is learnt."""
    case = make_case(12, 4)
    teacher = case["teacher"]
    far = teacher.logsumexp.clone()
    far[case["row"][0]] = 1e4
    case["teacher"] = Teacher(teacher.last, None, teacher.weight, far)
    values = in_chunks(case)
    assert_close(values, at_once(case))
    empty = case["row"] == case["row"][0]
    for name in ("loss", "alpha", "d_hidden"):
        assert not values[name][empty].any()
        assert values[name][~empty].any()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_row_without_weight_leaves_no_trace(loss: Loss) -> None:
    """Not even where it is not finite; a row with a weight shows that it is not."""
    case = make_case(loss=loss)
    weighted = torch.arange(23) % 3 > 0
    case["weight"][~weighted] = 0
    expected = at_once(case)
    with torch.no_grad():
        case["hidden"][~weighted] = float("nan")
        case["hidden"][0, 0] = float("inf")
    values = in_chunks(case)
    assert not values["d_hidden"][~weighted].any()
    for name in ("total", "d_lm_head", "d_hidden"):
        rows = weighted if name == "d_hidden" else ...
        assert torch.allclose(values[name][rows], expected[name][rows])
    case["weight"][0] = 1
    assert torch.isnan(in_chunks(case)["total"])


def test_lk_weight() -> None:
    """exp(−3 · mean α of the step); a step without rows has the mean of all."""
    alpha, step = torch.tensor([0.2, 0.4, 0.9]), torch.tensor([0, 0, 2])
    weight = lk_weight(alpha, step, 4)
    torch.testing.assert_close(weight, (-3 * torch.tensor([0.3, 0.5, 0.9, 0.5])).exp())


@pytest.mark.parametrize("most", [1000, 40, 11, 1])
def test_a_thinned_plan_has_the_rows_of_every_nth_teacher(most: int) -> None:
    """α of its rows is that of the whole plan's."""
    case = arguments_of(make_case(300, 100, 70, 33))
    plan = case["plan"]
    rows, some = plan.thinned(most)
    every = max(1, len(plan.positions) // most)
    teachers = torch.empty(300, dtype=torch.int64)
    teachers[plan.order] = plan.teacher_index
    kept = torch.arange(300)[rows].sort().values
    assert kept.tolist() == (teachers % every == 0).nonzero()[:, 0].tolist()
    whole = distill_linear(**case)
    inputs = {name: case[name][rows] for name in ("hidden", "weight")}
    part = distill_linear(**case | inputs | {"plan": some}, buffer_bytes=20_000)
    torch.testing.assert_close(part.alpha, whole.alpha[rows])


def in_float64(case: dict[str, Any]) -> dict[str, Any]:
    """Return a case of the same numbers in float64."""
    teacher = case["teacher"]
    fields = {name: getattr(teacher, name).double() for name in ("last", "weight", "logsumexp")}
    wide = {n: case[n].detach().double().requires_grad_() for n in ("hidden", "lm_head")}
    return case | wide | {"teacher": replace(teacher, **fields)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", LOSSES)
def test_narrow_dtypes(loss: Loss, dtype: torch.dtype) -> None:
    """As far from float64 of the same numbers as all at once is in the same dtype, no farther."""
    case = make_case(300, 40, 70, 33, loss=loss, dtype=dtype)
    values, eager = in_chunks(case, height=4), at_once(case)  # a hundred chunks
    # A gradient is rounded once more, since it is scaled by 3 after its product.
    names = {"loss": 1.01, "alpha": 1.01, "d_hidden": 1.5, "d_lm_head": 1.5}
    assert_no_farther(values, eager, at_once(in_float64(case)), names, 1e-6)
    for name in ("loss", "alpha", "total"):
        assert values[name].dtype == torch.float32
    assert values["d_hidden"].dtype == values["d_lm_head"].dtype == dtype
    assert torch.equal(values["best"], eager["best"])


def assert_no_farther(
    values: dict[str, Tensor],
    eager: dict[str, Tensor],
    exact: dict[str, Tensor],
    factors: dict[str, float],
    rounding: float,
) -> None:
    """Assert that each error is at most a factor of the eager one, and a share of the norm more."""
    for name, factor in factors.items():
        expected = exact[name].detach()
        error, eager_error = ((v[name].detach() - expected).norm() for v in (values, eager))
        assert error <= factor * eager_error + rounding * expected.norm(), name


def test_autocast_computes_products_in_its_dtype() -> None:
    """As F.linear of float32 parameters does there; lm_head's gradient stays float32."""
    case = make_case(60, 10, 40, 33, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        values, expected = in_chunks(case), at_once(case)
    assert values["d_lm_head"].dtype == torch.float32
    assert_close(values, {n: v.to(values[n].dtype) for n, v in expected.items()}, 2e-2)
    assert torch.equal(values["best"], expected["best"])
    exact = in_chunks(case)
    assert not torch.equal(values["loss"], exact["loss"])


def test_the_targets_norm() -> None:
    """Is applied to the positions that teach and to no other."""
    lengths = []

    def norm(last: Tensor) -> Tensor:
        lengths.append(len(last))
        return F.rms_norm(last, last.shape[-1:])

    case = make_case()
    teacher = case["teacher"]
    plain = Teacher(norm(teacher.last), None, teacher.weight, teacher.logsumexp)
    normed = Teacher(teacher.last, norm, teacher.weight, teacher.logsumexp)
    case["row"] = case["row"] // 3 * 3  # three positions of nine
    expected = at_once(case | {"teacher": plain})
    lengths.clear()
    assert_close(in_chunks(case | {"teacher": normed}, height=100), expected)
    assert lengths == [3]


def test_wrong_arguments() -> None:
    case = make_case()
    arguments = arguments_of(case)
    for name, wrong in (
        ("hidden", case["hidden"][:, 1:]),
        ("weight", case["weight"][1:]),
        ("lm_head", case["lm_head"][1:]),
        ("plan", plan_rows(case["row"][1:])),
        ("loss", "lk"),
        ("kl_weight", case["weight"]),
    ):
        with pytest.raises(ValueError, match="expected"):
            distill_linear(**(arguments | {name: wrong}))
    with pytest.raises(ValueError, match="kl_weight"):
        distill(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1), loss="lk")


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


@on_gpu
@pytest.mark.parametrize(
    ("dtype", "loss", "vocab", "softcap"),
    [
        (torch.bfloat16, "soft_ce", 32_003, None),
        (torch.bfloat16, "lk", 1000, None),
        (torch.bfloat16, "lk", 4096, 30.0),
        (torch.float16, "soft_ce", 5000, None),
        (torch.float32, "soft_ce", 999, None),
        (torch.float32, "lk", 2500, None),
    ],
    ids=str,
)
def test_kernel_at_real_sizes(
    dtype: torch.dtype, loss: Loss, vocab: int, softcap: float | None, device: str
) -> None:
    """No farther from float64 than the eager loss; equal bits in a second run; no host waits."""
    sizes = {"loss": loss, "softcap": softcap, "device": device}
    case = make_case(700, 100, vocab, 257, 257, **sizes, dtype=dtype)
    case["weight"] = torch.rand(700, device=device) / 700
    arguments = arguments_of(case)

    def run() -> dict[str, Tensor]:
        out = distill_linear(**arguments)
        return vars(out) | gradients(case, out.total, 1.0)

    run()  # compiles
    with no_host_sync():
        values = run()
    again = run()
    for name in ("loss", "d_hidden", "d_lm_head"):
        assert torch.equal(values[name], again[name]), name
    eager, exact = at_once(case, 1.0), at_once(in_float64(case), 1.0)
    # Products of other shapes round otherwise, where two logits are nearly equal.
    assert (values["best"] == eager["best"]).float().mean() > 0.98
    # Sums over rows in float32 differ in their order.
    names = ("loss", "alpha", "total", "d_hidden", "d_lm_head")
    assert_no_farther(values, eager, exact, dict.fromkeys(names, 1.1), 2e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_frozen_columns_are_part_of_the_product_without_a_gradient(loss: Loss) -> None:
    """[hidden · frozenᵀ] + [rest · lm_headᵀ] as one product; also without trained columns."""
    case = make_case(17, 5, 23, size=9, loss=loss)
    for columns in (4, 9):
        frozen, trained = case["lm_head"].detach().split([columns, 9 - columns], 1)
        trained = trained.clone().requires_grad_()
        parts = arguments_of(case) | {"lm_head": trained, "frozen": frozen}
        actual = distill_linear(**parts, buffer_bytes=2000)
        expected = at_once(case)
        torch.testing.assert_close(actual.loss, expected["loss"].detach())
        torch.testing.assert_close(actual.total.detach(), expected["total"].detach())
        d_hidden, d_trained = torch.autograd.grad(3 * actual.total, (case["hidden"], trained))
        torch.testing.assert_close(d_hidden, expected["d_hidden"])
        torch.testing.assert_close(d_trained, expected["d_lm_head"][:, columns:])
