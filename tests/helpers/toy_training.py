"""Training of toy heads on answers that follow a rule; packers of them, and equal batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftlab.heads.config import HeadConfig
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.progress import Monitor
from draftlab.store.store import Record
from draftlab.target_model.parts import TargetParts
from draftlab.text.draft_vocabulary import DraftVocabulary
from draftlab.train.batch.loss_rows import StepSampling
from draftlab.train.batch.packing import Batch, OptimizerStep, Packer, Rows, map_tensors
from draftlab.train.loop import Trainer
from draftlab.train.settings import TrainSettings
from tests.helpers import synthetic
from tests.helpers.list_store import ListStore
from tests.helpers.synthetic import spans_of

PROMPT, ANSWER = 3, 9
"""Tokens of a toy record's prompt and answer."""


def toy_answer(target: TargetParts, seed: int) -> Record:
    """Make a record of a prompt and an answer that follows a rule after its first token.

    x_a is random, x_{a+1} = x_a + 7, and x + 1 follows x from there on (modulo 20, plus 10).
    The features are the current token's embedding and a marker at the prompt's end; the teacher is
    sure of the next token.
    """
    generator = torch.Generator().manual_seed(seed)
    first = int(torch.randint(20, (1,), generator=generator))
    answer = [first, (first + 7) % 20]
    while len(answer) < ANSWER:
        answer.append((answer[-1] + 1) % 20)
    tokens = torch.randint(0, 10, (PROMPT + ANSWER + 1,), generator=generator)
    tokens[PROMPT : PROMPT + ANSWER] = torch.tensor(answer) + 10
    following = tokens.roll(-1)
    last = 6 * target.lm_head[following]
    features = torch.cat([target.embeddings[tokens], torch.zeros(len(tokens), 32)], -1)
    features[PROMPT - 1, 32:] = 3.0
    logits = target.logits(last)
    return Record(
        f"s{seed}",
        tokens,
        spans_of([(PROMPT, ANSWER)]),
        features,
        last,
        logits.logsumexp(-1),
        logits.argmax(-1),
        0.0,
    )


def orthogonal_parts() -> TargetParts:
    """Make embeddings and an lm_head in which tokens are easy to tell apart."""
    target = synthetic.parts()
    return TargetParts(
        torch.nn.functional.normalize(target.embeddings) * 4,
        target.norm,
        torch.nn.functional.normalize(target.lm_head),
        3.0,
        None,
    )


def trained(
    folder: Path,
    store: ListStore,
    target: TargetParts,
    monitor: Monitor | None = None,
    config: HeadConfig | None = None,
    initial: Eagle3Head | None = None,
    **settings: object,
) -> Trainer:
    """Train a toy head, and return the trainer after its run."""
    fields = {
        "steps": 200,
        "row_tokens": 64,
        "batch_rows": 4,
        "ttt_steps": 3,
        "learning_rate": 1e-2,
        "validation_share": 0.2,
        "checkpoint_every": 1000,
        "log_every": 50,
    }
    config = config or synthetic.config()
    trainer = Trainer(
        store,  # type: ignore[arg-type]
        target,
        config,
        DraftVocabulary(torch.arange(40 - config.draft_vocab_size, 40), 1.0),
        TrainSettings.model_validate(fields | settings),
        seed=0,
        folder=folder,
        monitor=monitor or Monitor(),
        initial=initial,
    )
    trainer.run()
    return trainer


def assert_same_weights(
    one: Trainer, other: Trainer, *, rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Check that two trainings ended with the same weights, by default with the same bits."""
    first, second = (dict(trainer.head.state_dict()) for trainer in (one, other))
    torch.testing.assert_close(first, second, rtol=rtol, atol=atol)


def toy_store(count: int = 12) -> ListStore:
    target = orthogonal_parts()
    return ListStore([toy_answer(target, number) for number in range(count)])


def packer(
    store: Any = None,
    *,
    sampling: StepSampling | None = None,
    imitates_states: bool = False,
    one_row: bool = True,
    **settings: Any,
) -> Packer:
    """Make a packer for four rows of 64 positions and three steps."""
    fields = {"row_tokens": 64, "batch_rows": 4, "ttt_steps": 3} | settings
    validated = TrainSettings.model_validate(fields)
    return Packer(store or toy_store(), validated, 7, sampling, imitates_states, one_row)


def step(number: int = 3, micro_batches: list[tuple[Rows, bool]] | None = None) -> OptimizerStep:
    """Make a step of two micro-batches of three records, and an idle one."""
    rows = [([[first, first + 1], [first + 2]], False) for first in range(2)]
    return OptimizerStep(number, micro_batches or [*rows, ([[0]], True)])


def all_tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch that go to the device."""
    tensors: list[Tensor] = []
    map_tensors(batch, lambda t: tensors.append(t) or t)
    return tensors


def assert_same_batches(actual: list[Batch], expected: list[Batch]) -> None:
    """Check that batches have equal bits, shapes, dtypes and numbers."""
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        assert _contents(one) == _contents(other)


def _contents(batch: Batch) -> list[Any]:
    tensors = [*all_tensors(batch), *(plan.host for plan in batch.plans)]
    plain = [t.cpu().flatten().clone(memory_format=torch.contiguous_format) for t in tensors]
    bits = [t.view(torch.uint8).tolist() for t in plain]
    numbers = [batch.num_tokens, batch.idle, batch.counts]
    return [*((t.dtype, t.shape, b) for t, b in zip(tensors, bits, strict=True)), *numbers]
