"""One training step: losses, gradients accumulated over micro-batches, clipping, the update.

`accumulate` leaves the gradient of the mean loss over all tokens of the step, on all ranks;
`update` clips it and takes the optimizer's step; `validate` is the mean loss over the validation
set. The divisor is the token count of the whole step, so that neither the micro-batch size nor the
number of ranks changes more than rounding. train.py runs these in its loop, dry_run.py counts
their bytes and FLOPs, draft_head.py trains a draft head with them.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

import moe
from attention import as_attend
from model import Attend, MoE, Transformer, causal_attention, packed_attention
from parallelism.dist_env import DistEnv
from parallelism.parallel_dims import IGNORE, ParallelDims
from training.data import decode

MTP_WEIGHT = 0.3  # of the loss of predicting further (DeepSeek-V3, arXiv:2412.19437, 4.2)
SINGLE_PROCESS = ParallelDims()  # one process


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


def make_attend(attention: str, packed: bool = False) -> Attend:
    """The model's attend argument for that kind of attention."""
    if packed:
        return PackedFlash() if attention == "flash" else packed_attention
    return as_attend() if attention == "flash" else causal_attention


def loss_sums(
    model: Transformer,
    batch: Tensor,
    attend: Attend = causal_attention,
    layout: ParallelDims = SINGLE_PROCESS,
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropies of batch (B, T + 1), coded rows (data.py), in nats: of the next token,
    and of those further ahead, the mean over the model's multi-token prediction depths (0 without
    any). Of the tokens that `layout` gives this rank."""
    at = layout.positions(batch.shape[1] - 1, batch.device)
    inputs, targets, positions = decode(batch, layout.packed)
    if at is not None:
        inputs, targets = inputs[:, at], targets[:, at]
    where = at if positions is None else positions
    if not (model.mtp or layout.has_chunked_loss):
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
    balance: LoadBalancer | None = None,
    layout: ParallelDims = SINGLE_PROCESS,
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
    count = layout.all_reduce_sum(counted) // (cp * layout.size("pp"))
    rows = len(batch) * layout.dp_size * cp
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
    main, ahead, aux = layout.all_reduce_sum(totals).tolist()
    losses = {"loss": main} | ({"mtp_loss": ahead} if len(model.mtp) else {})
    return losses | ({"aux_loss": aux} if balance is not None and balance.auxiliary else {})


def count_targets(batch: Tensor, layout: ParallelDims = SINGLE_PROCESS) -> Tensor:
    """How many of a batch's tokens are to be predicted."""
    return (decode(batch, layout.packed)[1] != IGNORE).sum()


class LoadBalancer:
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
        layout: ParallelDims = SINGLE_PROCESS,
    ):  # fmt: skip
        self.speed, self.aux, self.seq, self.z = speed, aux, seq, z
        self.config, self.terms, self.watching = model.config, [], True
        self.mixtures = [m for m in model.modules() if isinstance(m, MoE)]
        whole = layout.stages is None
        n = len(self.mixtures) if whole else len(self.config.moe_layers)
        self.auxiliary = n > 0 and max(aux, seq, z) > 0
        shape, device = (n, self.config.n_experts), next(model.parameters()).device
        self.counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self.rows = range(n) if whole else layout.stages.local_moe_layers()  # those that are here
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

    def update(self, layout: ParallelDims = SINGLE_PROCESS) -> float | None:
        """End of a step: move the corrections, leave the step's counts (mixtures, E) in .last, over
        all ranks, and what is to be said of them in .row; the busiest expert's load over the mean,
        in the worst layer (1 is perfect; None: no mixtures)."""
        self.row: dict[str, Any] = {}
        if not len(self.counts):
            return None
        self.last = layout.all_reduce_sum(self.counts.clone())
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


def update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    lr: float,
    layout: ParallelDims = SINGLE_PROCESS,
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
    place: DistEnv,
    attend: Attend = causal_attention,
    layout: ParallelDims = SINGLE_PROCESS,
) -> float:
    """Mean loss over the held_out_batches, the same ones on all ranks."""
    batches = [*validation_batches(tokens, seq_len, micro_batch_size, place.device)]
    total, count = 0.0, sum(count_targets(batch, layout).item() for batch in batches)
    for _, same in groupby(batches, len):
        some = [*same]
        if layout.stages is None:
            with place.autocast():
                losses = [loss_sums(model, batch, attend, layout)[0] for batch in some]
        else:
            losses = layout.stages.validation_losses(model, some, place.autocast, attend, layout)
        total += sum(layout.all_reduce_sum(loss).item() for loss in losses) / layout.dp_size
    layout.reshard(model)
    return total / count


def validation_batches(
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
