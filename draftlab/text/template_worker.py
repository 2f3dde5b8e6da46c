"""The program that renders chat templates for template_process.py, which starts it.

The language is that of transformers' `apply_chat_template`, in the same sandbox of jinja2. So that
it starts in 0.1 s, this file imports nothing but jinja2 and the standard library.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import (
    BaseLoader,
    Template,
    TemplateError,
    TemplateNotFound,
    TemplateSyntaxError,
    debug,  # noqa: F401  (jinja2 imports it at the first error, when memory may be short)
    nodes,
)
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LIMITS = {
    resource.RLIMIT_AS: 1 << 30,
    resource.RLIMIT_NOFILE: 16,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_FSIZE: 0,
}
_MAX_SHOWN = 300
"""Characters of an error's message that are passed on."""


class _GenerationBlocks(Extension):
    """Reads `{% generation %}` blocks, which mark answers, as what they enclose."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Dict:
    """The function `dict`, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace without private names."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=…)` is allowed
        self, *rest = args
        Namespace.__init__(self, {})
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"access to the private name {name} of a namespace is unsafe")
        super().__setitem__(name, value)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, loopcontrols],
        loader=BaseLoader(),  # finds nothing
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "dict": _Dict(),
        "namespace": _Namespace,
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment.from_string(source)


def _render(source: str, variables: Mapping[str, Any]) -> str | dict[str, Any]:
    """Return a text, or the fields of a `Fault` (template_process.py)."""
    try:
        return _compiled(source).render(variables)
    except TemplateSyntaxError as error:
        return {"kind": "syntax", "reason": _shown(error), "line": error.lineno}
    except RecursionError:
        return {"kind": "refused", "reason": "it calls itself without end, or is nested too deep"}
    except MemoryError:
        return {"kind": "refused", "reason": "it fills the memory"}
    except TemplateNotFound as error:
        return {"kind": "refused", "reason": f"it reads another template: {_shown(error)}"}
    except (
        SecurityError,
        OverflowError,
        SyntaxError,
    ) as error:  # Python's, of what jinja2 compiles
        return {"kind": "refused", "reason": _shown(error)}
    except Exception as error:  # whatever a stranger's program raises
        return {"kind": "conversation", "reason": _shown(error)}


def _shown(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} …"


def _limit(kind: int, value: int) -> None:
    with suppress(ValueError, OSError):  # macOS has no limit of memory
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, hard))


def main() -> None:
    """Answer requests, a line of JSON each, until the process that sends them ends."""
    for kind, value in LIMITS.items():
        _limit(kind, value)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + request["seconds"])
        answers = [_render(request["source"], chat) for chat in request["chats"]]
        answer = json.dumps(answers, ensure_ascii=False, separators=(",", ":"))
        del answers
        sys.stdout.buffer.write(answer.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()
