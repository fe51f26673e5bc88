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
and block-sparse masks compose freely, forward and backward, with gradients to sinks, bias and
through lse; any T and S, head dims to 256, of q and v apart (192 / 128). A feature that is not
asked for is not in the compiled kernel. The backward pass writes every gradient from one program,
without atomics: the same bits on every run.

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
import sys
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
    n_q: int, n_k: int, *, local: int = 0, global_: int = 0, stride: int = 0
) -> Tensor:
    """Blocks of the usual sparse patterns (Sparse Transformers, arXiv:1904.10509; BigBird,
    arXiv:2007.14062), to be united with | : fewer than `local` blocks away; the first `global_`
    blocks, as keys and as queries; every `stride`-th block back. bool (n_q, n_k)."""
    a = torch.arange(n_q)[:, None] + n_k - n_q
    b = torch.arange(n_k)
    visit = ((a - b).abs() < local) | (b < global_) | (torch.arange(n_q)[:, None] < global_)
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


FLAGS = (
    "bool causal, float scale, int? window, float? softcap, Tensor? slopes, Tensor? sinks, "
    "Tensor? bias, Tensor? cu_q, Tensor? cu_k, Tensor? prefix, Tensor? lengths, Tensor? visit, "
    "int block"
)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    prefix: Tensor | None = None,
    block_mask: BlockMask | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, _Flags]:
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
            _check(
                ok, f"{name} must be int32 of one dim, 0 first, not {cu.dtype} {tuple(cu.shape)}"
            )
        _check(len(cu_k) == len(cu_seqlens_q), "cu_seqlens_q and cu_seqlens_k differ in length")
        _check(block_mask is None, "block_mask is not for packed sequences (cu_seqlens_q)")
    B, T, Hq, D = q.shape
    S, Hkv = k.shape[1:3]
    _check(k.shape[0] == B and v.shape[:3] == k.shape[:3], "q, k and v differ in batch, or k and v")
    _check(k.shape[3] == D, f"k has head dim {k.shape[3]}, q has {D}")
    _check(Hkv > 0 and Hq % Hkv == 0, f"q has {Hq} heads, no multiple of k's {Hkv}")
    scale = D**-0.5 if scale is None else float(scale)
    _check(scale > 0 and math.isfinite(scale), f"scale must be positive, not {scale}")
    _check(window is None or window >= 1, f"window must be 1 or more, not {window}")
    _check(softcap is None or softcap > 0, f"softcap must be positive, not {softcap}")
    for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        _check(x is None or x.shape == (Hq,), f"{name} must be ({Hq},), one for each head of q")
    if bias is not None:
        _check(bias.dim() <= 4, f"bias has {bias.dim()} dims, at most 4 are (B, Hq, T, S)")
        bias = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
        ok = all(n in (1, full) for n, full in zip(bias.shape, (B, Hq, T, S)))
        _check(ok, f"bias {tuple(bias.shape)} does not broadcast to {(B, Hq, T, S)}")
    n = len(cu_k) - 1 if packed else B
    for name, x in (("prefix", prefix), ("lengths", lengths)):
        ok = x is None or (x.shape == (n,) and x.dtype == torch.int32)
        _check(ok, f"{name} must be int32 ({n},), one for each sequence")
    size, visit = (128, None) if block_mask is None else (block_mask.block, block_mask.visit)
    if visit is not None:
        _check(size >= 16 and size & (size - 1) == 0, f"block_mask: block {size} is no 16, 32, ...")
        ok = visit.dtype == torch.bool and visit.shape[-2:] == (-(-T // size), -(-S // size))
        ok = ok and visit.dim() in (2, 3) and (visit.dim() == 2 or len(visit) in (1, Hq))
        _check(
            ok, f"block_mask: visit must be bool ({-(-T // size)}, {-(-S // size)}), or per head"
        )
        visit = visit.to(q.device).reshape(-1, *visit.shape[-2:])
    slopes = None if alibi_slopes is None else alibi_slopes.float()
    flags = _Flags(
        bool(causal), scale, window, softcap, slopes, sinks, bias,
        cu_seqlens_q, cu_k, prefix, lengths, visit, size,
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
    seen = j < ends.view(-1, 1, 1, 1)
    if f.causal:
        seen = seen & (
            (j <= i) if f.prefix is None else (j <= i) | (j < f.prefix.view(-1, 1, 1, 1))
        )
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
    top = (
        s.detach().amax(-1, keepdim=True)
        if k.shape[1]
        else s.new_full((*s.shape[:3], 1), -math.inf)
    )
    if f.sinks is not None:
        sinks = f.sinks.to(s.dtype).view(1, -1, 1, 1)
        top = torch.maximum(top, sinks.detach())
    top = top.clamp(min=torch.finfo(s.dtype).min)  # so that -inf - top is -inf, not NaN
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    if f.sinks is not None:
        total = total + torch.exp(sinks - top)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (top + total.log()).masked_fill(empty, -math.inf)
    return _values(p / total, v), lse[..., 0]


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
    dtype = torch.promote_types(q.dtype, torch.float32)
    m = q.new_full((B, Hq, t), -math.inf, dtype=dtype)
    l, acc = torch.zeros_like(m), q.new_zeros(B, Hq, t, v.shape[3], dtype=dtype)
    if f.sinks is not None:  # a score that was taken already, whose value is 0
        m, l = f.sinks.detach().to(dtype)[:, None].expand_as(m), l + 1
        l = l * torch.exp(f.sinks.to(dtype)[:, None] - m)
    for start in range(first // chunk * chunk, last, chunk):
        cols = slice(start, min(start + chunk, last))
        if f.visit is None or _visited(f, rows, cols):
            acc, m, l = _absorb((acc, m, l), _scores(q, k, f, rows, cols), v[:, cols])
    empty = l == 0
    l = l.masked_fill(empty, 1)
    lse = (m.clamp(min=torch.finfo(dtype).min) + l.log()).masked_fill(empty, -math.inf)
    return acc / l[..., None], lse


def _visited(f: _Flags, rows: slice, cols: slice) -> bool:
    a, b = (slice(s.start // f.block, -(-s.stop // f.block)) for s in (rows, cols))
    return bool(f.visit[:, a, b].any())


def _chunked(q: Tensor, k: Tensor, v: Tensor, f: _Flags, chunk: int = 512) -> tuple[Tensor, Tensor]:
    """_online for one block of queries after another; the backward pass runs each again."""
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
    q: Tensor, k: Tensor, v: Tensor, *, chunk: int = 512, return_lse: bool = False, **flags: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Step 2: one pass over the keys, `chunk` of them at a time; all queries at once."""
    q, k, v, f = _prepare(q, k, v, **flags)
    core = lambda q, k, v, f: _online(q, k, v, f, slice(0, q.shape[1]), chunk)
    return _answer(*_plain(core, q, k, v, f), f, return_lse)


def chunked_attention(
    q: Tensor, k: Tensor, v: Tensor, *, chunk: int = 512, return_lse: bool = False, **flags: Any
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
# Kernels: what forward and backward share
# --------------------------------------------------------------------------------------------------

# exp2 is the instruction a GPU has, so logits are kept in base 2: multiplied by log2(e)
if triton is not None:
    jit = triton.jit
    LOG2E = tl.constexpr(math.log2(math.e))
else:
    jit = lambda fn=None, **_: fn or (lambda fn: fn)


class _Rules(NamedTuple):
    """What makes a logit of q.k, as kernels take it. A feature that is None compiles to nothing."""

    scale: Any
    softcap: Any
    window: Any
    bias_ptr: Any  # (B, Hq, T, S)
    bias_strides: Any
    slopes_ptr: Any  # (Hq,) fp32
    prefix_ptr: Any  # (sequences,) int32


class _Lists(NamedTuple):
    """BlockMask.lists: for each block of one axis the blocks of the other. strides: head, block."""

    list_ptr: Any
    count_ptr: Any
    stride_h: Any
    stride_a: Any


@jit
def _locate(pid, cu_a, cu_b, n_seqs, len_a, len_b, BLOCK: tl.constexpr):
    """The tile of axis a that program pid owns: sequence, tile in it, start and length of a and b.
    Packed, sequence n owns the tiles from cu[n] // BLOCK + n on: enough for all of its rows, and
    known without asking the device for its lengths; a tile past the end has no rows."""
    seq, tile, start_a, start_b = 0, pid, 0, 0
    if cu_a is not None:
        end = n_seqs
        while end - seq > 1:
            middle = (seq + end) // 2
            before = tl.load(cu_a + middle) // BLOCK + middle <= pid
            seq, end = tl.where(before, middle, seq), tl.where(before, end, middle)
        start_a, start_b = tl.load(cu_a + seq), tl.load(cu_b + seq)
        len_a, len_b = tl.load(cu_a + seq + 1) - start_a, tl.load(cu_b + seq + 1) - start_b
        tile = pid - start_a // BLOCK - seq
    return seq, tile, start_a, len_a, start_b, len_b


@jit
def _key_tiles(i_first, i_last, k_len, prefix, window, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Tiles of keys that queries i_first..i_last see: [first, inner) in part, for the window ends
    there; [inner, outer) whole; [outer, last) in part, for the diagonal or the end is there."""
    first, inner, end, whole = 0, 0, k_len, k_len
    if CAUSAL:
        end = tl.minimum(k_len, tl.maximum(i_last + 1, prefix))
        whole = tl.minimum(k_len, tl.maximum(i_first + 1, prefix))
    if window is not None:
        first = tl.maximum(i_first - window + 1, 0) // BLOCK
        inner = tl.cdiv(tl.maximum(i_last - window + 1, 0), BLOCK)
    last = tl.cdiv(tl.maximum(end, 0), BLOCK)
    inner = tl.minimum(inner, last)
    outer = tl.maximum(inner, tl.maximum(whole, 0) // BLOCK)
    return first, inner, outer, last


@jit
def _query_tiles(
    j_first, j_last, q_len, k_len, prefix, window, CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):
    """The same for keys: tiles of queries that see j_first..j_last in part, whole, in part."""
    offset = k_len - q_len
    begin, whole, end, whole_end = 0, 0, q_len, q_len
    if CAUSAL:
        begin = tl.maximum(tl.where(j_first < prefix, 0, j_first - offset), 0)
        whole = tl.maximum(tl.where(j_last < prefix, 0, j_last - offset), 0)
    if window is not None:
        end = tl.minimum(q_len, j_last + window - offset)
        whole_end = tl.minimum(q_len, j_first + window - offset)
    first, last = begin // BLOCK, tl.cdiv(tl.maximum(end, 0), BLOCK)
    inner = tl.minimum(tl.cdiv(whole, BLOCK), last)
    outer = tl.maximum(inner, tl.maximum(whole_end, 0) // BLOCK)
    return first, inner, outer, last


@jit
def _load(
    ptr, stride, n_rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr,
    CHECK: tl.constexpr = True, stride_c=1,
):  # fmt: skip
    """A tile (ROWS, COLS) from ptr on, zero past WIDTH columns and (CHECK) past n_rows rows."""
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
def _unit(rules):
    """What _logits leaves to be multiplied: with no feature in the way, scaling is part of exp2's
    own multiply-add."""
    if rules.softcap is None and rules.bias_ptr is None and rules.slopes_ptr is None:
        return rules.scale * LOG2E
    else:
        return 1.0


@jit
def _logits(
    s, i, j, offset, k_len, prefix, slope, bias_ptr, rules,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """q.k at positions i and j (of any two shapes that broadcast) -> logits / _unit, and the tanh
    of softcap."""
    tanh = s
    if rules.softcap is not None:
        x = s * (rules.scale / rules.softcap)
        e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
        tanh = tl.where(x < 0, e - 1, 1 - e) / (1 + e)
        s = tanh * (rules.softcap * LOG2E)
    elif rules.bias_ptr is not None or rules.slopes_ptr is not None:
        s = s * (rules.scale * LOG2E)
    if rules.bias_ptr is not None:
        t = i - offset
        ptrs = bias_ptr + t.to(tl.int64) * rules.bias_strides[2] + j * rules.bias_strides[3]
        bias = tl.load(ptrs, mask=(t < k_len - offset) & (j < k_len), other=0.0)
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


@jit
def _prefix_of(rules, sequence):
    if rules.prefix_ptr is not None:
        return tl.load(rules.prefix_ptr + sequence)
    else:
        return 0


# --------------------------------------------------------------------------------------------------
# Forward, which is also decode
# --------------------------------------------------------------------------------------------------


@jit(do_not_specialize=["T", "S", "n_seqs"])
def _forward_kernel(
    q_ptr,  # (B, T, Hq, D)
    k_ptr,  # (B, S, Hkv, D), or a tensor descriptor of it
    v_ptr,  # (B, S, Hkv, Dv), or a tensor descriptor; None: the first BLOCK_D columns of k
    o_ptr,  # (SPLITS, B, T, Hq, DV)
    lse_ptr,  # (SPLITS, B, Hq, T) fp32
    rules, lists, scales,  # scales: of FP8 q, k, v, (B, H, blocks) fp32 each
    sinks_ptr,  # (Hq,)
    cu_q_ptr, cu_k_ptr,  # (n_seqs + 1,) int32
    lengths_ptr,  # (B,) int32
    q_strides, k_strides, v_strides,  # of B, T, H; v's also of D
    T, S, n_seqs,
    D: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr,
    SPLITS: tl.constexpr, CAUSAL: tl.constexpr, SPARSE: tl.constexpr, TMA: tl.constexpr,
    ROUND_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """o = softmax(logits(q k^T)) v, lse = log sum exp. Grid (query tiles * SPLITS, heads, B).

    PACK: a tile's rows are the queries of all GROUP heads of one key head, so that decode reads
    every key once and fills the matrix unit. SPLITS: programs that share a row of tiles, each over
    a part of the keys. D = BLOCK_D + BLOCK_R where it is the sum of two powers of two.
    """
    # the last queries have the most keys to see: begin with them
    pid = (tl.num_programs(0) - 1 - tl.program_id(0)) // SPLITS
    split = tl.program_id(0) % SPLITS
    b = tl.program_id(2).to(tl.int64)
    seq, tile, q_start, q_len, k_start, k_len = _locate(
        pid, cu_q_ptr, cu_k_ptr, n_seqs, T, S, BLOCK_M
    )
    PER_ROW: tl.constexpr = GROUP if PACK else 1
    n_rows = q_len * PER_ROW
    if tile * BLOCK_M >= n_rows:
        return
    if lengths_ptr is not None:
        k_len = tl.load(lengths_ptr + b)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    t = row // PER_ROW
    head = tl.program_id(1) * PER_ROW + row % PER_ROW
    n_heads = tl.num_programs(1) * PER_ROW
    kv_head = tl.program_id(1) if PACK else tl.program_id(1) // GROUP
    offset = k_len - q_len
    i = (t + offset)[:, None]
    prefix = _prefix_of(rules, b + seq)

    valid = (row < n_rows)[:, None]
    q_ptrs = q_ptr + b * q_strides[0] + (q_start + t).to(tl.int64) * q_strides[1]
    q_ptrs = (q_ptrs + head * q_strides[2])[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    q = tl.load(q_ptrs + offs_d, mask=valid & (offs_d < D), other=0.0)
    if BLOCK_R:
        q_rest = tl.load(q_ptrs + BLOCK_D + tl.arange(0, BLOCK_R)[None, :], mask=valid, other=0.0)
    stride_kt, stride_vt = tl.cast(k_strides[1], tl.int64), tl.cast(v_strides[1], tl.int64)
    if not TMA:
        k_base = k_ptr + b * k_strides[0] + k_start * stride_kt + kv_head * k_strides[2]
        if v_ptr is not None:
            v_base = v_ptr + b * v_strides[0] + k_start * stride_vt + kv_head * v_strides[2]
    slope, bias_ptr = 0.0, rules.bias_ptr
    if rules.slopes_ptr is not None:
        slope = tl.load(rules.slopes_ptr + head, mask=row < n_rows, other=0.0)[:, None]
    if rules.bias_ptr is not None:
        bias_ptr += (b * rules.bias_strides[0] + head * rules.bias_strides[1])[:, None]
        bias_ptr += q_start.to(tl.int64) * rules.bias_strides[2] if cu_q_ptr is not None else 0
        bias_ptr += k_start * rules.bias_strides[3]

    unit = _unit(rules)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    if sinks_ptr is not None:  # a key already seen, once
        sink = tl.load(sinks_ptr + head, mask=row < n_rows, other=0.0).to(tl.float32) * LOG2E
        m_i = tl.where(split == 0, sink, m_i)
        l_i = tl.where(split == 0, 1.0, l_i)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)

    i_last = tl.minimum(n_rows - 1, tile * BLOCK_M + BLOCK_M - 1) // PER_ROW + offset
    first, inner, outer, last = _key_tiles(
        tile * BLOCK_M // PER_ROW + offset, i_last, k_len, prefix, rules.window, CAUSAL, BLOCK_N
    )
    if SPARSE:
        at = (tl.program_id(1) * lists.stride_h + tile * BLOCK_M // SPARSE) * 1
        first, inner, outer = 0, 0, 0
        last = tl.load(lists.count_ptr + at) * (SPARSE // BLOCK_N)
        list_ptr = lists.list_ptr + at * lists.stride_a
    if SPLITS > 1:
        share = tl.cdiv(tl.maximum(last - first, 0), SPLITS)
        first += split * share
        last = tl.maximum(first, tl.minimum(last, first + share))
        inner = tl.minimum(tl.maximum(inner, first), last)
        outer = tl.minimum(tl.maximum(outer, inner), last)
    for phase in tl.static_range(3):  # the window's edge, the inside, the diagonal
        MASKED: tl.constexpr = phase != 1
        if phase == 2 or (not SPARSE and (phase == 1 or rules.window is not None)):
            if phase == 0:
                begin, end = first, inner
            elif phase == 1:
                begin, end = inner, outer
            else:
                begin, end = outer, last
            for n in range(begin, end):
                start = n * BLOCK_N
                if SPARSE:
                    R: tl.constexpr = SPARSE // BLOCK_N
                    start = tl.load(list_ptr + n // R) * SPARSE + n % R * BLOCK_N
                j = start + tl.arange(0, BLOCK_N)[None, :]
                if TMA:
                    at_key = [b.to(tl.int32), k_start + start, kv_head, 0]
                    k = k_ptr.load(at_key).reshape([BLOCK_N, BLOCK_D])
                else:
                    k_tile = k_base + start * stride_kt
                    k = _load(k_tile, k_strides[1], k_len - start, BLOCK_N, D, BLOCK_D, MASKED)
                s = tl.dot(q, tl.trans(k), input_precision="ieee")
                if BLOCK_R:
                    k_tile += BLOCK_D
                    k_rest = _load(
                        k_tile, k_strides[1], k_len - start, BLOCK_N, BLOCK_R, BLOCK_R, MASKED
                    )
                    s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision="ieee")
                if scales is not None:
                    s *= _block_scale(scales[0], b * n_heads + head, T, tile * BLOCK_M)[:, None]
                    kv_row = b * (n_heads // GROUP) + kv_head
                    s *= _block_scale(scales[1], kv_row, S, start)
                s, _ = _logits(
                    s, i, j, offset, k_len, prefix, slope, bias_ptr, rules, CAUSAL, MASKED
                )
                m_new = tl.maximum(m_i, tl.max(s, 1) * unit)
                base = m_new
                if MASKED or rules.bias_ptr is not None:  # a row may have seen nothing so far
                    base = tl.where(m_new == float("-inf"), 0.0, m_new)
                p = tl.exp2(s * unit - base[:, None])
                alpha = tl.exp2(m_i - base)
                acc *= alpha[:, None]
                if v_ptr is None:
                    v = k
                elif TMA:
                    v = v_ptr.load([b.to(tl.int32), k_start + start, kv_head, 0])
                    v = v.reshape([BLOCK_N, BLOCK_DV])
                    if MASKED:  # the next sequence's, perhaps not finite
                        v = tl.where(tl.trans(j) < k_len, v, 0.0)
                else:
                    v = _load(
                        v_base + start * stride_vt, v_strides[1], k_len - start,
                        BLOCK_N, DV, BLOCK_DV, MASKED, v_strides[3],
                    )  # fmt: skip
                if scales is not None:  # p * 256: out of e4m3's subnormal range
                    v_scale = _block_scale(scales[2], kv_row, S, start) / 256
                    p8, v = p * 256, v if ROUND_P else v.to(tl.float32)
                    acc += tl.dot(p8.to(v.dtype), v, input_precision="ieee") * v_scale
                else:
                    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
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
    o_parts_ptr,  # (SPLITS, B, T, Hq, DV) fp32
    lse_parts_ptr,  # (SPLITS, B, Hq, T) fp32
    o_ptr, lse_ptr,  # the same without SPLITS
    T, DV: tl.constexpr, SPLITS: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """merge_attention of all splits. Grid (T, Hq, B)."""
    t, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n_heads, rows = tl.num_programs(1), tl.num_programs(2) * tl.num_programs(1) * T
    at, at_lse = (b * T + t) * n_heads + head, (b * n_heads + head) * T + t
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_DV)
    lse = tl.load(lse_parts_ptr + s * rows + at_lse, mask=s < SPLITS, other=float("-inf"))
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((lse - top) * LOG2E), 0)
    total_or_1 = tl.where(total == 0, 1.0, total)
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    for n in range(SPLITS):
        w = tl.exp2((tl.load(lse_parts_ptr + n * rows + at_lse) - top) * LOG2E)
        part_ptr = o_parts_ptr + (n * rows + at).to(tl.int64) * DV
        acc += w * tl.load(part_ptr + d, mask=d < DV, other=0.0)
    o = (acc / total_or_1).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + at.to(tl.int64) * DV + d, o, mask=d < DV)
    tl.store(
        lse_ptr + at_lse, tl.where(total == 0, float("-inf"), top + tl.log2(total_or_1) / LOG2E)
    )


# --------------------------------------------------------------------------------------------------
# Backward
# --------------------------------------------------------------------------------------------------
#
# With p = exp(logit - lse), dp = do v^T and delta = sum(o * do) - dlse for each row:
#
#     dv = p^T do      d logit = p * (dp - delta)      dq = scale * ds k      dk = scale * ds^T q
#
# where ds is d logit through softcap's tanh. Tensors here are contiguous, so their strides are
# their shapes.


@jit
def _delta_kernel(
    o_ptr, do_ptr, dlse_ptr, delta_ptr, T, DV: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta (B, Hq, T) = sum over Dv of o * do (B, T, Hq, Dv), less dlse. Grid (T tiles, Hq, B)."""
    start, head, n_heads = tl.program_id(0) * BLOCK, tl.program_id(1), tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    at = ((b * T + start) * n_heads + head) * DV
    o = _load(o_ptr + at, n_heads * DV, T - start, BLOCK, DV, BLOCK_DV).to(tl.float32)
    do = _load(do_ptr + at, n_heads * DV, T - start, BLOCK, DV, BLOCK_DV).to(tl.float32)
    t = start + tl.arange(0, BLOCK)
    row = (b * n_heads + head) * T + t
    dlse = tl.load(dlse_ptr + row, mask=t < T, other=0.0)
    tl.store(delta_ptr + row, tl.sum(o * do, 1) - dlse, mask=t < T)


@jit
def _query_side(
    x, b, head, T, begin, left, HQ: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """q, do, lse (base 2) and delta of ROWS queries from row `begin` on, of which `left` exist. One
    that does not, or sees nothing, gets lse = inf, and so p = 0."""
    q_ptr, _, _, do_ptr, lse_ptr, delta_ptr = x
    at = (b * T + begin) * HQ + head
    q = _load(q_ptr + at * D, HQ * D, left, ROWS, D, BLOCK_D)
    do = _load(do_ptr + at * DV, HQ * DV, left, ROWS, DV, BLOCK_DV)
    r = tl.arange(0, ROWS)
    row = (b * HQ + head) * T + begin + r
    lse = tl.load(lse_ptr + row, mask=r < left, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    return q, do, lse, tl.load(delta_ptr + row, mask=r < left, other=0.0)


@jit
def _key_side(
    x, b, kv_head, S, begin, left, HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """k and v of ROWS keys from row `begin` on, of which `left` exist."""
    _, k_ptr, v_ptr, _, _, _ = x
    at = (b * S + begin) * HKV + kv_head
    k = _load(k_ptr + at * D, HKV * D, left, ROWS, D, BLOCK_D, CHECK)
    return k, _load(v_ptr + at * DV, HKV * DV, left, ROWS, DV, BLOCK_DV, CHECK)


@jit
def _tile_gradient(
    q, k, v, do, lse, delta, i, j, offset, k_len, prefix, slope, bias_ptr, rules,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """p, d logit and ds of one tile: (queries, keys), or (keys, queries) BY_KEY."""
    if BY_KEY:
        s = tl.dot(k, tl.trans(q), input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
    else:
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    s, tanh = _logits(s, i, j, offset, k_len, prefix, slope, bias_ptr, rules, CAUSAL, MASKED)
    p = tl.exp2(s * _unit(rules) - lse)
    dlogit = p * (dp - delta)
    ds = dlogit
    if rules.softcap is not None:
        ds = dlogit * (1 - tanh * tanh)
    return p, dlogit, ds


@jit
def _head_rules(rules, b, head, q_start, k_start):
    """ALiBi slope of a head, and where its bias begins."""
    slope, bias_ptr = 0.0, rules.bias_ptr
    if rules.slopes_ptr is not None:
        slope = tl.load(rules.slopes_ptr + head)
    if rules.bias_ptr is not None:
        strides = rules.bias_strides
        bias_ptr += b * strides[0] + head * strides[1]
        bias_ptr += q_start * tl.cast(strides[2], tl.int64) + k_start * strides[3]
    return slope, bias_ptr


@jit
def _key_value_gradient(
    pid, kv_head, b, x, dk_ptr, dv_ptr, rules, lists, cu_q_ptr, cu_k_ptr, T, S, n_seqs,
    HQ: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys: sums over the queries of all heads in its group."""
    seq, tile, k_start, k_len, q_start, q_len = _locate(
        pid, cu_k_ptr, cu_q_ptr, n_seqs, S, T, BLOCK_N
    )
    HKV: tl.constexpr = HQ // GROUP
    key = tile * BLOCK_N
    left = tl.maximum(k_len - key, 0)
    offset, prefix = k_len - q_len, _prefix_of(rules, b + seq)
    j = key + tl.arange(0, BLOCK_N)[:, None]
    k, v = _key_side(
        x, b, kv_head, S, k_start + key, left, HKV, D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, True
    )
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    first, inner, outer, last = _query_tiles(
        key, tl.minimum(key + BLOCK_N, k_len) - 1, q_len, k_len, prefix, rules.window, CAUSAL,
        BLOCK_M,
    )  # fmt: skip
    last = tl.where(left > 0, last, 0)
    for g in range(GROUP):
        head = kv_head * GROUP + g
        slope, bias_ptr = _head_rules(rules, b, head, q_start, k_start)
        if SPARSE:
            at = head * lists.stride_h + key // SPARSE
            first, inner, outer = 0, 0, 0
            last = tl.load(lists.count_ptr + at) * (SPARSE // BLOCK_M)
            list_ptr = lists.list_ptr + at * lists.stride_a
        for phase in tl.static_range(3):  # the diagonal, the inside, the window's edge or the end
            MASKED: tl.constexpr = phase != 1
            if phase == 2 or (not SPARSE and (phase == 1 or CAUSAL)):
                if phase == 0:
                    begin, end = first, tl.minimum(inner, last)
                elif phase == 1:
                    begin, end = inner, tl.minimum(outer, last)
                else:
                    begin, end = outer, last
                for n in range(begin, end):
                    start = n * BLOCK_M
                    if SPARSE:
                        R: tl.constexpr = SPARSE // BLOCK_M
                        start = tl.load(list_ptr + n // R) * SPARSE + n % R * BLOCK_M
                    q, do, lse, delta = _query_side(
                        x, b, head, T, q_start + start, q_len - start, HQ, D, DV, BLOCK_M,
                        BLOCK_D, BLOCK_DV,
                    )  # fmt: skip
                    i = (start + offset + tl.arange(0, BLOCK_M))[None, :]
                    p, _, ds = _tile_gradient(
                        q, k, v, do, lse[None, :], delta[None, :], i, j, offset, k_len, prefix,
                        slope, bias_ptr, rules, CAUSAL, MASKED, True,
                    )  # fmt: skip
                    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
                    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    at = (b * S + k_start + key) * HKV + kv_head
    _store(dk_ptr + at * D, dk * rules.scale, HKV * D, left, BLOCK_N, D, BLOCK_D)
    _store(dv_ptr + at * DV, dv, HKV * DV, left, BLOCK_N, DV, BLOCK_DV)


@jit
def _query_gradient(
    pid, head, b, x, dq_ptr, rules, lists, cu_q_ptr, cu_k_ptr, T, S, n_seqs,
    HQ: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries: a sum over the keys that they see."""
    seq, tile, q_start, q_len, k_start, k_len = _locate(
        pid, cu_q_ptr, cu_k_ptr, n_seqs, T, S, BLOCK_M
    )
    query = tile * BLOCK_M
    left = tl.maximum(q_len - query, 0)
    offset, prefix = k_len - q_len, _prefix_of(rules, b + seq)
    i = (query + offset + tl.arange(0, BLOCK_M))[:, None]
    slope, bias_ptr = _head_rules(rules, b, head, q_start, k_start)
    q, do, lse, delta = _query_side(
        x, b, head, T, q_start + query, left, HQ, D, DV, BLOCK_M, BLOCK_D, BLOCK_DV
    )
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    first, inner, outer, last = _key_tiles(
        query + offset, tl.minimum(query + BLOCK_M, q_len) - 1 + offset, k_len, prefix,
        rules.window, CAUSAL, BLOCK_N,
    )  # fmt: skip
    if SPARSE:
        at = head * lists.stride_h + query // SPARSE
        first, inner, outer = 0, 0, 0
        last = tl.load(lists.count_ptr + at) * (SPARSE // BLOCK_N)
        list_ptr = lists.list_ptr + at * lists.stride_a
    last = tl.where(left > 0, last, 0)
    for phase in tl.static_range(3):
        MASKED: tl.constexpr = phase != 1
        if phase == 2 or (not SPARSE and (phase == 1 or rules.window is not None)):
            if phase == 0:
                begin, end = first, tl.minimum(inner, last)
            elif phase == 1:
                begin, end = inner, tl.minimum(outer, last)
            else:
                begin, end = outer, last
            for n in range(begin, end):
                start = n * BLOCK_N
                if SPARSE:
                    R: tl.constexpr = SPARSE // BLOCK_N
                    start = tl.load(list_ptr + n // R) * SPARSE + n % R * BLOCK_N
                k, v = _key_side(
                    x, b, head // GROUP, S, k_start + start, k_len - start, HQ // GROUP, D, DV,
                    BLOCK_N, BLOCK_D, BLOCK_DV, MASKED,
                )  # fmt: skip
                j = start + tl.arange(0, BLOCK_N)[None, :]
                _, _, ds = _tile_gradient(
                    q, k, v, do, lse[:, None], delta[:, None], i, j, offset, k_len, prefix,
                    slope, bias_ptr, rules, CAUSAL, MASKED, False,
                )  # fmt: skip
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    at = (b * T + q_start + query) * HQ + head
    _store(dq_ptr + at * D, dq * rules.scale, HQ * D, left, BLOCK_M, D, BLOCK_D)


@jit
def _store(ptr, x, stride, n_rows, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr):
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    x = x.to(ptr.dtype.element_ty)
    tl.store(ptr + r * stride + c, x, mask=(r < n_rows) & (c < WIDTH))


@jit(do_not_specialize=["T", "S", "n_seqs", "n_key_tiles", "n_query_tiles"])
def _backward_kernel(
    x,  # q, k, v, do (B, T, Hq, Dv), lse and delta (B, Hq, T)
    dq_ptr, dk_ptr, dv_ptr,  # like q, k, v
    rules, by_query, by_key, cu_q_ptr, cu_k_ptr, T, S, n_seqs, n_key_tiles, n_query_tiles,
    HQ: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M1: tl.constexpr, BLOCK_N1: tl.constexpr, BLOCK_M2: tl.constexpr,
    BLOCK_N2: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """All gradients but the bias's. Grid (key tiles + GROUP * query tiles, Hkv, B): the first
    programs, which have the most to do, write a tile of dk and dv each, the others one of dq."""
    pid, kv_head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if pid < n_key_tiles:
        _key_value_gradient(
            pid, kv_head, b, x, dk_ptr, dv_ptr, rules, by_key, cu_q_ptr, cu_k_ptr, T, S, n_seqs,
            HQ, GROUP, D, DV, BLOCK_M1, BLOCK_N1, BLOCK_D, BLOCK_DV, CAUSAL, SPARSE,
        )  # fmt: skip
    else:
        pid -= n_key_tiles
        head = kv_head * GROUP + pid // n_query_tiles
        _query_gradient(
            pid % n_query_tiles, head, b, x, dq_ptr, rules, by_query, cu_q_ptr, cu_k_ptr, T, S,
            n_seqs, HQ, GROUP, D, DV, BLOCK_M2, BLOCK_N2, BLOCK_D, BLOCK_DV, CAUSAL, SPARSE,
        )  # fmt: skip


@jit(do_not_specialize=["T", "S", "n_seqs", "B"])
def _bias_kernel(
    x, dbias_ptr,  # (B or 1, Hq or 1, T, S) fp32, zeros
    rules, visit_ptr, visit_strides, cu_q_ptr, cu_k_ptr, T, S, n_seqs, B,
    HQ: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """The bias's gradient: d logit, summed in a loop over the batch rows and heads that share it.
    Grid (query tiles, Hq or 1, B or 1)."""
    seq, tile, q_start, q_len, k_start, k_len = _locate(
        tl.program_id(0), cu_q_ptr, cu_k_ptr, n_seqs, T, S, BLOCK_M
    )
    query, offset = tile * BLOCK_M, k_len - q_len
    n_heads, n_batch = HQ // tl.num_programs(1), B // tl.num_programs(2)
    t = query + tl.arange(0, BLOCK_M)[:, None]
    out = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    out_ptrs = dbias_ptr + (out * T + q_start + t) * S + k_start
    last = tl.where(query < q_len, tl.cdiv(k_len, BLOCK_N), 0)
    for n in range(0, last):
        start = n * BLOCK_N
        j = start + tl.arange(0, BLOCK_N)[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for shared in range(0, n_heads * n_batch):
            b = (tl.program_id(2) * n_batch + shared // n_heads).to(tl.int64)
            head = tl.program_id(1) * n_heads + shared % n_heads
            slope, bias_ptr = _head_rules(rules, b, head, q_start, k_start)
            q, do, lse, delta = _query_side(
                x, b, head, T, q_start + query, q_len - query, HQ, D, DV, BLOCK_M, BLOCK_D,
                BLOCK_DV,
            )  # fmt: skip
            k, v = _key_side(
                x, b, head // GROUP, S, k_start + start, k_len - start, HQ // GROUP, D, DV,
                BLOCK_N, BLOCK_D, BLOCK_DV, True,
            )  # fmt: skip
            _, dlogit, _ = _tile_gradient(
                q, k, v, do, lse[:, None], delta[:, None], t + offset, j, offset, k_len,
                _prefix_of(rules, b + seq), slope, bias_ptr, rules, CAUSAL, True, False,
            )  # fmt: skip
            if SPARSE:
                at = head * visit_strides[0] + query // SPARSE * visit_strides[1] + start // SPARSE
                dlogit = tl.where(tl.load(visit_ptr + at) != 0, dlogit, 0.0)
            total += dlogit
        tl.store(out_ptrs + j, total, mask=(t < q_len) & (j < k_len))


# --------------------------------------------------------------------------------------------------
# Launchers
# --------------------------------------------------------------------------------------------------

# (BLOCK_M, BLOCK_N, num_warps, num_stages, TMA) for head dims up to the key. "decode": BLOCK_M is
# an upper bound there. "backward": tiles of (queries, keys) for dk and dv, then for dq.
CONFIGS: dict[str, dict[int, tuple]] = {
    "forward": {64: (128, 128, 4, 3, True), 128: (128, 64, 8, 3, True), 256: (64, 64, 8, 2, False)},
    "decode": {64: (64, 128, 4, 3, False), 128: (64, 64, 4, 3, False), 512: (16, 32, 8, 2, False)},
    "backward": {
        64: (64, 128, 128, 64, 8, 3),
        128: (64, 128, 128, 64, 8, 3),
        256: (32, 64, 64, 32, 8, 1),
    },
}


def _config(kind: str, dim: int, *caps: int) -> tuple:
    table = CONFIGS[kind]
    return table[min((d for d in table if d >= dim), default=max(table))]


def _power(n: int) -> int:
    """The power of two from n on, and at least what a matrix unit takes."""
    return max(16, 1 << (n - 1).bit_length())


def _split_dim(D: int) -> tuple[int, int]:
    """BLOCK_D and BLOCK_R: 192 = 128 + 64, 576 = 512 + 64; or one power of two around D."""
    low = 1 << (D.bit_length() - 1)
    rest = D - low
    return (low, rest) if rest >= 16 and rest & (rest - 1) == 0 else (_power(D), 0)


@lru_cache
def _device(index: int | None) -> tuple[int, int, int]:
    """Processors, bytes of shared memory a program may have, and major compute capability."""
    if index is None:  # the interpreter: some device
        return 132, 232448, 9
    p = torch.cuda.get_device_properties(index)
    return p.multi_processor_count, p.shared_memory_per_block_optin, p.major


def _rules(f: _Flags, q: Tensor, k: Tensor) -> _Rules:
    strides = None
    if f.bias is not None:
        full = f.bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        strides = full.stride()
    return _Rules(f.scale, f.softcap, f.window, f.bias, strides, f.slopes, f.prefix)


def _lists(f: _Flags, by_key: bool = False) -> _Lists | None:
    """For each query block the key blocks that it visits, in order; by_key the other way round."""
    if f.visit is None:
        return None
    visit = (f.visit.transpose(1, 2) if by_key else f.visit).to(torch.int8)
    order = visit.argsort(dim=-1, descending=True, stable=True).int().contiguous()
    count = visit.sum(-1, dtype=torch.int32).contiguous()
    return _Lists(order, count, count.shape[1] if len(count) > 1 else 0, order.shape[2])


def _tiles(length: int, cu: Tensor | None, block: int) -> int:
    """Programs for `length` rows; packed, as many as there could be."""
    return -(-length // block) if cu is None else length // block + len(cu) - 1


def _forward(
    q: Tensor, k: Tensor, v: Tensor | None, f: _Flags, *, pack: bool = False, splits: int = 1,
    latent_dim: int = 0, scales: tuple[Tensor, Tensor, Tensor] | None = None, dtype=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernel: o (B, T, Hq, Dv) and lse (B, Hq, T)."""
    (B, T, Hq, D), (S, Hkv) = q.shape, k.shape[1:3]
    DV = latent_dim or v.shape[3]
    BLOCK_D, BLOCK_R = _split_dim(D)
    BLOCK_DV = BLOCK_D if v is None else _power(DV)
    M, N, warps, stages, tma = _config("decode" if pack else "forward", max(BLOCK_D, BLOCK_DV))
    processors, shared, major = _device(q.device.index)
    rows = T * Hq // Hkv if pack else T
    M = min(M, _power(rows))
    if f.visit is not None:
        M, N = min(M, f.block), min(N, f.block)
    while stages * N * (BLOCK_D + BLOCK_R + BLOCK_DV) * q.element_size() > shared - (16 << 10):
        stages, N = (stages - 1, N) if stages > 2 else (stages, N // 2)
    q = q if q.stride(3) == 1 else q.contiguous()
    k = k if k.stride(3) == 1 else k.contiguous()
    tma = tma and major >= 9 and not BLOCK_R and (D, DV) == (BLOCK_D, BLOCK_DV) and v is not None
    tma = tma and scales is None and all(_tma_ready(x) for x in (k, v))
    shape = (B, T, Hq, DV)
    empty = torch.empty if f.cu_q is None else torch.zeros  # rows of no sequence stay 0, -inf
    dtype = dtype or q.dtype
    o = empty(shape, dtype=dtype, device=q.device)
    lse = torch.full((B, Hq, T), -math.inf, device=q.device)
    if o.numel() == 0:
        return o, lse
    o_parts, lse_parts = o, lse
    if splits > 1:
        o_parts = torch.empty((splits, *shape), dtype=torch.float32, device=q.device)
        lse_parts = lse.new_empty((splits, B, Hq, T))
    k_strides, v_strides = k.stride(), (k if v is None else v).stride()
    if tma:
        k, v = _descriptor(k, N), _descriptor(v, N)
    grid = (_tiles(rows, f.cu_q, M) * splits, Hkv if pack else Hq, B)
    _forward_kernel[grid](
        q, k, v, o_parts, lse_parts, _rules(f, q, q.new_empty(1, S)), _lists(f),
        scales, f.sinks, f.cu_q, f.cu_k, f.lengths, q.stride()[:3], k_strides[:3], v_strides,
        T, S, 0 if f.cu_q is None else len(f.cu_q) - 1, D=D, DV=DV, GROUP=Hq // Hkv, PACK=pack,
        SPLITS=splits, CAUSAL=f.causal, SPARSE=f.block if f.visit is not None else 0, TMA=tma,
        ROUND_P=not INTERPRET, BLOCK_M=M, BLOCK_N=N, BLOCK_D=BLOCK_D, BLOCK_R=BLOCK_R,
        BLOCK_DV=BLOCK_DV, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[T, Hq, B](
            o_parts, lse_parts, o, lse, T, DV=DV, SPLITS=splits, BLOCK_DV=_power(DV),
            BLOCK_S=_power(splits), num_warps=4,
        )  # fmt: skip
    return o, lse


def _tma_ready(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can read x: 16-byte rows, the last dim together."""
    size = x.element_size()
    return x.stride(3) == 1 and all(s * size % 16 == 0 for s in x.stride()[:3] + (x.data_ptr(),))


def _descriptor(x: Tensor, rows: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, 1, x.shape[3]])


def _backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor, f: _Flags,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the backward kernels: dq, dk, dv, dbias and dsinks (empty where there is none)."""
    q, k, v, do = (x.contiguous() for x in (q, k, v, do))
    (B, T, Hq, D), (S, Hkv), DV = q.shape, k.shape[1:3], v.shape[3]
    BLOCK_D, BLOCK_DV = _power(D), _power(DV)
    M1, N1, M2, N2, warps, stages = _config("backward", max(BLOCK_D, BLOCK_DV))
    if q.element_size() == 4:
        M1, N1, M2, N2 = (max(16, x // 2) for x in (M1, N1, M2, N2))
    if f.visit is not None:
        M1, N1, M2, N2 = (min(x, f.block) for x in (M1, N1, M2, N2))
    delta = torch.empty_like(lse)
    dq, dk, dv = (
        torch.zeros_like(x) if f.cu_q is not None else torch.empty_like(x) for x in (q, k, v)
    )
    none = q.new_empty(0)
    if q.numel() == 0 or k.numel() == 0:
        zero = [torch.zeros_like(x) if x is not None else none for x in (f.bias, f.sinks)]
        return dq.zero_(), dk.zero_(), dv.zero_(), *zero
    _delta_kernel[-(-T // 64), Hq, B](
        o, do, dlse.contiguous(), delta, T, DV=DV, BLOCK=64, BLOCK_DV=BLOCK_DV, num_warps=4
    )
    x, rules = (q, k, v, do, lse, delta), _rules(f, q, k)
    n_seqs = 0 if f.cu_q is None else len(f.cu_q) - 1
    key_tiles, query_tiles = _tiles(S, f.cu_k, N1), _tiles(T, f.cu_q, M2)
    sizes = dict(HQ=Hq, GROUP=Hq // Hkv, D=D, DV=DV, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV)
    sizes |= dict(CAUSAL=f.causal, SPARSE=f.block if f.visit is not None else 0)
    sizes |= dict(num_warps=warps, num_stages=stages)
    _backward_kernel[key_tiles + Hq // Hkv * query_tiles, Hkv, B](
        x, dq, dk, dv, rules, _lists(f), _lists(f, True), f.cu_q, f.cu_k,
        T, S, n_seqs, key_tiles, query_tiles, BLOCK_M1=M1, BLOCK_N1=N1, BLOCK_M2=M2,
        BLOCK_N2=N2, **sizes,
    )  # fmt: skip
    dbias = dsinks = none
    if bias_grad:
        heads, batch = f.bias.shape[1], f.bias.shape[0]
        dbias = torch.zeros(batch, heads, T, S, device=q.device)
        visit = None if f.visit is None else f.visit.expand(Hq, -1, -1).to(torch.int8)
        strides = None if visit is None else visit.stride()[:2]
        _bias_kernel[query_tiles, heads, batch](
            x, dbias, rules, visit, strides, f.cu_q, f.cu_k, T, S, n_seqs, B, BLOCK_M=M2,
            BLOCK_N=N2, **sizes,
        )  # fmt: skip
        dbias = dbias.sum_to_size(f.bias.shape).to(f.bias.dtype)
    if f.sinks is not None:
        p = torch.exp(f.sinks.float()[:, None] - lse)
        dsinks = -(p * delta).masked_fill(lse == -math.inf, 0).sum((0, 2)).to(f.sinks.dtype)
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
    return _backward(q, k, v, o, lse, do, dlse, _Flags(*flags), bias_grad)


@_backward_op.register_fake
def _(q, k, v, o, lse, do, dlse, bias_grad, *flags):
    f, like = _Flags(*flags), lambda x: torch.empty_like(x, memory_format=torch.contiguous_format)
    none = q.new_empty(0)
    bias = like(f.bias) if bias_grad else none
    return like(q), like(k), like(v), bias, none if f.sinks is None else like(f.sinks)


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
    f = _Flags(*flags)
    return _forward(q, k, v, f, pack=True, splits=splits, latent_dim=latent_dim)


@_decode_op.register_fake
def _(q, k, v, latent_dim, splits, *flags):
    B, T, Hq, _ = q.shape
    DV = latent_dim if v is None else v.shape[3]
    return q.new_empty(B, T, Hq, DV), q.new_empty(B, Hq, T, dtype=torch.float32)


# --------------------------------------------------------------------------------------------------
# What is called
# --------------------------------------------------------------------------------------------------


def _kernels(q: Tensor, dim: int = 256) -> bool:
    """Whether a Triton kernel can take q."""
    runs = triton is not None and (q.is_cuda or INTERPRET)
    return runs and q.dtype != torch.float64 and q.shape[-1] <= dim


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    prefix: Tensor | None = None,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
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
    if not _kernels(q) or v.shape[3] > 256:
        return _answer(*_plain(_chunked, q, k, v, f), f, return_lse)
    dtype = q.dtype
    if INTERPRET and dtype == torch.bfloat16:  # which the interpreter gets wrong
        q, k, v = q.float(), k.float(), v.float()
    o, lse = _forward_op(q, k, v, *f)
    return _answer(o.to(dtype), lse, f, return_lse)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    lengths: Tensor | None = None,
    *,
    latent_dim: int | None = None,
    n_splits: int | None = None,
    return_lse: bool = False,
    **flags: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few new queries to a cache: o (B, T, Hq, Dv). Not differentiable.

    k (B, S, Hkv, D), v (B, S, Hkv, Dv): a dense cache of any strides, of which row b uses
    lengths[b] slots (int32; None: all S), the T queries being its last. With latent_dim (absorbed
    MLA) v is None: the values are the first latent_dim columns of k, and are read once. flags:
    causal, scale, window, softcap, alibi_slopes, sinks, as of flash_attention.

    The keys of a row are split over n_splits programs (flash-decoding); None: enough to fill the
    GPU. With n_splits given, a row's bits do not depend on the batch that it is in.
    """
    _check((v is None) == (latent_dim is not None), "decode needs v, or latent_dim instead of it")
    values = k[..., :latent_dim] if v is None else v
    q, k, values, f = _prepare(q, k, values, lengths=lengths, **flags)
    if not _kernels(q, 1024):
        return _answer(*_plain(_chunked, q, k, values, f), f, return_lse)
    dtype = q.dtype
    if INTERPRET and dtype == torch.bfloat16:
        q, k, values = q.float(), k.float(), values.float()
    shared = v is None and _split_dim(q.shape[3])[0] == latent_dim
    splits = n_splits or _n_splits(q, k)
    o, lse = _decode_op(q, k, None if shared else values, latent_dim if shared else 0, splits, *f)
    return _answer(o.to(dtype), lse, f, return_lse)


def _n_splits(q: Tensor, k: Tensor) -> int:
    """Enough programs for two on each processor, but 256 keys or more in each."""
    (B, T, Hq, _), (S, Hkv) = q.shape, k.shape[1:3]
    programs = B * Hkv * -(-T * Hq // Hkv // 64)
    wanted = -(-2 * _device(q.device.index)[0] // programs)
    return max(1, min(wanted, S // 256, 64))


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

    def attend(spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        flags = dict(
            scale=spec.scale, window=spec.window, softcap=spec.softcap,
            alibi_slopes=spec.alibi_slopes, sinks=spec.sinks,
        )  # fmt: skip
        if cu_seqlens is not None:
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
    _check(n > 0 and n & (n - 1) == 0, f"a Hadamard matrix needs a power of two, not {n}")
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
        q, k = q.float() @ h, k.float() @ h
    (q, qs), (k, ks), (v, vs) = quantize_blocks(q), quantize_blocks(k), quantize_blocks(v)
    if not _kernels(q):
        return _fp8_reference(q, k, v, f, (qs, ks, vs)).to(dtype)
    # the second product wants the keys' axis together, as the tensor cores read it
    v = v.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
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
