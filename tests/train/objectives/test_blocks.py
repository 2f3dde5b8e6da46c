"""The packed objective of block heads equals blocks run anchor by anchor, slot by slot."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.heads.block import BlockHead
from draftlab.store.store import Record
from draftlab.target_model.parts import TargetParts
from draftlab.train.batch.loss_rows import loss_reach, sample_anchors
from draftlab.train.batch.packing import pack
from draftlab.train.objectives.block import block_outputs, block_weights
from draftlab.train.objectives.loss import DraftTeacher, LossTerms, weighted_loss
from draftlab.train.settings import TrainSettings
from tests.helpers.plain_chain import PlainBlock
from tests.helpers.synthetic import (
    VOCAB,
    assert_same,
    family_loss,
    parts,
    random_norms_head,
    record,
    spans_of,
    teacher_logits,
)

K, GAMMA = 4, 0.8
TURNS = [[(3, 6)], [(2, 4), (0, 3)], [(1, 1)], [(4, 9)], [(1, 2), (3, 7)]]
DFLASH, DSPARK = ({"family": f, "k_trained": K, "num_layers": 2} for f in ("dflash", "dspark"))
DFLASH2 = DFLASH | {"family": "dflash2"}
KINDS = {
    "dspark": DSPARK,
    "dspark, whole vocabulary": DSPARK | {"draft_vocab_size": VOCAB, "num_layers": 1},
    "dspark, causal": DSPARK | {"is_causal": True},
    "dspark, sliding": DSPARK | {"sliding_window": K + 1},
    "dspark, sliding, causal": DSPARK | {"sliding_window": K + 3, "is_causal": True},
    "dflash": DFLASH,
    "dflash, one sliding": DFLASH
    | {"sliding_window": 7, "layer_types": ("full_attention", "sliding_attention")},
    "dflash, causal": DFLASH | {"is_causal": True, "num_layers": 3},
    "dflash2": DFLASH2,
    "dflash2, three taps": DFLASH2
    | {"conv_kernel_size": 3, "embedding_scale": 2.0, "logit_scale": 0.7, "num_layers": 1},
}


def random_head(kind: str) -> BlockHead:
    model = random_norms_head(**KINDS[kind])
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():  # their initial values are small, or 0
        for name, parameter in model.named_parameters():
            if (
                name.startswith(("markov_head", "confidence_head", "candidate_"))
                or "_conv." in name
            ):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def terms_of(model: BlockHead) -> LossTerms:
    return model.family.objective().loss_terms(TrainSettings())


def records_of(target: TargetParts) -> list[Record]:
    return [record(spans_of(turns), target, seed) for seed, turns in enumerate(TURNS)]


def reference(
    model: BlockHead, target: TargetParts, records: list[Record], kept: dict[str, Tensor]
) -> tuple[Tensor, list[int]]:
    """Σ w ℓ / Σ w over the slots that carry loss, and the number of slots of each step."""
    plain = PlainBlock(dict(model.named_parameters()), model.config)
    ids, spark = torch.nonzero(model.t2d)[:, 0], bool(model.config.markov_rank)
    ce, l1, confidence = (0.1, 0.9, 1.0) if spark else (1.0, 0.0, 0.0)
    selects = model.config.family == "dflash2"
    total, weight, counts = torch.zeros(()), 0.0, [0] * K
    for r in records:
        reach = loss_reach(r.spans)
        for t in range(len(r.tokens) - 1):
            steps = min(int(reach[t]), K) if kept[r.id][t] else 0
            if not steps:
                continue
            newest = int(r.tokens[t + 1])
            outputs = plain.block(r.features[: t + 1], newest, model.config.block_size)
            losses = []
            for k in range(steps):
                hidden = outputs[model.config.first_slot + k]
                previous, label = int(r.tokens[t + 1 + k]), int(r.tokens[t + 2 + k])
                q = plain.logits(hidden, previous).softmax(0)
                full = teacher_logits(target, r.last[t + 1 + k]).softmax(0)
                p = full[ids]
                alpha = torch.minimum(p, q).sum()
                distance = (q - p).abs().sum() + 1 - p.sum()
                loss = l1 * distance
                if selects:
                    best, scores = int(full.argmax()), plain.logits(hidden, previous)
                    tokens = scores.topk(model.config.selector_top_k).indices.tolist()
                    if best not in tokens:
                        tokens[-1] = best
                    chosen = plain.selector_scores(hidden, previous, tokens).log_softmax(0)
                    loss = loss - p @ q.log() - chosen[tokens.index(best)]
                elif label in ids:
                    loss = loss - ce * q[int((ids == label).nonzero())].log()
                if confidence:
                    s = plain.confidence(hidden, previous)
                    c = alpha.detach()
                    loss = loss - c * F.logsigmoid(s) - (1 - c) * F.logsigmoid(-s)
                losses.append(loss)
                counts[k] += 1
            for k, loss in enumerate(losses):
                total, weight = total + GAMMA**k * loss, weight + GAMMA**k
    return total / weight, counts


def gradients(model: BlockHead) -> dict[str, Tensor]:
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


ALL = {f"r{seed}": torch.ones(40) for seed in range(len(TURNS))}
SOME = {f"r{seed}": (torch.arange(40) + seed) % 3 != 0 for seed in range(len(TURNS))}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kept", [ALL, SOME], ids=["all", "some"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_blocks_run_one_by_one(kind: str, kept: dict[str, Tensor]) -> None:
    target, model = parts(), random_head(kind)
    settings = TrainSettings(gamma=GAMMA)
    records = records_of(target)
    batch = pack(
        [records[:3], records[3:]], 64, K,
        max_steps=lambda r: (kept[r.id][: len(r.tokens)] * K).long(),
    )  # fmt: skip
    terms = model.family.objective().loss_terms(settings)
    loss, sums = family_loss(model, target, batch, gamma=GAMMA, terms=terms)
    (loss / batch.num_anchors).backward()
    actual = gradients(model)
    expected, counts = reference(model, target, records, kept)
    expected.backward()
    expected_gradients = gradients(model)
    assert sums.count.tolist() == batch.counts == counts
    assert min(counts) > 2
    weights = model.family.objective().step_weights(settings.gamma, counts)
    assert weights == block_weights(GAMMA, counts)
    assert float(loss.detach()) / batch.num_anchors == pytest.approx(
        float(expected.detach()), rel=1e-12
    )
    frozen = {"embed_tokens.weight", "lm_head.weight"}
    assert actual.keys() == {n for n, _ in model.named_parameters()} - frozen
    for name in frozen & expected_gradients.keys():
        del expected_gradients[name]
    for name, gradient in expected_gradients.items():
        assert gradient.abs().max() > 1e-6, name
    assert_same(actual, expected_gradients)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", ["dspark", "dflash, causal"])
def test_passes_and_packing_add_up_to_the_whole(kind: str) -> None:
    target, model = parts(), random_head(kind)
    records, teacher = records_of(target), DraftTeacher.of(target, model)
    whole = pack([records[:3], records[3:]], 64, K)
    weights = block_weights(GAMMA, whole.counts)

    def losses(*batches: object) -> tuple[float, dict[str, Tensor]]:
        total = 0.0
        for batch in batches:
            outputs = block_outputs(model, batch)
            loss, _ = weighted_loss(outputs, model, teacher, batch, weights, terms_of(model))
            if loss.requires_grad:  # a record may have no prediction
                loss.backward()
            total += float(loss.detach())
        return total, gradients(model)

    expected = losses(whole)
    passes = pack([records[:3], records[3:]], 64, K, num_passes=3)
    alone = [pack([[r]], 64, K) for r in records]
    for batches in (passes.split(), alone):
        total, actual = losses(*batches)
        assert total == pytest.approx(expected[0], rel=1e-12)
        assert_same(actual, expected[1])


def test_every_record_with_predictions_has_a_block() -> None:
    settings = TrainSettings(ttt_steps=K, anchor_share=1e-6)
    r = record(spans_of([(5, 6), (3, 4)]), parts())
    for step in range(20):
        (chosen,) = sample_anchors(r, settings, 0, step).nonzero()[:, 0].tolist()
        assert loss_reach(r.spans)[chosen] > 0
    empty = record(spans_of([(5, 1)]), parts())
    assert not sample_anchors(empty, settings, 0, 0).any()


def test_anchors_are_chosen_by_seed_step_record_and_position_alone() -> None:
    length, settings = 20_000, TrainSettings(ttt_steps=K, anchor_share=0.3)
    r = record([0, *[1] * (length - 1)], parts())
    first = sample_anchors(r, settings, 1, 2)
    assert set(first.tolist()) == {0, K}
    slack = 5 * math.sqrt(0.3 * 0.7 / length)
    assert float((first > 0).double().mean()) == pytest.approx(0.3, abs=slack)
    assert torch.equal(first, sample_anchors(r, settings, 1, 2))
    for seed, step in ((1, 3), (2, 2)):
        assert not torch.equal(first, sample_anchors(r, settings, seed, step))
    shorter = replace(r, tokens=r.tokens[:50], spans=r.spans[:50])
    assert torch.equal(sample_anchors(shorter, settings, 1, 2)[:50], first[:50])
