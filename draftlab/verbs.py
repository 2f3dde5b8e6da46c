"""The verbs that need no recipe: evaluating and exporting a head, of a run or on its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from draftlab.base import Monitor, UserError, sha256_file
from draftlab.chat.render import stop_ids, template_sha256, tokenizer_sha256
from draftlab.data.suites import load_suite, suite_sha256
from draftlab.decode.evaluate import EvalKnobs, Evaluator, NamedHead
from draftlab.export import ExportKnobs, find_layout
from draftlab.heads.config import HeadConfig
from draftlab.heads.folder import CONFIG, WEIGHTS, load_config, load_head
from draftlab.recipe import Recipe, flat, load_recipe
from draftlab.report import write_html
from draftlab.results import Report
from draftlab.run import RUNS, STAGES, find_run, making_otherwise
from draftlab.target.model import (
    EMBEDDED,
    Target,
    TargetKnobs,
    load_target,
    load_tokenizer,
    resolve_target,
)

REFERENCE = "reference"


def reference_head() -> Path:
    """The head for the embedded target that ships in the package."""
    return Path(str(resources.files("draftlab") / "embedded" / "heads" / REFERENCE))


def head_path(source: str) -> Path:
    """A head folder by path, or "reference".

    Raises:
        UserError: when no head lies there.
    """
    path = reference_head() if source == REFERENCE else Path(source)
    load_config(path)
    return path


def check_fits(head: HeadConfig, target: Target, tokenizer: Any, folder: Path) -> None:
    """Refuses a head that was trained for another target, tokenizer or template."""
    pairs = {
        "target": (head.target.fingerprint, target.fingerprint),
        "tokenizer": (head.target.tokenizer_sha256, tokenizer_sha256(tokenizer)),
        "chat template": (head.target.template_sha256, template_sha256(tokenizer)),
    }
    faults = [
        f"{name}: the head was trained with {trained[:12]}, found {found[:12]}"
        for name, (trained, found) in pairs.items()
        if trained != found
    ]
    if faults:
        raise UserError(
            f"the head was trained for {head.target.name}, which is not the target given:\n  "
            + "\n  ".join(faults),
            where=folder,
            do="give its own target with --target",
        )


def _load_named(folder: Path, name: str, target: Target) -> NamedHead:
    """A head for a target's device and dtype."""
    head = load_head(
        folder,
        embeddings=target.parts.embeddings.to("cpu", torch.float32),
        dtype=target.dtype,
        device=target.device,
    )
    return NamedHead(name, head, folder)


def _compared(
    knobs: EvalKnobs, taken: set[str], target: Target, tokenizer: Any, monitor: Monitor
) -> Iterator[NamedHead]:
    """The heads of `eval.compare`; one that was made for another target is left out, and named."""
    for source in knobs.compare:
        folder = head_path(source)
        config = load_config(folder)
        try:
            check_fits(config, target, tokenizer, folder)
        except UserError:
            monitor.say(
                f"warning: eval.compare: {source} is left out, it was trained for "
                f"{config.target.name}"
            )
            continue
        name = source if source == REFERENCE else folder.resolve().name
        if name in taken:
            name = str(folder)
        taken.add(name)
        yield _load_named(folder, name, target)


def evaluate(
    target_knobs: TargetKnobs,
    head_folder: Path | None,
    knobs: EvalKnobs,
    out: Path,
    *,
    monitor: Monitor,
    target: Target | None = None,
    head_name: str | None = None,
) -> Report:
    """Evaluates a head and writes report.json, report.html and plots into `out`.

    Args:
        head_folder: None measures plain decoding only.
        target: the loaded target, when there is one already.
        head_name: as rows call it; None: the folder's name.
    """
    target = target or load_target(target_knobs)
    tokenizer = load_tokenizer(target_knobs)
    heads = []
    if head_folder is not None:
        check_fits(load_config(head_folder), target, tokenizer, head_folder)
        name = head_name or head_folder.resolve().name
        heads.append(_load_named(head_folder, name, target))
        heads += _compared(knobs, {name}, target, tokenizer, monitor)
    longest = target.max_length - max(knobs.max_new_tokens, knobs.timing_tokens)
    report = Evaluator(
        target,
        heads,
        load_suite(knobs.suite, tokenizer, monitor, raw=knobs.raw, longest=max(longest, 1)),
        stop_ids(tokenizer, target.folder),
        knobs,
        monitor=monitor,
    ).run()
    report.write(out / "report.json")
    write_html(report, out)
    monitor.say(f"report: {out / 'report.html'}")
    return report


