"""train.py: train a Llama- or DeepSeek-style model from text, on one process or under torchrun.

    python train.py                              the standard library's source -> runs/stdlib
    python train.py --data A.jsonl=3 --data B --pack --model small --steps 2000 --out runs/mine
    torchrun --nproc-per-node 8 --max-restarts 9 train.py --resume auto --tp 2 --zero 3 ...
                                                 matrices over two ranks, the rest over the four
                                                 with other batches; a rank that dies is replaced
    python train.py --out runs/mine --export     the newest checkpoint as a Hugging Face folder
    python train.py --init runs/mine --task sft --data chats.jsonl --out runs/chat
                                                 then --task dpo or grpo; each with --lora 8 or not
    python train.py --init checkpoints/small --upcycle 8 --out runs/mixture
                                                 8 experts in place of every MLP, each its copy
    python train.py --train-draft-head --init checkpoints/small --out runs/head
                                                 a draft head for speculative decoding with it
    python train.py --diloco 100 --diloco-at FOLDER --diloco-workers 4 --diloco-worker 0 --out RUN0
                                                 and 1, 2, 3 elsewhere: workers that meet in each
                                                 100th step, and may come and go (diloco.py)

A run, in order: read the documents; train a tokenizer on them; write them as token files; then per
step take a batch, accumulate gradients over micro-batches, clip, AdamW; now and then validate and
save. OUT has metrics.jsonl and checkpoints/, and when the run ends or is stopped it is a Hugging
Face folder (config.json, model.safetensors in bf16, tokenizer) that generate.py and transformers
open. --fp8 and --qat change what a step multiplies, not what is saved.

What holds, and test_all.py proves:

- The batch is a pure function of (seed, step, sample index). No loader has a state, so a run
  resumed with --resume prints the losses of an uninterrupted one to the last digit (on CPU).
- The loss of a step is the mean over its *tokens*: every micro-batch's sum is divided by the count
  of the whole step, on all ranks, so micro-batch size and rank count change nothing but rounding.
- Layouts (--tp --cp --ep --zero ..., layout.py) change nothing but rounding either: one seed is
  the same weights and batches under each, and the checkpoint goes on under any other. (But for
  --aux-loss, which is one of each micro-batch.)
- --recompute, --offload and --loss-chunk change memory: the first two no bit, the third rounding.
- A checkpoint appears whole or not at all, and is not read if a byte of it has changed. SIGTERM
  and Ctrl-C save and leave; kill -9 at any moment, of any rank, leaves the previous one.

Its parts, each a file: flags.py; place.py; text.py and data.py; layout.py, how ranks share the
work; recompute.py, chunked_loss.py and offload.py, memory; optimizers.py; lora.py and tuning.py,
what comes after pre-training; checkpoint.py, state.py and recovery.py; metrics.py.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

import moe
from attention import as_attend
from checkpoint import Checkpoints
from data import BOS, EOS, decode
from flags import DRAFT_HEAD, FIXED, QAT_GRIDS, SAVED, flag, parse_args
from flags import settle_diloco_flags, settle_expert_flags, settle_flags
from layout import IGNORE, Layout
from lora import lora_
from metrics import Metrics, PeakMemory, flops_per_token, peak_flops, plot, profiled
from metrics import summary_writer
from model import (
    CONFIGS,
    Attend,
    ModelConfig,
    MoE,
    Transformer,
    allocate,
    causal_attention,
    load_checkpoint,
    packed_attention,
    read_config,
)
from offload import OffloadedOptimizer, OptimizerInBackward
from optimizers import LossScaler, Several, StochasticAdamW, learning_rate, muon_split
from optimizers import mup_factors
from place import Place, find_place
from quantize import fp8_training_, qat_
from recovery import Diverged, Guard, Mirror, Watch, stragglers
from state import CHECKPOINTS, Island, State, export, saved_run
from text import TEXTS, NextToken, Text, prepare_task, prepare_text
from tuning import objective_of
from upcycle import upcycle_, upcycled_config

RUN_ID = "run.id"  # in OUT: which run this is
LAST_WORDS = 10.0  # seconds that a step may go on after SIGTERM, before its state is kept
HUNG = 75  # the exit code of a rank that waited too long: EX_TEMPFAIL, try again
MTP_WEIGHT = 0.3  # of the loss of predicting further (DeepSeek-V3, arXiv:2412.19437, 4.2)

# --------------------------------------------------------------------------------------------------
# One step
# --------------------------------------------------------------------------------------------------


ALONE = Layout()  # one process


class PackedFlash:
    """The attend hook for documents that share rows, on attention.py's kernels."""

    def __init__(self) -> None:
        self.positions, self.run = None, None

    def __call__(self, spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        if positions is not self.positions:  # every layer of a forward pass has the same ones
            starts = (positions.flatten() == 0).nonzero().flatten()
            ends = starts.new_tensor([positions.numel()])
            self.run = as_attend(cu_seqlens=torch.cat((starts, ends)).int())
            self.positions = positions
        flat = (x.flatten(0, 1)[None] for x in (q, k, v))
        return self.run(spec, *flat, positions).view(*q.shape[:3], v.shape[-1])


def attend_of(attention: str, packed: bool = False) -> Attend:
    """The model's attend argument for that kind of attention."""
    if packed:
        return PackedFlash() if attention == "flash" else packed_attention
    return as_attend() if attention == "flash" else causal_attention


def loss_sums(
    model: Transformer, batch: Tensor, attend: Attend = causal_attention, layout: Layout = ALONE
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropies of batch (B, T + 1), coded rows (data.py), in nats: of the next token,
    and of those further ahead, the mean over the model's multi-token prediction depths (0 without
    any). Of the tokens that `layout` gives this rank."""
    at = layout.positions(batch.shape[1] - 1, batch.device)
    inputs, targets, positions = decode(batch, layout.packed)
    if at is not None:
        inputs, targets = inputs[:, at], targets[:, at]
    where = at if positions is None else positions
    if not (model.mtp or layout.chunked):
        main = layout.cross_entropy(model(inputs, where, attend=attend), targets)
        return main, torch.zeros_like(main)
    hidden = model(inputs, where, attend=attend, return_hidden=True)
    main = layout.head_loss(model, hidden, targets)
    ahead = main.new_zeros(())
    for depth in range(1, 1 + len(model.mtp)):
        near, further = None, targets[:, depth:]
        if positions is not None:  # of what lies that far ahead, some is another document's
            near = positions[:, :-depth]
            further = further.masked_fill(positions[:, depth:] < depth, IGNORE)
        hidden = model.predict_further(hidden[:, :-1], inputs[:, depth:], near, attend, depth - 1)
        ahead = ahead + layout.head_loss(model, hidden, further)
    return main, ahead / max(1, len(model.mtp))


def accumulate(
    model: torch.nn.Module,
    batch: Tensor,
    micro_batch_size: int,
    autocast: Callable[[], Any] = contextlib.nullcontext,
    attend: Attend = causal_attention,
    balance: Balance | None = None,
    layout: Layout = ALONE,
    objective: Any = None,
    scale: float = 1.0,
) -> dict[str, float]:
    """Leave in .grad the gradient of the mean loss over all the step's tokens (and MTP_WEIGHT times
    that of predicting further, and the auxiliary losses of `balance`), times `scale`; return those
    losses. objective: in place of the next token (tuning.py), with `count` and `loss`.

    The divisor is the token count of the whole step (all micro-batches, all ranks), known before
    the first backward. A mean of micro-batch means would weigh a token by how few stand beside it.
    An auxiliary loss is a mean over routed tokens, of which all rows have the same number: it
    counts by the share of the step's rows.
    """
    tp, cp = layout.size("tp"), layout.size("cp")
    counted = objective.count(batch) if objective else count_targets(batch, layout)
    count = layout.total(counted) // (cp * layout.size("pp"))
    rows = len(batch) * layout.batch_shares * cp
    if layout.stages is not None:
        how = autocast, attend, balance, layout
        totals = layout.stages.accumulate(model, batch, count, rows, *how)
    else:
        totals, seen = torch.zeros(3, device=batch.device), 0
        for micro in layout.micro_batches(model, batch, micro_batch_size):
            if balance is not None:
                balance.watching = True
            with autocast():
                if objective is None:
                    main, ahead = (x / count for x in loss_sums(model, micro, attend, layout))
                else:
                    here = slice(seen, seen + len(micro))
                    main = objective.loss(model, micro, here, attend) / count
                    ahead = torch.zeros_like(main)
            aux = main.new_zeros(()) if balance is None else balance.take() * (len(micro) / rows)
            # the gradients of a mixture's inputs are added up over tp: of this loss, each is all
            loss = main + MTP_WEIGHT * ahead + aux / tp
            (loss if scale == 1.0 else loss * scale).backward()
            totals += torch.stack((main, ahead, aux)).detach()
            seen += len(micro)
    layout.sum_gradients(model)
    main, ahead, aux = layout.total(totals).tolist()
    losses = {"loss": main} | ({"mtp_loss": ahead} if len(model.mtp) else {})
    return losses | ({"aux_loss": aux} if balance is not None and balance.auxiliary else {})


def count_targets(batch: Tensor, layout: Layout = ALONE) -> Tensor:
    """How many of a batch's tokens are to be predicted."""
    return (decode(batch, layout.packed)[1] != IGNORE).sum()


