"""Two processes train as one does: the same losses and weights, whatever wraps the head."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from draftlab.errors import UserError
from draftlab.train.batch.packing import pack
from draftlab.train.checkpoint import trainable
from draftlab.train.distributed.backends import DistillationModule
from draftlab.train.distributed.ranks import (
    Ranks,
    assign_micro_batches,
    check_gpus,
    idle_note,
)
from draftlab.train.objectives.loss import DraftTeacher
from draftlab.train.settings import TrainSettings
from tests.helpers import synthetic
from tests.helpers.rank_program import CUT, DIVERGING, MUON, SIGNALLED, STEPS, train
from tests.helpers.toy_training import orthogonal_parts

PRINTED = {
    "ddp": "DistributedDataParallel",
    "fsdp2": "fully_shard",
    "zero1": "DeepSpeed ZeRO-1",
    "zero2": "DeepSpeed ZeRO-2",
    "zero3": "DeepSpeed ZeRO-3",
}
BEGUN = [
    *(f"{parallel}-eagle3" for parallel in PRINTED),
    "ddp-peagle",
    "fsdp2-peagle",
    "zero3-peagle",
    *(f"{p}-{family}" for p in ("ddp", "fsdp2", "zero3") for family in ("dspark", "dflash2")),
    *(f"{parallel}-eagle3-muon" for parallel in ("ddp", "fsdp2")),
]
RESUMED = [
    *(f"{parallel}-eagle3-resumed" for parallel in PRINTED),
    *(f"{parallel}-eagle3-muon-resumed" for parallel in ("ddp", "fsdp2")),
]


def alone_name(name: str) -> str:
    """Returns the training by one process that a case equals."""
    return name.removesuffix("-resumed").partition("-")[2]


def torchrun(folder: Path, *names: str) -> None:
    """Runs `rank_program` in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "-m", "tests.helpers.rank_program", str(folder), *names]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    errors = [line for line in done.stderr.splitlines() if "[rank" in line]
    assert done.returncode == 0, "\n".join(errors) or done.stderr


