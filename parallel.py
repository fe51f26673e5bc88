"""parallel.py: one model on many ranks: what a rank has of it, and what ranks tell each other.

A step of training is products of a batch, a sequence, heads and columns, and each can be shared out
over ranks that then have something to tell each other:

    dimension   a rank has a part of                    and in every layer
    dp          the batch                               (gradients, once a step)
    fsdp        and of all parameters (ZeRO)            gathers each block, scatters its gradient
    tp          heads and columns of every matrix       2 all-reduces forward, 2 backward
     + sp       and of the sequence between these       each as all-gather + reduce-scatter
    cp          the sequence                            keys of the others (context_parallel.py)
    pp          the layers                              (hidden states, to the next; pipeline.py)
    ep          the experts                             tokens, there and back (expert_parallel.py)

    mesh = make_mesh(dp_shard=2, cp=2, tp=2)            DeviceMesh of torch, with views of it
    tp = apply_tp(model, mesh, sequence_parallel=True)  print(tp): what is cut, and how
    apply_fsdp(model, mesh)                             torch's fully_shard, group by group
    loss.backward(); sum_gradients(model, mesh, tp); gradient_norm(model, mesh, tp)

The parameters that tp leaves are plain tensors in the model's own Linear layers, and what ranks say
to each other stands in two hooks around attention and feed-forward. So whatever swaps or reads
layers (quantization, kernels, LoRA) works on a rank's part as on a model of that width, and a step
costs no DTensor dispatch; the price is that this file must know which gradients are sums
(`partial`). Parameters sharded over data-parallel ranks are torch's DTensors.

A loss is a sum over tokens divided by the count of all ranks' tokens, never a mean of means, and
all gradients are sums. That is what makes one process and any layout the same run: test_all.py
compares loss, every gradient, its norm and the weights after several steps, for every dimension
and every pair, and counts the collectives.

When it loses: tp over links slower than the products (keep it inside a node); cp where a sequence
fits, for a rank then has less to multiply per byte; fsdp with micro-batches too small to hide a
block's gather. Needs: torch. `python parallel.py` starts 4 processes, checks itself and prints a
table (--check: none).
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

Group = dist.ProcessGroup

# torch 2.13 renamed these two; 2.11 has the old names only
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# The mesh
# --------------------------------------------------------------------------------------------------

DIMS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first: tp needs the fastest links


@dataclass(frozen=True)
class Mesh:
    """The ranks as a grid, and two further views of it. `dense` takes dp_shard and cp for one
    dimension, fsdp: both see different tokens, so that parameters are sharded over both. `experts`
    cuts the same ranks again into expert_fsdp x ep."""

    world: DeviceMesh  # DIMS
    dense: DeviceMesh  # pp, dp_replicate, fsdp, tp
    experts: DeviceMesh  # pp, dp_replicate, expert_fsdp, ep, tp

    def _view(self, dim: str) -> DeviceMesh:
        for view in (self.world, self.dense, self.experts):
            if dim in view.mesh_dim_names:
                return view
        raise ValueError(
            f"the mesh has no dimension {dim!r}; it has {', '.join(DIMS)}, fsdp, expert_fsdp, ep"
        )

    def group(self, dim: str) -> Group:
        """The ranks that differ from this one in `dim` alone."""
        return self._view(dim).get_group(dim)

    def size(self, dim: str) -> int:
        view = self._view(dim)
        return view.size(view.mesh_dim_names.index(dim))

    def rank(self, dim: str) -> int:
        return self._view(dim).get_local_rank(dim)

    @property
    def dp(self) -> tuple[int, int]:
        """(which, of how many) shares of a batch this rank has."""
        shards = self.size("dp_shard")
        return self.rank("dp_replicate") * shards + self.rank("dp_shard"), (
            self.size("dp_replicate") * shards
        )

    def __str__(self) -> str:
        """A line per group along tp, with its index in the other dimensions."""
        ranks, names = self.world.mesh, [d for d in DIMS if self.size(d) > 1] or ["tp"]
        ep = self.size("ep")
        head = " x ".join(f"{d} {self.size(d)}" for d in names)
        head += f"; experts over {ep} of them" if ep > 1 else ""
        lines = [f"{ranks.numel()} ranks: {head}"]
        outer = [d for d in DIMS[:-1] if d in names]
        for at in torch.cartesian_prod(*map(torch.arange, ranks.shape[:-1])).view(-1, 4).tolist():
            where = "  ".join(f"{d} {i}" for d, i in zip(DIMS, at) if d in outer)
            row = ranks[tuple(at)].tolist()
            lines.append(f"  {where}{'  ' * bool(where)}ranks {', '.join(map(str, row))}")
        return "\n".join(lines if len(lines) < 66 else [*lines[:64], "  ..."])


def make_mesh(
    dp_replicate: int = 1,
    dp_shard: int = 1,
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    *,
    device_type: str = "cpu",
) -> Mesh:
    """The grid of all ranks. Neighbours are along tp, then cp, dp_shard, dp_replicate, pp; experts
    are shared out over `ep` neighbours among the dp_shard x cp. ValueError, with the arithmetic,
    for sizes that are not the world's. Collective: all ranks make the same."""
    sizes = dict(zip(DIMS, (pp, dp_replicate, dp_shard, cp, tp)))
    for name, size in {**sizes, "ep": ep}.items():
        _check(size >= 1, f"{name} must be at least 1, not {size}")
    product, world = math.prod(sizes.values()), dist.get_world_size()
    sum_ = " x ".join(f"{name} {size}" for name, size in sizes.items())
    _check(product == world, f"{sum_} = {product}, but there are {world} ranks: change one of them")
    fsdp = dp_shard * cp
    _check(
        fsdp % ep == 0,
        f"ep {ep} must divide dp_shard {dp_shard} x cp {cp} = {fsdp}, the ranks with tokens of "
        "their own",
    )
    make = partial(init_device_mesh, device_type)
    grid = make((pp, dp_replicate, dp_shard, cp, tp), mesh_dim_names=DIMS)
    dense = make((pp, dp_replicate, fsdp, tp), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    names = ("pp", "dp_replicate", "expert_fsdp", "ep", "tp")
    return Mesh(grid, dense, make((pp, dp_replicate, fsdp // ep, ep, tp), mesh_dim_names=names))


# --------------------------------------------------------------------------------------------------
# Tensor and sequence parallelism
# --------------------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    """Megatron's f: the same tokens go into every rank's part; their gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """Megatron's g: every rank's part of the output is added up; each gets the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    """f of sequence parallelism: shards of the sequence become the whole of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scattered(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    """g of sequence parallelism: the sum, of which every rank gets its shard of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None


def _summed(x: Tensor, group: Group) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _gathered(x: Tensor, group: Group) -> Tensor:
    """(B, t, ...) of every rank -> (B, t * ranks, ...)"""
    ranks = dist.get_world_size(group)
    parts = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    all_gather(parts, x.contiguous(), group=group)
    return parts.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)


def _scattered(x: Tensor, group: Group) -> Tensor:
    """(B, T, ...) of every rank -> their sum's (B, T / ranks, ...)"""
    ranks = dist.get_world_size(group)
    _check(
        x.shape[1] % ranks == 0,
        f"sequence parallelism: {x.shape[1]} tokens cannot be cut in {ranks}; take a multiple",
    )
    parts = x.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    out = x.new_empty(x.shape[0], x.shape[1] // ranks, *x.shape[2:])
    reduce_scatter(out, parts, group=group)
    return out


@dataclass(frozen=True)
class Cut:
    """This rank's part of a tensor. `dim` is `blocks` stacked blocks of size `whole`, and the rank
    has rows start .. stop - 1 of every block. `copies` ranks have the same part."""

    dim: int
    start: int
    stop: int
    whole: int
    blocks: int = 1
    copies: int = 1

    def of(self, tensor: Tensor) -> Tensor:
        """The part of the whole tensor."""
        cut = [b.narrow(self.dim, self.start, self.stop - self.start)
               for b in tensor.split(self.whole, self.dim)]  # fmt: skip
        return torch.cat(cut, self.dim)

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Of the whole tensor, from the part's."""
        return (*part[: self.dim], self.blocks * self.whole, *part[self.dim + 1 :])


# How each module is cut, by the end of its name. Of a Linear's weight (out, in), "column" cuts the
# rows, "heads" and "kv_heads" too, whole heads at a time, and "row" the columns. A "region" is what
# begins with whole tokens on every rank and ends with a sum over ranks.
PLAN = {
    "embed": "lookup",
    "attention": "region",
    "attention.q_proj": "heads",
    "attention.k_proj": "kv_heads",
    "attention.v_proj": "kv_heads",
    "attention.q_b_proj": "heads",
    "attention.kv_b_proj": "heads",
    "attention.o_proj": "row",
    "mlp": "region",
    "mlp.gate_proj": "column",
    "mlp.up_proj": "column",
    "mlp.down_proj": "row",
    "mlp.shared.gate_proj": "column",
    "mlp.shared.up_proj": "column",
    "mlp.shared.down_proj": "row",
    "mlp.w_gate_up": "gate_up",
    "mlp.w_down": "down",
    "head": "vocab",
}


@dataclass(frozen=True)
class TensorParallel:
    """What apply_tp did. Printed, it is the plan: a line per kind of parameter."""

    group: Group
    sequence: bool  # between regions, every rank has a shard of the sequence
    cuts: dict[str, Cut] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)  # whole on every rank; gradients to be added up
    kinds: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    @property
    def vocab_start(self) -> int:
        """The first token whose logit is this rank's."""
        cut = self.cuts.get("head.weight") or self.cuts.get("embed.weight")
        return 0 if cut is None else cut.start

    def __str__(self) -> str:
        rows: dict[tuple, list[str]] = {}
        for name, (kind, whole, part) in self.kinds.items():
            general = ".".join("*" if step.isdigit() else step for step in name.split("."))
            rows.setdefault((general, kind, whole, part), []).append(name)
        lines = []
        for (general, kind, whole, part), names in rows.items():
            sizes = "x".join(map(str, whole)) + (
                " -> " + "x".join(map(str, part)) if part != whole else ""
            )
            lines.append(f"{general:34} {len(names):4} x {kind:10} {sizes}")
        return "\n".join(lines)


class VocabEmbedding(nn.Embedding):
    """An embedding of which this rank has the rows from `start` on: others' tokens give zeros, and
    `leave` adds the ranks up."""

    start: int
    leave: Callable[[Tensor], Tensor]

    def forward(self, tokens: Tensor) -> Tensor:
        rows = tokens - self.start
        others = (rows < 0) | (rows >= len(self.weight))
        x = F.embedding(rows.masked_fill(others, 0), self.weight)
        return self.leave(x.masked_fill(others[..., None], 0.0))


def apply_tp(
    model: nn.Module,
    mesh: Mesh,
    *,
    sequence_parallel: bool = False,
    ring: tuple[Callable[..., list[Tensor]], Callable[..., Tensor]] | None = None,
    gather_logits: bool = True,
    plan: Mapping[str, str] = PLAN,
) -> TensorParallel:
    """Leave of the model, in place, this rank's part along tp (Megatron-LM, arXiv:1909.08053): of
    every region's first matrices the columns, of its last the rows, so that attention and
    feed-forward each take one all-reduce forward and one backward. It may be on the meta device;
    model.cuts then tells the loader what to read.

    sequence_parallel: between regions ranks have a shard of the sequence, and each all-reduce is
    an all-gather and a reduce-scatter (Korthikanti et al., arXiv:2205.05198): the same bytes, 1 /
    tp of the norms' work and of what these keep. (A region's input is kept gathered for its
    weights' gradients; Megatron-LM gathers it again.) ring: (all_gather_matmul,
    matmul_reduce_scatter) of async_tp.py, which overlap the transfers with the products and keep
    shards alone.
    gather_logits=False leaves each rank the logits of its part of the vocabulary, for
    vocab_cross_entropy; what gathers them is a hook on the head, which goes with a head that is
    swapped. With more ranks than key heads, several have the same.

    ValueError for sizes that tp does not divide.
    """
    group, rank, ranks = mesh.group("tp"), mesh.rank("tp"), mesh.size("tp")
    _check(sequence_parallel or not ring, "ring goes with sequence_parallel: give both")
    tp = TensorParallel(group, sequence_parallel and ranks > 1)
    if ranks == 1:
        return tp
    mtp = sequence_parallel and len(getattr(model, "mtp", ())) > 0
    _check(not mtp, "sequence_parallel cannot shift hidden states by a token: not with MTP layers")
    for name, p in model.named_parameters():
        kind = _of_plan(plan, name) or _of_plan(plan, name.rpartition(".")[0])
        kind = None if kind == "region" else kind
        whole = tuple(p.shape)
        if kind is not None and (cut := _cut(kind, name, p, model.config, rank, ranks)):
            p.data = cut.of(p.data)
            tp.cuts[name] = cut
        elif tp.sequence or _region(plan, name):
            tp.partial.add(name)
        tp.kinds[name] = (kind or "whole", whole, tuple(p.shape))
    model.cuts |= tp.cuts
    _connect(model, tp, plan, rank, ring, gather_logits)
    return tp


def _connect(
    model: nn.Module, tp: TensorParallel, plan: Mapping[str, str], rank: int, ring: Any,
    gather_logits: bool,
) -> None:  # fmt: skip
    """What ranks tell each other, as hooks at both ends of every region."""
    group, ranks = tp.group, dist.get_world_size(tp.group)
    f, g = (_Gather, _Scatter) if tp.sequence else (_Copy, _Sum)
    enter, leave = (lambda x: f.apply(x, group)), (lambda x: g.apply(x, group))
    for name, module in list(model.named_modules()):
        kind = _of_plan(plan, name)
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        if hasattr(module, "first_head"):
            module.first_head = rank * (model.config.n_heads // ranks)
        leaves = [leaf for leaf, _ in module.named_children()]
        row = next((leaf for leaf in leaves if _of_plan(plan, f"{name}.{leaf}") == "row"), None)
        if kind == "region" and ring and hasattr(module, "products"):
            module.products = partial(_ring_products, ring[0], group)
            setattr(module, row, RingRow(getattr(module, row), ring[1], group))
        elif kind == "region":
            # a mixture's router wants its input as it is; products would round theirs anyway
            narrow = (lambda x: x) if hasattr(module, "experts") else _as_autocast
            module.register_forward_pre_hook(
                lambda m, a, narrow=narrow: (enter(narrow(a[0])), *a[1:])
            )
            module.register_forward_hook(partial(_leave, leave, row, rank))
        elif kind == "lookup":
            new = VocabEmbedding.from_pretrained(module.weight, freeze=False)
            new.weight, new.start, new.leave = module.weight, tp.cuts[f"{name}.weight"].start, leave
            model.set_submodule(name, new)
        elif kind == "vocab":
            module.register_forward_pre_hook(lambda m, a: (enter(_as_autocast(a[0])), *a[1:]))
            if gather_logits:
                size = model.config.vocab_size
                module.register_forward_hook(lambda m, a, y: _Logits.apply(y, size, rank, group))


class RingRow(nn.Module):
    """The last layer of a region, whose sum over ranks is made while it multiplies."""

    def __init__(self, linear: nn.Linear, product: Callable[..., Tensor], group: Group):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.product, self.group = product, group

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x, self.weight, self.group)
        return y if self.bias is None else y + self.bias.type_as(y)


def _ring_products(
    product: Callable[..., list[Tensor]], group: Group, x: Tensor, *linears: nn.Linear
) -> list[Tensor]:
    """The model's products hook: one ring for all of them."""
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    return product(x, weights, group, biases)


def _of_plan(plan: Mapping[str, str], name: str) -> str | None:
    ends = (name.split(".", i)[-1] for i in range(name.count(".") + 1))
    return next((plan[end] for end in ends if end in plan), None)


def _region(plan: Mapping[str, str], name: str) -> bool:
    steps = name.split(".")
    return any(_of_plan(plan, ".".join(steps[:i])) == "region" for i in range(1, len(steps)))


def _cut(kind: str, name: str, p: Tensor, config: Any, rank: int, ranks: int) -> Cut | None:
    """How tp cuts a parameter, None for the bias of a row-parallel layer."""
    if kind == "row" and p.dim() == 1:
        return None
    dim, blocks = {"row": (1, 1), "gate_up": (1, 2), "down": (2, 1)}.get(kind, (0, 1))
    whole, copies = p.shape[dim] // blocks, 1
    if kind in ("lookup", "vocab"):  # need not be even
        each = -(-whole // ranks)
        ok = (ranks - 1) * each < whole
        _check(ok, f"tp {ranks} leaves ranks without any of {name}'s {whole} rows: take fewer")
        return Cut(0, min(whole, rank * each), min(whole, (rank + 1) * each), whole)
    units, what = whole, f"the {whole} of {name}"
    if kind == "heads":
        units, what = config.n_heads, f"n_heads {config.n_heads}"
    if kind == "kv_heads":
        units, what = config.n_kv_heads, f"n_kv_heads {config.n_kv_heads}"
        if ranks % units == 0:
            copies = ranks // units
    _check(
        units % (ranks // copies) == 0, f"tp {ranks} does not divide {what}: take a divisor of it"
    )
    each = whole // (ranks // copies)
    return Cut(dim, rank // copies * each, (rank // copies + 1) * each, whole, blocks, copies)


def _as_autocast(x: Tensor) -> Tensor:
    """What a product would make of it, before it travels: half the bytes."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _leave(
    leave: Callable, row: str | None, rank: int, module: nn.Module, args: Any, y: Tensor
) -> Tensor:
    """The end of a region. Every rank's Linear has added the bias; all but the first take it off
    again, so that the sum has it once."""
    bias = getattr(module.get_submodule(row), "bias", None) if row else None
    return leave(y if bias is None or rank == 0 else y - bias.type_as(y))


class _Logits(torch.autograd.Function):
    """(B, T, V / ranks) of every rank -> (B, T, V) on all; the way back takes what is its own."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, size: int, rank: int, group: Group) -> Tensor:
        widest = -(-size // dist.get_world_size(group))
        ctx.mine = slice(rank * widest, rank * widest + y.shape[-1])
        parts = _gathered(F.pad(y, (0, widest - y.shape[-1])).movedim(-1, 1), group)
        return parts.movedim(1, -1)[..., :size]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[..., ctx.mine], None, None, None


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int, group: Group) -> Tensor:
        """log(sum exp(l)) - l[target] of logits that every rank has some columns of: one all-reduce
        of maxima and one of (sum, target's logit), N numbers each."""
        top = logits.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        shifted = logits - top[:, None]
        column = targets - start
        others = (column < 0) | (column >= logits.shape[-1])
        column = column.masked_fill(others, 0)[:, None]  # no host sync to select by `others`
        picked = shifted.gather(-1, column)[:, 0].masked_fill(others, 0.0)
        probs = shifted.exp_()
        both = torch.stack((probs.sum(-1), picked))
        dist.all_reduce(both, group=group)
        ctx.save_for_backward(probs.div_(both[0][:, None]), column, others)
        return both[0].log() - both[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probs, column, others = ctx.saved_tensors
        dlogits = probs * grad[:, None]
        dlogits.scatter_add_(-1, column, -grad.masked_fill(others, 0.0)[:, None])
        return dlogits, None, None, None


def vocab_cross_entropy(
    logits: Tensor, targets: Tensor, tp: TensorParallel, ignore_index: int = -100
) -> Tensor:
    """Summed cross-entropy, in nats, of logits (N, V / ranks), this rank's columns, and targets
    (N,): the same number on every rank. The logits are never gathered, and what is kept for the
    backward pass is this rank's part of the softmax (Megatron-LM, 3)."""
    losses = _VocabCrossEntropy.apply(logits.float() if logits.dtype != torch.float64 else logits,
                                      targets, tp.vocab_start, tp.group)  # fmt: skip
    return losses.masked_fill(targets == ignore_index, 0.0).sum()


# --------------------------------------------------------------------------------------------------
# Data parallelism: sharded parameters, gradients, and what a checkpoint wants whole
# --------------------------------------------------------------------------------------------------


def apply_fsdp(
    model: nn.Module,
    mesh: Mesh,
    *,
    stage: int = 3,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    offload: bool = False,
    node_size: int | None = None,
    all_gather: Any = None,
    reduce_scatter: Any = None,
    head_apart: bool = False,
) -> None:
    """Shard parameters, gradients and optimizer states over dp_shard x cp, in place, by torch's
    fully_shard: a group of parameters per block, one for embedding, one for norm and head. With
    dp_replicate > 1 the shards have replicas (HSDP). Mixtures are groups over expert_fsdp, whose
    ranks have the same experts.

    stage (ZeRO, arXiv:1910.02054): 3 gathers a group before its forward and again before its
    backward pass; 2 keeps it between; 1 keeps gradients whole until `last_micro_batch` too.
    param_dtype: what is gathered is rounded to it, norms and routers too, and the residual stream
    with the embedding; inputs are not, so run products under autocast. Gradients are added up in
    reduce_dtype, as sums over ranks, not means: divide the loss by the tokens of all. offload: the
    shards, their gradients and the optimizer's work are the CPU's; on GPUs the process group needs
    a backend for these as well ("cpu:gloo,cuda:nccl"). node_size: the backward pass of stage 3
    gathers inside so many neighbours, who keep what was gathered before (ZeRO++'s hpZ).
    all_gather, reduce_scatter: for FSDPModule.set_custom_all_gather and _reduce_scatter.
    head_apart: norm and head are two groups, for a head that is not called in the same forward.
    """
    _check(stage in (1, 2, 3), f"stage must be 1, 2 or 3, not {stage}")
    how: dict[str, Any] = dict(reshard_after_forward=stage == 3 and (node_size or True))
    # inputs as they come: a block's are its rotations too, which in bf16 would turn by other angles
    how["mp_policy"] = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
    if offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    dims = ("dp_replicate",) if mesh.size("dp_replicate") > 1 else ()
    dense = dict(mesh=mesh.dense[(*dims, "fsdp")], **how)
    experts = dict(mesh=mesh.experts[(*dims, "expert_fsdp")], **how)
    for block in (*model.layers, *getattr(model, "mtp", ())):
        for module in block.modules():
            if any(p.dim() == 3 for p in module.parameters(recurse=False)):
                fully_shard(module, **experts)
        fully_shard(block, **dense)
    for group in _ends(model, head_apart):
        if group := [module for module in group if module is not None]:
            fully_shard(group, **dense)
    fully_shard(model, **dense)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
            if all_gather is not None:
                module.set_custom_all_gather(all_gather)
            if reduce_scatter is not None:
                module.set_custom_reduce_scatter(reduce_scatter)


def _ends(model: nn.Module, head_apart: bool) -> list[list[nn.Module | None]]:
    """Which of norm, head and embedding are gathered together."""
    tied = model.head is not None and model.embed is not None
    tied = tied and model.head.weight is model.embed.weight
    ends = [[model.norm, model.head], [model.embed]]
    if head_apart or len(getattr(model, "mtp", ())) > 0:  # there it runs more often than the norm
        ends = [[model.norm], [model.head], [model.embed]]
    if tied:
        ends = [[model.norm], [model.head, model.embed]]
    return ends


def last_micro_batch(model: nn.Module, stage: int, last: bool) -> None:
    """Before the forward pass of each of a step's micro-batches, if the model is sharded: until the
    last, stages 1 and 2 keep the gathered parameters, and stage 1 the whole gradients."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or stage > 1)
        model.set_reshard_after_backward(last or stage == 3)


def reshard(model: nn.Module, stage: int) -> None:
    """Give back what forward passes without backward ones have gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if stage < 3:
                module.set_reshard_after_forward(True, recurse=False)
            module.reshard()
            if stage < 3:
                module.set_reshard_after_forward(False, recurse=False)


def local(x: Tensor) -> Tensor:
    """This rank's shard of a tensor, or itself."""
    return x.to_local() if isinstance(x, DTensor) else x


def is_stack(p: Tensor) -> bool:
    """Whether a parameter holds one matrix per expert, (E, ...): nothing else has three dims."""
    return p.dim() == 3


def sum_gradients(model: nn.Module, mesh: Mesh, tp: TensorParallel) -> None:
    """After the backward passes of a step: leave in .grad the sums over ranks that neither these
    nor fully_shard have made. Of parameters that tp leaves whole but whose inputs or outputs are
    cut, over tp; of keys' heads, over the ranks that have the same; of replicas, over data
    parallelism, experts over the ranks that have the same ones; of routers sharded with their
    experts, over ep."""
    cut: list[tuple[Tensor, int, int]] = []
    over: dict[str, list[Tensor]] = {"fsdp": [], "expert_fsdp": [], "dp_replicate": [], "ep": []}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.grad is None:  # of experts that no token chose, for some that run them
            p.grad = torch.zeros_like(p)
        grad = local(p.grad)
        copies = tp.cuts[name].copies if name in tp.cuts else 0
        if name in tp.partial or copies > 1:
            pieces = mesh.size("tp") // copies if copies else 1
            cut.append((grad, pieces, mesh.rank("tp") // copies if copies else 0))
        if not isinstance(p, DTensor):
            over["expert_fsdp" if is_stack(p) else "fsdp"].append(grad)
            over["dp_replicate"].append(grad)
        elif "expert_fsdp" in p.device_mesh.mesh_dim_names and not is_stack(p):
            over["ep"].append(grad)
    for dim, grads in over.items():
        _sum_each(grads, mesh.group(dim))
    _sum_over_tp(cut, mesh.group("tp"))


def _sum_each(grads: list[Tensor], group: Group) -> None:
    """Each over the ranks; all are on their way at once."""
    if dist.get_world_size(group) > 1:
        for transfer in [dist.all_reduce(g, group=group, async_op=True) for g in grads]:
            transfer.wait()


def _sum_over_tp(grads: list[tuple[Tensor, int, int]], group: Group) -> None:
    """Each of (gradient, pieces, which): added up over the ranks that have the same piece, all in
    one all-reduce of all pieces, in which a rank leaves the others' zero."""
    if not grads:
        return
    sizes = [g.numel() * n for g, n, _ in grads]
    widest = max((g.dtype for g, _, _ in grads), key=lambda dtype: dtype.itemsize)
    flat = grads[0][0].new_zeros(sum(sizes), dtype=widest)
    spans = flat.split(sizes)
    mine = [span.view(n, *g.shape)[i] for span, (g, n, i) in zip(spans, grads)]
    for part, (g, _, _) in zip(mine, grads):
        part.copy_(g)
    dist.all_reduce(flat, group=group)
    for part, (g, _, _) in zip(mine, grads):
        g.copy_(part)


def gradient_norm(
    model: nn.Module, mesh: Mesh, tp: TensorParallel, copies: Mapping[str, int] | None = None
) -> Tensor:
    """Of the whole model's gradient, one number, bit for bit, on all ranks. An element that n ranks
    have counts 1 / n on each. copies: of parameters, how many there are along pp (1)."""
    ranks = dist.get_world_size() // mesh.size("pp")
    total: Tensor | float = 0.0
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        shards = 1
        if isinstance(p, DTensor):
            sizes = zip(p.device_mesh.shape, p.placements)
            shards = math.prod(n for n, placement in sizes if placement.is_shard())
        if name in tp.cuts:
            shards *= mesh.size("tp") // tp.cuts[name].copies
        if is_stack(p):
            shards *= mesh.size("ep")
        shards /= (copies or {}).get(name, 1)
        grad = local(p.grad)
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32))
        total = total + grad.square().sum() * (shards / ranks)  # a CPU's vector_norm is 1e-4 off
    dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def clip_gradients(model: nn.Module, norm: Tensor, most: float) -> None:
    """Scale the gradient, whose norm gradient_norm gave, to `most` if it is more."""
    scale = (most / (norm + 1e-6)).clamp(max=1.0)
    for p in model.parameters():
        if p.requires_grad:
            local(p.grad).mul_(scale.to(p.grad.dtype))


@torch.no_grad()
def copy_shard_(p: Tensor, whole: Tensor, cut: Cut | None = None) -> None:
    """Copy into p, be it cut, sharded, both or neither, its part of the whole tensor."""
    part = whole if cut is None else cut.of(whole)
    if isinstance(p, DTensor):
        part = part.to(p.device)
        part = distribute_tensor(part, p.device_mesh, p.placements, src_data_rank=None)
    local(p).copy_(local(part))


@torch.no_grad()
def gather(x: Tensor, cut: Cut | None, mesh: Mesh) -> Tensor | None:
    """The whole tensor that x is this rank's part of, on the first rank along tp (None on others).
    Collective."""
    x = x.full_tensor() if isinstance(x, DTensor) else x.detach()
    if cut is None:
        return x
    ranks, first, dim = mesh.size("tp"), mesh.rank("tp") == 0, cut.dim
    widest = -(-cut.whole // (ranks // cut.copies)) * cut.blocks
    x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, widest - x.shape[dim])).contiguous()
    parts = [torch.empty_like(x) for _ in range(ranks)] if first else None
    dist.gather(x, parts, group=mesh.group("tp"), group_dst=0)
    if not first:
        return None
    blocks = [part.unflatten(dim, (cut.blocks, -1)) for part in parts[:: cut.copies]]
    return torch.cat(blocks, dim + 1).narrow(dim + 1, 0, cut.whole).flatten(dim, dim + 1)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    def __init__(self, C: int, Hq: int, Hkv: int):
        super().__init__()
        self.head_dim = C // Hq
        for name, rows in (("q_proj", C), ("k_proj", C // Hq * Hkv), ("v_proj", C // Hq * Hkv)):
            self.add_module(name, nn.Linear(C, rows, bias=False))
        self.o_proj = nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, C: int):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(C, 3 * C), nn.Linear(C, 3 * C)
        self.down_proj = nn.Linear(3 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Block(nn.Module):
    def __init__(self, C: int, Hq: int, Hkv: int):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(C), nn.RMSNorm(C)
        self.attention, self.mlp = _Attention(C, Hq, Hkv), _MLP(C)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class _Model(nn.Module):
    """The least that the functions above ask of a model: these names."""

    def __init__(self, V: int, C: int, L: int, Hq: int, Hkv: int):
        super().__init__()
        self.config, self.cuts = SimpleNamespace(n_heads=Hq, n_kv_heads=Hkv, vocab_size=V), {}
        self.embed, self.head = nn.Embedding(V, C), nn.Linear(C, V, bias=False)
        self.layers = nn.ModuleList(_Block(C, Hq, Hkv) for _ in range(L))
        self.norm = nn.RMSNorm(C)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def check(rank: int, ranks: int) -> None:
    """A step of dp 2 x tp 2, of tp 4 and of replicated shards == one process's, in every gradient
    and in their norm."""
    torch.manual_seed(0)
    whole = _Model(V=37, C=32, L=2, Hq=4, Hkv=2).double()
    tokens = torch.randint(37, (4, 17))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    losses = F.cross_entropy(whole(inputs).flatten(0, 1), targets.flatten())
    losses.backward()
    norm = nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    for sizes in (dict(dp_shard=2, tp=2), dict(tp=4), dict(dp_replicate=2, dp_shard=2)):
        mesh = make_mesh(**sizes)
        part, mine = copy.deepcopy(whole), slice(mesh.dp[0], None, mesh.dp[1])
        part.zero_grad()
        tp = apply_tp(part, mesh, sequence_parallel=True, gather_logits=False)
        apply_fsdp(part, mesh, reduce_dtype=None)
        logits = part(inputs[mine])
        loss = vocab_cross_entropy(logits.flatten(0, 1), targets[mine].flatten(), tp)
        (loss / targets.numel()).backward()
        sum_gradients(part, mesh, tp)
        assert torch.allclose(gradient_norm(part, mesh, tp), norm, rtol=1e-12), sizes
        for (name, p), q in zip(part.named_parameters(), whole.parameters()):
            grad = gather(p.grad, tp.cuts.get(name), mesh)
            assert grad is None or torch.allclose(grad, q.grad, rtol=1e-10, atol=1e-12), name


def benchmark(rank: int, ranks: int) -> None:
    """Milliseconds of forward and backward passes, on this machine, whose ranks share its cores."""
    say = print if rank == 0 else lambda *_: None
    V, C, L, T = 2048, 512, 4, 512
    mesh, tokens = make_mesh(tp=ranks), torch.randint(V, (1, T))
    say(f"tp {ranks}: {L} layers of C {C}, T {T}, V {V}, fp32, forward + backward, ms")
    for name, cut in (
        ("torch's DTensor", lambda m: _dtensor_tp(m, mesh.world["tp"])),
        ("apply_tp", lambda m: apply_tp(m, mesh)),
        ("apply_tp, sequence", lambda m: apply_tp(m, mesh, sequence_parallel=True)),
    ):
        torch.manual_seed(0)
        model = _Model(V, C, L, Hq=8, Hkv=4)
        cut(model)
        ms = _ms(lambda: F.cross_entropy(model(tokens)[0], tokens[0]).backward())
        say(f"{name:>22}{ms:>9.1f}")


def _dtensor_tp(model: nn.Module, mesh: DeviceMesh) -> None:
    """The same cuts as a plan of torch's parallelize_module."""
    column, row = ColwiseParallel(), RowwiseParallel()
    names = dict(q_proj=column, k_proj=column, v_proj=column, o_proj=row)
    plan = {f"attention.{name}": how for name, how in names.items()}
    plan |= {"mlp.gate_proj": column, "mlp.up_proj": column, "mlp.down_proj": row}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    ends = dict(embed=RowwiseParallel(input_layouts=Replicate()))
    ends["head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, ends)


def _ms(work: Callable[[], Any], times: int = 7) -> float:
    spent = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        spent.append(1e3 * (time.perf_counter() - start))
    return statistics.median(spent[2:])


def main() -> None:
    if "RANK" not in os.environ:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        sys.exit(subprocess.run([*run, *sys.argv], env=os.environ | threads).returncode)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _check(ranks == 4, f"the check is for 4 ranks, not {ranks}")
    check(rank, ranks)
    if "--check" not in sys.argv:
        benchmark(rank, ranks)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
