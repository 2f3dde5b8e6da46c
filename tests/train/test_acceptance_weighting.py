"""`train.acceptance_weighting` reaches every family's loss; rows without weight add nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftlab.heads.family import family_names, get_family
from draftlab.train.batch.packing import pack
from draftlab.train.objectives.loss import DraftTeacher, LossTerms, weighted_loss
from draftlab.train.settings import TrainSettings
from tests.helpers.synthetic import head, parts, record, spans_of


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
