"""Flash attention in Triton: forward, backward and decode, each with its plain-torch reference.

softmax(q k^T) v computed literally stores the T x S matrix of scores, and reading and writing it,
not the arithmetic, takes the time. Four functions remove it step by step:

    attention_reference   all scores at once, every feature, fp32 or fp64
    online_attention      one pass over blocks of keys with a running maximum m, sum l and output
                          (Milakov & Gimelshein, arXiv:1805.02867)
    chunked_attention     blocks of queries too, recomputed in the backward pass (Rabe & Staats,
                          arXiv:2112.05682): memory linear in T + S, still plain torch
    flash_attention       the same loop as one Triton kernel that keeps its tiles on chip
                          (FlashAttention 1 and 2, arXiv:2205.14135, 2307.08691)

Each also returns lse = m + log l, with which `merge_attention` merges outputs over disjoint sets of
keys: the basis of split-KV decoding (flash-decoding), ring attention and shared prefixes.

Order of operations on a score:  scale * q.k  ->  softcap * tanh(. / softcap)  ->  + bias
- alibi_slope * (i - j)  ->  mask. Without `causal` ALiBi takes |i - j|, as in flash-attn. Query t
has position i = t + S - T (bottom-right alignment). It attends to keys j <= i (causal) or
j < prefix, with i - j < window. A sink is one extra logit per head in the softmax, without a value.
A fully masked row gives o = 0 and lse = -inf.

All features can be combined, except block masks with packed sequences, for any T and S and head
dims up to 256, different ones for q and v too (192 / 128). Unused features are compiled out. The
backward pass is deterministic: each gradient tile is written by one program, without atomics.

When it loses: for determinism the backward pass computes the scores twice (7 matmuls instead of 5),
and a third time for the gradient of a bias. Without Triton or a GPU every call runs
chunked_attention: exact and memory-efficient, but on a CPU slower than torch's fused kernel.

Hook: `as_attend()` returns the model's attend callable, for training, packed prompts and KV caches.
Equivalence (test_all.py): each step equals the one before, gradients included. TRITON_INTERPRET=1
runs the kernels on a CPU, slowly, for tests.

Shapes: B batch, T queries, S keys, Hq / Hkv query / key-value heads, D / Dv head dims, N packed
tokens. q (B, T, Hq, D), k (B, S, Hkv, D), v (B, S, Hkv, Dv), o (B, T, Hq, Dv), lse (B, Hq, T).
Packed: q (N, Hq, D) etc., lse (Hq, N); sequence n is rows cu_seqlens[n] to cu_seqlens[n + 1].
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # macOS, Windows: every call runs chunked_attention
    triton = None

INTERPRET = triton is not None and triton.knobs.runtime.interpret
FP8_BLOCK = 128  # rows per scale

# --------------------------------------------------------------------------------------------------
# Arguments
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockMask:
    """Block-sparse mask: scores of query block a and key block b are computed only where mask[a, b]
    (or mask[h, a, b], per query head) and skipped elsewhere; the other masks apply too. mask: bool,
    (ceil(T / block_size), ceil(S / block_size)); block_size: a power of two, at least 16."""

    mask: Tensor
    block_size: int = 128


def sparse_blocks(
    n_q: int, n_k: int, *, local: int = 0, global_: int = 0, stride: int = 0
) -> Tensor:
    """Block mask of the usual sparse patterns (Sparse Transformers, arXiv:1904.10509; BigBird,
    arXiv:2007.14062), or-ed together: blocks less than `local` apart; the first `global_` blocks,
    as keys and as queries; every `stride`-th block. The last query block is aligned with the last
    key block. bool (n_q, n_k)."""
    a, b = torch.arange(n_k - n_q, n_k)[:, None], torch.arange(n_k)
    mask = ((a - b).abs() < local) | (b < global_) | (a < global_)
    return mask | ((a - b) % stride == 0) if stride else mask


class _Flags(NamedTuple):
    """The validated arguments of one call, in the form that every implementation here takes."""

    causal: bool
    scale: float
    window: int | None
    softcap: float | None
    slopes: Tensor | None  # (Hq,) fp32
    sinks: Tensor | None  # (Hq,)
    bias: Tensor | None  # (B or 1, Hq or 1, T or 1, S or 1)
    cu_q: Tensor | None
    cu_k: Tensor | None
    prefix: Tensor | None  # (B,) or (sequences,) int32
    lengths: Tensor | None  # (B,) int32: number of valid keys, for decode
    block_mask: Tensor | None  # (H or 1, query blocks, key blocks) bool
    block_size: int  # 0 without a block mask

    @property
    def n_sequences(self) -> int:
        """Number of packed sequences; 0 if not packed."""
        return 0 if self.cu_q is None else len(self.cu_q) - 1

    @property
    def max_tile(self) -> int:
        """Largest tile size: a tile must not exceed a block of the block mask."""
        return self.block_size or 1024


# The fields of _Flags as arguments of a torch.library operator
FLAGS = (
    "bool causal, float scale, int? window, float? softcap, Tensor? slopes, Tensor? sinks, "
    "Tensor? bias, Tensor? cu_q, Tensor? cu_k, Tensor? prefix, Tensor? lengths, "
    "Tensor? block_mask, int block_size"
)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_block_mask(block_mask: BlockMask, Hq: int, T: int, S: int) -> Tensor:
    """The block mask's tensor, (Hq or 1, query blocks, key blocks)."""
    ok = isinstance(block_mask, BlockMask)
    _check(ok, f"block_mask must be a BlockMask, not a {type(block_mask).__name__}")
    n, mask = block_mask.block_size, block_mask.mask
    _check(n > 0, f"block_mask: block_size must be positive, not {n}")
    want = (-(-T // n), -(-S // n))
    ok = mask.dtype == torch.bool and mask.shape in (want, (1, *want), (Hq, *want))
    _check(ok, f"block_mask: mask must be bool {want}, or one such mask for each query head")
    return mask.reshape(-1, *want).contiguous()


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None,
    window: int | None = None, softcap: float | None = None, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, bias: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, prefix: Tensor | None = None,
    block_mask: BlockMask | None = None, lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, _Flags]:  # fmt: skip
    """q, k, v in four dims (packed ones as a batch of 1) and the validated arguments. ValueError
    names the invalid argument."""
    packed = cu_seqlens_q is not None
    _check(packed or cu_seqlens_k is None, "cu_seqlens_k requires cu_seqlens_q")
    for name, x in (("q", q), ("k", k), ("v", v)):
        want = "(N, H, D), packed" if packed else "(B, T, H, D)"
        _check(x.dim() == 4 - packed, f"{name} must be {want}, not of shape {tuple(x.shape)}")
        _check(x.dtype == q.dtype, f"{name} is {x.dtype}, q is {q.dtype}: they must be the same")
    ok = q.dtype.is_floating_point and q.element_size() > 1
    _check(ok, f"q must be of 16, 32 or 64 bit floats, not {q.dtype}")
    cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    if packed:
        q, k, v = q[None], k[None], v[None]
        for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_k)):
            ok = cu.dim() == 1 and len(cu) > 1 and cu.dtype == torch.int32
            _check(ok, f"{name} must be (n_sequences + 1,) int32, not {cu.dtype} {tuple(cu.shape)}")
        _check(len(cu_k) == len(cu_seqlens_q), "cu_seqlens_q and cu_seqlens_k differ in length")
        _check(block_mask is None, "block_mask cannot be combined with cu_seqlens_q")
    (B, T, Hq, D), (S, Hkv) = q.shape, k.shape[1:3]
    _check(k.shape[0] == B and v.shape[:3] == k.shape[:3], "q, k and v differ in batch, or k and v")
    _check(k.shape[3] == D > 0, f"k has head dim {k.shape[3]}, q has {D}")
    _check(Hkv > 0 and Hq % Hkv == 0, f"q has {Hq} heads, not a multiple of k's {Hkv}")
    scale = D**-0.5 if scale is None else float(scale)
    _check(scale > 0 and math.isfinite(scale), f"scale must be positive, not {scale}")
    ok = window is None or (isinstance(window, int) and window >= 1)
    _check(ok, f"window must be a positive integer, not {window}")
    ok = softcap is None or (softcap > 0 and math.isfinite(softcap))
    _check(ok, f"softcap must be positive, not {softcap}")
    for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        _check(x is None or x.shape == (Hq,), f"{name} must be ({Hq},), one per query head")
    n = len(cu_k) - 1 if packed else B
    for name, x in (("prefix", prefix), ("lengths", lengths)):
        ok = x is None or (x.shape == (n,) and x.dtype == torch.int32)
        _check(ok, f"{name} must be int32 ({n},), one per sequence")
    if bias is not None:
        shape = (1,) * (4 - bias.dim()) + bias.shape
        ok = len(shape) == 4 and all(n in (1, size) for n, size in zip(shape, (B, Hq, T, S)))
        _check(ok, f"bias {tuple(bias.shape)} does not broadcast to {(B, Hq, T, S)}")
        bias = bias.reshape(shape)
    mask, block_size = None, 0
    if block_mask is not None:
        mask = _check_block_mask(block_mask, Hq, T, S).to(q.device)
        block_size = block_mask.block_size
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.detach().to(torch.promote_types(q.dtype, torch.float32))
    vectors = alibi_slopes, sinks, cu_seqlens_q, cu_k, prefix, lengths
    for x in (k, v, bias, *vectors):
        ok = x is None or x.device == q.device
        _check(ok, f"q is on {q.device}, another argument on {None if ok else x.device}")
    slopes, sinks, *vectors = (x if x is None else x.contiguous() for x in vectors)
    flags = scale, window, softcap, slopes, sinks, bias, *vectors, mask, block_size
    return q, k, v, _Flags(bool(causal), *flags)


