"""Replayed drafts carry the target's distributions after them, and training with them repeats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftlab.errors import UserError
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import family_names
from draftlab.heads.folder import new_head
from draftlab.heads.head import DraftHead, initialise_head
from draftlab.progress import Monitor
from draftlab.store.samples import Sample
from draftlab.store.store import Record
from draftlab.target_model.loading import load_target
from draftlab.target_model.model import Target
from draftlab.target_model.parts import TargetParts
from draftlab.target_model.settings import TargetSettings
from draftlab.text.draft_vocabulary import DraftVocabulary
from draftlab.train import replay
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.distillation_module import DistillationModule
from draftlab.train.loop import Trainer
from draftlab.train.objectives.loss import DraftTeacher
from draftlab.train.objectives.objective import Objective
from draftlab.train.objectives.ttt import ttt_weights, unroll
from draftlab.train.replay import Branch, Replay
from draftlab.train.settings import TrainSettings
from tests.helpers.list_store import ListStore
from tests.helpers.plain_replay import plain_loss
from tests.helpers.recordings import BOUNDARIES, online_store, small_target
from tests.helpers.small_run import InterruptingMonitor
from tests.helpers.synthetic import config as head_config
from tests.helpers.synthetic import family_loss
from tests.helpers.toy_training import assert_same_weights

WORDS = (40, 41, 42)
"""The draft vocabulary, of which the answers are made: a third of the drafts is accepted."""
STEPS, GAMMA = 4, 0.8
FAMILIES = ("eagle3", "peagle", "dflash", "dspark", "eagle")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return small_target(tmp_path_factory.mktemp("replay") / "target")


@pytest.fixture(scope="module")
def records(target: Target) -> list[Record]:
    generator = np.random.default_rng(0)
    samples = []
    for number, (prompt, answer) in enumerate([(3, 20), (5, 30), (2, 7), (4, 1)] * 3):
        ids = generator.integers(0, 280, prompt).tolist() + generator.choice(WORDS, answer).tolist()
        spans = [0] * prompt + [1] * answer
        if number % 2:  # a second answer
            ids += [7, 8, *generator.choice(WORDS, 9).tolist(), 9]
            spans += [0, 0, *[2] * 9, 0]
        samples.append(Sample(f"c{number}", ids, spans, 0.0))
    store = online_store(target, samples)
    return [store[i] for i in range(len(store))]


def head_of(target: Target, family: str = "eagle3", **changes: Any) -> DraftHead:
    fields = {"vocab_size": target.vocab_size, "k_trained": STEPS, "draft_vocab_size": len(WORDS)}
    if family in ("eagle", "dflash", "dspark"):
        fields["draft_vocab_size"] = target.vocab_size
    boundaries = (target.num_layers,) if family == "eagle" else BOUNDARIES
    head = new_head(head_config(family=family, boundaries=boundaries, **fields | changes))
    ids = WORDS if head.config.draft_vocab_size == len(WORDS) else range(target.vocab_size)
    initialise_head(
        head,
        embeddings=target.parts.embeddings,
        final_norm=torch.ones(target.hidden_size),
        lm_head=target.parts.lm_head,
        target_ids=torch.tensor(ids),
        seed=1,
    )
    return head


def module_of(head: DraftHead, target: Target) -> DistillationModule:
    teacher = DraftTeacher.of(target.parts, head)
    return DistillationModule(head, teacher, TrainSettings(ttt_steps=STEPS), torch.float32)


def replayed(target: Target, head: DraftHead, batch: Batch) -> Batch:
    return Replay(target, module_of(head, target)).apply(batch)


def packed(rows: list[list[Record]], **options: Any) -> Batch:
    return pack(rows, 512, STEPS, replays=lambda record: True, **options)


@pytest.fixture(scope="module")
def expected(target: Target, records: list[Record]) -> float:
    with torch.inference_mode():
        values = [
            plain_loss(head_of(target), target, record, list(WORDS), STEPS, GAMMA)
            for record in records
        ]
    assert sum(number for _, number in values) > 30
    return sum(value for value, _ in values)


def loss_of(target: Target, batch: Batch) -> float:
    return family_loss(head_of(target), target.parts, batch, gamma=GAMMA)[0].item()


@pytest.mark.parametrize("one_row", [False, True])
def test_the_loss_is_that_of_single_sequences(
    target: Target, records: list[Record], expected: float, one_row: bool
) -> None:
    batch = packed([records[:5], records[5:7], records[7:]], one_row=one_row)
    after = replayed(target, head_of(target), batch)
    assert after.counts == batch.counts
    assert loss_of(target, after) == pytest.approx(expected, rel=1e-5)
    assert loss_of(target, batch) != pytest.approx(expected, rel=1e-3)
    module = module_of(head_of(target), target)
    fast, _ = module(after, [GAMMA**k for k in range(STEPS)])
    assert fast.item() == pytest.approx(expected, rel=1e-5)


MISTAKES: dict[str, Callable[[Branch], Branch]] = {
    "the next draft": lambda b: replace(b, tokens=np.roll(b.tokens, -1)),
    "the draft before": lambda b: replace(b, tokens=np.roll(b.tokens, 1)),
    "the next anchor": lambda b: replace(b, anchor=b.anchor + 1),
    "the anchor before": lambda b: replace(b, anchor=b.anchor - 1),
    "a conversation without its first token": lambda b: replace(b, start=b.start + 1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_alignment_is_caught(
    mistake: str,
    target: Target,
    records: list[Record],
    expected: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find, change = replay.rejected_drafts, MISTAKES[mistake]
    monkeypatch.setattr(replay, "rejected_drafts", lambda *a: [change(b) for b in find(*a)])
    after = replayed(target, head_of(target), packed([[record] for record in records]))
    assert loss_of(target, after) != pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_hold_the_drafts_and_the_target_there(
    family: str, target: Target, records: list[Record]
) -> None:
    head, teacher = head_of(target, family), DraftTeacher.of(target.parts, head_of(target, family))
    batch = packed([records[:6], records[6:]])
    after = replayed(target, head, batch)
    assert after.labels is not None
    width, moved = after.tokens.shape[1], 0
    with torch.no_grad():
        objective = head.family.objective()
        outputs = list(objective.forward(head, after))
    read: dict[int, list[int]] = {}
    tokens, documents = after.tokens.flatten(), batch.documents
    for k, (before, step, output) in enumerate(zip(batch.steps, after.steps, outputs, strict=True)):
        for old, slot, out in zip(
            before.teacher_index.tolist(), step.teacher_index.tolist(), output.output, strict=True
        ):
            row, t = divmod(old - 1 - k, batch.tokens.shape[1])
            if slot == row * width + t + 1 + k:
                continue  # recorded tokens
            key = row * width + t
            read.setdefault(key, []).append(int(tokens[slot]))
            first = int((documents[row] == documents[row, t]).nonzero()[0])
            text = torch.cat([batch.tokens[row, first : t + 1], torch.tensor(read[key])])
            last = target.states(text[None]).last[0, -1]
            torch.testing.assert_close(after.last.flatten(0, 1)[slot], last, rtol=1e-4, atol=1e-4)
            argmax = int(target.logits(last).argmax())
            assert int(after.argmax.flatten()[slot]) == argmax
            assert int(after.labels.flatten()[slot]) in (argmax, int(batch.tokens[row, t + 2 + k]))
            if k + 1 < STEPS and len(read[key]) == k + 1:
                with torch.no_grad():  # the token that the next step reads is this one's draft
                    best = head.logits(out[None], tokens[slot][None]).argmax(-1)
                draft = int(teacher.target_ids[best])
                assert int(tokens[slot + 1]) in (draft, 0)
                moved += int(tokens[slot + 1]) == draft
    assert moved > 20


def test_a_batch_without_replayed_records_stays(target: Target, records: list[Record]) -> None:
    head = head_of(target)
    batch = pack([records], 512, STEPS, replays=lambda record: False)
    after = replayed(target, head, batch)
    assert after is batch
    batch = pack([records], 512, STEPS)
    assert replayed(target, head, batch) is batch


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_replays_as_a_cpu_does(
    family: str, target: Target, records: list[Record], tmp_path: Path
) -> None:
    batch, losses = packed([records], one_row=True), []
    on_gpu = load_target(TargetSettings(path=str(target.folder), device="cuda"))
    for device, model, dtype in (
        ("cpu", target, torch.float32),
        ("cuda", on_gpu, torch.float32),
        ("cuda", on_gpu, torch.bfloat16),
    ):
        head = head_of(target, family).to(device)
        teacher = DraftTeacher.of(model.parts, head)
        module = DistillationModule(head, teacher, TrainSettings(ttt_steps=STEPS), dtype)
        after = Replay(model, module).apply(batch.to(torch.device(device)))
        assert after.tokens.shape[1] > batch.tokens.shape[1]
        loss, _ = module(after, head.family.objective().step_weights(GAMMA, after.counts))
        losses.append(loss.item())
    # A draft may differ where two logits are nearly equal.
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[2] == pytest.approx(losses[0], rel=5e-2)


def train(
    folder: Path,
    target: Target | None,
    records: list[Record],
    monitor: Monitor | None = None,
    *,
    config: HeadConfig | None = None,
    parts: TargetParts | None = None,
    **changes: Any,
) -> Trainer:
    settings = {
        "steps": 12,
        "row_tokens": 128,
        "batch_rows": 2,
        "ttt_steps": STEPS,
        "learning_rate": 1e-2,
        "validation_share": 0.2,
        "checkpoint_every": 4,
        "log_every": 1,
        "replay": {"start": 0.25, "share": 0.7},
    }
    trainer = Trainer(
        ListStore(records),
        parts or target.parts,
        config or head_of(target).config,
        DraftVocabulary(torch.tensor(WORDS), 1.0),
        TrainSettings.model_validate(settings | changes),
        seed=0,
        folder=folder,
        monitor=monitor or Monitor(),
        target_model=target,
    )
    trainer.run()
    return trainer


def test_training_with_replay_repeats_and_resumes_to_the_bit(
    target: Target, records: list[Record], tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", target, records)
    assert_same_weights(whole, train(tmp_path / "again", target, records))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", target, records, InterruptingMonitor("train", 10))
    resumed = train(tmp_path / "cut", target, records)
    assert_same_weights(whole, resumed)
    without = train(tmp_path / "without", target, records, replay=None)
    with pytest.raises(AssertionError):
        assert_same_weights(whole, without)
    parts = train(tmp_path / "parts", target, records, micro_rows=1)
    assert_same_weights(whole, parts, rtol=1e-3, atol=1e-4)


def test_what_cannot_be_replayed_is_refused(
    target: Target, records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(FAMILIES) <= set(family_names())
    head = head_of(target)
    with pytest.raises(UserError, match="no target model"):
        train(tmp_path, None, records, config=head.config, parts=target.parts)
    monkeypatch.setattr(target, "recurrent", True)
    with pytest.raises(UserError, match="recurrent layers"):
        train(tmp_path, target, records)
    monkeypatch.undo()
    unknown = Objective(unroll, ttt_weights)
    monkeypatch.setattr(type(head.family), "objective", lambda self: unknown)
    with pytest.raises(UserError, match="does not say how it drafts"):
        train(tmp_path, target, records)


@pytest.mark.parametrize("changes", [{"parallel": "fsdp2"}, {"anchor_parts": 2}])
def test_settings_that_split_the_head_or_the_batch_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="replay runs the whole head"):
        TrainSettings.model_validate({"replay": {}} | changes)
