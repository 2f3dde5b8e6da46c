"""Evaluation of a parallel head: rows, warnings, certificate."""

from __future__ import annotations

from draftlab.evaluate.certificate.certify import Certification, CertifySettings, Sampled
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.peagle import PeagleHead
from draftlab.progress import Monitor
from draftlab.target_model.model import Target
from tests.helpers.evaluation import HEAD_NAMES, evaluate
from tests.helpers.greedy_answers import requests
from tests.helpers.monitors import RecordingMonitor


def test_chain_and_parallel_in_one_report(
    target: Target, head: Eagle3Head, parallel_head: PeagleHead
) -> None:
    monitor = RecordingMonitor()
    report = evaluate(target, head, parallel_head, monitor=monitor, k=[1, 5], temperatures=0)
    drafted = [row for row in report.rows if row.head]
    assert [(row.head, row.drafter, row.k) for row in drafted] == [
        (name, drafter, k)
        for name, drafter in zip(HEAD_NAMES, ("chain", "parallel"), strict=True)
        for k in (1, 5)
    ]
    for row in drafted:
        assert row.k_trained == 3
        assert row.prompts_equal == 1.0
        assert row.self_check is not None
        assert row.self_check.passed
    for row, unit in zip(drafted[1::2], ("steps", "depths"), strict=True):
        assert any(f"K = 5 exceeds the 3 {unit} of training" in text for text in row.warnings)
    assert not any("exceeds" in text for row in drafted if row.k == 1 for text in row.warnings)
    assert any("another: K = 5 exceeds the 3 depths" in line for line in monitor.lines)
    (pair,) = report.adviser["break_even"]
    assert (pair["chain"], pair["parallel"]) == HEAD_NAMES


def test_sampled_drafts_pass_the_self_check(target: Target, parallel_head: PeagleHead) -> None:
    report = evaluate(target, parallel_head, k=3, temperatures=0.8, timing_prompts=0)
    for row in report.rows[1:]:
        assert row.drafter == "parallel"
        assert row.self_check is not None
        assert row.self_check.passed
        assert sum(row.expected_acceptance or []) > 0


def test_a_parallel_head_is_certified(target: Target, parallel_head: PeagleHead) -> None:
    prompts = [(r.id, r.prompt_ids) for r in requests(4, seed=100, shortest=3)]
    settings = CertifySettings(num_rows=2, samples=1000, contexts=8)
    rows = [
        Sampled(temperature=0.8, k=3, draft_probs=True),
        Sampled(temperature=1.5, k=2, draft_probs=False, top_k=4),
    ]
    certification = Certification(target, parallel_head, frozenset(), settings, Monitor())
    certificate = certification.run(prompts, 3, rows)
    assert (certificate.passed, certificate.prompts_equal) == (True, 1.0)
    assert {arm.draft_probs for arm in certificate.arms} == {True, False}
