"""recompute.py: activations that are made again in the backward pass instead of being kept.

A block of a transformer keeps for its backward pass some 30 numbers for each one of its input. What
can be made again from less need not be kept: memory for flops (Chen et al., arXiv:1604.06174). The
modes, per block, from dear to cheap in memory:

    none        what autograd keeps
    attention   each attention is a checkpoint of its own: q, k and v are kept, not the T x T
                matrices between them and its output (Korthikanti et al., arXiv:2205.05198, 5)
    selective   torchtitan's: kept are the input, the output of the attention op and every second
                product; norms, rotations, nonlinearities and the other products are made again
    full        the input alone is kept
    sqrt        `segments`: sqrt(L) runs of neighbours, and of each the input alone (Chen et al., 4)

    for block in model.layers:
        block.forward = wrapped(block.forward, "selective")  # then block.compile(), fully_shard

What it costs: full makes a second forward pass, a third more flops, without the last product;
selective about half of that; attention its own flops, little where sequences are short.

When it loses. attention: where the kernel is fused, flash attention keeps no matrix, and all there
is to win is lse, four bytes per token and head; the mode is for attention that has scores. sqrt:
while a run is made again all of it is there at once, L / n blocks; a block of Llama holds 20 to 30
inputs, so that sqrt alone beats full only from about 900 layers on. Over blocks that are "full"
themselves it keeps 2 sqrt(L) inputs instead of L, for one more forward pass.

What is opaque. selective sees operations of torch. An autograd.Function, as a Triton kernel has it,
is none: its output is not kept, and it runs again in the backward pass, unless its kernel is a
torch.library.custom_op that is named in `save`. Collectives run again too, on every rank alike.

Of products the second, fourth ... are kept: of q, k, v, o, gate, up, down these are k, o and up.
With the first, third ... of torchtitan as many flops are made again, but the output of down is held
as well, which no backward pass asks for.

`block_bytes` and `block_flops` are the formulas of all this, `kept_bytes` measures, and `choose`
finds the modes with the least flops that fit a budget. Which hook: a block's forward, and for
attention the `attend` argument. Equivalence (test_all.py): losses and gradients in every mode are
those of none, bit for bit, with dropout, autocast, fully_shard, tensor parallelism and
block.compile(); but where several passes share an autocast context, selective adds up a weight's
gradients in fp32 and not in autocast's dtype. Needs: torch. `python training/recompute.py` checks itself and
prints a table.
"""

from __future__ import annotations

import bisect
import gc
import itertools
import math
import statistics
import sys
import time
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
    """The operations of aten that this torch has."""
    packets = [getattr(aten, name, None) for name in names]
    return {packet.default for packet in packets if packet is not None}


MATMUL_OPS = _aten_ops(["mm", "addmm", "linear", "_scaled_mm", "_grouped_mm"])
# outputs of attention, and what a router chose, lest it choose otherwise the second time
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
    """A block's forward(x, *others) in that mode: the same numbers, gradients too.

    attention: any callable among `others` (the attend hook) is the attention, or where there is
    none each call of F.scaled_dot_product_attention. save: further operations, as torch.ops has
    them, whose outputs selective keeps. ValueError for another mode, and for sqrt, which is not of
    one block.
    """
    if mode == "sqrt":
        raise ValueError("mode sqrt is of a run of blocks, not of one: use segments(blocks)")
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; known: {', '.join(MODES)}")
    if mode == "attention":
        return partial(_checkpoint_attention, forward)
    if mode == "selective":
        return partial(_selective, forward, partial(_save_every_second_matmul, SAVED_OPS.union(save)))
    return forward if mode == "none" else partial(_full, forward)


# torch.compile starts at a function's frame, and skips checkpoint's own: a bare partial(checkpoint,
# forward) would run eagerly without a word.


def _full(forward: Forward, x: Tensor, *rest_args: Any) -> Tensor:
    return non_reentrant_checkpoint(forward, x, *rest_args)


def _selective(forward: Forward, context_fn: Callable[[], Any], x: Tensor, *rest_args: Any) -> Tensor:
    return non_reentrant_checkpoint(partial(_without_cast_cache, forward), x, *rest_args, context_fn=context_fn)


