"""Running a chat template that nobody has read: no way out, and an end in time and size.

Jinja's immutable sandbox closes the way to Python's internals. It does not bound work, so
each rendering has a :class:`Budget`: every loop pass and macro call looks at the clock (the
check is put into the template's syntax tree, so that loops without output end too),
every printed value is counted, and operators and filters that grow a value are measured before
they run.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_REPEATS = 100_000  # a width, a count, an exponent; equals Jinja's limit for range()
PRINT_FACTOR = 8  # a printed character may pass through this many macros and blocks

_GROWING_METHODS = frozenset(
    ("center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust", "zfill")
)
_GROWING_FILTERS = (
    *("batch", "center", "format", "indent", "join", "replace", "round", "slice", "string"),
    *("tojson", "truncate"),
)
_NEEDLESS = ("filesizeformat", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
# A width of six digits, or one taken from the arguments: %*d, %.999999f, {:999999}, {:{}}.
_WIDE_FORMAT = re.compile(r"%[-#0 +]*\d*\.?(\*|\d{6})|%[-#0 +]*\d{6}|\{[^{}]*(\d{6}|\{)")

_TICK, _CONCATENATE = "_tick", "_concatenate"  # unreachable: kwargs may not begin with "_"


class BudgetExceeded(Exception):
    """``limit`` says which: "time" or "size"."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit


class Budget:
    """What one rendering may use: seconds, and characters of any one value."""

    def __init__(self, max_seconds: float, max_chars: int) -> None:
        self.deadline = time.monotonic() + max_seconds
        self.max_chars = max_chars
        self.left_to_print = PRINT_FACTOR * max_chars

    def tick(self) -> None:
        if time.monotonic() > self.deadline:
            raise BudgetExceeded("time")

    def check_size(self, size: int) -> None:
        if size > self.max_chars:
            raise BudgetExceeded("size")

    def spend(self, size: int) -> None:
        self.left_to_print -= size
        if self.left_to_print < 0:
            raise BudgetExceeded("size")


_budget: ContextVar[Budget] = ContextVar("template budget")


def compile_template(source: str) -> tuple[Template, nodes.Template]:
    """The template with its checks built in, and its tree as written. Raises TemplateError,
    or RecursionError for a source that nests too deeply."""
    environment = _Sandbox()
    written = environment.parse(source)
    checked = _Checks().visit(environment.parse(source))
    checked.set_environment(environment)
    return environment.from_string(checked), written


def render(template: Template, variables: Mapping[str, Any], budget: Budget) -> str:
    """Raises :class:`BudgetExceeded`, or whatever the template's expressions raise."""
    token = _budget.set(budget)
    try:
        pieces = []
        size = 0
        for piece in template.generate(dict(variables)):
            budget.tick()
            size += len(piece)
            budget.check_size(size)
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _budget.reset(token)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Hugging Face's template dialect (trim_blocks, lstrip_blocks, loop controls)."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folding constants would run them without a budget
            finalize=_printed,
            extensions=[loopcontrols, _GenerationBlock],
        )
        self.filters["tojson"] = _tojson
        for name in _GROWING_FILTERS:
            self.filters[name] = _measured(name, self.filters[name])
        for name in _NEEDLESS:
            del self.filters[name]
        self.globals = {
            "range": self.globals["range"],
            "dict": _dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            _TICK: _tick,
            _CONCATENATE: _concatenate,
        }

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes) and method.__name__ in _GROWING_METHODS:
            if method.__name__ == "join" and args:
                args = (list(args[0]),)
                _check_join(args[0], owner)
            else:
                _check_growth(method.__name__, (owner, *args), kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _GenerationBlock(Extension):
    """``{% generation %}`` marks assistant turns for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Checks(NodeTransformer):
    """A clock check in each loop pass and call, a size check in each ``~``."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _statement(node.lineno))
        if node.test is not None:  # runs for items that never reach the body
            lineno = node.test.lineno
            node.test = nodes.And(nodes.Not(_call(_TICK, [], lineno)), node.test, lineno=lineno)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _statement(node.lineno))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self.visit_Macro(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(_CONCATENATE, node.nodes, node.lineno)


def _call(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    function = nodes.Name(name, "load", lineno=lineno)
    return nodes.Call(function, args, [], None, None, lineno=lineno)


def _statement(lineno: int) -> nodes.Node:
    return nodes.ExprStmt(_call(_TICK, [], lineno), lineno=lineno)


def _tick() -> None:
    _budget.get().tick()


def _concatenate(*values: Any) -> str:
    budget = _budget.get()
    budget.check_size(sum(_size(value, budget) for value in values))
    return "".join([str(value) for value in values])


def _printed(value: Any) -> Any:
    """Jinja's ``finalize``: sees each value before it becomes output."""
    budget = _budget.get()
    budget.spend(_size(value, budget))
    return value


def _size(value: Any, budget: Budget) -> int:
    """About how many characters ``str(value)`` has; stops walking when over the limit.

    A list that holds itself twice, and so on 40 times, is small in memory but not in print.
    """
    if isinstance(value, str):
        return len(value)
    total = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, Mapping):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
            stack += item
        total += 1
        budget.check_size(total)
    return total


def _check_operator(operator: str, left: Any, right: Any) -> None:
    budget = _budget.get()
    if operator == "**":
        if isinstance(right, int) and abs(right) > 64:
            raise BudgetExceeded("size")
        budget.check_size(_bits(left))
    elif operator == "+":
        if hasattr(left, "__len__") and hasattr(right, "__len__"):
            budget.check_size(len(left) + len(right))
    elif operator == "*":
        budget.check_size(_repeated(left, right))
        budget.check_size(_repeated(right, left))
        budget.check_size(_bits(left) + _bits(right))
    elif isinstance(left, str):  # %
        _check_growth("format", (left, right), {})


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _repeated(sequence: Any, count: Any) -> int:
    return len(sequence) * count if hasattr(sequence, "__len__") and isinstance(count, int) else 0


def _check_growth(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Bound what a method or filter returns by its arguments (the value first)."""
    budget = _budget.get()
    value, others = args[0], (*args[1:], *kwargs.values())
    size = _size(value, budget) + sum(_size(other, budget) for other in others)
    if name in ("format", "format_map"):
        if _WIDE_FORMAT.search(str(value)):
            raise BudgetExceeded("size")
    elif name == "replace" and isinstance(value, str) and len(others) > 1:
        old, new = str(others[0]), str(others[1])
        size += value.count(old) * len(new)
    elif any(isinstance(other, int) and abs(other) > MAX_REPEATS for other in others):
        raise BudgetExceeded("size")
    budget.check_size(size)


def _check_join(items: list[Any], separator: Any) -> None:
    budget = _budget.get()
    budget.check_size(len(items) * len(str(separator)) + _size(items, budget))


def _measured(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is measured first. Jinja passes some a context or environment in front."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        if name == "join":
            args = (*args[:first], list(args[first]), *args[first + 1 :])
            _check_join(args[first], args[first + 1] if len(args) > first + 1 else "")
        else:
            _check_growth(name, args[first:], kwargs)
        return function(*args, **kwargs)

    return measured


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, escapes nothing for HTML: a model reads it, not a browser."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """A function, not the class: the class has methods such as ``fromkeys``."""
    return dict(*args, **kwargs)


class _Namespace(Namespace):
    """Takes no name with a leading underscore, which could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"  # its content could be larger than any limit


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateError(f"a namespace cannot hold {name!r}")
