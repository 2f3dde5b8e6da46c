"""Prompt suites for evaluation: public benchmarks, embedded prompts, or a file of conversations.

Of each benchmark's conversations a suite has the first turn only, as in `vllm bench`, and each
prompt once. The order is the data's own, where a file may begin with many prompts of one category.
So a part of a suite is drawn from all of it (`Suite.sample`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from draftlab.errors import UserError
from draftlab.files import canonical_json, known_sha256, sha256_text
from draftlab.progress import Monitor
from draftlab.target_model.settings import TemplateArguments
from draftlab.text.chat_rows import Dropped, read_row
from draftlab.text.chat_template import (
    Chat,
    Messages,
    RenderError,
    encode_prompts,
    template_sha256,
)
from draftlab.text.conversations import Conversation
from draftlab.text.data_sets import FORMATS, Source, rows_of
from draftlab.text.prompts import (
    EMBEDDED_PROMPTS,
    describe_arguments,
    prompt_file,
    select_prompts,
    with_arguments,
)
from draftlab.text.settings import PromptSettings

# SPEED-Bench writes this into prompts that its prepare script has not filled in.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class BenchmarkLayout:
    """The columns of a benchmark's rows, and where the rows are.

    Attributes:
        column: the prompt's column, which `chat_rows.py` reads.
        id_column: the column of the rows' ids; None: rows are numbered.
        hub, config, split: the data set on the Hub.
        get: what a user does to get the benchmark if it is not on the Hub.
        subset: the default of a folder with one file per subset, as in `vllm bench`.
        max_new_tokens: the output tokens per prompt in `vllm bench`.
    """

    column: str
    id_column: str | None
    hub: str | None = None
    config: str | None = None
    split: str | None = None
    subset: str | None = None
    get: str = ""
    max_new_tokens: int = 256


BENCHMARKS = {
    "mt-bench": BenchmarkLayout("turns", "question_id", hub="philschmid/mt-bench", split="train"),
    "humaneval": BenchmarkLayout("prompt", "task_id", hub="openai/openai_humaneval", split="test"),
    "gsm8k": BenchmarkLayout("question", None, hub="openai/gsm8k", config="main", split="test"),
    "spec-bench": BenchmarkLayout(
        "turns",
        "question_id",
        get="give it as spec-bench:PATH, the question.jsonl of the Spec-Bench repository",
    ),
    "speed-bench": BenchmarkLayout(
        "messages",
        "question_id",
        subset="qualitative",
        get="give it as speed-bench:PATH, the folder that SPEED-Bench's prepare script writes",
        max_new_tokens=4096,
    ),
}
"""The layouts of the benchmarks, by name."""


@dataclass(frozen=True)
class BenchmarkSource:
    """A benchmark's rows: from a local file or folder (`path` None: the Hub), or a part of them."""

    name: str
    layout: BenchmarkLayout
    path: Path | None
    subset: str | None
    category: str | None

    def file(self) -> Path | None:
        """Return the local file; None for the Hub.

        Raises:
            UserError: there is no such file, or it is ambiguous which one is meant.
        """
        if self.path is None:
            if self.layout.hub is None:
                raise UserError(
                    f"expected a path for {self.name}, found none",
                    where=self.name,
                    do=self.layout.get,
                )
            return None
        if self.path.is_file():
            if self.path.suffix not in FORMATS:
                raise UserError(
                    f"expected a file in {', '.join(FORMATS)}, found {self.path.name}",
                    where=self.path,
                    do="give a file of one of these kinds, or a folder with them",
                )
            return self.path
        if not self.path.is_dir():
            raise UserError(
                f"expected a file or folder of {self.name}, found neither",
                where=self.path,
                do="check the path",
            )
        files = sorted(
            file
            for file in self.path.rglob("*")
            if file.suffix in FORMATS and file.name != "dataset_infos.json" and file.is_file()
        )
        matches = [file for file in files if self.subset in (None, file.stem)]
        if len(matches) == 1:
            return matches[0]
        names = ", ".join(str(file.relative_to(self.path)) for file in files[:8])
        expected, do = "one file", f"name the file: {self.name}:FILE"
        if self.subset:
            expected = f"one file for the subset {self.subset}"
            do = f"name the subset: {self.name}:{self.path}#SUBSET"
        raise UserError(
            f"expected {expected}, found {len(matches)} in {names or 'no such file'}"
            + ", …" * (len(files) > 8),
            where=self.path,
            do=do,
        )


