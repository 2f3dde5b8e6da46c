"""Find what a user names or leaves out: a head, its target, and defaults of its family."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from shlex import quote

from draftlab.errors import UserError
from draftlab.export.layout import Layout
from draftlab.files import read_json
from draftlab.formatting import distinct_name
from draftlab.heads.family import get_family
from draftlab.heads.folder import CONFIG, NATIVE, load_config
from draftlab.progress import Monitor
from draftlab.recipe.recipe import RECIPE, Recipe, load_recipe
from draftlab.run.folder import RUNS
from draftlab.run.stages import STAGES, read_record, record_path
from draftlab.target_model.locate import check_named, resolve_target
from draftlab.target_model.settings import EMBEDDED, TargetSettings

REFERENCE = "reference"
HOW_TO_NAME_A_HEAD = 'give a head folder, a run (its name or its folder), or "reference"'


def reference_head() -> Path:
    """Return the folder of the head for the embedded target that ships in the package."""
    return Path(str(resources.files("draftlab") / "embedded" / "heads" / REFERENCE))


def find_head(name: str | Path, *, any_layout: bool = False) -> Path:
    """Return the folder of a head: "reference", the head of a run (by path or name), or a folder.

    With `any_layout` also of heads in other programs' layouts and with damaged files. Raises a
    `UserError` without a head, or if draftlab.json is not a head's.
    """
    path = Path(name).expanduser()
    if str(name) == REFERENCE and not path.exists():
        return reference_head()
    if not path.exists() and (RUNS / name).is_dir():
        path = RUNS / name
    if (path / "head" / CONFIG).is_file() or (any_layout and any((path / "head").glob("*"))):
        path = path / "head"
    elif not path.is_dir():
        raise UserError(
            f"expected a head folder, found {'a file' if path.exists() else 'none'}",
            where=name,
            do=HOW_TO_NAME_A_HEAD,
        )
    elif (recipe := path / RECIPE).is_file() and not (path / NATIVE).is_file():
        # A pushed head has a recipe beside its config.json.
        raise UserError(
            "expected the run to have a trained head, found none",
            where=path,
            do=f"`draftlab train {quote(str(recipe))}` trains it",
        )
    if not any(path.glob("*.safetensors")) and not any(
        (path / file).is_file() for file in (CONFIG, NATIVE)
    ):
        raise UserError(
            "expected a head folder, found one with neither a config nor safetensors",
            where=name,
            do=HOW_TO_NAME_A_HEAD,
        )
    if not any_layout:
        load_config(path)
    return path


def run_of(folder: Path) -> Path | None:
    """Return the run folder that holds a head folder or an export; None: it belongs to no run."""
    for parent in folder.resolve().parents[:2]:  # runs/NAME/head and runs/NAME/export/LAYOUT
        if (parent / RECIPE).is_file() and (parent / "stages").is_dir():
            return parent
    return None


def recipe_of(run_folder: Path) -> Recipe:
    """Return the resolved recipe of a run, which lets no code of a target run."""
    return load_recipe(run_folder / RECIPE)


def name_in_reports(folder: Path, others: set[str] | None = None) -> str:
    """Return a head's name in reports: that of its run or of its folder.

    Args:
        others: names of other heads, to which this one is added. If the name is among them, the
            parent folder's is put before it ("runs/mine"), then a number behind it.
    """
    folder = folder.resolve()
    folder = folder.parent if folder.name == "head" else folder
    names = [folder.name, f"{folder.parent.name}/{folder.name}"]
    return distinct_name(names, set() if others is None else others)


def find_target(
    head: Path,
    name: str | None,
    device: str | None = None,
    *,
    trust_remote_code: bool = False,
    monitor: Monitor | None = None,
) -> TargetSettings:
    """Return the settings of the named target.

    By default it is that of the run to which the head belongs, or the embedded one, if the head is
    for it; else a `UserError` asks for it. Only code that comes with a named target may run.
    """
    check_named(name, trust_remote_code)
    settings, source = TargetSettings(path=name or EMBEDDED), "--target"
    if name is None and (run := run_of(head)) is not None:
        settings, source = recipe_of(run).target, str(run / RECIPE)
    elif name is None:
        trained_for, source = _target_name(head), str(head)
        embedded = resolve_target(TargetSettings(path=EMBEDDED))
        if trained_for != EMBEDDED and Path(trained_for or "").resolve() != embedded.resolve():
            raise UserError(
                "expected --target with the head"
                + (f", which was trained for {trained_for!r}" if trained_for else ""),
                where=head,
                do='give a folder, a GGUF file, a Hub id such as "org/name", or "embedded"',
            )
    say_target(settings, source, monitor)
    fields = {"trust_remote_code": trust_remote_code} | ({"device": device} if device else {})
    return settings.model_copy(update=fields)


def say_target(settings: TargetSettings, source: str, monitor: Monitor | None) -> None:
    """Report which target a verb takes, and the file or option that names it."""
    if monitor is not None:
        monitor.say(f"target: {settings.path}, from {source}")


def _target_name(head: Path) -> str | None:
    """Return the target that a head's config names, even if the config has other faults."""
    is_head_folder = (head / CONFIG).is_file()
    path = (
        ("target", "name") if is_head_folder else ("speculators_config", "verifier", "name_or_path")
    )
    try:
        value = read_json(head / (CONFIG if is_head_folder else NATIVE))
    except UserError:
        return None
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


NORM_BEFORE_RESIDUAL = "head.norm_before_residual"


def with_family_defaults(recipe: Recipe, folder: Path) -> tuple[Recipe, str]:
    """Return a recipe with `head.norm_before_residual`, and a sentence on why, or "".

    A head whose training has begun in the run folder keeps its value. Raises a `UserError` if the
    recipe leaves the setting out and `head.init` names no head.
    """
    if recipe.head.norm_before_residual is not None:
        return recipe, ""
    value, why = _norm_before_residual(recipe, folder)
    head = recipe.head.model_copy(update={"norm_before_residual": value})
    said = why and f"{NORM_BEFORE_RESIDUAL}: {str(value).lower()}, {why}"
    return recipe.model_copy(update={"head": head}), said


def _norm_before_residual(recipe: Recipe, folder: Path) -> tuple[bool, str]:
    """Return the default of `head.norm_before_residual`, and the rest of a sentence on why."""
    family = get_family(recipe.head.family)
    if "norm_before_residual" not in family.options:
        return False, ""
    if recipe.head.init is not None:
        options = load_config(find_head(recipe.head.init)).options()
        return options.get("norm_before_residual", False), "as in head.init"
    if not family.norms_residual:
        return False, ""
    path = record_path(folder, STAGES["head"])
    inputs = read_record(path)["inputs"] if path.exists() else {}
    if inputs.get("head.family") == family.name and NORM_BEFORE_RESIDUAL in inputs:
        return inputs[NORM_BEFORE_RESIDUAL], "as this run's training began"
    for program in recipe.export.formats:
        layout = family.layouts().get(program)
        if isinstance(layout, Layout) and not layout.reads_norm_before_residual:
            return False, (
                f"which {program} needs (export.formats); true, the default without {program}, "
                "raised AL from 1.54 to 1.71 in a small training"
            )
    return True, "which raises AL and which SGLang cannot serve"