class Balance:
    """Keeps the load of experts even and counts it, through MoE.observe, in training alone.

    With a correction: no loss (arXiv:2408.15664). After each step every expert's correction moves
    by `speed`, up if the expert got fewer tokens than the mean of the step, else down.
    Auxiliary losses, times their coefficients, summed over mixtures, that of an MTP layer included:
    `aux`, GShard's and Switch's (arXiv:2101.03961), `seq`, DeepSeek-V3's (arXiv:2412.19437, 2.1.2),
    and `z`, ST-MoE's (arXiv:2202.08906). `seq` and `z` are means over sequences and over tokens,
    the same however a step is cut; `aux` is of products of means over one micro-batch of one rank,
    so that another micro-batch size or rank count is another loss.
    """

    def __init__(
        self, model: Transformer, speed: float = 2e-3, aux: float = 0, seq: float = 0, z: float = 0,
        layout: Layout = ALONE,
    ):  # fmt: skip
        self.speed, self.aux, self.seq, self.z = speed, aux, seq, z
        self.config, self.terms, self.watching = model.config, [], True
        self.mixtures = [m for m in model.modules() if isinstance(m, MoE)]
        whole = layout.stages is None
        n = len(self.mixtures) if whole else len(self.config.moe_layers)
        self.auxiliary = n > 0 and max(aux, seq, z) > 0
        shape, device = (n, self.config.n_experts), next(model.parameters()).device
        self.counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self.rows = range(n) if whole else layout.stages.mixtures()  # those that are here
        see = torch.compiler.disable(self._see)  # what it keeps for later is no part of a graph
        for i, mixture in zip(self.rows, self.mixtures, strict=True):
            mixture.observe = partial(see, self.counts[i])

    def _see(self, counts: Tensor, logits: Tensor, ids: Tensor) -> None:
        """One mixture, one forward: logits (B, T, E), ids (B, T, K), into its row of counts."""
        if not torch.is_grad_enabled():  # validation
            return
        known = len(self.terms)
        if self.watching:
            counts += moe.count_experts(ids, len(counts))
        if self.aux or self.seq:
            probs = moe.router_probs(logits, self.config.scoring)
            if self.aux:
                flat = probs.flatten(0, 1), ids.flatten(0, 1)
                self.terms.append(self.aux * moe.balance_loss(*flat))
            if self.seq:
                self.terms.append(self.seq * moe.balance_loss(probs, ids))
        if self.z:
            self.terms.append(self.z * moe.z_loss(logits))
        if not self.watching:  # recomputed for a backward pass, which wants the same operations
            del self.terms[known:]

    def take(self) -> Tensor:
        """The auxiliary losses of the forward passes since the last take, summed. Until `watching`
        is set again, forward passes are those of checkpoints, and seen already."""
        terms, self.terms, self.watching = self.terms, [], False
        return torch.stack(terms).sum() if terms else torch.zeros((), device=self.counts.device)

    def update(self, layout: Layout = ALONE) -> float | None:
        """End of a step: move the corrections, leave the step's counts (mixtures, E) in .last, over
        all ranks, and what is to be said of them in .row; the busiest expert's load over the mean,
        in the worst layer (1 is perfect; None: no mixtures)."""
        self.row: dict[str, Any] = {}
        if not len(self.counts):
            return None
        self.last = layout.total(self.counts.clone())
        self.counts.zero_()
        for i, mixture in zip(self.rows, self.mixtures):
            if self.config.correction_bias:
                moe.update_bias_(mixture.correction, self.last[i], self.speed)
        of = moe.load_statistics(self.last)
        self.row = {
            "worst_load": round(of["max_over_mean"], 3),
            "load_entropy": round(of["entropy"], 4),
            "dead_experts": int(of["dead"]),
        }
        return of["max_over_mean"]


