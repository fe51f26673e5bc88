"""flags.py: the command line of train.py: what there is to say, and what of it goes with what.

Every mistake that can be seen before the first step is a ValueError here, in pipeline_model.py or in
parallel_dims.py: one line with the flag and the mend.
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

# What --qat rounds to: the grids of generate.py's --quantize
QAT_SPECS = {name: SCHEMES[name].grid for name in ("int8", "int4")}

DRAFT_HEAD = "draft_head.safetensors"
NUM_DRAFT_TOKENS = 4  # tokens in a row that a draft head's validation drafts
DRAFT_LR = 1e-2  # where --lr is not given
TUNING_LR = {"lora": 2e-4, "sft": 2e-5, "dpo": 1e-6, "grpo": 1e-5}

# --resume takes these from the checkpoint. Those in FIXED decide what is learned and stay; others
# may be given anew (another micro-batch size sums in another order: equal but for rounding).
LOSSES = ("aux_loss", "seq_aux_loss", "router_z_loss")
OUTER = ("diloco", "outer_lr", "outer_momentum")
FIXED = ("seed", "batch_size", "seq_len", "lr", "data", "dtype", "fp8", "qat", *LOSSES, *OUTER)
FIXED += ("param_dtype", "optimizer", "lr_schedule", "warmup_steps", "decay_steps", "min_lr_factor", "weight_decay", "grad_clip")
FIXED += ("mup_base", "output_z_loss", "pack", "task", "lora", "lora_alpha", "beta", "kl", "num_generations")
FIXED += ("reward", "max_new_tokens", "init")
SAVED = (*FIXED, "steps", "micro_batch_size", "save_every", "eval_every", "compile", "attention")
SAVED += ("experts", "diloco_rendezvous", "diloco_workers", "diloco_worker", "diloco_timeout")
SAVED += ("keep_latest_k", "loss_spike_sigma", "max_skipped_batches", "memory_checkpoint_every", "memory_checkpoint_dir", "hang_timeout", "workers")
SAVED += ("lora_merged", "streamed")


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line, and in .given which flags were on it; ValueError names one out of range."""
    text = "train a Llama- or DeepSeek-style model from text, on one process or under torchrun"
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
    """ValueError for flags that do not go together; defaults that others decide. To be called again
    when a checkpoint has told the rest of them."""
    check_numbers(args)
    if args.fp8 and args.qat:
        raise ValueError("--fp8 and --qat exclude each other; choose one")
    if sum((args.plot, args.dry_run, args.export is not None)) > 1:
        raise ValueError("--plot, --dry-run and --export are one at a time")
    if args.world_size is not None and not args.dry_run:
        raise ValueError("--world-size goes with --dry-run; torchrun starts the ranks of a run")
    resolve_draft_head_flags(args)
    resolve_tuning_flags(args)
    check_memory_flags(args)


def add_run_flags(p: argparse.ArgumentParser) -> None:
    """What is trained, how long, where."""
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
        help="go on with the run in --out; auto: or start it, if nothing was saved yet",
    )
    number = partial(p.add_argument, type=int)
    number("--steps", default=500, help="in all (%(default)s)")
    number("--seed", default=0, help="of weights and batches (%(default)s)")
    number("--batch-size", default=8, help="sequences in a step, over all ranks (%(default)s)")
    text = "sequences in one forward, per rank (%(default)s)"
    number("--micro-batch-size", default=2, help=text)
    number("--seq-len", default=512, help="tokens (%(default)s)")
    number("--eval-every", default=100, metavar="STEPS")
    p.add_argument("--device", help="default: cuda if there is one, else cpu")
    p.add_argument(
        "--attention",
        choices=("sdpa", "flash"),
        default="sdpa",
        help="flash: attention.py's kernels; on a CPU its plain torch, slower (%(default)s)",
    )
    p.add_argument("--compile", action="store_true", help="torch.compile the model")
    text = "draw OUT/metrics.png: loss, throughput, load of experts; and exit"
    p.add_argument("--plot", action="store_true", help=text)
    p.add_argument(
        "--export",
        nargs="?",
        const="",
        metavar="DIR",
        help="write the newest checkpoint as a Hugging Face folder, DIR or OUT itself, and exit",
    )
    p.add_argument("--tensorboard", action="store_true", help="metrics to OUT/tensorboard as well")
    text = "write OUT/profile: a Chrome trace of this process's so-manieth step, and its memory"
    number("--profile", nargs="?", const=3, metavar="STEP", help=text + " (3)")


