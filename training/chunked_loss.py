"""Fused linear and cross-entropy, chunked over tokens, which never materializes all logits.

The logits of N tokens over a vocabulary of V are the largest tensor of a training step: with V =
128k, in fp32, 8 rows of them take as much memory as 1000 hidden states of width 1024, and the plain
loss stores three such tensors (logits, log-softmax, gradient). But rows are independent: compute
the logits of a chunk of rows, its loss and, before the logits are overwritten, its contribution to
the gradients:

    logits = hidden W^T         p = softmax(logits)         loss = lse - logits[target]
    dlogits = p - onehot        dhidden = dlogits W         dW = sum over chunks, dlogits^T hidden

as in Liger Kernel (arXiv:2410.10989, 3.2), whose chunks have logits about as large as the hidden
states; Cut Cross-Entropy (arXiv:2411.09009) extends this to tiles within a kernel. The loss is a
sum, so that the backward pass only scales both gradients. Gradients that are not required are not
computed; without any, only the loss is.

    total = linear_cross_entropy(hidden, head.weight, targets) / count

With `group` the vocabulary is sharded over ranks, as in Megatron-LM (arXiv:1909.08053, 3): each
rank has some rows of W; for each chunk an all-reduce of the maxima, and one of the sums and the
targets' logits.

Cost: one pass over dW, in fp32, per chunk, and W's whole gradient exists from the forward to the
backward pass. When it loses: if the vocabulary is not much larger than the width. Limits: a single
backward pass, no double backward. Hook: return_hidden. A sharded weight must be gathered first:
with fully_shard, call this within the head's own forward. Equivalence (test_all.py): loss and
gradients == F.cross_entropy of F.linear, within rounding. Needs: torch.
`python training/chunked_loss.py` checks itself and prints a table.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

MIN_CHUNK_ROWS = 128  # default minimum: with fewer rows, the passes over dW become visible
WEIGHT_GRAD_ROWS = 8192  # rows of dW in the matmul's dtype at a time, before accumulation in fp32


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    softcap: float | None = None,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
) -> Tensor:
    """Sum over targets of lse - logit[target] + z_loss * lse^2, in nats, a scalar in fp32 (fp64 for
    fp64 inputs); logits = hidden weight^T + bias, or softcap * tanh(that / softcap) (Gemma 2).

    hidden (N, C), weight (V, C), targets (N,) int64 (ignore_index is skipped), bias (V,). chunk:
    rows of logits computed at a time; by default so many that the logits are as large as hidden,
    but at least 128. z_loss: PaLM's coefficient (arXiv:2204.02311, 5). group: vocabulary-parallel
    ranks with the same hidden and targets, each with the rows of weight and bias from vocab_start
    on. All get the same loss and the gradient of their own rows of weight; that of hidden is
    partial and must be summed over the group.

    Matmuls run in the tensors' dtype, or autocast's; the rest, accumulation of dW included, in
    fp32. Allows one backward pass: the gradients are computed here and only scaled there.
    """
    _check(hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1],
           f"hidden must be (N, C) and weight (V, C), not {tuple(hidden.shape)} and "
           f"{tuple(weight.shape)}")  # fmt: skip
    _check(
        targets.shape == hidden.shape[:1] and targets.dtype == torch.int64,
        f"targets must be ({len(hidden)},) int64, not {tuple(targets.shape)} {targets.dtype}",
    )
    _check(
        bias is None or bias.shape == weight.shape[:1],
        f"bias must be ({len(weight)},), not {bias is not None and tuple(bias.shape)}",
    )
    _check(chunk is None or chunk > 0, f"chunk must be 1 or more rows, not {chunk}")
    _check(softcap is None or softcap > 0, f"softcap must be more than 0, not {softcap}")
    kind, dtype = hidden.device.type, hidden.dtype
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    else:
        _check(weight.dtype == dtype, f"hidden is {dtype} and weight {weight.dtype}: without "
               "autocast they must be equal")  # fmt: skip
    V, C = weight.shape
    chunk = chunk or max(MIN_CHUNK_ROWS, len(hidden) * C // V)
    params = (hidden, weight, bias)
    needs_grad = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in params]
    config = _LossConfig(dtype, chunk, ignore_index, z_loss, softcap, group, vocab_start)
    if not any(needs_grad):
        return _loss(config, needs_grad, *params, targets)[0]
    return _LinearCrossEntropy.apply(config, needs_grad, *params, targets)


@dataclass(frozen=True)
class _LossConfig:
    dtype: torch.dtype  # of matmuls
    chunk: int
    ignore_index: int
    z_loss: float
    softcap: float | None
    group: dist.ProcessGroup | None
    vocab_start: int


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves the gradients for an upstream gradient of 1 and scales them in place; autograd raises
    in a second backward pass, because they were modified."""

    @staticmethod
    def forward(ctx: Any, config: _LossConfig, needs_grad: list[bool], *tensors: Any) -> Tensor:
        loss, *grads = _loss(config, needs_grad, *tensors)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grads = [g if g is None else g.mul_(grad) for g in ctx.saved_tensors]
        return None, None, *grads, None


