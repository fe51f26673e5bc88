"""quantized_collectives.py: sharded training whose transfers are of int8 and int4 (ZeRO++).

ZeRO-3 moves every parameter three times in a step: gathered for the forward pass, gathered for the
backward pass, its gradient scattered; in bf16 that is 6 bytes, and between nodes they are what a
step waits for. ZeRO++ (Wang et al., arXiv:2306.10209) makes 1.5 of them:

    qwZ   weights are gathered as int8, blockwise                                     2 -> 1
    hpZ   after the forward pass each node keeps what was gathered, shared out over
          its own ranks: the backward pass gathers inside the node                    2 -> 0
    qgZ   gradients travel as int4, blockwise, in an all-to-all: each is rounded, sent
          to its owner, and added up there in fp32                                    2 -> 0.5

A ring's reduce-scatter would round a sum at each of P - 1 ranks; an all-to-all rounds once. Over
nodes of L ranks it has two hops, or all L ranks would send the border what can be added up before:
first inside the node, to the rank that is to have these slices of all nodes, then, L times smaller,
to the same place in each node. The first hop takes slices out of order, x (N, L, n) -> (L, N, n),
so that after the second rank (node, local) has slice node * L + local.

A block of `block` values is a step in fp32, max|x| / (2^(bits - 1) - 1), and integers: zeros stay
zero, and each value moves by half a step at most: its block's maximum / 254, or / 14 in int4. So a
gathered weight is within half a step; a sum within half a step for each rank that sent a part of
it, of the second hop's blocks too. One inf or NaN makes its block so: nothing overflows unseen.

Which hook: `quantized_all_gather` and `quantized_reduce_scatter` stand for the plain ones;
`QuantizedAllGather` and `QuantizedReduceScatter` are what torch's fully_shard takes:

    fully_shard(block, mesh=mesh, reshard_after_forward=8)                           # hpZ
    block.set_custom_all_gather(QuantizedAllGather(plain_ranks=8))                   # qwZ
    block.set_custom_reduce_scatter(QuantizedReduceScatter(nodes=node_groups(8)))    # qgZ

Masters stay exact: fully_shard's optimizer steps shards, which no one rounds. What it costs: noise,
the more the shorter `bits` (BENCHMARKS.md has what of the loss); passes over the data before and
after each transfer; with hpZ the bf16 model in each node. When it loses: links as fast as memory;
blocks that mix a norm's ones with small weights, for fully_shard lays parameters end to end.
Equivalence (test_all.py): hpZ alone is exact; the others are within the bound, and the bytes handed
to the collectives are the formula's. Needs: torch. `python parallelism/quantized_collectives.py` starts 4
processes, checks itself and prints a table (--check: none).
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Group = dist.ProcessGroup | None  # None: all ranks
NodeGroups = tuple[dist.ProcessGroup, dist.ProcessGroup]  # this rank's node; its place in every node

# the older names are all that torch 2.11 has, and deprecated in 2.13
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Blocks of integers
# --------------------------------------------------------------------------------------------------


def payload_bytes(n: int, bits: int, block: int = 256) -> int:
    """What n values weigh on the wire: integers, and 4 bytes of step for every block."""
    return -(-n * bits // 8) + 4 * -(-n // block)


def quantize(x: Tensor, bits: int, block: int = 256) -> Tensor:
    """Rows (R, n) of floats -> (R, payload_bytes(n, bits, block)) uint8: a row's steps, then its
    integers, of int4 two in a byte, the first one low."""
    _check(bits in (4, 8), f"bits must be 4 or 8, not {bits}")
    _check(block > 0 and block % 2 == 0, f"block must be even and more than 0, not {block}")
    rows, n = x.shape
    blocks = -(-n // block)
    x = F.pad(x.float(), (0, blocks * block - n)).view(rows, blocks, block)
    step = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    q = (x / step).round_().to(torch.int8).flatten(1)  # of zeros: anything, times 0
    if bits == 4:
        low, high = (q + 8).view(torch.uint8)[:, : n + n % 2].unflatten(1, (-1, 2)).unbind(-1)
        q = low | high << 4
    else:
        q = q[:, :n].view(torch.uint8)
    return torch.cat((step.flatten(1).view(torch.uint8), q), 1)


def dequantize(payload: Tensor, n: int, bits: int, block: int = 256) -> Tensor:
    """What `quantize` made of (R, n), in fp32."""
    blocks = -(-n // block)
    step = payload[:, : 4 * blocks].flatten().view(torch.float32).view(-1, blocks)
    q = payload[:, 4 * blocks :]
    if bits == 4:
        q = torch.stack((q & 15, q >> 4), -1).flatten(1)[:, :n].view(torch.int8) - 8
    return q.view(torch.int8).float().mul_(step.repeat_interleave(block, 1)[:, :n])


# --------------------------------------------------------------------------------------------------
# Two collectives
# --------------------------------------------------------------------------------------------------


def quantized_all_gather(
    shard: Tensor, group: Group = None, *, bits: int = 8, block: int = 256
) -> Tensor:
    """Every rank's (n,), end to end, (P * n,) in the shard's dtype: on all ranks the same rounded
    values, a rank's own too."""
    ranks, n = dist.get_world_size(group), shard.numel()
    local = quantize(shard.reshape(1, n), bits, block)
    gathered = local.new_empty(ranks, local.shape[1])
    all_gather(gathered, local, group=group)
    return dequantize(gathered, n, bits, block).to(shard.dtype).flatten()