class _CheckpointSDPA(TorchFunctionMode):
    """Makes each call of F.scaled_dot_product_attention a checkpoint."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = F.scaled_dot_product_attention
        call = partial(non_reentrant_checkpoint, func) if func is run else func
        return call(*args, **(kwargs or {}))


def _checkpoint_attention(forward: Forward, x: Tensor, *rest_args: Any) -> Tensor:
    if not any(callable(other) for other in rest_args):
        with _CheckpointSDPA():
            return forward(x, *rest_args)
    return forward(x, *(partial(non_reentrant_checkpoint, o) if callable(o) else o for o in rest_args))


def _save_every_second_matmul(saved: set[Any]) -> tuple[Any, Any]:
    """The contexts of one forward pass: `kept` operations and every second product are kept."""
    seen = 0

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal seen
        seen += op in MATMUL_OPS
        keep = op in saved or (op in MATMUL_OPS and seen % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _without_cast_cache(forward: Forward, x: Tensor, *rest_args: Any) -> Tensor:
    """forward without autocast's cache of casts: operations are found again by their number, and
    one that the cache has spared the first time would be one too many the second."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return forward(x, *rest_args)
    with torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False):
        return forward(x, *rest_args)


def layer_groups(blocks: Sequence[nn.Module], n: int | None = None) -> list[Forward]:
    """n runs of neighbouring blocks (default: the integer next to sqrt(L)), as even as can be, the
    longer ones first; each is one checkpoint.

    Each takes and returns what a block does, and calls its blocks as modules, so that their hooks
    fire, when it is made again too.
    """
    blocks = list(blocks)
    n = max(1, round(math.sqrt(len(blocks)))) if n is None else n
    if not 1 <= n <= max(1, len(blocks)):
        raise ValueError(f"n must be from 1 to the {len(blocks)} blocks, not {n}")

    def run(part: Sequence[nn.Module], x: Tensor, *rest_args: Any) -> Tensor:
        for block in part:
            x = block(x, *rest_args)
        return x

    size, more = divmod(len(blocks), n)
    ends = [i * size + min(i, more) for i in range(n + 1)]
    parts = [blocks[start:end] for start, end in zip(ends, ends[1:]) if end > start]
    return [partial(non_reentrant_checkpoint, partial(run, part)) for part in parts]


# --------------------------------------------------------------------------------------------------
# What is kept: measured, and by formula
# --------------------------------------------------------------------------------------------------


def _storages(of: Any) -> dict[StorageWeakRef, int]:
    """Those of the tensors in nested lists, tuples and mappings (of a DTensor the local one's), and
    their bytes. Nothing is held, but no other storage will be taken for one of them."""
    if isinstance(of, Tensor):
        storage = (of.to_local() if hasattr(of, "to_local") else of).untyped_storage()
        return {StorageWeakRef(storage): storage.nbytes()}
    parts = of.values() if isinstance(of, Mapping) else of
    external: dict[StorageWeakRef, int] = {}
    for part in (
        parts if isinstance(parts, Iterable) and not isinstance(parts, (str, bytes)) else ()
    ):
        external |= _storages(part)
    return external


