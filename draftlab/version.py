"""Versions of draftlab and of the packages it uses."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

NOT_INSTALLED = "(not installed)"


def package_version(name: str = "draftlab") -> str:
    """Return the version of a package, or "(not installed)" for a source tree on PYTHONPATH."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


def git_commit() -> str | None:
    """Return the commit of draftlab's own working tree; None if there is none."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():  # a repository further up belongs to another project
        return None
    try:
        result = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
