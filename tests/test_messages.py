"""Rules that every error of the package keeps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "draftlab"


def user_errors() -> Iterator[tuple[str, ast.Call]]:
    """Yield the place and the call of every `UserError` in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "UserError":
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node


def test_every_error_says_what_to_do() -> None:
    without = []
    for place, call in user_errors():
        advice = next((keyword.value for keyword in call.keywords if keyword.arg == "do"), None)
        if advice is None or (isinstance(advice, ast.Constant) and not advice.value):
            without.append(place)
    assert not without
