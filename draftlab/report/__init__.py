"""Reports for readers: a list of sections in the console, on an offline HTML page, in a card."""

from collections.abc import Sequence

from rich.console import Console

from draftlab.evaluate.results import Report
from draftlab.report.console import print_sections
from draftlab.report.html import write_html
from draftlab.report.sections import sections, suite_sections

__all__ = ["print_report", "print_suites", "write_html"]


def print_report(report: Report, console: Console, said: Sequence[str] = ()) -> None:
    """Print a report, and the warnings that the command `said` before."""
    print_sections(sections(report, said=said), console)


def print_suites(reports: Sequence[Report], console: Console) -> None:
    """Print the rows of several reports, grouped by setting, a line for each suite and batch.

    Raises:
        UserError: the reports have different targets or no rows.
    """
    print_sections(suite_sections(reports), console)
