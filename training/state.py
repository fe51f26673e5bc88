"""The training state: saving, loading and resharding checkpoints, export, and the DiLoCo worker.

The state of a run is its parameters, buffers and optimizer states; all else follows from the step.
State knows which region of each full tensor a rank holds under the current parallelism, so that a
checkpoint (checkpoint.py) stores the model independently of the ranks that wrote it and can be
loaded under any other parallelism. recovery.py's memory checkpoints store the same local tensors.
Parameters frozen by --lora have no state: they are in --init.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import argparse
import hashlib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from huggingface.weights import hf_modules, load_checkpoint, save_checkpoint
from model import ModelConfig, Transformer
from parallel import to_local
from parallelism.diloco import DiLoCo, ElasticExchange
from parallelism.dist_env import DistEnv
from parallelism.parallel_dims import ParallelDims
from training.checkpoint import (
    CheckpointInfo,
    Checkpoints,
    ShardedTensor,
    checkpoint_path,
    list_steps,
    read_full_tensors,
    read_user_metadata,
)
from training.flags import flag
from training.lora import adapter_parameters, apply_lora_, merge_, save_adapters
from training.optimizers import muon_split

CHECKPOINTS = "checkpoints"


class State:
    """Parameters, buffers and optimizer states under a layout. kind: --optimizer; updates: number
    of optimizer steps taken."""

    def __init__(self, model: nn.Module, optimizer: Any, layout: ParallelDims, kind: str = "adamw"):
        self.model, self.optimizer, self.layout, self.updates = model, optimizer, layout, 0
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.moments = {p: moment_names(kind, name, p) for name, p in self.trainable.items()}

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
        """This rank's part of each full tensor, for a checkpoint. Collective."""
        tensors = self._local_sharded_tensors()
        if self.layout.buckets is None or not self.updates:
            return tensors
        names = {p: self.layout.checkpoint_name(name) for name, p in self.trainable.items()}
        whole = lambda x: ShardedTensor(x, x.shape, [((0,) * x.dim(), ())])
        for p, state in self.layout.buckets.gather_state().items():  # on rank 0
            tensors |= {f"{m}.{names[p]}": whole(x) for m, x in state.items() if x.dim()}
        return tensors

    @torch.no_grad()
    def load(self, saver: Checkpoints, found: CheckpointInfo) -> None:
        """Load a checkpoint, bit for bit. Collective."""
        self.updates, buckets = found.metadata["updates"], self.layout.buckets
        tensors, states = self._local_sharded_tensors(), {}
        if buckets is not None and self.updates:
            for name, p in self.trainable.items():
                states[p] = {m: torch.empty(p.shape) for m in self.moments[p]}
                at = [((0,) * p.dim(), ())]
                full = {f"{m}.{name}": x for m, x in states[p].items()}
                tensors |= {name: ShardedTensor(x, p.shape, at) for name, x in full.items()}
        optional = ["outer.state"] if "outer" in found.metadata else []  # DiLoCoWorker loads it
        saver.load(found, tensors, optional=optional)
        if states:
            step = torch.tensor(float(self.updates))
            buckets.load_state({p: {"step": step, **state} for p, state in states.items()})
        self.sync_after_load()

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


def read_state(out: Path) -> dict[str, Tensor]:
    """All full tensors of the newest checkpoint in OUT: "weight.NAME", "exp_avg.NAME", ..."""
    path, *_ = saved_run(out)
    return read_full_tensors(path)


def export(out: Path, to: Path, merged: bool = False, verify: bool = False) -> None:
    """Export the newest checkpoint of OUT as a Hugging Face folder, in bf16 except buffers (expert
    biases). With --lora: the adapters in PEFT's format or, if `merged`, the merged model. verify:
    skip checkpoints with a changed byte; one process only."""
    found = saved_run(out)
    if found is None:
        raise ValueError(f"--export: {out / CHECKPOINTS} has no checkpoint; nothing was saved yet")
    path, _, about = found
    if verify:
        good = Checkpoints(out / CHECKPOINTS).newest()
        path, about = good.path, good.metadata
    config, run = ModelConfig.from_hf(about["config"]), about["run"]
    with torch.device("meta"):
        bf16_model = Transformer(config)
    if run.get("lora"):
        model = load_checkpoint(Path(run["init"]), "cpu", torch.float32)
        apply_lora_(model, run["lora"], run["lora_alpha"] or 2 * run["lora"])
        names = adapter_parameters(model) | dict(model.named_buffers())
        model.load_state_dict(read_weights(path, names), strict=False)
        if not merged:
            save_adapters(model, to, run["init"], rename=hf_modules(model).__getitem__)
            return
        tensors = {**dict(merge_(model).named_parameters()), **dict(model.named_buffers())}
    else:
        names = dict(chain(bf16_model.named_parameters(), bf16_model.named_buffers()))
        tensors = read_weights(path, names)
    for name, _ in bf16_model.named_parameters():
        tensors[name] = tensors[name].detach().to(torch.bfloat16)
    bf16_model.load_state_dict(tensors, strict=False, assign=True)
    bf16_model.tie()
    to.mkdir(parents=True, exist_ok=True)
    save_checkpoint(bf16_model, to)


