"""Replicas that run prompts and replicas that decode, behind one HTTP server (cluster.py).

    python -m serving.cluster --disaggregate 1:2 --checkpoint DIR

A call goes to two replicas: to the prefill replica that has most of its prompt cached, and to the
decode replica with fewer calls. The first runs the prompt and sends its KV in parts meanwhile; with
the first token it hands the request over, and the second streams the answer (kv_transfer.py). What
this one computes goes back, each block as soon as it is full, to the prefix cache of the first: so
the next turn of a conversation, prompt and answer, is prefilled from there (MemServe,
arXiv:2406.17565). With --replicate it goes back after each step (DejaVu, arXiv:2403.01876): if the
decode replica dies, the call goes on at the prefill replica after the last token that arrived, and
from there to another decode replica. Without, less than a block is computed again.

Replicas are processes that come and go, so each pair has a process group of its own, made on the
loopback interface when a call first needs it. If either replica of a call dies, or their connection
breaks, the call is sent again with the tokens that the client has (replicated_engine.py).

Cost: two hops in place of one until the first token, about a millisecond; the answer's KV travels
too. On GPUs all KV passes through host memory. When it loses: few calls, for which one kind of
replica is idle; short prompts. Not here: replicas of several ranks, Ray.

Equivalence (test_all.py): texts == those of one engine, also amid kill -9 of either kind; a second
turn hits the prefill replica's prefix cache. Needs: replicated_engine.py, kv_transfer.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of serving/cluster.py; run: python -m serving.cluster --help")

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch.distributed as dist

from paged_kv import Output
from serving.async_engine import AsyncEngine, Progress
from serving.batch import Request, Service
from serving.replicated_engine import Replica, Update
from serving.kv_transfer import (
    PROMPT, Cancel, Channel, Handover, KVInbox, KVPart, KVSender, decodes,
)  # fmt: skip

CONNECT_SECONDS = 20
ORPHAN_SECONDS = 30  # that replicated KV of a dead replica waits for its call


class KVService:
    """What AsyncEngine uses of a Service; after each step it sends KV to other replicas."""

    def __init__(self, service: Service, is_prefill: bool, replicate: bool):
        """replicate: a decode replica sends new KV after each step, not only full blocks."""
        self.service, self.engine = service, service.engine
        self.is_prefill, self.replicate = is_prefill, replicate
        self.compile_grammar = service.compile_grammar
        self.sender, self.inbox = KVSender(self.engine), KVInbox(self.engine)
        self.channels: dict[Request, Channel] = {}  # to the other replica of each request
        self.handed_over: dict[int, Channel] = {}  # ids of requests whose KV comes back
        self.lost: set[int] = set()  # ids of requests whose other replica died

    def add(self, request: Request, prompt_logprobs: int | None = None) -> Output:
        return self.service.add(request, prompt_logprobs)

    def resume(self, request: Request, earlier: Output) -> Output:
        """As Service.resume, with the KV that has arrived."""
        output = self.service.resume(request, earlier, partial(self.inbox.kv, request.id))
        self.inbox.forget(request.id)
        size = self.engine.allocator.block_size
        if not self.is_prefill:  # the other replica has the blocks before
            self.sender.sent[request] = {PROMPT: len(request.ids) // size * size}
        return output

    def abort(self, request: Request) -> None:
        self.service.abort(request)
        self._cancel(request)

    def end(self, request: Request) -> None:
        """Of a decode replica: a call has ended, whether its request came or not."""
        self._cancel(request)
        self.forget(request.id)

    def _cancel(self, request: Request) -> None:
        """No more KV of a request will be sent."""
        channel = self.channels.pop(request, None)
        with suppress(RuntimeError):
            if channel is not None:
                channel.send(Cancel(request.id))

    def step(self) -> list[Output]:
        """As Service.step; an output that was handed over is finished here."""
        outputs = {output.id: output for output in self.service.step()}
        for request, channel in list(self.channels.items()):
            output = self.engine.outputs.get(request) or outputs.get(request)
            if output is None:  # not yet queued
                continue
            try:
                if self.is_prefill:
                    outputs |= self._prefill(output, channel)
                elif output.finished:
                    self._cancel(request)
                elif self.engine.allocator.prefix_cache:
                    self._send_back(request, channel)
            except RuntimeError:  # the other replica died
                self.channels.pop(request, None)
                if self.is_prefill and request in self.engine.outputs:
                    self.lost.add(request.id)
                    self.service.abort(request)
        return list(outputs.values())

    def _prefill(self, output: Output, channel: Channel) -> dict[Request, Output]:
        """Send the new KV, and the request once it has a token; then returns its last output."""
        request = output.id
        if not output.finished and not decodes(self.engine, request):
            self.sender.send_new(request, request.id, channel)
            return {}
        samples = [replace(sample, finish_reason=None) for sample in output.samples]
        end = Handover(request.id, replace(output, id=None, prompt_ids=[], samples=samples))
        if output.finished:
            channel.send(end)
        else:
            self.sender.hand_over(request, request.id, channel, end)
            self.inbox.before[request.id] = request.ids
            self.handed_over[request.id] = channel
        self.channels.pop(request, None)  # its call may have ended meanwhile
        ended = [replace(s, finish_reason=s.finish_reason or "handover") for s in output.samples]
        return {request: replace(output, samples=ended)}

    def _send_back(self, request: Request, channel: Channel) -> None:
        """Send the blocks that are full, or all new KV."""
        size, sent = self.engine.allocator.block_size, self.sender.sent[request]
        new = lambda s: s.num_computed_tokens // size > sent.get(s.index, s.n_prompt) // size
        if self.replicate or any(map(new, self.engine.sequences[request])):
            self.sender.send_new(request, request.id, channel)

    def forget(self, id: int, channel: Channel | None = None) -> None:
        """Drop the KV that a request has in host memory. channel: only if it came from there."""
        if channel is None or self.handed_over.get(id) is channel:
            self.inbox.forget(id)
            self.handed_over.pop(id, None)


def pair_group(store: dist.Store, rank: int) -> dist.ProcessGroupGloo:
    """A process group of two ranks on this machine, which torch.distributed does not know. The
    keys of the store must be new: those of an earlier group name closed ports."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=CONNECT_SECONDS)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, 2, options)


