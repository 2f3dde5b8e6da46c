"""Numbers, sizes and exit codes as text for people."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from itertools import chain, count
from typing import Any

# C0 and C1 control characters, DEL, what reorders text, line separators, halves of a character, and
# what is not seen: soft hyphens, spaces without width and the block of tags. Joiners stay.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    r"\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """Return a text of the same length in which no character controls a terminal.

    Line feeds and tabs stay. An escape character becomes ␛; what has no such picture becomes �.
    """
    return _CONTROL.sub(lambda found: _PICTURES.get(found[0], "\ufffd"), text)


_PICTURES = {chr(code): chr(0x2400 + code) for code in range(32)} | {"\x7f": "\u2421"}


def visible_json(text: str) -> str:
    """Return equal JSON in which escapes stand for the characters that control a terminal."""

    def escaped(found: re.Match[str]) -> str:
        units = found[0].encode("utf-16-be", "surrogatepass").hex()
        return re.sub("....", r"\\u\g<0>", units)

    return _CONTROL.sub(escaped, text)


def is_positive(value: Any) -> bool:
    """Return whether a value of a JSON file is a positive number that float32 can hold."""
    return type(value) in (int, float) and 0 < value < 3e38


def count_text(number: int, noun: str) -> str:
    """Return a count with its noun: "1 shard", "2,000 shards", "2 processes"."""
    return f"{number:,} {noun}" + ("es" if noun.endswith("s") else "s") * (number != 1)


def value_text(value: Any) -> str:
    """Return a setting's value as Python writes it; of a hash the first digits."""
    return re.sub(r"([0-9a-f]{12})[0-9a-f-]{20,}", r"\1…", repr(value))


def distinct_name(names: Sequence[str], taken: set[str]) -> str:
    """Return the first name that is not taken, or else the last with a number; it is then taken."""
    numbered = (f"{names[-1]} ({number})" for number in count(2))
    name = next(name for name in chain(names, numbered) if name not in taken)
    taken.add(name)
    return name


def rounded_text(value: float, digits: int = 3) -> str:
    """Return a number with so many digits and no exponent up to 1e15: "0.0764", "1,530"."""
    return f"{float(f'{value:.{digits}g}'):,.15g}"


def p_text(value: float) -> str:
    """Return a p-value with three digits, and not as 1 unless it is: "p = 0.0213", "p > 0.999"."""
    return "p > 0.999" if 0.9995 <= value < 1 else f"p = {value:.3g}"


def exit_text(code: int) -> str:
    """Return how a process ended, from its `returncode`: "exit code 3", "killed by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


def size_text(number_of_bytes: float) -> str:
    """Return a size with three digits: "816 kB", "33.1 GB"."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number_of_bytes >= unit:
            return f"{rounded_text(number_of_bytes / unit)} {name}"
    return f"{number_of_bytes:,.0f} B"


_SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([kMGTP]?B)?\s*", re.IGNORECASE)
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}


def parse_size(text: str) -> int:
    """Return a size such as "200GB", "1.5 TB" or "1000" (bytes) in bytes, at least 1.

    Raises:
        ValueError: it is none.
    """
    match = _SIZE.fullmatch(text)
    if match is None or not (size := int(float(match[1]) * _UNITS[(match[2] or "B").upper()])):
        raise ValueError(f"expected a size such as 200GB or 1.5TB, found {text!r}")
    return size


def plain_values(fields: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the numbers and texts among some fields, as names and values to print."""
    form = {int: "{:,}", float: "{:.4g}", str: "{}"}
    return [
        (name.replace("_", " "), form[type(value)].format(value))
        for name, value in fields.items()
        if type(value) in form
    ]


EXTRAS = {
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "deepspeed": "deepspeed>=0.19.8",
    "ray": "ray[train]>=2.60",
    "s3": "s3fs>=2024.12",
    "gcs": "gcsfs>=2024.12",
    "gguf": "gguf>=0.17",
    "suites": "datasets>=4.0",
}
"""What the extras of pyproject.toml install."""


def pip_install(extra: str) -> str:
    """Return the command that installs an extra's package, whether draftlab is installed or not."""
    package = EXTRAS[extra]
    return f"pip install {package}" if package.isalpha() else f"pip install '{package}'"
