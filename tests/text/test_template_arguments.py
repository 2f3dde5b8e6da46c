"""Template arguments, such as enable_thinking: of a line, as a mix, in answers and in suites."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.servers.settings import RegenerateSettings
from draftlab.text.answers import regenerate
from draftlab.text.conversations import (
    Conversation,
    parse_conversation,
    write_conversations,
)
from draftlab.text.prompts import load_prompts, with_arguments
from draftlab.text.samples import build_samples
from draftlab.text.settings import PromptSettings
from draftlab.text.suites import load_suite
from tests.helpers.fake_decoder import generate
from tests.helpers.messages import assistant, read_conversations, user
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.template_families import QWEN3
from tests.helpers.toys import toy_tokenizer

THINK, PLAIN = {"enable_thinking": True}, {"enable_thinking": False}
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def line(text: str, arguments: Any = None, **fields: Any) -> dict[str, Any]:
    own = {} if arguments is None else {"template_arguments": arguments}
    return {"messages": [user(text)], **own, **fields}


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer(QWEN3, eos="<|im_end|>")


def test_a_line_has_its_own_and_they_are_written_back(tmp_path: Path) -> None:
    arguments = {"enable_thinking": False, "effort": "low", "budget": 5, "share": 0.5}
    shared = {"from": "human", "value": "q"}
    other = {"conversations": [shared], "template_arguments": THINK}  # another form of row
    path = write(tmp_path / "p.jsonl", line("q", arguments), line("r"), other)
    first, second, third = read_conversations(path)
    assert [one.template_arguments for one in (first, second, third)] == [arguments, {}, THINK]
    assert "template_arguments" not in second.to_json()
    write_conversations(tmp_path / "again.jsonl", [first, second])
    assert read_conversations(tmp_path / "again.jsonl") == [first, second]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("thinking", "template_arguments: expected a mapping, found 'thinking'"),
        ({"messages": "x"}, "found messages, which draftlab sets"),
        ({"a": [1]}, "template_arguments.a: expected true or false or a whole number"),
    ],
)
def test_a_line_whose_arguments_do_not_fit_is_named(arguments: Any, message: str) -> None:
    text = json.dumps(line("q", arguments)).encode()
    with pytest.raises(UserError) as caught:
        parse_conversation(text, Path("p.jsonl"), 7)
    assert message in caught.value.what
    assert caught.value.where == "p.jsonl:7"


def test_a_mix_is_even_in_every_beginning_and_the_lines_own_come_first(tmp_path: Path) -> None:
    rows = [line(f"q{i}") for i in range(40)]
    rows[3] = line("q3", PLAIN)
    rows[4] = line("q3", THINK)  # no repetition of q3: its answer is another one
    path, monitor = write(tmp_path / "p.jsonl", *rows), RecordingMonitor()
    modes = ({**THINK, "effort": "low"}, THINK)
    found = load_prompts(PromptSettings(source=str(path)), monitor, modes=modes, seed=1)
    assert len(found) == 40
    assert found[3].template_arguments["enable_thinking"] is False
    assert found[4].template_arguments["enable_thinking"] is True
    chosen = ["effort" in one.template_arguments for one in found]
    for start in range(0, 40, 2):
        assert chosen[start] != chosen[start + 1]
    assert 5 < Counter(chosen[::2])[True] < 15  # no mode falls on every second prompt
    of_39 = load_prompts(
        PromptSettings(source=str(path), max_prompts=39), Monitor(), modes=modes, seed=1
    )
    assert of_39 == found[:39]
    others = with_arguments(found, modes, seed=2, keep_own=False)
    assert others != found
    (said,) = [text for text in monitor.lines if "template arguments" in text]
    assert said.startswith("prompts: template arguments: ")
    assert "enable_thinking=true for " in said
    assert "enable_thinking=false for 1" in said


def test_answers_are_those_to_each_conversations_own_prompt(tmp_path: Path, tokenizer) -> None:
    asked = [
        Conversation(f"p{i}", [user("q"), assistant(""), user("r")], "s", template_arguments=mode)
        for i, mode in enumerate((THINK, PLAIN, {}))
    ]
    answered = generate(tmp_path / "a.jsonl", prompts=asked, tokenizer=tokenizer)
    assert [one.template_arguments for one in answered] == [THINK, PLAIN, {}]
    assert {len(one.answers) for one in answered} == {2}
    for one in answered:
        for answer in one.answers:
            text = tokenizer.decode(answer.prompt_ids)
            assert text.endswith(EMPTY_THOUGHT) == (one.template_arguments == PLAIN)
    changed = [*asked[:2], Conversation("p2", asked[2].messages, "s", template_arguments=PLAIN)]
    with pytest.raises(UserError, match="prompts: "):  # no resume from answers to other prompts
        generate(tmp_path / "a.jsonl", prompts=changed, tokenizer=tokenizer)


def test_given_answers_are_rendered_with_them(tmp_path: Path, tokenizer) -> None:
    chat = [user("q"), assistant("the answer")]
    given = [Conversation("plain", chat, "s", template_arguments=PLAIN)]
    path = tmp_path / "a.jsonl"
    settings = RegenerateSettings(enabled=False)
    regenerate(None, tokenizer, given, settings, path, seed=0, monitor=Monitor())
    (sample,) = build_samples(read_conversations(path), tokenizer, Monitor())
    spans, tokens = list(sample.spans), list(sample.token_ids)
    answer = tokenizer.decode([t for t, s in zip(tokens, spans, strict=True) if s])
    assert answer == "the answer<|im_end|>"
    assert tokenizer.decode(tokens[: spans.index(1)]).endswith(EMPTY_THOUGHT)
    with pytest.raises(UserError, match="where the answer is 'the answer'"):
        list(build_samples([Conversation("think", chat, "s")], tokenizer, Monitor()))


def modes_of(suite: Any, tokenizer: Any) -> dict[str, bool]:
    """Return whether each prompt is one without thinking, by its id."""
    return {id_: tokenizer.decode(ids).endswith(EMPTY_THOUGHT) for id_, ids in suite.prompts}


def test_a_suite_in_several_modes_has_them_as_categories(tmp_path: Path, tokenizer) -> None:
    rows = [line(f"q{i}", category="odd" if i % 2 else "even") for i in range(20)]
    source = f"mt-bench:{write(tmp_path / 'm.jsonl', *({'turns': [f'q{i}']} for i in range(20)))}"
    for name in (str(write(tmp_path / "s.jsonl", *rows)), source):
        suite = load_suite(name, tokenizer, Monitor(), modes=(PLAIN, THINK), seed=1)
        assert suite.name == name
        labels = {True: "enable_thinking=false", False: "enable_thinking=true"}
        plain = modes_of(suite, tokenizer)
        assert suite.categories == {id_: labels[is_plain] for id_, is_plain in plain.items()}
        assert Counter(plain.values()) == {True: 10, False: 10}
        drawn = suite.sample(6, seed=0)
        assert Counter(suite.categories[id_] for id_, _ in drawn.prompts) == dict.fromkeys(
            labels.values(), 3
        )
