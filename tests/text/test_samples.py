"""Samples: exact tokens of the target's own answers, and which answers share a sample."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.sample_table import Sample
from draftlab.text.chat_template import prompt_ids
from draftlab.text.conversations import Answer, Conversation, write_conversations
from draftlab.text.samples import ANSWERS_HELP, build_samples, highlight_answers, open_samples
from tests.helpers.assistant_turns import assistant_turns
from tests.helpers.fake_decoder import generate
from tests.helpers.messages import assistant, user
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.toys import CHATML_TEMPLATE, toy_tokenizer


def test_own_answers_keep_their_tokens_and_given_ones_are_rendered():
    tokenizer, monitor = toy_tokenizer(), RecordingMonitor()
    chat = [user("q"), assistant("def")]
    prompt = prompt_ids(tokenizer, chat[:1])
    # Sampling may write "def" as two tokens, tokenizing never does.
    split = (*tokenizer.convert_tokens_to_ids(["de", "f"]), 285)
    sampled = Conversation("own", chat, "s", 0.8, (Answer(prompt, split, "stop"),))
    unanswered, given = Conversation("silent", chat[:1], "s"), Conversation("given", chat, "s")
    own_sample, given_sample = build_samples([sampled, unanswered, given], tokenizer, monitor)
    assert (own_sample.id, own_sample.token_ids) == ("own", prompt + split)
    assert own_sample.spans.tolist() == [0] * len(prompt) + [1] * 3
    (turn,) = assistant_turns(tokenizer, chat)
    assert (given_sample.id, given_sample.token_ids) == ("given", turn.prompt_ids + turn.token_ids)
    assert given_sample.spans.tolist() == [0] * len(turn.prompt_ids) + [1] * len(turn.token_ids)
    assert (own_sample.temperature, given_sample.temperature) == (0.8, None)
    assert "dropped 1 conversation (first: silent)" in monitor.lines[0]
    with pytest.raises(UserError, match="no assistant turn"):
        list(build_samples([unanswered], tokenizer, monitor))


def test_rounds_share_a_sample_only_if_the_tokens_agree():
    tokenizer = toy_tokenizer(CHATML_TEMPLATE, eos="<|im_end|>")
    end = tokenizer.eos_token_id
    chat = [user("q"), assistant("def"), user("r")]
    prompt, next_prompt = prompt_ids(tokenizer, chat[:1]), prompt_ids(tokenizer, chat)
    (word,) = tokenizer("def")["input_ids"]
    split = tokenizer.convert_tokens_to_ids(["de", "f"])

    def samples(token_ids: tuple[int, ...], finish: str) -> list[Sample]:
        answers = (Answer(prompt, token_ids, finish), Answer(next_prompt, (65, end), "stop"))
        conversation = Conversation("c", chat, "s", 0.0, answers)
        return list(build_samples([conversation], tokenizer, Monitor()))

    (joined,) = samples((word, end), "stop")
    assert joined.token_ids == (*next_prompt, 65, end)
    assert [s for s in joined.spans if s] == [1, 1, 2, 2]
    (cut,) = samples((word,), "length")  # the template writes the closing tag
    assert [s for s in cut.spans if s] == [1, 2, 2]
    assert cut.spans[cut.token_ids.index(end, len(prompt))] == 0
    first, second = samples((*split, end), "stop")
    assert (first.id, first.token_ids) == ("c", (*prompt, *split, end))
    assert (second.id, second.token_ids) == ("c#2", (*next_prompt, 65, end))
    assert second.spans.tolist() == [0] * len(next_prompt) + [1, 1]


def as_lists(samples: Iterable[Sample]) -> list[tuple]:
    return [(s.id, list(s.token_ids), list(s.spans), s.temperature) for s in samples]


def test_the_index_holds_the_samples_and_is_made_again_when_anything_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, tokenizer = tmp_path / "answers.jsonl", toy_tokenizer()
    conversations = [*generate(path), Conversation("silent", [user("q")], "s")]
    write_conversations(path, conversations)
    path.with_suffix(".json").unlink()
    expected = as_lists(build_samples(conversations, tokenizer, Monitor()))

    def opened(tokenizer=tokenizer) -> tuple[list[tuple], RecordingMonitor]:
        monitor = RecordingMonitor()
        return as_lists(open_samples(path, tokenizer, monitor)), monitor

    samples, monitor = opened()
    assert samples == expected
    assert "indexing" in monitor.lines[0]
    assert monitor.times_done["samples"] == 1  # a log has a line whenever a stage is done
    with monkeypatch.context() as patch:  # a second process reads no line of the file
        patch.setattr("draftlab.text.samples.iterate_conversations", None)
        samples, monitor = opened()
        assert samples == expected
        assert monitor.lines == [
            "samples: dropped 1 conversation (first: silent): no assistant turn"
        ]
    part = tmp_path / "answers.index" / "00000.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    samples, monitor = opened()
    assert samples == expected
    assert "indexing" in monitor.lines[0]
    assert "indexing" in opened(toy_tokenizer(CHATML_TEMPLATE))[1].lines[0]
    write_conversations(path, conversations[:2])
    path.write_bytes(path.read_bytes().rstrip())  # the last line has no end
    samples, monitor = opened()
    assert samples == as_lists(build_samples(conversations[:2], tokenizer, Monitor()))
    assert monitor.times_done["samples"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.index", "answers.jsonl"]


def test_one_process_indexes_and_the_others_wait(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    generate(path)
    with open(path, "rb+") as file, ThreadPoolExecutor() as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        monitors = [RecordingMonitor(), RecordingMonitor()]
        futures = [pool.submit(open_samples, path, toy_tokenizer(), m) for m in monitors]
        while not all(monitor.lines for monitor in monitors):
            time.sleep(0.01)
        fcntl.flock(file, fcntl.LOCK_UN)
        tables = [as_lists(future.result()) for future in futures]
    assert tables[0] == tables[1]
    assert all("indexing" in monitor.lines[0] for monitor in monitors)
    assert sum(monitor.times_done["samples"] for monitor in monitors) == 1


def test_answers_that_lack_a_line_are_noticed_and_a_cut_line_names_its_remedy(tmp_path: Path):
    path, monitor = tmp_path / "answers.jsonl", RecordingMonitor()
    generate(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    for _ in range(2):  # also where the index is there
        open_samples(path, toy_tokenizer(), monitor)
        assert "was changed after it was written, from 10 to 9 conversations" in monitor.lines[-1]
        assert monitor.times_done["samples"] == 1
        assert "`draftlab prepare` generates all answers again" in monitor.lines[-1]
    path.write_bytes(b"".join(lines)[:-40])
    with pytest.raises(UserError) as caught:
        open_samples(path, toy_tokenizer(), monitor)
    assert caught.value.where == f"{path}:10"
    assert caught.value.do == ANSWERS_HELP


def test_highlighting_shows_every_token_and_colours_only_answers():
    tokenizer = toy_tokenizer()
    conversation = Conversation("c", [user("first?"), assistant("the\none 日本語")], "s")
    (sample,) = build_samples([conversation], tokenizer, Monitor())
    text = highlight_answers(sample.token_ids, sample.spans, tokenizer)
    assert len(text.spans) == len(sample.token_ids)
    assert [("green" in str(part.style)) for part in text.spans] == [s > 0 for s in sample.spans]
    assert "first?" in text.plain
    assert "⏎" in text.plain