def export(
    head_folder: Path,
    target_knobs: TargetKnobs,
    out: Path,
    layout: str,
    *,
    k: int | None = None,
    dtype: str | None = None,
    monitor: Monitor,
) -> Path:
    """Exports a head to a layout; it is loaded back and compared before this returns."""
    path = find_layout(layout)(
        head_folder,
        resolve_target(target_knobs),
        out,
        target_name=target_knobs.path,
        k=k,
        dtype=dtype,
        monitor=monitor,
    )
    monitor.say(f"export: {path} holds the head in {layout} layout, read back and equal")
    return path


def input_files(knobs: EvalKnobs) -> dict[str, str]:
    """Content hashes of the files an evaluation reads, as they enter its stage's key."""
    suite = suite_sha256(knobs.suite)
    found = {"eval.suite.sha256": suite} if suite else {}
    return found | {
        f"eval.compare.{source}.sha256": sha256_file(head_path(source) / WEIGHTS)
        for source in knobs.compare
    }


@dataclass(frozen=True)
class Subject:
    """A head with its target, for `eval` and `export` on their own.

    Attributes:
        head: head folder. name: as reports call it. target: its target.
        knobs, exports: to start from; a run's are its recipe's.
        folder: where eval/ and export/ go. is_run: whether that is a run folder.
    """

    head: Path
    name: str
    target: TargetKnobs
    knobs: EvalKnobs
    exports: ExportKnobs
    folder: Path
    is_run: bool

    def evaluate(
        self, target: TargetKnobs, knobs: EvalKnobs, out: Path | None, *, monitor: Monitor
    ) -> tuple[Report, Path]:
        """Evaluates into `out` (None: the subject's own eval/); the report and its folder."""
        folder = out or self.folder / "eval"
        booked = flat(knobs, "eval.") | flat(target, "target.") | input_files(knobs)
        monitor.say(f"eval: {self.head}")
        with self._booking("eval", booked, out):
            report = evaluate(
                target, self.head, knobs, folder, monitor=monitor, head_name=self.name
            )
        return report, folder

    def export(self, knobs: ExportKnobs, out: Path | None, *, monitor: Monitor) -> list[Path]:
        """Exports to every layout; one alone goes into `out` itself (None: export/<layout>)."""
        folder = out or self.folder / "export"
        with self._booking("export", flat(knobs, "export."), out):
            return [
                export(
                    self.head,
                    self.target,
                    folder if out and len(knobs.formats) == 1 else folder / layout,
                    layout,
                    k=knobs.k,
                    dtype=knobs.dtype,
                    monitor=monitor,
                )
                for layout in knobs.formats
            ]

    @contextmanager
    def _booking(self, stage: str, knobs: dict[str, Any], out: Path | None) -> Iterator[None]:
        if self.is_run and out is None:
            with making_otherwise(self.folder, STAGES[stage], knobs):
                yield
        else:
            yield


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
                do=f"`draftlab train {folder / 'recipe.yaml'}` finishes it",
            )
        knobs = recipe.target
        if target is not None:
            knobs = knobs.model_copy(update={"path": target})
        return Subject(
            folder / "head", folder.name, knobs, recipe.eval, recipe.export, folder, True
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
    name = path.resolve().name
    return Subject(
        path,
        name,
        TargetKnobs(path=target or EMBEDDED),
        EvalKnobs(),
        ExportKnobs(),
        RUNS / f"eval-{name}",
        False,
    )


def recipe_of(run_folder: Path) -> Recipe:
    """The resolved recipe a run was made with."""
    return load_recipe(run_folder / "recipe.yaml")
