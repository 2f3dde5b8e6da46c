"""The strict base class of all settings, and pydantic's validation errors in plain words."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from draftlab.errors import UserError
from draftlab.formatting import parse_size
from draftlab.url_secrets import secret_in

S = TypeVar("S", bound="Settings")


class Settings(BaseModel):
    """Base of all settings: frozen, without unknown keys, documented by attribute docstrings."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `steps=true`, which pydantic reads as 1."""
        if any(isinstance(one, bool) for one in (value if isinstance(value, list) else [value])):
            types = set(_types_in(cls.model_fields[typing.cast(str, info.field_name)].annotation))
            if types & {int, float} and bool not in types:
                expected = "a number" if float in types else "a whole number"
                raise ValueError(f"expected {expected}, found {_yaml_text(value)}")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_large_numbers(cls, value: Any) -> Any:
        """Refuse whole numbers that no array index or seed can be."""
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, int) and not -(2**63) <= one < 2**63:
                raise ValueError(f"expected a number below 2^63, found {one}")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_credentials(cls, value: Any) -> Any:
        """Refuse URLs with credentials in any setting: recipes are stored, shown and published."""
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, str) and (found := secret_in(one)):
                raise ValueError(
                    f"expected a URL without credentials, found {found}: give it in the "
                    "environment (docs/guide/scale.md)"
                )
        return value


def _types_in(annotation: Any) -> Iterator[Any]:
    """Yield all types that an annotation contains."""
    if typing.get_origin(annotation) is typing.Literal:
        yield from map(type, typing.get_args(annotation))
        return
    yield annotation
    for argument in typing.get_args(annotation):
        yield from _types_in(argument)


def _as_list(value: Any) -> Any:
    """Return a single value as a tuple; split a text at its commas."""
    if isinstance(value, str):
        items = [item.strip() for item in value.split(",")] if value.strip() else []
        if "" in items:
            raise ValueError(f"expected values between commas, found {value!r}")
        return tuple(items)
    return (value,) if isinstance(value, int | float) else value


SingleOrList = BeforeValidator(_as_list)
"""For settings with several values: `eval.k=4` and `eval.k=3,5` equal `[4]` and `[3, 5]`."""
ServerUrls = Annotated[
    tuple[Annotated[str, Field(pattern=r"^https?://[^\s?#@]+$")], ...],
    SingleOrList,
    Field(min_length=1),
]
"""Addresses of equal servers."""


def _as_bytes(value: Any) -> Any:
    """Return a size such as "200GB" as a number of bytes."""
    return parse_size(value) if isinstance(value, str) else value


Size = Annotated[int, BeforeValidator(_as_bytes, json_schema_input_type=int | str), Field(gt=0)]
"""A number of bytes, or a text with a decimal unit: `record.window=200GB`."""


def update_settings(
    settings: S,
    values: Mapping[str, Any],
    *,
    where: str,
    options: Mapping[str, str] | None = None,
    do: str = "",
) -> S:
    """Return a validated copy of settings with other values; None leaves a setting as it is.

    Args:
        options: setting → its name in an error message, if that is not the setting's own.
        where, do: parts of the error message.
    """
    fields = {key: value for key, value in values.items() if value is not None}
    try:
        return type(settings).model_validate(settings.model_dump() | fields)
    except ValidationError as error:
        lines = []
        for one in merged_errors(error):
            # An error of several settings together has no location.
            names = [(options or {}).get(str(name), str(name)) for name in one["loc"][:1]]
            lines.append(": ".join([*names, describe_error(one)]))
        raise UserError("\n".join(lines), where=where, do=do) from None


_UNION_MEMBER = re.compile(r"(bool|int|float|str|(literal|list|tuple|dict)\[.*\])$")
"""What pydantic appends to a key for each type of a union."""

_MAX_LENGTH, _MAX_LINES = 80, 12
"""Characters of a value, and lines of one error, that messages show."""

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "string_too_short": "a text that is not empty",
    "tuple_type": "a list",
    "list_type": "a list",
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "none_required": "null",
}
"""What was expected, by pydantic's types of errors."""


def merged_errors(error: ValidationError) -> list[Any]:
    """Return pydantic's errors, one for each value.

    For a list with invalid items pydantic also reports that the list is empty, and for a union it
    reports one error for each type: those inside a list or a mapping say most, and errors of the
    value itself are joined.
    """
    by_key: dict[tuple[Any, ...], Any] = {}
    for one in error.errors():
        loc = tuple(part for part in one["loc"] if not _UNION_MEMBER.match(str(part)))
        if loc != one["loc"] and _UNION_MEMBER.match(str(one["loc"][-1])):
            expected = _expected(one)
            if loc in by_key:
                expected = f"{by_key[loc]['expected']} or {expected}"
            one = {**one, "expected": expected}
        by_key[loc] = {**one, "loc": loc}
    inner = {loc[:length] for loc in by_key for length in range(len(loc))}
    return [
        e
        for loc, e in by_key.items()
        if loc not in inner or not ("expected" in e or e["type"] == "too_short")
    ]


def _expected(error: Any) -> str:
    kind, message = error["type"], error["msg"].removeprefix("Input should be ")
    if kind == "string_pattern_mismatch":
        return f"a text that matches {error['ctx']['pattern']}"
    if kind == "too_short":
        return "at least one value"
    return _EXPECTED.get(kind) or "a number " * message.startswith(("greater", "less")) + message


def _yaml_text(value: Any) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml_text, value))}]"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 200 else f"{text[:200]} …"


def describe_error(error: Any) -> str:
    """Return "expected …, found …" for one of `merged_errors`."""
    kind = error["type"]
    if kind == "value_error":  # a message of draftlab's own validators
        return str(error["msg"]).removeprefix("Value error, ")
    if kind == "missing":
        return "expected a value, found nothing"
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "too_short" and "expected" not in error:
        return "expected at least one value, found none"
    found = _yaml_text(error["input"])
    found = found if len(found) <= _MAX_LENGTH else f"{found[:_MAX_LENGTH]}…"
    return f"expected {error.get('expected') or _expected(error)}, found {found}"


def describe_errors(error: ValidationError, whole: str = "") -> str:
    """Return a line for each of the first errors, which begins with its key.

    Args:
        whole: stands for the key of an error that concerns all values together.
    """
    lines = [
        ": ".join(filter(None, [".".join(map(str, one["loc"])) or whole, describe_error(one)]))
        for one in merged_errors(error)
    ]
    more = [f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    return "\n  ".join(lines[:_MAX_LINES] + more)
