"""A Jinja sandbox that limits a template's work.

Jinja's sandbox keeps a template from Python's internals, but not from two nested loops of 10^5 or
from doubling a text 40 times: such a template of a downloaded folder would hold a thread of the
server for ever, or take all memory. Here a rendering has a number of units, and what could take
long spends them before it begins: each turn of a loop and call of a macro (more if it is long); an
operator, filter, method, comparison or output for every 16 characters and for every element that it
reads, and for what it adds to them, as 'x' * n and center(n) do. For that the syntax tree is
changed, and nothing is evaluated while it is compiled. Units are counts, so that the outcome does
not depend on the machine: at most a few seconds and a few hundred megabytes.

Cost: 30 to 60 us for a conversation of 4 messages, which takes 25 us without limits. When it loses:
a template whose work grows with the square of the conversation's length, from some thousand
messages on. Equivalence (test_all.py): the text that transformers renders. Needs: jinja2.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import functools
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_WORK = 5_000_000  # units of a rendering
MAX_READS = 64  # and those of reading what it is given so often
CHARACTERS = 16  # that one unit reads or writes
CALL = 10  # units of a call or filter of the smallest values
NODES = 8  # of a loop's body in the syntax tree that one unit runs
# filters and methods that do not read what is in the elements of a collection
ONE_LEVEL_FILTERS = {
    *"attr batch count d default first items last length list map random reject rejectattr".split(),
    *"reverse select selectattr slice".split(),
}
ONE_LEVEL_METHODS = {"copy", "get", "items", "keys", "values"}
COMPARING_TESTS = {
    *"== != < <= > >= eq equalto ne lt lessthan le gt greaterthan ge in lower upper".split()
}
WIDTH = re.compile(r"[%:.<>=^)][-+ #0,_^]*(\d+)")  # in a format string
WIDTH_IN_ARGUMENTS = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\d*\.)?\*|\{[^{}]*\{")


class TooMuchWork(Exception):
    """A rendering has spent its units."""


class _Work(threading.local):
    left = MAX_WORK


_WORK = _Work()


def start_rendering(variables: dict[str, Any]) -> None:
    """Give the rendering that begins in this thread its units."""
    _WORK.left = 2**60
    _WORK.left = MAX_WORK + MAX_READS * _read(variables)


def _spend(units: float) -> None:
    left = _WORK.left = _WORK.left - units
    if left < 0:
        raise TooMuchWork


def _read(value: Any) -> float:
    """Spend the units of reading a value with all that is in it, and return them."""
    if type(value) is str:
        units = 1 + len(value) // CHARACTERS
        _spend(units)
        return units
    before, stack = _WORK.left, [value]
    while stack:
        x = stack.pop()
        if isinstance(x, (str, bytes)):
            _spend(1 + len(x) // CHARACTERS)
        elif isinstance(x, int):
            _spend(1 + x.bit_length() // CHARACTERS)
        elif isinstance(x, (list, tuple, dict, Collection, Namespace)):
            if isinstance(x, Namespace):
                x = object.__getattribute__(x, "_Namespace__attrs")
            _spend(1 + len(x))
            stack += x
            stack += x.values() if isinstance(x, Mapping) else ()
        else:
            _spend(1)
    return before - _WORK.left


def _read_one_level(value: Any) -> None:
    """Spend a unit for each element, or CHARACTERS of a text; an iterator was paid for when it was
    made."""
    if isinstance(value, (str, bytes)):
        _spend(1 + len(value) // CHARACTERS)
    else:
        _spend(1 + (len(value) if isinstance(value, (list, tuple, Collection)) else 0))


def _read_call(name: str, subject: Any, args: Iterable[Any], one_level: set[str]) -> None:
    """Spend the units of a method or filter `name` of `subject`."""
    _spend(CALL)
    args = [*args]
    if name in one_level:
        _read_one_level(subject)
        units = 0
    else:
        units = _read(subject)
    units += sum(map(_read, args))
    _spend(_added(name, subject, args, units) // CHARACTERS)


def _added(name: str, subject: Any, args: list[Any], units: float) -> float:
    """Characters of a result beyond those of what is read; an element counts as CHARACTERS. units:
    of reading it."""
    args = [y for x in args for y in (x if isinstance(x, (list, tuple)) else [x])]
    numbers = sum(abs(x) for x in args if isinstance(x, int))
    texts = [x for x in args if isinstance(x, (str, bytes))]
    is_text = isinstance(subject, (str, bytes))
    match name:
        case "center" | "ljust" | "rjust" | "zfill" | "round" | "to_bytes":
            return numbers
        case "batch" | "slice" | "list":
            return CHARACTERS * (numbers + (len(subject) if is_text else 0))
        case "generate_lorem_ipsum":  # paragraphs times words, 500 by default
            return (500 + numbers) ** 2
        case "format" | "format_map":
            return _widths(subject, args) if is_text else 0
        case "strftime_now":
            return sum(_widths(text, []) for text in texts)
        case "replace" if is_text and len(texts) > 1 and type(texts[0]) is type(subject):
            return subject.count(texts[0]) * len(texts[1])
        case "split" | "rsplit" if is_text and texts and texts[0] and type(texts[0]) is str:
            return CHARACTERS * str(subject).count(texts[0])
        case "split" | "rsplit" | "splitlines" | "expandtabs":
            return (CHARACTERS + numbers) * len(subject)
        case "indent" if is_text:
            return (str(subject).count("\n") + 1) * (numbers + sum(map(len, texts)))
        case "join" | "replace" | "indent" | "tojson":
            added = numbers + sum(map(len, texts))
            return units * CHARACTERS * added * (added if name == "tojson" else 1)
        case "pprint" | "striptags" | "sum" | "translate" | "urlize" | "wordwrap" | "xmlattr":
            return units**2  # at worst
    return 0


def _widths(text: str, args: Iterable[Any]) -> float:
    """Characters that the widths and precisions of a format string may add."""
    widths = [int(digits[:20]) for digits in WIDTH.findall(text)]
    if WIDTH_IN_ARGUMENTS.search(text):
        widths += [abs(x) for x in args if isinstance(x, int)]
    return sum(widths)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, in which all that could take long spends units first."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any):
        super().__init__(**options, finalize=_output, optimized=False)
        for name, function in self.filters.items():
            self.filters[name] = limited_filter(name, function)
        for name in COMPARING_TESTS & self.tests.keys():
            self.tests[name] = limited_filter(name, self.tests[name])
        self.filters |= {
            SPEND: _spend,
            READ: _passed(_read),
            READ_ONE_LEVEL: _passed(_read_one_level),
        }

    def compile_limited(self, text: str) -> Template:
        """A template; jinja2.TemplateError if it is none."""
        tree = _Limits().visit(self.parse(text))
        tree.set_environment(self)
        return self.from_string(tree)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is type(right) is str:
            _spend(1 + (len(left) + len(right)) // CHARACTERS)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _spend(1 + left.bit_length() * abs(right) // CHARACTERS)
        elif operator == "+" and isinstance(left, (list, tuple)):
            _read_one_level(left)
            _read_one_level(right)
        else:
            units = _read(left) + _read(right)
            times = [x for x in (left, right) if isinstance(x, int)]
            if operator == "*" and len(times) == 1:
                _spend(units * abs(times[0]))
            elif operator == "%" and isinstance(left, str):
                args = right if isinstance(right, tuple) else (right,)
                _spend(_widths(left, args) // CHARACTERS)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(__obj, (Macro, LoopContext)):  # whose bodies spend more
            _spend(CALL)
        else:
            method = getattr(__obj, "__wrapped__", __obj)  # str.format is wrapped
            subject, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
            if name == "join" and args:
                args = ([*args[0]] if isinstance(args[0], Iterator) else args[0], *args[1:])
                _read_call(name, args[0], [subject], ONE_LEVEL_METHODS)
            else:
                _read_call(name, subject, [*args, *kwargs.values()], ONE_LEVEL_METHODS)
        return super().call(__context, __obj, *args, **kwargs)


# Filters that the changed syntax tree has, of which no template can spell the names
SPEND, READ, READ_ONE_LEVEL = " spend", " read", " read one level"


def _passed(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def filtered(value: Any) -> Any:
        function(value)
        return value

    return filtered


@pass_context
def _output(context: Any, value: Any) -> Any:
    """Of each {{ expression }}. It takes the context so that Jinja calls it as late as it can."""
    _read(value)
    return value


def limited_filter(name: str, function: Callable) -> Callable:
    """A filter or test that spends units first."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja's own argument

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        own, subject, more = args[:first], args[first], args[first + 1 :]
        if name in ("join", "sum") and isinstance(subject, Iterator):
            subject = [*subject]
        _read_call(name, subject, [*more, *kwargs.values()], ONE_LEVEL_FILTERS)
        return function(*own, subject, *more, **kwargs)

    return limited


