"""Removal of private values from an upload: local paths, addresses, accounts of other services."""

from __future__ import annotations

import re
from typing import Any

from draftlab.evaluate.results import Report
from draftlab.formatting import distinct_name

REMOVED = "(removed by draftlab push)"
PRIVATE_SETTINGS = ("regenerate.server.url", "regenerate.server.model", "train.wandb")
"""Settings of a recipe that name servers and accounts."""
PATH_SETTINGS = ("prompts.source", "eval.suite", "head.init", "export.calibration")
"""Settings of a recipe that may be paths; folders of a relative one name clients and projects."""
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


def without_private_values(value: Any) -> Any:
    """Return a JSON value, its keys too, with only the last part of paths and no addresses."""
    if isinstance(value, dict):
        keys: set[str] = set()
        return {
            distinct_name([without_private_values(key)], keys): without_private_values(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [without_private_values(item) for item in value]
    if not isinstance(value, str):
        return value
    if _WHOLE_PATH.fullmatch(value):
        return _last_part(value)
    return _PATH.sub(lambda match: _last_part(match[0]), _ADDRESS.sub(REMOVED, value))


def _last_part(path: str) -> str:
    """Return the last part of a path of any system."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def without_private_settings(recipe: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a recipe as it may be published, and the names of the settings that it lacks."""
    recipe, removed = without_private_values(recipe), []
    for name in (*PRIVATE_SETTINGS, *PATH_SETTINGS):
        *sections, key = name.split(".")
        fields = recipe
        for section in sections:
            fields = fields.get(section) or {}
        if fields.get(key) is None:
            continue
        if name in PATH_SETTINGS:
            fields[key] = _without_folders(fields[key])
        else:
            fields[key] = REMOVED
            removed.append(name)
    return recipe, removed


def _without_folders(value: Any) -> Any:
    """Return a path, or several of them, without folders; `spec-bench:` before one stays."""
    if isinstance(value, list):
        return [_without_folders(one) for one in value]
    return re.sub(r"[^:]*[/\\]", "", value) if isinstance(value, str) else value


def publishable_report(report: Report) -> Report:
    """Return a report as it may be published; heads of different names keep different ones."""
    names: set[str] = set()
    renamed = {
        head: distinct_name([without_private_values(head)], names)
        for head in dict.fromkeys(row.head for row in report.rows if row.head)
    }
    values = _renamed(report.model_dump(mode="json", by_alias=True), renamed)
    return Report.model_validate(without_private_values(values))


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """Return a JSON value with other texts for some of its texts and keys."""
    if isinstance(value, dict):
        return {names.get(key, key): _renamed(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value
