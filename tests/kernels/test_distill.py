"""The distillation loss: finite differences; chunks equal all rows at once; real sizes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftlab.kernels.distill import distill, lk_weight
from draftlab.kernels.distill_linear import distill_linear
from draftlab.kernels.distill_plan import plan_rows
from draftlab.kernels.distill_types import Loss, Teacher
from tests.helpers.distill_cases import (
    LOSSES,
    assert_close,
    at_once,
    gradients,
    in_chunks,
    make_case,
)
from tests.helpers.gpu import no_host_sync, on_gpu


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_finite_differences(loss: Loss) -> None:
    case = make_case(5, 3, 11, loss=loss)
    teacher, row = case["teacher"], case["row"]
    z = teacher.to_logits(teacher.last @ teacher.weight.t())[row]

    def losses(hidden: Tensor, lm_head: Tensor) -> Tensor:
        logits = F.linear(hidden, lm_head)
        kl_weight = case["kl_weight"]
        return distill(logits, z, teacher.logsumexp[row], loss=loss, kl_weight=kl_weight).loss

    assert torch.autograd.gradcheck(losses, (case["hidden"], case["lm_head"]))


def test_definitions() -> None:
    """The losses, written down a second time, token by token."""
    case = make_case(1, 1, 6, loss="lk")
    teacher = case["teacher"]
    x = F.linear(case["hidden"], case["lm_head"])[0].tolist()
    z = (teacher.last @ teacher.weight.t())[0].tolist()
    q = [float(torch.tensor(v).exp()) for v in x]
    q = [v / sum(q) for v in q]
    p = [float(torch.tensor(v - float(teacher.logsumexp[0])).exp()) for v in z]
    assert sum(p) < 0.99  # the rest is outside the draft vocabulary
    log = lambda v: float(torch.tensor(v).log())  # noqa: E731
    cross = -sum(a * log(b) for a, b in zip(p, q, strict=True))
    kl = sum(a * log(a / b) for a, b in zip(p, q, strict=True))
    alpha = sum(min(a, b) for a, b in zip(p, q, strict=True))
    kl_weight = float(case["kl_weight"][0])
    expected = {"soft_ce": cross, "lk": kl_weight * kl + (1 - kl_weight) * (1 - alpha)}
    for loss, value in expected.items():
        found = at_once(
            case | {"loss": loss, "kl_weight": case["kl_weight"] if loss == "lk" else None}
        )
        assert found["loss"].item() == pytest.approx(value, abs=1e-5)
        assert float(found["alpha"]) == pytest.approx(alpha, abs=1e-5)
        assert int(found["best"]) == x.index(max(x))


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(1, 35), st.integers(1, 9)),
    height=st.integers(1, 60),
    wanted=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    softcap=st.sampled_from([None, 1.5]),
    seed=st.integers(0, 99),
)
def test_chunks_equal_all_at_once(
    loss: Loss,
    shape: tuple[int, int, int, int],
    height: int,
    wanted: tuple[bool, bool],
    softcap: float | None,
    seed: int,
) -> None:
    case = make_case(*shape, loss=loss, softcap=softcap, scale=0.7, seed=seed)
    case["hidden"].requires_grad_(wanted[0])
    case["lm_head"].requires_grad_(wanted[1])
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
    found = in_chunks(case)
    assert_close(found, at_once(case))
    empty = case["row"] == case["row"][0]
    for name in ("loss", "alpha", "d_hidden"):
        assert not found[name][empty].any()
        assert found[name][~empty].any()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_row_without_weight_leaves_no_trace(loss: Loss) -> None:
    """Not even where it is not finite; a row with a weight shows that it is not."""
    case = make_case(loss=loss)
    kept = torch.arange(23) % 3 > 0
    case["weight"][~kept] = 0
    expected = at_once(case)
    with torch.no_grad():
        case["hidden"][~kept] = float("nan")
        case["hidden"][0, 0] = float("inf")
    found = in_chunks(case)
    assert_close(
        {"total": found["total"], "d_lm_head": found["d_lm_head"]} | EMPTY,
        {"total": expected["total"], "d_lm_head": expected["d_lm_head"]} | EMPTY,
    )
    assert not found["d_hidden"][~kept].any()
    assert torch.allclose(found["d_hidden"][kept], expected["d_hidden"][kept])
    case["weight"][0] = 1
    assert torch.isnan(in_chunks(case)["total"])


EMPTY = {name: torch.zeros(0) for name in ("loss", "alpha", "best")}


def test_lk_weight() -> None:
    """exp(−3 · mean α of the step), no gradient; a step without rows is nobody's."""
    alpha, step = torch.tensor([0.2, 0.4, 0.9]), torch.tensor([0, 0, 2])
    found = lk_weight(alpha, step, 4)
    torch.testing.assert_close(found, (-3 * torch.tensor([0.3, 0.3, 0.9])).exp())


def in_float64(teacher: Teacher) -> Teacher:
    """Return a teacher with the same numbers in float64."""
    names = ("last", "weight", "logsumexp")
    return replace(teacher, **{name: getattr(teacher, name).double() for name in names})