def parse_benchmark(source: str) -> BenchmarkSource | None:
    """Parse a benchmark's name; return None for embedded prompts and files of conversations.

    The forms are "NAME", "NAME#category", "NAME:PATH" and "NAME:PATH#category"; for a folder of
    SPEED-Bench also "NAME:PATH#subset" and "NAME:PATH#subset/category".
    """
    name = next(
        (n for n in BENCHMARKS if source == n or source.startswith((f"{n}:", f"{n}#"))), None
    )
    if name is None:
        return None
    rest = source[len(name) :]
    text, category = rest[1:] if rest.startswith(":") else "", ""
    if rest.startswith("#"):
        category = rest[1:]
    elif "#" in text and not Path(text).expanduser().exists():  # a path may contain a "#"
        text, _, category = text.rpartition("#")
    layout, path = BENCHMARKS[name], Path(text).expanduser() if text else None
    subset = layout.subset if path is not None and path.is_dir() else None
    if subset is not None and category:
        subset, _, category = category.partition("/")
    return BenchmarkSource(name, layout, path, subset, category or None)


def read_rows(source: BenchmarkSource) -> list[tuple[str, str | None, str]]:
    """Return (id, category, first turn) of every row of the source, in the data's order.

    An id is name/id or, for rows without an id, name/number (from 1). A repeated id gets the row's
    number as a suffix.

    Raises:
        UserError: a row has another layout (the error names file, line, and the expected field), no
            row has the category, or there are no rows.
    """
    layout = source.layout
    rows: dict[str, tuple[str, str | None, str]] = {}
    categories: set[str] = set()
    for number, (where, row) in enumerate(_rows(source), 1):
        category = None if row.get("category") is None else str(row["category"])
        categories |= {category} if category else set()
        if source.category is not None and category != source.category:
            continue
        row_id = row.get(layout.id_column) if layout.id_column else None
        id_ = f"{source.name}/{number if row_id is None else row_id}"
        if id_ in rows:
            id_ = f"{source.name}/{row_id}:{number}"
        rows[id_] = (id_, category, _first_turn(source, row, where))
    if not rows:
        what = "expected prompts, found no rows"
        if source.category is not None:
            what = (
                f"expected rows of the category {source.category}, found "
                f"{', '.join(sorted(categories)) or 'rows without a category'}"
            )
        raise UserError(
            what,
            where=source.path or layout.hub or source.name,
            do="check the name of the category, or the file",
        )
    return list(rows.values())