def quantized_reduce_scatter(
    x: Tensor, group: Group = None, *, bits: int = 4, block: int = 256, nodes: NodeGroups | None = None
) -> Tensor:
    """Slice r of x (P * n,), summed over ranks, on rank r: (n,), in x's dtype. nodes: in two hops,
    over these groups of `node_groups` and not over `group`."""

    sizes = [dist.get_world_size(g) for g in nodes or (group,)]
    ranks = math.prod(sizes)
    _check(x.numel() % ranks == 0, f"{x.numel()} values cannot be cut in {ranks} slices: pad them")

    def all_to_all_sum(x: Tensor, group: Group) -> Tensor:  # (P, k, n) -> (k, n); no block mixes slices
        sent = quantize(x.flatten(0, 1), bits, block)
        dist.all_to_all_single(received := torch.empty_like(sent), sent, group=group)
        return dequantize(received, x.shape[2], bits, block).view(x.shape).sum(0)

    slices = x.reshape(-1, sizes[0], x.numel() // ranks).transpose(0, 1)
    out = all_to_all_sum(slices, group if nodes is None else nodes[0])
    out = out if nodes is None else all_to_all_sum(out[:, None], nodes[1])
    return out.flatten().to(x.dtype)


def node_groups(node_size: int, ranks: Sequence[Sequence[int]] | None = None) -> NodeGroups:
    """The two groups of this rank, from rows of ranks that shard together (one row, all ranks): a
    node is `node_size` neighbours. Collective over all ranks."""
    _check(node_size > 0, f"node_size must be more than 0, not {node_size}")
    rows = torch.tensor([range(dist.get_world_size())] if ranks is None else ranks)
    _check(rows.shape[1] % node_size == 0,
           f"node_size {node_size} must divide the {rows.shape[1]} ranks that shard")  # fmt: skip
    nodes = rows.view(len(rows), -1, node_size)
    group = lambda of: dist.new_subgroups_by_enumeration(of.flatten(0, 1).tolist())[0]
    return group(nodes), group(nodes.mT)


def inter_node_bytes(n: int, ranks: int, node_size: int, *, block: int = 256) -> tuple[int, int]:
    """(ZeRO-3's, ZeRO++'s) bytes that a node sends to others in a step of n parameters in bf16,
    gradients too; P divides n. A ring crosses a node's border once: of an all-gather or a
    reduce-scatter a node sends what a rank does, P - 1 slices."""
    part, nodes = n // ranks, ranks // node_size
    gather = (ranks - 1) * payload_bytes(part, 8, block)
    scatter = node_size * (nodes - 1) * payload_bytes(part, 4, block)
    return 3 * (ranks - 1) * 2 * part, gather + scatter


# --------------------------------------------------------------------------------------------------
# For torch's fully_shard
# --------------------------------------------------------------------------------------------------


class _CommBase:
    """torch.distributed.fsdp's Comm, by its methods: the class itself is not public."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class QuantizedAllGather(_CommBase):
    """For FSDPModule.set_custom_all_gather. Groups of up to `plain_ranks` gather what they have:
    hpZ's node, whose shards are rounded already."""

    def __init__(self, bits: int = 8, block: int = 256, unquantized_group_size: int = 1):
        self.bits, self.block, self.unquantized_group_size = bits, block, unquantized_group_size

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """In stream order: None, for there is nothing to wait for."""
        if group.size() <= self.unquantized_group_size or not input_tensor.is_floating_point():
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        kwargs = dict(bits=self.bits, block=self.block)
        output_tensor.copy_(quantized_all_gather(input_tensor, group, **kwargs))
        return None


class QuantizedReduceScatter(_CommBase):
    """For FSDPModule.set_custom_reduce_scatter, whose sums or means; nodes: in two hops."""

    def __init__(self, bits: int = 4, block: int = 256, nodes: NodeGroups | None = None):
        self.bits, self.block, self.nodes = bits, block, nodes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        _check(op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), f"{op}: only sums and means are made")
        if self.nodes is not None:
            ranks = self.nodes[0].size() * self.nodes[1].size()
            _check(ranks == group.size(), f"nodes have {ranks} ranks, the group {group.size()}")
        kwargs = dict(bits=self.bits, block=self.block, nodes=self.nodes)
        output_tensor.copy_(quantized_reduce_scatter(input_tensor, group, **kwargs))
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        return None


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def _max_rounding_error(x: Tensor, bits: int, block: int) -> Tensor:
    """How far each value of (n,) may be off."""
    pieces = x.abs().split(block)
    return torch.cat([p.max().expand_as(p) for p in pieces]) / (2**bits - 2)


