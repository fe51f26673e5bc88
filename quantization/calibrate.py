"""Calibration for low-bit weights: GPTQ, AWQ, SmoothQuant, equalization and TaCQ.

Rounding to nearest minimizes the error of the weights, not of the layer's output. On the inputs x
of a calibration text the output error is

    sum over x of |W x - W' x|^2  =  tr((W - W') H (W - W')^T),    H = sum over x of x x^T

so the Hessian H, one (K, K) matrix per linear, is the only statistic of the text it needs. Errors
of weights with correlated inputs can cancel, and weights on large inputs matter more. Each method
exploits this differently; the last one uses the gradient of the loss:

    gptq             rounds column by column and adjusts the remaining columns to cancel the error
                     (arXiv:2210.17323). The least error per layer; minutes per billion weights
    awq_scales       gives input channels with large inputs finer steps: multiplies their columns by
                     s and divides the producer's outputs by s (arXiv:2306.00978). Overfits little
    smooth_scales    the opposite direction, for int8 activations: divides outlier channels, and
                     multiplies their columns (SmoothQuant, arXiv:2211.10438)
    equalize_        without data: gives a channel the same range on both sides, and
    bias_correction  adds the mean output error to the bias (arXiv:1906.04721; 2106.08295, 4).
                     On models with even ranges equalize_ gains nothing; the biases 2 to 9% of
                     the KL divergence at 4 bits
    select_salient   Task-Circuit Quantization, TaCQ (arXiv:2504.07389): selects the few weights
                     whose rounding would increase the loss most, to keep them in 16 bits

`observe` collects the statistics. `layer_by_layer` runs the calibration text through a model, each
layer on the outputs of the quantized layers before it, with the statistics of one layer in memory:

    for index, layer, replay in layer_by_layer(model.layers, hidden_states, run):
        with observe(linears_of(layer), "hessian") as stats:
            replay()
        quantize_(layer, "int4", rounding=lambda name, w: gptq(w, stats[name].hessian, spec))

When it loses: at 4 bits in groups of 32 rounding to nearest costs the shipped checkpoint 0.02
nats, the most that calibration can recover. If the text differs from what the model will see, gptq
can be worse than rounding, though never on that text. Folding requires a producer that is linear in
its scale: q_proj, k_proj, gate_proj, up_proj and a router have the norm before them, down_proj has
up_proj; o_proj has v_proj, only without grouped queries. Weights kept in 16 bits add a sparse
matmul.

A `spec`, such as quantize.QuantSpec, has group_size (columns that share a scale; None: a row, 0:
all), choose_qparams(w) -> (scales, zeros), quantize(w, scales, zeros) -> qweight and
dequantize(qweight, scales, zeros) -> w; zeros may be None. Shapes: weight (N, K) as in nn.Linear,
scales and zeros (N, G), inputs (..., K).

Hook: the Linear swap, through its `rounding`. Equivalence (test_all.py): gptq against the optimal
brain surgeon's update in float64; its output error <= that of rounding, on every row; folding
changes the output in fp32 by less than 1e-5. Needs: torch. `python quantization/calibrate.py`
checks itself and prints each method's output error and time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

# --------------------------------------------------------------------------------------------------
# Statistics
# --------------------------------------------------------------------------------------------------

STATISTICS = ("hessian", "absmax", "mean_abs", "mean")


class Stats:
    """Statistics of the inputs x (..., K) of a linear, fp32; those not requested are None.

    count    rows seen
    hessian  (K, K), the sum of x x^T; 800 MB where K is 14336
    absmax   (K,), the largest |x|;  mean_abs, mean  (K,), of |x| and of x
    """

    def __init__(self, *names: str):
        """ValueError for a name that is not in STATISTICS."""
        if not names or set(names) - set(STATISTICS):
            raise ValueError(
                f"statistics must be one or more of {', '.join(STATISTICS)}, not {names}"
            )
        self.count, self.sums = 0, dict.fromkeys(names, 0)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Add x (..., K). Called directly where no hook can be: for the experts of a stack."""
        x = x.detach().reshape(-1, x.shape[-1]).float()
        if len(x) == 0:  # no token was routed to this expert
            return
        for name, total in self.sums.items():
            if name == "hessian":
                self.sums[name] = total.addmm_(x.t(), x) if self.count else x.t() @ x
            elif name == "absmax":
                self.sums[name] = x.abs().amax(0).clamp(min=total)
            else:
                self.sums[name] = total + (x.abs() if name == "mean_abs" else x).sum(0)
        self.count += len(x)

    @property
    def hessian(self) -> Tensor | None:
        return self._sum("hessian")

    @property
    def absmax(self) -> Tensor | None:
        return self._sum("absmax")

    @property
    def mean_abs(self) -> Tensor | None:
        total = self._sum("mean_abs")
        return None if total is None else total / self.count

    @property
    def mean(self) -> Tensor | None:
        total = self._sum("mean")
        return None if total is None else total / self.count

    def _sum(self, name: str) -> Tensor | None:
        return self.sums.get(name) if self.count else None


