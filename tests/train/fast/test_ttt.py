"""The fast unroll has the outputs and gradients of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftlab.train.batch.packing import pack
from draftlab.train.distillation_module import DistillationModule
from draftlab.train.fast import choose_forward
from draftlab.train.fast import ttt as fast_unroll
from draftlab.train.fast.choose_forward import compiled_ops
from draftlab.train.fast.layers import FUSED_OPS, FusedOps
from draftlab.train.fast.ttt import FastUnroll
from draftlab.train.flops import kept_bytes
from draftlab.train.objectives.loss import DraftTeacher
from draftlab.train.objectives.ttt import unroll
from draftlab.train.settings import TrainSettings
from tests.helpers.fast_forward import EAGLE, head_with_random_norms, ragged_batch, train_step
from tests.helpers.synthetic import assert_same, head, parts, record, spans_of

OPTIONS: list[dict[str, object]] = [
    {},
    {"qk_norm": True},
    {"norm_before_residual": True},
    {"norm_output": True},
    {"norm_before_fc": True},
    {"fc_norm": True},
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_outputs_and_gradients_equal_the_reference(changes: dict[str, object]) -> None:
    model, batch = head_with_random_norms(**changes), ragged_batch()
    assert FastUnroll.supports(model)
    expected = train_step(model, list(unroll(model, batch)), batch)
    found = train_step(model, FastUnroll(torch.float64)(model, batch), batch)
    assert_same(found, expected)
    again = train_step(model, FastUnroll(torch.float64, recompute=True)(model, batch), batch)
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
    model = head_with_random_norms(qk_norm=True)
    plain = FastUnroll(torch.float64)
    fast = FastUnroll(torch.float64, ops=compiled_ops("aot_eager"))
    for num_steps in (4, 2, 1):
        batch = ragged_batch(num_steps)
        expected = train_step(model, plain(model, batch), batch)
        assert_same(train_step(model, fast(model, batch), batch), expected)


def test_in_16_bit_nothing_is_widened() -> None:
    model, batch = head_with_random_norms(), ragged_batch()
    widths: list[torch.dtype] = []

    def seen(op):
        def call(rows, weights, eps):
            made = op(rows, weights, eps)
            widths.extend(t.dtype for t in (made if isinstance(made, tuple) else (made,)))
            return made

        return call

    fast = FastUnroll(torch.bfloat16, ops=FusedOps(*(seen(op) for op in FUSED_OPS)))
    with torch.autocast("cpu", torch.bfloat16):
        found = train_step(model, fast(model, batch), batch)
    assert set(widths) == {torch.bfloat16}
    assert all(g.dtype == torch.float32 for n, g in found.items() if not n.startswith("step"))
    expected = train_step(model, list(unroll(model, batch)), batch)
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
    model, batch = head_with_random_norms(), ragged_batch()
    for recompute in (False, True):
        settings = TrainSettings(ttt_steps=4, recompute=recompute)
        module = DistillationModule(model, DraftTeacher.of(parts(), model), settings, torch.float32)
        module(batch, [1.0] * 4)
        assert ("recomputed in the backward pass" in module.description) == recompute
    assert calls == [False, True]
    other = head(parts(), **EAGLE)
    settings = TrainSettings(ttt_steps=4, recompute=True, compile=True)
    module = DistillationModule(other, DraftTeacher.of(parts(), other), settings, torch.float32)
    module(batch, [1.0] * 4)
    assert len(calls) == 2
    assert "train.compile and train.recompute have no effect" in module.description


def test_failing_or_wrong_compiled_code_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = head_with_random_norms()
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


def test_other_heads_are_not_supported() -> None:
    assert not FastUnroll.supports(head(parts(), family="peagle"))
    assert not FastUnroll.supports(head(parts(), **EAGLE))


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_complete_before_the_backward_pass_ends(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks reduce what is whole while the backward pass goes on: it must not come at the end.

    What follows attention is last read at step 0, before the backward pass of its attention.
    """
    model, batch, seen = head_with_random_norms(), ragged_batch(), []
    attention = fast_unroll.ttt_attention

    def watched(query: Tensor, *rest: object) -> Tensor:
        if query.requires_grad:
            query.register_hook(lambda _: seen.append("attention"))
        return attention(query, *rest)

    monkeypatch.setattr(fast_unroll, "ttt_attention", watched)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    train_step(model, FastUnroll(torch.float32, recompute=recompute)(model, batch), batch)
    last = max(number for number, name in enumerate(seen) if name == "attention")
    layer = "layers.0.{}.weight".format
    early = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.o_proj"}
    assert {"lm_head.weight", *map(layer, early)} <= set(seen[:last])
    assert {"fc.weight", layer("self_attn.q_proj"), layer("self_attn.k_proj")} <= set(seen[last:])
