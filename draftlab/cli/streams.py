"""The standard streams of a command: any encoding, a reader that has gone, a closed stream."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO

STREAMS = {1: "stdout", 2: "stderr"}


class _Pipe(io.FileIO):
    """A descriptor whose reader may go, as that of `| head -1`: what it does not read is lost."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return memoryview(data).nbytes


def prepare_streams() -> None:
    """Have stdout and stderr take any text, until the process ends.

    A letter that their encoding lacks is printed as "?". A closed stream loses what is printed, and
    no file that is opened later gets its descriptor. Hours of work do not end for a lost reader.
    """
    for number in (0, *STREAMS):
        try:
            os.fstat(number)
        except OSError:  # closed; the lowest free descriptor is this one
            os.open(os.devnull, os.O_RDWR)
    for number, name in STREAMS.items():
        setattr(sys, name, _stream(number, getattr(sys, name)))


def _stream(number: int, former: TextIO | None) -> TextIO:
    encoding = "utf-8" if former is None else former.encoding
    if former is not None:
        former.flush()
    pipe = _Pipe(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(pipe),
        encoding=encoding,
        errors="replace",
        line_buffering=number == 2 or pipe.isatty(),
        write_through=number == 2,
    )
