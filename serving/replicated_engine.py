"""An engine made of replicas: a stream survives the death of its replica.

A Replica is an Engine in a process of its own. ReplicatedEngine has AsyncEngine's methods and sends
each call to a replica, by a function that chooses one (cluster.py has two). It keeps what the
client of each stream has received: tokens and characters. When a replica dies, its calls are sent
to another one with the tokens so far, and continue after them. Noise is a function of seed,
position and token (generation/sampling.py), so in fp32 the rest is, token by token, what the dead
replica would have sent; in bf16 a near-tie may differ, since rounding depends on the batch.

When it loses: a call that is sent again recomputes its prompt and tokens. Equivalence
(test_all.py): 50 streams over 2 replicas, which are killed at random moments, == the undisturbed
run. Needs: async_engine.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of serving/cluster.py; run: python -m serving.cluster --help")

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

from paged_kv import Output, Sample
from serving.async_engine import AsyncEngine, LogProb, Piece, Progress, Stats, Stream
from serving.batch import Request, Service
from serving.tp_worker import follow, on_rank0

MAX_FAILURES = 10  # replicas of a call that may die; then it ends with an error
RETRY_SECONDS = 0.1  # before the third replica, 0.2 before the fourth, and so on: a router may
# need some time to notice a death


@dataclass
class Update:
    """What a replica sends: pieces of a stream, or how it ended, and the state of its engine."""

    replica: str  # its id
    stats: Stats
    pieces: list[Piece]
    prompt_logprobs: list[list[LogProb]]  # of each request, complete once it has a token
    error: str | None = None


@contextmanager
def rank_service(argv: list[str], threads: int) -> Iterator[Service]:
    """The Service of this process, which is one of several ranks if torchrun's variables are set.
    argv: the flags of generate.py --serve. ValueError names a wrong one, on all ranks."""
    import torch

    from generation.config import parse_args
    from generation.load import open_gguf
    from generation.ranks import process_group
    from serving.build import build_service

    torch.set_num_threads(threads)
    args = parse_args(argv)
    with process_group(args):
        with torch.inference_mode(), open_gguf(args):
            service = build_service(args)
        yield service


def run_follower(argv: list[str], threads: int) -> None:
    """Ranks of a replica other than 0. Returns only if no rank could start."""
    with ExitStack() as stack:
        try:
            service = stack.enter_context(rank_service(argv, threads))
        except ValueError:  # rank 0 reports it
            return
        follow(service)


class Replica:
    """An Engine in this process, or rank 0 of one."""

    def __init__(self, argv: list[str], threads: int):
        """As rank_service."""
        self.ranks = ExitStack()  # closed with the process
        self.service = on_rank0(self.ranks.enter_context(rank_service(argv, threads)))
        self.id, self.engine = uuid.uuid4().hex, None  # an AsyncEngine needs a loop

    async def describe(self) -> tuple[int, int]:
        """(tokens of a sequence at most, vocabulary size)."""
        return self.service.engine.capacity, self.service.engine.model.config.vocab_size

    async def generate(
        self,
        requests: list[Request],
        previous: list[Output],
        prompt_logprobs: int | None,
        seen: list[Progress],
    ) -> AsyncIterator[Update]:
        """AsyncEngine.submit, and what follows what the caller has seen. The first update, without
        pieces, says that the call is valid."""
        engine = self.engine = self.engine or AsyncEngine(self.service, self._check_engine)
        stream = await engine.submit(requests, previous, prompt_logprobs)

        def update(pieces: list[Any], error: str | None = None) -> Update:
            logprobs = [output.prompt_logprobs for output in stream.outputs]
            return Update(self.id, engine.stats(), pieces, logprobs, error)

        try:
            yield update([])
            async for piece in stream.pieces(seen):
                yield update([piece])
            yield update([], stream.error)
        finally:
            engine.close_stream(stream)

    def _check_engine(self, stats: Stats) -> None:
        if not self.engine.alive:
            os._exit(1)  # its calls continue on another replica, and it is started again


class ReplicatedEngine:
    """AsyncEngine's methods over replicas."""

    alive = True  # replicas that die are started again

    def __init__(self, call: Callable[..., AsyncIterator[Update]], on_step: Callable[[Stats], Any]):
        """call: Replica.generate of some replica; ConnectionError if that dies."""
        self.call, self.on_step = call, on_step
        self.stats: dict[str, Stats] = {}  # the latest of each replica
        self.tasks: dict[Stream, asyncio.Task] = {}
        self.numbers = count()

    @property
    def n_waiting(self) -> int:
        """Requests that no replica has begun, as far as this process knows."""
        outputs = (output for stream in self.tasks for output in stream.outputs)
        return sum(not output.timestamps for output in outputs)

    async def submit(
        self,
        requests: list[Request],
        previous: Sequence[Output] = (),
        prompt_logprobs: int | None = None,
    ) -> Stream:
        """As AsyncEngine.submit."""
        stream, now = Stream(requests), time.perf_counter()
        for i, request in enumerate(requests):
            request.id = next(self.numbers)  # the same for each replica that gets it
            samples = [Sample() for _ in range(request.params.n)]
            output = previous[i] if previous else Output(request, request.ids, samples)
            more = dict(num_prompt_logprobs=prompt_logprobs, arrival_time=now, timestamps=[])
            stream.outputs.append(replace(output, id=request, **more))
            request.samples = {j: SimpleNamespace(text="") for j in range(request.params.n)}
        accepted = asyncio.get_running_loop().create_future()
        self.tasks[stream] = asyncio.create_task(self._run(stream, accepted))
        try:
            await accepted
        except BaseException:  # also if this call is cancelled
            self.close_stream(stream)
            raise
        return stream

    async def _run(self, stream: Stream, accepted: asyncio.Future) -> None:
        """Read a stream from a replica; if that dies, from another."""
        replicas: set[str] = set()  # that answered; those that live will tell their state again
        for failures in range(MAX_FAILURES):
            try:
                async with aclosing(self.call(*self._arguments(stream))) as updates:
                    async for update in updates:
                        replicas.add(update.replica)
                        self._apply(stream, update)
                        if not accepted.done():
                            accepted.set_result(None)
                break
            except ConnectionError:
                while replicas:
                    self.stats.pop(replicas.pop(), None)
                if stream.finished:
                    break
                await asyncio.sleep(failures * RETRY_SECONDS)
            except Exception as e:
                if not accepted.done():
                    return accepted.set_exception(e)
                stream.error = f"the replica failed ({type(e).__name__})"
                break
        if not stream.finished:
            stream.error = "its replicas died"
        if not accepted.done():
            accepted.set_exception(RuntimeError("no replica is alive"))
        stream.changed.set()

    def _arguments(self, stream: Stream) -> tuple:
        """Of Replica.generate, to continue a stream."""
        requests = [replace(request, samples={}) for request in stream.requests]
        previous = []
        for output in stream.outputs:
            unended = [replace(sample, finish_reason=None) for sample in output.samples]
            previous.append(replace(output, id=None, samples=unended))
        return requests, previous, previous[0].num_prompt_logprobs, list(stream.progress)

    def _apply(self, stream: Stream, update: Update) -> None:
        self.stats[update.replica] = update.stats
        now = time.perf_counter()
        for piece in update.pieces:
            request, output, i = stream.sample(piece.choice)
            sample, old = output.samples[i], stream.progress[piece.choice]
            sample.token_ids[old.tokens :] = piece.tokens  # those of an interrupted run too
            sample.logprobs[old.tokens :] = piece.logprobs
            sample.finish_reason = piece.finish_reason
            request.samples[i].text += piece.text
            tokens, chars = old.tokens + len(piece.tokens), old.chars + len(piece.text)
            stream.progress[piece.choice] = Progress(tokens, chars, piece.finish_reason)
            output.timestamps = output.timestamps or [now]
            output.timestamps += [now] * len(piece.tokens) if i == 0 else []
        for output, logprobs in zip(stream.outputs, update.prompt_logprobs):
            output.prompt_logprobs = logprobs
        stream.error = stream.error or update.error
        stream.changed.set()
        total = {name: sum(s[name] for s in self.stats.values()) for name in update.stats}
        self.on_step(total | {"kv_usage": total["kv_usage"] / len(self.stats)})

    def close_stream(self, stream: Stream, then: Callable[[], Any] = lambda: None) -> None:
        """As AsyncEngine.close_stream."""
        task = self.tasks.pop(stream)
        task.cancel()
        task.add_done_callback(lambda _: then())

    def stop(self) -> None:
        for stream, task in self.tasks.items():
            task.cancel()
            stream.error = stream.error or "the server stops"
            stream.changed.set()

    async def close(self) -> None:
        self.stop()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
