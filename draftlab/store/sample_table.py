"""Samples: rendered conversations to be recorded, in memory or in an index on disk.

A `SampleTable` holds its samples in flat columns, a few large tensors instead of millions of Python
objects. Those of an index (docs/formats.md) are mapped from its files, so a process that opens it
reads only the samples that it records.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftlab.errors import UserError
from draftlab.files import atomic_folder, read_json, sha256_file, write_json
from draftlab.target_model.image_files import ImageFile, Images
from draftlab.tensor_files import save_tensors

Columns = dict[str, np.ndarray]
INDEX_FILE = "index.json"
_PART = re.compile(r"[0-9]{5,}\.safetensors")
MAX_MODES = 64
"""Most different template arguments of samples that are listed."""
PART_TOKENS = 2**22
"""Tokens of a file of an index, at least, except in the last one."""
NO_TEACHER = (float("nan"), -1)
"""logsumexp and argmax of positions outside `teacher_mask`, where they are not computed."""
NEVER = 2**31 - 1
_COLUMNS = {
    "lengths": np.int32,
    "temperatures": np.float64,  # NaN: unknown
    "loss_tokens": np.int32,  # positions in answers
    "first_label": np.int32,  # position of the first `prediction_mask` token; NEVER: there is none
    "lowest": np.int32,  # token id, or 0 if all are above
    "highest": np.int32,
}


@dataclass(frozen=True)
class Sample:
    """A rendered conversation, to be recorded.

    Attributes:
        id: unique in its data set.
        token_ids: [T] of the target's vocabulary.
        spans: [T], 0 outside answers; 1, 2, … in the first, second … answer, closing tag included.
        temperature: the sampling temperature of the answers; None: unknown, or not the target's.
        images: what the target reads at image tokens.
    """

    id: str
    token_ids: Sequence[int] | np.ndarray
    spans: Sequence[int] | np.ndarray
    temperature: float | None = None
    images: Images = ()


def prediction_mask(spans: Tensor) -> Tensor:
    """Return the positions whose tokens a head learns to predict: bool [T].

    w_k(t) = 1 makes x_{t+2+k} a label if x_{t+1} … x_{t+2+k} are in one span (methods §1), so x_j
    is one iff j ≥ 2 and x_{j−1}, x_j are in one span. The target generates a span's first token.
    """
    mask = torch.zeros(len(spans), dtype=torch.bool)
    mask[2:] = (spans[1:-1] == spans[2:]) & (spans[2:] > 0)
    return mask


def teacher_mask(spans: Tensor) -> Tensor:
    """Return the positions whose target distribution a head learns from: bool [T].

    The teacher of the prediction of x_j is the target's distribution at j − 1.
    """
    mask = torch.zeros(len(spans), dtype=torch.bool)
    mask[:-1] = prediction_mask(spans)[1:]
    return mask


class _Samples(Sequence[Sample]):
    """A sequence that makes its samples when they are read."""

    def __getitem__(self, index: Any) -> Any:
        rows = range(len(self))[index]
        return self._sample(rows) if isinstance(rows, int) else [self._sample(i) for i in rows]


class SampleTable(_Samples):
    """Samples in columns.

    Args:
        parts: the columns of consecutive samples: tokens int32 [T], spans int16 [T], ids as JSON
            in uint8, the names of images likewise where there are any, and `_COLUMNS` [n].
        sha256: hash of all samples: ids, token ids, spans, temperatures.
        notes: lines on how the samples were made.
        modes: the different template arguments of the conversations; None: too many to list.
        folder: that of the files which images name.

    Attributes:
        lengths, temperatures, loss_tokens, first_label, lowest, highest: `_COLUMNS` of all samples.
    """

    def __init__(
        self,
        parts: Sequence[Columns],
        sha256: str,
        notes: Sequence[str] = (),
        modes: Sequence[dict[str, Any]] | None = ({},),
        folder: Path = Path(),
    ) -> None:
        self.parts, self.sha256, self.notes, self.modes = parts, sha256, notes, modes
        self.folder = folder
        self.lengths, self.temperatures, self.loss_tokens, self.first_label, *bounds = (
            np.concatenate([np.zeros(0, dtype), *(part[name] for part in parts)])
            for name, dtype in _COLUMNS.items()
        )
        self.lowest, self.highest = bounds
        self._first = [0, *accumulate(len(part["lengths"]) for part in parts)]
        self._starts = [np.cumsum([0, *part["lengths"]]) for part in parts]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> SampleTable:
        """Return samples as a table, in memory."""
        if isinstance(samples, SampleTable):
            return samples
        digest, folders = hashlib.sha256(), (i.folder for s in samples for i in s.images)
        parts = list(_make_parts(samples, digest))
        return cls(parts, digest.hexdigest(), folder=next(folders, Path()))

    @cached_property
    def ids(self) -> list[str]:
        """The samples' ids."""
        return [id_ for part in self.parts for id_ in json.loads(part["ids"].tobytes())]

    def __len__(self) -> int:
        return len(self.lengths)

    def _sample(self, index: int) -> Sample:
        number = bisect_right(self._first, index) - 1
        part, row = self.parts[number], index - self._first[number]
        window = slice(*self._starts[number][row : row + 2])
        temperature = float(self.temperatures[index])
        return Sample(
            self.ids[index],
            part["tokens"][window],
            part["spans"][window].astype(np.int32),
            None if np.isnan(temperature) else temperature,
            tuple(ImageFile(self.folder, one) for one in self._image_names[number].get(row, ())),
        )

    @property
    def has_images(self) -> bool:
        """Return whether any sample has images."""
        return any("images" in part for part in self.parts)

    @cached_property
    def _image_names(self) -> list[dict[int, list[str]]]:
        """The names of the images of each part's samples, by their row, of those that have any."""
        texts = (part["images"].tobytes() if "images" in part else b"[]" for part in self.parts)
        return [dict(json.loads(text)) for text in texts]


