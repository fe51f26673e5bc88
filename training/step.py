"""The parts of a training step: losses, what they are divided by, expert balance, clipping.

train.py's `forward_backward` runs them for each micro-batch. `loss_sums` is the loss; `step_shares`
counts the tokens of the whole step, by which losses are divided, so that the micro-batch size and
the number of ranks change only rounding; `clip_gradients` clips the gradient; `validate` is the
mean loss over the validation set. dry_run.py counts their bytes and FLOPs.

What is trained is an objective: an object with the methods of Objective. NextToken is here, others
are in dpo.py, grpo.py, draft_head.py and lora_jobs.py; objectives.py builds that of --task.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

import moe
from attention import as_attend
from model import Attend, MoE, Transformer, causal_attention, packed_attention
from training.data import decode
from training.dist_env import DistEnv
from training.parallelize import IGNORE, ParallelDims

MTP_WEIGHT = 0.3  # of the multi-token prediction loss (DeepSeek-V3, arXiv:2412.19437, 4.2)
SINGLE_PROCESS = ParallelDims()


class PackedFlash:
    """The attend hook for packed rows of several documents, on attention.py's varlen kernels."""

    def __init__(self) -> None:
        self.positions, self.run = None, None

    def __call__(self, spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        if positions is not self.positions:  # all layers of a forward pass share one tensor
            starts = (positions.flatten() == 0).nonzero().flatten()
            ends = starts.new_tensor([positions.numel()])
            self.run = as_attend(cu_seqlens=torch.cat((starts, ends)).int())
            self.positions = positions
        flat = (x.flatten(0, 1)[None] for x in (q, k, v))
        return self.run(spec, *flat, positions).view(*q.shape[:3], v.shape[-1])


def short_attention(spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """causal_attention with all scores of a layer in memory, for up to 512 tokens in bf16 on a CPU,
    where torch's flash kernel takes three times as long. The scores are rounded to bf16, so without
    gradients, as in validation, causal_attention is used."""
    (B, T, Hq, _), Hkv = q.shape, k.shape[2]
    plain = spec.causal and all(x is None for x in (spec.window, spec.sparse, spec.alibi_slopes))
    on_cpu = q.dtype == torch.bfloat16 and q.device.type == "cpu"
    if not plain or not on_cpu or T > 512 or not torch.is_grad_enabled():
        return causal_attention(spec, q, k, v, positions)
    # the heads of a group are more queries of the same keys: (B * Hkv, group * T, D)
    q, k, v = (x.transpose(1, 2).reshape(B * Hkv, -1, x.shape[-1]) for x in (q, k, v))
    mask = torch.full((T, T), -torch.inf, dtype=q.dtype).triu(1).repeat(Hq // Hkv, 1)
    scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=spec.scale)
    o = scores.softmax(-1, dtype=q.dtype) @ v
    return o.view(B, Hq, T, -1).transpose(1, 2)


def make_attend(attention: str, packed: bool = False) -> Attend:
    """The model's attend callable for --attention, with packed documents or not."""
    if packed:
        return PackedFlash() if attention == "flash" else packed_attention
    return as_attend() if attention == "flash" else short_attention


def loss_sums(
    model: Transformer, batch: Tensor, attend: Attend = causal_attention,
    layout: ParallelDims = SINGLE_PROCESS,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Summed cross-entropies in nats of batch (B, T + 1), encoded rows (data.py), over this rank's
    tokens under `layout`: of next-token prediction, and of multi-token prediction, averaged over
    the model's MTP depths (0 without any)."""
    at = layout.positions(batch.shape[1] - 1, batch.device)
    inputs, targets, positions = decode(batch, layout.packed)
    if at is not None:
        inputs, targets = inputs[:, at], targets[:, at]
    padding = layout.padding(batch) if model.config.moe_layers else None
    at = at if positions is None else positions
    if not (model.mtp or layout.has_chunked_loss):
        logits = model(inputs, at, attend=attend, is_padding=padding)
        main = layout.cross_entropy(logits, targets)
        return main, torch.zeros_like(main)
    hidden = model(inputs, at, attend=attend, return_hidden=True, is_padding=padding)
    main = layout.head_loss(model, hidden, targets)
    mtp = main.new_zeros(())
    for depth in range(1, 1 + len(model.mtp)):
        mtp_positions, mtp_targets = None, targets[:, depth:]
        if positions is not None:  # ignore targets that belong to the next document
            mtp_positions = positions[:, :-depth]
            mtp_targets = mtp_targets.masked_fill(positions[:, depth:] < depth, IGNORE)
        mtp_padding = None if padding is None else padding[:, depth:]
        rest = mtp_positions, attend, depth - 1, mtp_padding
        hidden = model.mtp_forward(hidden[:, :-1], inputs[:, depth:], *rest)
        mtp = mtp + layout.head_loss(model, hidden, mtp_targets)
    return main, mtp / max(1, len(model.mtp))


class Objective(Protocol):
    """What train.py trains. row: additions to the step's row of metrics.jsonl."""

    row: dict[str, Any]

    def batch(self, step: int) -> Tensor:
        """This rank's encoded rows (B, T + 1) (data.py) of a step."""

    def count(self, batch: Tensor) -> Tensor:
        """What the summed losses of this rank's batch are divided by, such as its targets."""

    def loss(
        self, model: Any, micro_batch: Tensor, rows: slice, attend: Attend
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The summed loss of batch[rows], or (it, the summed multi-token prediction loss)."""

    def validate(self, model: Any, micro_batch_size: int, attend: Attend) -> dict[str, Any]:
        """Additions to the row at a validation. Collective."""


@dataclass
class NextToken:
    """Next-token prediction (--task text, sft). rows(step, indices in its batch) -> (n, T + 1);
    local_ids: this rank's samples of each batch; validation: see `validate`."""

    rows: Callable[[int, Sequence[int]], Tensor] | None = None
    local_ids: Sequence[int] = ()
    validation: Tensor | None = None
    seq_len: int = 0
    env: DistEnv | None = None
    layout: ParallelDims = SINGLE_PROCESS
    prefetched: dict[int, Future] = field(default_factory=dict)  # {step: its batch}
    row = {}

    def batch(self, step: int) -> Tensor:
        """This rank's rows of a step; for a GPU in pinned memory, read by a thread during the step
        before."""
        if self.env is None or self.env.device.type == "cpu":
            return self.rows(step, self.local_ids)
        if step not in self.prefetched:
            wait(self.prefetched.values())  # one reader at a time
            self.prefetched = {step: self._prefetch(step)}
        batch = self.prefetched.pop(step).result()
        self.prefetched[step + 1] = self._prefetch(step + 1)
        return batch

    def _prefetch(self, step: int) -> Future:
        future: Future = Future()

        def run() -> None:
            try:
                future.set_result(self.rows(step, self.local_ids).pin_memory())
            except Exception as e:  # raised in the step that needs them
                future.set_exception(e)

        # a daemon, as an executor's threads are not: the process may exit during a read
        threading.Thread(target=run, name="data", daemon=True).start()
        return future

    def count(self, batch: Tensor) -> Tensor:
        return count_targets(batch, self.layout)

    def loss(
        self, model: Any, micro_batch: Tensor, rows: slice, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        return loss_sums(model, micro_batch, attend, self.layout)

    def validate(self, model: Any, micro_batch_size: int, attend: Attend) -> dict[str, Any]:
        if self.validation is None:
            return {}
        rest = self.seq_len, micro_batch_size, self.env, attend, self.layout
        return {"val_loss": validate(model, self.validation, *rest)}


def step_shares(
    model: torch.nn.Module, batch: Tensor, objective: Objective, layout: ParallelDims
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Of this rank's batch of a step: what its losses are divided by, the number of the step's
    inputs that are not padding, and the share of a micro-batch in the step, by which its auxiliary
    losses count (LoadBalancer.pop_losses)."""
    cp, pp = layout.size("cp"), layout.size("pp")
    count = layout.all_reduce_sum(objective.count(batch)) // (cp * pp)
    sizes = partial(batch_sizes, n_depths=len(getattr(model, "mtp", ())), layout=layout)
    step_sizes = layout.all_reduce_sum(sizes(batch)) // pp

    def share(micro_batch: Tensor) -> Tensor:
        return sizes(micro_batch) / step_sizes.clamp(min=1)

    return count, step_sizes[0], share


def count_targets(batch: Tensor, layout: ParallelDims = SINGLE_PROCESS) -> Tensor:
    """The number of targets of a batch of encoded rows."""
    return (decode(batch, layout.packed)[1] != IGNORE).sum()


def batch_sizes(batch: Tensor, n_depths: int, layout: ParallelDims) -> Tensor:
    """Of encoded rows, this rank's part of each: the number of inputs that are not padding, for the
    model and for each MTP depth, and of rows: (n_depths + 2,) int64."""
    real = ~layout.padding(batch)
    tokens = [real[:, depth:].sum() for depth in range(n_depths + 1)]
    return torch.stack([*tokens, torch.full_like(tokens[0], len(batch))])


class LoadBalancer:
    """Balances and counts the load of experts in training, through MoE.observe. Padding, tokens
    with ids of -1, counts nowhere.

    With an expert bias, without a loss (arXiv:2408.15664): after each step the bias of every expert
    moves by `speed`, up if the expert got fewer tokens than the step's mean, else down. Auxiliary
    losses, times their coefficients, summed over MoE layers (of MTP layers too): `aux` of GShard
    and Switch (arXiv:2101.03961), `seq` of DeepSeek-V3 (arXiv:2412.19437, 2.1.2), `z` of ST-MoE
    (arXiv:2202.08906). `seq` and `z` are means over sequences and over tokens, independent of the
    micro-batch size. `aux` multiplies means over one micro-batch of one rank, so that its value
    depends on the micro-batch size and the rank count.
    """

    def __init__(
        self, model: Transformer, speed: float = 2e-3, aux: float = 0, seq: float = 0, z: float = 0,
        layout: ParallelDims = SINGLE_PROCESS,
    ):  # fmt: skip
        self.speed, self.aux, self.seq, self.z = speed, aux, seq, z
        self.config, self.terms, self.recording = model.config, [], True
        named = {name: m for name, m in model.named_modules() if isinstance(m, MoE)}
        self.moe_layers = [*named.values()]
        # "mtp.0.block.mlp" sees the tokens of MTP depth 1, a layer of the model those of depth 0
        depths = [int(n.split(".")[1]) + 1 if n.startswith("mtp.") else 0 for n in named]
        whole = layout.stages is None
        self.sizes = [len(m.router) for m in self.moe_layers]  # E of each row of counts
        if not whole:
            self.sizes = [self.config.experts_of(i) for i in sorted(self.config.moe_layers)]
        n = len(self.sizes)
        self.has_aux_loss = n > 0 and max(aux, seq, z) > 0
        shape, device = (n, self.config.n_experts), next(model.parameters()).device
        self.counts = torch.zeros(shape, dtype=torch.int64, device=device)
        sizes = torch.tensor(self.sizes, device=device).view(-1, 1)
        self.absent = torch.arange(shape[1], device=device) >= sizes
        self.rows = range(n) if whole else layout.stages.local_moe_layers()  # rows of counts
        observe = torch.compiler.disable(self._observe)  # it stores tensors outside the graph
        for i, layer, depth in zip(self.rows, self.moe_layers, depths, strict=True):
            layer.observe = partial(observe, self.counts[i], depth)

    def _observe(self, counts: Tensor, depth: int, logits: Tensor, ids: Tensor) -> None:
        """Called by each MoE layer's forward: logits (B, T, E), ids (B, T, K); counts (E,). A term
        has the index of its share: `depth` for means over tokens, -1 for means over rows."""
        if not torch.is_grad_enabled():  # validation
            return
        n_before = len(self.terms)
        if self.recording:
            counts += moe.count_experts(ids, len(counts))
        if self.aux or self.seq:
            probs = moe.router_probs(logits, self.config.scoring)
            if self.aux:
                flat = probs.flatten(0, 1), ids.flatten(0, 1)
                self.terms.append((depth, self.aux * moe.balance_loss(*flat)))
            if self.seq:
                self.terms.append((-1, self.seq * moe.balance_loss(probs, ids)))
        if self.z:
            self.terms.append((depth, self.z * moe.z_loss(logits, ids)))
        if not self.recording:  # recomputation must run the same operations, but counts nothing
            del self.terms[n_before:]

    def pop_losses(self, shares: Tensor | None = None) -> Tensor:
        """Sum of the auxiliary losses of the forward passes since the last call, each times the
        share of its micro-batch in the step (batch_sizes over the step's; None: 1). Forward passes
        before `recording` is set again are recomputation and are not counted twice."""
        terms, self.terms, self.recording = self.terms, [], False
        if not terms:
            return torch.zeros((), device=self.counts.device)
        return torch.stack([x if shares is None else x * shares[i] for i, x in terms]).sum()

    def update(self, layout: ParallelDims = SINGLE_PROCESS) -> None:
        """End of a step: update the expert biases; .last = token counts (MoE layers, E) of the step
        over all ranks (-1: no such expert), .row = their statistics for metrics.jsonl, of which
        worst_load is the load of the busiest expert over its layer's mean (1 is perfect)."""
        self.row: dict[str, Any] = {}
        if not len(self.counts):
            return
        self.last = layout.all_reduce_sum(self.counts.clone()).masked_fill_(self.absent, -1)
        self.counts.zero_()
        for i, layer in zip(self.rows, self.moe_layers):
            if self.config.correction_bias:
                moe.update_bias_(layer.expert_bias, self.last[i, : self.sizes[i]], self.speed)
        stats = moe.load_statistics(self.last)
        self.row = {
            "worst_load": round(stats["max_over_mean"], 3),
            "load_entropy": round(stats["entropy"], 4),
            "dead_experts": int(stats["dead"]),
        }

    def expert_load(self) -> list[list[int]]:
        """The token counts of the last step, by MoE layer and expert."""
        return [row[:n] for row, n in zip(self.last.tolist(), self.sizes)]


def clip_gradients(
    model: torch.nn.Module, max_norm: float = 1.0, layout: ParallelDims = SINGLE_PROCESS,
    scale: float = 1.0, groups: Sequence[Sequence[Tensor]] = (),
) -> float:  # fmt: skip
    """Divide the gradient by `scale` and clip its norm to `max_norm` (0: do not): that of all
    parameters, or of each group of whole parameters. Returns the largest unclipped norm."""
    if scale != 1.0:
        layout.scale_gradients(model, 1 / scale)
    norms = [torch.nn.utils.clip_grad_norm_(group, max_norm or math.inf) for group in groups]
    norms = norms or [layout.clip(model, max_norm or math.inf)]
    return torch.stack(norms).max().item()


@torch.no_grad()
def validate(
    model: torch.nn.Module, tokens: Tensor, seq_len: int, micro_batch_size: int, env: DistEnv,
    attend: Attend = causal_attention, layout: ParallelDims = SINGLE_PROCESS,
) -> float:  # fmt: skip
    """Mean loss over validation_batches, the same ones on all ranks."""
    batches = [*validation_batches(tokens, seq_len, micro_batch_size, env.device)]
    total, count = 0.0, sum(count_targets(batch, layout).item() for batch in batches)
    for _, group in groupby(batches, len):
        same_size = [*group]
        if layout.stages is None:
            with env.autocast():
                losses = [loss_sums(model, batch, attend, layout)[0] for batch in same_size]
        else:
            losses = layout.stages.validation_losses(model, same_size, env.autocast, attend, layout)
        total += sum(layout.all_reduce_sum(loss).item() for loss in losses) / layout.dp_size
    layout.reshard(model)
    return total / count


def validation_batches(
    tokens: Tensor, seq_len: int, micro_batch_size: int, device: torch.device
) -> Iterator[Tensor]:
    """Batches (at most micro_batch_size, seq_len + 1) of up to 65,536 validation tokens: windows of
    tokens (n,), or rows of (R, seq_len + 1), evenly spaced and always the same."""
    is_rows = tokens.dim() == 2
    n = len(tokens) if is_rows else (len(tokens) - 1) // seq_len
    wanted = min(n, 65536 // seq_len or 1)
    indices = [i * n // wanted for i in range(wanted)]
    for i in range(0, len(indices), micro_batch_size):
        batch = indices[i : i + micro_batch_size]
        rows = [
            tokens[j] if is_rows else tokens[j * seq_len : (j + 1) * seq_len + 1] for j in batch
        ]
        yield torch.stack(rows).long().to(device)
