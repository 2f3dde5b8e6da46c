"""A head with its target, its settings and the folder of its reports and exports."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.evaluate.results import Report
from draftlab.evaluate.settings import EvalSettings
from draftlab.export.serving_tables import report_path
from draftlab.export.settings import ExportSettings
from draftlab.files import known_sha256, parse_json
from draftlab.heads.folder import CONFIG, NATIVE, WEIGHTS
from draftlab.progress import Monitor
from draftlab.recipe.recipe import RECIPE, flatten
from draftlab.run.api import evaluate_head, export_layouts
from draftlab.run.folder import RUNS, find_run, lock
from draftlab.run.resolve import (
    find_head,
    find_target,
    name_in_reports,
    recipe_of,
    say_target,
)
from draftlab.run.stages import REPORT, STAGES, recorded_with
from draftlab.target_model.locate import check_named
from draftlab.target_model.settings import TargetSettings
from draftlab.text.suites import suite_sha256


def input_files(settings: EvalSettings) -> dict[str, str]:
    """Return content hashes of the files that an evaluation reads, by the name of the input."""
    suites = {source: suite_sha256(source) for source in settings.suite or ()}
    hashes = {f"eval.suite.{source}.sha256": digest for source, digest in suites.items() if digest}
    return hashes | {
        f"eval.compare.{source}.sha256": known_sha256(find_head(source) / WEIGHTS)
        for source in settings.compare
    }


def export_files(settings: ExportSettings) -> dict[str, str]:
    """Return content hashes of the files that an export reads beside the head, if they exist."""
    if settings.calibration is None:
        return {}
    path = report_path(Path(settings.calibration).expanduser())
    return {"export.calibration.sha256": known_sha256(path)} if path.is_file() else {}


@dataclass(frozen=True)
class HeadWorkspace:
    """What `eval`, `export` and `push` need of a head.

    Attributes:
        name: the head's name in reports.
        settings, exports: default settings; for a run, those of its recipe.
        folder: contains eval/ and export/.
        is_run: whether `folder` is a run folder.
    """

    head: Path
    name: str
    target: TargetSettings
    settings: EvalSettings
    exports: ExportSettings
    folder: Path
    is_run: bool

    def evaluate(
        self, target: TargetSettings, settings: EvalSettings, out: Path | None, *, monitor: Monitor
    ) -> tuple[Report, Path]:
        """Evaluate into `out` (None: eval/ of the workspace); return the report and its folder."""
        if out is not None:
            _check_out(out)
        folder = out or self.folder / "eval"
        inputs = flatten(settings, "eval.") | flatten(target, "target.") | input_files(settings)
        monitor.say(f"eval: {self.head}")
        with self._lock(out):
            report = evaluate_head(
                target,
                self.head,
                settings,
                folder,
                monitor=monitor,
                head_name=self.name,
                trained_for=self.target,
                # Recorded only then, so that an interruption keeps the former report.
                writing=self._recorded("eval", inputs, out),
            )
        return report, folder

    def export(self, settings: ExportSettings, out: Path | None, *, monitor: Monitor) -> list[Path]:
        """Export to every layout; return the folders: `out`, or <out or export/>/<layout>."""
        if not settings.formats:
            raise UserError(
                "expected at least one layout, found none (export.formats is empty)",
                where=self.folder,
                do="name one, such as --to vllm",
            )
        folder = out or self.folder / "export"
        inputs = flatten(settings, "export.") | export_files(settings)
        with self._lock(out):
            alone = out is not None and len(settings.formats) == 1
            return export_layouts(
                self.head,
                self.target,
                {name: folder if alone else folder / name for name in settings.formats},
                settings=settings,
                report=self.folder / STAGES["eval"].artefact / REPORT,
                monitor=monitor,
                writing=self._recorded("export", inputs, out),
            )

    def _lock(self, out: Path | None) -> AbstractContextManager[None]:
        return lock(self.folder) if self.is_run and out is None else nullcontext()

    def _recorded(
        self, stage: str, settings: dict[str, Any], out: Path | None
    ) -> AbstractContextManager[None]:
        if self.is_run and out is None:
            return recorded_with(self.folder, STAGES[stage], settings)
        return nullcontext()


def open_head(
    run_name: str | None,
    head: str | None,
    target: str | None,
    *,
    trust_remote_code: bool = False,
    monitor: Monitor | None = None,
) -> HeadWorkspace:
    """Return the workspace of a run's head (None: the latest run's), or of a head and its
    target; raise a `UserError` without one.
    """
    if head is None:
        check_named(target, trust_remote_code)
        folder = find_run(run_name)
        recipe, path = recipe_of(folder), find_head(folder)
        settings = recipe.target
        if target is not None:  # the recipe's revision is one of another target
            code = {"trust_remote_code": trust_remote_code, "revision": None}
            settings = settings.model_copy(update={"path": target, **code})
        say_target(settings, "--target" if target else str(folder / RECIPE), monitor)
        return HeadWorkspace(path, folder.name, settings, recipe.eval, recipe.export, folder, True)
    if run_name is not None:
        raise UserError(
            f"expected a run or a head, found both: {run_name} and {head}",
            where="command line",
            do="leave one of the two out",
        )
    path = find_head(head)
    name = name_in_reports(path)
    return HeadWorkspace(
        path,
        name,
        find_target(path, target, trust_remote_code=trust_remote_code, monitor=monitor),
        EvalSettings(),
        ExportSettings(),
        RUNS / f"eval-{name}",
        False,
    )


def _check_out(folder: Path) -> None:
    """Raise a `UserError` if a folder that the user names for a report is a run's, a head's or a
    stage's, or another report would be replaced.
    """
    place, stages = folder.resolve(), {"stages", "train", *(s.artefact for s in STAGES.values())}
    is_stage = place.name in stages and (place.parent / RECIPE).is_file()
    if is_stage or any((folder / name).is_file() for name in (RECIPE, CONFIG, NATIVE)):
        raise UserError(
            "expected a folder for a report, found a run's, a head's or one of a run's stages",
            where=folder,
            do="name a new folder with --out; without --out a run's report is in its eval/",
        )
    there = [name for name in (REPORT, "report.html") if (folder / name).is_file()]
    try:
        fields = parse_json((folder / REPORT).read_bytes())
    except (OSError, ValueError):
        fields = None
    if there and not (isinstance(fields, dict) and {"schema", "rows"} <= fields.keys()):
        raise UserError(
            "expected a new folder or one with draftlab's report.json, found another "
            f"{' and '.join(there)}, which the report would replace",
            where=folder,
            do="name another folder with --out, or move these files",
        )
