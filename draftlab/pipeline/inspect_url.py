"""Print what `draftlab inspect` finds at a URL: the copy of a run."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from draftlab.evaluate.results import Report
from draftlab.formatting import size_text
from draftlab.pipeline.copied_run import STAGE_FILES, CopiedRun
from draftlab.pipeline.stage_records import read_record
from draftlab.pipeline.stages import REPORT, STAGES
from draftlab.report import print_report
from draftlab.store.object_store import UrlFolder

_REPORT = f"{STAGES['eval'].artefact}/{REPORT}"


def print_copied_run(url: str, console: Console) -> bool:
    """Print the run whose files are at a URL, with its report; return whether there is one.

    Raises:
        UserError: a file there is damaged, or the URL does not answer.
    """
    remote = UrlFolder(url)
    copied = CopiedRun.read(remote)
    if copied is None:
        return False
    rows = {"address": url}
    with TemporaryDirectory() as folder:

        def local(name: str) -> Path:
            path, file = Path(folder) / name.replace("/", "-"), copied.files[name]
            remote.download(name, path, file.bytes, file.sha256)
            return path

        for stage in STAGE_FILES:
            if (name := f"stages/{stage}.json") in copied.files:
                complete = read_record(local(name))["complete"]
                rows[stage] = "complete" if complete else "unfinished"
        if steps := copied.steps():
            rows["checkpoints"] = "steps " + ", ".join(f"{step:,}" for step in steps)
        rows["size"] = size_text(sum(file.bytes for file in copied.files.values()))
        title = f"run {copied.name}"
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        for key, value in rows.items():
            table.add_row(key, value)
        console.print(table)
        if _REPORT in copied.files:
            print_report(Report.read(local(_REPORT)), console)
    return True
