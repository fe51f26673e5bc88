"""Async tensor parallelism: all-gather and reduce-scatter overlapped with the layer's matmuls.

Under sequence parallelism a layer begins with an all-gather that its first matmul waits for, and
ends with a reduce-scatter that waits for its last. Both can be decomposed (Wang et al., "Overlap
Communication with Dependent Computation via Decomposition", ASPLOS 2023): a rank multiplies the
shard that it has while it receives the next one, and adds its partial result to a sum that
circulates around the ring:

    all_gather_matmul       y_i = all_gather(x) W_i^T      one ring of x for all W_i
    matmul_reduce_scatter   y = reduce_scatter(x W^T)      one ring of partial sums

The backward of each is the other, so it overlaps too. Cost: no extra traffic, a rank sends as much
as the collective would; each matmul has 1 / ranks of the rows. When it loses: where that leaves too
few rows for the device (decoding), and where the same cores compute and copy, as on CPUs with gloo.
PyTorch's fused matmuls require torch.distributed._symmetric_memory, which is not public; here
NCCL's send and receive move the shards on their own streams.

Hook: parallel.apply_tp(async_matmuls=(all_gather_matmul, matmul_reduce_scatter)). Equivalence
(test_all.py): values and gradients == all-gather and F.linear, F.linear and reduce-scatter. Needs:
torch. A check and a table: `torchrun --standalone --nproc-per-node 2 parallelism/async_tp.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Group = dist.ProcessGroup | None

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _ring_shift(x: Tensor, group: Group, tag: int) -> Callable[[], Tensor]:
    """Start sending x to the next rank; the returned call waits for the previous rank's tensor."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(x := x.contiguous())
    pair = (dist.isend, x, rank + 1), (dist.irecv, received, rank - 1)
    ops = [dist.P2POp(op, t, group=group, tag=tag, group_peer=r % ranks) for op, t, r in pair]
    works = dist.batch_isend_irecv(ops)

    def wait(sent: Tensor = x) -> Tensor:  # keeps the sent tensor alive
        for work in works:
            work.wait()
        return received

    return wait


def _ring_all_gather(x: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, its x) for every rank, starting here and going backwards; the next x is received
    while the caller uses the current one."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for step in range(ranks - 1):
        wait = _ring_shift(x, group, tag=0)
        yield (rank - step) % ranks, x
        x = wait()
    yield (rank + 1) % ranks, x


def _ring_reduce_scatter(compute_partial: Callable[[int], Tensor], group: Group) -> Tensor:
    """The sum over all ranks of their partial(this rank). The sum for a rank starts at the rank
    after it and travels the whole ring; a rank computes its part while it receives the sum."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    total = compute_partial((rank - 1) % ranks)
    for step in range(2, ranks + 1):
        wait = _ring_shift(total, group, tag=1)
        total = compute_partial((rank - step) % ranks)
        total = total.add_(wait())
    return total


def _accumulate_matmul(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total (n, m) + a (B, t, n)^T b (B, t, m), in fp32 or wider, to avoid rounding each step."""
    a, b = a.flatten(0, 1).t(), b.flatten(0, 1)
    if a.dtype.itemsize < 4:
        return (a @ b).float() if total is None else total.add_(a @ b)
    return a @ b if total is None else total.addmm_(a, b)