def add_data_flags(p: argparse.ArgumentParser) -> None:
    """Those of data.py."""
    p.add_argument(
        "--data",
        action="append",
        metavar="PATH[=WEIGHT]",
        help='text file, folder, or JSONL with "text" (default: the standard library); several: '
        "mixed by their weights (1)",
    )
    text = "rows of whole documents, each with positions and attention of its own"
    p.add_argument("--pack", action="store_true", help=text + ", by best fit")
    text = "processes that tokenize, into shards, while the first steps are made (0)"
    p.add_argument("--workers", type=int, default=0, metavar="N", help=text)


def add_optimizer_flags(p: argparse.ArgumentParser) -> None:
    """Those of optimizers.py."""
    text = "muon: for matrices inside blocks, AdamW for the rest (%(default)s)"
    p.add_argument("--optimizer", choices=("adamw", "muon", "sgd"), default="adamw", help=text)
    real = partial(p.add_argument, type=float)
    text = f"peak (%(default)s; heads {DRAFT_LR:g}, "
    text += ", ".join(f"{task} {lr:g}" for task, lr in TUNING_LR.items())
    real("--lr", default=2e-3, help=text + ")")
    p.add_argument(
        "--lr-schedule",
        choices=("cosine", "linear", "wsd", "constant"),
        default="cosine",
        help="of the learning rate after its warm-up; wsd is stable, then decays (%(default)s)",
    )
    number = partial(p.add_argument, type=int, metavar="STEPS")
    number("--warmup-steps", help="to the peak (5%% of all, at most 500)")
    number("--decay-steps", help="of wsd, the last ones (20%% of all)")
    real("--min-lr-factor", default=0.1, help="of the peak, at the end (%(default)s)")
    real("--weight-decay", default=0.1, help="of matrices (%(default)s)")
    real(
        "--grad-clip", default=1.0, metavar="NORM", help="of the gradient, at most (%(default)s; 0: any)"
    )
    text = "muP: the learning rate is one for this width, and holds for the model's"
    p.add_argument("--mup-base", type=int, metavar="WIDTH", help=text)


def add_precision_flags(p: argparse.ArgumentParser) -> None:
    """Dtypes; those of quantize.py's training, and of speculative.py's."""
    p.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="of the matmuls (autocast). auto: bf16 where the hardware multiplies it, else fp32; "
        "fp16 scales its loss, and skips a step that overflows",
    )
    p.add_argument(
        "--param-dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="what is kept of them; bf16 has no fp32 copy: AdamW rounds stochastically (fp32)",
    )
    p.add_argument(
        "--fp8",
        choices=tuple(RECIPES),
        help="linear layers multiply in FP8, with scales per tensor, row or block; without FP8 "
        "tensor cores the same numbers, slower",
    )
    p.add_argument(
        "--qat",
        choices=tuple(QAT_SPECS),
        help="train for generate.py --quantize int8 or int4: every forward rounds the weights so",
    )
    p.add_argument(
        "--train-draft-head",
        action="store_true",
        help="train no model but a head that drafts for that of --init in speculative decoding: "
        f"OUT/{DRAFT_HEAD}",
    )


def add_memory_flags(p: argparse.ArgumentParser) -> None:
    """Those of recompute.py, chunked_loss.py and offload.py."""
    p.add_argument(
        "--recompute",
        default="none",
        metavar="none|attention|selective|full|sqrt|BYTES",
        help="activations that the backward pass computes again: attention's, all but every other "
        "product's, a whole block's, those of sqrt(layers) runs of blocks; or as few as leave a "
        "micro-batch BYTES (8e9, 500M, 12G) of them (%(default)s)",
    )
    p.add_argument(
        "--loss-chunk",
        default="auto",
        metavar="ROWS",
        help="logits that there are at a time; 0: all. auto: 0, until all would be 512 MiB",
    )
    text = "of log(sum exp(logits)) squared, which keeps logits small (PaLM; 0)"
    p.add_argument("--output-z-loss", type=float, default=0.0, metavar="COEF", help=text)
    p.add_argument(
        "--offload",
        metavar="cpu|FOLDER",
        help="masters and moments in host memory, or in memory-mapped files in that folder",
    )
    text = "step each parameter when its gradient is there, and free that (with --grad-clip 0)"
    p.add_argument("--optimizer-in-backward", action="store_true", help=text)


