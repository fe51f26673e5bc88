"""Flash attention in Triton: forward, backward and decode, with the plain torch it is equal to.

Attention is softmax(q k^T) v. Written so, it needs the T x S matrix of scores in memory, and it is
the traffic of that matrix, not the arithmetic, that takes the time. The way out is climbed here in
four steps, each a function, each proved equal to the one before:

    attention_reference   the definition: all scores at once, every feature, fp32 or fp64
    online_attention      one pass over blocks of keys with a running maximum m, sum l and output
                          (Milakov & Gimelshein, arXiv:1805.02867): no row needs all its scores
    chunked_attention     blocks of queries too, recomputed in the backward pass (Rabe & Staats,
                          arXiv:2112.05682): memory linear in T + S, still plain torch
    flash_attention       the same loop as one Triton kernel whose tiles never leave the chip
                          (FlashAttention 1 and 2, arXiv:2205.14135, 2307.08691)

and one identity carries all the rest: with lse = m + log l beside its output, attention over a part
of the keys can be merged with attention over another (`merge_attention`). Splitting the keys of a
decode step over the whole GPU (flash-decoding), ring attention and shared prefixes are that merge.

What a row of scores is, in this order:  scale * q.k  ->  softcap * tanh(. / softcap)  ->  + bias
- alibi_slope * (i - j)  ->  mask. Query t of T stands at i = t + S - T, so that the last query sees
the last key; it sees keys j <= i (causal) or j < prefix, with i - j < window. A sink is one more
logit in the softmax of its head, without a value. A row that sees nothing is 0, its lse -inf.

Grouped-query attention, packed sequences (cu_seqlens), windows, softcap, ALiBi, sinks, bias, prefix
and block-sparse masks compose freely (but block masks are not for packed sequences), forward and
backward, with gradients to sinks, bias and through lse; any T and S, head dims to 256, of q and v
apart (192 / 128). A feature that is not asked for is not in the compiled kernel. The backward pass
writes every gradient from one program, without atomics: the same bits on every run.

Costs and losses. The backward computes scores twice (7 matrix products where 5 would do): the price
of determinism. A learned bias costs a third pass. Without Triton or a GPU every call here runs
chunked_attention: exact and lean, but on a CPU slower than torch's own fused kernel.

Hook: `as_attend()` is the model's attend callable, for training, packed prompts and KV caches.
Copied alone, this file needs torch, and triton for the kernels; `python attention.py` checks
itself and prints a benchmark. TRITON_INTERPRET=1 runs the kernels on a CPU, slowly, for tests.

Shapes: B batch, T queries, S keys, Hq / Hkv query / key-value heads, D / Dv head dims; N packed
tokens. q (B, T, Hq, D), k (B, S, Hkv, D), v (B, S, Hkv, Dv), o (B, T, Hq, Dv), lse (B, Hq, T).
Packed: q (N, Hq, D) and so on, lse (Hq, N); sequence n is rows cu_seqlens[n] to cu_seqlens[n + 1].
"""

from __future__ import annotations

import math
import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, Windows: chunked_attention serves every call
    triton = None

INTERPRET = triton is not None and triton.knobs.runtime.interpret
FP8_BLOCK = 128  # rows that share a scale

# --------------------------------------------------------------------------------------------------
# What is asked for
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockMask:
    """A mask by tiles: scores of query block a and key block b are computed where visit[a, b] (or
    visit[h, a, b] for each query head), and cost nothing elsewhere. visit: bool, (ceil(T / block),
    ceil(S / block)); block: 16 or more, a power of two. Joins the other masks by "and"."""

    visit: Tensor
    block: int = 128


def sparse_blocks(
    n_q: int, n_k: int, *, local: int = 0, global_: int = 0, stride: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:  # fmt: skip
    """Blocks of the usual sparse patterns (Sparse Transformers, arXiv:1904.10509; BigBird,
    arXiv:2007.14062), to be united with | : fewer than `local` blocks away; the first `global_`
    blocks, as keys and as queries; every `stride`-th block. The last query block stands at the last
    key block. bool (n_q, n_k)."""
    b = torch.arange(n_k, device=device)
    a = torch.arange(n_k - n_q, n_k, device=device)[:, None]
    visit = ((a - b).abs() < local) | (b < global_) | (a < global_)
    return visit | ((a - b) % stride == 0) if stride else visit


class _Flags(NamedTuple):
    """The checked arguments of one call, as every implementation and operator here takes them."""

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
    lengths: Tensor | None  # (B,) int32: keys in use, for decode
    visit: Tensor | None  # (H or 1, query blocks, key blocks) bool
    block: int

    def cap(self) -> int:
        """A tile may not be larger than a block of the block mask."""
        return 1024 if self.visit is None else self.block


FLAGS = (
    "bool causal, float scale, int? window, float? softcap, Tensor? slopes, Tensor? sinks, "
    "Tensor? bias, Tensor? cu_q, Tensor? cu_k, Tensor? prefix, Tensor? lengths, Tensor? visit, "
    "int block"
)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _broadcasting(bias: Tensor, full: tuple[int, ...]) -> Tensor:
    """bias with all four dims, each 1 or that of (B, Hq, T, S)."""
    _check(bias.dim() <= 4, f"bias has {bias.dim()} dims, at most 4 are (B, Hq, T, S)")
    bias = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
    ok = all(n in (1, whole) for n, whole in zip(bias.shape, full))
    _check(ok, f"bias {tuple(bias.shape)} does not broadcast to {full}")
    return bias


def _visit(mask: BlockMask, sizes: tuple[int, int, int]) -> Tensor:
    """The tiles of a block mask, (Hq or 1, query blocks, key blocks)."""
    (Hq, T, S), n, visit = sizes, mask.block, mask.visit
    _check(n > 0, f"block_mask: block must be positive, not {n}")
    want = (-(-T // n), -(-S // n))
    ok = visit.dtype == torch.bool and visit.dim() in (2, 3) and visit.shape[-2:] == want
    ok = ok and (visit.dim() == 2 or len(visit) in (1, Hq))
    _check(ok, f"block_mask: visit must be bool {want}, or that for each query head")
    return visit.reshape(-1, *want).contiguous()


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None,
    window: int | None = None, softcap: float | None = None, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, bias: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, prefix: Tensor | None = None,
    block_mask: BlockMask | None = None, lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, _Flags]:  # fmt: skip
    """q, k, v in four dims (packed ones as a batch of one) and the flags. ValueError names the
    argument that is wrong."""
    packed = cu_seqlens_q is not None
    _check(packed or cu_seqlens_k is None, "cu_seqlens_k needs cu_seqlens_q")
    for name, x in (("q", q), ("k", k), ("v", v)):
        want = "(N, H, D), packed" if packed else "(B, T, H, D)"
        _check(x.dim() == 4 - packed, f"{name} must be {want}, not of shape {tuple(x.shape)}")
        _check(x.dtype == q.dtype, f"{name} is {x.dtype}, q is {q.dtype}: they must be the same")
    _check(q.dtype.is_floating_point, f"q must be floating point, not {q.dtype}")
    cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    if packed:
        q, k, v = q[None], k[None], v[None]
        for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_k)):
            ok = cu.dim() == 1 and len(cu) > 1 and cu.dtype == torch.int32
            _check(ok, f"{name} must be (sequences + 1,) int32, not {cu.dtype} {tuple(cu.shape)}")
        _check(len(cu_k) == len(cu_seqlens_q), "cu_seqlens_q and cu_seqlens_k differ in length")
        _check(block_mask is None, "block_mask is not for packed sequences (cu_seqlens_q)")
    B, T, Hq, D = q.shape
    S, Hkv = k.shape[1:3]
    _check(k.shape[0] == B and v.shape[:3] == k.shape[:3], "q, k and v differ in batch, or k and v")
    _check(k.shape[3] == D, f"k has head dim {k.shape[3]}, q has {D}")
    _check(Hkv > 0 and Hq % Hkv == 0, f"q has {Hq} heads, no multiple of k's {Hkv}")
    scale = D**-0.5 if scale is None else float(scale)
    _check(scale > 0 and math.isfinite(scale), f"scale must be positive, not {scale}")
    ok = window is None or (isinstance(window, int) and window >= 1)
    _check(ok, f"window must be an integer, 1 or more, not {window}")
    ok = softcap is None or (softcap > 0 and math.isfinite(softcap))
    _check(ok, f"softcap must be positive, not {softcap}")
    for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        _check(x is None or x.shape == (Hq,), f"{name} must be ({Hq},), one for each head of q")
    n = len(cu_k) - 1 if packed else B
    for name, x in (("prefix", prefix), ("lengths", lengths)):
        ok = x is None or (x.shape == (n,) and x.dtype == torch.int32)
        _check(ok, f"{name} must be int32 ({n},), one for each sequence")
    bias = None if bias is None else _broadcasting(bias, (B, Hq, T, S))
    visit = None if block_mask is None else _visit(block_mask, (Hq, T, S)).to(q.device)
    size = 128 if block_mask is None else block_mask.block
    slopes = alibi_slopes
    if slopes is not None:
        slopes = slopes.detach().to(torch.promote_types(q.dtype, torch.float32))
    vectors = slopes, sinks, cu_seqlens_q, cu_k, prefix, lengths
    for x in (k, v, bias, *vectors):
        ok = x is None or x.device == q.device
        _check(ok, f"q is on {q.device}, another argument on {None if ok else x.device}")
    slopes, sinks, cu_q, cu_k, prefix, lengths = (
        x if x is None else x.contiguous() for x in vectors
    )
    flags = _Flags(
        bool(causal), scale, window, softcap, slopes, sinks, bias,
        cu_q, cu_k, prefix, lengths, visit, size,
    )  # fmt: skip
    return q, k, v, flags


