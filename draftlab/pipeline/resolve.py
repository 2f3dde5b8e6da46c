"""What `eval` and `export` work on: the head of a run, or a head folder, with its target."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from draftlab.errors import UserError
from draftlab.evaluate.results import Report
from draftlab.evaluate.settings import EvalSettings
from draftlab.export import ExportSettings
from draftlab.files import check_folder, sha256_file
from draftlab.heads.folder import CONFIG, WEIGHTS, load_config
from draftlab.pipeline.api import export, head_name_of, head_path, new_evaluator, write_report
from draftlab.pipeline.recipe import Recipe, flat, read_run_recipe
from draftlab.pipeline.run_folder import RUNS, find_run, lock, making_otherwise
from draftlab.pipeline.stages import STAGES
from draftlab.progress import Monitor
from draftlab.target_model.settings import EMBEDDED, TargetSettings
from draftlab.text.suites import suite_sha256


def input_files(settings: EvalSettings) -> dict[str, str]:
    """Content hashes of the files an evaluation reads, as they enter its stage's key."""
    suite = suite_sha256(settings.suite)
    found = {"eval.suite.sha256": suite} if suite else {}
    return found | {
        f"eval.compare.{source}.sha256": sha256_file(head_path(source) / WEIGHTS)
        for source in settings.compare
    }


@dataclass(frozen=True)
class Subject:
    """A head with its target, for `eval` and `export` on their own.

    Attributes:
        head: head folder. name: as reports call it. target: its target.
        settings, exports: to start from; a run's are its recipe's.
        folder: where eval/ and export/ go. is_run: whether that is a run folder.
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
        """Evaluates into `out` (None: the subject's own eval/); the report and its folder."""
        folder = out or self.folder / "eval"
        booked = flat(settings, "eval.") | flat(target, "target.") | input_files(settings)
        check_folder(folder)  # all that the user may have got wrong comes before the books
        monitor.say(f"eval: {self.head}")
        evaluator = new_evaluator(target, self.head, settings, monitor=monitor, head_name=self.name)
        with self._lock(out):
            report = evaluator.run()
            # Booked only now: whoever interrupts the minutes before keeps the report that was.
            with self._booking("eval", booked, out):
                write_report(report, folder)
        return report, folder

    def export(self, settings: ExportSettings, out: Path | None, *, monitor: Monitor) -> list[Path]:
        """Exports to every layout; one alone goes into `out` itself (None: export/<layout>)."""
        folder = out or self.folder / "export"
        with self._lock(out), self._booking("export", flat(settings, "export."), out):
            return [
                export(
                    self.head,
                    self.target,
                    folder if out and len(settings.formats) == 1 else folder / layout,
                    layout,
                    settings=settings,
                    monitor=monitor,
                )
                for layout in settings.formats
            ]

    def _lock(self, out: Path | None) -> AbstractContextManager[None]:
        return lock(self.folder) if self.is_run and out is None else nullcontext()

    def _booking(
        self, stage: str, settings: dict[str, Any], out: Path | None
    ) -> AbstractContextManager[None]:
        if self.is_run and out is None:
            return making_otherwise(self.folder, STAGES[stage], settings)
        return nullcontext()


def eval_subject(run_name: str | None, head: str | None, target: str | None) -> Subject:
    """The head of a run (None: the latest), or a head folder with its target.

    Raises:
        UserError: no such run or head, or a head folder without a target.
    """
    if head is None:
        folder = find_run(run_name)
        recipe = recipe_of(folder)
        if not (folder / "head" / CONFIG).is_file():
            raise UserError(
                "expected the run to have a trained head, found none",
                where=folder,
                do=f"`draftlab train {quote(str(folder / 'recipe.yaml'))}` finishes it",
            )
        settings = recipe.target
        if target is not None:
            settings = settings.model_copy(update={"path": target})
        return Subject(
            folder / "head", folder.name, settings, recipe.eval, recipe.export, folder, True
        )
    if run_name is not None:
        raise UserError(
            f"expected a run or a head, found both: {run_name} and {head}", where="command line"
        )
    path = head_path(head)
    trained_for = load_config(path).target.name
    if target is None and trained_for != EMBEDDED:
        raise UserError(
            f"expected --target beside --head (it was trained for {trained_for})", where=path
        )
    name = head_name_of(path)
    return Subject(
        path,
        name,
        TargetSettings(path=target or EMBEDDED),
        EvalSettings(),
        ExportSettings(),
        RUNS / f"eval-{name}",
        False,
    )


def recipe_of(run_folder: Path) -> Recipe:
    """The resolved recipe a run was made with."""
    return read_run_recipe(run_folder / "recipe.yaml")