def _rows(source: BenchmarkSource) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row after its location for error messages."""
    layout, file = source.layout, source.file()
    if file is None:
        one = Source(source.name, str(layout.hub), str(layout.split), layout.config)
        alternative = f"give a local copy: {source.name}:PATH"
    else:
        one, alternative = Source(source.name, str(file)), ""
    for number, row in enumerate(rows_of(one, alternative), 1):
        where = f"{one.path}:{number}"
        if isinstance(row, dict):
            yield where, row
        elif not isinstance(row, bytes) or row.strip():
            found = f"{row[:60]!r}" if isinstance(row, bytes) else type(row).__name__
            raise UserError(
                f"expected a JSON object a row, found {found}",
                where=where,
                do="correct the row, or remove it",
            )


def _first_turn(source: BenchmarkSource, row: dict[str, Any], where: str) -> str:
    column = source.layout.column
    if column not in row:
        raise UserError(
            f"expected the field {column} of {source.name}, found {', '.join(row) or 'no field'}",
            where=where,
            do="check that the file is the benchmark that its name says",
        )
    try:
        messages = read_row({column: row[column]}).messages
    except Dropped as reason:
        raise UserError(
            f"expected a text, turns or messages in {column}, found {reason}",
            where=where,
            do="correct the row, or remove it",
        ) from None
    turn: str = next(message["content"] for message in messages if message["role"] == "user")
    if _PLACEHOLDER in turn:
        raise UserError(
            "expected a prepared prompt, found SPEED-Bench's placeholder",
            where=where,
            do="fill in the prompts with SPEED-Bench's own prepare script first",
        )
    return turn


NO_TEMPLATE = "none (raw text)"
"""The value of `Suite.template_sha256` for raw text."""
_HELP = (
    f"suites are {', '.join(EMBEDDED_PROMPTS)}, {', '.join(BENCHMARKS)} (each also as "
    "NAME:PATH[#category], speed-bench:FOLDER[#subset[/category]]), or a JSONL file of "
    "conversations"
)
MAX_SINGLE = 16
"""Most categories of a suite in which they have fewer than two prompts on average."""
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
    max_prompt_tokens: int | None = None,
    modes: Sequence[TemplateArguments] = ({},),
    seed: int = 0,
) -> Suite:
    """Load a prompt suite as token ids.

    Args:
        source: a benchmark (`parse_benchmark`), an embedded prompt set, or a JSONL file of
            conversations. A conversation's prompt is all turns before its first answer.
        raw: encode the plain text as the tokenizer does by default (usually with a bos), without
            the chat template.
        max_prompt_tokens: longer prompts are left out, and their number is reported.
        modes, seed: template arguments, of which each prompt gets one (`with_arguments`); a
            conversation's own ones take precedence.

    Raises:
        UserError: the suite is unknown (the error lists all suites), a file has another layout, the
            template refuses a prompt, or no prompt is left.
    """
    benchmark = parse_benchmark(source)
    if benchmark is None:
        _check_known(source)
        settings = PromptSettings(source=source, deduplicate=False)
        conversations = select_prompts(settings, monitor)
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
            f"{benchmark.layout.max_new_tokens:,} tokens for each, draftlab eval.max_new_tokens"
        )
    conversations = with_arguments(conversations, modes, seed)
    return _render(source, conversations, tokenizer, monitor, raw, max_prompt_tokens)


def conversation_suite(
    name: str,
    conversations: Sequence[Conversation],
    tokenizer: Any,
    monitor: Monitor,
    *,
    raw: bool = False,
    max_prompt_tokens: int | None = None,
    modes: Sequence[TemplateArguments] = ({},),
    seed: int = 0,
) -> Suite:
    """Return a suite of conversations; the other arguments and errors are those of `load_suite`.

    Args:
        modes: they take precedence over the conversations' own template arguments.
    """
    conversations = with_arguments(conversations, modes, seed, keep_own=False)
    return _render(name, conversations, tokenizer, monitor, raw, max_prompt_tokens)


def _render(
    source: str,
    conversations: Sequence[Conversation],
    tokenizer: Any,
    monitor: Monitor,
    raw: bool,
    max_prompt_tokens: int | None,
) -> Suite:
    if raw:
        encoded = [_encode_raw(tokenizer, one, source) for one in conversations]
    else:
        encoded = _encode(tokenizer, conversations, source)
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
    """Return a hash of the turns before a conversation's first answer."""
    return hashlib.blake2b(canonical_json(_prompt(conversation)).encode(), digest_size=16).digest()


def _encode(
    tokenizer: Any, conversations: Sequence[Conversation], source: str
) -> list[tuple[int, ...]]:
    chats = (Chat.of(one, _prompt(one)) for one in conversations)
    found = []
    for one, prompt in zip(conversations, encode_prompts(tokenizer, chats), strict=True):
        if isinstance(prompt, RenderError):
            raise UserError(prompt.what, where=f"{source}, prompt {one.id}", do=prompt.do)
        found.append(prompt.ids)
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
