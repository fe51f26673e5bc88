"""The model and the optimizer that train.py's flags describe, on the ranks of a layout."""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import argparse
import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moe
from huggingface.weights import allocate, load_checkpoint, read_config
from model import CONFIGS, ModelConfig, MoE, Transformer
from parallelism.dist_env import DistEnv
from parallelism.parallel_dims import ParallelDims
from quantize import fp8_training_, qat_
from training.data import BOS, EOS
from training.flags import QAT_SPECS
from training.lora import lora_
from training.offload import OffloadedOptimizer, OptimizerInBackward
from training.optimizers import Several, StochasticAdamW, mup_factors, muon_split
from training.state import saved_run
from training.step import SINGLE_PROCESS
from training.upcycle import upcycle_, upcycled_config


def model_config(args: argparse.Namespace) -> ModelConfig:
    """The shape to train: of OUT under --resume, of --init, or what --model says."""
    if args.resume:
        return ModelConfig.from_hf(saved_run(args.out)[2]["config"])
    if args.init is not None:
        if not args.init.is_dir():
            raise ValueError(f"--init {args.init}: no such folder")
        if (args.init / "adapter_config.json").exists():
            raise ValueError(
                f"--init {args.init}: holds adapters; train.py --out {args.init} --export DIR "
                "--lora-merged makes a model of them"
            )
        config = read_config(args.init / "config.json")
        return upcycled_config(config, args) if args.upcycle else config
    if args.model in CONFIGS or Path(args.model).exists():
        shape = CONFIGS[args.model] if args.model in CONFIGS else read_config(args.model)
        context = max(shape.max_seq_len, args.seq_len)
        return replace(shape, max_seq_len=context, bos_id=BOS, eos_ids=(EOS,))
    raise ValueError(f"--model {args.model}: neither a config.json nor one of {', '.join(CONFIGS)}")


def build_model(
    args: argparse.Namespace, config: ModelConfig, place: DistEnv, layout: ParallelDims = SINGLE_PROCESS
) -> Transformer:
    """The model to train, in --param-dtype: that of --init, or new, drawn from --seed; of it what
    `layout` gives this rank. Weights are drawn on the CPU: one seed, one model."""
    drawn = args.init is None or (args.resume and not args.lora)
    late = drawn and layout.uses_fsdp  # their weights come when there are shards
    late = late and not (args.fp8 or args.qat)  # which look at them
    if drawn:
        model = meta_model(config)
        layout.shard_model_(model)
    elif args.upcycle:
        model = upcycle_(load_checkpoint(args.init, "cpu", torch.float32), config, args.seed)
        layout.shard_model_(model)
    else:
        model = load_checkpoint(args.init, "cpu", torch.float32, prepare=layout.shard_model_)
    if drawn and not late:
        layout.init_weights_(allocate(model, "cpu", torch.float32), args.seed)
    if args.lora:
        lora_(model, args.lora, args.lora_alpha or 2 * args.lora, seed=args.seed)
    cast_params_(model, args)
    convert_linears_(model, args)
    layout.parallelize_(model, {"bf16": torch.bfloat16}.get(place.dtype))
    if late:
        model.to_empty(device=place.device)
        if layout.stages is None:
            model.tie()
        if not args.resume:
            layout.init_weights_(model, args.seed)
    return model.to(place.device).train()


def cast_params_(model: Transformer, args: argparse.Namespace) -> None:
    """--param-dtype bf16: parameters are, buffers stay as they are."""
    for p in model.parameters() if args.param_dtype == "bf16" else ():
        p.data = p.data.to(torch.bfloat16)


def convert_linears_(model: Transformer, args: argparse.Namespace) -> None:
    """--experts, --fp8 and --qat: have the model's layers multiply how and what the flag says, over
    the parameters that they have."""
    if args.experts == "grouped" and any(isinstance(m, MoE) for m in model.modules()):
        moe.use_grouped_experts(model)
    if args.fp8:
        fp8_training_(model, args.fp8)
    if args.qat:
        try:
            tied = ("head",) if model.config.tie_embeddings else ()  # --pp gives it a copy
            qat_(model, QAT_SPECS[args.qat], skip=tied)
        except ValueError as e:
            raise ValueError(
                f"--qat {args.qat}, in groups of 32: {e}; or train --qat int8"
            ) from None


def compile_model(model: Transformer) -> Any:
    """torch.compile, but for experts without kernels: how many tokens each gets is new in every
    forward, and would be compiled anew."""
    for mixture in model.modules():
        if isinstance(mixture, MoE) and not moe.has_static_shapes(mixture):
            mixture.experts = torch.compiler.disable(mixture.experts)
    return torch.compile(model)


def meta_model(config: ModelConfig) -> Transformer:
    """The whole model without its memory, for counting."""
    with torch.device("meta"):
        return Transformer(config)


def build_optimizer(
    model: torch.nn.Module, layout: ParallelDims = SINGLE_PROCESS, args: argparse.Namespace | None = None
) -> Any:
    """What args say, by default AdamW (arXiv:1711.05101); decay on matrices and embeddings, none on
    norms and biases. A group's "scale" multiplies the learning rate."""
    width = model.config.dim if args and args.mup_base else 1
    groups: dict[Any, list[Any]] = {(True, None, 1.0): [], (False, None, 1.0): []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            scale = mup_factors(name, p.shape, width, args.mup_base)[1] if width > 1 else 1.0
            # a fused step is of tensors on one mesh
            key = p.dim() >= 2, getattr(p, "device_mesh", None), scale
            groups.setdefault(key, []).append((name, p))
    decay = 0.1 if args is None else args.weight_decay
    settings = [  # with muP, decay per step stays what it is
        {"params": named, "weight_decay": decay / scale if decays else 0.0, "scale": scale}
        for (decays, _, scale), named in groups.items() if named
    ]  # fmt: skip
    if args is not None and args.optimizer == "muon":
        return build_muon(settings)
    plain = [s | {"params": [p for _, p in s["params"]]} for s in settings]
    factory = optimizer_factory(args)
    if args is not None and args.optimizer_in_backward:
        return OptimizerInBackward(plain, factory)
    if args is not None and args.offload:
        where = "cpu" if args.offload == "cpu" else offload_folder(args)
        return OffloadedOptimizer(plain, factory, where)
    return layout.optimizer(plain, factory)


def offload_folder(args: argparse.Namespace) -> Path:
    """In --offload's folder, that of this run and rank."""
    run = hashlib.sha256(str(args.out.resolve()).encode()).hexdigest()[:12]
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Path(args.offload) / f"{run}-rank{rank}"


def optimizer_factory(args: argparse.Namespace | None) -> Callable[..., torch.optim.Optimizer]:
    if args is not None and args.optimizer == "sgd":
        return partial(torch.optim.SGD, lr=0.0, momentum=0.9)
    how = dict(lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    if args is not None and args.param_dtype == "bf16":
        return partial(StochasticAdamW, **how, seed=args.seed)
    return partial(torch.optim.AdamW, **how, fused=True)


def build_muon(settings: list[dict[str, Any]]) -> Several:
    """torch's Muon for matrices in blocks, its steps as large as AdamW's, which has the rest."""
    parts = [[], []]
    for group in settings:
        for part, named in zip(parts, muon_split(group["params"])):
            if named:
                part.append(group | {"params": [p for _, p in named]})
    adam = partial(torch.optim.AdamW, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    whole = partial(torch.optim.Muon, lr=0.0, adjust_lr_fn="match_rms_adamw")
    return Several(*(make(part) for make, part in zip((whole, adam), parts) if part))
