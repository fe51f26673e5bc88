"""Builds what the modes of serving/entrypoints.py run: engines, models, adapters and services.

Each function takes a GenerateConfig and gives its flags to the part that they are of:

    load_engine     model + engine_options -> an Engine, without text     --bench-serving
    build_service   Engine + tokenizer + EOS ids + adapters -> a Service  --batch --serve --program
    add_drafter     --speculate, for an Engine that exists
    make_pool       --adapters: LoRA adapters of one model, any of them in one batch
    load_models     --models: fine-tunes that share the weights which are equal
    fine_tunes      both by name, for a server that has no weights (serving/cluster.py)

Flags that these cannot know to be wrong before they have read a checkpoint are a ValueError that
names the flag and the folder. With several ranks, all run the same functions, and take the smallest
number of KV blocks, since all schedule the same steps.

Equivalence (test_all.py): a request of a Service == generate.py alone with the same flags.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from generation.adapters import MAX_RANK, NAME, Adapter, AdapterPool
from generation.config import GenerateConfig
from generation.cpu import load_kernels
from generation.cpu_decode import FusedLayers, add_adapters, install_
from generation.load import (
    checkpoint_config, is_quantized, load, load_draft, moe_layers, open_gguf,
    optimize_for_inference_, pick_device,
)  # fmt: skip
from generation.prompt import text_format
from generation.ranks import Rank0Policy, all_reduce_min, broadcast_object, run_on_all_or_raise
from huggingface.fine_tune import FineTune, TextFormat, load_fine_tune_format
from huggingface.gguf_checkpoint import as_folder, is_gguf, model_name
from huggingface.tokenizer import Tokenizer, eos_ids, load_tokenizer
from huggingface.weights import hf_modules, load_checkpoint, read_config
from model import CONFIGS, ModelConfig, Transformer
from serving import batch
from serving.adapter_merging import AdapterMerging
from serving.disaggregated import parse_placement
from serving.kv_store import open_regular
from serving.paged_drafting import enable_speculative_decoding
from serving.policies import make_policy
from serving.prompt_cache import open_store
from serving.shared_models import ModelPool, ModulePerRow
from training.lora import read_adapters

# --------------------------------------------------------------------------------------------------
# The engine
# --------------------------------------------------------------------------------------------------


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

    def rank0_clock() -> float:
        return broadcast_object(time.perf_counter())

    # all ranks schedule the same steps
    clock = rank0_clock if dist.is_initialized() else time.perf_counter
    options["policy"] = make_policy(args.policy, clock)
    if moe_layers(model):  # a step without static shapes cannot be captured
        from moe import has_static_shapes

        options.setdefault("static", all(map(has_static_shapes, moe_layers(model))))
        if args.compile and not options["static"]:
            raise ValueError("--compile requires the GPU kernels of --experts grouped; remove it")
    sizes = options["block_size"], args.max_num_seqs, args.kv_cache_dtype
    draft_layers = draft_cache_layers(args, model.config)
    num_blocks = batch.num_available_blocks(model, *sizes, draft_layers, args.kv_blocks)
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


def load_engine(args: GenerateConfig, device: Any) -> Any:
    """The Engine of --bench-serving, of this rank's shard of the model."""
    model, tokenizer = run_on_all_or_raise(partial(load, args, device))
    engine = batch.build_engine(model, **engine_options(args, model))
    add_drafter(args, engine, tokenizer)
    longest = args.shared_prefix + args.input_tokens[1] + args.output_tokens[1]
    if longest > engine.capacity:
        text = f"--shared-prefix, input_tokens and output_tokens give up to {longest} tokens, but "
        text += f"the context or the KV cache (--kv-blocks) holds {engine.capacity}"
        raise ValueError(text)
    return engine


# --------------------------------------------------------------------------------------------------
# The service: an engine with a tokenizer
# --------------------------------------------------------------------------------------------------


def build_service(args: GenerateConfig) -> batch.Service:
    """The Engine of --batch, --serve and --program, with its tokenizer."""
    device = run_on_all_or_raise(partial(pick_device, args.device))
    with torch.inference_mode(args.finetune is None):  # such weights cannot be used in autograd
        model, tokenizer = run_on_all_or_raise(partial(load, args, device))
        format = text_format(args, model.config, tokenizer)
        pool = None if args.models is None else load_models(args, model, tokenizer, format)
        options = engine_options(args, model) | dict(adapters=pool)
        if args.adapters is not None:
            options["adapters"] = make_pool(model, args.merge_adapters)
        service = batch.Service(model, tokenizer, format.eos_ids, **options)
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


def cascade_engine(args: GenerateConfig, service: batch.Service) -> Any:
    """--serve --cascade: what makes the server's engine, of the small model and `service`."""
    from serving.cascade import read_gate, small_args
    from serving.cascade_engine import CascadeEngine

    gate = read_gate(args)
    small = small_args(args, gate)
    with open_gguf(small):
        return partial(CascadeEngine, build_service(small), gate, service)


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


# --------------------------------------------------------------------------------------------------
# Adapters
# --------------------------------------------------------------------------------------------------

MAX_HEADER = 2**20  # bytes of an adapter's config, and of its file beside the weights


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


# --------------------------------------------------------------------------------------------------
# Several models
# --------------------------------------------------------------------------------------------------


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