def add_expert_flags(p: argparse.ArgumentParser) -> None:
    """Those of mixtures of experts."""
    p.add_argument(
        "--experts",
        choices=("grouped", "loop"),
        default="grouped",
        help="of mixtures: moe.py's grouped products, or one expert after the other (%(default)s); "
        "--fp8 has a loop of its own, whichever is said here",
    )
    loss = partial(p.add_argument, type=float, metavar="COEF")
    loss("--aux-loss", help="Switch's, for even loads (0.01 without a routing correction, else 0)")
    loss("--seq-aux-loss", default=0.0, help="DeepSeek-V3's, for even loads in a sequence (0)")
    loss("--router-z-loss", default=0.0, help="ST-MoE's, for small router logits (0)")
    number = partial(p.add_argument, type=int)
    number("--upcycle", metavar="E", help="each MLP of --init becomes a mixture of so many copies")
    number("--upcycle-top-k", default=2, help="experts per token (%(default)s)")


def add_tuning_flags(p: argparse.ArgumentParser) -> None:
    """Those of lora.py and tuning.py."""
    p.add_argument(
        "--task",
        choices=("text", "sft", "dpo", "grpo"),
        default="text",
        help='sft: --data is JSONL of {"messages": [...]}, and what the assistant says is learned; '
        'dpo: of {"prompt", "chosen", "rejected"}; grpo: of {"prompt", "answer"} (%(default)s)',
    )
    number, real = partial(p.add_argument, type=int), partial(p.add_argument, type=float)
    number("--lora", metavar="RANK", help="train adapters of this rank, and nothing else")
    real("--lora-alpha", help="they are scaled by alpha / rank (2 x rank)")
    p.add_argument("--lora-merged", action="store_true", help="exports have adapters added in")
    real("--beta", default=0.1, help="of dpo: how dear it is to leave the model of --init (0.1)")
    real("--kl", default=0.0, help="of grpo: weight of the KL divergence from --init's (0)")
    number("--num-generations", default=8, metavar="N", help="of grpo: completions of a prompt (8)")
    text = "of grpo: exact, number, prefix (alignment.py), or FILE.py:FUNCTION (%(default)s)"
    p.add_argument("--reward", default="exact", help=text)
    number("--max-new-tokens", default=64, help="of grpo's completions (%(default)s)")


def add_diloco_flags(p: argparse.ArgumentParser) -> None:
    """Those of diloco.py; each worker is a program of its own, with an --out of its own."""
    number = partial(p.add_argument, type=int)
    number("--diloco", metavar="H", help="meet other workers in each H-th step, and in no other")
    p.add_argument(
        "--diloco-rendezvous",
        metavar="WHERE",
        help="a folder that all workers write to, or HOST:PORT of `python parallelism/diloco.py --serve`",
    )
    number("--diloco-workers", default=1, metavar="N", help="that share every batch out (1)")
    number("--diloco-worker", default=0, metavar="I", help="which one this is (0)")
    real = partial(p.add_argument, type=float)
    real("--diloco-timeout", default=60.0, help="seconds to wait for a worker (%(default)s)")
    real("--outer-lr", default=0.7, help="of SGD on what workers moved by (%(default)s)")
    real("--outer-momentum", default=0.9, help="its Nesterov momentum (%(default)s)")


