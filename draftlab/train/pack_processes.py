"""Processes that pack batches, so that the one that trains has Python's interpreter to itself.

A step of a small head is as long as the host takes to start its few thousand kernels. Threads that
pack, with their own thousands of small operations, take the interpreter from the thread that does
this. Processes cost it a message and a copy for each batch:

    work ─► pipe ─► Packer, in a Region ─► pipe: where each tensor lies ─► copied to pinned memory

A `Region` is memory of both processes: a file without a name, which grows as batches need it (no
/dev/shm, which containers keep small). Processes are begun by a command and not by
`multiprocessing`, which would run the user's script again in each of them.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftlab.base import UserError
from draftlab.data.packing import Batch, Room, anywhere, pinned
from draftlab.train.packer import Packer, StepWork

if TYPE_CHECKING:  # what processes that pack have no use for takes seconds to import
    from draftlab.train.ranks import Ranks

MOST = 4
"""Processes that pack for a GPU, unless train.packers says otherwise: one alone keeps up with small
heads, and the copies of large ones are bound by memory."""
_ALIGNED = 64
_SERVE = "from draftlab.train.pack_processes import serve; serve({pipe}, {memory})"
_WITHOUT = "train.packers=0 packs on threads of the process that trains"


def _say(pipe: Connection, value: Any) -> None:
    """Sends by plain pickle; `Connection.send` has ways of its own for tensors."""
    pipe.send_bytes(pickle.dumps(value))


def _hear(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


class Packed(NamedTuple):
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

    def bytes(self, size: int) -> Tensor:
        """The first bytes and perhaps more, uint8; the file grows where it is smaller."""
        if size > len(self._maps[-1]):
            size = -(-max(size, 2 * len(self._maps[-1])) // mmap.PAGESIZE) * mmap.PAGESIZE
            size = max(size, os.fstat(self.memory).st_size)
            os.ftruncate(self.memory, size)
            # Tensors of an earlier mapping stay what they were: it is the same memory.
            self._maps.append(torch.frombuffer(mmap.mmap(self.memory, size), dtype=torch.uint8))
        return self._maps[-1]

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that holds anything: a `Room`."""
        start = -(-self.used // _ALIGNED) * _ALIGNED
        self.used = start + math.prod(shape) * dtype.itemsize
        return self.bytes(self.used)[start : self.used].view(dtype).view(tuple(shape))

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


def packed(packer: Packer, work: StepWork, region: Region) -> list[Packed]:
    """The micro-batches of a step, packed in a region."""
    region.clear()
    found, start = [], 0
    for batch in packer.batches(work, region.take):
        _Pickler(tree := io.BytesIO(), region, start).dump(batch)
        stop = -(-region.used // _ALIGNED) * _ALIGNED
        region.bytes(stop)
        found.append(Packed(start, stop, tree.getvalue()))
        region.used = start = stop
    return found


def unpacked(found: Sequence[Packed], region: Region, room: Room) -> list[Batch]:
    """What `packed` made, copied out of the region."""
    batches = []
    for start, stop, tree in found:
        copy = room((stop - start,), torch.uint8)
        # numpy copies on the thread that asks, without the interpreter.
        np.copyto(copy.numpy(), region.bytes(stop)[start:stop].numpy())
        batches.append(_Unpickler(io.BytesIO(tree), copy).load())
    return batches


def serve(pipe: int, memory: int) -> None:
    """What a process does that packs: answers work until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains
    torch.set_num_threads(1)
    region = Region(memory)
    with Connection(pipe) as asked:
        try:
            packer: Packer = _hear(asked)
            while True:
                work = _hear(asked)
                try:
                    answer: Any = packed(packer, work, region)
                except Exception as error:
                    error.add_note(f"in a process that packs:\n{traceback.format_exc()}")
                    answer = error
                _say(asked, answer)
        except (EOFError, OSError):
            return


class _Process:
    """One of them, seen from the process that trains."""

    def __init__(self, packer: Packer) -> None:
        self.memory = os.memfd_create("draftlab-batches")
        self.region = Region(self.memory)
        self.pipe, there = Pipe()
        words = _SERVE.format(pipe=there.fileno(), memory=self.memory)
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with there:
            self.process = subprocess.Popen(
                [sys.executable, "-c", words],
                stdin=subprocess.DEVNULL,
                pass_fds=(there.fileno(), self.memory),
                # No GPU is theirs; what they would take of one is lost to training.
                env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
            )
        self._ask(packer)

    def pack(self, work: StepWork, room: Room) -> list[Batch]:
        self._ask(work)
        try:
            answer = _hear(self.pipe)
        except (EOFError, OSError):
            raise self._lost() from None
        if isinstance(answer, Exception):
            raise answer
        return unpacked(answer, self.region, room)

    def close(self) -> None:
        self.pipe.close()
        os.close(self.memory)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _ask(self, value: Any) -> None:
        try:
            _say(self.pipe, value)
        except OSError:
            raise self._lost() from None

    def _lost(self) -> UserError:
        code = self.process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return UserError(
            f"a process that packs batches ended ({how}); its own words, if it had any, are above",
            do=f"look whether memory ran out, and run the same command again; {_WITHOUT}",
        )


class PackProcesses:
    """Processes that pack, called from as many threads.

    Args:
        packer: what they all do.
        number: of processes, at least 1.
        device: that the batches are for.
    """

    def __init__(self, packer: Packer, number: int, device: torch.device) -> None:
        self.threads: int | None = number
        self.how = f"{number} process" + "es" * (number > 1)
        self._on_gpu = device.type == "cuda"
        self._all = [_Process(packer) for _ in range(number)]
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        for process in self._all:
            self._idle.put(process)

    def __call__(self, work: StepWork) -> list[Batch]:
        """The micro-batches of an optimizer step, in pinned memory for a GPU.

        Raises:
            UserError: a process ended. Besides, whatever packing raises.
        """
        process = self._idle.get()
        try:
            batches = process.pack(work, pinned if self._on_gpu else anywhere)
        finally:
            self._idle.put(process)
        return batches if self._on_gpu else [batch.decoded() for batch in batches]

    def close(self) -> None:
        """Ends the processes, once no thread waits for one."""
        for process in self._all:
            process.close()


class PackHere:
    """Packing on threads of the process that trains."""

    threads: int | None = None
    how = "threads"

    def __init__(self, packer: Packer, device: torch.device) -> None:
        self._packer, self._room = packer, pinned if device.type == "cuda" else None

    def __call__(self, work: StepWork) -> list[Batch]:
        """The micro-batches of an optimizer step, in pinned memory for a GPU."""
        return list(self._packer.batches(work, self._room))

    def close(self) -> None:
        """Nothing is left."""


def packing(packer: Packer, ranks: Ranks) -> PackProcesses | PackHere:
    """Packing as train.packers asks for it, begun.

    Raises:
        UserError: processes are asked for where there can be none.
    """
    asked, fault = packer.knobs.packers, _fault(packer)
    if asked and fault:
        raise UserError(
            f"train.packers asks for {asked} processes, and {fault}",
            where="train.packers",
            do="set it to 0, or leave it out",
        )
    if asked is None:
        can = ranks.device.type == "cuda" and not fault
        asked = usual_number(ranks.gpus_here) if can else 0
    return PackProcesses(packer, asked, ranks.device) if asked else PackHere(packer, ranks.device)


def usual_number(gpus: int) -> int:
    """How many processes pack for one of so many GPUs of this machine: half of its cores' share."""
    return max(1, min(MOST, len(os.sched_getaffinity(0)) // (2 * gpus)))


def _fault(packer: Packer) -> str | None:
    """Why no other process can pack; None: it can."""
    if packer.store.manifest.online:
        return "the process that trains makes the states (record.online)"
    try:
        os.close(os.memfd_create("draftlab-batches"))
    except (AttributeError, OSError) as error:
        return f"this system has no memory to share with them ({error})"
    return None
