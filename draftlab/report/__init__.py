"""Reports for readers: tables in the console, an offline HTML page, plots."""

from draftlab.report.html import write_html
from draftlab.report.suites import print_suites
from draftlab.report.table import print_report

__all__ = ["print_report", "print_suites", "write_html"]
