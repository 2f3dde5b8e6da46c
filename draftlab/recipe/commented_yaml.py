"""Recipes as commented YAML, for `draftlab recipe schema` and `draftlab recipe show`."""

from __future__ import annotations

import math
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from draftlab.settings import Size


def schema_lines(model: type[BaseModel], indent: int = 0) -> Iterator[str]:
    """Yield commented YAML with meaning, type and default of every setting."""
    pad = "  " * indent
    for name, field in model.model_fields.items():
        for line in " ".join((field.description or "").split()).splitlines():
            yield f"{pad}# {line}"
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield f"{pad}{name}:"
            yield from schema_lines(kind, indent + 1)
        elif field.default is PydanticUndefined:
            yield f"{pad}{name}: # {_type_name(kind)}; default: the recipe's file name"
        else:
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            text = yaml.safe_dump(default, default_flow_style=True).removesuffix("...\n")
            yield f"{pad}{name}: {text.strip()} # {_type_name(kind)}"
            if model_of_kind := settings_in(kind):  # off by default: its settings as comments
                yield from (f"{pad}# {line}" for line in schema_lines(model_of_kind, 1))


def shown_lines(settings: BaseModel, pad: str = "") -> Iterator[str]:
    """Yield settings as YAML; those that are at their defaults are comments."""
    at_default = []
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        text = setting_text(settings, name)
        if value != field.default and isinstance(value, BaseModel):
            yield f"{pad}{name}:"
            yield from shown_lines(value, pad + "  ")
        elif value != field.default:
            yield pad + text
        elif isinstance(value, BaseModel):
            yield from comment_lines(text.split(", "), pad, ", ")
        else:
            at_default.append(text)
    yield from comment_lines(at_default, pad, ", ")


def setting_text(settings: BaseModel, name: str) -> str:
    """Return a setting and its value as a line of YAML."""
    tree = {name: settings.model_dump(mode="json")[name]}
    options = {"default_flow_style": True, "sort_keys": False, "width": math.inf}
    return yaml.safe_dump(tree, allow_unicode=True, **options).strip()[1:-1]


def comment_lines(texts: list[str], pad: str = "", separator: str = " ") -> Iterator[str]:
    """Yield texts as lines of a comment, none of them broken."""
    words = separator.join(text.replace(" ", "\0") for text in texts)
    for line in textwrap.wrap(words, 98 - len(pad), break_long_words=False):
        yield f"{pad}# {line}".replace("\0", " ")


def settings_in(kind: Any) -> type[BaseModel] | None:
    """Return the settings model that a type is, or that it is besides null."""
    models = (k for k in (kind, *typing.get_args(kind)) if isinstance(k, type))
    return next((k for k in models if issubclass(k, BaseModel)), None)


def _type_name(kind: Any) -> str:
    """Return the name of a type for users."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " | ".join(str(a) for a in args)
    if kind == Size:
        return "size such as 200GB"
    if origin is typing.Annotated:
        return _type_name(args[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type_name(a) for a in args)
    if origin is tuple:
        return f"list of {_type_name(args[0])}"
    if settings_in(kind):
        return "a mapping of the settings below"
    return "null" if kind is type(None) else getattr(kind, "__name__", str(kind))