def build_optimizer(
    model: torch.nn.Module, layout: Layout = ALONE, args: argparse.Namespace | None = None
) -> Any:
    """What args say, by default AdamW (arXiv:1711.05101); decay on matrices and embeddings, none on
    norms and biases. A group's "scale" multiplies the learning rate."""
    width = model.config.dim if args and args.mup_base else 1
    groups: dict[Any, list[Any]] = {(True, None, 1.0): [], (False, None, 1.0): []}
    for name, p in model.named_parameters():
        if p.requires_grad:
            scale = mup_factors(name, p.shape, width, args.mup_base)[1] if width > 1 else 1.0
            # a fused step is of tensors on one mesh
            key = p.dim() >= 2, getattr(p, "device_mesh", None), scale
            groups.setdefault(key, []).append((name, p))
    decay = 0.1 if args is None else args.weight_decay
    settings = [  # with muP, decay per step stays what it is
        {"params": named, "weight_decay": decay / scale if decays else 0.0, "scale": scale}
        for (decays, _, scale), named in groups.items() if named
    ]  # fmt: skip
    if args is not None and args.optimizer == "muon":
        return muon(settings)
    plain = [s | {"params": [p for _, p in s["params"]]} for s in settings]
    factory = optimizer_of(args)
    if args is not None and args.optimizer_in_backward:
        return OptimizerInBackward(plain, factory)
    if args is not None and args.offload:
        where = "cpu" if args.offload == "cpu" else offload_folder(args)
        return OffloadedOptimizer(plain, factory, where)
    return layout.optimizer(plain, factory)


def offload_folder(args: argparse.Namespace) -> Path:
    """In --offload's folder, that of this run and rank."""
    run = hashlib.sha256(str(args.out.resolve()).encode()).hexdigest()[:12]
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Path(args.offload) / f"{run}-rank{rank}"


def optimizer_of(args: argparse.Namespace | None) -> Callable[..., torch.optim.Optimizer]:
    if args is not None and args.optimizer == "sgd":
        return partial(torch.optim.SGD, lr=0.0, momentum=0.9)
    how = dict(lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    if args is not None and args.weights == "bf16":
        return partial(StochasticAdamW, **how, seed=args.seed)
    return partial(torch.optim.AdamW, **how, fused=True)


def muon(settings: list[dict[str, Any]]) -> Several:
    """torch's Muon for matrices in blocks, its steps as large as AdamW's, which has the rest."""
    parts = [[], []]
    for group in settings:
        for part, named in zip(parts, muon_split(group["params"])):
            if named:
                part.append(group | {"params": [p for _, p in named]})
    adam = partial(torch.optim.AdamW, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    whole = partial(torch.optim.Muon, lr=0.0, adjust_lr_fn="match_rms_adamw")
    return Several(*(make(part) for make, part in zip((whole, adam), parts) if part))


def update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    lr: float,
    layout: Layout = ALONE,
    clip: float = 1.0,
    scale: float = 1.0,
    take: Callable[[float], bool] = lambda norm: True,
) -> float:
    """Clip the gradient of the whole model, given times `scale`, to norm `clip` (0: leave it), take
    the optimizer's step if take(its norm before) says so, clear the gradient; that norm."""
    if scale != 1.0:
        layout.scale_gradients(model, 1 / scale)
    norm = layout.clip(model, clip or math.inf).item()
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)
    if take(norm):
        optimizer.step()
    optimizer.zero_grad()
    return norm


