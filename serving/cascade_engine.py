"""The engines of `--serve --cascade`: a small model's and a large one's, called like one.

A call goes to the small model first; once that has answered, the Gate (serving/cascade.py) keeps
the answer, or the large model gets the call. The client sees one stream: the small model's answer
at once and complete, the large model's token by token. An answer of several choices is kept if the
gate keeps each. Completions are cached by their exact prompt and parameters, for all clients:
greedy ones whatever their seed, sampled ones with theirs (random by default, so never found).

The large model alone gets calls with log-probabilities or an echoed prompt, and those that the
small model's context does not hold. If the tokenizers differ, the models share text only: prompts
are encoded again for the small model, and what is not text goes to the large one alone: chats
(whose template is the large model's), logit_bias, and token ids that no text has. An interrupted
stream is continued by the model that wrote it. Latencies count from the arrival of the call.

When it loses: see serving/cascade.py; a client that leaves is noticed when the small model has
answered. Equivalence (test_all.py): threshold 1 is the large model's server, 0 the small one's.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from serving.cascade import CompletionCache, Gate
from paged_kv import Output
from serving.async_engine import AsyncEngine, Progress, Stats, Stream
from serving.batch import Request, Service


class CascadeEngine:
    """An AsyncEngine's interface over two of them. All methods are called in the loop's thread."""

    def __init__(
        self, small: Service, gate: Gate, large: Service, on_step: Callable[[Stats], Any]
    ):
        report = lambda _: on_step(self.stats())
        self.gate, self.cache, self.n_small = gate, CompletionCache(), 0
        self.small, self.large = AsyncEngine(small, report), AsyncEngine(large, report)
        self.engines = [self.small, self.large]
        pieces = lambda t: [*map(t.piece, range(t.vocab_size))]
        self.same_tokenizer = pieces(small.tokenizer) == pieces(large.tokenizer)
        self.by_small: WeakSet[Request] = WeakSet()  # requests of the small model
        self.origins = WeakKeyDictionary()  # of a stream: engine (None: cached), key in the cache

    @property
    def n_waiting(self) -> int:
        return sum(engine.n_waiting for engine in self.engines)

    @property
    def alive(self) -> bool:
        return all(engine.alive for engine in self.engines)

    def stats(self) -> Stats:
        """Sums over both engines; of the KV usage, the larger."""
        both = [engine.stats() for engine in self.engines]
        total = {name: sum(stats[name] for stats in both) for name in both[0]}
        return total | {"kv_usage": max(stats["kv_usage"] for stats in both)}

    def stop(self) -> None:
        for engine in self.engines:
            engine.stop()

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()

    async def submit(
        self,
        requests: list[Request],
        previous: Sequence[Output] = (),
        prompt_logprobs: int | None = None,
    ) -> Stream:
        """As AsyncEngine.submit; waits for the small model's answer, if that is asked."""
        if previous:
            return await self._continue(previous, prompt_logprobs)
        key = cache_key(requests, prompt_logprobs)
        if (found := self.cache.get(key)) is not None:
            return self._track(cached_stream(*found), None)
        arrival = self.large.engine.clock()
        if self._fits_small(requests, prompt_logprobs):
            stream = await self._ask_small(requests)
            if stream is not None:
                self.n_small += 1
                return self._track(stream, self.small, key)
        stream = await self.large.submit(requests, (), prompt_logprobs)
        for output in stream.outputs:
            output.arrival_time = arrival
        return self._track(stream, self.large, key)

    async def _continue(self, previous: Sequence[Output], prompt_logprobs: int | None) -> Stream:
        """An interrupted stream, by the model that wrote it."""
        requests = [replace(output.id, samples={}) for output in previous]
        engine = self.small if previous[0].id in self.by_small else self.large
        self.by_small.update(requests if engine is self.small else ())
        return self._track(await engine.submit(requests, previous, prompt_logprobs), engine)

    def close_stream(self, stream: Stream, then: Callable[[], Any] = lambda: None) -> None:
        """As AsyncEngine.close_stream; a complete answer is cached."""
        engine, key = self.origins.pop(stream)
        if engine is None:
            then()
            return
        complete = {p.finish_reason for p in stream.progress} <= {"eos", "stop", "length"}
        if complete and stream.error is None and key is not None:
            size = sum(len(r.ids) for r in stream.requests) + sum(p.tokens for p in stream.progress)
            self.cache.put(key, (stream.requests, stream.outputs, stream.progress), size)
        engine.close_stream(stream, then)

    def _track(self, stream: Stream, engine: AsyncEngine | None, key: Hashable = None) -> Stream:
        self.origins[stream] = engine, key
        return stream

    def _fits_small(self, requests: Sequence[Request], prompt_logprobs: int | None) -> bool:
        is_text = lambda r: self.same_tokenizer or r.continues and not r.params.logit_bias
        fits = all(r.params.logprobs is None and is_text(r) for r in requests)
        return self.gate.asks_small and prompt_logprobs is None and fits

    async def _ask_small(self, requests: Sequence[Request]) -> Stream | None:
        """The small model's answers, None if they are not kept."""
        try:
            copies = [self._for_small(request) for request in requests]
            self.by_small.update(copies)
            stream = await self.small.submit(copies)
        except ValueError:  # invalid for the small model; if for the large one too, that says why
            return None
        try:
            async for _ in stream.pieces():
                pass
        finally:
            self.small.close_stream(stream)
        samples = chain(*(output.samples for output in stream.outputs))
        logprobs = [[entry[0] for entry in sample.logprobs] for sample in samples]
        keeps = lambda x: x and self.gate.keeps(self.gate.confidence(x))
        return stream if stream.error is None and all(map(keeps, logprobs)) else None

    def _for_small(self, request: Request) -> Request:
        """ValueError if its token ids are not those of a text."""
        ids = request.ids
        if not self.same_tokenizer:
            small, large = (engine.service.tokenizer for engine in self.engines)
            text = large.decode(ids)
            if large.encode(text) != ids:
                raise ValueError("prompt is not text")
            ids = small.encode(text)
        return replace(request, ids=ids, params=replace(request.params, logprobs=0), samples={})


def cache_key(requests: Sequence[Request], prompt_logprobs: int | None) -> Hashable:
    """What a call's completions depend on: prompts and parameters; if greedy, not the seed."""
    seedless = lambda p: replace(p, seed=0) if p.temperature == 0 else p
    parts = [(tuple(r.ids), seedless(r.params), r.continues) for r in requests]
    return prompt_logprobs, *parts


def cached_stream(
    requests: list[Request], outputs: list[Output], progress: list[Progress]
) -> Stream:
    """A completion as a stream that has finished now."""
    now = time.perf_counter()
    stream = Stream(requests)
    stream.outputs = [replace(o, arrival_time=now, timestamps=[now, now]) for o in outputs]
    stream.progress = [*progress]
    return stream
