"""A head in other programs' layouts. An export renames, fills and casts; it never computes.

What is here is imported when it is first asked for: settings are read before torch is.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "ExportSettings": "settings",
    "write_export": "write",
    "layout_for": "layouts",
    "verify_export": "write",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'draftlab.export' has no attribute {name!r}")
    return getattr(import_module(f"draftlab.export.{_WHERE[name]}"), name)
