"""Parallel heads trained by draftlab: what they learn; how a step is cut changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftlab.heads.config import HeadConfig
from draftlab.heads.folder import EMBEDDINGS, load_head, save_head
from draftlab.heads.peagle import PeagleHead
from draftlab.train.batch.order import batches
from draftlab.train.batch.packing import Batch, OptimizerStep, pack
from draftlab.train.distributed.ranks import assign_micro_batches
from draftlab.train.loop import Trainer
from draftlab.train.objectives.loss import DraftTeacher
from draftlab.train.validation import score, validate
from tests.helpers import synthetic
from tests.helpers.list_store import ListStore
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.toy_training import (
    ANSWER,
    PROMPT,
    assert_same_weights,
    orthogonal_parts,
    toy_answer,
    trained,
)

DEPTHS = 4


def peagle_config(**changes: object) -> HeadConfig:
    return synthetic.config(family="peagle", k_trained=DEPTHS, **changes)


def store(count: int) -> ListStore:
    target = orthogonal_parts()
    return ListStore([toy_answer(target, i) for i in range(count)])


def test_every_depth_is_learnt(tmp_path: Path) -> None:
    """Answers count up: from an anchor alone, depth d is d further, which chance hits 1 in 20."""
    target = orthogonal_parts()
    trainer = trained(
        tmp_path,
        store(300),
        target,
        config=peagle_config(num_layers=2),
        steps=150,
        ttt_steps=DEPTHS,
    )
    records = [toy_answer(target, 1000 + i) for i in range(30)]
    batch = pack([[r] for r in records], 64, DEPTHS)
    hits = score(trainer.head, DraftTeacher.of(target, trainer.head), batch).hits
    for depth in range(DEPTHS):
        # Anchors behind the answer's first token: their own token says what follows.
        measured = hits[:, PROMPT : PROMPT + ANSWER - 2 - depth, depth].float().mean()
        assert measured > 0.9, depth


def test_only_the_mask_token_s_embedding_changes(tmp_path: Path) -> None:
    target = orthogonal_parts()
    trainer = trained(
        tmp_path, store(20), target, config=peagle_config(), steps=3, ttt_steps=DEPTHS
    )
    before = torch.nn.functional.normalize(synthetic.parts().embeddings) * 4
    head = trainer.head
    assert isinstance(head, PeagleHead)
    assert torch.equal(head.embed_tokens.weight, before)
    save_head(tmp_path / "head", head, torch.float32)
    loaded = load_head(tmp_path / "head", dtype=torch.float32, device="cpu")
    changed = (loaded.tensors()[EMBEDDINGS] != before).any(1).nonzero()[:, 0]
    assert changed.tolist() == [head.mask_token_id]
    everything = torch.arange(synthetic.VOCAB)
    assert torch.equal(loaded.embed(everything), head.embed(everything))
    assert torch.equal(loaded.embed_tokens(everything), head.embed(everything))


@pytest.mark.parametrize("cut", [{"micro_rows": 1}, {"anchor_parts": 3}], ids=str)
def test_how_a_step_is_cut_changes_nothing(cut: dict, tmp_path: Path) -> None:
    target = orthogonal_parts()  # with 30 records a gradient of layers.1 rounds to either sign
    fields = {"config": peagle_config(num_layers=2), "ttt_steps": DEPTHS, "steps": 5}
    whole = trained(tmp_path / "a", store(31), target, **fields)
    pieces = trained(tmp_path / "b", store(31), target, **fields, **cut)
    assert_same_weights(whole, pieces, rtol=1e-3, atol=1e-4)


def entries(batches: list[Batch]) -> list[tuple]:
    """Predictions of an optimizer step, by content: depth, and the features at the anchor."""
    return sorted(
        (depth, *batch.features.flatten(0, 1)[int(teacher) - 1 - depth, :3].tolist())
        for batch in batches
        for steps in batch.passes
        for depth, rows in enumerate(steps)
        for teacher in rows.teacher_index
    )


def test_what_is_dropped_depends_on_the_step_and_not_on_how_it_is_cut(tmp_path: Path) -> None:
    target = orthogonal_parts()
    packers = [
        trained(
            tmp_path / str(i),
            store(24),
            target,
            config=peagle_config(),
            steps=1,
            ttt_steps=DEPTHS,
            **cut,
        )
        for i, cut in enumerate(({}, {"micro_rows": 1}, {"anchor_parts": 2}))
    ]
    lengths = [packers[0].store.lengths[i] for i in packers[0].training]
    order = batches(lengths, 64, packers[0].settings.batch_rows, seed=0)
    rows = [[packers[0].training[i] for i in row] for row in next(order)]

    def packed(trainer: Trainer, step: int) -> list[tuple]:
        micro = assign_micro_batches(rows, trainer.settings.micro_rows, trainer.ranks)
        return entries(trainer.loader.packer[OptimizerStep(step, micro)])

    first, *others = (packed(t, 7) for t in packers)
    assert others == [first, first]
    assert packed(packers[0], 8) != first
    whole = pack([[packers[0].store[i] for i in row] for row in rows], 64, DEPTHS)
    assert whole.counts[0] < len(first) < sum(whole.counts)


def test_validation_sees_every_depth_of_every_anchor(tmp_path: Path) -> None:
    """Nothing is dropped where a head is measured."""
    target = orthogonal_parts()
    data = store(12)
    head = synthetic.head(target, family="peagle")
    measured = validate(head, DraftTeacher.of(target, head), data, range(12), num_steps=DEPTHS)
    everything = pack([[r] for r in data.records], 64, DEPTHS)
    assert len(measured.alpha) == len(measured.accuracy) == DEPTHS
    hits = score(head, DraftTeacher.of(target, head), everything).hits
    counts = torch.tensor(everything.counts)
    agreed = torch.stack([hits[..., d].sum() / counts[d] for d in range(DEPTHS)])
    # The toy's argmax is its next token, so accuracy is the share of hits.
    assert measured.accuracy == pytest.approx(agreed.tolist())
    assert measured.walk.k == DEPTHS
    assert measured.walk.drafts > 0


def test_another_beginning_is_another_training(tmp_path: Path) -> None:
    target, monitor = orthogonal_parts(), RecordingMonitor()
    fields = {"config": peagle_config(num_layers=2), "ttt_steps": DEPTHS, "steps": 1}
    chain = synthetic.head(target, seed=3)
    begun = trained(tmp_path / "1", store(12), target, monitor=monitor, initial=chain, **fields)
    assert "1 more begins as the identity" in monitor.lines[0]
    assert begun.key != trained(tmp_path / "2", store(12), target, **fields).key
