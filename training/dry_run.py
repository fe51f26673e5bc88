"""Dry run: memory and communication of a training step on one rank of many, without the ranks.

    python train.py --dry-run 512 --model llama3-8b --tp 8 --zero 3 --seq-len 8192

It runs rank 0 of the real program: train.py's model, step and optimizer under parallelize.py, on
torch's "fake" process group, whose collectives return at once, with fake tensors, which have
shapes, dtypes and storages but no data. Counted are, as on real ranks:
- Bytes sent by ring algorithms: (n - 1) shards for an all-gather, (n - 1) / n of the input for a
  reduce-scatter, twice that for an all-reduce, else what goes to other ranks.
- Activations: what autograd saves of a micro-batch for its backward pass, each storage once,
  without parameters, but with their bf16 copies, which autocast makes without --zero.
- The peak of a step: all storages alive at the same time, model and optimizer states included, at
  their current size (fully_shard frees the memory of storages that stay alive). A GPU's allocator,
  and libraries on a CPU, need some more: gloo's reduce-scatter copies its input.
Data-dependent shapes: tokens are routed uniformly at random, so that W of E experts get
1 - C(E - W, K) / C(E, K) of the tokens; with expert groups it would be fewer.

The two trackers are not torch's: MemTracker (torch.distributed._tools) takes one micro-batch per
step, and CommDebugMode counts calls, not bytes.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

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
from parallelism.expert_parallel import Placement, all_to_all_dispatch, remap_expert_ids
from training.build import build_optimizer, cast_params_, convert_linears_, meta_model
from training.config import TrainConfig
from training.dist_env import DistEnv
from training.lora import apply_lora_
from training.metrics import flops_per_token
from training.parallelize import ExpertParallel, ParallelDims
from training.rank_env import world_size
from training.step import LoadBalancer, clip_gradients, loss_sums, make_attend

# operation -> (kind, bytes each of n ranks sends of an input of b bytes, o of them to itself)
COLLECTIVES: dict[str, tuple[str, Callable[[int, int, int], int]]] = {
    "allreduce_": ("all-reduce", lambda b, n, o: 2 * b * (n - 1) // n),
    "_allgather_base_": ("all-gather", lambda b, n, o: b * (n - 1)),
    "_reduce_scatter_base_": ("reduce-scatter", lambda b, n, o: b * (n - 1) // n),
    "alltoall_base_": ("all-to-all", lambda b, n, o: b - o),
    "send": ("send", lambda b, n, o: b),
}


GPUS_PER_NODE = 8


def cross_node_share(kind: str, ranks: Sequence[int]) -> float:
    """Share of a group's bytes that cross nodes: of the edges of a ring, of the pairs of an
    all-to-all."""
    nodes = [rank // GPUS_PER_NODE for rank in ranks]
    edges = [(a, b) for a in nodes for b in nodes] if kind == "all-to-all" else []
    edges = edges or list(zip(nodes, nodes[1:] + nodes[:1]))
    local = sum(a == b for a, b in edges)
    self_pairs = len(nodes) if kind == "all-to-all" else 0  # nobody sends to itself
    return 1 - (local - self_pairs) / (len(edges) - self_pairs)


class CommTracker(TorchDispatchMode):
    """Records the bytes sent by every collective over two ranks or more, by mesh dimension, and
    how many of them cross nodes, on average over the group."""

    def __init__(self, layout: ParallelDims):
        super().__init__()
        self.sent, self.dims, mesh, self.cross_node = {}, {}, layout.mesh, 0.0
        self.ep = layout.size("ep") > 1
        for view in () if mesh is None else (mesh.experts, mesh.world, mesh.dense):
            self.dims |= {view.get_group(d).group_name: d for d in view.mesh_dim_names}
        for group in (layout.ring_group, layout.ulysses_group) if layout.size("cp") > 1 else ():
            self.dims[group.group_name] = "cp"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its operations on local shards are dispatched again
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
                share = cross_node_share(kind, dist.get_process_group_ranks(group))
                self.cross_node += share * sends(b, n, own)
        return func(*args, **(kwargs or {}))


class MemoryTracker(TorchDispatchMode):
    """Peak bytes of live storages: those created in the body, and those of `existing` tensors."""

    def __init__(self, existing: Iterable[Tensor] = ()):
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.sizes = weakref.WeakKeyDictionary()  # {storage: [bytes]}
        self.original_resize_ = torch.UntypedStorage.resize_
        self.track(existing)

    def track(self, tensors: Iterable[Any]) -> None:
        for x in tensors:
            if isinstance(x, Tensor):
                self.track_storage(to_local(x).untyped_storage())

    def track_storage(self, storage: torch.UntypedStorage) -> None:
        if storage not in self.sizes:
            self.sizes[storage] = size = [0]
            weakref.finalize(storage, self.release, size)
        size, n = self.sizes[storage], storage.nbytes()
        grown, size[0] = n - size[0], n
        self.live_bytes += grown  # no call on this line: a garbage collection may release others
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def release(self, size: list[int]) -> None:
        self.live_bytes -= size[0]

    def __enter__(self) -> Any:
        def resize_(storage: torch.UntypedStorage, n: int) -> Any:
            out = self.original_resize_(storage, n)  # not dispatched to modes
            self.track_storage(storage)
            return out

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self.original_resize_
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self.track(tree_leaves(out))
        return out


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; of DTensors, this rank's shards."""
    return sum(to_local(t).numel() * t.element_size() for t in tensors)


