"""Copies of functions that see other globals: one call in a model's own code can be replaced."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any


def copy_function(
    function: FunctionType, global_names: dict[str, Any], code: CodeType | None = None
) -> FunctionType:
    """Return a copy of the function with other globals, or with other code."""
    copied = FunctionType(
        code or function.__code__,
        global_names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    return copied
