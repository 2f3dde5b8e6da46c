"""Training samples: the token ids and answer spans of answered conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.store import Sample
from draftlab.text.chat_template import RenderError
from draftlab.text.conversations import Answer, Conversation
from draftlab.text.loss_mask import REGENERATE, AssistantTurn, assistant_turns


def build_samples(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, monitor: Monitor
) -> list[Sample]:
    """Return the samples of conversations, in order; report how many were dropped, and why.

    The target's own answers keep the token ids that it read and wrote. Given answers are rendered
    with its chat template. If a later prompt does not begin with the tokens before it (the template
    drops earlier reasoning, trims answers, or they tokenize differently), the later answers become
    samples of their own, `<id>#2`, `<id>#3` …, each with the prompt that the target saw.

    Raises:
        UserError: no sample is left, or two samples have one id.
    """
    samples: list[Sample] = []
    dropped: Counter[str] = Counter()
    first: dict[str, str] = {}
    for conversation in conversations:
        try:
            answers = conversation.answers or assistant_turns(
                tokenizer, conversation.messages, conversation.tools, where=conversation.id
            )
            samples += _join_answers(conversation, answers)
            if answers:
                continue
            reason = "no assistant turn"
        except RenderError as error:
            reason = error.what
        dropped[reason] += 1
        first.setdefault(reason, conversation.id)
    # Reasons quote texts, so there may be many of them.
    for reason, count in dropped.most_common(5):
        monitor.say(f"samples: dropped {count:,} (first: {first[reason]}): {reason}")
    if len(dropped) > 5:
        monitor.say(f"samples: dropped {dropped.total():,} in all")
    if not samples:
        reason = dropped.most_common(1)[0][0] if dropped else "there are no conversations"
        raise UserError(
            f"expected conversations with answers to train on, found none: {reason}",
            where=first.get(reason, ""),
            do=REGENERATE,
        )
    duplicates = [i for i, count in Counter(sample.id for sample in samples).items() if count > 1]
    if duplicates:
        raise UserError(f"expected unique ids of samples, found {duplicates[0]!r} twice")
    return samples


def _join_answers(
    conversation: Conversation, answers: Sequence[Answer | AssistantTurn]
) -> Iterator[Sample]:
    """Yield as few samples as hold every answer behind exactly the prompt that it answered."""
    tokens: tuple[int, ...] = ()
    spans: list[int] = []
    span, name = 0, conversation.id
    for number, answer in enumerate(answers, 1):
        if tokens and answer.prompt_ids[: len(tokens)] != tokens:
            yield Sample(name, tokens, tuple(spans), conversation.temperature)
            tokens, spans, span, name = (), [], 0, f"{conversation.id}#{number}"
        span += 1
        spans += [0] * (len(answer.prompt_ids) - len(tokens)) + [span] * len(answer.token_ids)
        tokens = answer.prompt_ids + answer.token_ids
    if tokens:
        yield Sample(name, tokens, tuple(spans), conversation.temperature)


def highlight_answers(
    token_ids: Sequence[int], spans: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> Text:
    """Return a sample's text with alternating shades per token, answers in green, the rest dim.

    Newlines are shown as ⏎. A token that is part of a character is shown as in the vocabulary.
    """
    text = Text()
    for index, (token, span) in enumerate(zip(token_ids, spans, strict=True)):
        decoded = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if "\ufffd" in decoded or not decoded:
            decoded = str(tokenizer.convert_ids_to_tokens(token))
        shades = ("black on green", "black on bright_green") if span else ("dim", "dim underline")
        text.append(decoded.replace("\n", "⏎\n"), style=shades[index % 2])
    return text
