"""Samples: exact tokens of the target's own answers, and which answers share a sample."""

from __future__ import annotations

import pytest

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.store import Sample
from draftlab.text.chat_template import prompt_ids
from draftlab.text.conversations import Answer, Conversation
from draftlab.text.loss_mask import assistant_turns
from draftlab.text.samples import build_samples, highlight_answers
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
    assert own_sample == Sample("own", prompt + split, (0,) * len(prompt) + (1,) * 3, 0.8)
    (turn,) = assistant_turns(tokenizer, chat)
    spans = (0,) * len(turn.prompt_ids) + (1,) * len(turn.token_ids)
    assert given_sample == Sample("given", turn.prompt_ids + turn.token_ids, spans, None)
    assert "dropped 1 (first: silent)" in monitor.lines[0]
    with pytest.raises(UserError, match="no assistant turn"):
        build_samples([unanswered], tokenizer, monitor)


def test_rounds_share_a_sample_only_if_the_tokens_agree():
    tokenizer = toy_tokenizer(CHATML_TEMPLATE, eos="<|im_end|>")
    end = tokenizer.eos_token_id
    chat = [user("q"), assistant("def"), user("r")]
    prompt, next_prompt = prompt_ids(tokenizer, chat[:1]), prompt_ids(tokenizer, chat)
    (word,) = tokenizer("def")["input_ids"]
    split = tokenizer.convert_tokens_to_ids(["de", "f"])

    def samples(token_ids: tuple[int, ...], finish: str) -> list[Sample]:
        answers = (Answer(prompt, token_ids, finish), Answer(next_prompt, (65, end), "stop"))
        return build_samples([Conversation("c", chat, "s", 0.0, answers)], tokenizer, Monitor())

    (joined,) = samples((word, end), "stop")
    assert joined.token_ids == (*next_prompt, 65, end)
    assert [s for s in joined.spans if s] == [1, 1, 2, 2]
    (cut,) = samples((word,), "length")  # the template writes the closing tag
    assert [s for s in cut.spans if s] == [1, 2, 2]
    assert cut.spans[cut.token_ids.index(end, len(prompt))] == 0
    first, second = samples((*split, end), "stop")
    assert (first.id, first.token_ids) == ("c", (*prompt, *split, end))
    assert (second.id, second.token_ids) == ("c#2", (*next_prompt, 65, end))
    assert second.spans == (0,) * len(next_prompt) + (1, 1)


def test_highlighting_shows_every_token_and_colours_only_answers():
    tokenizer = toy_tokenizer()
    conversation = Conversation("c", [user("first?"), assistant("the\none 日本語")], "s")
    (sample,) = build_samples([conversation], tokenizer, Monitor())
    text = highlight_answers(sample.token_ids, sample.spans, tokenizer)
    assert len(text.spans) == len(sample.token_ids)
    assert [("green" in str(part.style)) for part in text.spans] == [s > 0 for s in sample.spans]
    assert "first?" in text.plain
    assert "⏎" in text.plain
