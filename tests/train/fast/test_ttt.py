"""The fast unroll has the outputs and gradients of the plain one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftlab.heads.eagle3 import Eagle3Head
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.distillation_module import DistillationModule
from draftlab.train.fast import choose_forward
from draftlab.train.fast import ttt as fast_unroll
from draftlab.train.fast.choose_forward import compiled_ops
from draftlab.train.fast.layers import FUSED_OPS, FusedOps
from draftlab.train.fast.ttt import FastUnroll
from draftlab.train.flops import kept_bytes
from draftlab.train.objectives.loss import DraftTeacher, StepOutput, weighted_loss
from draftlab.train.objectives.ttt import unroll
from draftlab.train.settings import TrainSettings
from tests.helpers.synthetic import assert_same, head, parts, record
from tests.train.objectives.test_chains import EAGLE
from tests.train.objectives.test_ttt import spans_of

OPTIONS: list[dict[str, object]] = [
    {},
    {"qk_norm": True},
    {"norm_before_residual": True},
    {"norm_output": True},
    {"norm_before_fc": True},
    {"fc_norm": True},
]


def batch_of(num_steps: int = 4) -> Batch:
    """Rows of other lengths, one conversation without a prediction, adjacent answers."""
    target = parts()
    turns = [[(3, 6)], [(2, 4), (0, 3)], [(1, 1)], [(4, 9)], [(5, 2)]]
    records = [record(spans_of(each), target, seed) for seed, each in enumerate(turns)]
    return pack([records[:3], records[3:]], 64, num_steps)


def loud(**changes: object) -> Eagle3Head:
    """A head whose norms are not one."""
    made = head(parts(), **changes)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return made


def learnt(model: Eagle3Head, outputs: list[StepOutput], batch: Batch) -> dict[str, Tensor]:
    """Outputs of the steps, and the gradients of a loss on all of them (0 where there is none)."""
    weights = [0.8**k for k in range(len(batch.steps))]
    loss, _ = weighted_loss(outputs, model, DraftTeacher.of(parts(), model), batch, weights)
    model.zero_grad()
    loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    zero = {n: torch.zeros_like(p) for n, p in trained.items()}
    gradients = {n: zero[n] if p.grad is None else p.grad.clone() for n, p in trained.items()}
    return {**gradients, **{f"step {k}": o.output.detach() for k, o in enumerate(outputs)}}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_equal_to_the_plain_unroll(changes: dict[str, object]) -> None:
    model, batch = loud(**changes), batch_of()
    assert FastUnroll.supports(model)
    expected = learnt(model, list(unroll(model, batch)), batch)
    found = learnt(model, FastUnroll(torch.float64)(model, batch), batch)
    assert_same(found, expected)
    again = learnt(model, FastUnroll(torch.float64, recompute=True)(model, batch), batch)
    assert_same(again, found, 0)


def test_recomputed_steps_keep_little() -> None:
    """What the backward pass keeps, beside the weights: as estimated, and little if recomputed."""
    target, model = parts(), head(parts(), intermediate_size=512)
    batch = pack([[record(spans_of([(2, 100)]), target)]], 128, 6)
    rows = sum(len(step.valid_rows) for step in batch.steps)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def kept(recompute: bool) -> int:
        found: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            # Of the layer's length are weights that were stacked; the others belong to rows.
            if storage.data_ptr() not in own and len(tensor) not in (2 * 512, 32, 64, 128):
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = FastUnroll(torch.float32, recompute=recompute)(model, batch)
        assert outputs
        return sum(found.values())

    expected = rows * kept_bytes(model.config, torch.float32)
    assert 0.5 < kept(False) / expected < 1.5
    assert kept(True) < 0.1 * expected


@pytest.mark.usefixtures("float64")
def test_compiled_ops_are_equal_whatever_the_number_of_rows() -> None:
    model = loud(qk_norm=True)
    plain = FastUnroll(torch.float64)
    fast = FastUnroll(torch.float64, ops=compiled_ops("aot_eager"))
    for num_steps in (4, 2, 1):
        batch = batch_of(num_steps)
        expected = learnt(model, plain(model, batch), batch)
        assert_same(learnt(model, fast(model, batch), batch), expected)


def test_in_16_bit_nothing_is_widened() -> None:
    model, batch = loud(), batch_of()
    widths: list[torch.dtype] = []

    def seen(op):
        def call(rows, weights, eps):
            made = op(rows, weights, eps)
            widths.extend(t.dtype for t in (made if isinstance(made, tuple) else (made,)))
            return made

        return call

    fast = FastUnroll(torch.bfloat16, ops=FusedOps(*(seen(op) for op in FUSED_OPS)))
    with torch.autocast("cpu", torch.bfloat16):
        found = learnt(model, fast(model, batch), batch)
    assert set(widths) == {torch.bfloat16}
    assert all(g.dtype == torch.float32 for n, g in found.items() if not n.startswith("step"))
    expected = learnt(model, list(unroll(model, batch)), batch)
    for name, value in expected.items():
        error = (found[name].float() - value).norm() / value.norm()
        assert error < 0.05, name


def test_training_runs_the_fast_unroll(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    call = FastUnroll.__call__

    def seen(self: FastUnroll, *given):
        calls.append(self.recompute)
        return call(self, *given)

    monkeypatch.setattr(FastUnroll, "__call__", seen)
    model, batch = loud(), batch_of()
    for recompute in (False, True):
        settings = TrainSettings(ttt_steps=4, recompute=recompute)
        lesson = DistillationModule(model, DraftTeacher.of(parts(), model), settings, torch.float32)
        lesson(batch, [1.0] * 4)
        assert ("recomputed in the backward pass" in lesson.description) == recompute
    assert calls == [False, True]
    other = head(parts(), **EAGLE)
    settings = TrainSettings(ttt_steps=4, recompute=True, compile=True)
    lesson = DistillationModule(other, DraftTeacher.of(parts(), other), settings, torch.float32)
    lesson(batch, [1.0] * 4)
    assert len(calls) == 2
    assert "train.compile and train.recompute have no effect" in lesson.description


def test_a_compiler_that_fails_or_errs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loud()
    settings = TrainSettings(ttt_steps=4, compile=True)

    def wrong(rows, weights, eps):
        return 2 * FUSED_OPS.queries(rows, weights, eps)

    for ops, reason in (
        (FUSED_OPS._replace(queries=wrong), "compiled and eager steps differ"),
        (FUSED_OPS._replace(queries=None), "TypeError"),
    ):
        monkeypatch.setattr(choose_forward, "compiled_ops", lambda ops=ops: ops)
        objective = model.family.objective()
        chosen, how = choose_forward.choose_forward(model, objective, settings, torch.float32)
        assert chosen.ops == FUSED_OPS
        assert "not compiled" in how
        assert reason in how


def test_other_heads_do_not_fit() -> None:
    assert not FastUnroll.supports(head(parts(), family="peagle"))
    assert not FastUnroll.supports(head(parts(), **EAGLE))


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_whole_as_soon_as_they_can_be(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks reduce what is whole while the backward pass goes on: it must not come at the end.

    What follows attention is last read at step 0, before the backward pass of its attention.
    """
    model, batch, seen = loud(), batch_of(), []
    attention = fast_unroll.ttt_attention

    def watched(query: Tensor, *rest: object) -> Tensor:
        if query.requires_grad:
            query.register_hook(lambda _: seen.append("attention"))
        return attention(query, *rest)

    monkeypatch.setattr(fast_unroll, "ttt_attention", watched)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    learnt(model, FastUnroll(torch.float32, recompute=recompute)(model, batch), batch)
    last = max(number for number, name in enumerate(seen) if name == "attention")
    layer = "layers.0.{}.weight".format
    early = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"}
    assert {"lm_head.weight", *map(layer, early)} <= set(seen[:last])
    assert {"fc.weight", layer("self_attn.q_proj"), layer("self_attn.k_proj")} <= set(seen[last:])
