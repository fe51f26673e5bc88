"""The command line of train.py: flags, their defaults, and which flags require or exclude others.

Every mistake that can be found before the first step is a ValueError here, in pipeline_model.py or
in parallel_dims.py: one line that names the flag and the fix.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import argparse
import math
import os
from functools import partial
from pathlib import Path

from model import CONFIGS, ModelConfig
from parallelism.parallel_dims import add_flags as add_layout_flags
from quantize import RECIPES, SCHEMES

# Quantization of --qat, the same as that of generate.py --quantize
QAT_SPECS = {name: SCHEMES[name].spec for name in ("int8", "int4")}

DRAFT_HEAD = "draft_head.safetensors"
NUM_DRAFT_TOKENS = 4  # consecutive tokens drafted in the validation of a draft head
DRAFT_LR = 1e-2  # default --lr of a draft head
TUNING_LR = {"lora": 2e-4, "sft": 2e-5, "dpo": 1e-6, "grpo": 1e-5}

# Arguments that --resume takes from the checkpoint. FIXED ones determine the result and cannot be
# changed; the others can (another micro-batch size changes the order of a sum: rounding only).
LOSSES = ("aux_loss", "seq_aux_loss", "router_z_loss")
OUTER = ("diloco", "outer_lr", "outer_momentum")
FIXED = ("seed", "batch_size", "seq_len", "lr", "data", "dtype", "fp8", "qat", *LOSSES, *OUTER)
FIXED += ("param_dtype", "optimizer", "lr_schedule", "warmup_steps", "decay_steps", "min_lr_factor")
FIXED += ("weight_decay", "grad_clip", "mup_base", "output_z_loss", "pack", "task", "lora", "beta")
FIXED += ("lora_alpha", "kl", "num_generations", "reward", "max_new_tokens", "init")
NOT_FIXED = ("steps", "micro_batch_size", "save_every", "eval_every", "compile", "attention")
NOT_FIXED += ("experts", "diloco_rendezvous", "diloco_workers", "diloco_worker", "diloco_timeout")
NOT_FIXED += ("keep_latest_k", "loss_spike_sigma", "max_skipped_batches", "memory_checkpoint_every")
NOT_FIXED += ("memory_checkpoint_dir", "hang_timeout", "workers", "lora_merged", "streamed")
# {argument: its key in a checkpoint}; the keys do not change when a flag is renamed
SAVED = {name: name for name in (*FIXED, *NOT_FIXED)} | {
    "param_dtype": "weights", "lr_schedule": "schedule", "warmup_steps": "warmup",
    "decay_steps": "decay", "min_lr_factor": "lr_end", "grad_clip": "clip",
    "output_z_loss": "logit_z_loss", "router_z_loss": "z_loss", "seq_aux_loss": "sequence_loss",
    "num_generations": "group", "keep_latest_k": "keep", "loss_spike_sigma": "spike",
    "max_skipped_batches": "patience", "memory_checkpoint_every": "mirror_every",
    "memory_checkpoint_dir": "mirror_at", "diloco_rendezvous": "diloco_at",
}  # fmt: skip


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; .given is the set of flags on it. ValueError for bad values."""
    text = "train a Llama- or DeepSeek-style model on text, in one process or under torchrun"
    p = argparse.ArgumentParser(prog="train.py", description=text, allow_abbrev=False)
    add_run_flags(p)
    add_data_flags(p)
    add_optimizer_flags(p)
    add_precision_flags(p)
    add_memory_flags(p)
    add_expert_flags(p)
    add_tuning_flags(p)
    add_layout_flags(p)
    add_diloco_flags(p)
    add_recovery_flags(p)
    args = p.parse_args(argv)
    args.given = {a.split("=")[0] for a in argv if a.startswith("--")}
    args.auto = args.resume == "auto"
    args.streamed = args.pack or args.workers > 0 or len(args.data or ()) > 1  # rows from shards
    parse_sizes(args)
    resolve_flags(args)
    return args


