"""The verdict of a report: one sentence for each head."""

from __future__ import annotations

import pytest

from draftlab.evaluate.results import Report
from draftlab.report.verdict import title, verdicts
from tests.helpers import sample_report as sample


def advice(k: int, **speedups: float) -> dict[str, object]:
    """Return the adviser's entry for the sample's head at temperature 0, with speed-ups by K."""
    row = sample.row()
    keys = {
        key: getattr(row, key) for key in ("suite", "engine", "head", "temperature", "draft_probs")
    }
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
            advice(4, k4=1.6),
            "At T = 0 and K = 4 head makes decoding 1.60× as fast [1.55, 1.65]; K = 4 is best.",
        ),
        (
            1.6,
            advice(3, k3=1.7, k4=1.6),
            "At T = 0 and K = 4 head makes decoding 1.60× as fast [1.55, 1.65]; K = 3 would "
            "be best (predicted 1.70×).",
        ),
        (
            0.8,
            advice(3, k3=1.1),
            "At T = 0 and K = 4 head slows decoding down: 0.80× as fast [0.75, 0.85]; K = 3 would "
            "be best (predicted 1.10×).",
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


def timed_report(**changes: object) -> Report:
    """Return a report of rows with and without drafts that were timed at batch 1."""
    rows = [sample.with_timing(sample.baseline(), sample.PLAIN_MS)]
    for k, step_ms in ((4, 12.0), (1, 11.5)):
        row = sample.with_timing(sample.row(keep=0.62, k=k), step_ms, **changes)
        names = ("speedup", "speedup_ci", "tpot_ms")
        times = {name: getattr(row.timings[0], name) for name in names}
        rows.append(row.model_copy(update=times))
    return sample.with_adviser(rows)


def test_the_verdict_says_of_which_prompts_it_is() -> None:
    some, every = timed_report(), timed_report(prompts=64)
    assert (
        "(tokens a step of 64 prompts, step times of 10 of them); K = 4 is best."
        in verdicts(some)[0]
    )
    assert "] (tokens a step and step times of 64 prompts); K = 4 is best." in verdicts(every)[0]


def test_verdict_and_adviser_have_one_speed_up() -> None:
    """The timed prompts' own speed-up, three quarters of the suite's, is in neither."""
    report = timed_report(timed_speedup=1.42, timed_speedup_ci=(1.35, 1.6))
    row = report.rows[1]
    (advice,) = report.adviser["advice"]
    own = advice["predictions"][row.k - 1]
    assert (own["speedup"], own["speedup_ci"]) == (row.speedup, row.speedup_ci)
    number = "{:.2f}× {}[{:.2f}, {:.2f}]"
    assert number.format(row.speedup, "as fast ", *row.speedup_ci) in verdicts(report)[0]
    assert f"best K = {row.k} at batch 1: " in advice["text"]
    assert number.format(row.speedup, "", *row.speedup_ci) + ", measured" in advice["text"]
    assert "1.42" not in verdicts(report)[0] + advice["text"]


def test_a_disturbed_machine_gives_no_verdict() -> None:
    report = timed_report(disturbance="the machine was disturbed", speedup=None, speedup_ci=None)
    (sentence,) = verdicts(report)
    length = f"{report.rows[1].acceptance_length:.2f}"
    reason = "no verdict: the machine was disturbed; repeat the evaluation."
    assert sentence.endswith(f" has AL {length}; {reason}")
    assert report.adviser is None


def test_too_few_timed_prompts_give_no_verdict() -> None:
    (sentence,) = verdicts(timed_report(prompts=1, speedup_ci=None))
    assert "×" not in sentence
    assert "no verdict from 1 timed prompt: an interval needs 6" in sentence


def test_each_suite_has_its_verdict() -> None:
    report = timed_report()
    rows = [row.model_copy(update={"suite": "data/mt-bench.jsonl"}) for row in report.rows]
    first, second = verdicts(report.model_copy(update={"rows": [*report.rows, *rows]}))
    assert "head makes decoding of held-out" in first
    assert "head makes decoding of mt-bench.jsonl" in second


def test_the_title_names_head_and_target_without_their_folders() -> None:
    named = report(1.6).model_copy(update={"target": {"name": "/models/llama"}})
    assert title(named) == "Draft head head for target llama"
    plain = named.model_copy(update={"rows": named.rows[:1]})
    assert title(plain) == "Plain decoding of target llama"
