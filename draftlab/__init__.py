"""draftlab: train, evaluate and export draft heads for speculative decoding.

The verbs of the command line are functions here (imported when first used, so that
`import draftlab` stays light)::

    from draftlab import Pipeline, load_recipe
    pipeline = Pipeline(load_recipe(Path("recipes/quickstart.yaml")), Monitor())
    pipeline.make("export")
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "Pipeline": "draftlab.pipeline",
    "evaluate": "draftlab.pipeline",
    "export": "draftlab.pipeline",
    "find_run": "draftlab.pipeline",
    "Recipe": "draftlab.recipe",
    "load_recipe": "draftlab.recipe",
    "Report": "draftlab.results",
    "Monitor": "draftlab.base",
    "UserError": "draftlab.base",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'draftlab' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
