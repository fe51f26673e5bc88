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
                        result is in order of path, whatever ends first.
    skeleton            Skeleton-of-Thought (arXiv:2307.15337): calls on each line of an outline,
                        with the whole outline in front, are one batch and share that prefix.
    fork, join, select  SGLang (arXiv:2312.07104). A State is a text that `gen` continues, in
                        branches once it is forked. `select` takes the choice whose tokens have the
                        highest mean log-probability; the keys of what precedes them are shared.

A prompt is tokenized as a whole, as the text that a client would send. Cost: a thread switch and a
few dictionary operations per step. When it loses: a chain of calls gains only the round trips; a
stage on partial output slows its predecessor down if the batch is compute bound; a mean over tokens
prefers long choices whose last tokens follow from their first (`scores` has each).

Equivalence (test_all.py): every call == its prompt alone, token for token, greedy or seeded; a
Stream's result == that of nested loops; all blocks are free when a program has ended.
`generate.py --program FILE.py` runs one; program_examples.py has five. Needs: serving/values.py,
serving/batch.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --program FILE.py")

import asyncio
import string
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from graphlib import TopologicalSorter
from typing import Any

from huggingface.tokenizer import one_line
from paged_kv import Output, SamplingParams
from serving.batch import Request, Service
from serving.values import CallError, Value, waits_for

PARAMS = {f.name for f in fields(SamplingParams)}


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
                self._end(f"the engine failed ({type(e).__name__}: {one_line(e)})")
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
                self.service.add(request, *((0, len(ids)) if choice else ()))
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
