"""Mixture of experts (MoE): routing, load balancing, and a grouped matmul for dropless experts.

An MoE layer has the parameters of E feed-forward networks and the FLOPs of K: a router selects K
experts per token (Shazeer et al., arXiv:1701.06538). It has three parts:

1. Routing. `route` implements Switch, Mixtral, Qwen3-MoE, DeepSeek-V2 and V3: softmax or sigmoid
   scores in fp32, the top K of all experts or of the best groups, and an expert bias that affects
   the choice but not the weights.
2. Load balancing. Without it a router favours the experts that learned first. Auxiliary losses
   (Switch, GShard; DeepSeek's per sequence; the z-loss keeps logits small) act through gradients;
   `update_bias_` instead moves the expert bias against the load after each step, without a loss.
3. Experts. `grouped_experts` runs all experts at once and drops no token, however skewed the load.
   MegaBlocks (arXiv:2211.15841) pads slots to whole blocks for a block-sparse matmul; here slots
   are sorted by expert, a tile ends where an expert's slots end, and five kernels run:

       h = silu(x Wg^T) * (x Wu^T)     gathers rows of x as it reads them, both matmuls in one loop
       y = p h Wd^T                    writes rows in the order of slots
       out = the sum of its K slots    in a fixed order, without atomics: deterministic
       dh, dp, dSwiGLU from dy Wd      in one epilogue; dp needs h, so y is not saved
       dWg, dWu, dWd                   one program per tile of an expert, over all its rows

   For few tokens tiles have 16 rows, and each active expert's weights are read once. Weights may be
   int8, int4 or FP8, dequantized in registers. On a CPU, plain torch: one sort, two matmuls per
   active expert, one pass that gathers and sums.

Cost: a sort of N * K ids, and memory for the outputs of all slots before they are summed. When it
loses: at K = E, where a dense matmul is simpler; few tokens spread over many experts take as long
as reading those experts; on a CPU with bf16 matrix units a plain loop over large experts is nearly
as fast. Hook: experts, by `use_grouped_experts(model)`. Equivalence (test_all.py): outputs and all
gradients match the plain loop, 1e-5 in fp32.

Shapes: N tokens, K experts per token, E experts, C model width, F expert width, M = N * K slots:
slot n * K + k is the k-th choice of token n. An id of -1 is padding: the slot adds nothing.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, Windows: plain torch only
    triton = None

INTERPRET = triton is not None and triton.knobs.runtime.interpret
# For fp32 inputs: tf32x3, three tf32 matmuls, has fp32's accuracy on tensor cores
PRECISION = tl.constexpr("ieee" if INTERPRET else "tf32x3") if triton else None
jit = triton.jit if triton else (lambda fn=None, **_: fn or (lambda fn: fn))


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Routing
# --------------------------------------------------------------------------------------------------


def _scores(logits: Tensor, scoring: str) -> Tensor:
    _check(scoring in ("softmax", "sigmoid"), f"scoring must be softmax or sigmoid, not {scoring}")
    return logits.float().softmax(-1) if scoring == "softmax" else logits.float().sigmoid()


def route(
    logits: Tensor, top_k: int, *, scoring: str = "softmax", renormalize: bool = False,
    bias: Tensor | None = None, n_groups: int = 1, topk_groups: int = 1,
    group_score_topk: int = 1, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Select each token's experts: logits (N, E) -> weights (N, K) fp32, ids (N, K).

    s = softmax or sigmoid of the logits; ids = the top_k largest s + bias among the allowed groups;
    weights = s[ids], divided by their sum with `renormalize`, times `scale`. `bias` (E,) affects
    only the choice (DeepSeek-V3, arXiv:2412.19437, 2.1.2). Groups are n_groups equal ranges of
    experts, those of a device or node: a token may use the topk_groups groups with the highest sum
    of their group_score_topk best scores (1: device-limited, arXiv:2405.04434, 2.1.2; 2:
    node-limited, V3). Mixtral, Qwen3-MoE: softmax and renormalize; Switch: top_k 1. ValueError
    names the invalid argument; on a GPU logits are not checked, and weights of logits that are not
    finite are not finite.
    """
    _check(logits.dim() == 2, f"logits must be (N, E), not {tuple(logits.shape)}")
    E = logits.shape[1]
    ok = n_groups >= 1 and E % n_groups == 0
    _check(ok, f"n_groups {n_groups} does not divide the {E} experts")
    size = E // n_groups
    for name, n, most in (
        ("topk_groups", topk_groups, n_groups),
        ("top_k", top_k, size * topk_groups),
        ("group_score_topk", group_score_topk, size),
    ):
        ok = 1 <= n <= most
        _check(ok, f"{name} must be from 1 to {most} ({E} experts, {n_groups} groups), not {n}")
    ok = bias is None or bias.shape == (E,)
    _check(ok, f"bias must be ({E},), not {None if ok else tuple(bias.shape)}")
    _check_finite(logits)
    scores = _scores(logits, scoring)
    choice = scores.detach() if bias is None else scores.detach() + bias
    if topk_groups < n_groups:
        groups = choice.unflatten(1, (n_groups, -1))
        group_scores = groups.topk(group_score_topk, dim=-1).values.sum(-1)
        best = group_scores.topk(topk_groups, dim=-1).indices
        excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best, False)
        choice = groups.masked_fill(excluded[..., None], -math.inf).flatten(1)
    ids = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids


def _check_finite(logits: Tensor) -> None:
    if logits.device.type == "cpu" and not torch.compiler.is_compiling():  # a GPU would synchronize
        finite = logits.detach().isfinite().all(-1)
        first = int(finite.int().argmin()) if len(finite) else 0
        message = f"logits of token {first} are not finite: check the model's weights and x"
        _check(bool(finite.all()), message)


# --------------------------------------------------------------------------------------------------
# Load balancing
# --------------------------------------------------------------------------------------------------


