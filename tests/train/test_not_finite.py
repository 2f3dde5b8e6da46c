"""Numbers that are not finite end a training and reach no checkpoint; so does a full GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.train.distributed.backends import TrainBackend
from draftlab.train.metrics import Window
from tests.helpers.list_store import ListStore
from tests.helpers.toy_training import orthogonal_parts, toy_answer, trained


def train(folder: Path, **settings: Any) -> None:
    """Train on 12 answers."""
    target = orthogonal_parts()
    trained(folder, ListStore([toy_answer(target, i) for i in range(12)]), target, **settings)


@pytest.mark.parametrize("steps", [1, 4])
def test_weights_that_are_not_finite_reach_no_checkpoint(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed from such a checkpoint could not recover."""
    monkeypatch.setattr("draftlab.train.loop.learning_rate", lambda *_: math.inf)
    with pytest.raises(
        UserError, match=r"up to step 1, found weights that are not finite: .*fc\.weight"
    ):
        train(tmp_path, steps=steps, checkpoint_every=1, log_every=8)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_reaches_no_checkpoint(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = TrainBackend.weights

    def weights(self: TrainBackend) -> dict[str, Tensor]:
        found = usual(self)
        found["fc.weight"][-1, 3] = value
        return found

    monkeypatch.setattr(TrainBackend, "weights", weights)
    with pytest.raises(UserError, match=r"weights that are not finite: fc\.weight\n"):
        train(tmp_path, steps=1)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(("factor", "norm"), [(1e25, "inf"), (math.nan, "nan")])
def test_one_gradient_that_is_not_finite_is_noticed(
    factor: float, norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only its norm overflows: clipped by that, its step would change nothing."""
    usual, calls = TrainBackend.backward, []

    def backward(self: TrainBackend, loss: Tensor, anchors: int) -> None:
        calls.append(None)
        usual(self, loss * (factor if len(calls) == 2 else 1.0), anchors)

    monkeypatch.setattr(TrainBackend, "backward", backward)
    with pytest.raises(UserError, match=f"up to step 4, found losses .* gradient of norm {norm}"):
        train(tmp_path, steps=8, log_every=4)


def test_losses_that_are_not_finite_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Window.compute

    def row(self: Window, *arguments: Any, **options: Any) -> dict[str, Any]:
        return usual(self, *arguments, **options) | {"loss": [1.0, math.inf, 1.0]}

    monkeypatch.setattr(Window, "compute", row)
    with pytest.raises(UserError, match=r"losses \[1\.0, inf, 1\.0\]"):
        train(tmp_path, steps=2, log_every=1)


def test_memory_that_runs_out_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backward(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(TrainBackend, "backward", backward)
    with pytest.raises(UserError, match=r"training ran out of GPU memory: .* 2 GiB") as error:
        train(tmp_path, steps=2)
    assert "train.micro_rows" in error.value.do
