"""Addresses of stores: local folders, and folders at URLs that fsspec reads and writes.

Settings use this module, so it imports nothing heavy.
"""

from __future__ import annotations

import re

from draftlab.errors import UserError
from draftlab.formatting import pip_install
from draftlab.url_secrets import secret_in

_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BUCKET_SCHEMES = ("s3", "s3a", "gs", "gcs", "hf")
_FOLDER_SCHEMES = ("file", "local")
_NO_STORES = ("http", "https", "ftp")
"""Schemes that fsspec knows and at which it cannot replace files as a whole."""
_EXAMPLE = "expected the URL of a folder, such as s3://bucket/store"


def is_url(address: str) -> bool:
    """Return whether an address is a URL and not a path."""
    return _SCHEME.match(address) is not None


def check_url(url: str) -> str:
    """Return the URL of a folder without a slash at its end.

    Raises a `ValueError` if it is none, or has credentials, which the message does not repeat.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    host = rest.partition("/")[0]
    user = host.rpartition("@")[0]  # may have quotes and spaces, which end a URL in a text
    has_bucket = scheme in _BUCKET_SCHEMES
    found = ""
    if "::" in url:
        found = "a chain of file systems (::)"
    elif "?" in url or "#" in url:
        found = "one with a query, which may be a secret"
    elif secret_in(url) or ":" in user or (has_bucket and (":" in rest or "@" in host)):
        found = "one with credentials in it: give them in the environment (docs/guide/scale.md)"
    elif not is_url(url):
        found = repr(url)
    elif scheme in _FOLDER_SCHEMES:
        found = f"{url!r}: name a store by its path; a run's store/ may be a link to another disk"
    elif has_bucket and not _BUCKET.fullmatch(host):
        found = f"{url!r} without the name of a bucket"
    elif ".." in rest.split("/"):
        found = "one with '..'"
    if found:
        raise ValueError(f"{_EXAMPLE}, found {found}")
    return url.rstrip("/") if rest.strip("/") else url


def check_scheme(url: str) -> None:
    """Check, without asking its server, that a store can be written to a URL.

    Raises a `UserError` if its files do not outlive the process, cannot be written, or need a
    package that is not installed.
    """
    import fsspec

    scheme = url.partition("://")[0].lower()
    if scheme == "memory" or scheme in _NO_STORES:
        kind = "whose files outlive this process" if scheme == "memory" else "that can be written"
        raise UserError(
            f"expected a URL {kind}, found {scheme}://",
            where=url,
            do="name a bucket, such as s3://bucket/folder",
        )
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise scheme_error(url, error) from None


def scheme_error(url: str, error: Exception) -> UserError:
    """Return the error of a URL that fsspec cannot open."""
    scheme = url.partition("://")[0]
    extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(scheme)
    return UserError(
        f"{scheme}:// URLs cannot be opened: {error}",
        where=url,
        do=pip_install(extra)
        if extra
        else f"correct the URL, or install the package with which fsspec reads {scheme}://",
    )
