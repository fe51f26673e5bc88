"""Decode steps on a CPU: all layers of a dense model in one C call, all experts of a layer in one.

A layer of a 1B model reads 90 MB in 2 ms. As separate operators it is a dozen calls, each of which
starts a team of threads and waits for the slowest. Here one team runs all layers, with the residual
stream and attention in fp32.

    install_(model)             # sets model.layer_groups; the model is used as before
    use_fused_experts_(model)   # sets the experts hook of MoE layers

FusedLayers runs forward calls of few tokens whose keys and values are in a KVCache or PagedKVCache:
decode steps of one sequence or a batch, short prompts, drafts; and decode steps whose keys are in
an EvictingCache. Other calls run layer by layer. It supports bf16 models of Attention with RoPE and
MLP layers, with and without sliding windows, biases and qk_norm; linear layers in bf16, or
quantized to q8_0 or q4_0. `run_experts` runs the experts of an MoE layer, with few tokens for each,
in one C call.

When it loses: a step of many tokens with long contexts, where sdpa's blocks reuse what they read.

Hooks: Transformer.layer_groups, MoE.experts. Equivalence (test_all.py): equal to the layers in fp32
up to the rounding of each linear layer's input; the cache gets the same keys and values. Needs:
torch, a C compiler.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from generation import cpu
from generation.kv_eviction import EvictingCache
from model import (
    MLP,
    Attend,
    Attention,
    AttentionSpec,
    Block,
    Experts,
    KVCache,
    MoE,
    Transformer,
    apply_linears,
)
from paged_kv import PagedKVCache, Step
from quantize import BlockScheme, QuantizedLinear, QuantizedStack
from generation import adapters


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Layer(ctypes.Structure):
    """cpu.c's Layer."""

    _fields_ = [
        *_fields(ctypes.c_void_p, "attention_norm mlp_norm q_norm k_norm"),
        *_fields(cpu.Matrix, "q k v o gate up down"),
        *_fields(ctypes.c_void_p, "k_cache v_cache"),
        *_fields(ctypes.c_int64, "block_size block_stride head_stride slot_stride ring window"),
        *_fields(ctypes.c_void_p, "tables slots"),
        *_fields(ctypes.c_int64, "width"),
        *_fields(ctypes.c_void_p, "weights"),
    ]


class Model(ctypes.Structure):
    """cpu.c's Model."""

    _fields_ = [
        *_fields(ctypes.POINTER(Layer), "layers"),
        *_fields(ctypes.c_int64, "L C F Hq Hkv D rope_dim interleaved"),
        *_fields(ctypes.c_float, "eps scale"),
    ]


class Segment(ctypes.Structure):
    """cpu_adapters.c's Segment."""

    _fields_ = [
        *_fields(ctypes.c_int64, "first end rank low"),
        *_fields(ctypes.c_void_p, "blocks offsets"), ("scale", ctypes.c_float),
    ]  # fmt: skip


class Adapters(ctypes.Structure):
    """cpu_adapters.c's Adapters. `tensors` are those that it points to."""

    _fields_ = [("segments", ctypes.POINTER(Segment)), *_fields(ctypes.c_int64, "n targets size")]

    @classmethod
    def of(cls, batch: adapters.Batch, first_layer: int) -> Adapters:
        """The segments of a step, at least one, for layers from first_layer on."""
        segments, tensors, size = batch.segments, [], 0
        structs = (Segment * len(segments))()
        for i, (adapter, first, end, scale) in enumerate(segments):
            blocks = torch.tensor(adapter.blocks, dtype=torch.int32)
            offsets = adapter.offsets[first_layer:]
            pointers = blocks.data_ptr(), offsets.data_ptr()
            structs[i] = Segment(first, end, adapter.rank, size, *pointers, scale)
            tensors.append((blocks, offsets))
            size += (end - first) * adapter.rank
        targets = segments[0].adapter.offsets.shape[1]
        made = cls(structs, len(segments), targets, size)
        made.tensors = tensors
        return made