class DisaggregatedReplica(Replica):
    """A replica that runs prompts, or one that decodes."""

    def __init__(
        self, is_prefill: bool, replicate: bool, store: tuple[str, int], argv: list[str],
        threads: int,
    ):  # fmt: skip
        """store: host and port of a TCPStore. The others: see Replica."""
        super().__init__(argv, threads)
        self.service = KVService(self.service, is_prefill, replicate)
        self.is_prefill, self.store = is_prefill, store
        self.channels: dict[str, Future[Channel]] = {}  # of each pair
        self.expected: dict[int, tuple[str, asyncio.Future]] = {}  # requests that will arrive

    async def generate(self, pair: str, requests: list[Request], *args: Any) -> AsyncIterator:
        """Replica.generate of a call to a pair, this replica and another one. Of a decode replica,
        the first update says that it expects the KV. ConnectionError if the other one dies."""
        self.engine = self.engine or AsyncEngine(self.service, self._check_engine)
        self.loop = asyncio.get_running_loop()
        run = self._prefill if self.is_prefill else self._decode
        async with aclosing(run(pair, requests, *args)) as updates:
            async for update in updates:
                yield update

    async def _prefill(
        self, pair: str, requests: list[Request], previous: list[Output], *args: Any
    ) -> AsyncIterator[Update]:
        channel, complete = await self._connect(pair), False
        self.service.channels.update(dict.fromkeys(requests, channel))
        try:
            async with aclosing(super().generate(requests, previous, *args)) as updates:
                async for update in updates:
                    yield replace(update, pieces=[], prompt_logprobs=[])
            if self.service.lost.intersection(r.id for r in requests):
                raise ConnectionError("the decode replica died")
            complete = True
        finally:
            for request in requests:
                self.service.channels.pop(request, None)
                self.service.lost.discard(request.id)
                if not complete:  # nothing will come back
                    self.engine.call_between_steps(partial(self.service.forget, request.id))

    async def _decode(
        self, pair: str, requests: list[Request], previous: list[Output],
        prompt_logprobs: int | None, seen: list[Progress],
    ) -> AsyncIterator[Update]:  # fmt: skip
        arriving = {request.id: (pair, self.loop.create_future()) for request in requests}
        self.expected |= arriving
        update = partial(Update, self.id, pieces=[], prompt_logprobs=[], error=None)
        try:
            yield update(stats=self.engine.stats())
            channel = await self._connect(pair)
            self.service.channels.update(dict.fromkeys(requests, channel))
            earlier = [await future for _, future in arriving.values()]
            for error in filter(None, (output.error for output in earlier)):
                yield update(stats=self.engine.stats(), error=error)
                return
            more = requests, earlier, prompt_logprobs, seen
            async with aclosing(super().generate(*more)) as updates:
                async for item in updates:
                    yield item
        finally:
            for request in requests:
                if self.expected.get(request.id) is arriving[request.id]:
                    del self.expected[request.id]
                self.engine.call_between_steps(partial(self.service.end, request))

    # ---- channels ----

    async def _connect(self, pair: str) -> Channel:
        """The channel of a pair. ConnectionError: there is none."""
        if pair not in self.channels:
            self.channels[pair] = future = Future()
            future.set_running_or_notify_cancel()
            threading.Thread(target=self._make_channel, args=(pair, future), daemon=True).start()
        try:
            return await asyncio.wrap_future(self.channels[pair])
        except RuntimeError as e:
            self.channels.pop(pair, None)
            raise ConnectionError(f"the replicas {pair} do not connect") from e

    def _make_channel(self, pair: str, future: Future[Channel]) -> None:
        """In a thread, since it waits for the other replica."""
        rank = int(not self.is_prefill)
        try:
            store = dist.TCPStore(*self.store, is_master=False, wait_for_workers=False)
            group = pair_group(dist.PrefixStore(pair, store), rank)
            channel = Channel(self.service.engine, {1 - rank: slice(None)}, [1 - rank], group)
        except RuntimeError as e:  # it died
            return future.set_exception(e)
        take = partial(self._take, pair, channel)
        channel.listen(lambda m: self.engine.call_between_steps(partial(take, m)))
        future.set_result(channel)

    def _take(self, pair: str, channel: Channel, message: Any) -> None:
        """A message of the other replica, between two steps."""
        service = self.service
        if isinstance(message, KVPart):
            expected = self.expected.get(message.key, (None,))[0] == pair
            if expected or service.handed_over.get(message.key) is channel:
                service.inbox.add(message)
        elif isinstance(message, Handover):
            self.loop.call_soon_threadsafe(self._arrived, pair, message)
        elif isinstance(message, Cancel):
            service.forget(message.key, channel if self.is_prefill else None)
        else:  # the exception that ended the channel
            self.channels.pop(pair, None)
            orphans = [id for id, to in service.handed_over.items() if to is channel]
            self.loop.call_soon_threadsafe(self._lost, pair, channel, orphans)

    def _arrived(self, pair: str, end: Handover) -> None:
        of, future = self.expected.get(end.key, (None, None))
        if of == pair and not future.done():
            future.set_result(end.output)

    def _lost(self, pair: str, channel: Channel, orphans: Sequence[int]) -> None:
        for of, future in self.expected.values():
            if of == pair and not future.done():
                future.set_exception(ConnectionError("the prefill replica died"))
        for id in orphans:  # unless its call goes on, handed over to another replica
            forget = partial(self.service.forget, id, channel)
            self.loop.call_later(ORPHAN_SECONDS, self.engine.call_between_steps, forget)


