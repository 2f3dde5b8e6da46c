"""Calibrations in the console, on the page and as reliability diagrams."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from draftlab.evaluate.results import Report
from draftlab.report.console import print_sections
from draftlab.report.plots import FEWEST, plots
from draftlab.report.sections import sections
from tests.helpers import sample_report as sample
from tests.helpers.draft_blocks import calibrated, simulate


@pytest.fixture(scope="module")
def report() -> Report:
    four, seven = (simulate([0.5] * k, [0.3] * k, blocks=4000) for k in (4, 7))
    sampled = {"temperature": 0.8, "draft_probs": True}
    both = [calibrated(four), calibrated(seven, "confidence head", **sampled)]
    return sample.report().model_copy(update={"calibrations": both})


def test_the_console_has_a_line_for_each(report: Report) -> None:
    console = Console(width=400, file=io.StringIO(), force_terminal=False)
    print_sections(sections(report), console)
    text = console.file.getvalue()
    first, second = report.calibrations
    worst = max(first.positions, key=lambda p: p.error_after)
    assert f"{worst.error_after:.3f} after" in text
    assert f"over {first.blocks:,} steps of 100 other prompts" in text
    saving = second.survival_saving
    assert f"leaves out {100 * saving.not_verified:.1f} % of the drafts" in text


def test_a_diagram_for_each_position(report: Report) -> None:
    figures = {
        p.figure.name: p.figure.figure
        for p in plots(report)
        if p.figure.name.startswith("reliability")
    }
    assert list(figures) == ["reliability_1", "reliability_2"]
    for figure, one in zip(figures.values(), report.calibrations, strict=True):
        assert len(figure.axes) == one.k
        for axes, position in zip(figure.axes, one.positions, strict=True):
            _, before, after = axes.lines
            for line, bins in ((before, position.before), (after, position.after)):
                drawn = [b for b in bins if b.count >= FEWEST]
                assert list(line.get_xdata()) == [b.predicted for b in drawn]
                assert list(line.get_ydata()) == [b.observed for b in drawn]
    assert not [p for p in plots(sample.report()) if p.figure.name.startswith("reliability")]
