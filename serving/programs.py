"""Programs of prompts: calls whose outputs flow into other calls, over one continuous batch.

An application usually sends a prompt, waits, and pastes the answer into the next one. The engine
sees each call alone: it idles between two of them, does not know which ones somebody waits for, and
a stage starts when the one before has ended. Here a placeholder is filled by a Value, a text that
becomes known later:

    async def main(p, topic):
        outline = p.call("Outline of {topic}:\\n", topic=topic, stop="\\n\\n")
        points = outline.lines().map(lambda line: p.call("Explain {line}\\n", line=line))
        return await p.call("Summary of {points}\\n", points=points)

    semantic variables  Parrot (OSDI 2024, arXiv:2405.19888). Calls form a graph as they are made. A
                        call is added to the engine between the step in which its last input became
                        known and the next one. Equal prefixes are computed once, also by calls that
                        start together (the prefix cache of paged_kv.py).
    objectives          Parrot, section 5.2. Backwards from what the client awaits, the only call of
                        a stage is on the critical path: latency. Several calls of a stage are one
                        group for throughput, and so is what nobody awaits. Latency is a smaller
                        `priority`, and all of a group are as old as its oldest.
    partial outputs     ALTO (arXiv:2403.04311). `value.lines()` is a Stream of complete lines, and
                        `stream.map(f)` starts f(line) while the rest is written. A path is a line's
                        ancestry, (2, 0) the first line of what became of the third, and a Stream's
                        result is in order of path, whatever ends first. `put` looks for cycles, in
                        time that grows with what the item waits for.
    skeleton            Skeleton-of-Thought (arXiv:2307.15337): calls on each line of an outline,
                        with the whole outline in front, are one batch and share that prefix.
    fork, join, select  SGLang (arXiv:2312.07104). A State is a text that `gen` continues, in
                        branches once it is forked. `select` takes the choice whose tokens have the
                        highest mean log-probability; the keys of what precedes them are shared.

A prompt is tokenized as a whole, as the text that a client would send. Cost: a thread switch and a
few dictionary operations per step. When it loses: a chain of calls gains only the round trips; a
stage on partial output slows its predecessor down if the batch is compute bound; a mean over tokens
prefers long choices whose last tokens follow from their first (`scores` has each).

A Value is known once it has a result or an error. Its inputs are other Values: it starts when all
are known, and fails with the first that fails. A result is passed on at once, in the thread of the
asyncio loop, and not by futures, which would take a turn of the loop for each value of a chain.

Equivalence (test_all.py): every call == its prompt alone, token for token, greedy or seeded; a
Stream's result == that of nested loops over the whole texts; all blocks are free when a program has
ended. `generate.py --program FILE.py` runs one; program_examples.py has five. Needs:
serving/batch.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --program FILE.py")

import asyncio
import string
import traceback
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from graphlib import TopologicalSorter
from typing import Any

from huggingface.tokenizer import one_line
from paged_kv import Output, SamplingParams
from serving.batch import Request, Service

PARAMS = {f.name for f in fields(SamplingParams)}
Path = tuple[int, ...]  # ancestry of an item of a Stream


# --------------------------------------------------------------------------------------------------
# Texts that become known later
# --------------------------------------------------------------------------------------------------


class CallError(RuntimeError):
    """Why a value will never be known."""


def _check_separator(separator: Any) -> None:
    if not (isinstance(separator, str) and separator):
        raise ValueError(f"lines: the separator must be a non-empty text, not {separator!r}")


def _error_text(e: Exception) -> str:
    return f"{type(e).__name__}: {one_line(e)}"


def as_text(result: Any) -> str:
    """A result in a prompt: an element of a list is a line."""
    return "\n".join(map(as_text, result)) if isinstance(result, list) else str(result)


class Value:
    """A text, or a list of them, that becomes known later. `await value` gives it; CallError if a
    call that it depends on failed. path: its ancestry, if it comes from a Stream."""

    source: Value | None = None  # of a Stream: the stage before

    def __init__(self, program: Program, f: Callable[..., Any] = lambda *results: [*results]):
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

    def __init__(self, program: Program, source: Value):
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


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------


class Call(Value):
    """The continuation of a prompt, or one of `choices`: a request of the engine, or one for each.
    output: its token ids and times. scores: mean log-probabilities of the choices."""

    def __init__(
        self, program: Program, parts: Sequence[str | Value], params: SamplingParams,
        choices: Sequence[str] = (),
    ):  # fmt: skip
        super().__init__(program)
        self.parts, self.params, self.choices = parts, params, choices
        self.requests: list[Request] = []
        self.output: Output | None = None
        self.scores: dict[str, float] = {}
        self.objective, self.group = "throughput", None  # group: its key, of several calls
        program.add(self)
        self.compute_from([part for part in parts if isinstance(part, Value)])

    def start(self) -> None:
        self.program.runtime.between_steps(partial(self.program.runtime.submit, self))

    def resolve(self, result: Any = None, error: str | None = None) -> None:
        self.program.calls.pop(self, None)
        self.program.changed = True
        super().resolve(result, error)

    def progress(self, output: Output) -> None:
        """A step has changed the output of a request."""
        if self.known:
            return
        if output.error is not None:
            self.program.runtime.fail(self, output.error)
        elif self.choices and output.finished:
            logprobs = [logprob for logprob, *_ in output.prompt_logprobs]
            choice = self.choices[self.requests.index(output.id)]
            self.scores[choice] = sum(logprobs) / len(logprobs)
            if len(self.scores) == len(self.choices):
                self.resolve(max(self.choices, key=self.scores.get))
        elif not self.choices:
            self.output = output
            self.grow(output.id.samples[0].text)
            if output.finished:
                self.resolve(self.text)


# --------------------------------------------------------------------------------------------------
# A client's program
# --------------------------------------------------------------------------------------------------


class Program:
    """The calls of one client. `async with`: at the end, what has not finished is aborted."""

    def __init__(self, runtime: Runtime, params: SamplingParams, name: str):
        self.runtime, self.params, self.name = runtime, params, name
        self.calls: dict[Call, None] = {}  # that have not finished
        self.awaited: list[Value] = []
        self.to_call: deque[Callable[[], Any]] = deque()  # see Value.resolve
        self.changed = self.closed = False  # changed: the objectives are out of date

    async def __aenter__(self) -> Program:
        self.runtime.programs.append(self)
        return self

    async def __aexit__(self, *_: Any) -> None:
        ended = asyncio.Event()
        self.runtime.between_steps(lambda: (self.end("the program has ended"), ended.set()))
        await ended.wait()

    def end(self, why: str) -> None:
        """Abort all calls. Between two steps only."""
        self.closed = True
        for call in [*self.calls]:
            self.runtime.fail(call, why)
        self.runtime.programs = [p for p in self.runtime.programs if p is not self]

    def call(self, template: str, /, **kwargs: Any) -> Call:
        """Continue a template. Keywords: its {placeholders}, each a text, a number, a Value or a
        list of these; and fields of SamplingParams. {{ and }} are braces."""
        parts, params = self._parse(template, kwargs)
        return State(self, parts).gen(**params)

    def select(self, template: str, choices: Sequence[str], /, **values: Any) -> Call:
        """The choice that is the likeliest continuation of a template, per token."""
        return State(self, self._parse(template, values)[0]).select(choices)

    def state(self, text: str = "") -> State:
        """A text to continue: see State."""
        return State(self, [text])

    def apply(self, f: Callable[..., Any], *values: Any) -> Value:
        """f(*results), called when they are known."""
        return Value(self, f).compute_from([*map(self.value, values)])

    def value(self, x: Any) -> Value:
        """x as a Value of this program. ValueError if a prompt cannot contain it."""
        if isinstance(x, Value):
            if x.program is not self and not x.known:
                raise ValueError("a Value of another program must be awaited first")
            return x
        if isinstance(x, (list, tuple)):
            return Value(self).compute_from([*map(self.value, x)])
        if not isinstance(x, (str, int, float)):
            kind = type(x).__name__
            raise ValueError(f"a value must be text, a number, a Value or a list, not {kind}")
        return Value(self, lambda: x).compute_from(())

    def _parse(self, template: str, kwargs: dict[str, Any]) -> tuple[list, dict[str, Any]]:
        """The parts of a prompt, and the sampling parameters among the keywords."""
        where, escape = f"template {template[:40]!r}", "write {{ and }} for braces"
        params = {name: kwargs[name] for name in kwargs.keys() & PARAMS}
        values = {name: self.value(x) for name, x in kwargs.items() if name not in params}
        parts, unused = [], {*values}
        try:
            pieces = [*string.Formatter().parse(template)]
        except ValueError as e:
            raise ValueError(f"{where}: {e}; {escape}") from None
        for literal, name, spec, conversion in pieces:
            parts.append(literal)
            if name in values and not (spec or conversion):
                parts.append(values[name])
                unused.discard(name)
            elif name in PARAMS:
                raise ValueError(f"{where}: rename {{{name}}}, which is a sampling parameter")
            elif name is not None:
                wanted = f"add {name}=..." if name.isidentifier() else escape
                raise ValueError(f"{where}: no value for {{{name}}}; {wanted}")
        if unused:
            name = min(unused)
            raise ValueError(f"{where}: {name} is neither in it nor a sampling parameter")
        return parts, params

    def add(self, call: Call) -> None:
        if self.closed:
            raise CallError("the program has ended: make calls inside its `async with`")
        self.calls[call], self.changed = None, True

    def await_(self, value: Value) -> None:
        """The client waits for a value."""
        self.awaited.append(value)
        self.changed = True
        self.runtime.wake.set()

    def infer_objectives(self) -> None:
        """Give each call its objective. Between two steps only."""
        self.changed, self.awaited = False, [v for v in self.awaited if not v.known]
        inferred: dict[Call, tuple[str, Any]] = {}
        for root in self.awaited:
            for depth, stage in stages(root).items():
                for call in stage:
                    if len(stage) == 1:
                        inferred[call] = "latency", None
                    else:
                        inferred.setdefault(call, ("throughput", (root, depth)))
        groups = defaultdict(list)
        for call in self.calls:
            call.objective, call.group = inferred.get(call, ("throughput", None))
            for seq in self.runtime.sequences(call):
                seq.priority = int(call.objective == "throughput")
                groups[call.group or seq].append(seq)
        for group in groups.values():
            oldest = min(seq.arrival for seq in group)
            for seq in group:
                seq.arrival = oldest


def stages(root: Value) -> dict[int, list[Call]]:
    """The calls that a value waits for, by the number of stages between, on the longest path."""
    graph, depths, found = waits_for(root), defaultdict(int), defaultdict(list)
    for value in reversed([*TopologicalSorter(graph).static_order()]):
        is_call = isinstance(value, Call)
        found[depths[value]] += [value] * is_call
        for x in graph[value]:
            depths[x] = max(depths[x], depths[value] + (is_call or x is value.source))
    return found


class State:
    """A text that grows: by `state += text` (or a Value), and by `gen` and `select`, which append
    the Value that they return."""

    def __init__(self, program: Program, parts: Sequence[str | Value]):
        self.program, self.parts, self.n_forked = program, [*parts], len(parts)

    def __iadd__(self, part: Any) -> State:
        self.parts.append(part if isinstance(part, str) else self.program.value(part))
        return self

    def gen(self, **params: Any) -> Call:
        """Continue the text. params: fields of SamplingParams."""
        params = replace(self.program.params, **params)
        if params.n != 1:
            raise ValueError(f"n must be 1, not {params.n}: make calls with different seeds")
        self.parts.append(call := Call(self.program, [*self.parts], params))
        return call

    def select(self, choices: Sequence[str]) -> Call:
        """The likeliest of the choices, per token."""
        texts = isinstance(choices, (list, tuple)) and all(isinstance(c, str) for c in choices)
        if not (texts and all(choices) and len({*choices}) == len(choices) > 1):
            raise ValueError(f"choices must be two or more different texts, not {choices!r}")
        params = SamplingParams(temperature=0.0, max_new_tokens=1)
        self.parts.append(call := Call(self.program, [*self.parts], params, choices))
        return call

    def fork(self, n: int) -> list[State]:
        """n branches of this text, which share its keys."""
        return [State(self.program, self.parts) for _ in range(n)]

    def join(self, branches: Sequence[State]) -> None:
        """Append what each branch has added since it was forked."""
        self.parts += [part for branch in branches for part in branch.parts[branch.n_forked :]]


# --------------------------------------------------------------------------------------------------
# The engine
# --------------------------------------------------------------------------------------------------


class Runtime:
    """Steps a Service's Engine, in a thread, for the programs of an asyncio loop. Whatever touches
    the engine is a command that runs between two steps."""

    def __init__(self, service: Service):
        self.service, self.engine = service, service.engine
        self.programs: list[Program] = []
        self.commands: deque[Callable[[], Any]] = deque()
        self.wake, self.closed, self.n_programs = asyncio.Event(), False, 0

    async def __aenter__(self) -> Runtime:
        self.thread = ThreadPoolExecutor(1, "engine")
        self.task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.between_steps(lambda: setattr(self, "closed", True))
        await self.task
        self.thread.shutdown()

    def program(self, params: SamplingParams = SamplingParams(temperature=0.0)) -> Program:
        """A client's program. params: the defaults of its calls."""
        self.n_programs += 1
        return Program(self, params, f"program {self.n_programs}")

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.closed:
            await asyncio.sleep(0)  # clients see what the last step made known
            try:
                self._run_commands()
                if self.engine.unfinished:
                    outputs = await loop.run_in_executor(self.thread, self.engine.step)
                    for output in outputs:
                        output.id.id.progress(output)
                elif not self.closed:
                    await self.wake.wait()
            except Exception as e:
                traceback.print_exc()
                self._end(f"the engine failed ({_error_text(e)})")
        self._end("the engine has stopped")

    def _run_commands(self) -> None:
        self.wake.clear()
        while self.commands:
            self.commands.popleft()()
        for program in self.programs:
            if program.changed:
                program.infer_objectives()

    def _end(self, why: str) -> None:
        for program in self.programs:
            program.end(why)

    def between_steps(self, command: Callable[[], Any]) -> None:
        """Run a command before the next step."""
        if self.closed:
            return command()
        self.commands.append(command)
        self.wake.set()

    def sequences(self, call: Call) -> list[Any]:
        """The engine's sequences of a call."""
        return [seq for r in call.requests for seq in self.engine.sequences.get(r, ())]

    def submit(self, call: Call) -> None:
        """Add the requests of a call whose inputs are known."""
        if call.known:  # it was aborted
            return
        tokenizer, name = self.service.tokenizer, call.program.name
        prompt = "".join(part if isinstance(part, str) else part.text for part in call.parts)
        try:
            ids = tokenizer.encode(prompt)
            for choice in call.choices or [""]:
                more = tokenizer.encode_continuation(choice) if choice else []
                request = Request(call, 0, ids + more, call.params, priority=1, client=name)
                if choice:
                    self.service.add(request, 0, len(ids))
                else:
                    self.service.add(request)
                call.requests.append(request)
        except ValueError as e:
            self.fail(call, f"the call {prompt[:40]!r} failed: {one_line(e)}")

    def fail(self, call: Call, why: str) -> None:
        """Abort a call's requests, and resolve it with an error."""
        for request in call.requests:
            if request in self.engine.outputs:
                self.engine.abort(request)
        call.resolve(error=why)


async def run(main: Callable[..., Any], service: Service, *args: Any, **kwargs: Any) -> Any:
    """The result of main(program, *args), awaited if it is a Value. kwargs: of Runtime.program."""
    async with Runtime(service) as runtime, runtime.program(**kwargs) as program:
        result = await main(program, *args)
        return await result if isinstance(result, Value) else result
