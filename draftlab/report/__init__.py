"""Result rows for readers: the console's closing tables, an offline HTML page, plots."""

from draftlab.report.html import write_html
from draftlab.report.suites import print_suites
from draftlab.report.table import print_report

__all__ = ["print_report", "print_suites", "write_html"]