class _StorageTracker(TorchDispatchMode):
    """Storages that operations make, and others that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: dict[StorageWeakRef, int] = {}
        self.external: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor: what it does to its shard will be seen
        read = _storages([args, kwargs])
        self.external |= {ref: n for ref, n in read.items() if ref not in self.allocated}
        out = func(*args, **(kwargs or {}))
        self.allocated |= {ref: n for ref, n in _storages(out).items() if ref not in self.external}
        return out


def saved_bytes(run: Callable[[], Any], exclude: Iterable[Tensor] = ()) -> int:
    """Bytes that are alive after run() because of the graph of what it returns, one tensor or more.

    Every storage counts once, those of `but` (parameters, inputs that are held anyway) not. What
    run makes counts wherever it is kept: in the graph, in a checkpoint's closures and caches; a
    tensor from outside where autograd saves it; outputs where the graph needs them. On any device,
    meta and fake tensors too.
    """
    saved: dict[StorageWeakRef, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved.update(_storages(x))
        return x

    gc.freeze()  # only what run leaves behind is searched for garbage, not all there is
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
    held = _storages(list(exclude))
    return sum(n for ref, n in alive.items() if ref not in held)


def block_bytes(
    tokens: int,
    dim: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    *,
    seq: int = 0,
    residual_bytes: int = 4,
    matmul_bytes: int | None = None,
    gated: bool = True,
    fused: bool = True,
    cast_weights: bool = False,
) -> dict[str, int]:
    """Bytes that a block of Llama keeps of N `tokens`, run eagerly, in each mode but sqrt.

    stream, product: bytes of a number in the residual stream and in products (4 and 2: fp32 under
    autocast; default: the same). gated: SwiGLU; else up, one nonlinearity, down. fused: flash
    attention; else torch's MATH, in sequences of `seq` tokens, which repeats key heads and computes
    in fp32. copies: the casts of fp32 weights that autocast makes and the graph holds count too.

    With C, Hq, Hkv, D, F and s, p = stream, product:
        none       norms 2 (4 C + 4 + s C): input in fp32, 1 / rms, output before the weight; after
                   it p C, and under autocast each of the products has a cast of its own; q, k, v,
                   o p D (2 Hq + 2 Hkv) and lse 4 Hq; gate, up, silu and their product 4 p F
        attention  without lse; q, k, v, o instead of what MATH keeps
        selective  s C, o, lse, and k, o and up of the products (not gated: k, o and down)
        full       s C
    """
    p = residual_bytes if matmul_bytes is None else matmul_bytes
    q, kv = p * heads * head_dim, p * kv_heads * head_dim
    inputs = (5 if gated else 4) if p != residual_bytes else 2
    norms = 2 * (4 * dim + 4 + residual_bytes * dim) + inputs * p * dim
    ends = 2 * q + 2 * kv  # q, k, v, o
    core = 4 * heads if fused else 4 * heads * (3 * head_dim + seq) - (ends - q)
    inner = (4 if gated else 2) * p * ffn
    none, attention = norms + ends + core + inner, norms + ends + inner
    second = kv + p * dim + (p * ffn if gated else p * dim)
    selective = residual_bytes * dim + second + (q + 4 * heads if fused else 0)
    weights = cast_weights * p * dim * (2 * (heads + kv_heads) * head_dim + (3 if gated else 2) * ffn)
    per = {"none": none, "attention": attention, "selective": selective, "full": residual_bytes * dim}
    held = {"none": weights, "attention": weights}
    return {mode: tokens * n + held.get(mode, 0) for mode, n in per.items()}


def block_flops(
    tokens: int,
    dim: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    *,
    seq: int,
    gated: bool = True,
    fused: bool = True,
) -> dict[str, float]:
    """Flops of products that a block of Llama computes again, in each mode but sqrt. Attention is
    causal, half of 4 seq D a head. The last product is never made again."""
    q, kv, up = (2.0 * dim * n for n in (heads * head_dim, kv_heads * head_dim, ffn))
    core = 2.0 * seq * heads * head_dim
    per = {
        "none": 0.0,
        "attention": core,
        "selective": q + kv + up + (0.0 if fused else core),  # q, v, and gate or up
        "full": 2 * q + 2 * kv + (2 if gated else 1) * up + core,
    }
    return {mode: tokens * n for mode, n in per.items()}


# --------------------------------------------------------------------------------------------------
# Which block in which mode
# --------------------------------------------------------------------------------------------------

Costs = Mapping[str, tuple[int, float]]


def choose_modes(costs: Sequence[Costs], budget: int) -> list[str]:
    """A mode per block: of all choices whose bytes fit the budget, one with the least flops.

    costs: of each block {mode: (bytes, recomputed flops)}. Exact: a list of all pairs of sums that
    no other beats in both (Pareto), block by block, without those that cannot be completed within
    the budget, or to less than what is known to be possible. That is told by a price of a byte
    (Lagrange): what a choice costs over the cheapest at that price adds up, at most to the gap.
    ValueError, with the least bytes that are possible, where none fits.
    """
    least = sum(min(b for b, _ in modes.values()) for modes in costs)
    if least > budget:
        raise ValueError(f"budget of {budget} bytes: the least that is possible is {least}")
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
    """The least flops per byte at which the cheapest mode of every block fits the budget, and the
    flops of these modes."""

    def cheapest(price: float) -> tuple[int, float]:
        picks = [min((f + price * b, b, f) for b, f in modes.values()) for modes in costs]
        return sum(b for _, b, _ in picks), sum(f for _, _, f in picks)

    pairs = [p for modes in costs for p in itertools.product(modes.values(), repeat=2)]
    slopes = {(f - g) / (c - b) for (b, f), (c, g) in pairs if b < c and f > g}
    prices = [0.0, *sorted(slopes), 2 * max(slopes, default=0.0) + 1]
    nudge = 1 + 1e-9  # at a slope itself two modes are equally cheap
    i = bisect.bisect_left(prices, True, key=lambda price: cheapest(price * nudge)[0] <= budget)
    return prices[i], cheapest(prices[i] * nudge)[1]


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.type_as(x)


class Block(nn.Module):
    """A block of Llama without rotations: forward(x (B, T, C), attend)."""

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
        heads = (each(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (q, k, v))
        x = x + o(attend(*heads).transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + down(F.silu(gate(h)) * up(h))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def apply_mode(blocks: Sequence[nn.Module], mode: str) -> list[Forward]:
    """Blocks in that mode; sqrt over full ones, the one that keeps least."""
    if mode == "sqrt":
        for block in blocks:
            block.forward = checkpoint_wrapper(block.forward, "full")
        return layer_groups(blocks)
    return [checkpoint_wrapper(block.forward, mode) for block in blocks]


def compute_loss(forwards: Sequence[Forward], x: Tensor) -> Tensor:
    for forward in forwards:
        x = forward(x, attend)
    return x.square().mean()


def make_blocks(device: str, n: int, *sizes: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(*sizes).to(device) for _ in range(n)]


class Peak(_StorageTracker):
    """Bytes that operations made and that were alive together, at most."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.allocated = {ref: n for ref, n in self.allocated.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.allocated.values()))
        return out


