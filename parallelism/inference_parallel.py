"""Parallel layouts for inference: batch-sharded attention, 2D feed-forward.

Tensor parallelism by heads (parallel.py) is the usual layout. Two cases it handles badly:

    batch_sharded_attend  Where heads share keys (multi-query attention, absorbed MLA), TP
                          replicates the KV cache on every rank. Sharded by batch rows, a rank
                          stores and reads 1/P of it ("Efficiently Scaling Transformer Inference",
                          arXiv:2211.05102, 3.3).
    FFN2D                 Megatron's feed-forward sends the same bytes for any number of ranks.
                          Sharded along both C and F it sends about 1/sqrt(P) of that, in four
                          collectives instead of two (3.2.2): for many ranks and many rows. With
                          still more rows (long prompts) it shards these instead, and gathers the
                          weights (3.2.3).

When they lose: on few ranks, where latency dominates (FFN2D has twice the collectives); with a
batch of one row, which cannot be sharded. Hooks: batch_sharded_attend wraps an `attend` callable;
FFN2D replaces an MLP. Equivalence (test_all.py): outputs == one rank's, caches of B/P rows, bytes
sent == the formulas in this file. Needs: torch. A check and a table: `torchrun --standalone
--nproc-per-node 2 parallelism/inference_parallel.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Group = dist.ProcessGroup | None  # None: all ranks

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Batch-sharded attention and 2D feed-forward
# --------------------------------------------------------------------------------------------------


def _check_no_grad(*tensors: Tensor) -> None:
    grads = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    _check(not grads, "these layouts have no backward: run them under torch.no_grad()")


def all_gather_dim(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """The ranks' tensors, concatenated along dim."""
    ranks, dim = dist.get_world_size(group), dim % x.dim()
    if ranks == 1:
        return x
    out = x.new_empty(ranks, *x.shape)
    all_gather(out.flatten(0, 1), x.contiguous(), group=group)  # gloo requires concatenation
    return out.movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter_dim(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """This rank's shard along dim of the sum of the ranks' tensors."""
    ranks, dim = dist.get_world_size(group), dim % x.dim()
    if ranks == 1:
        return x
    parts = x.unflatten(dim, (ranks, -1)).movedim(dim, 0).contiguous()
    reduce_scatter(out := torch.empty_like(parts[0]), parts.flatten(0, 1), group=group)
    return out


def _heads_to_batch(x: Tensor, group: Group) -> Tensor:
    """This rank's heads of all rows (B, T, H/P, D) -> all heads of its rows (B/P, T, H, D)."""
    parts = x.unflatten(0, (dist.get_world_size(group), -1)).contiguous()
    dist.all_to_all_single(out := torch.empty_like(parts), parts, group=group)
    return out.movedim(0, 2).flatten(2, 3)


def _batch_to_heads(x: Tensor, group: Group) -> Tensor:
    """The inverse of _heads_to_batch."""
    parts = x.unflatten(2, (dist.get_world_size(group), -1)).movedim(2, 0).contiguous()
    dist.all_to_all_single(out := torch.empty_like(parts), parts, group=group)
    return out.flatten(0, 1)


def batch_sharded_attend(
    attend: Callable[..., Tensor], group: Group = None
) -> Callable[..., Tensor]:
    """Wraps `attend` so that this rank's KV cache has only its B/P batch rows (3.3): `attend` is
    called with all heads of those rows. The caller passes all rows: q of the rank's Hq/P heads, and
    k, v that are replicated on all ranks, as in multi-query attention or absorbed MLA.

    Expanded MLA has k, v of the rank's heads, which go through the same all-to-all as q. If a cache
    calls `expand` for cached latents, all ranks must, for the same number of keys: the latents are
    gathered, expanded and exchanged, so prefill in one chunk, or raise `absorb_up_to`. ValueError
    if P does not divide B: pad the batch. It has no backward.
    """
    gather = partial(all_gather_dim, group=group, dim=0)

    def all_to_all(*tensors: Tensor) -> tuple[Tensor, ...]:
        both = _heads_to_batch(torch.cat(tensors, -1), group)
        return both.split([t.shape[-1] for t in tensors], -1)

    def run(spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        _check_no_grad(q, k, v)
        B, ranks, rank = len(q), dist.get_world_size(group), dist.get_rank(group)
        _check(B % ranks == 0, f"{B} rows are not divisible by {ranks} ranks: pad the batch")
        local = lambda t: t.chunk(ranks)[rank]
        by_head = {name: getattr(spec, name) for name in ("alibi_slopes", "sinks")}
        new = {name: gather(t) for name, t in by_head.items() if t is not None}
        if spec.expand is None:
            (q,), k, v = all_to_all(q), local(k), local(v)
        else:
            q, k, v = all_to_all(q, k, v)
            expand = lambda latent: all_to_all(*spec.expand(gather(latent)))
            new |= dict(latent=local(spec.latent), expand=expand)
        if positions.dim() == 2 and len(positions) == B:
            positions = local(positions)
        return _batch_to_heads(attend(replace(spec, **new), q, k, v, positions), group)

    return run


class FFN2D(nn.Module):
    """SwiGLU on X x Y ranks (3.2.2): rank (i, j) has shard i of X along C and shard j of Y along F
    of every weight: gate and up (F/Y, C/X), down (C/X, F/Y). The arguments are full weights;
    x_group: the ranks of this j in the order of i; y_group: those of this i.

        x (C/P) gather y -> (C/X) gate, up -> (F/Y) reduce-scatter x -> (F/P) silu(gate) * up
                gather x -> (F/Y) down     -> (C/X) reduce-scatter y -> (C/P)

    Input and output are (..., C/P), shard i * Y + j, in which norm and residual can stay; or, if
    `replicated`, (..., C), equal on all ranks, for one more gather. X = 1 is Megatron's layout.

    gather_weights requires `replicated`: where it sends fewer bytes, a rank gathers all weights,
    computes 1/P of the rows and drops the weights (3.2.3). FFN2D has no backward.
    """

    def __init__(
        self, gate: Tensor, up: Tensor, down: Tensor, x_group: Group, y_group: Group,
        replicated: bool = True, gather_weights: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.groups, self.replicated = (x_group, y_group), replicated
        self.gather_weights = gather_weights
        _check(replicated or not gather_weights, "gather_weights requires replicated=True")
        (i, j), (X, Y) = self.grid_coords()
        width, dim = len(gate), len(down)
        self.sizes = dim, width
        ok = width % (X * Y) == 0 and dim % (X * Y) == 0
        _check(ok, f"F {width} and C {dim} must be divisible by {X} x {Y} ranks")
        gate, up = (w.chunk(Y)[j].chunk(X, 1)[i] for w in (gate, up))
        down = down.chunk(X)[i].chunk(Y, 1)[j].clone()
        frozen = partial(nn.Parameter, requires_grad=False)
        self.gate_up, self.down = frozen(torch.cat((gate, up))), frozen(down)

    def grid_coords(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(i, j), (X, Y)"""
        getters = dist.get_rank, dist.get_world_size
        return tuple(tuple(get(group) for group in self.groups) for get in getters)

    def sends_weights(self, rows: int) -> bool:
        """Whether B * T = `rows` are so many that gathering the weights sends fewer bytes."""
        (X, Y), (C, F) = self.grid_coords()[1], self.sizes
        stationary = ffn_bytes(rows, C, F, X, Y, replicated=True)
        return self.gather_weights and gathered_ffn_bytes(rows, C, F, X * Y) < stationary

    def _weight_gathered(self, x: Tensor) -> Tensor:
        (i, j), (X, Y) = self.grid_coords()
        gather_all = lambda w, x_dim, y_dim: all_gather_dim(
            all_gather_dim(w, self.groups[0], x_dim), self.groups[1], y_dim
        )
        gate, up = (gather_all(w, 1, 0) for w in self.gate_up.chunk(2))
        down = gather_all(self.down, 0, 1)
        rows, n = x.flatten(0, -2), X * Y
        padded = F.pad(rows, (0, 0, 0, -len(rows) % n))
        local = padded.chunk(n)[i * Y + j]
        y = F.linear(F.silu(F.linear(local, gate)) * F.linear(local, up), down)
        y = all_gather_dim(all_gather_dim(y, self.groups[1], 0), self.groups[0], 0)
        return y[: len(rows)].view(x.shape)

    def forward(self, x: Tensor) -> Tensor:
        _check_no_grad(x)
        if self.sends_weights(x.shape[:-1].numel()):
            return self._weight_gathered(x)
        (i, _), (X, _) = self.grid_coords()
        x_group, y_group = self.groups
        x = x.chunk(X, -1)[i] if self.replicated else all_gather_dim(x, y_group)
        h = F.linear(x, self.gate_up).unflatten(-1, (2, -1))
        gate, up = _reduce_scatter_dim(h, x_group).unbind(-2)
        h = all_gather_dim(F.silu(gate) * up, x_group)
        y = _reduce_scatter_dim(F.linear(h, self.down), y_group)
        return all_gather_dim(all_gather_dim(y, y_group), x_group) if self.replicated else y


def ffn_bytes(
    rows: int, C: int, F: int, X: int, Y: int, itemsize: int = 2, replicated: bool = False
) -> float:
    """Bytes that a rank sends in FFN2D for B * T = `rows`: (n - 1) / n of the size of each gather
    or reduce-scatter over n ranks, C/X twice along Y and F/Y three times along X. The paper drops
    (n - 1) / n and has no gate: 2 rows (C/X + F/Y). X = 1 (Megatron): 2 rows C for any P."""
    width, hidden = (Y - 1) / Y * C / X, (X - 1) / X * F / Y
    back = (X * Y - 1) / (X * Y) * C if replicated else width
    return rows * itemsize * (width + back + 3 * hidden)


def gathered_ffn_bytes(rows: int, C: int, F: int, P: int, itemsize: int = 2) -> float:
    """Bytes that a rank sends in FFN2D if the weights are gathered: its shard of three matrices,
    and its rows of the output, to P - 1 ranks. Fewer than Megatron's 2 rows C if rows > 3 F."""
    return (P - 1) / P * (3 * C * F + rows * C) * itemsize


def best_grid(ranks: int, C: int, F: int, replicated: bool = False) -> tuple[int, int]:
    """The (X, Y) with X * Y = ranks that sends the fewest bytes: X is about
    sqrt(2/3 * ranks * C / F)."""
    grids = [(X, ranks // X) for X in range(1, ranks + 1) if ranks % X == 0]
    return min(grids, key=lambda grid: ffn_bytes(1, C, F, *grid, replicated=replicated))


def batch_sharded_bytes(rows: int, heads: int, dims: int, ranks: int, itemsize: int = 2) -> float:
    """Bytes that a rank sends in batch_sharded_attend for B * T = `rows` and Hq = `heads`; `dims`:
    D + Dv of q and o, or 2D + 2Dv for expanded MLA."""
    return rows * heads * dims * itemsize * (ranks - 1) / ranks**2


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """FFN2D == the feed-forward on one rank; milliseconds and bytes of each grid."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    if "RANK" not in os.environ:
        sys.exit("run: torchrun --standalone --nproc-per-node 2 parallelism/inference_parallel.py")
    gpu = torch.cuda.is_available()
    torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    C, width, rows = (8192, 28672, 64) if gpu else (512, 2048, 64)
    torch.manual_seed(0)
    x, gate, up, down = torch.randn(rows, C), *torch.randn(2, width, C), torch.randn(C, width)
    make = dist.new_subgroups_by_enumeration
    for X in (n for n in range(1, ranks + 1) if ranks % n == 0):
        grid = torch.arange(ranks, device="cpu").view(X, ranks // X)
        ffn = FFN2D(gate, up, down, make(grid.T.tolist())[0], make(grid.tolist())[0])
        run = torch.no_grad()(lambda: ffn(x))
        one_rank = torch.no_grad()(lambda: F.silu(x @ gate.T).mul_(x @ up.T) @ down.T)
        torch.testing.assert_close(run(), one_rank(), rtol=1e-3, atol=1e-4 * C * width**0.5)
        # the same number of runs on all ranks
        ms = [1e3 * Timer("f()", globals=dict(f=f)).timeit(20).mean for f in (run, one_rank)]
        kb = ffn_bytes(rows, C, width, *grid.shape, itemsize=4, replicated=True) / 1e3
        if rank == 0:
            print(f"C {C}, F {width}, {rows} rows, {X} x {ranks // X} ranks: {ms[0]:.2f} ms, "
                  f"{kb:.0f} KB sent; on one rank {ms[1]:.2f} ms")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
