"""dry_run.py: what a step costs one rank of many, without the ranks.

    python train.py --dry-run --world-size 512 --model llama3-8b --tp 8 --zero 3 --seq-len 8192

The program is the real one, rank 0 of it: train.py's model, step and optimizer under parallel_dims.py. But
its process group is torch's "fake", whose transfers return at once, and its tensors are fake: with
shapes, dtypes and storages, without numbers. What runs is counted; real ranks count the same:
- Sent are the bytes of ring algorithms: for an all-gather (n - 1) shards, for a reduce-scatter
  (n - 1) / n of the input, for an all-reduce twice that, else what is for others.
- Activations are what autograd keeps of a micro-batch until its backward pass, each storage once,
  parameters not, but bf16 copies of them, which autocast makes without --zero.
- The peak of a step is of all storages that are alive at a time, from the model on, at the size
  that they have then: fully_shard takes memory back from storages that live on. A GPU's allocator,
  and on a CPU libraries, have some more.
- Where a shape depends on numbers, tokens fall on experts as if drawn: W of E get
  1 - C(E - W, K) / C(E, K) of the tokens; groups would have fewer.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import argparse
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import comb
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import ModelConfig, Transformer
from parallel import to_local
from parallelism.dist_env import DistEnv
from parallelism.expert_parallel import Placement, exchanged, placed
from parallelism.parallel_dims import ExpertParallel, ParallelDims
from training.build import build_optimizer, convert_linears_, meta_model, model_config, cast_params_
from training.flags import resolve_expert_flags
from training.lora import lora_
from training.metrics import flops_per_token
from training.step import LoadBalancer, accumulate, make_attend, loss_sums, update

# operation -> kind, bytes that each of n ranks sends of an input of b bytes, of which o are its own
COLLECTIVES: dict[str, tuple[str, Callable[[int, int, int], int]]] = {
    "allreduce_": ("all-reduce", lambda b, n, o: 2 * b * (n - 1) // n),
    "_allgather_base_": ("all-gather", lambda b, n, o: b * (n - 1)),
    "_reduce_scatter_base_": ("reduce-scatter", lambda b, n, o: b * (n - 1) // n),
    "alltoall_base_": ("all-to-all", lambda b, n, o: b - o),
    "send": ("send", lambda b, n, o: b),
}


class CommTracker(TorchDispatchMode):
    """Notes every transfer between two ranks or more."""

    def __init__(self, layout: ParallelDims):
        super().__init__()
        self.sent, self.dims, mesh = {}, {}, layout.mesh
        self.ep = layout.size("ep") > 1
        for view in () if mesh is None else (mesh.experts, mesh.world, mesh.dense):
            self.dims |= {view.get_group(d).group_name: d for d in view.mesh_dim_names}
        for group in (layout.ring_group, layout.ulysses_group) if layout.size("cp") > 1 else ():
            self.dims[group.group_name] = "cp"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # what it does to its shard will be seen
        name = func.overloadpacket.__name__
        if "c10d" in func.namespace and name not in ("recv_", "wait_tensor"):
            several = isinstance(args[0], (list, tuple))
            b = nbytes(args[0] if several else args[1:2])
            group = dist.ProcessGroup.unbox(args[2 - several])
            split, n = args[4] if name == "alltoall_base_" else (), group.size()
            own = b * split[group.rank()] // sum(split) if any(split) else b // n
            dim, (kind, sends) = self.dims.get(group.group_name, "all"), COLLECTIVES[name]
            key = "ep" if kind == "all-to-all" and self.ep and dim != "cp" else dim, kind
            if n > 1:
                self.sent.setdefault(key, []).append(sends(b, n, own))
        return func(*args, **(kwargs or {}))


class Peak(TorchDispatchMode):
    """The most bytes of storages that are alive at a time: of those that operations make inside,
    and of `held`."""

    def __init__(self, held: Iterable[Tensor] = ()):
        super().__init__()
        self.alive = self.most = 0
        self.sizes: weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]]
        self.sizes, self.plain = weakref.WeakKeyDictionary(), torch.UntypedStorage.resize_
        self.note(held)

    def note(self, tensors: Iterable[Any]) -> None:
        for x in tensors:
            if isinstance(x, Tensor):
                self.see(to_local(x).untyped_storage())

    def see(self, storage: torch.UntypedStorage) -> None:
        if storage not in self.sizes:
            self.sizes[storage] = size = [0]
            weakref.finalize(storage, self.gone, size)
        size = self.sizes[storage]
        self.alive += storage.nbytes() - size[0]
        size[0] = storage.nbytes()
        self.most = max(self.most, self.alive)

    def gone(self, size: list[int]) -> None:
        self.alive -= size[0]

    def __enter__(self) -> Any:
        def resize_(storage: torch.UntypedStorage, n: int) -> Any:
            out = self.plain(storage, n)  # is no operation, of which a mode would be told
            self.see(storage)
            return out

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self.plain
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self.note(tree_leaves(out))
        return out


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Of DTensors, this rank's shards."""
    return sum(to_local(t).numel() * t.element_size() for t in tensors)


