"""Addresses of stores: local folders, and folders at URLs that fsspec reads and writes.

Settings use this module, so it imports nothing heavy.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BUCKET_SCHEMES = ("s3", "s3a", "gs", "gcs", "hf")
_EXAMPLE = "expected the URL of a folder, such as s3://bucket/store"


def is_url(address: str) -> bool:
    """Return whether an address is a URL and not a path."""
    return _SCHEME.match(address) is not None


def check_url(url: str) -> str:
    """Return the URL of a folder without a slash at its end.

    Raises:
        ValueError: it is not one, or it contains credentials, which the message does not repeat.
    """
    scheme, _, rest = url.partition("://")
    if "::" in url:
        raise ValueError(f"{_EXAMPLE}, found a chain of file systems (::)")
    if "?" in url or "#" in url:
        raise ValueError(f"{_EXAMPLE}, found one with a query, which may be a secret")
    host = rest.partition("/")[0]
    has_bucket = scheme.lower() in _BUCKET_SCHEMES
    if has_bucket and (":" in rest or "@" in host):
        raise ValueError(
            f"{_EXAMPLE}, found one with credentials in it: give them in the environment "
            "(docs/guide/scale.md)"
        )
    is_http = scheme.lower() in ("http", "https")  # there a user may be a token
    if not has_bucket and "@" in rest and (is_http or ":" in rest.rpartition("@")[0]):
        raise ValueError(
            f"{_EXAMPLE}, found one with a password in it: give it in the environment "
            "(docs/guide/scale.md)"
        )
    if not is_url(url):
        raise ValueError(f"{_EXAMPLE}, found {url!r}")
    if has_bucket and not _BUCKET.fullmatch(host):
        raise ValueError(f"{_EXAMPLE}, found {url!r} without the name of a bucket")
    if ".." in rest.split("/"):
        raise ValueError(f"{_EXAMPLE}, found one with '..'")
    local_folder(url)
    return url.rstrip("/") if rest.strip("/") else url


def local_folder(url: str) -> Path | None:
    """Return the folder of a file:// URL; None for other URLs.

    Raises:
        ValueError: the URL names a host.
    """
    parts = urlsplit(url)
    if parts.scheme.lower() not in ("file", "local"):
        return None
    if parts.netloc not in ("", "localhost"):
        raise ValueError(f"expected file:///FOLDER, found the host {parts.netloc!r}")
    return Path(unquote(parts.path))


def address_of(text: str | Path) -> str | Path:
    """Return a store's address: the URL, or the path of a local folder.

    Raises:
        ValueError: see `check_url`.
    """
    text = str(text)
    if not is_url(text):
        return Path(text)
    url = check_url(text)
    return local_folder(url) or url
