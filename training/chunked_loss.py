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

MIN_CHUNK_ROWS = 128  # default minimum: with fewer rows, the passes over dW become visible
WEIGHT_GRAD_ROWS = 8192  # rows of dW in the matmul's dtype at a time, before accumulation in fp32


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None,
    chunk: int | None = None, ignore_index: int = -100, z_loss: float = 0.0,
    softcap: float | None = None, group: dist.ProcessGroup | None = None, vocab_start: int = 0,
) -> Tensor:  # fmt: skip
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
    config: _LossConfig, needs_grad: list[bool], hidden: Tensor, weight: Tensor,
    bias: Tensor | None, t: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
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


def main() -> None:
    """Loss and gradients == the reference's; milliseconds of forward and backward pass."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    cuda = torch.cuda.is_available()
    N, C, V = (8192, 4096, 131072) if cuda else (256, 128, 131072)
    torch.set_default_device("cuda" if cuda else "cpu")
    hidden, weight = torch.randn(N, C, requires_grad=True), torch.randn(V, C, requires_grad=True)
    targets = torch.randint(0, V, (N,))

    def step(loss: Callable[..., Tensor]) -> list[Tensor]:
        return [*torch.autograd.grad(loss(hidden, weight, targets), [hidden, weight])]

    for got, want in zip(step(linear_cross_entropy), step(reference)):
        assert (got - want).norm() < 1e-5 * want.norm()
    print(f"{N} tokens, width {C}, vocabulary {V}; {N * V * 4 / 1e6:.0f} MB of logits in fp32")
    losses = {"F.cross_entropy(F.linear(...))": reference, "chunked_loss.py": linear_cross_entropy}
    losses["chunked_loss.py, chunk=64"] = partial(linear_cross_entropy, chunk=64)
    for name, loss in losses.items():
        ms = 1e3 * Timer("step(loss)", globals=dict(step=step, loss=loss)).timeit(3).median
        print(f"{name:>32}{ms:>9.0f} ms", flush=True)


if __name__ == "__main__":
    main()