def router_probs(logits: Tensor, scoring: str = "softmax") -> Tensor:
    """Scores that sum to 1, for balance_loss: sigmoids are normalized (DeepSeek-V3, eq. 19)."""
    scores = _scores(logits, scoring)
    return scores if scoring == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)


def count_experts(ids: Tensor, n_experts: int) -> Tensor:
    """Slots per expert, (E,) int64, without host synchronization."""
    return _counts(ids.flatten(), n_experts)


def _counts(ids: Tensor, n_experts: int) -> Tensor:
    """ids (..., n) -> (..., E)."""
    index = ids.masked_fill(ids < 0, n_experts).long()
    zeros = torch.zeros(*ids.shape[:-1], n_experts + 1, dtype=torch.int64, device=ids.device)
    return zeros.scatter_add_(-1, index, torch.ones_like(index))[..., :n_experts]


def balance_loss(probs: Tensor, ids: Tensor, counts: Tensor | None = None) -> Tensor:
    """Load-balancing loss: sum_e f_e P_e, with f_e the slots of expert e over the mean and P_e its
    mean probability. 1 if balanced, at most E. f has no gradient; the gradient of P lowers the
    probability of overloaded experts.

    probs (..., N, E), ids (..., N, K); leading dims are averaged over. Tokens whose ids are all -1
    are padding and do not count, as with the attention_mask of transformers'
    load_balancing_loss_func (K times this). (N, E) is the loss of GShard and Switch
    (arXiv:2101.03961, eq. 4), (B, T, E) DeepSeek's sequence-wise one (arXiv:2412.19437, eq. 17).
    counts (..., E): slots to use for f, of all ranks or of the global batch, instead of
    those of `ids`: experts may then specialize within a micro-batch (arXiv:2501.11873).
    """
    E, real = probs.shape[-1], (ids >= 0).any(-1)
    counts = _counts(ids.flatten(-2), E) if counts is None else counts
    f = counts.float() * E / counts.sum(-1, keepdim=True).clamp(min=1)
    mean_probs = (probs.float() * real[..., None]).sum(-2) / real.sum(-1, keepdim=True).clamp(min=1)
    return (f * mean_probs).sum(-1).mean()


def z_loss(logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """Router z-loss: the mean of (log sum_e exp logits)^2, which keeps logits small and so their
    rounding errors (ST-MoE, arXiv:2202.08906, eq. 5). ids: tokens whose ids are all -1 are padding
    and do not count."""
    squares = logits.float().logsumexp(-1).square()
    if ids is None:
        return squares.mean()
    real = (ids >= 0).any(-1)
    return (squares * real).sum() / real.sum().clamp(min=1)


@torch.no_grad()
def update_bias_(bias: Tensor, counts: Tensor, speed: float) -> None:
    """Auxiliary-loss-free balancing: after a step, raise route's bias (E,) by `speed` for experts
    with fewer slots than the mean, lower it for those with more (arXiv:2408.15664, algorithm 1).
    bias must be fp32: bf16 is too coarse for such small steps. counts (E,): the step's, over all
    ranks."""
    bias += speed * (counts.double().mean() - counts).sign().to(bias.dtype)


def load_statistics(counts: Tensor) -> dict[str, float]:
    """From counts (E,) or (L, E): max_over_mean and entropy (divided by log E; 1 is balanced) of
    the worst layer, and `dead`, the number of experts in all layers that got no token. A layer with
    fewer experts than E is padded with -1."""
    counts = counts.reshape(-1, counts.shape[-1]).double()
    E = (counts >= 0).double().sum(-1)
    shares = counts.clamp(min=0)
    shares = shares / shares.sum(-1, keepdim=True).clamp(min=1)
    entropy = -torch.xlogy(shares, shares).sum(-1) / E.log()
    entropy = torch.where(E > 1, entropy, shares.sum(-1))
    return {
        "max_over_mean": (shares.amax(-1) * E).max().item(),
        "entropy": entropy.min().item(),
        "dead": float((counts == 0).sum().item()),
    }


# --------------------------------------------------------------------------------------------------
# Experts in plain torch
# --------------------------------------------------------------------------------------------------


def experts_reference(
    x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor
) -> Tensor:
    """The definition of grouped_experts: a loop over experts that selects each one's slots, runs
    them and adds the results to their tokens."""
    out = torch.zeros_like(x)
    for e in ids[ids >= 0].unique().tolist():
        token, k = (ids == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], w_gate_up[e]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, w_down[e]) * weights[token, k, None].type_as(x)
        out = out.index_add(0, token, y)
    return out


