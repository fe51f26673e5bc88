"""The configuration of train.py: every setting, and which settings go together.

A field of TrainConfig is a flag, or a rarer setting of --set (flags.py). REQUIRES and EXCLUDES say
which settings go together; what depends on the ranks or the model is checked in parallelize.py
and pipeline_model.py. Every mistake is one line that names the setting and the fix.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model import CONFIGS, ModelConfig
from training.rank_env import world_size
from parallelism.schedules import LOOPED, SCHEDULES
from training.flags import Settings, check_excludes, check_limits, check_requires, flag, parse
from training.flags import parse_bytes, rare
from training.low_precision import RECIPES

DRAFT_HEAD = "draft_head.safetensors"  # file in OUT of a trained draft head
NUM_DRAFT_TOKENS = 4  # consecutive tokens drafted in the validation of a draft head
TASK_LR = {"lora": 2e-4, "sft": 2e-5, "dpo": 1e-6, "grpo": 1e-5, "draft-head": 1e-2}
RECOMPUTE = ("none", "attention", "selective", "full", "sqrt")
# fmt: off


@dataclass
class TrainConfig(Settings):
    """Every setting of a run: a flag of its own, or --set NAME=VALUE for the rarer ones."""

    # run
    out: Path = flag(Path("runs/stdlib"), "folder of the run")
    model: str = flag("small", f"a config.json, or {', '.join(CONFIGS)}", metavar="CONFIG")
    init: Path | None = flag(None, "start from this checkpoint and its tokenizer", metavar="DIR")
    resume: str | None = flag(
        None, "continue the run in --out; auto: start it if nothing was saved yet",
        nargs="?", const="yes", choices=("yes", "auto"))
    steps: int = flag(500, "total number of steps", "positive")
    seed: int = flag(0, "seed of weights and batches")
    batch_size: int = flag(8, "sequences per step over all ranks", "positive")
    micro_batch_size: int = flag(2, "sequences per forward pass and rank", "positive")
    seq_len: int = flag(512, "tokens per sequence", "positive")
    device: str | None = flag(None, "default: cuda if available, else cpu")
    attention: str = flag(
        "sdpa", "flash: attention.py's kernels, slower on a CPU", choices=("sdpa", "flash"))
    compile: bool = flag(False, "torch.compile the model")

    # output and failures
    eval_every: int = flag(100, "steps between validations", "positive", metavar="STEPS")
    save_every: int = flag(100, "steps between checkpoints", "positive", metavar="STEPS")
    keep_latest_k: int = flag(2, "number of checkpoints to keep", "positive", metavar="N")
    memory_checkpoint_every: int | None = flag(
        None, "steps between checkpoints to the memory of this node and a peer (never)",
        "positive", metavar="STEPS")
    export: str | None = flag(
        None, "write the newest checkpoint as a Hugging Face folder, DIR or OUT itself, and exit",
        nargs="?", const="", metavar="DIR")
    plot: bool = flag(False, "plot loss, throughput and expert load to OUT/metrics.png and exit")
    profile: int | None = flag(
        None, "profile the STEP-th step of this process to OUT/profile (3)", "positive",
        nargs="?", const=3, metavar="STEP")
    tensorboard: bool = rare(False, "also log to OUT/tensorboard")
    memory_checkpoint_dir: Path | None = rare(None, "in-memory folder, local to each node")
    hang_timeout: float = rare(
        600.0, "seconds until a stuck step (10 times that: the first) ends the run", "positive")
    loss_spike_sigma: float = rare(
        10.0, "skip batches whose loss is so many deviations above the mean", "0 or more")
    max_skipped_batches: int = rare(10, "skipped batches in a row that stop the run", "positive")

    # data
    data: list[str] | None = flag(
        None, 'folder of text files, JSONL with "text", or one text file, whose documents are '
        "pieces of up to 8192 characters, cut after a line (default: the standard library); repeat "
        "it to mix sources by weight (1)", action="append", metavar="PATH[=WEIGHT]")
    pack: bool = flag(False, "pack whole documents into rows, each attending only to itself")
    workers: int = flag(
        0, "processes that tokenize into shards while training starts", "0 or more", metavar="N")

    # task
    task: str = flag(
        "text", 'JSONL of --data: sft {"messages": [...]}, trains on the assistant turns without '
        '"weight": 0; dpo {"prompt", "chosen", "rejected"}; grpo {"prompt", "answer"}; all with '
        '"tools" for the chat template. draft-head: for speculative decoding with the frozen '
        '--init', choices=("text", "sft", "dpo", "grpo", "draft-head"))
    lora: int | None = flag(
        None, "train only LoRA adapters of this rank", "positive", metavar="RANK")
    lora_jobs: Path | None = flag(
        None, "train several LoRA adapters in one batch, one per line of this JSONL: "
        '{"name", "data": [PATH], "rank"} and "alpha", "lr", "seed", "adapter" (lora_jobs.py)',
        metavar="FILE")
    reward: str = flag(
        "exact", "grpo: exact, number, prefix (grpo.py), or FILE.py:FUNCTION")
    lora_alpha: float | None = rare(None, "scale adapters by this / rank (2 x rank)", "positive")
    lora_merged: bool = rare(False, "merge adapters in exports")
    beta: float = rare(0.1, "dpo: penalty for leaving the model of --init", "positive")
    kl: float = rare(0.0, "grpo: coefficient of the KL divergence from --init", "0 or more")
    num_generations: int = rare(8, "grpo: completions per prompt", "2 or more")
    max_new_tokens: int = rare(64, "grpo: tokens per completion", "positive")

    # optimizer
    optimizer: str = flag(
        "adamw", "muon: Muon for the matrices of blocks, AdamW for the rest",
        choices=("adamw", "muon", "sgd"))
    lr: float = flag(
        2e-3, "peak learning rate; " + ", ".join(f"{k}: {x:g}" for k, x in TASK_LR.items()),
        "positive")
    lr_schedule: str = flag(
        "cosine", "learning rate after warm-up; wsd: warm-up, stable, decay",
        choices=("cosine", "linear", "wsd", "constant"))
    warmup_steps: int | None = flag(
        None, "linear warm-up (5%% of --steps, at most 500)", "0 or more", metavar="STEPS")
    weight_decay: float = flag(0.1, "of matrices only", "0 or more")
    grad_clip: float = flag(1.0, "largest norm of the gradient; 0: any", "0 or more")
    decay_steps: int | None = rare(None, "final decay of wsd (20%% of --steps)", "positive")
    min_lr_factor: float = rare(0.1, "final learning rate, a fraction of --lr", "0 or more")
    mup_base: int | None = rare(None, "muP: --lr was tuned at this width", "positive")
    optimizer_in_backward: bool = rare(False, "update in the backward pass, free each gradient")

    # precision and memory
    dtype: str = flag(
        "auto", "dtype of the matmuls (autocast). auto: bf16 if the hardware supports it, else "
        "fp32; fp16 uses dynamic loss scaling", choices=("auto", "bf16", "fp16", "fp32"))
    param_dtype: str = flag(
        "fp32", "dtype of the parameters; bf16: no fp32 copy, AdamW with stochastic rounding",
        choices=("fp32", "bf16"))
    fp8: str | None = flag(
        None, "FP8 matmuls in linear layers; slower, with the same numbers, on hardware without",
        choices=tuple(RECIPES))
    qat: str | None = flag(
        None, "quantization-aware training for generate.py --quantize", choices=("int8", "int4"))
    recompute: str | int = flag(
        "none", "activations recomputed in the backward pass. attention: those of attention; "
        "selective: all but every other matmul's; full: of whole blocks; sqrt: of sqrt(layers) "
        "groups of blocks; BYTES (8e9, 500M, 12G): as few as fit a micro-batch into that budget",
        metavar="|".join((*RECOMPUTE, "BYTES")))
    offload: str | None = flag(
        None, "keep master weights and optimizer states in host memory or memory-mapped files",
        metavar="cpu|FOLDER")
    mlp_chunk: int | None = rare(
        None, "tokens that a feed-forward computes at a time, recomputed in the backward pass",
        "1 or more")
    loss_chunk: int | None = rare(
        None, "rows of logits computed at a time; 0: all (chunks if they exceed 512 MiB)",
        "0 or more")
    output_z_loss: float = rare(0.0, "coefficient of log(sum exp(logits)) ** 2", "0 or more")

    # mixture of experts
    upcycle: int | None = flag(
        None, "turn each MLP of --init into an MoE layer of E copies", "positive", metavar="E")
    aux_loss: float | None = flag(
        None, "Switch load balancing loss (0 with a learned expert bias, else 0.01)", "0 or more",
        metavar="COEF")
    experts: str = rare(
        "grouped", "grouped matmuls of moe.py, or a loop over experts", choices=("grouped", "loop"))
    seq_aux_loss: float = rare(0.0, "DeepSeek-V3 sequence-wise balancing loss", "0 or more")
    router_z_loss: float = rare(0.0, "ST-MoE loss that keeps router logits small", "0 or more")
    upcycle_top_k: int = rare(2, "experts per token of the upcycled model", "positive")

    # parallelism
    dp: int | None = flag(
        None, "data-parallel degree (world size / (pp x tp x cp))", "positive", metavar="N")
    dp_replicate: int = flag(1, "replicas of the sharded model: HSDP", "positive", metavar="N")
    zero: int = flag(
        0, "ZeRO stage, by torch's fully_shard: shard the optimizer states (1), also the gradients "
        "(2), also the parameters (3) over data-parallel ranks", choices=(0, 1, 2, 3))
    tp: int = flag(1, "tensor-parallel degree", "positive", metavar="N")
    async_tp: bool = flag(False, "with --tp: overlap communication with matmuls")
    cp: int = flag(1, "context-parallel degree", "positive", metavar="N")
    cp_ulysses: int = flag(
        1, "ranks of --cp that shard heads instead of the sequence", "positive", metavar="N")
    ep: int = flag(1, "expert-parallel degree; divides dp x cp", "positive", metavar="N")
    pp: int = flag(1, "pipeline-parallel degree", "positive", metavar="N")
    pp_schedule: str = flag(
        "1f1b", "python parallelism/schedules.py --schedule NAME draws it",
        choices=tuple(SCHEDULES), metavar="NAME")
    dry_run: int | None = flag(
        None, "do not train: print the memory and communication of a step on rank 0 of RANKS (1)",
        "positive", nargs="?", const=1, metavar="RANKS")
    sequence_parallel: bool = rare(True, "with --tp: shard norms and residuals by position")
    cp_method: str = rare(
        "zigzag", "ring attention, zigzag or striped; all-gather of k and v; or Ring Self-"
        "Attention, which keeps all scores (parallelism/ring_self_attention.py)",
        choices=("zigzag", "striped", "all-gather", "ring-self-attention"))
    ep_node_size: int | None = rare(
        None, "ranks per node: tokens are sent once per node", "positive")
    ep_chunks: int = rare(1, "chunks of tokens whose all-to-all and experts overlap", "positive")
    ep_quantized: str | None = rare(
        None, "send tokens in int8 or fp8, a scale per token; not exact", choices=("int8", "fp8"))
    virtual_stages: int | None = rare(
        None, f"stages per rank, with {' and '.join(LOOPED)} (2)", "positive")
    pp_layers: str | None = rare(None, "layers of each stage, N,N,... (balanced by FLOPs)")
    pp_recompute: str | None = rare(None, "stages with full recomputation, S,S,...")
    distributed_optimizer: bool = rare(False, "--zero 1 and 2 by zero.py, not fully_shard")
    zero_quantized: bool = rare(False, "ZeRO++: int8 all-gather, int4 reduce-scatter; not exact")
    hpz_size: int | None = rare(
        None, "ranks per node: --zero 3 gathers backward within nodes (ZeRO++ hpZ)", "positive")

    # fault-tolerant groups: each is a program of its own with its own --out
    replica_groups: int | None = flag(
        None, "data-parallel groups that may die and come back, each with its share of every "
        "batch (torchft)", "positive", metavar="N")
    replica_group: int = flag(0, "index of this group", "0 or more", metavar="I")

    # DiLoCo: each worker is a program of its own with its own --out
    diloco: int | None = flag(
        None, "synchronize with the other workers every H steps", "positive", metavar="H")
    diloco_rendezvous: str | None = flag(
        None, "a folder shared by all workers, or HOST:PORT of python parallelism/diloco.py "
        "--serve", metavar="WHERE")
    diloco_workers: int = flag(1, "workers that split each batch", "positive", metavar="N")
    diloco_worker: int = flag(0, "index of this worker", "0 or more", metavar="I")
    diloco_timeout: float = rare(60.0, "seconds to wait for a worker", "positive")
    outer_lr: float = rare(0.7, "learning rate of the outer SGD", "positive")
    outer_momentum: float = rare(0.9, "Nesterov momentum of the outer SGD", "0 or more")

    auto: bool = False  # --resume auto
    # fmt: on

    @property
    def batch_share(self) -> tuple[int, int]:
        """(the number of jobs that split each batch, the index of this one)."""
        if self.replica_groups is not None:
            return self.replica_groups, self.replica_group
        return self.diloco_workers, self.diloco_worker

    @property
    def streamed(self) -> bool:
        """Whether rows are read from shards that are tokenized as the run goes."""
        return self.pack or self.workers > 0 or len(self.data or ()) > 1

    def common_settings(self) -> dict[str, Any]:
        """By flag, those that must be the same on all ranks: all that is not PER_RANK."""
        names = (name for name in self.flags() if name not in PER_RANK)
        values = {self.shown(name): getattr(self, name) for name in names}
        return values | {"whether --offload is given": self.offload is not None}

    def settings(self) -> dict[str, Any]:
        """What a checkpoint stores and --resume restores, as JSON."""
        values = {SAVED_AS.get(name, name): getattr(self, name) for name in (*FIXED, *RESTORED)}
        values["cwd"] = os.getcwd()  # of relative paths in data
        return {key: str(x.resolve()) if isinstance(x, Path) else x for key, x in values.items()}

    def changed_settings(self, run: Mapping[str, Any]) -> list[str]:
        """The FIXED fields that differ from a saved run's. One that the run lacks (saved before the
        field existed) counts only if it is given."""
        now, keys = self.settings(), {name: SAVED_AS.get(name, name) for name in FIXED}
        now["data"] = absolute_paths(self.data, now["cwd"])
        run = {**run, "data": absolute_paths(run.get("data"), run.get("cwd", now["cwd"]))}
        known = (n for n, key in keys.items() if key in run or n in self.given)
        return [n for n in known if now[keys[n]] != run.get(keys[n])]


GROUPS = {  # the first field of each group of --help
    "out": "run", "eval_every": "output and failures", "data": "data", "task": "task",
    "optimizer": "optimizer", "dtype": "precision and memory", "upcycle": "mixture of experts",
    "dp": "parallelism", "replica_groups": "replica groups", "diloco": "DiLoCo",
}  # fmt: skip

# Settings that --resume takes from the checkpoint. FIXED ones determine the result and cannot be
# changed; the others can (another micro-batch size changes the order of a sum: rounding only).
FIXED = """
    seed batch_size seq_len lr data dtype fp8 qat aux_loss seq_aux_loss router_z_loss diloco
    outer_lr outer_momentum param_dtype optimizer lr_schedule warmup_steps decay_steps min_lr_factor
    weight_decay grad_clip mup_base output_z_loss pack task lora beta lora_alpha kl num_generations
    reward max_new_tokens init lora_jobs model
