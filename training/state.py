"""The training state: saving, loading and resharding checkpoints, and export.

The state of a run is its parameters, buffers and optimizer states; all else follows from the step.
State knows which region of each full tensor a rank holds under the current parallelism, so that a
checkpoint (checkpoint.py) stores the model independently of the ranks that wrote it and can be
loaded under any other parallelism. recovery.py's memory checkpoints store the same local tensors.
Parameters frozen by --lora have no state: they are in --init.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from huggingface.weights import hf_modules, load_checkpoint, save_checkpoint
from model import ModelConfig, Transformer
from parallel import to_local
from training.parallelize import ParallelDims
from training.checkpoint import CheckpointInfo, Checkpoints, ShardedTensor, checkpoint_path
from training.checkpoint import flat_regions, list_steps, read_full_tensors, read_user_metadata
from training.config import FIXED, RESTORED, SAVED_AS, TrainConfig
from training.config import absolute_paths, check_combinations
from training.flags import check_limits
from training.lora import apply_lora_, merge_, save_adapters
from training.lora_jobs import LoRAJob, apply_lora_jobs_, check_same_jobs, save_jobs
from training.optimizers import LossScaler, muon_split
from training.recovery import Guard
from training.run_folder import check_output_dir, input_hash, make_folder, read_inputs
from training.run_folder import verify_init
from training.shards import parse_sources

CHECKPOINTS = "checkpoints"


class TrainState:
    """Parameters, buffers and optimizer states under a layout, with the few numbers that a run also
    resumes from. updates: the number of optimizer steps taken."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        layout: ParallelDims,
        config: TrainConfig = TrainConfig(),
        guard: Guard | None = None,
        scaler: LossScaler | None = None,
        fingerprint: Any = None,
    ):
        self.model, self.optimizer, self.layout, self.updates = model, optimizer, layout, 0
        self.config, self.guard, self.scaler = config, guard, scaler
        self.fingerprint = fingerprint  # of the data; None: not known yet
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        named = self.trainable.items()
        self.moments = {p: moment_names(config.optimizer, name, p) for name, p in named}

    def metadata(self) -> dict[str, Any]:
        """The JSON that a checkpoint stores in addition to its tensors."""
        metadata = {"updates": self.updates, "guard": self.guard.state_dict()}
        metadata |= {"run": self.config.settings(), "config": self.model.config.to_hf()}
        metadata |= {"text": self.fingerprint}
        return metadata | ({"scaler": self.scaler.state_dict()} if self.scaler else {})

    def load_metadata(self, metadata: Mapping[str, Any], step: int) -> None:
        """Load all but the tensors. ValueError if the run had other data."""
        saved, current = metadata.get("text"), self.fingerprint
        if self.config.lora_jobs:  # their settings and paths: check_same_jobs
            saved, current = ([job["text"] for job in jobs] for jobs in (saved, current))
        if None not in (saved, current) and saved != current:
            raise ValueError(
                f"--data has changed: {current} now, {saved} when step {step} was saved; restore "
                "it, or start a new run in another --out"
            )
        self.updates = metadata["updates"]
        self.guard.load_state_dict(metadata["guard"])
        if self.scaler is not None:
            self.scaler.load_state_dict(metadata["scaler"])

    def tensors(self, moments: bool = True) -> dict[str, tuple[str, Tensor]]:
        """{name in a checkpoint: (local name of the parameter or buffer, local tensor)}. moments:
        with optimizer states, created as zeros before the first step."""
        stored = self.layout.checkpoint_name
        tensors = {f"weight.{stored(n)}": (n, p.detach()) for n, p in self.trainable.items()}
        tensors |= {f"weight.{n}": (n, b) for n, b in self.model.named_buffers()}
        if not moments or self.layout.buckets is not None:
            return tensors
        for name, p in self.trainable.items():
            state = self._state_of(p)
            tensors |= {f"{m}.{stored(name)}": (name, state[m]) for m in self.moments[p]}
        return tensors

    def _state_of(self, p: nn.Parameter) -> dict[str, Tensor]:
        """The optimizer's state of p, created if missing."""
        if p not in self.optimizer.state:
            zero = {m: torch.zeros_like(p) for m in self.moments[p]}
            # fused AdamW needs "step" on the parameter's device
            self.optimizer.state.update({p: {"step": torch.zeros((), device=p.device), **zero}})
        return self.optimizer.state[p]

    def _local_sharded_tensors(self) -> dict[str, ShardedTensor]:
        return {
            name: ShardedTensor(
                to_local(x), *self.layout.shard_regions(like, self.trainable.get(like, x))
            )
            for name, (like, x) in self.tensors(self.updates > 0).items()
        }

    def sharded_state_dict(self) -> dict[str, ShardedTensor]:
        """This rank's part of each full tensor, in place, to save or to load a checkpoint."""
        tensors = self._local_sharded_tensors()
        if self.layout.buckets is None or not self.updates:
            return tensors
        names = {p: self.layout.checkpoint_name(name) for name, p in self.trainable.items()}
        local = self.layout.buckets.local_state(next(iter(self.moments.values())), self.updates)
        for p, (elements, state) in local.items():
            blocks = flat_regions(p.shape, elements)
            for moment, x in state.items():
                tensors[f"{moment}.{names[p]}"] = ShardedTensor(x, p.shape, blocks)
        return tensors

    @torch.no_grad()
    def load(self, saver: Checkpoints, found: CheckpointInfo) -> None:
        """Load a checkpoint, bit for bit. Collective."""
        self.updates = found.metadata["updates"]
        tensors = self.sharded_state_dict()
        optional = ["outer.state"] if "outer" in found.metadata else []  # DiLoCoWorker loads it
        saver.load(found, tensors, optional=optional)
        self.sync_after_load()
        if self.guard is not None:
            self.load_metadata(found.metadata, found.step)

    @torch.no_grad()
    def sync_after_load(self) -> None:
        """Update what depends on the loaded tensors: copies of tied parameters, step counters,
        master weights."""
        named: dict[str, nn.Parameter] = {}
        for name, p in self.trainable.items():  # a tied head may be a separate parameter
            twin = named.setdefault(self.layout.checkpoint_name(name), p)
            for one, other in ((p, twin), *self._moment_pairs(p, twin)) if p is not twin else ():
                to_local(other).copy_(to_local(one))
        params = self.trainable.values() if self.layout.buckets is None else ()
        for state in (self.optimizer.state.get(p) for p in params):
            if state is not None and "step" in state:
                state["step"].fill_(self.updates)
        if hasattr(self.optimizer, "refresh"):
            self.optimizer.refresh()  # master weights

    def _moment_pairs(self, p: nn.Parameter, twin: nn.Parameter) -> list[tuple[Tensor, Tensor]]:
        if not self.updates or self.layout.buckets is not None:
            return []
        state = self.optimizer.state
        return [(state[p][m], state[twin][m]) for m in self.moments[p]]