class Selection(_Samples):
    """Some samples of a table by their numbers (rows), in order, cut to max_length tokens."""

    def __init__(self, table: SampleTable, rows: np.ndarray, max_length: int) -> None:
        self.table, self.rows, self.max_length = table, rows, max_length

    def __len__(self) -> int:
        return len(self.rows)

    def _sample(self, index: int) -> Sample:
        sample, n = self.table[self.rows[index]], self.max_length
        return replace(sample, token_ids=sample.token_ids[:n], spans=sample.spans[:n])


def write_index(
    samples: Iterable[Sample],
    folder: Path,
    made_of: dict[str, Any],
    notes: Sequence[str],
    modes: Collection[dict[str, Any]] = ({},),
) -> None:
    """Write an index of samples atomically. Any index in `folder` is replaced.

    Args:
        made_of: hashes of what the samples are made of; JSON values.
        notes: lines on how they are made; `samples` may add to them until it ends.
        modes: their different template arguments; `samples` may add to them, too.
    """
    digest, files = hashlib.sha256(), {}
    with atomic_folder(folder) as new:
        for number, part in enumerate(_make_parts(samples, digest)):
            path = new / f"{number:05d}.safetensors"
            columns = {name: torch.from_numpy(column) for name, column in part.items()}
            files[path.name] = save_tensors(columns, path)
        fields = {
            "samples_sha256": digest.hexdigest(),
            "files": files,
            "notes": list(notes),
            "template_arguments": list(modes) if len(modes) <= MAX_MODES else None,
        }
        write_json(new / INDEX_FILE, {"made_of": made_of, **fields})


def read_index(folder: Path, made_of: dict[str, Any]) -> SampleTable | None:
    """Return the samples of an index; None if it is missing, damaged or made of something else."""
    try:
        index = read_json(folder / INDEX_FILE)
        if index["made_of"] != made_of:
            return None
        parts = []
        for name, sha256 in index["files"].items():
            path = folder / name
            if not _PART.fullmatch(name) or path.is_symlink() or sha256_file(path) != sha256:
                return None  # a stranger's index may name files outside of its folder
            file = safe_open(path, "pt")  # maps the tensors
            parts.append({key: file.get_tensor(key).numpy() for key in file.keys()})  # noqa: SIM118
        modes = index["template_arguments"]
        modes = modes if isinstance(modes, list) else None
        return SampleTable(parts, index["samples_sha256"], index["notes"], modes, folder.parent)
    except (UserError, OSError, SafetensorError, KeyError, TypeError):
        return None


def _make_parts(samples: Iterable[Sample], digest: Any) -> Iterator[Columns]:
    """Yield the columns of consecutive samples; add the samples to a hash."""
    part, num_tokens = list[Sample](), 0
    for sample in samples:
        length = len(sample.token_ids)
        tokens, spans = (np.asarray(one, "<i4") for one in (sample.token_ids, sample.spans))
        digest.update(f"{sample.id!r} {sample.temperature!r} {length}\n".encode())
        digest.update(tokens.tobytes())
        digest.update(spans.tobytes())
        digest.update("".join(image.sha256 for image in sample.images).encode())
        part.append(replace(sample, token_ids=tokens, spans=spans.astype(np.int16)))
        num_tokens += length
        if num_tokens >= PART_TOKENS:
            yield _columns(part)
            part, num_tokens = [], 0
    if part:
        yield _columns(part)


def _columns(part: Sequence[Sample]) -> Columns:
    """Return the columns of samples whose tokens are int32 and spans int16."""
    tokens, spans = (
        np.concatenate([getattr(sample, name) for sample in part])
        for name in ("token_ids", "spans")
    )
    ends = np.cumsum([len(sample.token_ids) for sample in part])
    starts = np.concatenate([[0], ends[:-1]])
    # A sample's mask is that of all tokens from its third on; the last entry is beyond any end.
    labels = np.append(prediction_mask(torch.from_numpy(spans)).numpy().nonzero(), len(spans))
    labels = labels[np.searchsorted(labels, np.minimum(starts + 2, len(spans)))]
    values = {
        "lengths": ends - starts,
        "temperatures": [sample.temperature for sample in part],  # None becomes NaN
        "loss_tokens": [np.count_nonzero(sample.spans) for sample in part],
        "first_label": np.where(labels < ends, labels - starts, NEVER),
        "lowest": [np.min(sample.token_ids, initial=0) for sample in part],
        "highest": [np.max(sample.token_ids, initial=0) for sample in part],
    }
    images = [(n, [i.name for i in sample.images]) for n, sample in enumerate(part)]
    images = [(n, names) for n, names in images if names]
    return {
        "ids": _json_column([sample.id for sample in part]),
        **({"images": _json_column(images)} if images else {}),
        "tokens": tokens,
        "spans": spans,
        **{name: np.array(values[name], dtype) for name, dtype in _COLUMNS.items()},
    }


def _json_column(value: Any) -> np.ndarray:
    """Return a value as JSON in uint8."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8).copy()
