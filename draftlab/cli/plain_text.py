"""Output of a command: strangers' names are plain text, and stdout and stderr take any text."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterable
from typing import Any, TextIO

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from draftlab.formatting import visible, visible_json
from draftlab.url_secrets import without_secrets


class PlainConsole(Console):
    """A console for texts with strangers' names: they are neither markup nor control sequences.

    Colours and the progress bar are rich's own sequences, and stay.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        if (
            isinstance(renderable, Text)
            and (plain := visible(renderable.plain)) != renderable.plain
        ):
            renderable = renderable.copy()
            renderable.plain = plain  # of the same length, so that the styles fit
        return super().render(renderable, options)


def echo(line: str) -> None:
    """Print a line on stdout."""
    typer.echo(visible(line))


def echo_json(text: str) -> None:
    """Print JSON on stdout, in UTF-8 whatever the encoding of stdout is."""
    typer.echo(visible_json(text.rstrip("\n")).encode())


def clean_library_messages() -> None:
    """Let log records and warnings of libraries, which quote strangers' names, be visible text."""

    class Record(logging.LogRecord):
        def getMessage(self) -> str:
            return visible(without_secrets(super().getMessage()))

    logging.setLogRecordFactory(Record)
    formatted = warnings.formatwarning

    def format_warning(*args: Any, **kwargs: Any) -> str:
        return visible(without_secrets(formatted(*args, **kwargs)))

    warnings.formatwarning = format_warning


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