@torch.no_grad()
def _loss(
    config: _LossConfig,
    needs_grad: list[bool],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    t: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss, and its gradients of hidden, weight and bias where needs_grad, else None."""
    acc_dtype = torch.promote_types(config.dtype, torch.float32)
    zeros = lambda i, x, dtype: x.new_zeros(x.shape, dtype=dtype) if needs_grad[i] else None
    dhidden, dweight = zeros(0, hidden, hidden.dtype), zeros(1, weight, acc_dtype)
    dbias, loss = zeros(2, bias, acc_dtype), hidden.new_zeros((), dtype=acc_dtype)
    with _no_autocast(hidden.device.type):
        w = weight.to(config.dtype)
        buffer = weight.new_empty((min(config.chunk, len(hidden)), len(weight)), dtype=acc_dtype)
        for start in range(0, len(hidden), config.chunk):
            rows = slice(start, start + config.chunk)
            h = hidden[rows].to(config.dtype)
            z = _matmul_out(h, w.T, buffer[: len(h)])
            if bias is not None:
                z += bias
            loss += _chunk_loss(config, z, t[rows], any(needs_grad))
            if dbias is not None:
                dbias += z.sum(0)
            d = z.to(config.dtype)
            if dhidden is not None:
                dhidden[rows] = d @ w
            if dweight is not None:
                _addmm_(dweight, d, h)
            del d
    cast = lambda grad, param: grad if grad is None else grad.to(param.dtype)
    return loss, dhidden, cast(dweight, weight), cast(dbias, bias)


def _no_autocast(kind: str) -> Any:
    available = torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if available else nullcontext()


def _matmul_out(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b into a reused buffer: page faults of a new one cost a CPU more than the matmul."""
    return torch.mm(a, b, out=out) if a.dtype == out.dtype else out.copy_(a @ b)


def _addmm_(total: Tensor, d: Tensor, h: Tensor) -> None:
    """total (V, C) += d^T h for d (n, V), h (n, C); in lower precision WEIGHT_GRAD_ROWS rows at a
    time, so that the temporary is never as large as total."""
    if d.dtype == total.dtype:
        total.addmm_(d.T, h)
        return
    for rows, part in zip(total.split(WEIGHT_GRAD_ROWS), d.split(WEIGHT_GRAD_ROWS, dim=1)):
        rows += part.T @ h


def _chunk_loss(config: _LossConfig, z: Tensor, targets: Tensor, needs_grad: bool) -> Tensor:
    """Loss of rows of logits z (n, V), or of this rank's columns. z is overwritten: with dlogits if
    needs_grad."""
    if config.softcap is not None:
        z.div_(config.softcap).tanh_().mul_(config.softcap)
        slope = 1 - (z / config.softcap).square_() if needs_grad else None
    column, ignored = targets - config.vocab_start, targets == config.ignore_index
    invalid = ignored  # rows whose target is not in this rank's columns
    if config.group is not None:
        invalid = ignored | (column < 0) | (column >= z.shape[1])
    column = column.masked_fill(invalid, 0)[:, None]
    target_logits = z.gather(1, column)[:, 0].masked_fill(invalid, 0.0)
    row_max = z.amax(1)
    if config.group is not None:
        dist.all_reduce(row_max, dist.ReduceOp.MAX, group=config.group)
    sums = z.sub_(row_max[:, None]).exp_().sum(1)
    if config.group is not None:
        both = torch.stack((sums, target_logits))
        dist.all_reduce(both, group=config.group)
        sums, target_logits = both
    lse = row_max + sums.log()
    loss = (lse - target_logits + config.z_loss * lse.square()).masked_fill(ignored, 0.0).sum()
    if needs_grad:
        z.mul_(((1 + 2 * config.z_loss * lse) / sums).masked_fill(ignored, 0.0)[:, None])
        z.scatter_add_(1, column, invalid.to(z.dtype)[:, None] - 1)
        if config.softcap is not None:
            z.mul_(slope)
    return loss


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None,
    ignore_index: int = -100, z_loss: float = 0.0, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """linear_cross_entropy with all logits at once, in plain torch."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.float() if logits.dtype != torch.float64 else logits
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    if z_loss:
        lse = logits.logsumexp(-1).masked_fill(targets == ignore_index, 0.0)
        loss = loss + z_loss * lse.square().sum()
    return loss


class PeakMemory(TorchDispatchMode):
    """Peak of the bytes that operators allocated and that were alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {StorageWeakRef(t.untyped_storage()) for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and (ref := StorageWeakRef(t.untyped_storage())) not in known:
                self.alive[ref] = t.untyped_storage().nbytes()
        self.alive = {ref: n for ref, n in self.alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


def check() -> None:
    """Loss and gradients == the reference's in fp64."""
    rng = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)
    targets = torch.randint(0, 97, (50,), generator=rng)
    targets[::7] = -100
    for config in ({}, {"z_loss": 0.01}, {"softcap": 2.0}, {"bias": randn(97)}):
        results = []
        tensors = [randn(50, 16), randn(97, 16)]
        for run in (linear_cross_entropy, reference):
            leaves = [t.clone().requires_grad_() for t in tensors]
            chunked = {"chunk": 13} if run is linear_cross_entropy else {}
            loss = run(*leaves, targets, **config, **chunked)
            (loss / 7).backward()
            results.append([loss, *(t.grad for t in leaves)])
        for got, want in zip(*results):
            assert torch.allclose(got, want, rtol=1e-11, atol=1e-12), config


def implementations() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Name -> loss function of hidden (N, C), the head's weight (V, C) and targets (N,)."""
    found: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "F.cross_entropy(F.linear(...))": reference
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        options = torch.nn.LinearCrossEntropyOptions()
        found["F.linear_cross_entropy (torch)"] = lambda h, w, t: F.linear_cross_entropy(
            h, w, t, reduction="sum", options=options
        )
    found["chunked_loss.py"] = linear_cross_entropy
    for rows in (64, 128, 256):
        found[f"chunked_loss.py, chunk={rows}"] = partial(linear_cross_entropy, chunk=rows)
    return found


def benchmark(device: str) -> None:
    """Milliseconds and peak MB, without the inputs, of forward and backward pass."""
    cuda = device == "cuda"
    N, C, V = (8192, 4096, 131072) if cuda else (256, 128, 131072)
    dtype = torch.bfloat16 if cuda else torch.float32
    randn = lambda *shape: torch.randn(*shape, device=device).to(dtype).requires_grad_()
    tensors = [randn(N, C), randn(V, C)]
    targets = torch.randint(0, V, (N,), device=device)
    print(f"{N} tokens, width {C}, vocabulary {V}, {dtype}, {device}; logits {N * V * 4 / 1e6:.0f}"
          " MB in fp32")  # fmt: skip
    print(f"{'':>32}{'ms':>9}{'peak MB':>9}")
    for name, run in implementations().items():

        def step() -> None:
            run(*tensors, targets).backward()
            for t in tensors:
                t.grad = None

        times = []
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with nullcontext(PeakMemory()) if cuda else PeakMemory() as tracker:
            step()
        peak = torch.cuda.max_memory_allocated() - before if cuda else tracker.peak
        for _ in range(3):
            start = time.perf_counter()
            step()
            if cuda:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        print(f"{name:>32}{statistics.median(times):>9.0f}{peak / 1e6:>9.0f}", flush=True)


if __name__ == "__main__":
    check()
    if "--check" not in sys.argv:
        benchmark("cuda" if torch.cuda.is_available() else "cpu")
