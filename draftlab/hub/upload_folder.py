"""The folder that a push uploads: an export with its model card, report and recipe.

`privacy.py` removes paths, addresses and accounts from its files.
"""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from draftlab.errors import UserError
from draftlab.evaluate.results import Report
from draftlab.export.launch import cached_target_text
from draftlab.export.layout import layout_for
from draftlab.export.serving_tables import CALIBRATION, STS
from draftlab.export.settings import ExportSettings
from draftlab.export.weight_files import DELTA
from draftlab.export.write import check_destination, write_export
from draftlab.files import atomic_folder, known_sha256, read_json, write_json, write_text
from draftlab.formatting import plain_values
from draftlab.heads.folder import CONFIG, NATIVE, WEIGHTS, load_config
from draftlab.hub.card import model_card
from draftlab.hub.privacy import (
    publishable_report,
    relative_paths,
    without_private_settings,
    without_private_values,
)
from draftlab.hub.upload import check_repo_id
from draftlab.progress import Monitor
from draftlab.recipe.recipe import RECIPE, read_yaml
from draftlab.report.conditions import description
from draftlab.report.html import is_plot, write_plots
from draftlab.report.sections import of_head, sections
from draftlab.run.folder import check_links
from draftlab.run.head_workspace import HeadWorkspace
from draftlab.target_model.locate import is_hub_id, resolve_target

README, LAUNCH, REPORT = "README.md", "launch.md", "report.json"
HEAD = "head.json"
"""The name of draftlab.json in the upload. Under its own name it would mark the folder as a head
folder, but the folder is an export (which `draftlab import` reads)."""


def write_upload_folder(
    workspace: HeadWorkspace,
    repo: str,
    exports: ExportSettings,
    path: Path,
    monitor: Monitor,
    *,
    base_model: str | None = None,
    licence: str | None = None,
) -> Path:
    """Write the folder that is uploaded, replace an earlier one, and return its path.

    Args:
        repo: the repository's id, "org/name".
        exports: the layout of the files (one), and how they are written.
        base_model: the target's Hub id; None: the recipe's target, if that is a Hub id.
        licence: the licence's id on the Hub, such as "apache-2.0".

    Raises:
        UserError: the run has no report, the layout does not support the head, the folder has
            other content, or that of the run has links.
    """
    check_links(workspace.folder)
    path = path.expanduser().resolve()
    plots = {file.name for file in path.glob("*.png") if is_plot(file)} if path.is_dir() else set()
    check_destination(path, "earlier push", {RECIPE, REPORT, HEAD, *plots})
    (report, name), head = _read_report(workspace), load_config(workspace.head)
    target, recipe = workspace.target.path, read_yaml(workspace.folder / RECIPE)
    targets = (target, str(report.target.get("name")), head.target.name)
    paths = relative_paths(recipe, (row.suite for row in report.rows), targets)
    report = publishable_report(report, paths)
    if base_model is not None:
        check_repo_id(base_model, "--base-model")
        if not is_hub_id(base_model):
            raise UserError(
                f"expected the target's id on the Hub, found a folder here: {base_model}",
                where="--base-model",
                do="if the Hub has a model of this name, push from another folder: draftlab push "
                f"{quote(str(workspace.folder))} {repo} …",
            )
    base_model = base_model or (target if is_hub_id(target) else None)
    if base_model is None:
        monitor.say(
            "warning: push: the target is not a model on the Hub, so the card has no base_model "
            "and the serving commands name no target: give --base-model ORG/NAME"
        )
    if licence is None:
        monitor.say("warning: push: the card states no licence: give --license, as apache-2.0")
    layout = layout_for(exports.formats[0], head.family)
    recipe, removed = without_private_settings(recipe, paths)
    if removed:
        monitor.say(f"push: the recipe's values of {', '.join(removed)} are private: removed")
    recipe_text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100)
    with atomic_folder(path) as folder:
        launch = _export(workspace, repo, exports, base_model, folder, monitor)
        own = of_head(report, name)
        shown = sections(own, figures=True)
        write_plots(shown, folder, description(own))
        write_text(folder / RECIPE, recipe_text)
        report.write(folder / REPORT)
        # The export has been compared with the head, and so may lose private values.
        for name in (NATIVE, CALIBRATION, STS, HEAD):
            file = workspace.head / CONFIG if name == HEAD else folder / name
            if file.exists():
                write_json(folder / name, without_private_values(read_json(file), paths))
        card = model_card(
            repo,
            head,
            own,
            shown,
            base_model=base_model,
            licence=licence,
            launch=launch,
            layout=layout.title,
            recipe=recipe_text,
            removed=removed,
            data=_training_data(recipe)
            + plain_values(without_private_values(head.provenance, paths)),
        )
        write_text(folder / README, card)
    return path


def _read_report(workspace: HeadWorkspace) -> tuple[Report, str]:
    """Return the run's report, and the name of this head in it: that of its run at the time."""
    path = workspace.folder / "eval" / REPORT
    evaluate = f"run `draftlab eval --run {quote(workspace.folder.name)}`"
    if not path.is_file():
        raise UserError("expected the run to have a report, found none", where=path, do=evaluate)
    report = Report.read(path)
    names = report.heads_with(known_sha256(workspace.head / WEIGHTS))
    if (name := next((row.head for row in report.rows if row.head in names), None)) is None:
        raise UserError(
            "expected a report of this head, found one of a head with other weights",
            where=path,
            do=evaluate,
        )
    return report, name


def _export(
    workspace: HeadWorkspace,
    repo: str,
    exports: ExportSettings,
    base_model: str | None,
    folder: Path,
    monitor: Monitor,
) -> str:
    """Write and verify the export, move its files into `folder`, and return launch.md."""
    target = resolve_target(workspace.target)
    export = write_export(
        workspace.head,
        target,
        folder / "export",
        exports.formats[0],
        target_name=base_model or workspace.target.path,
        settings=exports,
        report=workspace.folder / "eval" / REPORT,
        monitor=monitor,
        trust_remote_code=workspace.target.trust_remote_code,
    )
    for file in export.iterdir():
        file.rename(folder / file.name)
    export.rmdir()
    launch = (folder / LAUNCH).read_text(encoding="utf-8")
    launch = launch.replace(str(export.resolve()), repo)
    if (folder / DELTA).is_file():  # which vLLM does not fetch
        launch += f"\nFirst fetch this repository: `hf download {repo} --local-dir {repo}`.\n"
    if base_model is None:
        path = str(target.resolve())
        here = cached_target_text(path, load_config(workspace.head).target.name)
        launch = launch.replace(here, "")
        file = str(Path(workspace.target.path).expanduser().resolve())
        if file.endswith(".gguf"):  # llama.cpp's command names it beside the folder
            launch = launch.replace(quote(file), "TARGET.gguf")
        launch = launch.replace(quote(path), "TARGET")
        also = ", and TARGET.gguf for its file" * ("TARGET.gguf" in launch)
        launch += f"\nTARGET stands for the folder of the target{also}, which is not on the Hub.\n"
    write_text(folder / LAUNCH, launch)
    return launch


def _training_data(recipe: dict[str, Any]) -> list[tuple[str, str]]:
    """Return where the training data came from, as (name, value)."""
    prompts, regenerate = recipe.get("prompts", {}), recipe.get("regenerate", {})
    answers = "given with the prompts"
    if regenerate.get("enabled", True):
        temperatures = ", ".join(f"{t:g}" for t in regenerate.get("temperatures", []))
        answers = f"the target's own, at temperatures {temperatures}"
    return [("prompts", str(prompts.get("source"))), ("answers", answers)]
