"""state.py: what a run of train.py goes on from, and its way to disk, memory and back.

The state of a run is its parameters, buffers and moments; all else follows from the step. A State
knows where each of them lies in the whole model, whatever the layout, so that a checkpoint
(checkpoint.py) is of the model and not of the ranks that wrote it, and goes on under any other
layout. The same tensors, as they are, go to recovery.py's copies in memory. Of frozen parameters,
as --lora leaves them, there is no state: they are in --init.
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
from parallelism.diloco import DiLoCo, Workers
from parallelism.dist_env import DistEnv
from parallelism.parallel_dims import ParallelDims
from training.checkpoint import Checkpoints, Found, Piece, find, path_of, read_about, read_whole
from training.flags import flag
from training.lora import adapters, lora_, merge_, save_adapters
from training.optimizers import muon_split

CHECKPOINTS = "checkpoints"


class State:
    """Of a model and its optimizer, --optimizer's `kind`, under a layout. updates: steps that the
    optimizer has made."""

    def __init__(self, model: nn.Module, optimizer: Any, layout: ParallelDims, kind: str = "adamw"):
        self.model, self.optimizer, self.layout, self.updates = model, optimizer, layout, 0
        self.learns = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.moments = {p: moments_of(kind, name, p) for name, p in self.learns.items()}

    def tensors(self, moments: bool = True) -> dict[str, tuple[str, Tensor]]:
        """{name in a checkpoint: (name of the parameter or buffer here, tensor)}; moments are made,
        zero, where there are none yet."""
        stored = self.layout.checkpoint_name
        here = {f"weight.{stored(n)}": (n, p.detach()) for n, p in self.learns.items()}
        here |= {f"weight.{n}": (n, b) for n, b in self.model.named_buffers()}
        if not moments or self.layout.buckets is not None:
            return here
        for name, p in self.learns.items():
            state = self._state_of(p)
            here |= {f"{m}.{stored(name)}": (name, state[m]) for m in self.moments[p]}
        return here

    def _state_of(self, p: nn.Parameter) -> dict[str, Tensor]:
        """The optimizer's, which holds its moments."""
        if p not in self.optimizer.state:
            zero = {m: torch.zeros_like(p) for m in self.moments[p]}
            # fused AdamW wants it where the parameter is
            self.optimizer.state.update({p: {"step": torch.zeros((), device=p.device), **zero}})
        return self.optimizer.state[p]

    def _placed(self) -> dict[str, Piece]:
        return {
            name: Piece(to_local(x), *self.layout.shard_regions(like, self.learns.get(like, x)))
            for name, (like, x) in self.tensors(self.updates > 0).items()
        }

    def pieces(self) -> dict[str, Piece]:
        """The state as checkpoints have it: this rank's part of each whole tensor. Collective."""
        pieces = self._placed()
        if self.layout.buckets is None or not self.updates:
            return pieces
        names = {p: self.layout.checkpoint_name(name) for name, p in self.learns.items()}
        whole = lambda x: Piece(x, x.shape, [((0,) * x.dim(), ())])
        for p, state in self.layout.buckets.gather_state().items():  # of the first rank
            pieces |= {f"{m}.{names[p]}": whole(x) for m, x in state.items() if x.dim()}
        return pieces

    @torch.no_grad()
    def load(self, saver: Checkpoints, found: Found) -> None:
        """From a checkpoint, bit for bit. Collective."""
        self.updates, buckets = found.about["updates"], self.layout.buckets
        pieces, states = self._placed(), {}
        if buckets is not None and self.updates:
            for name, p in self.learns.items():
                states[p] = {m: torch.empty(p.shape) for m in self.moments[p]}
                at = [((0,) * p.dim(), ())]
                pieces |= {f"{m}.{name}": Piece(x, p.shape, at) for m, x in states[p].items()}
        others = ["outer.state"] if "outer" in found.about else []  # an island's, who loads it
        saver.load(found, pieces, optional=others)
        if states:
            step = torch.tensor(float(self.updates))
            buckets.load_state({p: {"step": step, **state} for p, state in states.items()})
        self.loaded()

    @torch.no_grad()
    def loaded(self) -> None:
        """After the tensors were written to: what follows from them."""
        named: dict[str, nn.Parameter] = {}
        for name, p in self.learns.items():  # a tied head may have a copy of its own
            twin = named.setdefault(self.layout.checkpoint_name(name), p)
            for one, other in ((p, twin), *self._moments_of_both(p, twin)) if p is not twin else ():
                to_local(other).copy_(to_local(one))
        plain = self.learns.values() if self.layout.buckets is None else ()
        for state in (self.optimizer.state.get(p) for p in plain):
            if state is not None and "step" in state:
                state["step"].fill_(self.updates)
        if hasattr(self.optimizer, "refresh"):
            self.optimizer.refresh()  # masters

    def _moments_of_both(self, p: nn.Parameter, twin: nn.Parameter) -> list[tuple[Tensor, Tensor]]:
        if not self.updates or self.layout.buckets is not None:
            return []
        state = self.optimizer.state
        return [(state[p][m], state[twin][m]) for m in self.moments[p]]


