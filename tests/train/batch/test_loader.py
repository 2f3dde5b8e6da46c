"""Batches reach training in their order, whole, whoever packed them, and faults come along."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from draftlab.progress import Monitor
from draftlab.train import validation as validating
from draftlab.train.batch import packing
from draftlab.train.batch.loader import ahead, feed, in_threads
from draftlab.train.batch.packing import Batch, map_tensors, pack
from draftlab.train.objectives.loss import DraftTeacher
from draftlab.train.profiler import NOT_TRAINING, PhaseTimer
from draftlab.train.token_scores import score
from draftlab.train.validation import validate
from tests.helpers.list_store import ListStore
from tests.helpers.synthetic import family_loss, head, parts, record
from tests.train.objectives.test_ttt import spans_of
from tests.train.test_learning import orthogonal_parts, toy_answer, trained

CPU = torch.device("cpu")


def a_batch(one_row: bool = False) -> Batch:
    target = parts()
    turns = [[(3, 6)], [(2, 4), (0, 3)], [(1, 1)], [(4, 9)]]
    records = [record(spans_of(each), target, seed) for seed, each in enumerate(turns)]
    return pack([records[:2], records[2:]], 64, 3, one_row=one_row)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_order_does_not_depend_on_threads(threads: int) -> None:
    def slow(number: int) -> int:
        time.sleep(0.002 * (number % 3))
        return number

    assert list(in_threads(slow, iter(range(40)), threads)) == list(range(40))
    assert list(ahead(iter(range(10)), 3)) == list(range(10))


def test_no_more_is_made_ahead_than_asked_for() -> None:
    begun: list[int] = []
    made = in_threads(lambda n: begun.append(n) or n, iter(range(1000)), 2)
    assert next(made) == 0
    made.close()
    assert len(begun) <= 6
    assert not [t for t in threading.enumerate() if t.name.startswith("pack")]


def test_a_fault_in_packing_reaches_training() -> None:
    def broken(number: int) -> list[Batch]:
        if number == 2:
            raise ValueError("record 2 is broken")
        return [a_batch()]

    pieces = feed(range(5), broken, CPU)
    assert next(pieces).first
    assert next(pieces).last
    with pytest.raises(ValueError, match="record 2 is broken"):
        next(pieces)


def test_the_pieces_of_a_step_share_its_counts() -> None:
    batch = a_batch()
    first, second = feed([None], lambda _: [batch, batch], CPU)
    assert first.counts == second.counts == tuple(2 * n for n in batch.counts)
    assert (first.first, first.last, second.first, second.last) == (True, False, False, True)


def test_integers_travel_as_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = a_batch()
    gathered = packing._gathered(plain, packing.anywhere)
    moved: list[torch.Tensor] = []
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, *a, **k: moved.append(t) or to(t, *a, **k).clone()
    )
    arrived = gathered.to(CPU)
    assert len(moved) == 4  # integers, features, last states, logsumexp
    found: list[list[torch.Tensor]] = [[], []]
    for each, batch in zip(found, (plain, arrived), strict=True):
        map_tensors(batch, lambda t, each=each: each.append(t) or t)
    assert len(found[0]) > 20
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_one_row_has_the_same_loss_and_no_padding() -> None:
    target, model = parts(), head(parts())
    rows, row = a_batch(), a_batch(one_row=True)
    assert len(row.tokens) == 1
    assert row.counts == rows.counts
    assert all(step.index.numel() == len(step.valid_rows) for step in row.steps)
    assert any(step.index.numel() > len(step.valid_rows) for step in rows.steps)
    expected, found = (family_loss(model, target, batch, gamma=0.8)[0] for batch in (rows, row))
    torch.testing.assert_close(found, expected)


def test_time_is_cut_into_phases() -> None:
    clock = PhaseTimer(CPU)
    clock.start()
    for phase, seconds in (("data", 0.01), ("forward", 0.03), ("data", 0.01), (NOT_TRAINING, 0.02)):
        time.sleep(seconds)
        clock.mark(phase)
    found = clock.read()
    assert found.keys() == {"data", "forward", NOT_TRAINING}
    assert found["data"] >= 0.02
    assert found["forward"] >= 0.03
    assert clock.read() == {}


def test_lines_say_what_training_did(tmp_path: Path) -> None:
    class Lines(Monitor):
        def __init__(self) -> None:
            self.said: list[str] = []
            self.details: list[str] = []

        def say(self, line: str) -> None:
            self.said.append(line)

        def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
            self.details.append(detail)

    import json

    target, monitor = orthogonal_parts(), Lines()
    store = ListStore([toy_answer(target, i) for i in range(40)])
    trained(
        tmp_path, store, target, monitor, steps=7, log_every=2, validate_every=3, checkpoint_every=5
    )
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [row for row in rows if "loss" in row]
    assert [row["step"] for row in logged] == [2, 4, 6, 7]
    for row in logged:
        # Validations and checkpoints lie between some of them, and are no part of the time.
        assert row["phases"].keys() == {"data", "forward", "backward", "optimizer"}
        assert sum(row["phases"].values()) == pytest.approx(1)
        assert 0 < row["loss_tokens_per_s"] < row["tokens_per_s"]
        assert row["loss_tokens_per_s"] < row["predictions_per_s"]
        assert row["mfu"] > 0
        assert row["peak_memory_gib"] > 0.1
    assert "GFLOP a token" in monitor.said[0]
    assert all("dense MFU" in line and "data" in line and "GiB" in line for line in monitor.details)


def test_long_records_are_validated_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [10, 20, 30, 40, 90, 200]
    monkeypatch.setattr(validating, "MOST_TOKENS", 100)
    assert list(validating._groups(range(6), lengths, 3)) == [[0, 1, 2], [3], [4], [5]]
    monkeypatch.undo()
    assert list(validating._groups(range(6), lengths, 4)) == [[0, 1, 2, 3], [4, 5]]


def test_validation_cuts_alpha_by_position() -> None:
    target, model = parts(), head(parts())
    records = [record(spans_of([(250, 20)]), target, seed) for seed in range(3)]
    teacher, store = DraftTeacher.of(target, model), ListStore(records)
    found = validate(model, teacher, store, range(3), num_steps=2)  # type: ignore[arg-type]
    first, second = found.by_position
    assert (first.start, first.stop, second.start, second.stop) == (0, 256, 256, 512)
    # Loss at t = 249 … 267 in step 0, one less in step 1.
    assert (first.rows, second.rows) == ([3 * 7, 3 * 7], [3 * 12, 3 * 11])
    scores = score(model, teacher, pack([[r] for r in records], 300, 2))
    for stretch, at in ((first, slice(0, 256)), (second, slice(256, None))):
        alpha = scores.alpha[:, at].sum((0, 1)) / torch.tensor(stretch.rows)
        assert stretch.alpha == pytest.approx(alpha.tolist(), rel=1e-5)
    line = found.position_line()
    assert line is not None
    assert "below 256" in line
    assert "below 512" in line
    short = [record(spans_of([(3, 20)]), target, seed) for seed in range(3)]
    brief = validate(model, teacher, ListStore(short), range(3), num_steps=2)  # type: ignore[arg-type]
    assert brief.position_line() is None
