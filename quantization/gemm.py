"""Triton GEMMs that libraries lack: weight-only int8 / int4, and matmul with a fused epilogue.

1. `weight_only_matmul`: int8 or int4 weights times 16-bit activations. Decoding one token is bound
   by reading the weights, so they are dequantized in registers, not to memory first: one row of x
   runs a GEMV reduction, up to 64 rows the tensor cores (as in Marlin, arXiv:2408.11743, and
   GemLite). K is split over enough programs to fill the GPU (split-K) and the parts are summed in a
   fixed order, without atomics: deterministic.
2. `gemm`: matmul with an arbitrary epilogue. Each operation after a matmul (scales, bias,
   activation, residual, cast) costs a round trip to memory unless it is fused before the store.
   Libraries fuse the common chains; here the chain is an expression, a tree of small jit functions
   inlined into the kernel (Epilogue Visitor Tree, Chen et al., ASPLOS 2024):

       gemm(a, b, silu(acc * row(sa) * col(sb) + col(bias)) + matrix(residual))

   Operands are fp16, bf16, fp32, int8 or e4m3. FP8 partial sums are promoted to fp32 every 128
   columns, where they may also take a blockwise scale (DeepSeek-V3, arXiv:2412.19437, 3.3.2).

When it loses: beyond about 64 rows, compute is the bound and a weight dequantized in advance is
faster than `weight_only_matmul`. A large matmul without an epilogue is faster in cuBLAS or
torch._scaled_mm than `gemm`, which has no TMA and no warp specialization. On an H100, of the
bandwidth of a copy, the GEMV reaches 85% in int8 and 65% in int4 at 28672 x 4096, 62% and 43% at
4096 x 4096, where the whole kernel takes 8 to 9 us (BENCHMARKS.md).

Hook: the matmul of quantize.py's layers: use_linear_fn_(model, weight_only_matmul), and for FP8 in
blocks block_scaled_matmul. Equivalence (test_all.py): both against fp64 of the dequantized
operands, in Triton's interpreter if there is no GPU, and compiled for sm_80, 90 and 100. Without
triton or on a CPU the plain-torch references run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, Windows: every call runs the plain-torch reference
    triton = None

INTERPRET = triton is not None and triton.knobs.runtime.interpret
# For fp32 inputs only: three tf32 matmuls on the tensor cores reach fp32 accuracy
PRECISION = tl.constexpr("ieee" if INTERPRET else "tf32x3") if triton else None
jit = triton.jit if triton else (lambda fn=None, **_: fn or (lambda fn: fn))


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# int8 and int4 weights, 16- or 32-bit activations
# --------------------------------------------------------------------------------------------------

# With few rows the time is that of reading the weights. At full bandwidth each H200 SM receives 19
# int8 or 38 int4 weights per clock and can issue 128 operations, so the budget per weight is small.
# Quantized values stay integers, exact in any float format; x (q - zero) is summed in fp32 and each
# group's sum is multiplied by its scale.
#
# The GEMV: each thread loads a chunk, 16 bytes of a row, and x in the order of `permute_for_gemv`:
# loads of neighbouring threads coalesce. Values are masked in place in each half of a 32-bit word,
# not shifted: value i is scaled by 2^(BITS * i), and x is divided by that. Rows are unrolled so
# that every tile has the shape (BLOCK_C, 4) and the same layout: x is loaded once for all rows, by
# the threads that need it. Masks that are always true (EVEN) are removed by the compiler.


@jit
def _gemv_kernel(
    x_ptr,  # (values of a word, words)
    q_ptr, scales_ptr, zeros_ptr, bias_ptr,  # (N, words) int32, (N, G) both, (N,)
    y_ptr,  # (SPLITS, N)
    N, G, chunks, words, chunks_per_split,
    BITS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y[n] = sum_g scale[n, g] (sum_(k in g) x[k] q[n, k] - zero[n, g] sum_(k in g) x[k]).
    Grid (tiles of N, SPLITS). The sum of x is shared by all rows."""
    PER_HALF: tl.constexpr = 16 // BITS  # values in half a word
    PER_CHUNK: tl.constexpr = 128 // BITS
    first_row, first = tl.program_id(0) * BLOCK_N, tl.program_id(1) * chunks_per_split
    word = tl.arange(0, 4)[None, :]
    zero_tile = tl.full((BLOCK_C, 4), 0.0, tl.float32)
    accs = (zero_tile,) * BLOCK_N
    for start in range(first, tl.minimum(first + chunks_per_split, chunks), BLOCK_C):
        chunk = start + tl.arange(0, BLOCK_C)[:, None]
        at = chunk * 4 + word
        mask = (chunk < chunks) | EVEN
        qs, parts, sum_x = (), (zero_tile,) * BLOCK_N, zero_tile
        for r in tl.static_range(BLOCK_N):
            row = tl.minimum(first_row + r, N - 1).to(tl.int64)
            q = tl.load(q_ptr + row * words + at, mask=mask, other=0, eviction_policy="evict_first")
            if zeros_ptr is None:
                q = q ^ -0x7F7F7F80  # flips the sign bits: int8 becomes uint8 with zero point 128
            qs = qs + (q,)
        for half in tl.static_range(2):
            for i in tl.static_range(PER_HALF):
                x_ptrs = x_ptr + (half * PER_HALF + i) * words + at
                x = tl.load(x_ptrs, mask=mask, other=0.0)
                sum_x += x
                x = x * (1 / (1 << (BITS * i)))
                sums = ()
                for r in tl.static_range(BLOCK_N):
                    value = (qs[r] >> (16 * half)) & (((1 << BITS) - 1) << (BITS * i))
                    sums = sums + (parts[r] + x * value.to(tl.float32),)
                parts = sums
        sums = ()
        for r in tl.static_range(BLOCK_N):
            if zeros_ptr is None:
                part = parts[r] - 128.0 * sum_x
            else:
                row = tl.minimum(first_row + r, N - 1).to(tl.int64)
                group = row * G + chunk * PER_CHUNK // GROUP + word * 0
                zero = tl.load(zeros_ptr + group, mask=mask, other=0).to(tl.float32)
                scale = tl.load(scales_ptr + group, mask=mask, other=0.0).to(tl.float32)
                part = (parts[r] - zero * sum_x) * scale
            sums = sums + (accs[r] + part,)
        accs = sums
    for r in tl.static_range(BLOCK_N):
        row = tl.minimum(first_row + r, N - 1)  # past the end: the last row again
        y = tl.sum(tl.reshape(accs[r], (BLOCK_C * 4,)), 0)
        if zeros_ptr is None:
            y *= tl.load(scales_ptr + row).to(tl.float32)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + row).to(tl.float32) * (tl.program_id(1) == 0)
        tl.store(y_ptr + tl.program_id(1) * N + row, y.to(y_ptr.dtype.element_ty))


