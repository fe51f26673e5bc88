"""The draft head of --task draft-head, for speculative decoding.

    python train.py --task draft-head --init checkpoints/small --out runs/head
    python generate.py --checkpoint checkpoints/small --speculate head --draft-model runs/head

The target model is frozen. The head (speculative.DraftHead) learns to predict the target's next
distributions from its hidden state at a position and the tokens that follow. OUT then has
draft_head.safetensors and no model.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from huggingface.weights import load_checkpoint, write_atomically
from model import Attend, ModelConfig, Transformer, causal_attention
from speculative import DraftHead
from training.build import compile_model, convert_linears_
from training.config import DRAFT_HEAD, NUM_DRAFT_TOKENS, TrainConfig
from training.data import decode, is_padding
from training.dataset import Dataset
from training.dist_env import DistEnv
from training.metrics import read_metrics
from training.step import validation_batches

UNROLL_STEPS = 2  # drafts per position in training: 2 reach a lower loss per time than all 4
STEP_DECAY = 0.5  # weight of a draft in the loss, relative to the draft before it


def new_draft_head(dim: int, seed: int) -> DraftHead:
    """A DraftHead initialized from the seed. It is the identity, since `down` is zero."""
    head, rng = DraftHead(dim, 2 * dim), torch.Generator().manual_seed(seed)
    torch.nn.init.normal_(head.up.weight, 0.0, (2 * dim) ** -0.5, rng)
    torch.nn.init.zeros_(head.down.weight)
    return head


def draft_logits(
    head: DraftHead, model: Transformer, tokens: Tensor, attend: Attend = causal_attention,
    steps: int = NUM_DRAFT_TOKENS,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The target's logits (B, T, V) of tokens (B, T), and for i = 1..steps the head's logits of
    positions i and later (B, T - i, V): unrolled i times from the target's hidden state i positions
    earlier, with teacher forcing."""
    with torch.no_grad():
        hidden = model(tokens, attend=attend, return_hidden=True)
        target, embedded = model.head(hidden), model.embed(tokens).float()
    h, drafts = hidden.float(), []
    for i in range(1, steps + 1):
        h = head(h[:, :-1], embedded[:, i:])
        drafts.append(model.head(h))
    return target, drafts


