"""async_tp.py: tensor parallelism whose transfers hide behind its own products.

Under sequence parallelism a layer begins with an all-gather that its first product waits for, and
ends with a reduce-scatter that waits for its last. Both come apart (Wang et al., "Overlap
Communication with Dependent Computation via Decomposition", ASPLOS 2023): a rank multiplies the
shard that it has while the next is on its way, and adds its piece to a sum that goes round:

    all_gather_matmul       y_i = all_gather(x) W_i^T      one ring of x for all W_i
    matmul_reduce_scatter   y = reduce_scatter(x W^T)      one ring of sums

The gradient of each is the other, so backward overlaps too. What it costs: nothing on the wire, a
rank sends what the collective would; products of 1 / ranks of the rows. When it loses: where these
are too few for the device (decoding), and where the same cores compute and copy, as CPUs over gloo
do. PyTorch's own fused products need torch.distributed._symmetric_memory, which is not public; so
here NCCL's send and receive carry the shards, on streams of their own.

Hooks: model.py's `products` and parallel.apply_tp(ring=(all_gather_matmul, matmul_reduce_scatter)).
Equivalence (test_all.py): values and gradients of all-gather and F.linear, of F.linear and
reduce-scatter. Needs: torch. `python async_tp.py` starts 4 processes, checks itself and prints a
table (--check: none).
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


def _pass_on(x: Tensor, group: Group, tag: int) -> Callable[[], Tensor]:
    """Begin to send x to the next rank; a call then awaits what the previous one sends."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    arriving = torch.empty_like(x := x.contiguous())
    pair = (dist.isend, x, rank + 1), (dist.irecv, arriving, rank - 1)
    ops = [dist.P2POp(op, t, group=group, tag=tag, group_peer=r % ranks) for op, t, r in pair]
    works = dist.batch_isend_irecv(ops)

    def wait(sent: Tensor = x) -> Tensor:  # `sent` has to live until then
        for work in works:
            work.wait()
        return arriving

    return wait


def _gathered(x: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """(rank, its x) of every rank, from this one backwards: the next arrives while one is used."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for step in range(ranks - 1):
        wait = _pass_on(x, group, tag=0)
        yield (rank - step) % ranks, x
        x = wait()
    yield (rank + 1) % ranks, x


def _scattered(piece: Callable[[int], Tensor], group: Group) -> Tensor:
    """The sum over ranks of their piece(this rank). A sum begins just behind the rank that it is
    for and goes all round; a rank computes its piece while what it is added to arrives."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    total = piece((rank - 1) % ranks)
    for step in range(2, ranks + 1):
        wait = _pass_on(total, group, tag=1)
        total = piece((rank - step) % ranks)
        total = total.add_(wait())
    return total


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total (n, m) + a (B, t, n)^T b (B, t, m), in fp32 at least: every step would round it."""
    a, b = a.flatten(0, 1).t(), b.flatten(0, 1)
    if a.dtype.itemsize < 4:
        return (a @ b).float() if total is None else total.add_(a @ b)
    return a @ b if total is None else total.addmm_(a, b)


def _as_autocast(x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """What F.linear would make of them, before they travel."""
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
        for source, shard in _gathered(x, group):
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
        shards = _gathered(x, ctx.group)

        def piece(target: int) -> Tensor:
            if any(need[:n]):  # a step of the ring of x for each of the ring of its gradient
                source, shard = next(shards)
                for i in range(n):
                    if need[i]:
                        grad_w[i] = _add_product(grad_w[i], parts[i][:, source], shard)
            return reduce(torch.add, (part[:, target] @ w for part, w in zip(parts, weights)))

        grad_x = _scattered(piece, ctx.group)
        grad_w = [total if total is None else total.to(x.dtype) for total in grad_w]
        grad_b = [grad.sum((0, 1)) if b else None for grad, b in zip(grads, need[n:])]
        return grad_x, None, None, *grad_w, *grad_b


def all_gather_matmul(
    x: Tensor, weights: Sequence[Tensor], group: Group = None, biases: Sequence[Tensor | None] = ()
) -> list[Tensor]:
    """[F.linear(x of all ranks, w_i, b_i)], (B, t * P, n_i) each, of x (B, t, C), this rank's part
    of the sequence, and its rows (n_i, C) of the weights, in one ring. Of x this part alone is kept
    for the backward pass, where it travels again, next to what will be its gradient. All ranks have
    the same t, and ask for the same gradients.
    """
    biases = biases or [None] * len(weights)
    _check(x.dim() == 3, f"x must be (B, t, C), not {tuple(x.shape)}")
    shapes = [tuple(w.shape) for w in weights]
    ok = len(shapes) > 0 and all(shape[1:] == x.shape[2:] for shape in shapes)
    _check(ok, f"weights must be (n, {x.shape[2]}), for x {tuple(x.shape)}, not {shapes}")
    _check(len(biases) == len(weights), f"{len(weights)} weights need as many biases (or None)")
    x, *tensors = _as_autocast(x, *weights, *biases)
    return list(_AllGatherMatmul.apply(x, group, len(weights), *tensors))


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        parts = x.unflatten(1, (dist.get_world_size(group), -1))
        return _scattered(lambda target: F.linear(parts[:, target], weight), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        parts = x.unflatten(1, (dist.get_world_size(ctx.group), -1))
        grad_x, grad_w = torch.empty_like(parts), None
        for source, shard in _gathered(grad, ctx.group):
            grad_x[:, source] = shard @ weight
            if ctx.needs_input_grad[1]:
                grad_w = _add_product(grad_w, shard, parts[:, source])
        return grad_x.flatten(1, 2), grad_w if grad_w is None else grad_w.to(x.dtype), None


def matmul_reduce_scatter(x: Tensor, weight: Tensor, group: Group = None) -> Tensor:
    """This rank's part (B, t, C) of the sum over ranks of F.linear(x, weight), from x (B, t * P, n)
    and this rank's columns (C, n) of the weight. A bias is for the caller to add, to the sum."""
    ranks, shape = dist.get_world_size(group), tuple(x.shape)
    ok = len(shape) == 3 and shape[1] % ranks == 0
    _check(ok, f"x must be (B, T, n), T divisible by the {ranks} ranks, not {shape}")
    ok = weight.dim() == 2 and weight.shape[1] == shape[2]
    _check(ok, f"weight must be (C, {shape[2]}), for x {shape}, not {tuple(weight.shape)}")
    return _MatmulReduceScatter.apply(*_as_autocast(x, weight), group)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


class _Plain(torch.autograd.Function):
    """One collective; its gradient is the other's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathers: bool) -> Tensor:
        ctx.gathers = gathers
        return _collective(x, gathers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _collective(grad, not ctx.gathers), None


def _collective(x: Tensor, gathers: bool) -> Tensor:
    """x (B, t, C) of all ranks, or this rank's part of the sum of x (B, t * P, C)."""
    ranks = dist.get_world_size()
    if gathers:
        parts = x.new_empty(ranks * len(x), *x.shape[1:])
        all_gather(parts, x.contiguous())
        return parts.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2)
    parts = x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    reduce_scatter(out := torch.empty_like(parts[0]), parts.flatten(0, 1))
    return out


