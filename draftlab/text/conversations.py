"""Conversations: strict JSONL in, strict JSONL out, and where prompts come from."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from draftlab.errors import UserError
from draftlab.files import atomic_path, canonical_json
from draftlab.progress import Monitor
from draftlab.text.conversation_schema import Line
from draftlab.text.settings import PromptSettings

EMBEDDED = {"embedded": "head.jsonl", "embedded:heldout": "heldout.jsonl"}
"""Prompt sets that ship in draftlab/embedded/prompts: for training a head, and held out."""

_HINT = (
    'a line is {"id": …, "messages": [{"role": "system" | "user" | "assistant", '
    '"content": text}, …], "source": …}; id and source may be left out of all lines'
)


@dataclass(frozen=True)
class Answer:
    """One answer as the target wrote it; nothing is tokenised a second time.

    Attributes:
        prompt_ids: what it answered to.
        token_ids: the answer, a final stop token included.
        finish: "stop" or "length" (no closing tag then).
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class Conversation:
    """Messages, and where they come from.

    Attributes:
        id: unique in its file.
        messages: [{"role", "content"}, …]; answers may have `reasoning_content` and `tool_calls`.
        source: data set or file it was taken from.
        temperature: that its answers were sampled at; None: given, not the target's own.
        answers: the target's own, in the order of the assistant turns; empty for given ones.
        media: kinds of parts that are no text ("image", …) and so are not in `messages`.
        tools: JSON schemas of functions that the answers may call.
    """

    id: str
    messages: list[dict[str, Any]]
    source: str
    temperature: float | None = None
    answers: tuple[Answer, ...] = ()
    media: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def answered(self) -> bool:
        """Whether there is an assistant turn."""
        return any(message["role"] == "assistant" for message in self.messages)

    @property
    def digest(self) -> bytes:
        """Of what is said, messages and tools; the same for two that say the same."""
        text = canonical_json([self.messages, self.tools])
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def to_json(self) -> str:
        """One line of JSON, without its end."""
        fields = {
            "id": self.id,
            "messages": self.messages,
            "source": self.source,
            "temperature": self.temperature,
            "answers": [vars(answer) for answer in self.answers],
            **({"tools": list(self.tools)} if self.tools else {}),
        }
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def further_id(id_: str, sample: int) -> str:
    """The id of a prompt's answer number `sample`: `prompt-7`, `prompt-7~1`, `prompt-7~2`, …"""
    return f"{id_}~{sample}" if sample else id_


def parse_line(line: bytes, path: Path, number: int) -> Conversation:
    """A conversation from one line of `path`; without an id it is called file:number.

    Raises:
        UserError: naming file and line.
    """
    return _conversation(_parse(line, path, number), path, number)


def _parse(line: bytes, path: Path, number: int) -> Line:
    where = f"{path}:{number}"
    try:
        # Editors of Windows begin a file with a byte order mark.
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(
            "expected a JSON object in UTF-8 on each line, found "
            f"{line[:60].decode(errors='replace').strip() or 'an empty line'!r}: {error}",
            where=where,
            do=_HINT,
        ) from None
    try:
        read = Line.model_validate(value)
        for message in read.messages:
            message.text.encode()
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the line"
        if first["type"] == "missing":
            text = f"expected {place}, found {', '.join(first['input']) or 'nothing'}"
        else:
            wanted = first["msg"].replace("Input should be", "expected")
            if first["type"] in ("model_type", "dict_type"):
                wanted = "expected an object"
            text = f"{place}: {wanted}, found {str(first['input'])[:60]!r}"
        raise UserError(text, where=where, do=_HINT) from None
    except UnicodeEncodeError as error:
        raise UserError(
            f"expected Unicode text, found half a surrogate pair: {error}", where=where
        ) from None
    return read


def _conversation(read: Line, path: Path, number: int) -> Conversation:
    return Conversation(
        read.id or f"{path.stem}:{number}",
        [message.plain() for message in read.messages],
        read.source or path.name,
        read.temperature,
        tuple(Answer(tuple(a.prompt_ids), tuple(a.token_ids), a.finish) for a in read.answers),
        tuple(sorted(set().union(*(message.media for message in read.messages)))),
        tuple(read.tools),
    )


