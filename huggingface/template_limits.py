"""A Jinja sandbox that limits a template's work.

Jinja's sandbox keeps a template from Python's internals, but not from two nested loops of 10^5 or
from doubling a text 40 times: such a template of a downloaded folder would hold a thread of the
server for ever, or take all memory. Here a rendering has a number of units, and what could take
long spends them before it begins: each turn of a loop and call of a macro (more if it is long); an
operator, filter, method, comparison or output for every 16 characters and for every element that it
reads, and for what it adds to them, as 'x' * n and center(n) do. For that the syntax tree is
changed, and nothing is evaluated while it is compiled. Units are counts, so that the outcome does
not depend on the machine: mostly a few seconds (25 at worst, that of groupby), and a few hundred
megabytes.

Cost: 30 to 60 us for a conversation of 4 messages, which takes 25 us without limits. When it loses:
a template whose work grows with the square of the conversation's length, from some thousand
messages on. Equivalence (test_all.py): the text that transformers renders. Needs: jinja2.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import functools
import inspect
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
ONE_LEVEL = {
    *"attr batch copy d default first get items keys last length list map random reject".split(),
    *"rejectattr reverse select selectattr slice values".split(),
}
# whose arguments add characters, or elements, at every place of what they read
GROWING = {
    *"batch center expandtabs indent join list ljust replace rjust round slice split".split(),
    *"rsplit splitlines to_bytes tojson zfill".split(),
}
REPEATING = {"translate", "urlize", "wordwrap"}  # an argument, for each character, link or word
SQUARE = {*"pprint striptags sum translate urlize wordwrap xmlattr".split()}  # time, at worst
LISTS = {*"batch expandtabs list rsplit slice split splitlines".split()}  # elements of a text
COMPARING_TESTS = {
    *"== != < <= > >= eq equalto ne lt lessthan le gt greaterthan ge in lower upper".split()
}
WIDTH = re.compile(r"[%:.<>=^)][-+ #0,_^]*(\d+)")  # in a format string
WIDTH_IN_ARGUMENTS = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\d*\.)?\*|\{[^{}]*\{")
SPEND, READ = " spend", " read"  # filters in the changed syntax tree; no template can spell them


class TooMuchWork(Exception):
    """A rendering has spent its units."""


_WORK = threading.local()  # .left: units that the rendering of this thread has


def start_rendering(variables: dict[str, Any]) -> None:
    """Give the rendering that begins in this thread its units."""
    _WORK.left = 2**60
    _WORK.left = MAX_WORK + MAX_READS * _read(variables)


def _spend(units: float) -> None:
    _WORK.left -= units
    if _WORK.left < 0:
        raise TooMuchWork


def _read(value: Any, deep: bool = True) -> float:
    """Spend the units of reading a value, deep: with all that is in it. Returns them. An iterator
    was paid for when it was made; the work of an integer's arithmetic is the square of its size."""
    before, stack = _WORK.left, [value]
    while stack:
        x = stack.pop()
        if isinstance(x, (str, bytes)):
            _spend(1 + len(x) // CHARACTERS)
        elif isinstance(x, int):
            _spend(1 + (x.bit_length() // 64) ** 2)
        elif isinstance(x, (Collection, Namespace)):
            if isinstance(x, Namespace):
                x = object.__getattribute__(x, "_Namespace__attrs")
            _spend(1 + len(x))
            if deep:
                stack += x
                stack += x.values() if isinstance(x, Mapping) else ()
        else:
            _spend(1)
    return before - _WORK.left


def _spend_call(name: str, subject: Any, args: list[Any]) -> None:
    """Spend the units of a filter, a method of `subject` or a function."""
    units = _read(subject, name not in ONE_LEVEL) + sum(map(_read, args))
    _spend(CALL + _growth(name, subject, args, units))


def _growth(name: str, subject: Any, args: list[Any], units: float) -> float:
    """Units of making what is more than the values that are read, of so many units."""
    args = [y for x in args for y in (x if isinstance(x, (list, tuple)) else [x])]
    texts = [x for x in args if isinstance(x, (str, bytes))]
    numbers = sum(abs(x) for x in args if isinstance(x, int))
    is_text = isinstance(subject, (str, bytes))
    if name in ("format", "format_map", "strftime_now"):
        form = "".join(texts) if subject is None else str(subject)
        return _widths(form, args) / CHARACTERS
    if name == "generate_lorem_ipsum":  # paragraphs times words, 500 by default
        return (500 + numbers) ** 2
    if name in SQUARE:
        repeats = name in REPEATING and any(not isinstance(x, int) for x in args)
        return units**2 * (CHARACTERS / 4 if repeats else 1 / CHARACTERS)
    if name not in GROWING:
        return 0
    added = numbers + sum(map(len, texts))
    if is_text and name in LISTS:
        added += CHARACTERS
    if is_text and [type(x) for x in texts[:1]] == [type(subject)] and texts[0]:
        if name in ("split", "rsplit"):
            return subject.count(texts[0])
        if name == "replace" and len(texts) == 2:
            return subject.count(texts[0]) * len(texts[1]) / CHARACTERS
    return units * added * (added if name == "tojson" else 1)  # tojson: it indents at every depth


def _widths(text: str, args: Iterable[Any]) -> int:
    """Characters that the widths and precisions of a format string may add."""
    widths = [int(digits[:20]) for digits in WIDTH.findall(text)]
    if WIDTH_IN_ARGUMENTS.search(text.replace("{{", "")):  # which is a brace
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
        self.filters |= {SPEND: _spend, READ: _filtered}

    def compile_limited(self, text: str) -> Template:
        """A template; jinja2.TemplateError if it is none."""
        tree = _Limits().visit(self.parse(text))
        tree.set_environment(self)
        return self.from_string(tree)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        units = _read(left, operator != "+") + _read(right, operator != "+")
        both = isinstance(left, int), isinstance(right, int)
        if operator == "**" and all(both):
            _spend((left.bit_length() * abs(right) // 64) ** 2)
        elif operator == "*" and any(both) and not isinstance(right if both[0] else left, float):
            times = left if both[0] else right
            _spend(0 if all(both) else units * abs(times))
        elif operator == "%" and isinstance(left, (str, bytes)):
            args = right if isinstance(right, tuple) else (right,)
            _spend(_widths(str(left), args) / CHARACTERS)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # str.format is wrapped
        subject, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(__obj, (Macro, LoopContext)):  # whose bodies spend more
            _spend(CALL)
        elif name == "join" and args:
            args = ([*args[0]] if isinstance(args[0], Iterator) else args[0], *args[1:])
            _spend_call(name, args[0], [subject])
        else:
            _spend_call(name, subject, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)


def limited_filter(name: str, function: Callable) -> Callable:
    """A filter or test that spends units first."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja's own argument

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        if kwargs:  # in the order of the function's parameters
            bound = inspect.signature(function).bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        own, subject, more = args[:first], args[first], args[first + 1 :]
        if name in ("join", "sum") and isinstance(subject, Iterator):
            subject = [*subject]
        _spend_call(name, subject, [*more, *kwargs.values()])
        return function(*own, subject, *more, **kwargs)

    return limited


def _filtered(value: Any, deep: bool) -> Any:
    _read(value, deep)
    return value


@pass_context
def _output(context: Any, value: Any) -> Any:
    """Of each {{ expression }}. It takes the context so that Jinja calls it as late as it can."""
    return _filtered(value, True)


class _Limits(NodeTransformer):
    """Makes loops, macros, comparisons, slices, concatenations and keys spend units."""

    def generic_visit(self, node: nodes.Node) -> nodes.Node:
        node = super().generic_visit(node)
        if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
            texts = sum(len(x.data) for x in node.find_all(nodes.TemplateData))
            units = 1 + sum(1 for _ in node.find_all(nodes.Node)) // NODES + texts // CHARACTERS
            spend = _filter(nodes.Const(units, lineno=node.lineno), SPEND)
            node.body.insert(0, nodes.ExprStmt(spend, lineno=node.lineno))
        match node:
            case nodes.For():
                node.iter = _filter(node.iter, READ, False)
            case nodes.Getitem() if isinstance(node.arg, nodes.Slice):
                node.node = _filter(node.node, READ, False)
            case nodes.Getitem():  # a tuple's hash reads all that is in it
                node.arg = _filter(node.arg, READ, True)
            case nodes.Pair():
                node.key = _filter(node.key, READ, True)
            case nodes.Concat():
                node.nodes = [_filter(x, READ, True) for x in node.nodes]
            case nodes.Compare() if not _with_constant(node):
                for side in (node, *node.ops):
                    side.expr = _filter(side.expr, READ, True)
        return node


def _with_constant(node: nodes.Compare) -> bool:
    """Whether it is an equality with a constant: it reads no more than the constant has."""
    sides = [side.expr for side in (node, *node.ops)]
    return node.ops[0].op in ("eq", "ne") and len(sides) == 2 and nodes.Const in map(type, sides)


def _filter(node: nodes.Expr, name: str, *args: bool) -> nodes.Expr:
    """The expression, filtered by one of ours; a constant is not read."""
    if isinstance(node, nodes.Const) and name == READ:
        return node
    constants = [nodes.Const(x, lineno=node.lineno) for x in args]
    return nodes.Filter(node, name, constants, [], None, None, lineno=node.lineno)
