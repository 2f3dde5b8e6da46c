"""Muon beside torch's own, on the matrices that are its own, and through a resume."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from draftlab.heads.family import get_family
from draftlab.train import optimizer
from draftlab.train.checkpoint import trainable
from draftlab.train.distributed.backends import TrainBackend
from draftlab.train.distributed.ranks import Ranks
from draftlab.train.optimizer import Muon, learning_rate, new_optimizer
from draftlab.train.settings import TrainSettings
from tests.helpers import synthetic
from tests.helpers.rank_program import CUT, MUON, STEPS, train

CPU = torch.device("cpu")


def matrices(seed: int) -> list[Tensor]:
    """Makes a wide, a square and a tall matrix."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((24, 64), (32, 32), (80, 16))]


def test_steps_as_torch_muon() -> None:
    """torch's computes in bfloat16: steps agree to 4 % of their size (2 % found)."""
    own, theirs = ([x.clone().requires_grad_() for x in matrices(0)] for _ in range(2))
    muon = Muon([{"params": own, "muon": True}], lr=1e-2)
    torch_muon = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        before = [x.detach().clone() for x in own]
        for parameters in (own, theirs):
            for parameter, gradient in zip(parameters, matrices(10 + step), strict=True):
                parameter.grad = gradient
        muon.step()
        torch_muon.step()
        for x, y, x0 in zip(own, theirs, before, strict=True):
            assert float((x - y).norm() / (x - x0).norm()) < 0.04
            y.data.copy_(x.data)


def test_matrices_of_one_size_step_as_each_would_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upright ones, small gradients, more than one batch, and one without gradient."""
    monkeypatch.setattr(optimizer, "MAX_BATCH", 2 * 24 * 64)
    generator = torch.Generator().manual_seed(0)
    shapes, scales = ((24, 64), (64, 24), (64, 24), (24, 64), (24, 64)), (1.0, 1e-3, 1e2, 1.0, None)
    own, alone = ([torch.zeros(shape, requires_grad=True) for shape in shapes] for _ in range(2))
    muons = [Muon([{"params": x, "muon": True}], lr=1e-2) for x in (own, *([y] for y in alone))]
    for _ in range(2):
        for x, y, scale in zip(own, alone, scales, strict=True):
            gradient = torch.randn(x.shape, generator=generator)
            x.grad, y.grad = (None if scale is None else scale * gradient for _ in range(2))
        for muon in muons:
            muon.step()
    for x, y, scale in zip(own, alone, scales, strict=True):
        torch.testing.assert_close(x, y)
        assert bool(x.any()) == (scale is not None)


@pytest.mark.parametrize("shape", [(3, 24, 64), (3, 64, 24), (2, 3, 24, 64)])
def test_each_matrix_of_stacked_ones_steps_as_it_would_alone(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(shape, generator=generator)
    gradient *= torch.logspace(-2, 2, len(gradient)).view(-1, *[1] * (len(shape) - 1))
    stacked = torch.zeros(shape, requires_grad=True)
    stacked.grad = gradient.clone()
    alone = [x.clone().requires_grad_() for x in torch.zeros(shape).flatten(0, -3)]
    for matrix, own in zip(alone, gradient.flatten(0, -3), strict=True):
        matrix.grad = own.clone()
    for weights in ([stacked], alone):
        Muon([{"params": weights, "muon": True}], lr=1e-2).step()
    torch.testing.assert_close(stacked.detach().flatten(0, -3), torch.stack(alone).detach())


def test_experts_of_a_family_have_muon_and_its_embeddings_have_adamw() -> None:
    head = get_family("eagle3").new_head(synthetic.config())
    head.experts = torch.nn.Parameter(torch.zeros(3, 8, 16))
    head.gate = torch.nn.Parameter(torch.zeros(16, 1))  # a vector
    head.depths = torch.nn.Embedding(4, 8)
    groups = new_optimizer(head, TrainSettings(optimizer="muon"), CPU)
    of = {id(p): group for group in groups.param_groups for p in group["params"]}
    assert of[id(head.experts)].get("muon")
    assert not of[id(head.depths.weight)].get("muon")
    assert not of[id(head.gate)].get("muon")


SIZES: list[dict[str, int]] = [
    {},
    {"draft_vocab_size": 32},  # the hidden size, and rows of q_proj
    {"draft_vocab_size": 48},  # the intermediate size
    {"vocab_size": 48, "draft_vocab_size": 16},  # the intermediate size, and rows of k_proj
    {"vocab_size": 48, "draft_vocab_size": 48},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("family", ["eagle3", "peagle", "dspark", "dflash", "dflash2"])
def test_matrices_with_a_row_for_each_token_and_vectors_have_adamw(
    family: str, sizes: dict[str, int]
) -> None:
    rows = sizes.get("vocab_size", 64)
    whole = {"draft_vocab_size": rows} if get_family(family).whole_vocabulary else {}
    config = synthetic.config(**{"family": family, "vocab_size": 64, **sizes, **whole})
    head = get_family(family).new_head(config)
    groups = new_optimizer(head, TrainSettings(optimizer="muon"), CPU).param_groups
    steps = {id(p) for group in groups if group.get("muon") for p in group["params"]}
    all_steps = [id(p) for group in groups for p in group["params"]]
    names = {name for name, p in trainable(head).items() if id(p) in steps}
    assert sorted(all_steps) == sorted(id(p) for p in trainable(head).values())
    assert names == {
        name
        for name, p in trainable(head).items()
        if name in ("fc.weight", "candidate_selector.hidden_projection.weight")
        or (name.startswith("layers.") and name.endswith(("proj.weight", "projection.weight")))
    }


def test_gradients_of_all_groups_are_clipped_together() -> None:
    head = get_family("dspark").new_head(synthetic.config(family="dspark"))
    settings = TrainSettings(optimizer="muon", clip=0.5)
    backend = TrainBackend(SimpleNamespace(head=head), settings, Ranks(0, 1, CPU))
    assert len(backend.optimizer.param_groups) == 2
    norms: list[float] = []

    def note_norm(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    backend.optimizer.register_step_pre_hook(note_norm)
    for parameter in trainable(head).values():
        parameter.grad = torch.ones_like(parameter)
    size = sum(parameter.numel() for parameter in trainable(head).values())
    assert float(backend.step(1e-3)) == pytest.approx(size**0.5)
    # AdamW's step, which Muon's calls, may call it again, with the other gradients alone.
    assert norms[0] == pytest.approx(0.5, rel=1e-4)


def test_adamw_has_its_own_learning_rate(tmp_path: Path) -> None:
    """A vector moves by the rate in AdamW's first step, whatever its gradient's size is."""
    settings = {**MUON, "steps": 1, "warmup": 0.0}
    rates = {"same": None, "quarter": MUON["learning_rate"] / 4}
    moved = {}
    for name, rate in rates.items():
        trainer, _ = train(tmp_path / name, **settings | {"adamw_learning_rate": rate})
        moved[name] = trainer.head
    start = torch.ones(())
    for name, weight in trainable(moved["same"]).items():
        other = trainable(moved["quarter"])[name]
        if name.endswith("norm.weight"):
            ratio = float((other - start).norm() / (weight - start).norm())
            assert ratio == pytest.approx(0.25, rel=0.01), name
        else:
            of_muon = name.startswith(("fc.", "layers."))
            assert torch.equal(other, weight) == of_muon, name


def test_a_resumed_training_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "whole", **MUON)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step-{STEPS:07d}")
    resumed, monitor = train(tmp_path / "resumed", **MUON)
    assert f"resuming training after step {CUT}" in monitor.lines
    for key, weight in whole.head.state_dict().items():
        assert torch.equal(resumed.head.state_dict()[key], weight), key
    folder = tmp_path / "whole" / "checkpoints" / f"step-{CUT:07d}"
    kinds = {name.rpartition("/")[2] for name in load_file(folder / "optimizer.safetensors")}
    assert kinds == {"momentum", "exp_avg", "exp_avg_sq", "step"}


def test_deepspeed_splits_matrices() -> None:
    with pytest.raises(ValidationError, match="expected parallel ddp or fsdp2, found zero2"):
        TrainSettings(optimizer="muon", parallel="zero2")


def test_a_rate_of_adamw_beside_muon_needs_muon() -> None:
    with pytest.raises(ValidationError, match="adamw_learning_rate is for optimizer=muon"):
        TrainSettings(adamw_learning_rate=1e-3)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3, 100])
def test_every_training_has_a_step_at_the_peak(steps: int, schedule: str) -> None:
    settings = TrainSettings(steps=steps, schedule=schedule, learning_rate=0.5)
    rates = [learning_rate(step, settings) for step in range(steps)]
    assert max(rates) == 0.5
    if steps > 1:
        assert rates[-1] == pytest.approx(0.5 * settings.final_learning_rate)


def test_the_schedules_rise_and_fall_as_they_say() -> None:
    shared = {"steps": 101, "warmup": 0.046, "learning_rate": 2.0, "final_learning_rate": 0.1}
    cosine = TrainSettings(schedule="cosine", **shared)
    wsd = TrainSettings(schedule="wsd", decay=0.2, **shared)
    for settings in (cosine, wsd):  # 5 steps of warm-up, the last of which has the peak
        rates = [learning_rate(step, settings) for step in range(5)]
        assert rates == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    for step in range(5, 101):
        fallen = (step - 4) / 96
        expected = 0.2 + 1.8 * (1 + math.cos(math.pi * fallen)) / 2
        assert learning_rate(step, cosine) == pytest.approx(expected)
        expected = 0.2 + 1.8 * min(1.0, (100 - step) / 20)  # over the last 20 steps
        assert learning_rate(step, wsd) == pytest.approx(expected)


def test_settings_of_validations_do_not_change_the_head() -> None:
    def identity(**fields: float) -> dict[str, object]:
        return TrainSettings(**{"validate_every": 2, "validation_share": 0.1} | fields).identity()

    assert identity() == identity(validate_every=3) == identity(validation_records=4)
    assert identity() != identity(validation_share=0.2)