def resolve_flags(args: argparse.Namespace) -> None:
    """Fill defaults that depend on other flags; ValueError for flags that cannot be combined.
    Called again after --resume has filled args from the checkpoint."""
    check_numbers(args)
    if args.fp8 and args.qat:
        raise ValueError("--fp8 cannot be combined with --qat; choose one")
    if sum((args.plot, args.dry_run, args.export is not None)) > 1:
        raise ValueError("--plot, --dry-run and --export cannot be combined; choose one")
    if args.world_size is not None and not args.dry_run:
        raise ValueError("--world-size requires --dry-run; torchrun starts the ranks of a run")
    resolve_draft_head_flags(args)
    resolve_tuning_flags(args)
    check_memory_flags(args)


def add_run_flags(p: argparse.ArgumentParser) -> None:
    """Flags of the run: model, steps, batch size, output."""
    p.add_argument("--out", type=Path, default=Path("runs/stdlib"), help="folder of the run")
    p.add_argument(
        "--model", default="small", metavar="CONFIG", help=f"a config.json, or {', '.join(CONFIGS)}"
    )
    p.add_argument(
        "--init", type=Path, metavar="DIR", help="start from this checkpoint and its tokenizer"
    )
    p.add_argument(
        "--resume",
        nargs="?",
        const="yes",
        choices=("yes", "auto"),
        help="continue the run in --out; auto: start it if nothing was saved yet",
    )
    number = partial(p.add_argument, type=int)
    number("--steps", default=500, help="total number of steps (%(default)s)")
    number("--seed", default=0, help="seed of weights and batches (%(default)s)")
    number("--batch-size", default=8, help="sequences per step over all ranks (%(default)s)")
    text = "sequences per forward pass and rank (%(default)s)"
    number("--micro-batch-size", default=2, help=text)
    number("--seq-len", default=512, help="tokens per sequence (%(default)s)")
    text = "steps between validations (%(default)s)"
    number("--eval-every", default=100, metavar="STEPS", help=text)
    p.add_argument("--device", help="default: cuda if available, else cpu")
    p.add_argument(
        "--attention",
        choices=("sdpa", "flash"),
        default="sdpa",
        help="flash: the kernels of attention.py; on CPU its slower torch code (%(default)s)",
    )
    p.add_argument("--compile", action="store_true", help="torch.compile the model")
    text = "plot loss, throughput and expert load to OUT/metrics.png and exit"
    p.add_argument("--plot", action="store_true", help=text)
    p.add_argument(
        "--export",
        nargs="?",
        const="",
        metavar="DIR",
        help="write the newest checkpoint as a Hugging Face folder, DIR or OUT itself, and exit",
    )
    p.add_argument("--tensorboard", action="store_true", help="also log to OUT/tensorboard")
    text = "profile the STEP-th step of this process: Chrome trace and memory in OUT/profile (3)"
    number("--profile", nargs="?", const=3, metavar="STEP", help=text)


def add_data_flags(p: argparse.ArgumentParser) -> None:
    """Flags of data.py."""
    p.add_argument(
        "--data",
        action="append",
        metavar="PATH[=WEIGHT]",
        help='text file, folder, or JSONL with "text" (default: the standard library); repeat it '
        "to mix sources by weight (1)",
    )
    text = "pack whole documents into rows by best fit, with per-document positions and attention"
    p.add_argument("--pack", action="store_true", help=text)
    text = "worker processes that tokenize into shards while training starts (0: tokenize first)"
    p.add_argument("--workers", type=int, default=0, metavar="N", help=text)


