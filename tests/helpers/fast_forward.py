"""Heads, batches and gradients for comparing a fast training forward with its reference."""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.heads.head import DraftHead
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.objectives.loss import DraftTeacher, StepOutput, weighted_loss
from tests.helpers.synthetic import VOCAB, head, parts, record, spans_of

EAGLE = {"family": "eagle", "boundaries": (4,), "draft_vocab_size": VOCAB}


def ragged_batch(num_steps: int = 4) -> Batch:
    """Make rows of different lengths: adjacent answers, a conversation without predictions."""
    target = parts()
    turns = [[(3, 6)], [(2, 4), (0, 3)], [(1, 1)], [(4, 9)], [(5, 2)]]
    records = [record(spans_of(each), target, seed) for seed, each in enumerate(turns)]
    return pack([records[:3], records[3:]], 64, num_steps)


def random_norms_head(**changes: object) -> DraftHead:
    """Return a head whose norms are not all one and whose masked slots are not initial ones."""
    model = head(parts(), **changes)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.startswith("mask_"):
                parameter.copy_(noise)
            elif parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * noise)
    return model


def train_step(model: DraftHead, outputs: list[StepOutput], batch: Batch) -> dict[str, Tensor]:
    """Return the outputs of the steps, and the gradients of a loss on all of them (0 if None)."""
    weights = [0.8**k for k in range(len(batch.steps))]
    loss, _ = weighted_loss(outputs, model, DraftTeacher.of(parts(), model), batch, weights)
    model.zero_grad()
    loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    zero = {n: torch.zeros_like(p) for n, p in trained.items()}
    gradients = {n: zero[n] if p.grad is None else p.grad.clone() for n, p in trained.items()}
    return {**gradients, **{f"step {k}": o.output.detach() for k, o in enumerate(outputs)}}
