"""A step as one CUDA graph: batches padded to fixed sizes have the same loss and gradients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftlab.kernels.distill.plan import plan_rows
from draftlab.store.store import Record
from draftlab.train import loop, step_graph
from draftlab.train.batch import fixed_sizes
from draftlab.train.batch.fixed_sizes import FixedSizes
from draftlab.train.batch.loss_rows import joint_reach
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.distributed.backends import DistillationModule
from draftlab.train.loop import Trainer
from draftlab.train.objectives import loss as loss_module
from draftlab.train.objectives.loss import DraftTeacher, Sums
from draftlab.train.settings import TrainSettings
from draftlab.train.step_graph import StepGraph
from tests.helpers.gpu import relative_error
from tests.helpers.list_store import ListStore
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import InterruptingMonitor
from tests.helpers.synthetic import EAGLE, assert_same, parts, random_norms_head, record, spans_of
from tests.helpers.toy_training import (
    assert_same_weights,
    orthogonal_parts,
    toy_answer,
    toy_store,
    trained,
)

STEPS, POSITIONS = 3, 300
WEIGHTS = [0.8**k for k in range(STEPS)]


def conversations(seed: int, tokens: int = 250) -> list[Record]:
    """Make conversations of one to three turns; states without teacher have no log Σ exp."""
    random, target, records = np.random.default_rng(seed), parts(), []
    while sum(len(r.tokens) for r in records) < tokens - 50:
        turns = [tuple(random.integers(1, 8, 2)) for _ in range(random.integers(1, 4))]
        records.append(record(spans_of(turns), target, 100 * seed + len(records)))
    for each in records:
        taught = pack([[each]], len(each.tokens), STEPS).plan.positions
        outside = torch.ones(len(each.tokens), dtype=torch.bool).index_fill(0, taught, False)
        each.logsumexp[outside], each.argmax[outside] = float("nan"), -1
    return records


@pytest.fixture(autouse=True)
def odd_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not round sizes up: that would hide rows that are missing."""
    monkeypatch.setattr(fixed_sizes, "_MULTIPLE", 1)


def sizes_of(batches: list[list[Record]], height: int = 80) -> FixedSizes:
    reaches = (joint_reach([r.spans for r in records]) for records in batches)
    return FixedSizes.choose(reaches, POSITIONS, STEPS, height)


def run(module: DistillationModule, batch: Batch) -> dict[str, Tensor]:
    """Return the loss, the sums and the gradients of a batch."""
    module.zero_grad()
    loss, sums = module(batch, WEIGHTS)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in module.head.named_parameters() if p.requires_grad}
    return {"loss": loss.detach()} | sums._asdict() | gradients


def module_of(dtype: torch.dtype, device: str = "cpu", **changes: Any) -> DistillationModule:
    head = random_norms_head(**changes.pop("head", {})).to(device)
    settings = TrainSettings(ttt_steps=STEPS, row_tokens=POSITIONS, batch_rows=1, **changes)
    return DistillationModule(head, DraftTeacher.of(parts(), head), settings, dtype)


HEADS: list[dict[str, object]] = [
    {},
    {"num_layers": 2, "qk_norm": True},
    {"num_layers": 2, "sliding_window": 5, "norm_before_residual": True},
]