def add_optimizer_flags(p: argparse.ArgumentParser) -> None:
    """Flags of optimizers.py."""
    text = "muon: Muon for the matrices of blocks, AdamW for the rest (%(default)s)"
    p.add_argument("--optimizer", choices=("adamw", "muon", "sgd"), default="adamw", help=text)
    real = partial(p.add_argument, type=float)
    text = f"peak learning rate (%(default)s; draft heads {DRAFT_LR:g}, "
    text += ", ".join(f"{task} {lr:g}" for task, lr in TUNING_LR.items())
    real("--lr", default=2e-3, help=text + ")")
    p.add_argument(
        "--lr-schedule",
        choices=("cosine", "linear", "wsd", "constant"),
        default="cosine",
        help="learning rate after warm-up; wsd: warm-up, stable, decay (%(default)s)",
    )
    number = partial(p.add_argument, type=int, metavar="STEPS")
    number("--warmup-steps", help="linear warm-up (5%% of --steps, at most 500)")
    number("--decay-steps", help="final decay of --lr-schedule wsd (20%% of --steps)")
    text = "final learning rate as a fraction of the peak (%(default)s)"
    real("--min-lr-factor", default=0.1, help=text)
    real("--weight-decay", default=0.1, help="of matrices only (%(default)s)")
    text = "maximum norm of the gradient (%(default)s; 0: no clipping)"
    real("--grad-clip", default=1.0, metavar="NORM", help=text)
    text = "muP: --lr was tuned at this width and is scaled to the model's"
    p.add_argument("--mup-base", type=int, metavar="WIDTH", help=text)


def add_precision_flags(p: argparse.ArgumentParser) -> None:
    """Flags of dtypes, FP8 training, QAT and draft heads."""
    p.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="dtype of the matmuls (autocast). auto: bf16 if the hardware supports it, else fp32; "
        "fp16 uses dynamic loss scaling and skips steps that overflow",
    )
    p.add_argument(
        "--param-dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="dtype of the parameters; bf16: no fp32 copy, AdamW with stochastic rounding (fp32)",
    )
    p.add_argument(
        "--fp8",
        choices=tuple(RECIPES),
        help="FP8 matmuls in linear layers, scaled per tensor, row or block; slower but with the "
        "same numbers on hardware without FP8 tensor cores",
    )
    p.add_argument(
        "--qat",
        choices=tuple(QAT_SPECS),
        help="quantization-aware training for generate.py --quantize: fake-quantize the weights in "
        "every forward pass",
    )
    p.add_argument(
        "--train-draft-head",
        action="store_true",
        help="train a draft head for speculative decoding with the frozen model of --init: "
        f"OUT/{DRAFT_HEAD}",
    )


def add_memory_flags(p: argparse.ArgumentParser) -> None:
    """Flags of recompute.py, chunked_loss.py and offload.py."""
    p.add_argument(
        "--recompute",
        default="none",
        metavar="none|attention|selective|full|sqrt|BYTES",
        help="activations recomputed in the backward pass. attention: those of attention; "
        "selective: all but every other matmul's; full: of whole blocks; sqrt: of sqrt(layers) "
        "groups of blocks; BYTES (8e9, 500M, 12G): as few as fit a micro-batch into that budget "
        "(%(default)s)",
    )
    p.add_argument(
        "--loss-chunk",
        default="auto",
        metavar="ROWS",
        help="rows of logits computed at a time in the loss; 0: all. auto: chunk if all logits "
        "exceed 512 MiB",
    )
    text = "coefficient of the loss log(sum exp(logits)) ** 2, which keeps logits small (PaLM; 0)"
    p.add_argument("--output-z-loss", type=float, default=0.0, metavar="COEF", help=text)
    p.add_argument(
        "--offload",
        metavar="cpu|FOLDER",
        help="keep master weights and optimizer states in host memory or memory-mapped files",
    )
    text = "update each parameter in the backward pass and free its gradient (needs --grad-clip 0)"
    p.add_argument("--optimizer-in-backward", action="store_true", help=text)


def add_expert_flags(p: argparse.ArgumentParser) -> None:
    """Flags of MoE models."""
    p.add_argument(
        "--experts",
        choices=("grouped", "loop"),
        default="grouped",
        help="MoE layers: grouped matmuls of moe.py, or a loop over experts (%(default)s); --fp8 "
        "always uses its own loop",
    )
    loss = partial(p.add_argument, type=float, metavar="COEF")
    text = "Switch load balancing loss (0 with a learned expert bias, else 0.01)"
    loss("--aux-loss", help=text)
    text = "DeepSeek-V3 sequence-wise load balancing loss (0)"
    loss("--seq-aux-loss", default=0.0, help=text)
    loss("--router-z-loss", default=0.0, help="ST-MoE router z-loss, keeps router logits small (0)")
    number = partial(p.add_argument, type=int)
    text = "turn each MLP of --init into an MoE layer of E copies"
    number("--upcycle", metavar="E", help=text)
    text = "experts per token of the upcycled model (%(default)s)"
    number("--upcycle-top-k", default=2, help=text)


