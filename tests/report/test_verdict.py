"""The verdict of a report: one sentence for each head."""

from __future__ import annotations

from typing import Any

import pytest

from draftlab.evaluate.results import Report, Row, drafting_pays
from draftlab.evaluate.warnings import row_warnings
from draftlab.report.verdict import verdicts
from tests.helpers import sample_report as sample


def advice(k: int, **speedups: float) -> dict[str, object]:
    """Return the adviser's entry for the sample's head at temperature 0, with speed-ups by K."""
    row = sample.row()
    names = ("suite", "engine", "head", "temperature", "draft_probs", "batch")
    keys = {name: getattr(row, name) for name in names}
    predictions = [{"k": int(name[1:]), "speedup": value} for name, value in speedups.items()]
    return {"advice": [keys | {"best_k": k, "predictions": predictions}]}


def report(speedup: float | None, adviser: dict[str, object] | None = None) -> Report:
    """Return a report of a row without drafting and rows at K = 4 and, slower, at K = 5."""
    interval = None if speedup is None else (speedup - 0.05, speedup + 0.05)
    rows = [
        row_of(speedup, interval),
        row_of(speedup and 0.5, speedup and (0.4, 0.6), k=5),
        row_of(speedup and 9.0, speedup and (8.0, 9.9), temperature=0.8),
    ]
    return sample.report([sample.baseline(), *rows]).model_copy(update={"adviser": adviser})


def row_of(speedup: float | None, interval: tuple[float, float] | None, **changes: Any) -> Row:
    """Return a row that was timed at batch 1 and has this speed-up."""
    times = {"speedup": speedup, "speedup_ci": interval}
    row = sample.row(**changes | times)
    return row if speedup is None else sample.with_timing(row, 10.0, prompts=64, **times)


BEGINNING = "At T = 0, batch 1 and K = 4, head "
PROMPTS = "(tokens a step and step times of 64 prompts)"


@pytest.mark.parametrize(
    ("speedup", "adviser", "effect", "end"),
    [
        (1.6, None, "makes decoding 1.60× as fast [1.55, 1.65]", "."),
        (
            1.6,
            advice(4, k3=1.5, k4=1.6),
            "makes decoding 1.60× as fast [1.55, 1.65]",
            "; no other K up to 4 is clearly faster.",
        ),
        (
            1.6,
            advice(3, k3=1.7, k4=1.6),
            "makes decoding 1.60× as fast [1.55, 1.65]",
            "; K = 3 would be faster (predicted 1.70×).",
        ),
        (0.8, None, "slows decoding down: 0.80× as fast [0.75, 0.85]", "."),
        (
            0.99,
            None,
            "has no clear effect on the speed of decoding: 0.99× as fast [0.94, 1.04]",
            ".",
        ),
    ],
)
def test_the_verdict_is_of_the_fastest_row_at_the_lowest_temperature(
    speedup: float, adviser: dict[str, object] | None, effect: str, end: str
) -> None:
    one = report(speedup, adviser)
    assert verdicts(one) == [f"{BEGINNING}{effect} {PROMPTS}{end}"]
    warnings = " ".join(row_warnings(one.rows[1]))
    assert ("do not show whether drafting pays at batch 1" in warnings) == ("no clear" in effect)
    assert ("slows decoding down at batch 1" in warnings) == ("slows" in effect)


def test_each_engine_has_its_verdict() -> None:
    """One whose machine was disturbed takes none from another."""
    ours = row_of(1.3, (1.25, 1.35), engine="draftlab")
    vllm = {"engine": "vllm (V1, cpu)"}
    both = sample.report([ours, row_of(1.6, (1.55, 1.65), **vllm)])
    first, second = verdicts(both)
    assert first.startswith(f"With draftlab at{BEGINNING[2:]}makes decoding 1.30× as fast")
    assert second.startswith(f"With vllm (V1, cpu) at{BEGINNING[2:]}makes decoding 1.60× as fast")
    disturbed = sample.with_timing(sample.row(speedup=None, **vllm), 9.0, disturbance="disturbed")
    first, second = verdicts(sample.report([ours, disturbed]))
    assert "makes decoding 1.30× as fast" in first
    assert second.endswith("; no verdict: disturbed; repeat the evaluation.")


def test_without_times_the_verdict_is_the_acceptance_length() -> None:
    (sentence,) = verdicts(report(None))
    assert sentence.endswith("; no times were measured.")
    assert "At T = 0 and K = 5, head has AL 2." in sentence
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
    assert "] (tokens a step of 64 prompts, step times of 10 of them); no" in verdicts(some)[0]
    assert f"] {PROMPTS}; no other K up to 4 is clearly faster." in verdicts(every)[0]
    repeated = timed_report(prompts=256)  # a batch of 256 decodes each of 64 prompts 4 times
    assert verdicts(repeated) == verdicts(every)


def test_the_advice_is_that_of_the_batch() -> None:
    other = advice(3, k3=1.7, k4=1.6)["advice"][0] | {"batch": 8}
    own = advice(4, k3=1.5, k4=1.6)["advice"][0]
    (sentence,) = verdicts(report(1.6, {"advice": [other, own]}))
    assert sentence.endswith("; no other K up to 4 is clearly faster.")
    (sentence,) = verdicts(report(1.6, {"advice": [other]}))
    assert sentence.endswith(f"{PROMPTS}.")


@pytest.mark.parametrize(
    ("interval", "pays"),
    [
        ((1.01, 1.2), True),
        ((1.004, 1.2), None),  # "1.00" in print
        ((0.8, 0.99), False),
        ((0.8, 0.996), None),
        (None, None),
    ],
)
def test_drafting_pays_as_the_printed_interval_says(
    interval: tuple[float, float] | None, pays: bool | None
) -> None:
    assert drafting_pays(interval) is pays


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


def test_too_few_timed_prompts_give_no_verdict() -> None:
    (sentence,) = verdicts(timed_report(prompts=1, speedup_ci=None))
    assert "×" not in sentence
    assert "no verdict from 1 timed prompt: an interval needs 6" in sentence


def test_each_suite_has_its_verdict() -> None:
    report = timed_report()
    rows = [row.model_copy(update={"suite": "data/mt-bench.jsonl"}) for row in report.rows]
    first, second = verdicts(report.model_copy(update={"rows": [*report.rows, *rows]}))
    assert "head makes decoding of held-out" in first
    assert "head makes decoding of mt-bench " in second