def add_recovery_flags(p: argparse.ArgumentParser) -> None:
    """Those of checkpoint.py and recovery.py."""
    number = partial(p.add_argument, type=int)
    number("--save-every", default=100, metavar="STEPS", help="(%(default)s)")
    number(
        "--keep-latest-k", default=2, metavar="N", help="newest checkpoints, of those saved (%(default)s)"
    )
    text = "keep copies in memory, this node's and another's, for a restart (never)"
    number("--memory-checkpoint-every", metavar="STEPS", help=text)
    text = "a folder in memory, another on each node (/dev/shm/sheaf-... of --out)"
    p.add_argument("--memory-checkpoint-dir", type=Path, metavar="FOLDER", help=text)
    real = partial(p.add_argument, type=float)
    text = "a step may last, the first ten times that; then the guilty ranks are named (600)"
    real("--hang-timeout", default=600.0, metavar="SECONDS", help=text)
    text = "skip a batch whose loss is so many deviations above the mean; 0: none (%(default)s)"
    real("--loss-spike-sigma", default=10.0, metavar="SIGMAS", help=text)
    text = "batches skipped in a row (spikes, or not finite) before the run stops (%(default)s)"
    number("--max-skipped-batches", default=10, metavar="N", help=text)


def check_numbers(args: argparse.Namespace) -> None:
    """ValueError for a number that is out of range."""
    positive = "steps batch_size micro_batch_size seq_len save_every eval_every lr upcycle "
    positive += (
        "dp dp_replicate pp virtual_stages tp cp cp_ulysses ep ep_node_size ep_chunks world_size "
    )
    positive += "hpz_size diloco diloco_workers diloco_timeout outer_lr upcycle_top_k keep_latest_k "
    positive += "memory_checkpoint_every hang_timeout max_skipped_batches mup_base profile lora lora_alpha beta num_generations "
    positive += "max_new_tokens decay_steps"
    for name in positive.split():
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            raise ValueError(f"{flag(name)} must be positive, not {value}")
    zero = (*LOSSES, "workers", "warmup_steps", "min_lr_factor", "weight_decay", "grad_clip", "loss_spike_sigma", "kl")
    for name in (*zero, "output_z_loss"):
        if (value := getattr(args, name)) is not None and not 0 <= value < math.inf:
            raise ValueError(f"{flag(name)} must be 0 or more, not {value}")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed must be from 0 to 2**32 - 1, not {args.seed}")
    if args.upcycle is not None and not 2 <= args.upcycle_top_k <= args.upcycle:
        raise ValueError(  # of one the weight is always 1, and its router would learn nothing
            f"--upcycle-top-k must be from 2 to --upcycle {args.upcycle}, not {args.upcycle_top_k}"
        )
    if args.upcycle is not None and args.init is None and not args.resume:
        raise ValueError("--upcycle needs --init, the dense model that the experts are copies of")


def parse_sizes(args: argparse.Namespace) -> None:
    """--recompute as a mode or a number of bytes, --loss-chunk as a number or None (auto)."""
    if args.recompute not in ("none", "attention", "selective", "full", "sqrt"):
        args.recompute = parse_bytes(args.recompute)
    if args.loss_chunk == "auto":
        args.loss_chunk = None
    elif args.loss_chunk.isdecimal():
        args.loss_chunk = int(args.loss_chunk)
    else:
        raise ValueError(f"--loss-chunk {args.loss_chunk}: give a number of rows, or auto")


