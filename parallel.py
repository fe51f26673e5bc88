"""One model on many ranks: meshes, tensor and sequence parallelism, FSDP, gradients and norms.

A training step multiplies a batch of sequences by sharded weight matrices. Each dimension can be
split over ranks, at the price of communication:

    dimension   a rank has a shard of                   and in every layer
    dp          the batch                               (gradients, once a step)
    fsdp        and of all parameters (ZeRO)            gathers each block, scatters its gradient
    tp          heads and columns of every matrix       2 all-reduces forward, 2 backward
     + sp       and of the sequence between these       each as all-gather + reduce-scatter
    cp          the sequence                            keys of other ranks (context_parallel.py)
    pp          the layers                              (hidden states to the next; pipeline.py)
    ep          the experts                             tokens, there and back (expert_parallel.py)

    mesh = make_mesh(dp_shard=2, cp=2, tp=2)            DeviceMesh of torch, with views of it
    tp = apply_tp(model, mesh, sequence_parallel=True)  print(tp): the sharding plan
    apply_fsdp(model, mesh)                             torch's fully_shard, group by group
    loss.backward(); sum_gradients(model, mesh, tp); gradient_norm(model, mesh, tp)

TP leaves plain tensors in the model's own Linear layers; all communication is in two hooks around
attention and feed-forward. So whatever swaps or reads layers (quantization, kernels, LoRA) works on
a rank's shard as on a narrower model, and a step has no DTensor dispatch. The price: this file must
know which gradients are partial sums (`partial_grads`). FSDP-sharded parameters are torch DTensors.

A loss is a sum over tokens divided by the token count of all ranks, never a mean of means, and all
gradients are sums. So one process and any parallel layout are the same run: test_all.py compares
loss, every gradient, its norm and the weights after several steps, for every dimension and every
pair of dimensions, and counts the collectives.

When it loses: tp over links slower than the matmuls (keep it inside a node); cp where a sequence
fits, since a rank then has less compute per byte sent; fsdp with micro-batches too small to hide
the gather of a block. Needs: torch. A check and a table: `torchrun --standalone --nproc-per-node 2
parallel.py`.
"""

from __future__ import annotations

import copy
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

Group = dist.ProcessGroup

# torch 2.13 renamed these two; torch 2.11 has only the old names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# The mesh
# --------------------------------------------------------------------------------------------------

DIMS = "pp", "dp_replicate", "dp_shard", "cp", "tp"  # not the order of ranks: see make_mesh


