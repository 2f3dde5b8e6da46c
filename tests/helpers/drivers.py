"""Programs of eval/ as modules; they are beside the package, not part of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

EVAL = Path(__file__).resolve().parents[2] / "eval"


def load(name: str) -> ModuleType:
    """Return eval/`name`.py as a module; its folder joins sys.path, as if the program ran."""
    path = EVAL / f"{name}.py"
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return importlib.import_module(path.stem)