def measure(
    args: argparse.Namespace, model: Transformer, batch: Tensor, layout: ParallelDims
) -> dict:
    """Of a step of train.py with `batch`, this rank's, and one micro-batch's forward pass: bytes,
    and of (dimension of the mesh, kind) calls and bytes sent. Collective; fake or not."""
    optimizer, own = build_optimizer(model, args=args), list(model.parameters())
    attend, n = layout.attend(make_attend(args.attention)), args.micro_batch_size
    balance = LoadBalancer(model, aux=args.aux_loss, seq=args.seq_aux_loss, z=args.router_z_loss)
    autocast = DistEnv(batch.device, args.dtype, 0, 1).autocast
    with Peak([*own, batch]) as peak, CommTracker(layout) as traffic:
        accumulate(model, batch, n, autocast, attend, balance, layout)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        update(model, optimizer, args.lr, layout, args.grad_clip)
        balance.update(layout)
    kept: dict[int, Any] = {}  # alive, or another may get its id

    def keep(x: Tensor) -> Tensor:
        if not isinstance(x if x._base is None else x._base, nn.Parameter):
            kept[id(x.untyped_storage())] = x.untyped_storage()
        return x

    with saved_tensors_hooks(keep, lambda x: x), autocast():
        loss_sums(model, batch[:n], attend, layout)
    whole = [p for p in model.parameters() if args.zero and not isinstance(p, DTensor)]
    states = [x for state in optimizer.state.values() for x in state.values()]
    tensors = dict(parameters=own, gathered=whole, gradients=gradients, optimizer=states)
    costs = {name: nbytes(of) for name, of in tensors.items()}
    costs["peak"] = peak.most
    costs["activations"] = sum(storage.nbytes() for storage in kept.values())
    return costs | {"sent": {key: (len(each), sum(each)) for key, each in traffic.sent.items()}}


class FakeScalars(TorchDispatchMode):
    """Over a FakeTensorMode: what code gets that asks for numbers. `next`, and then always 1."""

    next: Sequence[int] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, aten = func.overloadpacket, torch.ops.aten
        if op is aten.aminmax:  # are ids in their range?
            return torch.tensor(0), torch.tensor(0)
        if op is aten._local_scalar_dense and getattr(args[0], "constant", args[0]) is None:
            value, *self.next = self.next or [1]
            return value
        return func(*args, **(kwargs or {}))

    def told(self, run: Any, sizes: Callable[[int], list[int]], x: Tensor, *others: Any) -> Tensor:
        """run(x, ...), which asks for the sizes that so many rows have."""
        self.next = sizes(len(x))
        return run(x, *others)


