"""The verdict of a report: one sentence for each head."""

from __future__ import annotations

import pytest

from draftlab.evaluate.results import Report
from draftlab.report.verdict import title, verdicts
from tests.helpers import sample_report as sample


def advice(k: int, **speedups: float) -> dict[str, object]:
    """Return the adviser's entry for the sample's head at temperature 0, with speed-ups by K."""
    row = sample.row()
    keys = {key: getattr(row, key) for key in ("engine", "head", "temperature", "draft_probs")}
    predictions = [{"k": int(name[1:]), "speedup": value} for name, value in speedups.items()]
    return {"advice": [keys | {"best_k": k, "predictions": predictions}]}


def report(speedup: float | None, adviser: dict[str, object] | None = None) -> Report:
    """Return a report of a row without drafting and rows at K = 4 and, slower, at K = 5."""
    interval = None if speedup is None else (speedup - 0.05, speedup + 0.05)
    other = None if speedup is None else (0.4, 0.6)
    rows = [
        sample.baseline(),
        sample.row(k=4, speedup=speedup, speedup_ci=interval),
        sample.row(k=5, speedup=speedup and 0.5, speedup_ci=other),
        sample.row(k=4, temperature=0.8, speedup=speedup and 9.0, speedup_ci=other),
    ]
    return sample.report(rows).model_copy(update={"adviser": adviser})


@pytest.mark.parametrize(
    ("speedup", "adviser", "expected"),
    [
        (1.6, None, "At T = 0 and K = 4 head makes decoding 1.60× as fast [1.55, 1.65]."),
        (
            1.6,
            advice(4, k4=1.7),
            "At T = 0 and K = 4 head makes decoding 1.60× as fast [1.55, 1.65]; K = 4 is best.",
        ),
        (
            1.6,
            advice(3, k3=1.5, k4=1.4),
            "At T = 0 and K = 4 head makes decoding 1.60× as fast [1.55, 1.65]; over the whole "
            "suite K = 3 would be best (predicted 1.50×, K = 4: 1.40×).",
        ),
        (
            0.8,
            advice(3, k3=1.1),
            "At T = 0 and K = 4 head slows decoding down: 0.80× as fast [0.75, 0.85]; over the "
            "whole suite K = 3 would be best (predicted 1.10×).",
        ),
        (
            0.8,
            advice(3, k3=0.9, k4=0.8),
            "At T = 0 and K = 4 head slows decoding down: 0.80× as fast [0.75, 0.85].",
        ),
    ],
)
def test_the_verdict_is_of_the_fastest_row_at_the_lowest_temperature(
    speedup: float, adviser: dict[str, object] | None, expected: str
) -> None:
    assert verdicts(report(speedup, adviser)) == [expected]


def test_without_times_the_verdict_is_the_acceptance_length() -> None:
    (sentence,) = verdicts(report(None))
    assert sentence.endswith("; no times were measured.")
    assert "At T = 0 and K = 5 head has AL 2." in sentence
    assert verdicts(sample.report([sample.baseline()])) == []


def test_the_title_names_head_and_target_without_their_folders() -> None:
    named = report(1.6).model_copy(update={"target": {"name": "/models/llama"}})
    assert title(named) == "Draft head head for target llama"
    plain = named.model_copy(update={"rows": named.rows[:1]})
    assert title(plain) == "Plain decoding of target llama"
