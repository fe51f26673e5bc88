"""--batch, --bench-serving, --serve and --program of generate.py: the Engine that the flags
describe, on a file of requests, a random trace (serving/traces.py), HTTP clients'
(serving/server.py), or the calls of a program (serving/programs.py)."""

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import count, groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from generation.bench import device_name
from generation.config import GenerateConfig
from generation.cpu import load_kernels
from generation.cpu_decode import FusedLayers, add_adapters, install_
from serving.prompt_cache import open_store
from generation.load import (
    checkpoint_config, dummy_config, is_quantized, load, load_draft, moe_layers, open_gguf,
    optimize_for_inference_, pick_device,
)  # fmt: skip
from generation.prompt import prompt_text, text_format
from generation.ranks import (
    Rank0Policy, all_reduce_min, broadcast_object, rank0_then_broadcast, run_on_all_or_raise,
)  # fmt: skip
from huggingface.fine_tune import FineTune, TextFormat, load_fine_tune_format
from huggingface.tokenizer import Tokenizer, eos_ids, load_tokenizer
from huggingface.weights import hf_modules, load_checkpoint, read_config
from model import CONFIGS, ModelConfig, Transformer
from huggingface.gguf_checkpoint import as_folder, is_gguf, model_name
from serving import batch as serving_batch
from serving.adapter_merging import AdapterMerging
from generation.adapters import MAX_RANK, NAME, Adapter, AdapterPool
from serving.batch_file import Results, read_results, request_lines, run_hash
from serving.disaggregated import Placement, Worker, parse_placement, placements, search
from serving.kv_store import open_regular
from serving.tp_worker import follow, on_rank0
from serving.paged_drafting import enable_speculative_decoding
from serving.policies import make_policy
from serving.runtime_adapters import RuntimeAdapters
from serving.shared_models import ModelPool, ModulePerRow
from serving.traces import FRESH, Arrival, generate
from training.lora import read_adapters
from training.writer_lock import file_lock

MAX_HEADER = 2**20  # bytes of an adapter's config, and of its file beside the weights


def check_engine_flags(args: GenerateConfig) -> None:
    """Before the model is loaded: ValueError names --policy or --disaggregate; the latter is parsed
    in place."""
    try:
        make_policy(args.policy)
    except ValueError as e:
        raise ValueError(f"--policy {args.policy}: {e}") from None
    if args.disaggregate not in (None, "auto"):
        args.disaggregate = parse_placement(args.disaggregate)


def engine_options(args: GenerateConfig, model: Transformer) -> dict[str, Any]:
    """The Engine's arguments from the flags."""
    names = "block_size max_num_batched_tokens max_num_seqs compile"
    options = {name: getattr(args, name) for name in names.split()}
    if args.kv_layout == "virtual":
        options |= virtual_cache(args, model)
    options |= dict(kv_dtype=args.kv_cache_dtype, kv_swap=args.kv_swap)
    options |= dict(prefix_cache=args.prefix_cache, continuous=args.continuous)
    clock = time.perf_counter
    if dist.is_initialized():  # all ranks schedule the same steps
        clock = lambda: broadcast_object(time.perf_counter())
    options["policy"] = make_policy(args.policy, clock)
    if moe_layers(model):  # a step without static shapes cannot be captured
        from moe import has_static_shapes

        options.setdefault("static", all(map(has_static_shapes, moe_layers(model))))
        if args.compile and not options["static"]:
            raise ValueError("--compile requires the GPU kernels of --experts grouped; remove it")
    sizes = options["block_size"], args.max_num_seqs, args.kv_cache_dtype
    draft_layers = draft_cache_layers(args, model.config)
    num_blocks = serving_batch.num_available_blocks(model, *sizes, draft_layers, args.kv_blocks)
    num_blocks = all_reduce_min(num_blocks)
    if args.mesh is not None or args.offload or args.models is not None:
        # collectives, streamed layers and modules per row are not captured in CUDA graphs
        options["static"] = False
        if args.compile:
            raise ValueError("--compile: the engine's steps are not compiled with --tp; remove it")
    options["kv_store"] = open_store(args, model)
    return options | {"num_blocks": num_blocks}


