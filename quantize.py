"""Quantized linear layers: int8, int4, FP8 and LLM.int8().

Decoding reads every weight once per token, so it is bound by the bytes of the weights. Prefill is
bound by matmuls, and hardware multiplies 8-bit numbers twice as fast as 16-bit ones. Both gain when
weights, or weights and activations, are integers or FP8 with shared scales:

    w' = (q - zero) * scale          a QuantSpec: the bits, and which weights share a scale

    scheme         weights                          activations
    int8           8 bits, a scale per row          16 bits    half the bytes, almost no loss
    int4           4 bits, a scale and a zero       16 bits    0.3 of the bytes; calibrate.gptq
                   per group of 32, 64 or 128                  halves the increase of the loss
    int3, int2     the same                         16 bits    for research: no fast kernel
    q8_0, q4_0     8 or 4 bits, an fp16 scale       8 bits, a scale per 32 columns: llama.cpp's
                   per 32 columns                  formats, and the fastest kernels on a CPU
    int8-dynamic   8 bits, a scale per row          8 bits, a scale per token (W8A8)
    llm.int8       the same                         the same, but outlier columns in 16 bits
                                                    (LLM.int8(), arXiv:2208.07339)
    fp8            e4m3, a scale per row            e4m3, a scale per token
    fp8-block      e4m3, blocks of 128 x 128        e4m3, tiles of 1 x 128 (DeepSeek-V3)

`quantize_(model, scheme)` replaces every nn.Linear and the stacked expert weights of MoE layers.
`quantize_module` does so for one module, while a checkpoint loads: the peak is one unquantized
module. The stored tensors do not depend on the device: a model packed on a CPU runs on a GPU.
training/low_precision.py trains in FP8, or for quantization, with the same values.

When it loses: weight-only schemes gain nothing when matmuls are compute-bound, with many rows of
x: the weight is dequantized first. int8-dynamic, llm.int8 and fp8 gain nothing without 8-bit matrix
units, as on most CPUs. llm.int8 is slow everywhere, and finds outliers over all rows of a call, so
a row's result depends on its batch. The matmuls here are plain torch; generation/cpu.py and
quantization/gemm.py have the kernels that run at memory speed, installed by `use_linear_fn_`.

Hooks: the Linear swap; the experts hook, which indexes the stack by expert; `linear_fn` of every
layer. Equivalence (test_all.py): dequantized weights equal the formula bit for bit; each matmul
matches fp64 of the dequantized weights; quantizing while loading == after. Needs: torch.
`python quantize.py` checks itself and prints bytes, error and time of each scheme.

Shapes: M rows of x, N output and K input features, G groups of a row.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --------------------------------------------------------------------------------------------------
# Integer quantization: scales, zero points, packing
# --------------------------------------------------------------------------------------------------


def dequantize(qdata: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """(qdata - zeros) * scales in fp32: qdata (..., N, K), scales and zeros (..., N, G)."""
    expand = partial(_expand_groups, K=qdata.shape[-1])
    shifted = qdata.float() if zeros is None else qdata.float() - expand(zeros)
    return shifted * expand(scales)


def _expand_groups(per_group: Tensor, K: int) -> Tensor:
    """(..., N, G) -> (..., N, K) fp32, or (..., N, 1) if G is 1."""
    G = per_group.shape[-1]
    return per_group.float() if G == 1 else per_group.float().repeat_interleave(K // G, -1)


@dataclass(frozen=True)
class QuantSpec:
    """Uniform integer quantization (Nagel et al., arXiv:2106.08295, 2.2):

        w' = (q - zero) * scale,    q = clamp(round(w / scale) + zero, low, high)

    Symmetric: no zero point, q from -(2^(bits-1) - 1); else affine, with a zero point in q's range,
    so that 0.0 is always exact. `group_size` columns share a scale: None means a whole row (one
    output channel), 0 the whole tensor. Weights and q are (N, K), scales and zeros (N, G), or
    (1, 1) for the whole tensor. Scales of groups are rounded to `scale_dtype`, in which they are
    stored. signed_scale: symmetric with all 2^bits values of q; the weight of largest magnitude
    becomes the lowest q, so its scale is negative if that weight is positive.
    """

    bits: int = 8
    group_size: int | None = None
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.bfloat16
    signed_scale: bool = False

    def __post_init__(self):
        if self.bits not in range(2, 9):
            raise ValueError(f"bits must be from 2 to 8, not {self.bits}")

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest q."""
        high = 2 ** (self.bits - 1) - 1
        low = -high - 1 if self.signed_scale else -high
        return (low, high) if self.symmetric else (0, 2**self.bits - 1)

    def check(self, w: Tensor) -> None:
        """ValueError unless w can be quantized with this spec."""
        K, size = w.shape[-1], self.group_size
        if size and K % size:
            fits = ", ".join(str(s) for s in (8, 16, 32, 64, 128) if K % s == 0) or "none"
            raise ValueError(
                f"group_size {size} does not divide its {K} columns; give one that does ({fits}), "
                "or skip this layer"
            )
        if w.is_meta or w.numel() == 0:
            return
        low, high = map(float, w.detach().aminmax())
        if not math.isfinite(low) or not math.isfinite(high):
            raise ValueError("holds NaN or infinity, which cannot be quantized")
        largest = torch.finfo(self.scale_dtype).max * self.limits[1]
        if size and max(-low, high) > largest:
            raise ValueError(f"holds values beyond {largest:.3g}, too large for the scales' dtype")

    def choose_qparams(self, w: Tensor) -> tuple[Tensor, Tensor | None]:
        """The smallest scales (N, G) fp32, and zeros (N, G) uint8, None if symmetric, whose range
        contains all weights and 0. A group of zeros has scale 1."""
        self.check(w)
        w = w.float().reshape(1, -1) if self.group_size == 0 else w.float()
        groups = w.unflatten(1, (-1, self.group_size or w.shape[1]))
        low, high = groups.amin(-1), groups.amax(-1)
        q_min, q_max = self.limits
        if self.signed_scale:
            scales = torch.where(-low > high, low, high) / q_min
        elif self.symmetric:
            scales = torch.maximum(-low, high) / q_max
        else:
            low, high = low.clamp(max=0), high.clamp(min=0)
            scales = high / (q_max - q_min) - low / (q_max - q_min)  # high - low may overflow
        if self.group_size:
            up = 1 + torch.finfo(self.scale_dtype).eps / 2  # rounded up: nothing is clipped
            scales = (scales * up).to(self.scale_dtype).float()
        scales = torch.where(scales != 0, scales, 1.0)
        zeros = None if self.symmetric else (-low / scales).round().clamp(q_min, q_max).byte()
        return scales, zeros

    def quantize(self, w: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Round to nearest, ties to even: w (N, K) -> q (N, K), int8, or uint8 if affine."""
        expand = partial(_expand_groups, K=w.shape[1])
        qdata = (w.float() / expand(scales)).round()
        qdata = qdata if zeros is None else qdata + expand(zeros)
        return qdata.clamp(*self.limits).to(torch.int8 if self.symmetric else torch.uint8)

    dequantize = staticmethod(dequantize)


def pack(qdata: Tensor, bits: int) -> Tensor:
    """uint8 values (..., K) -> bytes (..., K * bits / 8). 4 bits: byte j holds column 2j in its low
    half and 2j + 1 in its high half. 2 and 3 bits: bit planes, a byte has bit b of 8 columns."""
    if bits == 8:
        return qdata
    if bits == 4:
        return qdata[..., ::2] | qdata[..., 1::2] << 4
    columns = qdata.unflatten(-1, (-1, 8))
    shift = torch.arange(8, device=qdata.device, dtype=torch.uint8)
    planes = [((columns >> b & 1) << shift).sum(-1, dtype=torch.uint8) for b in range(bits)]
    return torch.cat(planes, dim=-1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack: bytes (..., K * bits / 8) -> uint8 values (..., K)."""
    if bits == 8:
        return packed
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    shift = torch.arange(8, device=packed.device, dtype=torch.uint8)
    planes = packed.unflatten(-1, (bits, -1))[..., None] >> shift & 1  # (..., bits, K / 8, 8)
    bit = torch.arange(bits, device=packed.device, dtype=torch.uint8)
    return (planes << bit[:, None, None]).sum(-3, dtype=torch.uint8).flatten(-2)


# --------------------------------------------------------------------------------------------------
# Matmuls: (x (..., K), qweight, scales, zeros, bias) -> (..., N)
# --------------------------------------------------------------------------------------------------


def dequantized_linear(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, bits: int
) -> Tensor:
    """The reference of weight_only: dequantize the weight, then F.linear."""
    return F.linear(x, dequantize(unpack(qweight, bits), scales, zeros).to(x.dtype), bias)


def weight_only(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Quantized weights, 16-bit activations: int8 by row (qweight (N, K) int8), or int4 by group
    (qweight (N, K / 2) uint8). Decoding is bound by reading weights, so a fast kernel unpacks them
    in registers: torch has one for int8 on a CPU; others are installed by `use_linear_fn_`."""
    bits, rows = 8 if zeros is None else 4, x.numel() // x.shape[-1]
    fits = x.shape[-1] % 32 == 0 == len(qweight) % 16  # else torch's op reads out of bounds
    fits = fits and x.dtype in (torch.float32, torch.bfloat16)  # in fp16 its sums would overflow
    unsupported = x.is_cuda or x.requires_grad or torch.compiler.is_compiling()
    if unsupported or bits == 4 or not 0 < rows <= 8 or not fits:
        return dequantized_linear(x, qweight, scales, zeros, bias, bits)
    flat = x.reshape(rows, -1).contiguous()
    y = torch._weight_int8pack_mm(flat, qweight, torch.ones_like(scales[:, 0], dtype=x.dtype))
    y = y.float() * scales[:, 0]
    return (y if bias is None else y + bias).to(x.dtype).view(*x.shape[:-1], -1)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, K) -> int8 values (M, K) and scales (M, 1) fp32: vector-wise absmax quantization
    (LLM.int8(), arXiv:2208.07339, 3.1)."""
    scales = x.float().abs().amax(-1, keepdim=True) / 127
    scales = torch.where(scales == 0, 1.0, scales)
    return (x.float() / scales).round().to(torch.int8), scales  # a NaN in x stays NaN, in the scale


def block_linear(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: None, bias: Tensor | None
) -> Tensor:
    """q8_0 or q4_0: x is rounded to int8 with a scale per 32 columns too, so that a block's dot
    product is one of integers."""
    scheme = SCHEMES["q8_0" if qweight.dtype == torch.int8 else "q4_0"]
    qdata, x_scales = quantize_rows(x.reshape(-1, 32))
    rounded = (qdata * x_scales).view_as(x)
    y = F.linear(rounded, scheme.dequantize(qweight, scales, zeros))
    return (y if bias is None else y + bias).to(x.dtype)


def int8_dynamic(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: None, bias: Tensor | None
) -> Tensor:
    """int8 times int8, summed in int32: activations are quantized at run time by row, weights by
    output channel."""
    qdata, rows = quantize_rows(x.reshape(-1, x.shape[-1]))
    y = int8_matmul(qdata, qweight) * rows * scales.t()
    return (y if bias is None else y + bias).to(x.dtype).view(*x.shape[:-1], len(qweight))


def int8_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K), b (N, K) int8 -> a @ b^T (M, N) int32. torch's CUDA matmul requires more than 16
    rows and multiples of 8."""
    if not a.is_cuda:
        return torch._int_mm(a, b.t())
    M, N = len(a), len(b)
    a = F.pad(a, (0, -a.shape[1] % 8, 0, max(17 - M, 0)))
    b = F.pad(b, (0, -b.shape[1] % 8, 0, -N % 8))
    return torch._int_mm(a, b.t())[:M, :N]


OUTLIER_THRESHOLD = 6.0  # a feature with such an |x| is an outlier (arXiv:2208.07339, 3.2)


def llm_int8(
    x: Tensor, qweight: Tensor, scales: Tensor, zeros: None, bias: Tensor | None
) -> Tensor:
    """LLM.int8() (arXiv:2208.07339, 3.2): columns of x with an outlier are multiplied in x's dtype,
    the others in int8, so that outliers do not enlarge the scales of the rows."""
    flat = x.reshape(-1, x.shape[-1])
    outlier = (flat.abs() >= OUTLIER_THRESHOLD).any(0)
    y = int8_dynamic(flat.masked_fill(outlier, 0), qweight, scales, None, None)
    compiling = torch.compiler.is_compiling()  # first: the other call cannot be traced
    if compiling or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        # no shape may depend on the data
        y = y + F.linear(flat * outlier, dequantize(qweight, scales, None).to(x.dtype))
    else:
        columns = outlier.nonzero()[:, 0]
        weight = dequantize(qweight[:, columns], scales, None)
        y = y + F.linear(flat[:, columns], weight.to(x.dtype))
    return (y if bias is None else y + bias).view(*x.shape[:-1], len(qweight))


# --------------------------------------------------------------------------------------------------
# FP8
# --------------------------------------------------------------------------------------------------

TILE = 128
# Rows and columns that share a scale; None: all of them. A matmul sums over the columns.
GRANULARITIES: dict[str, tuple[int | None, int | None]] = {
    "tensorwise": (None, None),
    "rowwise": (1, None),
    "1x128": (1, TILE),
    "128x128": (TILE, TILE),
}
ScaledTensor = tuple[Tensor, Tensor]  # FP8 values (M, K), and the scale of each tile


def round_fp8(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, saturate: bool = False
) -> Tensor:
    """The values of x.to(dtype), bit for bit, in fp32 and by fp32 arithmetic alone: the reference
    of the cast (arXiv:2209.05433, table 1), for a device without it.

    Rounds to the nearest multiple of a step, ties to even. The step halves with each power of two
    down to the smallest normal number; smaller values are subnormal and share its step. On overflow
    e5m2 gives infinity; e4m3fn has none and gives NaN above 448, or 448 with `saturate`, as torch
    does from 2.13 on.
    """
    limits = torch.finfo(dtype)
    x = x.float()
    exponent = torch.frexp(x.abs().clamp(min=limits.smallest_normal)).exponent - 1
    step = torch.ldexp(torch.full_like(x, limits.eps), exponent)
    y = (x / step).round() * step
    overflow = limits.max if saturate else math.nan if dtype == torch.float8_e4m3fn else math.inf
    return torch.where(y.abs() > limits.max, torch.full_like(y, overflow).copysign(y), y)


def fp8_scale(x: Tensor, granularity: str, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """x (M, K) -> the fp32 scale of each of its tiles, its largest |x| / the largest number of
    `dtype`: (1, 1) tensorwise, (M, 1) rowwise, (M, ceil(K / 128)) or (ceil(M / 128),
    ceil(K / 128)) in tiles. A tile of zeros has scale 1. With NaN or infinity in the tile the scale
    is not finite either, so that the matmul's result shows it."""
    if granularity not in GRANULARITIES:
        raise ValueError(
            f"granularity {granularity!r} is unknown; choose from {', '.join(GRANULARITIES)}"
        )
    (M, K), (rows, columns) = x.shape, GRANULARITIES[granularity]
    rows, columns = rows or max(M, 1), columns or max(K, 1)  # there may be no tokens
    x = F.pad(x.abs(), (0, -K % columns, 0, -M % rows))
    tiles = x.view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    amax = tiles.amax((1, 3)).float()
    scale = (amax / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax == 0, 1.0, scale)


def to_fp8(x: Tensor, granularity: str, dtype: torch.dtype = torch.float8_e4m3fn) -> ScaledTensor:
    """x (M, K) -> FP8 values (M, K) of `dtype` and their scales: x is about values * scale. Nothing
    overflows: the largest |x| of a tile becomes the largest number of `dtype`."""
    scale = fp8_scale(x, granularity, dtype)
    qdata = (x.float() / _expand_tiles(scale, x.shape)).to(dtype)
    return qdata.contiguous(), scale  # also if x is a transpose: tensor cores read along K


def from_fp8(qdata: Tensor, scale: Tensor) -> Tensor:
    """FP8 values (M, K) and the scales of their tiles -> values * scale (M, K) fp32."""
    return qdata.float() * _expand_tiles(scale, qdata.shape)


def _expand_tiles(scale: Tensor, shape: torch.Size) -> Tensor:
    """Scales expanded to broadcast to (M, K); a dimension of size 1 keeps it."""
    for dim, size in enumerate(shape):
        if scale.shape[dim] not in (1, size):
            # True division: torch.compile on a CPU (2.13) drops the remainder of size // TILE.
            tile = (torch.arange(size, device=scale.device) / TILE).long()
            scale = scale.index_select(dim, tile)
    return scale


def fp8_matmul(
    a: ScaledTensor,
    b: ScaledTensor,
    dtype: torch.dtype = torch.float32,
    use_fast_accum: bool = False,
) -> Tensor:
    """a (M, K), b (N, K), outputs of `to_fp8` -> a @ b^T (M, N) in `dtype`, summed in fp32. Runs on
    FP8 tensor cores if the GPU has them and they support the shape, else computes the same from the
    dequantized operands. use_fast_accum: Hopper's tensor cores accumulate in about 14 bits, their
    default (DeepSeek-V3, arXiv:2412.19437, 3.5.2)."""
    (qdata, _), (N, K) = a, b[0].shape
    cuda = qdata.is_cuda and torch.version.cuda is not None
    if cuda and K % 16 == N % 16 == 0 and torch.cuda.get_device_capability(qdata.device) >= (8, 9):
        return scaled_mm(a, b, dtype, use_fast_accum)
    with torch.autocast(qdata.device.type, enabled=False):
        return (from_fp8(*a) @ from_fp8(*b).t()).to(dtype)


def scaled_mm(
    a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype, use_fast_accum: bool = False
) -> Tensor:
    """fp8_matmul by torch._scaled_mm, which takes one scale per tensor or per row. If scales change
    along K: one matmul per 128 columns, promoted, that is scaled and accumulated in fp32
    (DeepSeek-V3, 3.3.2)."""
    (a, scale_a), (b, scale_b) = a, b
    (M, K), N = a.shape, len(b)
    if scale_a.numel() == scale_b.numel() == 1:
        scales = scale_a.reshape(()), scale_b.reshape(())
        options = dict(out_dtype=dtype, use_fast_accum=use_fast_accum)
        return torch._scaled_mm(a, b.t(), *scales, **options)
    scale_a, scale_b = (_expand_tiles(s, (n, s.shape[1])) for s, n in ((scale_a, M), (scale_b, N)))
    if scale_a.shape[1] == scale_b.shape[1] == 1:
        scales = scale_a.expand(M, 1).contiguous(), scale_b.expand(N, 1).contiguous().t()
        options = dict(out_dtype=torch.bfloat16, use_fast_accum=use_fast_accum)
        y = torch._scaled_mm(a, b.t(), *scales, **options)
        return y.to(dtype)  # on Hopper the kernel with a scale per row writes only bf16
    y, one = a.new_zeros(M, N, dtype=torch.float32), scale_a.new_ones(())
    for g, k in enumerate(range(0, K, TILE)):
        columns = slice(k, k + TILE)
        part = torch._scaled_mm(a[:, columns], b[:, columns].t(), one, one, out_dtype=torch.float32)
        y.addcmul_(part, scale_a[:, g, None] * scale_b[:, g])
    return y.to(dtype)


def fp8_linear(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: None,
    bias: Tensor | None,
    matmul: Callable[..., Tensor] = fp8_matmul,
) -> Tensor:
    """qweight (N, K) FP8 with the scales of its tiles. x is quantized to e4m3 at run time: by row
    if the weight has a scale per row, in tiles of 1 x 128 if it has blocks of 128 x 128. matmul:
    called like fp8_matmul."""
    granularity = "rowwise" if scales.shape[1] == 1 else "1x128"
    rows = to_fp8(x.reshape(-1, x.shape[-1]), granularity)
    y = matmul(rows, (qweight, scales), x.dtype, use_fast_accum=True)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.view(*x.shape[:-1], len(qweight))


# --------------------------------------------------------------------------------------------------
# Schemes and layers
# --------------------------------------------------------------------------------------------------

QTensors = tuple[Tensor, Tensor, Tensor | None]  # qweight, scales, zeros
LinearFn = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]

