"""Prepares the output folder of a training run, and builds its model and optimizer, from the
flags of train.py."""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moe
from huggingface.weights import allocate, check_folder, load_checkpoint, read_config
from model import CONFIGS, ModelConfig, MoE, Transformer
from training.dist_env import DistEnv
from training.parallelize import ParallelDims
from quantization.gemm import block_scaled_matmul
from quantize import SCHEMES, fp8_matmul
from training.checkpoint import list_steps
from training.config import TrainConfig, check_experts
from training.data import BOS, EOS
from training.lora import apply_lora_
from training.lora_jobs import apply_lora_jobs_, job_groups, read_jobs
from training.low_precision import fp8_training_, qat_
from training.offload import OffloadedOptimizer, OptimizerInBackward
from training.optimizers import ChainedOptimizer, StochasticAdamW, mup_factors, muon_split
from training.metrics import summary_writer
from training.run_folder import INPUTS, check_apart, check_new_folder, check_output_dir, copy_files
from training.run_folder import init_sample, input_hash, make_folder, read_inputs, record_inputs
from training.run_folder import starting, verify_init, verify_input
from training.state import CHECKPOINTS, export, needs_init, saved_run
from training.step import SINGLE_PROCESS
from training.upcycle import upcycle_, upcycle_config
from training.writer_lock import writer_lock

# Quantization of --qat, the same as that of generate.py --quantize
QAT_SPECS = {name: SCHEMES[name].spec for name in ("int8", "int4")}


def model_config(args: TrainConfig) -> ModelConfig:
    """The config of OUT with --resume, of --init (upcycled with --upcycle), or of --model."""
    if args.resume:
        return ModelConfig.from_hf(saved_run(args.out)[2]["config"])
    if args.init is not None:
        if (args.init / "adapter_config.json").exists():
            raise ValueError(
                f"--init {args.init}: holds LoRA adapters; merge them first with train.py --out "
                f"{args.init} --export DIR --set lora_merged=true"
            )
        for run in args.init, *args.init.parents[:2]:
            if not (args.init / "config.json").exists() and list_steps(run / CHECKPOINTS):
                raise ValueError(
                    f"--init {args.init}: of a run that was not exported; write its newest "
                    f"checkpoint with train.py --out {run} --export DIR"
                )
        try:
            check_folder(args.init)
        except ValueError as e:  # begins with the path
            raise ValueError(f"--init {e}") from None
        config = with_context(read_config(args.init / "config.json"), args.seq_len)
        return upcycle_config(config, args) if args.upcycle else config
    if args.model in CONFIGS or Path(args.model).exists():
        config = CONFIGS[args.model] if args.model in CONFIGS else read_config(args.model)
        return replace(with_context(config, args.seq_len), bos_id=BOS, eos_ids=(EOS,))
    raise ValueError(f"--model {args.model}: neither a config.json nor one of {', '.join(CONFIGS)}")


def with_context(config: ModelConfig, seq_len: int) -> ModelConfig:
    """A config whose context has room for the rows that it is trained on. Dynamic NTK is unchanged:
    its frequencies depend on max_seq_len."""
    if seq_len <= config.context or config.has_dynamic_rope:
        return config
    return replace(config, max_seq_len=seq_len)


