"""Evaluation: rows that stand alone, and figures that follow from their counters."""

from __future__ import annotations

import pytest
import torch

from draftlab.errors import UserError
from draftlab.evaluate.evaluator import EvalSettings, Evaluator, NamedHead, environment
from draftlab.evaluate.results import Report, Timing
from draftlab.evaluate.timing import one_thread, rounds
from draftlab.evaluate.warnings import row_warnings
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.progress import Monitor
from draftlab.target_model.model import Target
from draftlab.text.suites import Suite
from tests.helpers import sample_report as sample
from tests.helpers.greedy_answers import STOPS, requests


def suite(count: int = 6) -> Suite:
    return Suite("toy", "t", tuple((r.id, r.prompt_ids) for r in requests(count, seed=30)))


class Heard(Monitor):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def evaluate(
    target: Target, *heads: Eagle3Head, monitor: Monitor | None = None, **settings: object
) -> Report:
    fields = {"max_new_tokens": 16, "batch": 4, "timing_prompts": 2, "timing_tokens": 8}
    names = ("a head", "another")
    evaluator = Evaluator(
        target,
        [NamedHead(name, head) for name, head in zip(names, heads, strict=False)],
        suite(),
        STOPS,
        EvalSettings.model_validate(fields | settings),
        monitor=monitor or Monitor(),
    )
    return evaluator.run()


def test_rows_of_every_temperature_and_mode(target: Target, head: Eagle3Head, tmp_path) -> None:
    report = evaluate(target, head)
    rows = report.rows
    assert [(r.temperature, r.drafter, r.draft_probs) for r in rows] == [
        (0.0, "none", False),
        (0.0, "chain", False),
        (0.8, "none", False),
        (0.8, "chain", False),
        (0.8, "chain", True),
    ]
    for row in rows:
        row.counters.check_tokens(row.output_tokens, row.prompts)
        assert (row.prompts, row.max_new_tokens, row.batch) == (6, 16, 4)
        assert row.suite_sha256 == suite().sha256
        assert row.tpot_ms is not None
        assert row.ttft_ms is not None
        if row.drafter == "none":
            assert (row.head, row.k, row.drafts, row.speedup) == (None, 0, 0, None)
            assert row.acceptance_length is row.expected_acceptance is None
            assert row.undrafted_steps > 0
        else:
            assert (row.head, row.k, row.k_trained) == ("a head", 3, 3)
            plain = next(r for r in rows if r.temperature == row.temperature)
            assert row.baseline_tpot_ms == plain.tpot_ms
            assert row.speedup == pytest.approx(row.baseline_tpot_ms / row.tpot_ms)
            assert row.acceptance_length == 1 + row.accepted / row.drafts
            assert any("few prompts (6)" in warning for warning in row.warnings)
            # Probabilities are of what was drafted: unconditional, so they fall with depth.
            assert row.expected_acceptance == sorted(row.expected_acceptance, reverse=True)
    greedy = rows[1]
    assert greedy.prompts_equal == 1.0
    assert greedy.lossless.level == "L2"
    assert greedy.expected_acceptance == pytest.approx(
        [a / greedy.drafts for a in greedy.accepted_at]
    )
    assert rows[3].lossless is None
    report.write(tmp_path / "report.json")
    assert Report.read(tmp_path / "report.json").rows == rows


def test_counters_do_not_depend_on_the_batch(target: Target, head: Eagle3Head) -> None:
    one, six = (
        evaluate(target, head, batch=batch, timing_prompts=0, temperatures=(0.8,), draft_probs="on")
        for batch in (1, 6)
    )
    assert [r.counters for r in one.rows] == [r.counters for r in six.rows]
    assert {(r.tpot_ms, r.speedup, r.step_ms) for r in one.rows} == {(None, None, None)}
    assert one.environment["timing"] is None


