"""Command-line options from a settings model, so that each setting is described once."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel

from draftlab.settings import Settings, update_settings

S = TypeVar("S", bound=Settings)


class SettingsOptions:
    """The options of a verb for fields of a settings model.

    Args:
        model: the settings; an option's help is the field's description.
        verb: the verb's name, for error messages.
        names: field → names of the option, if not `--field-name`.
        panels: title → fields, in the order of `--help`; None: all fields, in the model's order.
    """

    def __init__(
        self,
        model: type[Settings],
        verb: str,
        *,
        names: Mapping[str, Sequence[str]] | None = None,
        panels: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.model, self.names = model, dict(names or {})
        self.hint = f"`draftlab {verb} --help` explains every option"
        fields = [n for n, f in model.model_fields.items() if not _is_model(f.annotation)]
        panels = panels or {"": fields}
        self.panel_of = {name: panel for panel, fields in panels.items() for name in fields}

    def add_to(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a command whose parameter `chosen` is replaced by the options.

        `chosen` receives the values by field; None: the user did not give the option.
        """
        hints = typing.get_type_hints(function, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name == "chosen":
                parameters += map(self._parameter, self.panel_of)
            else:
                kind, hint = inspect.Parameter.KEYWORD_ONLY, hints[parameter.name]
                parameters.append(parameter.replace(kind=kind, annotation=hint))

        @wraps(function)
        def command(**values: Any) -> None:
            chosen = {name: values.pop(name) for name in self.panel_of}
            # An absent flag is False, which must not replace True in a recipe.
            chosen |= {name: chosen[name] or None for name in chosen if self._is_flag(name)}
            function(chosen=chosen, **values)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    def apply(self, settings: S, chosen: Mapping[str, Any]) -> S:
        """Return a copy of settings with the options that the user gave; a `UserError` names the
        option whose value does not fit.
        """
        options = {name: self._names(name)[0] for name in chosen}
        return update_settings(
            settings, chosen, where="command line", options=options, do=self.hint
        )

    def _names(self, field: str) -> Sequence[str]:
        return self.names.get(field) or [f"--{field.replace('_', '-')}"]

    def _is_flag(self, field: str) -> bool:
        return self.model.model_fields[field].default is False

    def _parameter(self, field: str) -> inspect.Parameter:
        """Return the option of a field as a parameter of the command."""
        info, names = self.model.model_fields[field], list(self._names(field))
        kind, metavar = _option_type(info.annotation)
        if info.default is True:
            names = [f"{names[0]}/--no-{names[0].removeprefix('--')}"]
        option = typer.Option(
            *names,
            help=_plain(info.description or ""),
            rich_help_panel=self.panel_of[field] or None,
            metavar=metavar,
        )
        default = False if self._is_flag(field) else None
        annotation = bool if self._is_flag(field) else kind | None
        return inspect.Parameter(
            field,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[annotation, option],
        )


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _option_type(annotation: Any) -> tuple[Any, str | None]:
    """Return the type that typer parses, and the metavar; lists are parsed from one text."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _option_type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        kinds = [a for a in arguments if a is not type(None)]
        return _option_type(kinds[0]) if len(kinds) == 1 else (str, None)
    if origin is tuple:
        return str, "X,X,…"
    if origin is typing.Literal:
        return str, "|".join(map(str, arguments))
    return (annotation, None) if annotation in (int, float, bool, str) else (str, None)


def _plain(description: str) -> str:
    """Return a field's description as the help of an option, on one line."""
    text = re.sub(r"\s+", " ", description).strip()
    return text.replace(". None:", ". By default:").replace("None:", "by default:")
