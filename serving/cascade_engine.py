"""The engines of `--serve --cascade`: a small model's and a large one's, called like one.

A call goes to the small model first; once that has answered, its Gate (generation/cascade.py) keeps
the answer or the large model gets the call. What the client sees is one stream: of the small model
at once and complete, of the large one token by token. A call of several choices is kept if the gate
keeps each. Completions are cached by their exact prompt and parameters, for all clients:
greedy ones whatever their seed, sampled ones with theirs (random by default, so never found).

The two models share text only. Prompts are encoded again for the small one, unless the tokenizers
are equal; what text does not carry over goes to the large model alone: chats (whose template is the
large model's) if the tokenizers differ, log-probabilities, echoed prompts. So does a prompt that
the small model's context does not hold. An interrupted stream is continued by the model that wrote
it. Latencies count from the arrival at the small model.

When it loses: see generation/cascade.py; a client that leaves is noticed when the small model has
answered. Equivalence (test_all.py): threshold 1 is the large model's server, threshold 0 the small
one's. Needs: serving/async_engine.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from generation.cascade import CompletionCache, Gate
from huggingface.tokenizer import Tokenizer
from paged_kv import Output
from serving.async_engine import AsyncEngine, Progress, Stats, Stream
from serving.batch import Request, Service


class CascadeEngine:
    """An AsyncEngine's interface over two of them. All methods are called in the loop's thread."""

    def __init__(
        self, small: Service, gate: Gate, large: Service, on_step: Callable[[Stats], Any]
    ):
        report = lambda stats: on_step(self.stats())
        self.gate, self.cache, self.n_small = gate, CompletionCache(), 0
        self.small, self.large = AsyncEngine(small, report), AsyncEngine(large, report)
        self.engines = [self.small, self.large]
        self.same_tokenizer = same_pieces(small.tokenizer, large.tokenizer)
        self.by_small: WeakSet[Request] = WeakSet()  # requests of the small model
        # of a stream: its engine, None from the cache; the key of its completion
        self.origins: WeakKeyDictionary[Stream, tuple[AsyncEngine | None, Hashable]]
        self.origins = WeakKeyDictionary()

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
            continued = [replace(output.id, samples={}) for output in previous]
            is_small = previous[0].id in self.by_small
            engine = self.small if is_small else self.large
            self.by_small.update(continued if is_small else ())
            return self._own(await engine.submit(continued, previous, prompt_logprobs), engine)
        key = cache_key(requests, prompt_logprobs)
        if (found := self.cache.get(key)) is not None:
            return self._own(cached_stream(*found), None)
        arrival = self.large.engine.clock()
        if self._fits_small(requests, prompt_logprobs):
            stream = await self._ask_small(requests)
            if stream is not None:
                self.n_small += 1
                return self._own(stream, self.small, key)
        stream = await self.large.submit(requests, (), prompt_logprobs)
        for output in stream.outputs:
            output.arrival_time = min(output.arrival_time, arrival)
        return self._own(stream, self.large, key)

    def close_stream(self, stream: Stream, then: Callable[[], Any] = lambda: None) -> None:
        """As AsyncEngine.close_stream; a completion that is whole is cached."""
        engine, key = self.origins.pop(stream)
        if engine is None:
            then()
            return
        whole = {p.finish_reason for p in stream.progress} <= {"eos", "stop", "length"}
        if whole and stream.error is None and key is not None:
            size = sum(len(r.ids) for r in stream.requests) + sum(p.tokens for p in stream.progress)
            self.cache.put(key, (stream.requests, stream.outputs, stream.progress), size)
        engine.close_stream(stream, then)

    def _own(self, stream: Stream, engine: AsyncEngine | None, key: Hashable = None) -> Stream:
        self.origins[stream] = engine, key
        return stream

    def _fits_small(self, requests: Sequence[Request], prompt_logprobs: int | None) -> bool:
        plain = prompt_logprobs is None and all(r.params.logprobs is None for r in requests)
        same = self.same_tokenizer or all(r.continues for r in requests)
        return plain and same and self.gate.asks_small

    async def _ask_small(self, requests: Sequence[Request]) -> Stream | None:
        """The small model's answers, None if they are not kept."""
        copies = [self._for_small(request) for request in requests]
        self.by_small.update(copies)
        try:
            stream = await self.small.submit(copies)
        except ValueError:  # its context is too small, or the fault is the call's, for the large
            return None
        try:
            async for _ in stream.pieces():
                pass
        finally:
            self.small.close_stream(stream)
        samples = [sample for output in stream.outputs for sample in output.samples]
        logprobs = [[entry[0] for entry in sample.logprobs] for sample in samples]
        if stream.error is not None or not all(logprobs):
            return None
        return stream if self.gate.keeps(min(map(self.gate.confidence, logprobs))) else None

    def _for_small(self, request: Request) -> Request:
        ids = request.ids
        if not self.same_tokenizer:
            text = self.large.service.tokenizer.decode(ids)
            ids = self.small.service.tokenizer.encode(text)
        return replace(request, ids=ids, params=replace(request.params, logprobs=0), samples={})


def same_pieces(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether two tokenizers have the same pieces."""
    sizes = a.vocab_size, b.vocab_size
    return sizes[0] == sizes[1] and all(a.piece(i) == b.piece(i) for i in range(sizes[0]))


def cache_key(requests: Sequence[Request], prompt_logprobs: int | None) -> Hashable:
    """What decides the completions of a call: prompts and parameters; of greedy ones no seed."""
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