def add_tuning_flags(p: argparse.ArgumentParser) -> None:
    """Flags of lora.py and tuning.py."""
    p.add_argument(
        "--task",
        choices=("text", "sft", "dpo", "grpo"),
        default="text",
        help='JSONL of --data: sft {"messages": [...]}, trains on the assistant turns; '
        'dpo {"prompt", "chosen", "rejected"}; grpo {"prompt", "answer"} (%(default)s)',
    )
    number, real = partial(p.add_argument, type=int), partial(p.add_argument, type=float)
    number("--lora", metavar="RANK", help="train only LoRA adapters of this rank")
    real("--lora-alpha", help="adapters are scaled by alpha / rank (2 x rank)")
    p.add_argument("--lora-merged", action="store_true", help="merge adapters in exports")
    text = "dpo: strength of the penalty for leaving the model of --init (%(default)s)"
    real("--beta", default=0.1, help=text)
    real("--kl", default=0.0, help="grpo: coefficient of the KL divergence from --init (0)")
    text = "grpo: completions per prompt (%(default)s)"
    number("--num-generations", default=8, metavar="N", help=text)
    text = "grpo: exact, number, prefix (alignment.py), or FILE.py:FUNCTION (%(default)s)"
    p.add_argument("--reward", default="exact", help=text)
    number("--max-new-tokens", default=64, help="grpo: tokens per completion (%(default)s)")


def add_diloco_flags(p: argparse.ArgumentParser) -> None:
    """Flags of diloco.py; each worker is a separate program with its own --out."""
    number = partial(p.add_argument, type=int)
    number("--diloco", metavar="H", help="synchronize with the other workers every H steps")
    p.add_argument(
        "--diloco-rendezvous",
        metavar="WHERE",
        help="a folder shared by all workers, or HOST:PORT of python parallelism/diloco.py --serve",
    )
    number("--diloco-workers", default=1, metavar="N", help="workers that split each batch (1)")
    number("--diloco-worker", default=0, metavar="I", help="index of this worker (0)")
    real = partial(p.add_argument, type=float)
    real("--diloco-timeout", default=60.0, help="seconds to wait for a worker (%(default)s)")
    real("--outer-lr", default=0.7, help="learning rate of the outer SGD (%(default)s)")
    real("--outer-momentum", default=0.9, help="Nesterov momentum of the outer SGD (%(default)s)")


def add_recovery_flags(p: argparse.ArgumentParser) -> None:
    """Flags of checkpoint.py and recovery.py."""
    number = partial(p.add_argument, type=int)
    text = "steps between checkpoints (%(default)s)"
    number("--save-every", default=100, metavar="STEPS", help=text)
    text = "number of checkpoints to keep (%(default)s)"
    number("--keep-latest-k", default=2, metavar="N", help=text)
    text = "steps between checkpoints to the memory of this node and a peer (never)"
    number("--memory-checkpoint-every", metavar="STEPS", help=text)
    text = "in-memory folder, local to each node (/dev/shm/sheaf-... derived from --out)"
    p.add_argument("--memory-checkpoint-dir", type=Path, metavar="FOLDER", help=text)
    real = partial(p.add_argument, type=float)
    text = "limit of a step (10 times that for the first); then report stuck ranks and exit (600)"
    real("--hang-timeout", default=600.0, metavar="SECONDS", help=text)
    text = "skip batches whose loss is this many deviations above the mean; 0: never (%(default)s)"
    real("--loss-spike-sigma", default=10.0, metavar="SIGMAS", help=text)
    text = "stop after this many skipped batches (spike or not finite) in a row (%(default)s)"
    number("--max-skipped-batches", default=10, metavar="N", help=text)


