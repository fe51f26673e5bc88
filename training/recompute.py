"""Activation checkpointing: activations are recomputed in the backward pass instead of stored.

A transformer block saves some 30 numbers for its backward pass for each number of its input. What
can be recomputed from less need not be saved: memory is traded for FLOPs (Chen et al.,
arXiv:1604.06174). The modes, per block, by falling memory:

    none        everything that autograd saves
    attention   each attention is its own checkpoint: q, k and v are saved, not the T x T matrices
                between them and its output (Korthikanti et al., arXiv:2205.05198, 5)
    selective   torchtitan's per-op policy: saves the input, the attention op's output and every
                second matmul; recomputes norms, rotations, nonlinearities and the other matmuls
    full        saves only the block's input
    sqrt        `layer_groups`: sqrt(L) groups of consecutive blocks, only the input of each is
                saved (Chen et al., 4)

    for block in model.layers:
        block.forward = checkpoint_wrapper(block.forward, "selective")
        # then block.compile(), fully_shard

Cost: full runs a second forward pass, a third more FLOPs, without the last matmul; selective about
half of that; attention its own FLOPs, few if sequences are short.

When it loses. attention: with a fused kernel. Flash attention saves no T x T matrix, so that only
the lse, four bytes per token and head, is gained; the mode is for attention that materializes
scores. sqrt: while a group is recomputed, all its activations exist at once, L / n blocks; a Llama
block saves 20 to 30 times its input, so that sqrt alone beats full only from about 900 layers on.
Combined with full blocks it saves 2 sqrt(L) inputs instead of L, for one more forward pass.

What selective cannot see: it works on torch operators. An autograd.Function, such as a Triton
kernel's, is not one: its output is not saved and it runs again in the backward pass, unless its
kernel is a torch.library.custom_op that is listed in `save`. Collectives run again too, on every
rank alike.

Of the matmuls the second, fourth, ... are saved: of q, k, v, o, gate, up, down these are k, o, up.
Saving the first, third, ... as torchtitan does recomputes as many FLOPs, but also stores the output
of down, which no backward pass needs.

`saved_bytes` measures what a forward pass saves, and `choose_modes` finds the modes with the fewest
recomputed FLOPs within a memory budget. Hooks: a block's forward, and for attention the `attend`
argument. Equivalence (test_all.py): losses and gradients in every mode equal those of none, bit for
bit, with dropout, autocast and block.compile(); with fully_shard and tensor parallelism up to
rounding. Exception: if several passes share one autocast context, selective accumulates a weight's
gradients in fp32 and not in autocast's dtype. Needs: torch.
`python training/recompute.py` checks itself and prints a table.
"""

from __future__ import annotations

import bisect
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

MODES = ("none", "attention", "selective", "full", "sqrt")

Forward = Callable[..., Tensor]
aten = torch.ops.aten


def _aten_ops(names: Iterable[str]) -> set[Any]:
    """The ATen operators of these names that this torch version has."""
    packets = [getattr(aten, name, None) for name in names]
    return {packet.default for packet in packets if packet is not None}


MATMUL_OPS = _aten_ops(["mm", "addmm", "linear", "_scaled_mm", "_grouped_mm"])
# attention outputs, and the router's choice, which must not differ in the recomputation
SAVED_OPS = _aten_ops(
    [
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable", "topk",
    ]
)  # fmt: skip

non_reentrant_checkpoint = partial(checkpoint, use_reentrant=False)


# --------------------------------------------------------------------------------------------------
# The modes
# --------------------------------------------------------------------------------------------------


def checkpoint_wrapper(forward: Forward, mode: str, save: Iterable[Any] = ()) -> Forward:
    """A block's forward(x, *rest_args) with activation checkpointing; same outputs and gradients.

    attention: checkpoints every callable in `rest_args` (the attend hook), or if there is none each
    call of F.scaled_dot_product_attention. save: additional operators (torch.ops) whose outputs
    selective saves. ValueError for an unknown mode, and for sqrt, which needs several blocks.
    """
    if mode == "sqrt":
        raise ValueError("mode sqrt is for groups of blocks, not for one: use layer_groups(blocks)")
    if mode not in MODES:
        raise ValueError(f"unsupported mode {mode!r}; supported: {', '.join(MODES)}")
    if mode == "attention":
        return partial(_checkpoint_attention, forward)
    if mode == "selective":
        context_fn = partial(_save_every_second_matmul, SAVED_OPS.union(save))
        return partial(_selective, forward, context_fn)
    return forward if mode == "none" else partial(_full, forward)


