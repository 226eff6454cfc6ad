"""Running a chat template that nobody has read: no way out, and an end in time and size.

Jinja's immutable sandbox closes the way to Python's internals. It does not bound work, so
each rendering has a :class:`Budget`: every loop pass, call and filter looks at the clock (the
check is put into the template's syntax tree, so that loops without output end too), and
whatever makes a value is measured before it runs. Of strings and mappings a template has
the methods listed below, of other values none. Python walks nested values without
looking at any clock, and a list that holds itself twice, and so on 40 times, is small in memory
but endless to walk: values are measured in full before they are printed, compared, or filtered.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_WALL_SECONDS = 30.0  # a thread that gets no core for so long is on an overloaded machine
MAX_REPEATS = 100_000  # a width or a count; equals Jinja's limit for range()
MAX_BITS = 10_000  # of an integer; slower than linear work on more is slow
MAX_WIDTH = 999  # in a format
MAX_SEPARATORS = 16  # characters of those of JSON
TOTAL_FACTOR = 32  # what all values of a rendering may have together, over what one may

_STRING_METHODS = frozenset(
    "capitalize casefold center count endswith expandtabs find format format_map index isalnum "  # noqa: SIM905
    "isalpha isascii isdecimal isdigit islower isnumeric isspace istitle isupper join ljust lower "
    "lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit "
    "rstrip split splitlines startswith strip swapcase title upper zfill".split()
)
_MAPPING_METHODS = frozenset(("copy", "get", "items", "keys", "values"))
# Filters that do not look into the elements of what they are given.
_SHALLOW_FILTERS = frozenset(
    "count d default first items last length list map reject rejectattr reverse safe select "  # noqa: SIM905
    "selectattr".split()
)
_NEEDLESS = ("filesizeformat", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
# A width of four digits, or one taken from the arguments: %*d, %(x).9999f, {:9999}, {:{}}.
_WIDE_FORMAT = re.compile(r"%(\([^)]*\))?[-#0 +]*(\d*\.)?(\*|\d{4})|\{[^{}]*(\d{4}|\{)")

# Unreachable for a template's author: kwargs and variables may not begin with "_".
_TICK, _CONCATENATE, _MEASURE, _COPY = "_tick", "_concatenate", "_measure", "_copy"


class BudgetExceeded(Exception):
    """``limit`` says which: "time" (of the processor), "wall" or "size"."""

    def __init__(self, limit: str) -> None:
        super().__init__(limit)
        self.limit = limit


class Budget:
    """What one rendering may use: seconds of its thread, and characters of any one value."""

    def __init__(self, max_seconds: float, max_chars: int) -> None:
        self.deadline = time.thread_time() + max_seconds
        self.wall_deadline = time.monotonic() + max_seconds + MAX_WALL_SECONDS
        self.max_chars = max_chars
        self.chars_left = TOTAL_FACTOR * max_chars

    def tick(self) -> None:
        if time.thread_time() > self.deadline:
            raise BudgetExceeded("time")
        if time.monotonic() > self.wall_deadline:
            raise BudgetExceeded("wall")

    def check_size(self, size: int) -> None:
        if size > self.max_chars:
            raise BudgetExceeded("size")

    def spend(self, size: int) -> None:
        """Before a value of about ``size`` characters (or items) is made."""
        self.check_size(size)
        self.chars_left -= size
        if self.chars_left < 0:
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

    intercepted_binops = frozenset(("+", "*", "**", "/", "//", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folding constants would run them without a budget
            finalize=_printed,
            extensions=[loopcontrols, _GenerationBlock],
        )
        for name in _NEEDLESS:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        for name, function in self.filters.items():
            self.filters[name] = _measured_filter(name, function)
        for name, function in self.tests.items():
            self.tests[name] = _measured_test(function)
        self.globals = {
            "range": self.globals["range"],
            "dict": _dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            _TICK: _tick,
            _CONCATENATE: _concatenate,
            _MEASURE: _measure,
            _COPY: _copy,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            allowed = attr in _STRING_METHODS
        elif isinstance(obj, Mapping):
            allowed = attr in _MAPPING_METHODS
        else:
            allowed = isinstance(obj, Namespace | LoopContext)
        return allowed and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().tick()
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            if method.__name__ == "join" and args:
                args = (list(args[0]),)
            _check_growth(method.__name__, (owner, *args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)


class _GenerationBlock(Extension):
    """``{% generation %}`` marks assistant turns for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Checks(NodeTransformer):
    """A clock check in each loop pass and macro; a size check in each ``~``, of what is cut into
    slices, of tuples (which may be hashed), and of what is compared, unless a constant ends the
    comparison at once."""

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

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _call(_COPY, [node.node], node.lineno)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call(_MEASURE, [node], node.lineno) if node.ctx == "load" else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        constant = isinstance(node.expr, nodes.Const)
        if not constant and not all(isinstance(o.expr, nodes.Const) for o in node.ops):
            node.expr = _call(_MEASURE, [node.expr], node.lineno)
            for operand in node.ops:
                operand.expr = _call(_MEASURE, [operand.expr], node.lineno)
        return node


