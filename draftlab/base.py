"""What every room stands on: the user's error, strict knobs, and files that outlive crashes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import threading
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
)


class UserError(Exception):
    """A mistake the user can mend. The CLI prints it as one block and exits with code 2.

    Args:
        what: what was expected and what was found.
        where: the file, key or sample it was found at.
        do: what to do about it.
    """

    def __init__(self, what: str, *, where: str | Path = "", do: str = "") -> None:
        self.what, self.where, self.do = what, str(where), do
        super().__init__(
            "\n".join(part for part in (what, f"at: {where}" if where else "", do) if part)
        )


class Knobs(BaseModel):
    """Base of every room's knobs: frozen, no unknown keys, documented by attribute docstrings."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_no_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses `steps=true`, which pydantic takes for 1."""
        if any(isinstance(one, bool) for one in (value if isinstance(value, list) else [value])):
            kinds = set(_kinds(cls.model_fields[typing.cast(str, info.field_name)].annotation))
            if kinds & {int, float} and bool not in kinds:
                wanted = "a number" if float in kinds else "a whole number"
                raise ValueError(f"expected {wanted}, found {_shown(value)}")
        return value


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of."""
    if typing.get_origin(annotation) is typing.Literal:
        yield from map(type, typing.get_args(annotation))
        return
    yield annotation
    for part in typing.get_args(annotation):
        yield from _kinds(part)


def _as_list(value: Any) -> Any:
    """One value where several may stand; of a text, several between commas, of "" none."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")] if value.strip() else []
        if "" in parts:
            raise ValueError(f"expected values between commas, found {value!r}")
        return tuple(parts)
    return (value,) if isinstance(value, int | float) else value


Listed = BeforeValidator(_as_list)
"""Of knobs with several values: `eval.k=4` and `eval.k=3,5` are as good as `eval.k=[3, 5]`."""


_ALTERNATIVE = re.compile(r"(bool|int|float|str|literal\[.*\])$")
"""What pydantic puts behind a key for each type of a union."""
_WORDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "list_type": "a list",
    "model_type": "a mapping of knobs",
    "dict_type": "a mapping of knobs",
}
"""What is wanted, by pydantic's types of faults."""


def faults(error: ValidationError) -> list[Any]:
    """What does not fit, a fault for each value.

    Of a list whose items do not fit pydantic also says that it is empty, and of a value that may be
    of several types it says how each of them is missed.
    """
    found: dict[tuple[Any, ...], Any] = {}
    for fault in error.errors():
        loc = fault["loc"]
        if len(loc) > 1 and _ALTERNATIVE.match(str(loc[-1])):
            wanted = _wanted(fault)
            if loc[:-1] in found:
                wanted = f"{found[loc[:-1]]['wanted']} or {wanted}"
            fault = {**fault, "loc": loc[:-1], "wanted": wanted}
        found[fault["loc"]] = fault
    lists = {loc[:-1] for loc in found}
    return [f for loc, f in found.items() if f["type"] != "too_short" or loc not in lists]


def _wanted(fault: Any) -> str:
    kind, message = fault["type"], fault["msg"].removeprefix("Input should be ")
    if kind == "string_pattern_mismatch":
        return f"a text that matches {fault['ctx']['pattern']}"
    return _WORDS.get(kind) or "a number " * message.startswith(("greater", "less")) + message


def _shown(value: Any) -> str:
    """A value as YAML has it, where Python writes it otherwise."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def complaint(fault: Any) -> str:
    """ "expected …, found …" of one of `faults`, in words of people who do not know pydantic."""
    kind = fault["type"]
    if kind == "value_error":  # our own validators have said it whole
        return str(fault["msg"]).removeprefix("Value error, ")
    if kind == "missing":
        return "expected a value, found nothing"
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "too_short":
        return "expected at least one value, found none"
    return f"expected {fault.get('wanted') or _wanted(fault)}, found {_shown(fault['input'])}"


def complaints(error: ValidationError) -> str:
    """All of them, a line each, under the keys they belong to."""
    return "\n  ".join(
        ": ".join(filter(None, [".".join(map(str, fault["loc"])), complaint(fault)]))
        for fault in faults(error)
    )


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


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


def sha256_text(text: str) -> str:
    """Hex SHA-256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_UMASK = threading.Lock()


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary sibling of `path`; on success it is fsynced and renamed onto `path`.

    A crash at any point leaves either the old file or the new one, never a part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        # Some writers create files that only their owner may read; servers run as other users.
        with _UMASK:  # it can only be read by setting it, for all threads
            umask = os.umask(0)
            os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        temporary.unlink(missing_ok=True)


def check_folder(path: Path) -> None:
    """Refuses a folder that could not be written to, before anything is computed for it.

    Raises:
        UserError: `path` is a file, or it or the folder it would be made in is not ours to write.
    """
    there = path.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        found = f"a file, {there}"
    elif not os.access(there, os.W_OK | os.X_OK):
        found = f"no permission to write to {there}"
    else:
        return
    raise UserError(
        f"expected a folder to write to, found {found}", where=path, do="name another folder"
    )


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, *, kind: str = "JSON file") -> Any:
    """Reads JSON; a missing or broken file is a `UserError` that names it as a `kind`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"expected a {kind}, found nothing", where=path) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"expected a {kind}, found text that is not JSON: {error}", where=path
        ) from None


class Monitor:
    """Where a room's lines and progress go. This one swallows them; the CLI's prints them."""

    def say(self, line: str) -> None:
        """A finished line: a count, a default that was chosen, something dropped."""

    def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
        """How far a stage is; `detail` is a short text such as "1,024 tokens/s"."""


def save_tensors(
    tensors: dict[str, Any], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """safetensors' `save_file`, whose errors of the disk become the user's.

    Raises:
        UserError: when the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise UserError(
            f"the tensors could not be written: {error}",
            where=path,
            do="free disk space or write elsewhere; the same command then goes on",
        ) from None