def sort_slots(ids: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the slots n * K + k of ids (N, K) by expert, then token, padding last -> (order (N * K,)
    of slots, bounds (E + 1,) int32: expert e has order[bounds[e]:bounds[e + 1]])."""
    flat = ids.flatten()
    keys, order = flat.masked_fill(flat < 0, n_experts).sort(stable=True)
    experts = torch.arange(n_experts + 1, device=ids.device)
    return order, torch.searchsorted(keys, experts, out_int32=True)


ExpertLinear = Callable[[Tensor, Any, int], Tensor]  # (rows (n, in), stack, e) -> (n, out)


def expert_linear(rows: Tensor, stack: Any, e: int) -> Tensor:
    """rows (n, in) -> (n, out), by expert e of a stack: (E, out, in), a sequence of (out, in), or
    an object with a `linear` method, such as a quantized stack."""
    return stack.linear(rows, e) if hasattr(stack, "linear") else F.linear(rows, stack[e])


def sorted_experts(
    x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Any, w_down: Any, linear: ExpertLinear
) -> Tensor:
    """grouped_experts in plain torch: sort the slots once, two matmuls per active expert, then
    gather and sum the rows of each token."""
    E, (N, K) = w_down.shape[0], ids.shape
    order, bounds = sort_slots(ids, E)
    ends = bounds.tolist()
    sizes = [after - before for before, after in zip(ends, ends[1:])]
    # split and unbind are one autograd node each; the gradient of an index is as large as the stack
    rows = x[order[: ends[E]] // K].split(sizes)
    w_gate_up, w_down = (
        w.unbind() if isinstance(w, Tensor) and w.requires_grad else w for w in (w_gate_up, w_down)
    )
    outputs = []
    for e in [e for e in range(E) if sizes[e]] or [0]:
        gate, up = linear(rows[e], w_gate_up, e).chunk(2, dim=-1)
        outputs.append(linear(F.silu(gate) * up, w_down, e).type_as(x))
    y = torch.cat(outputs)
    row = torch.empty_like(order)
    row[order] = torch.arange(len(order), device=x.device)
    if ends[E] < len(order):  # padding reads a row of zeros with weight 0
        weights = weights.masked_fill(ids < 0, 0.0)
        y, row = F.pad(y, (0, 0, 0, 1)), row.clamp(max=ends[E])
    row, weights = row.view(N, K), weights.type_as(x)
    if x.is_cuda:  # there embedding_bag has no gradient for bf16 weights
        return (y[row] * weights[..., None]).sum(1)
    # gather and weighted sum in one pass
    return F.embedding_bag(row, y, mode="sum", per_sample_weights=weights)


# --------------------------------------------------------------------------------------------------
# Experts: kernels
# --------------------------------------------------------------------------------------------------

# A grouped matmul is one matmul whose rows are the slots sorted by expert, in tiles of BLOCK_M that
# end where an expert's slots end. The number of tiles is known only on the GPU, but is at most
# M / BLOCK_M + E: that many programs are launched, and those past the last tile return at once.
# There is no host synchronization, and the launch can be captured in a CUDA graph. Rows are neither
# padded nor copied into expert order: tiles gather them when reading.

# Format of a stack (E, N, K): bits per weight (16: not quantized), rows and columns per scale
_Format = namedtuple("_Format", "BITS SCALE_N SCALE_K")
UNQUANTIZED = _Format(16, 1, 1)


@jit
def _tiles_kernel(bounds_ptr, tiles_ptr, E, T, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """tiles (2, T): the expert of every tile (-1 past the last tile) and its first row.
    Grid (E + 1,): a program per expert, and one for the unused tiles."""
    e, i = tl.program_id(0), tl.arange(0, BLOCK_E)
    begin = tl.load(bounds_ptr + i, mask=i < E, other=0)
    n_tiles = (tl.load(bounds_ptr + i + 1, mask=i < E, other=0) - begin + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(i < e, n_tiles, 0), 0)
    count = tl.where(e == E, T - first, tl.sum(tl.where(i == e, n_tiles, 0), 0))
    start = tl.load(bounds_ptr + e)
    for j in range(0, count, BLOCK_E):
        tile = j + i
        tl.store(tiles_ptr + first + tile, tl.where(e == E, -1, e) + tile * 0, mask=tile < count)
        tl.store(tiles_ptr + T + first + tile, start + tile * BLOCK_M, mask=tile < count)


@jit
def _tile(tiles_ptr, bounds_ptr, T, tiles_n, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """This program's expert (-1: none), its rows, their mask, its tile of columns. GROUP_M tiles of
    rows run column by column (L2 swizzle), so that tiles of an expert read the same part of its
    weight at the same time."""
    pid = tl.program_id(0)
    first = pid // (GROUP_M * tiles_n) * GROUP_M
    size = tl.minimum(T - first, GROUP_M)
    tile = first + pid % (GROUP_M * tiles_n) % size
    e = tl.load(tiles_ptr + tile)
    end = tl.load(bounds_ptr + tl.maximum(e, 0) + 1)
    row = tl.load(tiles_ptr + T + tile) + tl.arange(0, BLOCK_M)
    return e, tl.minimum(row, end - 1), row < end, pid % (GROUP_M * tiles_n) // size


@jit
def _load_weight(
    stack, e, n, start, N, K, stride_n, stride_k, dtype: tl.constexpr, FORMAT: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile (BLOCK_K, BLOCK_N) in `dtype` of expert e's weight (N, K), columns from `start`.
    stack: pointers to the weights and, for int8, int4 and FP8, to their scales and zeros."""
    w_ptr, scales_ptr, zeros_ptr = stack
    k = start + tl.arange(0, BLOCK_K)
    if FORMAT.BITS == 16:
        w_ptrs = w_ptr + e.to(tl.int64) * N * K + n[None, :] * stride_n + k[:, None] * stride_k
        return tl.load(w_ptrs, mask=(k < K)[:, None] | EVEN, other=0.0)
    else:
        row_bytes = K * FORMAT.BITS // 8
        j = start * FORMAT.BITS // 8 + tl.arange(0, BLOCK_K * FORMAT.BITS // 8)
        q_ptrs = w_ptr + e.to(tl.int64) * N * row_bytes + n[:, None] * row_bytes + j[None, :]
        q = tl.load(q_ptrs, mask=(j < row_bytes)[None, :], other=0.0)
        if FORMAT.BITS == 4:
            q = tl.interleave(q & 0xF, q >> 4)
        GROUP: tl.constexpr = FORMAT.SCALE_K if FORMAT.SCALE_K < BLOCK_K else BLOCK_K
        G = tl.cdiv(K, FORMAT.SCALE_K)
        g = (start // FORMAT.SCALE_K + tl.arange(0, BLOCK_K // GROUP))[None, :]
        at = (e * tl.cdiv(N, FORMAT.SCALE_N) + n // FORMAT.SCALE_N)[:, None] * G + g
        shift = 0.0
        if FORMAT.BITS == 4:  # the bits of 2 ** 23 + q: conversions have a quarter of the speed
            shift, w = 8388608.0, (q.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        else:
            w = q.to(tl.float32)
        w = tl.reshape(w, (BLOCK_N, BLOCK_K // GROUP, GROUP))
        if zeros_ptr is not None:
            zeros = tl.load(zeros_ptr + at, mask=g < G, other=0).to(tl.float32)
            w -= (zeros + shift)[:, :, None]
        w *= tl.load(scales_ptr + at, mask=g < G, other=0.0).to(tl.float32)[:, :, None]
        return tl.trans(tl.reshape(w, (BLOCK_N, BLOCK_K))).to(dtype)


@jit
def _load_rows(ptrs, start, K, EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns from `start` of rows that ptrs (BLOCK_M, 1) point to."""
    k = start + tl.arange(0, BLOCK_K)[None, :]
    return tl.load(ptrs + k, mask=(k < K) | EVEN, other=0.0)


@jit
def _gate_up_kernel(
    x_ptr, order_ptr, w_ptr, scales_ptr, zeros_ptr,  # (N, C), (M,), (E, 2F, C), (E, ..) both
    h_ptr, gate_up_ptr,  # (M, F), (M, 2F) or None, in the order of experts
    tiles_ptr, bounds_ptr, T, F, C,
    TOP_K: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """h = silu(x Wg^T) * (x Wu^T) for the row of x of every slot. Grid (T * tiles of F,)."""
    e, row, valid, tile_n = _tile(tiles_ptr, bounds_ptr, T, tl.cdiv(F, BLOCK_N), BLOCK_M, GROUP_M)
    if e < 0:
        return
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_n = n % F  # columns past the end read others, still contiguous
    x_ptrs = x_ptr + (tl.load(order_ptr + row) // TOP_K)[:, None] * C
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    precision: tl.constexpr = PRECISION if dtype == tl.float32 else None
    stack = (w_ptr, scales_ptr, zeros_ptr)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, C, BLOCK_K):
        x = _load_rows(x_ptrs, start, C, EVEN, BLOCK_K)
        w = _load_weight(
            stack, e, gate_n, start, 2 * F, C, C, 1, dtype, FORMAT, EVEN, BLOCK_N, BLOCK_K
        )
        gate = tl.dot(x, w, gate, input_precision=precision)
        w = _load_weight(
            stack, e, gate_n + F, start, 2 * F, C, C, 1, dtype, FORMAT, EVEN, BLOCK_N, BLOCK_K
        )
        up = tl.dot(x, w, up, input_precision=precision)
    mask, at = valid[:, None] & (n < F)[None, :], row.to(tl.int64)[:, None] * F + n[None, :]
    tl.store(h_ptr + at, (gate * tl.sigmoid(gate) * up).to(dtype), mask=mask)
    if gate_up_ptr is not None:
        at += row.to(tl.int64)[:, None] * F
        tl.store(gate_up_ptr + at, gate.to(dtype), mask=mask)
        tl.store(gate_up_ptr + at + F, up.to(dtype), mask=mask)


@jit
def _down_kernel(
    a_ptr, order_ptr, weights_ptr,  # (M, K) in the order of experts, (M,), (M,) by slot or None
    w_ptr, scales_ptr, zeros_ptr,  # (E, N, K), (E, ..) both
    y_ptr,  # (M, N) by slot
    tiles_ptr, bounds_ptr, T, N, K, stride_n, stride_k,
    FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """y[slot] = weight[slot] * a W^T. Grid (T * tiles of N,)."""
    e, row, valid, tile_n = _tile(tiles_ptr, bounds_ptr, T, tl.cdiv(N, BLOCK_N), BLOCK_M, GROUP_M)
    if e < 0:
        return
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    a_ptrs = a_ptr + row.to(tl.int64)[:, None] * K
    dtype: tl.constexpr = a_ptr.dtype.element_ty
    precision: tl.constexpr = PRECISION if dtype == tl.float32 else None
    stack = (w_ptr, scales_ptr, zeros_ptr)
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a = _load_rows(a_ptrs, start, K, EVEN, BLOCK_K)
        w = _load_weight(
            stack, e, n % N, start, N, K, stride_n, stride_k, dtype, FORMAT, EVEN, BLOCK_N, BLOCK_K
        )
        y = tl.dot(a, w, y, input_precision=precision)
    slot = tl.load(order_ptr + row)
    if weights_ptr is not None:
        y *= tl.load(weights_ptr + slot).to(tl.float32)[:, None]
    y_ptrs = y_ptr + slot[:, None] * N + n[None, :]
    tl.store(y_ptrs, y.to(dtype), mask=valid[:, None] & (n < N)[None, :])


@jit
def _add_slots_kernel(y_ptr, ids_ptr, out_ptr, C, TOP_K: tl.constexpr, BLOCK_C: tl.constexpr):
    """out[n] = sum over k of y[n * K + k], without padding. Grid (N, blocks of C)."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_C,), tl.float32)
    for k in tl.static_range(TOP_K):
        slot = n * TOP_K + k
        mask = c < tl.where(tl.load(ids_ptr + slot) < 0, 0, C)
        total += tl.load(y_ptr + slot * C + c, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + n * C + c, total.to(out_ptr.dtype.element_ty), mask=c < C)


@jit
def _down_backward_kernel(
    dy_ptr, order_ptr, weights_ptr, w_ptr,  # (N, C), (M,), (M,) by slot, (E, C, F)
    gate_up_ptr, d_gate_up_ptr, h_ptr, dweights_ptr,  # (M, 2F) both, (M, F), (tiles of F, M)
    tiles_ptr, bounds_ptr, T, F, C, M,
    TOP_K: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """With g = dy Wd and the weight p of a slot: dh = p g, then through SwiGLU d gate and d up;
    p h, for Wd's gradient (p h)^T dy; and this tile's part of dp = h . g, which does not require
    the slot's output. Grid (T * tiles of F,)."""
    e, row, valid, tile_n = _tile(tiles_ptr, bounds_ptr, T, tl.cdiv(F, BLOCK_N), BLOCK_M, GROUP_M)
    if e < 0:
        return
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(order_ptr + row)
    dy_ptrs = dy_ptr + (slot // TOP_K)[:, None] * C
    dtype: tl.constexpr = dy_ptr.dtype.element_ty
    precision: tl.constexpr = PRECISION if dtype == tl.float32 else None
    stack = (w_ptr, None, None)
    g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, C, BLOCK_K):
        dy = _load_rows(dy_ptrs, start, C, EVEN, BLOCK_K)
        w = _load_weight(stack, e, n % F, start, F, C, 1, F, dtype, FORMAT, EVEN, BLOCK_N, BLOCK_K)
        g = tl.dot(dy, w, g, input_precision=precision)
    mask, at = valid[:, None] & (n < F)[None, :], row.to(tl.int64)[:, None] * (2 * F) + n[None, :]
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + F, mask=mask, other=0.0).to(tl.float32)
    p = tl.load(weights_ptr + slot).to(tl.float32)[:, None]
    s = tl.sigmoid(gate)
    h, dh = gate * s * up, g * p
    tl.store(d_gate_up_ptr + at, (dh * up * s * (1 + gate * (1 - s))).to(dtype), mask=mask)
    tl.store(d_gate_up_ptr + at + F, (dh * gate * s).to(dtype), mask=mask)
    at -= row.to(tl.int64)[:, None] * F
    tl.store(h_ptr + at, (h * p).to(dtype), mask=mask)
    tl.store(dweights_ptr + tile_n * M + row, tl.sum(tl.where(mask, h * g, 0.0), 1), mask=valid)


@jit
def _weight_grad_kernel(
    a_ptr, b_ptr, order_ptr, bounds_ptr, dw_ptr,  # (M or N, P), (N or M, Q), (M,), (E, P, Q)
    P, Q, TOP_K: tl.constexpr, A_BY_TOKEN: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dW[e] = a^T b over e's rows, one of them stored by token, the other in the order of experts.
    One program sums all rows: no atomics. Grid (tiles of (P, Q), E)."""
    e, tiles_q = tl.program_id(1), tl.cdiv(Q, BLOCK_Q)
    p = tl.program_id(0) // tiles_q * BLOCK_P + tl.arange(0, BLOCK_P)
    q = tl.program_id(0) % tiles_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
    precision: tl.constexpr = PRECISION if a_ptr.dtype.element_ty == tl.float32 else None
    end = tl.load(bounds_ptr + e + 1)
    acc = tl.zeros((BLOCK_P, BLOCK_Q), tl.float32)
    for start in range(tl.load(bounds_ptr + e), end, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        token = tl.load(order_ptr + row, mask=row < end, other=0) // TOP_K
        row_a = token if A_BY_TOKEN else row.to(tl.int64)
        row_b = row.to(tl.int64) if A_BY_TOKEN else token
        mask_a = (p < P)[:, None] & (row < end)[None, :]
        mask_b = (row < end)[:, None] & (q < Q)[None, :]
        a = tl.load(a_ptr + row_a[None, :] * P + p[:, None], mask=mask_a, other=0.0)
        b = tl.load(b_ptr + row_b[:, None] * Q + q[None, :], mask=mask_b, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=precision)
    at = e.to(tl.int64) * P * Q + p.to(tl.int64)[:, None] * Q + q[None, :]
    mask = (p < P)[:, None] & (q < Q)[None, :]
    tl.store(dw_ptr + at, acc.to(dw_ptr.dtype.element_ty), mask=mask)


# Key: the largest mean number of rows per expert. Value: BLOCK_M, BLOCK_N, BLOCK_K, num_warps,
# num_stages. gate_up has two accumulators and two weight tiles. Not yet tuned on a GPU.
CONFIGS: dict[str, dict[float, tuple[int, int, int, int, int]]] = {
    "gate_up": {16: (16, 64, 128, 4, 3), 64: (64, 64, 64, 4, 4), math.inf: (128, 128, 64, 8, 3)},
    "down": {16: (16, 64, 128, 4, 4), 64: (64, 128, 64, 4, 4), math.inf: (128, 256, 64, 8, 3)},
    "down_backward": {64: (64, 64, 64, 4, 4), math.inf: (128, 64, 64, 8, 4)},
    # BLOCK_M, BLOCK_P, BLOCK_Q. The addresses of a and b depend on `order`, and Triton divides
    # num_stages between the two loads: with 5, two tiles are in flight.
    "weight_grad": {math.inf: (64, 128, 128, 8, 5)},
}


def _config(kernel: str, rows: float, n: int, k: int, x: Tensor) -> tuple[int, ...]:
    """The entry of CONFIGS, with tiles no larger than n and k, smaller in fp32, and with as many
    stages as fit in the GPU's shared memory."""
    *blocks, warps, stages = next(c for most, c in CONFIGS[kernel].items() if rows <= most)
    if x.element_size() == 4:
        blocks, stages = [min(b, most) for b, most in zip(blocks, (64, 64, 32))], 2
    fit = lambda block, size: min(block, max(16, triton.next_power_of_2(size)))
    M, N, K = blocks[0], fit(blocks[1], n), fit(blocks[2], k)
    weight_tiles = 2 if kernel == "gate_up" else 1
    elements = (N + K) * M if kernel == "weight_grad" else (M + weight_tiles * N) * K
    while stages > 1 and stages * elements * x.element_size() > _shared_memory(x.device):
        stages -= 1
    return M, N, K, warps, stages


@lru_cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 18
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 1 << 17)


def _launch(
    kernel: Any, name: str, n: int, k: int, bounds: Tensor, a: Tensor, order: Tensor,
    *tensors: Tensor | None, sizes: tuple[int, ...] = (), **flags: Any,
) -> None:  # fmt: skip
    """Launch a grouped matmul: n columns, sums over k, one row per slot of order."""
    M, E = len(order), len(bounds) - 1
    BLOCK_M, BLOCK_N, BLOCK_K, warps, stages = _config(name, M / E, n, k, a)
    T = min(M, -(-M // BLOCK_M) + E)
    tiles = torch.empty((2, T), dtype=torch.int32, device=bounds.device)
    _tiles_kernel[(E + 1,)](bounds, tiles, E, T, BLOCK_M=BLOCK_M, BLOCK_E=triton.next_power_of_2(E))
    kernel[(T * -(-n // BLOCK_N),)](
        a, order, *tensors, tiles, bounds, T, n, k, *sizes, **flags, EVEN=k % BLOCK_K == 0,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=8, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip


def _add_slots(parts: Tensor, ids: Tensor, out: Tensor) -> None:
    (N, C), K = out.shape, ids.shape[1]
    BLOCK_C = min(1024, triton.next_power_of_2(C))
    _add_slots_kernel[N, -(-C // BLOCK_C)](parts, ids, out, C, TOP_K=K, BLOCK_C=BLOCK_C)


def _format(w: Tensor, scales: Tensor | None, zeros: Tensor | None, K: int) -> _Format:
    """How the stack w (E, N, K) is quantized: the number of scales says how many rows and columns
    share one."""
    if scales is None:
        return UNQUANTIZED
    rows, columns = scales.shape[1:]
    by_row = rows == w.shape[1]
    spanned = K if by_row else 128 * columns  # columns that all scales of a row span
    scale_k = 1 << 30 if columns == 1 else spanned // columns
    return _Format(8 if zeros is None else 4, 1 if by_row else 128, scale_k)


def _on_device_of_first(launch: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current GPU."""

    @wraps(launch)
    def run(x: Tensor, *arguments: Any) -> Any:
        with torch.cuda.device_of(x):
            return launch(x, *arguments)

    return run


@torch.library.custom_op("sheaf::experts_forward", mutates_args=())
@_on_device_of_first
def _forward(
    x: Tensor, weights: Tensor, ids: Tensor,
    w_gate_up: Tensor, scales_1: Tensor | None, zeros_1: Tensor | None,
    w_down: Tensor, scales_2: Tensor | None, zeros_2: Tensor | None, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernels: y (N, C), gate and up (M, 2F) with `save`, and the order and
    bounds of sort_slots. Depends only on shapes, so CUDA graphs can capture it."""
    (N, C), K, E, F2 = x.shape, ids.shape[1], *w_gate_up.shape[:2]
    M, F_ = N * K, F2 // 2
    order, bounds = sort_slots(ids, E)
    saved, y = x.new_empty(M if save else 0, F2), x.new_zeros(N, C)
    if M == 0:
        return y, saved, order, bounds
    x, weights, ids = x.contiguous(), weights.contiguous(), ids.contiguous()
    gate_up = w_gate_up.contiguous(), scales_1, zeros_1
    down = w_down.contiguous(), scales_2, zeros_2
    h, parts = x.new_empty(M, F_), x.new_empty(M, C)
    _launch(
        _gate_up_kernel, "gate_up", F_, C, bounds, x, order, *gate_up, h, saved if save else None,
        TOP_K=K, FORMAT=_format(*gate_up, C),
    )  # fmt: skip
    _launch(
        _down_kernel, "down", C, F_, bounds, h, order, weights, *down, parts, sizes=(F_, 1),
        FORMAT=_format(*down, F_),
    )  # fmt: skip
    _add_slots(parts, ids, y)
    return y, saved, order, bounds


@torch.library.custom_op("sheaf::experts_backward", mutates_args=())
@_on_device_of_first
def _backward(
    dy: Tensor, x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor,
    gate_up: Tensor, order: Tensor, bounds: Tensor, need_x: bool, need_w: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the backward kernels: gradients of x, weights and stacks (empty if not needed)."""
    (N, C), K, (E, _, F_) = x.shape, ids.shape[1], w_down.shape
    M = N * K
    make = Tensor.new_empty if M else Tensor.new_zeros
    dx = make(x, x.shape if need_x else 0)
    dw = [make(w, w.shape if need_w else 0) for w in (w_gate_up, w_down)]
    if M == 0:
        return dx, weights.new_zeros(weights.shape), *dw
    dy, x, weights, ids, w_gate_up, w_down = (
        t.contiguous() for t in (dy, x, weights, ids, w_gate_up, w_down)
    )
    d_gate_up, h = torch.empty_like(gate_up), x.new_empty(M, F_)
    tiles_n = -(-F_ // _config("down_backward", M / E, F_, C, x)[1])
    dweights = torch.zeros(tiles_n, M, device=x.device)
    _launch(
        _down_backward_kernel, "down_backward", F_, C, bounds, dy, order, weights, w_down, gate_up,
        d_gate_up, h, dweights, sizes=(M,), TOP_K=K, FORMAT=UNQUANTIZED,
    )  # fmt: skip
    by_slot = torch.empty_like(dweights[0]).scatter_(0, order, dweights.sum(0))
    if need_x:
        parts = x.new_empty(M, C)
        _launch(
            _down_kernel, "down", C, 2 * F_, bounds, d_gate_up, order, None, w_gate_up, None, None,
            parts, sizes=(1, C), FORMAT=UNQUANTIZED,
        )  # fmt: skip
        _add_slots(parts, ids, dx)
    for a, b, out in ((d_gate_up, x, dw[0]), (dy, h, dw[1])) if need_w else ():
        P, Q = out.shape[1:]
        BM, BP, BQ, warps, stages = _config("weight_grad", M / E, P, Q, x)
        _weight_grad_kernel[-(-P // BP) * -(-Q // BQ), E](
            a, b, order, bounds, out, P, Q, TOP_K=K, A_BY_TOKEN=a is dy, BLOCK_P=BP, BLOCK_Q=BQ,
            BLOCK_M=BM, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return dx, by_slot.view_as(weights).to(weights.dtype), *dw


@_forward.register_fake
def _(x, weights, ids, w_gate_up, scales_1, zeros_1, w_down, scales_2, zeros_2, save):
    E, F2 = w_gate_up.shape[:2]
    order = ids.new_empty(ids.numel())
    bounds = ids.new_empty(E + 1, dtype=torch.int32)
    return x.new_empty(x.shape), x.new_empty(ids.numel() if save else 0, F2), order, bounds


@_backward.register_fake
def _(dy, x, weights, ids, w_gate_up, w_down, gate_up, order, bounds, need_x, need_w):
    dw = (w.new_empty(w.shape if need_w else 0) for w in (w_gate_up, w_down))
    return x.new_empty(x.shape if need_x else 0), weights.new_empty(weights.shape), *dw


def _save(ctx, inputs, output):
    x, weights, ids, w_gate_up, _, _, w_down, *_ = inputs
    ctx.save_for_backward(x, weights, ids, w_gate_up, w_down, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _derivative(ctx, dy, *_):
    need_x, need_weights, _, need_1, _, _, need_2, *_ = ctx.needs_input_grad
    grads = _backward(dy, *ctx.saved_tensors, need_x, need_1 or need_2)
    needs = need_x, need_weights, need_1, need_2
    dx, dweights, dw_1, dw_2 = (grad if need else None for grad, need in zip(grads, needs))
    return dx, dweights, None, dw_1, None, None, dw_2, None, None, None


_forward.register_autograd(_derivative, setup_context=_save)


# --------------------------------------------------------------------------------------------------
# Public entry points
# --------------------------------------------------------------------------------------------------


def _stack_tensors(stack: Any) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """Weights, scales and zeros of a stack that the kernels support: a tensor, int8, int4 with
    zeros, FP8 (weight-only: x is not quantized); None for others."""
    if isinstance(stack, Tensor):
        return stack, None, None
    q, weight_only = stack.qweight, getattr(stack.scheme, "is_weight_only", True)
    is_int4 = q.dtype == torch.uint8 and 2 * q.shape[-1] == stack.shape[-1]
    is_integer = weight_only and (q.dtype == torch.int8 or is_int4)
    supported = q.dtype == torch.float8_e4m3fn or is_integer
    return (q, stack.scales, stack.zeros) if supported else None


def can_use_triton(x: Tensor, stacks: Sequence[Any]) -> bool:
    """Whether the Triton kernels support these tensors on this device."""
    supported = triton is not None and (x.is_cuda or INTERPRET)
    supported = supported and x.dtype in (torch.float16, torch.bfloat16, torch.float32)
    for stack in stacks:
        tensors = _stack_tensors(stack)
        if isinstance(stack, Tensor):
            supported = supported and stack.device == x.device
        elif tensors is None or torch.is_grad_enabled() and x.requires_grad:
            supported = False
        elif tensors[0].dtype == torch.float8_e4m3fn and x.is_cuda:
            supported = supported and torch.cuda.get_device_capability(x.device) >= (8, 9)
    return supported


def _triton_experts(x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Any, w_down: Any) -> Tensor:
    dtype, inputs = x.dtype, [x, *_stack_tensors(w_gate_up), *_stack_tensors(w_down)]
    if INTERPRET and dtype == torch.bfloat16:  # wrong results in the interpreter
        inputs = [t.float() if t is not None and t.dtype == dtype else t for t in inputs]
    x, *stacks = inputs
    grad = any(t is not None and t.requires_grad for t in (weights, *inputs))
    return _forward(x, weights, ids, *stacks, grad and torch.is_grad_enabled())[0].to(dtype)


def grouped_experts(
    x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Any, w_down: Any, *, backend: str = "auto",
    linear: ExpertLinear | None = None,
) -> Tensor:  # fmt: skip
    """y[n] = sum_k weights[n, k] * Wd_e (silu(Wg_e x[n]) * Wu_e x[n]), e = ids[n, k]: the experts
    hook, all experts at once, no slot dropped or padded (MegaBlocks, arXiv:2211.15841).

    x (N, C), weights and ids (N, K), w_gate_up (E, 2F, C) gate rows first, w_down (E, C, F) ->
    (N, C) in x's dtype. An id of -1 adds nothing. Gradients of x, weights and both stacks;
    deterministic. Stacks may be quantized (qweight, scales and zeros, as in quantize.py). backend:
    "triton" (on a GPU, or in Triton's interpreter), "torch" (a matmul per active expert, by
    linear(rows, stack, e)), or "auto": triton on a GPU if it supports the tensors, else torch.
    ValueError names the invalid argument. Autocast casts as for F.linear.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        w_gate_up, w_down = (
            w.to(dtype) if isinstance(w, Tensor) else w for w in (w_gate_up, w_down)
        )
        with torch.autocast(x.device.type, enabled=False):
            kwargs = dict(backend=backend, linear=linear)
            y = grouped_experts(x.to(dtype), weights, ids, w_gate_up, w_down, **kwargs)
            return y.type_as(x)
    _check_experts(x, weights, ids, w_gate_up, w_down)
    ok = backend in ("auto", "triton", "torch")
    _check(ok, f"backend must be auto, triton or torch, not {backend!r}")
    _check(linear is None or backend != "triton", "linear requires backend auto or torch")
    try_triton = backend == "triton" or backend == "auto" and x.is_cuda and linear is None
    if try_triton and can_use_triton(x, (w_gate_up, w_down)):
        return _triton_experts(x, weights, ids, w_gate_up, w_down)
    _check(
        backend != "triton",
        "backend triton requires a GPU (or TRITON_INTERPRET=1), fp16, bf16 or fp32, and for "
        "quantized weights a supported scheme and no gradient; use backend torch",
    )
    return sorted_experts(x, weights, ids, w_gate_up, w_down, linear or expert_linear)


def _check_experts(x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Any, w_down: Any) -> None:
    sizes = {name: tuple(t.shape) for name, t in (("x", x), ("ids", ids), ("weights", weights))}
    _check(len(sizes["x"]) == 2 and sizes["x"][1] > 0, f"x must be (N, C), not {sizes['x']}")
    N, C = sizes["x"]
    ok = len(sizes["ids"]) == 2 and sizes["ids"][0] == N and sizes["ids"][1] > 0
    _check(ok, f"ids must be ({N}, K), not {sizes['ids']}")
    ok = sizes["weights"] == sizes["ids"]
    _check(ok, f"weights {sizes['weights']} and ids {sizes['ids']} must have one shape")
    gate_up, down = tuple(w_gate_up.shape), tuple(w_down.shape)
    ok = len(gate_up) == 3 and gate_up[0] > 0 and gate_up[1] % 2 == 0 and gate_up[2] == C
    _check(ok, f"w_gate_up must be (E, 2F, {C}), not {gate_up}")
    expected = (gate_up[0], C, gate_up[1] // 2)
    _check(down == expected, f"w_down must be {expected}, not {down}")
    for name, w in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        ok = not isinstance(w, Tensor) or w.dtype == x.dtype
        _check(ok, f"{name} is {w.dtype}, x {x.dtype}: cast one to the other")
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        low, high = (int(v) for v in ids.aminmax())
        ok = low >= -1 and high < gate_up[0]
        _check(ok, f"ids range from {low} to {high}, but w_gate_up has {gate_up[0]} experts")


def has_static_shapes(module: nn.Module) -> bool:
    """Whether an MoE layer's experts run in this file's Triton kernels on a GPU: then no shape
    depends on the routing, and a step can be compiled and captured in a CUDA graph."""
    stacks = module.w_gate_up, module.w_down
    weight = stacks[0] if isinstance(stacks[0], Tensor) else stacks[0].qweight
    x = torch.empty(0, dtype=stacks[0].dtype, device=weight.device)
    grouped = getattr(module.experts, "func", None) is grouped_experts
    options = {**module.experts.keywords} if grouped else {}
    grouped = grouped and options.pop("backend", "auto") in ("auto", "triton") and not options
    return grouped and weight.is_cuda and can_use_triton(x, stacks)


def gather_experts_if_compiled(experts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An experts hook for compiled steps without a grouped kernel: gathers the weights of each
    token's K experts, so that no shape depends on routing. Outside of torch.compile, as in prefill,
    it calls the given `experts`."""

    def run(x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return experts(x, weights, ids, w_gate_up, w_down)
        gate, up = torch.einsum("nc,nkfc->nkf", x, w_gate_up[ids]).chunk(2, dim=-1)
        y = torch.einsum("nkf,nkcf->nkc", F.silu(gate) * up, w_down[ids])
        return (y * weights[..., None].type_as(x)).sum(1)

    return run


def use_grouped_experts(model: nn.Module, **options: Any) -> nn.Module:
    """Set the experts hook of every MoE layer below `model` (a module with `experts`, w_gate_up and
    w_down) to grouped_experts with these keyword arguments. Returns the model."""
    names = ("experts", "w_gate_up", "w_down")
    layers = [m for m in model.modules() if all(hasattr(m, name) for name in names)]
    _check(bool(layers), "grouped experts require an MoE model; this one has no MoE layers")
    for module in layers:
        module.experts = partial(grouped_experts, **options)
    return model


def upcycle_mlp(gate: Tensor, up: Tensor, down: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """Copy a dense MLP, gate and up (F, C), down (C, F), to n_experts experts (sparse upcycling,
    arXiv:2212.05055): the same function if a token's weights sum to 1. -> w_gate_up, w_down."""
    return torch.cat((gate, up)).repeat(n_experts, 1, 1), down.repeat(n_experts, 1, 1)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def grouped_mm_experts(
    x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor
) -> Tensor:
    """The peer: torch._grouped_mm, with gather, SwiGLU and sum as separate operations."""
    order, bounds = sort_slots(ids, len(w_down))
    rows = x[order // ids.shape[1]]
    gate, up = torch._grouped_mm(rows, w_gate_up.mT, offs=bounds[1:]).chunk(2, dim=-1)
    y = torch._grouped_mm(F.silu(gate) * up, w_down.mT, offs=bounds[1:])
    by_slot = torch.empty_like(y).index_copy(0, order, y).unflatten(0, ids.shape)
    return (by_slot * weights[..., None].type_as(x)).sum(1)


def main() -> None:
    """Outputs and gradients == the reference's; milliseconds of forward and backward."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    gpu = torch.cuda.is_available()
    randn = lambda *shape: torch.randn(shape, device="cuda" if gpu else "cpu")

    def inputs_of(N: int, K: int, E: int, C: int, F_: int, dtype: torch.dtype) -> list[Tensor]:
        weights, ids = route(randn(N, E), K, renormalize=True)
        x, gate_up, down = randn(N, C), randn(E, 2 * F_, C) * C**-0.5, randn(E, C, F_) * F_**-0.5
        x, gate_up, down = (t.to(dtype).requires_grad_() for t in (x, gate_up, down))
        return [x, weights.requires_grad_(), ids, gate_up, down]

    inputs = inputs_of(37, 3, 5, 40, 24, torch.float32)
    inputs[2][0, -1] = -1
    results, grouped = [], partial(grouped_experts, backend="triton" if INTERPRET else "auto")
    for f in (grouped, experts_reference):
        y = f(*inputs)
        leaves = [t for t in inputs if t.requires_grad]
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    assert all((a - b).norm() < 1e-5 * b.norm() for a, b in zip(*results))
    if INTERPRET:
        return print("the kernels are correct in the interpreter, which is not timed")
    E, K, C, F_ = (128, 8, 2048, 768) if gpu else (32, 4, 1024, 512)
    print(f"milliseconds of forward and backward; E {E}, K {K}, C {C}, F {F_}, bf16")
    print(f"{'tokens':>7}{'loop':>11}{'grouped_mm':>11}{'grouped':>11}")
    for N in (64, 4096, 32768) if gpu else (1, 16, 256):
        row, inputs = f"{N:>7}", inputs_of(N, K, E, C, F_, torch.bfloat16)
        for f in (experts_reference, grouped_mm_experts, grouped_experts):
            step = Timer("f(*inputs).sum().backward()", globals=dict(f=f, inputs=inputs))
            row += f"{1e3 * step.blocked_autorange().median:11.2f}"
        print(row)


if __name__ == "__main__":
    main()