# --------------------------------------------------------------------------------------------------
# Plain torch: naive, online, chunked
# --------------------------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, f: _Flags, rows: slice, cols: slice) -> Tensor:
    """Masked scores of queries `rows` and keys `cols`: (B, Hq, rows, cols), fp32 or q's fp64."""
    (B, T, Hq, D), (S, Hkv) = q.shape, k.shape[1:3]
    dtype, device = torch.promote_types(q.dtype, torch.float32), q.device
    q, k = q[:, rows].to(dtype), k[:, cols].to(dtype)
    # the query heads of a group become rows of one matmul, so that keys are not repeated
    s = q.transpose(1, 2).reshape(B, Hkv, Hq // Hkv * q.shape[1], D) @ k.permute(0, 2, 3, 1)
    s = s.view(B, Hq, q.shape[1], k.shape[1]) * f.scale
    if f.softcap is not None:
        s = f.softcap * torch.tanh(s / f.softcap)
    if f.bias is not None:
        s = s + f.bias.expand(-1, -1, T, S)[:, :, rows, cols].to(dtype)
    j = torch.arange(cols.start, cols.stop, device=device)
    ends = torch.tensor([S], device=device) if f.lengths is None else f.lengths
    i = torch.arange(rows.start, rows.stop, device=device) + (ends - T)[:, None]
    i, j = i[:, None, :, None], j[None, None, None]  # (B or 1, 1, rows, 1), (1, 1, 1, cols)
    if f.slopes is not None:
        distance = i - j if f.causal else (i - j).abs()
        s = s - f.slopes.to(dtype)[:, None, None] * distance
    all_past = not f.causal or cols.stop <= rows.start + S - T + 1
    all_near = f.window is None or rows.stop + S - T - cols.start <= f.window
    if all_past and all_near and f.lengths is None and f.block_mask is None:  # nothing to mask
        return s
    mask = j < ends.view(-1, 1, 1, 1)
    if f.causal:
        past = j <= i
        mask = mask & (past if f.prefix is None else past | (j < f.prefix.view(-1, 1, 1, 1)))
    if f.window is not None:
        mask = mask & (i - j < f.window)
    if f.block_mask is not None:
        t = torch.arange(rows.start, rows.stop, device=device)
        mask = mask & f.block_mask[:, t // f.block_size][..., j.flatten() // f.block_size]
    return s.masked_fill(~mask, -math.inf)


def _values(p: Tensor, v: Tensor) -> Tensor:
    """p (B, Hq, T, S) @ v (B, S, Hkv, Dv) -> (B, Hq, T, Dv)."""
    B, Hq, T, S = p.shape
    o = p.reshape(B, v.shape[2], Hq // v.shape[2] * T, S) @ v.transpose(1, 2).to(p.dtype)
    return o.view(B, Hq, T, v.shape[3])


def _naive(q: Tensor, k: Tensor, v: Tensor, f: _Flags) -> tuple[Tensor, Tensor]:
    """softmax(scores) v with all scores in memory: o (B, Hq, T, Dv), lse (B, Hq, T)."""
    s = _scores(q, k, f, slice(0, q.shape[1]), slice(0, k.shape[1]))
    if f.sinks is not None:
        sinks = f.sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        s = torch.cat((s, sinks), -1)
    empty = (s == -math.inf).all(-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)  # torch's softmax of a fully masked row is NaN
    lse = s.logsumexp(-1).masked_fill(empty[..., 0], -math.inf)
    p = s.softmax(-1).masked_fill(empty, 0.0)
    return _values(p[..., : k.shape[1]], v), lse


State = tuple[Tensor, Tensor, Tensor]  # sum of p v (B, Hq, T, Dv), m and l (B, Hq, T)


def _online_softmax_step(state: State, s: Tensor, v: Tensor) -> State:
    """Online softmax: add one block of scores and values to (acc, m, l), where m = max s,
    l = sum exp(s - m) and acc = sum exp(s - m) v over all blocks so far."""
    acc, m, l = state
    m_new = torch.maximum(m, s.detach().amax(-1))
    base = m_new.clamp(min=torch.finfo(s.dtype).min)
    p, alpha = torch.exp(s - base[..., None]), torch.exp(m - base)
    return acc * alpha[..., None] + _values(p, v), m_new, l * alpha + p.sum(-1)


def _online(
    q: Tensor, k: Tensor, v: Tensor, f: _Flags, rows: slice, chunk: int
) -> tuple[Tensor, Tensor]:
    """Attention of queries `rows` over all their visible keys, one block of keys at a time."""
    B, T, Hq, _ = q.shape
    S, t = k.shape[1], rows.stop - rows.start
    first, last = 0, S
    if f.lengths is None and f.causal and f.prefix is None:
        last = max(0, min(S, rows.stop + S - T))
    if f.lengths is None and f.window is not None:
        first = max(0, rows.start + S - T - f.window + 1)
    no_keys = _scores(q, k, f, rows, slice(0, 0))
    acc, dtype = _values(no_keys, v[:, :0]), no_keys.dtype  # zeros inside the autograd graph
    m = no_keys.new_full((B, Hq, t), -math.inf)
    l = torch.zeros_like(m)
    if f.sinks is not None:  # starts the running sum; its value is 0
        m, l = f.sinks.detach().to(dtype)[:, None].expand_as(m), l + 1
        l = l * torch.exp(f.sinks.to(dtype)[:, None] - m.clamp(min=torch.finfo(dtype).min))
    for start in range(first // chunk * chunk, last, chunk):
        cols = slice(start, min(start + chunk, last))
        if f.block_mask is not None:
            a, b = (
                slice(x.start // f.block_size, -(-x.stop // f.block_size)) for x in (rows, cols)
            )
            if not f.block_mask[:, a, b].any():
                continue
        values = v[:, cols]
        if f.lengths is not None:  # an unused slot may hold NaN or inf, and 0 * inf is NaN
            unused = torch.arange(cols.start, cols.stop, device=q.device) >= f.lengths[:, None]
            values = values.masked_fill(unused[:, :, None, None], 0.0)
        acc, m, l = _online_softmax_step((acc, m, l), _scores(q, k, f, rows, cols), values)
    empty = l == 0
    l = l.masked_fill(empty, 1)
    lse = (m.clamp(min=torch.finfo(dtype).min) + l.log()).masked_fill(empty, -math.inf)
    return acc / l[..., None], lse


def _chunked(q: Tensor, k: Tensor, v: Tensor, f: _Flags, chunk: int = 256) -> tuple[Tensor, Tensor]:
    """_online for one block of queries at a time, each recomputed in the backward pass."""
    dtype = torch.promote_types(q.dtype, torch.float32)  # block gradients are summed in this dtype
    sinks, bias = (x if x is None else x.to(dtype) for x in (f.sinks, f.bias))
    f = f._replace(sinks=sinks, bias=bias)
    run = _online
    if torch.is_grad_enabled():
        run = partial(checkpoint, _online, use_reentrant=False, preserve_rng_state=False)
    T, parts = q.shape[1], []
    for start in range(0, max(1, T), chunk):
        parts.append(run(q, k, v, f, slice(start, min(start + chunk, T)), chunk))
    o, lse = zip(*parts)
    return torch.cat(o, 2), torch.cat(lse, 2)


Core = Callable[[Tensor, Tensor, Tensor, _Flags], tuple[Tensor, Tensor]]


def _per_sequence(core: Core, q: Tensor, k: Tensor, v: Tensor, f: _Flags) -> tuple[Tensor, Tensor]:
    """Run core on each packed sequence; rows past the last sequence get o = 0 and lse = -inf."""
    cu_q, cu_k, N = f.cu_q.tolist(), f.cu_k.tolist(), q.shape[1]
    parts = []
    for n, (q0, q1, k0, k1) in enumerate(zip(cu_q, cu_q[1:], cu_k, cu_k[1:])):
        bias = f.bias
        if bias is not None:
            bias = bias.expand(1, -1, N, k.shape[1])[:, :, q0:q1, k0:k1]
        prefix = None if f.prefix is None else f.prefix[n : n + 1]
        dense = f._replace(cu_q=None, cu_k=None, bias=bias, prefix=prefix)
        parts.append(core(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], dense))
    o, lse = (torch.cat(x, 2) for x in zip(*parts))
    n_padding = N - o.shape[2]
    return F.pad(o, (0, 0, 0, n_padding)), F.pad(lse, (0, n_padding), value=-math.inf)


def _output(o: Tensor, lse: Tensor, f: _Flags, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """o, or (o, lse) with return_lse, without the batch dim if packed."""
    if f.cu_q is not None:
        o, lse = o[0], lse[0]
    return (o, lse) if return_lse else o


def _run_torch(
    core: Core, q: Tensor, k: Tensor, v: Tensor, f: _Flags, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Run core; output in the public layout: o (B, T, Hq, Dv) in q's dtype, lse (B, Hq, T)."""
    with torch.autocast(q.device.type, enabled=False):  # autocast would run fp32 matmuls in bf16
        o, lse = core(q, k, v, f) if f.cu_q is None else _per_sequence(core, q, k, v, f)
    return _output(o.transpose(1, 2).to(q.dtype), lse, f, return_lse)


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **flags: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Step 1, the reference: flash_attention's arguments, all scores in memory, fp32 (fp64 for
    fp64 inputs), gradients by autograd."""
    return _run_torch(_naive, *_prepare(q, k, v, **flags), return_lse)


def online_attention(
    q: Tensor, k: Tensor, v: Tensor, *, chunk: int = 256, return_lse: bool = False, **flags: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Step 2: one pass over the keys, `chunk` keys at a time; all queries at once."""
    _check(chunk > 0, f"chunk must be positive, not {chunk}")
    core = lambda q, k, v, f: _online(q, k, v, f, slice(0, q.shape[1]), chunk)
    return _run_torch(core, *_prepare(q, k, v, **flags), return_lse)


def chunked_attention(
    q: Tensor, k: Tensor, v: Tensor, *, chunk: int = 256, return_lse: bool = False, **flags: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Step 3: blocks of queries and of keys; each block of queries is recomputed in the backward
    pass. Memory beyond inputs and outputs, in scores: B * Hq * chunk * chunk in the forward pass,
    B * Hq * chunk * S in the backward pass."""
    _check(chunk > 0, f"chunk must be positive, not {chunk}")
    core = partial(_chunked, chunk=chunk)
    return _run_torch(core, *_prepare(q, k, v, **flags), return_lse)


def merge_attention(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys: o (B, T, Hq, Dv), lse (B, Hq, T), or packed.

        lse = log(exp lse1 + exp lse2),   o = exp(lse1 - lse) o1 + exp(lse2 - lse) o2

    Associative and differentiable. Sinks must be counted in only one of the two."""
    top = torch.maximum(lse1, lse2).detach()
    top = top.clamp(min=torch.finfo(top.dtype).min)
    w1, w2 = torch.exp(lse1 - top), torch.exp(lse2 - top)
    total = w1 + w2
    empty = total == 0
    total = total.masked_fill(empty, 1)
    w1, w2 = ((w / total).transpose(-1, -2)[..., None] for w in (w1, w2))
    o = (w1 * o1 + w2 * o2).to(o1.dtype)
    return o, (top + total.log()).masked_fill(empty, -math.inf)


# --------------------------------------------------------------------------------------------------
# Helpers shared by the kernels
# --------------------------------------------------------------------------------------------------

# GPUs have an exp2 instruction, so logits are kept in base 2: multiplied by log2(e)
LOG2E = tl.constexpr(math.log2(math.e)) if triton else None
# For fp32 inputs only: three tf32 matmuls on the tensor cores reach fp32 accuracy
PRECISION = tl.constexpr("ieee" if INTERPRET else "tf32x3") if triton else None
jit = triton.jit if triton else (lambda fn=None, **_: fn or (lambda fn: fn))


# How q.k becomes a logit: bias (B, Hq, T, S) and its strides, ALiBi slopes (Hq,) fp32, prefix
# lengths (sequences,) int32. A feature that is None is compiled out.
_ScoreMod = namedtuple(
    "_ScoreMod", "scale softcap window bias_ptr bias_b bias_h bias_t bias_s slopes_ptr prefix_ptr"
)
# A block mask as lists: for each block of one axis the indices of its visible blocks of the other,
# (H, blocks, n), and their number, (H, blocks); blocks is 0 if all heads share one mask
_BlockLists = namedtuple("_BlockLists", "list_ptr count_ptr blocks n")
# l = sum exp(s - fixed_max) of each split, (SPLITS, B, Hq, T) fp32, and the range of l
_Sums = namedtuple("_Sums", "ptr fixed_max low high")
# Inputs of the backward kernels, contiguous; lse in base 2, delta (B, Hq, T) fp32
_Saved = namedtuple("_Saved", "q k v do lse delta")
# Constants of the backward kernels; GROUP = HQ / HKV, SPARSE = block size of the block mask, or 0
_Sizes = namedtuple("_Sizes", "HQ HKV GROUP D DV BLOCK_D BLOCK_DV CAUSAL SPARSE")


@jit
def _locate(pid, axes, BY_KEY: tl.constexpr, BLOCK: tl.constexpr):
    """The tile of queries (BY_KEY: of keys) of program pid: its sequence, its first row in it, and
    the sequence's first query, number of queries, first key and number of keys.

    Packed: the tiles of sequence n start at cu[n] // BLOCK + n, which leaves room for all its rows
    without reading its length on the host. A tile past the end of its sequence has no rows."""
    T, S, n_seqs, cu_q_ptr, cu_k_ptr = axes
    seq, tile, q_start, k_start = 0, pid, 0, 0
    if cu_q_ptr is not None:
        cu_ptr = cu_k_ptr if BY_KEY else cu_q_ptr
        end = n_seqs
        while end - seq > 1:
            middle = (seq + end) // 2
            before = tl.load(cu_ptr + middle) // BLOCK + middle <= pid
            seq, end = tl.where(before, middle, seq), tl.where(before, end, middle)
        tile = pid - tl.load(cu_ptr + seq) // BLOCK - seq
        q_start, k_start = tl.load(cu_q_ptr + seq), tl.load(cu_k_ptr + seq)
        T, S = tl.load(cu_q_ptr + seq + 1) - q_start, tl.load(cu_k_ptr + seq + 1) - k_start
    return seq, tile * BLOCK, q_start, T, k_start, S


@jit
def _key_tiles(i_first, i_last, k_len, prefix, window, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """The key tiles visible to queries i_first..i_last: [first, inner) partly masked (window edge),
    [inner, outer) not masked, [outer, last) partly masked (diagonal or end of the keys)."""
    first, inner, end, unmasked = 0, 0, k_len, k_len
    if CAUSAL:
        end = tl.minimum(k_len, tl.maximum(i_last + 1, prefix))
        unmasked = tl.minimum(k_len, tl.maximum(i_first + 1, prefix))
    if window is not None:
        first = tl.maximum(i_first - window + 1, 0) // BLOCK
        inner = tl.cdiv(tl.maximum(i_last - window + 1, 0), BLOCK)
    last = tl.cdiv(tl.maximum(end, 0), BLOCK)
    inner = tl.minimum(inner, last)
    return first, inner, tl.maximum(inner, tl.maximum(unmasked, 0) // BLOCK), last


@jit
def _query_tiles(
    j_first, j_last, q_len, offset, prefix, window, CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):
    """The query tiles that see keys j_first..j_last: partly masked, not masked, partly masked."""
    begin, unmasked, end, unmasked_end = 0, 0, q_len, q_len
    if CAUSAL:
        begin = tl.maximum(tl.where(j_first < prefix, 0, j_first - offset), 0)
        unmasked = tl.maximum(tl.where(j_last < prefix, 0, j_last - offset), 0)
    if window is not None:
        end = tl.minimum(q_len, j_last + window - offset)
        unmasked_end = tl.minimum(q_len, j_first + window - offset)
    last = tl.cdiv(tl.maximum(end, 0), BLOCK)
    inner = tl.minimum(tl.cdiv(unmasked, BLOCK), last)
    return begin // BLOCK, inner, tl.maximum(inner, tl.maximum(unmasked_end, 0) // BLOCK), last


@jit
def _block_list(lists, head, row, SPARSE: tl.constexpr, BLOCK: tl.constexpr):
    """The block mask's list for this row's block, and its length in tiles of the other axis."""
    at = head * lists.blocks + row // SPARSE
    return lists.list_ptr + at * lists.n, tl.load(lists.count_ptr + at) * (SPARSE // BLOCK)


@jit
def _tile_start(n, list_ptr, SPARSE: tl.constexpr, BLOCK: tl.constexpr):
    """First row of the n-th visible tile."""
    if SPARSE:
        PER_BLOCK: tl.constexpr = SPARSE // BLOCK
        return tl.load(list_ptr + n // PER_BLOCK) * SPARSE + n % PER_BLOCK * BLOCK
    else:
        return n * BLOCK


@jit
def _load(
    ptr, stride, n_rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr,
    CHECK: tl.constexpr = True, stride_c=1,
):  # fmt: skip
    """Load a tile (ROWS, COLS) at ptr; zero past WIDTH columns and, with CHECK, past n_rows."""
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    # masks that are always true are removed by the compiler
    mask = ((r < n_rows) | (not CHECK)) & ((c < WIDTH) | (WIDTH >= COLS))
    return tl.load(ptr + r * stride + c * stride_c, mask=mask, other=0.0)


@jit
def _store(ptr, x, stride, n_rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr):
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    mask = (r < n_rows) & (c < WIDTH)
    tl.store(ptr + r * stride + c, x.to(ptr.dtype.element_ty), mask=mask)


@jit
def _load_head_terms(mod, b, seq, head, q_start, k_start, q_len, k_len):
    """Per-sequence and per-head inputs of _logits: (i - t, k_len, prefix, slope, bias_ptr)."""
    head = head.to(tl.int64)  # head * stride may exceed 2^31
    prefix, slope, bias_ptr = 0, 0.0, 0
    if mod.prefix_ptr is not None:
        prefix = tl.load(mod.prefix_ptr + b + seq)
    if mod.slopes_ptr is not None:
        slope = tl.load(mod.slopes_ptr + head)
    if mod.bias_ptr is not None:
        bias_ptr = mod.bias_ptr + b * mod.bias_b + head * mod.bias_h
        bias_ptr += q_start * tl.cast(mod.bias_t, tl.int64) + k_start * mod.bias_s
    return k_len - q_len, k_len, prefix, slope, bias_ptr


@jit
def _exp2_scale(mod):
    """The factor that _logits leaves out: without softcap, bias and ALiBi the scale is applied in
    the multiply-add of exp2(logit - m)."""
    if mod.softcap is None and mod.bias_ptr is None and mod.slopes_ptr is None:
        return mod.scale * LOG2E
    else:
        return 1.0


@jit
def _logits(s, i, j, terms, mod, CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    """s = q.k at positions i and j (shapes that broadcast) -> logits / _exp2_scale, and softcap's
    tanh for the backward pass."""
    offset, k_len, prefix, slope, bias_ptr = terms
    tanh = s
    if mod.softcap is not None:
        tanh = 1 - 2 / (1 + tl.exp2(s * (mod.scale / mod.softcap * 2 * LOG2E)))
        s = tanh * (mod.softcap * LOG2E)
    elif mod.bias_ptr is not None or mod.slopes_ptr is not None:
        s = s * (mod.scale * LOG2E)
    if mod.bias_ptr is not None:
        t = (i - offset).to(tl.int64)
        ptrs = bias_ptr + t * mod.bias_t + j * mod.bias_s
        bias = tl.load(ptrs, mask=(i < k_len) & (j < k_len), other=0.0)
        s += bias.to(tl.float32) * LOG2E
    if mod.slopes_ptr is not None:
        distance = i - j
        if not CAUSAL:
            distance = tl.abs(distance)
        s -= slope * LOG2E * distance
    if MASKED:
        mask = j < k_len
        if CAUSAL and mod.prefix_ptr is not None:
            mask = mask & ((j <= i) | (j < prefix))
        elif CAUSAL:
            mask = mask & (j <= i)
        if mod.window is not None:
            mask = mask & (i - j < mod.window)
        s = tl.where(mask, s, float("-inf"))
    return s, tanh


# --------------------------------------------------------------------------------------------------
# Forward and decode
# --------------------------------------------------------------------------------------------------


@jit
def _softmax_step(s, m_i, exp2_scale, mod, MASKED: tl.constexpr):
    """Online softmax: p = exp2(s - m), the factor alpha of all sums so far, the new maximum m."""
    m_new = tl.maximum(m_i, tl.max(s, 1) * exp2_scale)
    base = m_new
    if MASKED or mod.bias_ptr is not None:  # a row may be fully masked so far
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    return tl.exp2(s * exp2_scale - base[:, None]), tl.exp2(m_i - base), m_new


@jit(do_not_specialize=["T", "S", "n_seqs"])
def _forward_kernel(
    q_ptr,  # (B, T, Hq, D)
    k_ptr,  # (B, S, Hkv, D), or a tensor descriptor
    v_ptr,  # (B, S, Hkv, DV), or a tensor descriptor; None: the first BLOCK_D columns of k
    o_ptr, lse_ptr,  # (SPLITS, B, T, Hq, DV), (SPLITS, B, Hq, T) fp32
    mod, lists, scales,  # scales: of FP8 q, k, v, each (B, H, blocks) fp32
    sinks_ptr, lengths_ptr, cu_q_ptr, cu_k_ptr,  # (Hq,), (B,) int32, (n_seqs + 1,) int32
    fixed_max, sums,  # of decode_attention's two passes, or None
    q_strides, k_strides, v_strides, T, S, n_seqs,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    SPLITS: tl.constexpr, CAUSAL: tl.constexpr, SPARSE: tl.constexpr, TMA: tl.constexpr,
    ROUND_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """o = softmax(logits(q k^T)) v, lse = log sum exp. Grid (query tiles * SPLITS, heads, B).

    PACK: the rows of a tile are the queries of all GROUP heads of one key head, so that decode
    reads each key once and fills the tensor cores. SPLITS: the number of programs that split the
    keys of a tile. D = BLOCK_D + BLOCK_R if it is the sum of two powers of two (192, 576).
    fixed_max: o is acc, lse is l = sum exp(s - fixed_max). sums: only rows with l out of range.
    """
    # ---- this program's queries: rows of one sequence, one head (PACK: the heads of one key head)
    PER_ROW: tl.constexpr = GROUP if PACK else 1
    n_heads = tl.num_programs(1) * PER_ROW
    b = tl.program_id(2).to(tl.int64)
    # the last queries have the most keys if causal: start with them
    pid = (tl.num_programs(0) - 1 - tl.program_id(0)) // SPLITS
    split = tl.program_id(0) % SPLITS
    axes = (T, S, n_seqs, cu_q_ptr, cu_k_ptr)
    seq, first_row, q_start, q_len, k_start, k_len = _locate(pid, axes, False, BLOCK_M)
    n_rows = q_len * PER_ROW
    if first_row >= n_rows:
        return
    if lengths_ptr is not None:
        k_len = tl.minimum(tl.load(lengths_ptr + b), S)
    row = first_row + tl.arange(0, BLOCK_M)
    valid = row < n_rows
    t = row // PER_ROW
    head = tl.program_id(1) * PER_ROW + row % PER_ROW
    if sums is not None:
        at = tl.where(valid, (b * n_heads + head) * T + t, 0)
        rows = tl.num_programs(2) * n_heads * T
        valid &= _out_of_range(sums, at, split, rows, SPLITS)
        if tl.max(valid.to(tl.int32), 0) == 0:
            return

    # ---- inputs of the scores, the tile of q, and where the sequence's keys and values start
    kv_head = tl.program_id(1) // (GROUP // PER_ROW)
    terms = _load_head_terms(mod, b, seq, head[:, None], q_start, k_start, q_len, k_len)
    offset, _, prefix, _, _ = terms
    i = (t + offset)[:, None]
    q_ptrs = q_ptr + b * q_strides[0] + (q_start + t).to(tl.int64) * q_strides[1]
    q_ptrs = (q_ptrs + head.to(tl.int64) * q_strides[2])[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    q = tl.load(q_ptrs + offs_d, mask=valid[:, None] & (offs_d < D), other=0.0)
    if BLOCK_R:
        q_ptrs = q_ptrs + BLOCK_D + tl.arange(0, BLOCK_R)[None, :]
        q_rest = tl.load(q_ptrs, mask=valid[:, None], other=0.0)
    stride_kt, stride_vt = tl.cast(k_strides[1], tl.int64), tl.cast(v_strides[1], tl.int64)
    if not TMA:
        kv_head = kv_head.to(tl.int64)  # descriptors take int32, pointer offsets may exceed 2^31
        k_ptr += b * k_strides[0] + k_start * stride_kt + kv_head * k_strides[2]
        if v_ptr is not None:
            v_ptr += b * v_strides[0] + k_start * stride_vt + kv_head * v_strides[2]

    # ---- running maximum m, sum l and output acc
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    if sinks_ptr is not None and split == 0:  # the sink's logit starts the sum, in one split only
        m_i = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        l_i += 1.0
    if fixed_max is not None:
        l_i *= tl.exp2(m_i - fixed_max * LOG2E)
        p_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # its columns are summed once, at the end

    # ---- the visible key tiles, and the part of them that is this split's
    exp2_scale, list_ptr = _exp2_scale(mod), 0
    i_last = tl.minimum(n_rows, first_row + BLOCK_M) - 1
    first, inner, outer, last = _key_tiles(
        first_row // PER_ROW + offset, i_last // PER_ROW + offset, k_len, prefix, mod.window,
        CAUSAL, BLOCK_N,
    )  # fmt: skip
    if SPARSE:
        first, inner, outer = 0, 0, 0
        list_ptr, last = _block_list(lists, tl.program_id(1), first_row, SPARSE, BLOCK_N)
    if SPLITS > 1:
        tiles_per_split = tl.cdiv(tl.maximum(last - first, 0), SPLITS)
        first += split * tiles_per_split
        last = tl.maximum(first, tl.minimum(last, first + tiles_per_split))
        inner = tl.minimum(tl.maximum(inner, first), last)
        outer = tl.minimum(tl.maximum(outer, inner), last)

    for phase in tl.static_range(3):  # window edge, unmasked tiles, diagonal
        if phase == 2 or (not SPARSE and (phase == 1 or mod.window is not None)):
            bounds = (first, inner, outer, last)
            for n in range(bounds[phase], bounds[phase + 1]):
                start = _tile_start(n, list_ptr, SPARSE, BLOCK_N)
                j = start + tl.arange(0, BLOCK_N)[None, :]
                n_left = k_len - start
                # ---- scores s = q k^T
                if TMA:
                    k = k_ptr.load([b.to(tl.int32), k_start + start, kv_head, 0])
                    k = k.reshape([BLOCK_N, BLOCK_D])
                else:
                    k_tile = k_ptr + start * stride_kt
                    k = _load(k_tile, k_strides[1], n_left, BLOCK_N, D, BLOCK_D, phase != 1)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                if BLOCK_R:
                    k_rest = _load(
                        k_tile + BLOCK_D, k_strides[1], n_left, BLOCK_N, BLOCK_R, BLOCK_R,
                        phase != 1,
                    )  # fmt: skip
                    s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision=PRECISION)
                if scales is not None:
                    kv_row = b * (n_heads // GROUP) + kv_head
                    q_scale = _block_scale(scales[0], b * n_heads + tl.program_id(1), T, first_row)
                    s *= q_scale * _block_scale(scales[1], kv_row, S, start)
                s, tanh = _logits(s, i, j, terms, mod, CAUSAL, phase != 1)
                # ---- probabilities p, up to a factor per row
                if fixed_max is None:
                    p, alpha, m_i = _softmax_step(s, m_i, exp2_scale, mod, phase != 1)
                    acc *= alpha[:, None]
                else:
                    p = tl.exp2(s * exp2_scale - fixed_max * LOG2E)
                    p_sum += p
                # ---- acc += p v
                if v_ptr is None:
                    v = k
                elif TMA:
                    v = v_ptr.load([b.to(tl.int32), k_start + start, kv_head, 0])
                    v = v.reshape([BLOCK_N, BLOCK_DV])
                    if phase != 1 and (cu_q_ptr is not None or lengths_ptr is not None):
                        # rows of the next sequence or unused slots may hold inf or NaN
                        v = tl.where(tl.trans(j) < k_len, v, 0.0)
                else:
                    v_tile, stride_vd = v_ptr + start * stride_vt, v_strides[3]
                    v = _load(
                        v_tile, v_strides[1], n_left, BLOCK_N, DV, BLOCK_DV, phase != 1, stride_vd
                    )
                if scales is not None:  # p * 256: e4m3 is coarse near zero
                    v_scale = _block_scale(scales[2], kv_row, S, start) / 256
                    v = v if ROUND_P else v.to(tl.float32)
                    acc += tl.dot((p * 256).to(v.dtype), v, input_precision=PRECISION) * v_scale
                else:
                    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
                if fixed_max is None:
                    l_i = l_i * alpha + tl.sum(p, 1)

    # ---- o = acc / l and lse (fixed_max: acc and l, for the merge)
    total = tl.where((l_i == 0) | (fixed_max is not None), 1.0, l_i)
    base_row = (split * tl.num_programs(2) + b) * n_heads * T
    o_ptrs = o_ptr + (base_row + (q_start + t).to(tl.int64) * n_heads + head)[:, None] * DV
    offs_v = tl.arange(0, BLOCK_DV)[None, :]
    o = (acc / total[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptrs + offs_v, o, mask=valid[:, None] & (offs_v < DV))
    lse = tl.where(l_i == 0, float("-inf"), (m_i + tl.log2(total)) / LOG2E)
    if fixed_max is not None:  # an acc that is not finite is out of range too
        lse = tl.where(tl.sum(acc * 0.0, 1) == 0, l_i + tl.sum(p_sum, 1), float("inf"))
    tl.store(lse_ptr + base_row + head.to(tl.int64) * T + q_start + t, lse, mask=valid)


@jit
def _block_scale(scale_ptr, row, length, start):
    return tl.load(scale_ptr + row * tl.cdiv(length, 128) + start // 128)


@jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr,  # (B, T, H, D), the same in e4m3, (B, H, blocks) fp32
    x_strides, out_strides, T, D: tl.constexpr, HADAMARD: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of a head in e4m3 with one scale. Grid: (blocks of rows, heads, batch)."""
    block, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    t = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (t < T) & (d < D)
    at = b * x_strides[0] + t * x_strides[1] + head * x_strides[2] + d * x_strides[3]
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    if HADAMARD:  # Sylvester's matrix is -1 where i & j has an odd number of ones; D <= 256
        bits = tl.arange(0, BLOCK_D)[:, None] & d
        bits ^= bits >> 4
        bits ^= bits >> 2
        bits ^= bits >> 1
        signs = (1 - 2 * (bits & 1)).to(x.dtype)
        x = tl.dot(x, signs, input_precision="ieee") * D**-0.5
    x = x.to(tl.float32)
    scale = tl.maximum(tl.max(tl.max(tl.abs(x), axis=1), axis=0), 1e-12) / 448
    tl.store(scale_ptr + (b * tl.num_programs(1) + head) * tl.num_programs(0) + block, scale)
    at = b * out_strides[0] + t * out_strides[1] + head * out_strides[2] + d * out_strides[3]
    tl.store(out_ptr + at, (x / scale).to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _out_of_range(sums, at, split, rows, SPLITS: tl.constexpr):
    """Whether row `at` needs the exact softmax in `split`: its l there overflows, or its l over all
    splits underflows. A small l in some splits alone loses nothing."""
    own = tl.load(sums.ptr + split * rows + at)
    total = tl.zeros_like(own)
    for s in tl.static_range(SPLITS):
        total += tl.load(sums.ptr + s * rows + at)
    return (own >= sums.high) | (total <= sums.low)


@jit
def _combine_kernel(
    o_parts_ptr, lse_parts_ptr,  # (SPLITS, B, T, Hq, DV) fp32, (SPLITS, B, Hq, T) fp32
    o_ptr, lse_ptr, sums, DV: tl.constexpr, SPLITS: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge all splits, as merge_attention. Grid (T, Hq, B). sums: splits in range are acc and l;
    if all are, every w is 1, and the merge only adds."""
    t, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    T, n_heads = tl.num_programs(0), tl.num_programs(1)
    rows = tl.num_programs(2) * n_heads * T
    at, at_lse = (b * T + t) * n_heads + head, (b * n_heads + head) * T + t
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    lse = tl.load(lse_parts_ptr + s * rows + at_lse, mask=s < SPLITS, other=float("-inf"))
    l = 1.0
    if sums is not None:
        exact = _out_of_range(sums, at_lse, tl.minimum(s, SPLITS - 1), rows, SPLITS)
        l = tl.load(sums.ptr + s * rows + at_lse, mask=s < SPLITS, other=1.0)
        l = tl.where(exact, 1.0, l)
        lse = tl.where(exact | (s >= SPLITS), lse, sums.fixed_max)
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    w = tl.exp2((lse - top) * LOG2E)
    total = tl.sum(w * l, 0)
    parts = o_parts_ptr + (s * rows + at).to(tl.int64)[:, None] * DV + d[None, :]
    mask = (s < SPLITS)[:, None] & (d < DV)[None, :]
    acc = tl.sum(w[:, None] * tl.load(parts, mask=mask, other=0.0), 0)
    o = (acc / tl.where(total == 0, 1.0, total)).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + at.to(tl.int64) * DV + d, o, mask=d < DV)
    tl.store(lse_ptr + at_lse, top + tl.log2(total) / LOG2E)


# --------------------------------------------------------------------------------------------------
# Backward
# --------------------------------------------------------------------------------------------------
#
# With p = exp(logit - lse), dp = do v^T and delta = sum(o * do) - dlse for each row:
#
#     dv = p^T do      d logit = p * (dp - delta)      dq = scale * ds k      dk = scale * ds^T q
#
# where ds is d logit times the derivative of softcap. x is a _Saved. A fully masked row has lse =
# +inf here, so that p = exp2(-inf) = 0, not NaN.


@jit(do_not_specialize=["T"])
def _delta_kernel(
    o_ptr, lse_ptr, do_ptr, dlse_ptr, delta_ptr, lse2_ptr, T, DV: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta and base-2 lse, (B, Hq, T), from o and do (B, T, Hq, DV). Grid (T tiles, Hq, B)."""
    start, head, n_heads = tl.program_id(0) * ROWS, tl.program_id(1), tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    at = ((b * T + start) * n_heads + head) * DV
    o = _load(o_ptr + at, n_heads * DV, T - start, ROWS, DV, BLOCK_DV).to(tl.float32)
    do = _load(do_ptr + at, n_heads * DV, T - start, ROWS, DV, BLOCK_DV).to(tl.float32)
    t = start + tl.arange(0, ROWS)
    row = (b * n_heads + head) * T + t
    dlse = tl.load(dlse_ptr + row, mask=t < T, other=0.0)
    tl.store(delta_ptr + row, tl.sum(o * do, 1) - dlse, mask=t < T)
    lse = tl.load(lse_ptr + row, mask=t < T, other=0.0)
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    tl.store(lse2_ptr + row, lse, mask=t < T)


@jit
def _load_q_do(
    x, b, head, T, begin, n_left, ROWS: tl.constexpr, Z: tl.constexpr, CHECK: tl.constexpr
):
    """q, do, lse and delta of ROWS queries starting at row `begin`, of which `n_left` are valid."""
    at = (b * T + begin) * Z.HQ + head
    q = _load(x.q + at * Z.D, Z.HQ * Z.D, n_left, ROWS, Z.D, Z.BLOCK_D, CHECK)
    do = _load(x.do + at * Z.DV, Z.HQ * Z.DV, n_left, ROWS, Z.DV, Z.BLOCK_DV, CHECK)
    r, row = tl.arange(0, ROWS), (b * Z.HQ + head) * T + begin
    mask = (r < n_left) | (not CHECK)
    lse = tl.load(x.lse + row + r, mask=mask, other=float("inf"))
    return q, do, lse, tl.load(x.delta + row + r, mask=mask, other=0.0)


@jit
def _load_kv(
    x, b, kv_head, S, begin, n_left, ROWS: tl.constexpr, Z: tl.constexpr, CHECK: tl.constexpr
):
    """k and v of ROWS keys starting at row `begin`, of which `n_left` are valid."""
    at = (b * S + begin) * Z.HKV + kv_head
    k = _load(x.k + at * Z.D, Z.HKV * Z.D, n_left, ROWS, Z.D, Z.BLOCK_D, CHECK)
    return k, _load(x.v + at * Z.DV, Z.HKV * Z.DV, n_left, ROWS, Z.DV, Z.BLOCK_DV, CHECK)


@jit
def _tile_backward(
    q, k, v, do, lse, delta, i, j, terms, mod, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BY_KEY: tl.constexpr,
):  # fmt: skip
    """p, d logit and ds of one tile: (queries, keys), or (keys, queries) with BY_KEY."""
    if BY_KEY:
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    else:
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    s, tanh = _logits(s, i, j, terms, mod, CAUSAL, MASKED)
    p = tl.exp2(s * _exp2_scale(mod) - lse)
    dlogit = p * (dp - delta)
    ds = dlogit
    if mod.softcap is not None:
        ds = dlogit * (1 - tanh * tanh)
    return p, dlogit, ds


@jit
def _backward_dkdv(
    pid, kv_head, b, axes, x, dk_ptr, dv_ptr, mod, lists, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys, summed over the queries of all heads of the group."""
    seq, key, q_start, q_len, k_start, k_len = _locate(pid, axes, True, BLOCK_N)
    n_left = tl.maximum(k_len - key, 0)
    j = key + tl.arange(0, BLOCK_N)[:, None]
    k, v = _load_kv(x, b, kv_head, axes[1], k_start + key, n_left, BLOCK_N, Z, True)
    dk, dv = tl.zeros_like(k).to(tl.float32), tl.zeros_like(v).to(tl.float32)
    for g in range(Z.GROUP):
        head = kv_head * Z.GROUP + g
        terms = _load_head_terms(mod, b, seq, head, q_start, k_start, q_len, k_len)
        offset, _, prefix, _, _ = terms
        j_last, list_ptr = tl.minimum(key + BLOCK_N, k_len) - 1, 0
        first, inner, outer, last = _query_tiles(
            key, j_last, q_len, offset, prefix, mod.window, Z.CAUSAL, BLOCK_M
        )
        if Z.SPARSE:
            first, inner, outer = 0, 0, 0
            list_ptr, last = _block_list(lists, head, key, Z.SPARSE, BLOCK_M)
        last = tl.where(n_left > 0, last, 0)
        for phase in tl.static_range(3):  # diagonal, unmasked tiles, window edge or end
            if phase == 2 or (not Z.SPARSE and (phase == 1 or Z.CAUSAL)):
                bounds = (first, inner, outer, last)
                for n in range(bounds[phase], tl.minimum(bounds[phase + 1], last)):
                    start = _tile_start(n, list_ptr, Z.SPARSE, BLOCK_M)
                    q, do, lse, delta = _load_q_do(
                        x, b, head, axes[0], q_start + start, q_len - start, BLOCK_M, Z, phase != 1
                    )
                    i = (start + offset + tl.arange(0, BLOCK_M))[None, :]
                    lse, delta = lse[None, :], delta[None, :]
                    p, dlogit, ds = _tile_backward(
                        q, k, v, do, lse, delta, i, j, terms, mod, Z.CAUSAL, phase != 1, True
                    )
                    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
                    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    at = (b * axes[1] + k_start + key) * Z.HKV + kv_head
    _store(dk_ptr + at * Z.D, dk * mod.scale, Z.HKV * Z.D, n_left, BLOCK_N, Z.D, Z.BLOCK_D)
    _store(dv_ptr + at * Z.DV, dv, Z.HKV * Z.DV, n_left, BLOCK_N, Z.DV, Z.BLOCK_DV)


@jit
def _backward_dq(
    pid, head, b, axes, x, dq_ptr, mod, lists, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    Z: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, summed over their visible keys."""
    seq, query, q_start, q_len, k_start, k_len = _locate(pid, axes, False, BLOCK_M)
    n_left = tl.maximum(q_len - query, 0)
    terms = _load_head_terms(mod, b, seq, head, q_start, k_start, q_len, k_len)
    offset, _, prefix, _, _ = terms
    i = (query + offset + tl.arange(0, BLOCK_M))[:, None]
    q, do, lse, delta = _load_q_do(x, b, head, axes[0], q_start + query, n_left, BLOCK_M, Z, True)
    lse, delta = lse[:, None], delta[:, None]
    dq, list_ptr = tl.zeros_like(q).to(tl.float32), 0
    i_last = tl.minimum(query + BLOCK_M, q_len) - 1 + offset
    first, inner, outer, last = _key_tiles(
        query + offset, i_last, k_len, prefix, mod.window, Z.CAUSAL, BLOCK_N
    )
    if Z.SPARSE:
        first, inner, outer = 0, 0, 0
        list_ptr, last = _block_list(lists, head, query, Z.SPARSE, BLOCK_N)
    last = tl.where(n_left > 0, last, 0)
    for phase in tl.static_range(3):
        if phase == 2 or (not Z.SPARSE and (phase == 1 or mod.window is not None)):
            bounds = (first, inner, outer, last)
            for n in range(bounds[phase], tl.minimum(bounds[phase + 1], last)):
                start = _tile_start(n, list_ptr, Z.SPARSE, BLOCK_N)
                k, v = _load_kv(
                    x, b, head // Z.GROUP, axes[1], k_start + start, k_len - start, BLOCK_N, Z,
                    phase != 1,
                )  # fmt: skip
                j = start + tl.arange(0, BLOCK_N)[None, :]
                p, dlogit, ds = _tile_backward(
                    q, k, v, do, lse, delta, i, j, terms, mod, Z.CAUSAL, phase != 1, False
                )
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    at = (b * axes[0] + q_start + query) * Z.HQ + head
    _store(dq_ptr + at * Z.D, dq * mod.scale, Z.HQ * Z.D, n_left, BLOCK_M, Z.D, Z.BLOCK_D)


@jit(do_not_specialize=["T", "S", "n_seqs", "n_key_tiles", "n_query_tiles"])
def _backward_kernel(
    x, dq_ptr, dk_ptr, dv_ptr, mod, by_query, by_key, cu_q_ptr, cu_k_ptr, T, S, n_seqs,
    n_key_tiles, n_query_tiles, BLOCK_M1: tl.constexpr, BLOCK_N1: tl.constexpr,
    BLOCK_M2: tl.constexpr, BLOCK_N2: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv. Grid (key tiles + GROUP * query tiles, Hkv, B): the first programs, which have
    the most work, each write a tile of dk and dv, the others a tile of dq."""
    pid, kv_head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    axes = (T, S, n_seqs, cu_q_ptr, cu_k_ptr)
    if pid < n_key_tiles:
        _backward_dkdv(pid, kv_head, b, axes, x, dk_ptr, dv_ptr, mod, by_key, BLOCK_M1, BLOCK_N1, Z)
    else:
        pid -= n_key_tiles
        head = kv_head * Z.GROUP + pid // n_query_tiles
        pid = n_query_tiles - 1 - pid % n_query_tiles  # the last have the most keys if causal
        _backward_dq(pid, head, b, axes, x, dq_ptr, mod, by_query, BLOCK_M2, BLOCK_N2, Z)


@jit(do_not_specialize=["T", "S", "n_seqs"])
def _bias_kernel(
    x, dbias_ptr,  # (B or 1, Hq or 1, T, S) fp32, zeros
    mod, mask_ptr, mask_strides, cu_q_ptr, cu_k_ptr, T, S, n_seqs, heads, batch,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """Gradient of the bias: d logit summed over the `heads` heads and `batch` sequences that share
    it. Grid (query tiles, Hq / heads, B / batch)."""
    axes = (T, S, n_seqs, cu_q_ptr, cu_k_ptr)
    seq, query, q_start, q_len, k_start, k_len = _locate(tl.program_id(0), axes, False, BLOCK_M)
    t = query + tl.arange(0, BLOCK_M)[:, None]
    out = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    out_ptrs = dbias_ptr + (out * T + q_start + t) * S + k_start
    for n in range(0, tl.where(query < q_len, tl.cdiv(k_len, BLOCK_N), 0)):
        start = n * BLOCK_N
        j = start + tl.arange(0, BLOCK_N)[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for shared in range(0, heads * batch):
            b = (tl.program_id(2) * batch + shared // heads).to(tl.int64)
            head = tl.program_id(1) * heads + shared % heads
            terms = _load_head_terms(mod, b, seq, head, q_start, k_start, q_len, k_len)
            q, do, lse, delta = _load_q_do(
                x, b, head, T, q_start + query, q_len - query, BLOCK_M, Z, True
            )
            k, v = _load_kv(
                x, b, head // Z.GROUP, S, k_start + start, k_len - start, BLOCK_N, Z, True
            )
            i, lse, delta = t + k_len - q_len, lse[:, None], delta[:, None]
            p, dlogit, ds = _tile_backward(
                q, k, v, do, lse, delta, i, j, terms, mod, Z.CAUSAL, True, False
            )
            if mask_ptr is not None:
                at = head * mask_strides[0] + query // Z.SPARSE * mask_strides[1]
                dlogit *= tl.load(mask_ptr + at + start // Z.SPARSE)
            total += dlogit
        tl.store(out_ptrs + j, total, mask=(t < q_len) & (j < k_len))


# --------------------------------------------------------------------------------------------------
# Launchers
# --------------------------------------------------------------------------------------------------

# By largest head dim. forward and decode: BLOCK_M (for decode the maximum), BLOCK_N, num_warps,
# num_stages, use tensor descriptors (Hopper's TMA). backward: BLOCK_M and BLOCK_N of the dk and dv
# tiles, BLOCK_M and BLOCK_N of the dq tiles, num_warps, num_stages.
CONFIGS: dict[str, dict[int, tuple]] = {
    "forward": {
        64: (128, 128, 4, 3, True), 128: (128, 128, 8, 2, True), 256: (128, 64, 8, 2, True)
    },
    "decode": {64: (64, 128, 4, 3, False), 128: (64, 64, 4, 3, False), 512: (64, 32, 8, 2, False)},
    "backward": {
        64: (32, 128, 128, 64, 8, 3), 128: (64, 128, 128, 64, 8, 3), 256: (16, 64, 64, 32, 8, 2)
    },
}  # fmt: skip

# The range of l = sum exp(s - fixed_max). fp16: p <= l must not exceed 65504, and with l >= 1, as
# with a running maximum, p loses little below the smallest fp16. Otherwise e^-60 to e^60: a p that
# fp32 cannot hold is e^-27 of l at most, and values of up to e^28 do not overflow.
SAFE_SUMS = {torch.float16: (1.0, 6e4)}
WIDE_SUMS = (1e-26, 1e26)


def _config(kind: str, dim: int) -> tuple:
    table = CONFIGS[kind]
    return table[min((d for d in table if d >= dim), default=max(table))]


def _tile_size(n: int) -> int:
    """The next power of two from n, at least 16, the smallest tile of tl.dot."""
    return max(16, 1 << (n - 1).bit_length())


def _shared_bytes(x: Tensor) -> int:
    """Bytes of shared memory per element of x; an fp32 element is split into two tf32."""
    return x.element_size() if x.element_size() < 4 else 8


def _split_dim(D: int) -> tuple[int, int]:
    """BLOCK_D and BLOCK_R: 192 = 128 + 64, 576 = 512 + 64; otherwise D padded to a power of two."""
    low = 1 << (D.bit_length() - 1)
    rest = D - low
    return (low, rest) if rest >= 16 and rest & (rest - 1) == 0 else (_tile_size(D), 0)


@lru_cache
def _device_properties(index: int | None) -> tuple[int, int, int]:
    """Number of SMs, shared memory per program in bytes, major compute capability."""
    if index is None:  # the interpreter: numbers of an H100
        return 132, 232448, 9
    p = torch.cuda.get_device_properties(index)
    return p.multi_processor_count, p.shared_memory_per_block_optin, p.major


def _score_mod(f: _Flags, q: Tensor, S: int) -> _ScoreMod:
    B, T, Hq, _ = q.shape
    strides = (None,) * 4 if f.bias is None else f.bias.expand(B, Hq, T, S).stride()
    return _ScoreMod(f.scale, f.softcap, f.window, f.bias, *strides, f.slopes, f.prefix)


def _block_lists(f: _Flags, by_key: bool = False) -> _BlockLists | None:
    """For each query block its visible key blocks, in ascending order; by_key: the reverse."""
    if f.block_mask is None:
        return None
    mask = (f.block_mask.transpose(1, 2) if by_key else f.block_mask).to(torch.int8)
    order = mask.argsort(dim=-1, descending=True, stable=True).int().contiguous()
    count = mask.sum(-1, dtype=torch.int32).contiguous()
    return _BlockLists(order, count, count.shape[1] if len(count) > 1 else 0, order.shape[2])


def _n_tiles(length: int, cu: Tensor | None, block: int) -> int:
    """Number of tiles for `length` rows; for packed sequences an upper bound."""
    return -(-length // block) if cu is None else length // block + len(cu) - 1


def _is_aligned(x: Tensor) -> bool:
    """Whether x has the 16-byte alignment that a TMA descriptor requires."""
    offsets = x.data_ptr(), *(n * x.element_size() for n in x.stride()[:3])
    return x.stride(3) == 1 and all(n % 16 == 0 for n in offsets)


def _forward_tiles(
    q: Tensor, f: _Flags, kind: str, rows: int, key: int, value: int
) -> tuple[int, int, int, int, bool]:
    """CONFIGS' BLOCK_M, BLOCK_N, num_warps, num_stages and use of TMA, reduced to the tile's `rows`
    and to shared memory. key, value: columns to load per key; value is 0 if it is a part of key."""
    M, N, warps, stages, tma = _config(kind, max(key, value))
    size, shared = _shared_bytes(q), _device_properties(q.device.index)[1] - 2048
    M = min(M if size < 8 else max(16, M // 2), _tile_size(rows), f.max_tile)
    N = min(N, f.max_tile)
    per_key = (key + value) * size + (0 if f.bias is None else M * f.bias.element_size())
    while M * key * size + stages * N * per_key > shared and M * N * stages > 16 * 16:
        if stages > 2:
            stages -= 1
        elif N > 16:
            N //= 2
        else:
            M, stages = max(16, M // 2), 1
    return M, N, warps, stages, tma


def _forward(
    q: Tensor, k: Tensor, v: Tensor | None, f: _Flags, *, pack: bool = False, splits: int = 1,
    latent_dim: int = 0, fixed_max: float | None = None,
    scales: tuple[Tensor, Tensor, Tensor] | None = None, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernel: o (B, T, Hq, Dv), lse (B, Hq, T)."""
    (B, T, Hq, D), (S, Hkv) = q.shape, k.shape[1:3]
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    DV, (BLOCK_D, BLOCK_R) = latent_dim or v.shape[3], _split_dim(D)
    BLOCK_DV = BLOCK_D if v is None else _tile_size(DV)
    o = torch.empty(B, T, Hq, DV, dtype=dtype or q.dtype, device=q.device)
    lse = torch.empty(B, Hq, T, device=q.device)
    if f.cu_q is not None:  # rows past the last sequence
        o, lse = o.zero_(), lse.fill_(-math.inf)
    if o.numel() == 0:
        return o, lse
    rows = T * Hq // Hkv if pack else T
    kind = "decode" if pack and (rows < 128 or BLOCK_DV > 256) else "forward"
    value = 0 if v is None else BLOCK_DV
    M, N, warps, stages, tma = _forward_tiles(q, f, kind, rows, BLOCK_D + BLOCK_R, value)
    o_parts, lse_parts = o, lse
    if splits > 1:
        o_parts, lse_parts = (lse.new_empty(splits, *x.shape) for x in (o, lse))
    # of each launch: where it writes lse or l, fixed_max, the l that it reads
    passes, sums = [(lse_parts, None, None)], None
    if fixed_max is not None and splits > 1 and kind == "decode":
        sums = _Sums(torch.empty_like(lse_parts), fixed_max, *SAFE_SUMS.get(q.dtype, WIDE_SUMS))
        passes = [(sums.ptr, fixed_max, None), (lse_parts, None, sums)]
    k_strides, v_strides = k.stride(), (k if v is None else v).stride()
    major = _device_properties(q.device.index)[2]
    tma = tma and S and major >= 9 and (D, DV) == (BLOCK_D, BLOCK_DV)
    tma = bool(tma and v is not None and not scales and _is_aligned(k) and _is_aligned(v))
    if tma:
        k, v = (TensorDescriptor.from_tensor(x, [1, N, 1, x.shape[3]]) for x in (k, v))
    for lse_or_l, *fixed in passes:
        _forward_kernel[_n_tiles(rows, f.cu_q, M) * splits, Hkv if pack else Hq, B](
            q, k, v, o_parts, lse_or_l, _score_mod(f, q, S), _block_lists(f), scales, f.sinks,
            f.lengths, f.cu_q, f.cu_k, *fixed, q.stride(), k_strides, v_strides, T, S,
            f.n_sequences, D=D, DV=DV, GROUP=Hq // Hkv, PACK=pack, SPLITS=splits, CAUSAL=f.causal,
            SPARSE=f.block_size, TMA=tma, ROUND_P=not INTERPRET, BLOCK_M=M, BLOCK_N=N,
            BLOCK_D=BLOCK_D, BLOCK_R=BLOCK_R, BLOCK_DV=BLOCK_DV, num_warps=8 if scales else warps,
            num_stages=stages,
        )  # fmt: skip
    if splits > 1:
        _combine_kernel[T, Hq, B](
            o_parts, lse_parts, o, lse, sums, DV=DV, SPLITS=splits, BLOCK_DV=_tile_size(DV),
            BLOCK_S=_tile_size(splits),
        )  # fmt: skip
    return o, lse


def _backward_tiles(q: Tensor, f: _Flags, key: int, value: int) -> tuple[int, ...]:
    """CONFIGS' tiles, num_warps and num_stages, reduced to shared memory. key, value: columns of
    the tiles."""
    *tiles, warps, stages = _config("backward", max(key, value))
    divisor = 1 if f.bias is None else 2  # leaves shared memory for the tiles of the bias
    M1, N1, M2, N2 = (max(16, min(n // divisor, f.max_tile)) for n in tiles)
    _, shared, major = _device_properties(q.device.index)
    if major >= 10 and max(key, value) > 128:  # tensor memory has 512 columns
        N1, M2 = min(N1, 32), min(M2, 32)
    width = (key + value) * _shared_bytes(q)
    fits = lambda: max(N1 + stages * M1, M2 + stages * N2) * width < shared - 4096
    while not fits() and max(N1, M2) > 16:
        if stages > 1:
            stages -= 1
        else:
            M1, N1, M2, N2 = (max(16, n // 2) for n in (M1, N1, M2, N2))
    return M1, N1, M2, N2, warps, stages


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor, f: _Flags,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the backward kernels: dq, dk, dv, dbias and dsinks (empty if not needed)."""
    q, k, v, do, dlse = (x.contiguous() for x in (q, k, v, do, dlse))
    (B, T, Hq, D), (S, Hkv), DV = q.shape, k.shape[1:3], v.shape[3]
    BLOCK_D, BLOCK_DV = _tile_size(D), _tile_size(DV)
    empty = torch.empty_like if f.cu_q is None and S and T else torch.zeros_like
    dq, dk, dv, delta, lse2 = empty(q), empty(k), empty(v), empty(lse), empty(lse)
    dbias, dsinks = q.new_empty(0), q.new_empty(0)
    if bias_grad:
        dbias = torch.zeros(*f.bias.shape[:2], T, S, device=q.device)
    if T:
        _delta_kernel[-(-T // 64), Hq, B](
            o, lse, do, dlse, delta, lse2, T, DV=DV, ROWS=64, BLOCK_DV=BLOCK_DV
        )
    if T and S:
        M1, N1, M2, N2, warps, stages = _backward_tiles(q, f, BLOCK_D, BLOCK_DV)
        Z = _Sizes(Hq, Hkv, Hq // Hkv, D, DV, BLOCK_D, BLOCK_DV, f.causal, f.block_size)
        x, mod = _Saved(q, k, v, do, lse2, delta), _score_mod(f, q, S)
        axes, kwargs = (f.cu_q, f.cu_k, T, S, f.n_sequences), dict(Z=Z, num_warps=warps)
        n_k, n_q = _n_tiles(S, f.cu_k, N1), _n_tiles(T, f.cu_q, M2)
        _backward_kernel[n_k + Hq // Hkv * n_q, Hkv, B](
            x, dq, dk, dv, mod, _block_lists(f), _block_lists(f, True), *axes, n_k, n_q,
            BLOCK_M1=M1, BLOCK_N1=N1, BLOCK_M2=M2, BLOCK_N2=N2, num_stages=stages, **kwargs,
        )  # fmt: skip
        if bias_grad:
            mask = None if f.block_mask is None else f.block_mask.expand(Hq, -1, -1).to(torch.int8)
            strides = None if mask is None else mask.stride()
            batch, heads = dbias.shape[:2]
            _bias_kernel[n_q, heads, batch](
                x, dbias, mod, mask, strides, *axes, Hq // heads, B // batch, BLOCK_M=M2,
                BLOCK_N=N2, num_stages=1, **kwargs,
            )  # fmt: skip
    if bias_grad:
        dbias = dbias.sum_to_size(f.bias.shape).to(f.bias.dtype)
    if f.sinks is not None:
        p = torch.exp(f.sinks.float()[:, None] - lse).masked_fill(lse == -math.inf, 0)
        dsinks = -(p * delta).sum((0, 2)).to(f.sinks.dtype)
    return dq, dk, dv, dbias, dsinks


# --------------------------------------------------------------------------------------------------
# torch.library operators: torch.compile and checkpointing see one node with a registered backward
# --------------------------------------------------------------------------------------------------


custom_op = partial(torch.library.custom_op, mutates_args=())


@custom_op(
    "sheaf::attention_forward",
    schema=f"(Tensor q, Tensor k, Tensor v, {FLAGS}) -> (Tensor, Tensor)",
)
def _forward_op(q, k, v, *flags):
    with torch.cuda.device_of(q):
        return _forward(q, k, v, _Flags(*flags))


@custom_op(
    "sheaf::attention_decode",
    schema=f"(Tensor q, Tensor k, Tensor? v, int latent_dim, int splits, float? fixed_max, "
    f"{FLAGS}) -> (Tensor, Tensor)",
)
def _decode_op(q, k, v, latent_dim, splits, fixed_max, *flags):
    kwargs = dict(pack=True, splits=splits or _n_splits(q, k), latent_dim=latent_dim)
    with torch.cuda.device_of(q):
        return _forward(q, k, v, _Flags(*flags), fixed_max=fixed_max, **kwargs)


def _fake_outputs(q, DV):
    B, T, Hq, _ = q.shape
    return q.new_empty(B, T, Hq, DV), q.new_empty(B, Hq, T, dtype=torch.float32)


_forward_op.register_fake(lambda q, k, v, *_: _fake_outputs(q, v.shape[3]))
_decode_op.register_fake(
    lambda q, k, v, latent_dim, *_: _fake_outputs(q, latent_dim if v is None else v.shape[3])
)


@custom_op(
    "sheaf::attention_backward",
    schema="(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, Tensor dlse, "
    f"bool bias_grad, {FLAGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(q, k, v, o, lse, do, dlse, bias_grad, *flags):
    with torch.cuda.device_of(q):
        return _backward(q, k, v, o, lse, do, dlse, _Flags(*flags), bias_grad)


@_backward_op.register_fake
def _(q, k, v, o, lse, do, dlse, bias_grad, *flags):
    f, like = _Flags(*flags), lambda x: torch.empty_like(x, memory_format=torch.contiguous_format)
    bias = like(f.bias) if bias_grad else q.new_empty(0)
    return like(q), like(k), like(v), bias, q.new_empty(0) if f.sinks is None else like(f.sinks)


def _setup_context(ctx, inputs, output):
    q, k, v, *flags = inputs
    tensors = [x if isinstance(x, Tensor) else None for x in flags]
    ctx.save_for_backward(q, k, v, *output, *tensors)
    ctx.constants = [None if isinstance(x, Tensor) else x for x in flags]


def _autograd_backward(ctx, do, dlse):
    q, k, v, o, lse, *tensors = ctx.saved_tensors
    flags = [c if t is None else t for c, t in zip(ctx.constants, tensors)]
    needs = _Flags(*ctx.needs_input_grad[3:])
    dq, dk, dv, dbias, dsinks = _backward_op(q, k, v, o, lse, do, dlse, needs.bias, *flags)
    grads = _Flags(*[None] * len(flags))
    grads = grads._replace(
        bias=dbias if needs.bias else None, sinks=dsinks if needs.sinks else None
    )
    return dq, dk, dv, *grads


_forward_op.register_autograd(_autograd_backward, setup_context=_setup_context)


# --------------------------------------------------------------------------------------------------
# Public functions
# --------------------------------------------------------------------------------------------------


def _can_use_triton(q: Tensor, v: Tensor, block: int = 0, limit: int = 256) -> bool:
    """Whether the Triton kernels support these inputs on this device; block: of a block mask."""
    ok = triton is not None and (q.is_cuda or INTERPRET) and q.dtype != torch.float64
    ok = ok and not (INTERPRET and q.dtype == torch.bfloat16)  # wrong results in the interpreter
    ok = ok and (block == 0 or block >= 16 and block & (block - 1) == 0)
    return ok and max(q.shape[-1], v.shape[-1]) <= limit


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None,
    window: int | None = None, softcap: float | None = None, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, bias: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, prefix: Tensor | None = None,
    block_mask: BlockMask | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Exact attention: o (B, T, Hq, Dv), or (o, lse) with return_lse, lse (B, Hq, T).

    q (B, T, Hq, D), k (B, S, Hkv, D), v (B, S, Hkv, Dv) of one dtype; query head h uses key head
    h // (Hq / Hkv). The flags are those of the head of this file. scale: D ** -0.5 if None.
    alibi_slopes, sinks: (Hq,). bias: broadcasts to (B, Hq, T, S). prefix (B,) int32: the first
    prefix[b] keys are visible to all queries. Gradients for q, k, v, sinks and bias, also through
    lse; deterministic.

    Packed sequences: q (N, Hq, D), k (M, Hkv, D), cu_seqlens int32 on the same device, cu_seqlens_k
    defaulting to cu_seqlens_q; lse (Hq, N), bias over (Hq, N, M), one prefix per sequence. No
    padding, and lengths are never read on the host. ValueError names the invalid argument.
    """
    q, k, v, f = _prepare(
        q, k, v, causal=causal, scale=scale, window=window, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, bias=bias, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, prefix=prefix, block_mask=block_mask,
    )  # fmt: skip
    if not _can_use_triton(q, v, f.block_size):
        return _run_torch(_chunked, q, k, v, f, return_lse)
    return _output(*_forward_op(q, k, v, *f), f, return_lse)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor | None, lengths: Tensor | None = None, *,
    latent_dim: int | None = None, n_splits: int | None = None, fixed_max: float | None = None,
    return_lse: bool = False, **flags: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of a few new queries over a KV cache: o (B, T, Hq, Dv). Not differentiable.

    k (B, S, Hkv, D), v (B, S, Hkv, Dv): a dense cache with any strides. Sequence b uses its first
    lengths[b] slots (int32; None: all S); the T queries are its last tokens. With latent_dim
    (absorbed MLA) v is None: the values are the first latent_dim columns of k, read once. flags:
    causal, scale, window, softcap, alibi_slopes, sinks, bias, prefix, as in flash_attention.

    The keys of a sequence are split over n_splits programs (flash-decoding); None: enough to fill
    the GPU. With a fixed n_splits the output is batch-invariant, bit for bit.

    fixed_max (FlashDecoding++, arXiv:2311.01282, 3): the splits sum exp(s - fixed_max) without a
    running maximum and without rescaling, and the merge only adds. Exact for any input: where lse -
    fixed_max of a row is above 11 (fp16) or 60 (bf16, fp32) in a split, or below 0 or -60 over all
    splits, a second launch, which otherwise returns at once, computes the row again in that split
    with the running maximum. Choose fixed_max from the lse of typical inputs. When it loses: many
    rows are out of range and their keys are read twice, or the cache is so short that the second
    launch costs more than is saved (speed: not measured yet). No effect with one split, with 128 or
    more rows (queries * heads) per key head, and without Triton.
    """
    ok = (v is None) == (latent_dim is not None)
    _check(ok, "decode_attention requires either v or latent_dim")
    ok = latent_dim is None or 0 < latent_dim <= k.shape[-1]
    _check(ok, f"latent_dim must be from 1 to {k.shape[-1]} (k's head dim), not {latent_dim}")
    _check(n_splits is None or n_splits > 0, f"n_splits must be positive, not {n_splits}")
    ok = fixed_max is None or math.isfinite(fixed_max)
    _check(ok, f"fixed_max must be finite, not {fixed_max}")
    values = k[..., :latent_dim] if v is None else v
    q, k, values, f = _prepare(q, k, values, lengths=lengths, **flags)
    ok = f.cu_q is None and f.block_mask is None
    _check(ok, "decode_attention does not support cu_seqlens_q and block_mask")
    if not _can_use_triton(q, values, limit=1024):
        return _run_torch(_chunked, q, k, values, f, return_lse)
    v_in_k = v is None and _split_dim(q.shape[3])[0] == latent_dim
    values, latent_dim = (None, latent_dim) if v_in_k else (values, 0)
    o, lse = _decode_op(q, k, values, latent_dim, n_splits or 0, fixed_max, *f)
    return _output(o, lse, f, return_lse)


def _n_splits(q: Tensor, k: Tensor) -> int:
    """Splits for two programs per SM, with at least 256 keys each."""
    (B, T, Hq, _), (S, Hkv) = q.shape, k.shape[1:3]
    programs = B * Hkv * -(-T * Hq // Hkv // 64)
    wanted = -(-2 * _device_properties(q.device.index)[0] // max(1, programs))
    # a power of two: fewer kernels to compile
    return 1 << (max(1, min(wanted, S // 256, 64)).bit_length() - 1)


def pack(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Pack token sequences into one row without padding: tokens (1, N), positions (N,), starting at
    0 in each sequence, and cu_seqlens (n + 1,) int32."""
    _check(len(sequences) > 0, "pack: sequences is empty")
    device = sequences[0].device
    lengths = torch.tensor([0] + [len(s) for s in sequences])
    positions = torch.cat([torch.arange(len(s), device=device) for s in sequences])
    cu_seqlens = lengths.cumsum(0).to(device, torch.int32)
    return torch.cat(list(sequences))[None], positions, cu_seqlens


def as_attend(
    cache: Any = None, *, cu_seqlens: Tensor | None = None, limit: int | None = None,
    fixed_max: float | None = None,
) -> Callable[..., Tensor]:  # fmt: skip
    """The model's attend callable, (spec, q, k, v, positions) -> o, backed by this file's kernels.

    Without arguments: causal attention over the new tokens, for training. With cu_seqlens: the
    batch is one row of packed sequences. With a cache (any object whose update(spec, k, v,
    positions, limit) stores the new tokens and returns all keys and values, slot = position):
    decode and chunked prefill; positions of a row must be consecutive and below `limit`. With
    spec.sparse a block mask is used for whole sequences, else a bias, which skips nothing.
    fixed_max: decode_attention's.
    """
    _check(cache is None or cu_seqlens is None, "cache cannot be combined with cu_seqlens")

    def attend(spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        if torch.is_autocast_enabled(q.device.type):  # as torch's own attention does
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        flags = dict(
            scale=spec.scale, window=spec.window, softcap=spec.softcap,
            alibi_slopes=spec.alibi_slopes, sinks=spec.sinks,
        )  # fmt: skip
        if cache is not None:
            k, v = cache.update(spec, k, v, positions, limit)
        T, S, sparse = q.shape[1], k.shape[1], getattr(spec, "sparse", None)
        if sparse is not None and T == S:
            starts = torch.arange(0, S, sparse.block_size, device=q.device)
            flags["block_mask"] = BlockMask(sparse.mask(starts, starts), sparse.block_size)
        elif sparse is not None:
            mask = sparse.mask(positions, torch.arange(S, device=q.device))
            flags["bias"] = q.new_zeros(()).where(mask, -math.inf).view(-1, 1, T, S)
        if cu_seqlens is not None:
            _check(len(q) == 1, f"cu_seqlens requires a batch of 1 packed row, not {len(q)}")
            return flash_attention(q[0], k[0], v[0], cu_seqlens_q=cu_seqlens, **flags)[None]
        if cache is None or "block_mask" in flags:
            return flash_attention(q, k, v, causal=getattr(spec, "causal", True), **flags)
        lengths = (positions[..., -1] + 1).to(torch.int32).expand(len(q)).contiguous()
        v = v if spec.latent_dim is None else None
        flags |= dict(latent_dim=spec.latent_dim, fixed_max=fixed_max)
        return decode_attention(q, k, v, lengths, **flags)

    attend.qk_history = getattr(cache, "qk_history", None)
    return attend


# --------------------------------------------------------------------------------------------------
# FP8
# --------------------------------------------------------------------------------------------------


def hadamard_matrix(n: int) -> Tensor:
    """(n, n) orthonormal, entries +-n ** -0.5 (Sylvester); n a power of two."""
    ok = n > 0 and n & (n - 1) == 0
    _check(ok, f"a Hadamard matrix requires a power of two, not {n}: pass hadamard=False")
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h * n**-0.5


def quantize_blocks(
    x: Tensor, *, hadamard: bool = False, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """x (B, T, H, D) -> e4m3 of the same shape and scales (B, H, ceil(T / 128)) fp32: one scale per
    128 rows of a head, which maps their largest magnitude to 448. hadamard: rotate the rows first.
    transposed: the result is contiguous along T, in memory for a multiple of 128 rows."""
    T, D = x.shape[1], x.shape[3]
    use_kernel = x.is_cuda and triton is not None  # the interpreter's casts to e4m3 do not round
    if hadamard:
        _check(D & (D - 1) == 0, f"hadamard=True requires a head dim of a power of two, not {D}")
        size = (FP8_BLOCK + D) * D * x.element_size()  # the rows and the matrix
        if not use_kernel or size > _device_properties(x.device.index)[1]:
            hadamard = False
            with torch.autocast(x.device.type, enabled=False):
                x = x.float() @ hadamard_matrix(D).to(x.device)
    if use_kernel:
        return _quantize(x, hadamard, transposed)
    rows = F.pad(x.float(), (0, 0, 0, 0, 0, -T % FP8_BLOCK)).unflatten(1, (-1, FP8_BLOCK))
    scale = rows.abs().amax((2, 4), keepdim=True).clamp(min=1e-12) / 448
    x8 = (rows / scale).to(torch.float8_e4m3fn).flatten(1, 2)[:, :T]
    if transposed:
        padded = F.pad(x8, (0, 0, 0, 0, 0, -T % FP8_BLOCK)).permute(0, 2, 3, 1).contiguous()
        x8 = padded.permute(0, 3, 1, 2)[:, :T]
    return x8, scale[:, :, 0, :, 0].transpose(1, 2).contiguous()


def _quantize(x: Tensor, hadamard: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    """quantize_blocks by one kernel."""
    (B, T, H, D), blocks = x.shape, -(-x.shape[1] // FP8_BLOCK)
    shape = (B, H, D, blocks * FP8_BLOCK) if transposed else x.shape
    x8 = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    if transposed:
        x8 = x8.permute(0, 3, 1, 2)[:, :T]
    scale = torch.empty(B, H, blocks, device=x.device)
    with torch.cuda.device_of(x):
        _quantize_kernel[blocks, H, B](
            x, x8, scale, x.stride(), x8.stride(), T, D=D, HADAMARD=hadamard, BLOCK=FP8_BLOCK,
            BLOCK_D=_tile_size(D), num_warps=8,
        )  # fmt: skip
    return x8, scale


def flash_attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None,
    hadamard: bool = True,
) -> Tensor:  # fmt: skip
    """flash_attention with q, k, v and the probabilities in e4m3, forward only (FlashAttention-3,
    arXiv:2407.08608, 3.3): o (B, T, Hq, Dv) of q's dtype.

    One scale per 128 rows of a head. With hadamard, q and k are rotated first: q.k is unchanged and
    outlier channels are spread over all channels, so that they no longer determine the scale.
    """
    q, k, v, f = _prepare(q, k, v, causal=causal, scale=scale)
    dtype = q.dtype
    (q, qs), (k, ks) = (quantize_blocks(x, hadamard=hadamard) for x in (q, k))
    # transposed: the layout that the tensor cores read in the second matmul
    v, vs = quantize_blocks(v, transposed=True)
    if not _can_use_triton(q, v):
        return _fp8_reference(q, k, v, f, (qs, ks, vs)).to(dtype)
    with torch.cuda.device_of(q):
        return _forward(q, k, v, f, scales=(qs, ks, vs), dtype=dtype)[0]


def _fp8_reference(
    q: Tensor, k: Tensor, v: Tensor, f: _Flags, scales: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """flash_attention_fp8 with the same rounding, all scores in memory."""
    q, k, v = (
        x.float() * s.transpose(1, 2).repeat_interleave(FP8_BLOCK, 1)[:, : x.shape[1], :, None]
        for x, s in zip((q, k, v), scales)
    )
    s = _scores(q, k, f, slice(0, q.shape[1]), slice(0, k.shape[1]))
    top = F.pad(s, (0, 1), value=-math.inf).amax(-1, keepdim=True)  # padded: there may be no keys
    p = torch.exp(s - top.clamp(min=torch.finfo(s.dtype).min))
    p8 = (p * 256).to(torch.float8_e4m3fn).float() / 256
    return (_values(p8, v) / p.sum(-1, keepdim=True).clamp(min=1e-30)).transpose(1, 2)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    qkv = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2)


def main() -> None:
    """Gradients == the reference's; milliseconds beside SDPA; on a GPU also decode in GB/s."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    cuda = torch.cuda.is_available() and not INTERPRET
    device, T = "cuda" if cuda else "cpu", 8192 if cuda else 64 if INTERPRET else 2048
    make = lambda *shape, dtype=None: torch.randn(*shape, dtype=dtype, device=device)
    small = [make(2, 53, heads, 32).requires_grad_() for heads in (4, 2, 2)]
    got, want = (
        torch.autograd.grad(attend(*small, window=30, softcap=5.0).sin().sum(), small)
        for attend in (flash_attention, attention_reference)
    )
    error = max((a - b).abs().max().item() for a, b in zip(got, want))
    backend = "Triton" if _can_use_triton(small[0], small[2]) else "plain torch"
    print(f"flash_attention, {backend}: error of the gradients {error:.1e}")
    assert error < 1e-3, "flash_attention is wrong on this device"
    ms = lambda run: 1e3 * Timer("run()", globals=dict(run=run)).blocked_autorange().median
    dtype = torch.bfloat16 if cuda else torch.float32
    q, k, v = (make(1, T, 8, 64, dtype=dtype).requires_grad_() for _ in range(3))
    print(f"causal, B 1, T {T}, H 8, D 64, {dtype}: ms forward, ms forward + backward")
    for attend in (flash_attention, _sdpa):
        step = lambda: torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
        forward = ms(torch.no_grad()(lambda: attend(q, k, v)))
        print(f"{attend.__name__:>18}{forward:>10.2f}{ms(step):>10.2f}")
    if cuda:
        q, k, v = (make(16, t, h, 128, dtype=dtype) for t, h in ((1, 32), (8192, 8), (8192, 8)))
        out, gigabytes = torch.empty_like(k), (k.nbytes + v.nbytes) / 1e9
        decode, copy = ms(lambda: decode_attention(q, k, v)), ms(lambda: out.copy_(k))
        print(f"decode {gigabytes / decode * 1e3:.0f} GB/s, copy {gigabytes / copy * 1e3:.0f} GB/s")


if __name__ == "__main__":
    main()
