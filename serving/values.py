"""Texts that become known later: the dataflow of serving/programs.py, without an engine.

A Value is known once it has a result or an error. Its inputs are other Values: it starts when all
are known, and fails with the first that fails. A Stream is a list of Values that arrive one after
the other: the pieces of a growing text, or what is computed from them. Each has a path: (2, 0) is
the first piece of what was computed from the third piece. So items may end in any order, and the
result has them in order of path (ALTO, arXiv:2403.04311).

A result is passed on at once, in the thread of the asyncio loop, and not by futures, which would
take a turn of the loop for each value of a chain. A program is any object with `to_call`, a deque
of callbacks (see Value.resolve), `await_(value)`, called when a client waits, and `value(x)`, x as
a Value. When it loses: `put` looks for cycles, in time that grows with what the item waits for.
Equivalence (test_all.py): a Stream's result == that of nested loops over the whole texts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

Path = tuple[int, ...]


class CallError(RuntimeError):
    """Why a value will never be known."""


def _check_separator(separator: Any) -> None:
    if not (isinstance(separator, str) and separator):
        raise ValueError(f"lines: the separator must be a non-empty text, not {separator!r}")


def _error_text(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())}"


def as_text(result: Any) -> str:
    """A result in a prompt: an element of a list is a line."""
    return "\n".join(map(as_text, result)) if isinstance(result, list) else str(result)


class Value:
    """A text, or a list of them, that becomes known later. `await value` gives it; CallError if a
    call that it depends on failed. path: its ancestry, if it comes from a Stream."""

    source: Value | None = None  # of a Stream: the stage before

    def __init__(self, program: Any, f: Callable[..., Any] = lambda *results: [*results]):
        """f: of the inputs' results."""
        self.program, self.f, self.inputs, self.path = program, f, [], ()
        self.result, self.error, self.text = None, None, ""  # text: so far
        self.event = asyncio.Event()  # set when it is known
        self.on_text: list[Callable[[], Any]] = []
        self.on_known: list[Callable[[], Any]] = []

    @property
    def known(self) -> bool:
        return self.event.is_set()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        self.program.await_(self)
        await self.event.wait()
        if self.error is not None:
            raise CallError(self.error)
        return self.result

    def lines(self, separator: str = "\n") -> Stream:
        """Its pieces between separators, without blank ones, each as soon as it is complete."""
        _check_separator(separator)
        stream = Stream(self.program, self)
        stream.split(separator, self.path, self)
        stream.end()
        return stream

    def compute_from(self, inputs: Sequence[Value]) -> Value:
        """Start when these are known, or fail with the first that fails."""
        self.inputs, missing = [*inputs], dict.fromkeys(inputs)

        def input_known(value: Value) -> None:
            missing.pop(value)
            if value.error is not None:
                self.resolve(error=value.error)
            elif not missing and not self.known:
                self.start()

        for value in [*missing]:
            value.when_known(partial(input_known, value))
        if not inputs:
            self.start()
        return self

    def start(self) -> None:
        """Called when all inputs are known."""
        try:
            self.resolve(self.f(*(value.result for value in self.inputs)))
        except Exception as e:
            self.resolve(error=_error_text(e))

    def grow(self, text: str) -> None:
        """Its text so far."""
        self.text = text
        for f in self.on_text:
            f()

    def when_known(self, f: Callable[[], Any]) -> None:
        """Call f once it is known, or now."""
        if self.known:
            f()
        else:
            self.on_known.append(f)

    def resolve(self, result: Any = None, error: str | None = None) -> None:
        """Make it known, and call who waits, from a queue: chains may be deeper than the stack."""
        if self.known:
            return
        self.result, self.error = result, error
        self.text = self.text if error is not None else as_text(result)
        self.event.set()
        queue, first = self.program.to_call, not self.program.to_call
        queue.extend(self.on_known)
        while first and queue:
            queue[0]()
            queue.popleft()