""".split()
RESTORED = """
    steps micro_batch_size save_every eval_every compile attention experts diloco_rendezvous
    diloco_workers diloco_worker diloco_timeout keep_latest_k loss_spike_sigma max_skipped_batches
    memory_checkpoint_every memory_checkpoint_dir hang_timeout workers lora_merged
    replica_groups replica_group
""".split()
# Settings that may differ between ranks. All others change the numbers or the collective calls.
PER_RANK = (
    *"out data init lora_jobs model reward".split(),  # the content is compared (train.py)
    *"device memory_checkpoint_dir offload".split(),  # places of one machine
    *"profile tensorboard hang_timeout".split(),  # what one process observes
)
SAVED_AS = {  # keys in checkpoints of fields that once had another name
    "param_dtype": "weights", "lr_schedule": "schedule", "warmup_steps": "warmup",
    "decay_steps": "decay", "min_lr_factor": "lr_end", "grad_clip": "clip",
    "output_z_loss": "logit_z_loss", "router_z_loss": "z_loss", "seq_aux_loss": "sequence_loss",
    "num_generations": "group", "keep_latest_k": "keep", "loss_spike_sigma": "spike",
    "max_skipped_batches": "patience", "memory_checkpoint_every": "mirror_every",
    "memory_checkpoint_dir": "mirror_at", "diloco_rendezvous": "diloco_at",
}  # fmt: skip

# setting, the setting that it needs
REQUIRES = [
    ("upcycle", "init"), ("upcycle_top_k", "upcycle"),
    ("task=sft|dpo|grpo|draft-head", "init"), ("task=dpo|grpo", "data"), ("lora", "init"),
    ("task=sft", "data lora_jobs"), ("lora_jobs", "init"),
    ("lora_alpha", "lora"), ("lora_merged", "lora"), ("beta", "task=dpo"),
    *((name, "task=grpo") for name in ("kl", "num_generations", "reward", "max_new_tokens")),
    ("decay_steps", "lr_schedule=wsd"), ("mup_base", "optimizer=adamw"),
    ("optimizer_in_backward", "grad_clip=0.0"), ("param_dtype=bf16", "optimizer=adamw"),
    ("memory_checkpoint_dir", "memory_checkpoint_every"),
    ("dp_replicate", "zero"), ("distributed_optimizer", "zero=1|2"), ("zero_quantized", "zero"),
    ("hpz_size", "zero=3"), ("async_tp", "tp"), ("sequence_parallel", "tp"), ("cp_method", "cp"),
    ("cp_ulysses", "cp"), ("ep_node_size", "ep"), ("ep_chunks", "ep"),
    ("ep_quantized", "ep"),
    *((name, "pp") for name in ("pp_schedule", "virtual_stages", "pp_layers", "pp_recompute")),
    *((name, "diloco") for name in ("diloco_rendezvous", "diloco_workers", "diloco_worker")),
    *((name, "diloco") for name in ("diloco_timeout", "outer_lr", "outer_momentum")),
    ("diloco", "diloco_rendezvous"), ("replica_group", "replica_groups"),
]  # fmt: skip

# setting, settings that it cannot be combined with, why
EXCLUDES = [
    ("export", "plot dry_run", "each is a command"),
    ("plot", "dry_run", "each is a command"),
    ("init", "model", "the model is that of --init"),
    ("fp8", "qat", "both replace the matmuls"),
    ("resume=yes", "upcycle", "upcycling starts a run"),
    ("lora", "qat fp8 upcycle", "adapters train on frozen, unchanged matmuls"),
    ("mlp_chunk", "tp pp fp8 qat task=draft-head", "it splits the tokens of each matmul"),
    ("lora", "tp pp cp ep", "every rank needs the whole model"),
    ("lora_jobs", "lora data workers", "each job has its own"),
    ("lora_jobs", "task=dpo|grpo|draft-head", "jobs train on text and conversations"),
    ("lora_jobs", "qat fp8 upcycle", "adapters train on frozen, unchanged matmuls"),
    ("lora_jobs", "tp pp cp ep zero", "every rank needs the whole model"),
    ("lora_jobs", "compile optimizer=muon optimizer_in_backward offload diloco replica_groups "
     "mup_base dry_run output_z_loss", "the layers of each job change from batch to batch"),
    ("task=dpo|grpo", "tp pp cp ep", "every rank needs the whole model"),
    ("task=dpo|grpo", "pack workers loss_chunk output_z_loss", "it has its own rows and loss"),
    ("task=dpo|grpo", "loss_spike_sigma", "its loss may be 0"),
    ("task=draft-head", "fp8 qat upcycle lora recompute param_dtype aux_loss", "frozen model"),
    ("task=draft-head", "seq_aux_loss router_z_loss diloco mup_base pack", "the head has none"),
    ("optimizer=muon", "offload optimizer_in_backward", "it updates whole matrices"),
    ("optimizer=muon", "zero tp cp ep pp", "it updates whole matrices"),
    ("optimizer_in_backward", "offload dtype=fp16", "it has no separate step"),
    ("optimizer_in_backward", "memory_checkpoint_every", "it is never between two steps"),
    ("param_dtype=bf16", "offload dtype=fp16|fp32", "stochastic rounding replaces fp32 copies"),
    ("param_dtype=bf16", "pp", "stochastic rounding makes the copies of a tied head differ"),
    ("loss_chunk=0", "output_z_loss", "the z-loss is part of the chunked loss"),
    ("distributed_optimizer", "tp ep dp_replicate pp", "its buckets are data-parallel only"),
    ("distributed_optimizer", "offload param_dtype=bf16 memory_checkpoint_every zero_quantized",
     "its buckets hold the optimizer states"),
    ("fp8", "tp", "its scales are of full matrices"),
    ("qat", "tp", "its scales are of full matrices"),
    ("async_tp", "sequence_parallel=False", "it overlaps the sequence's all-gathers"),
    ("cp", "pack", "documents would be split over ranks"),
    ("cp", "seq_aux_loss", "it needs whole sequences"),
    ("pp", "dtype=fp16", "pipelines have no loss scaling"),
    ("pp", "recompute=sqrt", "groups of blocks would span stages"),
    ("pp", "loss_chunk output_z_loss", "the last stage computes whole logits"),
    ("qat", "loss_chunk output_z_loss", "the head is fake-quantized"),
    ("hpz_size", "ep pp", "weights are gathered within nodes by FSDP alone"),
    ("diloco", "task=sft|dpo|grpo lora offload", "workers exchange full weights on text"),
    ("diloco", "optimizer_in_backward memory_checkpoint_every", "rounds are between steps"),
    ("replica_groups", "diloco", "both split the batches"),
    ("replica_groups", "task=dpo|grpo|draft-head distributed_optimizer offload",
     "groups average whole gradients"),
    ("replica_groups", "optimizer_in_backward",
     "groups average the gradients of whole steps"),
    ("dry_run", "resume compile device pp diloco replica_groups pack offload distributed_optimizer",
     "it models plain steps on fake tensors"),
    ("dry_run", "task=sft|dpo|grpo|draft-head", "it models plain steps on fake tensors"),
]  # fmt: skip


def parse_args(argv: list[str]) -> TrainConfig:
    """The config of a command line. ValueError for values and combinations that cannot work; with
    --resume, what a setting requires is checked once the run's settings are restored."""
    text = "train a Llama- or DeepSeek-style model on text, in one process or under torchrun"
    config = parse(TrainConfig, argv, "train.py", text, GROUPS)
    config.auto = config.resume == "auto"
    if config.recompute not in RECOMPUTE:
        config.recompute = recompute_bytes(config.recompute)
    check_limits(config)
    check_excludes(config, EXCLUDES)
    if not (config.resume or config.export is not None or config.plot):
        check_combinations(config)
    return config