def check_memory_flags(args: argparse.Namespace) -> None:
    """ValueError for flags of memory, optimizers and dtypes that exclude each other."""
    alone = (("--decay-steps", args.lr_schedule == "wsd", "--lr-schedule wsd"),
             ("--memory-checkpoint-dir", args.memory_checkpoint_every is not None, "--memory-checkpoint-every"))  # fmt: skip
    for given, there, needed in alone:
        if given in args.given and not there:
            raise ValueError(f"{given} goes with {needed}; give both, or leave it out")
    warm = (args.warmup_steps or 0) + (args.decay_steps or 0)
    if warm > args.steps:
        raise ValueError(f"--warmup-steps and --decay-steps are {warm} steps, more than --steps {args.steps}")
    if args.min_lr_factor > 1:
        raise ValueError(f"--min-lr-factor is a part of --lr, from 0 to 1, not {args.min_lr_factor}")
    if args.offload is not None and args.offload != "cpu" and args.offload.lower() in ("", "cpu"):
        raise ValueError(f"--offload {args.offload}: give cpu, or a folder")
    if args.loss_chunk == 0 and args.output_z_loss:
        raise ValueError("--output-z-loss is the chunked loss's; leave --loss-chunk 0 out")
    if args.optimizer_in_backward and args.grad_clip:
        raise ValueError(
            "--optimizer-in-backward steps before the gradient's norm is known; give --grad-clip 0"
        )
    if args.optimizer_in_backward and (args.offload or args.dtype == "fp16"):
        other = "--offload" if args.offload else "--dtype fp16"
        raise ValueError(f"--optimizer-in-backward and {other} exclude each other; choose one")
    if args.optimizer == "muon" and (args.offload or args.optimizer_in_backward):
        raise ValueError(
            "--optimizer muon is of whole matrices at once: no --offload, nor in backward"
        )
    if args.mup_base is not None and args.optimizer != "adamw":
        raise ValueError("--mup-base has the rates of Adam; leave --optimizer out")
    if args.optimizer_in_backward and args.memory_checkpoint_every is not None:
        raise ValueError(
            "--optimizer-in-backward is never between two steps; leave --memory-checkpoint-every out"
        )
    if args.param_dtype == "bf16" and args.pp > 1:
        raise ValueError("--param-dtype bf16 would round a tied head's copies apart; leave --pp out")
    if args.param_dtype == "bf16" and (args.optimizer != "adamw" or args.offload):
        raise ValueError("--param-dtype bf16 is AdamW's, whole in memory: no --optimizer, no --offload")
    if args.param_dtype == "bf16" and args.dtype in ("fp16", "fp32"):
        raise ValueError("--param-dtype bf16 goes with products in bf16; leave --dtype out")


def parse_bytes(text: str) -> int:
    """8e9, 500M or 12G as a number of bytes."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    digits, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    try:
        return int(float(digits) * unit)
    except (ValueError, OverflowError):
        raise ValueError(
            f"--recompute {text}: give none, attention, selective, full, sqrt or a number of bytes"
        ) from None


def validate_diloco_flags(args: argparse.Namespace, shares: int) -> None:
    """ValueError for flags of --diloco that do not fit each other, or a batch of which a worker's
    part is `shares` ranks'."""
    given = args.given & {flag(k) for k in SAVED if k.startswith(("diloco_", "outer_"))}
    if args.diloco is None and given:
        raise ValueError(f"{min(given)} goes with --diloco; give both, or leave it out")
    if args.diloco is None:
        return
    if args.diloco_rendezvous is None:
        raise ValueError("--diloco needs --diloco-rendezvous, where workers find each other")
    if not 0 <= args.diloco_worker < args.diloco_workers:
        raise ValueError(
            f"--diloco-worker must be from 0 to {args.diloco_workers - 1}, not {args.diloco_worker}"
        )
    if not 0 <= args.outer_momentum < 1:
        raise ValueError(f"--outer-momentum must be from 0 to 1, not {args.outer_momentum}")
    if args.steps % args.diloco:
        raise ValueError(f"--steps {args.steps} must be a multiple of --diloco {args.diloco}")
    if args.batch_size % (args.diloco_workers * shares):
        raise ValueError(
            f"--batch-size {args.batch_size} must be a multiple of the {args.diloco_workers} "
            f"workers x {shares} ranks of one with batches of their own"
        )
    for name in ("task", "lora", "offload", "optimizer_in_backward", "memory_checkpoint_every"):
        if getattr(args, name) not in (None, False, "text"):
            raise ValueError(f"--diloco goes with plain training; leave {flag(name)} out")


def resolve_expert_flags(args: argparse.Namespace, config: ModelConfig) -> None:
    """The default of --aux-loss; ValueError for flags that a dense model has no use for."""
    asked = [name for name in LOSSES if getattr(args, name)] + ["ep"] * (args.ep > 1)
    if asked and not config.moe_layers:
        raise ValueError(f"{flag(asked[0])}: the model has no mixture of experts; leave it out")
    for given, needed in (
        ("--ep-chunks", "--ep"), ("--ep-node-size", "--ep"), ("--upcycle-top-k", "--upcycle"),
        ("--cp-method", "--cp"), ("--cp-ulysses", "--cp"), ("--no-sequence-parallel", "--tp"),
        ("--async-tp", "--tp"),
    ):  # fmt: skip
        if given in args.given and needed not in args.given:
            raise ValueError(f"{given} goes with {needed}; give both, or leave it out")
    if args.resume and args.upcycle is not None and not args.auto:
        raise ValueError("--upcycle starts a run; with --resume leave it out")
    if args.aux_loss is None:  # a run that is older than the flag had none
        uneven = config.moe_layers and not config.correction_bias and not args.resume
        args.aux_loss = 0.01 if uneven else 0.0


