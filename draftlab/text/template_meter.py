"""What a chat template may compute: a meter of time and characters, and operations it counts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

from jinja2 import TemplateRuntimeError, pass_context
from jinja2.runtime import Context
from jinja2.utils import Namespace

MAX_SECONDS = 5.0
"""Seconds of this thread's processor time that one rendering may take."""
MAX_CHARACTERS = 20_000_000
"""Characters that one rendering may make, and `SHARE` more for each character of the chat."""
SHARE = 50
_ITEM = 16
"""Characters that an item of a list counts as."""
_MAX_ARGUMENT = 100_000
_MAX_BITS = 4096
_TICKS = 16
"""Loop turns and calls between two looks at the clock."""
SHORTER = frozenset(
    {
        "capitalize",
        "casefold",
        "count",
        "endswith",
        "find",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "rfind",
        "rindex",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
    }
)
"""Methods of texts whose result is about as long as the text."""
_LONGER = frozenset({"center", "ljust", "rjust", "zfill"})
"""Methods of texts whose result is as long as an argument says, besides those that are estimated.
No other method can be called: the rest make bytes, or texts of any size."""


class LimitError(TemplateRuntimeError):
    """A template exceeded a limit."""


class Meter:
    """What one rendering may still compute.

    Args:
        characters: number of them that it may make.
    """

    def __init__(self, characters: int = MAX_CHARACTERS) -> None:
        self.left, self._ticks, self._end = characters, 0, time.thread_time() + MAX_SECONDS

    def tick(self) -> None:
        """Count a turn of a loop, or a call.

        Raises:
            LimitError: the time is over.
        """
        self._ticks += 1
        if not self._ticks % _TICKS and time.thread_time() > self._end:
            raise LimitError(f"it computes for more than {MAX_SECONDS:.0f} seconds")

    def check(self, size: int) -> None:
        """Raise a `LimitError` if a value of so many characters cannot be made any more."""
        if size > self.left:
            raise LimitError(f"it makes more than {MAX_CHARACTERS:,} characters")

    def charge(self, value: Any) -> Any:
        """Charge a value with its size, and return it.

        Raises:
            LimitError: it is too large, or holds a namespace, whose size can change later.
        """
        if isinstance(value, str):
            size = len(value)
        elif isinstance(value, (list, tuple, dict, Namespace)):
            size = self._expanded(value)
        elif isinstance(value, bytes):
            raise LimitError("it computes with bytes")
        else:
            return value
        if size > self.left:
            self.check(size)
        self.left -= size
        return value

    def _expanded(self, value: Any) -> int:
        """Return the size of a nested value, in which all parts count as often as they occur."""
        size, rest = 0, list(_attributes(value)) if isinstance(value, Namespace) else [value]
        while rest:
            item = rest.pop()
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, list | tuple | dict):
                size += _ITEM * len(item)
                rest.extend(item)
                if isinstance(item, dict):
                    rest.extend(item.values())
            elif isinstance(item, Namespace):
                raise LimitError("it keeps a namespace in another value")
            self.check(size)
        return size

    def check_arguments(self, arguments: Iterable[Any]) -> None:
        """Charge the arguments of a call.

        Raises:
            LimitError: they are too large.
        """
        for argument in arguments:
            if isinstance(argument, int):
                if not -_MAX_ARGUMENT <= argument <= _MAX_ARGUMENT:
                    raise LimitError(f"it calls a function with a number above {_MAX_ARGUMENT:,}")
            elif isinstance(argument, str | list):
                self.check(len(argument))
                self.left -= len(argument)


def _attributes(namespace: Namespace) -> Iterable[Any]:
    values: dict[str, Any] = object.__getattribute__(namespace, "_Namespace__attrs")
    return values.values()


