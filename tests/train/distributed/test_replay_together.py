"""Two processes that replay drafts (`train.replay`) train the head that one process trains."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from draftlab.train.checkpoint import MOMENTS, WEIGHTS
from tests.helpers.small_run import copy_of_finished, draftlab

SETTINGS = (
    *("train.device=cpu", "train.micro_rows=1", "train.steps=24", "train.row_tokens=64"),
    *("train.ttt_steps=3", "train.checkpoint_every=8", "train.learning_rate=1e-3"),
)
REPLAY = "train.replay={start: 0.25, share: 0.7}"


def train(folder: Path, *arguments: str) -> Path:
    """Train on the store of the finished run, in a copy of it; return the train/ folder."""
    if not folder.exists():
        copy_of_finished(folder)
        for part in ("head", "train", "eval", "export"):
            shutil.rmtree(folder / "runs/small" / part)
            (folder / f"runs/small/stages/{part}.json").unlink(missing_ok=True)
    result = draftlab(folder, "train", "small.yaml", *SETTINGS, *arguments)
    assert result.exit_code == 0, result.output
    return folder / "runs/small/train"


def same(one: Path, two: Path, name: str) -> bool:
    """Return whether two trainings have the same bits in a file of the last checkpoint."""
    tensors = [load_file(path / "checkpoints/step-0000024" / name) for path in (one, two)]
    assert tensors[0].keys() == tensors[1].keys()
    return all(tensor.equal(tensors[1][key]) for key, tensor in tensors[0].items())


@pytest.mark.slow
def test_two_processes_replay_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as this process has it
    # A step has two rows. The sum of two gradients has the same bits in either order.
    one = train(tmp_path / "one", REPLAY)
    two = train(tmp_path / "two", REPLAY, "--gpus", "2")
    assert "training on 2 × cpu, DistributedDataParallel" in capfd.readouterr().err
    assert same(one, two, WEIGHTS)
    assert same(one, two, MOMENTS)
    assert not same(one, train(tmp_path / "without"), WEIGHTS)
    # From a checkpoint behind which drafts are replayed.
    shutil.rmtree(two / "checkpoints/step-0000024")
    shutil.rmtree(two.parent / "head")
    train(tmp_path / "two", REPLAY, "--gpus", "2")
    assert "resuming training after step 16" in capfd.readouterr().err
    assert same(one, two, WEIGHTS)
