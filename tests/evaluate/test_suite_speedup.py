"""The speed-up of a suite: its own tokens a step, with the step times of the timed prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftlab.engine.sampling import Generation
from draftlab.evaluate.adviser import advise
from draftlab.evaluate.decoding_config import NamedHead
from draftlab.evaluate.evaluator import new_rows
from draftlab.evaluate.metrics import (
    acceptance_fields,
    equality_fields,
    timing,
    without_disturbed,
)
from draftlab.evaluate.results import Timing
from draftlab.evaluate.settings import EvalSettings
from draftlab.evaluate.timing import TimedRun
from draftlab.evaluate.workload import EngineResults, Workload
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.hub.card import _eval_results
from draftlab.intervals import MIN_INTERVAL_PROMPTS
from draftlab.progress import Monitor
from draftlab.report.verdict import verdicts
from draftlab.target_model.model import Target
from draftlab.text.suites import Suite
from tests.helpers import evaluation
from tests.helpers import sample_report as sample

PLAIN_MS, STEP_MS = 3.0, 4.0


def generation(
    steps: int, accepted: float, step_ms: float, *, k: int = 2, name: str = "p"
) -> Generation:
    """Return an answer of so many steps after its first token, with `accepted` drafts a step."""
    counts = [int((i + 1) * accepted) - int(i * accepted) for i in range(steps)]
    tokens = 1 + steps + sum(counts)
    outcomes = tuple((k, count) for count in counts)
    return evaluation.generation(tokens, 1e-3 * step_ms, outcomes, k=k, name=name)


def plain(tokens: int, step_ms: float = PLAIN_MS) -> Generation:
    return generation(tokens - 1, 0, step_ms, k=0)


def times(
    drafted: list[Generation], base: list[Generation], counted: list[Generation] | None
) -> Timing:
    found = timing(TimedRun(drafted, 1.0), TimedRun(base, 1.0), batch=1, counted=counted)
    assert found is not None
    return found


def test_the_speed_up_is_that_of_the_suite() -> None:
    """The timed prompts accept 1 draft a step, the suite 1.5."""
    drafted = [generation(10, 1.0, STEP_MS) for _ in range(8)]
    suite = [generation(20, 1.5, 99.0) for _ in range(40)]  # its own times play no part
    found = times(drafted, [plain(21)] * 8, suite)
    assert found.tokens_per_step == 2.0
    assert found.tpot_ms == pytest.approx(STEP_MS / 2.5)
    assert found.baseline_tpot_ms == pytest.approx(PLAIN_MS)
    assert found.speedup == pytest.approx(PLAIN_MS * 2.5 / STEP_MS)
    assert found.timed_speedup == pytest.approx(PLAIN_MS * 2.0 / STEP_MS)
    assert found.speedup_ci == pytest.approx((found.speedup, found.speedup))
    assert found.timed_speedup_ci == pytest.approx((found.timed_speedup, found.timed_speedup))
    assert found.step_ms == pytest.approx(STEP_MS)


def test_where_all_prompts_are_timed_it_is_the_ratio_of_their_times() -> None:
    """Also the interval is that of the ratio, since both parts are drawn together."""
    generator = np.random.default_rng(1)
    shapes = [(int(generator.integers(4, 30)), generator.random() * 2) for _ in range(12)]
    drafted = [generation(n, a, STEP_MS + a) for n, a in shapes]
    base = [
        plain(len(g.token_ids), PLAIN_MS + n / 40)
        for g, (n, _) in zip(drafted, shapes, strict=True)
    ]
    found = times(drafted, base, drafted)
    assert found.speedup == pytest.approx(found.timed_speedup)
    assert found.speedup_ci == pytest.approx(found.timed_speedup_ci)
    apart = times(drafted, base, drafted * 2)  # other prompts, drawn by themselves
    assert apart.speedup == pytest.approx(found.speedup)
    assert apart.speedup_ci != pytest.approx(found.speedup_ci, rel=1e-3)


def test_a_step_within_its_interval_of_plain_decoding_is_no_disturbance() -> None:
    def disturbed(low: float, high: float) -> bool:
        drafted = [generation(10, 1.0, PLAIN_MS) for _ in range(8)]
        found = times(drafted, [plain(21)] * 8, None)
        found = found.model_copy(update={"step_ratio_ci": (low, high)})
        (after,) = without_disturbed({"a": found}).values()
        assert (after.speedup is None) == bool(after.disturbance)
        return bool(after.disturbance)

    assert disturbed(0.9, 0.98)
    assert not disturbed(0.9, 1.0)
    assert not disturbed(0.98, 0.995)  # answers of other lengths


@pytest.mark.parametrize(("dtype", "level"), [(torch.float32, "L2"), (torch.bfloat16, "L3")])
def test_equal_tokens_prove_equality_in_float32_alone(dtype: torch.dtype, level: str) -> None:
    same, other = plain(8), plain(9)
    assert equality_fields([same], [same], dtype)["lossless"].level == level
    fields = equality_fields([same, same], [same, other], dtype)
    assert (fields["prompts_equal"], fields["lossless"].level) == (0.5, "L3")


def test_the_interval_holds_the_variation_of_both_parts() -> None:
    steady, varied = [generation(10, 1.0, STEP_MS)] * 10, []
    for i in range(10):
        varied.append(generation(10, 1.0, STEP_MS * (0.7 + 0.06 * i)))
    suite = [generation(20, 0.2 * i, 1.0) for i in range(10)] * 3
    same = [generation(20, 1.0, 1.0)] * 30
    base = [plain(21)] * 10

    def width(drafted: list[Generation], counted: list[Generation]) -> float:
        low, high = times(drafted, base, counted).speedup_ci or (np.nan, np.nan)
        return float(np.log(high / low))

    assert width(steady, same) == pytest.approx(0)
    steps, tokens = width(varied, same), width(steady, suite)
    assert min(steps, tokens) > 0.1
    assert width(varied, suite) == pytest.approx(np.hypot(steps, tokens), rel=0.15)


@pytest.mark.parametrize("faulty", [3, 2], ids=["a row", "a probe"])
def test_a_drafted_step_faster_than_a_plain_one_leaves_no_speed_up_of_its_batch(
    target: Target, head: Eagle3Head, faulty: int
) -> None:
    """All K's of a temperature are compared with the same plain decoding; T = 0.8 has its own."""
    names = [f"q{i}" for i in range(8)]
    suite = Suite("toy", "t", tuple((n, (1,)) for n in names), dict.fromkeys(names, "c"))
    settings = EvalSettings(k=(1, 3), temperatures=(0, 0.8), draft_probs="off")
    workload = Workload(
        target, (NamedHead("a head", head),), suite, frozenset(), settings, Monitor()
    )
    results = EngineResults("draftlab", "1")
    for t in settings.temperatures:
        runs = {}
        for config in [*workload.configs, replace(workload.configs[1], k=2)]:
            wrong = t == 0 and config.k == faulty
            step_ms = 2.0 if wrong else PLAIN_MS + config.k
            answers = [
                generation(20, 0.7 * bool(config.k), step_ms, k=config.k, name=name)
                for name in names
            ]
            runs[config] = TimedRun(answers, 1.0)
            if config.k != 2:
                results.generations[t, config] = answers
        workload.add_timings(results, runs, t, 1)
    rows = new_rows(workload, [results], 1)
    found = {(row.temperature, row.k): row for row in rows if row.k}
    assert found.keys() == {(t, k) for t in (0, 0.8) for k in (1, 3)}
    for (t, k), row in found.items():
        timing, (category,) = row.timings[0], row.categories
        speedups = (
            row.speedup, row.speedup_ci, timing.speedup, timing.speedup_ci,
            timing.timed_speedup, timing.timed_speedup_ci, category.speedup, category.speedup_ci,
        )  # fmt: skip
        assert {value is None for value in speedups} == {t == 0}
        assert any("took 2.00 ms and one without 3.00 ms" in w for w in row.warnings) == (t == 0)
        assert timing.step_ms == pytest.approx(2.0 if (t, k) == (0, faulty) else 3.0 + k)

    report = sample.report(rows).model_copy(update={"adviser": advise(rows, results.probes)})
    assert [one["temperature"] for one in report.adviser["advice"]] == [0.8]
    assert "no verdict: the machine was disturbed" in verdicts(report)[0]
    published = [one.metric_name for row in rows for one in _eval_results(row)]
    assert sum("Speed-up" in name for name in published) == 2
    assert not any("Speed-up" in name and "T = 0," in name for name in published)


