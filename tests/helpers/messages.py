"""Chat messages."""

from __future__ import annotations


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: str) -> dict[str, str]:
    return {"role": "assistant", "content": text, **fields}
