"""What a diagnosis may claim from few prompts, on the stored scores of 64 prompts.

prompt_scores.json has, for a good head, a weak one and heads with one known mistake each, the
accepted drafts and the positions of each prompt: of the head as stored and of its variants.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftlab.doctor.hypotheses import HeadVariant, Hypothesis
from draftlab.doctor.score import Score
from draftlab.doctor.settings import DoctorSettings
from draftlab.doctor.verdict import (
    MARGIN,
    TOO_FEW,
    VariantResult,
    VariantSearch,
    make_diagnosis,
    score_finding,
)
from draftlab.engine.counters import Counters

SCORES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("prompt_scores.json").read_text()
)
SOUND = ("good head", "weak head")
MISTAKES = [name for name in SCORES if name not in SOUND]
SEEDS = 40


def sample(case: str, count: int, seed: int) -> VariantSearch:
    """Return the search over `count` of the prompts, drawn without replacement."""
    fields = SCORES[case]
    rows = np.random.default_rng(seed).permutation(len(fields["positions"]))[:count]
    positions = np.array(fields["positions"], float)[rows]

    def score(accepted: list[int]) -> Score:
        values = np.array(accepted, float)[rows]
        # Of the first drafts as many are accepted as of all that follow a position.
        shares = values / fields["k"] / positions
        counters = tuple(
            Counters(1, int(n), int(n), round(s * n), [round(s * n)])
            for n, s in zip(positions, shares, strict=True)
        )
        return Score(counters, values, positions, fields["k"])

    stored = score(fields["stored"])
    tried, worse = fields["tried"], Hypothesis("", "another variant", "", HeadVariant(None, {}))  # type: ignore[arg-type]
    others = []
    for name, accepted in fields["variants"].items():
        mistake, changed = Hypothesis(name, name, "", HeadVariant(None, {})), score(accepted)  # type: ignore[arg-type]
        others.append(VariantResult(mistake, changed, *changed.gain(stored, tried)))
    others += [VariantResult(worse, stored, -1.0)] * (tried - len(others))  # not in the file
    others.sort(key=lambda result: result.gain, reverse=True)
    return VariantSearch(VariantResult(None, stored), others)


def states(case: str, count: int) -> set[str]:
    """Return the states of diagnoses that other prompts give."""
    found = set()
    for seed in range(SEEDS):
        search = sample(case, count, seed)
        finding = score_finding(search, {})
        scored = {None: "healthy", "weak": "weak", TOO_FEW: "undecided"}
        found.add("faulty" if search.best else scored[finding and finding.kind])
    return found


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("case", SCORES)
def test_up_to_eight_prompts_carry_no_verdict(case: str, count: int) -> None:
    assert states(case, count) == {"undecided"}


@pytest.mark.parametrize("count", [12, 16, 32])
@pytest.mark.parametrize("case", SOUND)
def test_sound_heads_are_not_called_faulty(case: str, count: int) -> None:
    """Nor is a weak head called healthy, or a good one weak."""
    claimed = {"good head": {"healthy"}, "weak head": {"weak"}}[case]
    assert states(case, count) <= claimed | {"undecided"}
    whole = make_diagnosis("h", "t", [], layout="draftlab", search=sample(case, 64, 0))
    assert whole.state in claimed


@pytest.mark.parametrize("count", [12, 24])
def test_variants_that_differ_by_chance_are_not_called_better(count: int) -> None:
    """Differences whose signs are drawn: 0.5 % of the searches over 16 such variants may err."""
    fields, generator = SCORES["weak head"], np.random.default_rng(1)
    positions = np.array(fields["positions"], float)
    differences = [np.array(v, float) - fields["stored"] for v in fields["variants"].values()]
    errors, trials = 0, 300
    for _ in range(trials):
        rows = generator.permutation(len(positions))[:count]
        zeros = np.zeros(count)
        stored = Score((), zeros, positions[rows], fields["k"])
        for difference in differences:
            signs = generator.choice([-1, 1], count)
            accepted = 3 * signs * difference[rows]  # larger, so that the margin excludes little
            changed = Score((), accepted, positions[rows], fields["k"])
            gain, interval = changed.gain(stored, len(differences))
            if gain >= MARGIN and interval is not None and interval[0] > 0:
                errors += 1
                break
    assert errors <= 0.01 * trials


@pytest.mark.parametrize("case", MISTAKES)
def test_known_mistakes_are_found_with_the_default_number_of_prompts(case: str) -> None:
    """A mistake that fewer prompts show is the same one."""
    count = DoctorSettings().max_prompts
    assert count <= len(SCORES[case]["positions"])
    search = sample(case, count, 0)
    diagnosis = make_diagnosis("h", "t", [], layout="draftlab", search=search)
    assert (diagnosis.state, search.best) == ("faulty", search.others[0])
