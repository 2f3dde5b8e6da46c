"""The packed, compacted objective of parallel drafting equals a server run anchor by anchor."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from draftlab.heads.peagle import PeagleHead
from draftlab.store.store import Record
from draftlab.target_model.parts import TargetParts
from draftlab.train.batch.loss_rows import sample_depths, split_anchors
from draftlab.train.batch.packing import pack
from draftlab.train.objectives.loss import LossTerms
from draftlab.train.settings import TrainSettings
from tests.helpers.dense_attention import dense_pass
from tests.helpers.plain_chain import PlainChain
from tests.helpers.synthetic import (
    assert_same,
    family_loss,
    parts,
    random_norms_head,
    record,
    server_rows,
    spans_of,
    teacher_logits,
)

DEPTHS, GAMMA = 4, 0.8
TURNS = [[(3, 6)], [(2, 4), (0, 3)], [(1, 1)], [(4, 9)], [(1, 2), (3, 7)]]


def records_of(target: TargetParts) -> list[Record]:
    """One turn, adjacent answers, an answer without a prediction, more turns."""
    return [record(spans_of(turns), target, seed) for seed, turns in enumerate(TURNS)]


def server_passes(model: PeagleHead, record: Record) -> list[Tensor]:
    """Return log q [depths, D] of a server's pass at each anchor (servers §1.5, methods §4).

    The sequence is the pairs (x_{p+1}, g_p), p ≤ anchor, then depths − 1 mask tokens with
    fc(mask_hidden), at consecutive positions, under plain causal attention.
    """
    w, mask_token = dict(model.named_parameters()), model.mask_token_id
    w["embed_tokens.weight"] = w["embed_tokens.weight"].index_copy(
        0, torch.tensor([mask_token]), w["mask_embedding"].view(1, -1)
    )
    plain, passes = PlainChain(w, model.config), []
    features = plain.w["fc.weight"].new_tensor(record.features.tolist())
    mask_state, true_pairs = plain.project_features(w["mask_hidden"].flatten()), plain.empty
    for anchor in range(len(record.tokens) - 1):
        state = plain.project_features(features[anchor])
        token = int(record.tokens[anchor + 1])
        _, logits, true_pairs = plain.step(token, state, anchor, true_pairs)
        rows, caches = [logits], true_pairs
        for position in range(anchor + 1, anchor + DEPTHS):
            _, logits, caches = plain.step(mask_token, mask_state, position, caches)
            rows.append(logits)
        passes.append(torch.stack(rows).log_softmax(-1))
    return passes


def reference(
    model: PeagleHead,
    target: TargetParts,
    records: list[Record],
    kept: dict[str, Tensor],
    reach: float = 0.0,
) -> tuple[Tensor, list[int]]:
    """Σ_d γ^d (Σ ℓ) / N_d over what a server may be asked for and `kept` leaves; and N_d.

    With `reach`, ℓ is so far multiplied by the product of the α before it.
    """
    ids = torch.nonzero(model.t2d)[:, 0]
    losses: list[list[Tensor]] = [[] for _ in range(DEPTHS)]
    for r in records:
        # What a server drafts beyond the answer's end changes nothing before it.
        passes = server_passes(model, r)
        for anchor, rows in itertools.groupby(sorted(server_rows(r.spans, DEPTHS)), lambda e: e[0]):
            depths = [d for _, d in rows if d < kept[r.id][anchor]]
            log_q, reached = passes[anchor], 1.0
            for d in depths:
                logits = teacher_logits(target, r.last[anchor + 1 + d])
                p = (logits[ids] - logits.logsumexp(-1)).exp().to(log_q.dtype)
                losses[d].append(-(p * log_q[d]).sum() * (1 - reach + reach * reached))
                reached *= float(p.minimum(log_q[d].detach().exp()).sum())
    total = sum(GAMMA**d * torch.stack(rows).mean() for d, rows in enumerate(losses) if rows)
    return total, [len(rows) for rows in losses]


def gradients(model: PeagleHead) -> dict[str, Tensor]:
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


ALL = {f"r{seed}": torch.full((40,), DEPTHS) for seed in range(len(TURNS))}
SOME = {f"r{seed}": torch.arange(40) * (seed + 4) % 5 % DEPTHS + 1 for seed in range(len(TURNS))}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kept", [ALL, SOME], ids=["all", "dropped"])
@pytest.mark.parametrize(
    ("changes", "reach"),
    [
        ({}, 0.0),
        ({"num_layers": 3}, 0.0),
        ({"num_layers": 2, "qk_norm": True}, 0.9),
        ({"qk_norm": True, "norm_before_residual": True}, 1.0),
    ],
    ids=str,
)
def test_loss_and_gradients_equal_a_server_run_anchor_by_anchor(
    changes: dict, reach: float, kept: dict[str, Tensor]
) -> None:
    target, model = parts(), random_norms_head(family="peagle", **changes)
    records = records_of(target)
    batch = pack(
        [records[:3], records[3:]],
        64,
        DEPTHS,
        max_steps=lambda r: kept[r.id][: len(r.tokens)],
    )
    loss, sums = family_loss(
        model, target, batch, gamma=GAMMA, terms=LossTerms(acceptance_weighting=reach)
    )
    (loss / batch.num_anchors).backward()
    actual = gradients(model)
    expected, counts = reference(model, target, records, kept, reach)
    expected.backward()
    expected_gradients = gradients(model)
    assert sums.count.tolist() == batch.counts == counts
    assert min(counts) > 2
    assert float(loss.detach()) / batch.num_anchors == pytest.approx(
        float(expected.detach()), rel=1e-12
    )
    parameters = {"mask_hidden", "mask_embedding", "fc.weight"}
    assert actual.keys() == expected_gradients.keys() >= parameters
    for name, gradient in expected_gradients.items():
        assert gradient.abs().max() > 1e-6, name
    assert_same(actual, expected_gradients)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("changes", [{}, {"num_layers": 3, "qk_norm": True}], ids=str)
def test_a_whole_pass_of_the_head_is_that_of_a_server(changes: dict) -> None:
    """True pairs, then masked slots, plainly causal: the pass that decoding is tested by."""
    target, model = parts(), random_norms_head(family="peagle", **changes)
    (r,) = records_of(target)[:1]
    pairs = 5
    tokens = torch.cat([r.tokens[1 : pairs + 1], torch.full((DEPTHS - 1,), model.mask_token_id)])
    hidden = torch.cat(
        [
            model.project_features(r.features[:pairs]),
            model.mask_state().expand(DEPTHS - 1, -1),
        ]
    )
    outputs = dense_pass(model, tokens, hidden)[pairs - 1 :]
    expected = server_passes(model, r)[pairs - 1]
    actual = model.logits(outputs).log_softmax(-1)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("passes", [1, 2, 3, 8])
def test_every_anchor_is_dealt_once_and_parts_are_alike(passes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    reach = torch.randint(-20, 12, (3, 400), generator=generator).clamp(min=0)
    dealt = split_anchors(reach, DEPTHS, passes)
    assert torch.equal(sum(dealt), reach)
    assert torch.equal(sum((part > 0).long() for part in dealt), (reach > 0).long())
    for part in dealt:
        share = part.clamp(max=DEPTHS).sum(1) / reach.clamp(max=DEPTHS).sum(1)
        assert (share - 1 / passes).abs().max() < 0.02


def kept(r: Record, *, step: int = 0, seed: int = 0) -> Tensor:
    settings = TrainSettings(ttt_steps=8, cod_ratio=0.8, cod_min=0.3)
    return sample_depths(r, settings, seed, step)


def test_dropped_depths_follow_the_law() -> None:
    length = 20_000
    r = record([0, *[1] * (length - 1)], parts())
    depths = kept(r)
    assert int(depths.min()) >= 1  # depth 0 is never dropped
    for depth in range(8):
        share = max(0.8**depth, 0.3)
        slack = 5 * math.sqrt(share * (1 - share) / length)
        assert float((depths > depth).double().mean()) == pytest.approx(share, abs=slack + 1e-12)


def test_dropping_depends_on_seed_step_record_and_position_alone() -> None:
    target = parts()
    one, two = (record(spans_of([(2, 60)]), target, seed) for seed in (1, 2))
    state = torch.get_rng_state()
    first = kept(one)
    torch.manual_seed(4)
    assert torch.equal(first, kept(one))
    torch.set_rng_state(state)
    for other in (kept(two), kept(one, step=1), kept(one, seed=1)):
        assert not torch.equal(first, other)
    shorter = Record(one.id, *(t[:30] for t in (one.tokens, one.spans)), *[one.last] * 4, None)
    assert torch.equal(kept(shorter), first[:30])