def check_numbers(args: argparse.Namespace) -> None:
    """ValueError for numbers that are out of range."""
    positive = "steps batch_size micro_batch_size seq_len save_every eval_every lr upcycle "
    positive += "dp dp_replicate pp virtual_stages tp cp cp_ulysses ep ep_node_size ep_chunks "
    positive += "world_size hpz_size diloco diloco_workers diloco_timeout outer_lr upcycle_top_k "
    positive += "keep_latest_k memory_checkpoint_every hang_timeout max_skipped_batches mup_base "
    positive += "profile lora lora_alpha beta num_generations max_new_tokens decay_steps"
    for name in positive.split():
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            raise ValueError(f"{flag(name)} must be positive, not {value}")
    zero = (*LOSSES, "workers", "warmup_steps", "min_lr_factor", "weight_decay", "grad_clip")
    for name in (*zero, "loss_spike_sigma", "kl", "output_z_loss"):
        if (value := getattr(args, name)) is not None and not 0 <= value < math.inf:
            raise ValueError(f"{flag(name)} must be 0 or more, not {value}")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed must be from 0 to 2**32 - 1, not {args.seed}")
    if args.upcycle is not None and not 2 <= args.upcycle_top_k <= args.upcycle:
        raise ValueError(  # with top-1 the gate weight is always 1 and the router cannot learn
            f"--upcycle-top-k must be from 2 to --upcycle {args.upcycle}, not {args.upcycle_top_k}"
        )
    if args.upcycle is not None and args.init is None and not args.resume:
        raise ValueError("--upcycle requires --init, the dense model to upcycle")


def parse_sizes(args: argparse.Namespace) -> None:
    """--recompute as a mode or a number of bytes, --loss-chunk as a number or None (auto)."""
    if args.recompute not in ("none", "attention", "selective", "full", "sqrt"):
        args.recompute = parse_bytes(args.recompute)
    if args.loss_chunk == "auto":
        args.loss_chunk = None
    elif args.loss_chunk.isdecimal():
        args.loss_chunk = int(args.loss_chunk)
    else:
        raise ValueError(f"--loss-chunk {args.loss_chunk}: must be a number of rows, or auto")


def check_memory_flags(args: argparse.Namespace) -> None:
    """ValueError for flags of memory, optimizers and dtypes that cannot be combined."""
    memory = args.memory_checkpoint_every
    for given, has_other, other in (
        ("--decay-steps", args.lr_schedule == "wsd", "--lr-schedule wsd"),
        ("--memory-checkpoint-dir", memory is not None, "--memory-checkpoint-every"),
    ):
        if given in args.given and not has_other:
            raise ValueError(f"{given} requires {other}")
    total = (args.warmup_steps or 0) + (args.decay_steps or 0)
    if total > args.steps:
        raise ValueError(
            f"--warmup-steps and --decay-steps are {total} steps, more than --steps {args.steps}"
        )
    if args.min_lr_factor > 1:
        raise ValueError(f"--min-lr-factor must be from 0 to 1, not {args.min_lr_factor}")
    if args.offload is not None and args.offload != "cpu" and args.offload.lower() in ("", "cpu"):
        raise ValueError(f"--offload {args.offload}: must be cpu or a folder")
    if args.loss_chunk == 0 and args.output_z_loss:
        raise ValueError("--output-z-loss requires the chunked loss; remove --loss-chunk 0")
    if args.optimizer_in_backward and args.grad_clip:
        raise ValueError(
            "--optimizer-in-backward requires --grad-clip 0: it updates before the gradient norm "
            "is known"
        )
    if args.optimizer_in_backward and (args.offload or args.dtype == "fp16"):
        other = "--offload" if args.offload else "--dtype fp16"
        raise ValueError(f"--optimizer-in-backward cannot be combined with {other}; choose one")
    if args.optimizer == "muon" and (args.offload or args.optimizer_in_backward):
        other = "--offload" if args.offload else "--optimizer-in-backward"
        raise ValueError(
            f"--optimizer muon cannot be combined with {other}: it updates whole matrices"
        )
    if args.mup_base is not None and args.optimizer != "adamw":
        raise ValueError(f"--mup-base requires --optimizer adamw, not {args.optimizer}")
    if args.optimizer_in_backward and memory is not None:
        raise ValueError(
            "--optimizer-in-backward cannot be combined with --memory-checkpoint-every: its state "
            "is never between two steps"
        )
    if args.param_dtype == "bf16" and args.pp > 1:
        raise ValueError(
            "--param-dtype bf16 cannot be combined with --pp: stochastic rounding would make the "
            "copies of a tied head differ"
        )
    if args.param_dtype == "bf16" and (args.optimizer != "adamw" or args.offload):
        raise ValueError(
            "--param-dtype bf16 requires --optimizer adamw and cannot be combined with --offload"
        )
    if args.param_dtype == "bf16" and args.dtype in ("fp16", "fp32"):
        raise ValueError(f"--param-dtype bf16 requires --dtype bf16, not {args.dtype}")


