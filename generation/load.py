"""Loads the model of generate.py: from a checkpoint or random, quantized, sharded over ranks.

Each rank loads only its own weights: `shard_` reduces the model on the meta device to this rank's
shards of --pp, --tp and --ep, the weights are read into them, and `finalize_` installs the
collectives after all module swaps. A prompt's logits are gathered, so that all ranks sample the
same tokens.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import copy
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from generation import cpu
from generation.cpu_decode import install_, use_fused_experts_
from generation.config import DTYPES, GenerateConfig
from generation.ranks import run_on_all_or_raise
from generation.layer_offload import LayerStream, host_memory
from huggingface.tokenizer import DummyTokenizer, Tokenizer, load_tokenizer
from huggingface.weights import allocate, hf_modules, load_checkpoint, read_config
from model import CONFIGS, ModelConfig, MoE, Transformer
from training.rank_env import rank_env
from huggingface import gguf_checkpoint
from training.lora import load_adapters_, merge_


def pick_device(name: str | None) -> torch.device:
    """The device of that name, after a test allocation; by default CUDA if available. Each rank
    gets its own GPU."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if dist.is_initialized() and name.startswith("cuda:"):
        raise ValueError(f"--device {name}: each rank uses its own GPU; use --device cuda")
    if name == "cuda":  # set_device takes no device without an index
        name = f"cuda:{rank_env().local_rank}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as e:
        why = str(e).splitlines()[0].partition(". ")[0]  # of one without kernels, all others follow
        raise ValueError(f"--device {name} is not available ({why})") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # graphs are captured on the current device
    return device


@contextmanager
def open_gguf(args: GenerateConfig) -> Iterator[None]:
    """--checkpoint FILE.gguf: within this context, args.checkpoint is a folder made of it. Its
    layers stay quantized unless they must become something else."""
    dense = ("quantize", "mesh", "adapter", "offload", "quantize_report", "models")
    packed = not any(getattr(args, name) for name in dense)
    with gguf_checkpoint.as_folder(args.checkpoint, packed) as args.checkpoint:
        yield


def checkpoint_config(path: Path) -> ModelConfig:
    """The config of a checkpoint's folder, or of a GGUF file."""
    with gguf_checkpoint.as_folder(path) as folder:
        return read_config(folder / "config.json")


def load(args: GenerateConfig, device: torch.device) -> tuple[Transformer, Tokenizer]:
    """Model and tokenizer of --checkpoint or --dummy. ValueError if they do not match."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if args.compile and not shutil.which(compiler):
            raise ValueError(f"--compile on a CPU requires a C++ compiler; {compiler} not found")
    dtype = DTYPES[args.dtype] if args.dtype else None
    shards = [EPShards(args)] if args.ep else []
    if (args.pp or 1) > 1:
        from generation.pipeline_inference import PPStage

        shards.append(PPStage(args))
    shards += [] if args.mesh is None else [TPShards(args)]
    prepare = partial(shard_model_, shards) if shards else None
    if args.dummy is not None:
        host = torch.device("cpu") if args.offload else device
        model = dummy_model(args.dummy, host, dtype or torch.bfloat16, prepare)
        if args.offload:
            stream_layers_(model, layer_stream(args, device))
        if args.quantize is not None:
            from generation import quantize_model

            quantize_model.quantize_dummy_(args, model)
        return optimize_for_inference_(args, model, shards), DummyTokenizer(model.config.vocab_size)
    if args.mesh is not None and is_quantized(args.checkpoint):
        raise ValueError(
            f"--{'pp' if args.mesh.size('pp') > 1 else 'tp'}: {args.checkpoint} is quantized, and "
            "quantized weights cannot be sharded; use the original checkpoint with --quantize"
        )
    if args.quantize is not None or is_quantized(args.checkpoint):
        from generation import quantize_model

        tokenizer = partial(load_tokenizer, args.checkpoint)
        model = quantize_model.load(args, device, dtype, tokenizer, prepare)
    elif args.offload:
        model = load_streamed(args, device, dtype)
    else:
        model = load_checkpoint(args.checkpoint, device, dtype, prepare=prepare)
    if args.adapter is not None:
        names = hf_modules(model)
        try:
            merge_(load_adapters_(model, args.adapter, lambda name: names.get(name, name)))
        except ValueError as e:
            raise ValueError(f"--adapter {args.adapter}: {e}") from None
    return optimize_for_inference_(args, model, shards), load_tokenizer(args.checkpoint)


def layer_stream(args: GenerateConfig, device: torch.device) -> LayerStream:
    """The stream of --offload. ValueError if its folder cannot be written."""
    try:
        host_memory(1, args.offload, pin=False)
    except OSError as e:
        raise ValueError(f"--offload {args.offload}: {e.strerror}; give another folder") from None
    return LayerStream(args.offload, device)


def load_streamed(
    args: GenerateConfig, device: torch.device, dtype: torch.dtype | None
) -> Transformer:
    """--offload: the layers of --checkpoint go to the host or to files, each before the next is
    read."""
    stream, parts = layer_stream(args, device), []

    def add_loaded_layers(name: str, module: nn.Module) -> nn.Module:
        """Called in the order of named_modules: all layers before this module's are loaded."""
        model, (part, _, rest) = parts[0], name.partition(".")
        n_loaded = int(rest.partition(".")[0]) if part == "layers" and rest else len(stream.host)
        for layer in model.layers[len(stream.host) : n_loaded]:
            stream.add(layer)
        return module

    options = dict(prepare=parts.append, convert_module=add_loaded_layers)
    model = load_checkpoint(args.checkpoint, "cpu", dtype, **options)
    stream_layers_(model, stream)
    return model


