"""Many LoRA adapters in one batch: every row of a step has its own, their weights are paged.

A fine-tuned model per tenant or task is the base and an adapter of some MB (training/lora.py).
Merged, each needs a copy of the base and a batch of its own; but the base's matmuls, which are
nearly all of the work, are the same for all. So a batch mixes them (Punica, arXiv:2310.18547):

    y = W x + scale_i * B_i (A_i x)        for the rows with adapter i; ranks differ

    SGMV    segments of rows with one adapter, as in prefill: small matmuls, x read in tiles
    BGMV    single rows, as in decode: matrix-vector products, bound by reading A_i and B_i
    paging  an adapter's weights are in blocks of the KV cache (S-LoRA's unified paging,
            arXiv:2311.03285): layer l's A and B are in layer l's keys and values of its blocks, and
            every path reads them there, through the block table. Host memory has all adapters;
            blocks get those of running requests, before the step that needs them, or earlier while
            a request waits and blocks are free.
    eviction  the blocks of an adapter are a chain of the allocator's prefix tree, below a root of
            its own. So an adapter that no sequence uses is cached like a prompt and evicted by the
            same LRU, its last blocks first; the rest is kept, and what is missing is loaded again.
            Keys and values computed with an adapter are below the same root: adapters share none.
    merging   when one adapter dominates, its B A is added to W, and the rows of others get minus
            that: serving/adapter_merging.py (dLoRA) decides when.

Cost: 2 rank (C + F) operations per row and linear layer, 1% of the layer's at rank 16, and reading
the weights of all active adapters in every step. Rank 16 in all seven linears of TinyLlama takes
the KV of 1120 tokens. When it loses: one adapter for all requests (merge it: generate.py
--adapter); more active adapters than blocks, which are then loaded in turn. A cold adapter is
copied from host memory, tens of MB, and the step waits for that unless it was prefetched; computing
its prefill on the host meanwhile (CaraServe, arXiv:2401.11240) is left out: on a CPU host and
device are one.

Hooks: the Linear swap (`AdapterPool(model)` wraps each target, quantized or not, in an
AdapterLinear), `linear_fn` of modules that apply several linears to one input, and Engine(adapters=
pool), which calls `get`, `load` and `prepare`. Equivalence (test_all.py): a mixed batch == each
adapter merged, alone; kernels == float64. Needs: torch, and triton on a GPU.

Shapes: N rows (tokens) of a step, C and F a layer's input and output width, A (rank, C), B (F,
rank). Weights of a layer in a pool are one vector: for each group of linears with the same input
their A's, then their B's transposed, (rank, F).
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

triton = None  # then plain torch serves every call; the import takes 0.3 s that a CPU can save
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET"):
    with suppress(ImportError):  # not installed
        import triton
        import triton.language as tl

GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
TARGETS = [name for group in GROUPS for name in group]
MAX_RANK = 256
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # of an adapter: no path, one line


def _check(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Adapters and their blocks
# --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Adapter:
    """One adapter: its weights in host memory, and which of its blocks are in the pool."""

    name: str
    rank: int
    scale: float  # alpha / rank
    weights: list[Tensor]  # of each layer (num_blocks, parts, chunk): the vector, padded
    offsets: Tensor  # (L, targets, 2) int32: where A and B begin in the vector; -1: not adapted
    allocator: Any
    root: int  # a node of the prefix tree, below 0, the parent of its weights and of its KV
    matrices: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # for merging
    blocks: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)  # of the prefix tree, to notice an eviction
    text_format: Any = None  # huggingface/fine_tune.py's; None: the base's

    @property
    def num_blocks(self) -> int:
        return len(self.weights[0])

    @property
    def num_missing(self) -> int:
        return self.num_blocks - len(self.resident())

    def resident(self) -> list[int]:
        """Its first blocks that are in the pool: the last are evicted first."""
        entries = self.allocator.entries
        while self.blocks and entries.get(self.blocks[-1], (0, 0, 0))[2] != self.nodes[-1]:
            self.blocks.pop()
            self.nodes.pop()
        return self.blocks

    def share(self) -> list[int]:
        """Add a reference to its resident blocks; returns them."""
        return [*map(self.allocator.share, self.resident())]

    def allocate(self) -> list[int]:
        """Allocate the blocks that are missing, one reference each; returns them. Their weights
        must be loaded before the next step."""
        new = []
        for i in range(len(self.resident()), self.num_blocks):
            block, parent = self.allocator.allocate(), self.nodes[-1] if i else self.root
            self.nodes.append(self.allocator.register(block, parent, (self.name, i)))
            self.blocks.append(block)
            new.append(block)
        return new


class Segment(NamedTuple):
    """Rows start to end, in the order of Batch.order, with one adapter."""

    adapter: Adapter
    start: int
    end: int
    scale: float


# (batch, x (N, C), ys (N, F) each, the first of their linears): Batch.add, in place
Kernels = Callable[["Batch", Tensor, list[Tensor], "AdapterLinear"], None]


@dataclass(eq=False)
class Batch:
    """What the linear layers read of a step: which rows have which adapter. AdapterPool.prepare
    writes it, between steps it is empty."""

    pages: list[Tensor] = field(default_factory=list)  # of each layer (parts, blocks, chunk)
    segments: list[Segment] = field(default_factory=list)
    order: Tensor | None = None  # (N,) rows sorted by adapter
    in_order: bool = True  # they are sorted
    tables: Tables | None = None  # the same for Triton's kernels
    cached: Any = None  # the same for other kernels
    kernels: Kernels | None = None  # by default add_segments
    layer: int = -1  # of `vectors`
    vectors: dict[Adapter, Tensor] = field(default_factory=dict)

    def add(self, x: Tensor, ys: list[Tensor], linears: Sequence[AdapterLinear]) -> list[Tensor]:
        """Add the adapters' part to ys, each (..., F) of linears with one input x (..., C), in
        place. The linears are consecutive targets of a layer."""
        if self.segments or self.tables is not None:
            x, *rows = [t.flatten(0, -2) for t in (x, *ys)]
            self.kernels(self, x, rows, linears[0])
        return ys

    def add_segments(self, x: Tensor, ys: list[Tensor], first: AdapterLinear) -> None:
        """`add` in plain torch: small matmuls, a segment at a time. x (N, C), ys (N, F) each."""
        self._gather(first.layer)
        if self.in_order:
            return self._add_segments(x, ys, first)
        copies = [t[self.order] for t in ys]
        self._add_segments(x[self.order], copies, first)
        for y, new in zip(ys, copies):
            y.index_copy_(0, self.order, new)

    def _gather(self, layer: int) -> None:
        """Copy the vectors of a layer's active adapters out of the blocks."""
        if layer == self.layer:
            return
        pages, self.layer = self.pages[layer].transpose(0, 1), layer
        adapters = {s.adapter: len(s.adapter.blocks) for s in self.segments}
        blocks = torch.tensor([block for adapter in adapters for block in adapter.blocks])
        parts = pages.index_select(0, blocks.to(pages.device)).split([*adapters.values()])
        self.vectors = {adapter: part.flatten() for adapter, part in zip(adapters, parts)}

    def _add_segments(self, x: Tensor, ys: list[Tensor], first: AdapterLinear) -> None:
        """x (N, C) and ys (N, F) in the segments' order. The A's of an adapter, which are next to
        each other, are one matmul."""
        C = x.shape[1]
        for adapter, start, end, scale in self.segments:
            rank, vector = adapter.rank, self.vectors[adapter]
            offsets = adapter.offsets[first.layer, first.target :][: len(ys)].tolist()
            adapted = [(y, *at) for y, at in zip(ys, offsets) if at[0] >= 0]
            if not adapted:
                continue
            a = vector[adapted[0][1] :][: len(adapted) * rank * C].view(-1, C)
            low = x[start:end] @ a.t()
            for (y, _, at), part in zip(adapted, low.split(rank, 1)):
                b = vector[at:][: rank * y.shape[1]].view(rank, -1)
                y[start:end].addmm_(part, b, alpha=scale)


