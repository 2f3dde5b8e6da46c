"""Programs of eval/ and data_prep/ as modules; they are beside the package, not part of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation

EVAL = Path(__file__).resolve().parents[2] / "eval"


def load(name: str) -> ModuleType:
    """Return a program as a module; its folder joins sys.path, as if the program ran.

    Args:
        name: eval/`name`.py, or data_prep/….
    """
    path = (EVAL.parent if name.startswith("data_prep/") else EVAL) / f"{name}.py"
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return importlib.import_module(path.stem)


def decoded(name: str, steps: tuple[int, ...], *, finish: str = "length") -> Generation:
    """Return an answer of steps of 3 drafts, with so many accepted; its tokens are 10, 11, …."""
    counters = Counters(3)
    for accepted in steps:
        counters.add_step(3, accepted)
    tokens = tuple(range(10, 11 + len(steps) + sum(steps)))
    drafted = tuple((3, accepted) for accepted in steps)
    return Generation(name, tokens, finish, counters, (), drafted, 0.1, 0.2)