@jit
def _int4_to_float(q, dtype: tl.constexpr):
    """int4 values 0 .. 15 (uint8) as fp16, bf16 or fp32, plus a power of two so large that integers
    are the low mantissa bits: an `or`, which has a higher throughput than conversions."""
    if dtype == tl.float16:
        return (q.to(tl.int16) | 0x6400).to(dtype, bitcast=True)  # 1024
    elif dtype == tl.bfloat16:
        return (q.to(tl.int16) | 0x4300).to(dtype, bitcast=True)  # 128
    else:
        return (q.to(tl.int32) | 0x4B000000).to(dtype, bitcast=True)  # 2^23


@jit
def _skinny_gemm_kernel(
    x_ptr, q_ptr, scales_ptr, zeros_ptr, bias_ptr,  # (M, K), (N, K * BITS / 8), (N, G) both, (N,)
    y_ptr,  # (SPLITS, M, N)
    M, N, K, G, groups_per_split,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The same for M rows of x, on the tensor cores. Grid (tiles of N, SPLITS, tiles of M).

    A step computes GROUPS groups of GROUP columns as a batch of matmuls: full cache lines are read
    even for small groups, and each group has its own sum to scale. A flat GEMM (FlashDecoding++,
    arXiv:2311.01282, 4): M is padded to 16, the smallest tile of tl.dot, not to 64, and the next
    tiles are loaded during this one's matmul, into num_stages - 1 buffers (two in the paper).
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(n, N - 1)
    precision: tl.constexpr = PRECISION if x_ptr.dtype.element_ty == tl.float32 else None
    BLOCK_K: tl.constexpr = GROUP * GROUPS
    x_ptrs = x_ptr + (m % M).to(tl.int64)[:, None] * K
    q_ptrs = q_ptr + row.to(tl.int64)[:, None] * (K * BITS // 8)
    first = tl.program_id(1) * groups_per_split
    acc = tl.zeros((BLOCK_M, BLOCK_N) if GROUPS == 1 else (GROUPS, BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, tl.minimum(first + groups_per_split, tl.cdiv(K, GROUP)), GROUPS):
        k = start * GROUP + tl.arange(0, BLOCK_K)[None, :]
        j = start * GROUP * BITS // 8 + tl.arange(0, BLOCK_K * BITS // 8)[None, :]
        g = start + tl.arange(0, GROUPS)
        mask_g = (g < G) | EVEN
        x = tl.load(x_ptrs + k, mask=(k < K) | EVEN, other=0.0)
        q = tl.load(q_ptrs + j, mask=(j < K * BITS // 8) | EVEN, other=0)
        if zeros_ptr is None:
            w = q.to(tl.float16 if x.dtype == tl.float16 else tl.float32).to(x.dtype)
            acc = tl.dot(x, tl.trans(w), acc, input_precision=precision)
        else:
            zero_ptrs = zeros_ptr + row[:, None] * G + g[None, :]
            zero = _int4_to_float(tl.load(zero_ptrs, mask=mask_g[None, :], other=0), x.dtype)
            w = _int4_to_float(tl.interleave(q & 0xF, q >> 4), x.dtype)
            if GROUPS == 1:
                part = tl.dot(x, tl.trans(w - zero), input_precision=precision)
                scale = tl.load(scales_ptr + row * G + start)[None, :]
            else:
                x = tl.permute(tl.reshape(x, (BLOCK_M, GROUPS, GROUP)), (1, 0, 2))
                w = tl.reshape(w, (BLOCK_N, GROUPS, GROUP)) - zero[:, :, None]
                part = tl.dot(x, tl.permute(w, (1, 2, 0)), input_precision=precision)
                scale_ptrs = scales_ptr + (row * G)[None, None, :] + g[:, None, None]
                scale = tl.load(scale_ptrs, mask=mask_g[:, None, None], other=0.0)
            acc += part * scale.to(tl.float32)
    y = acc if GROUPS == 1 else tl.sum(acc, 0)
    if zeros_ptr is None:
        y *= tl.load(scales_ptr + row).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + row).to(tl.float32)[None, :] * (tl.program_id(1) == 0)
    y_ptrs = y_ptr + (tl.program_id(1) * M + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@jit
def _reduce_splits_kernel(parts_ptr, y_ptr, numel, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """y = the sum of SPLITS parts, in a fixed order. Grid (blocks of y,)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(SPLITS):
        y += tl.load(parts_ptr + i, mask=i < numel, other=0.0)
        parts_ptr += numel
    tl.store(y_ptr + i, y.to(y_ptr.dtype.element_ty), mask=i < numel)


# By bits, the fastest of 20 (GEMV) and 12 on an H100, at Llama-3.1-8B's shapes; those of int4 from
# 16 rows on and of 32 rows are not tuned. GEMV: BLOCK_N, BLOCK_C (chunks of 16 bytes per row),
# num_warps. Each thread has 4 loads in flight. Skinny GEMM, by largest number of rows: BLOCK_M,
# BLOCK_N, columns per step (at least one group), num_warps, num_stages. From 32 rows on, the sums
# of several int4 groups would not fit in registers.
GEMV_CONFIGS: dict[int, tuple[int, int, int]] = {8: (2, 128, 2), 4: (4, 64, 2)}
SKINNY_GEMM_CONFIGS: dict[int, dict[int, tuple[int, int, int, int, int]]] = {
    8: {16: (16, 64, 128, 4, 4), 32: (32, 64, 128, 4, 4), 64: (64, 128, 128, 8, 3)},
    4: {16: (16, 64, 128, 4, 4), 32: (32, 64, 32, 4, 4), 64: (64, 64, 32, 8, 4)},
}


@lru_cache
def _processors(index: int | None) -> int:
    return 132 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


def _n_splits(tiles: int, steps: int, processors: int) -> int:
    """Split-K factor: the largest power of two with at most two programs per SM and at least four
    steps per program, which fill its pipeline."""
    limit = min(2 * processors // tiles, steps // 4)
    return 1 << (max(1, limit).bit_length() - 1)


def permute_for_gemv(x: Tensor, bits: int) -> Tensor:
    """x (1, K) -> fp32 (values of a 32-bit word, words): [i, w] = x[0, w * values + i]. Outside the
    custom op, so that torch.compile fuses it with the operation that computes x."""
    by_word = x.view(-1, 32 // bits).t()
    return torch.empty(by_word.shape, device=x.device).copy_(by_word)


def _launch_gemv(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    n_splits: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Launch the GEMV of an x from permute_for_gemv. Choices depend on shapes alone, for CUDA
    graph capture."""
    (N, G), words, bits = scales.shape, x.shape[1], 32 // x.shape[0]
    processors = _processors(x.device.index)
    if qweight.data_ptr() % 16:
        qweight = qweight.clone()
    BLOCK_N, BLOCK_C, warps = GEMV_CONFIGS[bits]
    while BLOCK_N > 1 and -(-N // BLOCK_N) < 2 * processors:  # smaller tiles first
        BLOCK_N //= 2
    chunks = words // 4
    if chunks % BLOCK_C == BLOCK_C // 2 or chunks < BLOCK_C:
        BLOCK_C, warps = BLOCK_C // 2, warps // 2
    if chunks % BLOCK_C:  # masks use registers
        BLOCK_N = max(1, BLOCK_N // 2)
    tiles, steps = -(-N // BLOCK_N), -(-chunks // BLOCK_C)
    n_splits = n_splits or _n_splits(tiles, steps, processors)
    y = torch.empty((1, N), dtype=dtype, device=x.device)
    parts = y if n_splits == 1 else torch.empty((n_splits, 1, N), device=x.device)
    _gemv_kernel[tiles, n_splits](
        x, qweight.view(torch.int32), scales, zeros, bias, parts, N, G, chunks, words,
        -(-steps // n_splits) * BLOCK_C, BITS=bits, GROUP=words * 32 // bits // G,
        EVEN=chunks % BLOCK_C == 0, BLOCK_N=BLOCK_N, BLOCK_C=BLOCK_C, num_warps=warps,
    )  # fmt: skip
    return _reduce_splits(parts, y)


def _launch_skinny_gemm(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None,
    n_splits: int,
) -> Tensor:  # fmt: skip
    """The same for x (M, K)."""
    (M, K), (N, G), bits = x.shape, scales.shape, 8 if zeros is None else 4
    max_rows = min((n for n in (16, 32) if M <= n), default=64)
    BLOCK_M, BLOCK_N, columns, warps, stages = SKINNY_GEMM_CONFIGS[bits][max_rows]
    group = columns if bits == 8 else K // G
    if x.element_size() == 4:
        BLOCK_M, BLOCK_N, stages = 16, 32, 2
    columns = max(columns, group)
    m_tiles, tiles = -(-M // BLOCK_M), -(-N // BLOCK_N)
    steps, unit = -(-K // columns), columns // group  # groups per step
    n_splits = n_splits or _n_splits(tiles * m_tiles, steps, _processors(x.device.index))
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    parts = y if n_splits == 1 else torch.empty((n_splits, M, N), device=x.device)
    _skinny_gemm_kernel[tiles, n_splits, m_tiles](
        x, qweight, scales, zeros, bias, parts, M, N, K, G, -(-steps // n_splits) * unit,
        BITS=bits, GROUP=group, GROUPS=unit, EVEN=K % columns == 0, BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return _reduce_splits(parts, y)


def _reduce_splits(parts: Tensor, y: Tensor) -> Tensor:
    """y = the sum of parts (SPLITS, M, N), unless it is y that the kernel has written."""
    if parts is not y:
        grid = (-(-y.numel() // 1024),)
        _reduce_splits_kernel[grid](parts, y, y.numel(), SPLITS=len(parts), BLOCK=1024)
    return y


# Opaque ops for torch.compile, which would otherwise trace into the kernels' launches
_ARGUMENTS = "(Tensor x, Tensor qweight, Tensor scales, Tensor? zeros, Tensor? bias, int n_splits"
_op = partial(torch.library.custom_op, mutates_args=())


@_op("sheaf::weight_only_gemv", schema=f"{_ARGUMENTS}, ScalarType dtype) -> Tensor")
def _gemv_op(x, qweight, scales, zeros, bias, n_splits, dtype):
    with torch.cuda.device_of(x):
        return _launch_gemv(x, qweight, scales, zeros, bias, n_splits, dtype)


@_gemv_op.register_fake
def _(x, qweight, scales, zeros, bias, n_splits, dtype):
    return x.new_empty((1, qweight.shape[0]), dtype=dtype)


@_op("sheaf::weight_only_matmul", schema=f"{_ARGUMENTS}) -> Tensor")
def _weight_only_op(x, qweight, scales, zeros, bias, n_splits):
    if not _can_use_triton(x):
        return weight_only_reference(x, qweight, scales, zeros, bias)
    with torch.cuda.device_of(x):
        return _launch_skinny_gemm(x, qweight, scales, zeros, bias, n_splits)


@_weight_only_op.register_fake
def _(x, qweight, scales, zeros, bias, n_splits):
    return x.new_empty(x.shape[0], qweight.shape[0])


def _can_use_triton(x: Tensor) -> bool:
    """Whether the Triton kernels support x on this device."""
    return triton is not None and (x.is_cuda or INTERPRET) and x.dtype != torch.float64


def weight_only_matmul(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None = None,
    bias: Tensor | None = None, *, n_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """y = x w^T + bias with w = (q - zero) * scale dequantized in registers.

    x (..., K) fp16, bf16 or fp32. int8: qweight (N, K) int8, scales (N, 1), zeros None. int4:
    qweight (N, K / 2) uint8, byte j = column 2j + 16 * column 2j+1, scales (N, G) and zeros (N, G)
    uint8, group size K / G: 32, 64 or 128. bias (N,). -> y (..., N) in x's dtype, summed in fp32,
    deterministic. Fast for up to 64 rows of x, correct for any number. K is split over n_splits
    programs; None: enough to fill the GPU. ValueError names the invalid argument.
    """
    K, (N, G), shape = x.shape[-1], scales.shape, lambda t: None if t is None else tuple(t.shape)
    if zeros is None:
        ok = qweight.dtype == torch.int8 and shape(qweight) == (N, K) and G == 1
        wanted = f"qweight {(N, K)} int8 and scales ({N}, 1), or zeros"
    else:
        ok = qweight.dtype == torch.uint8 and zeros.dtype == torch.uint8
        ok = ok and shape(qweight) == (N, K // 2) and shape(zeros) == (N, G)
        ok = ok and K % G == 0 and K // G in (32, 64, 128)
        wanted = f"qweight {(N, K // 2)} uint8, zeros uint8 ({N}, G), groups of 32, 64 or 128"
    given = f"qweight {shape(qweight)} {qweight.dtype}, scales {(N, G)}, zeros {shape(zeros)}"
    _check(ok, f"x with {K} columns requires {wanted}, not {given}")
    _check(bias is None or shape(bias) == (N,), f"bias must be ({N},), not {shape(bias)}")
    _check(n_splits is None or n_splits > 0, f"n_splits must be positive, not {n_splits}")
    rows, tensors = x.reshape(-1, K).contiguous(), (qweight, scales, zeros, bias)
    if INTERPRET and x.dtype == torch.bfloat16:  # wrong results in the interpreter
        rows = rows.float()
    tensors = (t if t is None else t.contiguous() for t in tensors)
    if len(rows) == 0:
        return x.new_empty(*x.shape[:-1], N)
    bits = 8 if zeros is None else 4
    if len(rows) == 1 and K % (128 // bits) == 0 and _can_use_triton(x):
        y = _gemv_op(permute_for_gemv(rows, bits), *tensors, n_splits or 0, rows.dtype)
    else:
        y = _weight_only_op(rows, *tensors, n_splits or 0)
    return y.to(x.dtype).view(*x.shape[:-1], N)


def weight_only_reference(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """weight_only_matmul in plain torch: dequantize, then F.linear."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if zeros is None:
        w = qweight.to(dtype) * scales
    else:
        q = torch.stack((qweight & 0xF, qweight >> 4), dim=-1).view(*zeros.shape, -1).to(dtype)
        w = ((q - zeros[..., None].to(dtype)) * scales[..., None].to(dtype)).flatten(1)
    return F.linear(x.to(dtype), w, None if bias is None else bias.to(dtype)).to(x.dtype)


# --------------------------------------------------------------------------------------------------
# Matmul with a fused epilogue
# --------------------------------------------------------------------------------------------------

# The epilogue is an expression that builds a tree of Nodes and computes nothing; its leaves are the
# accumulator and loaded tensors. The kernel receives the nodes' functions in topological order and
# the argument indices of each. Both are compile-time constants, so the functions are inlined and
# the compiled code is the same as if the expression were written in the kernel.


@dataclass(frozen=True, eq=False)
class Node:
    """One operation of the epilogue: a jit function of tiles, its plain-torch reference, and its
    arguments (Nodes or numbers; for a leaf the tensor or number that it loads)."""

    fn: Any
    reference: Callable[..., Tensor] | None
    args: tuple[Any, ...]
    leaf: str | None = None

    __add__ = lambda self, other: add(self, other)
    __radd__ = lambda self, other: add(other, self)
    __mul__ = lambda self, other: multiply(self, other)
    __rmul__ = lambda self, other: multiply(other, self)


def epilogue_op(reference: Callable[..., Tensor]) -> Callable[[Any], Callable[..., Node]]:
    """Decorator: turns a triton.jit function of fp32 tiles ((BLOCK_M, BLOCK_N), or (BLOCK_M, 1) and
    (1, BLOCK_N) from row and col) into a function of Nodes. reference: the same function in plain
    torch, for gemm_reference and for devices without Triton."""
    return lambda fn: lambda *args: Node(fn, reference, args)


@epilogue_op(torch.add)
@jit
def add(x: tl.tensor, y: tl.tensor):
    """x + y"""
    return x + y


@epilogue_op(torch.mul)
@jit
def multiply(x: tl.tensor, y: tl.tensor):
    """x * y"""
    return x * y


@epilogue_op(F.relu)
@jit
def relu(x: tl.tensor):
    """max(x, 0)"""
    return tl.maximum(x, 0.0)


@epilogue_op(F.silu)
@jit
def silu(x: tl.tensor):
    """x * sigmoid(x)"""
    return x * tl.sigmoid(x)


@epilogue_op(F.gelu)
@jit
def gelu(x: tl.tensor):
    """x times the normal distribution function of x; not the tanh approximation."""
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@epilogue_op(lambda x: x.half().float())
@jit
def to_fp16(x: tl.tensor):
    """Round to fp16."""
    return x.to(tl.float16).to(tl.float32)


@epilogue_op(lambda x: x.bfloat16().float())
@jit
def to_bf16(x: tl.tensor):
    """Round to bf16."""
    return x.to(tl.bfloat16).to(tl.float32)


@jit
def _scalar(x, m, n, M, N):
    return x


@jit
def _row(ptr, m, n, M, N):
    return tl.load(ptr + m, mask=m < M, other=0.0).to(tl.float32)[:, None]


@jit
def _col(ptr, m, n, M, N):
    return tl.load(ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]


@jit
def _matrix(ptr, m, n, M, N):
    mask = (m < M)[:, None] & (n < N)[None, :]
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


acc = Node(None, None, ())  # the accumulator A B^T, in fp32


def scalar(value: float) -> Node:
    """A number passed at run time, without recompilation. Numbers in an expression are scalars."""
    return Node(_scalar, None, (float(value),), "scalar")


def row(x: Tensor) -> Node:
    """x (M,): one value per row of C."""
    return Node(_row, None, (x,), "row")


def col(x: Tensor) -> Node:
    """x (N,): one value per column of C."""
    return Node(_col, None, (x,), "col")


def matrix(x: Tensor) -> Node:
    """x (M, N): one value per element of C."""
    return Node(_matrix, None, (x,), "matrix")


def _topological_order(
    tree: Node, M: int, N: int
) -> tuple[list[Node], tuple[tuple[int, ...], ...], list]:
    """The nodes of the tree, each once and after its arguments; the argument indices of each node
    (0: the accumulator, i: the result of node i - 1, -1 - i for a leaf: input i); the inputs."""
    nodes, arg_ids, inputs, index_of = [], [], [], {id(acc): 0}
    sizes = {"row": (M,), "col": (N,), "matrix": (M, N)}

    def add_node(x: Any) -> int:
        if isinstance(x, (int, float)):
            x = scalar(x)
        fix = "wrap a tensor in row, col or matrix"
        _check(isinstance(x, Node), f"an epilogue takes nodes and numbers, not {type(x)}: {fix}")
        if id(x) in index_of:
            return index_of[id(x)]
        if x.leaf is None:
            ids = tuple(add_node(arg) for arg in x.args)
        else:
            (value,), ids = x.args, (-1 - len(inputs),)
            if x.leaf != "scalar":
                size, wanted = tuple(value.shape), sizes[x.leaf]
                ok = value.numel() == math.prod(wanted) and (x.leaf != "matrix" or size == wanted)
                _check(ok, f"{x.leaf}() must have shape {wanted}, not {size}")
                value = value.reshape(wanted).contiguous()
            inputs.append(value)
        nodes.append(x)
        arg_ids.append(ids)
        index_of[id(x)] = len(nodes)
        return len(nodes)

    add_node(tree)
    return nodes, tuple(arg_ids), inputs


@jit
def _epilogue(accumulator, m, n, M, N, FUNCTIONS, ARGS: tl.constexpr, inputs):
    """The value of the tree for one tile of C."""
    values = (accumulator,)
    for i in tl.static_range(len(FUNCTIONS)):
        if ARGS[i][0] < 0:
            args = (inputs[-1 - ARGS[i][0]], m, n, M, N)
        else:
            args = ()
            for j in tl.static_range(len(ARGS[i])):
                args = args + (values[ARGS[i][j]],)
        values = values + (FUNCTIONS[i](*args),)
    return values[len(FUNCTIONS)]


@jit
def _gemm_kernel(
    a_ptr, b_ptr, c_ptr,  # (M, K), (N, K), (M, N)
    a_scale_ptr, b_scale_ptr,  # fp32 (M, ceil(K / 128)), (ceil(N / SCALE_N), ceil(K / 128)); None
    FUNCTIONS, inputs, ARGS: tl.constexpr,  # of the epilogue
    M, N, K, stride_am, stride_bn, SCALE_N: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):  # fmt: skip
    """C = epilogue(A B^T). Grid (tiles of C,), ordered column by column within GROUP_M rows of
    tiles, so that concurrent programs share rows of A and B in L2."""
    pid, tiles_n = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    rows = tl.minimum(tl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    pid_m = first_m + pid % (GROUP_M * tiles_n) % rows
    pid_n = pid % (GROUP_M * tiles_n) // rows
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + (m % M).to(tl.int64)[:, None] * stride_am + k[None, :]
    b_ptrs = b_ptr + (n % N).to(tl.int64)[None, :] * stride_bn + k[:, None]
    INT32_SUM: tl.constexpr = a_ptr.dtype.element_ty == tl.int8 and a_scale_ptr is None
    # Hopper's tensor cores accumulate fp8 with 14 bits: partial sums are promoted to fp32 every 128
    # columns (DeepSeek-V3, arXiv:2412.19437, 3.3.2), where the blockwise scales are applied too
    PROMOTE: tl.constexpr = a_ptr.dtype.element_ty.primitive_bitwidth == 8 and not INT32_SUM
    precision: tl.constexpr = PRECISION if a_ptr.dtype.element_ty == tl.float32 else None
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INT32_SUM else tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=(k[None, :] < K - start) | EVEN, other=0.0)
        b = tl.load(b_ptrs, mask=(k[:, None] < K - start) | EVEN, other=0.0)
        if PROMOTE:
            part = tl.dot(a, b).to(tl.float32)
            if a_scale_ptr is not None:
                ok: tl.constexpr = BLOCK_K == 128 and 128 % BLOCK_N == 0
                tl.static_assert(ok, "a tile must lie in one scale block")
                blocks = tl.cdiv(K, 128)
                a_scale = tl.load(a_scale_ptr + (m % M) * blocks + start // 128)
                if SCALE_N == 1:
                    b_scale = tl.load(b_scale_ptr + (n % N) * blocks + start // 128)
                    part *= a_scale[:, None] * b_scale[None, :]
                else:
                    b_scale = tl.load(b_scale_ptr + pid_n * BLOCK_N // 128 * blocks + start // 128)
                    part *= (a_scale * b_scale)[:, None]
            accumulator += part
        else:
            accumulator = tl.dot(a, b, accumulator, precision, out_dtype=accumulator.dtype)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    c = _epilogue(accumulator.to(tl.float32), m, n, M, N, FUNCTIONS, ARGS, inputs)
    c_ptrs = c_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(c_ptrs, c.to(c_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


FP8 = torch.float8_e4m3fn, torch.float8_e5m2

# By element size of the operands: BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages; first for up to
# 64 rows, then for more. 8-bit tiles are smaller: they hold two sums and 128 columns per scale.
GEMM_CONFIGS: dict[int, tuple[tuple[int, int, int, int, int], ...]] = {
    1: ((64, 128, 128, 4, 4), (128, 128, 128, 8, 4)),
    2: ((64, 128, 64, 4, 4), (128, 128, 64, 8, 4)),
    4: ((64, 64, 32, 4, 2), (64, 64, 32, 4, 2)),
}


def gemm(
    a: Tensor, b: Tensor, tree: Node = acc, *, a_scale: Tensor | None = None,
    b_scale: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """C = tree(A B^T) in one kernel, without intermediate results in memory.

    a (M, K), b (N, K): both fp16, bf16, fp32, int8 (summed in int32) or FP8 (e4m3fn or e5m2, summed
    in fp32). a_scale (M, ceil(K / 128)) fp32, one per 1 x 128 elements of an 8-bit a; b_scale
    (ceil(N / 128), ceil(K / 128)), one per 128 x 128 of b, as DeepSeek-V3's weights, or (N,
    ceil(K / 128)), one per 1 x 128. tree: built from acc, row, col, matrix, scalar, numbers, + and
    *, relu, silu, gelu, to_fp16, to_bf16 and any @epilogue_op. -> (M, N) in dtype; None: a's dtype,
    or bf16 if a has 8 bits. ValueError names the invalid argument.
    """
    ok = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[1]
    _check(ok, f"a must be (M, K) and b (N, K), not {tuple(a.shape)} and {tuple(b.shape)}")
    ok = a.dtype == b.dtype or {a.dtype, b.dtype} == set(FP8)
    _check(ok, f"a is {a.dtype}, b is {b.dtype}: they must be the same, or both FP8")
    floats = torch.float16, torch.bfloat16, torch.float32
    ok = a.dtype in (*floats, torch.int8, *FP8)
    _check(ok, f"a must be fp16, bf16, fp32, int8, float8_e4m3fn or float8_e5m2, not {a.dtype}")
    (M, K), N = a.shape, len(b)
    _check((a_scale is None) == (b_scale is None), "a_scale requires b_scale, and b_scale a_scale")
    if a_scale is not None:
        _check(a.element_size() == 1, f"a_scale requires 8-bit operands, not {a.dtype}")
        blocks, rows_b = -(-K // 128), N if len(b_scale) == N else -(-N // 128)
        for name, x, rows in (("a_scale", a_scale, M), ("b_scale", b_scale, rows_b)):
            size = (rows, blocks)
            ok = x.shape == size and x.dtype == torch.float32
            _check(ok, f"{name} must be {size} fp32, not {tuple(x.shape)} {x.dtype}")
    dtype = dtype or (a.dtype if a.dtype in floats else torch.bfloat16)
    if not _can_use_triton(a):
        return gemm_reference(a, b, tree, a_scale=a_scale, b_scale=b_scale, dtype=dtype)
    nodes, arg_ids, inputs = _topological_order(tree, M, N)
    if INTERPRET and a.dtype == torch.bfloat16:  # wrong results in the interpreter
        a, b = a.float(), b.float()
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
    a_scale, b_scale = (x if x is None else x.contiguous() for x in (a_scale, b_scale))
    BLOCK_M, BLOCK_N, BLOCK_K, warps, stages = GEMM_CONFIGS[a.element_size()][M > 64]
    cast_after = INTERPRET and dtype == torch.bfloat16
    c = torch.empty((M, N), dtype=torch.float32 if cast_after else dtype, device=a.device)
    with torch.cuda.device_of(a):
        _gemm_kernel[(-(-M // BLOCK_M) * -(-N // BLOCK_N),)](
            a, b, c, a_scale, b_scale, tuple(n.fn for n in nodes), tuple(inputs), arg_ids, M, N, K,
            a.stride(0), b.stride(0), SCALE_N=128 if b_scale is None or len(b_scale) < N else 1,
            EVEN=K % BLOCK_K == 0, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=8,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return c.to(dtype)


def gemm_reference(
    a: Tensor, b: Tensor, tree: Node = acc, *, a_scale: Tensor | None = None,
    b_scale: Tensor | None = None, dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """gemm in plain torch: the matmul in fp64, then node by node in fp32."""
    (M, K), N, a, b = a.shape, len(b), a.float().double(), b.float().double()
    if a_scale is not None:
        a *= a_scale.repeat_interleave(128, 1)[:, :K]
        b_scale = b_scale if len(b_scale) == N else b_scale.repeat_interleave(128, 0)[:N]
        b *= b_scale.repeat_interleave(128, 1)[:, :K]
    nodes, arg_ids, inputs = _topological_order(tree, M, N)
    values = [(a @ b.T).float()]
    for x, ids in zip(nodes, arg_ids):
        if x.leaf is not None:
            value = torch.as_tensor(inputs[-1 - ids[0]], device=a.device).float()
            values.append(value[:, None] if x.leaf == "row" else value)
        else:
            values.append(x.reference(*(values[i] for i in ids)))
    return values[-1].to(dtype)


@torch.library.custom_op("sheaf::block_scaled_matmul", mutates_args=())
def _block_scaled_op(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    return gemm(a, b, a_scale=a_scale, b_scale=b_scale, dtype=dtype)


@_block_scaled_op.register_fake
def _(a, a_scale, b, b_scale, dtype):
    return a.new_empty(len(a), len(b), dtype=dtype)


def block_scaled_matmul(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype = torch.float32,
    use_fast_accum: bool = False, *, fallback: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """a b^T (M, N) of FP8 a (M, K) and b (N, K), each (values, scales), by one launch of `gemm` if
    both have a scale per 128 columns. fallback(a, b, dtype, use_fast_accum) multiplies others, such
    as quantize.fp8_matmul, which launches a matmul per 128 columns."""
    (qdata, a_scale), (_, b_scale) = a, b
    by_block = a_scale.shape[1] == b_scale.shape[1] == -(-qdata.shape[1] // 128) > 1
    has_fp8 = INTERPRET or qdata.is_cuda and torch.cuda.get_device_capability(qdata.device)[0] >= 9
    if by_block and has_fp8 and _can_use_triton(qdata):
        return _block_scaled_op(*a, *b, dtype)
    return fallback(a, b, dtype, use_fast_accum)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def random_qweights(N: int, K: int, device: str) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """qweight, scales and zeros of int8, and of int4 with groups of 32 columns."""
    randint = lambda *args: torch.randint(*args, dtype=torch.uint8, device=device)
    scales = torch.rand(N, K // 32, device=device).bfloat16()
    int8 = randint(256, (N, K)).view(torch.int8), scales[:, :1].float(), None
    return [int8, (randint(256, (N, K // 2)), scales, randint(16, (N, K // 32)))]


def main() -> None:
    """Each kernel against its plain-torch reference, then microseconds of a layer beside F.linear
    in bf16; on a CPU of the references."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    device, size = ("cuda", 4096) if torch.cuda.is_available() else ("cpu", 512)
    dtype = torch.float16 if device == "cuda" else torch.float32
    near = lambda a, b: (a.double() - b.double()).norm() <= 2e-3 * b.double().norm()
    for M in (1, 7):
        x, residual = (torch.randn(M, n, device=device).to(dtype) for n in (352, 50))
        for w in random_qweights(50, 352, device):
            assert near(weight_only_matmul(x, *w), weight_only_reference(x.float(), *w)), M
        b, tree = torch.randn(50, 352, device=device).to(dtype), silu(acc) + matrix(residual)
        assert near(gemm(x, b, tree), gemm_reference(x, b, tree)), M
    weights = [(torch.randn(size, size, device=device).bfloat16(),)]
    weights += random_qweights(size, size, device)
    print(f"us per layer, {size} x {size}\n{'rows':>5}{'F.linear':>10}{'int8':>10}{'int4':>10}")
    for rows in (1, 8, 64):
        x, line = torch.randn(rows, size, device=device).bfloat16(), f"{rows:>5}"
        for f, w in zip((F.linear, weight_only_matmul, weight_only_matmul), weights):
            timer = Timer("f(x, *w)", globals=dict(f=f, x=x, w=w))
            line += f"{1e6 * timer.blocked_autorange().median:>10.1f}"
        print(line)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