@contextmanager
def observe(modules: Mapping[str, nn.Module], *names: str) -> Iterator[dict[str, Stats]]:
    """with observe({"q_proj": layer.q_proj}, "hessian", "absmax") as stats: every call of a module
    within the block adds its first argument to stats[its name].

    Linears with the same input have the same statistics: observe one of them.
    """
    stats = {name: Stats(*names) for name in modules}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, s=stats[name]: s.update(args[0]))
        for name, module in modules.items()
    ]
    try:
        yield stats
    finally:
        for hook in hooks:
            hook.remove()


def layer_by_layer(
    layers: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    run: Callable[[nn.Module, Tensor], Tensor],
) -> Iterator[tuple[int, nn.Module, Callable[[], None]]]:
    """Yield (index, layer, replay) for each layer: replay() runs all batches through the layer in
    its current state, so that the caller can observe it. The next layer's inputs are the outputs of
    the layer that the caller leaves in `layers`, quantized or replaced (as in GPTQ, section 4).

    inputs: the hidden states of each batch before the first layer; run(layer, states) -> states.
    replay may be called again, for example with q, k and v quantized before observing o_proj.
    """
    states = list(inputs)
    if not states:
        raise ValueError("inputs is empty; give the hidden states of at least one batch")

    @torch.no_grad()  # not around the yield: the caller keeps its own grad mode
    def replay(keep: bool = False) -> None:
        for i, x in enumerate(states):
            out = run(layers[index], x)
            if keep:
                states[i] = out

    for index in range(len(layers)):
        yield index, layers[index], replay
        replay(keep=True)


# --------------------------------------------------------------------------------------------------
# GPTQ
# --------------------------------------------------------------------------------------------------


def output_error(weight: Tensor, quantized: Tensor, hessian: Tensor) -> Tensor:
    """tr((W - W') H (W - W')^T), a float64 scalar: the squared output error over the calibration
    inputs. weight, quantized (N, K), hessian (K, K)."""
    _check_inputs(weight, hessian, quantized)
    return _row_errors(weight, quantized, hessian).sum()


def round_to_nearest(spec: Any, weight: Tensor) -> Tensor:
    """The weight (N, K) rounded to nearest with `spec`, dequantized."""
    params = spec.choose_qparams(weight)
    return spec.dequantize(spec.quantize(weight, *params), *params)


def _row_errors(weight: Tensor, quantized: Tensor, hessian: Tensor) -> Tensor:
    delta = weight.float() - quantized.float()
    return (delta @ hessian.float()).mul_(delta).sum(1, dtype=torch.float64)


