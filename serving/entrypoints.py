"""What generate.py does on --batch, --program, --bench-serving and --serve: a function for each.

    batch           a file of requests -> a file of results, which a later run resumes
    program         a program of prompts (serving/programs.py) -> its result
    bench_serving   a random trace (serving/traces.py) in real time -> latency and throughput; with
                    --disaggregate the goodput of each placement of prefill and decode
    serve           HTTP clients (serving/server.py) until a signal

Each checks what its flags name, builds a Service or an Engine (serving/build.py), runs it and
prints what it has measured: results on stdout or in a file, statistics on stderr. Below each stand
its own helpers. With several ranks (--tp), rank 0 reads files and sockets, the others follow its
steps (serving/tp_worker.py) and print nothing. ValueError names the flag; generate.py prints it.

Equivalence (test_all.py): each mode gives the text of the same request alone in generate.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import asyncio
import importlib.util
import json
import math
import os
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from generation.bench import device_name
from generation.config import GenerateConfig
from generation.load import dummy_config, is_quantized, pick_device
from generation.prompt import prompt_text, text_format
from generation.ranks import broadcast_object, rank0_then_broadcast, run_on_all_or_raise
from huggingface.weights import read_config
from model import ModelConfig
from serving import batch as serving_batch
from serving.batch_file import Results, read_results, request_lines, run_hash
from serving.build import (
    adapter_format, build_service, cascade_engine, load_engine, read_adapter, served_model,
)  # fmt: skip
from serving.disaggregated import Placement, Worker, placements, search
from serving.replay import replay, replay_metrics, summary_table
from serving.runtime_adapters import RuntimeAdapters
from serving.tp_worker import follow, on_rank0
from serving.traces import FRESH, Arrival, generate
from training.writer_lock import file_lock

# --------------------------------------------------------------------------------------------------
# --batch
# --------------------------------------------------------------------------------------------------

STDIN = Path("/dev/stdin")


def batch(args: GenerateConfig) -> int:
    """--batch: run a file of requests into a file of results. The exit code: 1 if some failed."""
    with ExitStack() as locks:
        return run_batch_file(args, *rank0_then_broadcast(partial(batch_files, args, locks)))


def batch_files(args: GenerateConfig, locks: ExitStack) -> tuple[Path, Results, str]:
    """--batch: the results file, read_results() of it, and run_hash(). `locks` holds its lock.
    ValueError names the flag: a file cannot be read or written, another process writes the results,
    or they are of other requests, flags or weights."""
    if str(args.batch) == "-":
        args.batch = STDIN
    if not os.access(args.batch, os.R_OK) or args.batch.is_dir():
        raise ValueError(f"--batch {args.batch}: cannot be read; give a JSONL file")
    if args.out is None and (args.batch == STDIN or not args.batch.is_file()):
        raise ValueError(f"--batch {args.batch}: a pipe requires --out FILE, for the results")
    out = args.out or args.batch.with_suffix(".results.jsonl")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise ValueError(f"--out {out}: a folder; give a file in it")
    if out.exists() and not out.is_file():  # results are read again, and a device has no end
        raise ValueError(f"--out {out}: a device or a pipe; give a file")
    if out.exists() and out.samefile(args.batch):
        raise ValueError(f"--out {out} is the requests file; use another")
    try:
        locks.enter_context(file_lock(out))
    except ValueError as e:
        raise ValueError(f"--out {e}") from None
    previous, run = read_results(out), run_hash(args)
    if previous and args.batch.is_file():  # a pipe can be read only once
        try:
            deque(request_lines(args.batch, run, previous), maxlen=0)
        except ValueError as e:
            raise ValueError(f"--out {out}: {e}") from None
    return out, previous, run


def run_batch_file(args: GenerateConfig, out: Path, previous_results: Results, run: str) -> int:
    """--batch, after the checks of batch_files, whose result the last three arguments are."""
    service = build_service(args)
    template = text_format(args, service.engine.model.config, service.tokenizer).template
    capacity, pool = service.engine.capacity, service.engine.adapters
    max_bytes = capacity * service.tokenizer.max_token_bytes
    requests = serving_batch.RequestFile(
        args.batch, previous_results, service.tokenizer, template, args.system_prompt,
        args.sampling_params, capacity, rank0_then_broadcast, args.reorder, run, max_bytes,
        {} if pool is None else pool.adapters,
    )  # fmt: skip
    is_rank0 = not dist.is_initialized() or dist.get_rank() == 0
    try:
        with saved_adapters(service):
            results = out if is_rank0 else Path(os.devnull)
            line, n_errors = serving_batch.run_batch(service, requests, results)
            while service.engine.background is not None:
                service.engine.step()
    except KeyboardInterrupt:
        text = f"interrupted; finished results are in {out}; to resume, run it again"
        print(text, file=sys.stderr)
        raise
    device = service.engine.model.embed.weight.device
    print(f"[{device_name(device, args.mesh)}] {line}", file=sys.stderr)
    return min(n_errors, 1)


@contextmanager
def saved_adapters(service: serving_batch.Service) -> Iterator[None]:
    """Save the adapters of --finetune also if it is stopped before its last step."""
    try:
        yield
    finally:
        if service.tuner is not None and not service.tuner.finished:
            service.tuner.save()


# --------------------------------------------------------------------------------------------------
# --program
# --------------------------------------------------------------------------------------------------


def program(args: GenerateConfig) -> None:
    """--program: print the result of a program of prompts."""
    from serving import programs

    main, service = load_program(args.program), build_service(args)
    prompt, params, start = prompt_text(args), args.sampling_params, time.perf_counter()
    try:
        result = asyncio.run(programs.run(main, service, prompt, params=params))
    except programs.CallError as e:
        raise ValueError(f"--program {args.program}: {e}") from None
    seconds, engine = time.perf_counter() - start, service.engine
    print(programs.as_text(result))
    stats = f"{engine.n_arrivals} requests, {engine.counts['steps']} steps, {seconds:.2f} s; "
    stats += f"{engine.scheduler.n_hit_tokens} of {engine.scheduler.n_admitted_tokens} tokens of "
    stats += "prompts were cached" + serving_batch.stored_tokens(engine.stats())
    print(f"[{device_name(engine.model.embed.weight.device)}] {stats}", file=sys.stderr)


def load_program(spec: str) -> Any:
    """--program FILE.py[:NAME]: the coroutine function NAME, by default main."""
    file, _, name = spec.partition(".py:")
    path = Path(f"{file}.py" if name else file)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"--program {spec}: no such file; give FILE.py or FILE.py:NAME")
    module_spec = importlib.util.spec_from_file_location(f"program_{path.stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module.__name__] = module  # dataclasses look for it there
    try:
        module_spec.loader.exec_module(module)
    except SyntaxError as e:
        raise ValueError(f"--program {spec}: line {e.lineno}: {e.msg}") from None
    main = getattr(module, name or "main", None)
    if not asyncio.iscoroutinefunction(main):
        functions = [n for n, f in vars(module).items() if asyncio.iscoroutinefunction(f)]
        known = f"; name one of its own: FILE.py:{' or '.join(functions)}" if functions else ""
        raise ValueError(
            f"--program {spec}: it has no `async def {name or 'main'}(p, prompt)`{known}"
        )
    return main


# --------------------------------------------------------------------------------------------------
# --bench-serving
# --------------------------------------------------------------------------------------------------


def bench_serving(args: GenerateConfig) -> None:
    """--bench-serving: random requests in real time, after a warm-up with requests of the same
    lengths and other tokens."""
    device = run_on_all_or_raise(partial(pick_device, args.device))
    params = replace(args.sampling_params, ignore_eos=True)
    if args.disaggregate:
        print(goodput_table(args, device, params))
        return
    engine = load_engine(args, device)
    trace = random_trace(args, args.request_rate, args.sampling_params.seed)
    warm_up = []
    for arrival in trace[: 2 * args.max_num_seqs]:
        prompt = tuple((text + FRESH, n) for text, n in arrival.prompt)
        warm_up.append(replace(arrival, arrival_time=0.0, prompt=prompt))
    replay(engine, warm_up, params, broadcast_object)  # compiles and captures steps
    metrics = replay_metrics(engine, trace, params, broadcast_object)
    print(json.dumps(metrics) if args.json else summary_table(metrics))


def random_trace(args: GenerateConfig, rate: float, seed: int) -> list[Arrival]:
    """The requests of --bench-serving."""
    fields = f"n={args.bench_serving},rate={rate},cv={args.arrival_cv},prefix={args.shared_prefix}"
    for name, (low, high) in (("input", args.input_tokens), ("output", args.output_tokens)):
        fields += f",{name}={low}:{high}"
    return list(generate(f"random:{fields}", seed))


def goodput_table(args: GenerateConfig, device: Any, params: Any) -> str:
    """--disaggregate: goodput of colocated engines and of splits into prefill and decode."""
    read = partial(read_config, args.checkpoint / "config.json")
    config = run_on_all_or_raise(partial(dummy_config, args.dummy) if args.dummy else read)
    seeds = count(params.seed)  # new prompts for each run: no prefix is cached

    def make_trace(rate: float) -> list[Arrival]:
        return random_trace(args, rate, next(seeds))

    def build(worker: Worker) -> Any:
        args.mesh = worker if worker.size("tp") > 1 else None
        return load_engine(args, device)

    rate = args.request_rate if args.request_rate < math.inf else 1.0
    kv_heads = 1 if config.kv_lora_rank else config.n_kv_heads
    candidates = candidate_placements(args, config)
    found = search(build, make_trace, params, args.slo, candidates, kv_heads, rate)
    best = max(found, key=found.get)
    lines = [f"{'prefill':>9}{'decode':>8}   goodput, requests/s"]
    for p, x in found.items():
        prefill = f"{p.n_prefill}x{p.prefill_tp}" if p.n_prefill else "colocated"
        decode = f"{p.n_decode}x{p.decode_tp}"
        lines.append(f"{prefill:>9}{decode:>8}{x:>10.2f}{'  best' if p == best else ''}")
    return "\n".join(lines)


def candidate_placements(args: GenerateConfig, config: ModelConfig) -> list[Placement]:
    """The placements that --disaggregate compares. ValueError names the flag."""
    given, ranks = args.disaggregate, dist.get_world_size() if dist.is_initialized() else 1
    needed = max(2, ranks) if given == "auto" else given.workers[-1].stop
    if ranks != needed:
        command = f"torchrun --nproc-per-node {needed}"
        raise ValueError(f"--disaggregate {given}: start it with {command}, not {ranks}")
    tps = range(1, ranks + 1) if given == "auto" else {given.prefill_tp, given.decode_tp}
    missing = {t: missing_for_tp(args, config, t) for t in tps}
    if given == "auto":
        return placements(ranks, [t for t in tps if not missing[t]])
    for t in tps:
        if missing[t]:
            raise ValueError(f"--disaggregate {given}: workers of {t} ranks require {missing[t]}")
    return [p for p in placements(ranks, tps) if p == given or not p.n_prefill]


def missing_for_tp(args: GenerateConfig, config: ModelConfig, tp: int) -> str:
    """What workers of tp ranks require, and these flags or this model lack; "" if nothing."""
    for name in ("compile", "calibrate", "adapter", "offload"):
        if tp > 1 and args.is_on(name):
            return f"no {args.shown(name)}"
    if tp > 1 and args.dummy is None and is_quantized(args.checkpoint):
        return "a checkpoint that is not quantized"
    for name in ("n_heads", "n_kv_heads", "ffn_dim", "expert_ffn_dim"):
        size = getattr(config, name)
        if size % tp and (name != "n_kv_heads" or tp % size):  # KV heads may be replicated
            return f"{name} {size} to be a multiple of {tp}"
    return ""


# --------------------------------------------------------------------------------------------------
# --serve
# --------------------------------------------------------------------------------------------------


def serve(args: GenerateConfig) -> None:
    """--serve: an HTTP server on an Engine."""
    try:
        from serving import server
    except ImportError as e:
        raise ValueError(f"--serve requires {e.name}: pip install -r requirements.txt") from None
    rank = dist.get_rank() if dist.is_initialized() else 0
    listener = run_on_all_or_raise(lambda: bind(args) if rank == 0 else None)
    service = build_service(args)
    if rank:
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 drains
            signal.signal(number, signal.SIG_IGN)
        return follow(service)
    config, pool = service.engine.model.config, service.engine.adapters
    format = text_format(args, config, service.tokenizer)
    sizes = service.engine.capacity, config.vocab_size
    adapters = {} if pool is None else pool.adapters
    model = served_model(args, service.tokenizer, format, adapters, *sizes)
    make_engine = partial(server.AsyncEngine, on_rank0(service))
    if args.cascade is not None:
        make_engine = cascade_engine(args, service)
    device = device_name(service.engine.model.embed.weight.device, args.mesh)
    runtime = None
    if args.runtime_adapters is not None:
        read_format = partial(adapter_format, args, format, service.tokenizer)
        read, folder = partial(read_adapter, pool, read_format=read_format), args.runtime_adapters
        runtime = RuntimeAdapters(pool, read, folder, args.max_adapters)
    with saved_adapters(service):
        serve_engine(args, make_engine, model, listener, device, runtime)
    broadcast_object(None)  # to `follow`


def serve_engine(
    args: GenerateConfig, make_engine: Any, model: Any, listener: socket.socket, where: str,
    adapters: RuntimeAdapters | None = None,
) -> None:  # fmt: skip
    """Serve on a socket until a signal."""
    from serving import server

    with address_errors(args):
        listener.listen(2048)
    limits = server.Limits(args.max_queue, drain_timeout=args.drain_timeout)
    limits.request_timeout = args.request_timeout
    keys = tuple(key.encode() for key in api_keys(args))
    app = server.Server(make_engine, model, keys, limits, args.cors_origin, adapters)
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    print(f"[{where}] {model.name}: http://{host}:{port}", file=sys.stderr, flush=True)
    server.DrainingServer(app, host, port).run([listener])


def bind(args: GenerateConfig) -> socket.socket:
    """A socket bound to the address of --serve. serve_engine listens on it: until then, while the
    model loads, connections are refused. ValueError if the address is not free."""
    host, port = parse_address(args)
    with address_errors(args):
        family, *_, address = min(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        listener = socket.socket(family)  # of two, IPv4
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    return listener


@contextmanager
def address_errors(args: GenerateConfig) -> Iterator[None]:
    """OSError as a ValueError that names the flag."""
    try:
        yield
    except OSError as e:
        raise ValueError(f"--serve {args.serve}: {e.strerror}; give another address") from None


def parse_address(args: GenerateConfig) -> tuple[str, int]:
    """--serve [HOST:]PORT. ValueError if others than this machine could call without a key."""
    host, _, port = args.serve.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--serve {args.serve}: give [HOST:]PORT, for example 127.0.0.1:8000")
    keys = api_keys(args)
    if host not in ("127.0.0.1", "localhost", "::1") and not keys:
        text = "an address beyond loopback requires SHEAF_API_KEY, --api-key-file or --api-key"
        raise ValueError(f"--serve {args.serve}: {text}")
    return host, int(port)


def api_keys(args: GenerateConfig) -> list[str]:
    """Those of --api-key, of the variable SHEAF_API_KEY, and of the lines of --api-key-file.
    ValueError names the source of a wrong one."""
    found = {"--api-key": [*args.api_key]}
    if "SHEAF_API_KEY" in os.environ:
        found["SHEAF_API_KEY"] = [os.environ["SHEAF_API_KEY"]]
    if args.api_key_file is not None:
        name = f"--api-key-file {args.api_key_file}"
        try:
            found[name] = args.api_key_file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise ValueError(f"{name}: cannot be read ({e})") from None
        if not found[name]:
            raise ValueError(f"{name} is empty; give a key in each line")
    for name, keys in found.items():
        if not all(re.fullmatch("[!-~]+", key) for key in keys):  # what a header can have
            raise ValueError(f"{name}: a key must be a word of visible ASCII characters")
    return [key for keys in found.values() for key in keys]
