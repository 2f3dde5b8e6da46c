"""The confidence that drafters state is of the temperature that a calibration names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftlab.engine.drafter import new_drafter
from draftlab.engine.sampling import Request, Sampling, sampling_metadata
from draftlab.evaluate.decoding_config import DecodingConfig
from draftlab.evaluate.settings import EvalSettings
from draftlab.heads.eagle3 import Eagle3Head
from tests.helpers.engines import RaggedPairs

K = 3


@pytest.mark.parametrize(
    ("draft_probs", "temperature", "settings", "at"),
    [
        (False, 0.0, {}, 1.0),
        (False, 0.7, {}, 1.0),
        (False, 0.7, {"draft_temperature": 0.4}, 1.0),
        (True, 0.7, {}, 0.7),
        (True, 0.7, {"draft_temperature": 0.4}, 0.4),
        (True, 0.0, {"draft_temperature": 0.4}, 1.0),
    ],
)
def test_confidence_has_the_temperature_that_a_calibration_names(
    draft_probs: bool, temperature: float, settings: dict[str, float], at: float, head: Eagle3Head
) -> None:
    config, evaluated = DecodingConfig(None, K, draft_probs), EvalSettings(**settings)
    assert config.confidence_temperature(temperature, evaluated) == at
    table, proposals = torch.tensor([[1]], dtype=torch.int32), []
    pairs = RaggedPairs([9]).next([9], table)
    request = Request("0", (1,), 1, Sampling(temperature))
    pairs = replace(pairs, keys=sampling_metadata([request], torch.device("cpu")))
    for probabilities in (draft_probs, True):  # the second one also gives the logits
        drafter = new_drafter(head, K, draft_probs=probabilities, confidence=True, **settings)
        drafter.start(2, 24)
        proposals.append(drafter.propose(pairs))
    stated, with_logits = proposals
    first = with_logits.distribution.logits[0, 0].double()
    largest = [float((first / t).softmax(-1).max()) for t in (at, 0.4, 0.7, 1.0)]
    expected, *others = (torch.tensor(m / (1 - m)).log().item() for m in largest)
    assert float(stated.confidence[0, 0]) == pytest.approx(expected, abs=1e-3)
    assert sum(abs(one - expected) > 0.05 for one in others) == 2  # the other temperatures show
