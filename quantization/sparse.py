"""sparse.py: weights of which every M neighbours keep N.

A weight matrix can lose its smaller half and still do most of its work, but zeros anywhere save
neither memory nor time. N:M sparsity keeps N of every M neighbours in a row: all rows stay equally
long, an index is a few bits, and a reader knows where each group begins. Top-down:

    prune        which N: the largest |w|, or by importance handed in, such as |w| * ||x|| of
                 calibration data (Wanda, arXiv:2306.11695)
    permute      which M are neighbours is free to choose. Large weights in one group push each
                 other out; apart they all stay. Greedy swaps of channels (Pool & Yu, NeurIPS 2021),
                 folded into the layers before and after: no product costs more
    gather_gemv  for the few rows of a decode step: reads values and indices, N/M of the weight, and
                 gathers x (nmSPARSE, MLSys 2023)
    V:N:M        a matrix unit knows 2:4 alone. V rows choose 4 of M columns together, each row 2 of
                 those: 2:M as a 2:4 product of gathered x (VENOM, arXiv:2310.02065)
    2:4          torch's semi-structured tensors, where a GPU multiplies them (`semi_structured`)

What it costs: an index of 1 byte beside each value of 2: 2:4 is 75 % of the dense bytes, 1:4 38 %,
4:32 19 %. When it loses: in accuracy, nearly always. Without retraining 2:4 costs a language model
more than int4, which is smaller; sparser patterns ruin it, and permutation wins back a part. A CPU
gains no time: the weight is unpacked for each product, as on a GPU for more than a few rows. 2:4
pays where compute bounds a large product. Times on a GPU: not yet measured.

Hook: the Linear swap, `sparsify_(model, n, m)`. Equivalence (test_all.py): every product == the
dense product of the masked weight; a permuted network, before pruning, == the one it was. Copied
alone, this file needs torch, and triton for the kernel; `python sparse.py` checks itself and prints
what is lost, what permutation wins back, and times beside F.linear's.

Shapes: M rows of x, N outputs and K inputs of a weight (N, K), G groups in a row; n of m are kept,
J = G * n values of a row. Of V:N:M: N / v blocks of v rows.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, Windows: plain torch serves every call
    triton = None

INTERPRET = triton is not None and triton.knobs.runtime.interpret
jit = triton.jit if triton else (lambda fn: fn)
FEW = 8  # rows of x up to which the gather kernel serves; more are worth unpacking the weight
BLOCK_N = {1: 4, 2: 4, 4: 4, 8: 2}  # by rows of x; with 512 values each, 16 bytes a thread and load

# --------------------------------------------------------------------------------------------------
# Which weights stay
# --------------------------------------------------------------------------------------------------


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _grouped(x: Tensor, n: int, m: int) -> Tensor:
    """x (N, K) -> (N, G, m), or a ValueError: n:m is no pattern, or not one for this K."""
    ok = isinstance(n, int) and isinstance(m, int) and 1 <= n < m <= 256
    _check(ok, f"n:m must have 1 <= n < m <= 256, as bytes index, not {n}:{m}")
    _check(x.dim() == 2, f"the weight must be (N, K), not {tuple(x.shape)}")
    K = x.shape[1]
    fits = ", ".join(str(i) for i in range(2, 33) if K % i == 0) or "none"
    _check(K % m == 0, f"m={m} does not divide the weight's {K} columns (m that do: {fits})")
    return x.unflatten(1, (-1, m))


def _scores(weight: Tensor, importance: Tensor | None) -> Tensor:
    """What pruning compares, (N, K): |w|, or the importance."""
    scores = (weight.abs() if importance is None else importance).detach()
    ok = scores.shape == weight.shape
    _check(ok, f"importance {tuple(scores.shape)} does not fit the weight {tuple(weight.shape)}")
    ok = weight.is_meta or bool((torch.isfinite(weight) & torch.isfinite(scores)).all())
    _check(ok, "the weight or its importance has a NaN or an infinity: mend it before pruning")
    return scores


def _largest(x: Tensor, n: int) -> Tensor:
    """The mask of the n largest along the last dimension; of equals, the first."""
    order = x.argsort(dim=-1, descending=True, stable=True)[..., :n]
    return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, order, True)


def prune(weight: Tensor, n: int, m: int, importance: Tensor | None = None) -> Tensor:
    """weight (N, K) -> mask (N, K) bool: in a row, of every m neighbours the n with the largest |w|
    or largest importance (N, K); of equals, the first."""
    return _largest(_grouped(_scores(weight, importance), n, m), n).flatten(1)


def is_pruned(x: Tensor, n: int, m: int) -> bool:
    """Audit: a mask or weight (N, K) has at most n nonzeros in every m neighbours of a row."""
    return bool(((_grouped(x, n, m) != 0).sum(-1) <= n).all())


def retained(weight: Tensor, mask: Tensor) -> float:
    """The part of sum |w| that a mask keeps: what permutation raises, VENOM's "energy"."""
    w = weight.detach().abs().double()
    return ((w * mask).sum() / w.sum()).item()


