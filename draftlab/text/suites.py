"""Prompt suites for evaluation: public benchmarks, embedded prompts, or a file of conversations.

A suite has each prompt once. The order is the data's own, where a file may begin with many prompts
of one category. So a part of a suite is drawn from all of it (`Suite.sample`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from draftlab.errors import UserError
from draftlab.files import canonical_json, known_sha256, sha256_text
from draftlab.formatting import count_text
from draftlab.progress import Monitor
from draftlab.target_model.images import image_ids, no_images
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TemplateArguments
from draftlab.text.benchmarks import BENCHMARKS, parse_benchmark, read_rows
from draftlab.text.chat_template import Chat, Messages, RenderError, encode_prompts, template_sha256
from draftlab.text.conversations import Conversation
from draftlab.text.prompts import (
    EMBEDDED_PROMPTS,
    NO_IMAGES,
    describe_arguments,
    prompt_file,
    select_prompts,
    with_arguments,
)
from draftlab.text.settings import PromptSettings

NO_TEMPLATE = "none (raw text)"
"""The value of `Suite.template_sha256` for raw text."""
_HELP = (
    f"suites are {', '.join(EMBEDDED_PROMPTS)}, {', '.join(BENCHMARKS)} (each also as "
    "NAME:PATH), or a JSONL file of conversations"
)
MAX_SINGLE = 16
"""Most categories of a suite in which they have fewer than two prompts on average."""
SHORT = 512
"""Most tokens of the prompts that `Suite.by_length` does not distinguish."""
Prompts = tuple[tuple[str, tuple[int, ...]], ...]
"""Prompts as (id, token ids)."""


@dataclass(frozen=True)
class Suite:
    """The prompts of a suite as token ids, rendered with the target's chat template.

    Attributes:
        categories: the category of each prompt that has one, by its id; template arguments of
            several values are categories.
        digests: `prompt_digest` of each prompt, by its id.
    """

    name: str
    template_sha256: str
    prompts: Prompts
    categories: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Return the hex SHA-256 of all ids and tokens."""
        return sha256_text(canonical_json(self.prompts))

    def by_length(self) -> Suite:
        """Return the suite with categories of its prompts' lengths in tokens, in powers of two."""
        ranges = {}
        for id_, ids in sorted(self.prompts, key=lambda prompt: len(prompt[1])):
            most = 1 << (len(ids) - 1).bit_length()
            names = f"up to {SHORT:,} tokens", f"{most // 2 + 1:,} to {most:,} tokens"
            ranges[id_] = names[most > SHORT]
        return replace(self, categories=ranges)

    def evenly_ordered(self, seed: int) -> Prompts:
        """Return the prompts in an order of which every beginning has its share of each category.

        The order within a category is random, by the seed.
        """
        strata = [self.categories.get(id_) for id_, _ in self.prompts]
        return tuple(self.prompts[i] for i in even_order(strata, seed))

    def sample(self, count: int | None, seed: int) -> Suite:
        """Return a suite of `count` prompts, drawn evenly from all categories (None: all).

        They keep the order of this suite.
        """
        if count is None or count >= len(self.prompts):
            return self
        drawn = {id_ for id_, _ in self.evenly_ordered(seed)[:count]}
        return replace(self, prompts=tuple(one for one in self.prompts if one[0] in drawn))


def even_order(strata: Sequence[str | None], seed: int) -> list[int]:
    """Return the numbers of items in an order of which every beginning represents all of them.

    The items of a stratum, n of them in random order, are at (0 + u) / n, (1 + u) / n … of the
    order, with a random u in [0, 1) of each stratum. So equal strata never differ by more than one
    item in any beginning.
    """
    generator = np.random.default_rng(seed)
    place: dict[int, float] = {}
    for stratum in dict.fromkeys(strata):
        members = [i for i, one in enumerate(strata) if one == stratum]
        start = generator.random()
        for j, i in enumerate(generator.permutation(members).tolist()):
            place[i] = (j + start) / len(members)
    return sorted(place, key=place.__getitem__)