def _cast_to_autocast(x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """The tensors in autocast's dtype, as F.linear would cast them, before they are sent."""
    if not torch.is_autocast_enabled(x.device.type):
        return [x, *others]
    return [t if t is None else t.to(torch.get_autocast_dtype(x.device.type)) for t in (x, *others)]


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, n: int, *tensors: Any) -> tuple[Tensor, ...]:
        weights, biases, ctx.group = tensors[:n], tensors[n:], group
        ctx.save_for_backward(x, *weights)
        shape = len(x), dist.get_world_size(group), x.shape[1]
        outs = [x.new_empty(*shape, len(w)) for w in weights]
        for source, shard in _ring_all_gather(x, group):
            for out, w, b in zip(outs, weights, biases):
                out[:, source] = F.linear(shard, w, b)
        return tuple(out.flatten(1, 2) for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (x, *weights), ranks, n = ctx.saved_tensors, dist.get_world_size(ctx.group), len(grads)
        need = ctx.needs_input_grad[3:]
        parts = [grad.unflatten(1, (ranks, -1)) for grad in grads]
        grad_w: list[Tensor | None] = [None] * n
        shards = _ring_all_gather(x, ctx.group)

        def compute_partial(target: int) -> Tensor:
            if any(need[:n]):  # one step of the ring of x per step of the ring of its gradient
                source, shard = next(shards)
                for i in range(n):
                    if need[i]:
                        grad_w[i] = _accumulate_matmul(grad_w[i], parts[i][:, source], shard)
            return reduce(torch.add, (part[:, target] @ w for part, w in zip(parts, weights)))

        grad_x = _ring_reduce_scatter(compute_partial, ctx.group)
        grad_w = [total if total is None else total.to(x.dtype) for total in grad_w]
        grad_b = [grad.sum((0, 1)) if b else None for grad, b in zip(grads, need[n:])]
        return grad_x, None, None, *grad_w, *grad_b


def all_gather_matmul(
    x: Tensor, weights: Sequence[Tensor], group: Group = None, biases: Sequence[Tensor | None] = ()
) -> list[Tensor]:
    """[F.linear(all_gather(x), w_i, b_i)], each (B, t * P, n_i), with one ring for all weights.
    x (B, t, C): this rank's part of the sequence; w_i (n_i, C): its rows of the weights. Only the
    local x is saved for the backward pass, which gathers it again while it reduces its gradient.
    All ranks must have the same t and require the same gradients.
    """
    biases = biases or [None] * len(weights)
    _check(x.dim() == 3, f"x must be (B, t, C), not {tuple(x.shape)}")
    shapes = [tuple(w.shape) for w in weights]
    ok = len(shapes) > 0 and all(shape[1:] == x.shape[2:] for shape in shapes)
    _check(ok, f"weights must be (n, {x.shape[2]}) for x {tuple(x.shape)}, not {shapes}")
    _check(len(biases) == len(weights), f"{len(weights)} weights require as many biases (or None)")
    x, *tensors = _cast_to_autocast(x, *weights, *biases)
    return list(_AllGatherMatmul.apply(x, group, len(weights), *tensors))


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        parts = x.unflatten(1, (dist.get_world_size(group), -1))
        return _ring_reduce_scatter(lambda target: F.linear(parts[:, target], weight), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        parts = x.unflatten(1, (dist.get_world_size(ctx.group), -1))
        grad_x, grad_w = torch.empty_like(parts), None
        for source, shard in _ring_all_gather(grad, ctx.group):
            grad_x[:, source] = shard @ weight
            if ctx.needs_input_grad[1]:
                grad_w = _accumulate_matmul(grad_w, shard, parts[:, source])
        return grad_x.flatten(1, 2), grad_w if grad_w is None else grad_w.to(x.dtype), None


def matmul_reduce_scatter(x: Tensor, weight: Tensor, group: Group = None) -> Tensor:
    """reduce_scatter(F.linear(x, weight)): this rank's part (B, t, C) of the sequence of the sum
    over ranks. x (B, t * P, n); weight (C, n): this rank's columns. The caller adds the bias."""
    ranks, shape = dist.get_world_size(group), tuple(x.shape)
    ok = len(shape) == 3 and shape[1] % ranks == 0
    _check(ok, f"x must be (B, T, n), T divisible by the {ranks} ranks, not {shape}")
    ok = weight.dim() == 2 and weight.shape[1] == shape[2]
    _check(ok, f"weight must be (C, {shape[2]}) for x {shape}, not {tuple(weight.shape)}")
    return _MatmulReduceScatter.apply(*_cast_to_autocast(x, weight), group)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """Each ring == the collective and F.linear; milliseconds of both."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    if "RANK" not in os.environ:
        sys.exit("run: torchrun --standalone --nproc-per-node 2 parallelism/async_tp.py")
    gpu = torch.cuda.is_available()
    torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    t, C = (2048, 4096) if gpu else (128, 512)
    torch.manual_seed(rank)
    x, h = torch.randn(1, t, C), torch.randn(1, ranks * t, 4 * C // ranks)
    up, down = torch.randn(4 * C // ranks, C), torch.randn(C, 4 * C // ranks)

    def gather_then_matmul() -> Tensor:
        all_gather(full := x.new_empty(ranks * t, C), x[0])
        return F.linear(full, up)[None]

    def matmul_then_scatter() -> Tensor:
        reduce_scatter(out := x.new_empty(t, C), F.linear(h[0], down))
        return out[None]

    for ring, plain in (
        (lambda: all_gather_matmul(x, [up])[0], gather_then_matmul),
        (lambda: matmul_reduce_scatter(h, down), matmul_then_scatter),
    ):
        torch.testing.assert_close(ring(), plain(), rtol=1e-3, atol=1e-2)
        # the same number of runs on all ranks
        ms = [1e3 * Timer("f()", globals=dict(f=f)).timeit(20).mean for f in (ring, plain)]
        if rank == 0:
            print(f"x {t} x {C} per rank, fp32: ring {ms[0]:.2f} ms, {plain.__name__} {ms[1]:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