def even(experts: ExpertParallel, answers: FakeScalars, config: ModelConfig) -> SimpleNamespace:
    """A layout's experts, with even loads."""
    own, E, K = experts.placement.width, config.n_experts, config.n_experts_per_token
    share = lambda width: 1 - comb(E - width, K) / comb(E, K)  # of tokens, with any among `width`
    slots, told = K * own / E / share(own), partial(partial, answers.told)  # of a token, here

    def wrap(run: Any) -> Any:
        run = told(run, lambda n: [round(n * slots) * e // own for e in range(own + 1)])
        for i, (width, group) in enumerate(experts.levels):
            chunks, ranks = experts.chunks if i == len(experts.levels) - 1 else 1, group.size()
            sizes = lambda n, c=chunks, part=share(width) / share(width * ranks), r=ranks: [
                round((n + c - 1 - j) // c * part) for j in range(c) for _ in range(2 * r)
            ]  # of each chunk, to each rank and from each
            run = told(exchanged(run, width, group, chunks), sizes)
        return placed(run, experts.placement)

    return SimpleNamespace(**vars(experts), wrap=wrap)


def count(args: argparse.Namespace, config: ModelConfig) -> tuple[dict, str]:
    """The costs of rank 0, and the mesh in a line."""
    layout, answers = ParallelDims(args, config, args.world_size), FakeScalars()
    if E := config.n_experts:
        plain = layout.experts or ExpertParallel(Placement.even(E, 1), tuple(range(E)), (), 1)
        layout.experts = even(plain, answers, config)
        plain.placement.physical(torch.zeros(0, 1, dtype=torch.int64))  # keeps a table: a real one
    model = meta_model(config)
    layout.shard_model_(model)
    if args.lora:
        lora_(model, args.lora)
    cast_params_(model, args)
    convert_linears_(model, args)
    layout.parallelize_(model, torch.bfloat16 if args.dtype == "bf16" else None)
    with FakeTensorMode(allow_non_fake_inputs=True), answers:
        model.to_empty(device="cpu")
        model.tie()
        rows = len(layout.samples(args.batch_size))
        costs = measure(args, model, torch.zeros(rows, args.seq_len + 1).long(), layout)
    return costs, "1 rank" if layout.mesh is None else str(layout.mesh).split("\n")[0]


def settle(args: argparse.Namespace) -> ModelConfig:
    """Defaults, the model, the process group. ValueError for flags that are not of a dry run."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("--dry-run is one process: not under torchrun, but with --world-size N")
    flags = "--resume --train-draft-head --compile --device --distributed-optimizer --pp --diloco --pack --task "
    flags += "--offload"
    for flag in flags.split():
        if flag in args.given:
            raise ValueError(f"--dry-run counts a step of plain training; leave {flag} out")
    config = model_config(args)
    resolve_expert_flags(args, config)
    if config.moe_layers and (args.fp8 or args.experts == "loop"):
        raise ValueError("--dry-run has no sizes for --fp8 and --experts loop; leave them out")
    args.dtype, args.world_size = args.dtype.replace("auto", "bf16"), args.world_size or 1
    if "--batch-size" not in args.given:  # a micro-batch for each rank
        args.batch_size = args.micro_batch_size * max(1, args.world_size // (args.tp * args.cp))
    try:
        dist.init_process_group("fake", rank=0, world_size=args.world_size)
    except (ImportError, RuntimeError, ValueError) as e:
        raise ValueError(f'--dry-run: this torch has no process group "fake" ({e})') from None
    return config


def dry_run(args: argparse.Namespace) -> str:
    """What --dry-run prints: a line per cost."""
    config = settle(args)
    (costs, mesh), whole = count(args, config), meta_model(config)
    B, T, world, sent = args.batch_size, args.seq_len, args.world_size, costs["sent"]
    passes = 4 if args.lora else 6  # frozen weights have no gradient
    flops = flops_per_token(whole, T, passes) * B * T / world
    rows = B * args.tp * args.cp // world
    loads = "; experts have even loads" if config.moe_layers else ""
    table = [
        ("parameters of the model", nbytes(whole.parameters()) // 4, nbytes(whole.parameters())),
        ("  of this rank", costs["parameters"] // 4, costs["parameters"]),
        ("  whole, from forward to backward pass", 0, costs["gathered"]),
        ("gradients, at the end of the step", 0, costs["gradients"]),
        ("optimizer states", 0, costs["optimizer"]),
        (
            f"activations of a micro-batch of {min(rows, args.micro_batch_size)}",
            0,
            costs["activations"],
        ),
        ("peak of a step, all of these together", 0, costs["peak"]),
        *((f"a step sends: {' '.join(key)}", *of) for key, of in sorted(sent.items())),
        ("  in all", *(sum(column) for column in zip((0, 0), *sent.values()))),
    ]
    return "\n".join((
        f"{args.init or args.model}, {args.dtype}; {mesh}; rank 0 of these",
        f"{B} x {T} tokens in a step, {rows} x {T} and {flops / 1e12:.3g} TFLOP to a rank{loads}\n",
        f"{'number':>58}{'MiB':>14}",
        *(f"{name:42}{f'{n:,}' if n else '':>16}{b / 2**20:>14,.2f}" for name, n, b in table),
    ))  # fmt: skip
