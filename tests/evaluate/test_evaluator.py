"""Evaluation: self-contained rows, and metrics that follow from their counters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftlab.engine import engine as engine_module
from draftlab.engine.kv_pool import draft_kv_bytes
from draftlab.evaluate import workload
from draftlab.evaluate.certificate.certify import Certification
from draftlab.evaluate.certificate.result import Certificate, Sampled, SamplingTest
from draftlab.evaluate.decoding_config import NamedHead
from draftlab.evaluate.evaluator import Evaluator
from draftlab.evaluate.metrics import timing
from draftlab.evaluate.results import Report
from draftlab.evaluate.settings import EvalSettings
from draftlab.evaluate.timing import TimedRun, timing_batches
from draftlab.evaluate.warnings import head_warnings, suite_warnings
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.progress import Monitor
from draftlab.target_model.model import Target
from draftlab.target_model.paged_cache import PagedCache
from tests.helpers.evaluation import HEAD_NAMES, evaluate, generation, suite
from tests.helpers.greedy_answers import STOPS, requests
from tests.helpers.monitors import RecordingMonitor


def test_rows_have_conditions_counters_and_times(
    target: Target, head: Eagle3Head, tmp_path: Path
) -> None:
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
            ratio = row.baseline_tpot_ms / row.tpot_ms
            assert row.speedup == pytest.approx(min(ratio, row.tokens_per_step))
            assert row.acceptance_length == 1 + row.accepted / row.drafts
            assert any("few prompts (6)" in warning for warning in row.warnings)
            # The expectations are unconditional, so they fall with the position.
            assert row.expected_acceptance == sorted(row.expected_acceptance, reverse=True)
    greedy = rows[1]
    assert greedy.prompts_equal == 1.0
    assert greedy.lossless.level == "L2"
    assert greedy.expected_acceptance == pytest.approx(
        [a / greedy.drafts for a in greedy.accepted_at]
    )
    assert rows[3].lossless is None
    levels = [row.self_check and row.self_check.level for row in rows]
    assert levels == [None, None, None, 5e-4, 5e-4]  # two rows are tested statistically
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


def test_block_verification_judges_sampled_drafts_alone(target: Target, head: Eagle3Head) -> None:
    token, block = (
        evaluate(target, head, timing_prompts=0, temperatures=(0.8,), verification=verification)
        for verification in ("token", "block")
    )
    assert [r.verification for r in token.rows] == ["token"] * 3
    assert [(r.draft_probs, r.verification) for r in block.rows] == [
        (False, "token"), (False, "token"), (True, "block"),
    ]  # fmt: skip
    for one, other in zip(token.rows[:2], block.rows[:2], strict=True):
        assert one.counters == other.counters
    assert token.rows[2].counters != block.rows[2].counters  # other noise, and another rule


def test_a_k_beyond_training_is_warned_of_before_decoding(target: Target, head: Eagle3Head) -> None:
    class StopAtFirstProgress(RecordingMonitor):
        def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
            raise InterruptedError

    monitor = StopAtFirstProgress()
    with pytest.raises(InterruptedError):
        evaluate(target, head, k=[3, 4], monitor=monitor)
    (line,) = (line for line in monitor.lines if "exceeds" in line)
    assert line.startswith("warning: a head: K = 4 exceeds the 3 steps of training")
    report = evaluate(target, head, k=[3, 4], timing_prompts=0, temperatures=0)
    assert [any("exceeds" in text for text in row.warnings) for row in report.rows] == [
        False, False, True,
    ]  # fmt: skip


def test_too_few_prompts_for_a_calibration_are_said_before_they_are_decoded() -> None:
    settings = EvalSettings(calibrate=True)
    assert any("no calibration of 11 prompts" in text for text in suite_warnings(11, settings))
    assert not any("calibration" in text for text in suite_warnings(12, settings))
    few = settings.model_copy(update={"timing_prompts": 8})  # what would give more is named
    assert suite_warnings(40, few)[-1].endswith("below 10 (eval.timing_prompts)")
    few = settings.model_copy(update={"timing_prompts": 10})
    assert suite_warnings(8, few)[-1].endswith("below 10 (eval.max_prompts, a larger eval.suite)")


@pytest.mark.parametrize(
    ("validated", "windows", "longer"),
    [
        (8, (None,), 3),
        ("8", (None,), 3),  # a stranger's head
        (16, (None,), 0),
        (8, (4, 4), 0),
        (8, (4, None), 3),
        (None, (None,), 0),
    ],
)
def test_prompts_beyond_the_validated_positions_are_named(
    head: Eagle3Head, validated: int | str | None, windows: tuple[int | None, ...], longer: int
) -> None:
    bins = [{"stop": 4}, {"stop": validated}] if validated else []
    fields = {"provenance": {"validation": {"by_position": bins}}}
    config = head.config.model_copy(update=fields)
    prompts = tuple((str(size), (0,) * size) for size in (8, 9, 10, 16))
    other_family = SimpleNamespace(validated_positions=config.validated_positions)
    for own in (config, other_family):
        layers = [SimpleNamespace(window=window) for window in windows]
        named = NamedHead("a head", SimpleNamespace(config=own, layers=layers))
        found = head_warnings(named, replace(suite(), prompts=prompts))
        assert [text.partition(" are longer")[0] for text in found] == [
            f"{longer} of the 4 prompts of {suite().name}"
        ] * bool(longer)
        assert all(("sliding_window" in text) == (own is config) for text in found)


def configs(report: Report) -> list[tuple[float, str | None, int, bool]]:
    return [(r.temperature, r.head, r.k, r.draft_probs) for r in report.rows]


def test_every_configuration_has_a_row_and_plain_decoding_one_per_temperature(
    target: Target, head: Eagle3Head
) -> None:
    report = evaluate(target, head, head, k=[1, 3, 1], temperatures=[0, 0.8], timing_prompts=0)
    assert configs(report) == [
        (0.0, None, 0, False),
        *[(0.0, name, k, False) for name in HEAD_NAMES for k in (1, 3)],
        (0.8, None, 0, False),
        *[(0.8, name, k, probs) for name in HEAD_NAMES for k in (1, 3) for probs in (False, True)],
    ]
    rows = report.rows
    # the same head under two names counts alike; its first drafts do not depend on K at T = 0
    assert rows[1].counters == rows[3].counters
    assert rows[1].accepted_at[0] > 0
    assert report.adviser is None


def test_every_batch_is_timed_and_the_adviser_covers_every_k(
    target: Target, head: Eagle3Head
) -> None:
    report = evaluate(target, head, k=3, temperatures=0, timing_batches=[1, 3])
    plain, drafted = report.rows
    tokens = drafted.tokens_per_step
    assert [(t.batch, t.prompts) for t in drafted.timings] == [(1, 2), (3, 3)]
    first = drafted.timings[0]
    assert (drafted.tpot_ms, drafted.speedup) == (first.tpot_ms, first.speedup)
    for times, base in zip(drafted.timings, plain.timings, strict=True):
        assert times.baseline_tpot_ms == base.tpot_ms
        assert times.speedup == pytest.approx(base.tpot_ms / times.tpot_ms)
        assert times.speedup_ci is None  # two prompts are too few
        assert times.tpot_ms == pytest.approx(max(times.step_ms, base.tpot_ms) / tokens)
        assert times.throughput_tok_s > 0
    # the step at K = 1 is timed for the slope and has no row
    advice = report.adviser["advice"]
    assert [(a["batch"], len(a["predictions"])) for a in advice] == [(1, 3), (3, 3)]
    assert [row.k for row in report.rows] == [0, 3]


def test_a_speed_up_is_tokens_a_step_over_the_ratio_of_step_times() -> None:
    """Also where answers end early, so that lengths differ and one answer has a single token."""
    drafted = [
        generation(1, 0.0, ()),
        generation(9, 0.004, ((2, 2), (2, 2), (2, 1))),
        generation(3, 0.004, ((2, 1),)),
    ]
    plain = [generation(n, 0.003, ((0, 0),) * (n - 1)) for n in (1, 4, 12)]
    times = timing(TimedRun(drafted, 1.0), TimedRun(plain, 1.0), batch=1)
    assert times.step_ms == pytest.approx(4.0)
    assert times.baseline_tpot_ms == pytest.approx(3.0)
    assert times.tokens_per_step == 10 / 4
    assert times.acceptance_at == [1.0, 0.5]
    assert times.tpot_ms == pytest.approx(4.0 / 2.5)
    assert times.speedup == pytest.approx(3.0 * 2.5 / 4.0)
    thrice = timing(TimedRun(3 * drafted, 1.0), TimedRun(3 * plain, 1.0), batch=1)
    low, high = thrice.speedup_ci
    assert 3.0 * 2 / 4.0 <= low < times.speedup < high <= 3.0 * (8 / 3) / 4.0
    assert thrice.step_ratio_ci == pytest.approx((4 / 3, 4 / 3))  # steps do not depend on the text
    assert timing(TimedRun(drafted[:1], 1.0), None, batch=1) is None


def test_copies_of_prompts_do_not_narrow_the_intervals() -> None:
    """A batch larger than the suite repeats its prompts, which adds no prompts."""
    rng = np.random.default_rng(0)
    drafted, plain = [], []
    for _ in range(20):
        steps, accepted = int(rng.integers(4, 12)), int(rng.integers(0, 3))
        tokens = 1 + steps * (1 + accepted)
        drafted.append(generation(tokens, 0.004, ((2, accepted),) * steps))
        plain.append(generation(tokens, 0.003, ((0, 0),) * (tokens - 1)))
    once = timing(TimedRun(drafted, 1.0), TimedRun(plain, 1.0), batch=20, distinct=20)
    copies = timing(TimedRun(8 * drafted, 1.0), TimedRun(8 * plain, 1.0), batch=160, distinct=20)
    assert once == timing(TimedRun(drafted, 1.0), TimedRun(plain, 1.0), batch=20)
    for name in ("tpot_ms_ci", "speedup_ci", "step_ratio_ci"):
        assert getattr(copies, name) == pytest.approx(getattr(once, name))


def test_timed_answers_end_where_counted_answers_end(target: Target, head: Eagle3Head) -> None:
    """With the same limit both passes have the same answers, so the prediction is what is timed."""
    counts = {"timing_prompts": 6, "timing_tokens": 16, "max_new_tokens": 16}
    report = evaluate(target, head, k=[1, 3], temperatures=0.8, **counts)
    for row in report.rows:
        (timed,) = row.timings
        assert timed.tokens_per_step == pytest.approx(row.tokens_per_step)
    for advice in report.adviser["advice"]:
        for p in advice["predictions"]:
            if p["k"] != 2 and p["step_ms"] > advice["plain_ms"]:  # K = 2 was timed, not counted
                assert p["speedup"] == pytest.approx(p["timed_speedup"])


def test_all_arms_share_one_kv_pool(
    target: Target, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = []
    new_pool = workload.new_kv_pool

    def record(*arguments: Any, **options: Any) -> PagedCache:
        pools.append(options | {"pool": new_pool(*arguments, **options)})
        return pools[-1]["pool"]

    for module in (workload, engine_module):
        monkeypatch.setattr(module, "new_kv_pool", record)
    small = {"max_new_tokens": 4, "timing_tokens": 4}
    evaluate(target, head, k=[2, 3], temperatures=[0, 0.8], timing_batches=[1, 5], **small)
    (one,) = pools
    assert one["batch"] == 5
    # four arms draft, and K = 1, which is timed for the adviser
    assert one["draft_bytes"] == 5 * draft_kv_bytes(head)
    assert one["monitor"] is not None  # which tells if memory is short


def test_timing_batches_are_full_and_copies_have_their_own_noise() -> None:
    prompts = requests(3, seed=1)
    assert [[r.id for r in batch] for batch in timing_batches(prompts, 2, 1)] == [["1-0"], ["1-1"]]
    (batch,) = timing_batches(prompts, 2, 5)
    assert len({r.id for r in batch}) == 5
    assert [r.prompt_ids for r in batch[3:]] == [r.prompt_ids for r in prompts[:2]]
    assert [len(batch) for batch in timing_batches(prompts, 7, 4)] == [4, 4]


def test_each_sampled_row_has_the_test_of_its_own_sampling(
    target: Target, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arm(row: Sampled) -> SamplingTest:
        return SamplingTest(
            **vars(row), level="L3", test=row.name, passed=False, p_value=1e-9, n=500, tests=[]
        )  # fmt: skip

    def run(_: Any, prompts: Any, k: int, rows: list[Sampled]) -> Certificate:
        tested = [arm(row) for row in rows if row.temperature < 1]
        return Certificate(
            level="L3", prompts_equal=1.0, passed=False, faults=["p = 1e-9"], num_tests=8,
            arms=tested, lines=["it differs"],
        )  # fmt: skip

    monkeypatch.setattr(Certification, "run", run)
    monitor, temperatures = RecordingMonitor(), (0.0, 0.8, 1.2)
    settings = {"timing_prompts": 0, "certify": True, "top_p": 0.9, "k": [2, 3]}
    report = evaluate(target, head, monitor=monitor, temperatures=temperatures, **settings)
    assert "certificate of a head: it differs" in monitor.lines
    for row in (row for row in report.rows if row.head):
        if row.temperature == 0:
            assert row.lossless.level == "L2"
        elif row.temperature == 1.2:
            assert row.lossless is None  # no test covers it
        else:
            own = Sampled(temperature=0.8, k=row.k, draft_probs=row.draft_probs, top_p=0.9)
            assert (row.lossless.level, row.lossless.test) == ("L3", own.name)
            assert "certificate failed: p = 1e-9" in row.warnings
    assert report.environment["certificates"]["a head"]["passed"] is False


def test_a_certificate_compares_prompts_of_every_suite(
    target: Target, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str, tuple[int, ...]]] = []

    def run(_: Any, prompts: Any, *__: Any) -> Certificate:
        found.extend(prompts)
        return Certificate(
            level="L2", prompts_equal=1.0, passed=True, faults=[], num_tests=0, arms=[], lines=[]
        )

    monkeypatch.setattr(Certification, "run", run)
    suites = [suite(2), replace(suite(3), name="other")]  # with the same ids
    settings = EvalSettings(certify=True, k=2, timing_prompts=0, max_new_tokens=4)
    heads = [NamedHead("a head", head)]
    Evaluator(target, heads, suites, STOPS, settings, monitor=Monitor()).run()
    assert [id_.split()[0] for id_, _ in found] == ["toy", "other", "toy", "other", "other"]
    assert len({id_ for id_, _ in found}) == 5


def test_without_a_k_the_first_temperature_measures_several(
    target: Target, head: Eagle3Head
) -> None:
    """So evaluation, advice and export can agree on the fastest."""
    settings = {"k": None, "temperatures": [0, 0.8], "timing_prompts": 6}
    report = evaluate(target, head, **settings)
    assert configs(report) == [
        (0.0, None, 0, False),
        *[(0.0, "a head", k, False) for k in (1, 2, 3)],
        (0.8, None, 0, False),
        *[(0.8, "a head", 3, probs) for probs in (False, True)],
    ]
    for row in report.rows[1:4]:
        assert row.speedup is not None or row.timings[0].disturbance
