"""The file answers grow in, and the manifest that says what made them.

`<stem>.partial.jsonl` is a header line (what the answers are made with) and then conversations in
prompt order, appended a piece at a time. A kill leaves at most one torn piece; it is cut off and
made again. When all are there, `<stem>.jsonl` and the manifest `<stem>.json` replace it.
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
    parse_line,
    read_conversations,
    write_conversations,
)

_FORMAT = "draftlab answers 1"


class AnswerFile:
    """Answers at `path`, made with `identity` (JSON values only); other ones there are refused."""

    def __init__(self, path: Path, identity: dict[str, Any], monitor: Monitor) -> None:
        self.path, self.identity, self.monitor = path, identity, monitor
        self.manifest = path.with_suffix(".json")
        self.partial = path.with_name(path.stem + ".partial.jsonl")

    def finished(self) -> list[Conversation] | None:
        """The answers when they are all there; None when some are to be made.

        Raises:
            UserError: those there were made with something else; every differing value is named.
        """
        if not self.manifest.exists():
            return None
        made = read_json(self.manifest, kind="manifest of answers")
        self._refuse_other(made.get("made_with", {}), self.manifest)
        if not self.path.exists() or sha256_file(self.path) != made.get("sha256"):
            self.monitor.say(f"answers: {self.path} is not what its manifest says; made again")
            return None
        self.partial.unlink(missing_ok=True)
        conversations = read_conversations(self.path)
        self.monitor.say(f"answers: all {len(conversations):,} conversations are there")
        return conversations

    def finish(self, conversations: Sequence[Conversation], counts: dict[str, int]) -> None:
        """Writes the final file, then its manifest, then drops the partial one."""
        write_conversations(self.path, conversations)
        digest = sha256_file(self.path)
        write_json(self.manifest, {"made_with": self.identity, **counts, "sha256": digest})
        self.partial.unlink()

    @contextmanager
    def progress(
        self, ids: Sequence[str], piece: int
    ) -> Iterator[tuple[list[Conversation], BinaryIO]]:
        """Opens the partial file, locked: the conversations of its whole pieces, and the file.

        Args:
            ids: all conversations' ids in order.
            piece: conversations appended at a time.
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
            else:  # new, or killed within the first write
                file.truncate(0)
                header = canonical_json({"format": _FORMAT, "made_with": self.identity}).encode()
                header += b"\n"
                file.write(header)
            whole = [line for line in lines if line.endswith(b"\n")]
            kept = whole if len(whole) == len(ids) else whole[: len(whole) // piece * piece]
            if len(kept) < len(lines):
                self.monitor.say(
                    f"answers: the last write was interrupted; {len(lines) - len(kept):,} lines "
                    "are made again"
                )
                file.truncate(len(header) + sum(map(len, kept)))
            done = [parse_line(line, self.partial, n) for n, line in enumerate(kept, 2)]
            if [conversation.id for conversation in done] != list(ids[: len(done)]):
                raise UserError(
                    "expected answers in the order of the prompts, found another order",
                    where=self.partial,
                    do="delete it to answer anew",
                )
            if done:
                self.monitor.say(f"answers: {len(done):,} of {len(ids):,} were there; going on")
            yield done, file

    @staticmethod
    def append(file: BinaryIO, conversations: Sequence[Conversation]) -> None:
        """Commits one piece: a single write, then fsync."""
        file.write("".join(c.to_json() + "\n" for c in conversations).encode())
        file.flush()
        os.fsync(file.fileno())

    def _check_header(self, header: bytes) -> None:
        try:
            found = json.loads(header)
            made = found["made_with"] if found["format"] == _FORMAT else None
        except (ValueError, KeyError, TypeError):
            made = None
        if not isinstance(made, dict):
            raise UserError(
                "expected answers in progress, found another file",
                where=self.partial,
                do="move it out of the way",
            )
        self._refuse_other(made, self.partial)

    def _refuse_other(self, made: dict[str, Any], where: Path) -> None:
        differ = [
            f"{key}: {made.get(key)!r} there, {self.identity.get(key)!r} wanted"
            for key in {**self.identity, **made}
            if made.get(key) != self.identity.get(key)
        ]
        if differ:
            raise UserError(
                "expected answers made as the recipe says, found others:\n  " + "\n  ".join(differ),
                where=where,
                do="restore the values, use another run, or delete the file to answer anew",
            )