class MeteredContext(Context):
    """The variables of a rendering and its meter.

    Attributes:
        written: number of characters that are written.
        blocks_written: the ranges of `{% generation %}` blocks among them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.meter, self.written = Meter(), 0
        self.blocks_written: list[tuple[int, int]] = []

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        new = super().derived(locals)
        new.__dict__ |= {n: self.__dict__[n] for n in ("meter", "written", "blocks_written")}
        return new


# Operations whose result is charged or estimated: filters that the compiled template calls.


@pass_context
def _tick(context: MeteredContext, value: Any) -> bool:
    context.meter.tick()
    return True


@pass_context
def _charge(context: MeteredContext, value: Any) -> Any:
    return context.meter.charge(value)


@pass_context
def _add(context: MeteredContext, left: Any, right: Any) -> Any:
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        context.meter.check(len(left) + len(right))
    return context.meter.charge(left + right)


@pass_context
def _multiply(context: MeteredContext, left: Any, right: Any) -> Any:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(other, int):
            context.meter.check(len(one) * other)
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    return context.meter.charge(left * right)


@pass_context
def _power(context: MeteredContext, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right)
    return left**right


@pass_context
def _modulo(context: MeteredContext, left: Any, right: Any) -> Any:
    if not isinstance(left, str):
        return left % right
    check_format(context.meter, left, right if isinstance(right, tuple) else (right,))
    return context.meter.charge(left % right)


@pass_context
def _concatenate(context: MeteredContext, values: list[Any]) -> str:
    texts = list(map(str, values))
    context.meter.check(sum(map(len, texts)))
    return str(context.meter.charge("".join(texts)))


OPERATIONS = {
    "_tick": _tick,
    "_charge": _charge,
    "_add": _add,
    "_multiply": _multiply,
    "_power": _power,
    "_modulo": _modulo,
    "_concatenate": _concatenate,
}


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise LimitError(f"it computes a number of more than {_MAX_BITS:,} bits")


def check_format(meter: Meter, text: str, values: Iterable[Any]) -> None:
    """Check a text with places for values: widths can make the result of any size."""
    if re.search(r"%[^a-zA-Z%]*(\*|\d{4})|\{[^}]*(\{|\d{4})", text):
        raise LimitError("it formats a text with a computed width, or one above 999")
    meter.check_arguments(values)
    sizes = sum(len(str(meter.charge(value))) for value in values)
    meter.check(len(text) * max(sizes, 1) + 1000 * (text.count("%") + text.count("{")))


def _check_join(meter: Meter, separator: str, values: Iterable[Any]) -> list[Any]:
    """Return the values as a list that can be joined."""
    values = [meter.charge(value) for value in values]
    meter.check(len(separator) * len(values) + sum(len(str(value)) for value in values))
    return values


def _check_replace(meter: Meter, text: str, old: Any = "", new: Any = "", *_: Any) -> str:
    meter.check(len(text) + str(text).count(str(old)) * len(str(new)))
    return text


def _check_indent(meter: Meter, text: str, width: Any = 4, *_: Any, **__: Any) -> str:
    meter.check((text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
    return text


def _check_format_filter(meter: Meter, text: Any, *values: Any, **named: Any) -> Any:
    check_format(meter, str(text), (*values, *named.values()))
    return text


def _check_sum(_: Meter, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):  # each sum copies all items before
        raise LimitError("it adds lists with the filter sum")
    return values


def _check_join_filter(
    meter: Meter, values: Any, d: str = "", attribute: Any = None
) -> Any:  # jinja2's names
    return values if attribute is not None else _check_join(meter, d, values)


_FILTER_CHECKS: dict[str, Callable[..., Any]] = {
    "format": _check_format_filter,
    "indent": _check_indent,
    "join": _check_join_filter,
    "replace": _check_replace,
    "sum": _check_sum,
}


def limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter whose arguments and result are charged."""
    check = _FILTER_CHECKS.get(name)
    # What jinja2's decorators (`pass_context`, …) leave: which object comes first.
    first = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @wraps(function)
    def run(context: MeteredContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = context.meter
        meter.tick()
        if args:
            meter.check_arguments(args)
        if kwargs:
            meter.check_arguments(kwargs.values())
        if check is not None:
            value = check(meter, value, *args, **kwargs)
        if first is None:
            return meter.charge(function(value, *args, **kwargs))
        given = {
            "context": context,
            "eval_context": context.eval_ctx,
            "environment": context.environment,
        }[first]
        return meter.charge(function(given, value, *args, **kwargs))

    return pass_context(run)


def checked_call(
    meter: Meter, text: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of a text's method, after a look at the size of its result."""
    meter.check_arguments((*args, *kwargs.values()))
    if method == "join" and len(args) == 1:
        return (_check_join(meter, text, args[0]),)
    if method == "replace":
        _check_replace(meter, text, *args)
    elif method not in _LONGER:
        raise LimitError(f"it calls the method {method} of a text")
    return args


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    width = indent if isinstance(indent, int) else len(indent or "")
    if max([width, *map(len, separators or ())]) > 16:
        raise LimitError("it writes JSON with an indent or separators of more than 16 characters")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