# --------------------------------------------------------------------------------------------------
# The ladder, in plain torch
# --------------------------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, f: _Flags, rows: slice, cols: slice) -> Tensor:
    """Masked scores of some queries and some keys: (B, Hq, rows, cols), fp32, or fp64 if q is."""
    (B, T, Hq, D), (S, Hkv) = q.shape, k.shape[1:3]
    dtype, device = torch.promote_types(q.dtype, torch.float32), q.device
    q, k = q[:, rows].to(dtype), k[:, cols].to(dtype)
    # query heads that share a key head become rows of one product: no key is copied
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
        s = s - f.slopes.to(dtype)[:, None, None] * (i - j)
    whole = f.lengths is None and f.visit is None
    whole = whole and (not f.causal or cols.stop <= rows.start + S - T + 1)
    if whole and (f.window is None or rows.stop + S - T - cols.start <= f.window):
        return s
    seen = j < ends.view(-1, 1, 1, 1)
    if f.causal:
        before = j <= i
        seen = seen & (before if f.prefix is None else before | (j < f.prefix.view(-1, 1, 1, 1)))
    if f.window is not None:
        seen = seen & (i - j < f.window)
    if f.visit is not None:
        t = torch.arange(rows.start, rows.stop, device=device)
        seen = seen & f.visit[:, t // f.block][..., j.flatten() // f.block]
    return s.masked_fill(~seen, -math.inf)


def _values(p: Tensor, v: Tensor) -> Tensor:
    """p (B, Hq, T, S) times v (B, S, Hkv, Dv) -> (B, Hq, T, Dv)."""
    B, Hq, T, S = p.shape
    o = p.reshape(B, v.shape[2], Hq // v.shape[2] * T, S) @ v.transpose(1, 2).to(p.dtype)
    return o.view(B, Hq, T, v.shape[3])


def _naive(q: Tensor, k: Tensor, v: Tensor, f: _Flags) -> tuple[Tensor, Tensor]:
    """softmax(scores) v, as it is written: o (B, Hq, T, Dv), lse (B, Hq, T)."""
    s = _scores(q, k, f, slice(0, q.shape[1]), slice(0, k.shape[1]))
    if f.sinks is not None:
        sinks = f.sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        s = torch.cat((s, sinks), -1)
    empty = (s == -math.inf).all(-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)  # torch's softmax of nothing is NaN
    lse = s.logsumexp(-1).masked_fill(empty[..., 0], -math.inf)
    p = s.softmax(-1).masked_fill(empty, 0.0)
    return _values(p[..., : k.shape[1]], v), lse


State = tuple[Tensor, Tensor, Tensor]  # sum of p v (B, Hq, T, Dv), m and l (B, Hq, T)


def _absorb(state: State, s: Tensor, v: Tensor) -> State:
    """The online softmax: take one more block of scores and values into (acc, m, l), where l = sum
    exp(s - m), acc = sum exp(s - m) v and m = max s over what was taken so far."""
    acc, m, l = state
    m_new = torch.maximum(m, s.detach().amax(-1))
    base = m_new.clamp(min=torch.finfo(s.dtype).min)
    p, alpha = torch.exp(s - base[..., None]), torch.exp(m - base)
    return acc * alpha[..., None] + _values(p, v), m_new, l * alpha + p.sum(-1)


def _online(
    q: Tensor, k: Tensor, v: Tensor, f: _Flags, rows: slice, chunk: int
) -> tuple[Tensor, Tensor]:
    """Some queries over all the keys they can see, block by block."""
    B, T, Hq, _ = q.shape
    S, t = k.shape[1], rows.stop - rows.start
    first, last = 0, S
    if f.lengths is None and f.causal and f.prefix is None:
        last = max(0, min(S, rows.stop + S - T))
    if f.lengths is None and f.window is not None:
        first = max(0, rows.start + S - T - f.window + 1)
    none = _scores(q, k, f, rows, slice(0, 0))
    acc, dtype = _values(none, v[:, :0]), none.dtype  # zeros, which autograd can follow
    m = none.new_full((B, Hq, t), -math.inf)
    l = torch.zeros_like(m)
    if f.sinks is not None:  # a score that was taken already, whose value is 0
        m, l = f.sinks.detach().to(dtype)[:, None].expand_as(m), l + 1
        l = l * torch.exp(f.sinks.to(dtype)[:, None] - m)
    for start in range(first // chunk * chunk, last, chunk):
        cols = slice(start, min(start + chunk, last))
        if f.visit is None or _visited(f, rows, cols):
            values = v[:, cols]
            if f.lengths is not None:  # 0 * what an unused slot holds may be NaN
                j = torch.arange(cols.start, cols.stop, device=q.device)
                unused = j >= f.lengths[:, None]
                values = values.masked_fill(unused[:, :, None, None], 0.0)
            acc, m, l = _absorb((acc, m, l), _scores(q, k, f, rows, cols), values)
    empty = l == 0
    l = l.masked_fill(empty, 1)
    lse = (m.clamp(min=torch.finfo(dtype).min) + l.log()).masked_fill(empty, -math.inf)
    return acc / l[..., None], lse


def _visited(f: _Flags, rows: slice, cols: slice) -> bool:
    a, b = (slice(s.start // f.block, -(-s.stop // f.block)) for s in (rows, cols))
    return bool(f.visit[:, a, b].any())


def _chunked(q: Tensor, k: Tensor, v: Tensor, f: _Flags, chunk: int = 256) -> tuple[Tensor, Tensor]:
    """_online for one block of queries after another; the backward pass runs each again."""
    dtype = torch.promote_types(q.dtype, torch.float32)  # in which gradients of blocks are summed
    sinks, bias = (x if x is None else x.to(dtype) for x in (f.sinks, f.bias))
    f = f._replace(sinks=sinks, bias=bias)
    parts = []
    for start in range(0, q.shape[1], chunk):
        args = q, k, v, f, slice(start, min(start + chunk, q.shape[1])), chunk
        if torch.is_grad_enabled():
            parts.append(checkpoint(_online, *args, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_online(*args))
    if not parts:
        return _naive(q, k, v, f)
    return torch.cat([o for o, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


Core = Callable[[Tensor, Tensor, Tensor, _Flags], tuple[Tensor, Tensor]]


def _packed(core: Core, q: Tensor, k: Tensor, v: Tensor, f: _Flags) -> tuple[Tensor, Tensor]:
    """One sequence of a packed row after another; rows that belong to none are 0 and -inf."""
    cu_q, cu_k = f.cu_q.tolist(), f.cu_k.tolist()
    Hq, N, Dv = q.shape[2], q.shape[1], v.shape[3]
    parts = []
    for n, (q0, q1, k0, k1) in enumerate(zip(cu_q, cu_q[1:], cu_k, cu_k[1:])):
        bias = f.bias
        if bias is not None:
            bias = bias.expand(1, -1, N, k.shape[1])[:, :, q0:q1, k0:k1]
        prefix = None if f.prefix is None else f.prefix[n : n + 1]
        one = f._replace(cu_q=None, cu_k=None, bias=bias, prefix=prefix)
        parts.append(core(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], one))
    dtype = torch.promote_types(q.dtype, torch.float32)
    o, lse = (torch.cat(x, 2) for x in zip(*parts))
    rest = N - o.shape[2]
    o = torch.cat((o, o.new_zeros(1, Hq, rest, Dv)), 2)
    return o, torch.cat((lse, lse.new_full((1, Hq, rest), -math.inf, dtype=dtype)), 2)


def _plain(core: Core, q: Tensor, k: Tensor, v: Tensor, f: _Flags) -> tuple[Tensor, Tensor]:
    """A core's answer in the public layout: o (B, T, Hq, Dv) of q's dtype, lse (B, Hq, T)."""
    with torch.autocast(q.device.type, enabled=False):  # it would turn fp32 products into bf16
        o, lse = core(q, k, v, f) if f.cu_q is None else _packed(core, q, k, v, f)
    return o.transpose(1, 2).to(q.dtype), lse


def _answer(o: Tensor, lse: Tensor, f: _Flags, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    if f.cu_q is not None:
        o, lse = o[0], lse[0]
    return (o, lse) if return_lse else o


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **flags: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Step 1, the definition: flash_attention's arguments, all scores in memory, fp32 (fp64 for
    fp64 inputs), gradients by torch."""
    q, k, v, f = _prepare(q, k, v, **flags)
    return _answer(*_plain(_naive, q, k, v, f), f, return_lse)


def online_attention(
    q: Tensor, k: Tensor, v: Tensor, *, chunk: int = 256, return_lse: bool = False, **flags: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Step 2: one pass over the keys, `chunk` of them at a time; all queries at once."""
    q, k, v, f = _prepare(q, k, v, **flags)
    core = lambda q, k, v, f: _online(q, k, v, f, slice(0, q.shape[1]), chunk)
    return _answer(*_plain(core, q, k, v, f), f, return_lse)


def chunked_attention(
    q: Tensor, k: Tensor, v: Tensor, *, chunk: int = 256, return_lse: bool = False, **flags: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Step 3: blocks of queries and of keys, each block of queries recomputed in the backward pass.
    Memory beyond inputs and outputs: B * Hq * chunk * S scores there, chunk * chunk forward."""
    q, k, v, f = _prepare(q, k, v, **flags)
    return _answer(*_plain(partial(_chunked, chunk=chunk), q, k, v, f), f, return_lse)


def merge_attention(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys as one: o (B, T, Hq, Dv), lse (B, Hq, T), or packed.

        lse = log(exp lse1 + exp lse2),   o = exp(lse1 - lse) o1 + exp(lse2 - lse) o2

    Associative and differentiable. A sink belongs to one of the two."""
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
# What the kernels share
# --------------------------------------------------------------------------------------------------

# A GPU has an instruction for exp2, so logits are kept in base 2: multiplied by log2(e)
LOG2E = tl.constexpr(math.log2(math.e)) if triton else None
# Of fp32 inputs alone: three products of tf32 are as exact as fp32 needs, on the matrix units
PRECISION = tl.constexpr("ieee" if INTERPRET else "tf32x3") if triton else None
jit = triton.jit if triton else (lambda fn=None, **_: fn or (lambda fn: fn))


# How q.k becomes a logit: bias (B, Hq, T, S) and its strides, ALiBi slopes (Hq,) fp32, prefixes
# (sequences,) int32. A feature that is None compiles to nothing.
_Rules = namedtuple(
    "_Rules", "scale softcap window bias_ptr bias_b bias_h bias_t bias_s slopes_ptr prefix_ptr"
)
# Of each block of one axis the blocks of the other that are visited, (H, blocks, n), and how many,
# (H, blocks); blocks is 0 where all heads share one mask
_Lists = namedtuple("_Lists", "list_ptr count_ptr blocks n")
# Constants of the backward kernels; GROUP = Hq / Hkv, SPARSE = block of the block mask or 0
_Sizes = namedtuple("_Sizes", "HQ GROUP D DV BLOCK_D BLOCK_DV CAUSAL SPARSE")


@jit
def _locate(pid, axes, BY_KEY: tl.constexpr, BLOCK: tl.constexpr):
    """The tile of queries (of keys) that program pid owns: its sequence, its first row there, and
    where the sequence's queries and keys begin and how many there are.

    Packed, sequence n owns tiles cu[n] // BLOCK + n and on: room for all of its rows, found without
    asking the device how long it is. A tile past the end has no rows."""
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
    """The tiles of keys that queries i_first..i_last see: [first, inner) in part, the window ends
    there; [inner, outer) whole; [outer, last) in part, the diagonal or the end is there."""
    first, inner, end, whole = 0, 0, k_len, k_len
    if CAUSAL:
        end = tl.minimum(k_len, tl.maximum(i_last + 1, prefix))
        whole = tl.minimum(k_len, tl.maximum(i_first + 1, prefix))
    if window is not None:
        first = tl.maximum(i_first - window + 1, 0) // BLOCK
        inner = tl.cdiv(tl.maximum(i_last - window + 1, 0), BLOCK)
    last = tl.cdiv(tl.maximum(end, 0), BLOCK)
    inner = tl.minimum(inner, last)
    return first, inner, tl.maximum(inner, tl.maximum(whole, 0) // BLOCK), last


@jit
def _query_tiles(
    j_first, j_last, q_len, offset, prefix, window, CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):
    """The tiles of queries that see keys j_first..j_last: in part, whole, in part."""
    begin, whole, end, whole_end = 0, 0, q_len, q_len
    if CAUSAL:
        begin = tl.maximum(tl.where(j_first < prefix, 0, j_first - offset), 0)
        whole = tl.maximum(tl.where(j_last < prefix, 0, j_last - offset), 0)
    if window is not None:
        end = tl.minimum(q_len, j_last + window - offset)
        whole_end = tl.minimum(q_len, j_first + window - offset)
    last = tl.cdiv(tl.maximum(end, 0), BLOCK)
    inner = tl.minimum(tl.cdiv(whole, BLOCK), last)
    return begin // BLOCK, inner, tl.maximum(inner, tl.maximum(whole_end, 0) // BLOCK), last


@jit
def _listed(lists, head, row, SPARSE: tl.constexpr, BLOCK: tl.constexpr):
    """A block mask's list for a row of one axis, and its length in tiles of the other."""
    at = head * lists.blocks + row // SPARSE
    return lists.list_ptr + at * lists.n, tl.load(lists.count_ptr + at) * (SPARSE // BLOCK)


@jit
def _start(n, list_ptr, SPARSE: tl.constexpr, BLOCK: tl.constexpr):
    """First row of the n-th tile that is visited."""
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
    """A tile (ROWS, COLS) from ptr on; zero past WIDTH columns and, with CHECK, past n_rows."""
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    ptrs = ptr + r * stride + c * stride_c
    if CHECK and WIDTH < COLS:
        return tl.load(ptrs, mask=(r < n_rows) & (c < WIDTH), other=0.0)
    elif CHECK:
        return tl.load(ptrs, mask=r < n_rows, other=0.0)
    elif WIDTH < COLS:
        return tl.load(ptrs, mask=c < WIDTH, other=0.0)
    else:
        return tl.load(ptrs)


@jit
def _store(ptr, x, stride, n_rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr):
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    mask = (r < n_rows) & (c < WIDTH)
    tl.store(ptr + r * stride + c, x.to(ptr.dtype.element_ty), mask=mask)


@jit
def _terms(rules, b, seq, head, q_start, k_start, q_len, k_len):
    """What the logits of a head need beside rules: (offset, keys, prefix, slope, its bias)."""
    head = head.to(tl.int64)  # head times stride may pass 2^31
    prefix, slope, bias_ptr = 0, 0.0, 0
    if rules.prefix_ptr is not None:
        prefix = tl.load(rules.prefix_ptr + b + seq)
    if rules.slopes_ptr is not None:
        slope = tl.load(rules.slopes_ptr + head)
    if rules.bias_ptr is not None:
        bias_ptr = rules.bias_ptr + b * rules.bias_b + head * rules.bias_h
        bias_ptr += q_start * tl.cast(rules.bias_t, tl.int64) + k_start * rules.bias_s
    return k_len - q_len, k_len, prefix, slope, bias_ptr


@jit
def _unit(rules):
    """What _logits leaves to be multiplied: without features between, scaling is part of the
    multiply-add that exp2(logit - m) needs anyway."""
    if rules.softcap is None and rules.bias_ptr is None and rules.slopes_ptr is None:
        return rules.scale * LOG2E
    else:
        return 1.0


@jit
def _logits(s, i, j, terms, rules, CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    """s = q.k at positions i and j, in any two shapes that broadcast -> logits / _unit, and the
    tanh of softcap."""
    offset, k_len, prefix, slope, bias_ptr = terms
    tanh = s
    if rules.softcap is not None:
        tanh = 1 - 2 / (1 + tl.exp2(s * (rules.scale / rules.softcap * 2 * LOG2E)))
        s = tanh * (rules.softcap * LOG2E)
    elif rules.bias_ptr is not None or rules.slopes_ptr is not None:
        s = s * (rules.scale * LOG2E)
    if rules.bias_ptr is not None:
        t = (i - offset).to(tl.int64)
        ptrs = bias_ptr + t * rules.bias_t + j * rules.bias_s
        bias = tl.load(ptrs, mask=(i < k_len) & (j < k_len), other=0.0)
        s += bias.to(tl.float32) * LOG2E
    if rules.slopes_ptr is not None:
        s -= slope * LOG2E * (i - j)
    if MASKED:
        seen = j < k_len
        if CAUSAL and rules.prefix_ptr is not None:
            seen = seen & ((j <= i) | (j < prefix))
        elif CAUSAL:
            seen = seen & (j <= i)
        if rules.window is not None:
            seen = seen & (i - j < rules.window)
        s = tl.where(seen, s, float("-inf"))
    return s, tanh


# --------------------------------------------------------------------------------------------------
# Forward, which is also decode
# --------------------------------------------------------------------------------------------------


@jit(do_not_specialize=["T", "S", "n_seqs"])
def _forward_kernel(
    q_ptr,  # (B, T, Hq, D)
    k_ptr,  # (B, S, Hkv, D), or a tensor descriptor
    v_ptr,  # (B, S, Hkv, DV), or a tensor descriptor; None: the first BLOCK_D columns of k
    o_ptr, lse_ptr,  # (SPLITS, B, T, Hq, DV), (SPLITS, B, Hq, T) fp32
    rules, lists, scales,  # scales of FP8 q, k, v: (B, H, blocks) fp32 each
    sinks_ptr, lengths_ptr, cu_q_ptr, cu_k_ptr,  # (Hq,), (B,) int32, (n_seqs + 1,) int32
    q_strides, k_strides, v_strides, T, S, n_seqs,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    SPLITS: tl.constexpr, CAUSAL: tl.constexpr, SPARSE: tl.constexpr, TMA: tl.constexpr,
    ROUND_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """o = softmax(logits(q k^T)) v, lse = log sum exp. Grid (query tiles * SPLITS, heads, B).

    PACK: the rows of a tile are the queries of all GROUP heads of one key head, so that decode
    reads a key once and fills the matrix unit with it. SPLITS: so many programs share a tile's
    keys. D is BLOCK_D + BLOCK_R where it is the sum of two powers of two (192, 576).
    """
    PER_ROW: tl.constexpr = GROUP if PACK else 1
    n_heads = tl.num_programs(1) * PER_ROW
    b = tl.program_id(2).to(tl.int64)
    # causally, the last queries have the most to do: begin with them
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
    valid = (row < n_rows)[:, None]
    t = row // PER_ROW
    head = tl.program_id(1) * PER_ROW + row % PER_ROW
    kv_head = tl.program_id(1) // (GROUP // PER_ROW)
    terms = _terms(rules, b, seq, head[:, None], q_start, k_start, q_len, k_len)
    offset, _, prefix, _, _ = terms
    i = (t + offset)[:, None]

    q_ptrs = q_ptr + b * q_strides[0] + (q_start + t).to(tl.int64) * q_strides[1]
    q_ptrs = (q_ptrs + head.to(tl.int64) * q_strides[2])[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    q = tl.load(q_ptrs + offs_d, mask=valid & (offs_d < D), other=0.0)
    if BLOCK_R:
        q_rest = tl.load(q_ptrs + BLOCK_D + tl.arange(0, BLOCK_R)[None, :], mask=valid, other=0.0)
    stride_kt, stride_vt = tl.cast(k_strides[1], tl.int64), tl.cast(v_strides[1], tl.int64)
    if not TMA:
        kv_head = kv_head.to(tl.int64)  # descriptors want int32, offsets may pass 2^31
        k_ptr += b * k_strides[0] + k_start * stride_kt + kv_head * k_strides[2]
        if v_ptr is not None:
            v_ptr += b * v_strides[0] + k_start * stride_vt + kv_head * v_strides[2]

    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    if sinks_ptr is not None and split == 0:  # a logit already seen, once
        m_i = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        l_i += 1.0
    unit, list_ptr = _unit(rules), 0
    i_last = tl.minimum(n_rows, first_row + BLOCK_M) - 1
    first, inner, outer, last = _key_tiles(
        first_row // PER_ROW + offset, i_last // PER_ROW + offset, k_len, prefix, rules.window,
        CAUSAL, BLOCK_N,
    )  # fmt: skip
    if SPARSE:
        first, inner, outer = 0, 0, 0
        list_ptr, last = _listed(lists, tl.program_id(1), first_row, SPARSE, BLOCK_N)
    if SPLITS > 1:
        share = tl.cdiv(tl.maximum(last - first, 0), SPLITS)
        first += split * share
        last = tl.maximum(first, tl.minimum(last, first + share))
        inner = tl.minimum(tl.maximum(inner, first), last)
        outer = tl.minimum(tl.maximum(outer, inner), last)
    for phase in tl.static_range(3):  # the window's edge, the inside, the diagonal
        if phase == 2 or (not SPARSE and (phase == 1 or rules.window is not None)):
            bounds = (first, inner, outer, last)
            for n in range(bounds[phase], bounds[phase + 1]):
                start = _start(n, list_ptr, SPARSE, BLOCK_N)
                j = start + tl.arange(0, BLOCK_N)[None, :]
                left = k_len - start
                if TMA:
                    k = k_ptr.load([b.to(tl.int32), k_start + start, kv_head, 0])
                    k = k.reshape([BLOCK_N, BLOCK_D])
                else:
                    k_tile = k_ptr + start * stride_kt
                    k = _load(k_tile, k_strides[1], left, BLOCK_N, D, BLOCK_D, phase != 1)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                if BLOCK_R:
                    k_rest = _load(
                        k_tile + BLOCK_D, k_strides[1], left, BLOCK_N, BLOCK_R, BLOCK_R, phase != 1
                    )
                    s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision=PRECISION)
                if scales is not None:
                    kv_row = b * (n_heads // GROUP) + kv_head
                    q_scale = _block_scale(scales[0], b * n_heads + tl.program_id(1), T, first_row)
                    s *= q_scale * _block_scale(scales[1], kv_row, S, start)
                s, tanh = _logits(s, i, j, terms, rules, CAUSAL, phase != 1)

                m_new = tl.maximum(m_i, tl.max(s, 1) * unit)
                base = m_new
                if phase != 1 or rules.bias_ptr is not None:  # a row may have seen nothing so far
                    base = tl.where(m_new == float("-inf"), 0.0, m_new)
                p = tl.exp2(s * unit - base[:, None])
                alpha = tl.exp2(m_i - base)
                acc *= alpha[:, None]

                if v_ptr is None:
                    v = k
                elif TMA:
                    v = v_ptr.load([b.to(tl.int32), k_start + start, kv_head, 0])
                    v = v.reshape([BLOCK_N, BLOCK_DV])
                    if phase != 1 and (cu_q_ptr is not None or lengths_ptr is not None):
                        # rows of the next sequence, or unused: they may be infinite
                        v = tl.where(tl.trans(j) < k_len, v, 0.0)
                else:
                    v_tile, stride_vd = v_ptr + start * stride_vt, v_strides[3]
                    v = _load(
                        v_tile, v_strides[1], left, BLOCK_N, DV, BLOCK_DV, phase != 1, stride_vd
                    )
                if scales is not None:  # p * 256, for e4m3 is coarse near zero
                    v_scale = _block_scale(scales[2], kv_row, S, start) / 256
                    v = v if ROUND_P else v.to(tl.float32)
                    acc += tl.dot((p * 256).to(v.dtype), v, input_precision=PRECISION) * v_scale
                else:
                    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
                l_i = l_i * alpha + tl.sum(p, 1)
                m_i = m_new

    total = tl.where(l_i == 0, 1.0, l_i)
    place = (split * tl.num_programs(2) + b) * n_heads * T
    o_ptrs = o_ptr + (place + (q_start + t).to(tl.int64) * n_heads + head)[:, None] * DV
    offs_v = tl.arange(0, BLOCK_DV)[None, :]
    o = (acc / total[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptrs + offs_v, o, mask=valid & (offs_v < DV))
    lse = tl.where(l_i == 0, float("-inf"), (m_i + tl.log2(total)) / LOG2E)
    tl.store(lse_ptr + place + head.to(tl.int64) * T + q_start + t, lse, mask=row < n_rows)


@jit
def _block_scale(scale_ptr, row, length, start):
    return tl.load(scale_ptr + row * tl.cdiv(length, 128) + start // 128)


@jit
def _combine_kernel(
    o_parts_ptr, lse_parts_ptr,  # (SPLITS, B, T, Hq, DV) fp32, (SPLITS, B, Hq, T) fp32
    o_ptr, lse_ptr, DV: tl.constexpr, SPLITS: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """merge_attention of all splits. Grid (T, Hq, B)."""
    t, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    T, n_heads = tl.num_programs(0), tl.num_programs(1)
    rows = tl.num_programs(2) * n_heads * T
    at, at_lse = (b * T + t) * n_heads + head, (b * n_heads + head) * T + t
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    lse = tl.load(lse_parts_ptr + s * rows + at_lse, mask=s < SPLITS, other=float("-inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    w = tl.exp2((lse - top) * LOG2E)
    total = tl.sum(w, 0)
    parts = o_parts_ptr + (s * rows + at).to(tl.int64)[:, None] * DV + d[None, :]
    seen = (s < SPLITS)[:, None] & (d < DV)[None, :]
    acc = tl.sum(w[:, None] * tl.load(parts, mask=seen, other=0.0), 0)
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
# where ds is d logit through the tanh of softcap. Tensors here are contiguous: x is (q, k, v, do,
# lse, delta), the last two (B, Hq, T) fp32, lse in base 2. A row that sees nothing has lse = inf
# here, so that p = exp(-inf) = 0 and not NaN.


@jit
def _delta_kernel(
    o_ptr, lse_ptr, do_ptr, dlse_ptr, delta_ptr, lse2_ptr, T, DV: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta and lse in base 2, (B, Hq, T), of o and do (B, T, Hq, DV). Grid (T tiles, Hq, B)."""
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
def _query_side(
    x, b, head, T, begin, left, ROWS: tl.constexpr, Z: tl.constexpr, CHECK: tl.constexpr
):
    """q, do, lse and delta of ROWS queries from row `begin` on, of which `left` exist."""
    HQ: tl.constexpr = Z.HQ  # named anew: Triton 3.6 forgets that an attribute is constexpr
    D: tl.constexpr = Z.D
    DV: tl.constexpr = Z.DV
    BLOCK_D: tl.constexpr = Z.BLOCK_D
    BLOCK_DV: tl.constexpr = Z.BLOCK_DV
    q_ptr, _, _, do_ptr, lse_ptr, delta_ptr = x
    at = (b * T + begin) * HQ + head
    q = _load(q_ptr + at * D, HQ * D, left, ROWS, D, BLOCK_D, CHECK)
    do = _load(do_ptr + at * DV, HQ * DV, left, ROWS, DV, BLOCK_DV, CHECK)
    r, row = tl.arange(0, ROWS), (b * HQ + head) * T + begin
    if CHECK:
        lse = tl.load(lse_ptr + row + r, mask=r < left, other=float("inf"))
        delta = tl.load(delta_ptr + row + r, mask=r < left, other=0.0)
    else:
        lse, delta = tl.load(lse_ptr + row + r), tl.load(delta_ptr + row + r)
    return q, do, lse, delta


@jit
def _key_side(
    x, b, kv_head, S, begin, left, ROWS: tl.constexpr, Z: tl.constexpr, CHECK: tl.constexpr
):
    """k and v of ROWS keys from row `begin` on, of which `left` exist."""
    HKV: tl.constexpr = Z.HQ // Z.GROUP
    D: tl.constexpr = Z.D
    DV: tl.constexpr = Z.DV
    BLOCK_D: tl.constexpr = Z.BLOCK_D
    BLOCK_DV: tl.constexpr = Z.BLOCK_DV
    _, k_ptr, v_ptr, _, _, _ = x
    at = (b * S + begin) * HKV + kv_head
    k = _load(k_ptr + at * D, HKV * D, left, ROWS, D, BLOCK_D, CHECK)
    return k, _load(v_ptr + at * DV, HKV * DV, left, ROWS, DV, BLOCK_DV, CHECK)


@jit
def _tile_gradient(
    q, k, v, do, lse, delta, i, j, terms, rules, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    BY_KEY: tl.constexpr,
):  # fmt: skip
    """p, d logit and ds of one tile: (queries, keys), or (keys, queries) BY_KEY."""
    if BY_KEY:
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    else:
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    s, tanh = _logits(s, i, j, terms, rules, CAUSAL, MASKED)
    p = tl.exp2(s * _unit(rules) - lse)
    dlogit = p * (dp - delta)
    ds = dlogit
    if rules.softcap is not None:
        ds = dlogit * (1 - tanh * tanh)
    return p, dlogit, ds


@jit
def _key_gradient(
    pid, kv_head, b, axes, x, dk_ptr, dv_ptr, rules, lists, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys: sums over the queries of all heads of its group."""
    GROUP: tl.constexpr = Z.GROUP
    CAUSAL: tl.constexpr = Z.CAUSAL
    SPARSE: tl.constexpr = Z.SPARSE
    seq, key, q_start, q_len, k_start, k_len = _locate(pid, axes, True, BLOCK_N)
    left = tl.maximum(k_len - key, 0)
    j = key + tl.arange(0, BLOCK_N)[:, None]
    k, v = _key_side(x, b, kv_head, axes[1], k_start + key, left, BLOCK_N, Z, True)
    dk, dv = tl.zeros_like(k).to(tl.float32), tl.zeros_like(v).to(tl.float32)
    for g in range(GROUP):
        head = kv_head * GROUP + g
        terms = _terms(rules, b, seq, head, q_start, k_start, q_len, k_len)
        offset, _, prefix, _, _ = terms
        j_last, list_ptr = tl.minimum(key + BLOCK_N, k_len) - 1, 0
        first, inner, outer, last = _query_tiles(
            key, j_last, q_len, offset, prefix, rules.window, CAUSAL, BLOCK_M
        )
        if SPARSE:
            first, inner, outer = 0, 0, 0
            list_ptr, last = _listed(lists, head, key, SPARSE, BLOCK_M)
        last = tl.where(left > 0, last, 0)
        for phase in tl.static_range(3):  # the diagonal, the inside, the window's edge or the end
            if phase == 2 or (not SPARSE and (phase == 1 or CAUSAL)):
                bounds = (first, inner, outer, last)
                for n in range(bounds[phase], tl.minimum(bounds[phase + 1], last)):
                    start = _start(n, list_ptr, SPARSE, BLOCK_M)
                    q, do, lse, delta = _query_side(
                        x, b, head, axes[0], q_start + start, q_len - start, BLOCK_M, Z, phase != 1
                    )
                    i = (start + offset + tl.arange(0, BLOCK_M))[None, :]
                    lse, delta = lse[None, :], delta[None, :]
                    p, dlogit, ds = _tile_gradient(
                        q, k, v, do, lse, delta, i, j, terms, rules, CAUSAL, phase != 1, True
                    )
                    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
                    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    HKV: tl.constexpr = Z.HQ // GROUP
    D: tl.constexpr = Z.D
    DV: tl.constexpr = Z.DV
    at = (b * axes[1] + k_start + key) * HKV + kv_head
    _store(dk_ptr + at * D, dk * rules.scale, HKV * D, left, BLOCK_N, D, dk.shape[1])
    _store(dv_ptr + at * DV, dv, HKV * DV, left, BLOCK_N, DV, dv.shape[1])


@jit
def _query_gradient(
    pid, head, b, axes, x, dq_ptr, rules, lists, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    Z: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries: a sum over the keys that they see."""
    CAUSAL: tl.constexpr = Z.CAUSAL
    SPARSE: tl.constexpr = Z.SPARSE
    seq, query, q_start, q_len, k_start, k_len = _locate(pid, axes, False, BLOCK_M)
    left = tl.maximum(q_len - query, 0)
    terms = _terms(rules, b, seq, head, q_start, k_start, q_len, k_len)
    offset, _, prefix, _, _ = terms
    i = (query + offset + tl.arange(0, BLOCK_M))[:, None]
    q, do, lse, delta = _query_side(x, b, head, axes[0], q_start + query, left, BLOCK_M, Z, True)
    lse, delta = lse[:, None], delta[:, None]
    dq, list_ptr = tl.zeros_like(q).to(tl.float32), 0
    i_last = tl.minimum(query + BLOCK_M, q_len) - 1 + offset
    first, inner, outer, last = _key_tiles(
        query + offset, i_last, k_len, prefix, rules.window, CAUSAL, BLOCK_N
    )
    if SPARSE:
        first, inner, outer = 0, 0, 0
        list_ptr, last = _listed(lists, head, query, SPARSE, BLOCK_N)
    last = tl.where(left > 0, last, 0)
    for phase in tl.static_range(3):
        if phase == 2 or (not SPARSE and (phase == 1 or rules.window is not None)):
            bounds = (first, inner, outer, last)
            for n in range(bounds[phase], tl.minimum(bounds[phase + 1], last)):
                start = _start(n, list_ptr, SPARSE, BLOCK_N)
                k, v = _key_side(
                    x, b, head // Z.GROUP, axes[1], k_start + start, k_len - start, BLOCK_N, Z,
                    phase != 1,
                )  # fmt: skip
                j = start + tl.arange(0, BLOCK_N)[None, :]
                p, dlogit, ds = _tile_gradient(
                    q, k, v, do, lse, delta, i, j, terms, rules, CAUSAL, phase != 1, False
                )
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    HQ: tl.constexpr = Z.HQ
    D: tl.constexpr = Z.D
    at = (b * axes[0] + q_start + query) * HQ + head
    _store(dq_ptr + at * D, dq * rules.scale, HQ * D, left, BLOCK_M, D, dq.shape[1])


@jit(do_not_specialize=["T", "S", "n_seqs", "n_key_tiles", "n_query_tiles"])
def _backward_kernel(
    x, dq_ptr, dk_ptr, dv_ptr, rules, by_query, by_key, cu_q_ptr, cu_k_ptr, T, S, n_seqs,
    n_key_tiles, n_query_tiles, BLOCK_M1: tl.constexpr, BLOCK_N1: tl.constexpr,
    BLOCK_M2: tl.constexpr, BLOCK_N2: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """All gradients but the bias's. Grid (key tiles + GROUP * query tiles, Hkv, B): the first
    programs, which have the most to do, each write a tile of dk and dv, the others one of dq."""
    pid, kv_head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    axes = (T, S, n_seqs, cu_q_ptr, cu_k_ptr)
    if pid < n_key_tiles:
        _key_gradient(
            pid, kv_head, b, axes, x, dk_ptr, dv_ptr, rules, by_key, BLOCK_M1, BLOCK_N1, Z
        )
    else:
        pid -= n_key_tiles
        head = kv_head * Z.GROUP + pid // n_query_tiles
        pid = n_query_tiles - 1 - pid % n_query_tiles  # causally, the last have the most to do
        _query_gradient(pid, head, b, axes, x, dq_ptr, rules, by_query, BLOCK_M2, BLOCK_N2, Z)


@jit(do_not_specialize=["T", "S", "n_seqs"])
def _bias_kernel(
    x, dbias_ptr,  # (B or 1, Hq or 1, T, S) fp32, zeros
    rules, visit_ptr, visit_strides, cu_q_ptr, cu_k_ptr, T, S, n_seqs, heads, batch,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """The bias's gradient: d logit, summed over the `heads` and `batch` rows that share it. Grid
    (query tiles, Hq / heads, B / batch)."""
    CAUSAL: tl.constexpr = Z.CAUSAL
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
            terms = _terms(rules, b, seq, head, q_start, k_start, q_len, k_len)
            q, do, lse, delta = _query_side(
                x, b, head, T, q_start + query, q_len - query, BLOCK_M, Z, True
            )
            k, v = _key_side(
                x, b, head // Z.GROUP, S, k_start + start, k_len - start, BLOCK_N, Z, True
            )
            i, lse, delta = t + k_len - q_len, lse[:, None], delta[:, None]
            p, dlogit, ds = _tile_gradient(
                q, k, v, do, lse, delta, i, j, terms, rules, CAUSAL, True, False
            )
            if visit_ptr is not None:
                at = head * visit_strides[0] + query // Z.SPARSE * visit_strides[1]
                dlogit *= tl.load(visit_ptr + at + start // Z.SPARSE)
            total += dlogit
        tl.store(out_ptrs + j, total, mask=(t < q_len) & (j < k_len))


# --------------------------------------------------------------------------------------------------
# Launchers
# --------------------------------------------------------------------------------------------------

# By head dim, up to the key. forward: BLOCK_M, BLOCK_N, num_warps, num_stages, and whether to load
# through tensor descriptors (Hopper's TMA). decode: the same, BLOCK_M at most. backward: queries
# and keys of a tile for dk and dv, then of one for dq, num_warps, num_stages.
CONFIGS: dict[str, dict[int, tuple]] = {
    "forward": {
        64: (128, 128, 4, 3, True),
        128: (128, 128, 8, 2, True),
        256: (128, 64, 8, 2, True),
    },
    "decode": {64: (64, 128, 4, 3, False), 128: (64, 64, 4, 3, False), 512: (64, 32, 8, 2, False)},
    "backward": {
        64: (32, 128, 128, 64, 8, 3),
        128: (64, 128, 128, 64, 8, 3),
        256: (16, 64, 64, 32, 8, 2),
    },
}


def _config(kind: str, dim: int) -> tuple:
    table = CONFIGS[kind]
    return table[min((d for d in table if d >= dim), default=max(table))]


def _power(n: int) -> int:
    """The power of two from n on, and at least what a matrix unit takes."""
    return max(16, 1 << (n - 1).bit_length())


def _tile_bytes(x: Tensor) -> int:
    """Shared memory for one element of x; an fp32 one is split into two tf32."""
    return x.element_size() if x.element_size() < 4 else 8


def _split_dim(D: int) -> tuple[int, int]:
    """BLOCK_D and BLOCK_R: 192 = 128 + 64, 576 = 512 + 64; or one power of two around D."""
    low = 1 << (D.bit_length() - 1)
    rest = D - low
    return (low, rest) if rest >= 16 and rest & (rest - 1) == 0 else (_power(D), 0)


@lru_cache
def _device(index: int | None) -> tuple[int, int, int]:
    """Processors, bytes of shared memory for one program, major compute capability."""
    if index is None:  # the interpreter: some device
        return 132, 232448, 9
    p = torch.cuda.get_device_properties(index)
    return p.multi_processor_count, p.shared_memory_per_block_optin, p.major


def _rules(f: _Flags, q: Tensor, S: int) -> _Rules:
    B, T, Hq, _ = q.shape
    strides = (None,) * 4 if f.bias is None else f.bias.expand(B, Hq, T, S).stride()
    return _Rules(f.scale, f.softcap, f.window, f.bias, *strides, f.slopes, f.prefix)


def _lists(f: _Flags, by_key: bool = False) -> _Lists | None:
    """For each query block the key blocks that it visits, in order; by_key the other way round."""
    if f.visit is None:
        return None
    visit = (f.visit.transpose(1, 2) if by_key else f.visit).to(torch.int8)
    order = visit.argsort(dim=-1, descending=True, stable=True).int().contiguous()
    count = visit.sum(-1, dtype=torch.int32).contiguous()
    return _Lists(order, count, count.shape[1] if len(count) > 1 else 0, order.shape[2])


def _n_tiles(length: int, cu: Tensor | None, block: int) -> int:
    """Tiles for `length` rows; packed, as many as there could be."""
    return -(-length // block) if cu is None else length // block + len(cu) - 1


def _descriptor(x: Tensor, rows: int) -> Any:
    """What TMA reads tiles of `rows` from; None where it cannot: it wants 16-byte strides."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    size = x.element_size()
    if any(n * size % 16 for n in x.stride()[:3]) or x.stride(3) != 1 or x.data_ptr() % 16:
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, 1, x.shape[3]])


def _forward(
    q: Tensor, k: Tensor, v: Tensor | None, f: _Flags, *, pack: bool = False, splits: int = 1,
    latent_dim: int = 0, scales: tuple[Tensor, Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernel: o (B, T, Hq, Dv), lse (B, Hq, T)."""
    (B, T, Hq, D), (S, Hkv) = q.shape, k.shape[1:3]
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    DV, (BLOCK_D, BLOCK_R) = latent_dim or v.shape[3], _split_dim(D)
    BLOCK_DV = BLOCK_D if v is None else _power(DV)
    rows = T * Hq // Hkv if pack else T
    kind = "decode" if pack and (rows < 128 or BLOCK_DV > 256) else "forward"
    M, N, warps, stages, tma = _config(kind, max(BLOCK_D + BLOCK_R, BLOCK_DV))
    size = _tile_bytes(q)
    M, N = min(M if size < 8 else max(16, M // 2), _power(rows), f.cap()), min(N, f.cap())
    _, shared, major = _device(q.device.index)
    key, per_key = BLOCK_D + BLOCK_R, 0 if f.bias is None else M * f.bias.element_size()
    per_key += (key + (0 if v is None else BLOCK_DV)) * size
    while M * key * size + stages * N * per_key > shared - 2048 and M * N * stages > 16 * 16:
        if stages > 2:
            stages -= 1
        elif N > 16:
            N //= 2
        else:
            M, stages = max(16, M // 2), 1
    o = torch.empty(B, T, Hq, DV, dtype=dtype or q.dtype, device=q.device)
    lse = torch.empty(B, Hq, T, device=q.device)
    if f.cu_q is not None:  # for rows of no sequence
        o, lse = o.zero_(), lse.fill_(-math.inf)
    if o.numel() == 0:
        return o, lse
    o_parts, lse_parts = o, lse
    if splits > 1:
        o_parts = torch.empty((splits, *o.shape), device=q.device)
        lse_parts = lse.new_empty((splits, B, Hq, T))
    k_strides, v_strides = k.stride(), (k if v is None else v).stride()
    if tma and S and major >= 9 and (D, DV) == (BLOCK_D, BLOCK_DV) and v is not None and not scales:
        described = _descriptor(k, N), _descriptor(v, N)
        tma = None not in described
        k, v = described if tma else (k, v)
    else:
        tma = False
    _forward_kernel[_n_tiles(rows, f.cu_q, M) * splits, Hkv if pack else Hq, B](
        q, k, v, o_parts, lse_parts, _rules(f, q, S), _lists(f), scales, f.sinks, f.lengths,
        f.cu_q, f.cu_k, q.stride(), k_strides, v_strides, T, S,
        0 if f.cu_q is None else len(f.cu_q) - 1, D=D, DV=DV, GROUP=Hq // Hkv, PACK=pack,
        SPLITS=splits, CAUSAL=f.causal, SPARSE=0 if f.visit is None else f.block, TMA=tma,
        ROUND_P=not INTERPRET, BLOCK_M=M, BLOCK_N=N, BLOCK_D=BLOCK_D, BLOCK_R=BLOCK_R,
        BLOCK_DV=BLOCK_DV, num_warps=8 if scales else warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[T, Hq, B](
            o_parts, lse_parts, o, lse, DV=DV, SPLITS=splits, BLOCK_DV=_power(DV),
            BLOCK_S=_power(splits),
        )  # fmt: skip
    return o, lse


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor, f: _Flags,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the backward kernels: dq, dk, dv, dbias and dsinks (empty where there is none)."""
    q, k, v, do, dlse = (x.contiguous() for x in (q, k, v, do, dlse))
    (B, T, Hq, D), (S, Hkv), DV = q.shape, k.shape[1:3], v.shape[3]
    empty = torch.empty_like if f.cu_q is None and S and T else torch.zeros_like
    dq, dk, dv, delta, lse2 = empty(q), empty(k), empty(v), empty(lse), empty(lse)
    dbias, dsinks = q.new_empty(0), q.new_empty(0)
    if bias_grad:
        dbias = torch.zeros(*f.bias.shape[:2], T, S, device=q.device)
    if T:
        BLOCK_D, BLOCK_DV = _power(D), _power(DV)
        _delta_kernel[-(-T // 64), Hq, B](
            o, lse, do, dlse, delta, lse2, T, DV=DV, ROWS=64, BLOCK_DV=BLOCK_DV
        )
    if T and S:
        *tiles, warps, stages = _config("backward", max(BLOCK_D, BLOCK_DV))
        less = 1 if f.bias is None else 2  # a bias brings tiles of its own
        M1, N1, M2, N2 = (max(16, min(n // less, f.cap())) for n in tiles)
        _, shared, major = _device(q.device.index)
        if major >= 10 and max(BLOCK_D, BLOCK_DV) > 128:  # tensor memory holds 512 columns, no more
            N1, M2 = min(N1, 32), min(M2, 32)
        width = (BLOCK_D + BLOCK_DV) * _tile_bytes(q)
        fits = lambda: max(N1 + stages * M1, M2 + stages * N2) * width < shared - 4096
        while not fits() and max(N1, M2) > 16:
            if stages > 1:
                stages -= 1
            else:
                M1, N1, M2, N2 = (max(16, n // 2) for n in (M1, N1, M2, N2))
        SPARSE = 0 if f.visit is None else f.block
        Z = _Sizes(Hq, Hq // Hkv, D, DV, BLOCK_D, BLOCK_DV, f.causal, SPARSE)
        x, rules, how = (q, k, v, do, lse2, delta), _rules(f, q, S), dict(Z=Z, num_warps=warps)
        axes = f.cu_q, f.cu_k, T, S, 0 if f.cu_q is None else len(f.cu_q) - 1
        n_k, n_q = _n_tiles(S, f.cu_k, N1), _n_tiles(T, f.cu_q, M2)
        _backward_kernel[n_k + Hq // Hkv * n_q, Hkv, B](
            x, dq, dk, dv, rules, _lists(f), _lists(f, True), *axes, n_k, n_q, BLOCK_M1=M1,
            BLOCK_N1=N1, BLOCK_M2=M2, BLOCK_N2=N2, num_stages=stages, **how,
        )  # fmt: skip
        if bias_grad:
            visit = None if f.visit is None else f.visit.expand(Hq, -1, -1).to(torch.int8)
            strides = None if visit is None else visit.stride()
            batch, heads = dbias.shape[:2]
            _bias_kernel[n_q, heads, batch](
                x, dbias, rules, visit, strides, *axes, Hq // heads, B // batch, BLOCK_M=M2,
                BLOCK_N=N2, num_stages=1, **how,
            )  # fmt: skip
    if bias_grad:
        dbias = dbias.sum_to_size(f.bias.shape).to(f.bias.dtype)
    if f.sinks is not None:
        p = torch.exp(f.sinks.float()[:, None] - lse).masked_fill(lse == -math.inf, 0)
        dsinks = -(p * delta).sum((0, 2)).to(f.sinks.dtype)
    return dq, dk, dv, dbias, dsinks


# --------------------------------------------------------------------------------------------------
# Operators, so that torch.compile and checkpointing see one node with a known derivative
# --------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "sheaf::attention_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {FLAGS}) -> (Tensor, Tensor)",
)
def _forward_op(q, k, v, *flags):
    with torch.cuda.device_of(q):
        return _forward(q, k, v, _Flags(*flags))


@_forward_op.register_fake
def _(q, k, v, *flags):
    B, T, Hq, _ = q.shape
    return q.new_empty(B, T, Hq, v.shape[3]), q.new_empty(B, Hq, T, dtype=torch.float32)


@torch.library.custom_op(
    "sheaf::attention_backward",
    mutates_args=(),
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


def _save(ctx, inputs, output):
    f = _Flags(*inputs[3:])
    tensors = [x if isinstance(x, Tensor) else None for x in f]
    ctx.save_for_backward(*inputs[:3], *output, *tensors)
    ctx.constants = [None if isinstance(x, Tensor) else x for x in f]


def _derivative(ctx, do, dlse):
    q, k, v, o, lse, *tensors = ctx.saved_tensors
    f = _Flags(*(c if t is None else t for c, t in zip(ctx.constants, tensors)))
    needs = dict(zip(_Flags._fields, ctx.needs_input_grad[3:]))
    dq, dk, dv, dbias, dsinks = _backward_op(q, k, v, o, lse, do, dlse, needs["bias"], *f)
    given = {"bias": dbias if needs["bias"] else None, "sinks": dsinks if needs["sinks"] else None}
    return dq, dk, dv, *(given.get(name) for name in _Flags._fields)


_forward_op.register_autograd(_derivative, setup_context=_save)


@torch.library.custom_op(
    "sheaf::attention_decode",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor? v, int latent_dim, int splits, {FLAGS}) "
    "-> (Tensor, Tensor)",
)
def _decode_op(q, k, v, latent_dim, splits, *flags):
    how = dict(pack=True, splits=splits or _n_splits(q, k), latent_dim=latent_dim)
    with torch.cuda.device_of(q):
        return _forward(q, k, v, _Flags(*flags), **how)


@_decode_op.register_fake
def _(q, k, v, latent_dim, splits, *flags):
    B, T, Hq, _ = q.shape
    DV = latent_dim if v is None else v.shape[3]
    return q.new_empty(B, T, Hq, DV), q.new_empty(B, Hq, T, dtype=torch.float32)


# --------------------------------------------------------------------------------------------------
# What is called
# --------------------------------------------------------------------------------------------------


def _kernels(q: Tensor, v: Tensor, block: int = 128, limit: int = 256) -> bool:
    """Whether a Triton kernel can take this."""
    runs = triton is not None and (q.is_cuda or INTERPRET) and q.dtype != torch.float64
    runs = runs and not (INTERPRET and q.dtype == torch.bfloat16)  # which it gets wrong
    return (
        runs and max(q.shape[-1], v.shape[-1]) <= limit and block >= 16 and block & (block - 1) == 0
    )


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None,
    window: int | None = None, softcap: float | None = None, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, bias: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, prefix: Tensor | None = None,
    block_mask: BlockMask | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(mask(logits(q k^T))) v, exactly: o (B, T, Hq, Dv), and with return_lse (B, Hq, T).

    q (B, T, Hq, D), k (B, S, Hkv, D), v (B, S, Hkv, Dv) of one dtype; head h reads key head
    h // (Hq / Hkv). scale: D ** -0.5 if None. window: keys with i - j < window. softcap:
    softcap * tanh(. / softcap). alibi_slopes, sinks: (Hq,). bias: broadcasts to (B, Hq, T, S).
    prefix: (B,) int32, so many first keys are seen by all. Differentiable in q, k, v, sinks, bias,
    also through lse; deterministic.

    Packed sequences: q (N, Hq, D), k (M, Hkv, D), cu_seqlens int32 on the same device, of k as of q
    if not given; lse (Hq, N), bias over (Hq, N, M), prefix one per sequence. Nothing is padded, and
    lengths are never read on the host. ValueError names what does not fit.
    """
    q, k, v, f = _prepare(
        q, k, v, causal=causal, scale=scale, window=window, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, bias=bias, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, prefix=prefix, block_mask=block_mask,
    )  # fmt: skip
    if not _kernels(q, v, f.block):
        return _answer(*_plain(_chunked, q, k, v, f), f, return_lse)
    return _answer(*_forward_op(q, k, v, *f), f, return_lse)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor | None, lengths: Tensor | None = None, *,
    latent_dim: int | None = None, n_splits: int | None = None, return_lse: bool = False,
    **flags: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of a few new queries to a cache: o (B, T, Hq, Dv). Not differentiable.

    k (B, S, Hkv, D), v (B, S, Hkv, Dv): a dense cache of any strides, of which row b uses
    lengths[b] slots (int32; None: all S), the T queries being its last. With latent_dim (absorbed
    MLA) v is None: the values are the first latent_dim columns of k, and are read once. flags:
    causal, scale, window, softcap, alibi_slopes, sinks, bias, prefix, as of flash_attention.

    The keys of a row are split over n_splits programs (flash-decoding); None: enough to fill the
    GPU. With n_splits given, a row's bits do not depend on the batch that it is in.
    """
    _check((v is None) == (latent_dim is not None), "decode needs v, or latent_dim instead of it")
    ok = latent_dim is None or 0 < latent_dim <= k.shape[-1]
    _check(ok, f"latent_dim must be from 1 to k's {k.shape[-1]}, not {latent_dim}")
    _check(n_splits is None or n_splits > 0, f"n_splits must be positive, not {n_splits}")
    values = k[..., :latent_dim] if v is None else v
    q, k, values, f = _prepare(q, k, values, lengths=lengths, **flags)
    _check(f.cu_q is None and f.visit is None, "decode takes no cu_seqlens_q and no block_mask")
    if not _kernels(q, values, limit=1024):
        return _answer(*_plain(_chunked, q, k, values, f), f, return_lse)
    shared = v is None and _split_dim(q.shape[3])[0] == latent_dim
    o, lse = _decode_op(
        q, k, None if shared else values, latent_dim if shared else 0, n_splits or 0, *f
    )
    return _answer(o, lse, f, return_lse)


def _n_splits(q: Tensor, k: Tensor) -> int:
    """Enough programs for two on each processor, but 256 keys or more in each."""
    (B, T, Hq, _), (S, Hkv) = q.shape, k.shape[1:3]
    programs = B * Hkv * -(-T * Hq // Hkv // 64)
    wanted = -(-2 * _device(q.device.index)[0] // programs)
    return 1 << (max(1, min(wanted, S // 256, 64)).bit_length() - 1)  # few kernels to compile


def pack(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Token sequences as one row without padding: tokens (1, N), positions (N,), which start at 0
    in each, and cu_seqlens (n + 1,) int32."""
    _check(len(sequences) > 0, "pack: sequences is empty")
    device = sequences[0].device
    lengths = torch.tensor([0] + [len(s) for s in sequences])
    positions = torch.cat([torch.arange(len(s), device=device) for s in sequences])
    cu_seqlens = lengths.cumsum(0).to(device, torch.int32)
    return torch.cat(list(sequences))[None], positions, cu_seqlens


def as_attend(
    cache: Any = None, *, cu_seqlens: Tensor | None = None, limit: int | None = None
) -> Callable[..., Tensor]:
    """The model's attend callable, (spec, q, k, v, positions) -> o, on the kernels of this file.

    Alone: causal attention over the new tokens, for training. With cu_seqlens: the one row of
    tokens is packed sequences. With a cache, anything whose update(spec, k, v, positions, limit)
    stores the new tokens and returns all keys and values, slot number = position: decode, and
    prefill in chunks; positions of a row must follow each other, and limit is more than any.
    """
    _check(cache is None or cu_seqlens is None, "as_attend takes a cache or cu_seqlens, not both")

    def attend(spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        if torch.is_autocast_enabled(q.device.type):  # as torch's own attention does
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        flags = dict(
            scale=spec.scale, window=spec.window, softcap=spec.softcap,
            alibi_slopes=spec.alibi_slopes, sinks=spec.sinks,
        )  # fmt: skip
        if cu_seqlens is not None:
            _check(len(q) == 1, f"cu_seqlens is for one row of packed sequences, not {len(q)}")
            return flash_attention(q[0], k[0], v[0], cu_seqlens_q=cu_seqlens, **flags)[None]
        if cache is None:
            return flash_attention(q, k, v, **flags)
        k, v = cache.update(spec, k, v, positions, limit)
        lengths = (positions[..., -1] + 1).to(torch.int32).expand(len(q)).contiguous()
        v = v if spec.latent_dim is None else None
        return decode_attention(q, k, v, lengths, latent_dim=spec.latent_dim, **flags)

    return attend


# --------------------------------------------------------------------------------------------------
# FP8
# --------------------------------------------------------------------------------------------------


def hadamard_matrix(n: int) -> Tensor:
    """(n, n) orthonormal, entries +-n ** -0.5 (Sylvester); n a power of two."""
    _check(
        n > 0 and n & (n - 1) == 0,
        f"a Hadamard matrix needs a power of two, not {n}: pass hadamard=False",
    )
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h * n**-0.5


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (B, T, H, D) -> e4m3 of the same shape and scales (B, H, ceil(T / 128)) fp32: a scale for
    every 128 rows of a head, so that the largest of them becomes 448."""
    T = x.shape[1]
    blocks = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, -T % FP8_BLOCK))
    blocks = blocks.unflatten(1, (-1, FP8_BLOCK))  # (B, blocks, 128, H, D)
    scale = blocks.abs().amax((2, 4), keepdim=True).clamp(min=1e-12) / 448
    x8 = (blocks / scale).to(torch.float8_e4m3fn).flatten(1, 2)[:, :T]
    return x8.contiguous(), scale[:, :, 0, :, 0].transpose(1, 2).contiguous()


def flash_attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None,
    hadamard: bool = True,
) -> Tensor:  # fmt: skip
    """flash_attention with q, k, v and the probabilities in e4m3, forward only (FlashAttention-3,
    arXiv:2407.08608, 3.3): o (B, T, Hq, Dv) of q's dtype.

    One scale per 128 rows of a head. With hadamard q and k are rotated first: q.k does not change,
    and a channel that is huge in every row is spread over all of them, so it no longer decides the
    step size of the rest.
    """
    q, k, v, f = _prepare(q, k, v, causal=causal, scale=scale)
    dtype = q.dtype
    if hadamard:
        h = hadamard_matrix(q.shape[3]).to(q.device)
        with torch.autocast(q.device.type, enabled=False):
            q, k = q.float() @ h, k.float() @ h
    (q, qs), (k, ks), (v, vs) = quantize_blocks(q), quantize_blocks(k), quantize_blocks(v)
    if not _kernels(q, v):
        return _fp8_reference(q, k, v, f, (qs, ks, vs)).to(dtype)
    # the second product wants the keys' axis together, as the tensor cores read it
    v = v.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    with torch.cuda.device_of(q):
        return _forward(q, k, v, f, scales=(qs, ks, vs), dtype=dtype)[0]


def _fp8_reference(
    q: Tensor, k: Tensor, v: Tensor, f: _Flags, scales: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """The same roundings, all scores at once."""
    q, k, v = (
        x.float() * s.transpose(1, 2).repeat_interleave(FP8_BLOCK, 1)[:, : x.shape[1], :, None]
        for x, s in zip((q, k, v), scales)
    )
    s = _scores(q, k, f, slice(0, q.shape[1]), slice(0, k.shape[1]))
    p = torch.exp(s - s.amax(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).min))
    p8 = (p * 256).to(torch.float8_e4m3fn).float() / 256
    return (_values(p8, v) / p.sum(-1, keepdim=True).clamp(min=1e-30)).transpose(1, 2)


# --------------------------------------------------------------------------------------------------
# python attention.py: a check of itself, then a benchmark of this device
# --------------------------------------------------------------------------------------------------


def _self_check(device: str) -> None:
    """The largest error of each step of the ladder against the definition in fp64, all flags on."""
    rng = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=rng).to(device).requires_grad_()
    q, k, v = make(2, 37, 4, 32), make(2, 53, 2, 32), make(2, 53, 2, 48)
    visit = sparse_blocks(3, 4, local=2, stride=3).to(device)
    learnt = dict(sinks=make(4), bias=make(4, 37, 53))
    flags = dict(
        window=30, softcap=5.0, alibi_slopes=torch.rand(4, generator=rng).to(device),
        prefix=torch.tensor([20, 3], dtype=torch.int32, device=device),
        block_mask=BlockMask(visit, 16),
    )  # fmt: skip

    def outcome(attend: Callable, dtype: torch.dtype) -> list[Tensor]:
        x, y = [t.to(dtype) for t in (q, k, v)], {n: t.to(dtype) for n, t in learnt.items()}
        o, lse = attend(*x, **flags, **y, return_lse=True)
        loss = o.sin().sum() + lse.sin().sum()
        return [o, lse, *torch.autograd.grad(loss, (q, k, v, *learnt.values()))]

    want = outcome(attention_reference, torch.float64)
    for attend in (online_attention, chunked_attention, flash_attention):
        got = outcome(attend, torch.float32)
        error = max((a - b).abs().max().item() for a, b in zip(got, want))
        what = "Triton" if attend is flash_attention and _kernels(q, v) else "plain torch"
        print(f"{attend.__name__:18s} {what:12s} error {error:.1e}, gradients included")
        assert error < 1e-4, f"{attend.__name__} is wrong here"


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return o.transpose(1, 2)


def _peak_mib(run: Callable[[], Any]) -> float:
    """How far `run` raises the memory this process holds (Linux; elsewhere NaN)."""
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # forget the old high-water mark
        read = lambda: {w[0]: int(w[1]) for w in map(str.split, open("/proc/self/status"))
                        if w[0] in ("VmRSS:", "VmHWM:")}  # fmt: skip
        before = read()["VmRSS:"]
        run()
        return (read()["VmHWM:"] - before) / 1024
    except OSError:
        run()
        return math.nan


def _cpu_table() -> None:
    print(
        "\ncausal, fp32, B 1, H 8, D 64, best of 2       forward                 forward + backward"
    )
    for T in (512, 2048):
        q, k, v = (torch.randn(1, T, 8, 64, requires_grad=True) for _ in range(3))
        for name, attend in (
            ("naive", attention_reference), ("chunked", chunked_attention), ("SDPA (CPU)", _sdpa)
        ):  # fmt: skip
            both = lambda: torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
            line = f"T {T:5d}  {name:34s}"
            for run in (torch.no_grad()(lambda: attend(q, k, v)), both):
                mib, times = _peak_mib(run), []
                for _ in range(2):
                    start = time.perf_counter()
                    run()
                    times.append(time.perf_counter() - start)
                line += f"{1e3 * min(times):8.1f} ms {mib:6.0f} MiB "
            print(line)


def _gpu_tables() -> None:
    """TFLOP/s (causal operations halved) beside torch's backends by name, then decode in GB/s."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from triton.testing import do_bench

    ms = partial(do_bench, return_mode="median")  # empties L2 between runs
    make = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16, device="cuda")
    print("\nbf16, 16k tokens, H * D = 2048: TFLOP/s forward / backward")
    for D, causal, T in [(d, c, t) for d in (64, 128) for c in (False, True) for t in (2048, 8192)]:
        q, k, v, do = (make(16384 // T, T, 2048 // D, D).requires_grad_() for _ in range(4))
        work = 4 * 16384 * T * 2048 / (1 + causal) / 1e9
        line = f"D {D:3d} {'causal' if causal else 'full':6s} T {T:5d}"
        for name in ("ours", "FLASH_ATTENTION", "CUDNN_ATTENTION"):
            backend = SDPBackend.MATH if name == "ours" else getattr(SDPBackend, name)
            attend = partial(flash_attention if name == "ours" else _sdpa, q, k, v, causal=causal)
            try:
                with sdpa_kernel(backend):
                    forward, o = ms(lambda: attend()), attend()
                    back = lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
                    line += f"   {name} {work / forward:4.0f} / {2.5 * work / ms(back):4.0f}"
            except RuntimeError as e:  # a backend that is not there
                if name == "ours":
                    raise
                line += f"   {name} - ({str(e).splitlines()[0][:40]})"
        print(line)
    x, y = make(2**29), make(2**29)
    copy = 2 * x.nbytes / ms(lambda: y.copy_(x)) / 1e6
    print(f"\ndecode, one token each, bf16: GB/s of cache read; a copy reaches {copy:.0f}")
    for B, S, Hq, Hkv, D, latent in (
        (16, 8192, 32, 8, 128, None), (64, 4096, 32, 8, 128, None), (1, 32768, 32, 8, 128, None),
        (64, 4096, 128, 1, 576, 512),
    ):  # fmt: skip
        q, k, v = make(B, 1, Hq, D), make(B, S, Hkv, D), None if latent else make(B, S, Hkv, D)
        run, graph = partial(decode_attention, q, k, v, latent_dim=latent), torch.cuda.CUDAGraph()
        eager = ms(run)
        with torch.cuda.graph(graph):
            run()
        read, replay = (k.nbytes + (0 if latent else v.nbytes)) / 1e6, ms(graph.replay)
        what = f"B {B:3d} S {S:6d} heads {Hq} / {Hkv} D {D}: {read / replay:5.0f} in a CUDA graph"
        print(f"{what} ({read / replay / copy:.0%}), {read / eager:5.0f} launched from Python")


def main() -> None:
    cuda = torch.cuda.is_available() and not INTERPRET
    device = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, triton {getattr(triton, '__version__', None)}, {device}")
    _self_check("cuda" if cuda else "cpu")
    if cuda:
        _gpu_tables()
    elif not INTERPRET:
        print("kernels not run: no GPU here; TRITON_INTERPRET=1 python attention.py checks them")
        _cpu_table()


if __name__ == "__main__":
    main()