NO_ADAPTERS = Adapters(None, 0, 0, 0)


class Group(ctypes.Structure):
    """cpu_adapters.c's Group."""

    _fields_ = [("pages", ctypes.c_void_p)]
    _fields_ += _fields(ctypes.c_int64, "parts part_stride chunk layer target count")


def add_adapters(
    batch: adapters.Batch, x: Tensor, ys: list[Tensor], first: adapters.AdapterLinear
) -> None:
    """AdapterPool's `kernels` in C: x (N, C), ys (N, F) each, in place; torch's matmuls if they are
    not bf16."""
    tensors = [x, *ys, batch.pages[first.layer]]
    if any(t.dtype != torch.bfloat16 or not t.is_contiguous() for t in tensors):
        return batch.add_segments(x, ys, first)
    if not batch.segments:
        return None
    pages, x = tensors[-1], x if batch.in_order else x[batch.order]
    segments = batch.cached or Adapters.of(batch, 0)
    batch.cached = segments
    parts, _, chunk = pages.shape
    group = Group(
        pages.data_ptr(), parts, pages.stride(0), chunk, first.layer, first.target, len(ys)
    )
    y = (ctypes.c_void_p * len(ys))(*(t.data_ptr() for t in ys))
    sizes = (ctypes.c_int64 * len(ys))(*(t.shape[1] for t in ys))
    structs = map(ctypes.byref, (segments, group))
    pointers = x.data_ptr(), y, sizes, batch.order.data_ptr()
    return cpu.load_kernels().add_adapters(*structs, *pointers, *x.shape)


class Located(NamedTuple):
    """The keys and values of a call: the position of each token's last key, the new tensors that
    the structs point to, and what to call after the step."""

    last: Tensor
    tensors: list[Tensor]
    observe: Callable[[], None] = lambda: None