QUANTIZED_AT_ONCE = 2**19  # weights; on a CPU their temporaries of 2 MB stay in the cache


@dataclass(frozen=True)
class Scheme:
    """Storage format of the weights, integers or FP8 in tiles, and the matmul that uses it."""

    name: str
    linear_fn: LinearFn
    spec: QuantSpec | None = None  # None: FP8
    granularity: str = "rowwise"  # of FP8 scales

    @property
    def is_weight_only(self) -> bool:
        """Whether activations stay in 16 bits."""
        rounding_x = int8_dynamic, llm_int8, block_linear
        return self.spec is not None and self.linear_fn not in rounding_x

    @property
    def has_group_size(self) -> bool:
        """Whether the group size can be chosen."""
        return self.spec is not None and not self.spec.symmetric

    def check(self, weight: Tensor) -> None:
        """ValueError unless weight (..., N, K) can be quantized with this scheme."""
        (self.spec or QuantSpec()).check(weight)

    def quantize(self, weight: Tensor) -> QTensors:
        """weight (N, K) -> the tensors that are stored."""
        if self.spec is None:
            return *to_fp8(weight, self.granularity), None
        if weight.is_meta:  # the shapes are those of one row, N times
            with torch.device("cpu"):  # callers may have set it to meta
                row = self.quantize(torch.zeros(1, weight.shape[1]))
            meta = partial(torch.empty, device="meta")
            shape = lambda t: (len(weight), *t.shape[1:])
            return tuple(t if t is None else meta(shape(t), dtype=t.dtype) for t in row)
        rows = len(weight)
        if weight.device.type == "cpu":
            rows = max(1, QUANTIZED_AT_ONCE // weight.shape[1])
        parts = []
        for block in weight.split(max(1, rows)):
            scales, zeros = self.spec.choose_qparams(block)
            parts.append(self.pack(self.spec.quantize(block, scales, zeros), scales, zeros))
        return tuple(None if each[0] is None else torch.cat(each) for each in zip(*parts))

    def pack(self, qdata: Tensor, scales: Tensor, zeros: Tensor | None) -> QTensors:
        """Unpacked integers -> the tensors that are stored: packed, scales of groups in bf16."""
        qdata = qdata if self.spec.symmetric else pack(qdata, self.spec.bits)
        return qdata, scales.bfloat16() if self.spec.group_size else scales, zeros

    def dequantize(self, qweight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Stored tensors -> the weight (..., N, K) fp32."""
        if self.spec is None:
            return from_fp8(qweight, scales)
        qdata = qweight if self.spec.symmetric else unpack(qweight, self.spec.bits)
        return dequantize(qdata, scales, zeros)


class BlockScheme(Scheme):
    """llama.cpp's formats, without zero points. Q8_0 stores int8. Q4_0 stores q + 8 in 4 bits: byte
    i of a block of 32 columns has column i in its low half and i + 16 in its high half."""

    def pack(self, qdata: Tensor, scales: Tensor, zeros: None) -> QTensors:
        if self.spec.bits == 4:
            pairs = (qdata + 8).to(torch.uint8).unflatten(-1, (-1, 2, 16)).transpose(-1, -2)
            qdata = pack(pairs.flatten(-3), 4)
        return qdata, scales.half(), None

    def dequantize(self, qweight: Tensor, scales: Tensor, zeros: None) -> Tensor:
        if self.spec.bits == 4:
            pairs = unpack(qweight, 4).unflatten(-1, (-1, 16, 2)).transpose(-1, -2)
            qweight = pairs.flatten(-3).to(torch.int8) - 8
        return dequantize(qweight, scales, None)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", weight_only, QuantSpec(8)),
        Scheme("int4", weight_only, QuantSpec(4, 32, symmetric=False)),
        Scheme("int3", partial(dequantized_linear, bits=3), QuantSpec(3, 32, symmetric=False)),
        Scheme("int2", partial(dequantized_linear, bits=2), QuantSpec(2, 32, symmetric=False)),
        BlockScheme("q8_0", block_linear, QuantSpec(8, 32, scale_dtype=torch.float16)),
        BlockScheme(
            "q4_0", block_linear, QuantSpec(4, 32, scale_dtype=torch.float16, signed_scale=True)
        ),
        Scheme("int8-dynamic", int8_dynamic, QuantSpec(8)),
        Scheme("llm.int8", llm_int8, QuantSpec(8)),
        Scheme("fp8", fp8_linear, granularity="rowwise"),
        Scheme("fp8-block", fp8_linear, granularity="128x128"),
    )
}


def get_scheme(name: str, group_size: int | None = None) -> Scheme:
    """The scheme of this name, with another group_size if one is given."""
    if not isinstance(name, str) or name not in SCHEMES:
        raise ValueError(f"scheme {name!r} is unknown; known: {', '.join(SCHEMES)}")
    scheme = SCHEMES[name]
    if group_size is None:
        return scheme
    if not scheme.has_group_size:
        grouped = ", ".join(n for n, s in SCHEMES.items() if s.has_group_size)
        raise ValueError(f"group_size requires one of {grouped}, not {name}")
    if type(group_size) is not int or group_size < 8 or group_size & (group_size - 1):
        raise ValueError(
            f"group_size must be 32, 64, 128 or another power of 2, not {group_size!r}"
        )
    return replace(scheme, spec=replace(scheme.spec, group_size=group_size))


class QuantizedModule(nn.Module):
    """A quantized weight (..., N, K). `.to` changes its device, but not the dtypes of its buffers:
    casting a model keeps qweight and scales. `linear_fn` may be replaced by another LinearFn."""

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __init__(self, weight: Tensor, scheme: Scheme, qtensors: QTensors):
        super().__init__()
        self.scheme, self.linear_fn = scheme, scheme.linear_fn
        self.shape, self.dtype = weight.shape, weight.dtype
        for name, tensor in zip(("qweight", "scales", "zeros"), qtensors):  # kernels need row-major
            self.register_buffer(name, None if tensor is None else tensor.contiguous())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedModule:
        buffers = {name: self._buffers[name] for name in ("qweight", "scales", "zeros")}
        super()._apply(fn, recurse)
        for name, tensor in buffers.items():
            if tensor is not None and self._buffers[name].dtype != tensor.dtype:
                self._buffers[name] = tensor.to(self._buffers[name].device)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def extra_repr(self) -> str:
        group = self.scheme.spec and self.scheme.spec.group_size
        return f"{tuple(self.shape)}, {self.scheme.name}" + (f", group_size={group}" * bool(group))


class QuantizedLinear(QuantizedModule):
    """nn.Linear with a quantized weight. A few weights may be kept in 16 bits: kept_weight, and
    kept_index into the flat weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scheme: Scheme, qtensors: QTensors):
        super().__init__(weight, scheme, qtensors)
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.has_added_bias = False
        self.register_buffer("kept_index", None)
        self.register_buffer("kept_weight", None)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight (N, K), in the model's dtype."""
        weight = self.scheme.dequantize(self.qweight, self.scales, self.zeros).to(self.dtype)
        if self.kept_index is not None:
            weight.view(-1)[self.kept_index.long()] = self.kept_weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        if self.kept_index is not None:
            return F.linear(x, self.weight.to(x.dtype), self.bias)
        return self.linear_fn(x, self.qweight, self.scales, self.zeros, self.bias)

    @torch.no_grad()
    def keep_unquantized(self, index: Tensor, weight: Tensor) -> None:
        """Store these elements of the flat weight in the model's dtype too, and use them."""
        self.kept_index, self.kept_weight = index.int(), weight.to(self.dtype)

    @torch.no_grad()
    def add_to_bias(self, delta: Tensor) -> None:
        """Add delta (N,) to the bias, or make it the bias of a layer that has none."""
        self.has_added_bias |= self.bias is None
        bias = delta if self.bias is None else self.bias + delta
        self.bias = nn.Parameter(bias.to(self.dtype), requires_grad=False)


class QuantizedStack(QuantizedModule):
    """The quantized weights of E experts (E, N, K). Indexing, by an int or a tensor of ids, returns
    dequantized weights, so that the experts hook can use it like the tensor that it replaces."""

    def __getitem__(self, ids: Any) -> Tensor:
        return self.scheme.dequantize(*self._expert_qtensors(ids)).to(self.dtype)

    def _expert_qtensors(self, ids: Any) -> QTensors:
        return self.qweight[ids], self.scales[ids], None if self.zeros is None else self.zeros[ids]

    def linear(self, x: Tensor, e: int) -> Tensor:
        """x (n, K) -> (n, N), by expert e."""
        return self.linear_fn(x, *self._expert_qtensors(e), None)


def expert_linear(x: Tensor, stack: Tensor | QuantizedStack, e: int) -> Tensor:
    """x (n, K) -> (n, N), by expert e of a stack, quantized or not."""
    return stack.linear(x, e) if isinstance(stack, QuantizedStack) else F.linear(x, stack[e])


def loop_experts(
    linear: Callable[[Tensor, Any, int], Tensor],
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w_gate_up: Any,
    w_down: Any,
) -> Tensor:
    """The experts hook as a loop over experts, with linear(x, stack, e) for its matmuls: SwiGLU
    experts, each run on the tokens routed to it. x (N, C), weights and ids (N, K), w_gate_up
    (E, 2F, C), gate rows first, and w_down (E, C, F) -> (N, C). An id of -1 is padding."""
    out = torch.zeros_like(x)
    for e in ids[ids >= 0].unique().tolist():
        token, k = (ids == e).nonzero(as_tuple=True)
        gate, up = linear(x[token], w_gate_up, e).chunk(2, dim=-1)
        y = linear(F.silu(gate) * up, w_down, e) * weights[token, k, None].type_as(x)
        out = out.index_add(0, token, y.type_as(out))
    return out


# --------------------------------------------------------------------------------------------------
# Replacing the modules of a model
# --------------------------------------------------------------------------------------------------

STACKS = ("w_gate_up", "w_down")
Rounding = Callable[[str, Tensor], QTensors]  # (name, weight (N, K)) -> unpacked q, scales, zeros


def quantizable_weights(
    name: str, module: nn.Module, skip: Sequence[str] = ()
) -> dict[str, Tensor]:
    """The weights that quantize_ would replace in this module itself, by full name: an nn.Linear's,
    or the two stacked expert weights of an MoE layer."""
    found = {}
    if type(module) is nn.Linear:
        found = {name: module.weight}
    elif hasattr(module, "experts"):
        stacks = {leaf: module._parameters.get(leaf) for leaf in STACKS}
        found = {f"{name}.{leaf}": w for leaf, w in stacks.items() if w is not None}
    return {full: w for full, w in found.items() if not any(_matches(full, s) for s in skip)}


def _matches(name: str, part: str) -> bool:
    return bool(part) and f".{part}." in f".{name}."


def quantizable_modules(model: nn.Module, skip: Sequence[str] = ()) -> dict[str, nn.Module]:
    """The modules below `model` that have weights to quantize, by name, except those that share
    their weight with another module, such as a head tied to the embedding."""
    modules = dict(model.named_modules())
    owners = Counter(p for m in modules.values() for p in m._parameters.values() if p is not None)
    found = {}
    for name, module in modules.items():
        weights = quantizable_weights(name, module, skip)
        root = module is model and type(module) is nn.Linear  # has no parent to replace it in
        if weights and not root and all(owners[w] == 1 for w in weights.values()):
            found[name] = module
    return found


def check_skip(model: nn.Module, skip: Sequence[str]) -> None:
    """ValueError for an entry of `skip` that matches no module or weight."""
    names = [n for name, m in model.named_modules() for n in (name, *quantizable_weights(name, m))]
    for part in skip:
        if not any(_matches(name, part) for name in names):
            raise ValueError(f"skip: no module of the model matches {part!r}")


def check_weights(
    modules: Mapping[str, nn.Module], check: Callable[[Tensor], None], skip: Sequence[str]
) -> None:
    """Call check(weight) for every weight to quantize; its ValueError names the layer."""
    for name, module in modules.items():
        for full, weight in quantizable_weights(name, module, skip).items():
            try:
                check(weight)
            except ValueError as e:
                raise ValueError(f"{full}: {e}") from None


def swap_class_(model: nn.Module, name: str, kind: type[nn.Linear], **attributes: Any) -> None:
    """Replace the nn.Linear of this name by a `kind` with the same parameters and these
    attributes."""
    parent, _, attribute = name.rpartition(".")
    old = model.get_submodule(name)
    with torch.device("meta"):
        new = kind(old.in_features, old.out_features, old.bias is not None)
    new.weight, new.bias = old.weight, old.bias
    vars(new).update(attributes)
    setattr(model.get_submodule(parent), attribute, new.train(old.training))


@torch.no_grad()
def quantize_module(
    name: str,
    module: nn.Module,
    scheme: Scheme,
    *,
    skip: Sequence[str] = (),
    rounding: Rounding | None = None,
) -> nn.Module:
    """The module to put in this module's place: a QuantizedLinear for an nn.Linear; any other
    module itself, its stacked expert weights quantized. `name` is passed to skip and rounding."""
    for full, weight in quantizable_weights(name, module, skip).items():
        try:
            qtensors = _quantize_weight(full, weight, scheme, rounding)
        except ValueError as e:
            raise ValueError(f"{full}: {e}") from None
        if type(module) is nn.Linear:
            return QuantizedLinear(weight, module.bias, scheme, qtensors).train(module.training)
        leaf = full.rpartition(".")[2]
        delattr(module, leaf)
        setattr(module, leaf, QuantizedStack(weight, scheme, qtensors).train(module.training))
        module.experts = partial(loop_experts, expert_linear)
    return module


def _quantize_weight(
    name: str, weight: Tensor, scheme: Scheme, rounding: Rounding | None
) -> QTensors:
    """Quantize a weight (N, K), or a stack (E, N, K) expert by expert."""
    if weight.dim() == 3:
        experts = enumerate(weight[:1] if weight.is_meta else weight)
        each = [_quantize_weight(f"{name}.{e}", w, scheme, rounding) for e, w in experts]
        stacked = (None if part[0] is None else torch.stack(part) for part in zip(*each))
        if weight.is_meta:
            stacked = (p if p is None else p.expand(len(weight), *p.shape[1:]) for p in stacked)
        return tuple(stacked)
    scheme.check(weight)
    if rounding is not None and scheme.spec is not None and not weight.is_meta:
        return scheme.pack(*rounding(name, weight.float()))
    return scheme.quantize(weight)


def quantize_(
    model: nn.Module,
    scheme: str,
    *,
    skip: str | Sequence[str] = (),
    group_size: int | None = None,
    rounding: Rounding | None = None,
) -> nn.Module:
    """Quantize `model` in place: every nn.Linear below it (exactly that type) and stacked experts
    (parameters w_gate_up (E, 2F, C) and w_down (E, C, F) of a module with an `experts` hook).
    Returns the model. On the meta device it changes only shapes and modules.

    Unchanged: norms, embeddings, routers, a Linear that shares its weight with another module (a
    tied head), and `skip`: names, or dotted parts of names ("head", "layers.0", "kv_b_proj").
    scheme is a key of SCHEMES, group_size applies to int4, int3 and int2. `rounding` replaces
    round-to-nearest (see calibrate.gptq). ValueError, before anything is changed, names the layer:
    unknown scheme, a group_size that does not divide K, NaN, a skip that matches nothing. (If
    `rounding` raises, earlier layers are replaced.)
    """
    chosen = get_scheme(scheme, group_size)
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    check_skip(model, skip)
    todo = quantizable_modules(model, skip)
    if not todo:
        done = any(isinstance(m, QuantizedModule) for m in model.modules())
        why = "the model is already quantized" if done else "skip excludes them all, or it has none"
        raise ValueError(f"no nn.Linear or stacked experts to quantize: {why}")
    check_weights(todo, chosen.check, skip)
    quantize_modules_(model, todo, chosen, skip, rounding)
    return model


def quantize_modules_(
    model: nn.Module,
    modules: dict[str, nn.Module],
    scheme: Scheme,
    skip: Sequence[str],
    rounding: Rounding | None = None,
) -> None:
    """Quantize these modules of the model, given by their full names, and empty the dict: each old
    weight is freed before the next is quantized."""
    for name in list(modules):
        module = modules.pop(name)
        new = quantize_module(name, module, scheme, skip=skip, rounding=rounding)
        if new is not module:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new)