def absolute_paths(data: list[str] | None, cwd: str) -> list[str] | None:
    """--data as given in the working directory `cwd`; weights are kept."""
    return data and [os.path.normpath(os.path.join(cwd, text)) for text in data]


def recompute_bytes(text: str) -> int:
    """The bytes of --recompute."""
    try:
        return parse_bytes(text)
    except ValueError:
        raise ValueError(
            f"--recompute {text}: must be none, attention, selective, full, sqrt or a number of "
            "bytes"
        ) from None


def check_combinations(config: TrainConfig) -> None:
    """Set the default learning rate of the task; ValueError for settings that do not fit."""
    check_requires(config, REQUIRES)
    check_excludes(config, EXCLUDES)
    c = config
    if not 0 <= c.seed < 2**32:
        raise ValueError(f"--seed must be from 0 to 2**32 - 1, not {c.seed}")
    if c.min_lr_factor > 1 or c.outer_momentum >= 1:
        name = "outer_momentum" if c.outer_momentum >= 1 else "min_lr_factor"
        raise ValueError(f"{c.shown(name)} must be from 0 to 1, not {getattr(c, name)}")
    if c.offload not in (None, "cpu") and c.offload.lower() in ("", "cpu"):
        raise ValueError(f"--offload {c.offload}: must be cpu or a folder")
    if c.task == "grpo" and c.zero and not c.distributed_optimizer:
        raise ValueError(
            "--task grpo cannot be combined with --zero: it generates with unsharded weights"
        )
    multiples = []
    if c.task == "dpo":
        multiples += [("batch_size", 2, "2 with --task dpo: a pair is two rows")]
        multiples += [("micro_batch_size", 2, "2 with --task dpo")]
    if c.task == "grpo":
        multiples += [("batch_size", c.num_generations, "--set num_generations")]
    if c.diloco is not None:
        multiples += [("steps", c.diloco, f"--diloco {c.diloco}")]
    for name, factor, needed in multiples:
        if getattr(c, name) % factor:
            raise ValueError(f"{c.shown(name)} {getattr(c, name)} must be a multiple of {needed}")
    if c.task == "draft-head" and c.seq_len < NUM_DRAFT_TOKENS + 2:
        least = NUM_DRAFT_TOKENS + 2
        raise ValueError(f"--task draft-head requires --seq-len {least} or more, not {c.seq_len}")
    if c.task == "draft-head" and world_size() > 1:
        raise ValueError("--task draft-head runs in one process; start it without torchrun")
    for name in ("device", "model"):
        if getattr(c, name) == "":
            raise ValueError(f"--{name} is empty; give a name, or leave it out")
    if (c.profile or 0) > c.steps:
        raise ValueError(f"--profile {c.profile} is after the last step, --steps {c.steps}")
    parts, part = c.batch_share
    if part >= parts:
        name = "--replica-group" if c.replica_groups is not None else "--diloco-worker"
        raise ValueError(f"{name} must be from 0 to {parts - 1}, not {part}")
    if c.upcycle is not None and not 2 <= c.upcycle_top_k <= c.upcycle:
        raise ValueError(  # with top-1 the gate weight is always 1 and the router cannot learn
            f"--set upcycle_top_k must be from 2 to --upcycle {c.upcycle}, not {c.upcycle_top_k}"
        )
    if (total := (c.warmup_steps or 0) + (c.decay_steps or 0)) > c.steps:
        raise ValueError(
            f"--warmup-steps and --set decay_steps are {total} steps, more than --steps {c.steps}"
        )
    task = "lora" if c.lora or c.lora_jobs else c.task
    if "lr" not in c.given and task in TASK_LR and not c.resume:
        c.lr = TASK_LR[task]


def check_experts(config: TrainConfig, model: ModelConfig) -> None:
    """Set the default of --aux-loss; ValueError for MoE settings of a dense model."""
    for name in ("aux_loss", "seq_aux_loss", "router_z_loss", "ep"):
        if not model.moe_layers and getattr(config, name) and config.is_on(name):
            raise ValueError(f"{config.shown(name)} requires a model with MoE layers")
    if config.aux_loss is None:  # runs saved before this flag existed had no such loss
        unbalanced = model.moe_layers and not model.correction_bias and not config.resume
        config.aux_loss = 0.01 if unbalanced else 0.0