def measure(
    args: TrainConfig, model: Transformer, batch: Tensor, layout: ParallelDims,
    forward_backward: Callable[..., Any],
) -> dict:  # fmt: skip
    """Costs of a training step with this rank's `batch`, and of a micro-batch's forward pass: bytes
    by kind, and under "sent" {(mesh dimension, collective): (calls, bytes)}. Collective; works with
    fake and real tensors. forward_backward: train.py's."""
    optimizer, params = build_optimizer(model, args=args), list(model.parameters())
    attend, n = layout.attend(make_attend(args.attention)), args.micro_batch_size
    balance = LoadBalancer(model, aux=args.aux_loss, seq=args.seq_aux_loss, z=args.router_z_loss)
    autocast = DistEnv(batch.device, args.dtype, 0, 1).autocast

    def step() -> list[Tensor]:
        """Returns the gradients."""
        forward_backward(model, batch, n, autocast, attend, balance, layout)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        clip_gradients(model, args.grad_clip, layout)
        optimizer.step()
        optimizer.zero_grad()
        balance.update(layout)
        return gradients

    # The peak is that of the second step: the first one makes the optimizer states, and DTensor
    # runs each operation that is new to it once on fake tensors of the global shape.
    with MemoryTracker([*params, batch]) as memory:
        step()
        memory.peak_bytes = memory.live_bytes
        with CommTracker(layout) as comm:
            gradients = step()
    saved: dict[int, Any] = {}  # keeps storages alive, so that no id is used twice

    def save(x: Tensor) -> Tensor:
        if not isinstance(x if x._base is None else x._base, nn.Parameter):
            saved[id(x.untyped_storage())] = x.untyped_storage()
        return x

    with saved_tensors_hooks(save, lambda x: x), autocast():
        loss_sums(model, batch[:n], attend, layout)
    gathered = [p for p in model.parameters() if args.zero and not isinstance(p, DTensor)]
    states = [x for state in optimizer.state.values() for x in state.values()]
    kinds = dict(parameters=params, gathered=gathered, gradients=gradients, optimizer=states)
    costs = {name: nbytes(tensors) for name, tensors in kinds.items()}
    costs["peak"] = memory.peak_bytes
    costs["activations"] = sum(storage.nbytes() for storage in saved.values())
    costs["cross_node"] = round(comm.cross_node)
    return costs | {"sent": {key: (len(sizes), sum(sizes)) for key, sizes in comm.sent.items()}}


class FakeScalars(TorchDispatchMode):
    """With FakeTensorMode: makes .item() of fake tensors return the values in `next`, then 1."""

    next: Sequence[int] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, aten = func.overloadpacket, torch.ops.aten
        if op is aten.aminmax:  # used to check that ids are in range
            return torch.tensor(0), torch.tensor(0)
        if op is aten._local_scalar_dense and getattr(args[0], "constant", args[0]) is None:
            value, *self.next = self.next or [1]
            return value
        return func(*args, **(kwargs or {}))

    def with_sizes(
        self, run: Any, sizes: Callable[[int], list[int]], x: Tensor, *others: Any
    ) -> Tensor:
        """run(x, ...) with .item() returning sizes(len(x))."""
        self.next = sizes(len(x))
        return run(x, *others)