class FusedLayers:
    """Consecutive layers of a model, called like one of them. Each must be `supported`. The values
    of their parameters may change in place; no parameter, module or hook may be replaced or added.
    """

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers, self.tensors, self.lock = layers, [], threading.Lock()
        self.batch = getattr(layers[0].attention.q_proj, "batch", None)  # of adapters
        self.structs = (Layer * len(layers))(*map(self._layer, layers))
        first, a = self.structs[0], layers[0].attention
        heads = first.q.N // a.head_dim, first.k.N // a.head_dim
        self.model = Model(
            self.structs, len(layers), first.gate.C, first.gate.N, *heads, a.head_dim, 0,
            a.interleaved, layers[0].mlp_norm.eps, a.spec.scale,
        )  # fmt: skip

    def __reduce__(self) -> tuple[type[FusedLayers], tuple[Sequence[nn.Module]]]:
        return FusedLayers, (self.layers,)  # a copy of the model has its own addresses

    def __call__(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        attend: Attend,
        *source: Any,
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C), as a layer's forward."""
        eager = not torch.compiler.is_compiling() and not torch.is_grad_enabled()
        fits = eager and x.dtype == torch.bfloat16 and x.is_cpu
        if fits and 0 < x.shape[0] * x.shape[1] <= cpu.max_matmul_rows():  # not traceable
            with self.lock:  # the structs have the addresses of one call's keys and values
                located = self._locate_kv(x, positions, attend)  # referenced until `decode` ends
                if located is not None:
                    y = self._decode(x, rope, located.last)
                    located.observe()
                    return y
        for layer in self.layers:
            x = layer(x, rope, positions, attend, *source)
        return x

    def _order(self) -> Tensor | None:
        """The order of tokens in which those with one adapter are consecutive, if any has one."""
        return self.batch.order if self.batch is not None and self.batch.segments else None

    def _decode(self, x: Tensor, rope: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
        (B, T, C), order, segments = x.shape, self._order(), NO_ADAPTERS
        hidden, positions = x.float().contiguous(), positions.long().expand(B, T).contiguous()
        cos, sin = (t.expand(B, T, 1, -1).contiguous() for t in rope)
        tensors = [hidden, cos, sin, positions]
        if order is not None:
            segments = Adapters.of(self.batch, self.layers[0].attention.spec.index)
            tensors = [t.view(B * T, -1)[order] for t in tensors]
        self.model.rope_dim = 2 * cos.shape[-1]
        pointers = [*(t.data_ptr() for t in tensors), ctypes.byref(segments)]
        cpu.load_kernels().decode(ctypes.byref(self.model), *pointers, B * T)
        if order is not None:
            hidden.view(B * T, C)[order] = tensors[0]
        return hidden.type_as(x)

    def _layer(self, layer: nn.Module) -> Layer:
        """The struct of a layer, without its keys and values."""
        a = layer.attention
        norms = (layer.attention_norm, layer.mlp_norm, a.q_norm, a.k_norm)
        pointers = [self._pointer(None if norm is None else norm.weight) for norm in norms]
        matrices = map(self._matrix, _linears(layer))
        return Layer(*pointers, *matrices, window=a.spec.window or 0)

    def _matrix(self, linear: nn.Module) -> cpu.Matrix:
        quantized = isinstance(linear, QuantizedLinear)
        weight, scales = (linear.qweight, linear.scales) if quantized else (linear.weight, None)
        matrix = cpu.matrix(weight, scales, linear.bias)
        self.tensors += matrix.tensors
        return matrix

    def _pointer(self, tensor: Tensor | None) -> int | None:
        self.tensors.append(tensor)
        return None if tensor is None else tensor.data_ptr()

    def _locate_kv(self, x: Tensor, positions: Tensor, attend: Attend) -> Located | None:
        """Set the structs' addresses of keys and values; None if `attend` is not the method of a
        cache that `decode` can use."""
        method, kwargs = attend, {}
        if isinstance(attend, partial) and not attend.args:
            method, kwargs = attend.func, attend.keywords
        cache = method.__self__ if isinstance(method, MethodType) else None
        if method == getattr(cache, "attend", None):
            if type(cache) is KVCache:
                return self._locate_in_rows(x, positions, cache)
            if type(cache) is PagedKVCache:
                return self._locate_in_blocks(x, positions, cache, kwargs["step"])
            if type(cache) is EvictingCache:
                return self._locate_in_slots(x, positions, cache)
        return None

    def _locate_in_rows(self, x: Tensor, positions: Tensor, cache: KVCache) -> Located | None:
        """_locate_kv for a KVCache, whose rows `decode` reads as one block each."""
        B, T, _ = x.shape
        first, last = (int(p) for p in positions.aminmax())
        k = [cache.k[layer.attention.spec.index] for layer in self.layers]
        rings = [t.shape[2] if t.shape[2] < cache.max_len else 0 for t in k]
        fits = k[0].dtype == x.dtype and len(k[0]) == B and 0 <= first and last < cache.max_len
        fits = fits and self._order() is None
        if not fits or T > 1 and any(rings):
            return None
        tables = torch.arange(B, dtype=torch.int32).repeat_interleave(T)
        for struct, layer, keys, ring in zip(self.structs, self.layers, k, rings):
            values = cache.v[layer.attention.spec.index]
            struct.k_cache, struct.v_cache = keys.data_ptr(), values.data_ptr()
            struct.block_stride, struct.head_stride, struct.slot_stride, _ = keys.stride()
            struct.block_size, struct.ring = keys.shape[2], ring
            struct.tables, struct.width, struct.slots = tables.data_ptr(), 1, None
            struct.weights = None
        cache.end.fill_(last + 1)
        return Located(positions, [tables])

    def _locate_in_slots(
        self, x: Tensor, positions: Tensor, cache: EvictingCache
    ) -> Located | None:
        """_locate_kv for an EvictingCache, whose rows `decode` reads as one block each."""
        (B, T, _), (L, rows, H, C, _), start = x.shape, cache.k.shape, int(positions[0])
        fits = T == 1 and B == rows and cache.k.dtype == x.dtype and self._order() is None
        fits = fits and cache.v is not None and len({*cache.num_kept}) == 1
        if not fits or cache.num_seen != [start] * len(self.layers):
            return None
        slots, n = cache.place(0, L, start)
        slots += C * torch.arange(B)[:, None]
        tables, last = torch.arange(B, dtype=torch.int32), torch.full((1,), n - 1)
        weights = None if cache.policy.gain is None else torch.empty(L, B, H, 1, n)
        for i, struct in enumerate(self.structs):
            struct.k_cache, struct.v_cache = cache.k[i].data_ptr(), cache.v[i].data_ptr()
            struct.block_stride, struct.head_stride, struct.slot_stride, _ = cache.k[i].stride()
            struct.block_size, struct.ring = C, 0
            struct.tables, struct.width, struct.slots = tables.data_ptr(), 1, slots[i].data_ptr()
            struct.weights = None if weights is None else weights[i].data_ptr()
        if weights is None:
            return Located(last, [tables, slots])
        return Located(last, [tables, slots], partial(cache.observe, 0, L, weights, self.model.Hq))

    def _locate_in_blocks(
        self, x: Tensor, positions: Tensor, cache: PagedKVCache, step: Step
    ) -> Located | None:
        """_locate_kv for a PagedKVCache."""
        counts = step.cu_seqlens.diff()  # new tokens of each sequence
        padded = int(step.cu_seqlens[-1]) != x.shape[0] * x.shape[1]
        if padded or cache.scales or cache.pages[0].dtype != x.dtype:
            return None
        kinds = [(step.slots, step.block_table), (step.ring_slots, step.ring_table)]
        kinds = [
            None if table is None else (slots, table.repeat_interleave(counts, 0).contiguous())
            for slots, table in kinds
        ]
        if (order := self._order()) is not None:
            kinds = [None if kind is None else (kind[0][order], kind[1][order]) for kind in kinds]
        H = self.model.Hkv
        kinds = [k and (k[0].repeat_interleave(H), k[1]) for k in kinds]  # a slot for each head
        for struct, layer in zip(self.structs, self.layers):
            index = layer.attention.spec.index
            (keys, values), (slots, table) = cache.pages[index], kinds[index in cache.windowed]
            struct.k_cache, struct.v_cache = keys.data_ptr(), values.data_ptr()
            struct.head_stride, struct.block_stride, struct.slot_stride, _ = keys.stride()
            struct.block_size, struct.ring = cache.block_size, 0
            struct.tables, struct.slots = table.data_ptr(), slots.data_ptr()
            struct.width, struct.weights = table.shape[1], None
        return Located(positions, [t for kind in kinds if kind for t in kind])


def run_experts(
    x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Any, w_down: Any, *, fallback: Experts
) -> Tensor:
    """MoE's experts hook: x (N, C), weights and ids (N, K), w_gate_up (E, 2F, C) gate rows first,
    w_down (E, C, F) -> (N, C). One C call for all experts if x is bf16 on a CPU, the experts have
    few rows each and their stacks are bf16, q8_0 or q4_0; else `fallback`, with the same arguments.
    """
    (N, C), K, E = x.shape, ids.shape[1], w_down.shape[0]
    eager = not torch.compiler.is_compiling() and not torch.is_grad_enabled()
    fits = eager and x.dtype == torch.bfloat16 and x.is_cpu
    fits = fits and w_gate_up.shape[2] == w_down.shape[1] == C
    fits = fits and 0 < N * K <= E * cpu.max_matmul_rows()
    stacks = [_stack(stack) for stack in (w_gate_up, w_down)] if fits else [None]
    if None in stacks:
        return fallback(x, weights, ids, w_gate_up, w_down)
    slots, order = ids.flatten().sort(stable=True)
    starts = torch.searchsorted(slots, torch.arange(E + 1))  # ids of -1 come before starts[0]
    tokens, weights = order // K, weights.flatten()[order].float()
    rows, y = x.float().contiguous(), torch.zeros(N, C)
    pointers = (t.data_ptr() for t in (starts, tokens, weights, rows, y))
    cpu.load_kernels().experts(*map(ctypes.byref, stacks), *pointers, E)
    return y.type_as(x)


def use_fused_experts_(model: nn.Module) -> None:
    """Let run_experts run the experts of MoE layers, with the present hook as its fallback."""
    for module in model.modules():
        if isinstance(module, MoE) and cpu.load_kernels() is not None:
            module.experts = partial(run_experts, fallback=module.experts)


def _stack(stack: Any) -> cpu.Matrix | None:
    """(E, N, C) as a matrix (E * N, C); None if `experts` does not support it."""
    if isinstance(stack, QuantizedStack) and isinstance(stack.scheme, BlockScheme):
        return cpu.matrix(stack.qweight.flatten(0, 1), stack.scales.flatten(0, 1))
    if not isinstance(stack, Tensor) or stack.dtype != torch.bfloat16 or not stack.is_cpu:
        return None
    return cpu.matrix(stack.flatten(0, 1)) if stack.is_contiguous() else None


def supported(layer: nn.Module, first: nn.Module) -> bool:
    """Whether FusedLayers can run a layer of a model, whose first layer is given: `decode` reads
    sizes and constants from that one."""
    if type(layer) is not Block or layer.cross_attention is not None:
        return False
    a, mlp = layer.attention, layer.mlp
    if type(a) is not Attention or type(mlp) is not MLP:
        return False
    plain = a.linear_fn is mlp.linear_fn and a.temperature is a.q_conv is None
    plain = plain and a.linear_fn in (apply_linears, adapters.apply_linears)
    plain = plain and a.spec == AttentionSpec(a.spec.index, a.spec.scale, a.spec.window)
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())
    bf16 = all(t.is_cpu and t.dtype == torch.bfloat16 for t in layer.parameters())
    fits = plain and not a.alibi_heads and not hooked and bf16
    linears = all(map(_is_supported_linear, _linears(layer)))
    return fits and linears and _constants(layer) == _constants(first)


