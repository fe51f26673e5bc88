"""An HTTP server with the OpenAI API, on one Engine: `python generate.py --serve [HOST:PORT]`.

    POST /v1/completions, /v1/chat/completions    with and without streaming (openai_api.py)
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter    with --runtime-adapters
    GET /v1/models    POST /tokenize, /detokenize    GET /health, /metrics    GET / a page

The engine runs in a thread (async_engine.py); here are the routes, limits and shutdown. A client
that leaves is aborted, and its KV blocks are free before the next step. Queue, body, prompt and
concurrent calls per key are bounded: what is beyond is a 4xx that says so, a full queue a 429 with
Retry-After. The first SIGTERM drains: new calls get 503, running ones finish, up
to --drain-timeout; the second ends at once. Without an API key it listens on loopback only, and its
name in a request must be LOOPBACK's; errors contain no path and no trace, and what a client sends
reaches the log without control characters.

Every SSE event has an id. A client whose connection broke repeats its call with the header
Last-Event-ID and gets what it missed and no more: tokens that were sampled are kept for a while,
and the engine continues after them; of two such connections the later one gets the rest. With
?repeat_unacked=1 every event has the text that is not acknowledged by POST /v1/acks, for proxies
that forward events in datagrams (unacked.py).

Needs: starlette, uvicorn. Proofs: test_all.py, with the clients openai and lm_eval.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import asyncio
import hmac
import itertools
import json
import math
import re
import resource
import sys
import time
from collections import Counter as Counts, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request as HTTPRequest
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from generation.structured import compile_dfa_async, known_dfa
from huggingface.fine_tune import template_of
from huggingface.tokenizer import one_line, printable
from paged_kv import Output, Sample
from serving.async_engine import AsyncEngine, Progress, Stats, Stream, log_exception
from serving.batch_file import parse_json
from serving.metrics import Metrics, log_line
from serving.openai_api import APIError, Call, Model, ResponseWriter, invalid, known_fields
from serving.openai_api import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from serving.runtime_adapters import RuntimeAdapters
from serving.unacked import UnackedTail

PAGE = Path(__file__).parent / "page.html"
# what can be continued: streams, their token ids and characters, seconds after their end
KEPT_STREAMS, KEPT_SIZE, KEPT_SECONDS = 256, 2**20, 120.0
LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}  # the names of a server without keys
HEADER_SECONDS, MAX_HEADERS = 10.0, 2**16  # for the headers of a request; their bytes
SEND_SECONDS = 10.0  # after its deadline, for a client to read the rest

Result = TypeVar("Result")


@dataclass
class Limits:
    """What a server accepts. Seconds, bytes, calls."""

    max_queue: int = 512  # waiting requests
    max_body: int = 4 * 2**20
    max_calls_per_key: int = 1024  # at once
    request_timeout: float = 600.0
    drain_timeout: float = 60.0


@dataclass
class Server:
    """The application: its routes' handlers, and what they share."""

    make_engine: Callable[[Callable[[Stats], None]], AsyncEngine]  # called with on_step
    model: Model
    keys: tuple[bytes, ...] = ()
    limits: Limits = field(default_factory=Limits)
    origin: str = ""  # whose pages may call this server (CORS)
    adapters: RuntimeAdapters | None = None  # None: clients may not load any

    def __post_init__(self):
        self.engine: AsyncEngine | None = None  # while it runs
        self.metrics, self.calls = Metrics(), Counts[str]()  # calls at present, by key
        self.draining = False
        # of new grammars: at most 2 processes, and 1 for each key
        self.compilations, self.compiles_of_key = asyncio.Semaphore(2), defaultdict(asyncio.Lock)
        self.changing_adapters = asyncio.Lock()  # one at a time: reading takes memory and a thread
        self.generations: dict[str, Generation] = {}  # by the id of the call
        self.forgetting: asyncio.TimerHandle | None = None  # of those that have ended

    def app(self) -> Starlette:
        """The ASGI application."""

        def route(path: str, handler: Callable[..., Awaitable[Response]], method: str) -> Route:
            return Route(path, self._endpoint(handler), methods=[method])

        routes = [
            route("/v1/completions", partial(self.generate, parse_completion), "POST"),
            route("/v1/chat/completions", partial(self.generate, parse_chat), "POST"),
            route("/v1/acks", self.acknowledge, "POST"),
            route("/v1/load_lora_adapter", self.load_adapter, "POST"),
            route("/v1/unload_lora_adapter", self.unload_adapter, "POST"),
            route("/v1/models", self.models, "GET"),
            route("/v1/models/{id:path}", self.models, "GET"),
            route("/tokenize", self.tokenize, "POST"),
            route("/detokenize", self.detokenize, "POST"),
            route("/metrics", self.show_metrics, "GET"),
            Route("/health", self.health),
            Route("/", lambda _: FileResponse(PAGE)),
        ]
        paths = ", ".join(sorted(r.path for r in routes if "{" not in r.path))

        def error(request: HTTPRequest, e: HTTPException) -> Response:
            text = f"{request.method} {request.url.path}: {e.detail}; the paths are {paths}"
            return _error(APIError(e.status_code, text, **(e.headers or {})))

        handlers = {HTTPException: error}
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        if self.origin:
            cors = dict(allow_origins=[self.origin], allow_methods=["*"], allow_headers=["*"])
            app.add_middleware(CORSMiddleware, **cors)
        return app

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.engine = self.make_engine(self.metrics.update)
        yield
        await self.engine.close()

    # ---- entry of every call ----

    def _endpoint(self, handler: Callable[..., Awaitable[Response]]) -> Callable:
        """A handler of a route, with authentication, the limit of calls, and errors as JSON."""

        async def call(request: HTTPRequest) -> Response:
            try:
                if sum(len(name) + len(value) for name, value in request.headers.raw) > MAX_HEADERS:
                    raise APIError(431, f"the headers are larger than {MAX_HEADERS} bytes")
                request.state.key = key = self._authenticate(request)
                if handler == self.show_metrics:
                    return await handler(request)
                if self.draining:
                    raise APIError(503, "the server is shutting down")
                if not self.engine.alive:
                    raise APIError(503, "the engine has stopped; see the server's log")
                if self.calls[key] >= self.limits.max_calls_per_key:
                    raise APIError(429, "too many calls at once with this key", Retry_After="1")
                with self.count_call(key):
                    return await handler(request)
            except APIError as e:
                error = e
            except ClientDisconnect:
                error = APIError(499, "the client has left")
            except Exception:
                log_exception()
                error = APIError(500, "internal error; see the server's log")
            print(f"{printable(request.url.path)} {error.status}: {error}", file=sys.stderr)
            return _error(error)

        return call

    @contextmanager
    def count_call(self, key: str) -> Iterator[None]:
        self.calls[key] += 1
        try:
            yield
        finally:
            self.calls[key] -= 1

    def _authenticate(self, request: HTTPRequest) -> str:
        """The key's number, for counting and the log."""
        if not self.keys:  # a page elsewhere could call its own name, resolved to this machine
            host = request.headers.get("host", "")
            if re.sub(r":\d*$", "", host).lower() not in LOOPBACK:
                names = ", ".join(sorted(LOOPBACK))
                raise APIError(403, f"Host {host!r} requires --api-key; without, use {names}")
            origin = request.headers.get("origin", f"http://{host}")  # a page elsewhere, by POST
            if origin not in (f"http://{host}", self.origin) and self.origin != "*":
                raise APIError(403, f"pages of {origin!r} may not call: see --set cors_origin")
            return "-"
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.encode("latin-1"), key) for key in self.keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise APIError(401, "give a valid API key: Authorization: Bearer KEY")
        return str(matches.index(True))

    async def _json(self, request: HTTPRequest) -> Any:
        body, length = bytearray(), request.headers.get("content-length", "")
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding not in ("", "identity"):
            text = f"Content-Encoding {encoding} is not supported; send plain JSON"
            raise APIError(415, text, Accept_Encoding="identity")
        if length.isdecimal() and (len(length) > 18 or int(length) > self.limits.max_body):
            raise APIError(413, f"the body is larger than {self.limits.max_body} bytes")
        try:
            async with asyncio.timeout(self.limits.request_timeout):
                async for part in request.stream():
                    body += part
                    if len(body) > self.limits.max_body:
                        raise APIError(413, f"the body is larger than {self.limits.max_body} bytes")
        except TimeoutError:
            raise APIError(408, "the body took too long") from None
        try:
            return await asyncio.to_thread(parse_json, bytes(body))
        except ValueError as e:
            raise APIError(400, f"the body {e}") from None

    # ---- generation ----

    async def generate(self, parse: Callable[..., Call], request: HTTPRequest) -> Response:
        body, key = await self._json(request), request.state.key
        deadline = asyncio.get_running_loop().time() + self.limits.request_timeout
        try:
            async with asyncio.timeout_at(deadline):
                call = await _while_connected(request, self._parse(parse, body, key))
        except TimeoutError:
            raise APIError(504, "the request took too long") from None
        event = request.headers.get("last-event-id")
        earlier, _ = self._find(event, key)
        # of two connections that continue a stream, the later one then continues the earlier one
        async with nullcontext() if earlier is None else earlier.continuing:
            if event is None:
                generation = Generation(self, call, key)
            else:
                generation = await self._resume(event, key)
            await self._start(generation, deadline)
        if request.query_params.get("repeat_unacked") == "1":
            generation.tails = [UnackedTail(p.chars) for p in generation.seen]
        if generation.call.stream:
            return EventStream(generation)
        try:
            return await _while_connected(request, generation.response())
        finally:
            generation.finish()

    async def _start(self, generation: Generation, deadline: float) -> None:
        """Queue the requests of a call. APIError if there are too many."""
        call, key = generation.call, generation.key
        if self.engine.n_waiting + len(call.requests) > self.limits.max_queue:
            raise APIError(429, "the queue is full; try again later", Retry_After="1")
        client = key if len(self.keys) > 1 else call.user or key  # who shares with whom (--policy)
        for queued in call.requests:
            queued.client = client
        await generation.start(deadline)

    async def _parse(self, parse: Callable[..., Call], body: Any, key: str) -> Call:
        """A body's Call, its grammar compiled in a process that ends with this task. Grammars that
        were compiled, or failed, wait for no others."""
        call = await asyncio.to_thread(parse, body, self.model)
        pattern = call.requests[0].params.grammar
        try:
            if pattern is not None and known_dfa(pattern) is None:
                async with self.compiles_of_key[key], self.compilations:
                    await compile_dfa_async(pattern)
        except ValueError as e:
            raise APIError(400, f"response_format {e}", "response_format") from None
        return call

    async def _resume(self, event: str, key: str) -> Generation:
        """Of the event that a client saw last, a generation of what the client lacks. Ends the
        earlier one if that has not noticed that the client left."""
        earlier, seen = self._find(event, key)
        if earlier is not None:
            earlier.end_connection()
            await earlier.ended.wait()
        samples = earlier.samples if earlier is not None else []
        possible = (p.tokens <= len(s.token_ids) for p, s in zip(seen, samples))
        if not samples or len(seen) != len(samples) or not all(possible):
            raise APIError(404, "this stream is not kept any more; send it without Last-Event-ID")
        requests = [replace(request, samples={}) for request in earlier.call.requests]
        return Generation(
            self, replace(earlier.call, requests=requests), key, seen,
            previous=earlier.unfinished_outputs(), n_counted=earlier.n_tokens,
            counted=earlier.counted, continuing=earlier.continuing,
        )  # fmt: skip

    def _find(self, event: Any, key: str) -> tuple[Generation | None, list[Progress]]:
        """The generation of an event id, if it belongs to the key; tokens and characters of each
        choice with that event, [] if they are not."""
        id, *counts = event.split(".") if isinstance(event, str) else [""]
        generation = self.generations.get(id)
        ok = all(re.fullmatch("[0-9]{1,9}-[0-9]{1,9}", count) for count in counts)
        seen = [Progress(*map(int, count.split("-"))) for count in counts] if ok else []
        return generation if generation is not None and generation.key == key else None, seen

    async def acknowledge(self, request: HTTPRequest) -> Response:
        """A client of ?repeat_unacked=1 has the event with this id, and what it repeats."""
        body = known_fields(await self._json(request), {"id"}, self.model)
        generation, acked = self._find(body.get("id"), request.state.key)
        if generation is None or not acked or len(acked) != len(generation.tails):
            raise APIError(404, "id is no event of a running stream with ?repeat_unacked=1", "id")
        for tail, seen, count in zip(generation.tails, generation.seen, acked):
            tail.ack(min(count.chars, seen.chars))
        return Response(status_code=204)

    def forget(self) -> None:
        """Of the generations that have ended, forget the oldest, and those without a stream."""
        if self.forgetting is not None:
            self.forgetting.cancel()
            self.forgetting = None
        ended = [g for g in self.generations.values() if g.ended.is_set()]
        n_streams, size = len(ended), sum(g.size for g in ended)
        oldest = time.monotonic() - KEPT_SECONDS
        for g in sorted(ended, key=lambda g: (g.call.stream, g.end_time)):
            is_full = n_streams > KEPT_STREAMS or size > KEPT_SIZE
            if is_full or g.end_time <= oldest or not g.call.stream:
                del self.generations[g.call.id]
                n_streams, size = n_streams - 1, size - g.size
                g.count_ends(is_last=True)
        if n_streams:
            loop = asyncio.get_running_loop()
            self.forgetting = loop.call_later(KEPT_SECONDS, self.forget)

    # ---- the other routes ----

    async def models(self, request: HTTPRequest) -> Response:
        about = {"object": "model", "created": 0, "owned_by": "sheaf"}
        about |= {"max_model_len": self.model.context}
        models = {}
        for name in [self.model.name, *self.model.adapters]:
            parent = {} if name == self.model.name else {"parent": self.model.name}
            template = template_of(name, self.model.adapters, self.model.template)
            models[name] = {"id": name} | about | {"chat": template is not None} | parent
        if (id := request.path_params.get("id")) is None:
            return JSONResponse({"object": "list", "data": list(models.values())})
        known_fields({"model": id}, {"model"}, self.model)
        return JSONResponse(models[id])

    async def load_adapter(self, request: HTTPRequest) -> Response:
        """Read and check an adapter in a thread, then serve it: other requests run meanwhile."""
        name, path = await self._adapter_fields(request, "lora_name", "lora_path")
        if name == self.model.name:
            raise APIError(400, f"lora_name {name!r} is the model's own", "lora_name")
        try:
            async with self.changing_adapters:
                self.adapters.check_room()
                adapter = await asyncio.to_thread(self.adapters.read_from, name, path)
                await self.engine.run(partial(self.adapters.pool.register, adapter))
                self.adapters.owners[name] = request.state.key
        except ValueError as e:
            raise APIError(400, one_line(e), "lora_path") from None
        return Response(f"Success: LoRA adapter {name!r} added", media_type="text/plain")

    async def unload_adapter(self, request: HTTPRequest) -> Response:
        """No new requests for an adapter; those that it has finish."""
        (name,) = await self._adapter_fields(request, "lora_name")
        try:
            async with self.changing_adapters:
                self.adapters.check_owner(name, request.state.key, "0" if self.keys else "-")
                await self.engine.run(partial(self.adapters.pool.remove, name))
                self.adapters.owners.pop(name, None)
        except ValueError as e:
            raise APIError(404, one_line(e), "lora_name") from None
        return Response(f"Success: LoRA adapter {name!r} removed", media_type="text/plain")

    async def _adapter_fields(self, request: HTTPRequest, *names: str) -> list[str]:
        """The fields of a body that changes the adapters."""
        if self.adapters is None:
            raise APIError(403, "adapters are not loaded at run time: see --runtime-adapters")
        body = known_fields(await self._json(request), {"lora_name", "lora_path"}, self.model)
        for name in names:
            if not isinstance(body.get(name), str) or not body[name]:
                raise APIError(400, f"{name} must be a text", name)
        return [body[name] for name in names]

    async def tokenize(self, request: HTTPRequest) -> Response:
        ids = await asyncio.to_thread(parse_tokenize, await self._json(request), self.model)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.model.context})

    async def detokenize(self, request: HTTPRequest) -> Response:
        body = await self._json(request)
        return JSONResponse({"prompt": await asyncio.to_thread(parse_detokenize, body, self.model)})

    async def health(self, request: HTTPRequest) -> Response:
        healthy = self.engine.alive and not self.draining
        return Response(status_code=200 if healthy else 503)

    async def show_metrics(self, request: HTTPRequest) -> Response:
        return Response(self.metrics.text(), media_type="text/plain")


