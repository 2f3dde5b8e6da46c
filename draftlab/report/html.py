"""The report as one HTML page that opens offline, with its plots as PNG files beside it."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from draftlab.evaluate.results import SCHEMA_VERSION, Report
from draftlab.files import atomic_path, write_text
from draftlab.report.conditions import description
from draftlab.report.section import Section
from draftlab.report.sections import sections


def _unbroken(text: str) -> str:
    """Return the text with spaces at which no line breaks inside of "K = 4" and "[2.20, 2.43]"."""
    return re.sub(r" = |(?<=\d), (?=\d)", lambda match: match[0].replace(" ", "\xa0"), text)


def render_html(shown: Sequence[Section], images: Mapping[str, bytes] | None = None) -> str:
    """Return the page of the sections.

    Args:
        images: the PNG of each figure by its name. The page embeds them and needs no other file.

    Returns:
        HTML whose only external reference is the link to report.json beside it.
    """
    from jinja2 import Environment, StrictUndefined

    # autoescape: names and warnings come from other people's files
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["unbroken"] = _unbroken
    template = files("draftlab.report").joinpath("report.html.jinja").read_text(encoding="utf-8")
    figures = [one for one in shown if one.figure]
    return environment.from_string(template).render(
        headline=next(one for one in shown if one.kind == "headline"),
        warnings=[one for one in shown if one.kind == "warning"],
        opened=[one for one in shown if one.kind == "open" and not one.figure],
        folded=[one for one in shown if one.kind == "folded"],
        figures=figures,
        images={name: base64.b64encode(png).decode() for name, png in (images or {}).items()},
        schema=SCHEMA_VERSION,
    )


def write_plots(shown: Sequence[Section], folder: Path, description: str) -> dict[str, bytes]:
    """Write a PNG file per figure into `folder`; return the PNG of each by its name."""
    from draftlab.report.plots import png  # matplotlib: half a second the console does not need

    images = {}
    for plot in (one.figure for one in shown if one.figure):
        images[plot.name] = png(plot.figure, description)
        with atomic_path(folder / f"{plot.name}.png") as temporary:
            temporary.write_bytes(images[plot.name])
    return images


def is_plot(path: Path) -> bool:
    """Return whether a PNG file has the name of a plot."""
    from draftlab.report.plots import PLOTS

    return path.stem.rstrip("_0123456789") in PLOTS


def write_html(report: Report, folder: Path) -> Path:
    """Write report.html and a PNG file per plot into `folder`, each atomically.

    The page links to report.json beside it, which is written too if it is missing. Plots of an
    earlier report that this one does not have are deleted.

    Returns:
        The path of report.html.
    """
    shown = sections(report, figures=True)
    images = write_plots(shown, folder, description(report))
    for old in folder.glob("*.png"):  # of an earlier report with other rows
        if old.stem not in images and is_plot(old):
            old.unlink()
    if not (folder / "report.json").exists():
        report.write(folder / "report.json")
    page = folder / "report.html"
    write_text(page, render_html(shown, images))
    return page
