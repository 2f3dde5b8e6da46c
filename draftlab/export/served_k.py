"""The drafts a step that an export names by default, and why."""

from __future__ import annotations

from pathlib import Path

from draftlab.evaluate.headline import fastest_k
from draftlab.evaluate.results import Report
from draftlab.export.serving_tables import calibrated_k
from draftlab.files import known_sha256
from draftlab.heads.config import HeadConfig
from draftlab.heads.folder import WEIGHTS


def served_k(
    head: HeadConfig, folder: Path, calibration: Path | None, report: Path | None
) -> tuple[int, str]:
    """Return K and a sentence's end that says why.

    It is the K of the calibration, else the fastest one that a report measured for these weights,
    else what an imported head's files name, or what the head was trained for.

    Args:
        folder: the head folder.
        calibration: a report with a calibration of the head, for servers.
        report: report.json of the head's evaluation.

    Raises:
        UserError: a report is damaged, or the calibration is of another head.
    """
    if calibration is not None:
        return calibrated_k(calibration, folder), "as the head was calibrated for"
    if report is not None and report.is_file() and (found := _measured(report, folder)):
        return found
    imported = (head.provenance.get("imported") or {}).get("k")
    if isinstance(imported, int) and imported > 0:
        return head.default_k, "as the imported head's files name; not measured"
    return head.k_trained, "as the head was trained for; not measured"


def _measured(path: Path, folder: Path) -> tuple[int, str] | None:
    report = Report.read(path)
    digest = known_sha256(folder / WEIGHTS)
    names = {name for name, known in report.environment.get("heads", {}).items() if known == digest}
    rows = [row for row in report.rows if row.head in names]
    best = fastest_k(rows)
    if best is None:
        return None
    which = "the fastest" if best.measured > 1 else "the only one"
    engine = f" with {best.engine}" if len({row.engine for row in rows}) > 1 else ""
    return best.k, f"{which} measured{engine} at T = {best.temperature:g} ({best.speedup:.2f}×)"
