"""Chat messages."""

from __future__ import annotations

from pathlib import Path

from draftlab.text.conversations import Conversation, iterate_conversations


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: str) -> dict[str, str]:
    return {"role": "assistant", "content": text, **fields}


def read_conversations(path: Path) -> list[Conversation]:
    return list(iterate_conversations(path))