def iterate_conversations(path: Path) -> Iterator[Conversation]:
    """Reads JSONL line by line.

    Raises:
        UserError: at a broken line, a line of another schema than the first, or a repeated id.
    """
    seen: dict[str, int] = {}
    keys: set[str] | None = None
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                read = _parse(line, path, number)
                conversation = _conversation(read, path, number)
                found = read.model_fields_set - {"tools"}
                keys = found if keys is None else keys
                if found != keys:
                    raise UserError(
                        f"expected the keys of line 1, {sorted(keys)}, found {sorted(found)}",
                        where=f"{path}:{number}",
                        do="keep data sets of different make in different files",
                    )
                if conversation.id in seen:
                    raise UserError(
                        f"expected unique ids, found {conversation.id!r} here and on line "
                        f"{seen[conversation.id]}",
                        where=f"{path}:{number}",
                        do="rename one, or leave ids out of all lines",
                    )
                seen[conversation.id] = number
                yield conversation
    except OSError as error:
        raise UserError(
            f"expected a readable JSONL file of conversations, found: {error.strerror}",
            where=path,
            do=f'give a path, "embedded" or "embedded:heldout". {_HINT}',
        ) from None


def read_conversations(path: Path) -> list[Conversation]:
    """All conversations of a JSONL file; an empty one is a `UserError`."""
    return _some(iterate_conversations(path), path)


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    """Writes JSONL atomically, in order."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(conversation.to_json() + "\n" for conversation in conversations)


def _some(conversations: Iterable[Conversation], where: Path | str) -> list[Conversation]:
    taken = list(conversations)
    if not taken:
        raise UserError("expected conversations, found an empty data set", where=where, do=_HINT)
    return taken


def conversation_file(source: str) -> Path:
    """The file behind a source: an embedded prompt set by name, or a path.

    Raises:
        UserError: when there is no such file.
    """
    if source in EMBEDDED:
        folder = Path(str(resources.files("draftlab"))) / "embedded" / "prompts"
        return folder / EMBEDDED[source]
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(
            "expected a JSONL file of conversations, found none",
            where=path,
            do=f"give a path, or one of {', '.join(EMBEDDED)}",
        )
    return path


def load_prompts(settings: PromptSettings, monitor: Monitor) -> list[Conversation]:
    """`usable_prompts`, counted aloud."""
    taken = usable_prompts(settings, monitor)
    monitor.say(f"prompts: {len(taken):,} conversations from {settings.source}")
    return taken


def usable_prompts(settings: PromptSettings, monitor: Monitor) -> list[Conversation]:
    """The conversations a source has; those a target cannot answer are dropped and counted.

    Raises:
        UserError: a missing, broken or empty source, or one of which everything was dropped.
    """
    path = conversation_file(settings.source)
    dropped: Counter[str] = Counter()
    taken_of: Counter[str] = Counter()
    said: set[bytes] = set()

    def usable() -> Iterator[Conversation]:
        for conversation in iterate_conversations(path):
            spoken = [m["role"] for m in conversation.messages if m["role"] != "system"]
            digest = conversation.digest if settings.deduplicate else b""
            if conversation.media:
                dropped[f"have {' and '.join(conversation.media)} parts: drafting is for text"] += 1
            elif "user" not in spoken:
                dropped["have no user turn"] += 1
            elif spoken[0] != "user":
                dropped["begin with an answer"] += 1
            elif digest in said:
                dropped["say the same as an earlier one (prompts.deduplicate)"] += 1
            elif taken_of[conversation.source] == settings.per_source:
                dropped["are more of their source than prompts.per_source"] += 1
            else:
                taken_of[conversation.source] += 1
                if settings.deduplicate:
                    said.add(digest)
                yield conversation

    taken = list(islice(usable(), settings.max_prompts))
    for reason, count in sorted(dropped.items()):
        monitor.say(f"prompts: dropped {count:,} conversations that {reason}")
    if not taken and dropped:
        raise UserError(
            "expected conversations of text with a user turn, found none", where=path, do=_HINT
        )
    return _some(taken, path)


def with_answers(conversations: list[Conversation], monitor: Monitor) -> list[Conversation]:
    """The conversations that have an assistant turn; the others are dropped and counted.

    Raises:
        UserError: when none has.
    """
    kept = [conversation for conversation in conversations if conversation.answered]
    if len(kept) < len(conversations):
        monitor.say(
            f"answers: dropped {len(conversations) - len(kept):,} conversations without an "
            "assistant turn"
        )
    if not kept:
        raise UserError(
            "expected conversations with an assistant turn, found none",
            do="let the target answer them (regenerate.enabled: true)",
        )
    return kept
