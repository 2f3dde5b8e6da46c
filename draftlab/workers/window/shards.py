"""The shards of a window on the disk: which are there, which a training needs, which can go."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable

from draftlab.errors import UserError
from draftlab.files import parse_json, sha256_file
from draftlab.progress import Monitor
from draftlab.store.resume import Receipts
from draftlab.store.shard import WrittenShard, shard_number

JOURNAL = "recorded.jsonl"
"""In the store's folder: the SHA-256 that each shard had when it was first recorded."""
VISIBLE_S, POLL_S = 60.0, 0.2
"""Longest time until a file system shows a shard that another machine has written, in seconds."""


class DamagedShardError(Exception):
    """A shard does not have the bytes that were written."""


class WindowShards:
    """The shards of a store that come and go, on the disk.

    Args:
        receipts: of the store's plan.
        sizes: most bytes of each of them, by number.
        size: of the window, in bytes.
        monitor: receives lines.

    Attributes:
        on_disk: bytes of the shards that are there or being recorded.
        verified: those whose bytes have been compared with their receipts.
        needed: how many groups, that are not finished, need a shard.
        recorded: number of shards that were recorded, and that again.
        tokens: that were recorded.
    """

    def __init__(
        self, receipts: Receipts, sizes: dict[int, int], size: int, monitor: Monitor
    ) -> None:
        self.receipts, self.sizes, self.size, self.monitor = receipts, sizes, size, monitor
        self.folder, self.plan = receipts.folder, receipts.plan
        self.on_disk: dict[int, int] = {}
        self.verified: set[int] = set()
        self.needed: Counter[int] = Counter()
        self.recorded = self.again = self.tokens = 0
        self._first_sha256 = self._read_journal()
        self._said_differs = False
        self.receipts.remove_temporary()
        for number in self._numbers():
            if self.receipts.is_committed(self.plan.shards[number]):
                self.on_disk[number] = self.sizes[number]
            else:
                self.delete_files(number)  # which an earlier recorder left

    def _numbers(self) -> set[int]:
        """Return the numbers of the shards that come and go of which there are files."""
        names = (path.with_suffix(".safetensors").name for path in self.folder.glob("shard-*"))
        return {shard_number(name) for name in names} & self.sizes.keys()

    def make_room(self, number: int, next_use: Callable[[int], float]) -> bool:
        """Make room for a shard and reserve it; return whether there is room.

        Unneeded shards that are needed again latest (`next_use`) are deleted.
        """
        used = sum(self.on_disk.values())
        while used + self.sizes[number] > self.size:
            unneeded = [n for n in self.on_disk if not self.needed[n]]
            if not unneeded:
                return False
            last = max(unneeded, key=lambda n: (next_use(n), n))
            used -= self.on_disk.pop(last)
            self.delete_files(last)
        self.on_disk[number] = self.sizes[number]
        return True

    def delete_files(self, number: int) -> None:
        """Delete a shard's file and receipt."""
        shard = self.plan.shards[number]
        self.verified.discard(number)
        (self.folder / shard.file).unlink(missing_ok=True)
        self.receipts.discard(shard)

    def read(self, number: int) -> WrittenShard:
        """Compare a shard with its receipt, and return the receipt; any thread calls this.

        Raises a `DamagedShardError` if it has other bytes or does not appear.
        """
        shard = self.plan.shards[number]
        end = time.monotonic() + VISIBLE_S
        while not self.receipts.is_committed(shard):
            if time.monotonic() > end:
                raise DamagedShardError(f"it is not there {VISIBLE_S:g} s after it was written")
            time.sleep(POLL_S)
        receipt = self.receipts.read(shard)
        digest = sha256_file(self.folder / shard.file)
        if receipt is None or digest != receipt.sha256:
            raise DamagedShardError(f"its SHA-256 is {digest}, which its receipt has not")
        return receipt

    def add_verified(self, number: int, receipt: WrittenShard, *, new: bool) -> None:
        """Note that a shard is there, recorded just now if it is `new`, and compare its hash
        with that of the first recording.
        """
        shard, sha256 = self.plan.shards[number], receipt.sha256
        first = self._first_sha256.get(shard.file)
        self.verified.add(number)
        if new:
            self.recorded += 1
            self.again += first is not None
            self.tokens += shard.tokens
        if first is None:
            self._first_sha256[shard.file] = sha256
            with open(self.folder / JOURNAL, "a", encoding="utf-8") as file:
                file.write(json.dumps({"file": shard.file, "sha256": sha256}) + "\n")
        elif first != sha256 and not self._said_differs:
            self._said_differs = True
            self.monitor.say(
                f"warning: {shard.file} was recorded again with other bytes than at first: another "
                "kind of GPU or another version of a library computes it. The training goes on, "
                "but another run may not give the same bits"
            )

    def _read_journal(self) -> dict[str, str]:
        path, hashes = self.folder / JOURNAL, dict[str, str]()
        if not path.exists():
            return hashes
        whole = [line for line in path.read_text().splitlines(keepends=True) if line[-1:] == "\n"]
        try:
            for entry in map(parse_json, whole):
                hashes.setdefault(entry["file"], entry["sha256"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"expected the hashes of recorded shards, found another file: {error!r}",
                where=path,
                do="remove the file",
            ) from None
        path.write_text("".join(whole))  # without a torn last line
        return hashes

    def clear(self) -> None:
        """Delete all shards that come and go."""
        for number in self._numbers():
            self.delete_files(number)
        self.receipts.remove_temporary()
