"""Training in low precision: FP8 matmuls, and quantization-aware training.

FP8 training (`train.py --fp8`). A step is bound by matmuls, which hardware runs twice as fast on
8-bit numbers. All three matmuls of a layer, forward and backward, multiply FP8 operands; the
weights that the optimizer updates stay in fp32. What decides is which values share a scale: the
whole tensor, a row, or DeepSeek-V3's tiles (arXiv:2412.19437, 3.3), and the gradients' format
(arXiv:2209.05433). When it loses: without FP8 tensor cores, in layers narrower than about 4096, and
with one scale per tensor where activations have outliers.

Quantization-aware training (`train.py --qat`). The forward pass rounds each weight to what
quantize.py will store, the backward pass ignores the rounding (straight-through estimator,
arXiv:2106.08295, 4.1), so quantizing the result costs no further loss. When it loses: for 8 bits,
where rounding after training costs next to nothing.

Hooks: the Linear swap and the experts hook; names, parameters and checkpoints do not change.
Equivalence (test_all.py): each FP8 matmul and gradient == fp64 of the rounded operands; a model
under fake quantization == the quantized model. Needs: quantize.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantize import QuantSpec, check_weights, fp8_matmul, loop_experts, quantizable_modules
from quantize import swap_class_, to_fp8

# --------------------------------------------------------------------------------------------------
# FP8 training
# --------------------------------------------------------------------------------------------------

# Recipe -> granularity of activations and gradients, and that of weights.
RECIPES = {
    "tensorwise": ("tensorwise", "tensorwise"),
    "rowwise": ("rowwise", "rowwise"),
    "blockwise": ("1x128", "128x128"),
}


class Float8Matmul(torch.autograd.Function):
    """y = x W^T, and backward dx = g W and dW = g^T x: three matmuls of FP8 operands. Each operand
    is quantized from full precision, with scales along the dimension that its matmul sums over: for
    x that is K in the forward matmul, and M, the tokens, in dW."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        recipe: str,
        grad_dtype: torch.dtype,
        matmul: Callable[..., Tensor],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.granularities, ctx.grad_dtype, ctx.matmul = RECIPES[recipe], grad_dtype, matmul
        x_gran, w_gran = ctx.granularities
        return matmul(to_fp8(x, x_gran), to_fp8(weight, w_gran), x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (x_gran, w_gran), dtype = ctx.granularities, ctx.grad_dtype
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = ctx.matmul(to_fp8(g, x_gran, dtype), to_fp8(weight.t(), w_gran), x.dtype)
        if ctx.needs_input_grad[1]:
            dw = ctx.matmul(to_fp8(g.t(), x_gran, dtype), to_fp8(x.t(), x_gran), weight.dtype)
        return dx, dw, None, None, None


def float8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: str = "rowwise",
    grad_dtype: torch.dtype = torch.float8_e5m2,
    matmul: Callable[..., Tensor] = fp8_matmul,
) -> Tensor:
    """F.linear for training, in FP8: x (..., K), weight (N, K) in any dtype, bias (N,) -> (..., N)
    in x's dtype, or autocast's if enabled."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    y = Float8Matmul.apply(x.reshape(-1, x.shape[-1]), weight, recipe, grad_dtype, matmul)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.view(*x.shape[:-1], len(weight))


class Float8Linear(nn.Linear):
    """nn.Linear computed by `float8_linear`. Its weight is the master weight and stays in fp32; FP8
    copies exist only within a step."""

    recipe: str
    grad_dtype: torch.dtype
    matmul: Callable[..., Tensor]

    def forward(self, x: Tensor) -> Tensor:
        options = dict(recipe=self.recipe, grad_dtype=self.grad_dtype, matmul=self.matmul)
        return float8_linear(x, self.weight, self.bias, **options)


def fp8_training_(
    model: nn.Module,
    recipe: str,
    *,
    skip: Sequence[str] = ("head", "lm_head"),
    grad_dtype: torch.dtype = torch.float8_e5m2,
    matmul: Callable[..., Tensor] = fp8_matmul,
) -> nn.Module:
    """Make every nn.Linear below `model`, and the experts of its MoE layers, multiply in FP8: in
    place, with the same parameters, so that optimizer, checkpoints and names do not change.

    recipe: tensorwise, one scale per operand, the fastest; rowwise, one per row; blockwise,
    DeepSeek-V3's tiles of 1 x 128 and blocks of 128 x 128, the most accurate. grad_dtype: of the
    gradients, e5m2 for its range, or e4m3fn for one more bit of mantissa (DeepSeek-V3). matmul:
    called like fp8_matmul, such as gemm.block_scaled_matmul for blockwise. Embedding, norms, router
    and head are unchanged: few of the FLOPs and much of the accuracy. Slower than bf16 without FP8
    tensor cores, and with them in layers narrower than about 4096.
    """
    if recipe not in RECIPES:
        raise ValueError(f"FP8 recipe {recipe!r} is unknown; choose from {', '.join(RECIPES)}")
    if grad_dtype not in (torch.float8_e5m2, torch.float8_e4m3fn):
        raise ValueError(f"grad_dtype must be float8_e5m2 or float8_e4m3fn, not {grad_dtype}")
    options = dict(recipe=recipe, grad_dtype=grad_dtype, matmul=matmul)
    by_expert = lambda x, stack, e: float8_linear(x, stack[e], **options)
    for name, module in quantizable_modules(model, skip).items():
        if type(module) is nn.Linear:
            swap_class_(model, name, Float8Linear, **options)
        else:
            module.experts = partial(loop_experts, by_expert)
    return model


# --------------------------------------------------------------------------------------------------
# Quantization-aware training
# --------------------------------------------------------------------------------------------------


def fake_quantize(weight: Tensor, spec: QuantSpec) -> Tensor:
    """weight (..., K) quantized with `spec` and dequantized, in weight's dtype.

    Straight-through estimator: rounding passes the gradient to the weight unchanged; clamped
    weights get none (arXiv:2106.08295, 4.1). The ranges are computed from the weight at each call
    and have no gradient.
    """
    with torch.no_grad():
        w = weight.flatten(0, -2).float()
        scales, zeros = spec.choose_qparams(w)
        q = spec.dequantize(spec.quantize(w, scales, zeros), scales, zeros)
        step = scales.float().repeat_interleave(w.shape[1] // scales.shape[1], 1)
        inside = ((q - w).abs() <= step).view_as(weight)  # rounding moves by at most half a step
    return q.view_as(weight).to(weight.dtype) + (weight - weight.detach()) * inside  # q + 0


class FakeQuantLinear(nn.Linear):
    """nn.Linear whose weight is fake-quantized in every forward pass; the optimizer updates the
    unrounded weight."""

    spec: QuantSpec

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, fake_quantize(self.weight, self.spec), self.bias)


def qat_(model: nn.Module, spec: QuantSpec, *, skip: Sequence[str] = ()) -> nn.Module:
    """Quantization-aware training: every nn.Linear that quantize_ would replace, and the experts of
    MoE layers, use fake-quantized weights, in place, with the same parameters. quantize_ with the
    same spec then costs no further loss. Activations are not quantized. ValueError, naming the
    layer, if the spec does not fit."""
    todo = quantizable_modules(model, skip)
    check_weights(todo, spec.check, skip)
    for name, module in todo.items():
        if type(module) is nn.Linear:
            swap_class_(model, name, FakeQuantLinear, spec=spec)
        else:
            module.experts = partial(_fake_quantized_experts, module.experts, spec)
    return model


def _fake_quantized_experts(
    experts: Callable[..., Tensor],
    spec: QuantSpec,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    *stacks: Tensor,
) -> Tensor:
    return experts(x, weights, ids, *(fake_quantize(w, spec) for w in stacks))