def moments_of(kind: str, name: str, p: nn.Parameter) -> tuple[str, ...]:
    """What --optimizer keeps of a parameter, beside its count of steps."""
    one = kind == "sgd" or (kind == "muon" and len(muon_split([(name, p)])[0]) > 0)
    return ("momentum_buffer",) if one else ("exp_avg", "exp_avg_sq")


# --------------------------------------------------------------------------------------------------
# A run in its folder
# --------------------------------------------------------------------------------------------------


def saved_run(out: Path) -> tuple[Path, int, dict[str, Any]] | None:
    """(folder, steps done, what the run said) of the newest checkpoint in OUT that says so; the
    bytes of its tensors are not looked at. None: there is none. ValueError: none can be read."""
    error = None
    for step in reversed(find(out / CHECKPOINTS)):
        path = path_of(out / CHECKPOINTS, step)
        try:
            return path, *read_about(path)
        except ValueError as e:
            error = error or e
    if error is not None:
        raise error
    return None


def read_state(out: Path) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint in OUT, whole: "weight.NAME", "exp_avg.NAME", ..."""
    path, *_ = saved_run(out)
    return read_whole(path)


def export(out: Path, to: Path, merged: bool = False, verify: bool = False) -> None:
    """The newest checkpoint of OUT as a Hugging Face folder, that generate.py and transformers
    open: in bf16, but for buffers, the routing corrections. Of a run with --lora its adapters in
    PEFT's format, or `merged`, the model with these added in. verify: the newest of which no byte
    has changed; in one process."""
    found = saved_run(out)
    if found is None:
        raise ValueError(f"--export: {out / CHECKPOINTS} has no checkpoint; nothing was saved yet")
    path, _, about = found
    if verify:
        good = Checkpoints(out / CHECKPOINTS).newest()
        path, about = good.path, good.about
    config, run = ModelConfig.from_hf(about["config"]), about["run"]
    with torch.device("meta"):
        half = Transformer(config)
    if run.get("lora"):
        model = load_checkpoint(Path(run["init"]), "cpu", torch.float32)
        lora_(model, run["lora"], run["lora_alpha"] or 2 * run["lora"])
        wanted = adapters(model) | dict(model.named_buffers())
        model.load_state_dict(read_weights(path, wanted), strict=False)
        if not merged:
            save_adapters(model, to, run["init"], rename=hf_modules(model).__getitem__)
            return
        tensors = {**dict(merge_(model).named_parameters()), **dict(model.named_buffers())}
    else:
        tensors = read_weights(path, dict(chain(half.named_parameters(), half.named_buffers())))
    for name, _ in half.named_parameters():
        tensors[name] = tensors[name].detach().to(torch.bfloat16)
    half.load_state_dict(tensors, strict=False, assign=True)
    half.tie()
    to.mkdir(parents=True, exist_ok=True)
    save_checkpoint(half, to)


def read_weights(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Parameters or buffers of a checkpoint, whole."""
    found = read_whole(path, [f"weight.{name}" for name in names])
    return {name.removeprefix("weight."): x for name, x in found.items()}


