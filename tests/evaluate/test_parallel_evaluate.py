"""Evaluation of a parallel head: rows, warnings, bandwidth, certificate; faulty head folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftlab.engine.engine import Engine
from draftlab.errors import UserError
from draftlab.evaluate.bandwidth import head_bytes
from draftlab.evaluate.certificate.certify import CertifySettings, certify
from draftlab.evaluate.evaluator import Evaluator
from draftlab.evaluate.settings import EvalSettings
from draftlab.heads.config import TargetIdentity
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.folder import save_head
from draftlab.heads.peagle import PeagleHead
from draftlab.pipeline.api import new_evaluator
from draftlab.progress import Monitor
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from tests.helpers.decoding import MASK
from tests.helpers.evaluation import HEAD_NAMES, RecordingMonitor, evaluate
from tests.helpers.greedy_answers import BOUNDARIES, requests


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
    assert [point["k"] for point in pair["points"]] == [1, 2, 3, 4, 5]


def test_sampled_drafts_pass_the_self_check(target: Target, parallel_head: PeagleHead) -> None:
    report = evaluate(target, parallel_head, k=3, temperatures=0.8, timing_prompts=0)
    for row in report.rows[1:]:
        assert row.drafter == "parallel"
        assert row.self_check is not None
        assert row.self_check.passed
        assert sum(row.expected_acceptance or []) > 0


def test_a_step_reads_a_parallel_head_once_for_any_k(
    head: Eagle3Head, parallel_head: PeagleHead
) -> None:
    assert head_bytes(parallel_head, 8) == head_bytes(parallel_head, 1)
    weights = [p for n, p in parallel_head.named_parameters() if not n.startswith("embed_tokens")]
    assert head_bytes(parallel_head, 1) == 4 * sum(p.numel() for p in weights)
    assert head_bytes(head, 8) > head_bytes(head, 1)


@pytest.fixture
def folder(target: Target, parallel_head: PeagleHead, tmp_path: Path) -> Path:
    """The folder of a head that was trained for this target."""
    from draftlab.text.chat_template import template_sha256, tokenizer_sha256

    tokenizer = load_tokenizer(TargetSettings(path=str(target.folder)))
    identity = TargetIdentity(
        name="toy",
        fingerprint=target.fingerprint,
        architecture="a",
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        template_sha256=template_sha256(tokenizer),
    )
    copy = PeagleHead(parallel_head.config.model_copy(update={"target": identity}))
    copy.load_state_dict(parallel_head.state_dict())
    save_head(tmp_path / "head", copy, torch.float32)
    return tmp_path / "head"


def evaluator(target: Target, folder: Path, suite: Path) -> Evaluator:
    suite.write_text('{"id": "1", "messages": [{"role": "user", "content": "hi there"}]}\n')
    settings = EvalSettings(
        suite=str(suite), temperatures=(0.0,), max_new_tokens=8, timing_prompts=0, raw=True
    )
    target_settings = TargetSettings(path=str(target.folder), device="cpu")
    return new_evaluator(target_settings, folder, settings, monitor=Monitor(), target=target)


def test_a_head_folder_is_evaluated(target: Target, folder: Path, tmp_path: Path) -> None:
    plain, drafted = evaluator(target, folder, tmp_path / "suite.jsonl").run().rows
    assert (drafted.drafter, drafted.head, drafted.k, drafted.prompts_equal) == (
        "parallel", folder.parent.name, 3, 1.0,
    )  # fmt: skip
    assert drafted.output_tokens == plain.output_tokens


FEATURES = 32 * len(BOUNDARIES)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no mask_hidden", "missing mask_hidden"),
        ("mask beyond", "mask_token_id 289 lies outside the 289 rows"),
        ("boundaries", rf"\[32, {FEATURES - 32}\], found \[32, {FEATURES}\] \(2 boundaries of 32"),
    ],
)
def test_a_faulty_head_folder_is_refused(
    fault: str, message: str, target: Target, folder: Path, tmp_path: Path
) -> None:
    path = folder / "draftlab.json"
    config = json.loads(path.read_text())
    assert config["mask_token_id"] == MASK
    if fault == "no mask_hidden":
        tensors = load_file(folder / "model.safetensors")
        del tensors["mask_hidden"]
        save_file(tensors, folder / "model.safetensors")
    elif fault == "mask beyond":
        path.write_text(json.dumps(config | {"mask_token_id": config["vocab_size"]}))
    else:
        path.write_text(json.dumps(config | {"boundaries": list(BOUNDARIES[:2])}))
    with pytest.raises(UserError, match=message):
        evaluator(target, folder, tmp_path / "suite.jsonl")


def test_a_parallel_head_is_certified(target: Target, parallel_head: PeagleHead) -> None:
    prompts = [(r.id, r.prompt_ids) for r in requests(4, seed=100, shortest=3)]
    settings = CertifySettings(samples=1000, contexts=8, finalists=2, max_samples=2000)
    certificate = certify(
        target, parallel_head, prompts, frozenset(), settings, k=3, monitor=Monitor(), engine=Engine
    )
    assert (certificate.passed, certificate.prompts_equal) == (True, 1.0)
    assert {arm.draft_probs for arm in certificate.arms} == {True, False}
