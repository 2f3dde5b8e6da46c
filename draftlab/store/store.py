"""The hidden-state store: its records, and random access to them.

A store is a folder with manifest.json and shards of ragged records (docs/formats.md). It is written
by `draftlab.store.record`. Reading maps a shard into memory and loads only the requested records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.files import canonical_json, sha256_text
from draftlab.formatting import count_text
from draftlab.store.fp8 import dequantise
from draftlab.store.manifest import MANIFEST, Manifest, StoreIdentity
from draftlab.store.sample_table import Sample, SampleTable, Selection
from draftlab.store.shard import NO_FILE, Listing
from draftlab.store.shard_files import ShardFiles, locate_store, map_shard, open_shard_files

if TYPE_CHECKING:
    from draftlab.train.batch.window_order import WindowFeed

__all__ = ["Record", "Store", "StoreIdentity"]


DAMAGED_SHARD = "the shard is damaged:"
RECORD_AGAIN = "record again into this folder: only missing shards are computed"
OPEN_SHARDS = 256
"""Shards that a store keeps mapped, those that were read last."""
OPEN_REMOTE_SHARDS = 8
"""The same for shards at a URL: mapped files that left the cache keep their disk space."""


@dataclass(frozen=True)
class Record:
    """A recorded conversation. Its tensors are copies, except in a `view`.

    Attributes:
        id: the sample's.
        tokens: int64 [T].
        spans: int64 [T].
        features: [T, F] in the store's dtype (fp8: bfloat16), the boundaries' states side by side
            in ascending order.
        last: [T, Ht] in the store's dtype (fp8: bfloat16), before the final norm.
        logsumexp: float32 [T] of the target's logits at temperature 1 over the whole vocabulary,
            from the state before rounding to the store's dtype; NaN outside `teacher_mask`.
        argmax: int64 [T] of the same logits, the lowest id of equal ones; −1 outside
            `teacher_mask`.
        temperature: the sample's.
        scales: float32 [T, b] in a `view` of an fp8 store, whose features are codes to be decoded
            with them (`dequantise`); else None.
    """

    id: str
    tokens: Tensor
    spans: Tensor
    features: Tensor
    last: Tensor
    logsumexp: Tensor
    argmax: Tensor
    temperature: float | None
    scales: Tensor | None = None


class Store:
    """Random access to the records of a complete store. `Store.open` makes one."""

    samples: Sequence[Sample] | None
    """The recorded samples in stored order, so that `tokens_and_spans` reads no shard; or None."""
    feed: WindowFeed | None
    """What makes the shards that come and go; None: they are there."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        files: ShardFiles | None = None,
        samples: Sequence[Sample] | None = None,
    ) -> None:
        self.folder, self.manifest, self.samples, self.feed = folder, manifest, samples, None
        self.files = files or ShardFiles(folder)
        self.identity, self.window = manifest.identity, manifest.window
        self.ids = manifest.index.ids
        self.lengths = memoryview(manifest.index.lengths)
        self._num_kept, self._verified = manifest.num_kept, set[int]()
        # A process may map 65,530 files; of a shard that is mapped no more, views stay valid.
        num_open = OPEN_SHARDS if self.files.is_local else OPEN_REMOTE_SHARDS
        self._kept_shard = lru_cache(num_open)(self._map)

    @classmethod
    def open(
        cls, address: Path | str, expected: StoreIdentity | None = None, *, url: str | None = None
    ) -> Store:
        """Open a store. This checks the manifest and the shards' sizes and reads no shard.

        Args:
            address: the folder of manifest.json, or its URL.
            expected: the identity that the store must have; None: any.
            url: where the shards of a local manifest are; None: in its folder. (A manifest does not
                say it: a stranger's could lead to other files of yours.)

        Raises:
            UserError: as `check_complete`; there is no store, it has another identity, or it is a
                window.
        """
        folder, files = locate_store(address, url)
        # The listing of a large store takes as long as the hash of its index: both run at a time.
        with ThreadPoolExecutor(1, "list") as thread:
            listing = thread.submit(files.list)
            manifest = Manifest.read(folder / MANIFEST)
        if expected is not None:
            manifest.identity.check(expected, files.address)
        if len(manifest.shards) > (num_kept := manifest.num_kept):
            raise UserError(
                "this store is a window: its shards come and go while a training reads them, and "
                f"only the first {count_text(num_kept, 'shard')}, of the validation records, stay",
                where=folder,
                do="record with record.keep: all to keep all shards",
            )
        check_complete(files, manifest, listing.result())
        return cls(folder, manifest, files=files)

    @classmethod
    def open_recorded(cls, folder: Path, samples: SampleTable, url: str | None = None) -> Store:
        """Open the store of these samples; shards that come and go may be missing.

        It reads no shard for `tokens_and_spans`. Raises a `UserError` as `open`, or if these are
        other samples.
        """
        manifest, files = Manifest.read(folder / MANIFEST), open_shard_files(folder, url)
        check_complete(files, manifest, files.list())
        if manifest.samples_sha256 != samples.sha256:
            raise UserError(
                "expected the answers that this store was planned from, found others",
                where=folder,
                do="restore answers.jsonl, or remove the store to record it again",
            )
        rows = {id_: row for row, id_ in enumerate(samples.ids)}
        order = np.array([rows[id_] for id_ in manifest.index.ids], int)
        selection = Selection(samples, order, manifest.settings["max_length"])
        return cls(folder, manifest, files=files, samples=selection)

    @classmethod
    def _reopen(cls, folder: Path, digest: str, url: str | None) -> Self:
        """Open a store that another process has pickled and whose shards it has checked."""
        store = cls(folder, Manifest.read(folder / MANIFEST), files=open_shard_files(folder, url))
        if store.digest != digest:
            raise UserError(
                "expected the store that the other process has open, found one that was recorded "
                "since",
                where=folder,
                do="run the command again",
            )
        return store

    @property
    def address(self) -> Path | str:
        """The folder or URL of the shards."""
        return self.files.address

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the manifest, which contains the hashes of index and shards."""
        return sha256_text(canonical_json(self.manifest.dump()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the store as its folder, without the states."""
        url = None if isinstance(self.address, Path) else self.address
        return self._reopen, (self.folder.resolve(), self.digest, url)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Record]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Record:
        view = self.view(index)
        return replace(
            view,
            tokens=view.tokens.long(),
            spans=view.spans.long(),
            features=view.features.clone()
            if view.scales is None
            else dequantise(view.features, view.scales),
            scales=None,
            last=view.last.clone(),
            logsumexp=view.logsumexp.clone(),
            argmax=view.argmax.long(),
        )

    def view(self, index: int) -> Record:
        """Return a record in the shard's memory and dtypes, which must not be changed.

        Integers are int32, and features of an fp8 store are codes with scales.
        """
        return self.views([index])[0]

    def views(self, indices: Sequence[int]) -> list[Record]:
        """Return the views of several records."""
        opened: dict[int, dict[str, Tensor]] = {}
        names = ("tokens", "spans", "features", "last", "logsumexp", "argmax")
        records = []
        for index in indices:
            number, tensors, window = self._locate(index, opened)
            scales = tensors["scales"][window] if "scales" in tensors else None
            columns = (tensors[name][window] for name in names)
            temperature = float(self.manifest.index.temperatures[number])
            known = None if np.isnan(temperature) else temperature
            records.append(Record(self.ids[number], *columns, known, scales))
        return records

    def tokens_and_spans(self, index: int) -> tuple[Tensor, Tensor]:
        """Return int64 [T] tokens and spans of a record, without reading its states."""
        if self.samples is not None:
            sample = self.samples[index]
            tokens, spans = np.array(sample.token_ids, np.int64), np.array(sample.spans, np.int64)
            return torch.from_numpy(tokens), torch.from_numpy(spans)
        _, tensors, window = self._locate(index, {})
        return tensors["tokens"][window].long(), tensors["spans"][window].long()

    def verify(self, numbers: Iterable[int] | None = None) -> None:
        """Check the hashes of shards (None: of all), each at most once; raise a `UserError`
        about the first one with other bytes than were written.
        """
        for number in range(len(self.manifest.shards)) if numbers is None else numbers:
            if number in self._verified:
                continue
            shard = self.manifest.shards[number]
            try:
                digest = self.files.sha256(shard) or "no file"
            except OSError as error:
                digest = f"no file that can be read ({error.strerror})"
            if digest != shard.sha256:
                raise UserError(
                    f"{DAMAGED_SHARD} expected SHA-256 {shard.sha256}, found {digest}",
                    where=self.files.where(shard.file),
                    do=self._how_to_remake(),
                )
            self._verified.add(number)

    def shards_of(self, records: Sequence[int] | np.ndarray) -> list[int]:
        """Return the numbers of the shards that hold these records."""
        numbers: list[int] = np.unique(self.manifest.index.shards_of(records)).tolist()
        return numbers

    def _how_to_remake(self) -> str:
        """Return what a user does about a damaged shard."""
        recipe = self.folder.parent / "recipe.yaml"
        if "made_by" in self.manifest.settings:
            return "remove this store and merge its sources again: `draftlab store merge`"
        if recipe.is_file():
            return f"remove this shard; `draftlab record {quote(str(recipe))}` makes it again"
        return f"remove this shard and {RECORD_AGAIN}"

    def _locate(
        self, index: int, opened: dict[int, dict[str, Tensor]]
    ) -> tuple[int, dict[str, Tensor], slice]:
        """Return a record's index from 0 on, its shard's tensors, and its positions in them.

        `opened` keeps shards that come and go, for one call: the disk space of a deleted file is
        free once nobody maps it.
        """
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(f"a store of {len(self)} records has no record {index}")
        number = int(self.manifest.index.shards_of(index))
        if number < self._num_kept:
            tensors = self._kept_shard(number)
        else:
            tensors = opened[number] = opened.get(number) or self._map(number)
        row = index - self.manifest.shards[number].rows.start
        start, end = tensors["offsets"][row : row + 2].tolist()
        return index, tensors, slice(start, end)

    def _map(self, number: int) -> dict[str, Tensor]:
        do = "run the same command again, which records the shards that it needs"
        do = self._how_to_remake() if number < self._num_kept else do
        return map_shard(self.files, self.manifest.shards[number], self.identity, do)