def build_model(
    args: TrainConfig, config: ModelConfig, env: DistEnv, layout: ParallelDims = SINGLE_PROCESS
) -> Transformer:
    """The model to train, this rank's part under `layout`, in --param-dtype: loaded from --init, or
    initialized from --seed. Weights are initialized on the CPU, so one seed gives one model."""
    new = args.init is None or (args.resume and not (args.lora or args.lora_jobs))
    # with FSDP, initialize after sharding; --fp8 and --qat read the weights earlier
    deferred = new and layout.uses_fsdp and not (args.fp8 or args.qat)
    if new:
        model = meta_model(config)
        layout.shard_model_(model)
    elif args.upcycle:
        model = upcycle_(load_checkpoint(args.init, "cpu", torch.float32), config, args.seed)
        layout.shard_model_(model)
    else:
        model = load_checkpoint(args.init, "cpu", torch.float32, prepare=layout.shard_model_)
        model.config = replace(model.config, max_seq_len=config.max_seq_len)
    if new and not deferred:
        layout.init_weights_(allocate(model, "cpu", torch.float32), args.seed)
    if args.lora:
        apply_lora_(model, args.lora, args.lora_alpha or 2 * args.lora, seed=args.seed)
    if args.lora_jobs:
        apply_lora_jobs_(model, read_jobs(args.lora_jobs), args.seed)
    cast_params_(model, args)
    convert_linears_(model, args)
    layout.parallelize_(model, {"bf16": torch.bfloat16}.get(env.dtype))
    if deferred:
        model.to_empty(device=env.device)
        if layout.stages is None:
            model.tie()
        if not args.resume:
            layout.init_weights_(model, args.seed)
    return model.to(env.device).train()


def cast_params_(model: Transformer, args: TrainConfig) -> None:
    """--param-dtype bf16: cast the parameters; buffers are unchanged."""
    for p in model.parameters() if args.param_dtype == "bf16" else ():
        p.data = p.data.to(torch.bfloat16)


def convert_linears_(model: Transformer, args: TrainConfig) -> None:
    """Apply experts, --fp8 and --qat: replace the matmuls of the layers, in place, over the same
    parameters."""
    if args.experts == "grouped" and any(isinstance(m, MoE) for m in model.modules()):
        moe.use_grouped_experts(model)
    if args.fp8:
        matmul = partial(block_scaled_matmul, fallback=fp8_matmul)
        fp8_training_(model, args.fp8, matmul=matmul)
    if args.qat:
        try:
            tied = ("head",) if model.config.tie_embeddings else ()  # with --pp it is a copy
            qat_(model, QAT_SPECS[args.qat], skip=tied)
        except ValueError as e:
            raise ValueError(f"--qat {args.qat} (groups of 32): {e}; or use --qat int8") from None


def compile_model(model: Transformer) -> Any:
    """torch.compile without the expert loop: its shapes depend on the number of tokens per expert,
    so that every forward pass would recompile."""
    for module in model.modules():
        if isinstance(module, MoE) and not moe.has_static_shapes(module):
            module.experts = torch.compiler.disable(module.experts)
    return torch.compile(model)


def meta_model(config: ModelConfig) -> Transformer:
    """The full model on the meta device, for counting parameters and FLOPs."""
    with torch.device("meta"):
        return Transformer(config)


