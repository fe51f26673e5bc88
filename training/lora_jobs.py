"""Several LoRA fine-tuning jobs in one batch, over one frozen base model.

    python train.py --init DIR --lora-jobs JOBS.jsonl --batch-size 16 --out runs/jobs

A line of JOBS.jsonl is a job: {"name": "sql", "data": ["sql.txt"], "rank": 8}, and optionally
"alpha" (2 x rank), "lr" (--lr), "seed" (--seed) and "adapter", a folder of PEFT's format to start
from. The jobs share --steps, the schedule and everything else. Each has an equal share of
--batch-size, and its adapter ends up in OUT/NAME, beside its tokens.

Fine-tuning jobs of one base model each need few rows per step, and alone each would hold a copy of
the base model and run it on a small batch. Ymir (Gao et al., ICS 2024) merges them: the batch has
the rows of all jobs, the frozen matmuls run once over all rows, and only the low-rank factors are
per job,

    y[rows of job j] = x W^T + alpha_j / rank_j * (x A_j^T) B_j^T

The loss is the *sum* of the jobs' mean losses, their parameters are disjoint, the norm of each
job's gradient is clipped alone, and each has its own learning rate. So every job gets the gradients
and the updates that it would get alone with its share of the batch (test_all.py: losses within
1e-5, adapters within 1e-3).

Gain: one base model in memory; matmuls of J times the rows, which matters where a small batch does
not use the device. Cost: two small matmuls per job, layer and micro-batch. When it loses: where one
job alone fills the device, and where jobs need different numbers of steps or lengths of rows. A
loss that is not finite skips the step of all jobs. Other differences from a run alone: a mixture of
experts is balanced over the rows of all jobs, and there is no multi-token prediction loss.
"adapter" is Ymir's transfer between tasks: a job that starts from the adapter of a related one
needs fewer steps.

Hook: the Linear swap. Part of train.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from huggingface.weights import hf_modules
from model import Attend, ModelConfig, Transformer
from training.config import TrainConfig
from training.data import decode, is_padding, json_objects
from training.dataset import Dataset, build_dataset
from training.dist_env import DistEnv, rank0_first, same_on_all_ranks
from training.lora import TARGETS, LoRALinear, make_lora_linear, read_adapters, save_adapters
from training.parallelize import ParallelDims
from training.run_folder import ANOTHER_RUN, adapter_hash, check_apart, check_output_dir
from training.run_folder import input_hash, make_folder, read_inputs, record_job
from training.step import NextToken, count_targets, validate


@dataclass(frozen=True)
class LoRAJob:
    """A line of --lora-jobs; None: the setting of the command line."""

    name: str
    data: list[str]
    rank: int
    alpha: float | None = None
    lr: float | None = None
    seed: int | None = None
    adapter: str | None = None

    def __post_init__(self):
        ok = isinstance(self.name, str) and re.fullmatch(r"[A-Za-z0-9][\w-]*", self.name)
        _check(ok, f"name must be of letters, digits, _ and -, not {self.name!r}")
        _check(self.name != "checkpoints", "name checkpoints is taken by the run's own folder")
        is_paths = isinstance(self.data, list) and all(isinstance(x, str) for x in self.data)
        _check(is_paths and self.data, f"data must be a list of paths, not {self.data!r}")
        _check(_is_number(self.rank, int), f"rank must be an integer above 0, not {self.rank!r}")
        for field_name in ("alpha", "lr"):
            value = getattr(self, field_name)
            ok = value is None or _is_number(value, (int, float))
            _check(ok, f"{field_name} must be a number above 0, not {value!r}")
        ok = self.seed is None or (type(self.seed) is int and 0 <= self.seed < 2**32)
        _check(ok, f"seed must be an integer from 0 to 2**32 - 1, not {self.seed!r}")
        ok = self.adapter is None or isinstance(self.adapter, str)
        _check(ok, f"adapter must be a folder, not {self.adapter!r}")

    @property
    def scale(self) -> float:
        return 2.0 if self.alpha is None else self.alpha / self.rank

    def config(self, shared: TrainConfig, n_jobs: int) -> TrainConfig:
        """The config that trains this job alone, in OUT/NAME, with its share of the batch."""
        own = dict(data=self.data, out=shared.out / self.name, lora=self.rank, lora_jobs=None)
        own |= {name: x for name in ("lr", "seed") if (x := getattr(self, name)) is not None}
        return replace(shared, **own, batch_size=shared.batch_size // n_jobs)


def _check(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_number(x: Any, kind: Any) -> bool:
    return isinstance(x, kind) and not isinstance(x, bool) and 0 < x < float("inf")


def read_jobs(path: Path) -> list[LoRAJob]:
    """The jobs of a file; ValueError names the line and the field."""
    jobs: dict[str, LoRAJob] = {}
    known = {f.name for f in fields(LoRAJob)}
    for where, values in json_objects(path, '"name", "data" and "rank"'):
        try:
            missing, unknown = {"name", "data", "rank"} - values.keys(), values.keys() - known
            _check(not missing, f"{', '.join(sorted(missing))} is missing")
            _check(not unknown, f"no field {', '.join(sorted(unknown))}; has {sorted(known)}")
            job = LoRAJob(**values)
            _check(job.name not in jobs, f"name {job.name} is that of an earlier line")
            adapter_hash(job.adapter)  # ValueError if there is none
        except ValueError as e:
            raise ValueError(f"--lora-jobs {where}: {e}") from None
        jobs[job.name] = job
    _check(jobs, f"--lora-jobs {path}: holds no job")
    return list(jobs.values())


def check_same_jobs(config: TrainConfig, saved: Sequence[Mapping[str, Any]]) -> None:
    """ValueError unless the jobs are those of a saved run, which a checkpoint describes: the same
    names and numbers, data and adapters of the same content, wherever they are now."""
    jobs, start = read_jobs(config.lora_jobs), f"--lora-jobs {config.lora_jobs}:"
    names, before = [job.name for job in jobs], [x["job"]["name"] for x in saved]
    fix = f"name those, {ANOTHER_RUN}"
    _check(names == before, f"{start} the jobs are {names}, but {before} in the run; {fix}")
    for job, old in zip(jobs, (LoRAJob(**x["job"]) for x in saved)):
        try:
            _check_same_job(job, old, job.config(config, len(jobs)))
        except ValueError as e:
            raise ValueError(f"{start} job {job.name}: {e}") from None


def _check_same_job(job: LoRAJob, old: LoRAJob, own: TrainConfig) -> None:
    rule = f"since the run began; restore it, {ANOTHER_RUN}"
    for name in ("rank", "alpha", "lr", "seed"):
        now, then = getattr(job, name), getattr(old, name)
        _check(now == then, f"{name} {now} has changed from {then} {rule}")
    recorded = read_inputs(own.out)
    needed = job.data != old.data or own.task == "sft"  # else its text is in OUT
    same = not needed or input_hash(own, "data") == recorded.get("data")
    _check(same, f"data {' '.join(job.data)} has changed {rule}")
    same = job.adapter == old.adapter  # of a run that is older than its hash
    if "adapter" in recorded:
        same = adapter_hash(job.adapter) == recorded["adapter"]
    _check(same, f"adapter {job.adapter or '(none)'} has changed {rule}")


# --------------------------------------------------------------------------------------------------
# The layers
# --------------------------------------------------------------------------------------------------


class LoRAJobsLinear(nn.Module):
    """x W^T + bias, and on the rows of each job its low-rank term. jobs: LoRALinears which share
    the frozen W; segments: [(job, its rows of the batch)], one list for all layers."""

    def __init__(self, jobs: Mapping[str, LoRALinear], segments: list[tuple[str, slice]]):
        super().__init__()
        # a ModuleDict has no place for some names of jobs, such as "train"
        self.jobs, self.layers, self.segments = jobs, nn.ModuleList(jobs.values()), segments

    def forward(self, x: Tensor) -> Tensor:
        base = self.layers[0]
        delta = [self.jobs[name].delta(x[rows]) for name, rows in self.segments]
        return F.linear(x, base.weight, base.bias) + torch.cat(delta)


def apply_lora_jobs_(
    model: Transformer, jobs: Sequence[LoRAJob], seed: int = 0
) -> list[tuple[str, slice]]:
    """Replace the linear layers of TARGETS, in place, and freeze all else. Returns the list of
    segments that the layers read: set it before each forward pass."""
    model.requires_grad_(False)
    segments: list[tuple[str, slice]] = []
    names = [n for n, m in model.named_modules() if n.rpartition(".")[2] in TARGETS]
    linears = {name: model.get_submodule(name) for name in names}
    for name, old in linears.items():
        make = lambda job: make_lora_linear(
            old, name, job.rank, job.scale, seed if job.seed is None else job.seed
        )
        model.set_submodule(name, LoRAJobsLinear({j.name: make(j) for j in jobs}, segments))
    for job in jobs:
        if job.adapter is not None:
            load_job_(model, job)
    return segments


def job_layers(model: nn.Module, job: str) -> dict[str, LoRALinear]:
    """The layers of one job, by the name of the linear layer that they adapt."""
    layers = model.named_modules()
    return {name: m.jobs[job] for name, m in layers if isinstance(m, LoRAJobsLinear)}


def job_parameters(model: nn.Module, job: str) -> list[nn.Parameter]:
    """The trainable parameters of one job."""
    return [p for m in job_layers(model, job).values() for p in (m.lora_a, m.lora_b)]


def one_job(model: Transformer, job: str) -> Transformer:
    """A model with the adapters of one job, which shares all tensors with `model`."""
    with torch.device("meta"):
        alone = Transformer(model.config)
    for name, layer in job_layers(model, job).items():
        alone.set_submodule(name, layer)
    return alone


@torch.no_grad()
def load_job_(model: Transformer, job: LoRAJob) -> None:
    """Load job.adapter. ValueError if its layers, rank or scale are not the job's."""
    layers, names = job_layers(model, job.name), hf_modules(one_job(model, job.name))
    shapes = {name: (layer.in_features, layer.out_features) for name, layer in layers.items()}
    rank, alpha, tensors = read_adapters(job.adapter, shapes, names.__getitem__)
    same = (rank, alpha / rank, tensors.keys()) == (job.rank, job.scale, layers.keys())
    wanted = f"has rank {rank}, alpha {alpha} and {len(tensors)} layers, not {job.rank}, "
    wanted += f"{job.scale * job.rank} and {len(layers)}"
    _check(same, f"--lora-jobs: job {job.name}: adapter {job.adapter} {wanted}")
    for name, (a, b) in tensors.items():
        layers[name].lora_a.copy_(a)
        layers[name].lora_b.copy_(b)