class _Limits(NodeTransformer):
    """Makes loops, macros, texts, comparisons, slices, concatenations and keys spend units."""

    def _with_step(self, node: nodes.Node) -> nodes.Node:
        units = 1 + sum(1 for _ in node.find_all(nodes.Node)) // NODES
        node = self.generic_visit(node)
        node.body.insert(0, _spend_statement(units, node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _with_step

    def visit_For(self, node: nodes.For) -> nodes.For:
        node = self._with_step(node)
        node.iter = _filter(node.iter, READ_ONE_LEVEL)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node | list[nodes.Node]:
        node = self.generic_visit(node)
        n = sum(len(x.data) for x in node.nodes if isinstance(x, nodes.TemplateData))
        return [_spend_statement(1 + n // CHARACTERS, node.lineno), node] if n else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        node = self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        is_equality = len(node.ops) == 1 and node.ops[0].op in ("eq", "ne")
        if is_equality and any(isinstance(side, nodes.Const) for side in sides):
            return node  # reads no more than the constant has
        node.expr = _filter(node.expr, READ)
        for operand in node.ops:
            operand.expr = _filter(operand.expr, READ)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        node = self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filter(node.node, READ_ONE_LEVEL)
        else:
            node.arg = _filter(node.arg, READ)  # a tuple's hash reads all that is in it
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        node = self.generic_visit(node)
        node.nodes = [_filter(x, READ) for x in node.nodes]
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        node = self.generic_visit(node)
        node.key = _filter(node.key, READ)
        return node


def _filter(node: nodes.Expr, name: str) -> nodes.Expr:
    """The expression, filtered; a constant needs nothing."""
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _spend_statement(units: int, line: int) -> nodes.ExprStmt:
    number = nodes.Const(units, lineno=line)
    return nodes.ExprStmt(nodes.Filter(number, SPEND, [], [], None, None, lineno=line), lineno=line)