def check() -> None:
    """Losses and gradients of every mode == those of none; bytes == the formula; choose == brute
    force."""
    x, seen = torch.randn(2, 16, 32), {}
    for mode in MODES:
        blocks = make_blocks("cpu", 4, 32, 4, 2, 48)
        loss = compute_loss(apply_mode(blocks, mode), x)
        loss.backward()
        seen[mode] = [loss, *(p.grad for block in blocks for p in block.parameters())]
        assert all(map(torch.equal, seen[mode], seen["none"])), mode
    expected = block_bytes(32, 32, 4, 2, 8, 48)
    for mode, n in expected.items():
        (block,) = make_blocks("cpu", 1, 32, 4, 2, 48)
        forward = checkpoint_wrapper(block.forward, mode)
        got = saved_bytes(lambda: forward(x.requires_grad_(), attend), block.parameters())
        assert got == n, (mode, got, n)
    rng = torch.Generator().manual_seed(0)
    for _ in range(50):
        draws = torch.randint(1, 9, (4, 3, 2), generator=rng).tolist()
        costs = [{f"{m}": (b, f) for m, (b, f) in enumerate(row)} for row in draws]
        sums = [[sum(c[i] for c in pick) for i in (0, 1)]
                for pick in itertools.product(*(c.values() for c in costs))]  # fmt: skip
        budget = sums[len(sums) // 2][0]
        got = choose_modes(costs, budget)
        assert sum(c[m][0] for c, m in zip(costs, got)) <= budget
        best = min(f for b, f in sums if b <= budget)
        assert sum(c[m][1] for c, m in zip(costs, got)) == best


def measure(device: str, run: Callable[[], Tensor], params: list[nn.Parameter]) -> list[float]:
    """MB kept between forward and backward pass, MB at the peak of both, and their ms."""
    cuda, times = device == "cuda", []
    amp = torch.autocast(device, torch.bfloat16, enabled=cuda)

    def step() -> None:
        with amp:
            loss = run()
        loss.backward()
        if cuda:
            torch.cuda.synchronize()

    step()  # so that gradients are there
    with amp:
        saved = saved_bytes(run, params)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with Peak() as tracker:  # of a GPU's backward pass, in another thread, it sees nothing
        step()
    peak = torch.cuda.max_memory_allocated() - before if cuda else tracker.peak
    for _ in range(3):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return [saved / 1e6, peak / 1e6, statistics.median(times)]


def benchmark(device: str) -> None:
    cuda = device == "cuda"
    n, (B, T), sizes = 16, (2, 256), (256, 4, 2, 704)
    if cuda:
        n, (B, T), sizes = 32, (8, 2048), (2048, 16, 8, 8192)
    x = torch.randn(B, T, sizes[0], device=device)
    print(f"{n} blocks, {B} x {T} tokens, width {sizes[0]}, {device}, {'bf16' if cuda else 'fp32'}")
    print(f"{'mode':>10}{'saved MB':>10}{'peak MB':>10}{'ms':>9}")
    for mode in MODES:
        blocks = make_blocks(device, n, *sizes)
        forwards = apply_mode(blocks, mode)
        params = [p for block in blocks for p in block.parameters()]
        saved, peak, ms = measure(device, lambda: compute_loss(forwards, x), params)
        print(f"{mode:>10}{saved:>10.1f}{peak:>10.1f}{ms:>9.0f}", flush=True)


if __name__ == "__main__":
    check()
    if "--check" not in sys.argv:
        benchmark("cuda" if torch.cuda.is_available() else "cpu")