# --------------------------------------------------------------------------------------------------
# The server's side
# --------------------------------------------------------------------------------------------------


class DisaggregatedReplicas:
    """Calls to pairs of LocalReplicas (cluster.py), of which the first n_prefill run prompts."""

    def __init__(self, replicas: Any, n_prefill: int, store: Any):
        """store: the TCPStore of their connections."""
        self.store = store
        self.replicas, self.describe = replicas, replicas.describe
        self.prefill, self.decode = slice(n_prefill), slice(n_prefill, None)
        self.pairs: dict[tuple[int, int], str] = {}  # names, by process ids; each connects once
        self.n_pairs = count()

    async def call(self, requests: list[Request], *args: Any) -> AsyncIterator[Update]:
        """As Replica.generate. ConnectionError if one of two replicas dies."""
        prefill = await self.replicas.choose(requests[0].ids, self.prefill)
        decode = await self.replicas.choose([], self.decode)
        pids = prefill.pid, decode.pid
        pair = self.pairs.get(pids) or "{}-{}-{}".format(*pids, next(self.n_pairs))
        self.pairs[pids] = pair
        decoding = self.replicas.updates(decode, pair, requests, *args)
        prefilling = self.replicas.updates(prefill, pair, requests, *args)
        try:
            async with aclosing(decoding), aclosing(prefilling):
                await anext(decoding)  # it expects the KV now
                async with aclosing(merge(decoding, prefilling)) as updates:
                    async for update in updates:
                        yield update
        except ConnectionError:
            if self.pairs.get(pids) == pair:
                del self.pairs[pids]
            raise


async def merge(main: AsyncIterator[Any], other: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The items of two iterators as they come, until `main` ends or either raises."""
    items: asyncio.Queue[Callable[[], Any]] = asyncio.Queue()

    async def read(iterator: AsyncIterator[Any], ends: bool) -> None:
        try:
            async for item in iterator:
                items.put_nowait(item)
            if ends:
                items.put_nowait(None)
        except Exception as e:
            items.put_nowait(e)

    tasks = [asyncio.create_task(read(*pair)) for pair in ((main, True), (other, False))]
    try:
        while (item := await items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
