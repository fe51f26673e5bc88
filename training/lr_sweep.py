"""Trials of learning rates at several widths, trained as one batch of models.

    python -m training.lr_sweep --lrs 5e-4,1e-3,2e-3,4e-3 --widths 64,128 --steps 200

and other flags of train.py. It prints the last training loss of every trial, and the command that
trains the full width at the best learning rate.

The learning rate of a large run is tuned on small models, since muP (Yang et al., arXiv:2203.03466)
keeps the best one the same at any width. Small models leave the device idle: their matmuls are
small and launching them takes longer than computing. Hydro (Hu et al., OSDI 2023) trains the trials
of one shape as one model. Here the parameters of n trials are stacked and torch.func.vmap turns
each operation into its batched form: one bmm in place of n matmuls, the same batch of text for all,

    losses (n,), grads = vmap(grad_and_value(loss))(stacked parameters, batch)

then the gradients are clipped and AdamW updates them, with one learning rate per trial. Trials of
one width run together, widths one after another; the smallest is muP's base.

Gain: as many launches as one trial has. Cost: n times the memory of a trial. When it loses: where
one trial fills the device; and one that diverges is computed to the end.

Equivalence (test_all.py): each trial's losses == those of train.py with its --lr, within 1e-4. Not
supported: mixtures of experts, whose shapes depend on the data; fp16; and flags that change what is
trained in other ways. Those that do not, such as --compile, are for the printed command alone. Part
of train.py.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m training.lr_sweep --help")

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from huggingface.weights import allocate
from model import ModelConfig, Transformer
from training.build import meta_model, model_config
from training.config import FIXED, TrainConfig, parse_args
from training.data import IGNORE, decode
from training.dataset import build_dataset
from training.dist_env import init_distributed
from training.flags import out_of_memory
from training.optimizers import learning_rate, mup_factors
from training.parallelize import ParallelDims
from training.rank_env import world_size

BETAS, EPS = (0.9, 0.95), 1e-8  # those of train.py
SUPPORTED = "model seed batch_size seq_len data dtype lr_schedule warmup_steps decay_steps "
SUPPORTED += "min_lr_factor weight_decay grad_clip"  # of the settings that change what is trained
UNSUPPORTED = {*FIXED, "resume", "export", "plot", "dry_run", "upcycle", "replica_groups"}
UNSUPPORTED -= {*SUPPORTED.split()}


def scaled_to_width(config: ModelConfig, width: int) -> ModelConfig:
    """The model with all widths in proportion to its dim. ValueError if one is not an integer."""
    names = "dim n_heads n_kv_heads ffn_dim".split()
    sizes = {name: getattr(config, name) * width / config.dim for name in names}
    if not all(x.is_integer() and x >= 1 for x in sizes.values()):
        shown = ", ".join(f"{name} {x:g}" for name, x in sizes.items())
        raise ValueError(f"--widths {width}: the scaled --model would have {shown}")
    return replace(config, **{name: int(x) for name, x in sizes.items()})


def attention(spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """The attend hook: causal attention in operations that vmap can batch."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    distance = torch.arange(q.shape[1], device=q.device)
    distance = distance[:, None] - distance
    masked = (distance < 0) | (distance >= (spec.window or q.shape[1]))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * spec.scale
    p = scores.masked_fill(masked, -torch.inf).softmax(-1, dtype=torch.float32)
    return torch.einsum("bhts,bshd->bthd", p.to(v.dtype), v)


class Trials:
    """Copies of a model, one per learning rate, that are trained on the same batches by AdamW."""

    def __init__(
        self, model: Transformer, lrs: Sequence[float], lr_scale: Callable[[str, Tensor], float],
        weight_decay: float = 0.1, grad_clip: float = 1.0,
    ):  # fmt: skip
        """lr_scale: (name, parameter) -> factor of its learning rate."""
        self.model, self.n, self.updates = model, len(lrs), 0
        self.lrs = torch.tensor(lrs, device=model.embed.weight.device)
        named = dict(model.named_parameters())
        self.parameters = {name: torch.stack([p.detach()] * self.n) for name, p in named.items()}
        self.scales = {name: lr_scale(name, p) for name, p in named.items()}
        self.decay = {name: weight_decay * (p.dim() >= 2) for name, p in named.items()}
        zeros = lambda: {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.first, self.second, self.grad_clip = zeros(), zeros(), grad_clip

    def _loss(self, parameters: dict[str, Tensor], rows: Tensor, count: int) -> Tensor:
        inputs, targets, positions = decode(rows, packed=False)
        args = (inputs, positions), dict(attend=attention)
        logits = functional_call(self.model, parameters, *args).float().flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
        return loss / count

    def step(self, batch: Tensor, micro_batch_size: int, factor: float) -> Tensor:
        """Train on rows (B, T + 1) at `factor` times each learning rate. Losses (n,)."""
        count = int((decode(batch, packed=False)[1] != IGNORE).sum())
        run = vmap(grad_and_value(self._loss), in_dims=(0, None, None))
        totals, grads = torch.zeros(self.n, device=self.lrs.device), {}
        for rows in batch.split(micro_batch_size):
            new, losses = run(self.parameters, rows, count)
            grads = {name: g + grads[name] if grads else g for name, g in new.items()}
            totals += losses
        self._update(grads, factor)
        return totals

    def _per_trial(self, x: Tensor, like: Tensor) -> Tensor:
        """x (n,) in a shape that broadcasts with a stacked parameter."""
        return x.view(-1, *[1] * (like.dim() - 1)).to(like.dtype)

    def _update(self, grads: dict[str, Tensor], factor: float) -> None:
        """AdamW on gradients clipped per trial, as torch.optim.AdamW."""
        norm = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        clip = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0) if self.grad_clip else norm * 0 + 1
        self.updates += 1
        correction = [1 - beta**self.updates for beta in BETAS]
        for name, p in self.parameters.items():
            g = grads[name] * self._per_trial(clip, p)
            lr = self._per_trial(self.lrs * factor, p) * self.scales[name]
            self.first[name].lerp_(g, 1 - BETAS[0])
            self.second[name].lerp_(g * g, 1 - BETAS[1])
            p.mul_(1 - lr * self.decay[name] / self.scales[name])
            denominator = (self.second[name] / correction[1]).sqrt_().add_(EPS)
            p.sub_(lr * self.first[name] / correction[0] / denominator)


