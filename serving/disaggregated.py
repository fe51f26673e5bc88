"""Disaggregated prefill and decode: some workers run prompts, others decode.

A prompt's chunk and the decoding sequences of one engine share each step, so a prompt delays every
next token. Engines in processes of their own do not disturb each other, and each phase can have its
own batch size, workers and parallelism (DistServe, arXiv:2401.09670; Splitwise, arXiv:2311.18677).
`prefill_worker` runs each prompt to its first token and sends its KV in parts meanwhile, one after
each chunk, so that with the first token only the last one remains; `decode_worker` goes on
(kv_transfer.py):

    torch.distributed.init_process_group("gloo")
    engine = Engine(model, num_blocks=1024)
    if dist.get_rank() == 0:
        prefill_worker(engine, [(0, prompt_ids, params), ...], targets=[{1: slice(None)}])
    else:
        outputs = decode_worker(engine, sources=[[0]])

A worker may be several tensor-parallel ranks with an engine each. They run the same steps: the
first rank decides what is added before each. A prefill rank sends a decode rank the KV heads that
the latter caches, and no others.

`torchrun --nproc-per-node 4 generate.py --bench-serving 100 --disaggregate auto` measures goodput,
the highest request rate at which 90% of the requests meet two limits, on the time to the first
token and on the time per further token (DistServe, section 2.2), of every placement on all ranks:
number and tensor parallelism of the workers of each phase, and of colocated engines. DistServe
(sections 4.1, 4.2) searches the same and pipeline parallelism, by simulation; here each is run.

Cost: the KV of each prompt crosses the network once; `auto` loads the model for every placement.
When it loses: short prompts, where the transfer takes longer than the prefill; few requests, which
leave workers idle; loose limits, which colocated engines meet at a higher rate.

Equivalence (test_all.py): outputs == those of one engine, sampled ones and errors included.
Needs: kv_transfer.py, and a process group, of gloo if a worker has several ranks.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import gc
import math
import queue
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paged_kv import Engine, Output, SamplingParams
from serving.kv_transfer import Channel, Handover, KVInbox, KVPart, KVSender, decodes

Request = tuple[int, list[int], SamplingParams]  # id, prompt, parameters


class Placement(NamedTuple):
    """Workers of each phase, and tensor-parallel ranks of each worker; the first ranks are those of
    prefill. n_prefill 0: colocated, the decode workers run the prompts too."""

    n_prefill: int
    prefill_tp: int
    n_decode: int
    decode_tp: int

    def __str__(self) -> str:
        return "{}x{}:{}x{}".format(*self)

    @property
    def workers(self) -> list[range]:
        """The ranks of each worker."""
        sizes = [self.prefill_tp] * self.n_prefill + [self.decode_tp] * self.n_decode
        return [range(end - n, end) for n, end in zip(sizes, accumulate(sizes))]

    def kv_slices(self, n_kv_heads: int) -> list[tuple[int, int, slice]]:
        """What a prefill worker sends to a decode worker: (sender and receiver, as ranks within the
        workers; which of the sender's heads). Heads are sharded or replicated as by apply_tp."""
        heads = lambda i, tp: range(i * n_kv_heads // tp, -(-(i + 1) * n_kv_heads // tp))
        slices = []
        for i, j in product(range(self.prefill_tp), range(self.decode_tp)):
            have, need = heads(i, self.prefill_tp), heads(j, self.decode_tp)
            first, stop = max(have.start, need.start), min(have.stop, need.stop)
            if first < stop and i * n_kv_heads % self.prefill_tp == 0:  # the first of replicas
                slices.append((i, j, slice(first - have.start, stop - have.start)))
        return slices


def parse_placement(text: str) -> Placement:
    """P:D, workers, or PxT:DxT, workers and ranks of each; ValueError names the flag."""
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?:([1-9]\d*)(?:x([1-9]\d*))?", text)
    if match is None:
        raise ValueError(f"--disaggregate must be P:D, PxT:DxT or auto, not {text!r}")
    return Placement(*(int(n or 1) for n in match.groups()))


def placements(ranks: int, tps: Iterable[int]) -> list[Placement]:
    """Every placement on `ranks` ranks with workers of a size in tps, colocated ones first."""
    return [
        Placement(n // p, p, (ranks - n) // d, d)
        for n in range(ranks)
        for p, d in product(tps if n else (1,), tps)
        if n % p == 0 == (ranks - n) % d
    ]


class Worker:
    """This rank's worker of a placement; the `mesh` of parallel.apply_tp, with no dimension but tp.
    peers: for each worker of the other phase, its ranks that exchange KV with this rank, and which
    of the sender's heads. n_kv_heads: of the whole model; 1 if all heads share a latent."""

    def __init__(self, placement: Placement, n_kv_heads: int):
        """Collective: makes the process groups of all workers."""
        self.placement, workers, rank = placement, placement.workers, dist.get_rank()
        groups = [dist.new_group(list(w)) if len(w) > 1 else None for w in workers]
        self.index = next(i for i, ranks in enumerate(workers) if rank in ranks)
        self.ranks, self.tp_group = workers[self.index], groups[self.index]
        slices, n, me = placement.kv_slices(n_kv_heads), placement.n_prefill, self.rank("tp")
        self.peers = [{w[i]: x for i, j, x in slices if j == me} for w in workers[:n]]
        if self.index < n:
            self.peers = [{w[j]: x for i, j, x in slices if i == me} for w in workers[n:]]

    def group(self, dim: str) -> Any:
        return self.tp_group

    def size(self, dim: str) -> int:
        return len(self.ranks)

    def rank(self, dim: str) -> int:
        return dist.get_rank() - self.ranks[0]


def from_first_rank(items: Iterator, group: Any) -> Iterator:
    """The items of a worker's first rank, on all its ranks. group None: it has one rank."""

    def next_item() -> Any:
        box = [next(items, ...) if dist.get_rank(group) == 0 else None]
        dist.broadcast_object_list(box, group=group, group_src=0)
        return box[0]

    return items if group is None else iter(next_item, ...)


def add_arrived(
    engine: Engine, requests: Iterator[Request | None], refuse: Callable[[Output], Any]
) -> bool:
    """Add requests until the iterator yields None: the next one has not arrived yet. False once it
    is exhausted. refuse(output with the error) is called for an invalid request."""
    while (request := next(requests, ...)) is not None:
        if request is ...:
            return False
        id, prompt, params = request
        try:
            engine.add(prompt, params, id=id)
        except ValueError as e:
            refuse(Output(id, prompt, error=str(e)))
    if not engine.unfinished:
        time.sleep(1e-4)
    return True


def prefill_worker(
    engine: Engine, requests: Iterable[Request | None], targets: Sequence[Mapping[int, slice]]
) -> None:
    """Run each prompt to its first token and send it to the ranks of targets[id % n], with the
    slice of this engine's KV heads that each maps to."""
    channels = [Channel(engine, ranks) for ranks in targets]
    arrivals, more, sender = iter(requests), True, KVSender(engine)

    def finish(output: Output) -> None:
        channels[output.id % len(channels)].send(Handover(output.id, output))

    while more or engine.unfinished:
        more = more and add_arrived(engine, arrivals, finish)
        for output in engine.step():
            if output.finished:
                finish(output)
        for id in list(engine.outputs):
            done = decodes(engine, id)
            (sender.hand_over if done else sender.send_new)(id, id, channels[id % len(channels)])
    for channel in channels:
        channel.send(None)
        channel.flush()


def decode_worker(
    engine: Engine, sources: Sequence[Iterable[int]], group: Any = None
) -> list[Output]:
    """Decode the requests that prefill workers send; returns the outputs in order of id. sources:
    of each such worker the ranks that send this engine's KV heads, in order of heads. group: of
    this worker, if it has several ranks."""
    inboxes: list[queue.Queue] = [queue.Queue() for _ in sources]
    order: queue.Queue[int] = queue.Queue()  # of arrival
    for i, ranks in enumerate(sources):
        put = lambda message, i=i: (inboxes[i].put(message), order.put(i))
        Channel(engine, sources=ranks).listen(put)

    def arrived() -> Iterator[int | None]:
        while True:  # blocks only if there is nothing to decode
            yield None if engine.unfinished and order.empty() else order.get()

    outputs, inbox, open_sources = {}, KVInbox(engine), len(sources)
    arrivals = from_first_rank(arrived(), group)
    while open_sources or engine.unfinished:
        while open_sources and (i := next(arrivals)) is not None:
            message = inboxes[i].get()
            if isinstance(message, Exception):
                raise message
            if message is None:
                open_sources -= 1
            elif isinstance(message, KVPart):
                inbox.add(message)
            else:
                output = message.output
                try:
                    outputs[message.key] = inbox.receive(message)
                except ValueError as e:  # this engine has a smaller cache, for example
                    outputs[message.key] = replace(output, samples=[], error=str(e))
        engine.step()
    return [outputs[id] for id in sorted(outputs)]


def colocated_worker(engine: Engine, requests: Iterable[Request | None]) -> list[Output]:
    """Prefill and decode in one engine; returns the outputs as they finish."""
    outputs, arrivals, more = [], iter(requests), True
    while more or engine.unfinished:
        more = more and add_arrived(engine, arrivals, outputs.append)
        outputs += [output for output in engine.step() if output.finished]
    return outputs


# --------------------------------------------------------------------------------------------------
# Goodput
# --------------------------------------------------------------------------------------------------


def run_trace(
    engine: Engine, trace: Sequence[Any], params: SamplingParams, worker: Worker
) -> list[tuple[float, float]]:
    """Run a trace of Arrivals in real time on all workers of a placement; each runs prompts for its
    share. Collective. Returns on all ranks the (time to first token, time per further token) of
    each request, in seconds."""
    n_prefill, _, n_decode, _ = worker.placement
    prompts = [a.ids(engine.model.config.vocab_size) for a in trace]
    dist.barrier()
    dist.broadcast_object_list(start := [time.time()])  # one for all: two ranks time a request
    engine.clock = lambda: time.time() - start[0]

    def arrivals() -> Iterator[Request | None]:
        for i in range(worker.index, len(trace), n_prefill or n_decode):
            while engine.clock() < trace[i].arrival_time:
                yield None
            new, seed = trace[i].max_new_tokens, (params.seed + i) % 2**63
            yield i, prompts[i], replace(params, max_new_tokens=new, seed=seed)

    outputs, requests = [], from_first_rank(arrivals(), worker.tp_group)
    if not n_prefill:
        outputs = colocated_worker(engine, requests)
    elif worker.index < n_prefill:
        prefill_worker(engine, requests, worker.peers)
    else:
        outputs = decode_worker(engine, worker.peers, worker.tp_group)
    latencies, errors = {}, [output.error for output in outputs if output.error is not None]
    for output in outputs if not errors else ():
        _, first, *later = output.timestamps
        per_token = (later[-1] - first) / len(later) if later else 0.0
        latencies[output.id] = first - trace[output.id].arrival_time, per_token
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (latencies, errors))
    if errors := [error for _, part in gathered for error in part]:
        raise ValueError(errors[0])
    merged = {id: pair for part, _ in gathered for id, pair in part.items()}
    return [merged[i] for i in range(len(trace))]


def goodput(
    attainment: Callable[[float], float], rate: float, target: float = 0.9, steps: int = 4
) -> float:
    """The highest request rate with attainment(rate) >= target. attainment(rate): the share of
    requests within the limits. `rate` is doubled or halved until one rate meets the target and one
    does not, then bisected `steps` times on a logarithmic scale. 0 if a 16th of it does not meet
    the target, inf if 1024 times as much does."""
    met, missed, tried = 0.0, math.inf, rate
    while rate / 16 <= tried <= 1024 * rate:
        if attainment(tried) >= target:
            met = tried
        else:
            missed = tried
        if met and missed < math.inf:
            if steps == 0:
                break
            steps, tried = steps - 1, math.sqrt(met * missed)
        else:
            tried = 2 * met if met else missed / 2
    return met if missed < math.inf else math.inf


def search(
    build: Callable[[Worker], Engine],
    make_trace: Callable[[float], Sequence[Any]],
    params: SamplingParams,
    limits: tuple[float, float],
    candidates: Sequence[Placement],
    n_kv_heads: int,
    rate: float,
) -> dict[Placement, float]:
    """{placement: goodput in requests per second}. build(worker): this rank's engine; make_trace
    (rate): the trace; limits: on the time to first token and per further token, seconds;
    n_kv_heads: see Worker. Collective."""

    def measure(placement: Placement) -> float:
        if torch.cuda.is_available():  # free the last engine, whose CUDA graphs refer to it
            gc.collect()
            torch.cuda.empty_cache()
        worker = Worker(placement, n_kv_heads)
        engine = build(worker)

        def attainment(rate: float) -> float:
            latencies = run_trace(engine, make_trace(rate), params, worker)
            return sum(a <= limits[0] and b <= limits[1] for a, b in latencies) / len(latencies)

        attainment(math.inf)  # the first run compiles and allocates
        found = goodput(attainment, rate)
        if worker.tp_group is not None:
            dist.destroy_process_group(worker.tp_group)
        return found

    return {placement: measure(placement) for placement in candidates}