def _linears(layer: nn.Module) -> list[nn.Module]:
    """In the order of the fields of Layer."""
    a, mlp = layer.attention, layer.mlp
    projections = (a.q_proj, a.k_proj, a.v_proj, a.o_proj)
    linears = [*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return [getattr(linear, "base", linear) for linear in linears]  # of an AdapterLinear


def _constants(layer: nn.Module) -> list[Any]:
    """What all layers of a Model have in common."""
    a = layer.attention
    norms = [n for n in (layer.attention_norm, layer.mlp_norm, a.q_norm, a.k_norm) if n is not None]
    linears = _linears(layer)
    shapes = [x.shape if isinstance(x, QuantizedLinear) else x.weight.shape for x in linears]
    return [a.spec.scale, a.head_dim, a.interleaved, {norm.eps for norm in norms}, shapes]


def _is_supported_linear(linear: nn.Module) -> bool:
    if isinstance(linear, QuantizedLinear):
        return isinstance(linear.scheme, BlockScheme) and linear.kept_index is None
    return type(linear) is cpu.CPULinear and linear.weight.is_contiguous()


def install_(model: Transformer) -> Transformer:
    """Let FusedLayers run a model's layers, if it supports them. Call it after all other changes of
    the model. Returns the model."""
    layers = list(model.layers)
    plain = model.layer_groups is None and cpu.load_kernels() is not None and layers
    if plain and all(supported(layer, layers[0]) for layer in layers):
        model.layer_groups = [FusedLayers(layers)]
    return model