def check(rank: int, ranks: int) -> None:
    """Both collectives == the plain ones within half a step for each rounding; uneven blocks, and
    values over 7 orders of magnitude."""
    nodes, n, block = node_groups(2), 301, 64
    rng = torch.Generator().manual_seed(rank)
    x = torch.randn(ranks * n, generator=rng) * torch.logspace(-6, 1, ranks * n)
    shard = x[rank * n :][:n]
    all_gather(want := torch.empty_like(x), shard)
    all_gather(bound := torch.empty_like(x), _max_rounding_error(shard, 8, block))
    assert ((quantized_all_gather(shard, block=block) - want).abs() <= 1.001 * bound).all(), rank
    reduce_scatter(want := x.new_empty(n), x)
    reduce_scatter(
        bound := x.new_empty(n), torch.cat([_max_rounding_error(part, 4, block) for part in x.split(n)])
    )
    # the sums of nodes, which the second hop rounds, are no larger than the sum of maxima
    for groups, times in ((None, 1), (nodes, 2 + 1 / 14)):
        got = quantized_reduce_scatter(x, block=block, nodes=groups)
        assert ((got - want).abs() <= 1.001 * times * bound).all(), (rank, times)


def _time_ms(work: Callable[[], Any], times: int = 7) -> float:
    spent = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        spent.append(time.perf_counter() - start)
    return 1e3 * statistics.median(spent[2:])


def benchmark(rank: int, ranks: int) -> None:
    """Per million parameters: what a rank sends, milliseconds, and how far the result is off. Here
    ranks share one memory and its cores; the bytes are what a network would feel."""
    n, nodes, log = 2**20, node_groups(2), print if rank == 0 else lambda *_: None
    rng = torch.Generator().manual_seed(rank)
    x, part = torch.randn(n, generator=rng), n // ranks
    plain, out = x.new_empty(n), x.new_empty(part)
    all_gather(plain, x[:part]), reduce_scatter(out, x)
    relative_error = lambda got, want: ((got - want).norm() / want.norm()).item()
    rows: list[tuple[str, float, Callable[[], Any], float]] = [
        ("all-gather, bf16", 2, lambda: all_gather(plain.bfloat16(), x[:part].bfloat16()), 0.0)
    ]
    for bits in (8, 4):
        run = lambda bits=bits: quantized_all_gather(x[:part], bits=bits)
        rows.append((f"all-gather, int{bits}", bits / 8 + 4 / 256, run, relative_error(run(), plain)))
    rows.append(("reduce-scatter, fp32", 4, lambda: reduce_scatter(out.clone(), x), 0.0))
    for bits, groups in ((8, None), (4, None), (4, nodes)):
        run = lambda bits=bits, groups=groups: quantized_reduce_scatter(x, bits=bits, nodes=groups)
        name = f"reduce-scatter, int{bits}" + (", two hops" if groups else "")
        rows.append((name, bits / 8 + 4 / 256, run, relative_error(run(), out)))
    log(f"{ranks} ranks, gloo, {n / 1e6:.2f}M values; bytes of a value, ms, relative error")
    for name, each, run, error in rows:
        log(f"{name:>30}{each:>9.3f}{_time_ms(run):>9.1f}{error:>10.4f}")
    for node in (2, 8):
        before, after = inter_node_bytes(64 * n, 8 * node, node)
        log(f"a node of {node} in 8 sends {before / after:.2f} times less in a step than in ZeRO-3")


def main() -> None:
    if "RANK" not in os.environ:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        sys.exit(subprocess.run([*run, *sys.argv], env=os.environ | threads).returncode)
    dist.init_process_group("gloo")
    check(dist.get_rank(), dist.get_world_size())
    if "--check" not in sys.argv:
        benchmark(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
