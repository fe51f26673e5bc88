"""Replicas of an Engine behind one HTTP server, on Ray Serve; a stream outlives its replica.

    python -m serving.cluster --replicas 2 --checkpoint DIR [further flags of generate.py --serve]

The HTTP server is serving/server.py in this process; its engine is a ReplicatedEngine, which has
AsyncEngine's methods and sends each call to a replica, a Ray actor with an Engine of its own and a
share of the CPUs, or a GPU. `--replicas MIN:MAX` lets Ray Serve add and remove replicas by the
number of calls that they have.

Failover. What a client has received is known here: tokens, and how much of the text. When a replica
dies, its calls are sent to another one with the tokens so far, and continue after them. Noise is a
function of seed, position and token (generation/sampling.py), so in fp32 the rest is, token by
token, what the dead replica would have sent; in bf16 a near-tie may fall otherwise, since rounding
depends on the batch.

Routing is Preble's E2 (Srivatsa et al. 2024, section 3.2), exploitation and exploration: a call
goes to the replica that has most of its prompt cached, if that saves more than half of the prompt
and the replica is not overloaded; else to the less loaded of two random ones.

When it loses: a call that is sent again recomputes its prompt and tokens; Ray costs about a
millisecond per event. Equivalence (test_all.py): 50 streams over 2 replicas, one of which is killed
at random moments, == the undisturbed run. Needs: ray[serve] (pip install "ray[serve]==2.60.0").
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m serving.cluster --help")

import argparse
import asyncio
import importlib
import os
import random
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

try:
    from ray.serve.request_router import FIFOMixin, RequestRouter
except ImportError:  # main says so
    FIFOMixin, RequestRouter = type("FIFOMixin", (), {}), object

from paged_kv import Output, Sample
from serving.async_engine import AsyncEngine, LogProb, Piece, Progress, Stats, Stream
from serving.batch import Request

MAX_FAILURES = 10  # of a call: then it ends with an error

# --------------------------------------------------------------------------------------------------
# Routing
# --------------------------------------------------------------------------------------------------


class PrefixAndLoad:
    """Preble's E2 over any replicas; keeps which prefixes were sent to which replica."""

    def __init__(self, block_size: int = 16, max_blocks: int = 2**18, imbalance: float = 2.0):
        """imbalance: a replica with more than this times the least load, plus 4, is overloaded."""
        self.block_size, self.max_blocks, self.imbalance = block_size, max_blocks, imbalance
        self.owners: OrderedDict[int, set[Hashable]] = OrderedDict()  # hash of a prefix -> replicas
        self.random = random.Random(0)

    def _prefixes(self, ids: Sequence[int]) -> list[int]:
        """A hash of each prefix of whole blocks."""
        hashes, last = [], 0
        for end in range(self.block_size, len(ids) + 1, self.block_size):
            last = hash((last, *ids[end - self.block_size : end]))
            hashes.append(last)
        return hashes

    def cached(self, ids: Sequence[int]) -> dict[Hashable, int]:
        """Tokens of the prompt that each replica should have in its prefix cache."""
        found: dict[Hashable, int] = {}
        for i, prefix in enumerate(self._prefixes(ids)):
            owners = self.owners.get(prefix, ())
            if not owners:
                break
            found |= dict.fromkeys(owners, (i + 1) * self.block_size)
        return found

    def choose(self, ids: Sequence[int], load: Mapping[Hashable, float]) -> list[Hashable]:
        """Replicas for a prompt, the best first. load: calls that each has at present."""
        limit = self.imbalance * min(load.values()) + 4
        cached = {r: n for r, n in self.cached(ids).items() if r in load and load[r] <= limit}
        best = max(cached, key=cached.get, default=None)
        if best is not None and 2 * cached[best] > len(ids):
            return [best]
        return sorted(self.random.sample(list(load), min(2, len(load))), key=load.get)

    def record(self, ids: Sequence[int], replica: Hashable) -> None:
        """The prompt was sent to a replica."""
        for prefix in self._prefixes(ids):
            self.owners.setdefault(prefix, set()).add(replica)
            self.owners.move_to_end(prefix)
        while len(self.owners) > self.max_blocks:
            self.owners.popitem(last=False)

    def forget(self, replica: Hashable) -> None:
        """A replica has died."""
        for owners in self.owners.values():
            owners.discard(replica)