def _error(e: APIError) -> Response:
    return JSONResponse(e.body, e.status, e.headers)


async def _while_connected(request: HTTPRequest, response: Awaitable[Result]) -> Result:
    """What is awaited; APIError as soon as the client leaves."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(response), asyncio.ensure_future(disconnected())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise APIError(499, "the client has left")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Generation:
    """One call from its entry to its line in the log; after that a client whose connection broke
    may continue its stream."""

    server: Server
    call: Call
    key: str  # of its client
    seen: list[Progress] = field(default_factory=list)  # what the client has of each choice
    previous: Sequence[Output] = ()  # of the generation that it continues
    n_counted: int = 0  # tokens of that, which are in Metrics
    counted: bool = False  # its finish reasons are in Metrics
    continuing: asyncio.Lock = field(default_factory=asyncio.Lock)  # while that begins
    has_successor: bool = False
    stream: Stream | None = None
    status: int = 500  # of an error: 504 after the deadline
    connection: asyncio.Timeout | None = None  # of a call with `stream`
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # in the engine
    tails: list[UnackedTail] = field(default_factory=list)  # of ?repeat_unacked=1, of each choice
    begun: float = field(default_factory=time.monotonic)

    async def start(self, deadline: float) -> None:
        """Queue its requests. From here on, `finish` must be called."""
        server, loop, k = self.server, asyncio.get_running_loop(), self.call.prompt_logprobs
        self.deadline = deadline
        try:
            async with asyncio.timeout_at(self.deadline):
                self.stream = await server.engine.submit(self.call.requests, self.previous, k)
        except ValueError as e:
            raise invalid(e, self.call.max_tokens_field) from None
        except TimeoutError:
            raise APIError(504, "the request took too long") from None
        self.seen = self.seen or [Progress() for _ in self.stream.progress]
        self.writer = ResponseWriter(self.call, self.stream, server.model, self.seen)
        server.generations[self.call.id] = self
        self.timer = loop.call_at(self.deadline, self._expire)

    def _expire(self) -> None:
        if not self.stream.finished:
            self.stream.error, self.status = "the request took too long", 504
            self.stream.changed.set()

    def end_connection(self) -> None:
        """End the response of a call with `stream`: its client has another connection."""
        self.has_successor = True
        if self.connection is not None and not self.connection.expired():
            self.connection.reschedule(0.0)

    async def response(self) -> Response:
        """Of a call without `stream`."""
        async for _ in self.stream.pieces(self.seen):
            pass
        if self.stream.error is not None:
            raise APIError(self.status, self.stream.error)
        return JSONResponse(self.writer.response())

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events. Each id says how much of every choice the client has with it."""
        for chunk in self.writer.first_chunks():
            yield self._event(chunk)
        async for piece in self.stream.pieces(self.seen):
            at = self.seen[piece.choice]
            tokens, chars = at.tokens + len(piece.tokens), at.chars + len(piece.text)
            self.seen[piece.choice] = Progress(tokens, chars)
            yield self._event(self.writer.chunk(piece) | self._repeated())
        if self.stream.error is not None:
            yield self._event(APIError(self.status, self.stream.error).body)
        elif self.call.include_usage:
            yield self._event(self.writer.usage_chunk())
        yield b"data: [DONE]\n\n"

    def _event(self, data: dict[str, Any]) -> bytes:
        id = ".".join([self.call.id, *(f"{p.tokens}-{p.chars}" for p in self.seen)])
        return f"id: {id}\ndata: {json.dumps(data)}\n\n".encode()

    def _repeated(self) -> dict[str, Any]:
        """The field `unacked` of ?repeat_unacked=1: of each choice, text from an offset on."""
        if not self.tails:
            return {}
        unacked = []
        for choice, (tail, seen) in enumerate(zip(self.tails, self.seen)):
            request, _, i = self.stream.sample(choice)
            text = request.samples[i].text if i in request.samples else ""
            unacked.append(dict(zip(("offset", "text"), tail.packet(text[: seen.chars]))))
        return {"unacked": unacked}

    def finish(self) -> None:
        """Abort what has not finished, count, and write a line of the log."""
        self.timer.cancel()
        self.connection = None
        n_tokens = sum(progress.tokens for progress in self.stream.progress)
        self.n_tokens = max(self.n_counted, n_tokens)  # none before the first step
        self.server.engine.close_stream(self.stream, self._end)
        new_tokens = self.n_tokens - self.n_counted
        self.server.metrics.observe(self.stream, new_tokens, continued=bool(self.previous))
        seconds, usage = time.monotonic() - self.begun, self.writer.usage()
        print(log_line(self.call, self.stream, usage, self.key, seconds), file=sys.stderr)

    def count_ends(self, is_last: bool = False) -> None:
        """Count the finish reasons of its choices, once; if one was aborted, when it cannot be
        continued any more."""
        is_last = is_last or all(p.finish_reason for p in self.stream.progress)
        if is_last and not self.counted:
            self.server.metrics.count_ends(self.stream)
        self.counted = self.counted or is_last

    def _end(self) -> None:
        for request in self.call.requests:  # a Grammar has tables of megabytes
            if request.params.grammar is not None and not isinstance(request.params.grammar, str):
                pattern = request.params.grammar.pattern
                request.params = replace(request.params, grammar=pattern)
        self.end_time, self.size = time.monotonic(), self._size()
        self.count_ends()
        self.ended.set()
        self.server.forget()

    @property
    def samples(self) -> list[Sample]:
        return [sample for output in self.stream.outputs for sample in output.samples]

    def unfinished_outputs(self) -> list[Output]:
        """A copy of its outputs without finish reasons, to be continued."""
        copies = []
        for output in self.stream.outputs:
            samples = [Sample([*s.token_ids], None, [*s.logprobs]) for s in output.samples]
            copies.append(replace(output, samples=samples))
        return copies

    def _size(self) -> int:
        """The number of token ids and characters that it has in memory."""
        held: list[Any] = [sample.token_ids for sample in self.samples]
        for request in self.call.requests:
            params = request.params
            held += [request.ids, *params.stop, params.logit_bias, params.grammar or ""]
            held += [sample.text for sample in request.samples.values()]
        for part in (*self.samples, *self.stream.outputs):
            held += [best for _, best, _ in getattr(part, "prompt_logprobs", part.logprobs)]
        return sum(map(len, held))