def parse_bytes(text: str) -> int:
    """A number of bytes from 8e9, 500M or 12G."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    digits, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    try:
        return int(float(digits) * unit)
    except (ValueError, OverflowError):
        raise ValueError(
            f"--recompute {text}: must be none, attention, selective, full, sqrt or a number of "
            "bytes"
        ) from None


def validate_diloco_flags(args: argparse.Namespace, dp_size: int) -> None:
    """ValueError for --diloco flags that do not fit each other, or a batch that does not divide
    over the workers and the dp_size data parallel ranks of each."""
    given = args.given & {flag(k) for k in SAVED if k.startswith(("diloco_", "outer_"))}
    if args.diloco is None and given:
        raise ValueError(f"{min(given)} requires --diloco")
    if args.diloco is None:
        return
    if args.diloco_rendezvous is None:
        raise ValueError("--diloco requires --diloco-rendezvous, where workers find each other")
    if not 0 <= args.diloco_worker < args.diloco_workers:
        raise ValueError(
            f"--diloco-worker must be from 0 to {args.diloco_workers - 1}, not {args.diloco_worker}"
        )
    if not 0 <= args.outer_momentum < 1:
        raise ValueError(f"--outer-momentum must be from 0 to 1, not {args.outer_momentum}")
    if args.steps % args.diloco:
        raise ValueError(f"--steps {args.steps} must be a multiple of --diloco {args.diloco}")
    if args.batch_size % (args.diloco_workers * dp_size):
        raise ValueError(
            f"--batch-size {args.batch_size} must be a multiple of {args.diloco_workers} workers x "
            f"{dp_size} data parallel ranks"
        )
    for name in ("task", "lora", "offload", "optimizer_in_backward", "memory_checkpoint_every"):
        if getattr(args, name) not in (None, False, "text"):
            raise ValueError(f"--diloco cannot be combined with {flag(name)}")


def resolve_expert_flags(args: argparse.Namespace, config: ModelConfig) -> None:
    """Set the default of --aux-loss; ValueError for MoE flags with a dense model."""
    moe_flags = [name for name in LOSSES if getattr(args, name)] + ["ep"] * (args.ep > 1)
    if moe_flags and not config.moe_layers:
        raise ValueError(f"{flag(moe_flags[0])} requires a model with MoE layers")
    for given, needed in (
        ("--ep-chunks", "--ep"), ("--ep-node-size", "--ep"), ("--upcycle-top-k", "--upcycle"),
        ("--cp-method", "--cp"), ("--cp-ulysses", "--cp"), ("--no-sequence-parallel", "--tp"),
        ("--async-tp", "--tp"),
    ):  # fmt: skip
        if given in args.given and needed not in args.given:
            raise ValueError(f"{given} requires {needed}")
    if args.resume and args.upcycle is not None and not args.auto:
        raise ValueError("--upcycle cannot be combined with --resume: it starts a run")
    if args.aux_loss is None:  # runs saved before this flag existed had no such loss
        unbalanced = config.moe_layers and not config.correction_bias and not args.resume
        args.aux_loss = 0.01 if unbalanced else 0.0


def resolve_tuning_flags(args: argparse.Namespace) -> None:
    """Set the default --lr of --task and --lora; ValueError for flags they cannot combine with."""
    grpo = {"--kl", "--num-generations", "--reward", "--max-new-tokens"} & args.given
    if grpo and args.task != "grpo" and not args.resume:
        raise ValueError(f"{min(grpo)} requires --task grpo")
    if "--beta" in args.given and args.task != "dpo" and not args.resume:
        raise ValueError("--beta requires --task dpo")
    if args.task in ("dpo", "grpo"):
        unused = ("--pack", "--workers", "--loss-chunk", "--output-z-loss", "--loss-spike-sigma")
        for other in unused:
            if other in args.given:
                raise ValueError(f"--task {args.task} cannot be combined with {other}")
    has_run = args.resume or args.export is not None
    if {"--lora-alpha", "--lora-merged"} & args.given and args.lora is None and not has_run:
        raise ValueError("--lora-alpha and --lora-merged require --lora")
    tuned = "--lora" if args.lora else f"--task {args.task}" if args.task != "text" else ""
    if not tuned:
        return
    if args.init is None and not args.resume:
        raise ValueError(f"{tuned} requires --init, the model to start from")
    if args.task != "text" and not args.data and not args.resume:
        raise ValueError(f"{tuned} requires --data, a JSONL file (see --help)")
    for name in ("tp", "pp", "cp", "ep"):
        if getattr(args, name) > 1 and (args.lora or args.task in ("dpo", "grpo")):
            raise ValueError(
                f"{tuned} cannot be combined with {flag(name)}: every rank needs the whole model"
            )
    if args.lora and (args.qat or args.fp8 or args.upcycle or args.train_draft_head):
        others = ("qat", "fp8", "upcycle", "train_draft_head")
        other = next(flag(name) for name in others if getattr(args, name))
        raise ValueError(f"--lora cannot be combined with {other}")
    if args.task == "grpo" and args.zero and not args.distributed_optimizer:
        raise ValueError(
            "--task grpo cannot be combined with --zero: it generates with unsharded weights"
        )
    if args.task == "dpo" and (args.batch_size % 2 or args.micro_batch_size % 2):
        raise ValueError(
            "--task dpo requires even --batch-size and --micro-batch-size: a pair is two rows"
        )
    if args.task == "grpo" and args.batch_size % args.num_generations:
        raise ValueError(
            f"--batch-size {args.batch_size} must be a multiple of --num-generations "
            f"{args.num_generations}"
        )
    if "--lr" not in args.given and not args.resume:
        args.lr = TUNING_LR["lora" if args.lora else args.task]


def resolve_draft_head_flags(args: argparse.Namespace) -> None:
    """Set the default --lr of --train-draft-head; ValueError for flags it cannot combine with."""
    if not args.train_draft_head:
        return
    if args.init is None:
        raise ValueError("--train-draft-head requires --init, the target model")
    others = (
        "--fp8",
        "--qat",
        "--upcycle",
        "--diloco",
        "--task",
        "--lora",
        "--param-dtype",
        "--offload",
    )
    others += ("--recompute", "--optimizer-in-backward", "--memory-checkpoint-every", "--mup-base")
    others += ("--grad-clip", "--optimizer", "--lr-schedule", "--warmup-steps", "--decay-steps")
    others += ("--min-lr-factor", "--weight-decay")
    for other in ("--model", *others, *map(flag, LOSSES)):
        if other in args.given:
            raise ValueError(f"--train-draft-head cannot be combined with {other}")
    if args.resume:
        raise ValueError(
            "--resume cannot be combined with --train-draft-head; start again in another --out"
        )
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("--train-draft-head runs in one process; start it without torchrun")
    if args.seq_len < NUM_DRAFT_TOKENS + 2:
        raise ValueError(
            f"--train-draft-head requires --seq-len {NUM_DRAFT_TOKENS + 2} or more, not "
            f"{args.seq_len}"
        )
    if "--lr" not in args.given:
        args.lr = DRAFT_LR


def flag(name: str) -> str:
    """The command line flag of an argument: lr_schedule -> --lr-schedule."""
    return "--" + name.replace("_", "-")
