"""Synthetic records and heads for tests of training: no target model is run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.heads.config import HeadConfig
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.folder import new_head
from draftlab.heads.head import DraftHead, initialise_head
from draftlab.heads.layers import RMSNorm
from draftlab.store.store import Record
from draftlab.target_model.parts import TargetParts
from draftlab.train.batch.packing import Batch, pack
from draftlab.train.objectives.loss import (
    SOFT_CE,
    DraftTeacher,
    LossTerms,
    StepOutput,
    Sums,
    weighted_loss,
)
from tests.helpers.head_toys import make_config

VOCAB, HIDDEN, BOUNDARIES = 40, 32, (1, 2)
OF_FAMILY: dict[object, dict[str, object]] = {
    "peagle": {"mask_token_id": 5, "embeddings": "own"},
    "dflash": {"mask_token_id": 5, "sample_from_anchor": False},
    "dflash2": {
        "mask_token_id": 5,
        "sample_from_anchor": False,
        "draft_vocab_size": 40,
        "conv_group_size": 4,
        "selector_rank": 6,
        "selector_top_k": 8,
    },
    "dspark": {
        "mask_token_id": 5,
        "sample_from_anchor": True,
        "markov_rank": 6,
        "confidence": True,
    },
}
"""Fields that heads of a family have beside those of all."""


def config(**changes: object) -> HeadConfig:
    """A tiny head's config; families that need a mask token have id 5."""
    fields: dict = {
        "boundaries": BOUNDARIES,
        "target_num_layers": 4,
        "target_hidden_size": HIDDEN,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
        "vocab_size": VOCAB,
        "draft_vocab_size": 30,
        "k_trained": 3,
    }
    return make_config(**(fields | OF_FAMILY.get(changes.get("family"), {}) | changes))


def parts(seed: int = 0) -> TargetParts:
    """Random embeddings and lm_head with an identity-weight norm."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(VOCAB, HIDDEN, generator=generator)
    lm_head = torch.randn(VOCAB, HIDDEN, generator=generator)
    return TargetParts(embeddings, RMSNorm(HIDDEN, 1e-6).requires_grad_(False), lm_head, 1.0, None)


def head(target: TargetParts, seed: int = 0, **changes: object) -> Eagle3Head:
    """A head with initial values; draft vocabulary: ids 3, 4, … (so offsets are not zero)."""
    new = new_head(config(**changes))
    size = new.config.draft_vocab_size
    initialise_head(
        new,
        embeddings=target.embeddings,
        final_norm=torch.ones(HIDDEN),
        lm_head=target.lm_head,
        target_ids=torch.arange(VOCAB - size, VOCAB),
        seed=seed,
    )
    return new


def family_loss(
    head: DraftHead, target: TargetParts, batch: Batch, *, gamma: float, terms: LossTerms = SOFT_CE
) -> tuple[Tensor, Sums]:
    """The loss of a head's family as its objective is written, not yet divided by N_0, and sums."""
    objective, teacher = head.family.objective(), DraftTeacher.of(target, head)
    weights = objective.step_weights(gamma, batch.counts)
    return weighted_loss(objective.forward(head, batch), head, teacher, batch, weights, terms)


def teacher_logits(target: TargetParts, last: Tensor) -> Tensor:
    """Return the target's logits [..., V] of last states [..., H], in the dtype of its weights."""
    return F.linear(target.norm(last), target.lm_head)


def assert_same(
    actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-10
) -> None:
    """Check that two ways to the same float64 tensors differ by rounding alone.

    A sum of n terms is rounded by at most n · 2^-53 times the sum of their sizes. The tests' sums
    have some thousand terms, so 1e-10 of the largest entry leaves room for what follows a sum, and
    is far below whatever a mistake changes.

    Args:
        bound: largest difference, as a share of the largest entry of all expected tensors.
    """
    assert actual.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype == torch.float64, name
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=bound * largest, msg=lambda m, n=name: f"{n}: {m}"
        )


def record(spans: list[int] | Tensor, target: TargetParts, seed: int = 0) -> Record:
    """A record with random tokens and states."""
    generator = torch.Generator().manual_seed(seed)
    spans = torch.as_tensor(spans)
    length = len(spans)
    last = torch.randn(length, HIDDEN, generator=generator)
    logits = teacher_logits(target, last)
    return Record(
        f"r{seed}",
        torch.randint(0, VOCAB, (length,), generator=generator),
        spans.long(),
        torch.randn(length, len(BOUNDARIES) * HIDDEN, generator=generator),
        last,
        logits.logsumexp(-1),
        logits.argmax(-1),
        0.0,
    )


def spans_of(turns: list[tuple[int, int]]) -> Tensor:
    """Return spans of turns of (prompt tokens, answer tokens), with one more token at the end."""
    spans: list[int] = []
    for number, (prompt, answer) in enumerate(turns, 1):
        spans += [0] * prompt + [number] * answer
    return torch.tensor([*spans, 0])


def server_rows(spans: Tensor, k: int) -> set[tuple[int, int]]:
    """Return every (t, step) that a server may draft, by trying all acceptances.

    The target writes the first answer token x_a, so the first chain starts at t = a − 1; it drafts
    x_{t+2} … x_{t+1+k}, of which those up to the span's end are real predictions of answer tokens;
    after accepting n of them the next chain starts at t + n + 1.
    """
    values, rows = spans.tolist(), set()
    starts = [a for a in range(1, len(values)) if values[a] and values[a] != values[a - 1]]
    for a in starts:
        end = a
        while end + 1 < len(values) and values[end + 1] == values[a]:
            end += 1
        seen, todo = set(), [a - 1]
        while todo:
            t = todo.pop()
            if t in seen or t + 1 > end:
                continue
            seen.add(t)
            steps = [step for step in range(k) if t + 2 + step <= end]
            rows |= {(t, step) for step in steps}
            todo += [t + accepted + 1 for accepted in range(len(steps) + 1)]
    return rows


EAGLE = {"family": "eagle", "boundaries": (4,), "draft_vocab_size": VOCAB}


def ragged_batch(num_steps: int = 4) -> Batch:
    """Make rows of different lengths: adjacent answers, a conversation without predictions."""
    target = parts()
    turns = [[(3, 6)], [(2, 4), (0, 3)], [(1, 1)], [(4, 9)], [(5, 2)]]
    records = [record(spans_of(each), target, seed) for seed, each in enumerate(turns)]
    return pack([records[:3], records[3:]], 64, num_steps)


def random_norms_head(**changes: object) -> DraftHead:
    """Return a head whose norms, masked slots and convolutions are not the initial ones."""
    model = head(parts(), **changes)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.startswith("mask_"):
                parameter.copy_(noise)
            elif parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * noise)
            elif "_conv." in name:
                parameter.add_(0.1 * noise)
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