def stream_layers_(model: Transformer, stream: LayerStream) -> None:
    """Move the layers that are not in the stream yet to the host, the rest to the device."""
    for layer in model.layers[len(stream.host) :]:
        stream.add(layer)
    stream.start(model.layers)
    for name, module in model.named_children():
        if name != "layers":
            module.to(stream.device)
    model.tie()


def load_draft(
    args: GenerateConfig, device: torch.device, name: str
) -> tuple[Transformer, Tokenizer]:
    """Model and tokenizer of --draft-model, loaded like --checkpoint or --dummy."""
    draft_args = copy.copy(args)
    draft_args.quantize, draft_args.checkpoint, draft_args.offload = None, Path(name), None
    draft_args.dummy = name if args.dummy is not None else None
    try:
        with open_gguf(draft_args):
            return run_on_all_or_raise(partial(load, draft_args, device))
    except ValueError as e:
        raise ValueError(f"--draft-model {name}: {str(e).removeprefix('--dummy ')}") from None


PERIOD = 2**18 + 3


def dummy_config(name: str) -> ModelConfig:
    """The config of --dummy: a name, or a config.json. ValueError if it is neither."""
    if name not in CONFIGS and not Path(name).is_file():
        raise ValueError(f"--dummy {name}: neither a config.json nor one of {', '.join(CONFIGS)}")
    return CONFIGS[name] if name in CONFIGS else read_config(name)


def dummy_model(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    prepare: Callable[[Transformer], Any] | None = None,
) -> Transformer:
    """A model with random weights, of a named config or a config.json. prepare(model), if given,
    shards it on the meta device; this rank then gets its shards of the same weights."""
    config = dummy_config(name)
    with torch.device("meta"):
        model = Transformer(config).eval()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    if prepare is not None:
        prepare(model)
    allocate(model, device, dtype)
    rng, local_params = torch.Generator(device).manual_seed(0), dict(model.named_parameters())
    for name, shape in shapes.items():
        p, module = local_params.get(name), name.rpartition(".")[0]
        is_stack = p is not None and p.dim() == 3
        expert_ids = model.get_submodule(module).local_expert_ids if is_stack else None
        shard = model.tp_shards.get(name)
        unsharded = p is not None and expert_ids is None and shard is None
        full = p if unsharded else torch.empty(shape, dtype=dtype, device=device)
        fill_dummy(model, name, full, rng)
        local = full if expert_ids is None else full[list(expert_ids)]
        if p is not None and not unsharded:
            p.data.copy_(local if shard is None else shard.slice(local))
        if name == "embed.weight" and config.tie_embeddings and "head.weight" in local_params:
            shard = model.tp_shards.get("head.weight")  # tied copy of the last pipeline stage
            local_params["head.weight"].data.copy_(full if shard is None else shard.slice(full))
    for buffer in model.buffers():
        buffer.zero_()
    return model


@torch.no_grad()
def fill_dummy(model: Transformer, name: str, p: Tensor, rng: torch.Generator) -> None:
    """Transformer.init_weight for benchmarks: repeats PERIOD random numbers, since drawing a
    billion takes seconds. PERIOD is odd, so that no two rows of a matrix are equal."""
    if p.dim() == 1 or p.numel() <= PERIOD:
        model.init_weight(name, p, rng)
        return
    block = torch.empty(PERIOD, 1, dtype=p.dtype, device=p.device)
    model.init_weight(name, block, rng)
    for part in p.view(-1).split(PERIOD):
        part.copy_(block[: len(part), 0])


