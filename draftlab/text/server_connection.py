"""How a server is reached: who gets the user's key, no redirects, and bounded answers."""

from __future__ import annotations

import ipaddress
import json
import os
import urllib.request
from typing import IO, Any
from urllib.parse import urlsplit

API_KEY = "OPENAI_API_KEY"
"""Environment variable with the key that is sent to a server of `key_for`, if it is set."""
BASE_URL = "OPENAI_BASE_URL"
"""Environment variable with the address of the server that the key is for, as OpenAI's clients read
it."""
MAX_BYTES = 1 << 26
"""Most bytes of an answer of the server that are read."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which would take prompts and key to an address that nobody named."""

    def redirect_request(self, *_: Any) -> None:
        return None


OPENER = urllib.request.build_opener(_NoRedirects)


def has_key() -> bool:
    """Return whether the user's environment has a key."""
    return bool(os.environ.get(API_KEY))


def key_for(url: str) -> str | None:
    """Return the user's key if a server may have it; else None.

    The address comes from a recipe, which may be a stranger's. So the key is sent to this machine,
    to OpenAI over HTTPS and to the server that the user's own environment names in `BASE_URL`.
    """
    origin = _origin(url)
    own = {("https", "api.openai.com", 443), _origin(os.environ.get(BASE_URL, ""))} - {None}
    if origin is None or not (origin in own or _is_loopback(origin[1])):
        return None
    return os.environ.get(API_KEY)


def _origin(url: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port of a URL; None: it has none."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        return None
    return (parts.scheme, parts.hostname, port) if parts.hostname else None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_json(answer: IO[bytes]) -> Any:
    """Return the JSON of an answer.

    Raises:
        ValueError: it is none, is longer than `MAX_BYTES` or is nested too deep.
    """
    content = answer.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"an answer of more than {MAX_BYTES:,} bytes")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None
