"""The hidden-state store: what is in a shard, what the manifest promises, and reading a record.

A store is a folder with manifest.json and shards of ragged records (docs/formats.md). It is written
by `draftlab.store.record`; reading maps a shard into memory and touches only the record asked for.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftlab.errors import UserError
from draftlab.files import canonical_json, sha256_file, sha256_text
from draftlab.store.fp8 import E4M3, dequantise
from draftlab.store.manifest import MANIFEST, Manifest, StoreIdentity

__all__ = ["Record", "Sample", "Store", "StoreIdentity", "predicted"]


class StateDtypes(NamedTuple):
    """Of a store's tensors of states; with e4m3 features there are also their scales."""

    features: torch.dtype
    last: torch.dtype


DTYPES = {
    "bfloat16": StateDtypes(torch.bfloat16, torch.bfloat16),
    "float32": StateDtypes(torch.float32, torch.float32),
    "fp8": StateDtypes(E4M3, torch.bfloat16),
}
NO_TEACHER = (float("nan"), -1)
"""logsumexp and argmax of positions that are no prediction's teacher: they are not computed."""
RERECORD = "record again into this folder: only what is missing is made"
REMOVE = "remove this shard and record again into this folder: only what is missing is made"


@dataclass(frozen=True)
class Sample:
    """A rendered conversation, to be recorded.

    Attributes:
        id: unique in its data set.
        token_ids: [T] of the target's vocabulary.
        spans: [T], 0 outside answers; 1, 2, … in the first, second … answer, closing tag included.
        temperature: that the answers were sampled at; None: not the target's own, or unknown.
    """

    id: str
    token_ids: tuple[int, ...]
    spans: tuple[int, ...]
    temperature: float | None = None