class PrefixRouter(FIFOMixin, RequestRouter):
    """PrefixAndLoad as a request router of Ray Serve."""

    def initialize_state(self) -> None:
        self.policy = PrefixAndLoad()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        if not replicas:
            return []
        load = {id: self.replica_queue_len_cache.get(id) or 0 for id in replicas}
        order = self.policy.choose(self._prompt(pending_request), load)
        return [[replicas[id]] for id in order]

    def on_request_routed(self, pending_request: Any, replica_id: Hashable, result: Any) -> None:
        self.policy.record(self._prompt(pending_request), replica_id)

    def on_replica_actor_died(self, replica_id: Hashable) -> None:
        super().on_replica_actor_died(replica_id)
        self.policy.forget(replica_id)

    def _prompt(self, pending: Any) -> list[int]:
        requests = pending.args[0] if pending is not None and pending.args else []
        return requests[0].ids if requests else []


# --------------------------------------------------------------------------------------------------
# Replicas
# --------------------------------------------------------------------------------------------------


@dataclass
class Update:
    """What a replica sends: pieces of a stream, or how it ended, and the state of its engine."""

    replica: int  # its process
    stats: Stats
    pieces: list[Piece]
    prompt_logprobs: list[list[LogProb]]  # of each request, whole once it has a token
    error: str | None = None


class Replica:
    """A deployment of Ray Serve: an Engine with its share of the machine."""

    def __init__(self, argv: list[str], threads: int):
        import torch

        from generation.config import parse_args
        from serving.run import build_service

        torch.set_num_threads(threads)
        with torch.inference_mode():
            self.service = build_service(parse_args(argv))
        self.engine: AsyncEngine | None = None  # needs a loop

    async def describe(self) -> tuple[int, int, int]:
        """(tokens of a sequence at most, vocabulary size, process id)."""
        engine = self.service.engine
        return engine.capacity, engine.model.config.vocab_size, os.getpid()

    async def generate(
        self,
        requests: list[Request],
        previous: list[Output],
        prompt_logprobs: int | None,
        seen: list[Progress],
    ) -> AsyncIterator[Update]:
        """AsyncEngine.submit, and what follows what the caller has seen. The first update says that
        the call is valid."""
        engine = self.engine = self.engine or AsyncEngine(self.service, lambda stats: None)
        stream = await engine.submit(requests, previous, prompt_logprobs)
        update = lambda pieces, error=None: Update(
            os.getpid(), engine.stats(), pieces, [o.prompt_logprobs for o in stream.outputs], error
        )
        try:
            yield update([])
            async for piece in stream.pieces(seen):
                yield update([piece])
            yield update([], stream.error)
        finally:
            engine.close_stream(stream)


class ReplicatedEngine:
    """AsyncEngine's methods over replicas."""

    def __init__(self, handle: Any, died: type[Exception], on_step: Callable[[Stats], Any]):
        """handle: Ray Serve's, or an object whose `generate.remote` is Replica.generate. died: what
        that raises if its replica dies."""
        self.handle, self.died, self.on_step = handle, died, on_step
        self.stats: dict[int, Stats] = {}  # the latest of each replica
        self.tasks: dict[Stream, asyncio.Task] = {}

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
            samples = [Sample() for _ in range(request.params.n)]
            output = previous[i] if previous else Output(request, request.ids, samples)
            more = dict(num_prompt_logprobs=prompt_logprobs, arrival_time=now, timestamps=[])
            stream.outputs.append(replace(output, id=request, **more))
            request.samples = {j: SimpleNamespace(text="") for j in range(request.params.n)}
        accepted = asyncio.get_running_loop().create_future()
        self.tasks[stream] = asyncio.create_task(self._run(stream, accepted))
        try:
            await accepted
        except BaseException:
            self.close_stream(stream)
            raise
        return stream

    async def _run(self, stream: Stream, accepted: asyncio.Future) -> None:
        """Read a stream from a replica; if it dies, from another."""
        replica: int | None = None  # that answered last
        for _ in range(MAX_FAILURES):
            try:
                async for update in self._updates(stream):
                    replica = update.replica
                    self._apply(stream, update)
                    if not accepted.done():
                        accepted.set_result(None)
                break
            except self.died:
                self.stats.pop(replica, None)
            except Exception as e:
                e = getattr(e, "cause", e)  # Ray's exceptions have the replica's
                if not accepted.done():
                    return accepted.set_exception(e)
                stream.error = f"the replica failed ({type(e).__name__})"
                break
        if not stream.finished:
            stream.error = "its replicas died"
        if not accepted.done():
            accepted.set_exception(RuntimeError("no replica is alive"))
        stream.changed.set()

    async def _updates(self, stream: Stream) -> AsyncIterator[Update]:
        """From one replica."""
        requests = [replace(request, samples={}) for request in stream.requests]
        unended = lambda samples: [replace(s, finish_reason=None) for s in samples]
        previous = [replace(o, id=None, samples=unended(o.samples)) for o in stream.outputs]
        k = stream.outputs[0].num_prompt_logprobs
        replies = self.handle.generate.remote(requests, previous, k, list(stream.progress))
        try:
            async for update in replies:
                yield update
        finally:
            if hasattr(replies, "cancel"):
                replies.cancel()

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