@torch.no_grad()
def validate(
    model: torch.nn.Module,
    tokens: Tensor,
    seq_len: int,
    micro_batch_size: int,
    place: Place,
    attend: Attend = causal_attention,
    layout: Layout = ALONE,
) -> float:
    """Mean loss over the held_out_batches, the same ones on all ranks."""
    batches = [*held_out_batches(tokens, seq_len, micro_batch_size, place.device)]
    total, count = 0.0, sum(count_targets(batch, layout).item() for batch in batches)
    for _, same in groupby(batches, len):
        some = [*same]
        if layout.stages is None:
            with place.autocast():
                losses = [loss_sums(model, batch, attend, layout)[0] for batch in some]
        else:
            losses = layout.stages.losses(model, some, place.autocast, attend, layout)
        total += sum(layout.total(loss).item() for loss in losses) / layout.batch_shares
    layout.reshard(model)
    return total / count


def held_out_batches(
    tokens: Tensor, seq_len: int, micro_batch_size: int, device: torch.device
) -> Iterator[Tensor]:
    """Up to 65,536 held-out tokens as (micro_batch_size or fewer, seq_len + 1): windows of tokens
    (n,), or of rows (R, seq_len + 1), spread evenly, always the same ones."""
    n = len(tokens) if tokens.dim() == 2 else (len(tokens) - 1) // seq_len
    picked = [
        i * n // min(n, max(1, 65536 // seq_len)) for i in range(min(n, 65536 // seq_len or 1))
    ]
    for i in range(0, len(picked), micro_batch_size):
        at = picked[i : i + micro_batch_size]
        whole = tokens.dim() == 2
        rows = [tokens[j] if whole else tokens[j * seq_len : (j + 1) * seq_len + 1] for j in at]
        yield torch.stack(rows).long().to(device)


# --------------------------------------------------------------------------------------------------
# The model
# --------------------------------------------------------------------------------------------------


def model_config(args: argparse.Namespace) -> ModelConfig:
    """The shape to train: of OUT under --resume, of --init, or what --model says."""
    if args.resume:
        return ModelConfig.from_hf(saved_run(args.out)[2]["config"])
    if args.init is not None:
        if not args.init.is_dir():
            raise ValueError(f"--init {args.init}: no such folder")
        if (args.init / "adapter_config.json").exists():
            raise ValueError(
                f"--init {args.init}: holds adapters; train.py --out {args.init} --export DIR "
                "--lora-merged makes a model of them"
            )
        config = read_config(args.init / "config.json")
        return upcycled_config(config, args) if args.upcycle else config
    if args.model in CONFIGS or Path(args.model).exists():
        shape = CONFIGS[args.model] if args.model in CONFIGS else read_config(args.model)
        context = max(shape.max_seq_len, args.seq_len)
        return replace(shape, max_seq_len=context, bos_id=BOS, eos_ids=(EOS,))
    raise ValueError(f"--model {args.model}: neither a config.json nor one of {', '.join(CONFIGS)}")


def build_model(
    args: argparse.Namespace, config: ModelConfig, place: Place, layout: Layout = ALONE
) -> Transformer:
    """The model to train, in --weights: that of --init, or new, drawn from --seed; of it what
    `layout` gives this rank. Weights are drawn on the CPU: one seed, one model."""
    drawn = args.init is None or (args.resume and not args.lora)
    late = drawn and layout.shards  # their weights come when there are shards
    late = late and not (args.fp8 or args.qat)  # which look at them
    if drawn:
        model = meta_model(config)
        layout.cut_(model)
    elif args.upcycle:
        model = upcycle_(load_checkpoint(args.init, "cpu", torch.float32), config, args.seed)
        layout.cut_(model)
    else:
        model = load_checkpoint(args.init, "cpu", torch.float32, prepare=layout.cut_)
    if drawn and not late:
        layout.draw_(allocate(model, "cpu", torch.float32), args.seed)
    if args.lora:
        lora_(model, args.lora, args.lora_alpha or 2 * args.lora, seed=args.seed)
    narrow_(model, args)
    change_products(model, args)
    layout.finish_(model, {"bf16": torch.bfloat16}.get(place.dtype))
    if late:
        model.to_empty(device=place.device)
        if layout.stages is None:
            model.tie()
        if not args.resume:
            layout.draw_(model, args.seed)
    return model.to(place.device).train()


def narrow_(model: Transformer, args: argparse.Namespace) -> None:
    """--weights bf16: parameters are, buffers stay as they are."""
    for p in model.parameters() if args.weights == "bf16" else ():
        p.data = p.data.to(torch.bfloat16)


