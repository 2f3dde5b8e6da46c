"""Which head and which target a command line names."""

from __future__ import annotations

from pathlib import Path

from draftlab.base import UserError, read_json
from draftlab.heads.folder import CONFIG, NATIVE
from draftlab.run import RUNS
from draftlab.target.model import EMBEDDED, TargetKnobs
from draftlab.verbs import REFERENCE, reference_head


def find_head(named: str) -> Path:
    """A head folder: "reference", that of a run (by path or name), or the folder itself, whatever
    state it is in."""
    path = Path(named).expanduser()
    if named == REFERENCE and not path.exists():
        return reference_head()
    if not path.exists() and (RUNS / named).is_dir():
        path = RUNS / named
    return path / "head" if (path / "head" / CONFIG).is_file() else path


def find_target(
    head: Path, named: str | None, device: str | None, *, trust_remote_code: bool = False
) -> TargetKnobs:
    """The target asked for, or the one that comes with draftlab where the head says so.

    Raises:
        UserError: none was named, and the head is for another than the embedded one.
    """
    if named is None:
        trained_for = _trained_for(head)
        if trained_for != EMBEDDED:
            raise UserError(
                "expected --target beside the head"
                + (f" (it was trained for {trained_for})" if trained_for else ""),
                where=head,
                do='give a folder, a Hub id such as "org/name", or "embedded"',
            )
        named = EMBEDDED
    asked = {"path": named, "trust_remote_code": trust_remote_code}
    return TargetKnobs(**asked | ({"device": device} if device else {}))


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