def balanced_experts(
    experts: ExpertParallel, scalars: FakeScalars, config: ModelConfig
) -> SimpleNamespace:
    """`experts` with the sizes of uniformly random routing."""
    K, with_sizes = config.n_experts_per_token, partial(partial, scalars.with_sizes)

    def wrap(run: Any, E: int) -> Any:
        own = E // experts.ranks
        # fraction of tokens that use at least one of `width` experts
        share = lambda width: 1 - comb(E - width, K) / comb(E, K)
        slots = K * own / E / share(own)  # local experts per token that reaches this rank
        run = with_sizes(run, lambda n: [round(n * slots) * e // own for e in range(own + 1)])
        for i, (members, group) in enumerate(experts.levels):
            width = members * own
            chunks, ranks = experts.chunks if i == len(experts.levels) - 1 else 1, group.size()
            sizes = lambda n, c=chunks, part=share(width) / share(width * ranks), r=ranks: [
                round((n + c - 1 - j) // c * part) for j in range(c) for _ in range(2 * r)
            ]  # per chunk: to each rank, then from each rank
            run = all_to_all_dispatch(run, width, group, chunks, experts.quantize)
            run = with_sizes(run, sizes)
        return remap_expert_ids(run, Placement.even(E, experts.ranks))

    return SimpleNamespace(**vars(experts), wrap=wrap, local_expert_ids=experts.local_expert_ids)


def count_costs(
    args: TrainConfig, config: ModelConfig, forward_backward: Callable[..., Any]
) -> tuple[dict, str]:
    """The costs of rank 0, and the mesh as one line."""
    layout, scalars = ParallelDims(args, config, args.dry_run), FakeScalars()
    if config.moe_layers:
        experts = layout.experts or ExpertParallel(0, 1, (), 1)
        layout.experts = balanced_experts(experts, scalars, config)
        for E in config.layer_experts or (config.n_experts,):
            # builds and caches a table, which must not be of fake tensors
            Placement.even(E, experts.ranks).physical_ids(torch.zeros(0, 1, dtype=torch.int64))
    model = meta_model(config)
    layout.shard_model_(model)
    if args.lora:
        apply_lora_(model, args.lora)
    cast_params_(model, args)
    convert_linears_(model, args)
    layout.parallelize_(model, torch.bfloat16 if args.dtype == "bf16" else None)
    with FakeTensorMode(allow_non_fake_inputs=True), scalars:
        model.to_empty(device="cpu")
        model.tie()
        rows = len(layout.samples(args.batch_size))
        batch = torch.zeros(rows, args.seq_len + 1).long()
        costs = measure(args, model, batch, layout, forward_backward)
    return costs, "1 rank" if layout.mesh is None else str(layout.mesh).split("\n")[0]


def setup(args: TrainConfig, config: ModelConfig) -> None:
    """Set defaults and start the fake process group. ValueError for what it cannot count."""
    if world_size() > 1:
        raise ValueError("--dry-run runs in one process; use --dry-run RANKS instead of torchrun")
    if config.moe_layers and (args.fp8 or args.experts == "loop"):
        other = "--fp8" if args.fp8 else "--set experts=loop"
        raise ValueError(f"--dry-run of an MoE model cannot be combined with {other}")
    args.dtype = args.dtype.replace("auto", "bf16")
    if "batch_size" not in args.given:  # one micro-batch per rank
        args.batch_size = args.micro_batch_size * max(1, args.dry_run // (args.tp * args.cp))
    try:
        dist.init_process_group("fake", rank=0, world_size=args.dry_run)
    except (ImportError, RuntimeError, ValueError) as e:
        raise ValueError(f'--dry-run: torch has no process group "fake" ({e})') from None


def dry_run(args: TrainConfig, config: ModelConfig, forward_backward: Callable[..., Any]) -> str:
    """The table that --dry-run prints: one line per cost. forward_backward: train.py's."""
    setup(args, config)
    costs, mesh = count_costs(args, config, forward_backward)
    model = meta_model(config)
    B, T, world, sent = args.batch_size, args.seq_len, args.dry_run, costs["sent"]
    flops_per_weight = 4 if args.lora else 6  # no weight gradients for frozen weights
    flops = flops_per_token(model, T, flops_per_weight) * B * T / world
    rows = B * args.tp * args.cp // world
    micro = min(rows, args.micro_batch_size)
    loads = "; assumes even expert loads" if config.moe_layers else ""
    table = [
        ("parameters of the model", nbytes(model.parameters()) // 4, nbytes(model.parameters())),
        ("  of this rank", costs["parameters"] // 4, costs["parameters"]),
        ("  all-gathered for forward and backward", 0, costs["gathered"]),
        ("gradients, at the end of the step", 0, costs["gradients"]),
        ("optimizer states", 0, costs["optimizer"]),
        (f"activations of a micro-batch of {micro}", 0, costs["activations"]),
        ("peak of a step", 0, costs["peak"]),
        *((f"sent per step: {' '.join(key)}", *n) for key, n in sorted(sent.items())),
        ("  total", *(sum(column) for column in zip((0, 0), *sent.values()))),
        (f"  of which between nodes of {GPUS_PER_NODE} GPUs", 0, costs["cross_node"]),
    ]
    return "\n".join((
        f"{args.init or args.model}, {args.dtype}; {mesh}; costs of rank 0",
        f"{B} x {T} tokens per step; {rows} x {T} and {flops / 1e12:.3g} TFLOP per rank{loads}\n",
        f"{'number':>58}{'MiB':>14}",
        *(f"{name:42}{f'{n:,}' if n else '':>16}{b / 2**20:>14,.2f}" for name, n, b in table),
    ))  # fmt: skip