def change_products(model: Transformer, args: argparse.Namespace) -> None:
    """--experts, --fp8 and --qat: have the model's layers multiply how and what the flag says, over
    the parameters that they have."""
    if args.experts == "grouped" and any(isinstance(m, MoE) for m in model.modules()):
        moe.use_grouped_experts(model)
    if args.fp8:
        fp8_training_(model, args.fp8)
    if args.qat:
        try:
            tied = ("head",) if model.config.tie_embeddings else ()  # --pp gives it a copy
            qat_(model, QAT_GRIDS[args.qat], skip=tied)
        except ValueError as e:
            raise ValueError(
                f"--qat {args.qat}, in groups of 32: {e}; or train --qat int8"
            ) from None


def compiled(model: Transformer) -> Any:
    """torch.compile, but for experts without kernels: how many tokens each gets is new in every
    forward, and would be compiled anew."""
    for mixture in model.modules():
        if isinstance(mixture, MoE) and not moe.has_static_shapes(mixture):
            mixture.experts = torch.compiler.disable(mixture.experts)
    return torch.compile(model)


def meta_model(config: ModelConfig) -> Transformer:
    """The whole model without its memory, for counting."""
    with torch.device("meta"):
        return Transformer(config)


# --------------------------------------------------------------------------------------------------
# The run
# --------------------------------------------------------------------------------------------------