def optimize_for_inference_(
    args: GenerateConfig, model: Transformer, shards: Sequence[EPShards | TPShards] = ()
) -> Transformer:
    """Install faster kernels than model.py's: on a CPU generation/cpu.py's linear layers, in MoE
    layers the grouped experts; then the collectives of --ep and --tp. Returns the model. ValueError
    if it needs a source."""
    if model.config.cross_attention_layers:
        raise ValueError("generate.py has no source for cross_attention_layers")
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu:
        use_cpu_kernels_(model)
    if args.experts == "grouped" and moe_layers(model):
        from moe import use_grouped_experts

        use_grouped_experts(model, **({"linear": cpu.expert_linear} if on_cpu else {}))
        if on_cpu:
            use_fused_experts_(model)
    for shard in shards:
        shard.finalize_(model)
    return install_(model) if on_cpu else model


def use_cpu_kernels_(model: Transformer) -> None:
    """Replace linear layers by generation/cpu.py's, and let malloc keep freed memory."""
    cpu.keep_freed_memory()
    cpu.swap_linear_(model)


def is_quantized(folder: Path) -> bool:
    """Whether --save wrote the folder. load_checkpoint reports an invalid config.json."""
    try:
        hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return hf["quantization_config"]["quant_method"] == "sheaf"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def moe_layers(model: Transformer) -> list[MoE]:
    """The MoE layers in order, those of multi-token prediction last."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def shard_model_(shards: Sequence[EPShards | TPShards], model: Transformer) -> None:
    """Keep only this rank's shards, by --ep, --pp and --tp, of a model."""
    for shard in shards:
        shard.shard_(model)


# --------------------------------------------------------------------------------------------------
# Sharding
# --------------------------------------------------------------------------------------------------