def check_store(folder: Path, url: str | None = None, since_ns: int | None = None) -> bool:
    """Check that a store is complete, as `Store.open` does; of a window only the shards that stay.

    Of shards on this machine whose files changed after `since_ns` (ns) the hashes are compared,
    too. Returns whether there were such shards; raises a `UserError` about the first fault.
    """
    manifest, files = Manifest.read(folder / MANIFEST), open_shard_files(folder, url)
    listing = files.list()
    check_complete(files, manifest, listing)
    if since_ns is None or not files.is_local:
        return False
    changed = [number for number in range(manifest.num_kept) if listing[number][1] > since_ns]
    Store(folder, manifest, files=files).verify(changed)
    return bool(changed)


def check_complete(files: ShardFiles, manifest: Manifest, listing: Listing) -> None:
    """Raise a `UserError` unless a store is complete and the shards that stay have their sizes."""
    if not manifest.complete:
        raise UserError(
            "the recording of this store was interrupted",
            where=files.address,
            do="run the same command again: recording resumes after the last whole shard",
        )
    for shard in manifest.shards[: manifest.num_kept]:
        if problem := shard.problem(listing.get(shard.number, NO_FILE)[0]):
            do = RECORD_AGAIN
            if files.is_local and not listing:
                do += "; or name the URL at which its run has the shards (record.url in its recipe)"
            raise UserError(problem, where=files.where(shard.file), do=do)