def settle_args(args: argparse.Namespace) -> None:
    """Fill args from the checkpoint under --resume; refuse what would spoil a run."""
    saved = saved_run(args.out)
    if args.auto and saved is None:  # memory may yet know of a run that no disk does
        args.resume = None
    if args.resume is None:
        refuse_taken(args.out)
        settle_flags(args)
        return
    if saved is None:
        raise ValueError(
            f"--resume: {args.out / CHECKPOINTS} has no checkpoint; nothing was saved yet, start "
            "without --resume"
        )
    run = saved[2]["run"]
    for name in SAVED:
        if flag(name) not in args.given:
            setattr(args, name, run.get(name, getattr(args, name)))  # it may be older than a flag
    if args.dtype == "auto":
        args.dtype = run["dtype"]
    for name in differing(args, run):
        raise ValueError(
            f"{flag(name)} {getattr(args, name)} differs from the run's {run.get(name)}; leave it "
            "out, or start anew in another --out"
        )
    args.init, args.mirror_at = (p and Path(p) for p in (args.init, args.mirror_at))
    settle_flags(args)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What --resume takes from a checkpoint, as JSON has it."""
    run = {name: getattr(args, name) for name in SAVED}
    return {name: str(x.resolve()) if isinstance(x, Path) else x for name, x in run.items()}


def differing(args: argparse.Namespace, run: Mapping[str, Any]) -> list[str]:
    """What of FIXED is not as it was; a run may be older than a flag."""
    known = [name for name in FIXED if name in run or flag(name) in args.given]
    return [name for name in known if settings(args)[name] != run.get(name)]


def refuse_taken(out: Path) -> None:
    """ValueError if OUT holds what a run that starts would write over."""
    if (saved := saved_run(out)) is not None:
        raise ValueError(
            f"--out {out}: holds a run of {saved[1]} steps; go on with --resume, or name another "
            "folder"
        )
    held = {path.name for path in out.glob("*.safetensors")}
    if held == {DRAFT_HEAD}:
        raise ValueError(f"--out {out}: holds a draft head; name another folder")
    if held:
        raise ValueError(f"--out {out}: holds a model that no run here made; name another folder")


def train(args: argparse.Namespace) -> None:
    """The whole run; every stage is one call."""
    settle_args(args)
    place = find_place(args)
    config = model_config(args)
    settle_expert_flags(args, config)
    if args.tensorboard:
        summary_writer()  # is it there?
    layout = Layout(args, config, place.world, place.device.type)
    settle_diloco_flags(args, layout.batch_shares)
    if args.seq_len <= config.n_mtp_layers:
        raise ValueError(
            f"--seq-len must be more than the model's {config.n_mtp_layers} MTP layers"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    for leftover in args.out.glob(".*.tmp") if place.rank == 0 else ():
        leftover.unlink()  # of a save that was killed
    if place.rank == 0 and args.mirror_every and not (args.out / RUN_ID).exists():
        (args.out / RUN_ID).write_text(os.urandom(8).hex())
    text = (prepare_text if args.task == "text" else prepare_task)(args, config, place)
    if args.train_draft_head:
        from draft_head import train_draft_head  # a program over this one

        train_draft_head(args, text, place)
        return
    memory = PeakMemory(place.device)
    model = build_model(args, config, place, layout)
    optimizer = build_optimizer(model, layout, args)
    run = Run(args, place, layout, model, optimizer, text, memory)
    try:
        run.resume()
        run.steps()
    finally:
        run.close()


class Run:
    """From the model that was built to the last checkpoint: the loop, and what stands around it."""

    def __init__(
        self, args: argparse.Namespace, place: Place, layout: Layout, model: Transformer,
        optimizer: Any, text: Text, memory: PeakMemory,
    ):  # fmt: skip
        self.memory, self.safe, self.changing = memory, None, threading.Lock()
        self.args, self.place, self.layout, self.model = args, place, layout, model
        self.optimizer, self.text, self.first, self.watch = optimizer, text, 0, None
        self.state = State(model, optimizer, layout, args.optimizer)
        self.saver = Checkpoints(args.out / CHECKPOINTS, keep=args.keep)
        self.mirror = self._mirror()
        drawn = args.task in ("dpo", "grpo")  # their losses are differences, and may be 0
        self.guard = Guard(args.patience, math.inf if drawn else args.spike or math.inf)
        self.scaler = LossScaler() if args.dtype == "fp16" else None
        self.island = None if args.diloco is None else Island(args, model, layout, place)
        losses = dict(aux=args.aux_loss, seq=args.sequence_loss, z=args.z_loss)
        self.balance = Balance(model, **losses, layout=layout)
        alone = args.compile and layout.mesh is None
        self.step_model = compiled(model) if alone else model
        self.attend = layout.attend(attend_of(args.attention, layout.packed))
        self.objective = objective_of(args, model, text, place, layout)
        self.tokens = args.batch_size // args.diloco_workers * args.seq_len
        passes = 4 if args.lora else 6  # frozen weights have no gradient
        self.flops = flops_per_token(meta_model(model.config), args.seq_len, passes)
        self.peak = peak_flops(place.device, args.dtype, place.world)

    def _mirror(self) -> Mirror | None:
        args = self.args
        if args.mirror_every is None:
            return None
        name = hashlib.sha256(str(args.out.resolve()).encode()).hexdigest()[:12]
        folder = args.mirror_at or Path(f"/dev/shm/sheaf-{os.getuid()}-{name}")
        group = dist.new_group(backend="gloo") if self.place.world > 1 else None
        run = (args.out / RUN_ID).read_text()  # an older run in a folder of this name was another
        return Mirror(folder, f"{run}.{self.layout.content}", group)

    # ---- from and to checkpoints ----

    def about(self) -> dict[str, Any]:
        """What goes with the tensors of a state, JSON."""
        about = {"updates": self.state.updates, "guard": self.guard.state_dict()}
        about |= {"run": settings(self.args), "config": self.model.config.to_hf()}
        about |= {"text": self.text.mark}
        return about | ({"scaler": self.scaler.state_dict()} if self.scaler else {})

    def resume(self) -> None:
        """To the newest state that is whole: of the copies in memory, or of the checkpoints."""
        args, about = self.args, None
        found = self.saver.newest() if args.resume else None
        if self.mirror is not None and (args.resume or args.auto):
            about = self.from_memory(found.step if found else 0)
        if about is None and found is not None:
            self.state.load(self.saver, found)
            about, self.first = found.about, found.step
            if self.island is not None:
                self.island.load(found)
        if about is None:
            if self.mirror is not None:
                self.mirror.clear()
            return
        if None not in (about.get("text"), self.text.mark) and about["text"] != self.text.mark:
            raise ValueError(
                f"--data is not what it was: {self.text.mark}, and {about['text']} when step "
                f"{self.first} was saved; restore it, or start anew in another --out"
            )
        self.guard.load_state_dict(about["guard"])
        if self.scaler is not None:
            self.scaler.load_state_dict(about["scaler"])

    def from_memory(self, after: int) -> dict[str, Any] | None:
        """Put the copies' state here, if it is of this run and of more steps than `after`."""
        at = self.mirror.newest()
        if at is None or at <= after:
            return None
        kept = {name: x.clone() for name, (_, x) in self.state.tensors().items()}
        tensors = {name: x for name, (_, x) in self.state.tensors().items()}
        about = self.mirror.get(at, tensors)
        if other := differing(self.args, about["run"]):
            self.say(f"what memory has of step {at} had another {flag(other[0])}; it is left alone")
            for name, x in tensors.items():
                x.copy_(kept[name])
            return None
        self.first, self.state.updates = at, about["updates"]
        self.state.loaded()
        self.say(f"resumed after step {at} from memory")
        return about

    def save(self, step: int) -> None:
        """Begin to write the state after `step`; training may go on."""
        pieces, about = self.state.pieces(), self.about()
        if self.island is not None:
            outer, held = self.island.pieces()
            pieces, about = pieces | outer, about | {"outer": held}
        self.saver.save(step, pieces, about, lazy=True)  # copied while the next step is computed

    def keep_in_memory(self, step: int) -> None:
        """Copies of the state after `step`, here and with a peer."""
        tensors = {name: x for name, (_, x) in self.state.tensors().items()}
        self.mirror.put(step, tensors, self.about())

    # ---- the loop ----

    def steps(self) -> None:
        """Steps first..args.steps, with progress, metrics, validation and checkpoints."""
        args, place, first = self.args, self.place, self.first
        if place.rank == 0:
            whole = meta_model(self.model.config)
            print(summary(args, whole, self.text.size, first, place), file=sys.stderr)
            if self.layout.mesh is not None:
                print(self.layout.mesh, file=sys.stderr)
        stop, leaving, done = stop_on_signals(), False, False
        self.last_words()
        metrics = Metrics(args.out, first, args.tensorboard) if place.rank == 0 else None
        self.watch = watch_of(args, place, self.hung)
        self.bar, at = progress(first, args.steps, place), first
        at = at if self.island is None else self.island.begin(at)
        for step in self.bar:
            if step < at:  # the others have made it without this worker
                continue
            looked = args.profile == step + 1 - first
            how = args.out, self.memory, place.rank
            with profiled(*how) if looked else contextlib.nullcontext({}) as facts:
                row = self.step(step)
            row |= facts
            if self.island is not None:
                self.saver.staged()
                row |= self.island.after(step)
                at, step = row["step"], row["step"] - 1
            leaving, row["data_wait"] = of_all_ranks(stop, row["data_wait"], place.device)
            done = step + 1 == args.steps
            if (step + 1) % args.eval_every == 0 or done:
                row |= self.look(row)
            if metrics is not None:
                metrics.write(row)
            due = (step + 1) % args.save_every == 0 and "skipped" not in row
            if due or leaving or done:
                self.save(step + 1)
            if self.mirror is not None and (step + 1) % args.mirror_every == 0:
                self.keep_in_memory(step + 1)
            if leaving:
                break
        self.finish(metrics, leaving and not done)

    def step(self, step: int) -> dict[str, Any]:
        """One step: a batch, its gradient, the update; its row of metrics.jsonl."""
        args, place, layout, scaler = self.args, self.place, self.layout, self.scaler
        start, self.safe = time.perf_counter(), step  # the state is that after so many steps
        self.watch.beat(step + 1, "data")
        batch = self.objective.batch(step).to(place.device)
        waited = time.perf_counter() - start
        lr = learning_rate(
            step, args.steps, args.lr, schedule=args.schedule, warmup=args.warmup,
            decay=args.decay, end=args.lr_end,
        )  # fmt: skip
        if args.optimizer_in_backward:
            self.saver.staged()
            self.safe = None
            for group in self.optimizer.param_groups:
                group["lr"] = lr * group["scale"]
        scale, other = scaler.scale if scaler else 1.0, self.objective
        other = None if isinstance(other, NextToken) else other
        self.watch.beat(step + 1, "forward and backward")
        how = self.attend, self.balance, layout, other, scale
        try:
            losses = accumulate(self.step_model, batch, args.micro_batch_size, place.autocast, *how)
        except RuntimeError:  # perhaps another rank's end; the weights are those of the last step
            self.keep_alone()
            raise
        row = {"step": step + 1, **losses}
        self.watch.beat(step + 1, "update")
        with self.changing:  # nobody may copy the state meanwhile
            self.safe = None  # it may be half of this step's
            take = partial(self.take, row)
            norm = update(self.model, self.optimizer, lr, layout, args.clip, scale, take)
            self.balance.update(layout)
            self.safe = step + 1
        row |= {} if args.optimizer_in_backward else {"grad_norm": norm}
        row["lr"] = lr
        row |= self.balance.row | self.objective.row
        spent = time.perf_counter() - start
        row["tokens_per_second"] = round(self.tokens / spent, 1)
        if self.peak:
            row["mfu"] = round(self.tokens / spent * self.flops / self.peak, 4)
        row["data_wait"] = waited
        mfu = f", MFU {row['mfu']:.1%}" if self.peak else ""
        text = f"loss {row['loss']:.3f}, {self.tokens / spent:,.0f} tok/s{mfu}"
        self.bar.set_postfix_str(text, refresh=False)
        return row

    def take(self, row: dict[str, Any], norm: float) -> bool:
        """Whether this batch's gradient, of that norm, is to be applied; said in `row` if not.
        ValueError if that happens too often."""
        self.saver.staged()  # the weights of the last step are written before they change
        why, scaler = None, self.scaler
        if scaler is not None and not scaler.update(math.isfinite(norm)):
            why = f"a gradient overflowed; the loss is scaled by {scaler.scale:g} from here on"
        if why is None or scaler.scale == scaler.LEAST:
            try:
                why = self.guard.judge(row["loss"], norm)
            except Diverged as e:  # on all ranks alike
                self.saver.wait()
                raise ValueError(f"step {row['step']}: {e} ({self.last_good()})") from None
        if why is not None and self.args.optimizer_in_backward:
            self.saver.wait()
            raise ValueError(
                f"step {row['step']}: {why}; it is in the weights ({self.last_good()})"
            )
        if why is not None:
            row["skipped"] = why
            self.say(f"step {row['step']}: skipped, {why}")
        self.state.updates += why is None
        return why is None

    def last_good(self) -> str:
        return f"the last checkpoint in {self.args.out} is as it was; try a lower --lr from there"

    def look(self, row: dict[str, Any]) -> dict[str, Any]:
        """Now and then: validation, and what ranks tell each other of their time and memory."""
        args, place, seen = self.args, self.place, {}
        self.watch.beat(row["step"], "validation")
        if self.text.held is not None:
            how = args.seq_len, args.micro_batch_size, place, self.attend, self.layout
            seen["val_loss"] = validate(self.step_model, self.text.held, *how)
        elif not isinstance(self.objective, NextToken):
            with place.autocast():
                how = self.step_model, args.micro_batch_size, self.attend
                seen |= self.objective.validate(*how)
            self.layout.reshard(self.step_model)
        seen |= {"expert_load": self.balance.last.tolist()} if self.balance.row else {}
        mine = [*self.watch.waits(), float(self.memory.bytes())]
        ranks = [mine]
        if place.world > 1:
            dist.all_gather_object(ranks := [None] * place.world, mine)
        waits, busy, memory = zip(*ranks)
        seen["peak_memory"] = int(max(memory))
        seen["comm_wait"] = round(sum(waits) / max(sum(waits) + sum(busy), 1e-9), 4)
        losses = f"loss {row['loss']:.4f}"
        for name in ("val_loss", "val_accuracy", "val_reward"):
            shown = name[4:] if name != "val_loss" else "validation"
            losses += f", {shown} {seen[name]:.4f}" if name in seen else ""
        self.say(f"step {row['step']}: {losses}, {seen['peak_memory'] / 2**20:,.0f} MiB at most")
        if place.world > 1 and (slow := stragglers([*zip(waits, busy)])):
            seen["stragglers"] = slow
            self.say(f"step {row['step']}: {slow}")
        return seen

    def finish(self, metrics: Metrics | None, leaving: bool) -> None:
        """The last checkpoint on disk, and what people open."""
        args = self.args
        self.watch.close()  # what follows takes as long as it takes
        self.saver.wait()
        if self.place.rank == 0 and saved_run(args.out):
            export(args.out, args.out, args.lora_merged)
            metrics.close()
        if args.offload not in (None, "cpu"):
            shutil.rmtree(offload_folder(args), ignore_errors=True)
        if self.mirror is not None and not leaving:
            self.mirror.clear()
        if leaving:
            self.say(f"stopped after step {self.safe}, saved in {args.out}; go on with --resume")

    # ---- when it fails ----

    def keep_alone(self) -> None:
        """The state after the last step, to this machine's memory and without the other ranks."""
        if self.mirror is None or not self.changing.acquire(blocking=False):
            return
        try:
            if self.safe is not None:
                tensors = {name: x for name, (_, x) in self.state.tensors().items()}
                with torch.no_grad():
                    self.mirror.dump(self.safe, tensors, self.about())
        finally:
            self.changing.release()

    def hung(self) -> None:
        """In the watching thread: the loop stands still, here or elsewhere, and will not go on."""
        try:
            self.keep_alone()
        finally:
            os._exit(HUNG)

    def last_words(self) -> None:
        """Have SIGTERM noted even while the main thread stands in a collective of which a rank is
        gone: torchrun kills it half a minute later, and its state may be the only copy."""
        if self.mirror is None or self.place.world == 1:
            return
        told, tell = os.pipe()
        os.set_blocking(tell, False)
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)

        def wait() -> None:
            while signal.SIGTERM not in os.read(told, 1):
                continue
            before = self.safe
            time.sleep(LAST_WORDS)
            if self.safe is not None and self.safe == before:
                self.keep_alone()

        threading.Thread(target=wait, daemon=True).start()

    def say(self, line: str) -> None:
        """Print a line above the progress bar, on rank 0."""
        if self.place.rank == 0:
            tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        if self.place.world == 1:  # of several ranks another may be gone, and this would hang
            with contextlib.suppress(OSError):
                self.saver.wait()
        for thing in (self.watch, self.island):
            if thing is not None:
                thing.close()