def moment_names(kind: str, name: str, p: nn.Parameter) -> tuple[str, ...]:
    """Names of the optimizer states of a parameter, without "step". kind: --optimizer."""
    momentum = kind == "sgd" or (kind == "muon" and len(muon_split([(name, p)])[0]) > 0)
    return ("momentum_buffer",) if momentum else ("exp_avg", "exp_avg_sq")


# --------------------------------------------------------------------------------------------------
# The folder of a run
# --------------------------------------------------------------------------------------------------


def saved_run(out: Path) -> tuple[Path, int, dict[str, Any]] | None:
    """(folder, step, metadata) of the newest readable checkpoint in OUT, without verifying its
    tensors. None: there is no checkpoint. ValueError: none can be read."""
    error = None
    for step in reversed(list_steps(out / CHECKPOINTS)):
        path = checkpoint_path(out / CHECKPOINTS, step)
        try:
            return path, *read_user_metadata(path)
        except ValueError as e:
            error = error or e
    if error is not None:
        raise error
    return None


def restore_settings(config: TrainConfig) -> None:
    """With --resume, fill the config from the checkpoint. ValueError if OUT holds something else,
    or a given setting contradicts the run's."""
    saved = saved_run(config.out)
    if config.resume == "auto" and saved is None:  # there may still be a checkpoint in memory
        config.resume = None
    if config.resume is None:
        check_output_dir(config.out, saved)
        check_combinations(config)
        return
    if saved is None:
        raise ValueError(
            f"--resume: {config.out / CHECKPOINTS} has no checkpoint; nothing was saved yet, start "
            "without --resume"
        )
    run = saved[2]["run"]
    for name in (*FIXED, *RESTORED):
        if name not in config.given:  # a run saved before the field existed lacks its key
            setattr(config, name, run.get(SAVED_AS.get(name, name), getattr(config, name)))
    if config.dtype == "auto":
        config.dtype = run["dtype"]
    inputs = read_inputs(config.out)
    for name in config.changed_settings(run):
        if name == "lora_jobs" and config.lora_jobs and run.get(name):
            continue  # check_same_jobs
        if name in inputs and input_hash(config, name) == inputs[name]:
            continue  # it has moved
        raise ValueError(
            f"{config.shown(name)} {getattr(config, name)} differs from the run's "
            f"{run.get(SAVED_AS.get(name, name))}; omit it, or start a new run in another --out"
        )
    if "data" not in config.given and config.data:
        there = absolute_paths(run["data"], run.get("cwd", ""))
        exists = [Path(source.path).exists() for source in parse_sources(there)]
        config.data = [new if ok else old for new, old, ok in zip(there, config.data, exists)]
    for name in ("init", "lora_jobs", "memory_checkpoint_dir"):
        setattr(config, name, getattr(config, name) and Path(getattr(config, name)))
    check_limits(config)
    check_combinations(config)
    if config.lora_jobs:
        check_same_jobs(config, saved[2]["text"])


