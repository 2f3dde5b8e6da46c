"""Credentials in URLs: users with passwords, and parameters such as sig= and token=."""

from __future__ import annotations

import re
from urllib.parse import unquote

_USER = re.compile(
    r"\b(?P<scheme>(?P<store>s3a?|gs|gcs)(?=:)|[A-Za-z][\w+.-]*)://"
    # user:password@, where the password may contain slashes and host:8000/a@b is none (the bucket
    # of an object store has no port); or user@
    r"(?P<user>[^\s/?#@:'\"<>]*:(?(store)|(?!\d+/))[^\s@'\"<>]*@|[^\s/?#@:'\"<>]+@)"
)
_PARAMETER = re.compile(r"(?P<name>[?&;#][^\s=&;#?'\"<>]+)=(?P<value>[^\s&;#'\"<>]+)")
_SECRET_NAME = re.compile(
    r".*(token|secret|passw|passphrase|pwd|signature|credential|bearer|session|assertion).*"
    r"|.*(apikey|api[-_]key|accesskey|access[-_]key).*"
    r"|(.*[-_.])?(key|sig|pass|pw|auth|authorization|jwt|sas|code)",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(r"(sk-|hf_|AKIA)[\w-]{8,}")
"""The shapes of keys of OpenAI, the Hugging Face Hub and AWS."""
HIDDEN = "(hidden)"


def secret_in(text: str) -> str:
    """Return what kind of credentials the URLs of a text contain, without them; "": none."""
    for found in _USER.finditer(text):
        if _is_secret_user(found):
            return "a user and a password"
    for found in _PARAMETER.finditer(text) if "://" in text else ():
        if _is_secret_parameter(found):
            return f"the parameter {unquote(found['name'][1:])!r}"
    return ""


def without_secrets(text: str) -> str:
    """Return a text with `HIDDEN` in place of the credentials in its URLs."""
    if "://" not in text:
        return text
    text = _USER.sub(
        lambda found: f"{found['scheme']}://{HIDDEN}@" if _is_secret_user(found) else found[0],
        text,
    )
    return _PARAMETER.sub(
        lambda found: f"{found['name']}={HIDDEN}" if _is_secret_parameter(found) else found[0],
        text,
    )


def _is_secret_user(found: re.Match[str]) -> bool:
    """Return whether a URL's user is secret: with a password, or in HTTP, where it may be a key."""
    is_http = found["scheme"].lower() in ("http", "https")
    return HIDDEN not in found["user"] and (is_http or ":" in found["user"])


def _is_secret_parameter(found: re.Match[str]) -> bool:
    name, value = unquote(found["name"][1:]), unquote(found["value"])
    is_secret = _SECRET_NAME.fullmatch(name) or _SECRET_VALUE.match(value)
    return not value.startswith(HIDDEN) and is_secret is not None