def watch_of(args: argparse.Namespace, place: Place, hung: Callable[[], None]) -> Watch:
    """Looks after the calling thread."""
    tell = lambda text: print(f"train.py: {text}", file=sys.stderr, flush=True)
    how = dict(timeout=args.hang_timeout, first=10 * args.hang_timeout)
    return Watch(place.store, place.rank, place.world, **how, report=tell, on_hang=hung)


def progress(first: int, steps: int, place: Place) -> tqdm:
    """The bar over steps first..steps, on rank 0."""
    return tqdm(
        range(first, steps),
        initial=first,
        total=steps,
        disable=place.rank > 0,
        mininterval=0.5 if sys.stderr.isatty() else 15,
        dynamic_ncols=True,
    )


def stop_on_signals() -> list[int]:
    """A list that the first SIGTERM or Ctrl-C puts a number into; the second acts at once."""
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return caught


def of_all_ranks(caught: list[int], wait: float, device: torch.device) -> tuple[bool, float]:
    """Whether any was told to stop, for all must leave at the same step; the longest wait."""
    most = torch.tensor([len(caught), wait], device=device)
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    told, wait = most.tolist()
    return told > 0, round(wait, 4)


def summary(
    args: argparse.Namespace, model: Transformer, n_tokens: int | None, first: int, place: Place
) -> str:
    """What is about to be trained, in one line."""
    size = sum(p.numel() for p in model.parameters()) / 1e6
    step_tokens = args.batch_size * args.seq_len
    if first >= args.steps:
        return f"{args.out}: all {first} steps are done; --steps makes a run longer"
    text = ""
    if n_tokens is not None:
        epochs = args.steps * step_tokens / n_tokens
        text = f" on {n_tokens / 1e6:.2f}M tokens, {epochs:.1f} epochs,"
    products = f", FP8 {args.fp8}" if args.fp8 else f", QAT {args.qat}" if args.qat else ""
    return (
        f"{size:.2f}M parameters{text} {args.steps} steps of {step_tokens} from step {first}, "
        f"{args.dtype}{products} on {place.device}"
    )


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        if args.plot:
            print(plot(args.out))
        elif args.export is not None:
            to = Path(args.export) if args.export else args.out
            export(args.out, to, args.lora_merged, verify=True)
            for name in TEXTS if to.resolve() != args.out.resolve() else ():
                if (args.out / name).exists():
                    shutil.copy(args.out / name, to)
            print(to)
        elif args.dry_run:
            from dry_run import dry_run  # a program over this one

            print(dry_run(args))
        else:
            train(args)
    except (ValueError, OSError) as e:
        print(f"train.py: error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the first step; later ones save first
        return 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
