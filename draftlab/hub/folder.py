"""The folder that a push uploads: an export, its card, report and recipe; no paths of a machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftlab.errors import UserError
from draftlab.evaluate.results import Report, Row
from draftlab.export import ExportSettings, write_export
from draftlab.export.destination import whole_folder
from draftlab.export.launch_text import is_hub_id
from draftlab.export.layouts import layout_for
from draftlab.files import read_json, write_json, write_text
from draftlab.formatting import plain_values
from draftlab.heads.folder import CONFIG, NATIVE, load_config
from draftlab.hub.card import CardFacts, model_card, own_rows
from draftlab.hub.names import check_repo
from draftlab.pipeline.head_workspace import HeadWorkspace
from draftlab.progress import Monitor
from draftlab.target_model.locate import resolve_target

README, LAUNCH, RECIPE, REPORT = "README.md", "launch.md", "recipe.yaml", "report.json"
HEAD = "head.json"
"""draftlab.json under another name: beside another program's files it would say that the folder is
a head folder of draftlab's, which it is not (`draftlab import` reads it)."""


@dataclass(frozen=True)
class Push:
    """What is pushed, and what its card says that no file does.

    Attributes:
        repo: "org/name".
        exports: the layout of the files at the root (one), and how they are written.
        base_model: the target's Hub id; None: the target's own name, where that is one.
        licence: as the Hub names licences ("apache-2.0").
    """

    repo: str
    exports: ExportSettings
    base_model: str | None = None
    licence: str | None = None


def write_folder(subject: HeadWorkspace, push: Push, place: Path, monitor: Monitor) -> Path:
    """Writes the exact folder that is uploaded; an earlier one is replaced whole.

    Raises:
        UserError: a run without a report, a head that the layout cannot hold, a folder that holds
            something else.
    """
    place = place.expanduser().resolve()
    if place.exists() and (not place.is_dir() or _foreign(place)):
        raise UserError(
            "the folder holds what no push wrote", where=place, do="name another with --out"
        )
    report, rows = _report(subject)
    if push.base_model is not None:
        check_repo(push.base_model, "--base-model")
    base = push.base_model or (subject.target.path if is_hub_id(subject.target.path) else None)
    if base is None:
        monitor.say(
            "warning: push: the target is no model of the Hub, so the card names no base_model and "
            "a server must be told the target: --base-model ORG/NAME names it"
        )
    if push.licence is None:
        monitor.say("warning: push: the card states no licence: --license apache-2.0, say")
    head = load_config(subject.head)
    layout = layout_for(push.exports.formats[0], head.family)
    with whole_folder(place) as folder:
        _export(subject, push, base, folder, monitor)
        launch = (folder / LAUNCH).read_text(encoding="utf-8")
        recipe = yaml.safe_dump(
            pathless(_recipe(subject)), sort_keys=False, allow_unicode=True, width=100
        )
        plots = sorted(file.name for file in (subject.folder / "eval").glob("*.png"))
        for name in plots:
            (folder / name).write_bytes((subject.folder / "eval" / name).read_bytes())
        write_text(folder / RECIPE, recipe)
        write_json(folder / REPORT, pathless(read_json(subject.folder / "eval" / REPORT)))
        write_json(folder / HEAD, pathless(read_json(subject.head / CONFIG)))
        facts = CardFacts(
            push.repo,
            head,
            report.model_copy(update={"target": pathless(report.target)}),
            rows,
            layout.title(),
            launch,
            recipe,
            base,
            push.licence,
            _data(subject),
            plots,
        )
        write_text(folder / README, model_card(facts))
    return place


def _foreign(place: Path) -> bool:
    """Whether a folder holds something, and no push of ours."""
    there = [path.name for path in place.iterdir()]
    return bool(there) and not {README, HEAD, REPORT} <= set(there)


def _report(subject: HeadWorkspace) -> tuple[Report, list[Row]]:
    path = subject.folder / "eval" / REPORT
    evaluate = f"`draftlab eval --run {subject.folder.name}` measures it"
    if not path.is_file():
        raise UserError("expected the run to have a report, found none", where=path, do=evaluate)
    report = Report.read(path)
    rows = own_rows(report, subject.name)
    if not any(row.head == subject.name for row in rows):
        raise UserError(
            f"expected rows of {subject.name} in the report, found none", where=path, do=evaluate
        )
    if path.stat().st_mtime < (subject.head / CONFIG).stat().st_mtime:
        raise UserError(
            "the report is older than the head: its figures are another head's",
            where=path,
            do=evaluate,
        )
    return report, rows


def _export(
    subject: HeadWorkspace, push: Push, base: str | None, folder: Path, monitor: Monitor
) -> None:
    """The export's files, read back and compared where they are made, then moved to the root."""
    made = write_export(
        subject.head,
        resolve_target(subject.target),
        folder / "export",
        push.exports.formats[0],
        target_name=base or subject.target.path,
        k=push.exports.k,
        dtype=push.exports.dtype,
        max_shard=push.exports.max_shard,
        monitor=monitor,
        trust_remote_code=subject.target.trust_remote_code,
    )
    for file in made.iterdir():
        file.rename(folder / file.name)
    made.rmdir()
    launch = (folder / LAUNCH).read_text(encoding="utf-8")
    launch = launch.replace(str(made.resolve()), push.repo)
    if base is None:
        launch = launch.replace(str(resolve_target(subject.target).resolve()), "TARGET")
    write_text(folder / LAUNCH, launch)
    # Compared with the head where it was made; elsewhere this machine's folders mean nothing.
    write_json(folder / NATIVE, pathless(read_json(folder / NATIVE)))


def _recipe(subject: HeadWorkspace) -> Any:
    return yaml.safe_load((subject.folder / RECIPE).read_text(encoding="utf-8"))


def _data(subject: HeadWorkspace) -> list[tuple[str, str]]:
    """Where the training data came from, and how much of it there was."""
    recipe = pathless(_recipe(subject))
    prompts, regenerate = recipe.get("prompts", {}), recipe.get("regenerate", {})
    rows = [("prompts", str(prompts.get("source")))]
    if regenerate.get("enabled", True):
        heat = ", ".join(f"{t:g}" for t in regenerate.get("temperatures", []))
        rows.append(("answers", f"the target's own, at temperatures {heat}"))
    else:
        rows.append(("answers", "given with the prompts"))
    return rows + plain_values(load_config(subject.head).provenance)


def pathless(value: Any) -> Any:
    """A JSON value in which absolute paths are their last part: whose machine it was is private."""
    if isinstance(value, dict):
        return {key: pathless(item) for key, item in value.items()}
    if isinstance(value, list):
        return [pathless(item) for item in value]
    if isinstance(value, str) and Path(value).expanduser().is_absolute() and "\n" not in value:
        return Path(value).name
    return value