def test_within_its_interval_a_faster_step_gains_no_more_than_its_tokens() -> None:
    drafted = [generation(10, 1.0, PLAIN_MS * (0.8 + 0.04 * i)) for i in range(10)]
    found = times(drafted, [plain(21)] * 10, None)
    assert found.step_ms < PLAIN_MS
    assert not found.disturbance
    assert found.speedup == found.timed_speedup == found.tokens_per_step == 2.0
    assert found.speedup_ci[1] == found.timed_speedup_ci[1] == 2.0
    assert found.speedup == pytest.approx(found.baseline_tpot_ms / found.tpot_ms)  # as in a row
    assert found.tpot_ms_ci[0] == found.tpot_ms == pytest.approx(PLAIN_MS / 2.0)
    assert found.tpot_ms_ci[1] > found.tpot_ms


@pytest.mark.parametrize("prompts", [1, MIN_INTERVAL_PROMPTS - 1, MIN_INTERVAL_PROMPTS])
def test_too_few_prompts_have_no_interval(prompts: int) -> None:
    few, many = ([generation(10, 1.0, STEP_MS)] * n for n in (prompts, 20))
    enough = prompts >= MIN_INTERVAL_PROMPTS
    for drafted, counted in ((few, many), (many, few)):
        found = times(drafted, [plain(21)] * len(drafted), counted)
        assert found.speedup == pytest.approx(1.5)
        names = ("tpot_ms_ci", "speedup_ci", "timed_speedup_ci", "step_ratio_ci")
        assert {getattr(found, name) is not None for name in names} == {enough}
    fields = acceptance_fields(few, greedy=True, rows=1)
    assert (fields["acceptance_length_ci"] is not None) == enough


