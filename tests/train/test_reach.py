"""`train.reach` comes to every family's loss, and rows that weigh nothing stay out of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftlab.train.batch.packing import pack
from draftlab.train.families import OBJECTIVES
from draftlab.train.objectives.loss import DraftTeacher, Terms, reached, weighted_loss
from draftlab.train.settings import TrainSettings
from tests.helpers.synthetic import head, parts, record
from tests.train.objectives.test_ttt import spans_of


@pytest.mark.parametrize("family", OBJECTIVES)
def test_the_setting_comes_to_the_loss_of_every_family(family: str) -> None:
    assert OBJECTIVES[family].terms(TrainSettings(reach=0.3)).reach == 0.3
    assert OBJECTIVES[family].terms(TrainSettings()).reach == 0


def test_the_product_of_what_an_anchor_was_accepted_at() -> None:
    """Anchors 4, 0 and 2 have three, one and two steps, in whatever order of rows."""
    step = torch.tensor([0, 0, 0, 1, 1, 2])
    anchor = torch.tensor([4, 0, 2, 2, 4, 4])
    alpha = torch.tensor([0.5, 0.9, 0.25, 0.7, 0.4, 0.1])
    found = reached(alpha, step, anchor, 3, 6)
    torch.testing.assert_close(found, torch.tensor([1, 1, 1, 0.25, 0.5, 0.5 * 0.4]))


@pytest.mark.parametrize("terms", [Terms(), Terms(reach=0.5), Terms("lk", reach=1.0)], ids=str)
def test_rows_that_weigh_nothing_add_nothing_though_they_are_not_finite(terms: Terms) -> None:
    target = parts()
    model = head(target)
    batch = pack([[record(spans_of([(2, 6)]), target)]], 64, 3)
    broken = batch.logsumexp.clone()
    broken[:, batch.steps[0].index[0, 2] + 1] = float("nan")
    batch = replace(batch, logsumexp=broken)
    outputs = list(OBJECTIVES["eagle3"].outputs(model, batch))
    teacher = DraftTeacher.of(target, model)
    nothing, _ = weighted_loss(outputs, model, teacher, batch, [0.0] * 3, terms)
    assert nothing == 0
    loss, _ = weighted_loss(outputs, model, teacher, batch, [1.0] * 3, terms)
    assert torch.isnan(loss)
