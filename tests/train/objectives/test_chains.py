"""EAGLE heads, EAGLE3's options and every loss: training equals a server, position by position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.heads.family import family_names, get_family
from draftlab.store.store import Record
from draftlab.target_model.parts import TargetParts
from draftlab.train.batch.packing import StepNoise, pack
from draftlab.train.objectives import loss
from draftlab.train.objectives.loss import SOFT_CE, DraftTeacher, LossTerms, weighted_loss
from draftlab.train.settings import TrainSettings
from tests.helpers.plain_chain import PlainChain
from tests.helpers.synthetic import (
    EAGLE,
    HIDDEN,
    VOCAB,
    assert_same,
    family_loss,
    head,
    parts,
    record,
    server_rows,
    spans_of,
    teacher_logits,
)

IMITATION = LossTerms("soft_ce", 0.1, 1.0)
KINDS: dict[str, tuple[dict[str, Any], LossTerms]] = {
    "eagle": (EAGLE, IMITATION),
    "eagle of 2 layers": (EAGLE | {"num_layers": 2}, IMITATION),
    "eagle3": ({}, SOFT_CE),
    "norm_before_fc": ({"norm_before_fc": True}, SOFT_CE),
    "fc_norm, norm_output": ({"fc_norm": True, "norm_output": True}, SOFT_CE),
    "one boundary, q and k normed": ({"boundaries": (1,), "qk_norm": True}, SOFT_CE),
    "last boundary, lk": ({"boundaries": (4,)}, LossTerms("lk")),
    "eagle3 of 3 layers": ({"num_layers": 3}, SOFT_CE),
    "window": ({"sliding_window": 5, "k_trained": 3, "num_layers": 2}, SOFT_CE),
    "reach": ({}, LossTerms(acceptance_weighting=0.7)),
    "eagle, reach": (EAGLE, LossTerms("soft_ce", 0.1, 1.0, acceptance_weighting=0.5)),
    "lk, reach": ({}, LossTerms("lk", acceptance_weighting=1.0)),
}
STEPS, GAMMA = 3, 0.8


def records(target: TargetParts) -> list[Record]:
    turns = [[(3, 6)], [(2, 4), (0, 3)], [(1, 1)], [(4, 9)]]
    return [record(spans_of(turn), target, seed) for seed, turn in enumerate(turns)]


def plain_losses(
    plain: PlainChain, target: TargetParts, r: Record, noise: Tensor | None = None
) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """(k, −Σ p log q, regression, α) of every prediction of a record, each on its own."""
    ids = torch.arange(VOCAB - len(plain.w["lm_head.weight"]), VOCAB)
    last = plain.c.boundaries == (4,)
    features = r.last if last else r.features[:, : HIDDEN * len(plain.c.boundaries)]
    hidden0 = [plain.project_features(x) for x in features]
    if noise is not None:
        hidden0 = [h + n for h, n in zip(hidden0, noise, strict=True)]
    before, found = [plain.empty], []
    for t in range(len(r.tokens) - 1):
        before.append(plain.step(int(r.tokens[t + 1]), hidden0[t], t, before[t])[2])
    for t, k in sorted(server_rows(r.spans, STEPS)):
        if k == 0:
            hidden, caches = hidden0[t], before[t]
        hidden, logits, caches = plain.step(int(r.tokens[t + 1 + k]), hidden, t + k, caches)
        z = teacher_logits(target, r.last[t + 1 + k])
        p, log_q = (z - z.logsumexp(-1))[ids].exp(), logits.log_softmax(-1)
        wanted = target.norm(r.last[t + 1 + k])
        missed = F.smooth_l1_loss(hidden, wanted)
        found.append((k, -(p * log_q).sum(), missed, p.minimum(log_q.exp()).sum()))
        if plain.c.family != "eagle":
            entropy = (p * p.log()).sum()
            found[-1] = (k, found[-1][1], entropy, found[-1][3])
    return found


def plain_total(
    plain: PlainChain, target: TargetParts, asked: list[Record], terms: LossTerms
) -> Tensor:
    rows = [row for r in asked for row in plain_losses(plain, target, r)]
    factors, passed = [], 1.0
    for step, *_, alpha in rows:  # an anchor's steps lie behind one another
        passed = passed if step else 1.0
        factors.append(1 - terms.acceptance_weighting + terms.acceptance_weighting * passed)
        passed *= float(alpha.detach())
    total = torch.zeros((), dtype=torch.float64)
    for step in range(STEPS):
        mine, factor = zip(
            *((r, f) for r, f in zip(rows, factors, strict=True) if r[0] == step), strict=True
        )
        if terms.loss == "lk":
            share = torch.exp(-3 * torch.stack([a for *_, a in mine]).mean().detach())
            values = [share * (ce + entropy) + (1 - share) * (1 - a) for _, ce, entropy, a in mine]
        else:
            values = [terms.distillation * ce + terms.regression * x for _, ce, x, _ in mine]
        total = total + GAMMA**step * sum(f * v for f, v in zip(factor, values, strict=True))
    return total


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_a_position_by_position_server(kind: str) -> None:
    changes, terms = KINDS[kind]
    target = parts()
    model = head(target, **changes)
    asked = [narrowed(r, model.config.feature_size) for r in records(target)]
    batch = pack([asked[:3], asked[3:]], 64, STEPS)
    loss, _ = family_loss(model, target, batch, gamma=GAMMA, terms=terms)
    loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found = {n: p.grad.clone() for n, p in trained.items()}
    model.zero_grad()
    expected = plain_total(
        PlainChain(dict(model.named_parameters()), model.config), target, asked, terms
    )
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert_same(found, {n: p.grad for n, p in trained.items()})
    lent = {"embed_tokens.weight", "lm_head.weight", "target_norm.weight"}
    assert lent.isdisjoint(trained) or changes.get("family") != "eagle"


@pytest.mark.usefixtures("float64")
def test_lk_weighs_a_step_by_the_rows_of_every_nth_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    target = parts()
    model, batch = head(target), pack([records(target)], 64, STEPS)
    calls, plain = [], loss.distill_linear

    def noted(*arguments: Any, kl_weight: Tensor | None = None, **options: Any) -> Any:
        found = plain(*arguments, kl_weight=kl_weight, **options)
        calls.append((found.alpha, kl_weight))
        return found

    monkeypatch.setattr(loss, "distill_linear", noted)
    family_loss(model, target, batch, gamma=GAMMA, terms=LossTerms("lk"))
    (alpha, _), (_, by_all) = calls  # few teachers: every row is read
    teachers = torch.cat([rows.teacher_index for rows in batch.steps]).unique(return_inverse=True)
    monkeypatch.setattr(loss, "LK_TEACHERS", len(teachers[0]) // 3)
    family_loss(model, target, batch, gamma=GAMMA, terms=LossTerms("lk"))
    sizes = [len(rows.teacher_index) for rows in batch.steps]
    for a, by_some, number, of_all in zip(
        *(x.split(sizes) for x in (alpha, calls[-1][1], teachers[1], by_all)), strict=True
    ):
        expected = (-3 * a[number % 3 == 0].mean()).exp()
        torch.testing.assert_close(by_some, expected.expand_as(a))
        assert not torch.allclose(by_some, of_all)


def narrowed(r: Record, width: int) -> Record:
    """With the features of the first boundaries alone, which may be more than were made."""
    fields = vars(r) | {"features": r.features[:, :width]}
    return Record(**fields)


def test_noise_is_a_function_of_seed_step_record_and_position() -> None:
    target = parts()
    one, two = (record(spans_of([(3, 8)]), target, seed) for seed in (1, 2))

    def drawn(rows: list[list[Record]], seed: int = 0, step: int = 5) -> Tensor:
        batch = pack(rows, 64, 2, noise=StepNoise(0.1, seed, step))
        assert batch.noise is not None
        return batch.noise.values(batch.positions, HIDDEN)

    size = len(one.tokens)
    alone, together = drawn([[two]]), drawn([[one, two]])
    assert torch.equal(alone[0], together[0, size:])
    assert torch.equal(alone, drawn([[two]]))
    for other in (drawn([[two]], seed=1), drawn([[two]], step=6), together[:, :size]):
        assert (other - alone).abs().min() < (other - alone).abs().max()
        assert (
            abs(float(torch.corrcoef(torch.stack([other.flatten(), alone.flatten()]))[0, 1])) < 0.2
        )
    bound = 0.1 * 512 / size
    assert float(alone.abs().max()) <= bound
    # Uniform: mean 0 and variance bound² / 3, on 64 conversations.
    many = torch.cat(
        [drawn([[record(spans_of([(3, 8)]), target, s)]]).flatten() for s in range(64)]
    )
    assert abs(float(many.mean())) < 4 * bound / (3 * len(many)) ** 0.5
    assert float(many.var()) == pytest.approx(bound**2 / 3, rel=0.03)


@pytest.mark.usefixtures("float64")
def test_noise_lies_on_the_normed_features_and_nowhere_else() -> None:
    target = parts()
    model = head(target, **EAGLE)
    r = record(spans_of([(3, 8)]), target, 1)
    batch = pack([[r]], 64, 1, noise=StepNoise(0.1, 0, 5))
    assert batch.noise is not None
    noise = batch.noise.values(batch.positions, HIDDEN)[0]
    loss, _ = family_loss(model, target, batch, gamma=GAMMA, terms=IMITATION)
    rows = plain_losses(PlainChain(dict(model.named_parameters()), model.config), target, r, noise)
    expected = torch.stack([0.1 * ce + missed for k, ce, missed, _ in rows if k == 0]).sum()
    assert loss.item() == pytest.approx(float(expected.detach()), rel=1e-12)


@pytest.mark.parametrize("family", family_names())
def test_the_setting_comes_to_the_loss_of_every_family(family: str) -> None:
    loss_terms = get_family(family).objective().loss_terms
    assert loss_terms(TrainSettings(acceptance_weighting=0.3)).acceptance_weighting == 0.3
    assert loss_terms(TrainSettings()).acceptance_weighting == 0


@pytest.mark.parametrize(
    "terms",
    [LossTerms(), LossTerms(acceptance_weighting=0.5), LossTerms("lk", acceptance_weighting=1.0)],
    ids=str,
)
def test_rows_that_weigh_nothing_add_nothing_though_they_are_not_finite(terms: LossTerms) -> None:
    target = parts()
    model = head(target)
    batch = pack([[record(spans_of([(2, 6)]), target)]], 64, 3)
    broken = batch.logsumexp.clone()
    broken[:, batch.steps[0].index[0, 2] + 1] = float("nan")
    batch = replace(batch, logsumexp=broken)
    outputs = list(get_family("eagle3").objective().forward(model, batch))
    teacher = DraftTeacher.of(target, model)
    nothing, _ = weighted_loss(outputs, model, teacher, batch, [0.0] * 3, terms)
    assert nothing == 0
    loss, _ = weighted_loss(outputs, model, teacher, batch, [1.0] * 3, terms)
    assert torch.isnan(loss)
