"""With train.precision=fp8 outputs and gradients differ from float32's by rounding alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.heads.head import DraftHead
from draftlab.kernels import fp8_linear, fp8_rows
from draftlab.kernels.fp8_linear import Quantise, quantise_weight
from draftlab.train.batch.loader import MicroBatch
from draftlab.train.distributed.backends import DistillationModule, product_dtype
from draftlab.train.fast import choose_forward
from draftlab.train.fast.choose_forward import compiled_ops
from draftlab.train.fast.fused_ops import FP8_OPS
from draftlab.train.fast.layers import LayerWeights
from draftlab.train.loop import Trainer
from draftlab.train.objectives.loss import DraftTeacher
from draftlab.train.settings import TrainSettings
from tests.helpers.gpu import on_devices
from tests.helpers.synthetic import EAGLE, parts, ragged_batch, random_norms_head, train_step
from tests.helpers.toy_training import orthogonal_parts, toy_store, trained

HEADS: list[dict[str, object]] = [
    {},
    {"qk_norm": True, "norm_before_residual": True},
    {"family": "peagle", "num_layers": 2},
    {"family": "dspark", "k_trained": 4, "num_layers": 2},
]


def module(model: DraftHead, **settings: object) -> DistillationModule:
    teacher = DraftTeacher.of(parts(), model)
    chosen = TrainSettings(ttt_steps=4, **{"precision": "fp8", **settings})
    return DistillationModule(model, teacher, chosen, torch.bfloat16)


def step_of(model: DraftHead, **settings: object) -> dict[str, Tensor]:
    """Return the outputs and gradients that training has."""
    batch = ragged_batch()
    return train_step(model, module(model, **settings).head_forward(model, batch), batch)


@on_devices
@pytest.mark.parametrize("changes", HEADS, ids=str)
def test_outputs_and_gradients_are_close_to_float32s(
    changes: dict[str, object], device: str
) -> None:
    model, batch = random_norms_head(**changes), ragged_batch()
    reference = model.family.objective().forward
    exact = train_step(model, list(reference(model, batch)), batch)
    model, batch = model.to(device), batch.to(torch.device(device))
    errors = {}
    for precision in ("bfloat16", "fp8"):
        compiled = device == "cuda" and precision == "fp8"
        fast = module(model, precision=precision, compile=compiled)
        assert ("operations are compiled" in fast.description) == compiled
        actual = train_step(model, fast.head_forward(model, batch), batch)
        for name, value in exact.items():
            error = (actual[name].cpu().float() - value).norm() / value.norm().clamp(min=1e-9)
            errors[precision, name] = float(error)
    for name in exact:
        assert errors["fp8", name] < (0.1 if name.startswith("step") else 0.25), name
    matrices = [n for n in exact if n.startswith("layers") and exact[n].ndim == 2]
    assert len(matrices) >= 7
    for name in (*matrices, "step 1"):
        assert errors["fp8", name] > 2 * errors["bfloat16", name], name


def test_compiled_steps_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_norms_head(**HEADS[1])
    expected = step_of(model)
    traced = partial(compiled_ops, backend="aot_eager")
    monkeypatch.setattr(choose_forward, "compiled_ops", traced)
    monkeypatch.setattr(choose_forward, "_FP8_TOLERANCE", 1e-6)
    compiled = module(model, compile=True)
    assert "small operations are compiled" in compiled.description
    batch = ragged_batch()
    actual = train_step(model, compiled.head_forward(model, batch), batch)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_every_product_of_a_layer_is_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that is not would only make the errors above smaller."""
    shapes: list[tuple[int, ...]] = []
    product = fp8_linear._scaled_product

    def recorded(x: Tensor, codes: Tensor, scale: Tensor, quantise: Quantise) -> Tensor:
        shapes.append(tuple(codes.shape))
        return product(x, codes, scale, quantise)

    model, batch = random_norms_head(family="dspark", k_trained=4), ragged_batch()
    fast = module(model)
    monkeypatch.setattr(fp8_linear, "_scaled_product", recorded)
    train_step(model, fast.head_forward(model, batch), batch)
    weights = LayerWeights(model.layers[0], torch.bfloat16, FP8_OPS)
    expected = []
    for name in ("query", "key_value", "output", "gate_up", "down"):
        shared = getattr(weights, name)
        expected += [tuple(shared.tensor.shape), tuple(shared.tensor.T.shape)]
        for actual, of_cast in zip(shared.matrix, quantise_weight(shared.tensor), strict=True):
            assert torch.equal(actual.float(), of_cast.float())
    assert sorted(shapes) == sorted(expected)


