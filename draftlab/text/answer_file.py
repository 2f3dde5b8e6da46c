"""The answers file: appended to while answers are generated, and resumed after an interruption.

`<stem>.partial.jsonl` is a header line (what the answers are generated with) followed by
conversations in prompt order, appended one chunk at a time. A conversation without any answer,
because a server refused its first prompt as too long, is a line that says so: it is not asked for
again, and is no part of the complete file. A kill leaves at most one incomplete
chunk, which is removed and generated again. When the file is complete, `<stem>.jsonl` and the
manifest `<stem>.json` replace it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from draftlab.errors import UserError
from draftlab.files import (
    atomic_path,
    canonical_json,
    parse_json,
    read_fields,
    sha256_file,
    try_lock,
    write_json,
)
from draftlab.progress import Monitor
from draftlab.text.conversations import Conversation, Reasons, parse_conversation

_FORMAT = "draftlab answers 1"
_DROPPED = b'{"dropped":'
"""How the line of a conversation without any answer begins; others begin with the id."""


@dataclass(frozen=True)
class DroppedPrompt:
    """A conversation of which no prompt was answered.

    Attributes:
        turns: number of its turns that an answer was expected for.
    """

    id: str
    reason: str
    turns: int

    def to_json(self) -> str:
        """Return its line in the partial file."""
        values = {"dropped": self.reason, "id": self.id, "turns": self.turns}
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def parse(cls, line: bytes) -> DroppedPrompt | None:
        """Return the dropped prompt of a line; None if it is another conversation's."""
        if not line.startswith(_DROPPED):
            return None
        values = parse_json(line)
        return cls(values["id"], values["dropped"], values["turns"])


