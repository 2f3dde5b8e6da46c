"""The prompts of a recipe: read from a JSONL file or an embedded set, deduplicated and limited."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from itertools import islice
from pathlib import Path

import numpy as np

from draftlab.errors import UserError
from draftlab.files import canonical_json, other_kind, read_fields
from draftlab.formatting import count_text
from draftlab.progress import Monitor
from draftlab.target_model.settings import TemplateArguments
from draftlab.text.conversations import LINE_HELP, Conversation, iterate_conversations, split_rounds
from draftlab.text.data_sets import data_set_file, fetch_data_set, hub_source
from draftlab.text.settings import SELF, PromptSettings

EMBEDDED_PROMPTS = {"embedded": "head.jsonl", "embedded:heldout": "heldout.jsonl"}
"""Prompt sets in draftlab/embedded/prompts: one to train a head, one held out for evaluation."""
NO_IMAGES = "no images are read here"
MEDIA = "draftlab reads text, and images of files that `image` names, before the first answer"
"""Why parts of messages are not read."""


def prompt_file(source: str) -> Path:
    """Return the file of a prompt source: an embedded prompt set's name, or a path; raise a
    `UserError` if there is no such file.
    """
    if source in EMBEDDED_PROMPTS:
        folder = Path(str(resources.files("draftlab"))) / "embedded" / "prompts"
        return folder / EMBEDDED_PROMPTS[source]
    path = Path(source).expanduser()
    if found := other_kind(path):
        raise UserError(
            f"expected a JSONL file of conversations, found {found}",
            where=path,
            do="give a path, a data set's id on the Hub, or one of "
            + ", ".join((*EMBEDDED_PROMPTS, SELF)),
        )
    return path


def find_prompts(settings: PromptSettings) -> Path | None:
    """Return the file of a recipe's prompts; None: a Hub data set that is not on this machine, or
    prompts that the target writes.

    Raises:
        UserError: as `prompt_file`, or a file has no revision.
    """
    if settings.source in EMBEDDED_PROMPTS or (source := hub_source(settings.source)) is None:
        if settings.revision is not None:
            raise UserError(
                f"expected no revision of a file, found {settings.revision!r}",
                where=f"prompts.revision, of {settings.source}",
                do="leave it out, or name a data set on the Hub",
            )
        return None if settings.source == SELF else prompt_file(settings.source)
    file = data_set_file(settings, source)
    return file if file.is_file() and file.with_suffix(".json").is_file() else None


def fetch_prompts(settings: PromptSettings, monitor: Monitor) -> Path:
    """Return `find_prompts`; a data set of the Hub is read first.

    Raises:
        UserError: as `find_prompts` and `fetch_data_set`.
    """
    if (file := find_prompts(settings)) is not None:
        return file
    source = hub_source(settings.source)
    assert source is not None
    return fetch_data_set(settings, source, monitor)


def data_set_commit(settings: PromptSettings) -> str | None:
    """Return the commit of a data set of the Hub that is on this machine; None: another source."""
    if hub_source(settings.source) is None or (file := find_prompts(settings)) is None:
        return None
    kind = "record of a data set's file"
    commit: str = read_fields(file.with_suffix(".json"), {"commit": str}, kind=kind)["commit"]
    return commit


def load_prompts(
    settings: PromptSettings,
    monitor: Monitor,
    *,
    reads_answers: bool = True,
    no_images: Callable[[], str] = lambda: NO_IMAGES,
    modes: Sequence[TemplateArguments] = ({},),
    seed: int = 0,
) -> list[Conversation]:
    """Return `select_prompts` with template arguments, and report how many there are.

    Args:
        modes, seed: see `with_arguments`; a line's own arguments take precedence.
    """
    prompts = select_prompts(settings, monitor, reads_answers=reads_answers, no_images=no_images)
    prompts = with_arguments(prompts, modes, seed)
    monitor.say(f"prompts: {count_text(len(prompts), 'conversation')} from {settings.source}")
    if any(prompt.template_arguments for prompt in prompts):
        counts = Counter(describe_arguments(prompt.template_arguments) for prompt in prompts)
        found = [f"{text or 'none'} for {count:,}" for text, count in counts.most_common(8)]
        more = f", and {len(counts) - 8:,} others" if len(counts) > 8 else ""
        monitor.say(f"prompts: template arguments: {', '.join(found)}{more}")
    return prompts


def with_arguments(
    conversations: Sequence[Conversation],
    modes: Sequence[TemplateArguments],
    seed: int,
    *,
    keep_own: bool = True,
) -> list[Conversation]:
    """Return conversations of which each has the template arguments of one of the modes.

    Of as many conversations in a row as there are modes each has another one, in random order: a
    fixed order would join a mode to one of `regenerate.temperatures`.

    Args:
        keep_own: whether a conversation's own values take precedence over those of the mode.
    """
    generator = np.random.default_rng([seed, 3])
    blocks = -(-len(conversations) // len(modes))
    chosen = generator.permuted(np.tile(np.arange(len(modes)), (blocks, 1)), axis=1).ravel()
    result = []
    for one, number in zip(conversations, chosen.tolist(), strict=False):
        mode, own = modes[number], one.template_arguments
        arguments = mode | own if keep_own else own | mode
        result.append(replace(one, template_arguments=arguments))
    return result


def describe_arguments(arguments: TemplateArguments) -> str:
    """Return template arguments as a text such as "enable_thinking=true"; "" for none."""
    pairs = sorted(arguments.items())
    return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in pairs)


def select_prompts(
    settings: PromptSettings,
    monitor: Monitor,
    *,
    reads_answers: bool = True,
    no_images: Callable[[], str] = lambda: NO_IMAGES,
) -> list[Conversation]:
    """Return the prompts that a target can answer; report how many were dropped, and why.

    Args:
        reads_answers: whether the given answers are used. Otherwise conversations that differ in
            them alone repeat each other: the target would answer one and the same prompt twice,
            in training and perhaps in validation.
        no_images: says why images of files are not read, "" if they are, which are all opened
            then; it is asked once there is one.

    Raises:
        UserError: the source is missing, not valid or empty, every conversation was dropped, or
            an image cannot be read.
    """
    path, refusal = fetch_prompts(settings, monitor), cache(no_images)
    dropped: Counter[str] = Counter()
    digests: set[bytes] = set()

    def usable() -> Iterator[Conversation]:
        for conversation in iterate_conversations(path):
            roles = [m["role"] for m in conversation.messages if m["role"] != "system"]
            digest = _digest(conversation, reads_answers) if settings.deduplicate else b""
            media, reason = conversation.media, refusal() if conversation.images else ""
            if reason:
                media = tuple(sorted({*media, "image"}))
            if media:
                dropped[f"with {' and '.join(media)} parts: {reason or MEDIA}"] += 1
            elif "user" not in roles:
                dropped["without a user turn"] += 1
            elif roles[0] != "user":
                dropped["with an answer before any prompt"] += 1
            elif digest in digests:
                dropped["equal to an earlier one (prompts.deduplicate)"] += 1
            else:
                if settings.deduplicate:
                    digests.add(digest)
                for image in conversation.images:
                    image.open()
                yield conversation

    prompts = list(islice(usable(), settings.max_prompts))
    for reason, count in sorted(dropped.items()):
        monitor.say(f"prompts: dropped {count_text(count, 'conversation')} {reason}")
    if not prompts:
        found = "found none" if dropped else "found an empty data set"
        what = f"expected text conversations with a user turn, {found}"
        raise UserError(what, where=path, do=LINE_HELP)
    return prompts


def _digest(conversation: Conversation, reads_answers: bool) -> bytes:
    """Return a hash of what decides a conversation's answers; duplicates have equal ones."""
    messages = conversation.messages
    turns = messages if reads_answers else split_rounds(messages)
    parts = [turns, conversation.tools, conversation.template_arguments]
    text = canonical_json([*parts, *(image.name for image in conversation.images)])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def select_answered(conversations: list[Conversation], monitor: Monitor) -> list[Conversation]:
    """Return the conversations whose assistant turns say something; report how many were dropped.

    Raises:
        UserError: no conversation has an assistant turn.
    """
    answered = [conversation for conversation in conversations if conversation.has_answer]
    if len(answered) < len(conversations):
        dropped = count_text(len(conversations) - len(answered), "conversation")
        monitor.say(f"answers: dropped {dropped} without an assistant turn, or with an empty one")
    if not answered:
        raise UserError(
            "expected conversations with an assistant turn, found none",
            do="let the target answer them (regenerate.enabled: true)",
        )
    return answered