def resolve_tuning_flags(args: argparse.Namespace) -> None:
    """ValueError for what --task and --lora cannot go with; their defaults for --lr."""
    grpo = {"--kl", "--num-generations", "--reward", "--max-new-tokens"} & args.given
    if grpo and args.task != "grpo" and not args.resume:
        raise ValueError(f"{min(grpo)} goes with --task grpo; give both, or leave it out")
    if "--beta" in args.given and args.task != "dpo" and not args.resume:
        raise ValueError("--beta goes with --task dpo; give both, or leave it out")
    if args.task in ("dpo", "grpo"):
        for other in ("--pack", "--workers", "--loss-chunk", "--output-z-loss", "--loss-spike-sigma"):
            if other in args.given:
                raise ValueError(f"--task {args.task} has no use for {other}; leave it out")
    before = args.resume or args.export is not None
    if {"--lora-alpha", "--lora-merged"} & args.given and args.lora is None and not before:
        raise ValueError("--lora-alpha and --lora-merged go with --lora; give both")
    tuned = "--lora" if args.lora else f"--task {args.task}" if args.task != "text" else ""
    if not tuned:
        return
    if args.init is None and not args.resume:
        raise ValueError(f"{tuned} needs --init, the model to begin with")
    if args.task != "text" and not args.data and not args.resume:
        raise ValueError(f"{tuned} needs --data, a JSONL file (see --help)")
    for name, most in (("tp", 1), ("pp", 1), ("cp", 1), ("ep", 1)):
        if getattr(args, name) > most and (args.lora or args.task in ("dpo", "grpo")):
            raise ValueError(f"{tuned} is for whole models on every rank; leave {flag(name)} out")
    if args.lora and (args.qat or args.fp8 or args.upcycle or args.train_draft_head):
        raise ValueError("--lora leaves the model's own products; no --fp8, --qat, --upcycle")
    if args.task == "grpo" and args.zero and not args.distributed_optimizer:
        raise ValueError("--task grpo generates on whole weights; leave --zero out")
    if args.task == "dpo" and (args.batch_size % 2 or args.micro_batch_size % 2):
        raise ValueError("--task dpo has two rows for a pair: give even batch sizes")
    if args.task == "grpo" and args.batch_size % args.num_generations:
        raise ValueError(f"--batch-size must be a multiple of --num-generations {args.num_generations}")
    if "--lr" not in args.given and not args.resume:
        args.lr = TUNING_LR["lora" if args.lora else args.task]


def resolve_draft_head_flags(args: argparse.Namespace) -> None:
    """ValueError for what --train-draft-head cannot go with; its own default for --lr."""
    if not args.train_draft_head:
        return
    if args.init is None:
        raise ValueError("--train-draft-head needs --init, the model that the head is to draft for")
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
    others += ("--recompute", "--optimizer-in-backward", "--memory-checkpoint-every", "--mup-base", "--grad-clip")
    others += ("--optimizer", "--lr-schedule", "--warmup-steps", "--decay-steps", "--min-lr-factor", "--weight-decay")
    for other in ("--model", *others, *map(flag, LOSSES)):
        if other in args.given:
            raise ValueError(f"--train-draft-head trains no model; leave {other} out")
    if args.resume:
        raise ValueError("--resume: a draft head trains in minutes; start anew in another --out")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("--train-draft-head runs in one process; start it without torchrun")
    if args.seq_len < NUM_DRAFT_TOKENS + 2:
        raise ValueError(f"--seq-len must be at least {NUM_DRAFT_TOKENS + 2} with --train-draft-head")
    if "--lr" not in args.given:
        args.lr = DRAFT_LR


def flag(name: str) -> str:
    """As it stands on the command line."""
    return "--" + name.replace("_", "-")