def draft_loss(
    target: Tensor, drafts: list[Tensor], real: Tensor | None = None,
    counts: Sequence[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Cross-entropy, in nats, against the target's distribution, which decides acceptance, not the
    text's tokens. Mean over positions, then over unroll steps weighted by STEP_DECAY, since a draft
    counts only if those before it are accepted. real (B, T): positions that are no padding; counts:
    their number for each unroll step in the whole batch, of which this is a part."""
    p, loss, weights = target.float().softmax(-1), 0.0, 0.0
    real = torch.ones_like(p[..., 0], dtype=torch.bool) if real is None else real
    counts = position_counts(real, len(drafts)) if counts is None else counts
    for i, draft in enumerate(drafts, 1):
        weight = STEP_DECAY**i
        draft, weights = draft.float().flatten(0, 1), weights + weight
        losses = F.cross_entropy(draft, p[:, i:].flatten(0, 1), reduction="none")
        loss = loss + weight * (losses * real[:, i:].flatten()).sum() / counts[i - 1]
    return loss / weights


def position_counts(real: Tensor, steps: int) -> list[Tensor]:
    """The number of positions of each unroll step that are no padding; real (B, T) bool."""
    return [real[:, i:].sum().clamp(min=1) for i in range(1, steps + 1)]


def acceptance_counts(target: Tensor, drafts: list[Tensor], tokens: Tensor) -> Tensor:
    """(2, NUM_DRAFT_TOKENS): how often an i-th greedy draft was verified, and accepted.

    Drafting starts wherever the target's argmax is the text's next token, and continues while
    draft, argmax and text agree. So the counts are those of decoding at temperature 0, where drafts
    follow their own tokens, as long as the output is the text.
    """
    n = tokens.shape[1] - 1 - NUM_DRAFT_TOKENS
    argmax = target.argmax(-1)
    matches_text = argmax[:, :-1] == tokens[:, 1:]
    verified, counts = matches_text[:, :n], []
    for i, draft in enumerate(drafts, 1):
        accepted = verified & (draft.argmax(-1)[:, :n] == argmax[:, i : i + n])
        counts.append(torch.stack((verified.sum(), accepted.sum())))
        verified = accepted & matches_text[:, i : i + n]
    return torch.stack(counts, 1)


class DraftHeadObjective:
    """The draft-head objective (training/step.py): a batch's mean draft_loss against the frozen
    model of --init, loaded in the dtype of the matmuls."""

    def __init__(self, config: TrainConfig, dataset: Dataset, env: DistEnv):
        dtype = torch.bfloat16 if env.dtype == "bf16" else torch.float32
        target = load_checkpoint(config.init, env.device, dtype).requires_grad_(False)
        convert_linears_(target, config)  # the experts
        self.target = compile_model(target) if config.compile else target
        self.config, self.dataset, self.env = config, dataset, env
        self.row: dict[str, Any] = {}

    def batch(self, step: int) -> Tensor:
        return self.dataset.rows(step, range(self.config.batch_size))

    def count(self, batch: Tensor) -> Tensor:
        self.counts = position_counts(~is_padding(batch), UNROLL_STEPS)
        return torch.tensor(1, device=batch.device)  # the losses are divided by self.counts

    def loss(self, head: DraftHead, micro_batch: Tensor, rows: slice, attend: Attend) -> Tensor:
        tokens = decode(micro_batch, packed=False)[0]
        logits = draft_logits(head, self.target, tokens, attend, UNROLL_STEPS)
        return draft_loss(*logits, ~is_padding(micro_batch), self.counts)

    @torch.no_grad()
    def validate(self, head: DraftHead, size: int, attend: Attend) -> dict[str, Any]:
        """Over the validation batches: mean loss, and the acceptance rate of each i-th draft given
        that those before it were accepted (acceptance_counts; 0 if none was verified)."""
        device = self.env.device
        losses, counts = [], torch.zeros(2, NUM_DRAFT_TOKENS, device=device)
        tokens, seq_len = self.dataset.validation, self.config.seq_len
        for batch in validation_batches(tokens, seq_len, size, device):
            logits = draft_logits(head, self.target, batch[:, :-1], attend)
            losses += [draft_loss(logits[0], logits[1][:UNROLL_STEPS]).item()] * len(batch)
            counts += acceptance_counts(*logits, batch[:, :-1])
        rates = (counts[1] / counts[0].clamp(min=1)).tolist()
        return {"val_loss": sum(losses) / len(losses), "acceptance": [round(r, 4) for r in rates]}


def build_draft_head(config: TrainConfig, target: ModelConfig, env: DistEnv) -> DraftHead:
    """The head to train, for a target model of that config."""
    head = new_draft_head(target.dim, config.seed).to(env.device)
    head.config = target
    return head


def save_draft_head(out: Path, head: DraftHead, step: int) -> None:
    """Write OUT/draft_head.safetensors in bf16, with its shape, steps and the acceptance rates of
    the last validation (null before the first) as metadata."""
    rows = reversed(read_metrics(out / "metrics.jsonl"))
    acceptance = next((row["acceptance"] for row in rows if "acceptance" in row), None)
    tensors = {name: p.detach().to("cpu", torch.bfloat16) for name, p in head.named_parameters()}
    (dim, ffn_dim), rates = head.down.weight.shape, json.dumps(acceptance)
    metadata = {"dim": str(dim), "ffn_dim": str(ffn_dim), "steps": str(step), "acceptance": rates}
    write_atomically(out / DRAFT_HEAD, lambda tmp: save_file(tensors, tmp, metadata))