def build_optimizer(
    model: torch.nn.Module, layout: ParallelDims = SINGLE_PROCESS, args: TrainConfig = TrainConfig()
) -> Any:
    """The optimizer of args, by default AdamW (arXiv:1711.05101), with weight decay on matrices and
    embeddings, none on norms and biases. A group's "scale" multiplies the learning rate (muP)."""
    if args.lora_jobs:
        return optimizer_factory(args)(job_groups(model, args))
    groups: dict[Any, list[Any]] = {(True, None, 1.0): [], (False, None, 1.0): []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            scale = 1.0
            if args.mup_base:
                scale = mup_factors(name, p.shape, model.config.dim, args.mup_base)[1]
            # a fused step needs all its tensors on one mesh
            key = p.dim() >= 2, getattr(p, "device_mesh", None), scale
            groups.setdefault(key, []).append((name, p))
    settings = [  # weight_decay / scale keeps the decay per step independent of muP's scale
        {"params": named, "weight_decay": args.weight_decay / scale if decays else 0.0,
         "scale": scale}
        for (decays, _, scale), named in groups.items() if named
    ]  # fmt: skip
    if args.optimizer == "muon":
        return build_muon(settings)
    plain = [s | {"params": [p for _, p in s["params"]]} for s in settings]
    factory = optimizer_factory(args)
    if args.optimizer_in_backward:
        return OptimizerInBackward(plain, factory)
    if args.offload:
        where = "cpu" if args.offload == "cpu" else offload_folder(args)
        if where != "cpu":
            make_folder("--offload", where)
        return OffloadedOptimizer(plain, factory, where)
    return layout.optimizer(plain, factory)


def offload_folder(args: TrainConfig) -> Path:
    """The subfolder of --offload for this run and rank."""
    run = hashlib.sha256(str(args.out.resolve()).encode()).hexdigest()[:12]
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Path(args.offload) / f"{run}-rank{rank}"


def optimizer_factory(args: TrainConfig) -> Callable[..., torch.optim.Optimizer]:
    """params -> the optimizer of --optimizer and --param-dtype, with learning rate 0 (the schedule
    sets it)."""
    if args.optimizer == "sgd":
        return partial(torch.optim.SGD, lr=0.0, momentum=0.9)
    adamw = dict(lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    if args.param_dtype == "bf16":
        return partial(StochasticAdamW, **adamw, seed=args.seed)
    return partial(torch.optim.AdamW, **adamw, fused=True)


def build_muon(settings: list[dict[str, Any]]) -> ChainedOptimizer:
    """torch.optim.Muon for the matrices of blocks, with update RMS as AdamW's, and AdamW for the
    rest."""
    parts = [[], []]
    for group in settings:
        for part, named in zip(parts, muon_split(group["params"])):
            if named:
                part.append(group | {"params": [p for _, p in named]})
    adam = partial(torch.optim.AdamW, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    muon = partial(torch.optim.Muon, lr=0.0, adjust_lr_fn="match_rms_adamw")
    return ChainedOptimizer(*(make(part) for make, part in zip((muon, adam), parts) if part))


# --------------------------------------------------------------------------------------------------
# The output folder
# --------------------------------------------------------------------------------------------------


def prepare_output(
    config: TrainConfig, locks: contextlib.ExitStack, start: contextlib.ExitStack
) -> None:
    """Make and lock OUT, without the temporary files of a save that was killed."""
    if config.tensorboard:
        summary_writer()  # fail now if tensorboard is not installed
    made = [folder for folder in (config.out, *config.out.parents) if not folder.exists()]
    if not config.resume:
        check_apart(config)
    make_folder("--out", config.out)
    locks.enter_context(writer_lock(config.out))
    if not config.resume:
        start.enter_context(starting(config.out, made))
        check_output_dir(config.out, saved_run(config.out))  # again, now that no other writes it
    for leftover in config.out.glob(".*.tmp"):
        leftover.unlink()
    if not config.resume:
        record_inputs(config)
        return
    verify_input(config, "reward")
    if needs_init(config):
        verify_init(config)


def common_inputs(config: TrainConfig) -> dict[str, Any]:
    """What must be the same on all ranks before OUT is written; checked."""
    model_cfg = model_config(config)
    check_experts(config, model_cfg)
    reward = {"the content of --reward": input_hash(config, "reward")}
    return {**config.common_settings(), "the model's config.json": model_cfg, **reward}


def common_files(config: TrainConfig) -> dict[str, Any]:
    """OUT's inputs.json and what identifies the weights of --init."""
    inputs, files = read_inputs(config.out), {}
    if "init" in inputs and config.init and (not config.resume or needs_init(config)):
        files["the content of --init"] = init_sample(config)
    return {f"{INPUTS} in --out": inputs, **files}


def export_run(config: TrainConfig) -> None:
    """--export: the newest intact checkpoint of OUT, with its tokenizer. OUT itself is locked, and
    another folder must be new."""
    to = Path(config.export) if config.export else config.out
    is_out = to.resolve() == config.out.resolve()
    if not is_out:
        check_new_folder("--export", to)
    with writer_lock(to) if is_out and to.is_dir() else contextlib.nullcontext():
        export(config.out, to, config.lora_merged, verify=True, init=config.init)
    if not is_out:
        copy_files(config.out, to)
    print(to)