def chunk_tokens(forward: Forward, size: int) -> Forward:
    """The feed-forward's forward(x (B, T, C)) on `size` tokens at a time, each chunk recomputed in
    the backward pass. Only one chunk's intermediates are in memory at a time, and only its input is
    saved, so saved bytes do not depend on F (Blockwise Parallel Transformer, arXiv:2305.19370)."""

    def run(x: Tensor) -> Tensor:
        return torch.cat([_full(forward, chunk) for chunk in x.split(size, dim=1)], dim=1)

    return run


# torch.compile starts at a Python function's frame and skips that of checkpoint itself: a bare
# partial(checkpoint, forward) would silently run eagerly.


def _full(forward: Forward, x: Tensor, *rest_args: Any) -> Tensor:
    return non_reentrant_checkpoint(forward, x, *rest_args)


def _selective(
    forward: Forward, context_fn: Callable[[], Any], x: Tensor, *rest_args: Any
) -> Tensor:
    forward = partial(_without_cast_cache, forward)
    return non_reentrant_checkpoint(forward, x, *rest_args, context_fn=context_fn)


class _CheckpointSDPA(TorchFunctionMode):
    """Checkpoints each call of F.scaled_dot_product_attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = F.scaled_dot_product_attention
        call = partial(non_reentrant_checkpoint, func) if func is run else func
        return call(*args, **(kwargs or {}))


def _checkpoint_attention(forward: Forward, x: Tensor, *rest_args: Any) -> Tensor:
    if not any(callable(arg) for arg in rest_args):
        with _CheckpointSDPA():
            return forward(x, *rest_args)
    run = non_reentrant_checkpoint
    return forward(x, *(partial(run, arg) if callable(arg) else arg for arg in rest_args))


def _save_every_second_matmul(saved: set[Any]) -> tuple[Any, Any]:
    """Contexts of one forward pass, which saves the outputs of `saved` ops and of every second
    matmul."""
    seen = 0

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal seen
        seen += op in MATMUL_OPS
        keep = op in saved or (op in MATMUL_OPS and seen % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _without_cast_cache(forward: Forward, x: Tensor, *rest_args: Any) -> Tensor:
    """forward without autocast's weight cache: selective checkpointing matches operators by their
    count, and the recomputation would run casts that the cache skipped in the forward pass."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return forward(x, *rest_args)
    with torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False):
        return forward(x, *rest_args)


def layer_groups(blocks: Sequence[nn.Module]) -> list[Forward]:
    """sqrt(L) groups, rounded, of consecutive blocks, of equal size up to one block, larger ones
    first; each group is one checkpoint.

    A group has a block's arguments and result. It calls its blocks as modules, so that their hooks
    run, in the recomputation too.
    """
    blocks = list(blocks)
    n = max(1, round(math.sqrt(len(blocks))))

    def run(part: Sequence[nn.Module], x: Tensor, *rest_args: Any) -> Tensor:
        for block in part:
            x = block(x, *rest_args)
        return x

    size, more = divmod(len(blocks), n)
    ends = [i * size + min(i, more) for i in range(n + 1)]
    parts = [blocks[start:end] for start, end in zip(ends, ends[1:]) if end > start]
    return [partial(non_reentrant_checkpoint, partial(run, part)) for part in parts]


# --------------------------------------------------------------------------------------------------
# Saved activations
# --------------------------------------------------------------------------------------------------