class Stream(Value):
    """Values that come one after the other, each with a path. `async for` gives them as they come,
    `await` the list of their results in order of path."""

    def __init__(self, program: Any, source: Value):
        super().__init__(program)
        self.source, self.inputs = source, [source]
        self.items: list[tuple[Path, Value]] = []  # in order of arrival
        self.n_open, self.first_error = 1, None  # n_open: sources and items that have not ended
        self.on_item: list[Callable[[Path, Value], Any]] = []
        self.arrived = asyncio.Event()

    def map(self, f: Callable[[Value], Any]) -> Stream:
        """The Stream of f(item), called as the items come. f returns what a prompt can contain."""

        def start(stage: Stream, path: Path, item: Value) -> None:
            try:
                stage.put(path, self.program.value(f(item)))
            except Exception as e:
                stage.first_error = stage.first_error or _error_text(e)

        return self._each(start)

    def lines(self, separator: str = "\n") -> Stream:
        """The pieces of all items; those of the item with path (i, j) have paths (i, j, 0 ...)."""
        _check_separator(separator)
        return self._each(lambda stream, *item: stream.split(separator, *item))

    def _each(self, f: Callable[[Stream, Path, Value], Any]) -> Stream:
        """A Stream to which f(stream, path, item) is applied for all items, now and later."""
        stream = Stream(self.program, self)
        for path, item in [*self.items]:
            f(stream, path, item)
        self.on_item.append(partial(f, stream))
        self.when_known(lambda: stream.end(self.error))
        return stream

    async def __aiter__(self) -> AsyncIterator[Value]:
        self.program.await_(self)
        n = 0
        while n < len(self.items) or not self.known:
            if n == len(self.items):
                self.arrived.clear()
                await self.arrived.wait()
            else:
                yield self.items[n][1]
                n += 1
        await self

    def put(self, path: Path, item: Value) -> None:
        """Add an item."""
        if self in waits_for(item):
            item.resolve(error="a cycle: a call uses the Stream that its own output is a part of")
        item.path = item.path or path
        self.items.append((path, item))
        self.inputs.append(item)
        self.n_open += 1
        self.arrived.set()
        for f in [*self.on_item]:  # f may add a stage, which then has this item
            f(path, item)
        item.when_known(lambda: self.end(item.error))

    def split(self, separator: str, path: Path, value: Value) -> None:
        """Put the pieces of a value's text, now and as it grows."""
        start, n, self.n_open = 0, 0, self.n_open + 1

        def read() -> None:
            nonlocal start, n
            while start < len(value.text):
                end = value.text.find(separator, start)
                if end < 0 and (not value.known or value.error is not None):
                    return  # incomplete
                text = value.text[start : end if end >= 0 else None]
                start += len(text) + len(separator)
                if text.strip():
                    self.put((*path, n), self.program.value(text))
                    n += 1

        read()
        value.on_text.append(read)
        value.when_known(lambda: (read(), self.end(value.error)))

    def end(self, error: str | None = None) -> None:
        """A source or an item has ended."""
        self.first_error = self.first_error or error
        self.n_open -= 1
        if not self.n_open:
            items = sorted(self.items, key=lambda pair: pair[0])
            self.resolve([item.result for _, item in items], self.first_error)
            self.arrived.set()


def waits_for(value: Value) -> dict[Value, list[Value]]:
    """The graph of what must become known first: value -> its unknown inputs."""
    graph, stack = {}, [value]
    while stack:
        if (value := stack.pop()) not in graph:
            graph[value] = [x for x in value.inputs if not x.known]
            stack += graph[value]
    return graph


def main() -> None:
    """The pieces of two texts that grow in turn == those of the whole texts."""
    program = SimpleNamespace(to_call=deque())
    program.value = lambda x: Value(program, lambda: x).compute_from(())
    texts, growing = ["ab\nc\n", "d\n\nef"], [Value(program), Value(program)]
    pair = Stream(program, program.value(""))
    for i, value in enumerate(growing):
        pair.put((i,), value)
    pair.end()
    lines = pair.lines()
    print(f"{'characters':>10}  pieces that are complete, by path")
    for n in range(1, 7):
        for value, text in zip(reversed(growing), reversed(texts)):
            value.grow(text[:n])
            if n >= len(text):
                value.resolve(text)
        print(f"{n:10}  {dict(sorted((path, item.text) for path, item in lines.items))}")
    assert lines.result == [line for text in texts for line in text.split("\n") if line]


if __name__ == "__main__":
    main()