def needs_init(config: TrainConfig) -> bool:
    """Whether a resumed run reads --init: its frozen weights, or those of a reference model."""
    frozen = config.lora or config.lora_jobs or config.task in ("dpo", "draft-head")
    return bool(frozen or (config.task == "grpo" and config.kl))


def read_state(out: Path) -> dict[str, Tensor]:
    """All full tensors of the newest checkpoint in OUT: "weight.NAME", "exp_avg.NAME", ..."""
    path, *_ = saved_run(out)
    return read_full_tensors(path)


def export(
    out: Path, to: Path, merged: bool = False, verify: bool = False, init: Path | None = None
) -> None:
    """Export the newest checkpoint of OUT as a Hugging Face folder, in bf16 except buffers (expert
    biases). With --lora: the adapters in PEFT's format or, if `merged`, the merged model; the other
    of the two is removed. verify: skip checkpoints with a changed byte; one process only. init:
    where the run's --init is now. OUT is only read, unless it is `to`."""
    found = saved_run(out)
    if found is None:
        raise ValueError(f"--export: {out / CHECKPOINTS} has no checkpoint; nothing was saved yet")
    path, _, metadata = found
    if verify:
        good = Checkpoints(out / CHECKPOINTS, read_only=True).newest()
        path, metadata = good.path, good.metadata
    make_folder("--export", to)
    run = metadata["run"]
    if run.get("lora_jobs") or run.get("lora"):
        moved = TrainConfig(out=out, init=Path(init or run["init"]))
        verify_init(moved)
        run = run | {"init": str(moved.init.resolve())}
    if run.get("lora_jobs"):
        jobs = [LoRAJob(**data["job"] | {"adapter": None}) for data in metadata["text"]]
        model = load_with_adapters(path, run["init"], lambda base: apply_lora_jobs_(base, jobs))
        save_jobs(model, jobs, to, run["init"])
    elif run.get("lora"):
        shape = run["lora"], run["lora_alpha"] or 2 * run["lora"]
        model = load_with_adapters(path, run["init"], lambda base: apply_lora_(base, *shape))
        if merged:
            config = ModelConfig.from_hf(metadata["config"])
            save_bf16(config, named_tensors(merge_(model)), to)
            remove_weights(to, "adapter_*")
        else:
            remove_weights(to, "model*.safetensors*", "config.json")
            save_adapters(model, to, run["init"], rename=hf_modules(model).__getitem__)
    else:
        config = ModelConfig.from_hf(metadata["config"])
        with torch.device("meta"):
            names = named_tensors(Transformer(config))
        save_bf16(config, read_weights(path, names), to)


def remove_weights(folder: Path, *patterns: str) -> None:
    """Remove an earlier export in the other format: a folder with both is neither."""
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        path.unlink()


def load_with_adapters(path: Path, init: str, adapt: Callable[[Transformer], Any]) -> Transformer:
    """The model of --init with adapters, added by `adapt` and loaded from a checkpoint."""
    model = load_checkpoint(Path(init), "cpu", torch.float32)
    adapt(model)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    model.load_state_dict(read_weights(path, named_tensors(model).keys() - frozen), strict=False)
    return model


def save_bf16(config: ModelConfig, tensors: dict[str, Tensor], to: Path) -> None:
    """Write full fp32 tensors as a Hugging Face folder: parameters in bf16, buffers unchanged."""
    with torch.device("meta"):
        model = Transformer(config)
    for name, _ in model.named_parameters():
        tensors[name] = tensors[name].detach().to(torch.bfloat16)
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie()
    to.mkdir(parents=True, exist_ok=True)
    save_checkpoint(model, to)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return dict(chain(model.named_parameters(), model.named_buffers()))


def read_weights(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Full parameters or buffers of a checkpoint, by name."""
    found = read_full_tensors(path, [f"weight.{name}" for name in names])
    return {name.removeprefix("weight."): x for name, x in found.items()}