def forms(
    x: Tensor, gate: Tensor, up: Tensor, h: Tensor, down: Tensor
) -> dict[str, Callable[[], list[Tensor]]]:
    """The two ends of a feed-forward, as collective and product, and as rings."""

    def plain_gather() -> list[Tensor]:
        whole = _Plain.apply(x, True)
        return [F.linear(whole, w) for w in (gate, up)]

    return {
        "gather, matmul": plain_gather,
        "as a ring": lambda: all_gather_matmul(x, [gate, up]),
        "matmul, scatter": lambda: [_Plain.apply(F.linear(h, down), False)],
        "as a ring ": lambda: [matmul_reduce_scatter(h, down)],
    }


def check(rank: int, ranks: int) -> None:
    """Values and gradients of the rings are those of collectives and products."""
    rng = torch.Generator().manual_seed(rank)
    make = lambda *s: torch.randn(s, generator=rng, dtype=torch.float64).requires_grad_()
    leaves = make(2, 3, 8), make(5, 8), make(4, 8), make(2, 3 * ranks, 6), make(8, 6)
    results = []
    for form in forms(*leaves).values():
        ys = form()
        taken = leaves[:3] if len(ys) == 2 else leaves[3:]
        results.append([*ys, *torch.autograd.grad([y.square().sum() for y in ys], taken)])
    for a, b in (*zip(*results[:2]), *zip(*results[2:])):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def benchmark(rank: int, ranks: int, t: int, C: int) -> None:
    """Milliseconds, on this machine, whose ranks share its cores."""
    n, rng = 4 * C // ranks, torch.Generator().manual_seed(rank)
    make = lambda *shape: torch.randn(shape, generator=rng).requires_grad_()
    x, gate, up, h, down = make(1, t, C), make(n, C), make(n, C), make(1, t * ranks, n), make(C, n)
    say = print if rank == 0 else lambda *_: None
    say(f"{ranks} ranks, x (1, {t}, {C}) each, F {4 * C}, fp32")
    say(f"{'ms':>18}{'forward':>9}{'and backward':>14}")
    for name, form in forms(x, gate, up, h, down).items():
        times = []
        for work in (form, lambda: torch.autograd.backward([y.sum() for y in form()])):
            spent = []
            for _ in range(9):
                dist.barrier()
                start = time.perf_counter()
                work()
                dist.barrier()
                spent.append(1e3 * (time.perf_counter() - start))
            times.append(statistics.median(spent[2:]))
        say(f"{name:>18}{times[0]:>9.2f}{times[1]:>14.2f}")


def main() -> None:
    if "RANK" not in os.environ:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        sys.exit(subprocess.run([*run, *sys.argv], env=os.environ | threads).returncode)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    check(rank, ranks)
    for t, C in () if "--check" in sys.argv else ((32, 256), (128, 512), (256, 1024)):
        benchmark(rank, ranks, t, C)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
