"""ZeRO++: FSDP with quantized collectives, int8 all-gathers and int4 reduce-scatters.

ZeRO-3 moves every parameter three times per step: all-gather in the forward pass, all-gather in the
backward pass, reduce-scatter of its gradient; in bf16 that is 6 bytes, and between nodes these
transfers bound the step. ZeRO++ (Wang et al., arXiv:2306.10209) sends 1.5 bytes:

    qwZ   block-quantized int8 all-gather of weights                                2 -> 1
    hpZ   after the forward pass each node keeps the gathered weights, sharded over
          its own ranks: the backward all-gather stays inside the node              2 -> 0
    qgZ   block-quantized int4 all-to-all of gradients, each value quantized, sent
          to its owner and reduced there in fp32                                    2 -> 0.5

A ring reduce-scatter would round a partial sum at each of P - 1 ranks; an all-to-all rounds once.
With nodes of L ranks it has two hops, since otherwise all L ranks would send between nodes what can
be reduced inside: first inside the node, to the rank that collects these slices for all nodes, then
L times less data to the same local rank of each node. The first hop permutes the slices, x (N, L,
n) -> (L, N, n), so that after the second one rank (node, local) has slice node * L + local.

A block of `block` values is stored as an fp32 scale, max|x| / (2^(bits - 1) - 1), and integers:
zeros are exact, and the error of a value is at most half a scale, which is its block's maximum /
254, or / 14 in int4. So a gathered weight is within half a scale; a sum within half a scale for
each rank that contributed, and for the second hop's rounding. One inf or NaN makes its whole block
non-finite: overflow is not hidden.

Hooks: `quantized_all_gather` and `quantized_reduce_scatter` replace the plain collectives;
`QuantizedAllGather` and `QuantizedReduceScatter` are for torch's fully_shard:

    fully_shard(block, mesh=mesh, reshard_after_forward=8)                           # hpZ
    block.set_custom_all_gather(QuantizedAllGather(unquantized_group_size=8))        # qwZ
    block.set_custom_reduce_scatter(QuantizedReduceScatter(nodes=node_groups(8)))    # qgZ

Master weights stay exact: the optimizer updates the shards, which are never quantized. Cost:
quantization noise, more with fewer `bits` (BENCHMARKS.md has the loss); passes over the data before
and after each transfer; with hpZ one bf16 copy of the model per node. When it loses: links as fast
as memory; blocks that mix a norm's ones with small weights, since fully_shard concatenates
parameters. Equivalence (test_all.py): hpZ alone is exact; the others are within the bound above,
and the bytes passed to the collectives match the formula. Needs: torch. A check and a table:
`torchrun --standalone --nproc-per-node 2 parallelism/quantized_collectives.py`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Group = dist.ProcessGroup | None  # None: all ranks
# ranks of this node; ranks with the same local rank on all nodes
NodeGroups = tuple[dist.ProcessGroup, dist.ProcessGroup]

# torch 2.11 has only the older names, which 2.13 deprecates
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Blockwise quantization
# --------------------------------------------------------------------------------------------------


def payload_bytes(n: int, bits: int, block: int = 256) -> int:
    """Bytes of n quantized values: the integers, and an fp32 scale per block."""
    return -(-n * bits // 8) + 4 * -(-n // block)


def quantize(x: Tensor, bits: int, block: int = 256) -> Tensor:
    """Rows (R, n) of floats -> (R, payload_bytes(n, bits, block)) uint8: a row's scales, then its
    integers; int4 packs two per byte, the first in the low bits."""
    _check(bits in (4, 8), f"bits must be 4 or 8, not {bits}")
    _check(block > 0 and block % 2 == 0, f"block must be even and more than 0, not {block}")
    rows, n = x.shape
    blocks = -(-n // block)
    x = F.pad(x.float(), (0, blocks * block - n)).view(rows, blocks, block)
    scale = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    q = (x / scale).round_().to(torch.int8).flatten(1)  # all zeros: 0 / 0, but the scale is 0
    if bits == 4:
        low, high = (q + 8).view(torch.uint8)[:, : n + n % 2].unflatten(1, (-1, 2)).unbind(-1)
        q = low | high << 4
    else:
        q = q[:, :n].view(torch.uint8)
    return torch.cat((scale.flatten(1).view(torch.uint8), q), 1)


def dequantize(payload: Tensor, n: int, bits: int, block: int = 256) -> Tensor:
    """Inverse of `quantize` for rows (R, n), in fp32."""
    blocks = -(-n // block)
    scale = payload[:, : 4 * blocks].flatten().view(torch.float32).view(-1, blocks)
    q = payload[:, 4 * blocks :]
    if bits == 4:
        q = torch.stack((q & 15, q >> 4), -1).flatten(1)[:, :n].view(torch.int8) - 8
    return q.view(torch.int8).float().mul_(scale.repeat_interleave(block, 1)[:, :n])


# --------------------------------------------------------------------------------------------------
# Collectives
# --------------------------------------------------------------------------------------------------


def quantized_all_gather(
    shard: Tensor, group: Group = None, *, bits: int = 8, block: int = 256
) -> Tensor:
    """All ranks' shards (n,) concatenated, (P * n,) in the shard's dtype. All ranks get the same
    rounded values, for their own shard too."""
    ranks, n = dist.get_world_size(group), shard.numel()
    local = quantize(shard.reshape(1, n), bits, block)
    gathered = local.new_empty(ranks, local.shape[1])
    all_gather(gathered, local, group=group)
    return dequantize(gathered, n, bits, block).to(shard.dtype).flatten()


def quantized_reduce_scatter(
    x: Tensor, group: Group = None, *, bits: int = 4, block: int = 256,
    nodes: NodeGroups | None = None,
) -> Tensor:  # fmt: skip
    """Slice r of x (P * n,), summed over ranks, on rank r: (n,) in x's dtype. nodes: two hops over
    these groups of `node_groups` instead of over `group`."""

    sizes = [dist.get_world_size(g) for g in nodes or (group,)]
    ranks = math.prod(sizes)
    _check(x.numel() % ranks == 0, f"{x.numel()} values do not divide by {ranks} ranks: pad them")

    def all_to_all_sum(x: Tensor, group: Group) -> Tensor:  # (P, k, n) -> (k, n), one row per slice
        sent = quantize(x.flatten(0, 1), bits, block)
        dist.all_to_all_single(received := torch.empty_like(sent), sent, group=group)
        return dequantize(received, x.shape[2], bits, block).view(x.shape).sum(0)

    slices = x.reshape(-1, sizes[0], x.numel() // ranks).transpose(0, 1)
    out = all_to_all_sum(slices, group if nodes is None else nodes[0])
    out = out if nodes is None else all_to_all_sum(out[:, None], nodes[1])
    return out.flatten().to(x.dtype)


def node_groups(node_size: int, ranks: Sequence[Sequence[int]] | None = None) -> NodeGroups:
    """(intra-node group, inter-node group) of this rank. ranks: one row of ranks per sharding group
    (default: one row of all); a node is `node_size` consecutive ones. Collective over all ranks."""
    _check(node_size > 0, f"node_size must be more than 0, not {node_size}")
    rows = torch.tensor([range(dist.get_world_size())] if ranks is None else ranks)
    _check(rows.shape[1] % node_size == 0,
           f"node_size {node_size} must divide the {rows.shape[1]} ranks that shard")  # fmt: skip
    nodes = rows.view(len(rows), -1, node_size)
    group = lambda of: dist.new_subgroups_by_enumeration(of.flatten(0, 1).tolist())[0]
    return group(nodes), group(nodes.mT)


# --------------------------------------------------------------------------------------------------
# Custom collectives for torch's fully_shard
# --------------------------------------------------------------------------------------------------


class _CommBase:
    """The interface of torch.distributed.fsdp's Comm, which is not public."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class QuantizedAllGather(_CommBase):
    """For FSDPModule.set_custom_all_gather. Groups of at most `unquantized_group_size` ranks gather
    without quantization: hpZ's intra-node groups, whose shards were quantized before."""

    def __init__(self, bits: int = 8, block: int = 256, unquantized_group_size: int = 1):
        self.bits, self.block, self.unquantized_group_size = bits, block, unquantized_group_size

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Runs in stream order: returns None if quantized, since there is no work to wait for."""
        if group.size() <= self.unquantized_group_size or not input_tensor.is_floating_point():
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        kwargs = dict(bits=self.bits, block=self.block)
        output_tensor.copy_(quantized_all_gather(input_tensor, group, **kwargs))
        return None


class QuantizedReduceScatter(_CommBase):
    """For FSDPModule.set_custom_reduce_scatter: sum or mean; nodes: in two hops."""

    def __init__(self, bits: int = 4, block: int = 256, nodes: NodeGroups | None = None):
        self.bits, self.block, self.nodes = bits, block, nodes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        ok = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        _check(ok, f"reduce op {op} is not supported: use SUM or AVG")
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


def main() -> None:
    """Both collectives are within the bound of the plain ones; milliseconds and errors of both."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    if "RANK" not in os.environ:
        sys.exit(
            "run: torchrun --standalone --nproc-per-node 2 parallelism/quantized_collectives.py"
        )
    gpu = torch.cuda.is_available()
    torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    n = 2**26 if gpu else 2**20
    torch.manual_seed(rank)
    x = torch.randn(n)
    shard = x[: n // ranks].contiguous()
    full, part = torch.empty_like(x), torch.empty_like(shard)
    largest = x.abs().max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    # half a scale for each value that was rounded: 1 in a gather, one per rank in a sum
    for name, out, plain, quantized, bits, rounded in (
        ("all-gather", full, lambda: all_gather(full, shard),
         lambda: quantized_all_gather(shard), 8, 1),
        ("reduce-scatter", part, lambda: reduce_scatter(part, x),
         lambda: quantized_reduce_scatter(x), 4, ranks),
    ):  # fmt: skip
        plain()
        error = quantized() - out
        assert error.abs().max() <= 1.001 * rounded * largest / (2**bits - 2)
        # the same number of runs on all ranks
        ms = [1e3 * Timer("f()", globals=dict(f=f)).timeit(10).mean for f in (quantized, plain)]
        if rank == 0:
            print(f"{n / 1e6:.0f}M values, {ranks} ranks, {name}: int{bits} {ms[0]:.1f} ms, fp32 "
                  f"{ms[1]:.1f} ms, relative error {error.norm() / out.norm():.4f}")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
