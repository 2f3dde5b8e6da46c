"""Heads in other programs' layouts. An export renames, fills and casts; it never computes.

The names below are imported on first use, so that settings can be read without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "ExportSettings": "settings",
    "write_export": "write",
    "layout_for": "layout",
    "verify_export": "write",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'draftlab.export' has no attribute {name!r}")
    return getattr(import_module(f"draftlab.export.{_MODULES[name]}"), name)
