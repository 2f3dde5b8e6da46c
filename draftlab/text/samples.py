"""Training samples: the token ids and answer spans of answered conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftlab.errors import UserError
from draftlab.files import canonical_json, known_sha256, locked
from draftlab.progress import Monitor
from draftlab.store.sample_table import MAX_MODES, Sample, SampleTable, read_index, write_index
from draftlab.text.answer_file import read_manifest
from draftlab.text.chat_template import (
    Chat,
    RenderError,
    omitted_roles,
    template_sha256,
    tokenizer_sha256,
)
from draftlab.text.conversations import Answer, Conversation, Reasons, iterate_conversations
from draftlab.text.loss_mask import REGENERATE, find_turns
from draftlab.text.template_process import BATCH

ANSWERS_HELP = (
    "remove this line to go on without it, or remove the file: `draftlab prepare` then generates "
    "all answers again"
)


def open_samples(
    answers: Path, tokenizer: PreTrainedTokenizerBase, monitor: Monitor
) -> SampleTable:
    """Return the samples of an answers file from the index beside it; report how they were made.

    The index is made first if it is missing or was made of another file, tokenizer or template.
    Other processes wait for the one that makes it.

    Raises:
        UserError: as `build_samples`, or a line of the file is not valid.
    """
    try:
        sha256, folder = known_sha256(answers), answers.with_suffix(".index")
    except OSError as error:
        raise UserError(
            f"expected the answers of a run: {error.strerror}",
            where=answers,
            do="`draftlab prepare RECIPE` makes them",
        ) from None
    made_of = {
        "version": 2,
        "answers": sha256,
        "tokenizer": tokenizer_sha256(tokenizer),
        "template": template_sha256(tokenizer),
    }
    table = read_index(folder, made_of)
    if table is None:
        monitor.say(f"samples: indexing {answers} in {folder}, or waiting for a process that does")
        with locked(answers, wait=True):
            table = read_index(folder, made_of)  # another process may have made it meanwhile
            if table is None:
                notes = _Notes(monitor)
                modes: dict[str, dict[str, Any]] = {}
                conversations = _checked(answers, sha256, notes, modes)
                samples = build_samples(conversations, tokenizer, notes)
                write_index(samples, folder, made_of, notes.lines, modes.values())
                table = read_index(folder, made_of)
    if table is None:
        raise UserError(
            "expected the index that was just written, found it damaged",
            where=folder,
            do="check the disk",
        )
    for note in table.notes:
        monitor.say(note)
    return table


class _Notes(Monitor):
    """A monitor that keeps its lines and passes progress on."""

    def __init__(self, monitor: Monitor) -> None:
        self.lines: list[str] = []
        self.say, self.progress = self.lines.append, monitor.progress


def _checked(
    answers: Path, sha256: str, monitor: Monitor, modes: dict[str, dict[str, Any]]
) -> Iterator[Conversation]:
    """Yield the conversations of an answers file; report if they differ from its manifest.

    Args:
        modes: receives the different template arguments, one more than an index lists at most.
    """
    manifest, count = answers.with_suffix(".json"), 0
    written = read_manifest(manifest) if manifest.exists() else {}
    total = written.get("conversations", 0)
    with open(answers, "rb") as file:
        num_lines = sum(1 for _ in file)
    for count, conversation in enumerate(iterate_conversations(answers, do=ANSWERS_HELP), 1):
        monitor.progress("samples", count, num_lines)
        if len(modes) <= MAX_MODES:
            arguments = conversation.template_arguments
            modes[canonical_json(arguments)] = arguments
        yield conversation
    if written.get("sha256", sha256) != sha256:
        monitor.say(
            f"warning: samples: {answers} was changed after it was written, from {total:,} to "
            f"{count:,} conversations. To restore it, remove it: `draftlab prepare` generates all "
            "answers again"
        )


def build_samples(
    conversations: Iterable[Conversation], tokenizer: PreTrainedTokenizerBase, monitor: Monitor
) -> Iterator[Sample]:
    """Yield the samples of conversations, in order; report how many were dropped, and why.

    The target's own answers keep the token ids that it read and wrote. Given answers are rendered
    with its chat template. If a later prompt does not begin with the tokens before it (the template
    drops earlier reasoning, trims answers, or they tokenize differently), the later answers become
    samples of their own, `<id>#2`, `<id>#3` …, each with the prompt that the target saw.

    Raises:
        UserError: there is no sample.
    """
    num_samples = 0
    dropped, omitted = Reasons(), Reasons()
    for conversation, answers in _with_answers(conversations, tokenizer, omitted):
        if isinstance(answers, RenderError):
            dropped.add(answers.what, conversation.id)
            continue
        for sample in _join_answers(conversation, answers):
            num_samples += 1
            yield sample
        if not answers:
            dropped.add("no assistant turn", conversation.id)
    for line in dropped.lines("samples: dropped", "conversation"):
        monitor.say(line)
    for line in omitted.lines("warning: samples:", "conversation"):
        monitor.say(line)
    if not num_samples:
        reason = next(iter(dropped.counts), "there are no conversations")
        raise UserError(
            f"expected conversations with answers to train on, found none: {reason}",
            where=dropped.first.get(reason, ""),
            do=REGENERATE,
        )


def _with_answers(
    conversations: Iterable[Conversation], tokenizer: PreTrainedTokenizerBase, omitted: Reasons
) -> Iterator[tuple[Conversation, Sequence[Answer] | RenderError]]:
    """Yield each conversation with its answers; given ones as the target would write them."""
    conversations = iter(conversations)
    while batch := list(islice(conversations, BATCH)):
        chats = [(Chat.of(c), c.id) for c in batch if not c.answers]
        given = find_turns(tokenizer, chats)
        for conversation in batch:
            if conversation.answers:
                yield conversation, conversation.answers
                continue
            found = next(given)
            if isinstance(found, RenderError):
                yield conversation, found
                continue
            text, turns = found
            for role in omitted_roles(text, conversation.messages) if turns else ():
                omitted.add(f"the chat template leaves out the {role} message", conversation.id)
            yield conversation, turns


def _join_answers(conversation: Conversation, answers: Sequence[Answer]) -> Iterator[Sample]:
    """Yield as few samples as hold every answer behind exactly the prompt that it answered."""
    tokens: tuple[int, ...] = ()
    lengths: list[int] = []  # of the prompt, the first answer, the tokens behind it, …
    name = conversation.id
    for number, answer in enumerate(answers, 1):
        if tokens and answer.prompt_ids[: len(tokens)] != tokens:
            yield _sample(conversation, name, tokens, lengths)
            tokens, lengths, name = (), [], f"{conversation.id}#{number}"
        lengths += [len(answer.prompt_ids) - len(tokens), len(answer.token_ids)]
        tokens = answer.prompt_ids + answer.token_ids
    if tokens:
        yield _sample(conversation, name, tokens, lengths)


def _sample(
    conversation: Conversation, name: str, tokens: tuple[int, ...], lengths: list[int]
) -> Sample:
    """Return a sample, whose spans follow from the lengths of its prompts and answers in turn."""
    numbers = [(index + 1) // 2 if index % 2 else 0 for index in range(len(lengths))]
    spans = np.repeat(np.array(numbers, np.int32), lengths)
    return Sample(name, tokens, spans, conversation.temperature, conversation.images)


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
