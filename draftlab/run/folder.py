"""The run folder: its lock, its recipe, what may be in it, and `runs/latest`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftlab.errors import UserError
from draftlab.files import check_folder, only_user, remove_leftovers, write_text
from draftlab.recipe.recipe import LATEST
from draftlab.run.stages import STAGES

RUNS = Path("runs")


def write_recipe(folder: Path, recipe: str) -> str | None:
    """Write recipe.yaml and point runs/latest at this run, where they differ; return a remark
    if runs/latest is no link, which stays as it is.
    """
    path, link = folder / "recipe.yaml", folder.parent / LATEST
    if not path.exists() or path.read_text(encoding="utf-8") != recipe:
        write_text(path, recipe)
    if link.exists() and not link.is_symlink():
        return f"{link} is not a link and stays: name the run for later commands"
    if not (link.is_symlink() and os.readlink(link) == folder.name):
        remove_leftovers(link.parent, f".{LATEST}.*")
        temporary = link.with_name(f".{LATEST}.{os.getpid()}.tmp")
        temporary.symlink_to(folder.name)
        os.replace(temporary, link)
    return None


def check_links(folder: Path) -> None:
    """Raise a `UserError` if a run folder has links, through which a stranger's run would write
    elsewhere.

    Only the store may be one, since it is often on another disk.
    """
    store = folder / STAGES["store"].artefact
    own_links = (store, folder / "train" / "wandb")  # wandb links to its latest run
    for root, folders, files in os.walk(folder):
        for path in (Path(root) / name for name in sorted(folders + files)):
            if path.is_symlink() and path != store:
                raise UserError(
                    f"expected no links in a run folder, found one to {os.readlink(path)}",
                    where=path,
                    do="put what it leads to in its place, if it belongs to the run, or remove it",
                )
        folders[:] = [name for name in folders if Path(root) / name not in own_links]


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock a run folder against other processes; raise a `UserError` if one holds the lock, or the
    folder has links (see `check_links`).
    """
    check_folder(folder)
    check_links(folder)
    folder.mkdir(parents=True, exist_ok=True)
    what = "another draftlab process is working in this run"
    with only_user(folder, what, "wait until it has finished, or start a run with another name"):
        for name in (".", "stages", "train", *(stage.artefact for stage in STAGES.values())):
            if name != STAGES["store"].artefact:  # which `record` looks after
                remove_leftovers(folder / name)
        yield


def find_run(name: str | None) -> Path:
    """Return the folder of a run by name or path (None: of the latest run); raise a `UserError`
    without.
    """
    candidates = [RUNS / LATEST] if name is None else [Path(name), RUNS / name]
    for folder in candidates:
        if (folder / "recipe.yaml").is_file():
            return folder.resolve()
    found = "none" if name is None else f"none named {name!r}"
    if name is not None and (there := [folder for folder in candidates if folder.exists()]):
        found = "a folder without recipe.yaml" if there[0].is_dir() else "a file"
    names = sorted({path.parent.name for path in RUNS.glob("*/recipe.yaml")} - {LATEST})
    raise UserError(
        "there is no run yet" if name is None else f"expected a run, found {found}",
        where=name or RUNS,
        do=f"the runs here are: {', '.join(names)}"
        if names
        else "`draftlab train recipes/quickstart.yaml` makes one",
    )
