"""Removal of private values from an upload: local paths, addresses, accounts of other services."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from draftlab.evaluate.results import Report
from draftlab.formatting import distinct_name

REMOVED = "(removed by draftlab push)"
PRIVATE_SETTINGS = ("regenerate.server.url", "regenerate.server.model", "train.wandb")
"""Settings of a recipe that name servers and accounts."""
_PATH = re.compile(r"(?<![\w/.~<-])(?:~[\w.-]*)?(?:/[^\s/:;,'\"`<>|(){}\[\]]+){2,}/?")
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
    if value.startswith(("/", "~/")) and "\n" not in value:  # it may contain spaces
        return Path(value).name
    return _PATH.sub(lambda match: Path(match[0]).name, _ADDRESS.sub(REMOVED, value))


def without_private_settings(recipe: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a recipe as it may be published, and the names of the settings that it lacks."""
    recipe, removed = without_private_values(recipe), []
    for name in PRIVATE_SETTINGS:
        *sections, key = name.split(".")
        fields = recipe
        for section in sections:
            fields = fields.get(section) or {}
        if fields.get(key) is not None:
            fields[key] = REMOVED
            removed.append(name)
    return recipe, removed


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