@dataclass
class AnswerCounts:
    """Counts of a file's conversations and answers, and of the answers that did not end.

    Attributes:
        dropped: conversations without any answer, by reason; none of the other counts has them.
        dropped_turns: the turns of those.
    """

    conversations: int = 0
    answers: int = 0
    tokens: int = 0
    unfinished: int = 0
    dropped: Reasons = field(default_factory=Reasons)
    dropped_turns: int = 0

    @property
    def lines(self) -> int:
        """Number of conversations with and without answers."""
        return self.conversations + self.dropped.counts.total()

    def add(self, conversation: Conversation | DroppedPrompt) -> None:
        """Count one conversation."""
        if isinstance(conversation, DroppedPrompt):
            self.dropped.add(conversation.reason, conversation.id)
            self.dropped_turns += conversation.turns
            return
        self.conversations += 1
        self.answers += len(conversation.answers)
        self.tokens += sum(len(answer.token_ids) for answer in conversation.answers)
        self.unfinished += sum(answer.finish == "length" for answer in conversation.answers)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of an answers file."""
    fields = {"made_with": dict, "conversations": int, "sha256": str}
    do = "remove the file: the answers are then generated again"
    return read_fields(path, fields, kind="manifest of answers", do=do)


class AnswerFile:
    """The answers at `path`, generated with `identity` (JSON values only)."""

    def __init__(self, path: Path, identity: dict[str, Any], monitor: Monitor) -> None:
        self.path, self.identity, self.monitor = path, identity, monitor
        self.manifest = path.with_suffix(".json")
        self.partial = path.with_name(path.stem + ".partial.jsonl")

    def is_complete(self) -> bool:
        """Return whether the file is complete.

        Raises:
            UserError: it has another identity; the error names every value that differs.
        """
        if not self.manifest.exists():
            return False
        manifest = read_manifest(self.manifest)
        self._check_identity(manifest["made_with"], self.manifest)
        if not self.path.exists() or sha256_file(self.path) != manifest["sha256"]:
            self.monitor.say(
                f"answers: {self.path} differs from its manifest; it is generated again"
            )
            return False
        self.partial.unlink(missing_ok=True)
        self.monitor.say(f"answers: all {manifest['conversations']:,} conversations are there")
        return True

    def complete(self, counts: AnswerCounts, dropped: int) -> None:
        """Write the final file and then its manifest, and remove the partial file.

        Args:
            dropped: prompts that were left out before any was sent.
        """
        with (
            open(self.partial, "rb") as partial,
            atomic_path(self.path) as temporary,
            open(temporary, "xb") as file,
        ):
            partial.readline()  # the header
            file.writelines(line for line in partial if not line.startswith(_DROPPED))
        fields = {"made_with": self.identity, **asdict(counts)}
        del fields["dropped_turns"]
        fields["dropped"] = dropped + counts.dropped.counts.total()
        write_json(self.manifest, {**fields, "sha256": sha256_file(self.path)})
        self.partial.unlink()

    @contextmanager
    def open_partial(
        self, ids: Sequence[str], chunk_size: int
    ) -> Iterator[tuple[AnswerCounts, BinaryIO]]:
        """Open and lock the partial file; yield the counts of its whole chunks, and it.

        Args:
            ids: the ids of all conversations, in order.
            chunk_size: conversations that are appended at a time.
        """
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        with open(self.partial, "a+b") as file:
            if not try_lock(file.fileno(), self.partial):
                raise UserError(
                    "another process is writing these answers",
                    where=self.partial,
                    do="wait until it ends, or stop it",
                )
            file.seek(0)
            header = file.readline()
            if header.endswith(b"\n"):
                self._check_header(header)
            else:  # a new file, or one whose first write was interrupted
                file.truncate(0)
                header = canonical_json({"format": _FORMAT, "made_with": self.identity}).encode()
                header += b"\n"
                file.write(header)
            ends = [len(header)]  # of the header and of each whole line
            torn = 0
            for line in file:
                if line.endswith(b"\n"):
                    ends.append(ends[-1] + len(line))
                else:
                    torn = 1
            valid = len(ends) - 1
            if valid != len(ids):  # only the last chunk may be shorter
                valid = valid // chunk_size * chunk_size
            if lines := len(ends) - 1 + torn - valid:
                self.monitor.say(
                    f"answers: the last write was interrupted; {lines:,} lines are generated again"
                )
                file.truncate(ends[valid])
            counts = self._count(file, ends[0], ids)
            if counts.lines:
                self.monitor.say(f"answers: resuming after {counts.lines:,} of {len(ids):,}")
            yield counts, file

    def _count(self, file: BinaryIO, start: int, ids: Sequence[str]) -> AnswerCounts:
        """Count the conversations from byte `start` on, and check that they are the first ones."""
        counts = AnswerCounts()
        file.seek(start)
        for line in file:
            conversation: Conversation | DroppedPrompt | None = DroppedPrompt.parse(line)
            if conversation is None:
                conversation = parse_conversation(line, self.partial, counts.lines + 2)
            if counts.lines == len(ids) or conversation.id != ids[counts.lines]:
                raise UserError(
                    "expected answers in the order of the prompts, found another order",
                    where=self.partial,
                    do="delete the file to generate the answers again",
                )
            counts.add(conversation)
        return counts

    @staticmethod
    def append(file: BinaryIO, conversations: Sequence[Conversation | DroppedPrompt]) -> None:
        """Append one chunk with a single write, then fsync."""
        file.write("".join(c.to_json() + "\n" for c in conversations).encode())
        file.flush()
        os.fsync(file.fileno())

    def _check_header(self, line: bytes) -> None:
        try:
            header = parse_json(line)
            identity = header["made_with"] if header["format"] == _FORMAT else None
        except (ValueError, KeyError, TypeError):
            identity = None
        if not isinstance(identity, dict):
            raise UserError(
                "expected a file of partial answers, found another file",
                where=self.partial,
                do="move it elsewhere",
            )
        self._check_identity(identity, self.partial)

    def _check_identity(self, identity: dict[str, Any], where: Path) -> None:
        differences = [
            f"{key}: {identity.get(key)!r} in the file, {self.identity.get(key)!r} now"
            for key in {**self.identity, **identity}
            if identity.get(key) != self.identity.get(key)
        ]
        if differences:
            raise UserError(
                "expected answers generated as the recipe says, found others:\n  "
                + "\n  ".join(differences),
                where=where,
                do="restore these values, use another run, or delete the file to generate the "
                "answers again",
            )
