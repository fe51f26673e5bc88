"""An Engine in a thread of its own, and its requests as streams of one asyncio loop.

A step of the engine takes milliseconds to seconds and releases Python's lock while it computes, so
it runs in a thread, and the loop keeps serving sockets. Between two steps the thread does what the
loop asked for, adding and aborting requests; after a step it reports, in one call into the loop,
how far every request has come. What takes long and needs no engine, such as compiling a regular
expression, runs in other threads.

Instead of a queue, a Stream keeps counts: how many tokens and characters of the engine's own
outputs its reader may see. A reader takes all that is new at once. So a slow reader
costs no more memory than its output, which max_new_tokens bounds, and gets larger pieces.

A Stream that was interrupted, here or on another machine, is continued by `submit` with the tokens
that it had: noise is a function of seed, position and token (generation/sampling.py), so the rest
is what it would have been, up to rounding, which depends on the batch.

Equivalence (test_all.py): streamed text == the text of generate.py with the same seed; all blocks
are free once every stream has ended or was closed. Needs: serving/batch.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import asyncio
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from huggingface.tokenizer import printable
from paged_kv import Output
from serving.batch import Request, Service
from serving.tp_worker import Rank0Service

READER_SECONDS, MAX_DELAY = 5e-5, 0.1  # of a reader for an event; between two events
MAX_IDLE = 60.0  # seconds between steps: other ranks wait in a collective, which has a timeout

Stats = dict[str, float]
LogProb = tuple[float, list[int], list[float]]  # of a token; the most likely tokens, and theirs


def log_exception() -> None:
    """Print the trace of the exception that is being handled. Its message may quote a client: all
    lines are indented, so that none looks like another line of the log."""
    for line in traceback.format_exc().splitlines():
        print(f"  {printable(line)}", file=sys.stderr)


@dataclass
class Piece:
    """What is new in a choice of a stream."""

    choice: int
    text: str
    tokens: list[int]
    logprobs: list[LogProb]
    finish_reason: str | None  # eos, stop, length or error


@dataclass
class Progress:
    """How much of a choice the reader may see, or has seen."""

    tokens: int = 0
    chars: int = 0
    finish_reason: str | None = None


@dataclass(eq=False)
class Stream:
    """One API call: some requests with n samples each, all together its choices."""

    requests: list[Request]
    outputs: list[Output] = field(default_factory=list)  # of each request
    progress: list[Progress] = field(default_factory=list)  # of each choice
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    error: str | None = None

    def __post_init__(self):
        self.progress = [Progress() for r in self.requests for _ in range(r.params.n)]

    @property
    def finished(self) -> bool:
        return self.error is not None or all(p.finish_reason for p in self.progress)

    def sample(self, choice: int) -> tuple[Request, Output, int]:
        """Request, output and number of the sample that is a choice."""
        i, sample = divmod(choice, self.requests[0].params.n)
        return self.requests[i], self.outputs[i], sample

    async def pieces(self, seen: Sequence[Progress] = ()) -> AsyncIterator[Piece]:
        """What is new, until the stream has finished. seen: what the reader has already."""
        seen = list(seen) or [Progress() for _ in self.progress]
        while True:
            self.changed.clear()
            finished = self.finished
            for choice, (old, new) in enumerate(zip(seen, self.progress)):
                ended = new.finish_reason is not None
                if old.finish_reason is None and (ended or new.chars > old.chars):
                    yield self._piece(choice, old, new)
                    seen[choice] = new
            if finished:
                return
            await self.changed.wait()

    def _piece(self, choice: int, old: Progress, new: Progress) -> Piece:
        request, output, i = self.sample(choice)
        text, sample = request.samples[i].text, output.samples[i]
        at = slice(old.tokens, new.tokens)
        tokens, logprobs = sample.token_ids[at], sample.logprobs[at]
        return Piece(choice, text[old.chars : new.chars], tokens, logprobs, new.finish_reason)


class AsyncEngine:
    """The thread of a Service's Engine. All methods but _run's are called in the loop's thread."""

    def __init__(self, service: Service | Rank0Service, on_step: Callable[[Stats], Any]):
        """on_step: called in the loop after every step."""
        self.service, self.engine, self.on_step = service, service.engine, on_step
        self.wake, self.commands = threading.Condition(), deque[Callable[[], Any]]()
        self.streams: dict[Request, Stream] = {}  # used by the engine's thread only
        self.unread: set[Stream] = set()  # used by the loop only: whose readers will be woken
        self.timer: asyncio.TimerHandle | None = None
        self.submitting: dict[Stream, int] = {}  # number of requests that the engine does not have
        self.step_began: float | None = None  # time.monotonic(), of a step that has not ended
        self.closed = self.ended = False  # the thread will end; it runs no more commands
        self.loop = asyncio.get_running_loop()
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    @property
    def n_waiting(self) -> int:
        """Requests in the queue, the thread's or the Engine's."""
        return sum([*self.submitting.values()]) + self.engine.n_waiting

    @property
    def alive(self) -> bool:
        """False after `stop`, or if the thread did not survive an error."""
        return not self.closed

    def stats(self) -> Stats:
        """Sequences that run and wait, the fraction of KV blocks in use, and totals."""
        scheduler, blocks = self.engine.scheduler, self.engine.allocator
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_usage": 1 - blocks.n_free / len(blocks.refs),
            "preemptions": scheduler.n_preempted,
            "prefix_queries": scheduler.n_admitted_tokens,
            "prefix_hits": scheduler.n_hit_tokens,
            **self.engine.kv_store.counts,
        }

    def step_seconds(self) -> float:
        """How long the present step has taken; 0 between two steps."""
        began = self.step_began
        return 0.0 if began is None else time.monotonic() - began

    async def submit(
        self,
        requests: list[Request],
        previous: Sequence[Output] = (),
        prompt_logprobs: int | None = None,
    ) -> Stream:
        """Queue the requests of a call, which have the same n. previous: the output of each in a
        run that was interrupted. prompt_logprobs: see Engine.add. ValueError if a request is
        invalid; then none is queued. RuntimeError if the thread has ended."""
        stream = Stream(requests)

        def add() -> None:
            try:
                if self.closed:
                    raise RuntimeError("the engine has stopped")
                for i, request in enumerate(requests):
                    earlier = previous[i] if previous else None
                    stream.outputs.append(self._add(request, earlier, prompt_logprobs))
                    self.streams[request] = stream
                self.submitting.pop(stream, None)
            except Exception:
                self._remove(stream)
                raise

        self.submitting[stream] = len(requests)
        try:
            for request in requests:
                if isinstance(request.params.grammar, str):  # takes up to seconds to compile
                    await asyncio.to_thread(self.service.compile_grammar, request)
            await self.run(add)
        except asyncio.CancelledError:
            self.close_stream(stream)
            raise
        finally:
            self.submitting.pop(stream, None)
        return stream

    async def run(self, function: Callable[[], Any]) -> Any:
        """Its result, called between two steps."""
        done: Future[Any] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function())
            except Exception as e:
                done.set_exception(e)

        self.call_between_steps(command)
        return await asyncio.wrap_future(done)

    def close_stream(self, stream: Stream, then: Callable[[], Any] = lambda: None) -> None:
        """Abort what has not finished: its blocks are free before the next step. Then, in the
        loop, call `then`."""

        def close() -> None:
            try:
                self._remove(stream)
            finally:
                self._call(self._publish, [])
                self._call(then)

        self.call_between_steps(close)

    def stop(self) -> None:
        """Stop the thread after the present step; unfinished streams end with an error."""
        self.closed = True
        self.call_between_steps(lambda: None)

    async def close(self) -> None:
        self.stop()
        await asyncio.to_thread(self.thread.join)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self.closed:
                self._step()
        finally:
            self.closed = True
            self._publish_error("the engine has stopped")
            with self.wake:
                self.ended = True
                while self.commands:
                    with suppress(Exception):
                        self.commands.popleft()()

    def _step(self) -> None:
        with self.wake:
            work = lambda: self.commands or self.streams or self.engine.background
            self.wake.wait_for(work, MAX_IDLE)
        try:
            while self.commands:
                self.commands.popleft()()
            if not self.closed:
                self.step_began = time.monotonic()
                self._report(self.service.step())
        except Exception as e:
            log_exception()
            self._fail(f"the engine failed ({type(e).__name__}); see the server's log")
        finally:
            self.step_began = None

    def _add(self, request: Request, earlier: Output | None, prompt_logprobs: int | None) -> Output:
        if earlier is None or not any(sample.token_ids for sample in earlier.samples):
            return self.service.add(request, prompt_logprobs)
        return self.service.resume(request, earlier)

    def _remove(self, stream: Stream) -> None:
        for request in stream.requests:
            if request in self.engine.outputs:
                self.service.abort(request)
            self.streams.pop(request, None)

    def _report(self, outputs: list[Output]) -> None:
        """Tell the loop how far the requests have come."""
        changes: list[tuple[Stream, int, list[Progress], str | None]] = []
        for output in outputs:
            request: Request = output.id
            if (stream := self.streams.get(request)) is None:
                continue
            new = [
                Progress(len(s.token_ids), len(request.samples[i].text), s.finish_reason)
                for i, s in enumerate(output.samples)
                if i in request.samples
            ]
            changes.append((stream, stream.requests.index(request), new, output.error))
            if output.finished:
                del self.streams[request]
        self._call(self._publish, changes)

    def _fail(self, why: str) -> None:
        """End every stream with an error."""
        self._publish_error(why)
        for stream in set(self.streams.values()):
            self._remove(stream)

    def _publish_error(self, why: str) -> None:
        self._call(self._publish, [(stream, 0, [], why) for stream in set(self.streams.values())])

    # ---- from thread to loop and back ----

    def _publish(self, changes: list[tuple[Stream, int, list[Progress], str | None]]) -> None:
        for stream, i, progress, error in changes:
            n = stream.requests[0].params.n
            stream.progress[i * n : i * n + len(progress)] = progress
            stream.error = stream.error or error
            self.unread.add(stream)
        self.on_step(self.stats())
        if self.timer is None:
            self._wake_readers()

    def _wake_readers(self) -> None:
        """Readers of many streams take the lock that the engine needs: wake them less often, so
        that they have a tenth of the time."""
        self.timer = None
        if self.unread:
            delay = min(MAX_DELAY, len(self.unread) * READER_SECONDS / 0.1)
            self.timer = self.loop.call_later(delay, self._wake_readers)
        for stream in self.unread:
            stream.changed.set()
        self.unread.clear()

    def call_between_steps(self, command: Callable[[], Any]) -> None:
        """Call it in the engine's thread. Any thread may ask for it."""
        with self.wake:
            if not self.ended:
                self.commands.append(command)
                self.wake.notify()
                return
        command()

    def _call(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop has closed
            self.closed = True