class Largest(TorchDispatchMode):
    """The most elements that an operation gave out."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def test_there_are_never_all_logits() -> None:
    case = make_case(400, 60, 200)
    with Largest() as largest:
        in_chunks(case, height=20)
    assert largest.elements <= max(20 * 200, 400 * 7)  # a chunk of logits, or hidden states
    with Largest() as largest:
        at_once(case)
    assert largest.elements == 400 * 200


def test_what_is_frozen_costs_nothing() -> None:
    """No product for lm_head's gradient when it is frozen, none at all without gradients."""

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.count += func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_")
            return func(*args, **(kwargs or {}))

    def products(case: dict[str, Any]) -> int:
        arguments = {n: v for n, v in case.items() if n != "row"} | {"plan": plan_rows(case["row"])}
        with Products() as counter:
            distill_linear(**arguments)
        return counter.count

    case = make_case()
    assert products(case) == 4
    with torch.no_grad():
        assert products(case) == 2
    case["lm_head"].requires_grad_(False)
    assert products(case) == 3
    case["hidden"].requires_grad_(False)
    assert products(case) == 2


def test_gradients_are_handed_out_once() -> None:
    """They are scaled where they lie, and become a parameter's `.grad` without a copy."""
    case = make_case()
    arguments = {name: value for name, value in case.items() if name != "row"}
    out = distill_linear(**arguments, plan=plan_rows(case["row"]))
    kept = out.total.grad_fn.saved_tensors[1].data_ptr()
    out.total.backward(retain_graph=True)
    assert case["lm_head"].grad.data_ptr() != kept  # the graph still holds them
    with pytest.raises(RuntimeError, match="inplace"):
        out.total.backward()
    case["lm_head"].grad = None
    out = distill_linear(**arguments, plan=plan_rows(case["row"]))
    kept = out.total.grad_fn.saved_tensors[1].data_ptr()
    out.total.backward()
    assert case["lm_head"].grad.data_ptr() == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", LOSSES)
def test_narrow_dtypes(loss: Loss, dtype: torch.dtype) -> None:
    """As far from float64 of the same numbers as all at once is in the same dtype, no farther."""
    case = make_case(300, 40, 70, 33, loss=loss, dtype=dtype)
    found, eager = in_chunks(case, height=4), at_once(case)  # a hundred chunks
    teacher, parameters = case["teacher"], ("hidden", "lm_head")
    case |= {name: case[name].detach().double().requires_grad_() for name in parameters}
    case["teacher"] = in_float64(teacher)
    exact = at_once(case)
    for name in ("loss", "alpha", "d_hidden", "d_lm_head"):
        mine, theirs = ((x[name].detach() - exact[name].detach()).norm() for x in (found, eager))
        # A gradient is rounded once more, since it is scaled by 3 after its product.
        allowed = 1.5 if name.startswith("d_") else 1.01
        assert mine <= allowed * theirs + 1e-6 * exact[name].detach().norm(), name
    for name in ("loss", "alpha", "total"):
        assert found[name].dtype == torch.float32
    assert found["d_hidden"].dtype == found["d_lm_head"].dtype == dtype
    assert torch.equal(found["best"], eager["best"])


def test_autocast_computes_products_in_its_dtype() -> None:
    """As F.linear of float32 parameters does there; lm_head's gradient stays float32."""
    case = make_case(60, 10, 40, 33, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = in_chunks(case), at_once(case)
    assert found["d_lm_head"].dtype == torch.float32
    assert_close(found, {n: v.to(found[n].dtype) for n, v in expected.items()}, 2e-2)
    assert torch.equal(found["best"], expected["best"])
    exact = in_chunks(case)
    assert not torch.equal(found["loss"], exact["loss"])


def test_the_targets_norm() -> None:
    """Is applied to the positions that teach and to no other."""
    seen = []

    def norm(last: Tensor) -> Tensor:
        seen.append(len(last))
        return F.rms_norm(last, last.shape[-1:])

    case = make_case()
    teacher = case["teacher"]
    plain = Teacher(norm(teacher.last), None, teacher.weight, teacher.logsumexp)
    normed = Teacher(teacher.last, norm, teacher.weight, teacher.logsumexp)
    case["row"] = case["row"] // 3 * 3  # three positions of nine
    expected = at_once(case | {"teacher": plain})
    seen.clear()
    assert_close(in_chunks(case | {"teacher": normed}, height=100), expected)
    assert seen == [3]


def test_wrong_arguments() -> None:
    case = make_case()
    arguments = {n: v for n, v in case.items() if n != "row"} | {"plan": plan_rows(case["row"])}
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
    arguments = {name: value for name, value in case.items() if name != "row"}
    arguments["plan"] = plan_rows(case["row"])

    def run() -> dict[str, Tensor]:
        out = distill_linear(**arguments)
        return vars(out) | gradients(case, out.total, 1.0)

    run()  # compiles
    with no_host_sync() if device == "cuda" else nullcontext():
        values = run()
    again = run()
    for name in ("loss", "d_hidden", "d_lm_head"):
        assert torch.equal(values[name], again[name]), name
    eager = at_once(case, 1.0)
    exact = at_once(
        case
        | {name: case[name].detach().double().requires_grad_() for name in ("hidden", "lm_head")}
        | {"teacher": in_float64(case["teacher"])},
        1.0,
    )
    # Products of other shapes round otherwise, where two logits are nearly equal.
    assert (values["best"] == eager["best"]).float().mean() > 0.98
    for name in ("loss", "alpha", "total", "d_hidden", "d_lm_head"):
        error, eager_error = (
            float((each[name].detach() - exact[name].detach()).norm()) for each in (values, eager)
        )
        # Sums over rows in float32 differ in their order.
        assert error <= 1.1 * eager_error + 2e-6 * float(exact[name].detach().norm()), name