class TPShards:
    """--tp: this rank's shard of every weight matrix. Call `shard_` before loading weights, and
    `finalize_` when no module is replaced any more (its hook is on model.head)."""

    def __init__(self, args: GenerateConfig):
        self.mesh, self.ranks, self.shard_batch = args.mesh, args.mesh.size("tp"), args.shard_batch
        self.ffn_2d = args.ffn_2d

    def shard_(self, model: Transformer) -> None:
        """Keep only this rank's shard of the model. ValueError names the flag."""
        from parallel import apply_tp

        c = model.config
        if self.shard_batch and not (c.kv_lora_rank or c.n_kv_heads == 1):
            raise ValueError(
                f"--set shard_batch requires MLA or MQA (one KV head), not {c.n_kv_heads} KV heads"
            )
        try:
            apply_tp(model, self.mesh, gather_logits=False)
        except ValueError as e:
            raise ValueError(f"--{e}") from None  # the message begins with "tp N does not divide"

    def finalize_(self, model: Transformer) -> None:
        """All-gather the logits over ranks, and set model.config to this rank's heads, for its KV
        cache."""
        c, group = model.config, self.mesh.group("tp")
        kv_heads = max(1, c.n_kv_heads // self.ranks)
        model.config = replace(c, n_heads=c.n_heads // self.ranks, n_kv_heads=kv_heads)
        shard_size = -(-c.vocab_size // self.ranks)

        def gather(head: nn.Module, args: Any, logits: Tensor) -> Tensor:
            local = F.pad(logits, (0, shard_size - logits.shape[-1])).contiguous()
            shards = [torch.empty_like(local) for _ in range(self.ranks)]
            dist.all_gather(shards, local, group=group)
            return torch.cat(shards, -1)[..., : c.vocab_size]

        if self.ranks > 1 and model.head is not None:
            model.head.register_forward_hook(gather)
        if self.ranks > 1 and self.ffn_2d:
            shard_ffn_2d_(model, group)


@torch.no_grad()
def shard_ffn_2d_(model: Transformer, group: Any) -> None:
    """Replace every MLP, sharded over the ranks of `group`, by an FFN2D on the grid that sends the
    fewest bytes, layer by layer."""
    from torch.distributed.device_mesh import DeviceMesh  # here: its import takes a second

    from parallelism.inference_parallel import FFN2D, all_gather_dim, best_grid

    config, ranks = model.config, dist.get_process_group_ranks(group)
    if config.moe_layers or config.mlp_bias:
        what = "MoE layers" if config.moe_layers else "biases in the MLP (mlp_bias)"
        raise ValueError(f"--set ffn_2d=true: the model has {what}, which FFN2D does not support")
    X, Y = best_grid(len(ranks), config.dim, config.ffn_dim, replicated=True)
    device = model.layers[0].mlp.gate_proj.weight.device.type
    mesh = DeviceMesh(device, torch.tensor(ranks).view(X, Y), mesh_dim_names=("x", "y"))
    groups = mesh.get_group("x"), mesh.get_group("y")
    for block in model.layers:
        mlp = block.mlp
        gate, up = (all_gather_dim(p.weight, group, 0) for p in (mlp.gate_proj, mlp.up_proj))
        down = all_gather_dim(mlp.down_proj.weight, group, 1)
        try:
            block.mlp = FFN2D(gate, up, down, *groups, gather_weights=True)
        except ValueError as e:
            raise ValueError(f"--set ffn_2d=true: {e}") from None


class EPShards:
    """--ep: this rank's experts of every MoE layer; with --tp, each group of --tp ranks holds one
    shard of the experts. Call `shard_` before loading weights, and `finalize_` after
    everything else that sets the experts hook."""

    def __init__(self, args: GenerateConfig):
        self.args, single = args, not dist.is_initialized()
        self.group = g = None if args.mesh is None else args.mesh.group("ep")  # None: all ranks
        self.rank, self.ranks = (0, 1) if single else (dist.get_rank(g), dist.get_world_size(g))
        self.placements: list[Any] = []

    def shard_(self, model: Transformer) -> None:
        """Keep only this rank's experts of the stacked weights. ValueError names the flag."""
        from parallelism.expert_parallel import keep_local_experts_

        if not moe_layers(model):
            raise ValueError("--ep requires an MoE model; this one has no MoE layers")
        counts = [len(module.router) for module in moe_layers(model)]
        self.placements = self._place(model.config, counts)
        if self.ranks > 1:
            for module, placement in zip(moe_layers(model), self.placements):
                keep_local_experts_(module, placement.slots[self.rank])

    def finalize_(self, model: Transformer) -> None:
        """All ranks' experts run the same tokens; an all-reduce adds their outputs."""
        from parallelism.expert_parallel import (
            all_reduce_combine,
            remap_expert_ids,
            select_local_slots,
        )

        placements = self.placements if self.ranks > 1 else ()
        for layer, (module, placement) in enumerate(zip(moe_layers(model), placements)):
            n = placement.slots_per_rank
            experts = select_local_slots(module.experts, self.rank * n, n)
            experts = all_reduce_combine(experts, self.group)
            module.experts = remap_expert_ids(experts, placement, offset=layer)

    def _place(self, config: ModelConfig, counts: list[int]) -> list[Any]:
        """A placement for each MoE layer; counts: of its experts."""
        from parallelism.expert_parallel import Placement

        path, copies = self.args.expert_load, self.args.num_redundant_experts
        try:
            if path is None and not copies:
                return [Placement.even(E, self.ranks) for E in counts]
            equal = [[1.0] * E for E in counts]
            loads = equal if path is None else read_loads(path, config, counts)
            spread = self.args.expert_spread
            return [Placement.by_load(load, self.ranks, copies, spread) for load in loads]
        except ValueError as e:
            flag = "--set num_redundant_experts" if copies else "--ep"
            error = str(e).replace("Placement.by_load", "give --set expert_load")
            raise ValueError(error if error.startswith("--") else f"{flag}: {error}") from None


def read_loads(path: Path, config: ModelConfig, counts: list[int]) -> list[list[float]]:
    """Token counts per expert of MoE layers that have these `counts` of experts: the last
    "expert_load" in train.py's metrics.jsonl, or a JSON file with such a list. MTP layers may be
    missing."""

    def parse(text: str) -> Any:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):  # an incomplete line, after a crash
            return None
        return value.get("expert_load") if isinstance(value, dict) else value

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(
            f"--set expert_load={path}: cannot be read ({e}); give metrics.jsonl"
        ) from None
    loads, n = parse(text), len(counts)
    if loads is None:
        loads = next(filter(None, map(parse, reversed(text.splitlines()))), None)
    ok = isinstance(loads, list) and len(loads) in (n, len(config.moe_layers))
    for load, E in zip(loads if ok else [], counts):
        ok = ok and isinstance(load, list) and len(load) == E
        ok = ok and all(type(x) in (int, float) and 0 <= x < math.inf for x in load)
    if not ok:
        raise ValueError(
            f"--set expert_load={path}: has no list of {max(counts)} counts for each of {n} MoE "
            "layers (expert_load in metrics.jsonl); give a file of this model"
        )
    return loads + [[1.0] * E for E in counts[len(loads) :]]
