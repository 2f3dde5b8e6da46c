"""Which head and which target a command line names."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from draftlab.errors import UserError
from draftlab.files import read_json
from draftlab.heads.folder import CONFIG, NATIVE
from draftlab.pipeline.api import REFERENCE, reference_head
from draftlab.pipeline.run_folder import RUNS
from draftlab.target_model.locate import resolve_target
from draftlab.target_model.settings import EMBEDDED, TargetSettings

GIVE = 'give a head folder, a run (its name, or its folder), or "reference"'


def find_head(named: str) -> Path:
    """A head folder: "reference", that of a run (by path or name), or the folder itself, whatever
    state it is in.

    Raises:
        UserError: there is none, or a run that has no head yet.
    """
    path = Path(named).expanduser()
    if named == REFERENCE and not path.exists():
        return reference_head()
    if not path.exists() and (RUNS / named).is_dir():
        path = RUNS / named
    if (path / "head" / CONFIG).is_file():
        return path / "head"
    if not path.is_dir():
        raise UserError(
            f"expected a head's folder, found {'a file' if path.exists() else 'none'}",
            where=named,
            do=GIVE,
        )
    recipe = path / "recipe.yaml"
    if recipe.is_file() and not (path / NATIVE).is_file():  # a pushed head ships its recipe
        raise UserError(
            "expected the run to have a trained head, found none",
            where=path,
            do=f"`draftlab train {quote(str(recipe))}` makes it",
        )
    configs = (path / CONFIG, path / NATIVE)
    if not any(path.glob("*.safetensors")) and not any(file.is_file() for file in configs):
        raise UserError(
            "expected a head's folder, found one with neither a config nor safetensors",
            where=named,
            do=GIVE,
        )
    return path


def find_target(
    head: Path, named: str | None, device: str | None, *, trust_remote_code: bool = False
) -> TargetSettings:
    """The target asked for, or the one that comes with draftlab where the head says so.

    Raises:
        UserError: none was named, and the head is for another than the embedded one.
    """
    if named is None:
        trained_for = _trained_for(head)
        embedded = resolve_target(TargetSettings(path=EMBEDDED))
        if trained_for != EMBEDDED and Path(trained_for or "").resolve() != embedded.resolve():
            raise UserError(
                "expected --target beside the head"
                + (f" (it was trained for {trained_for})" if trained_for else ""),
                where=head,
                do='give a folder, a Hub id such as "org/name", or "embedded"',
            )
        named = EMBEDDED
    asked = {"path": named, "trust_remote_code": trust_remote_code}
    return TargetSettings(**asked | ({"device": device} if device else {}))


def _trained_for(head: Path) -> str | None:
    """The target's name in a config, which may be broken in every other way."""
    own = (head / CONFIG).is_file()
    path = ("target", "name") if own else ("speculators_config", "verifier", "name_or_path")
    try:
        found = read_json(head / (CONFIG if own else NATIVE))
    except UserError:
        return None
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, str) else None