def curve(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl but for the closing validation."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What one process makes, by family, with every checkpoint."""
    folder = tmp_path_factory.mktemp("alone")
    names = ("eagle3", "peagle", "dspark", "dflash2", "eagle3-muon")
    for name in names:
        settings = MUON if name.endswith("muon") else {}
        trainer, _ = train(folder / name, name.partition("-")[0], **settings)
        torch.save(trainer.head.state_dict(), folder / name / "result.pt")
    return {name: folder / name for name in names}


@pytest.fixture(scope="module")
def together(alone: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes make, from the start or from the checkpoint of one."""
    folder = tmp_path_factory.mktemp("together")
    for name in RESUMED:
        shutil.copytree(alone[alone_name(name)], folder / name)
        shutil.rmtree(folder / name / "checkpoints" / f"step-{STEPS:07d}")
    torchrun(folder, *DIVERGING, SIGNALLED, *BEGUN, *RESUMED)
    return folder


@pytest.mark.parametrize("name", [*BEGUN, *RESUMED])
def test_two_processes_train_as_one(name: str, alone: dict[str, Path], together: Path) -> None:
    parallel, single = name.split("-")[0], alone[alone_name(name)]
    expected, found = curve(single), curve(together / name)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))  # each written once
    same(found, expected)
    weights = torch.load(single / "result.pt")
    head, lines = torch.load(together / name / "result.pt")
    assert head.keys() == weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(head[key], weight, rtol=1e-4, atol=1e-5, msg=key)
    assert any(f"2 × cpu, {PRINTED[parallel]}" in line for line in lines)
    assert ("resuming training after step 4" in lines) == name.endswith("resumed")


@pytest.mark.parametrize("name", DIVERGING)
def test_gradients_that_are_not_finite_end_the_training(name: str, together: Path) -> None:
    """ZeRO-3 by itself leaves such a step out, and says nothing."""
    for rank in range(2):
        assert "expected finite numbers" in (together / f"{name}-{rank}.txt").read_text()
    assert len(curve(together / name)) < STEPS


def test_a_signal_to_one_rank_ends_all_after_the_same_step(
    alone: dict[str, Path], together: Path
) -> None:
    for rank in range(2):
        text = (together / f"{SIGNALLED}-{rank}.txt").read_text()
        assert text.startswith("143 SIGTERM: a checkpoint of step 6 is written")
    _, monitor = train(together / SIGNALLED)
    assert "resuming training after step 6" in monitor.lines
    same(curve(together / SIGNALLED), curve(alone["eagle3"]))


@pytest.mark.parametrize("parallel", PRINTED)
def test_one_process_goes_on_from_the_checkpoint_of_two(
    parallel: str, alone: dict[str, Path], together: Path, tmp_path: Path
) -> None:
    shutil.copytree(together / f"{parallel}-eagle3", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{STEPS:07d}")
    trainer, heard = train(tmp_path / "run")
    assert f"resuming training after step {CUT}" in heard.lines
    same(curve(tmp_path / "run"), curve(alone["eagle3"]))
    for key, weight in torch.load(alone["eagle3"] / "result.pt").items():
        found = trainer.head.state_dict()[key]
        torch.testing.assert_close(found, weight, rtol=1e-4, atol=1e-5, msg=key)


def test_frozen_parameters_lie_in_no_checkpoint_and_change_on_no_rank(together: Path) -> None:
    expected = orthogonal_parts().embeddings
    for parallel in PRINTED:
        head, _ = torch.load(together / f"{parallel}-eagle3" / "result.pt")
        assert torch.equal(head["embed_tokens.weight"], expected)
        path = together / f"{parallel}-eagle3" / "checkpoints" / f"step-{STEPS:07d}"
        kept = load_file(path / "weights.safetensors")
        assert "lm_head.weight" in kept
        assert "embed_tokens.weight" not in kept


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Whether two curves agree to what another order of sums may change."""
    for one, two in zip(expected, found, strict=True):
        assert two["tokens_seen"] == one["tokens_seen"]
        for field in ("loss", "alpha", "accuracy", "grad_norm"):
            assert two[field] == pytest.approx(one[field], rel=2e-5, abs=1e-6), (field, one["step"])


def ranks(size: int) -> list[Ranks]:
    return [Ranks(rank, size, torch.device("cpu")) for rank in range(size)]


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("micro", [None, 1, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_are_dealt_once_and_evenly(rows: int, micro: int | None, size: int) -> None:
    dealt = [assign_micro_batches(list(range(rows)), micro, each) for each in ranks(size)]
    assert len({len(mine) for mine in dealt}) == 1
    counting = [batch for mine in dealt for batch, idle in mine if not idle]
    assert sorted(row for batch in counting for row in batch) == list(range(rows))
    assert all(len(batch) <= (micro or rows) for batch in counting)
    assert len(dealt[0]) == -(-rows // (size * (micro or rows)))  # passes of a rank
    working = sum(any(not idle for _, idle in mine) for mine in dealt)
    assert working == min(rows, size)
    # The order of the micro-batches is that of one process: rank r has r, r + size, …
    in_turn = [mine[at] for at in range(len(dealt[0])) for mine in dealt]
    assert [row for batch, idle in in_turn if not idle for row in batch] == list(range(rows))


@pytest.mark.parametrize(
    ("rows", "size", "note"),
    [
        (8, 8, None),
        (4, 8, "4 of 8 processes have nothing to do, since a step has 4 rows"),
        (9, 8, "some processes have a row more than others"),
    ],
)
def test_ranks_without_work_are_named(rows: int, size: int, note: str | None) -> None:
    printed = idle_note(rows, size)
    assert printed is None if note is None else printed.startswith(note)


def test_a_pass_without_loss_gives_every_parameter_a_gradient() -> None:
    target = synthetic.parts()
    head = synthetic.head(target)
    distillation = DistillationModule(
        head, DraftTeacher.of(target, head), TrainSettings(ttt_steps=3), torch.float32
    )
    batch = pack([[synthetic.record([0, 0, 1, 0], target)]], 8, 3)
    assert batch.counts == [0, 0, 0]
    loss, sums = distillation(batch, [1.0, 1.0, 1.0])
    loss.backward()
    assert loss.item() == sums.count.sum().item() == 0
    for name, parameter in trainable(head).items():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_more_gpus_than_there_are() -> None:
    with pytest.raises(UserError, match=f"expected {torch.cuda.device_count() + 1} GPUs, found"):
        check_gpus(torch.cuda.device_count() + 1, "auto")
    check_gpus(64, "cpu")


def test_processes_that_were_started_start_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="cannot start more"):
        check_gpus(2, "cpu")


def test_whoever_leaves_has_no_threads_left() -> None:
    """One that still lets go of a tensor while Python exits aborts the process."""

    def gloo() -> int:
        tasks = Path("/proc/self/task").glob("*/comm")
        return sum("gloo" in task.read_text() for task in tasks)

    before = gloo()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    left = Ranks(0, 2, torch.device("cpu"), dist.new_group(backend="gloo"))
    left.all_reduce(torch.ones(3))
    assert gloo() > before
    left.leave()
    assert gloo() == before
