"""Batches in memory that two processes see: laid there by the one that packs, copied out of it.

A `Region` is a file without a name, which grows as batches need it (no /dev/shm, which containers
keep small). What lies where is told by pickles, in which a tensor is its dtype, shape and place.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftlab.train.batch.packer import Packer, StepWork
from draftlab.train.batch.packing import Batch, Room

_ALIGNED = 64
"""Bytes: of any dtype a multiple."""


class Laid(NamedTuple):
    """A batch in a region: its bytes, from and to, and a pickle that says what lies where."""

    start: int
    stop: int
    tree: bytes


class Region:
    """Memory that two processes see, taken piece by piece and given back at once.

    Args:
        memory: descriptor of an anonymous file.
    """

    def __init__(self, memory: int) -> None:
        self.memory, self.used = memory, 0
        self._maps = [torch.empty(0, dtype=torch.uint8)]

    def clear(self) -> None:
        """Gives all memory back; what was taken is overwritten from now on."""
        self.used, self._maps = 0, self._maps[-1:]

    def close(self) -> None:
        """Lets go of the memory; the descriptor may be another file's from now on."""
        self.memory, self._maps = -1, [torch.empty(0, dtype=torch.uint8)]

    def reached(self, size: int) -> Tensor:
        """The memory, uint8, so many bytes of it at least; the file grows where it is smaller."""
        if size > len(self._maps[-1]):
            there = os.fstat(self.memory).st_size
            if there < size:
                there = -(-max(size, 2 * there) // mmap.PAGESIZE) * mmap.PAGESIZE
                os.ftruncate(self.memory, there)
            # Tensors of an earlier mapping stay what they were: it is the same memory.
            self._maps.append(torch.frombuffer(mmap.mmap(self.memory, there), dtype=torch.uint8))
        return self._maps[-1]

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that holds anything: a `Room`."""
        start = self.aligned()
        self.used = start + math.prod(shape) * dtype.itemsize
        return self.reached(self.used)[start : self.used].view(dtype).view(tuple(shape))

    def aligned(self) -> int:
        """Where the next tensor begins."""
        self.used = -(-self.used // _ALIGNED) * _ALIGNED
        self.reached(self.used)
        return self.used

    def offset(self, tensor: Tensor) -> int | None:
        """Where a tensor begins; None: it lies elsewhere, or is no plain run of numbers."""
        if not tensor.is_contiguous():
            return None
        at = (tensor.data_ptr() - each.data_ptr() for each in self._maps)
        return next((n for n, m in zip(at, self._maps, strict=True) if 0 <= n < len(m)), None)


class _Pickler(pickle.Pickler):
    """Writes tensors as where they lie in a region, from `start` on; others are laid there."""

    def __init__(self, file: io.BytesIO, region: Region, start: int) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.region, self.start = region, start

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        at = self.region.offset(value) if value.numel() else self.start
        if at is None:
            at = self.region.offset(self.region.take(value.shape, value.dtype).copy_(value))
        return value.dtype, tuple(value.shape), at - self.start


class _Unpickler(pickle.Unpickler):
    """Reads them as views of some bytes."""

    def __init__(self, file: io.BytesIO, found: Tensor) -> None:
        super().__init__(file)
        self.found = found

    def persistent_load(self, pid: Any) -> Tensor:
        dtype, shape, first = pid
        stop = first + math.prod(shape) * dtype.itemsize
        return self.found[first:stop].view(dtype).view(shape)


def lay(packer: Packer, work: StepWork, region: Region) -> list[Laid]:
    """Packs the micro-batches of a step in a region."""
    region.clear()
    found, start = [], 0
    for batch in packer.batches(work, region.take):
        # What the host reads of a plan is `place` again, and need not travel twice.
        plans = tuple(replace(plan, host=plan.place) for plan in batch.plans)
        _Pickler(tree := io.BytesIO(), region, start).dump(replace(batch, plans=plans))
        stop = region.aligned()
        found.append(Laid(start, stop, tree.getvalue()))
        start = stop
    return found


def pick_up(found: Sequence[Laid], region: Region, room: Room) -> list[Batch]:
    """The batches that `lay` made, each copied out of the region in one piece."""
    batches = []
    for start, stop, tree in found:
        copy = room((stop - start,), torch.uint8)
        # numpy copies on the thread that asks, without the interpreter.
        np.copyto(copy.numpy(), region.reached(stop)[start:stop].numpy())
        batch: Batch = _Unpickler(io.BytesIO(tree), copy).load()
        # Memory of its own: it stays with the batch, whose copy goes to the GPU and is given back.
        plans = tuple(replace(plan, host=plan.place.clone()) for plan in batch.plans)
        batches.append(replace(batch, plans=plans))
    region.clear()
    return batches