def load_suite(
    source: str,
    tokenizer: Any,
    monitor: Monitor,
    *,
    raw: bool = False,
    target: Target | None = None,
    **options: Any,
) -> Suite:
    """Load a prompt suite as token ids.

    Args:
        source: a benchmark (`parse_benchmark`), an embedded prompt set, or a JSONL file of
            conversations, whose own template arguments take precedence.
        raw, target, options: of `conversation_suite`.

    Raises:
        UserError: as `conversation_suite`, or the suite is unknown (the error lists all suites), or
            a file has another layout.
    """
    benchmark = parse_benchmark(source)
    if benchmark is None:
        reading = {} if raw or target is None else {"no_images": partial(no_images, target.folder)}
        conversations = read_conversations(source, monitor, **reading)
    else:
        rows = read_rows(benchmark)
        conversations = [
            Conversation(id_, [{"role": "user", "content": text}], "", category=kind)
            for id_, kind, text in rows
        ]
        counts = Counter(category for _, category, _ in rows if category)
        categories = ", ".join(f"{category} {count:,}" for category, count in counts.items())
        monitor.say(
            f"suite: {len(rows):,} prompts (first turns) of {source}"
            f"{f': {categories}' if categories else ''}; vllm bench generates at most "
            f"{benchmark.max_new_tokens:,} tokens for each, draftlab eval.max_new_tokens"
        )
    own = {"raw": raw, "keep_own": True, "target": target}
    return conversation_suite(source, conversations, tokenizer, monitor, **own, **options)


def read_conversations(source: str, monitor: Monitor, **reading: Any) -> list[Conversation]:
    """Return the conversations of an embedded prompt set or a JSONL file.

    Args:
        reading: options of `select_prompts`.

    Raises:
        UserError: the suite is unknown, or as `select_prompts`.
    """
    _check_known(source)
    settings = PromptSettings(source=source, deduplicate=False)
    return select_prompts(settings, monitor, **reading)


def conversation_suite(
    source: str,
    conversations: Sequence[Conversation],
    tokenizer: Any,
    monitor: Monitor,
    *,
    raw: bool = False,
    max_prompt_tokens: int | None = None,
    modes: Sequence[TemplateArguments] = ({},),
    seed: int = 0,
    keep_own: bool = False,
    target: Target | None = None,
) -> Suite:
    """Return a suite of conversations, whose prompts are all turns before the first answer.

    Args:
        source: the suite's name.
        max_prompt_tokens: longer prompts are left out, and their number is reported.
        raw: encode the plain text as the tokenizer does by default (usually with a bos), without
            the chat template.
        modes, seed: template arguments, of which each prompt gets one (`with_arguments`).
        keep_own: whether the conversations' own template arguments take precedence.
        target: reads images; None: prompts with images are dropped and counted.

    Raises:
        UserError: the template refuses a prompt, or no prompt is left.
    """
    texts = [one for one in conversations if not one.images]
    left_out = len(conversations) - len(texts)
    if left_out and (reason := NO_IMAGES if target is None else no_images(target.folder)):
        monitor.say(f"{source}: dropped {count_text(left_out, 'prompt')} with images: {reason}")
        conversations = texts
    if not conversations:
        raise UserError("expected prompts, found none without images", where=source, do=_HELP)
    conversations = with_arguments(conversations, modes, seed, keep_own=keep_own)
    if raw:
        encoded = [_encode_raw(tokenizer, one, source) for one in conversations]
    else:
        encoded = _encode(tokenizer, conversations, source, target)
    named = [(one.id, ids) for one, ids in zip(conversations, encoded, strict=True)]
    prompts = _drop_repeated(named, monitor)
    if max_prompt_tokens is not None:
        prompts = _drop_long(prompts, max_prompt_tokens, source, monitor)
    digests = {one.id: prompt_digest(one) for one in conversations}
    if raw:
        return Suite(source, NO_TEMPLATE, prompts, _categories(conversations), digests)
    modes = [*dict.fromkeys(describe_arguments(one.template_arguments) for one in conversations)]
    if len(modes) == 1 and modes[0]:
        source = f"{source} ({modes[0]})"
    categories = _categories(conversations, by_mode=len(modes) > 1)
    return Suite(source, template_sha256(tokenizer), prompts, categories, digests)


