"""N:M sparsity: of every M consecutive weights in a row at most N are nonzero.

A weight matrix can lose its smaller half and stay useful, but unstructured zeros save neither
memory nor time. N:M sparsity keeps N of every M consecutive weights of a row: all rows have the
same length, an index takes a few bits, and the offset of each group is known. Top-down:

    prune        selects the N weights: by magnitude |w|, or by a given importance such as
                 |w| * ||x|| of calibration data (Wanda, arXiv:2306.11695)
    permute      channel permutation. The order of the channels is free; spreading large weights
                 over groups lets more of them survive. Greedy swaps (Pool & Yu, NeurIPS 2021),
                 folded into the layers before and after, at no run-time cost
    gather_gemv  kernel for the few rows of a decode step: reads values and indices, N/M of the
                 weight, and gathers x (nmSPARSE, MLSys 2023)
    V:N:M        tensor cores support 2:4 only. V rows choose 4 of M columns together and each row 2
                 of those 4: a 2:M weight as a 2:4 matmul of gathered x (VENOM, arXiv:2310.02065)
    2:4          torch's semi-structured tensors, on GPUs that support them (`semi_structured`)

Cost: a 1-byte index per 2-byte value: 2:4 takes 75 % of the dense bytes, 1:4 38 %, 4:32 19 %. When
it loses: in accuracy, nearly always. Without retraining, 2:4 costs a language model more than int4,
which is smaller; sparser patterns ruin it, and permutation recovers part of the loss. On a CPU
there is no speedup: the weight is unpacked for each matmul, as on a GPU for more than a few rows.
2:4 pays off where compute bounds a large matmul. Speed on a GPU: not measured yet.

Hook: the Linear swap, `sparsify_(model, n, m)`. Equivalence (test_all.py): every matmul == the
dense matmul of the masked weight; a permuted network, before pruning, == the original. Needs torch,
and triton for the kernel. `python quantization/sparse.py` runs a self-check and prints accuracy
loss, what permutation recovers, and times against F.linear.

Shapes: M rows of x, N outputs and K inputs of a weight (N, K), G groups in a row; n of m are kept,
J = G * n values in a row. V:N:M: N / v blocks of v rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS, Windows: every call runs plain torch
    triton = None

INTERPRET = triton is not None and triton.knobs.runtime.interpret
jit = triton.jit if triton else (lambda fn: fn)
MAX_GEMV_ROWS = 8  # rows of x up to which gather_gemv is used; for more the weight is unpacked
BLOCK_N = {1: 4, 2: 4, 4: 4, 8: 2}  # by rows of x; 512 values per row: 16-byte loads per thread

# --------------------------------------------------------------------------------------------------
# Pruning
# --------------------------------------------------------------------------------------------------


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _split_groups(x: Tensor, n: int, m: int) -> Tensor:
    """x (N, K) -> (N, G, m). ValueError if n:m is invalid or m does not divide K."""
    ok = isinstance(n, int) and isinstance(m, int) and 1 <= n < m <= 256
    _check(ok, f"n:m must have 1 <= n < m <= 256 (8-bit indices), not {n}:{m}")
    _check(x.dim() == 2, f"the weight must be (N, K), not {tuple(x.shape)}")
    K = x.shape[1]
    fits = ", ".join(str(i) for i in range(2, 33) if K % i == 0) or "none"
    _check(K % m == 0, f"m={m} does not divide the weight's {K} columns (m that do: {fits})")
    return x.unflatten(1, (-1, m))


def _scores(weight: Tensor, importance: Tensor | None) -> Tensor:
    """Pruning scores (N, K): |w|, or the importance."""
    scores = (weight.abs() if importance is None else importance).detach()
    ok = scores.shape == weight.shape
    shapes = f"{tuple(scores.shape)} must have the weight's shape {tuple(weight.shape)}"
    _check(ok, f"importance {shapes}")
    ok = weight.is_meta or bool((torch.isfinite(weight) & torch.isfinite(scores)).all())
    _check(ok, "the weight or its importance has a NaN or an infinity: fix it before pruning")
    return scores


def _top_n_mask(x: Tensor, n: int) -> Tensor:
    """Mask of the n largest along the last dimension; ties keep the first."""
    order = x.argsort(dim=-1, descending=True, stable=True)[..., :n]
    return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, order, True)


def prune(weight: Tensor, n: int, m: int, importance: Tensor | None = None) -> Tensor:
    """weight (N, K) -> mask (N, K) bool: of every m consecutive weights in a row, the n with the
    largest |w| or importance (N, K); ties keep the first."""
    return _top_n_mask(_split_groups(_scores(weight, importance), n, m), n).flatten(1)


def is_pruned(x: Tensor, n: int, m: int) -> bool:
    """Whether a mask or weight (N, K) has at most n nonzeros in every m consecutive columns."""
    return bool(((_split_groups(x, n, m) != 0).sum(-1) <= n).all())


def retained_energy(weight: Tensor, mask: Tensor) -> float:
    """Fraction of sum |w| that a mask keeps (VENOM's "energy"); permutation raises it."""
    w = weight.detach().abs().double()
    return ((w * mask).sum() / w.sum()).item()


# --------------------------------------------------------------------------------------------------
# Channel permutation
# --------------------------------------------------------------------------------------------------


def permute_channels(
    weight: Tensor, n: int = 2, m: int = 4, importance: Tensor | None = None, rounds: int = 200
) -> Tensor:
    """weight (N, K) -> permutation (K,) such that weight[:, permutation], pruned to n:m, keeps at
    least as much magnitude.

    Each round swaps two channels in each of many pairs of groups, pairs with the largest gain
    first, until no swap gains (a local maximum) or after `rounds` rounds. The first round takes
    O(N K^2) time, later rounds the share of groups that changed; memory is O(K^2). For several
    layers with the same input channels, pass their weights stacked by rows.
    """
    _split_groups(weight, n, m)
    w = _scores(weight, importance).double().t().contiguous()  # a row is a channel
    K, G = len(w), len(w) // m
    order = torch.arange(K, device=w.device)
    changed, slots = (torch.arange(i, device=w.device) for i in (G, m))  # groups, slots in a group
    kept_with, kept = w.new_empty(K, K), w.new_empty(G)  # [position, its new channel], current
    for _ in range(rounds):
        positions = (changed[:, None] * m + slots).flatten()
        kept_with[positions], kept[changed] = _kept_after_swap(w, order[positions], n, m)
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
        changed = torch.tensor(sorted(used), device=w.device)
    return order


def _kept_after_swap(w: Tensor, channels: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """Magnitude that a group keeps if one of its channels (g * m,) is replaced by any of the K
    channels: (g * m, K); and without a swap: (g,).

    Per row: the n - 1 largest of the other channels, plus the larger of their nth and the new one,
    where max(a, b) = (a + b + |a - b|) / 2: summed over rows, a matrix of L1 distances."""
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
    """Permute, in place, the columns of the consumers' weights and the rows of the producers'
    weights and biases. The network's function is unchanged (up to summation order) if nothing else
    reads these channels and all operations in between are elementwise: fold_permutation_(p,
    mlp.down_proj, [mlp.gate_proj, mlp.up_proj]) for SwiGLU. A norm's weight is one more producer.
    """
    K, todo = len(permutation), []
    ok = torch.equal(permutation.sort().values.cpu(), torch.arange(K))
    _check(ok, f"permutation must have each of 0 .. {K - 1} exactly once")
    for role, modules, dim in (("consumers", consumers, 1), ("producers", producers, 0)):
        for i, module in enumerate([modules] if isinstance(modules, nn.Module) else modules):
            name, w, bias = f"{role}[{i}]", module.weight, getattr(module, "bias", None)
            _check(isinstance(w, nn.Parameter), f"{name} is packed: permute before sparsify_")
            ok = w.dim() > dim and w.shape[dim] == K
            _check(ok, f"{name} has weight {tuple(w.shape)}, the permutation {K} channels")
            todo += [(name, w, dim)] + [(name, bias, 0)] * (dim == 0 and bias is not None)
    for name, w, _ in todo:
        ok = sum(w is other for _, other, _ in todo) == 1
        _check(ok, f"{name} shares a parameter with another module: it cannot be permuted for both")
    with torch.no_grad():
        for _, w, dim in todo:
            w.copy_(w.index_select(dim, permutation.to(w.device)))


# --------------------------------------------------------------------------------------------------
# Packed formats: N:M and V:N:M
# --------------------------------------------------------------------------------------------------


def pack(weight: Tensor, n: int, m: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight (N, K) -> values (N, J), indices (N, J) uint8 within the group. mask: by default
    prune's; groups with fewer than n nonzeros are padded with zeros."""
    mask = prune(weight, n, m) if mask is None else mask.bool()
    ok = mask.shape == weight.shape and (mask.is_meta or is_pruned(mask, n, m))
    _check(ok, f"mask must have the weight's shape and keep n={n} of m={m}, as prune(weight, n, m)")
    order = _split_groups(mask, n, m).byte().argsort(dim=-1, descending=True, stable=True)[..., :n]
    values = _split_groups(weight.detach() * mask, n, m).gather(-1, order)
    return values.flatten(1), order.byte().flatten(1)


def unpack(values: Tensor, indices: Tensor, n: int, m: int) -> Tensor:
    """values (N, J), indices (N, J) -> the masked weight (N, K)."""
    values, indices = (x.unflatten(1, (-1, n)) for x in (values, indices))
    dense = values.new_zeros(*values.shape[:2], m)
    return dense.scatter_(-1, indices.long(), values).flatten(1)


class Venom(NamedTuple):
    """A packed V:n:m weight: a value's column in its group is columns[block, group, index]."""

    values: Tensor  # (N, J)
    indices: Tensor  # (N, J) uint8, 0 .. 3: 2 bits, as tensor cores take them
    columns: Tensor  # (N / v, G, 4) uint8, ascending
    n: int
    m: int


def _blocks(x: Tensor, v: int, n: int, m: int) -> Tensor:
    """x (N, K) -> (N / v, v, G, m), or a ValueError."""
    x = _split_groups(x, n, m)
    ok = n < 4 < m and isinstance(v, int) and v > 0 and len(x) % v == 0
    _check(ok, f"{v}:{n}:{m} must have n < 4 < m, and v must divide the weight's {len(x)} rows")
    return x.unflatten(0, (-1, v))


def venom_mask(
    weight: Tensor, v: int, n: int = 2, m: int = 8, importance: Tensor | None = None
) -> Tensor:
    """weight (N, K) -> mask (N, K) bool. Each block of v rows selects the 4 columns of every m with
    the largest sum of |w| (or importance), and each row the n largest of these. The authors' code
    tries all choices of 4 columns, which keeps more and takes longer."""
    scores = _blocks(_scores(weight, importance), v, n, m)
    chosen = _top_n_mask(scores.double().sum(1, keepdim=True), 4)
    return _top_n_mask(scores.masked_fill(~chosen, -torch.inf), n).flatten(2).flatten(0, 1)


def is_venom(x: Tensor, v: int, n: int = 2, m: int = 8) -> bool:
    """Whether in a mask or weight (N, K) each block of v rows uses at most 4 of every m columns,
    and each row at most n."""
    used = _blocks(x, v, n, m) != 0
    return bool((used.any(1).sum(-1) <= 4).all() and (used.sum(-1) <= n).all())


def pack_venom(weight: Tensor, v: int, n: int = 2, m: int = 8, mask: Tensor | None = None) -> Venom:
    """weight (N, K) -> Venom. mask: by default venom_mask's."""
    mask = venom_mask(weight, v, n, m) if mask is None else mask.bool()
    ok = mask.shape == weight.shape and is_venom(mask, v, n, m)
    _check(ok, f"mask must have the weight's shape and be {v}:{n}:{m}, as venom_mask returns it")
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
    """x (..., K) -> (..., N): each block of rows gathers its columns of x for an n:4 matmul."""
    (blocks, G, _), (values, indices, columns, n, m) = packed.columns.shape, packed
    _check(x.shape[-1] == G * m, f"x {tuple(x.shape)} must have {G * m} columns, as the weight")
    columns = columns + torch.arange(0, G * m, m, device=x.device)[:, None]
    four = unpack(values, indices, n, 4).unflatten(0, (blocks, -1))
    return torch.einsum("...bk,bvk->...bv", x[..., columns.flatten(1)], four).flatten(-2)


def semi_structured(weight: Tensor, fallback: bool = False) -> Tensor:
    """A 2:4 weight (N, K) as torch's semi-structured tensor: F.linear(x, it) runs on sparse tensor
    cores. If unsupported: ValueError, or with fallback=True the weight itself."""
    _check(is_pruned(weight, 2, 4), "weight is not 2:4: multiply it by prune(weight, 2, 4)")
    nvidia = weight.is_cuda and torch.version.hip is None
    why = "requires an NVIDIA GPU of sm_80 or newer"
    if nvidia and torch.cuda.get_device_capability(weight.device) >= (8, 0):
        why = "requires float16 or bfloat16, N a multiple of 32 and K of 64"
        (N, K), half = weight.shape, weight.dtype in (torch.float16, torch.bfloat16)
        if half and N % 32 == K % 64 == 0:
            return torch.sparse.to_sparse_semi_structured(weight.detach().contiguous())
    have = f"{weight.dtype} {tuple(weight.shape)} on {weight.device}"
    _check(fallback, f"a 2:4 matmul {why}; the weight is {have}. fallback=True keeps it dense")
    return weight


# --------------------------------------------------------------------------------------------------
# Gather GEMV, for a few rows of x
# --------------------------------------------------------------------------------------------------


@jit
def _gather_kernel(
    x_ptr,  # (M, K)
    values_ptr, indices_ptr,  # (N, J), and uint8
    bias_ptr,  # (N,), or None
    y_ptr,  # (M, N)
    M, N, K, J, KEPT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    """y[r, n] = bias[n] + sum_j values[n, j] * x[r, j // KEPT * GROUP + indices[n, j]], in fp32.

    Grid (tiles of N, tiles of M). The weight is read once, in order, for ROWS rows of x; x is small
    and stays in L1, and neighbouring threads read it from the same or adjacent groups."""
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_ptrs = x_ptr + r.to(tl.int64)[:, None, None] * K
    w_start = n.to(tl.int64)[None, :, None] * J
    acc = tl.zeros((ROWS, BLOCK_N, BLOCK_J), tl.float32)
    for start in range(0, J, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)[None, None, :]
        mask = (n < N)[None, :, None] & (j < J)
        w = tl.load(values_ptr + w_start + j, mask=mask, other=0.0, eviction_policy="evict_first")
        i = tl.load(indices_ptr + w_start + j, mask=mask, other=0, eviction_policy="evict_first")
        column = j // KEPT * GROUP + i.to(tl.int32)
        x = tl.load(x_ptrs + column, mask=mask & (r < M)[:, None, None], other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)
    y = tl.sum(acc, 2)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + r.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(r < M)[:, None] & (n < N)[None, :])


def gather_gemv_reference(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, bias: Tensor | None = None
) -> Tensor:
    """gather_gemv in plain torch, row by row, in fp32 (fp64 for fp64)."""
    columns = torch.arange(values.shape[1], device=x.device) // n * m + indices
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows, values = x.reshape(-1, x.shape[-1]).to(dtype), values.to(dtype)
    y = torch.stack([(values * row[columns]).sum(-1) for row in rows])
    return (y if bias is None else y + bias).to(x.dtype).view(*x.shape[:-1], -1)


@torch.library.custom_op(
    "sheaf::gather_gemv",
    mutates_args=(),
    schema="(Tensor x, Tensor values, Tensor indices, int n, int m, Tensor? bias) -> Tensor",
)
def _gather_op(x, values, indices, n, m, bias):
    """One opaque op for torch.compile, which would otherwise trace into the kernel launch."""
    if not _can_use_triton(x):
        return gather_gemv_reference(x, values, indices, n, m, bias)
    x, values, indices, (N, J) = *(t.contiguous() for t in (x, values, indices)), values.shape
    y, K, M = x.new_empty(*x.shape[:-1], N), x.shape[-1], x.numel() // x.shape[-1]
    rows = min(MAX_GEMV_ROWS, 1 << (M - 1).bit_length())
    with torch.cuda.device_of(x):
        _gather_kernel[-(-N // BLOCK_N[rows]), -(-M // rows)](
            x, values, indices, bias, y, M, N, K, J, KEPT=n, GROUP=m, ROWS=rows,
            BLOCK_N=BLOCK_N[rows],
            BLOCK_J=min(512, max(16, 1 << (J - 1).bit_length())), num_warps=4,
        )  # fmt: skip
    return y


@_gather_op.register_fake
def _(x, values, indices, n, m, bias):
    return x.new_empty(*x.shape[:-1], values.shape[0])


def _can_use_triton(x: Tensor) -> bool:
    """Whether the Triton kernel supports x on this device."""
    ok = triton is not None and (x.is_cuda or INTERPRET) and x.dtype != torch.float64
    return ok and not (INTERPRET and x.dtype == torch.bfloat16)  # wrong in the interpreter


def gather_gemv(
    x: Tensor, values: Tensor, indices: Tensor, n: int, m: int, bias: Tensor | None = None
) -> Tensor:
    """x (..., K) times a packed n:m weight, values and indices (N, J), + bias (N,) -> (..., N).

    Sums in fp32, rounded once to x's dtype. The weight is read once per 8 rows. No gradient."""
    (N, J), K = values.shape, values.shape[1] // n * m
    ok = x.shape[-1] == K and x.numel() > 0 and x.dtype == values.dtype
    have = f"{x.dtype} {tuple(x.shape)}"
    _check(ok, f"x must be {values.dtype} (..., {K}) for {J} values per row of {n}:{m}, not {have}")
    ok = indices.shape == values.shape and indices.dtype == torch.uint8
    _check(ok, f"indices must be uint8 {(N, J)}, as pack returns them")
    _check(bias is None or bias.shape == (N,), f"bias must be ({N},)")
    return _gather_op(x, values, indices, n, m, bias)


# --------------------------------------------------------------------------------------------------
# The Linear swap
# --------------------------------------------------------------------------------------------------


class SparseLinear(nn.Module):
    """nn.Linear with a packed n:m weight, for inference: values and indices (N, J), bias (N,)."""

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
        """The masked weight (N, K), unpacked on each access."""
        return unpack(self.values, self.indices, self.n, self.m)

    def forward(self, x: Tensor) -> Tensor:
        gemv = 0 < x.numel() <= MAX_GEMV_ROWS * self.in_features and x.dtype == self.values.dtype
        if gemv and _can_use_triton(x) and not (x.requires_grad and torch.is_grad_enabled()):
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

    skip: names, or dotted parts of names, of layers to keep dense: "head", "layers.0". A layer with
    a tied weight also stays dense. importance: (name, weight (N, K)) -> scores (N, K), used instead
    of |w|. Works on the meta device. ValueError names the layer and leaves the model unchanged.
    """
    _check(not isinstance(model, nn.Linear), "model is an nn.Linear: wrap it in nn.Sequential")
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
            _split_groups(_scores(linear.weight, None), n, m)
        except ValueError as error:
            raise ValueError(f'{name}: {error}; or keep it dense: skip=["{name}"]') from None
    for name in list(linears):
        linear = linears.pop(name)  # frees the previous layer's dense weight
        scores = importance and importance(name, linear.weight.detach())
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, SparseLinear(linear, n, m, scores))
    return model


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """gather_gemv against the masked dense matmul, then milliseconds of a layer in each format."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    device, size = ("cuda", 4096) if torch.cuda.is_available() else ("cpu", 1024)
    dtype, patterns = torch.float16 if device == "cuda" else torch.float32, ((2, 4), (1, 4), (2, 8))
    w, x = (torch.randn(rows, 96, device=device, dtype=dtype) for rows in (70, 5))
    for n, m in patterns:
        got, exact = gather_gemv(x, *pack(w, n, m), n, m), F.linear(x, w * prune(w, n, m))
        torch.testing.assert_close(got, exact, rtol=4e-3, atol=4e-3)
    dense = nn.Linear(size, size, bias=False).to(device, dtype)
    layers = [dense, *(SparseLinear(dense, n, m) for n, m in patterns)]
    print(f"ms per layer, {size} x {size}, {dtype}")
    print("rows F.linear" + "".join(f"{f'{n}:{m}':>9}" for n, m in patterns))
    for rows in (1, 2, 4, 8):
        x = torch.randn(rows, size, device=device, dtype=dtype)
        time = lambda f: Timer("f(x)", globals=dict(f=f, x=x)).blocked_autorange().median
        print(f"{rows:4}" + "".join(f"{1e3 * time(layer):9.3f}" for layer in layers))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
