"""Versions of installed packages."""

from __future__ import annotations

from importlib import metadata

NOT_INSTALLED = "(not installed)"


def package_version(name: str = "draftlab") -> str:
    """Return the version of a package, or "(not installed)" for a source tree on PYTHONPATH."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED
