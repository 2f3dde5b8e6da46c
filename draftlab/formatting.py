"""Numbers, sizes and exit codes as text for people."""

from __future__ import annotations

import signal
from typing import Any


def counted(number: int, noun: str) -> str:
    """A number of things: "1 shard", "2,000 shards", "2 processes"."""
    return f"{number:,} {noun}" + ("es" if noun.endswith("s") else "s") * (number != 1)


def rounded_text(value: float, digits: int = 3) -> str:
    """A number to so many digits, up to 1e15: "0.0764", "1,530" (`.3g` writes 1.53e+03)."""
    return f"{float(f'{value:.{digits}g}'):,.15g}"


def ended_text(code: int) -> str:
    """How a process ended, by `returncode`: "exit code 3", "killed by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"


def size_text(number_of_bytes: float) -> str:
    """A size for people, three digits of it: "816 kB", "33.1 GB"."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number_of_bytes >= unit:
            return f"{rounded_text(number_of_bytes / unit)} {name}"
    return f"{number_of_bytes:,.0f} B"


def plain_values(fields: dict[str, Any]) -> list[tuple[str, str]]:
    """Facts of provenance that read on a line."""
    form = {int: "{:,}", float: "{:.4g}", str: "{}"}
    return [
        (name.replace("_", " "), form[type(value)].format(value))
        for name, value in fields.items()
        if type(value) in form
    ]
