"""What decodes answers: the target's engine, here or in processes on other devices."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request
from draftlab.errors import UserError
from draftlab.formatting import ended_text
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target, load_target, resolve_device
from draftlab.target_model.settings import TargetSettings

_SPAWN = get_context("spawn")  # CUDA cannot be used in a fork of a process that used it

Decode = Callable[[Sequence[Request], int], Iterator[Generation]]
"""Decodes requests whose prompt and answer take at most so many positions, in any order."""


def engine_decode(target: Target | TargetMetadata, batch: int) -> Decode:
    """The target's own engine, for so many requests at once."""
    if isinstance(target, TargetMetadata):
        raise ValueError("an outline decodes nothing: expected `decode`")

    def decode(requests: Sequence[Request], max_length: int) -> Iterator[Generation]:
        engine = Engine(target, batch=min(batch, len(requests)), max_length=max_length, packed=True)
        return engine.generate(requests)

    return decode


class _Elsewhere:
    """A `Decode` in a process of its own."""

    def __init__(self, settings: TargetSettings, device: str, batch: int) -> None:
        self.device = device
        self._pipe, theirs = _SPAWN.Pipe()
        asked = settings.model_copy(update={"device": device})
        self._process = _SPAWN.Process(target=_serve, args=(theirs, asked, batch), daemon=True)
        self._process.start()
        theirs.close()  # so that its end is seen here

    def __call__(self, requests: Sequence[Request], max_length: int) -> Iterator[Generation]:
        with suppress(OSError):  # if it has ended, its last words are read
            self._pipe.send((requests, max_length))
        try:
            while (found := self._pipe.recv()) is not None:
                if isinstance(found, str):
                    raise self._failed(found)
                yield found
        except (EOFError, OSError):
            self._process.join()
            raise self._failed(f"it ended ({ended_text(self._process.exitcode)})") from None

    def _failed(self, why: str) -> UserError:
        return UserError(
            f"the process that answers on {self.device} failed: {why}",
            do="run again, with fewer GPUs where that fails too: whole pieces are kept",
        )

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self._process.terminate()
        self._process.join()
        self._pipe.close()


@contextmanager
def answering(
    settings: TargetSettings, devices: Sequence[str], batch: int
) -> Iterator[list[Decode]]:
    """Decoders for `data.regenerate`, one on each device, while the block runs.

    Args:
        settings: of the target, which each process loads.
        batch: prompts that each decodes at once.
    """
    with ExitStack() as stack:
        started = []
        for device in devices:
            started.append(_Elsewhere(settings, device, batch))
            stack.callback(started[-1].close)
        yield started


def _serve(pipe: Connection, settings: TargetSettings, batch: int) -> None:
    """The process: answers what comes until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    try:
        device = resolve_device(settings.device)
        if device.type == "cuda":  # streams, events and graphs are the current one's
            torch.cuda.set_device(device)
        decode = engine_decode(load_target(settings), batch)
        while True:
            for generation in decode(*pipe.recv()):
                pipe.send(generation)
            pipe.send(None)
    except (EOFError, BrokenPipeError):
        pass
    except Exception as error:
        said = str(error).replace("\n", "; ")
        pipe.send(said if isinstance(error, UserError) else f"{type(error).__name__}: {said}")
        os._exit(1)  # nothing is to be waited for