@torch.no_grad()
def gptq(
    weight: Tensor,
    hessian: Tensor,
    spec: Any,
    *,
    act_order: bool = False,
    damp: float = 0.01,
    block_size: int = 128,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """weight (N, K), hessian (K, K) -> (qweight, scales, zeros) of `spec` (arXiv:2210.17323).

    Columns are rounded one after another. The error of column j, divided by U_jj and multiplied by
    U_jk, is subtracted from each later column k, where H^-1 = U^T U: the optimal brain surgeon's
    update. Without act_order the scales of a group are chosen at its first column, from the weights
    updated so far. With act_order columns are processed by decreasing H_jj, and all scales are
    chosen first ("static groups"), so that no group index (g_idx) has to be stored.

    damp: this times the mean of H's diagonal is added to the diagonal, more if H cannot be
    factorized. keep: (N, K) bool, weights not to quantize (see `select_salient`); scales ignore
    them.

    The sweep is greedy, uses the damped H, and may choose coarser scales for updated weights, so a
    row can end up worse than rounded to nearest. Such a row is rounded to nearest.
    """
    _check_inputs(weight, hessian)
    if not damp >= 0 or block_size < 1:
        raise ValueError(f"damp ({damp}) must be 0 or more, block_size ({block_size}) 1 or more")
    if keep is not None and (keep.shape != weight.shape or keep.dtype != torch.bool):
        raise ValueError(f"keep must be bool and of weight's shape {list(weight.shape)}")
    W, H = weight.detach().float(), hessian.float()
    nearest = choose_qparams_masked(spec, W, keep)
    nearest_qweight = spec.quantize(W, *nearest)
    params = [None if p is None else p.clone() for p in nearest]
    if act_order:
        order = H.diagonal().argsort(descending=True, stable=True)
        factor, order = inverse_cholesky(H[order][:, order], damp), order.tolist()
    else:
        factor, order = inverse_cholesky(H, damp), list(range(len(H)))

    def update_qparams(j: int, w: Tensor) -> None:
        """Choose the scale and zero of the group from column j on, given its updated weights w."""
        n = w.shape[1]
        kept = None if keep is None else keep[:, j : j + n]
        for p, new in zip(params, choose_qparams_masked(spec, w, kept)):
            if p is not None:
                p[:, j // n, None] = new

    update = None if act_order else update_qparams
    qweight = _quantize_columns(W, keep, factor, spec, params, block_size, order, update)
    ours, rounded = spec.dequantize(qweight, *params), spec.dequantize(nearest_qweight, *nearest)
    if keep is not None:
        ours, rounded = torch.where(keep, W, ours), torch.where(keep, W, rounded)
    better = (_row_errors(W, ours, H) < _row_errors(W, rounded, H))[:, None]
    qweight = torch.where(better, qweight, nearest_qweight)
    return qweight, *(
        # a scale shared by all rows has not changed
        q if p is None or len(p) != len(W) else torch.where(better, p, q)
        for p, q in zip(params, nearest)
    )


def _quantize_columns(
    W: Tensor,
    keep: Tensor | None,
    factor: Tensor,
    spec: Any,
    params: list[Tensor | None],
    block_size: int,
    order: list[int],
    update_qparams: Callable[[int, Tensor], None] | None,
) -> Tensor:
    """Round W's columns in `order` -> qweight (N, K). update_qparams is called at the first column
    of every group but the first, whose weights have not changed."""
    K = W.shape[1]
    group = spec.group_size or K
    columns = W.t()[order].contiguous()  # (K, N): columns are contiguous
    qweight = [None] * K
    for start, stop in _blocks(K, group, block_size):
        errors = columns.new_empty(stop - start, len(W))
        for j in range(start, stop):
            c, g = order[j], order[j] // group
            if update_qparams is not None and j % group == 0 and j > 0:
                update_qparams(j, columns[j : j + group].t())
            qparams = [None if p is None else p[:, g, None] for p in params]
            qweight[c] = spec.quantize(columns[j, :, None], *qparams)
            rounded = spec.dequantize(qweight[c], *qparams)[:, 0]
            if keep is not None:
                rounded = torch.where(keep[:, c], W[:, c], rounded)
            error = torch.sub(columns[j], rounded, out=errors[j - start]).div_(factor[j, j])
            columns[j + 1 : stop].addr_(factor[j, j + 1 : stop], error, alpha=-1)
        columns[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)  # after the block
    return torch.cat(qweight, dim=1)


def _blocks(K: int, group: int, size: int) -> Iterator[tuple[int, int]]:
    """Blocks of up to `size` columns. No group starts in one block and ends in another: its scales
    would be chosen without the first block's updates."""
    span = max(group, size // group * group)
    for start in range(0, K, span):
        end = min(start + span, K)
        yield from ((i, min(i + size, end)) for i in range(start, end, size))


def choose_qparams_masked(
    spec: Any, weight: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """spec.choose_qparams(weight (N, K)) with each weight of keep (N, K) replaced by the mean of
    the others in its group, so that weights that are not quantized do not enlarge the scale."""
    if keep is None:
        return spec.choose_qparams(weight)
    w = weight.float().unflatten(1, (-1, spec.group_size or weight.shape[1]))
    kept = keep.view_as(w)
    mean = w.masked_fill(kept, 0).sum(-1, keepdim=True)
    mean /= (~kept).sum(-1, keepdim=True).clamp(min=1)
    return spec.choose_qparams(torch.where(kept, mean, w).flatten(1))


def inverse_cholesky(hessian: Tensor, damp: float) -> Tensor:
    """U (K, K), upper triangular, with (H + damp * mean(diag H) * I)^-1 = U^T U.

    From H = R R^T with R upper triangular (a Cholesky factor of H with its order reversed), U is
    R^-1. H^-1, whose condition number is the square of R's, is never formed, so fp32 is enough. A
    column without any input gets a positive diagonal: it is rounded and changes no other column.
    """
    H = hessian.flip(0, 1)  # a copy
    diagonal = H.diagonal()
    mean = diagonal.mean()
    diagonal += (diagonal == 0) * mean.clamp(min=1e-30) + damp * mean
    while True:
        L, failed = torch.linalg.cholesky_ex(H)
        if not failed:
            break
        more = max(9 * damp, 1e-6)
        damp += more
        if damp > 1:
            raise ValueError("hessian must be positive semi-definite: give a sum of x x^T")
        diagonal += more * mean
    eye = torch.eye(len(H), dtype=H.dtype, device=H.device)
    return torch.linalg.solve_triangular(L.flip(0, 1), eye, upper=True)


def _check_inputs(weight: Tensor, hessian: Tensor, quantized: Tensor | None = None) -> None:
    K = weight.shape[-1]
    for name, t, shape in (
        ("weight", weight, (len(weight), K)),
        ("hessian", hessian, (K, K)),
        ("quantized", weight if quantized is None else quantized, (len(weight), K)),
    ):
        if t.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, not {list(t.shape)}")
        _check_finite(name, t)


def _check_finite(name: str, t: Tensor) -> None:
    if not t.isfinite().all():
        raise ValueError(
            f"{name} holds NaN or inf; look for the weight or the calibration input it comes from"
        )


# --------------------------------------------------------------------------------------------------
# Folding scales: one layer divides, the next multiplies
# --------------------------------------------------------------------------------------------------


@torch.no_grad()
def awq_scales(weights: Sequence[Tensor], mean_abs: Tensor, hessian: Tensor, spec: Any) -> Tensor:
    """Scales s (K,) to fold into the linears that share an input, weights each (N, K): AWQ
    (arXiv:2306.00978, 3.2).

    s = mean_abs^alpha, normalized so that max s * min s = 1, with the alpha in 0, 0.05, .. 1 for
    which round(W s) / s has the least output error. The error is exact over all calibration
    inputs, from the Hessian. alpha = 0 is rounding to nearest, so the result is never worse by this
    measure.
    """
    for w in weights:
        _check_inputs(w, hessian)
    _check_channels("mean_abs", mean_abs, hessian.shape[0])
    if not weights:
        raise ValueError("weights is empty; give those of at least one linear")
    best, least_error = None, float("inf")
    sizes = (mean_abs.float() / mean_abs.max().clamp(min=1e-30)).clamp(min=1e-4)
    for i in range(21):
        s = sizes.pow(i / 20)
        s /= (s.max() * s.min()).sqrt()
        error = 0.0
        for w in weights:
            rounded = round_to_nearest(spec, w.float() * s) / s
            error += _row_errors(w, rounded, hessian).sum().item()
        if error < least_error:
            best, least_error = s, error
    return best


def smooth_scales(absmax: Tensor, weights: Sequence[Tensor], alpha: float = 0.5) -> Tensor:
    """s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), to fold: SmoothQuant (arXiv:2211.10438, eq. 4).

    absmax (K,) of the inputs, weights (..., K) of each linear that reads them. A larger alpha moves
    more of the quantization difficulty from the activations to the weights. s is 1 for a channel
    that is all zero on either side.
    """
    if not 0 <= alpha <= 1 or not weights:
        raise ValueError(
            f"alpha ({alpha}) must be from 0 to 1, weights ({len(weights)}) at least 1"
        )
    _check_channels("absmax", absmax, weights[0].shape[-1])
    weight_max = torch.stack([_channel_absmax(w, -1) for w in weights]).amax(0)
    return _ratio_or_one(absmax.float().pow(alpha), weight_max.pow(1 - alpha), absmax * weight_max)


@torch.no_grad()
def fold_(producer: nn.Module, consumers: Iterable[nn.Module | Tensor], s: Tensor) -> None:
    """Divide the producer's output channels by s (K,), multiply the consumers' input channels.

    producer: a norm (its weight and bias), or a linear (rows of its weight, and bias). consumers,
    everything that reads its output: linears, or parameters (..., K): a router (E, C), stacked
    experts (E, 2F, C). In bf16 both sides are rounded again, unless s is a power of two:
    s.log2().round().exp2().
    """
    outputs = [p for p in (producer.weight, getattr(producer, "bias", None)) if p is not None]
    inputs = [c.weight if isinstance(c, nn.Module) else c for c in consumers]
    K = s.numel()
    if not outputs:
        raise ValueError("producer has no weight to fold into; give the norm a weight of ones")
    if not (s.isfinite() & (s > 0)).all():
        raise ValueError("s must be finite and more than 0; use 1 for channels not to scale")
    if any(p.shape[0] != K for p in outputs) or any(c.shape[-1] != K for c in inputs):
        raise ValueError(
            f"s has {K} channels; the producer has {outputs[0].shape[0]} output channels, and the "
            f"consumers {[c.shape[-1] for c in inputs]} input channels"
        )
    for p in outputs:
        p.copy_(p / s.float().view(-1, *[1] * (p.dim() - 1)))
    for c in inputs:
        c.copy_(c * s.float())


def equalize_(first: nn.Linear, second: nn.Linear) -> Tensor:
    """Cross-layer equalization (arXiv:2106.08295, 4.1): give each channel between two linears the
    same range in both. Folds and returns s_i = sqrt(r1_i r2_i) / r2_i, with r1 the largest |weight|
    of a row of first and r2 of a column of second.

    Useful if rows or columns share scales. The function between the two must be linear per channel:
    in SwiGLU first = up_proj, second = down_proj.
    """
    r1, r2 = _channel_absmax(first.weight, 0), _channel_absmax(second.weight, -1)
    if len(r1) != len(r2):
        raise ValueError(f"first has {len(r1)} output channels, second {len(r2)} input channels")
    s = _ratio_or_one(r1.sqrt(), r2.sqrt(), r1 * r2)
    fold_(first, [second], s)
    return s


def bias_correction(weight: Tensor, quantized: Tensor, mean: Tensor) -> Tensor:
    """(W - W') E[x] (N,), to add to the bias, which restores the mean of the outputs
    (arXiv:2106.08295, 4.2). weight, quantized (N, K), mean (K,) of the inputs."""
    return (weight.float() - quantized.float()) @ mean.float()


def _channel_absmax(w: Tensor, channel: int) -> Tensor:
    """max |w| of each channel; `channel` is a dim of w."""
    return w.detach().float().abs().movedim(channel, 0).flatten(1).amax(1)


def _ratio_or_one(a: Tensor, b: Tensor, defined: Tensor) -> Tensor:
    return torch.where(defined > 0, a / b, 1.0)


def _check_channels(name: str, t: Tensor, K: int) -> None:
    _check_finite(name, t)
    if t.shape != (K,) or (t < 0).any():
        raise ValueError(f"{name} must be {K} values of 0 or more, one per column of the weights")


# --------------------------------------------------------------------------------------------------
# Task-Circuit Quantization
# --------------------------------------------------------------------------------------------------


def accumulate_saliency(
    model: nn.Module,
    matrices: Mapping[str, nn.Parameter],
    loss: Callable[[Any], Tensor],
    batches: Iterable[Any],
    fake_quantize: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """|Q(W) - W| * |W| * sum over batches of |dL/dW|, fp32, for each matrix of the model: a
    first-order estimate of what quantizing a weight does to the loss (TaCQ, arXiv:2504.07389, 3).

    loss(batch) -> scalar; fake_quantize(weight) -> the weight quantized and dequantized. As in the
    paper's code |.| is taken per batch, before the sum, so that gradients of different batches do
    not cancel. The paper's batches are single sequences.

    Each gradient is added and freed as soon as it is computed: apart from the sums, at most one
    layer's gradients exist. Existing .grad of the matrices are dropped.
    """
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in matrices.items()}
    required_grad = {p: p.requires_grad for p in (*model.parameters(), *matrices.values())}
    hooks, seen = [], 0

    def consume(total: Tensor, p: nn.Parameter) -> None:
        total.add_(p.grad.float().abs_())
        p.grad = None

    try:
        for p in required_grad:
            p.requires_grad_(False)
        for name, p in matrices.items():
            p.requires_grad_(True).grad = None
            hooks.append(p.register_post_accumulate_grad_hook(partial(consume, sums[name])))
        for batch in batches:
            seen += 1
            with torch.enable_grad():
                value = loss(batch)
            if not value.isfinite():
                raise ValueError(f"loss of batch {seen} is {value.item()}; remove the batch")
            value.backward()
    finally:
        for hook in hooks:
            hook.remove()
        for p, requires_grad in required_grad.items():
            p.requires_grad_(requires_grad)
    if not seen:
        raise ValueError("batches is empty; give at least one batch")
    with torch.no_grad():
        for name, p in matrices.items():
            sums[name].mul_(fake_quantize(p.detach()).sub(p).abs_().mul_(p.abs()))
    return sums


def select_salient(saliencies: Mapping[str, Tensor], fraction: float) -> dict[str, Tensor]:
    """The `fraction` of all weights with the highest saliency: name -> flat indices, ascending.

    One threshold for all matrices, so that important layers keep more. It is a running top-k over
    the matrices, with memory for twice the selection. Exact; ties are broken by order.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be from 0 to 1, not {fraction}")
    for name, s in saliencies.items():
        _check_finite(f"saliencies[{name!r}]", s)
    n_select = int(fraction * sum(s.numel() for s in saliencies.values()))
    if n_select == 0:
        return {name: torch.empty(0, dtype=torch.long) for name in saliencies}
    best = torch.empty(0)
    for s in saliencies.values():
        best = torch.cat((best, s.flatten().topk(min(n_select, s.numel())).values.cpu()))
        best = best.topk(min(n_select, len(best))).values
    ties = n_select - int((best > best[-1]).sum())  # weights at the threshold that are selected
    selected = {}
    for name, s in saliencies.items():
        flat = s.flatten()
        equal = (flat == best[-1]).nonzero()[:ties, 0]
        ties -= len(equal)
        selected[name] = torch.cat(((flat > best[-1]).nonzero()[:, 0], equal)).sort().values
    return selected


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


class MinMaxSpec:
    """A spec for the check below: affine, a scale and a zero for each group of columns."""

    def __init__(self, bits: int, group_size: int):
        self.top, self.group_size = 2**bits - 1, group_size

    def choose_qparams(self, w: Tensor) -> tuple[Tensor, Tensor]:
        low, high = w.unflatten(1, (-1, self.group_size)).aminmax(dim=-1)
        low, high = low.clamp(max=0), high.clamp(min=0)
        scales = ((high - low) / self.top).clamp(min=1e-8)
        return scales, (-low / scales).round()

    def quantize(self, w: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        n = w.shape[1] // scales.shape[1]
        q = w / scales.repeat_interleave(n, 1) + zeros.repeat_interleave(n, 1)
        return q.round().clamp(0, self.top).to(torch.uint8)

    def dequantize(self, qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        n = qweight.shape[1] // scales.shape[1]
        return (qweight - zeros.repeat_interleave(n, 1)) * scales.repeat_interleave(n, 1)


def gptq_reference(W: Tensor, H: Tensor, spec: Any) -> Tensor:
    """The qweight of `gptq` by the optimal brain surgeon's definition, in float64: round a column,
    apply its optimal update to the later columns, remove the column from H^-1."""
    W, H = W.double().clone(), H.double().clone()
    H.diagonal().add_(0.01 * H.diagonal().mean())
    inverse, qweight, n = H.inverse(), [], spec.group_size
    for j in range(W.shape[1]):
        if j % n == 0:
            scales, zeros = spec.choose_qparams(W[:, j : j + n].float())
        qweight.append(spec.quantize(W[:, j, None].float(), scales, zeros))
        error = W[:, j] - spec.dequantize(qweight[-1], scales, zeros)[:, 0].double()
        W -= error[:, None] * inverse[j] / inverse[j, j]
        inverse = inverse - inverse[:, j, None] * inverse[j] / inverse[j, j]
    return torch.cat(qweight, 1)


def random_problem(N: int, K: int, device: str) -> tuple[Tensor, Tensor]:
    """A weight (N, K), and inputs (4K, K) that are correlated and have some large channels."""
    rng, R = torch.Generator().manual_seed(0), K // 4
    x = torch.randn(4 * K, R, generator=rng) @ torch.randn(R, K, generator=rng) / R**0.5
    x = (x + 0.3 * torch.randn(4 * K, K, generator=rng)) * torch.randn(K, generator=rng).exp()
    return torch.randn(N, K, generator=rng).to(device), x.to(device)


def main(N: int = 512, K: int = 1024) -> None:
    """gptq against its reference, then each method's output error and time."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    device = "cuda" if torch.cuda.is_available() else "cpu"
    (W, x), spec = random_problem(32, 96, device), MinMaxSpec(3, 32)
    qweight, nearest = gptq(W, x.t() @ x, spec)[0], spec.quantize(W, *spec.choose_qparams(W))
    rows = (qweight != nearest).any(1)  # gptq falls back to rounding for the other rows
    same = (qweight == gptq_reference(W, x.t() @ x, spec))[rows].float().mean().item()
    assert rows.sum() > 16 and same > 0.99, same  # ties may differ

    W, x = random_problem(N, K, device)
    H, mean_abs = x.t() @ x, x.abs().mean(0)
    awq = lambda spec, s: round_to_nearest(spec, W * s) / s
    methods = {
        "nearest": lambda spec: round_to_nearest(spec, W),
        "AWQ": lambda spec: awq(spec, awq_scales([W], mean_abs, H, spec)),
        "GPTQ": lambda spec: spec.dequantize(*gptq(W, H, spec)),
        "act-order": lambda spec: spec.dequantize(*gptq(W, H, spec, act_order=True)),
    }
    size = output_error(W, torch.zeros_like(W), H)
    print(f"weight {N} x {K}, groups of 32: output error, % of the output's norm (seconds)")
    for bits, (name, method) in product((4, 3, 2), methods.items()):
        given = dict(f=method, spec=MinMaxSpec(bits, 32))
        seconds, out = Timer("f(spec)", globals=given).timeit(1).median, method(given["spec"])
        error = (output_error(W, out, H) / size).sqrt().item()
        print(f"{bits} bits {name:<10}{100 * error:>6.2f} ({seconds:.2f})")


if __name__ == "__main__":
    with torch.no_grad():
        main()