def read_weights(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Full parameters or buffers of a checkpoint, by name."""
    found = read_full_tensors(path, [f"weight.{name}" for name in names])
    return {name.removeprefix("weight."): x for name, x in found.items()}


class DiLoCoWorker:
    """--diloco: one DiLoCo worker. Its rank 0 synchronizes full weights on the CPU with the others,
    so that a worker can use any parallelism. Expert biases are not synchronized."""

    def __init__(
        self, args: argparse.Namespace, model: Transformer, layout: ParallelDims, env: DistEnv
    ):
        self.model, self.layout, self.env = model, layout, env
        self.every, self.is_rank0 = args.diloco, env.rank == 0
        self.full_params = None if layout.mesh is None else {}  # stays {} except on rank 0
        self.gather_full_params()
        if self.is_rank0:
            files = (args.out / f"tokenizer.{kind}" for kind in ("model", "json"))
            content = next(path for path in files if path.exists()).read_bytes()
            tokenizer = hashlib.sha256(content).hexdigest()[:8]
            same = ("seed", "batch_size", "seq_len", "steps", "lr", "diloco_workers")
            about = {flag(name): getattr(args, name) for name in same} | {"tokenizer": tokenizer}
            where = args.diloco_rendezvous, args.diloco_worker, args.diloco_workers
            self.workers = ElasticExchange(*where, timeout=args.diloco_timeout, run_config=about)
            params = model.parameters() if self.full_params is None else self.full_params.values()
            outer = dict(every=args.diloco, lr=args.outer_lr, momentum=args.outer_momentum)
            self.outer = DiLoCo(params, self.workers, device="cpu", **outer)

    def sharded_state_dict(self) -> tuple[dict[str, ShardedTensor], dict[str, Any]]:
        """Its part of a checkpoint: tensors, and JSON metadata."""
        if not self.is_rank0:
            return {}, {}
        metadata = self.outer.state_dict()
        state = metadata.pop("state").cpu()
        tensor = ShardedTensor(state, state.shape, [((0,) * state.dim(), ())])
        return {"outer.state": tensor}, metadata

    def load(self, found: CheckpointInfo) -> None:
        if self.is_rank0:
            state = read_full_tensors(found.path, ["outer.state"])["outer.state"]
            self.outer.load_state_dict({"state": state, **found.metadata["outer"]})

    def begin(self, step: int) -> int:
        """The step to start with: `step`, or that of the other workers if they are ahead."""
        late = self.is_rank0 and self.workers.begin(self.outer.round)
        return self.sync(join=True)["step"] if self.broadcast_object(late) else step

    def after_step(self, step: int) -> dict[str, Any]:
        """Call after `step`: synchronizes every `every` steps; returns metrics of that, or {}."""
        if (step + 1) % self.every == 0:
            return self.sync()
        if self.is_rank0:
            self.outer.step()
        return {}

    def sync(self, join: bool = False) -> dict[str, Any]:
        """Synchronize with the other workers; join: this worker is late and takes their weights.
        Returns metrics of the round."""
        model, layout, metrics = self.model, self.layout, None
        self.gather_full_params()
        if self.is_rank0:
            done = self.outer.join() if join else self.outer.step()
            metrics = {"step": self.outer.round * self.every, "round": done.number}
            metrics |= {"workers": done.workers, "sent_bytes": done.bytes_sent}
        local_params = dict(model.named_parameters())
        shapes = {} if self.full_params is None else layout.full_shapes(model)
        for name, shape in shapes.items():
            full = self.full_params[name] if self.is_rank0 else torch.empty(shape)
            dist.broadcast(full := full.to(self.env.device), 0)
            layout.copy_shards_(local_params, name, full)
        return self.broadcast_object(metrics)

    @torch.no_grad()
    def gather_full_params(self) -> None:
        """Gather all shards into full_params on rank 0."""
        params = {} if self.full_params is None else dict(self.model.named_parameters())
        for name, x in self.layout.full_tensors(params) if params else ():
            if self.is_rank0:
                self.full_params.setdefault(name, torch.empty(x.shape)).copy_(x)

    def broadcast_object(self, x: Any) -> Any:
        """Rank 0's object, on all ranks."""
        if self.full_params is None:
            return x
        dist.broadcast_object_list(box := [x], 0, device=self.env.device)
        return box[0]

    def close(self) -> None:
        if self.is_rank0:
            self.workers.close()