LOSSES: list[dict[str, object]] = [{"loss": "soft_ce"}, {"loss": "lk"}]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("head", HEADS, ids=str)
def test_padding_changes_no_loss_and_no_gradient(
    head: dict[str, object], loss: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the sums; here lk estimates the mean α of a step from every second teacher."""
    module = module_of(torch.float32, head=head, **loss)
    module.head_forward.dtype = torch.float64
    batches = [conversations(seed) for seed in range(6)]
    sizes, num_padded = sizes_of(batches), 0
    for records in batches:
        plain, padded = (
            pack([records], POSITIONS, STEPS, one_row=True, sizes=s) for s in (None, sizes)
        )
        if padded.padding is None:
            continue
        num_padded += 1
        assert padded.tokens.shape == (1, sizes.positions)
        assert tuple(len(rows.origin) for rows in padded.steps) == sizes.rows
        assert len(padded.plan.chunks(2)) > 2
        same = padded.counts, padded.num_teachers, padded.num_tokens
        assert same == (plain.counts, plain.num_teachers, plain.num_tokens)
        values = []
        for batch in (padded, plain):
            monkeypatch.setattr(loss_module, "LK_TEACHERS", len(batch.plan.positions) // 2)
            values.append(run(module, batch))
        assert_same(*values)
    assert num_padded >= 3


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize(
    "turns", [[[(3, 9)]], [[(0, 20)]], [[(3, 2)]], [[(2, 9)], [(4, 2)]]], ids=str
)
def test_small_batches_are_padded(
    turns: list[list[tuple[int, int]]],
    loss: dict[str, object],
    multiple: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one record, as long as a row, without later steps, without a position to spare."""
    monkeypatch.setattr(fixed_sizes, "_MULTIPLE", multiple)
    module = module_of(torch.float32, **loss)
    module.head_forward.dtype = torch.float64
    records = [record(spans_of(each), parts(), number) for number, each in enumerate(turns)]
    reach = joint_reach([each.spans for each in records])
    sizes = FixedSizes.choose([reach], len(reach), STEPS, 30)
    plain, padded = (
        pack([records], len(reach), STEPS, one_row=True, sizes=each) for each in (None, sizes)
    )
    assert padded.padding is not None
    assert bool(padded.padding.valid.all()) == (multiple == 1)
    assert_same(run(module, padded), run(module, plain))


def test_a_sampled_row_counts_once() -> None:
    """Also the last one, which stands in the places of its teacher's missing rows, too."""
    for teachers in ([0, 0, 1, 1, 2], [3, 3, 3], [0, 1, 1, 4]):
        plan = plan_rows(torch.tensor(teachers))
        rows, sampled, counts = plan.thinned_to_fixed(len(plan.positions), 3)
        assert rows[counts].tolist() == plan.order.tolist()
        taught = sampled.positions[sampled.teacher_index]
        assert taught[counts].tolist() == teachers


def test_sizes_depend_on_no_batch_and_no_row_stands_for_two() -> None:
    batches = [conversations(seed) for seed in range(6)]
    sizes = sizes_of(batches)
    packed = [pack([b], POSITIONS, STEPS, one_row=True, sizes=sizes) for b in batches]
    shapes = {
        tuple(tuple(t.shape) for t in (*vars(rows).values(), b.plan.order, b.plan.positions))
        for b in packed
        if b.padding is not None
        for rows in b.steps
    }
    assert len(shapes) == STEPS
    for batch in packed:
        for rows in batch.steps:
            for index in (rows.select, rows.index, rows.teacher_index, rows.origin):
                assert len(index.unique()) == index.numel()


def test_a_batch_that_does_not_fit_is_not_padded() -> None:
    batches = [conversations(seed) for seed in range(3)]
    sizes = sizes_of(batches)
    for reduced in (
        replace(sizes, positions=40),
        replace(sizes, rows=(10, 10, 10)),
        replace(sizes, teachers=20),
        replace(sizes, chunk=(sizes.chunk[0], 3)),
    ):
        batch = pack([batches[0]], POSITIONS, STEPS, one_row=True, sizes=reduced)
        assert batch.padding is None
    silent = [record(torch.zeros(20), parts())]
    assert pack([silent], POSITIONS, STEPS, one_row=True, sizes=sizes).padding is None


@pytest.mark.gpu
@pytest.mark.parametrize("loss", ["soft_ce", "lk"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_has_the_gradients_of_eager_passes(
    dtype: torch.dtype, layers: int, loss: str
) -> None:
    """Over batches of different rows, with one that does not fit between them."""
    cuda = torch.device("cuda")
    module = module_of(dtype, "cuda", head={"num_layers": layers}, loss=loss)
    batches = [conversations(seed) for seed in range(6)]
    sizes, graph = sizes_of(batches, 10**6), StepGraph(module, cuda)
    bound, num_padded = 1e-4 if dtype == torch.float32 else 0.03, 0
    for records in batches:
        plain, padded = (
            pack([records], POSITIONS, STEPS, one_row=True, sizes=s).to(cuda) for s in (None, sizes)
        )
        expected = run(module, plain)
        if padded.padding is None:
            continue
        num_padded += 1
        sums = graph(padded, WEIGHTS, plain.num_anchors)._asdict()
        for name, value in sums.items():
            torch.testing.assert_close(value, expected[name], rtol=bound, atol=bound)
        for name, parameter in module.head.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad * plain.num_anchors
                assert relative_error(gradient, expected[name]) <= bound, name
    assert num_padded >= 3


@pytest.mark.parametrize(
    ("changes", "supported"),
    [
        ({}, True),
        ({"loss": "lk", "micro_rows": 2}, True),
        ({"compile": True}, True),
        ({"micro_rows": 1}, False),
        ({"anchor_parts": 2}, False),
        ({"acceptance_weighting": 0.5}, False),
        ({"head": {"family": "peagle"}}, False),
        ({"head": {"family": "dspark"}}, False),
        ({"head": EAGLE}, False),
    ],
    ids=str,
)
def test_steps_of_one_pass_whose_rows_need_no_other_are_captured(
    changes: dict[str, Any], supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fits in (True, False):
        monkeypatch.setattr(step_graph, "two_steps_fit", lambda *_, fits=fits: fits)
        head = random_norms_head(**changes.get("head", {}))
        options = {"ttt_steps": STEPS, "batch_rows": 2} | changes
        options.pop("head", None)
        settings = TrainSettings(**options)
        teacher = DraftTeacher.of(parts(), head)
        module = DistillationModule(head, teacher, settings, torch.float32)
        found = step_graph.supports_graph(module, settings, torch.device("cuda"))
        assert found == (supported and fits)
        assert not step_graph.supports_graph(module, settings, torch.device("cpu"))


class WithoutGraph(StepGraph):
    """Runs the passes of a batch of fixed sizes, as a graph does, on a CPU; counts the steps."""

    steps = 0

    def __call__(self, batch: Batch, weights: Sequence[float], num_anchors: int) -> Sums:
        WithoutGraph.steps += 1
        self._divisor = torch.tensor(float(num_anchors))
        return self._passes(batch, weights)


def pad_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have trainings on a CPU run padded batches, as on a GPU; some batches do not fit."""
    monkeypatch.setattr(fixed_sizes, "MARGIN", 0.0)
    for name, value in {
        "uses_one_row": lambda _: True,
        "supports_graph": lambda *_: True,
        "StepGraph": WithoutGraph,
    }.items():
        monkeypatch.setattr(loop, name, value)
    report = Trainer._report_setup

    def report_as_on_a_gpu(trainer: Trainer) -> None:
        report(trainer)
        trainer.rate = 1e12

    monkeypatch.setattr(Trainer, "_report_setup", report_as_on_a_gpu)
    monkeypatch.setattr(WithoutGraph, "steps", 0)


def mixed_store() -> ListStore:
    toys = [toy_answer(orthogonal_parts(), number) for number in range(20)]
    return ListStore([*toys, *conversations(1, 300), *conversations(2, 300)])


def test_a_training_on_padded_batches_has_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And metrics."""
    store, monitor = mixed_store(), RecordingMonitor()
    options = {"steps": 12, "optimizer": "muon", "loss": "lk", "log_every": 1, "gamma": 0.7}
    plain = trained(tmp_path / "plain", store, orthogonal_parts(), **options)
    pad_on_cpu(monkeypatch)
    padded = trained(tmp_path / "padded", store, orthogonal_parts(), monitor, **options)
    assert "each step is one CUDA graph" in monitor.text
    assert 0 < WithoutGraph.steps < 12
    assert_same_weights(padded, plain, rtol=1e-3, atol=1e-4)
    lines = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("padded", "plain"))
    for one, other in zip(*(text.splitlines() for text in lines), strict=True):
        one, other = json.loads(one), json.loads(other)
        for name in {"loss", "alpha", "accuracy", "tokens_seen"} & one.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-3)


@pytest.mark.parametrize("steps", [1, 9])
def test_a_training_on_padded_batches_resumes(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the sizes that it began with, whatever is logged and checked, and the same bits."""
    pad_on_cpu(monkeypatch)
    store, target = mixed_store(), orthogonal_parts()
    options = {"steps": steps, "loss": "lk", "log_every": 1, "checkpoint_every": 2}
    whole = trained(tmp_path / "whole", store, target, **options)
    if steps > 1:
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "cut", store, target, InterruptingMonitor("train", 7), **options)
    resumed = trained(tmp_path / "cut", store, target, **options | {"log_every": 3})
    assert resumed.loader.packer.sizes == whole.loader.packer.sizes is not None
    assert_same_weights(whole, resumed)


@pytest.mark.gpu
def test_a_training_with_graphs_resumes(tmp_path: Path) -> None:
    """It ends with the weights of a training in one piece."""
    store, target, monitor = toy_store(60), orthogonal_parts(), RecordingMonitor()
    options = {"device": "cuda", "precision": "float32", "loss": "lk", "checkpoint_every": 4}
    options |= {"steps": 12, "log_every": 1}
    whole = trained(tmp_path / "whole", store, target, monitor, **options)
    assert "each step is one CUDA graph" in monitor.text
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut", store, target, InterruptingMonitor("train", 9), **options)
    resumed = trained(tmp_path / "cut", store, target, **options)
    assert_same_weights(whole, resumed, rtol=1e-3, atol=1e-4)