def _categories(conversations: Sequence[Conversation], *, by_mode: bool = False) -> dict[str, str]:
    """Return the categories by id; none where there is one, or nearly one for each prompt.

    Where a conversation has no category, the data set that it comes from (`source`) serves.

    Args:
        by_mode: whether they are the template arguments.
    """
    categories = {
        one.id: (describe_arguments(one.template_arguments) or "no template arguments")
        if by_mode
        else (one.category or one.source)
        for one in conversations
    }
    categories = {id_: category for id_, category in categories.items() if category}
    count = len(set(categories.values()))
    return categories if 2 <= count <= max(len(categories) / 2, MAX_SINGLE) else {}


def suite_sha256(source: str) -> str | None:
    """Return the SHA-256 of a suite's file; None for a data set on the Hub."""
    benchmark = parse_benchmark(source)
    if benchmark is None:
        _check_known(source)
        return known_sha256(prompt_file(source))
    file = benchmark.file()
    return None if file is None else sha256_text(canonical_json([known_sha256(file)]))


def _check_known(source: str) -> None:
    path = Path(source).expanduser()
    if source not in EMBEDDED_PROMPTS and not path.is_file():
        found = "a folder" if path.is_dir() else "neither"
        raise UserError(f"expected a prompt suite or a file, found {found}", where=source, do=_HELP)


def _prompt(conversation: Conversation) -> Messages:
    """Return a conversation's turns before its first answer."""
    return list(takewhile(lambda m: m["role"] != "assistant", conversation.messages))


def prompt_digest(conversation: Conversation) -> bytes:
    """Return a hash of the turns before a conversation's first answer, and of their images."""
    parts = [*_prompt(conversation), *(image.sha256 for image in conversation.images)]
    return hashlib.blake2b(canonical_json(parts).encode(), digest_size=16).digest()


def _encode(
    tokenizer: Any, conversations: Sequence[Conversation], source: str, target: Target | None
) -> list[tuple[int, ...]]:
    chats = (Chat.of(one, _prompt(one)) for one in conversations)
    found = []
    for one, prompt in zip(conversations, encode_prompts(tokenizer, chats), strict=True):
        if isinstance(prompt, RenderError):
            raise UserError(prompt.what, where=f"{source}, prompt {one.id}", do=prompt.do)
        ids = prompt.ids if target is None else image_ids(target, prompt.ids, one.images)
        found.append(ids)
    return found


def _encode_raw(tokenizer: Any, conversation: Conversation, source: str) -> tuple[int, ...]:
    messages, where = _prompt(conversation), f"{source}, prompt {conversation.id}"
    roles = [message["role"] for message in messages]
    if roles != ["user"]:
        raise UserError(
            f"expected one user turn as plain text, found {', '.join(roles)}",
            where=where,
            do="roles need a chat template: turn raw off",
        )
    ids = tuple(tokenizer(messages[0]["content"], verbose=False)["input_ids"])
    if not ids:
        raise UserError(
            "expected text, found a prompt without a token",
            where=where,
            do="remove the prompt from the suite",
        )
    return ids


def _drop_repeated(prompts: Sequence[tuple[str, tuple[int, ...]]], monitor: Monitor) -> Prompts:
    """Return the first prompt of each list of tokens: intervals take prompts as independent."""
    first: dict[tuple[int, ...], str] = {}
    for id_, ids in prompts:
        first.setdefault(ids, id_)
    if repeated := len(prompts) - len(first):
        monitor.say(
            f"eval.suite: left out {repeated:,} of {len(prompts):,} prompts, which repeat an "
            "earlier one"
        )
    return tuple((id_, ids) for ids, id_ in first.items())


def _drop_long(prompts: Prompts, max_tokens: int, source: str, monitor: Monitor) -> Prompts:
    """Return the prompts of at most `max_tokens` tokens, and report the others."""
    long = [(i, len(ids)) for i, ids in prompts if len(ids) > max_tokens]
    if long:
        examples = ", ".join(f"{i} ({length:,})" for i, length in long[:5])
        line = (
            f"{len(long):,} of {len(prompts):,} prompts, which have more than the {max_tokens:,} "
            f"tokens that leave room for an answer: {examples}{', …' if len(long) > 5 else ''}"
        )
        if len(long) == len(prompts):
            raise UserError(
                f"expected prompts that fit, found {line}",
                where=source,
                do="lower eval.max_new_tokens, or use a target with a longer context",
            )
        monitor.say(f"warning: eval.suite: left out {line}")
    return tuple(prompt for prompt in prompts if len(prompt[1]) <= max_tokens)
