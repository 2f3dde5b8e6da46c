"""Answers through vLLM: seeds and limits of each request, and the same file as other engines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.servers.settings import RegenerateSettings
from draftlab.servers.vllm_engine import VllmAnswers
from draftlab.servers.vllm_process import PYTHON_VARIABLE
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.settings import TargetSettings
from draftlab.text.answers import regenerate
from draftlab.text.conversations import Conversation
from tests.helpers.fake_vllm import read_log
from tests.helpers.messages import read_conversations
from tests.helpers.monitors import RecordingMonitor

SETTINGS = RegenerateSettings(backend="vllm", max_new_tokens=4, batch=3, piece=2)


@pytest.fixture
def log(install_fake: Any) -> Path:
    return install_fake()


def request(name: str, first: int, temperature: float, count: int = 4, seed: int = 7) -> Request:
    sampling = Sampling(temperature, top_k=5, top_p=0.9, seed=seed)
    return Request(name, (first, 7), count, sampling, frozenset({2}))


def test_seeds_depend_on_the_request_and_vllm_restarts_for_longer_requests(
    metadata: TargetMetadata, log: Path
) -> None:
    a, b = request("a", 3, 0.7), request("b", 5, 0.0, count=2)
    with VllmAnswers(metadata, SETTINGS, Monitor()) as decode:
        answers = list(decode([a, b], 6))
        for requests, max_length in (
            ([b, a], 6),
            ([a], 8),
            ([request("a", 3, 0.7, seed=8)], 8),
            ([request("c", 3, 0.7)], 8),
            ([a], 40),  # more positions than vLLM was started with
        ):
            list(decode(requests, max_length))
    assert [answer.id for answer in answers] == ["a", "b"]
    assert [answer.token_ids for answer in answers] == [(3, 4, 5, 6), (5, 6)]
    assert {answer.finish for answer in answers} == {"length"}
    start, first, second, alone, other_seed, other_id, restart, longer = read_log(log)
    assert (start["max_model_len"], restart["max_model_len"]) == (8, 64)  # the target's limit
    assert (start["max_num_seqs"], start["enable_prefix_caching"]) == (3, True)
    expected = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "max_tokens": 4}
    assert expected.items() <= first[1].items()
    assert (second[1]["temperature"], second[1]["seed"]) == (0.0, None)
    assert first[1]["seed"] == alone[1]["seed"] == longer[1]["seed"]
    assert len({line[1]["seed"] for line in (first, other_seed, other_id)}) == 3


def conversations(count: int) -> list[Conversation]:
    chat = [{"role": "user", "content": "add two numbers"}]
    return [Conversation(f"p{i}", chat, "test") for i in range(count)]


def regenerate_with_vllm(
    metadata: TargetMetadata, path: Path, settings: RegenerateSettings, monitor: Monitor
) -> list[Any]:
    tokenizer = load_tokenizer(metadata.settings)
    with VllmAnswers(metadata, settings, monitor) as decode:
        regenerate(
            metadata,
            tokenizer,
            conversations(5),
            settings,
            path,
            seed=1,
            monitor=monitor,
            decode=decode,
        )
    return read_conversations(path)


def test_the_answers_file_has_any_engines_format_and_names_its_own(
    metadata: TargetMetadata, log: Path, tmp_path: Path
) -> None:
    path, monitor = tmp_path / "answers.jsonl", RecordingMonitor()
    answers = regenerate_with_vllm(metadata, path, SETTINGS, monitor)
    assert [(c.id, c.temperature) for c in answers] == [(f"p{i}", (i % 2) * 0.8) for i in range(5)]
    assert all(len(c.answers[0].token_ids) == 4 for c in answers)
    assert any(line.startswith("vllm 9.9 (V1, cpu) at") for line in monitor.lines)
    assert monitor.lines[-1].endswith("tokens/s")
    manifest = json.loads(path.with_suffix(".json").read_text())
    assert manifest["made_with"]["backend"] == "vllm"
    assert "vllm" not in manifest["made_with"]

    log.unlink()
    regenerate_with_vllm(metadata, path, SETTINGS, monitor)
    assert not log.exists()
    paged = SETTINGS.model_copy(update={"backend": "paged"})
    with pytest.raises(UserError, match="backend: 'vllm' in the file, None now"):
        regenerate_with_vllm(metadata, path, paged, monitor)


@pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} names no vLLM")
@pytest.mark.slow
def test_greedy_answers_of_a_real_vllm_equal_the_engines(tmp_path: Path) -> None:
    metadata = TargetMetadata(TargetSettings(device="cpu"))
    settings = RegenerateSettings(backend="vllm", temperatures=(0.0,), max_new_tokens=24)
    answers = regenerate_with_vllm(metadata, tmp_path / "v.jsonl", settings, Monitor())
    regenerate(
        load_target(metadata.settings),
        load_tokenizer(metadata.settings),
        conversations(5),
        settings.model_copy(update={"backend": "paged"}),
        tmp_path / "t.jsonl",
        seed=1,
        monitor=Monitor(),
    )
    assert answers == read_conversations(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("tokens", "finish", "message"),
    [
        ([5, 10**9], "length", "found 1000000000 at position 1"),
        ([-1], "length", "found -1"),
        ([5] * 6, "length", "expected at most 4 tokens, found 6"),
        ([5], "abort", "ended by 'abort'"),
    ],
)
def test_an_answer_of_vllm_is_checked_before_it_is_stored(
    tokens: list[int],
    finish: str,
    message: str,
    metadata: TargetMetadata,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(*_: Any) -> Any:
        yield Generation("a", tuple(tokens), finish, Counters(0), (), (), 0.0, 0.0)

    monkeypatch.setattr("draftlab.servers.vllm_engine.generate", wrong)
    with (
        VllmAnswers(metadata, SETTINGS, Monitor()) as decode,
        pytest.raises(UserError, match=message),
    ):
        list(decode([request("a", 3, 0.0)], 6))
