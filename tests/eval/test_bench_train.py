"""The training benchmark runs on a CPU, beside stand-ins of other trainers."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from draftlab.errors import UserError
from draftlab.heads.folder import new_head
from draftlab.train.flops import StepWork, chain_flops
from draftlab.train.metrics import PhaseTimer
from tests.helpers.drivers import load

bench = load("bench/bench_train")
TINY = ["--shape", "tiny", "--device", "cpu", "--precision", "float32"]


@pytest.mark.parametrize(("prompt", "positions"), [("0.3", 44), ("0", 62)])
def test_one_json_line_says_where_the_time_went(
    prompt: str, positions: int, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.main([*TINY, "--repeats", "2", "--warmup", "1", "--prompt", prompt])
    conditions, line = capsys.readouterr().out.splitlines()
    assert "row_tokens 64" in conditions
    row = json.loads(line)
    assert row["phases_ms"].keys() == {"forward", "backward", "optimizer"}
    assert row["tokens_per_s"] == pytest.approx(256e3 / row["step_ms"])
    # 64 positions a row, 19 of them prompt: the last draft of an answer is its last token.
    assert row["predictions"] == [4 * (positions - k) for k in range(4)]


@pytest.mark.parametrize("ratio", ["0.5", "1"])
def test_a_parallel_head_of_some_layers_drops_depths(ratio: str) -> None:
    options = ["--family", "peagle", "--layers", "2", "--cod-ratio", ratio, "--cod-min", "0.3"]
    row = bench.main([*TINY, "--repeats", "1", "--warmup", "1", *options])
    assert row["shape"]["layers"] == 2
    whole = [4 * (44 - k) for k in range(5)]  # one depth more than a chain has steps
    if ratio == "1":
        assert row["predictions"] == whole
    else:
        shares = [a / b for a, b in zip(row["predictions"], whole, strict=True)]
        assert shares == pytest.approx([1, 0.5, 0.3, 0.3, 0.3], abs=0.1)
    assert row["predictions_per_s"] == pytest.approx(sum(row["predictions"]) / row["step_ms"] * 1e3)


def test_a_block_head_trains_sampled_anchors_of_whole_rows() -> None:
    options = ["--family", "dspark", "--layers", "2", "--anchor-share", "0.5"]
    row = bench.main([*TINY, "--repeats", "1", "--warmup", "1", *options])
    assert row["shape"]["draft_vocab"] == row["shape"]["vocab"]
    assert row["predictions"][0] == pytest.approx(0.5 * 2 * 126, rel=0.2)
    assert len(row["predictions"]) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--peer", "specforge"], "expected the module specforge.algorithms.eagle3.model, found"),
        (["--peer", "specforge", "--family", "peagle"], "SpecForge trains chains only"),
    ],
)
def test_a_peer_that_cannot_be_measured_is_refused(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        bench.main([*TINY, "--repeats", "1", "--warmup", "1", *options])


def test_other_trainers_wait_for_the_device_as_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trainer is waited for once in four steps after the warm-up."""
    read, waits, steps = PhaseTimer.read, [], []
    monkeypatch.setattr(PhaseTimer, "read", lambda clock: waits.append(clock) or read(clock))
    weight = torch.nn.Parameter(torch.ones(()))

    def forward() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        steps.append(len(waits))
        return 2 * weight, {}

    peer = SimpleNamespace(
        model=torch.nn.ParameterList([weight]), forward=forward, update=lambda: None
    )
    monkeypatch.setitem(sys.modules["train_peers"].PEERS, "speculators", lambda *_: peer)
    bench.main([*TINY, "--repeats", "2", "--warmup", "1", "--peer", "speculators"])
    assert steps == [2] * 5 + [3] * 4
    assert len(waits) == 2 + 2


def test_dense_formula_is_that_of_the_anchors() -> None:
    with torch.device("meta"):
        head = new_head(sys.modules["train_work"].head_config(bench.SHAPES["8b"]))
    flops = chain_flops(head, StepWork(1, [1] * 7, 1, bench.mean_context([2048])))
    assert flops == pytest.approx(16.5e9, rel=0.003)
    assert bench.matrix_rate(torch.device("cpu"), torch.float32) > 1e8
