"""The comparison of a head's files with the hashes that its run recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from draftlab.doctor.findings import Finding, fault
from draftlab.errors import UserError
from draftlab.files import sha256_file
from draftlab.run.resolve import run_of
from draftlab.run.stages import STAGES, read_record, record_path


def changed_file_findings(folder: Path) -> list[Finding]:
    """Return a finding for each file that is missing or has changed since its run wrote it.

    Args:
        folder: a head folder or an export; outside of a run it has no recorded hashes.
    """
    run = run_of(folder)
    if run is None:
        return []
    try:
        return list(_findings(folder.resolve(), run))
    except UserError as error:
        return [fault("unreadable", f"{error.where}: {error.what}", error.do)]


def _findings(folder: Path, run: Path) -> Iterator[Finding]:
    do = f"restore the file, or let `draftlab run {quote(str(run / 'recipe.yaml'))}` make it again"
    for stage in ("head", "export"):
        path = record_path(run, STAGES[stage])
        recorded = read_record(path).get("sha256", {}) if path.is_file() else {}
        for name, expected in recorded.items():
            file = run / name
            if file.parent != folder:
                continue
            if not file.is_file():
                yield fault("changed file", f"{file.name} is missing; the run wrote one", do)
            elif (actual := sha256_file(file)) != expected:
                what = f"{file.name} has SHA-256 {actual[:12]}, and {expected[:12]} when the run"
                yield fault("changed file", f"{what} wrote it", do)
