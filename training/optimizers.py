"""Optimizers beyond fp32 AdamW: low-precision states, loss scaling, Muon, schedules, muP.

    stochastic_round_   unbiased rounding from fp32 to bf16
    StochasticAdamW     AdamW with 6 bytes per parameter instead of 12: weights and moments in bf16,
                        no fp32 master weights
    LossScaler          dynamic loss scaling, which keeps fp16 gradients from underflowing
    learning_rate       cosine, linear, warm-up-stable-decay, constant
    ChainedOptimizer    Muon for matrices and AdamW for the rest as one optimizer (muon_split)
    mup_factors         initialization and learning rate by width: tune a narrow model, train a wide

bf16 has 8 bits of mantissa: w + u rounds to w as soon as |u| < |w| / 512, and an AdamW update is
about lr whatever w is. With rounding to nearest, training stops there. Stochastic rounding rounds
up with a probability equal to the distance from the lower neighbour: E[round(x)] = x, and small
updates accumulate in expectation (Gupta et al., arXiv:1502.02551; for LLM training Zamirai et al.,
arXiv:2010.06192, and Ozkara et al., arXiv:2502.20566). Implementation: add 16 random bits to the 16
that bf16 drops, then truncate.

Cost: noise of one bf16 step in every weight, and three random numbers per parameter, which a CPU
generates slowly: a step takes as long as 20 fused ones there. Gain: half the memory, and no
autocast. When it loses: if activations dominate the memory.

LossScaler is not torch.amp.GradScaler, which looks at this rank's gradients alone: here the norm
over all ranks decides, so that all take or skip a step. learning_rate is not one of torch's
schedulers: a function of the step has no state to save.

Hooks: none. Inputs are parameters, names, shapes and numbers; optimizers have torch.optim's API.
Equivalence (test_all.py): a StochasticAdamW step equals torch's fp32 AdamW in the mean over seeds
and depends only on (seed, step, parameter), so that a resumed run equals the uninterrupted one bit
for bit; ChainedOptimizer's steps are those of its optimizers. Needs: torch.
`python training/optimizers.py` checks itself and prints a table.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

BF16_MAX = torch.finfo(torch.bfloat16).max
# elements updated at a time, which bounds the fp32 copies: a CPU's cache, on a GPU 17 MB
CHUNKS = {"cpu": 2**18, "cuda": 2**22}

SCHEDULES = ("cosine", "linear", "wsd", "constant")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def stochastic_round_(
    target: Tensor, source: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Round fp32 `source` into bf16 `target`, to one of its two neighbours, without bias.

    Values that bf16 represents are unchanged, infinities and NaN too. Finite values never become
    infinite: those beyond bf16's largest, 3.39e38, saturate, which is the one biased case.
    """
    dtypes, wanted = (target.dtype, source.dtype), (torch.bfloat16, torch.float32)
    error = f"stochastic_round_ takes bf16 and fp32 of one shape, not {dtypes}"
    _check(dtypes == wanted and target.shape == source.shape, error)
    # a random int64 costs as much as an int16, and is split into four
    noise = torch.empty(-(-source.numel() // 4), dtype=torch.int64, device=source.device)
    noise = noise.random_(-(2**63), None, generator=generator).view(torch.int16)
    noise = noise[: source.numel()].to(torch.int32).bitwise_and_(0xFFFF).view(source.shape)
    # floats of one sign are ordered as their bits: noise in the dropped bits carries into the kept
    # ones, away from zero, with the probability that the dropped bits encode
    bits = noise.add_(source.clamp(-BF16_MAX, BF16_MAX).view(torch.int32)).bitwise_and_(-0x10000)
    return target.copy_(torch.where(source.isfinite(), bits.view(torch.float32), source))


def _local_tensor(t: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; other tensors are returned as is."""
    return t.to_local() if hasattr(t, "to_local") else t


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) for bf16 parameters: arithmetic in fp32; weights and both moments
    are stored in bf16 by `stochastic_round_`.

    The state is torch's: "step", "exp_avg", "exp_avg_sq". Random numbers depend only on (seed,
    step, index of the parameter): replicas of a parameter are rounded alike. Those of a sharded
    parameter depend on its shards: another layout gives another run, equal in expectation.
    Parameters must be contiguous.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, seed: int = 0,
    ):  # fmt: skip
        _check(all(0 <= b < 1 for b in betas), f"betas must be in [0, 1), not {betas}")
        _check(lr >= 0 and eps >= 0 and weight_decay >= 0, "lr, eps, weight_decay must be >= 0")
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, seed=seed)
        super().__init__(params, defaults)
        for p in (p for group in self.param_groups for p in group["params"]):
            error = f"parameter {tuple(p.shape)} is {p.dtype}: StochasticAdamW requires bfloat16"
            _check(p.dtype == torch.bfloat16, f"{error}; use torch.optim.AdamW")

    @torch.no_grad()
    def step(self) -> None:
        params = [(p, group) for group in self.param_groups for p in group["params"]]
        for index, (p, group) in enumerate(params):
            if p.grad is not None:
                self._update(p, index, group)

    def _update(self, p: Parameter, index: int, group: Mapping[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        step, (beta1, beta2), lr = int(state["step"]), group["betas"], group["lr"]
        step_size, correction2 = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
        local = [_local_tensor(t.detach()) for t in (p, state["exp_avg"], state["exp_avg_sq"])]
        # a CPU generator uses only 32 bits of its seed
        digest = hashlib.sha256(repr((group["seed"], step, index)).encode()).digest()
        generator = torch.Generator(local[0].device)
        generator.manual_seed(int.from_bytes(digest[:4], "little"))
        chunk = CHUNKS[generator.device.type]
        parts = [t.view(-1).split(chunk) for t in (*local, _local_tensor(p.grad).contiguous())]
        for *bf16, grad in zip(*parts):
            (weight, mean, square), grad = (t.float() for t in bf16), grad.float()
            mean.lerp_(grad, 1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            weight.mul_(1 - lr * group["weight_decay"])
            denom = square.sqrt().div_(correction2).add_(group["eps"])
            weight.addcdiv_(mean, denom, value=-step_size)
            for to, value in zip(bf16, (weight, mean, square)):
                stochastic_round_(to, value, generator)


@dataclass
class LossScaler:
    """Dynamic loss scale for fp16, so that small gradients do not underflow (Micikevicius et al.,
    arXiv:1710.03740, 3.2): halved if a gradient overflows, whose step is skipped, and multiplied by
    `growth_factor` after `growth_interval` consecutive finite steps. It stays in 1 .. 2^24.

        (loss * scaler.scale).backward()
        if scaler.update(bool(norm.isfinite())):  # else skip the step; the scale is now smaller
            optimizer.step()                      # of gradients / the scale before update

    `update` sets the next step's scale: unscale the gradients before. All ranks must pass the same
    `finite`.
    """

    MIN_SCALE = 1.0
    scale: float = 2.0**16
    growth_factor: float = 2.0
    growth_interval: int = 2000
    good_steps: int = field(default=0, init=False)

    def update(self, finite: bool) -> bool:
        """Update the scale; return whether to take the step."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, self.MIN_SCALE)
        elif self.good_steps == self.growth_interval:
            self.scale, self.good_steps = min(self.scale * self.growth_factor, 2.0**24), 0
        return finite

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good": self.good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good"])


def learning_rate(
    step: int, steps: int, peak: float, *, schedule: str = "cosine", warmup: int | None = None,
    decay: int | None = None, end: float = 0.1,
) -> float:  # fmt: skip
    """Learning rate of step `step` (from 0) of `steps`.

    It first grows linearly over `warmup` steps (None: 5% of all, at most 500). Then "constant" is
    peak; "cosine" (arXiv:1608.03983) and "linear" decay to end * peak at `steps`; "wsd" (warm-up,
    stable, decay: MiniCPM, arXiv:2404.06395) stays at peak and decays in the last `decay` steps
    (None: 20%) as 1 - sqrt, which Hägele et al. found better than linear (arXiv:2405.18392).
    A wsd run can be extended from any step before its decay; a longer cosine run differs from the
    first step on.
    """
    _check(schedule in SCHEDULES, f"unknown schedule {schedule!r}; known: {', '.join(SCHEDULES)}")
    warmup = min(500, max(1, steps // 20)) if warmup is None else warmup
    decay = max(1, steps // 5) if decay is None else decay
    _check(warmup >= 0 and decay >= 1, f"warmup must be >= 0, decay >= 1, not {warmup}, {decay}")
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    first = max(warmup, steps - decay) if schedule == "wsd" else warmup
    done = min(1.0, max(0.0, (step - first) / max(1, steps - first)))
    if schedule == "cosine":
        return peak * (end + (1 - end) * 0.5 * (1 + math.cos(math.pi * done)))
    return peak * (end + (1 - end) * (1 - (done if schedule == "linear" else math.sqrt(done))))


class ChainedOptimizer(torch.optim.Optimizer):
    """Several optimizers of disjoint parameters as one: one param_groups, state and state_dict.

        matrices, rest = muon_split(model.named_parameters())
        muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")
        optimizer = ChainedOptimizer(muon, torch.optim.AdamW(rest))

    Muon (arXiv:2502.16982) keeps one moment instead of two. With this adjust_lr_fn its updates have
    the RMS of AdamW's, and both use one learning rate. It needs whole matrices: matmuls of DTensors
    are collectives, and it must not be given plain tensors that are shards of a matrix.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers
        super().__init__([g for o in optimizers for g in o.param_groups], {})
        for o in optimizers:
            self.state.update(o.state)
        self._share_state()

    def _share_state(self) -> None:
        """Make the optimizers use the param_groups and state of this one: the same objects."""
        groups = iter(self.param_groups)
        for o in self.optimizers:
            o.param_groups, o.state = [*islice(groups, len(o.param_groups))], self.state

    def __setstate__(self, state: dict[str, Any]) -> None:  # load_state_dict ends here
        super().__setstate__(state)
        self._share_state()

    def step(self) -> None:
        for o in self.optimizers:
            o.step()


NamedParameters = list[tuple[str, Parameter]]


def muon_split(
    named_parameters: Iterable[tuple[str, Parameter]], exclude: Collection[str] = ("embed", "head")
) -> tuple[NamedParameters, NamedParameters]:
    """(hidden matrices, the rest) as lists of (name, parameter), which torch.optim takes.

    Muon orthogonalizes maps between hidden states: 2-D weights, except embeddings and heads, whose
    dotted names have a component in `exclude`. Stacked expert weights (3-D) are matrices too, but
    torch's Muon only takes 2-D: they go to the rest.
    """
    matrices, rest = [], []
    for name, p in named_parameters:
        hidden = p.dim() == 2 and not set(name.split(".")) & set(exclude)
        (matrices if hidden else rest).append((name, p))
    return matrices, rest


def mup_factors(
    name: str, shape: Sequence[int], width: int, base_width: int, *,
    inputs: Collection[str] = ("embed",), outputs: Collection[str] = ("head", "router"),
) -> tuple[float, float]:  # fmt: skip
    """(factor of the initial standard deviation, factor of Adam's learning rate) of a parameter in
    a model of `width`, relative to the same model of `base_width`: muP (Yang et al.,
    arXiv:2203.03466, table 3), with m = width / base_width:

        matrices, stacks of them   1 / sqrt(m)   1 / m
        outputs                    1 / m         1 / m    fan-in grows, fan-out does not
        inputs, norms, biases      1             1

    If C, Hq, Hkv and F all grow by m while depth, D, V, E, batch and steps are fixed, then in the
    limit of wide models a step changes every activation by the same amount at any m, and the best
    learning rate of `base_width` is about that of `width`. Attention keeps its scale 1 / sqrt(D),
    since D is fixed. Head and embedding must not be tied: one matrix cannot have two learning
    rates. Adam's eps must be far below the gradients, which shrink with width. Weight decay is
    multiplied by the learning rate: multiply weight_decay by m to keep its strength. inputs,
    outputs: matched against the components of the dotted name.
    """
    widths = f"width and base_width must be > 0, not {width} and {base_width}"
    _check(width > 0 and base_width > 0, widths)
    m, parts = width / base_width, set(name.split("."))
    if len(shape) < 2 or parts & set(inputs):
        return 1.0, 1.0
    return (1 / m if parts & set(outputs) else m**-0.5), 1 / m


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def check() -> None:
    """Rounding is unbiased, and exact for bf16 values."""
    generator, x = torch.Generator().manual_seed(0), torch.tensor([1 + 2**-9, -3.3e-5, 1.7e8])
    copies = x[:, None].repeat(1, 10**5)
    rounded = stochastic_round_(torch.empty_like(copies, dtype=torch.bfloat16), copies, generator)
    assert torch.allclose(rounded.double().mean(1), x.double(), rtol=2e-4)
    exact = torch.tensor([0.0, -1.5, math.inf, -math.inf, BF16_MAX, 2**-133])
    assert torch.equal(stochastic_round_(exact.bfloat16(), exact, generator).float(), exact)


def main() -> None:
    """Milliseconds of a step of 4M parameters, and bytes of a parameter and its state."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    check()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{device}, {torch.get_num_threads()} threads\n{'':>24}{'ms':>8}{'bytes':>8}")
    for dtype, kind in (
        (torch.float32, partial(torch.optim.AdamW, fused=True)),
        (torch.bfloat16, partial(torch.optim.AdamW, fused=True)),
        (torch.bfloat16, StochasticAdamW),
    ):
        name = "StochasticAdamW" if kind is StochasticAdamW else "AdamW fused"
        p = Parameter(torch.ones(2**22, device=device, dtype=dtype))
        p.grad, optimizer = torch.randn_like(p), kind([p])
        ms = 1e3 * Timer("o.step()", globals={"o": optimizer}).blocked_autorange().median
        size = p.element_size() + sum(t.nbytes for t in optimizer.state[p].values()) / p.numel()
        print(f"{name}, {str(dtype)[6:]:>8}".rjust(24) + f"{ms:>8.1f}{size:>8.1f}")


if __name__ == "__main__":
    main()