# --------------------------------------------------------------------------------------------------
# Channel permutation: which channels are neighbours
# --------------------------------------------------------------------------------------------------


def permute_channels(
    weight: Tensor, n: int = 2, m: int = 4, importance: Tensor | None = None, rounds: int = 200
) -> Tensor:
    """weight (N, K) -> permutation (K,): weight[:, permutation], pruned to n:m, keeps no less.

    A round swaps two channels in each of many pairs of groups, the pair with the largest gain
    first, until no swap gains: a local maximum. `rounds` bounds them. The first takes O(N K^2)
    time, later ones as much of it as groups have changed; memory is O(K^2). Layers that read the
    same channels are permuted as one, their weights stacked by rows.
    """
    _grouped(weight, n, m)
    w = _scores(weight, importance).double().t().contiguous()  # a row is a channel
    K, G = len(w), len(w) // m
    order = torch.arange(K, device=w.device)
    stale, within = (torch.arange(i, device=w.device) for i in (G, m))  # all groups, places in one
    kept_with, kept = w.new_empty(K, K), w.new_empty(G)  # [position i, channel put there], now
    for _ in range(rounds):
        place = (stale[:, None] * m + within).flatten()
        kept_with[place], kept[stale] = _replaced(w, order[place], n, m)
        after = kept_with[:, order]
        after = (after + after.t()).view(G, m, G, m).transpose(1, 2).reshape(G, G, m * m)
        best, which = after.max(-1)
        before = kept[:, None] + kept
        gain = torch.where(best > before * (1 + 1e-9), best - before, 0).triu(1).flatten()
        pairs = gain.nonzero().squeeze(1)
        pairs, used = pairs[gain[pairs].argsort(descending=True, stable=True)], set()
        for pair, at in zip(pairs.tolist(), which.flatten()[pairs].tolist()):
            a, b = divmod(pair, G)
            if a not in used and b not in used:
                used |= {a, b}
                swap = [a * m + at // m, b * m + at % m]
                order[swap] = order[swap[::-1]]
        if not used:
            break
        stale = torch.tensor(sorted(used), device=w.device)
    return order


def _replaced(w: Tensor, channels: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """What groups keep if one of their channels (g * m,) gives way to any: (g * m, K); now: (g,).

    In a row: the n - 1 largest of the others, and the larger of their nth and the new one, where
    max(a, b) = (a + b + |a - b|) / 2. So a matrix of L1 distances has the sums over all rows."""
    groups = w[channels].unflatten(0, (-1, m))
    top = groups.topk(n + 1, dim=1).values
    nth, next_, kept = top[:, n - 1 : n], top[:, n:], top[:, :n].sum((1, 2))
    others = kept[:, None] - groups.maximum(nth).sum(2)
    nth = torch.where(groups >= nth, next_, nth).flatten(0, 1)
    larger = (nth.sum(1)[:, None] + w.sum(1) + torch.cdist(nth, w, p=1)) / 2
    return larger + others.view(-1, 1), kept


def fold_permutation_(
    permutation: Tensor,
    consumers: nn.Module | Sequence[nn.Module],
    producers: nn.Module | Sequence[nn.Module],
) -> None:
    """Permute, in place, the columns of the consumers' weights, the rows of the producers' weights,
    and their biases. The network is the same, up to the order of its sums, if the channels have no
    other readers, and what lies between treats each alike and alone: fold_permutation_(p,
    mlp.down_proj, [mlp.gate_proj, mlp.up_proj]) for SwiGLU. A norm's weight is one more producer.
    """
    K, todo = len(permutation), []
    ok = torch.equal(permutation.sort().values.cpu(), torch.arange(K))
    _check(ok, f"permutation must have each of 0 .. {K - 1} once")
    for role, given, dim in (("consumers", consumers, 1), ("producers", producers, 0)):
        for i, module in enumerate([given] if isinstance(given, nn.Module) else given):
            name, w, bias = f"{role}[{i}]", module.weight, getattr(module, "bias", None)
            _check(isinstance(w, nn.Parameter), f"{name} is packed: permute, then sparsify_")
            ok = w.dim() > dim and w.shape[dim] == K
            _check(ok, f"{name} has weight {tuple(w.shape)}, the permutation {K} channels")
            todo += [(name, w, dim)] + [(name, bias, 0)] * (dim == 0 and bias is not None)
    for name, w, _ in todo:
        ok = sum(w is other for _, other, _ in todo) == 1
        _check(
            ok, f"{name} has a parameter that is another's too: no permutation is right for both"
        )
    with torch.no_grad():
        for _, w, dim in todo:
            w.copy_(w.index_select(dim, permutation.to(w.device)))


# --------------------------------------------------------------------------------------------------
# Packed: N:M, and V:N:M on top of it
# --------------------------------------------------------------------------------------------------


def pack(weight: Tensor, n: int, m: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight (N, K) -> values (N, J), indices (N, J) uint8 within the group; by default of prune's
    mask. One that keeps fewer than n in a group is filled up with zeros."""
    mask = prune(weight, n, m) if mask is None else mask.bool()
    ok = mask.shape == weight.shape and (mask.is_meta or is_pruned(mask, n, m))
    _check(ok, f"mask must be as the weight and keep n={n} of m={m}, as prune(weight, n, m) does")
    order = _grouped(mask, n, m).byte().argsort(dim=-1, descending=True, stable=True)[..., :n]
    values = _grouped(weight.detach() * mask, n, m).gather(-1, order)
    return values.flatten(1), order.byte().flatten(1)


def unpack(values: Tensor, indices: Tensor, n: int, m: int) -> Tensor:
    """values (N, J), indices (N, J) -> the masked weight (N, K)."""
    values, indices = (x.unflatten(1, (-1, n)) for x in (values, indices))
    dense = values.new_zeros(*values.shape[:2], m)
    return dense.scatter_(-1, indices.long(), values).flatten(1)


class Venom(NamedTuple):
    """A V:n:m weight: the values of a row stand at columns[block, group, index] of each group."""

    values: Tensor  # (N, J)
    indices: Tensor  # (N, J) uint8, 0 .. 3: 2 bits, as matrix units want them
    columns: Tensor  # (N / v, G, 4) uint8, ascending
    n: int
    m: int


def _blocks(x: Tensor, v: int, n: int, m: int) -> Tensor:
    """x (N, K) -> (N / v, v, G, m), or a ValueError."""
    x = _grouped(x, n, m)
    ok = n < 4 < m and isinstance(v, int) and v > 0 and len(x) % v == 0
    _check(ok, f"{v}:{n}:{m} must have n < 4 < m, and v must divide the weight's {len(x)} rows")
    return x.unflatten(0, (-1, v))


def venom_mask(
    weight: Tensor, v: int, n: int = 2, m: int = 8, importance: Tensor | None = None
) -> Tensor:
    """weight (N, K) -> mask (N, K) bool. v rows together take the 4 columns of every m with the
    largest sums of |w| (or importance), each row the n largest there. The authors' code tries all
    choices of 4, which keeps more and takes longer."""
    scores = _blocks(_scores(weight, importance), v, n, m)
    chosen = _largest(scores.double().sum(1, keepdim=True), 4)
    return _largest(scores.masked_fill(~chosen, -torch.inf), n).flatten(2).flatten(0, 1)


def is_venom(x: Tensor, v: int, n: int = 2, m: int = 8) -> bool:
    """Audit: in a mask or weight (N, K) v rows use at most 4 columns of every m, and each row n."""
    used = _blocks(x, v, n, m) != 0
    return bool((used.any(1).sum(-1) <= 4).all() and (used.sum(-1) <= n).all())


def pack_venom(weight: Tensor, v: int, n: int = 2, m: int = 8, mask: Tensor | None = None) -> Venom:
    """weight (N, K) -> Venom, by default of venom_mask's mask."""
    mask = venom_mask(weight, v, n, m) if mask is None else mask.bool()
    ok = mask.shape == weight.shape and is_venom(mask, v, n, m)
    _check(ok, f"mask must be as the weight and {v}:{n}:{m}, as venom_mask makes it")
    used = _blocks(mask, v, n, m).any(1).byte()
    columns = used.argsort(dim=-1, descending=True, stable=True)[..., :4].sort(-1).values
    at = columns[:, None].expand(-1, v, -1, -1)
    four = lambda x: _blocks(x, v, n, m).gather(-1, at).flatten(2).flatten(0, 1)
    return Venom(*pack(four(weight), n, 4, four(mask)), columns.byte(), n, m)


def unpack_venom(packed: Venom) -> Tensor:
    """-> the masked weight (N, K)."""
    (blocks, G, _), (values, indices, columns, n, m) = packed.columns.shape, packed
    four = unpack(values, indices, n, 4).view(blocks, -1, G, 4)
    dense = four.new_zeros(*four.shape[:3], m)
    at = columns[:, None].expand_as(four).long()
    return dense.scatter_(-1, at, four).flatten(2).flatten(0, 1)


def venom_matmul(x: Tensor, packed: Venom) -> Tensor:
    """x (..., K) -> (..., N): each block of rows gathers its columns of x; the rest is n:4."""
    (blocks, G, _), (values, indices, columns, n, m) = packed.columns.shape, packed
    _check(x.shape[-1] == G * m, f"x {tuple(x.shape)} must have {G * m} columns, as the weight has")
    columns = columns + torch.arange(0, G * m, m, device=x.device)[:, None]
    four = unpack(values, indices, n, 4).unflatten(0, (blocks, -1))
    return torch.einsum("...bk,bvk->...bv", x[..., columns.flatten(1)], four).flatten(-2)


def semi_structured(weight: Tensor, fallback: bool = False) -> Tensor:
    """A 2:4 weight (N, K) as torch's semi-structured tensor: F.linear(x, it) then runs on sparse
    matrix units. Where there are none, ValueError; with fallback=True the weight itself."""
    _check(is_pruned(weight, 2, 4), "weight is not 2:4: multiply it by prune(weight, 2, 4)")
    nvidia = weight.is_cuda and torch.version.hip is None
    why = "needs an NVIDIA GPU of sm_80 or newer"
    if nvidia and torch.cuda.get_device_capability(weight.device) >= (8, 0):
        why = "needs float16 or bfloat16, N a multiple of 32 and K of 64"
        (N, K), half = weight.shape, weight.dtype in (torch.float16, torch.bfloat16)
        if half and N % 32 == K % 64 == 0:
            return torch.sparse.to_sparse_semi_structured(weight.detach().contiguous())
    have = f"{weight.dtype} {tuple(weight.shape)} on {weight.device}"
    _check(fallback, f"a 2:4 product {why}; the weight is {have}. fallback=True keeps it dense")
    return weight


# --------------------------------------------------------------------------------------------------
# The product for a few rows
# --------------------------------------------------------------------------------------------------


@jit
def _gather_kernel(
    x_ptr,  # (M, K)
    values_ptr, indices_ptr,  # (N, J), and uint8
    bias_ptr,  # (N,); None: not in the kernel
    y_ptr,  # (M, N)
    M, N, K, J, KEEP: tl.constexpr, OF: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    """y[r, n] = bias[n] + sum_j values[n, j] * x[r, j // KEEP * OF + indices[n, j]], in fp32.

    Grid (tiles of N, tiles of M). What is large is read once for ROWS rows of x, in order; x is
    small, stays in the nearest cache, and neighbours read from one group or the next."""
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_ptrs = x_ptr + r.to(tl.int64)[:, None, None] * K
    w_start = n.to(tl.int64)[None, :, None] * J
    acc = tl.zeros((ROWS, BLOCK_N, BLOCK_J), tl.float32)
    for start in range(0, J, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)[None, None, :]
        seen = (n < N)[None, :, None] & (j < J)
        w = tl.load(values_ptr + w_start + j, mask=seen, other=0.0, eviction_policy="evict_first")
        i = tl.load(indices_ptr + w_start + j, mask=seen, other=0, eviction_policy="evict_first")
        column = j // KEEP * OF + i.to(tl.int32)
        x = tl.load(x_ptrs + column, mask=seen & (r < M)[:, None, None], other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)
    y = tl.sum(acc, 2)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + r.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(r < M)[:, None] & (n < N)[None, :])


def gather_gemv_reference(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, bias: Tensor | None = None
) -> Tensor:
    """gather_gemv by its definition, row after row, in fp32 (fp64 for fp64)."""
    columns = torch.arange(values.shape[1], device=x.device) // n * m + indices
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, values = x.reshape(-1, x.shape[-1]).to(wide), values.to(wide)
    y = torch.stack([(values * row[columns]).sum(-1) for row in rows])
    return (y if bias is None else y + bias).to(x.dtype).view(*x.shape[:-1], -1)


@torch.library.custom_op(
    "sheaf::gather_gemv",
    mutates_args=(),
    schema="(Tensor x, Tensor values, Tensor indices, int n, int m, Tensor? bias) -> Tensor",
)
def _gather_op(x, values, indices, n, m, bias):
    """A step that is compiled calls this; without it the compiler would look inside."""
    if not _kernel(x):
        return gather_gemv_reference(x, values, indices, n, m, bias)
    x, values, indices, (N, J) = *(t.contiguous() for t in (x, values, indices)), values.shape
    y, K, M = x.new_empty(*x.shape[:-1], N), x.shape[-1], x.numel() // x.shape[-1]
    rows = min(FEW, 1 << (M - 1).bit_length())
    with torch.cuda.device_of(x):
        _gather_kernel[-(-N // BLOCK_N[rows]), -(-M // rows)](
            x, values, indices, bias, y, M, N, K, J, KEEP=n, OF=m, ROWS=rows, BLOCK_N=BLOCK_N[rows],
            BLOCK_J=min(512, max(16, 1 << (J - 1).bit_length())), num_warps=4,
        )  # fmt: skip
    return y


@_gather_op.register_fake
def _(x, values, indices, n, m, bias):
    return x.new_empty(*x.shape[:-1], values.shape[0])


def _kernel(x: Tensor) -> bool:
    """Whether the Triton kernel can take this."""
    runs = triton is not None and (x.is_cuda or INTERPRET) and x.dtype != torch.float64
    return runs and not (INTERPRET and x.dtype == torch.bfloat16)  # which it gets wrong


def gather_gemv(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, bias: Tensor | None = None
) -> Tensor:
    """x (..., K) times a packed n:m weight, values and indices (N, J), + bias (N,) -> (..., N).

    Sums in fp32, rounded once to x's dtype. More than 8 rows read the weight again. No gradient."""
    (N, J), K = values.shape, values.shape[1] // n * m
    ok = x.shape[-1] == K and x.numel() > 0 and x.dtype == values.dtype
    have = f"{x.dtype} {tuple(x.shape)}"
    _check(ok, f"x must be {values.dtype} rows of {K}, for {J} values a row of {n}:{m}, not {have}")
    ok = indices.shape == values.shape and indices.dtype == torch.uint8
    _check(ok, f"indices must be uint8 {(N, J)}, as pack makes them")
    _check(bias is None or bias.shape == (N,), f"bias must be ({N},)")
    return _gather_op(x, values, indices, n, m, bias)


# --------------------------------------------------------------------------------------------------
# The Linear swap
# --------------------------------------------------------------------------------------------------


class SparseLinear(nn.Module):
    """nn.Linear with an n:m weight, for inference: buffers values and indices (N, J), bias (N,)."""

    def __init__(self, linear: nn.Linear, n: int, m: int, importance: Tensor | None = None):
        super().__init__()
        self.in_features, self.out_features, self.n, self.m = *linear.weight.shape[::-1], n, m
        w, bias = linear.weight.detach(), linear.bias
        for name, x in zip(("values", "indices"), pack(w, n, m, prune(w, n, m, importance))):
            self.register_buffer(name, x)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.train(linear.training)

    @property
    def weight(self) -> Tensor:
        """The masked weight (N, K), unpacked anew."""
        return unpack(self.values, self.indices, self.n, self.m)

    def forward(self, x: Tensor) -> Tensor:
        few = 0 < x.numel() <= FEW * self.in_features and x.dtype == self.values.dtype
        if few and _kernel(x) and not (x.requires_grad and torch.is_grad_enabled()):
            return gather_gemv(x, self.values, self.indices, self.n, self.m, self.bias)
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.n}:{self.m}"


def sparsify_(
    model: nn.Module,
    n: int = 2,
    m: int = 4,
    skip: Sequence[str] = (),
    importance: Callable[[str, Tensor], Tensor] | None = None,
) -> nn.Module:
    """Replace, in place, every nn.Linear (exactly that type) below model by a SparseLinear.

    skip: names, or dotted parts of names, that stay dense: "head", "layers.0". So does a Linear
    whose weight something else shares. importance: (name, weight (N, K)) -> scores (N, K) in place
    of |w|. On the meta device too. ValueError names the layer; the model is then as it was.
    """
    _check(not isinstance(model, nn.Linear), "model is itself a Linear: wrap it in nn.Sequential")
    skip = (skip,) if isinstance(skip, str) else skip
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and uses[id(module.weight)] == 1
        and not any(f".{part}." in f".{name}." for part in skip)
    }  # fmt: skip
    for name, linear in linears.items():
        try:
            _grouped(_scores(linear.weight, None), n, m)
        except ValueError as error:
            raise ValueError(f'{name}: {error}; or leave it dense: skip=["{name}"]') from None
    for name in list(linears):
        linear = linears.pop(name)  # the dense weight goes when the next one's turn comes
        scores = importance and importance(name, linear.weight.detach())
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, SparseLinear(linear, n, m, scores))
    return model


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def check(device: str) -> None:
    """Every format against the dense product of the masked weight."""
    rng = torch.Generator().manual_seed(0)
    dtype = torch.float16 if device == "cuda" else torch.float32
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=4e-3, atol=4e-3)
    w, x = (torch.randn(rows, 96, generator=rng).to(device, dtype) for rows in (70, 5))
    for n, m in ((1, 4), (2, 4), (2, 8), (4, 32)):
        wanted, packed = F.linear(x, w * prune(w, n, m)), pack(w, n, m)
        close(gather_gemv(x, *packed, n, m), wanted)
        close(gather_gemv_reference(x, *packed, n, m), wanted)
    packed = pack_venom(w, 35, m=16)
    close(venom_matmul(x, packed), F.linear(x, unpack_venom(packed)))
    permuted = w[:, permute_channels(w)]
    assert retained(permuted, prune(permuted, 2, 4)) > retained(w, prune(w, 2, 4))
    masked = w[:64, :64] * prune(w[:64, :64], 2, 4)
    close(F.linear(x[:, :64], semi_structured(masked, fallback=True)), F.linear(x[:, :64], masked))


