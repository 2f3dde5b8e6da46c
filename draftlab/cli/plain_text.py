"""Output in which strangers' names are plain text: neither markup nor control sequences."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from typing import Any

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