class DiLoCoWorker:
    """--diloco: this worker among the others. Of several ranks the first one meets these, with
    whole weights on the CPU, so that any layout will do and all its ranks are in the same rounds.
    Routing corrections stay each worker's own."""

    def __init__(
        self, args: argparse.Namespace, model: Transformer, layout: ParallelDims, place: DistEnv
    ):
        self.model, self.layout, self.place = model, layout, place
        self.every, self.first = args.diloco, place.rank == 0
        self.whole = None if layout.mesh is None else {}  # {} on other ranks than the first
        self.collect()
        if self.first:
            files = (args.out / f"tokenizer.{kind}" for kind in ("model", "json"))
            content = next(path for path in files if path.exists()).read_bytes()
            tokenizer = hashlib.sha256(content).hexdigest()[:8]
            same = ("seed", "batch_size", "seq_len", "steps", "lr", "diloco_workers")
            about = {flag(name): getattr(args, name) for name in same} | {"tokenizer": tokenizer}
            here = args.diloco_rendezvous, args.diloco_worker, args.diloco_workers
            self.workers = Workers(*here, timeout=args.diloco_timeout, about=about)
            params = model.parameters() if self.whole is None else self.whole.values()
            outer = dict(every=args.diloco, lr=args.outer_lr, momentum=args.outer_momentum)
            self.outer = DiLoCo(params, self.workers, device="cpu", **outer)

    def pieces(self) -> tuple[dict[str, Piece], dict[str, Any]]:
        """What a checkpoint needs of it: tensors, and what it says."""
        if not self.first:
            return {}, {}
        held = self.outer.state_dict()
        state = held.pop("state").cpu()
        return {"outer.state": Piece(state, state.shape, [((0,) * state.dim(), ())])}, held

    def load(self, found: Found) -> None:
        if self.first:
            state = read_whole(found.path, ["outer.state"])["outer.state"]
            self.outer.load_state_dict({"state": state, **found.about["outer"]})

    def begin(self, step: int) -> int:
        """The step to begin with: `step`, or if the run is elsewhere, where it will be."""
        late = self.first and self.workers.begin(self.outer.round)
        return self.meet(join=True)["step"] if self.shared(late) else step

    def after(self, step: int) -> dict[str, Any]:
        """After `step`: {} or, of the meeting that it ends in, what there is to be said."""
        if (step + 1) % self.every == 0:
            return self.meet()
        if self.first:
            self.outer.step()
        return {}

    def meet(self, join: bool = False) -> dict[str, Any]:
        """A meeting, or with `join` one that this worker comes late to: its weights are the
        others' then. What there is to be said of it."""
        model, layout, said = self.model, self.layout, None
        self.collect()
        if self.first:
            met = self.outer.join() if join else self.outer.step()
            said = {"step": self.outer.round * self.every, "round": met.number}
            said |= {"workers": met.workers, "sent_bytes": met.sent}
        here = dict(model.named_parameters())
        shapes = {} if self.whole is None else layout.full_shapes(model)
        for name, shape in shapes.items():
            whole = self.whole[name] if self.first else torch.empty(shape)
            dist.broadcast(whole := whole.to(self.place.device), 0)
            layout.copy_shards_(here, name, whole)
        return self.shared(said)

    @torch.no_grad()
    def collect(self) -> None:
        """Into the first rank's whole weights, what all have."""
        here = {} if self.whole is None else dict(self.model.named_parameters())
        for name, x in self.layout.full_tensors(here) if here else ():
            if self.first:
                self.whole.setdefault(name, torch.empty(x.shape)).copy_(x)

    def shared(self, x: Any) -> Any:
        """The first rank's."""
        if self.whole is None:
            return x
        dist.broadcast_object_list(box := [x], 0, device=self.place.device)
        return box[0]

    def close(self) -> None:
        if self.first:
            self.workers.close()