class AdapterLinear(nn.Module):
    """A linear layer and the adapters of a batch's rows."""

    def __init__(self, base: nn.Module, layer: int, target: int, batch: Batch):
        """layer, target: where Adapter.offsets has it."""
        super().__init__()
        self.base, self.layer, self.target, self.batch = base, layer, target, batch

    @property
    def weight(self) -> Any:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.batch.add(x, [self.base(x)], [self])[0]


def apply_linears(x: Tensor, *linears: AdapterLinear) -> list[Tensor]:
    """A module's linear_fn: [linear(x) for each], which share the matmul with their A's."""
    return linears[0].batch.add(x, [linear.base(x) for linear in linears], linears)


def lora_reference(
    x: Tensor, y: Tensor, rows: Sequence[int], weights: Sequence[tuple[Tensor, Tensor, float]]
) -> Tensor:
    """y (N, F) plus scale * B (A x) of each row of x (N, C): rows[n] is the number of its (A, B,
    scale) in weights, -1 for none."""
    out = y.clone()
    for n, i in enumerate(rows):
        if i >= 0:
            a, b, scale = weights[i]
            out[n] += scale * (b @ (a @ x[n]))
    return out


# --------------------------------------------------------------------------------------------------
# Kernels
# --------------------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """A step's adapters for the kernels, at addresses that a CUDA graph can keep. A slot is an
    active adapter. The second of rows and scales are those of a merged adapter."""

    rows: Tensor  # (1 or 2, N) int32: each row's slot, -1: none
    blocks: Tensor  # (slots, W) int32
    ranks: Tensor  # (slots,) int32
    scales: Tensor  # (1 or 2, slots) fp32
    offsets: Tensor  # (slots, L, targets, 2) int32


DECODE_ROWS = 64  # up to which a program has one row (BGMV), above BLOCK_M (SGMV)


if triton is not None:

    @triton.jit
    def _weights(
        ptr, table_ptr, at, mask, part_stride, PARTS: tl.constexpr, CHUNK: tl.constexpr
    ):  # fmt: skip
        """Elements `at` of an adapter's vector, through its block table."""
        chunk = at // CHUNK
        block = tl.load(table_ptr + chunk // PARTS, mask, other=0).to(tl.int64)
        part = (chunk % PARTS).to(tl.int64)
        return tl.load(ptr + part * part_stride + block * CHUNK + at % CHUNK, mask, other=0.0)

    @triton.jit(do_not_specialize=["N"])
    def _shrink_kernel(
        x_ptr,  # (N, C)
        low_ptr,  # (targets, N, MAX_RANK) fp32
        pages_ptr,  # (PARTS, blocks, CHUNK)
        rows_ptr, tables_ptr, ranks_ptr,
        offsets_ptr,  # (slots, ..., 2), of the first target
        N, C, stride_x, stride_table, stride_offsets, part_stride,
        PARTS: tl.constexpr, CHUNK: tl.constexpr, MAX_RANK: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    ):  # fmt: skip
        """low = A x for rows of a tile; a loop over the tile's adapters. Grid (tiles of rows,
        targets, tiles of ranks)."""
        offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        target, first_r = tl.program_id(1), tl.program_id(2) * BLOCK_R
        offs_r, offs_k = first_r + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
        slots = tl.load(rows_ptr + offs_m, offs_m < N, other=-1)
        slot = tl.max(slots, 0)
        while slot >= 0:
            rank = tl.load(ranks_ptr + slot)
            start = tl.load(offsets_ptr + slot * stride_offsets + 2 * target)
            if (start >= 0) & (first_r < rank):
                acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                for k in range(0, C, BLOCK_K):
                    ok = offs_k + k < C
                    x_at = offs_m[:, None].to(tl.int64) * stride_x + offs_k[None, :] + k
                    x = tl.load(x_ptr + x_at, (offs_m < N)[:, None] & ok[None, :], other=0.0)
                    a = _weights(
                        pages_ptr, tables_ptr + slot * stride_table,
                        start + offs_r[None, :] * C + offs_k[:, None] + k,
                        (offs_r < rank)[None, :] & ok[:, None], part_stride, PARTS, CHUNK,
                    )  # fmt: skip
                    if BLOCK_M >= 16:
                        acc = tl.dot(x, a, acc, input_precision="ieee")
                    else:
                        acc += tl.sum(x[:, :, None].to(tl.float32) * a[None].to(tl.float32), 1)
                to = low_ptr + (target * N + offs_m)[:, None] * MAX_RANK + offs_r[None, :]
                tl.store(to, acc, (slots == slot)[:, None] & (offs_r < rank)[None, :])
            slots = tl.where(slots == slot, -1, slots)
            slot = tl.max(slots, 0)

    @triton.jit(do_not_specialize=["N"])
    def _expand_kernel(
        low_ptr,  # (N, MAX_RANK) fp32
        y_ptr,  # (N, F)
        pages_ptr, rows_ptr, tables_ptr, ranks_ptr, scales_ptr,
        offsets_ptr,  # (slots, ..., 2), of the target
        N, F, stride_y, stride_table, stride_offsets, part_stride,
        PARTS: tl.constexpr, CHUNK: tl.constexpr, MAX_RANK: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    ):  # fmt: skip
        """y += scale * B low, with the same tiles. Grid (tiles of rows, tiles of columns)."""
        offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_r = tl.arange(0, BLOCK_R)
        slots = tl.load(rows_ptr + offs_m, offs_m < N, other=-1)
        slot = tl.max(slots, 0)
        while slot >= 0:
            rank = tl.load(ranks_ptr + slot)
            start = tl.load(offsets_ptr + slot * stride_offsets + 1)
            if start >= 0:
                own = slots == slot
                acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for r in range(0, rank, BLOCK_R):
                    ok = offs_r + r < rank
                    low_at = offs_m[:, None] * MAX_RANK + offs_r[None, :] + r
                    low = tl.load(low_ptr + low_at, own[:, None] & ok[None, :], other=0.0)
                    b = _weights(
                        pages_ptr, tables_ptr + slot * stride_table,
                        start + (offs_r[:, None] + r) * F + offs_n[None, :],
                        ok[:, None] & (offs_n < F)[None, :], part_stride, PARTS, CHUNK,
                    )  # fmt: skip
                    if BLOCK_M >= 16:
                        acc = tl.dot(low.to(b.dtype), b, acc, input_precision="ieee")
                    else:
                        acc += tl.sum(low[:, :, None] * b[None].to(tl.float32), 1)
                to = y_ptr + offs_m[:, None].to(tl.int64) * stride_y + offs_n[None, :]
                mask = own[:, None] & (offs_n < F)[None, :]
                y = tl.load(to, mask, other=0.0)
                acc = y.to(tl.float32) + tl.load(scales_ptr + slot) * acc
                tl.store(to, acc.to(y.dtype), mask)
            slots = tl.where(slots == slot, -1, slots)
            slot = tl.max(slots, 0)


def triton_kernels(batch: Batch, x: Tensor, ys: list[Tensor], first: AdapterLinear) -> None:
    """Batch.add by the kernels above: x (N, C), ys (N, F) each, in place."""
    pages, t = batch.pages[first.layer], batch.tables
    C, (parts, _, chunk) = x.shape[1], pages.shape
    N = min(len(x), t.rows.shape[1])  # without the padding of static shapes
    m, r = (1, 16) if N <= DECODE_ROWS else (32, 32)
    low = torch.empty(len(ys), N, MAX_RANK, dtype=torch.float32, device=x.device)
    offsets = t.offsets[:, first.layer, first.target :]
    strides = t.blocks.stride(0), t.offsets.stride(0), pages.stride(0)
    tiles = dict(PARTS=parts, CHUNK=chunk, MAX_RANK=MAX_RANK, BLOCK_M=m, BLOCK_R=r)
    for rows, scales in zip(t.rows, t.scales):
        tables = rows, t.blocks, t.ranks
        grid = (triton.cdiv(N, m), len(ys), MAX_RANK // r)
        _shrink_kernel[grid](
            x, low, pages, *tables, offsets, N, C, x.stride(0), *strides, **tiles, BLOCK_K=64
        )
        for i, y in enumerate(ys):
            grid = (triton.cdiv(N, m), triton.cdiv(y.shape[1], 128))
            _expand_kernel[grid](
                low[i], y, pages, *tables, scales, offsets[:, i:], N, y.shape[1], y.stride(0),
                *strides, **tiles, BLOCK_N=128,
            )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# The pool
# --------------------------------------------------------------------------------------------------


class AdapterPool:
    """The adapters of an Engine. A name may be added, removed and added again at any time between
    steps; requests keep the adapter that they were added with."""

    def __init__(
        self, model: nn.Module, kernels: Kernels | None = None,
        merging: Callable[[Mapping[str, nn.Module]], Any] | None = None,
    ):  # fmt: skip
        """Wraps the TARGETS of model.layers in AdapterLinears, in place. kernels: by default
        Triton's on a GPU, elsewhere plain torch. merging(the wrapped linears by name) -> an object
        with update(rows of each adapter in the next step) -> the adapter that is in the weights."""
        self.model, self.batch, self.adapters = model, Batch(), {}  # by name
        on_gpu = triton is not None and next(model.parameters()).is_cuda
        default = triton_kernels if on_gpu else Batch.add_segments
        self.batch.kernels = default if kernels is None else kernels
        self.index: dict[str, tuple[int, int]] = {}  # module name -> layer, target
        for name, parent in list(model.named_modules()):
            match = re.fullmatch(r"layers\.(\d+)(\..+)?", name)
            if match is not None:
                self._wrap(name, parent, int(match[1]))
        _check(self.index, f"the model has no linear layer named {', '.join(TARGETS)}")
        model.layer_groups = None  # they have the layers' own linears
        self.n_targets = 1 + max(target for _, target in self.index.values())
        bases = {name: model.get_submodule(name).base for name in self.index}
        self.shapes = {name: (m.in_features, m.out_features) for name, m in bases.items()}
        self.roots = count(-1, -1)
        self.merging = None if merging is None else merging(bases)

    def _wrap(self, name: str, parent: nn.Module, layer: int) -> None:
        """Wrap the targets among a module's children."""
        names = [x for x in TARGETS if isinstance(getattr(parent, x, None), nn.Module)]
        first = sum(at == layer for at, _ in self.index.values())
        for target, x in enumerate(names, first):
            setattr(parent, x, AdapterLinear(getattr(parent, x), layer, target, self.batch))
            self.index[f"{name}.{x}"] = layer, target
        if names and hasattr(parent, "linear_fn"):
            parent.linear_fn = apply_linears

    def bind(self, cache: Any, allocator: Any, max_rows: int, max_slots: int) -> None:
        """Called by the Engine. cache: of its `pages`, one tensor per layer (2 or 1, Hkv, blocks +
        1, block_size, D), all but the last block are the allocator's."""
        weight = next(self.model.parameters())
        self.dtype, self.allocator, self.device = weight.dtype, allocator, weight.device
        pages = cache.pages[0]
        ok = pages.element_size() <= weight.element_size() and pages.dtype not in _FP8
        _check(ok, f"adapters cannot be in a KV cache of {pages.dtype}, in which bytes may be NaN")
        ok = pages.shape[-2] * pages.shape[-1] * pages.element_size() % 16 == 0
        _check(ok, "adapters require KV blocks of a multiple of 16 bytes per head")
        flat = [p.flatten(0, 1).flatten(2, 3).view(self.dtype) for p in cache.pages]
        self.batch.pages = flat
        self.parts, _, self.chunk = flat[0].shape
        if self.batch.kernels is triton_kernels:
            self._allocate_tables(max_rows, max_slots)

    def _allocate_tables(self, max_rows: int, max_slots: int) -> None:
        size = max_slots, len(self.allocator.refs)
        zeros = lambda *shape: torch.zeros(*shape, dtype=torch.int32, device=self.device)
        self.batch.tables = Tables(
            zeros(n := 1 if self.merging is None else 2, max_rows) - 1, zeros(*size),
            zeros(max_slots), torch.zeros(n, max_slots, device=self.device),
            zeros(max_slots, len(self.batch.pages), self.n_targets, 2),
        )  # fmt: skip

    # ---- adding and removing ----

    def add(
        self, name: str, rank: int, scale: float, weights: Mapping[str, tuple[Tensor, Tensor]]
    ) -> Adapter:
        """Add an adapter: weights of each adapted module, A (rank, C) and B (F, rank). Only reads
        what does not change: another thread may call it. ValueError says what is wrong with it."""
        _check(NAME.fullmatch(name), f"adapter {name!r}: a name has letters, digits, '.', '_', '-'")
        _check(rank <= MAX_RANK, f"adapter {name}: rank {rank} is more than {MAX_RANK}")
        largest = torch.finfo(self.dtype).max
        _check(
            scale <= largest,
            f"adapter {name}: lora_alpha / r, {scale:g}, is not finite in {self.dtype}",
        )
        for module, (a, b) in weights.items():
            at = f"adapter {name}: {module}"
            _check(module in self.index, f"{at} is not one of {', '.join(TARGETS)} of a layer")
            finite = all(t.to(self.dtype).isfinite().all() for t in (a, b))
            _check(finite, f"{at} has weights that are not finite")
        adapter = self._pack(name, rank, scale, weights)
        n = len(self.allocator.refs)
        _check(
            adapter.num_blocks < n,
            f"adapter {name} takes {adapter.num_blocks} KV blocks, of {n}; use --kv-blocks",
        )
        return adapter

    def _pack(
        self, name: str, rank: int, scale: float, tensors: Mapping[str, tuple[Tensor, Tensor]]
    ) -> Adapter:
        """Lay out each layer's vector."""
        L = len(self.batch.pages)
        offsets = torch.full((L, self.n_targets, 2), -1, dtype=torch.int32)
        parts, sizes = [[] for _ in range(L)], [0] * L
        for i, group in self._groups():
            found = [module for module in group if module in tensors]
            for which in range(2):  # all A's of a group, then all B's
                for module in found:
                    tensor = tensors[module][which]
                    offsets[(*self.index[module], which)] = sizes[i]
                    sizes[i] += tensor.numel()
                    parts[i].append((tensor.t() if which else tensor).to(self.dtype).flatten())
        block = self.parts * self.chunk
        num_blocks = -(-max(sizes) // block)
        vectors = torch.zeros(L, num_blocks * block, dtype=self.dtype)
        vectors = vectors.pin_memory() if self.device.type == "cuda" else vectors
        for vector, part, size in zip(vectors, parts, sizes):
            vector[:size] = torch.cat(part) if part else 0
        weights = [*vectors.view(L, num_blocks, self.parts, self.chunk)]
        root, merge = next(self.roots), self.merging is not None
        matrices = tensors if merge else {}
        return Adapter(name, rank, scale, weights, offsets, self.allocator, root, matrices)

    def _groups(self) -> Iterable[tuple[int, list[str]]]:
        """(layer, modules with the same input), in the order of their targets."""
        parents = dict.fromkeys(name.rpartition(".")[0] for name in self.index)
        for parent in parents:
            for group in GROUPS:
                names = [f"{parent}.{x}" for x in group if f"{parent}.{x}" in self.index]
                if names:
                    yield self.index[names[0]][0], names

    def register(self, adapter: Adapter) -> None:
        """Serve an adapter under its name. ValueError if the name is in use."""
        _check(adapter.name not in self.adapters, f"adapter {adapter.name!r} is loaded already")
        self.adapters[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Remove an adapter; its requests finish. Its weights and KV are not found any more, under
        a root that no new request has, and are evicted."""
        self.get(name)
        del self.adapters[name]

    def get(self, name: str) -> Adapter:
        """ValueError if there is none of that name."""
        known = ", ".join(self.adapters) or "none"
        _check(name in self.adapters, f"adapter {name!r} is not loaded; loaded: {known}")
        return self.adapters[name]

    # ---- a step ----

    def load(self, loads: Iterable[tuple[Adapter, list[int]]]) -> None:
        """Copy weights to newly allocated blocks, the last of each adapter's."""
        for adapter, blocks in loads:
            at, n = torch.tensor(blocks, device=self.device), adapter.num_blocks - len(blocks)
            for pages, weights in zip(self.batch.pages, adapter.weights):
                new = weights[n:].to(self.device, non_blocking=True)
                pages.index_copy_(1, at, new.transpose(0, 1))

    def prepare(self, rows: Sequence[tuple[Adapter | None, int]]) -> None:
        """The adapter of each sequence of the next step and the number of its rows; () once the
        step has run: drafters run the same layers without adapters."""
        counts: Counter[Adapter | None] = Counter()
        for adapter, n in rows:
            counts[adapter] += n
        merged = self.merging.update(counts) if self.merging is not None and rows else None
        active = [adapter for adapter in counts if adapter not in (None, merged)]
        active += [] if merged is None else [merged]  # the last
        numbers = {adapter: i for i, adapter in enumerate(active)} | {None: -1}
        owners = torch.tensor([numbers[a] for a, n in rows for _ in range(n)], dtype=torch.int32)
        batch, batch.layer, batch.vectors = self.batch, -1, {}
        batch.cached = None
        if batch.tables is not None:
            self._write_tables(active, owners, merged)
            return
        sorted_owners, batch.order = owners.sort(stable=True)
        batch.in_order = torch.equal(sorted_owners, owners)
        ends = torch.searchsorted(sorted_owners, torch.arange(-1, len(active)), right=True).tolist()
        batch.segments = [
            Segment(adapter, *ends[i : i + 2], adapter.scale)
            for i, adapter in enumerate(active)
            if adapter is not merged
        ]
        if merged is not None and ends[-2]:  # the rows before its own
            batch.segments.append(Segment(merged, 0, ends[-2], -merged.scale))

    def _write_tables(
        self, active: Sequence[Adapter], owners: Tensor, merged: Adapter | None
    ) -> None:
        """`prepare` for the kernels."""
        t, n = self.batch.tables, len(active)
        t.rows.fill_(-1)
        last = owners == n - 1 if merged is not None else torch.zeros_like(owners, dtype=torch.bool)
        t.rows[0, : len(owners)].copy_(owners.masked_fill(last, -1))
        if merged is not None:
            t.rows[1, : len(owners)].copy_(torch.where(last, -1, n - 1))
            t.scales[1, n - 1] = -merged.scale
        for i, adapter in enumerate(active):
            t.blocks[i, : adapter.num_blocks].copy_(torch.tensor(adapter.blocks))
            t.offsets[i].copy_(adapter.offsets)
        t.ranks[:n].copy_(torch.tensor([a.rank for a in active], dtype=torch.int32))
        t.scales[0, :n].copy_(torch.tensor([a.scale for a in active]))


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


@torch.inference_mode()
def main() -> None:
    """Rows with 8 adapters of rank 16: the default path == the reference; its time beside that of
    the linear layer, whose adapters it adds."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    device = "cuda" if torch.cuda.is_available() else "cpu"
    C, rank = (4096, 16) if device == "cuda" else (512, 16)
    layer, linear = nn.Module(), nn.Linear(C, C, bias=False, device=device)
    layer.o_proj, model = linear, nn.Module()
    model.layers = nn.ModuleList([layer])
    pool = AdapterPool(model)
    pages, numbers = torch.zeros(2, 4, 513, 16, 64, device=device), count()
    one = SimpleNamespace(allocate=lambda: next(numbers), register=lambda *_: 0)
    one.refs, one.entries = [0] * 512, defaultdict(lambda: (0, 0, 0))  # blocks are never evicted
    pool.bind(SimpleNamespace(pages=[pages]), one, 512, 8)
    weights = [(torch.randn(rank, C), torch.randn(C, rank)) for _ in range(8)]
    adapters = [pool.add(f"a{i}", rank, 0.5, {"layers.0.o_proj": w}) for i, w in enumerate(weights)]
    pool.load([(adapter, adapter.allocate()) for adapter in adapters])
    print(f"{device}, {C} x {C}, fp32\n{'rows':>6}{'linear ms':>12}{'adapters ms':>14}")
    for N in (8, 64, 512):
        x, rows = torch.randn(N, C, device=device), sorted(n % 8 for n in range(N))
        pool.prepare([(adapters[i], 1) for i in rows])
        known = [(a.to(device), b.to(device), 0.5) for a, b in weights]
        want = lora_reference(x, linear(x), rows, known)
        assert torch.allclose(layer.o_proj(x), want, rtol=1e-3, atol=1e-2 * want.abs().max())
        ms = [1e3 * Timer("f(x)", globals=dict(f=f, x=x)).blocked_autorange().median
              for f in (linear, layer.o_proj)]  # fmt: skip
        print(f"{N:>6}{ms[0]:>12.3f}{ms[1] - ms[0]:>14.3f}")


if __name__ == "__main__":
    main()
