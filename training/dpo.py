"""DPO: training on pairs of completions, of which one is preferred.

    python train.py --init DIR --task dpo --data PAIRS.jsonl

Direct preference optimization (Rafailov et al., arXiv:2305.18290) needs no reward model and no
sampling: it is binary classification of the chosen against the rejected completion, by how much
more likely each is under the model than under a frozen reference model, which keeps the model close
to the initial one. The loss of a pair (eq. 7), log-probabilities summed over the completion:

    -log sigmoid(beta * ((log pi - log ref)(chosen) - (log pi - log ref)(rejected)))

The reference model is a frozen copy of --init or, with LoRA, the model with adapters disabled,
which costs no memory. Prompts and padding are not targets, and the head runs on completion tokens
only. The model must have all layers and see whole sequences and the whole vocabulary (no pipeline,
context or tensor parallelism). The log-probabilities and the reference model are also those of GRPO
(grpo.py).

Cost: two forward passes per completion, the reference's without gradient. When it loses: on pairs
that are unlikely under the model, both log-probabilities fall.

Losses and statistics are sums, to be added over micro-batches and ranks; the caller divides them by
the pair count of the step. DPO is an objective of training/step.py without a state that a resumed
run would miss: the pairs of a step are a function of (seed, step). `row` and `validate` are
collective. Equivalence (test_all.py): loss and gradient are those of the formulas in fp64.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from huggingface.tokenizer import Tokenizer
from huggingface.weights import load_checkpoint
from model import Attend, Transformer, causal_attention
from training.chats import (
    Preference,
    Render,
    as_messages,
    assistant_spans,
    check_rendered,
    encode_spans,
    has_targets,
    map_items,
    padding_hint,
    read_preferences,
    with_tools,
)
from training.config import TrainConfig
from training.data import IGNORE, decode, is_padding, pack_rows
from training.dataset import load_chat, train_val_split
from training.dist_env import DistEnv
from training.lora import adapter_parameters, disable_adapters
from training.parallelize import ParallelDims

# sum of a tensor over all ranks
AllReduce = Callable[[Tensor], Tensor]
PAIRS = 128  # maximum number of validation pairs


def _check(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Log-probabilities under the model and under the reference model
# --------------------------------------------------------------------------------------------------


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """log p(target) in nats: logits (..., V), targets (...) -> (...) in fp32 (fp64 for fp64
    logits), 0 where the target is -100."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="none")
    return -nll.view_as(targets)


def target_mask(batch: Tensor) -> Tensor:
    """Mask of the targets of encoded rows: (B, T + 1) -> (B, T)."""
    return decode(batch, packed=False)[1] != IGNORE


def logprobs(model: Any, micro: Tensor, attend: Attend = causal_attention) -> Tensor:
    """Log-probabilities (B, T) of the targets of encoded rows (B, T + 1), 0 where there is no
    target. The head runs only on positions with a target."""
    inputs, targets, positions = decode(micro, packed=False)
    padding = is_padding(micro) if model.config.moe_layers else None
    hidden = model(inputs, positions, attend=attend, return_hidden=True, is_padding=padding)
    mask = targets != IGNORE
    logps = token_logprobs(model.head(hidden[mask]), targets[mask])
    return logps.new_zeros(targets.shape).masked_scatter(mask, logps)


@torch.no_grad()
def reference_logprobs(
    reference: nn.Module | None, model: nn.Module, micro: Tensor, attend: Attend
) -> Tensor:
    """logprobs of the reference model; None: of the model without its adapters."""
    if reference is not None:
        return logprobs(reference, micro, attend)
    with disable_adapters(model):
        return logprobs(model, micro, attend)


def check_reference(reference: nn.Module | None, model: nn.Module) -> None:
    """ValueError unless there is a reference model, or adapters without which `model` is one."""
    if reference is None and not adapter_parameters(model):
        raise ValueError(
            "no reference model: pass a frozen copy as reference, or add LoRA adapters"
        )


def frozen_reference(config: TrainConfig, model: Transformer, env: DistEnv) -> Transformer | None:
    """A frozen copy of the model of --init. With --lora None: `model` without its adapters."""
    if config.lora:
        return None
    dtype = next(model.parameters()).dtype
    return load_checkpoint(config.init, env.device, dtype).requires_grad_(False)


# --------------------------------------------------------------------------------------------------
# Loss
# --------------------------------------------------------------------------------------------------


def dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPO loss (arXiv:2305.18290, eq. 7) of pairs, from the sums of their token_logprobs, each
    (B,).

    beta: strength of the implicit KL penalty. Returns the loss and statistics, all summed over
    pairs: reward_margin = beta * (log-ratio of chosen - log-ratio of rejected), and accuracy, 1 if
    the margin is above 0."""
    _check(beta > 0, f"beta must be above 0, not {beta}")
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    loss = -F.logsigmoid(margin).sum()
    margin = margin.detach()
    return loss, {"reward_margin": margin.sum(), "accuracy": (margin > 0).to(margin.dtype).sum()}


# --------------------------------------------------------------------------------------------------
# Rows of pairs
# --------------------------------------------------------------------------------------------------


def preference_rows(
    pairs: Iterable[Preference] | Mapping[int, Preference], render: Render, tokenizer: Tokenizer,
    seq_len: int,
) -> Tensor:  # fmt: skip
    """Pairs as encoded rows (2 * n, seq_len + 1) int32: chosen, rejected, chosen, ... The
    assistant's turns of the completions are targets, truncated at the end of the row.

    Strings are a user and an assistant message. Completions may repeat the prompt's messages.
    ValueError if a prompt leaves no room for its completion.
    """

    def row(pair: Preference, name: str) -> Tensor:
        messages = as_messages(pair.prompt, "user")
        reply = as_messages(getattr(pair, name), "assistant")
        reply = reply[len(messages) :] if reply[: len(messages)] == messages else reply
        _check(
            reply and reply[0]["role"] == "assistant",
            f"{name} must begin with a turn of the assistant, or repeat the prompt's messages "
            "unchanged before it",
        )
        check_rendered([*messages, *reply], pair.tools, render)
        template = with_tools(render, pair.tools)
        text, spans = assistant_spans([*messages, *reply], template, len(messages))
        values = encode_spans(text, spans, tokenizer)
        _check(has_targets(values), f"{name} has no text of the assistant")
        before = int((values >= 0).nonzero()[0])
        error = f"its prompt, {before} tokens, leaves no room in a row of {seq_len + 1}"
        _check(before <= seq_len, f"{error}; remove it, or increase --seq-len")
        return pack_rows([values[: seq_len + 1]], seq_len)[0]

    def two_rows(pair: Preference) -> Tensor:
        return torch.stack([row(pair, name) for name in ("chosen", "rejected")])

    return torch.cat(map_items("pair", pairs, two_rows))


def epoch_indices(
    n: int, seed: int, step: int, batch_size: int, local_ids: Sequence[int]
) -> list[int]:
    """Which of n samples are at positions `local_ids` of the batch of `step`, in an infinite
    sequence of shuffled epochs: every sample is seen once per epoch."""
    indices, orders = [], {}
    for i in local_ids:
        epoch, position = divmod(step * batch_size + i, n)
        if epoch not in orders:
            rng = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            orders[epoch] = torch.randperm(n, generator=rng).tolist()
        indices.append(orders[epoch][position])
    return indices


# --------------------------------------------------------------------------------------------------
# Objective
# --------------------------------------------------------------------------------------------------


@dataclass
class DPO:
    """dpo_loss summed over pairs of completions; the loss of a step is the mean."""

    model: nn.Module
    rows: Tensor  # (2 * pairs, T + 1) encoded: chosen, rejected, chosen, ...
    batch_size: int  # pairs per step over all ranks
    local_ids: Sequence[int]  # this rank's pairs of a batch
    seed: int = 0
    beta: float = 0.1
    reference: nn.Module | None = None  # None: the model without its adapters
    all_reduce: AllReduce = lambda x: x
    validation: Tensor | None = None  # rows like `rows`
    sums: Tensor = field(default_factory=lambda: torch.zeros(3), init=False)

    def __post_init__(self):
        n = len(self.rows)
        _check(n > 0 and n % 2 == 0, f"{n} rows are not pairs of chosen and rejected completions")
        check_reference(self.reference, self.model)

    def batch(self, step: int) -> Tensor:
        n = len(self.rows) // 2
        pairs = epoch_indices(n, self.seed, step, self.batch_size, self.local_ids)
        self.sums = torch.zeros(3)
        return self.rows.view(n, 2, -1)[pairs].flatten(0, 1).long()

    def count(self, batch: Tensor) -> Tensor:
        return torch.tensor(len(batch) // 2, device=batch.device)

    def loss(
        self, model: nn.Module, micro: Tensor, rows: slice, attend: Attend = causal_attention
    ) -> Tensor:
        even = f"a micro-batch of {len(micro)} rows splits a pair; make it even"
        _check(len(micro) % 2 == 0, even)
        ref = reference_logprobs(self.reference, model, micro, attend).sum(-1)
        new = logprobs(model, micro, attend).sum(-1)
        loss, stats = dpo_loss(new[0::2], new[1::2], ref[0::2], ref[1::2], self.beta)
        pairs = torch.tensor(len(micro) / 2, device=loss.device)
        sums = torch.stack([stats["reward_margin"], stats["accuracy"], pairs])
        self.sums = self.sums.to(loss.device) + sums
        return loss

    @property
    def row(self) -> dict[str, float]:
        margin, accuracy, pairs = self.all_reduce(self.sums.clone()).tolist()
        n = max(1, pairs)
        return {"reward_margin": round(margin / n, 6), "accuracy": round(accuracy / n, 6)}

    @torch.no_grad()
    def validate(
        self, model: nn.Module, size: int, attend: Attend = causal_attention
    ) -> dict[str, float]:
        """Every rank evaluates all pairs: sharded weights are gathered collectively."""
        if self.validation is None:
            return {}
        before, self.sums, loss = self.sums, torch.zeros(3), 0.0
        device = next(self.model.parameters()).device
        for micro in self.validation[: 2 * PAIRS].long().to(device).split(max(2, size // 2 * 2)):
            loss += self.loss(model, micro, slice(len(micro)), attend).item()
        (margin, accuracy, n), self.sums = self.sums.tolist(), before
        totals = {"val_loss": loss, "val_reward_margin": margin, "val_accuracy": accuracy}
        return {name: round(x / n, 6) for name, x in totals.items()}


def build_dpo(config: TrainConfig, model: Transformer, env: DistEnv, layout: ParallelDims) -> DPO:
    """--task dpo: the pairs of --data, split for validation. ValueError names file and line."""
    pairs = [pair for path in config.data for pair in read_preferences(Path(path))]
    chat = *load_chat(config.out, model.config), config.seq_len
    rows, validation = (preference_rows(part, *chat) for part in train_val_split(pairs))
    if env.rank == 0 and (hint := padding_hint(rows, "")):
        print(hint, file=sys.stderr)
    n = config.batch_size // 2
    return DPO(
        model, rows, n, layout.samples(n), config.seed, config.beta,
        frozen_reference(config, model, env), layout.all_reduce_sum, validation,
    )  # fmt: skip
