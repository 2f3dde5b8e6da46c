"""draftlab: train, evaluate and export draft heads for speculative decoding.

The Python API. Names are imported when they are first used, so that `import draftlab` is fast::

    from draftlab import Monitor, Pipeline, evaluate_head, export_head, load_recipe
    pipeline = Pipeline(load_recipe(Path("recipes/quickstart.yaml")), Monitor())
    head = pipeline.make("head")
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Name → module and attribute.
_EXPORTS = {
    "Monitor": ("draftlab.progress", "Monitor"),
    "Pipeline": ("draftlab.pipeline.pipeline", "Pipeline"),
    "Recipe": ("draftlab.recipe.recipe", "Recipe"),
    "Report": ("draftlab.evaluate.results", "Report"),
    "UserError": ("draftlab.errors", "UserError"),
    "evaluate_head": ("draftlab.run.api", "evaluate_head"),
    "export_head": ("draftlab.run.api", "export_head"),
    "import_head": ("draftlab.export.importing", "import_head"),
    "find_run": ("draftlab.run.folder", "find_run"),
    "load_recipe": ("draftlab.recipe.recipe", "load_recipe"),
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'draftlab' has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    return getattr(import_module(module), attribute)