def losses(device: str) -> None:
    """Magnitude kept and error of the output, with channels as they are and permuted."""
    rng, (N, K) = torch.Generator().manual_seed(0), (256, 704)
    scale = torch.randn(K // 8, generator=rng).exp().repeat_interleave(8)
    w, x = ((torch.randn(N, K, generator=rng) * s).to(device) for s in (scale, 1))
    print(f"random {N} x {K}, channels alike in runs of 8, which suits permutation")
    print("               bytes    kept   error | permuted: kept   error   search")
    for v, n, m in ((0, 2, 4), (0, 1, 4), (0, 4, 8), (64, 2, 8)):
        make = (lambda w: venom_mask(w, v, n, m)) if v else (lambda w: prune(w, n, m))
        packed = pack_venom(w.half(), v, n, m)[:3] if v else pack(w.half(), n, m)
        start, row = time.perf_counter(), []
        order = permute_channels(w, n, m)
        taken = time.perf_counter() - start
        for p in (torch.arange(K, device=device), order):
            mask, y = make(w[:, p]), F.linear(x, w)
            error = (F.linear(x[:, p], w[:, p] * mask) - y).norm() / y.norm()
            row += [f"{retained(w[:, p], mask):7.1%} {error.item():7.1%}"]
        part = sum(t.nbytes for t in packed) / (2 * w.numel())
        name = f"{v}:{n}:{m}" if v else f"{n}:{m}"
        print(f"{name:12} {part:7.1%} {row[0]} | {row[1]:>23} {taken:6.2f} s")


def seconds(f: Callable[[], object], repeats: int = 11) -> float:
    """Median time of a call; on a GPU of a captured graph: launching is not what is measured."""
    f()
    if torch.cuda.is_available():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            f()
        f = lambda: (graph.replay(), torch.cuda.synchronize())
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def benchmark(device: str) -> None:
    """Milliseconds of a layer; on a GPU in turns on more weights than its cache holds."""
    gpu, patterns = device == "cuda", ((2, 4), (1, 4), (2, 8), (4, 32))
    size, count, dtype = (4096, 8, torch.float16) if gpu else (1024, 2, torch.float32)
    where = torch.cuda.get_device_name() if gpu else f"cpu, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}: ms per layer, {size} x {size}, {dtype}")
    print("rows F.linear" + "".join(f"{f'{n}:{m}':>9}" for n, m in patterns))
    dense = [nn.Linear(size, size, bias=False).to(device, dtype) for _ in range(count)]
    layers = [dense] + [[SparseLinear(linear, n, m) for linear in dense] for n, m in patterns]
    for rows in (1, 2, 4, 8):
        x = torch.randn(rows, size, device=device, dtype=dtype)
        times = [1e3 * seconds(lambda: [f(x) for f in fs]) / count for fs in layers]
        print(f"{rows:4}" + "".join(f"{t:9.3f}" for t in times))


if __name__ == "__main__":
    where = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.inference_mode():
        check(where)
        losses(where)
        benchmark(where)
