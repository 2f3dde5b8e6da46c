"""vLLM in a report: the same configurations as draftlab, with its own counters and times."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.evaluate.evaluator import EvalSettings, Evaluator, NamedHead
from draftlab.evaluate.results import Report
from draftlab.evaluate.vllm_compare import check_settings
from draftlab.evaluate.workload import EngineResults, Workload, measure_draftlab
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.progress import Monitor
from draftlab.run.api import write_report
from draftlab.servers.vllm_process import PYTHON_VARIABLE
from draftlab.target_model.model import Target
from draftlab.text.suites import Suite
from tests.helpers import fake_vllm

# the fake vLLM begins an answer with the prompt's first token and accepts that many modulo K + 1
SUITE = Suite("toy", "t", tuple((f"p{i}", (i, 7)) for i in (4, 5, 6)))
SETTINGS = {
    "engine": "vllm",
    "max_new_tokens": 9,
    "timing_prompts": 2,
    "timing_tokens": 5,
    "timing_batches": [1, 2],
    "temperatures": 0,
    "k": [2, 3],
}


@pytest.fixture
def evaluator(target: Target, head: Eagle3Head) -> Evaluator:
    named = NamedHead("a head", head, target.folder)
    settings = EvalSettings.model_validate(SETTINGS)
    return Evaluator(target, [named], SUITE, frozenset(), settings, monitor=Monitor())


@pytest.fixture
def report(evaluator: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setenv("PYTHONPATH", str(fake_vllm.write(tmp_path / "site")))
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    return evaluator.run()


def test_vllm_has_the_same_rows_with_its_own_counters(report: Report) -> None:
    own_rows, vllm_rows = report.rows[:3], report.rows[3:]
    assert [(r.head, r.k, r.temperature) for r in own_rows] == [
        (r.head, r.k, r.temperature) for r in vllm_rows
    ]
    assert {r.engine for r in own_rows} == {"draftlab"}
    assert {(r.engine, r.engine_version) for r in vllm_rows} == {("vllm (V1, cpu)", "9.9")}
    assert {r.suite_sha256 for r in report.rows} == {SUITE.sha256}
    for row in vllm_rows:
        row.counters.check_tokens(row.output_tokens, row.prompts)
        assert [timing.batch for timing in row.timings] == [1, 2]
        assert row.self_check is None  # vLLM reports no expectations
    drafted = vllm_rows[2]
    # p4 accepts 0 of 3 in each of 8 steps, p5 accepts 1 in 4, p6 accepts 2 in 3
    assert (drafted.drafts, drafted.accepted_at) == (15, [7, 3, 0])
    assert drafted.speedup == pytest.approx(vllm_rows[0].tpot_ms / drafted.tpot_ms)


def test_vllm_rows_count_answers_equal_to_draftlabs(
    evaluator: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change_one_answer(workload: Workload) -> EngineResults:
        results = measure_draftlab(workload)
        generations = {
            key: [replace(answers[0], token_ids=(0,)), *answers[1:]] if key[1].k == 3 else answers
            for key, answers in results.generations.items()
        }
        return replace(results, engine="vllm", generations=generations)

    monkeypatch.setattr("draftlab.evaluate.vllm_compare.measure_vllm", change_one_answer)
    write_report(evaluator.run(), tmp_path)
    rows = Report.read(tmp_path / "report.json").rows
    assert [row.prompts_equal_draftlab for row in rows] == [None] * 3 + [1, 1, pytest.approx(2 / 3)]
    page = (tmp_path / "report.html").read_text()
    assert "<th>equal to draftlab</th>" in page
    assert "<td>0.667</td>" in page


def test_a_failure_of_vllm_leaves_the_rows_of_draftlab(
    evaluator: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Workload) -> EngineResults:
        raise UserError("vLLM ended with status 1", where="vllm", do="read its log")

    monkeypatch.setattr("draftlab.evaluate.vllm_compare.measure_vllm", fail)
    with pytest.raises(UserError, match="has draftlab's rows alone: vLLM ended with status 1"):
        write_report(evaluator.run(), tmp_path)
    report = Report.read(tmp_path / "report.json")
    assert [row.engine for row in report.rows] == ["draftlab"] * 3
    assert "vLLM ended with status 1" in report.environment["vllm_failure"]
    assert "vLLM ended with status 1" in (tmp_path / "report.html").read_text()


def test_block_verification_which_vllm_lacks_is_refused() -> None:
    settings = SETTINGS | {"temperatures": 0.8, "verification": "block"}
    with pytest.raises(UserError, match="settings that vLLM has too, found verification = block"):
        check_settings(EvalSettings.model_validate(settings))


def test_a_missing_vllm_is_reported_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EvalSettings.model_validate(SETTINGS)
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    check_settings(settings)
    monkeypatch.setenv(PYTHON_VARIABLE, "/no/python")
    with pytest.raises(UserError, match="found no program"):
        check_settings(settings)