def _storages(of: Any) -> dict[StorageWeakRef, int]:
    """{storage: bytes} of the tensors in nested lists, tuples and mappings (of a DTensor, of its
    local tensor). The references are weak, but their keys are never reused."""
    if isinstance(of, Tensor):
        storage = (of.to_local() if hasattr(of, "to_local") else of).untyped_storage()
        return {StorageWeakRef(storage): storage.nbytes()}
    parts = of.values() if isinstance(of, Mapping) else of
    storages: dict[StorageWeakRef, int] = {}
    if isinstance(parts, Iterable) and not isinstance(parts, (str, bytes)):
        for part in parts:
            storages |= _storages(part)
    return storages


class _StorageTracker(TorchDispatchMode):
    """Storages that operators allocate, and external ones that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: dict[StorageWeakRef, int] = {}
        self.external: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor: its ops on the local tensor are dispatched later
        read = _storages([args, kwargs])
        self.external |= {ref: n for ref, n in read.items() if ref not in self.allocated}
        out = func(*args, **(kwargs or {}))
        storages = _storages(out)
        self.allocated |= {ref: n for ref, n in storages.items() if ref not in self.external}
        return out


def saved_bytes(run: Callable[[], Any], exclude: Iterable[Tensor] = ()) -> int:
    """Bytes that the autograd graph of run()'s outputs (one tensor or more) keeps alive.

    Every storage counts once; those of `exclude` (parameters, inputs that live anyway) do not
    count. Storages that run allocates count wherever they are referenced: in the graph, or in a
    checkpoint's closures and caches; external tensors if autograd saves them; outputs if the graph
    needs them. Works on any device, with meta and fake tensors too.
    """
    saved: dict[StorageWeakRef, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved.update(_storages(x))
        return x

    gc.freeze()  # the collection below then only looks at objects that run created
    try:
        with _StorageTracker() as notes, saved_tensors_hooks(pack, lambda x: x):
            outputs = run()
        graph = [t.grad_fn for t in (outputs if isinstance(outputs, (list, tuple)) else [outputs])]
        del outputs
        torch.clear_autocast_cache()
        gc.collect()
    finally:
        gc.unfreeze()
    alive = {ref: n for ref, n in notes.allocated.items() if not ref.expired()}
    alive |= {ref: n for ref, n in saved.items() if ref not in notes.allocated}
    del graph
    excluded = _storages(list(exclude))
    return sum(n for ref, n in alive.items() if ref not in excluded)


# --------------------------------------------------------------------------------------------------
# A mode for each block
# --------------------------------------------------------------------------------------------------

Costs = Mapping[str, tuple[int, float]]


def choose_modes(costs: Sequence[Costs], budget: int) -> list[str]:
    """One mode per block: the assignment with the fewest recomputed FLOPs within the byte budget.

    costs: for each block {mode: (bytes, recomputed FLOPs)}. Exact: dynamic programming over blocks
    keeps the Pareto front of (bytes, FLOPs) and prunes entries that cannot be completed within the
    budget or cannot beat a known solution. The second test is a Lagrangian bound: with a price per
    byte, the excess of each choice over the block's cheapest adds up, at most to the duality gap.
    ValueError, with the minimum number of bytes, if no assignment fits.
    """
    least = sum(min(b for b, _ in modes.values()) for modes in costs)
    if least > budget:
        raise ValueError(f"budget of {budget} bytes is too small: the minimum is {least}")
    price, known = _lagrange_multiplier(costs, budget)
    over = [{m: f + price * b for m, (b, f) in modes.items()} for modes in costs]
    over = [{m: x - min(row.values()) for m, x in row.items()} for row in over]
    bound = sum(min(f + price * b for b, f in modes.values()) for modes in costs) - price * budget
    gap = (known - bound) * (1 + 1e-9) + 1e-9 * abs(known)
    rest, front = least, [(0, 0.0, 0.0, None)]  # bytes, flops, over the price, (mode, before)
    for modes, extra in zip(costs, over):
        rest -= min(b for b, _ in modes.values())
        more = [
            (at[0] + b, at[1] + f, at[2] + extra[m], (m, at[3]))
            for at in front
            for m, (b, f) in modes.items()
            if at[0] + b + rest <= budget and at[2] + extra[m] <= gap
        ]
        more.sort(key=lambda at: at[:2])
        front = [
            at for at, best in zip(more, accumulate((a[1] for a in more), min, initial=math.inf))
            if at[1] < best
        ]  # fmt: skip
    chosen, link = [], min(front, key=lambda at: at[1])[3]
    while link is not None:
        chosen.append(link[0])
        link = link[1]
    return chosen[::-1]


def _lagrange_multiplier(costs: Sequence[Costs], budget: int) -> tuple[float, float]:
    """The smallest price in FLOPs per byte at which every block's cheapest mode fits the budget,
    and the FLOPs of these modes."""

    def cheapest(price: float) -> tuple[int, float]:
        picks = [min((f + price * b, b, f) for b, f in modes.values()) for modes in costs]
        return sum(b for _, b, _ in picks), sum(f for _, _, f in picks)

    pairs = [p for modes in costs for p in itertools.product(modes.values(), repeat=2)]
    slopes = {(f - g) / (c - b) for (b, f), (c, g) in pairs if b < c and f > g}
    prices = [0.0, *sorted(slopes), 2 * max(slopes, default=0.0) + 1]
    nudge = 1 + 1e-9  # breaks the tie of two modes at the slope itself
    i = bisect.bisect_left(prices, True, key=lambda price: cheapest(price * nudge)[0] <= budget)
    return prices[i], cheapest(prices[i] * nudge)[1]


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A Llama block without rotary embedding: forward(x (B, T, C), attend)."""

    def __init__(self, dim: int, heads: int, kv_heads: int, ffn: int):
        super().__init__()
        self.head_dim, kv_dim = dim // heads, dim // heads * kv_heads
        sizes = [(dim, dim), (dim, kv_dim), (dim, kv_dim), (dim, dim)]
        sizes += [(dim, ffn), (dim, ffn), (ffn, dim)]
        self.linears = nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in sizes)
        self.norms = nn.ModuleList(Norm(dim) for _ in range(2))

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        q, k, v, o, gate, up, down = self.linears
        h = self.norms[0](x)
        heads = (proj(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (q, k, v))
        x = x + o(attend(*heads).transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + down(F.silu(gate(h)) * up(h))


class Norm(nn.Module):
    """RMSNorm of the self-check's blocks: x (..., C) -> (..., C), statistics in fp32."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.type_as(x)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: q (B, Hq, T, D), k and v (B, Hkv, T, D) -> (B, Hq, T, D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def main() -> None:
    """Gradients of every mode == those of none; MB saved for the backward pass, and the time."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    cuda = torch.cuda.is_available()
    n, B, T, sizes = 4, 2, 256, (256, 4, 2, 704)
    if cuda:
        n, B, T, sizes = 32, 8, 2048, (2048, 16, 8, 8192)
    torch.set_default_device("cuda" if cuda else "cpu")
    x, expected = torch.randn(B, T, sizes[0]), None
    print(f"{n} blocks, {B} x {T} tokens, width {sizes[0]}\n{'mode':>10}{'saved MB':>10}{'ms':>9}")
    for mode in MODES:
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Block(*sizes) for _ in range(n)))
        for block in blocks:  # sqrt is combined with full, which saves the least
            block.forward = checkpoint_wrapper(block.forward, "full" if mode == "sqrt" else mode)
        forwards = layer_groups(blocks) if mode == "sqrt" else [b.forward for b in blocks]

        def loss() -> Tensor:
            y = x
            for forward in forwards:
                y = forward(y, attend)
            return y.square().mean()

        params = [*blocks.parameters()]
        saved = saved_bytes(loss, params)
        grads = torch.autograd.grad(loss(), params)
        expected = expected or grads
        assert all(map(torch.equal, grads, expected)), mode
        ms = 1e3 * Timer("loss().backward()", globals=dict(loss=loss)).timeit(3).median
        print(f"{mode:>10}{saved / 1e6:>10.1f}{ms:>9.0f}", flush=True)


if __name__ == "__main__":
    main()