def virtual_cache(args: GenerateConfig, model: Transformer) -> dict[str, Any]:
    """The Engine's arguments for --set kv_layout=virtual."""
    from serving.vattention import VirtualKVCache, whole_block_size

    weight, kernels = model.embed.weight, {}
    if weight.is_cuda:
        from attention import decode_attention, flash_attention

        kernels = dict(attention=flash_attention, decode=decode_attention)
    cache = partial(VirtualKVCache, num_slots=args.max_num_seqs, **kernels)
    size = whole_block_size(model.config, args.block_size, weight.dtype, weight.device)
    return dict(cache=cache, block_size=size, static=False)


def draft_cache_layers(args: GenerateConfig, config: ModelConfig) -> float:
    """KV cache per token of the drafter's own cache, as a number of layers of the target model."""
    if args.speculate == "mtp":
        return 1.0
    if args.speculate != "draft" or args.draft_model is None:
        return 0.0
    path = Path(args.draft_model)
    if not path.exists() and args.draft_model not in CONFIGS:
        raise ValueError(f"--draft-model {args.draft_model}: no such folder")
    if args.draft_model in CONFIGS:
        c = CONFIGS[args.draft_model]
    else:
        c = checkpoint_config(path) if path.is_dir() or is_gguf(path) else read_config(path)
    heads = max(1, c.n_kv_heads // (args.tp or 1))  # `config` has this rank's heads already

    def width(c: ModelConfig, heads: int) -> int:  # of a token's cache in one layer
        return c.kv_lora_rank + c.qk_rope_head_dim if c.kv_lora_rank else 2 * heads * c.head_dim

    return c.n_layers * width(c, heads) / width(config, config.n_kv_heads)


def add_drafter(args: GenerateConfig, engine: Any, tokenizer: Tokenizer) -> None:
    """--speculate, if given, for an Engine."""
    if args.speculate:
        load_fn = partial(load_draft, args, engine.model.embed.weight.device)
        enable_speculative_decoding(args, engine, tokenizer, load_fn)
        if dist.is_initialized() and args.speculate_k == "auto":
            engine.speculate_k = Rank0Policy(engine.speculate_k)


def build_service(args: GenerateConfig) -> serving_batch.Service:
    """The Engine of --batch, --serve and --program, with its tokenizer."""
    device = run_on_all_or_raise(partial(pick_device, args.device))
    with torch.inference_mode(args.finetune is None):  # such weights cannot be used in autograd
        model, tokenizer = run_on_all_or_raise(partial(load, args, device))
        format = text_format(args, model.config, tokenizer)
        pool = None if args.models is None else load_models(args, model, tokenizer, format)
        options = engine_options(args, model) | dict(adapters=pool)
        if args.adapters is not None:
            options["adapters"] = make_pool(model, args.merge_adapters)
        service = serving_batch.Service(model, tokenizer, format.eos_ids, **options)
        if args.finetune is not None:
            from serving import finetune  # here: its imports take a second

            service.tuner = finetune.start(args.finetune, service, args.checkpoint)
    for name, folder in args.adapters or ():
        read_format = partial(adapter_format, args, format, tokenizer)
        register_adapter(service.engine.adapters, name, folder, read_format)
    add_drafter(args, service.engine, tokenizer)
    if args.serve and device.type == "cuda":  # on a CPU, compiling all shapes takes minutes
        service.engine.warm_up()
    return service


def make_pool(model: Transformer, merge: bool = False) -> AdapterPool:
    """The AdapterPool of --adapters, for a loaded model."""
    on_cpu = model.embed.weight.device.type == "cpu" and load_kernels() is not None
    pool = AdapterPool(model, add_adapters if on_cpu else None, AdapterMerging if merge else None)
    if on_cpu:
        install_(model)  # again: its fused layers read the linears when they are made
    return pool


def adapter_format(
    args: GenerateConfig, base: TextFormat, tokenizer: Tokenizer, folder: str | os.PathLike
) -> TextFormat:
    """Chat template and EOS ids of an adapter; base, tokenizer: of --checkpoint. ValueError if it
    has more EOS ids: the engine has the same ones for all requests."""
    if args.dummy is not None:
        return base
    format = load_fine_tune_format(args.checkpoint, base, tokenizer, Path(folder))
    if more := set(format.eos_ids) - set(base.eos_ids):
        raise ValueError(
            f"{folder}: its texts end with {tokenizer.piece(min(more))!r} too; add id {min(more)} "
            "to eos_token_id in generation_config.json of --checkpoint, or use --adapter"
        )
    return format


def read_adapter(
    pool: AdapterPool, name: str, folder: str | os.PathLike,
    read_format: Callable[[str | os.PathLike], TextFormat | None] = lambda folder: None,
) -> Adapter:  # fmt: skip
    """An adapter in PEFT's format, not served yet. Another thread than the Engine's may call it.
    read_format: of its folder. ValueError says what is wrong with it."""
    with torch.device("meta"):  # the names of quantized layers too
        names = hf_modules(Transformer(pool.model.config))
    largest = 8 * MAX_RANK * sum(map(sum, pool.shapes.values())) + MAX_HEADER

    def read(path: Path) -> bytes:
        """A regular file: opening another may take for ever, and safetensors holds Python's lock
        meanwhile."""
        with open_regular(path) as f:
            limit = MAX_HEADER if path.suffix == ".json" else largest
            if (size := os.fstat(f.fileno()).st_size) > limit:
                raise OSError(f"it has {size} bytes, more than {limit}")
            return f.read()

    found = read_adapters(folder, pool.shapes, lambda x: names.get(x, x), read)
    rank, alpha, weights = found
    adapter = pool.add(name, rank, alpha / rank, weights)
    adapter.text_format = read_format(folder)
    return adapter


def register_adapter(
    pool: AdapterPool, name: str, folder: str | os.PathLike,
    read_format: Callable[[str | os.PathLike], TextFormat | None] = lambda folder: None,
) -> None:  # fmt: skip
    """Read and serve an adapter. ValueError names the flag."""
    try:
        pool.register(read_adapter(pool, name, folder, read_format))
    except ValueError as e:
        raise ValueError(f"--adapters {name}={folder}: {e}") from None


def load_models(
    args: GenerateConfig, model: Transformer, tokenizer: Tokenizer, format: TextFormat
) -> ModelPool:
    """The ModelPool of --models. tokenizer, format: of --checkpoint. ValueError names the model and
    its folder."""
    if any(hasattr(module, "qweight") for module in model.modules()):
        raise ValueError(f"--models: {args.checkpoint} is quantized; give the 16-bit checkpoint")
    groups, pool, weight = model.layer_groups, ModelPool(model), model.embed.weight
    for name, folder in args.models:
        try:
            with as_folder(folder, packed=False) as path:
                check_fine_tune(args, name, path, format)
                own = load_fine_tune_format(args.checkpoint, format, tokenizer, path)
                options = dict(convert_module=pool.share)
                new = load_checkpoint(path, weight.device, weight.dtype, **options)
            new.tie()
            added = pool.add(name, optimize_for_inference_(args, new), own)
        except ValueError as e:
            raise ValueError(f"--models {name}={folder}: {e}") from None
        own, shared = (f"{n / 1e6:.1f} MB" for n in (added.own_bytes, added.shared_bytes))
        print(f"model {name}: {own} of weights stored, {shared} shared", file=sys.stderr)
    if groups is not None and model.layer_groups is None:
        fuse_shared_layers_(model)
    return pool


def check_fine_tune(args: GenerateConfig, name: str, folder: Path, format: TextFormat) -> None:
    """ValueError if requests to a model cannot be in the batches of --checkpoint."""
    if not NAME.fullmatch(name):
        raise ValueError("a name has letters, digits, '.', '_', '-'")
    if name == model_name(args.checkpoint):
        raise ValueError("the name is that of --checkpoint; use another")
    if is_quantized(folder):
        raise ValueError("it is quantized; give the 16-bit checkpoint")
    base, config = (read_config(path / "config.json") for path in (args.checkpoint, folder))
    own = load_tokenizer(folder)
    config = replace(config, eos_ids=eos_ids(folder, config.eos_ids, own))
    base = replace(base, eos_ids=format.eos_ids)
    for field in fields(base):
        ours, theirs = (getattr(c, field.name) for c in (base, config))
        if ours != theirs:
            text = f"{field.name} is {theirs}, but {ours} in {args.checkpoint}"
            raise ValueError(f"{text}; --models are fine-tunes of --checkpoint")


def fuse_shared_layers_(model: Transformer) -> None:
    """Let FusedLayers run the layers that all models of a pool share."""

    def has_own_modules(layer: torch.nn.Module) -> bool:
        return any(isinstance(module, ModulePerRow) for module in layer.modules())

    model.layer_groups = []
    for different, layers in groupby(model.layers, has_own_modules):
        model.layer_groups += layers if different else [FusedLayers([*layers])]


STDIN = Path("/dev/stdin")


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


def batch(args: GenerateConfig) -> int:
    """--batch: run a file of requests into a file of results. The exit code: 1 if some failed."""
    with ExitStack() as locks:
        return run_batch_file(args, *rank0_then_broadcast(partial(batch_files, args, locks)))


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
    serving_batch.replay(engine, warm_up, params, broadcast_object)  # compiles and captures steps
    metrics = serving_batch.replay_metrics(engine, trace, params, broadcast_object)
    print(json.dumps(metrics) if args.json else serving_batch.summary_table(metrics))


def random_trace(args: GenerateConfig, rate: float, seed: int) -> list[Arrival]:
    """The requests of --bench-serving."""
    fields = f"n={args.bench_serving},rate={rate},cv={args.arrival_cv},prefix={args.shared_prefix}"
    for name, (low, high) in (("input", args.input_tokens), ("output", args.output_tokens)):
        fields += f",{name}={low}:{high}"
    return list(generate(f"random:{fields}", seed))


def load_engine(args: GenerateConfig, device: Any) -> Any:
    """The Engine of --bench-serving, of this rank's shard of the model."""
    model, tokenizer = run_on_all_or_raise(partial(load, args, device))
    engine = serving_batch.build_engine(model, **engine_options(args, model))
    add_drafter(args, engine, tokenizer)
    longest = args.shared_prefix + args.input_tokens[1] + args.output_tokens[1]
    if longest > engine.capacity:
        text = f"--shared-prefix, input_tokens and output_tokens give up to {longest} tokens, but "
        text += f"the context or the KV cache (--kv-blocks) holds {engine.capacity}"
        raise ValueError(text)
    return engine


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


@contextmanager
def saved_adapters(service: serving_batch.Service) -> Iterator[None]:
    """Save the adapters of --finetune also if it is stopped before its last step."""
    try:
        yield
    finally:
        if service.tuner is not None and not service.tuner.finished:
            service.tuner.save()


def cascade_engine(args: GenerateConfig, service: serving_batch.Service) -> Any:
    """--serve --cascade: what makes the server's engine, of the small model and `service`."""
    from serving.cascade import read_gate, small_args
    from serving.cascade_engine import CascadeEngine

    gate = read_gate(args)
    small = small_args(args, gate)
    with open_gguf(small):
        return partial(CascadeEngine, build_service(small), gate, service)


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


def served_model(
    args: GenerateConfig, tokenizer: Tokenizer, format: TextFormat,
    adapters: Mapping[str, FineTune], capacity: int, vocab_size: int,
) -> Any:  # fmt: skip
    """The Model that calls of the API are parsed against. ValueError if an adapter has its name."""
    from serving.openai_api import Model

    name = Path(args.dummy).resolve().stem if args.dummy else model_name(args.checkpoint)
    max_bytes = capacity * tokenizer.max_token_bytes
    if name in adapters:
        flag = "adapters" if args.adapters else "models"
        raise ValueError(f"--{flag} {name}: this is the model's own name; give another one")
    return Model(name, tokenizer, format.template, capacity, vocab_size, max_bytes, adapters)


def fine_tunes(
    args: GenerateConfig, base: TextFormat, tokenizer: Tokenizer
) -> dict[str, FineTune]:  # fmt: skip
    """--adapters or --models by name, for a process that has no weights. ValueError names the
    flag."""
    found = {}
    for flag in ("adapters", "models"):
        for name, folder in getattr(args, flag) or ():
            try:
                with as_folder(folder) as path:
                    found[name] = FineTune(adapter_format(args, base, tokenizer, path))
            except ValueError as e:
                raise ValueError(f"--{flag} {name}={folder}: {e}") from None
    return found


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
