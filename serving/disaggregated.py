"""Disaggregated prefill and decode: some workers run prompts, others decode.

A prompt's chunk and the decoding sequences of one engine share each step, so a prompt delays every
next token. Engines in processes of their own do not disturb each other, and each phase can have its
own batch size and number of workers (DistServe, arXiv:2401.09670; Splitwise, arXiv:2311.18677).
`prefill_worker` runs each prompt to its first token, exports the request with its KV in host memory
(Engine.export_request, the format of KV swap, so block sizes may differ) and sends it;
`decode_worker` imports it and goes on:

    torch.distributed.init_process_group("gloo")
    engine = Engine(model, num_blocks=1024)
    if dist.get_rank() == 0:
        prefill_worker(engine, [(0, prompt_ids, params), ...], targets=[1])
    else:
        outputs = decode_worker(engine, sources=[0])

`torchrun --nproc-per-node 4 generate.py --bench-serving 100 --disaggregate auto` measures goodput,
the highest request rate at which 90% of the requests meet two limits, on the time to the first
token and on the time per further token (DistServe, section 2.2), of every split of the processes
into prefill and decode workers, and of as many engines that do both.

Cost: the KV of each prompt crosses the network once, pickled by send_object_list. When it loses:
short prompts, where the transfer takes longer than the prefill; few requests, which leave workers
idle; loose limits, which colocated engines meet at a higher rate.

Equivalence (test_all.py): outputs == those of one engine, sampled ones and errors included.
Needs: paged_kv.py, and a process group of gloo or another that sends objects.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from paged_kv import Engine, KVTransfer, Output, SamplingParams

Request = tuple[int, list[int], SamplingParams]  # id, prompt, parameters


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
    engine: Engine, requests: Iterable[Request | None], targets: Sequence[int]
) -> None:
    """Run each prompt to its first token and send it, with its KV, to rank targets[id % n]."""
    arrivals, more = iter(requests), True

    def send(output: Output) -> None:
        transfer = KVTransfer(output, []) if output.finished else engine.export_request(output.id)
        dist.send_object_list([transfer], targets[output.id % len(targets)])

    while more or engine.unfinished:
        more = more and add_arrived(engine, arrivals, send)
        for output in engine.step():
            send(output)
    for rank in targets:
        dist.send_object_list([None], rank)


def decode_worker(engine: Engine, sources: Sequence[int]) -> list[Output]:
    """Decode the requests that the ranks `sources` send; returns the outputs in order of id."""
    inbox: queue.Queue[KVTransfer | BaseException | None] = queue.Queue(maxsize=64)

    def receive(source: int) -> None:
        box: list[Any] = [...]
        while box[0] is not None:
            try:
                dist.recv_object_list(box, source)
            except BaseException as e:  # the other worker died
                return inbox.put(e)
            inbox.put(box[0])

    for source in sources:
        threading.Thread(target=receive, args=(source,), daemon=True).start()
    outputs, open_sources = {}, len(sources)
    while open_sources or engine.unfinished:
        while open_sources and (not engine.unfinished or not inbox.empty()):
            transfer = inbox.get()  # blocks only if there is nothing to decode
            if isinstance(transfer, BaseException):
                raise transfer
            if transfer is None:
                open_sources -= 1
                continue
            output = outputs[transfer.output.id] = transfer.output
            try:
                if transfer.sequences:
                    engine.import_request(transfer)
            except ValueError as e:  # this engine has a smaller cache, for example
                outputs[output.id] = Output(output.id, output.prompt_ids, error=str(e))
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
    engine: Engine, trace: Sequence[Any], params: SamplingParams, n_prefill: int
) -> list[tuple[float, float]]:
    """Run a trace of (arrival_time, ids, max_new_tokens) in real time: the first n_prefill ranks
    run prompts, the others decode; 0: every rank does both, for its share. Collective. Returns on
    all ranks the (time to first token, time per further token) of each request, in seconds."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    start = time.perf_counter()
    engine.clock = lambda: time.perf_counter() - start

    def arrivals(workers: int) -> Iterator[Request | None]:
        for i in range(rank, len(trace), workers):
            while engine.clock() < trace[i].arrival_time:
                yield None
            new, seed = trace[i].max_new_tokens, (params.seed + i) % 2**63
            yield i, trace[i].ids, replace(params, max_new_tokens=new, seed=seed)

    outputs = []
    if not n_prefill:
        outputs = colocated_worker(engine, arrivals(ranks))
    elif rank < n_prefill:
        prefill_worker(engine, arrivals(n_prefill), range(n_prefill, ranks))
    else:
        outputs = decode_worker(engine, range(n_prefill))
    latencies, errors = {}, [output.error for output in outputs if output.error is not None]
    for output in outputs if not errors else ():
        _, first, *later = output.timestamps
        per_token = (later[-1] - first) / len(later) if later else 0.0
        latencies[output.id] = first - trace[output.id].arrival_time, per_token
    gathered: list[Any] = [None] * ranks
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
    engine: Engine,
    make_trace: Callable[[float], Sequence[Any]],
    params: SamplingParams,
    limits: tuple[float, float],
    splits: Sequence[int],
    rate: float,
) -> dict[int, float]:
    """{prefill ranks (0: colocated): goodput in requests per second}. make_trace(rate): the trace;
    limits: on the time to first token and per further token, seconds. Collective."""

    def attainment(rate: float, n_prefill: int) -> float:
        latencies = run_trace(engine, make_trace(rate), params, n_prefill)
        return sum(a <= limits[0] and b <= limits[1] for a, b in latencies) / len(latencies)

    for n in splits:  # the first run of each compiles and allocates
        run_trace(engine, make_trace(math.inf), params, n)
    return {n: goodput(lambda rate, n=n: attainment(rate, n), rate) for n in splits}
