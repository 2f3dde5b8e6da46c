"""Processes that pack batches, so that the one that trains has Python's interpreter to itself.

A step of a small head is as long as the host takes to start its few thousand kernels. Threads that
pack, with their own thousands of small operations, take the interpreter from the thread that does
this. Processes cost it a message and a copy for each batch:

    work ─► pipe ─► Packer, in a Region ─► pipe: where each tensor lies ─► copied to pinned memory

Processes are begun by a command and not by `multiprocessing`, which would run the user's script
again in each of them.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any

import torch

from draftlab.errors import UserError
from draftlab.formatting import counted, ended_text
from draftlab.train.batch.packer import Packer, StepWork
from draftlab.train.batch.packing import Batch, Room, anywhere, pinned
from draftlab.train.batch.shared_memory import Region, lay, pick_up

if TYPE_CHECKING:  # what processes that pack have no use for takes seconds to import
    from draftlab.train.distributed.ranks import Ranks

MOST = 4
"""Processes that pack for a GPU, unless train.packers says otherwise: one alone keeps up with small
heads, and the copies of large ones are bound by memory."""
_SERVE = "from draftlab.train.batch.pack_processes import serve; serve({}, {})"
_WITHOUT = "train.packers=0 packs on threads of the process that trains"


def serve(pipe: int, memory: int) -> None:
    """What a process does that packs: answers work until the other end of the pipe is closed."""
    torch.set_num_threads(1)
    region = Region(memory)
    with Connection(pipe) as asked, suppress(EOFError, OSError):
        packer = _tried(pickle.loads, asked.recv_bytes())
        while True:
            work = pickle.loads(asked.recv_bytes())
            failed = isinstance(packer, Exception)
            answer = packer if failed else _tried(lay, packer, work, region)
            asked.send_bytes(pickle.dumps(answer))


def _tried(make: Callable[..., Any], *given: Any) -> Any:
    """What is made, or the exception that was raised, to be raised where training goes on."""
    try:
        return make(*given)
    except Exception as error:
        found: Exception = error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            found = RuntimeError(repr(error))  # what cannot travel is told
        found.add_note(f"in a process that packs:\n{traceback.format_exc()}")
        return found


class _Process:
    """One of them, seen from the process that trains."""

    def __init__(self, packer: bytes) -> None:
        self.file = open(os.memfd_create("draftlab-batches"), "r+b", buffering=0)  # noqa: SIM115
        self.region = Region(self.file.fileno())
        self.pipe, there = Pipe()
        both = there.fileno(), self.file.fileno()
        paths = [path or os.getcwd() for path in sys.path if isinstance(path, str)]
        with there:
            self.process = subprocess.Popen(
                # -P: modules are looked for where this process does, and nowhere else.
                [sys.executable, "-P", "-c", _SERVE.format(*both)],
                stdin=subprocess.DEVNULL,
                pass_fds=both,
                process_group=0,  # Ctrl-C is for the process that trains
                # No GPU is theirs; what they would take of one is lost to training.
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
            )
        self._ask(packer)

    def pack(self, work: StepWork, room: Room) -> list[Batch]:
        self._ask(pickle.dumps(work))
        try:
            answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._lost() from None
        if isinstance(answer, Exception):
            raise answer
        return pick_up(answer, self.region, room)

    def dismiss(self) -> None:
        """Lets it end, without waiting for that."""
        self.pipe.close()
        self.region.close()
        self.file.close()

    def wait(self) -> None:
        """Waits for its end, behind `dismiss`."""
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _ask(self, pickled: bytes) -> None:
        # By plain pickle: `Connection.send` has ways of its own for tensors.
        try:
            self.pipe.send_bytes(pickled)
        except OSError:
            raise self._lost() from None

    def _lost(self) -> UserError:
        how = ended_text(self.process.wait())
        return UserError(
            f"a process that packs batches ended ({how}); what it said is on stderr",
            do=f"look whether memory ran out, and run the same command again; {_WITHOUT}",
        )


class PackProcesses:
    """Processes that pack, called from threads; they begin when they are first needed.

    Args:
        packer: what they all do.
        number: of processes, at least 1.
        device: that the batches are for.
    """

    def __init__(self, packer: Packer, number: int, device: torch.device) -> None:
        self.threads: int | None = number
        self.how = counted(number, "process")
        self._packer, self._on_gpu = pickle.dumps(packer), device.type == "cuda"
        self._turns = BoundedSemaphore(number)
        self._idle: list[_Process] = []

    def __call__(self, work: StepWork) -> list[Batch]:
        """The micro-batches of an optimizer step, in pinned memory for a GPU.

        Raises:
            UserError: a process ended. Besides, whatever packing raises.
        """
        with self._turns:
            process = self._free()
            try:
                batches = process.pack(work, pinned if self._on_gpu else anywhere)
            except BaseException:
                # It may still be at work, and the next to ask would be given this work's batches.
                process.dismiss()
                process.wait()
                raise
            self._idle.append(process)
        return batches if self._on_gpu else [batch.decoded() for batch in batches]

    def _free(self) -> _Process:
        try:
            return self._idle.pop()
        except IndexError:
            return _Process(self._packer)

    def close(self) -> None:
        """Ends the processes, once no thread calls."""
        processes, self._idle = self._idle, []
        for process in processes:
            process.dismiss()
        for process in processes:
            process.wait()


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


def choose_packing(packer: Packer, ranks: Ranks) -> PackProcesses | PackHere:
    """Packing as train.packers asks for it.

    Raises:
        UserError: processes are asked for where there can be none.
    """
    asked, fault = packer.settings.packers, _fault(packer)
    if asked and fault:
        raise UserError(
            f"train.packers asks for {counted(asked, 'process')}, and {fault}",
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
    if not packer.store.on_disk:
        return "this store is no folder that they could open (record.online has none)"
    try:
        os.close(os.memfd_create("draftlab-batches"))
    except (AttributeError, OSError) as error:
        return f"this system has no memory to share with them ({error})"
    return None
