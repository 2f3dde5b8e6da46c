"""The answers file: appended to while answers are generated, and resumed after an interruption.

`<stem>.partial.jsonl` is a header line (what the answers are generated with) followed by
conversations in prompt order, appended one chunk at a time. A kill leaves at most one incomplete
chunk, which is removed and generated again. When the file is complete, `<stem>.jsonl` and the
manifest `<stem>.json` replace it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from draftlab.errors import UserError
from draftlab.files import canonical_json, read_json, sha256_file, write_json
from draftlab.progress import Monitor
from draftlab.text.conversations import (
    Conversation,
    parse_conversation,
    read_conversations,
    write_conversations,
)

_FORMAT = "draftlab answers 1"


class AnswerFile:
    """The answers at `path`, generated with `identity` (JSON values only)."""

    def __init__(self, path: Path, identity: dict[str, Any], monitor: Monitor) -> None:
        self.path, self.identity, self.monitor = path, identity, monitor
        self.manifest = path.with_suffix(".json")
        self.partial = path.with_name(path.stem + ".partial.jsonl")

    def read_complete(self) -> list[Conversation] | None:
        """Return the answers if the file is complete, else None.

        Raises:
            UserError: it has another identity; the error names every value that differs.
        """
        if not self.manifest.exists():
            return None
        manifest = read_json(self.manifest, kind="manifest of answers")
        self._check_identity(manifest.get("made_with", {}), self.manifest)
        if not self.path.exists() or sha256_file(self.path) != manifest.get("sha256"):
            self.monitor.say(
                f"answers: {self.path} differs from its manifest; it is generated again"
            )
            return None
        self.partial.unlink(missing_ok=True)
        conversations = read_conversations(self.path)
        self.monitor.say(f"answers: all {len(conversations):,} conversations are there")
        return conversations

    def complete(self, conversations: Sequence[Conversation], counts: dict[str, int]) -> None:
        """Write the final file and then its manifest, and remove the partial file."""
        write_conversations(self.path, conversations)
        digest = sha256_file(self.path)
        write_json(self.manifest, {"made_with": self.identity, **counts, "sha256": digest})
        self.partial.unlink()

    @contextmanager
    def open_partial(
        self, ids: Sequence[str], chunk_size: int
    ) -> Iterator[tuple[list[Conversation], BinaryIO]]:
        """Open and lock the partial file; yield the conversations of its whole chunks, and it.

        Args:
            ids: the ids of all conversations, in order.
            chunk_size: conversations that are appended at a time.
        """
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        with open(self.partial, "a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    "another process is writing these answers", where=self.partial
                ) from None
            file.seek(0)
            header, *lines = file.readlines() or [b""]
            if header.endswith(b"\n"):
                self._check_header(header)
            else:  # a new file, or one whose first write was interrupted
                file.truncate(0)
                header = canonical_json({"format": _FORMAT, "made_with": self.identity}).encode()
                header += b"\n"
                file.write(header)
            valid = [line for line in lines if line.endswith(b"\n")]
            if len(valid) != len(ids):  # only the last chunk may be shorter
                valid = valid[: len(valid) // chunk_size * chunk_size]
            if len(valid) < len(lines):
                self.monitor.say(
                    f"answers: the last write was interrupted; {len(lines) - len(valid):,} lines "
                    "are generated again"
                )
                file.truncate(len(header) + sum(map(len, valid)))
            done = [parse_conversation(line, self.partial, n)[0] for n, line in enumerate(valid, 2)]
            if [conversation.id for conversation in done] != list(ids[: len(done)]):
                raise UserError(
                    "expected answers in the order of the prompts, found another order",
                    where=self.partial,
                    do="delete the file to generate the answers again",
                )
            if done:
                self.monitor.say(f"answers: resuming after {len(done):,} of {len(ids):,}")
            yield done, file

    @staticmethod
    def append(file: BinaryIO, conversations: Sequence[Conversation]) -> None:
        """Append one chunk with a single write, then fsync."""
        file.write("".join(c.to_json() + "\n" for c in conversations).encode())
        file.flush()
        os.fsync(file.fileno())

    def _check_header(self, line: bytes) -> None:
        try:
            header = json.loads(line)
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
