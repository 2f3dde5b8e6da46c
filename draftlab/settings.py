"""The strict base class of all settings, and validation errors in plain words."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
)


class Settings(BaseModel):
    """Base of every room's settings: frozen, no unknown keys, documented by attribute
    docstrings."""

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
"""Of settings with several values: `eval.k=4` and `eval.k=3,5` are as good as `eval.k=[3, 5]`."""


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
    "model_type": "a mapping of settings",
    "dict_type": "a mapping of settings",
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
