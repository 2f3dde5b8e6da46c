"""Counters, intervals and the public report schema (methods §6)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from draftlab.engine.counters import Counters
from draftlab.errors import UserError
from draftlab.evaluate.metrics import acceptance_interval, repetition_rate
from draftlab.evaluate.results import SCHEMA_VERSION, Lossless, Report
from draftlab.intervals import expanded_interval, ratio_interval
from tests.helpers import sample_report as sample
from tests.helpers.drivers import load

K = st.integers(1, 7)


@st.composite
def steps(draw: st.DrawFn, k: int) -> list[tuple[int, int]]:
    """Draw (drafted, accepted) of each verify step."""
    drafted = draw(st.lists(st.integers(0, k), max_size=30))
    return [(n, draw(st.integers(0, n))) for n in drafted]


def count_steps(k: int, steps: list[tuple[int, int]]) -> Counters:
    counters = Counters(k)
    for drafted, accepted in steps:
        counters.add_step(drafted, accepted)
    return counters


@given(st.data(), K)
def test_counters_obey_the_identities(data: st.DataObject, k: int) -> None:
    all_steps = data.draw(steps(k))
    counters = count_steps(k, all_steps)
    drafts = [(n, a) for n, a in all_steps if n]
    assert counters.drafts + counters.undrafted_steps == len(all_steps)
    assert counters.drafts == len(drafts)
    assert counters.draft_tokens == sum(n for n, _ in drafts)
    assert counters.accepted == sum(a for _, a in drafts) == sum(counters.accepted_at)
    # position i was accepted by the steps that accepted more than i tokens, and by no others
    assert counters.accepted_at == [sum(a > i for _, a in drafts) for i in range(k)]
    if not drafts:
        assert counters.acceptance_length is None
        assert counters.acceptance_at is None
        assert counters.conditional_acceptance_at == [None] * k
        return
    assert counters.acceptance_length == pytest.approx(1 + np.mean([a for _, a in drafts]))
    assert sum(counters.acceptance_at) == pytest.approx(counters.acceptance_length - 1)
    conditional = [c for c in counters.conditional_acceptance_at if c is not None]
    assert np.cumprod(conditional) == pytest.approx(counters.acceptance_at[: len(conditional)])
    assert not any(counters.accepted_at[len(conditional) :])


@given(st.data(), K)
def test_the_sum_of_counters_counts_all_steps(data: st.DataObject, k: int) -> None:
    first, second = data.draw(steps(k)), data.draw(steps(k))
    a, b = count_steps(k, first), count_steps(k, second)
    a.truncated_tokens, b.truncated_tokens = 2, 3
    total = a + b
    assert total == Counters.total([a, b])
    assert total.truncated_tokens == 5
    total.truncated_tokens = 0
    assert total == count_steps(k, first + second)
    assert a.accepted_at == count_steps(k, first).accepted_at  # the summands stay as they are


@pytest.mark.parametrize(("drafted", "accepted"), [(2, 3), (5, 0), (3, -1), (-1, -1)])
def test_impossible_steps_are_refused_and_not_counted(drafted: int, accepted: int) -> None:
    counters = Counters(4)
    with pytest.raises(ValueError, match="0 <= accepted <= drafted <= 4"):
        counters.add_step(drafted, accepted)
    assert counters == Counters(4)


# -- intervals


@pytest.fixture(scope="module")
def prompts() -> list[Counters]:
    """Counters of 96 prompts with different difficulty and length."""
    generator = np.random.default_rng(7)
    prompts = []
    for _ in range(96):
        keep, counters = generator.beta(6, 4), Counters(4)
        for _ in range(generator.integers(10, 60)):
            counters.add_step(4, int(np.cumprod(generator.random(4) < keep).sum()))
        prompts.append(counters)
    return prompts


bootstrap_interval = load("measurements").bootstrap_interval


def scipy_interval(
    statistic: Callable[..., np.ndarray], *columns: np.ndarray, level: float = 0.95
) -> tuple[float, float]:
    """Return scipy's bootstrap interval over prompts, from other draws than ours.

    Its tails are those at which Student's interval with the unbiased variance would end.
    """
    n = len(columns[0])
    quantile = stats.t.ppf((1 + level) / 2, n - 1) * math.sqrt(n / (n - 1))
    return stats.bootstrap(
        columns,
        statistic,
        paired=True,
        vectorized=True,
        confidence_level=1 - 2 * stats.norm.sf(quantile),
        n_resamples=8000,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval


def assert_close(actual: tuple[float, float], expected: tuple[float, float]) -> None:
    """Check that two intervals differ by far less than their width."""
    width = expected[1] - expected[0]
    assert actual == pytest.approx(expected, abs=0.08 * width)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_bootstrap_intervals_agree_with_scipy(level: float) -> None:
    values = np.random.default_rng(3).gamma(2.0, 5.0, 80)
    expected = scipy_interval(np.mean, values, level=level)
    interval = bootstrap_interval(
        lambda index: values[index].mean(), len(values), samples=8000, level=level
    )
    assert_close(interval, expected)
    # the interval of a ratio is the bootstrap of the same resamples
    ratio = bootstrap_interval(lambda i: values[i].sum() / len(values), len(values), level=level)
    assert ratio_interval(values, np.ones(len(values)), level=level) == ratio


def test_intervals_are_reproducible_and_touch_no_global_generator(prompts: list[Counters]) -> None:
    np.random.seed(5)
    before = np.random.get_state()[1].copy()
    first = acceptance_interval(prompts, samples=200)
    assert first == acceptance_interval(prompts, samples=200)
    assert (np.random.get_state()[1] == before).all()


def test_prompts_without_a_draft_do_not_count_for_an_interval() -> None:
    undrafted, drafted = count_steps(2, [(0, 0)] * 3), count_steps(2, [(2, 1)])
    assert acceptance_interval([undrafted] * 40) is None
    assert acceptance_interval([undrafted] * 40 + [drafted] * 5) is None
    # resamples without a drafted prompt have no AL; they must not turn the interval to NaN
    assert acceptance_interval([undrafted] * 200 + [drafted] * 6) == (2.0, 2.0)


@pytest.mark.parametrize("n", [6, 30])
def test_an_interval_ends_where_students_does(n: int) -> None:
    """Resamples of a mean vary by the sample's variance, which divides by n."""
    chances = (np.arange(200_000) + 0.5) / 200_000
    resamples = stats.norm.ppf(chances) * math.sqrt((n - 1) / n)  # unbiased: 1
    for level in (0.8, 0.95):
        interval = expanded_interval(resamples, n, level)
        assert interval == pytest.approx(stats.t.interval(level, n - 1), rel=1e-3)