def _call(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    function = nodes.Name(name, "load", lineno=lineno)
    return nodes.Call(function, args, [], None, None, lineno=lineno)


def _statement(lineno: int) -> nodes.Node:
    return nodes.ExprStmt(_call(_TICK, [], lineno), lineno=lineno)


def _tick() -> None:
    """Nothing more: each call looks at the clock."""


def _measure(value: Any) -> Any:
    _size(value, _budget.get())
    return value


def _copy(value: Any) -> Any:
    _budget.get().spend(_length(value))
    return value


def _concatenate(*values: Any) -> str:
    budget = _budget.get()
    budget.spend(sum(_size(value, budget) for value in values))
    return "".join([str(value) for value in values])


def _printed(value: Any) -> Any:
    """Jinja's ``finalize``: sees each value before it becomes output."""
    budget = _budget.get()
    budget.spend(_size(value, budget))
    return value


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _size(value: Any, budget: Budget) -> int:
    """About how many characters ``str(value)`` has; stops walking when over the limit."""
    if isinstance(value, str):
        return len(value)
    total = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
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
    bits = max(_bits(left), _bits(right))
    if operator == "**":
        bits = _bits(left) * right if isinstance(right, int) else bits
    elif operator == "*":
        bits = _bits(left) + _bits(right)
        for sequence, count in ((left, right), (right, left)):
            if hasattr(sequence, "__len__") and isinstance(count, int):
                budget.spend(_size(sequence, budget) * max(count, 0))
    elif operator == "+":
        measure = _length if not isinstance(left, tuple) else lambda value: _size(value, budget)
        budget.spend(measure(left) + measure(right))
    elif operator == "%" and isinstance(left, str):
        _check_growth("format", (left, right))
    if bits > MAX_BITS:
        raise BudgetExceeded("size")


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_growth(name: str, args: tuple[Any, ...]) -> None:
    """Bound what a method or filter returns by its arguments, the value first: each place in
    the value may come to hold all the others."""
    budget = _budget.get()
    value, others = args[0], args[1:]
    numbers = [abs(other) for other in others if isinstance(other, int)]
    if any(number > MAX_REPEATS for number in numbers):
        raise BudgetExceeded("size")
    more = sum(numbers) + sum(_size(other, budget) for other in others)
    text = str(value) if isinstance(value, str) else ""
    places = 1
    if name in ("format", "format_map"):
        if _WIDE_FORMAT.search(text):
            raise BudgetExceeded("size")
        places, more = text.count("%") + text.count("{"), more + MAX_WIDTH
    elif name == "replace":
        places = text.count(str(others[0])) if others else 0
    elif name == "expandtabs":
        places, more = text.count("\t"), more + 8
    elif name == "indent":
        places = text.count("\n") + 1
    elif name == "join":
        places = max(map(_length, args))
    elif name == "int" and len(text) > MAX_BITS // 4:
        raise BudgetExceeded("size")
    elif name == "sum" and not all(isinstance(other, int | float | str) for other in others):
        raise TemplateError("sum takes numbers")
    budget.spend(_size(value, budget) + places * more)


def _measured_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is measured first. Jinja passes some a context or environment in front."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.tick()
        front, value, others = args[:first], args[first], args[first + 1 :]
        if name in _SHALLOW_FILTERS:
            budget.spend(_length(value))
        else:
            value = list(value) if isinstance(value, Iterator) else value
            _check_growth(name, (value, *others, *kwargs.values()))
        return function(*front, value, *others, **kwargs)

    return measured


def _measured_test(function: Any) -> Callable[..., Any]:
    """A test with two operands compares them."""

    @wraps(function)
    def measured(*args: Any) -> Any:
        if len(args) > 1:
            budget = _budget.get()
            budget.tick()
            for arg in args:
                _size(arg, budget)
        return function(*args)

    return measured


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, escapes nothing for HTML: a model reads it, not a browser."""
    budget = _budget.get()
    if separators is not None and sum(map(len, separators)) > MAX_SEPARATORS:
        raise BudgetExceeded("size")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    pieces, size = [], 0
    for piece in encoder.iterencode(value):  # the deeper, the wider
        size += len(piece)
        budget.check_size(size)
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    _check_growth("format", (format, ""))
    return datetime.now().strftime(format)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """A function, not the class: the class has methods such as ``fromkeys``."""
    _budget.get().spend(sum(map(_length, args)) + len(kwargs))
    return dict(*args, **kwargs)


class _Namespace(Namespace):
    """Takes no name with a leading underscore, which could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = _dict(*rest, **kwargs)
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