class EventStream(StreamingResponse):
    """The events of a generation, which finishes in any case: client gone, timeout, error."""

    def __init__(self, generation: Generation):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(generation.events(), headers=headers, media_type="text/event-stream")
        self.generation = generation

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        generation = self.generation
        end = 0.0 if generation.has_successor else generation.deadline + SEND_SECONDS
        try:
            with generation.server.count_call(generation.key):
                async with asyncio.timeout_at(end) as generation.connection:
                    await super().__call__(scope, receive, send)
        except TimeoutError:
            pass  # the connection is closed amid the response
        finally:
            generation.finish()


def max_connections() -> int:
    """How many the descriptors of this process are enough for: each may need another one, to a
    replica or a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**16 if soft == resource.RLIM_INFINITY else max(8, soft // 2 - 32)


class Protocol(H11Protocol):
    """uvicorn's, but a connection is closed if a request's headers take longer than
    HEADER_SECONDS, and the one that waits for a request the longest if there are too many."""

    numbers = itertools.count()  # the time of many connections may be equal: uvloop's has ms

    def __init__(self, *args: Any, max_connections: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.max_connections = max_connections

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.wait_for_headers()
        if len(self.connections) > self.max_connections:
            idle = [c for c in self.connections if c.cycle is None or c.cycle.response_complete]
            oldest = min(idle, key=lambda c: c.number)  # this one is among them
            self.connections.discard(oldest)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self.timer.cancel()
        elif self.timer.cancelled():  # the first bytes of the next headers
            self.wait_for_headers()

    def wait_for_headers(self) -> None:
        self.number = next(self.numbers)
        self.timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)


class DrainingServer(uvicorn.Server):
    """uvicorn, but the first signal drains and the second ends at once."""

    def __init__(self, server: Server, host: str, port: int):
        options = dict(log_level="error", access_log=False, timeout_graceful_shutdown=1)
        options |= dict(http=partial(Protocol, max_connections=max_connections()), ws="none")
        super().__init__(uvicorn.Config(server.app(), host, port, **options))
        self.server, self.drain_end = server, math.inf

    def handle_exit(self, sig: int, frame: Any) -> None:
        seconds = 0.0 if self.server.draining else self.server.limits.drain_timeout
        self.server.draining, self.drain_end = True, time.monotonic() + seconds

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        running = self.server.calls.total()
        if self.server.draining and (not running or time.monotonic() >= self.drain_end):
            self.server.engine.stop()
            self.should_exit = True
        return await super().on_tick(counter)
