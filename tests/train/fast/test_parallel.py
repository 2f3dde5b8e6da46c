"""The fast forward of a parallel head has the outputs and gradients of the reference."""

from __future__ import annotations

import pytest
import torch

from draftlab.heads.peagle import PeagleHead
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.distillation_module import DistillationModule
from draftlab.train.fast import choose_forward
from draftlab.train.fast.choose_forward import compiled_ops
from draftlab.train.fast.layers import FUSED_OPS
from draftlab.train.fast.parallel import FastParallel
from draftlab.train.objectives.loss import DraftTeacher
from draftlab.train.objectives.parallel import parallel_outputs
from draftlab.train.settings import TrainSettings
from tests.helpers.fast_forward import head_with_random_norms, ragged_batch, train_step
from tests.helpers.synthetic import assert_same, head, parts, record, spans_of

OPTIONS: list[dict[str, object]] = [
    {},
    {"num_layers": 2},
    {"num_layers": 3, "qk_norm": True},
    {"norm_before_residual": True, "num_layers": 2},
    {"norm_before_fc": True},
    {"fc_norm": True},
]


def make_masked_head(**changes: object) -> PeagleHead:
    """Make a parallel head with large random norms and mask parameters."""
    model = head_with_random_norms(family="peagle", **changes)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for mask in (model.mask_hidden, model.mask_embedding):
            mask.copy_(torch.randn(mask.shape, generator=generator))
    return model


def masked_tokens(batch: Batch) -> Batch:
    """Return the batch with mask tokens in conversations, which nothing forbids."""
    batch.tokens[:, ::5] = 5
    return batch


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_outputs_and_gradients_equal_the_reference(changes: dict[str, object]) -> None:
    model, batch = make_masked_head(**changes), masked_tokens(ragged_batch())
    assert FastParallel.supports(model)
    expected = train_step(model, list(parallel_outputs(model, batch)), batch)
    found = train_step(model, FastParallel(torch.float64)(model, batch), batch)
    assert_same(found, expected)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("turns", [[(3, 6)], [(2, 3)], [(1, 2)]])
@pytest.mark.parametrize("one_row", [False, True])
def test_few_masked_slots_or_none(turns: list[tuple[int, int]], one_row: bool) -> None:
    """One conversation of 4 predictions, of one, of none at depth 1: one slot is also a row."""
    batch = pack([[record(spans_of(turns), parts())]], 16, 3, one_row=one_row)
    for layers in (1, 2):
        model = make_masked_head(num_layers=layers)
        expected = train_step(model, list(parallel_outputs(model, batch)), batch)
        found = train_step(model, FastParallel(torch.float64)(model, batch), batch)
        assert_same(found, expected)


@pytest.mark.usefixtures("float64")
def test_compiled_ops_are_equal_whatever_the_number_of_rows() -> None:
    model = make_masked_head(qk_norm=True, num_layers=2)
    fast = FastParallel(torch.float64, ops=compiled_ops("aot_eager"))
    for num_steps in (4, 1):
        batch = ragged_batch(num_steps)
        expected = train_step(model, FastParallel(torch.float64)(model, batch), batch)
        assert_same(train_step(model, fast(model, batch), batch), expected)


def test_in_16_bit_it_is_as_near() -> None:
    model, batch = make_masked_head(num_layers=2), ragged_batch()
    expected = train_step(model, list(parallel_outputs(model, batch)), batch)
    with torch.autocast("cpu", torch.bfloat16):
        found = train_step(model, FastParallel(torch.bfloat16)(model, batch), batch)
    for name, value in expected.items():
        assert found[name].dtype == torch.bfloat16 if "step" in name else torch.float32
        error = (found[name].float() - value).norm() / value.norm()
        assert error < 0.05, name


def test_training_runs_it_and_checks_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make_masked_head(num_layers=2), ragged_batch()
    teacher = DraftTeacher.of(parts(), model)
    module = DistillationModule(
        model, teacher, TrainSettings(ttt_steps=4, recompute=True), torch.float32
    )
    assert isinstance(module.head_forward, FastParallel)
    assert (
        module.description
        == "all depths run side by side, train.recompute has no effect on such heads"
    )
    module(batch, [1.0] * 4)

    wrong = FUSED_OPS._replace(
        add_norm=lambda *given: tuple(2 * x for x in FUSED_OPS.add_norm(*given))
    )
    monkeypatch.setattr(choose_forward, "compiled_ops", lambda: wrong)
    module = DistillationModule(
        model, teacher, TrainSettings(ttt_steps=4, compile=True), torch.float32
    )
    assert "compiled and eager steps differ" in module.description
    assert module.head_forward.ops == FUSED_OPS
    monkeypatch.setattr(choose_forward, "compiled_ops", lambda: compiled_ops("aot_eager"))
    module = DistillationModule(
        model, teacher, TrainSettings(ttt_steps=4, compile=True), torch.float32
    )
    assert module.description == "all depths run side by side, small operations are compiled"


def test_other_heads_are_not_supported() -> None:
    assert not FastParallel.supports(head(parts()))