@dataclass(frozen=True)
class Mesh:
    """The ranks as a grid, with two views of it. `dense` flattens dp_shard and cp to one dimension,
    fsdp: both have different tokens, so parameters are sharded over both. `experts` splits the same
    ranks into expert_fsdp x ep."""

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
        """The process group of this rank along `dim`."""
        return self._view(dim).get_group(dim)

    def size(self, dim: str) -> int:
        view = self._view(dim)
        return view.size(view.mesh_dim_names.index(dim))

    def rank(self, dim: str) -> int:
        return self._view(dim).get_local_rank(dim)

    @property
    def dp_rank_and_size(self) -> tuple[int, int]:
        """This rank's index among the data-parallel ranks, which have different batches, and their
        number."""
        shards = self.size("dp_shard")
        rank = self.rank("dp_replicate") * shards + self.rank("dp_shard")
        return rank, self.size("dp_replicate") * shards

    def __str__(self) -> str:
        """A line per tp group, with its index in the other dimensions."""
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
    """The grid of all ranks, numbered with tp varying fastest, then cp, pp, dp_shard, dp_replicate:
    dimensions with more traffic that cannot overlap have nearer ranks (Llama 3, arXiv:2407.21783,
    3.3.2). Experts are sharded over `ep` ranks of dp_shard x cp. ValueError if
    the product of the sizes is not the world size. Collective: all ranks call it with the same
    sizes."""
    sizes = dict(zip(DIMS, (pp, dp_replicate, dp_shard, cp, tp)))
    for name, size in {**sizes, "ep": ep}.items():
        _check(size >= 1, f"{name} must be at least 1, not {size}")
    total, world = math.prod(sizes.values()), dist.get_world_size()
    product = " x ".join(f"{name} {size}" for name, size in sizes.items())
    _check(total == world, f"{product} = {total}, but there are {world} ranks: change a size")
    fsdp = dp_shard * cp
    _check(
        fsdp % ep == 0,
        f"ep {ep} must divide dp_shard {dp_shard} x cp {cp} = {fsdp}, the ranks with different "
        "tokens",
    )
    ranks = torch.arange(world).view(dp_replicate, dp_shard, pp, cp, tp).permute(2, 0, 1, 3, 4)
    view = lambda names, *shape: DeviceMesh(
        device_type, ranks.reshape(pp, dp_replicate, *shape, tp), mesh_dim_names=names
    )
    dense = view(("pp", "dp_replicate", "fsdp", "tp"), fsdp)
    experts = view(("pp", "dp_replicate", "expert_fsdp", "ep", "tp"), fsdp // ep, ep)
    return Mesh(view(DIMS, dp_shard, cp), dense, experts)


# --------------------------------------------------------------------------------------------------
# Tensor and sequence parallelism
# --------------------------------------------------------------------------------------------------


class _Collective(torch.autograd.Function):
    """forward_fn(x, group), whose gradient is backward_fn(grad, group)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward_fn: Callable, backward_fn: Callable, group: Group
    ) -> Tensor:
        ctx.backward_fn, ctx.group = backward_fn, group
        return forward_fn(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_fn(grad, ctx.group), None, None, None


def _identity(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _all_gather(x: Tensor, group: Group) -> Tensor:
    """(B, t, ...) of every rank -> (B, t * ranks, ...)"""
    ranks = dist.get_world_size(group)
    parts = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    all_gather(parts, x.contiguous(), group=group)
    return parts.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """(B, T, ...) of every rank -> the sum's shard (B, T / ranks, ...)"""
    ranks = dist.get_world_size(group)
    _check(
        x.shape[1] % ranks == 0,
        f"sequence parallelism: {x.shape[1]} tokens must be a multiple of the {ranks} ranks",
    )
    parts = x.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    out = x.new_empty(x.shape[0], x.shape[1] // ranks, *x.shape[2:])
    reduce_scatter(out, parts, group=group)
    return out


@dataclass(frozen=True)
class TPShard:
    """This rank's shard of a full tensor, whose dimension `dim` stacks `blocks` blocks of
    `block_size`. The rank has rows start .. stop - 1 of every block; `copies` ranks have the same
    shard."""

    dim: int
    start: int
    stop: int
    block_size: int
    blocks: int = 1
    copies: int = 1

    def slice(self, tensor: Tensor) -> Tensor:
        """The shard of a full tensor."""
        rows = [b.narrow(self.dim, self.start, self.stop - self.start)
                for b in tensor.split(self.block_size, self.dim)]  # fmt: skip
        return torch.cat(rows, self.dim)

    def full_shape(self, shard: Sequence[int]) -> tuple[int, ...]:
        """The shape of the full tensor, from the shard's."""
        return (*shard[: self.dim], self.blocks * self.block_size, *shard[self.dim + 1 :])


# How each module is sharded, by the suffix of its name. Of a Linear's weight (out, in), "column"
# shards the rows, "heads" and "kv_heads" the rows in whole heads, and "row" the columns. A "region"
# starts with full tokens on every rank and ends with a sum over ranks (Megatron's f and g).
PLAN = {
    "embed": "embedding",
    "attention": "region",
    "attention.q_proj": "heads",
    "attention.k_proj": "kv_heads",
    "attention.v_proj": "kv_heads",
    "attention.temperature": "heads",
    "attention.q_conv": "heads",
    "attention.k_conv": "kv_heads",
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
    """The result of apply_tp. Printed, it is the sharding plan: a line per kind of parameter."""

    group: Group
    sequence: bool  # sequence parallel: between regions, a rank has a shard of the sequence
    shards: dict[str, TPShard] = field(default_factory=dict)
    partial_grads: set[str] = field(default_factory=set)  # replicated; gradients need a sum
    kinds: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    @property
    def vocab_start(self) -> int:
        """The first token id of this rank's vocabulary shard."""
        shard = self.shards.get("head.weight") or self.shards.get("embed.weight")
        return 0 if shard is None else shard.start

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


class VocabParallelEmbedding(nn.Embedding):
    """An embedding with this rank's rows, from `start` on: tokens of other ranks give zeros, and
    `reduce` sums over ranks."""

    start: int
    reduce: Callable[[Tensor], Tensor]

    def forward(self, tokens: Tensor) -> Tensor:
        rows = tokens - self.start
        others = (rows < 0) | (rows >= len(self.weight))
        x = F.embedding(rows.masked_fill(others, 0), self.weight)
        return self.reduce(x.masked_fill(others[..., None], 0.0))


def apply_tp(
    model: nn.Module,
    mesh: Mesh,
    *,
    sequence_parallel: bool = False,
    async_matmuls: tuple[Callable[..., list[Tensor]], Callable[..., Tensor]] | None = None,
    gather_logits: bool = True,
) -> TensorParallel:
    """Shard the model in place for tensor parallelism (Megatron-LM, arXiv:1909.08053). The first
    matrices of a region are column-parallel and its last is row-parallel, so that attention and
    feed-forward each need one all-reduce forward and one backward. The model may be on the meta
    device; model.tp_shards tells the loader what to read.

    sequence_parallel: between regions a rank has a shard of the sequence, and each all-reduce
    becomes an all-gather and a reduce-scatter (Korthikanti et al., arXiv:2205.05198): the same
    bytes, 1 / tp of the norms' work and activations. The gathered input of attention and MLP is not
    kept: backward gathers it again for the weight gradients, as in Megatron-LM. async_matmuls:
    (all_gather_matmul, matmul_reduce_scatter) of async_tp.py, which overlap communication with the
    matmuls and keep only shards.
    gather_logits=False leaves each rank the logits of its vocabulary shard, for
    vocab_cross_entropy. The gather is a hook on the head module: it is lost if the head is swapped.
    With more ranks than key heads, key heads are replicated.

    ValueError for sizes that tp does not divide.
    """
    group, rank, ranks = mesh.group("tp"), mesh.rank("tp"), mesh.size("tp")
    _check(sequence_parallel or not async_matmuls, "async_matmuls requires sequence_parallel=True")
    tp = TensorParallel(group, sequence_parallel and ranks > 1)
    if ranks == 1:
        return tp
    mtp = sequence_parallel and len(getattr(model, "mtp", ())) > 0
    _check(not mtp, "sequence_parallel cannot be combined with MTP layers: they shift the tokens")
    for name, p in model.named_parameters():
        kind = _plan_kind(name) or _plan_kind(name.rpartition(".")[0])
        kind = None if kind == "region" else kind
        whole = tuple(p.shape)
        if kind is not None and (shard := _make_shard(kind, name, p, model.config, rank, ranks)):
            p.data = shard.slice(p.data)
            tp.shards[name] = shard
        elif tp.sequence or _in_region(name):
            tp.partial_grads.add(name)
        tp.kinds[name] = (kind or "replicated", whole, tuple(p.shape))
    model.tp_shards |= tp.shards
    _connect(model, tp, rank, async_matmuls, gather_logits)
    return tp


def _connect(
    model: nn.Module, tp: TensorParallel, rank: int, async_matmuls: Any,
    gather_logits: bool,
) -> None:  # fmt: skip
    """Register the communication hooks at both ends of every region."""
    group, ranks = tp.group, dist.get_world_size(tp.group)
    # Megatron's f and g: the gradient of each is the other
    f, g = (_all_gather, _reduce_scatter) if tp.sequence else (_identity, _all_reduce)
    enter = lambda x: _Collective.apply(x, f, g, group)
    leave = lambda x: _Collective.apply(x, g, f, group)
    for name, module in list(model.named_modules()):
        kind = _plan_kind(name)
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        if hasattr(module, "first_head"):
            module.first_head = rank * (model.config.n_heads // ranks)
        leaves = [leaf for leaf, _ in module.named_children()]
        row = next((leaf for leaf in leaves if _plan_kind(f"{name}.{leaf}") == "row"), None)
        if kind == "region" and async_matmuls and hasattr(module, "linear_fn"):
            module.linear_fn = partial(_async_column_linears, async_matmuls[0], group)
            setattr(module, row, AsyncRowLinear(getattr(module, row), async_matmuls[1], group))
        elif kind == "region" and tp.sequence and hasattr(module, "linear_fn"):
            module.linear_fn = partial(_column_linears, enter, group)
            module.register_forward_hook(partial(_exit_region, leave, row, rank))
        elif kind == "region":
            # an MoE router needs its input uncast; matmuls under autocast would cast theirs anyway
            cast = (lambda x: x) if hasattr(module, "experts") else _as_autocast
            module.register_forward_pre_hook(lambda m, a, cast=cast: (enter(cast(a[0])), *a[1:]))
            module.register_forward_hook(partial(_exit_region, leave, row, rank))
        elif kind == "embedding":
            new = VocabParallelEmbedding.from_pretrained(module.weight, freeze=False)
            new.weight, new.start = module.weight, tp.shards[f"{name}.weight"].start
            new.reduce = leave
            model.set_submodule(name, new)
        elif kind == "vocab":
            module.register_forward_pre_hook(lambda m, a: (enter(_as_autocast(a[0])), *a[1:]))
            if gather_logits:
                size = model.config.vocab_size
                gather_logits_hook = lambda m, a, y: _GatherLogits.apply(y, size, rank, group)
                module.register_forward_hook(gather_logits_hook)


class AsyncRowLinear(nn.Module):
    """The row-parallel layer of a region, with its matmul overlapped with the reduce-scatter."""

    def __init__(self, linear: nn.Linear, matmul: Callable[..., Tensor], group: Group):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.matmul, self.group = matmul, group

    def forward(self, x: Tensor) -> Tensor:
        y = self.matmul(x, self.weight, self.group)
        return y if self.bias is None else y + self.bias.type_as(y)


def _async_column_linears(
    matmul: Callable[..., list[Tensor]], group: Group, x: Tensor, *linears: nn.Linear
) -> list[Tensor]:
    """The hook for several column-parallel linears of one input: one all-gather ring for all."""
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    return matmul(x, weights, group, biases)


class _GatherLinears(torch.autograd.Function):
    """[F.linear(all_gather(x), w_i, b_i)] of x (B, t, C); saves x, and gathers it again in backward
    while the gradient of the input is computed (Korthikanti et al., 4.2.2)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, n: int, *tensors: Any) -> tuple[Tensor, ...]:
        weights, biases, ctx.group = tensors[:n], tensors[n:], group
        ctx.save_for_backward(x, *weights)
        full = _all_gather(x, group)
        return tuple(F.linear(full, w, b) for w, b in zip(weights, biases))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (x, *weights), n, ranks = ctx.saved_tensors, len(grads), dist.get_world_size(ctx.group)
        need, gathered = ctx.needs_input_grad[3:], None
        if any(need[:n]):
            gathered = x.new_empty(ranks * x.shape[0], *x.shape[1:])
            work = all_gather(gathered, x.contiguous(), group=ctx.group, async_op=True)
        grad_x = sum(grad @ w for grad, w in zip(grads, weights))
        grad_w, grad_b = [None] * n, [g.sum((0, 1)) if b else None for g, b in zip(grads, need[n:])]
        if gathered is not None:
            work.wait()
            full = gathered.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2).flatten(0, 1)
            grad_w = [g.flatten(0, 1).t() @ full if w else None for g, w in zip(grads, need)]
        return _reduce_scatter(grad_x, ctx.group), None, None, *grad_w, *grad_b


def _column_linears(
    enter: Callable[[Tensor], Tensor], group: Group, x: Tensor, *linears: nn.Module
) -> list[Tensor]:
    """The hook for the column-parallel linears of one input under sequence parallelism. Quantized
    and LoRA linears need the gathered input, which is then kept."""
    x = _as_autocast(x)
    if any(type(linear) is not nn.Linear for linear in linears):
        x = enter(x)
        return [linear(x) for linear in linears]
    biases = [linear.bias for linear in linears]
    tensors = [t if t is None else _as_autocast(t) for t in (*(m.weight for m in linears), *biases)]
    return list(_GatherLinears.apply(x, group, len(linears), *tensors))


def _plan_kind(name: str) -> str | None:
    ends = (name.split(".", i)[-1] for i in range(name.count(".") + 1))
    return next((PLAN[end] for end in ends if end in PLAN), None)


def _in_region(name: str) -> bool:
    steps = name.split(".")
    return any(_plan_kind(".".join(steps[:i])) == "region" for i in range(1, len(steps)))


def _make_shard(
    kind: str, name: str, p: Tensor, config: Any, rank: int, ranks: int
) -> TPShard | None:
    """This rank's TPShard of a parameter; None for the bias of a row-parallel layer."""
    if kind == "row" and p.dim() == 1:
        return None
    dim, blocks = {"row": (1, 1), "gate_up": (1, 2), "down": (2, 1)}.get(kind, (0, 1))
    whole, copies = p.shape[dim] // blocks, 1
    if kind in ("embedding", "vocab"):  # may be uneven
        each = -(-whole // ranks)
        ok = (ranks - 1) * each < whole
        _check(ok, f"tp {ranks} leaves a rank with none of {name}'s {whole} rows: use fewer ranks")
        return TPShard(0, min(whole, rank * each), min(whole, (rank + 1) * each), whole)
    units, what = whole, f"the {whole} of {name}"
    if kind == "heads":
        units, what = config.n_heads, f"n_heads {config.n_heads}"
    if kind == "kv_heads":
        units, what = config.n_kv_heads, f"n_kv_heads {config.n_kv_heads}"
        if ranks % units == 0:
            copies = ranks // units
    _check(units % (ranks // copies) == 0, f"tp {ranks} does not divide {what}: use a divisor")
    each = whole // (ranks // copies)
    return TPShard(dim, rank // copies * each, (rank // copies + 1) * each, whole, blocks, copies)


def _as_autocast(x: Tensor) -> Tensor:
    """Cast x as autocast would for a matmul, before it is sent: half the bytes."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _exit_region(
    leave: Callable, row: str | None, rank: int, module: nn.Module, args: Any, y: Tensor
) -> Tensor:
    """Sum a region's output over ranks. Every rank's Linear has added the bias; all ranks but the
    first subtract it again, so that the sum has it once."""
    bias = getattr(module.get_submodule(row), "bias", None) if row else None
    return leave(y if bias is None or rank == 0 else y - bias.type_as(y))


class _GatherLogits(torch.autograd.Function):
    """All-gather logits (B, T, V / ranks) -> (B, T, V); backward takes this rank's slice."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, size: int, rank: int, group: Group) -> Tensor:
        max_size = -(-size // dist.get_world_size(group))
        ctx.local = slice(rank * max_size, rank * max_size + y.shape[-1])
        parts = _all_gather(F.pad(y, (0, max_size - y.shape[-1])).movedim(-1, 1), group)
        return parts.movedim(1, -1)[..., :size]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[..., ctx.local], None, None, None


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, start: int, group: Group) -> Tensor:
        """log(sum exp(l)) - l[target] of vocabulary-sharded logits: one all-reduce of maxima (N,)
        and one of (sum of exp, target logit) (2, N)."""
        top = logits.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        shifted = logits - top[:, None]
        column = targets - start
        others = (column < 0) | (column >= logits.shape[-1])
        column = column.masked_fill(others, 0)[:, None]  # indexing by `others` would sync
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
    """Summed cross-entropy in nats of this rank's logits (N, V / ranks) and targets (N,), equal on
    all ranks. The logits are never gathered; only this rank's shard of the softmax is kept for the
    backward pass (Megatron-LM, 3)."""
    losses = _VocabCrossEntropy.apply(logits.float() if logits.dtype != torch.float64 else logits,
                                      targets, tp.vocab_start, tp.group)  # fmt: skip
    return losses.masked_fill(targets == ignore_index, 0.0).sum()


# --------------------------------------------------------------------------------------------------
# Data parallelism: sharded parameters, gradients, full tensors for checkpoints
# --------------------------------------------------------------------------------------------------


def apply_fsdp(
    model: nn.Module,
    mesh: Mesh,
    *,
    stage: int = 3,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    node_size: int | None = None,
    all_gather: Any = None,
    reduce_scatter: Any = None,
    separate_head: bool = False,
    prefetch: bool | None = None,
) -> None:
    """Shard parameters, gradients and optimizer states over dp_shard x cp, in place, with torch's
    fully_shard: one parameter group per block, one for the embedding, one for norm and head. With
    dp_replicate > 1 the shards are replicated (HSDP). MoE layers are groups over expert_fsdp, whose
    ranks have the same experts.

    stage (ZeRO, arXiv:1910.02054): 3 gathers a group before its forward and again before its
    backward pass; 2 keeps it gathered in between; 1 also keeps gradients unsharded until
    `set_last_micro_batch`.
    param_dtype: gathered parameters are cast to it, norms and routers too, and with the embedding
    the residual stream. Inputs are not cast: run matmuls under autocast. Gradients are reduced in
    reduce_dtype, as sums over ranks, not means: divide the loss by the token count of all ranks.
    node_size: with stage 3, the backward pass gathers within groups of node_size neighbours, which
    keep a secondary shard (ZeRO++'s hpZ).
    all_gather, reduce_scatter: for FSDPModule.set_custom_all_gather and _reduce_scatter.
    separate_head: norm and head are two groups, for a head not called in the model's forward.
    prefetch: with stage 3, gather each block's parameters while the block before it runs (in the
    backward pass, the block after it), as torchtitan does with expert parallelism: else a host that
    waits in each MoE layer for the tokens per expert launches the next gather too late. None: if
    the model has experts and is on a GPU.
    """
    _check(stage in (1, 2, 3), f"stage must be 1, 2 or 3, not {stage}")
    # inputs are not cast: they include RoPE's cos and sin, whose angles bf16 would change
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
    options = dict(mp_policy=policy, reshard_after_forward=stage == 3 and (node_size or True))
    dims = ("dp_replicate",) if mesh.size("dp_replicate") > 1 else ()
    dense = dict(mesh=mesh.dense[(*dims, "fsdp")], **options)
    experts = dict(mesh=mesh.experts[(*dims, "expert_fsdp")], **options)
    for block in (*model.layers, *getattr(model, "mtp", ())):
        for module in block.modules():
            if any(map(is_expert_stack, module.parameters(recurse=False))):
                fully_shard(module, **experts)
        fully_shard(block, **dense)
    for group in _ends(model, separate_head):
        fully_shard(group, **dense)
    fully_shard(model, **dense)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _set_collectives(module, all_gather, reduce_scatter)
    if prefetch is None:
        has_experts = any(map(is_expert_stack, model.parameters()))
        prefetch = has_experts and mesh.dense.device_type == "cuda"
    if prefetch and stage == 3:
        _prefetch_blocks(model)


def _set_collectives(module: FSDPModule, all_gather: Any, reduce_scatter: Any) -> None:
    """Gradients are sums over ranks; collectives other than torch's, if given."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    if all_gather is not None:
        module.set_custom_all_gather(all_gather)
    if reduce_scatter is not None:
        module.set_custom_reduce_scatter(reduce_scatter)


def _prefetch_blocks(model: nn.Module) -> None:
    """Gather the parameters of the next block in forward, and of the one before in backward."""
    groups = [[m for m in b.modules() if isinstance(m, FSDPModule)] for b in model.layers]
    for block, next_block in zip(groups, groups[1:]):
        block[0].set_modules_to_forward_prefetch([*block[1:], *next_block])  # in order of use
        next_block[0].set_modules_to_backward_prefetch([*next_block[1:], *block])


def _ends(model: nn.Module, separate_head: bool) -> list[list[nn.Module]]:
    """The FSDP groups of norm, head and embedding; a pipeline stage lacks some of these."""
    norm, head, embed = model.norm, model.head, model.embed
    if head is not None and embed is not None and head.weight is embed.weight:
        ends = [norm], [head, embed]
    elif separate_head or len(getattr(model, "mtp", ())) > 0:  # MTP calls the head more often
        ends = [norm], [head], [embed]
    else:
        ends = [norm, head], [embed]
    present = ([module for module in group if module is not None] for group in ends)
    return [group for group in present if group]


def set_last_micro_batch(model: nn.Module, stage: int, last: bool) -> None:
    """Call before the forward pass of each micro-batch of a step. Until the last one, stages 1 and
    2 keep gathered parameters, and stage 1 unsharded gradients. No-op without FSDP."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or stage > 1)
        model.set_reshard_after_backward(last or stage == 3)


def reshard(model: nn.Module, stage: int) -> None:
    """Free the parameters gathered by forward passes that had no backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if stage < 3:
                module.set_reshard_after_forward(True, recurse=False)
            module.reshard()
            if stage < 3:
                module.set_reshard_after_forward(False, recurse=False)


def to_local(x: Tensor) -> Tensor:
    """The local shard of a DTensor; other tensors unchanged."""
    return x.to_local() if isinstance(x, DTensor) else x


def is_expert_stack(p: Tensor) -> bool:
    """Whether a parameter stacks one matrix per expert, (E, ...): no other has three dims."""
    return p.dim() == 3


def sum_gradients(model: nn.Module, mesh: Mesh, tp: TensorParallel) -> None:
    """Call after the backward passes of a step: all-reduce the gradients that neither these nor
    fully_shard have reduced. Parameters replicated over tp with sharded inputs or outputs: over tp.
    Replicated key heads: over the ranks with the same heads. Parameters without FSDP: over data
    parallelism, experts over the ranks with the same experts. Routers sharded with their experts:
    over ep. A parameter that got no gradient on any rank keeps None: optimizers skip it."""
    over_tp: list[tuple[Tensor, int, int]] = []
    over: dict[str, list[Tensor]] = {"fsdp": [], "expert_fsdp": [], "dp_replicate": [], "ep": []}
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for (name, p), has_gradient in zip(trainable, _have_gradients(trainable, mesh)):
        if not has_gradient:
            continue
        if p.grad is None:  # experts without tokens, in some experts implementations
            p.grad = torch.zeros_like(p)
        grad = to_local(p.grad)
        copies = tp.shards[name].copies if name in tp.shards else 0
        if name in tp.partial_grads or copies > 1:
            pieces = mesh.size("tp") // copies if copies else 1
            over_tp.append((grad, pieces, mesh.rank("tp") // copies if copies else 0))
        if not isinstance(p, DTensor):
            over["expert_fsdp" if is_expert_stack(p) else "fsdp"].append(grad)
            over["dp_replicate"].append(grad)
        elif "expert_fsdp" in p.device_mesh.mesh_dim_names and not is_expert_stack(p):
            over["ep"].append(grad)
    for dim, grads in over.items():
        _sum_each(grads, mesh.group(dim))
    _sum_over_tp(over_tp, mesh.group("tp"))


def _have_gradients(trainable: list[tuple[str, nn.Parameter]], mesh: Mesh) -> list[int]:
    """Whether each parameter has a gradient on any rank with other tokens."""
    here = [int(p.grad is not None) for _, p in trainable]
    device = to_local(trainable[0][1]).device if trainable else "cpu"
    found = torch.tensor(here, dtype=torch.int32, device=device)
    for dim in ("fsdp", "dp_replicate"):
        if mesh.size(dim) > 1 and here:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.group(dim))
    return found.tolist()


BUCKET_BYTES = 32 * 2**20  # enough for the full bandwidth of a network


def _sum_each(grads: list[Tensor], group: Group) -> None:
    """All-reduce the gradients in flat buckets, all at once: it takes memory for a copy of them."""
    if dist.get_world_size(group) == 1:
        return
    transfers = []
    for bucket in _buckets(grads):
        flat = torch.cat([g.flatten() for g in bucket])
        transfers.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, transfer in transfers:
        transfer.wait()
        parts = flat.split([g.numel() for g in bucket])
        torch._foreach_copy_(bucket, [part.view(g.shape) for part, g in zip(parts, bucket)])


def _buckets(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Consecutive tensors of one dtype, at most BUCKET_BYTES or one tensor per bucket."""
    buckets, size = [], 0
    for x in tensors:
        if buckets and x.dtype == buckets[-1][0].dtype and size + x.nbytes <= BUCKET_BYTES:
            buckets[-1].append(x)
            size += x.nbytes
        else:
            buckets.append([x])
            size = x.nbytes
    return buckets


def _sum_over_tp(grads: list[tuple[Tensor, int, int]], group: Group) -> None:
    """Sum each (gradient, number of pieces, index) over the ranks with the same piece, in one
    all-reduce of a flat buffer of all pieces, zero at the other ranks' pieces."""
    if not grads:
        return
    sizes = [g.numel() * n for g, n, _ in grads]
    max_size = max((g.dtype for g, _, _ in grads), key=lambda dtype: dtype.itemsize)
    flat = grads[0][0].new_zeros(sum(sizes), dtype=max_size)
    spans = flat.split(sizes)
    local = [span.view(n, *g.shape)[i] for span, (g, n, i) in zip(spans, grads)]
    for piece, (g, _, _) in zip(local, grads):
        piece.copy_(g)
    dist.all_reduce(flat, group=group)
    for piece, (g, _, _) in zip(local, grads):
        g.copy_(piece)


def gradient_norm(
    model: nn.Module, mesh: Mesh, tp: TensorParallel, num_copies: Mapping[str, int] | None = None
) -> Tensor:
    """The norm of the whole model's gradient, bitwise equal on all ranks. An element replicated on
    n ranks counts 1 / n on each. num_copies: of parameters along pp, by name (default 1)."""
    ranks = dist.get_world_size() // mesh.size("pp")
    grads: dict[float, list[Tensor]] = {}  # by shards / copies along pp
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        shards = 1
        if isinstance(p, DTensor):
            sizes = zip(p.device_mesh.shape, p.placements)
            shards = math.prod(n for n, placement in sizes if placement.is_shard())
        if name in tp.shards:
            shards *= mesh.size("tp") // tp.shards[name].copies
        if is_expert_stack(p):
            shards *= mesh.size("ep")
        shards /= (num_copies or {}).get(name, 1)
        grads.setdefault(shards, []).append(to_local(p.grad))
    total = sum(squared_norm(group) * (shards / ranks) for shards, group in grads.items())
    dist.all_reduce(total)
    return total.sqrt()


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of all squares, in fp32 or wider. On a GPU in a few launches, without the squares in
    memory."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    if tensors[0].is_cuda:  # norms on a CPU are off by 1e-4
        return torch.stack(torch._foreach_norm(tensors, 2, wide)).square().sum()
    return torch.stack([x.to(wide).square().sum() for x in tensors]).sum()


@torch.no_grad()
def clip_gradients(model: nn.Module, norm: Tensor, max_norm: float) -> None:
    """Scale the gradient to max_norm if its norm, from gradient_norm, is larger."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    grads = [to_local(p.grad) for p in model.parameters() if p.grad is not None]
    for dtype in {g.dtype for g in grads}:
        torch._foreach_mul_([g for g in grads if g.dtype == dtype], scale.to(dtype))


@torch.no_grad()
def copy_shard_(p: Tensor, full: Tensor, shard: TPShard | None = None) -> None:
    """Copy into p its shard of a full tensor. p may be sharded by tp, by FSDP, by both or not."""
    part = full if shard is None else shard.slice(full)
    if isinstance(p, DTensor):
        part = part.to(p.device)
        part = distribute_tensor(part, p.device_mesh, p.placements, src_data_rank=None)
    to_local(p).copy_(to_local(part))


@torch.no_grad()
def gather_full_tensor(x: Tensor, shard: TPShard | None, mesh: Mesh) -> Tensor | None:
    """The full tensor of which x is this rank's shard, on the first tp rank (None on others).
    Collective."""
    x = x.full_tensor() if isinstance(x, DTensor) else x.detach()
    if shard is None:
        return x
    ranks, first, dim = mesh.size("tp"), mesh.rank("tp") == 0, shard.dim
    max_size = -(-shard.block_size // (ranks // shard.copies)) * shard.blocks
    x = F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, max_size - x.shape[dim])).contiguous()
    parts = [torch.empty_like(x) for _ in range(ranks)] if first else None
    dist.gather(x, parts, group=mesh.group("tp"), group_dst=0)
    if not first:
        return None
    blocks = [part.unflatten(dim, (shard.blocks, -1)) for part in parts[:: shard.copies]]
    return torch.cat(blocks, dim + 1).narrow(dim + 1, 0, shard.block_size).flatten(dim, dim + 1)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


class _MLP(nn.Module):
    def __init__(self, C: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(C, 3 * C), nn.Linear(C, 3 * C)
        self.down_proj = nn.Linear(3 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def main() -> None:
    """Gradients of a tensor-parallel MLP == one process's; milliseconds beside torch's DTensor."""
    if "RANK" not in os.environ:
        sys.exit("run: torchrun --standalone --nproc-per-node 2 parallel.py")
    from torch.distributed.tensor import parallel as dtensor  # here: slow to import
    from torch.utils.benchmark import Timer

    gpu = torch.cuda.is_available()
    torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    C, T = (4096, 4096) if gpu else (512, 512)
    torch.manual_seed(0)
    whole, x = nn.Sequential(OrderedDict(mlp=_MLP(C))), torch.randn(1, T, C)
    whole.config, whole.tp_shards = None, {}
    part, peer = copy.deepcopy(whole), copy.deepcopy(whole)
    step = lambda model: model(x).square().sum().backward()
    mesh = make_mesh(tp=ranks, device_type="cuda" if gpu else "cpu")
    tp = apply_tp(part, mesh)
    step(whole), step(part), sum_gradients(part, mesh, tp)
    for (name, p), q in zip(part.named_parameters(), whole.parameters()):
        grad = gather_full_tensor(p.grad, tp.shards.get(name), mesh)
        assert grad is None or (grad - q.grad).norm() < 1e-5 * q.grad.norm(), name
    plan = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), dtensor.ColwiseParallel())
    plan["mlp.down_proj"] = dtensor.RowwiseParallel()
    dtensor.parallelize_module(peer, mesh.world["tp"], plan)
    for name, model in {"apply_tp": part, "parallelize_module": peer}.items():
        # the same number of runs on all ranks
        ms = 1e3 * Timer("step(m)", globals=dict(step=step, m=model)).timeit(10).mean
        if rank == 0:
            print(f"MLP, C {C}, T {T}, tp {ranks}, forward + backward, {name}: {ms:.1f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