def use_linear_fn_(
    model: nn.Module, linear_fn: LinearFn, replaced: LinearFn = weight_only
) -> nn.Module:
    """Replace weight_only by `linear_fn`, such as gemm.weight_only_matmul, in every int8 and int4
    layer; or replace block_linear in every q8_0 and q4_0 layer, or fp8_linear in every fp8 and
    fp8-block layer. Returns the model."""
    for module in model.modules():
        if isinstance(module, QuantizedModule) and module.scheme.linear_fn is replaced:
            module.linear_fn = linear_fn
    return model


# --------------------------------------------------------------------------------------------------
# config.json
# --------------------------------------------------------------------------------------------------

VERSION = 1  # of quantization_config; increased when an older reader would misread it


def to_config(model: nn.Module, scheme: str, group_size: int | None, skip: Sequence[str]) -> dict:
    """quantization_config for config.json, from which from_config creates the same modules."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    kept = {n: len(m.kept_index) for n, m in layers.items() if m.kept_index is not None}
    added = [n for n, m in layers.items() if m.has_added_bias]
    chosen = get_scheme(scheme, group_size)
    size = chosen.spec.group_size if chosen.has_group_size else None
    config = {"quant_method": "sheaf", "version": VERSION, "scheme": scheme, "group_size": size}
    config |= {"skip": list(skip)} | ({"kept": kept} if kept else {})
    return config | ({"added_bias": added} if added else {})


def from_config(model: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """quantize_ a model on the meta device as quantization_config specifies, so that its tensors
    can be loaded. ValueError names the field."""
    known = {"quant_method", "version", "scheme", "group_size", "skip", "calibrated"}
    known |= {"kept", "added_bias"}
    if config.get("version") != VERSION or set(config) - known:
        unknown = ", ".join(sorted(set(config) - known)) or f"version {config.get('version')!r}"
        raise ValueError(
            f"quantization_config: {unknown} is unknown here (version {VERSION}); the folder was "
            "written by another quantize.py: load it with that, or quantize the model again"
        )
    skip, kept = config.get("skip"), config.get("kept", {})
    if not isinstance(skip, list) or not all(isinstance(part, str) for part in skip):
        raise ValueError(f"quantization_config: skip must be a list of names, not {skip!r}")
    try:
        scheme, group_size = config.get("scheme"), config.get("group_size")
        quantize_(model, scheme, skip=skip, group_size=group_size)
    except ValueError as e:
        raise ValueError(f"quantization_config: {e}") from None
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    counts = kept.items() if isinstance(kept, dict) else [(str(kept), 0)]
    for name, n in counts:
        if name not in layers or type(n) is not int or not 0 < n <= math.prod(layers[name].shape):
            raise ValueError(f"quantization_config: kept has an invalid entry {name!r}: {n!r}")
        layers[name].keep_unquantized(torch.empty(n, device="meta"), torch.empty(n, device="meta"))
    added = config.get("added_bias", [])
    if not isinstance(added, list) or not all(isinstance(n, str) and n in layers for n in added):
        raise ValueError("quantization_config: added_bias must be a list of quantized layers")
    for name in added:
        layers[name].add_to_bias(torch.empty(layers[name].out_features, device="meta"))
    return model


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def check(device: str) -> None:
    """Every scheme's matmul against its dequantized weight, and the FP8 cast against torch's."""
    for name, (N, K, rows) in itertools.product(SCHEMES, ((48, 64, 1), (7, 96, 130))):
        x = torch.randn(rows, K, device=device, dtype=torch.bfloat16)
        linear = nn.Linear(K, N, device=device, dtype=x.dtype)
        (layer,) = quantize_(nn.Sequential(linear), name)
        exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
        error = ((layer(x).double() - exact).norm() / exact.norm()).item()
        assert error < (5e-3 if SCHEMES[name].is_weight_only else 5e-2), (name, N, K, rows, error)
    numbers = 448 * torch.randn(9999).clamp(-1, 1)
    assert torch.equal(round_fp8(numbers), numbers.to(torch.float8_e4m3fn).float())


def main(size: int = 2048) -> None:
    """Bytes and error against the unquantized layer, and milliseconds by rows of the input."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    device = "cuda" if torch.cuda.is_available() else "cpu"
    check(device)
    dense = nn.Linear(size, size, bias=False).to(device, torch.bfloat16)
    inputs = [torch.randn(n, size, device=device, dtype=torch.bfloat16) for n in (1, 8, 128)]
    print(f"{size} x {size}, {'bytes':>9}{'error':>9}{'ms x1':>9}{'x8':>9}{'x128':>9}")
    for name in ("bf16", *SCHEMES):
        layer = nn.Sequential(copy.deepcopy(dense))
        if name != "bf16":
            quantize_(layer, name)
        ratio = sum(t.nbytes for t in (*layer.parameters(), *layer.buffers())) / (2 * size * size)
        exact = dense(inputs[2]).float()
        error = (layer(inputs[2]).float() - exact).norm() / exact.norm()
        time = lambda x: Timer("f(x)", globals=dict(f=layer, x=x)).blocked_autorange().median
        ms = "".join(f"{1e3 * time(x):>9.3f}" for x in inputs)
        print(f"{name:<14}{ratio:>7.2f}{error:>9.2%}{ms}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