@dataclass(frozen=True)
class Record:
    """A recorded conversation. Tensors are copies, free to be changed.

    Attributes:
        id: the sample's.
        tokens: int64 [T].
        spans: int64 [T].
        features: [T, F] in the store's dtype (fp8: read as bfloat16), the boundaries' states side
            by side, ascending.
        last: [T, Ht] in the store's dtype (fp8: bfloat16), before the final norm.
        logsumexp: float32 [T], of the target's logits at T = 1 over the whole vocabulary, from the
            state before it was rounded to the store's dtype; NaN where not `teachers`.
        argmax: int64 [T], of the same logits; ties are the lowest id; −1 where not `teachers`.
        temperature: the sample's.
        scales: of a `view` of an fp8 store, whose features are codes: float32 [T, b], to be
            multiplied with them (`dequantise`); else None.
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


def predicted(spans: Tensor) -> Tensor:
    """Positions whose tokens a head is asked for: bool [T].

    w_k(t) = 1 asks for x_{t+2+k} with x_{t+1} … x_{t+2+k} in one span (methods §1), so x_j is asked
    for iff j ≥ 2 and x_{j−1}, x_j lie in one span. The target itself writes a span's first token.
    """
    asked = torch.zeros(len(spans), dtype=torch.bool)
    asked[2:] = (spans[1:-1] == spans[2:]) & (spans[2:] > 0)
    return asked


def teachers(spans: Tensor) -> Tensor:
    """Positions whose distribution a head learns from: bool [T].

    The teacher of the prediction of x_j is the target's distribution at j − 1.
    """
    asked = torch.zeros(len(spans), dtype=torch.bool)
    asked[:-1] = predicted(spans)[1:]
    return asked


def check_store(folder: Path) -> None:
    """Refuses a store that is not whole, as `Store.open`; one that is made while training is."""
    if not Manifest.read(folder / MANIFEST).online:
        Store.open(folder)


def _reopened(folder: Path, digest: str) -> Store:
    """A store that another process has open."""
    store = Store.open(folder)
    if store.digest != digest:
        raise UserError(
            "expected the store that was opened, found one that was recorded since",
            where=folder,
            do="run the command again",
        )
    return store


class Store:
    """Random access to a complete store. Build it with `Store.open`."""

    def __init__(
        self, folder: Path, manifest: Manifest, opened: dict[int, dict[str, Tensor]] | None = None
    ) -> None:
        self.folder, self.manifest = folder, manifest
        self.identity = manifest.identity
        self.ids: list[str] = [i for shard in manifest.shards for i in shard.ids]
        self.lengths: list[int] = [n for shard in manifest.shards for n in shard.lengths]
        # Of shard s: number of its first record, and where its records begin.
        self._first = [0, *itertools.accumulate(len(shard.ids) for shard in manifest.shards)]
        self._offsets = [np.cumsum([0, *shard.lengths]) for shard in manifest.shards]
        self._opened = {} if opened is None else opened

    @classmethod
    def open(cls, folder: Path, expect: StoreIdentity | None = None) -> Store:
        """Opens a store; checks its manifest and its shards' sizes, reads none of them.

        Args:
            folder: where manifest.json is.
            expect: what the store must have been made for; None: whatever it is.

        Raises:
            UserError: no store, another identity, an interrupted recording, a shard that is missing
                or has another size than the manifest says.
        """
        folder = Path(folder)
        manifest = Manifest.read(folder / MANIFEST)
        if expect is not None:
            manifest.identity.check(expect, folder)
        if not manifest.complete:
            raise UserError(
                "the recording of this store was interrupted",
                where=folder,
                do="run the same command again: recording resumes after the last whole shard",
            )
        if manifest.online:
            raise UserError(
                "this store holds no states: its recipe makes them while it trains",
                where=folder,
                do="record with record.online: false to look into them",
            )
        for shard in manifest.shards:
            problem = shard.problem(folder)
            if problem:
                raise UserError(problem, where=folder / shard.file, do=RERECORD)
        return cls(folder, manifest)

    @property
    def on_disk(self) -> bool:
        """Whether a folder is all there is to it, so that other processes can open it too."""
        return type(self) is Store

    @property
    def digest(self) -> str:
        """Hex SHA-256 of what the manifest says, the shards' own hashes included."""
        return sha256_text(canonical_json(self.manifest.model_dump(mode="json")))

    def __reduce__(self) -> tuple[Any, ...]:
        """It goes to another process as its folder; the states stay where they lie."""
        return _reopened, (self.folder.resolve(), self.digest)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Record]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Record:
        record = self.view(index)
        coded = record.scales is not None
        return replace(
            record,
            tokens=record.tokens.long(),
            spans=record.spans.long(),
            features=dequantise(record.features, record.scales)
            if coded
            else record.features.clone(),
            scales=None,
            last=record.last.clone(),
            logsumexp=record.logsumexp.clone(),
            argmax=record.argmax.long(),
        )

    def view(self, index: int) -> Record:
        """A record in the shard's own memory and dtypes, not to be changed: integers are int32,
        features of an fp8 store are its codes, beside their scales."""
        number, row, window = self._place(index)
        shard, held = self.manifest.shards[number], self._shard(number)
        names = ("tokens", "spans", "features", "last", "logsumexp", "argmax")
        scales = held["scales"][window] if held["features"].dtype is E4M3 else None
        tensors = (held[name][window] for name in names)
        return Record(shard.ids[row], *tensors, shard.temperatures[row], scales)

    def views(self, indices: Sequence[int]) -> list[Record]:
        """`view` of several records."""
        return [self.view(index) for index in indices]

    def tokens_and_spans(self, index: int) -> tuple[Tensor, Tensor]:
        """int64 [T] tokens and spans of a record; its states are not touched."""
        number, _, window = self._place(index)
        tokens, spans = (self._read(number, name, window) for name in ("tokens", "spans"))
        return tokens.long(), spans.long()

    def stored(self, index: int) -> dict[str, Tensor]:
        """A record's part of every tensor of its shard, as it lies there; not to be changed."""
        number, _, window = self._place(index)
        names = self._shard(number).keys() - {"offsets"}
        return {name: self._read(number, name, window) for name in sorted(names)}

    def temperature(self, index: int) -> float | None:
        """That a record's answers were sampled at."""
        number, row, _ = self._place(index)
        return self.manifest.shards[number].temperatures[row]

    def verify(self) -> None:
        """Hashes every shard again.

        Raises:
            UserError: the first shard whose bytes are not those that were written.
        """
        for shard in self.manifest.shards:
            path = self.folder / shard.file
            found = sha256_file(path) if path.is_file() else "no file"
            if found != shard.sha256:
                raise UserError(
                    f"expected a shard with SHA-256 {shard.sha256}, found {found}",
                    where=path,
                    do=REMOVE,
                )

    def _place(self, index: int) -> tuple[int, int, slice]:
        """Shard, number in it, and positions of a record."""
        index = index + len(self) if index < 0 else index
        if not 0 <= index < len(self):
            raise IndexError(f"a store of {len(self)} records has no record {index}")
        number = bisect_right(self._first, index) - 1
        row = index - self._first[number]
        start, end = self._offsets[number][row : row + 2]
        return number, row, slice(int(start), int(end))

    def _read(self, number: int, name: str, window: slice) -> Tensor:
        # Shares memory with the mapping, where a change would be seen by later reads.
        return self._shard(number)[name][window]

    def _shard(self, number: int) -> dict[str, Tensor]:
        """The mapped shard's tensors, opened and checked on first use and then kept."""
        if number not in self._opened:
            path = self.folder / self.manifest.shards[number].file
            try:
                opened = safe_open(path, "pt")
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"the shard is truncated or corrupt: {error}", where=path, do=REMOVE
                ) from None
            shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
            offsets = tensors["offsets"].numpy() if "offsets" in tensors else None
            expected = self.identity.shapes(self.manifest.shards[number])
            if shapes != expected or not np.array_equal(offsets, self._offsets[number]):
                raise UserError(
                    "the shard does not hold the manifest's records: it belongs to another store "
                    f"or is corrupt (expected {expected}, found {shapes})",
                    where=path,
                    do=REMOVE,
                )
            self._opened[number] = tensors
        return self._opened[number]