@pytest.mark.parametrize("n", [6, 10, 30])
def test_intervals_hold_the_truth_as_often_as_they_say(n: int) -> None:
    """Of skewed ratios of sums the percentile interval of six prompts holds it 85 times in 100."""
    rng = np.random.default_rng(n)
    steps = rng.lognormal(3, 0.6, (400, n))
    tokens = steps * rng.lognormal(0.5, 0.35, (400, n))
    truth = math.exp(0.5 + 0.35**2 / 2)
    intervals = [ratio_interval(a, b) for a, b in zip(tokens, steps, strict=True)]
    assert np.mean([low <= truth <= high for low, high in intervals]) > 0.89


# -- repetition


def repetition_by_definition(answer: list[int], n: int) -> float | None:
    grams = [answer[i : i + n] for i in range(len(answer) - n + 1)]
    repeats = sum(gram in grams[:i] for i, gram in enumerate(grams))
    return repeats / len(grams) if grams else None


@given(st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=5), st.integers(1, 5))
def test_repetition_counts_repeated_ngrams(answers: list[list[int]], n: int) -> None:
    shares = [
        share for answer in answers if (share := repetition_by_definition(answer, n)) is not None
    ]
    expected = np.mean(shares) if shares else 0.0
    assert repetition_rate(answers, n) == pytest.approx(expected)


# -- the report


def test_report_round_trip(tmp_path: Path) -> None:
    report = sample.report()
    report.rows[1].lossless = Lossless(level="L1", test="G-test", p_value=0.31, n=200_000)
    report.rows += [sample.row(head="“日本語”\n\x7f", **sample.NOT_TIMED | sample.NOTHING_DRAFTED)]
    report.write(tmp_path / "report.json")
    fields = json.loads((tmp_path / "report.json").read_text())
    assert next(iter(fields)) == "schema"
    assert fields["schema"] == SCHEMA_VERSION
    assert "schema_version" not in fields
    assert Report.read(tmp_path / "report.json") == report
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_unreadable_reports_are_user_errors(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with pytest.raises(UserError, match="found no such file"):
        Report.read(path)
    path.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        Report.read(path)
    sample.report().write(path)
    fields = json.loads(path.read_text())
    for version in (SCHEMA_VERSION + 1, SCHEMA_VERSION - 1, None):
        path.write_text(json.dumps(fields | {"schema": version}))
        with pytest.raises(UserError, match=f"expected report schema {SCHEMA_VERSION}") as error:
            Report.read(path)
        assert str(path) in str(error.value)
