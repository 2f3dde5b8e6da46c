"""Answers through vLLM: each request's own seed and limits, in the rows that any engine fills."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from draftlab.engine.sampling import Request, Sampling
from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.settings import TargetSettings
from draftlab.text.answers import regenerate
from draftlab.text.conversations import Conversation
from draftlab.text.settings import RegenerateSettings
from draftlab.vllm.answers import VllmAnswers
from draftlab.vllm.process import PYTHON_VARIABLE
from tests.helpers import fake_vllm
from tests.helpers.recordings import Lines
from tests.helpers.toys import toy_target_folder

SETTINGS = RegenerateSettings(
    backend="vllm", vllm={"python": sys.executable}, max_new_tokens=4, batch=3, piece=2
)


@pytest.fixture(scope="module")
def outline(tmp_path_factory: pytest.TempPathFactory) -> TargetMetadata:
    folder = toy_target_folder(tmp_path_factory.mktemp("t"), layers=4, hidden=32, max_length=100)
    return TargetMetadata(TargetSettings(path=str(folder), device="cpu"))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(fake_vllm.write(tmp_path / "site")))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def logged(log: Path) -> list[Any]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def request(name: str, first: int, temperature: float, count: int = 4, seed: int = 7) -> Request:
    sampling = Sampling(temperature, top_k=5, top_p=0.9, seed=seed)
    return Request(name, (first, 7), count, sampling, frozenset({2}))


def test_a_requests_noise_is_its_own_and_vllm_starts_when_more_room_is_needed(
    outline: TargetMetadata, log: Path
) -> None:
    a, b = request("a", 3, 0.7), request("b", 5, 0.0, count=2)
    with VllmAnswers(outline, SETTINGS, Monitor()) as decode:
        found = list(decode([a, b], 6))
        list(decode([b, a], 6))
        list(decode([a], 8))
        list(decode([request("a", 3, 0.7, seed=8)], 8))
        list(decode([request("c", 3, 0.7)], 8))
        list(decode([a], 70))  # beyond the room it was started with
    assert [g.id for g in found] == ["a", "b"]
    assert [g.token_ids for g in found] == [(3, 4, 5, 6), (5, 6)]
    assert {g.finish for g in found} == {"length"}
    started, first, second, alone, reseeded, other, larger, last = logged(log)
    assert (started["max_model_len"], larger["max_model_len"]) == (8, 100)  # the target's limit
    assert (started["max_num_seqs"], started["enable_prefix_caching"]) == (3, True)
    expected = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "max_tokens": 4}
    assert expected.items() <= first[1].items()
    assert (second[1]["temperature"], second[1]["seed"]) == (0.0, None)
    assert first[1]["seed"] == alone[1]["seed"] == last[1]["seed"]
    assert len({found[1]["seed"] for found in (first, reseeded, other)}) == 3


def conversations(count: int) -> list[Conversation]:
    chat = [{"role": "user", "content": "add two numbers"}]
    return [Conversation(f"p{i}", chat, "test") for i in range(count)]


def answer(
    outline: TargetMetadata, path: Path, settings: RegenerateSettings, monitor: Monitor
) -> list[Any]:
    tokenizer = load_tokenizer(outline.settings)
    with VllmAnswers(outline, settings, monitor) as decode:
        return regenerate(
            outline,
            tokenizer,
            conversations(5),
            settings,
            path,
            seed=1,
            monitor=monitor,
            decode=decode,
        )


def test_the_answers_file_is_any_engines_and_goes_on_in_pieces(
    outline: TargetMetadata, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lines = tmp_path / "answers.jsonl", Lines()
    whole = answer(outline, path, SETTINGS, lines)
    assert [(c.id, c.temperature) for c in whole] == [(f"p{i}", (i % 2) * 0.8) for i in range(5)]
    assert all(len(c.answers[0].token_ids) == 4 for c in whole)
    assert any(line.startswith("vllm 9.9 (V1, cpu) at") for line in lines.lines)
    assert lines.lines[-1].endswith("tokens/s")
    made = path.read_bytes()
    head, *rows = made.splitlines(keepends=True)  # two pieces are there, the third is torn
    manifest = json.loads(path.with_suffix(".json").read_text())
    assert manifest["made_with"]["backend"] == "vllm"
    assert "vllm" not in manifest["made_with"]
    header = {"format": "draftlab answers 1", "made_with": manifest["made_with"]}
    partial = path.with_name("answers.partial.jsonl")
    partial.write_bytes(json.dumps(header).encode() + b"\n" + head + b"".join(rows[:3]) + b'{"i')
    path.unlink()
    path.with_suffix(".json").unlink()
    log.unlink()
    answer(outline, path, SETTINGS, lines)
    assert path.read_bytes() == made
    assert [line[0] for line in logged(log)[1:]] == [1]  # prompts asked for
    log.unlink()
    answer(outline, path, SETTINGS, lines)
    assert not log.exists()
    with pytest.raises(UserError, match="backend: 'vllm' in the file, None now"):
        answer(outline, path, SETTINGS.model_copy(update={"backend": "paged"}), lines)


@pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} names no vLLM")
@pytest.mark.slow
def test_a_real_vllms_greedy_answers_are_the_engines(tmp_path: Path) -> None:
    outline = TargetMetadata(TargetSettings(device="cpu"))
    settings = RegenerateSettings(backend="vllm", temperatures=(0.0,), max_new_tokens=24)
    theirs = answer(outline, tmp_path / "v.jsonl", settings, Monitor())
    ours = regenerate(
        load_target(outline.settings),
        load_tokenizer(outline.settings),
        conversations(5),
        settings.model_copy(update={"backend": "paged"}),
        tmp_path / "t.jsonl",
        seed=1,
        monitor=Monitor(),
    )
    assert theirs == ours