# --------------------------------------------------------------------------------------------------
# main
# --------------------------------------------------------------------------------------------------


def deploy(argv: list[str], replicas: str, resources: dict[str, float], max_calls: int) -> Any:
    """Start Ray, if it does not run, and the replicas. Returns their handle."""
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    paths = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])}}
    ray.init(include_dashboard=False, log_to_driver=False, runtime_env=paths)
    serve.start(proxy_location="Disabled")
    low, *high = map(int, replicas.split(":"))
    bounds = dict(min_replicas=low, max_replicas=max([low, *high]), target_ongoing_requests=16)
    scaling = {"autoscaling_config": bounds} if high else {"num_replicas": low}
    router = RequestRouterConfig(request_router_class="serving.cluster.PrefixRouter")
    options = dict(max_ongoing_requests=max_calls, request_router_config=router) | scaling
    deployment = serve.deployment(Replica).options(ray_actor_options=resources, **options)
    app = deployment.bind(argv, max(1, int(resources["num_cpus"])))
    return serve.run(app, name="sheaf", route_prefix=None).options(stream=True)


def main(argv: list[str] | None = None) -> int:
    from generation.config import parse_args
    from huggingface.tokenizer import DummyTokenizer, load_tokenizer
    from serving.run import bind, parse_address, serve_engine, served_model

    parser = argparse.ArgumentParser(
        prog="python -m serving.cluster", description=__doc__.split("\n")[0], allow_abbrev=False,
        epilog="All other flags are generate.py's.",
    )  # fmt: skip
    parser.add_argument("--replicas", default="2", metavar="N|MIN:MAX")
    own, rest = parser.parse_known_args(argv)
    rest = rest if any(a.startswith("--serve") for a in rest) else ["--serve", *rest]
    try:
        args = parse_args(rest)
        parse_address(args)
        numbers = own.replicas.split(":")
        if len(numbers) > 2 or not all(n.isdecimal() and int(n) for n in numbers):
            raise ValueError(f"--replicas must be N or MIN:MAX, not {own.replicas!r}")
        try:
            from ray.exceptions import RayActorError
        except ImportError:
            raise ValueError(
                'serving.cluster requires ray: pip install "ray[serve]==2.60.0"'
            ) from None
        import torch

        listener = bind(args)
        cuda = torch.cuda.is_available() and args.device in (None, "cuda")
        cpus = max(1.0, len(os.sched_getaffinity(0)) // int(numbers[-1]))
        resources = {"num_cpus": cpus, "num_gpus": int(cuda)}
        handle = deploy(rest, own.replicas, resources, args.max_queue + args.max_num_seqs)
        capacity, V, _ = asyncio.run(_describe(handle))
        tokenizer = DummyTokenizer(V) if args.dummy else load_tokenizer(args.checkpoint)
        model = served_model(args, tokenizer, capacity, V)
        make_engine = partial(ReplicatedEngine, handle, RayActorError)
        serve_engine(args, make_engine, model, listener, f"{own.replicas} replicas")
    except ValueError as e:
        print(f"serving.cluster: error: {e}", file=sys.stderr)
        return 2
    return 0


async def _describe(handle: Any) -> tuple[int, int, int]:
    return await handle.options(stream=False).describe.remote()


if __name__ == "__main__":
    # under the name with which Ray's processes find it
    sys.exit(importlib.import_module("serving.cluster").main())