def check_flags(config: TrainConfig) -> None:
    """ValueError for settings that trials would not follow."""
    for name in sorted(UNSUPPORTED & config.given):
        if config.is_on(name) or name == "lr":  # --lr would override that of the printed command
            raise ValueError(f"{config.shown(name)}: trials do not support it; remove it")
    if config.dtype == "fp16":
        raise ValueError("--dtype fp16: trials have no loss scaling; use bf16 or fp32")
    if world_size() > 1:
        raise ValueError("trials run in one process; start them without torchrun")


def run(config: TrainConfig, lrs: Sequence[float], widths: Sequence[int]) -> dict[int, list[Any]]:
    """{width: losses (steps, n)} of the trials."""
    env, full = init_distributed(config), model_config(config)
    if full.moe_layers:
        raise ValueError("--model has MoE layers; trials need a dense one")
    config.mup_base = min(widths) if {*widths} != {full.dim} else None
    models = {width: scaled_to_width(full, width) for width in widths}
    layouts = {w: ParallelDims(config, m, 1, env.device.type) for w, m in models.items()}  # checks
    dataset, losses = build_dataset(config, full, env), {}
    for width, layout in layouts.items():
        model = allocate(meta_model(models[width]), "cpu", torch.float32)
        layout.init_weights_(model, config.seed)
        base = config.mup_base
        scale = lambda n, p: mup_factors(n, p.shape, width, base)[1] if base else 1.0
        trials = Trials(model.to(env.device), lrs, scale, config.weight_decay, config.grad_clip)
        losses[width] = []
        for step in range(config.steps):
            batch = dataset.rows(step, range(config.batch_size)).to(env.device)
            factor = learning_rate(
                step, config.steps, 1.0, schedule=config.lr_schedule, warmup=config.warmup_steps,
                decay=config.decay_steps, end=config.min_lr_factor,
            )  # fmt: skip
            with env.autocast():
                losses[width].append(trials.step(batch, config.micro_batch_size, factor).tolist())
    return losses


def table(losses: dict[int, list[Any]], lrs: Sequence[float]) -> tuple[str, float]:
    """The mean loss of the last tenth of the steps by width and learning rate, and the best
    learning rate of the largest width."""
    lines = ["width" + "".join(f"{lr:>10g}" for lr in lrs)]
    for width, rows in sorted(losses.items()):
        last = torch.tensor(rows[-max(1, len(rows) // 10) :]).mean(0).nan_to_num(torch.inf).tolist()
        best = min(range(len(lrs)), key=last.__getitem__)
        cells = (f"{x:>9.4f}" + ("*" if i == best else " ") for i, x in enumerate(last))
        lines.append(f"{width:>5}" + "".join(cells).rstrip())
    return "\n".join(lines), lrs[best]


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A parser of comma-separated positive numbers."""

    def numbers(text: str) -> list[Any]:
        values = [kind(x) for x in text.split(",")]
        if not all(0 < x < float("inf") for x in values):
            raise ValueError
        return values

    return numbers


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.lr_sweep", allow_abbrev=False,
        description="train several learning rates at once; other flags are those of train.py",
    )  # fmt: skip
    parser.add_argument("--lrs", type=_numbers(float), required=True, metavar="LR,LR,...")
    parser.add_argument("--widths", type=_numbers(int), metavar="WIDTH,WIDTH,...")
    args, rest = parser.parse_known_args(argv)
    try:
        config = parse_args(rest)
        check_flags(config)
        widths = args.widths or [model_config(config).dim]
        with tempfile.TemporaryDirectory() as folder:  # for tokenizer and tokens
            config.out = Path(folder)
            text, best = table(run(config, args.lrs, widths), args.lrs)
    except (ValueError, OSError) as e:
        print(f"python -m training.lr_sweep: error: {e}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as e:
        if (reason := out_of_memory(e)) is None:
            raise
        fix = "give fewer --lrs or smaller --widths"
        text = f"python -m training.lr_sweep: error: out of memory ({reason}); {fix}"
        print(text, file=sys.stderr)
        return 2
    base = f" --set mup_base={config.mup_base}" if config.mup_base else ""
    print(f"{text}\n\npython train.py --lr {best:g}{base} {shlex.join(rest)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