def save_jobs(model: Transformer, jobs: Sequence[LoRAJob], out: Path, base: str) -> None:
    """Write each job's adapter to OUT/NAME in PEFT's format."""
    for job in jobs:
        alone = one_job(model, job.name)
        save_adapters(alone, out / job.name, base, hf_modules(alone).__getitem__)


def job_groups(model: nn.Module, args: TrainConfig) -> list[dict[str, Any]]:
    """The optimizer's group of parameters of each job: its learning rate is a multiple of --lr."""
    return [
        {"params": job_parameters(model, job.name), "weight_decay": args.weight_decay,
         "scale": (job.lr or args.lr) / args.lr}
        for job in read_jobs(args.lora_jobs)
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------
# The objective
# --------------------------------------------------------------------------------------------------


@dataclass
class LoRAJobs:
    """The sum over jobs of the mean next-token loss (Objective, training/step.py). objectives: each
    job's NextToken; segments: of apply_lora_jobs_."""

    objectives: dict[str, NextToken]
    segments: list[tuple[str, slice]]
    layout: ParallelDims
    rows_of: dict[str, int] = field(default_factory=dict)  # rows of each job in the batch
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: Tensor | None = None  # (jobs,) targets of the step on all ranks

    @classmethod
    def build(
        cls, config: TrainConfig, model: nn.Module, datasets: Mapping[str, Dataset], env: DistEnv,
        layout: ParallelDims,
    ) -> LoRAJobs:  # fmt: skip
        local_ids, rest = layout.samples(config.batch_size // len(datasets)), (env, layout)
        objectives = {
            name: NextToken(data.rows, local_ids, data.validation, config.seq_len, *rest)
            for name, data in datasets.items()
        }
        layer = next(m for m in model.modules() if isinstance(m, LoRAJobsLinear))
        return cls(objectives, layer.segments, layout)

    def batch(self, step: int) -> Tensor:
        rows = {name: objective.batch(step) for name, objective in self.objectives.items()}
        self.rows_of = {name: len(x) for name, x in rows.items()}
        self.sums = {name: torch.zeros(()) for name in rows}
        return torch.cat(list(rows.values()))

    def count(self, batch: Tensor) -> Tensor:
        counts = [count_targets(x, self.layout) for x in batch.split([*self.rows_of.values()])]
        self.counts = self.layout.all_reduce_sum(torch.stack(counts))
        return torch.ones((), device=batch.device)  # the losses are divided by self.counts

    def loss(self, model: Any, micro_batch: Tensor, rows: slice, attend: Attend) -> Tensor:
        self.segments[:] = self._segments(rows)
        inputs, targets, positions = decode(micro_batch, self.layout.packed)
        padding = is_padding(micro_batch) if model.config.moe_layers else None
        hidden = model(inputs, positions, attend=attend, return_hidden=True, is_padding=padding)
        total = hidden.new_zeros((), dtype=torch.float32)
        for name, at in self.segments:
            loss = self.layout.head_loss(model, hidden[at], targets[at])
            self.sums[name] = self.sums[name].to(loss.device) + loss.detach()
            total = total + loss / self.counts[list(self.objectives).index(name)]
        return total * self.layout.dp_size  # forward_backward divides by the summed `count`

    def _segments(self, rows: slice) -> list[tuple[str, slice]]:
        """[(job, its rows of the micro-batch)] of batch[rows]."""
        segments, first = [], -rows.start
        for name, n in self.rows_of.items():
            start, stop = max(0, first), min(rows.stop - rows.start, first + n)
            if start < stop:
                segments.append((name, slice(start, stop)))
            first += n
        return segments

    @property
    def row(self) -> dict[str, Any]:
        sums = self.layout.all_reduce_sum(torch.stack([*self.sums.values()]))
        means = (sums / self.counts.to(sums)).tolist()
        row = {f"loss/{name}": round(x, 6) for name, x in zip(self.objectives, means)}
        return {"loss": sum(means) / len(means), **row}

    def validate(self, model: Any, micro_batch_size: int, attend: Attend) -> dict[str, Any]:
        """Each job's validation loss, and their mean."""
        losses = {}
        for name, o in self.objectives.items():
            self.segments[:] = [(name, slice(None))]
            rest = o.seq_len, micro_batch_size, o.env, attend, self.layout
            losses[f"val_loss/{name}"] = validate(model, o.validation, *rest)
        return {"val_loss": sum(losses.values()) / len(losses), **losses}

    def clip_groups(self, model: nn.Module) -> list[list[nn.Parameter]]:
        """The parameters whose gradients are clipped together."""
        return [job_parameters(model, name) for name in self.objectives]


def prepare_job(job: LoRAJob, own: TrainConfig) -> None:
    """Make OUT/NAME, without the files of an earlier start. ValueError if it is of no run."""
    make_folder("--out", own.out)
    if not own.resume:
        check_apart(own)
        check_output_dir(own.out, None)
        record_job(own, job.adapter)


def build_job_datasets(config: TrainConfig, model_cfg: ModelConfig, env: DistEnv) -> Dataset:
    """The data set of each job, in OUT/NAME, and what is common to all. Collective."""
    jobs = read_jobs(config.lora_jobs)
    ranks = f" x {env.world} ranks" if env.world > 1 else ""
    _check(
        config.batch_size % (len(jobs) * env.world) == 0,
        f"--batch-size {config.batch_size} must be a multiple of the {len(jobs)} jobs of "
        f"--lora-jobs {config.lora_jobs}{ranks}",
    )
    paths = dict(data=[""], adapter=None)  # may differ: their content is compared
    about = lambda job: (adapter_hash(job.adapter), replace(job, **paths))
    names = {"the jobs of --lora-jobs": [job.name for job in jobs]}
    same_on_all_ranks(env, lambda: names | {f"job {job.name}": about(job) for job in jobs})
    datasets = {}
    for job in jobs:
        own = job.config(config, len(jobs))
        rank0_first(env, lambda own=own, job=job: prepare_job(job, own))
        datasets[job.name] = build_dataset(own, model_cfg, env)
    prints = [{"job": asdict(job), "text": datasets[job.name].fingerprint} for job in jobs]
    size, padding = (sum(getattr(d, x) for d in datasets.values()) for x in ("size", "padding"))
    return Dataset(None, None, size, prints, datasets, padding)