@pytest.mark.parametrize("changes", HEADS[1:], ids=str)
def test_a_trained_lm_head_multiplies_in_8_bits(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits and the gradient of its input, until fp8 ends."""
    of_lm_head: list[bool] = []
    product = fp8_linear._scaled_product

    def recorded(x: Tensor, codes: Tensor, scale: Tensor, quantise: Quantise) -> Tensor:
        of_lm_head.append(quantise is fp8_rows.quantise_rows)
        return product(x, codes, scale, quantise)

    monkeypatch.setattr(fp8_linear, "_scaled_product", recorded)
    model, batch = random_norms_head(**changes), ragged_batch()
    training, is_trained = module(model), model.lm_head.weight.requires_grad
    for in_fp8 in (True, False):
        of_lm_head.clear()
        loss, _ = training(batch, [1.0] * len(batch.steps))
        loss.backward()
        assert sum(of_lm_head) == 2 * (in_fp8 and is_trained)
        assert bool(of_lm_head) == in_fp8
        training.end_fp8()


def test_a_training_says_what_is_in_8_bits() -> None:
    fast = module(random_norms_head())
    assert fast.head_forward.ops == FP8_OPS
    assert "layers' and lm_head's products are in fp8" in fast.description
    frozen = module(random_norms_head(family="dspark", k_trained=4))
    assert "layers' products are in fp8" in frozen.description
    assert "fp8" not in module(random_norms_head(), precision="auto").description
    for unlike in (EAGLE, {"family": "dflash2", "k_trained": 4}):
        other = module(random_norms_head(**unlike))
        assert "train.precision=fp8 means bfloat16 on such heads" in other.description
    assert product_dtype("fp8", torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize(("decay", "switch"), [(1.0, 0), (0.3, 7)])
def test_the_last_steps_are_in_16_bits(
    decay: float, switch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a training that goes on after a checkpoint."""
    in_fp8: list[bool] = []
    accumulate, save = Trainer._accumulate, Trainer.save

    def recorded(trainer: Trainer, micro: MicroBatch) -> None:
        in_fp8.append(trainer.module.head_forward.in_fp8)
        accumulate(trainer, micro)

    def stop(trainer: Trainer) -> None:
        save(trainer)
        trainer.writer.finish()
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_accumulate", recorded)
    monkeypatch.setattr(Trainer, "save", stop)
    settings = {"precision": "fp8", "steps": 10, "decay": decay, "checkpoint_every": 5}
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path, toy_store(), orthogonal_parts(), **settings)
    assert in_fp8 == [number < switch for number in range(10)]


def test_sizes_that_no_gpu_multiplies_are_refused() -> None:
    with pytest.raises(UserError, match=r"multiples of 16, found \[40, 32\]") as caught:
        module(random_norms_head(intermediate_size=40))
    assert caught.value.where == "layers.0.mlp.gate_proj.weight"
    assert "train.precision=bfloat16" in caught.value.do


def test_a_gpu_without_such_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Tensor) -> Tensor:
        raise RuntimeError("torch._scaled_mm is only supported on …")

    monkeypatch.setattr(choose_forward, "linear", refuse)
    with pytest.raises(UserError, match="expects a GPU that multiplies e4m3") as caught:
        module(random_norms_head())
    assert "only supported on" in caught.value.what
