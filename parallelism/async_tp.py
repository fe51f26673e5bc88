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
(test_all.py): values and gradients == all-gather and F.linear, F.linear and reduce-scatter. Needs
torch. `python parallelism/async_tp.py` starts 4 processes, runs a self-check and prints a table
(--check: no table).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
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


class _Collective(torch.autograd.Function):
    """All-gather or reduce-scatter; the backward of each is the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: bool) -> Tensor:
        ctx.gather = gather
        return _collective(x, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _collective(grad, not ctx.gather), None


def _collective(x: Tensor, gather: bool) -> Tensor:
    """All-gather of x (B, t, C), or reduce-scatter of x (B, t * P, C), along the sequence."""
    ranks = dist.get_world_size()
    if gather:
        parts = x.new_empty(ranks * len(x), *x.shape[1:])
        all_gather(parts, x.contiguous())
        return parts.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)
    parts = x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    reduce_scatter(out := torch.empty_like(parts[0]), parts.flatten(0, 1))
    return out


def variants(
    x: Tensor, gate: Tensor, up: Tensor, h: Tensor, down: Tensor
) -> dict[str, Callable[[], list[Tensor]]]:
    """Both ends of an MLP, each as collective plus matmul and as a ring."""

    def gather_then_matmul() -> list[Tensor]:
        gathered = _Collective.apply(x, True)
        return [F.linear(gathered, w) for w in (gate, up)]

    return {
        "gather, matmul": gather_then_matmul,
        "as a ring": lambda: all_gather_matmul(x, [gate, up]),
        "matmul, scatter": lambda: [_Collective.apply(F.linear(h, down), False)],
        "as a ring ": lambda: [matmul_reduce_scatter(h, down)],
    }


def check(rank: int, ranks: int) -> None:
    """Values and gradients of the rings == those of collectives and matmuls."""
    rng = torch.Generator().manual_seed(rank)
    make = lambda *s: torch.randn(s, generator=rng, dtype=torch.float64).requires_grad_()
    leaves = make(2, 3, 8), make(5, 8), make(4, 8), make(2, 3 * ranks, 6), make(8, 6)
    results = []
    for run in variants(*leaves).values():
        ys = run()
        inputs = leaves[:3] if len(ys) == 2 else leaves[3:]
        results.append([*ys, *torch.autograd.grad([y.square().sum() for y in ys], inputs)])
    for a, b in (*zip(*results[:2]), *zip(*results[2:])):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def benchmark(rank: int, ranks: int, t: int, C: int) -> None:
    """Milliseconds of each variant; the ranks share this machine's cores."""
    n, rng = 4 * C // ranks, torch.Generator().manual_seed(rank)
    make = lambda *shape: torch.randn(shape, generator=rng).requires_grad_()
    x, gate, up, h, down = make(1, t, C), make(n, C), make(n, C), make(1, t * ranks, n), make(C, n)
    say = print if rank == 0 else lambda *_: None
    say(f"{ranks} ranks, x (1, {t}, {C}) each, F {4 * C}, fp32")
    say(f"{'ms':>18}{'forward':>9}{'and backward':>14}")
    for name, run in variants(x, gate, up, h, down).items():
        times = []
        for step in (run, lambda: torch.autograd.backward([y.sum() for y in run()])):
            samples = []
            for _ in range(9):
                dist.barrier()
                start = time.perf_counter()
                step()
                dist.barrier()
                samples.append(1e3 * (time.perf_counter() - start))
            times.append(statistics.median(samples[2:]))
        say(f"{name:>18}{times[0]:>9.2f}{times[1]:>14.2f}")


def main() -> None:
    if "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launch, "--nproc-per-node=4", *sys.argv]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        sys.exit(subprocess.run(command, env=os.environ | threads).returncode)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    check(rank, ranks)
    for t, C in () if "--check" in sys.argv else ((32, 256), (128, 512), (256, 1024)):
        benchmark(rank, ranks, t, C)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