def test_without_a_head_only_plain_rows(target: Target) -> None:
    report = evaluate(target, timing_prompts=0, max_prompts=2)
    assert [(r.drafter, r.prompts) for r in report.rows] == [("none", 2), ("none", 2)]


def test_a_k_beyond_training_is_said(target: Target, head: Eagle3Head) -> None:
    class First(Heard):
        """Stops the evaluation as it begins to decode."""

        def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
            raise InterruptedError

    heard = First()
    with pytest.raises(InterruptedError):
        evaluate(target, head, k=[3, 4], monitor=heard)
    said = [line for line in heard.lines if "exceeds" in line]
    deep = "K = 4 exceeds the 3 steps of training: its last drafts are guesses"
    assert said == [f"warning: a head: {deep}"]  # before the time it takes
    report = evaluate(target, head, k=[3, 4], timing_prompts=0, temperatures=0)
    assert [deep in row.warnings for row in report.rows] == [False, False, True]


def test_an_empty_suite_is_refused(target: Target) -> None:
    with pytest.raises(UserError, match="expected prompts to evaluate, found none"):
        Evaluator(target, [], suite(0), STOPS, EvalSettings(), monitor=Monitor())


def test_one_thread_inside_only() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with one_thread(torch.device("cpu")):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_environment_names_what_ran() -> None:
    found = environment(torch.device("cpu"))
    assert found["torch"] == torch.__version__
    assert found["device"].startswith("cpu")


def cells(report: Report) -> list[tuple[float, str | None, int, bool]]:
    return [(r.temperature, r.head, r.k, r.draft_probs) for r in report.rows]


def test_the_grid_decodes_plainly_once_a_temperature(target: Target, head: Eagle3Head) -> None:
    report = evaluate(target, head, head, k=[1, 3, 1], temperatures=[0, 0.8], timing_prompts=0)
    both = ("a head", "another")
    assert cells(report) == [
        (0.0, None, 0, False),
        *[(0.0, name, k, False) for name in both for k in (1, 3)],
        (0.8, None, 0, False),
        *[(0.8, name, k, probs) for name in both for k in (1, 3) for probs in (False, True)],
    ]
    rows = report.rows
    # the same head under two names counts alike; its first drafts do not depend on K at T = 0
    assert rows[1].counters == rows[3].counters
    assert rows[1].accepted_at[0] > 0
    assert report.adviser is None


def test_rows_below_the_threshold_draft_greedily(target: Target, head: Eagle3Head) -> None:
    asked = {"temperatures": [0.5, 1.0], "draft_probs": "both", "timing_prompts": 0}
    report = evaluate(target, head, greedy_below=0.8, **asked)
    assert [(t, probs) for t, name, _, probs in cells(report) if name] == [
        (0.5, False), (1.0, False), (1.0, True),
    ]  # fmt: skip
    plain = evaluate(target, head, **asked)
    assert [r.counters for r in report.rows if r.temperature == 0.5] == [
        r.counters for r in plain.rows if r.temperature == 0.5 and not r.draft_probs
    ]


def test_every_batch_is_timed_and_the_adviser_covers_every_k(
    target: Target, head: Eagle3Head
) -> None:
    report = evaluate(target, head, k=3, temperatures=0, timing_batches=[1, 3])
    plain, drafted = report.rows
    assert [(t.batch, t.prompts) for t in drafted.timings] == [(1, 2), (3, 3)]
    assert (drafted.tpot_ms, drafted.speedup) == (
        drafted.timings[0].tpot_ms, drafted.timings[0].speedup,
    )  # fmt: skip
    for one, base in zip(drafted.timings, plain.timings, strict=True):
        assert one.baseline_tpot_ms == base.tpot_ms
        assert one.speedup == pytest.approx(base.tpot_ms / one.tpot_ms)
        assert one.speedup_ci[0] <= one.speedup <= one.speedup_ci[1]
        assert one.throughput_tok_s > 0
        assert one.floor_ms is None  # no bandwidth is claimed of a CPU
    # the step at K = 1 was timed for the slope, and is no row
    assert [(a["batch"], len(a["predictions"])) for a in report.adviser["advice"]] == [
        (1, 3),
        (3, 3),
    ]
    assert [row.k for row in report.rows] == [0, 3]


