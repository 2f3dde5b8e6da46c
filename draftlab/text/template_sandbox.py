"""Chat templates in a sandbox with limits: a template is a stranger's program.

The language is that of transformers' `apply_chat_template`. Beyond the sandbox of jinja2, a
rendering may compute for `MAX_SECONDS` and make `MAX_CHARACTERS` (template_meter.py):

- Each turn of a loop and each call reads the clock of this thread, which works in any thread.
- The values that a template can keep or pass on (results of filters, calls, sums in assignments,
  lists and mappings) are charged with their size, nested values as often as they would be printed.
- An operation whose result can be many times larger than its operands is estimated before it runs.

Names and sums of a few terms, of which most templates consist, are computed as jinja2 does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from draftlab.text import template_meter
from draftlab.text.template_meter import (
    OPERATIONS,
    SHORTER,
    LimitError,
    Meter,
    MeteredContext,
    check_format,
    checked_call,
    limited_filter,
    to_json,
)

_MAX_SOURCE = 2_000_000
_FREE_SUMS = 8
"""Additions of one expression that are not estimated."""
_REMOVED_FILTERS = ("urlize", "wordwrap", "xmlattr")
"""Filters for HTML that can make a text of any size."""


class _Metering(NodeTransformer):
    """Rewrites a template so that its loops and the values that it keeps are counted."""

    def _operation(self, node: nodes.Node, name: str, *operands: nodes.Expr) -> nodes.Filter:
        first, *others = operands
        new = nodes.Filter(first, name, others, [], None, None, lineno=node.lineno)
        return new.set_environment(node.environment)  # type: ignore[no-any-return]

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node = self.generic_visit(node)
        tick = self._operation(node, "_tick", nodes.Const(0, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(tick, node.test, lineno=node.lineno)
        node.body = [nodes.ExprStmt(tick, lineno=node.lineno), *node.body]
        return node.set_environment(node.environment)

    def _assigned(self, value: nodes.Expr) -> nodes.Expr:
        has_sum = isinstance(value, nodes.Add) or value.find(nodes.Add) is not None
        return self._operation(value, "_charge", value) if has_sum else value

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        node.node = self.visit(self._assigned(node.node))
        return node

    def visit_With(self, node: nodes.With) -> nodes.Node:
        node.values = list(map(self._assigned, node.values))
        return self.generic_visit(node)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        sums = sum(1 for _ in node.find_all(nodes.Add))
        node = self.generic_visit(node)
        return node if sums < _FREE_SUMS else self._operation(node, "_add", node.left, node.right)

    def _binary(self, node: nodes.BinExpr) -> nodes.Node:
        node = self.generic_visit(node)
        names = {"*": "_multiply", "**": "_power", "%": "_modulo"}
        return self._operation(node, names[node.operator], node.left, node.right)

    visit_Mul = visit_Pow = visit_Mod = _binary

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        node = self.generic_visit(node)
        values = nodes.List(node.nodes, lineno=node.lineno)
        return self._operation(node, "_concatenate", values)

    def _container(self, node: Any) -> nodes.Node:
        node = self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":  # names that a tuple is assigned to
            return node  # type: ignore[no-any-return]
        return self._operation(node, "_charge", node)

    def _other_file(self, node: nodes.Node) -> nodes.Node:
        raise LimitError(f"it reads another template in line {node.lineno}")

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _other_file

    visit_List = visit_Dict = visit_Tuple = _container


class _Compiler(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        super().visit_Template(_Metering().visit(node), frame)


class _GenerationBlocks(Extension):
    """Keeps the ranges of `{% generation %}` blocks in the written text."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    @pass_context
    def _note(self, context: MeteredContext, caller: Callable[[], str]) -> str:
        text = caller()
        context.blocks_written.append((context.written, context.written + len(text)))
        return text


class _Namespace(Namespace):
    """A namespace without private names and without others in it."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=…)` is allowed
        self, *rest = args
        values = dict(*rest, **kwargs)
        Namespace.__init__(self, {})
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise LimitError(f"it sets a private name, {name}")
        if isinstance(value, Namespace):
            raise LimitError("it keeps a namespace in another value")
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Compiler
    context_class = MeteredContext

    def __init__(self) -> None:
        extensions = [_GenerationBlocks, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        kept = {n: f for n, f in self.filters.items() if n not in _REMOVED_FILTERS}
        kept["tojson"] = to_json
        self.filters = {n: limited_filter(n, f) for n, f in kept.items()} | OPERATIONS
        del self.globals["lipsum"]
        self.globals |= {
            "dict": _new_dict,
            "namespace": _Namespace,
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }

    @staticmethod
    def concat(parts: Iterable[str]) -> str:  # type: ignore[override]
        """Join what a macro or a block has written."""
        parts = list(parts)
        Meter(2 * template_meter.MAX_CHARACTERS).check(sum(map(len, parts)))
        return "".join(parts)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandboxed `str.format` of a text, with a look at the size of its result."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        @pass_context
        def run(context: MeteredContext, *args: Any, **kwargs: Any) -> str:
            check_format(context.meter, value.__self__, (*args, *kwargs.values()))
            return str(formatted(*args, **kwargs))

        return run

    def call(self, context: MeteredContext, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        meter = context.meter
        meter.tick()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            if obj.__name__ not in SHORTER:
                args = checked_call(meter, owner, obj.__name__, args, kwargs)
            return meter.charge(obj(*args, **kwargs))
        meter.check_arguments(args)
        meter.check_arguments(kwargs.values())
        return meter.charge(super().call(context, obj, *args, **kwargs))


def _raise(message: str) -> None:
    raise TemplateError(message)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


@lru_cache(maxsize=32)
def _compiled(source: str) -> Any:
    if len(source) > _MAX_SOURCE:
        raise LimitError(f"it has more than {_MAX_SOURCE:,} characters")
    return _Environment().from_string(source)


def render_template(
    source: str, variables: Mapping[str, Any], size: int
) -> tuple[str, list[tuple[int, int]]]:
    """Return a template's text and the character ranges of its `{% generation %}` blocks.

    Args:
        source: in Jinja.
        variables: JSON values by name.
        size: number of characters in the conversation.

    Raises:
        LimitError: the template exceeds its limits.
        Exception: whatever a template's mistakes raise.
    """
    template = _compiled(source)
    context = template.new_context(dict(variables))
    limit = template_meter.MAX_CHARACTERS + template_meter.SHARE * size
    context.meter = Meter(limit)

    def parts() -> Iterator[str]:
        for part in template.root_render_func(context):
            context.written += len(part)
            if context.written > limit:
                context.meter.check(context.written)
            yield part

    return "".join(parts()), context.blocks_written
