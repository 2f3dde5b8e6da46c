"""Removal of private values from an upload: local paths, addresses, accounts of other services."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from draftlab.evaluate.results import Report
from draftlab.formatting import distinct_name
from draftlab.target_model.locate import is_hub_id

REMOVED = "(removed by draftlab push)"
PRIVATE_SETTINGS = ("regenerate.server.url", "regenerate.server.model", "train.wandb")
"""Settings of a recipe that name servers and accounts."""
PATH_SETTINGS = ("prompts.source", "eval.suite", "eval.compare", "head.init", "export.calibration")
"""Settings of a recipe, beside the target's path, that may be paths; folders of a relative one name
clients and projects."""
Paths: TypeAlias = tuple[re.Pattern[str], ...]
_PART = r"[^\s/\\:;,'\"`<>|(){}\[\]]+"
_PATH = re.compile(
    # absolute, also behind an option such as -I; a single part, such as /s, is a unit
    rf"(?:(?<![\w/.~<-])|(?<=[\s'\"=,]-[A-Za-z])|(?<=\A-[A-Za-z]))(?:~[\w.-]*)?(?:/{_PART}){{2,}}/?"
    rf"|(?<=[\w-])/(?:home|Users|root)(?:/{_PART})+/?"
    # relative, from this folder or one above it
    rf"|(?<![\w/.\\])(?:\.\.?[/\\]+)+{_PART}(?:[/\\]+{_PART})*[/\\]*"
    # of Windows: a drive's or a server's, whose backslashes may be doubled
    rf"|(?:(?<![A-Za-z0-9])|(?<=-[A-Za-z]))[A-Za-z]:[/\\]+{_PART}(?:[/\\]+{_PART})*[/\\]*"
    rf"|(?<![\w\\])\\\\{_PART}(?:\\+{_PART})+\\*"
)
_WHOLE_PATH = re.compile(r"(?:/|~/|\.\.?[/\\]|[A-Za-z]:[/\\]|\\\\)[^\n]*")
"""A value that is a path, which may contain spaces."""
_ADDRESS = re.compile(r"\b[A-Za-z][\w+.-]*://[^\s'\"`<>]+")


def relative_paths(recipe: dict[str, Any], suites: Iterable[str], targets: Iterable[str]) -> Paths:
    """Return the paths below the current folder that an upload would name: in a run's recipe, as
    sources of prompts, or as targets that are no Hub ids.
    """
    values = [target for target in targets if not is_hub_id(target)]
    values += suites
    for name in PATH_SETTINGS:
        section, key = name.split(".")
        value = (recipe.get(section) or {}).get(key)
        values += value if isinstance(value, list) else [value or ""]
    paths = {value.rpartition(":")[2] for value in values if "://" not in value}  # spec-bench:PATH
    return tuple(
        re.compile(rf"(?<![\w./\\-]){re.escape(path)}(?![\w-])")
        for path in sorted(paths, key=len, reverse=True)
        if "/" in path
    )


def without_private_values(value: Any, paths: Paths = ()) -> Any:
    """Return a JSON value, its keys too, with only the last part of paths and no addresses.

    `paths` are relative ones, which look like Hub ids (see `relative_paths`).
    """

    def public(text: str) -> str:
        if _WHOLE_PATH.fullmatch(text):
            return _last_part(text)
        text = _ADDRESS.sub(REMOVED, text)
        for path in (*paths, _PATH):
            text = path.sub(lambda match: _last_part(match[0]), text)
        return text

    return _changed(value, public)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value whose texts and keys are changed; equal keys get numbers."""
    if isinstance(value, dict):
        keys: set[str] = set()
        return {
            distinct_name([change(key)], keys): _changed(item, change)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _last_part(path: str) -> str:
    """Return the last part of a path of any system."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def without_private_settings(
    recipe: dict[str, Any], paths: Paths
) -> tuple[dict[str, Any], list[str]]:
    """Return a recipe as it may be published, and the names of the settings that it lacks."""
    recipe, removed = without_private_values(recipe, paths), []
    for name in PRIVATE_SETTINGS:
        *sections, key = name.split(".")
        fields = recipe
        for section in sections:
            fields = fields.get(section) or {}
        if fields.get(key) is not None:
            fields[key] = REMOVED
            removed.append(name)
    return recipe, removed


def publishable_report(report: Report, paths: Paths) -> Report:
    """Return a report as it may be published; heads of different names keep different ones."""
    names: set[str] = set()
    renamed = {
        head: distinct_name([_last_part(head)], names)
        for head in dict.fromkeys(row.head for row in report.rows if row.head)
    }
    values = report.model_dump(mode="json", by_alias=True)
    values = _changed(values, lambda text: renamed.get(text, text))
    return Report.model_validate(without_private_values(values, paths))
