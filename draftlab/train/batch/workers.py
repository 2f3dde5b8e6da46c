"""Data workers: processes that pack batches.

A step of a small head takes as long as the host needs to launch its few thousand kernels. Threads
that pack compete with the launching thread for Python's interpreter. So do the threads with which
`torch.utils.data.DataLoader` receives batches: they cost small heads a quarter of their speed. A
data worker costs the process that trains one message and one copy a step:

    step ─► pipe ─► Packer ─► memory that both processes map ─► pipe: where tensors lie ─► copy

Workers are started by a command: `multiprocessing` would run the user's script again in each.
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
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import BoundedSemaphore
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.formatting import exit_text
from draftlab.signals import ENDING_SIGNALS
from draftlab.train.batch.packing import Batch, OptimizerStep, Packer, as_array

_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # a context would take memory of the GPU
    # glibc keeps freed memory, so that each batch does not fault in new pages.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}
_ALIGNMENT = 64
"""Bytes: a multiple of the size of every dtype."""
_SERVE = "from draftlab.train.batch.workers import serve; serve({}, {})"


class SharedMemory:
    """An anonymous file that two processes map; it needs no /dev/shm, which containers limit."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = torch.empty(0, dtype=torch.uint8)

    def block(self, start: int, stop: int) -> Tensor:
        """Return bytes [start, stop), uint8; the file grows if it is smaller."""
        if stop > len(self._map):
            file_size = os.fstat(self.descriptor).st_size
            if file_size < stop:
                file_size = -(-max(stop, 2 * file_size) // mmap.PAGESIZE) * mmap.PAGESIZE
                os.ftruncate(self.descriptor, file_size)
            self._map = torch.frombuffer(mmap.mmap(self.descriptor, file_size), dtype=torch.uint8)
        return self._map[start:stop]


class _Pickler(pickle.Pickler):
    """Pickles tensors as their place in shared memory, from byte `start` on.

    Tensors that `allocate` returned lie there already; others are copied to it.
    """

    def __init__(self, memory: SharedMemory, start: int) -> None:
        super().__init__(file := io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL)
        self.file, self.memory, self.start, self.stop = file, memory, start, start
        self._places: dict[int, tuple[Tensor, int]] = {}  # by id of a tensor, which stays alive

    def allocate(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a new tensor in the memory."""
        place, size = self.stop, math.prod(shape) * dtype.itemsize
        self.stop += -(-size // _ALIGNMENT) * _ALIGNMENT
        # Of memory that has grown, what was mapped before stays the same.
        tensor = self.memory.block(place, place + size).view(dtype).view(shape)
        self._places[id(tensor)] = tensor, place - self.start
        return tensor

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._places:
            copy = self.allocate(*value.shape, dtype=value.dtype)
            np.copyto(as_array(copy), as_array(value))
            self._places[id(value)] = value, self._places[id(copy)][1]
        return value.dtype, tuple(value.shape), self._places[id(value)][1]


class _Unpickler(pickle.Unpickler):
    """Unpickles tensors as views of a block."""

    def __init__(self, file: io.BytesIO, block: Tensor) -> None:
        super().__init__(file)
        self.block = block

    def persistent_load(self, pid: Any) -> Tensor:
        dtype, shape, start = pid
        stop = start + math.prod(shape) * dtype.itemsize
        return self.block[start:stop].view(dtype).view(shape)


def serve(pipe: int, memory: int) -> None:
    """Run a data worker: pack steps until the other end of the pipe is closed."""
    for number in ENDING_SIGNALS:  # the process that trains ends this one, after its checkpoint
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    shared = SharedMemory(memory)
    with Connection(pipe) as connection, suppress(EOFError, OSError):
        packer = _try(pickle.loads, connection.recv_bytes())
        while True:
            step = pickle.loads(connection.recv_bytes())
            failed = isinstance(packer, Exception)
            reply = packer if failed else _try(_pack_into, packer, step, shared)
            connection.send_bytes(pickle.dumps(reply))
    os._exit(0)  # Python would take half a second to free what it has imported


def _pack_into(packer: Packer, step: OptimizerStep, memory: SharedMemory) -> list[Any]:
    """Pack a step into shared memory; return the end and the pickle of each micro-batch."""
    reply, stop = [], 0
    for rows, idle in step.micro_batches:
        pickler = _Pickler(memory, stop)
        pickler.dump(packer.pack(step.number, rows, idle, pickler.allocate))
        stop = pickler.stop
        reply.append((stop, pickler.file.getvalue()))
    return reply


def _try(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result, or the exception, which the process that trains raises."""
    try:
        return function(*arguments)
    except Exception as error:
        sent: Exception = error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            sent = RuntimeError(repr(error))  # of an error that cannot be pickled
        sent.add_note(f"in a data worker:\n{traceback.format_exc()}")
        return sent


class _Worker:
    """A data worker, seen from the process that trains."""

    def __init__(self) -> None:
        self._has_packer = False
        self.file = open(os.memfd_create("draftlab-batches"), "r+b", buffering=0)  # noqa: SIM115
        self.memory = SharedMemory(self.file.fileno())
        self.pipe, worker_end = Pipe()
        descriptors = worker_end.fileno(), self.file.fileno()
        paths = [path or os.getcwd() for path in sys.path if isinstance(path, str)]
        environment = {"PYTHONPATH": os.pathsep.join(paths)} | _ENVIRONMENT
        with worker_end:
            self.process = subprocess.Popen(
                # -P: the working directory is not searched for modules.
                [sys.executable, "-P", "-c", _SERVE.format(*descriptors)],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                process_group=0,  # Ctrl-C is for the process that trains
                env=os.environ | environment,
            )

    def pack(self, packer: bytes, step: OptimizerStep, pinned: bool) -> list[Batch]:
        if not self._has_packer:
            self._send(packer)
            self._has_packer = True
        self._send(pickle.dumps(step))
        try:
            reply = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._ended() from None
        if isinstance(reply, Exception):
            raise reply
        batches, start = [], 0
        for stop, pickled in reply:
            block = torch.empty(stop - start, dtype=torch.uint8, pin_memory=pinned)
            # On this thread, without the interpreter.
            np.copyto(block.numpy(), self.memory.block(start, stop).numpy())
            batches.append(_Unpickler(io.BytesIO(pickled), block).load())
            start = stop
        return batches

    def close(self) -> None:
        """Let the worker end, without waiting for it."""
        self.pipe.close()
        self.memory = SharedMemory(-1)
        self.file.close()

    def wait(self) -> None:
        """Wait for the worker's end, behind `close`."""
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _send(self, pickled: bytes) -> None:
        # By plain pickle: `Connection.send` pickles tensors in another way.
        try:
            self.pipe.send_bytes(pickled)
        except OSError:
            raise self._ended() from None

    def _ended(self) -> UserError:
        return UserError(
            f"a data worker ended ({exit_text(self.process.wait())}); its output is on stderr",
            do="check whether memory is full, and run the same command again; "
            "train.data_workers=0 packs batches on threads of the process that trains",
        )


class WorkerPool:
    """Data workers, called from threads. They start at once, since imports take seconds."""

    def __init__(self, num_workers: int, *, pinned: bool) -> None:
        self._pinned = pinned
        self._slots = BoundedSemaphore(num_workers)
        self._idle = [_Worker() for _ in range(num_workers)]

    def begin(self, packer: Packer) -> None:
        """Set what packs the steps, before the first one."""
        self._packer = pickle.dumps(packer)

    def pack(self, step: OptimizerStep) -> list[Batch]:
        """Return the micro-batches of an optimizer step, in pinned memory for a GPU; raise whatever
        packing raises, and a `UserError` if a worker ended.
        """
        with self._slots:
            worker = self._idle.pop() if self._idle else _Worker()
            try:
                batches = worker.pack(self._packer, step, self._pinned)
            except BaseException:
                # The worker may still reply, and the next caller would get these batches.
                worker.close()
                worker.wait()
                raise
            self._idle.append(worker)
        return batches

    def close(self) -> None:
        """End the workers, once no thread calls."""
        workers, self._idle = self._idle, []
        for worker in workers:
            worker.close()
        for worker in workers:
            worker.wait()