def test_the_interval_contains_the_speed_up_of_all_prompts() -> None:
    """Ten timed prompts of a suite sorted by categories, whose drafts are accepted differently."""
    generator = np.random.default_rng(0)
    shapes = {
        f"q{i}": (0.4 + 0.2 * (i // 10) + 0.2 * generator.random(), generator.normal(1, 0.03))
        for i in range(80)
    }
    categories = {name: str(int(name[1:]) // 10) for name in shapes}
    suite = Suite("toy", "t", tuple((name, (1,)) for name in shapes), categories)
    answers = {
        name: generation(40, accepted, STEP_MS * noise, name=name)
        for name, (accepted, noise) in shapes.items()
    }
    base = {name: plain(40) for name in shapes}
    whole = times([*answers.values()], [*base.values()], None).speedup
    first_ten = times([*answers.values()][:10], [*base.values()][:10], None)
    assert not first_ten.speedup_ci[0] <= whole <= first_ten.speedup_ci[1]  # one category of eight
    held, shares = 0, []
    for seed in range(40):
        order = [name for name, _ in suite.evenly_ordered(seed)]
        timed = order[:10]
        found = times(
            [answers[name] for name in timed],
            [base[name] for name in timed],
            [answers[name] for name in order],
        )
        held += found.speedup_ci[0] <= whole <= found.speedup_ci[1]
        shares.append(found.speedup / whole)
    assert held >= 38
    assert np.abs(np.log(shares)).max() < 0.03


def test_the_prompts_of_a_category_are_not_the_timed_ones(target: Target, head: Eagle3Head) -> None:
    """Each timed prompt's step costs what its counterpart of the other category gains."""
    timed, others = ([f"{kind}{i}" for i in range(8)] for kind in "ab")
    categories = dict.fromkeys(timed, "a") | dict.fromkeys(others, "b")
    suite = Suite("toy", "t", tuple((n, (1,)) for n in categories), categories)
    settings = EvalSettings(k=(2,), temperatures=(0,), draft_probs="off")
    workload = Workload(
        target, (NamedHead("a head", head),), suite, frozenset(), settings, Monitor()
    )
    none, drafted = workload.configs
    gains = {name: 0.2 * int(name[1:]) for name in categories}
    answers = [generation(20, gain, 3.0 * (1 + gain), name=n) for n, gain in gains.items()]
    base = [generation(20, 0, PLAIN_MS, k=0, name=name) for name in categories]
    results = EngineResults("draftlab", "1")
    results.generations |= {(0.0, none): base, (0.0, drafted): answers}
    runs = {none: TimedRun(base[:8], 1.0), drafted: TimedRun(answers[:8], 1.0)}
    workload.add_timings(results, runs, 0.0, 1)
    row = next(row for row in new_rows(workload, [results], 1) if row.k)
    _, other = row.categories
    low, high = other.speedup_ci
    # Drawn together the two would cancel.
    assert low < 0.9 < 1.1 < high