def test_timed_rounds_are_full_and_copies_have_their_own_noise() -> None:
    asked = requests(3, seed=1)
    assert [[r.id for r in batch] for batch in rounds(asked, 2, 1)] == [["1-0"], ["1-1"]]
    (batch,) = rounds(asked, 2, 5)
    assert len({r.id for r in batch}) == 5
    assert [r.prompt_ids for r in batch[3:]] == [r.prompt_ids for r in asked[:2]]
    assert [len(batch) for batch in rounds(asked, 7, 4)] == [4, 4]


def test_what_is_decoded_and_what_is_doubtful_is_said(target: Target, head: Eagle3Head) -> None:
    heard = Heard()
    evaluate(target, head, monitor=heard, temperatures=0, max_prompts=4)
    text = "\n".join(heard.lines)
    assert "4 of 6 prompts of toy, up to 16 tokens each; T = 0; K = 3" in text
    assert "few prompts (4)" in text
    assert "few timed prompts (2)" in text


@pytest.mark.parametrize(
    ("speedup", "interval", "said"),
    [
        (0.8, (0.7, 0.9), "drafting slows decoding down here: 0.80× [0.70, 0.90] at batch 1"),
        (0.9, (0.8, 1.1), "drafting pays here is not shown either way: 0.90× [0.80, 1.10] at ba"),
        (1.1, (0.8, 1.3), "drafting pays here is not shown either way: 1.10× [0.80, 1.30] at ba"),
        (1.2, (1.1, 1.3), ""),
        (0.8, None, "drafting slows decoding down here: 0.80× at batch 1"),
        (None, None, ""),
    ],
)
def test_what_times_show_is_said_and_no_more(
    speedup: float | None, interval: tuple[float, float] | None, said: str
) -> None:
    times = {"batch": 1, "prompts": 9, "tpot_ms": 1.0, "tpot_ms_ci": (1.0, 1.0), "ttft_ms": 1.0}
    timing = Timing(**times, step_ms=1.0, speedup=speedup, speedup_ci=interval)
    found = row_warnings(sample.row(timings=[timing]))
    assert len(found) == bool(said)
    assert said in "".join(found)


def test_the_reference_engine_counts_the_same(target: Target, head: Eagle3Head) -> None:
    mine, reference = (
        evaluate(target, head, engine=engine, timing_prompts=0) for engine in ("paged", "reference")
    )
    assert [r.counters for r in mine.rows] == [r.counters for r in reference.rows]
    assert {r.engine for r in mine.rows} == {"draftlab"}
    assert {r.engine for r in reference.rows} == {"draftlab-reference"}


def test_a_certificate_fills_the_sampled_rows(
    target: Target, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftlab.evaluate.certificate import certify

    made = certify.Certificate(
        level="L3", test="G-test", statistic=99.0, p_value=1e-9, n=500, n_for_99_power=400,
        prompts_equal=1.0, passed=False, faults=["p = 1e-9"], arms=[], lines=["it differs"],
    )  # fmt: skip
    monkeypatch.setattr(certify, "certify", lambda *_, **__: made)
    heard = Heard()
    report = evaluate(target, head, monitor=heard, timing_prompts=0, certify=True)
    assert "certificate of a head: it differs" in heard.lines
    greedy, sampled = report.rows[1], report.rows[4]
    assert greedy.lossless.level == "L2"
    assert (sampled.lossless.level, sampled.lossless.p_value, sampled.lossless.n) == (
        "L3", 1e-9, 500,
    )  # fmt: skip
    assert "certificate failed: p = 1e-9" in sampled.warnings
    assert report.rows[3].lossless == sampled.lossless
    assert report.environment["certificates"]["a head"]["passed"] is False
