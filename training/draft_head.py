"""Training of a draft head for speculative decoding, as train.py --train-draft-head.

    python train.py --train-draft-head --init checkpoints/small --out runs/head
    python generate.py checkpoints/small --speculate head ...

Uses train.py's data, steps and optimizer. The target model is frozen. The head
(speculative.DraftHead) learns to predict the target's next distributions from its hidden state at a
position and the tokens that follow. OUT then has draft_head.safetensors and no model.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from huggingface.weights import load_checkpoint, write_atomically
from model import Attend, Transformer, causal_attention
from parallelism.dist_env import DistEnv
from speculative import DraftHead
from training.build import build_optimizer, convert_linears_, compile_model
from training.data import decode
from training.dataset import Dataset
from training.flags import DRAFT_HEAD, NUM_DRAFT_TOKENS
from training.metrics import Metrics, progress_bar, summary
from training.optimizers import learning_rate
from training.recovery import stop_on_signals
from training.step import make_attend, validation_batches, update

UNROLL_STEPS = 2  # drafts per position in training: 2 reach a lower loss per time than all 4
STEP_DECAY = 0.5  # weight of a draft in the loss, relative to the draft before it


def new_draft_head(dim: int, seed: int) -> DraftHead:
    """A DraftHead initialized from the seed. It is the identity, since `down` is zero."""
    head, rng = DraftHead(dim, 2 * dim), torch.Generator().manual_seed(seed)
    torch.nn.init.normal_(head.up.weight, 0.0, (2 * dim) ** -0.5, rng)
    torch.nn.init.zeros_(head.down.weight)
    return head


def draft_logits(
    head: DraftHead,
    model: Transformer,
    tokens: Tensor,
    attend: Attend = causal_attention,
    steps: int = NUM_DRAFT_TOKENS,
) -> tuple[Tensor, list[Tensor]]:
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


def draft_loss(target: Tensor, drafts: list[Tensor]) -> Tensor:
    """Cross-entropy, in nats, against the target's distribution, which decides acceptance, not the
    text's tokens. Mean over positions, then over unroll steps weighted by STEP_DECAY, since a draft
    counts only if those before it are accepted."""
    p, loss, weights = target.float().softmax(-1), 0.0, 0.0
    for i, draft in enumerate(drafts, 1):
        weight = STEP_DECAY**i
        draft, weights = draft.float().flatten(0, 1), weights + weight
        loss = loss + weight * F.cross_entropy(draft, p[:, i:].flatten(0, 1))
    return loss / weights


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


@torch.no_grad()
def validate_draft_head(
    head: DraftHead, model: Transformer, tokens: Tensor, args: argparse.Namespace, dist_env: DistEnv
) -> dict[str, Any]:
    """Over the validation batches: mean loss, and the acceptance rate of each i-th draft given that
    those before it were accepted (acceptance_counts; 0 if none was verified)."""
    losses, counts = [], torch.zeros(2, NUM_DRAFT_TOKENS, device=dist_env.device)
    for batch in validation_batches(tokens, args.seq_len, args.micro_batch_size, dist_env.device):
        with dist_env.autocast():
            logits = draft_logits(head, model, batch[:, :-1], make_attend(args.attention))
        losses += [draft_loss(logits[0], logits[1][:UNROLL_STEPS]).item()] * len(batch)
        counts += acceptance_counts(*logits, batch[:, :-1])
    rates = (counts[1] / counts[0].clamp(min=1)).tolist()
    return {"val_loss": sum(losses) / len(losses), "acceptance": [round(r, 4) for r in rates]}


def save_draft_head(out: Path, head: DraftHead, step: int, acceptance: list[float] | None) -> None:
    """Write OUT/draft_head.safetensors in bf16, with its shape, steps and last acceptance rates
    (null before the first validation) as metadata."""
    tensors = {name: p.detach().to("cpu", torch.bfloat16) for name, p in head.named_parameters()}
    (dim, ffn_dim), rates = head.down.weight.shape, json.dumps(acceptance)
    metadata = {"dim": str(dim), "ffn_dim": str(ffn_dim), "steps": str(step), "acceptance": rates}
    write_atomically(out / DRAFT_HEAD, lambda tmp: save_file(tensors, tmp, metadata))


def train_draft_head(args: argparse.Namespace, dataset: Dataset, dist_env: DistEnv) -> None:
    """Run --train-draft-head. The model of --init is loaded in the dtype of the matmuls and
    frozen."""
    B, T, attend = args.batch_size, args.seq_len, make_attend(args.attention)
    dtype = torch.bfloat16 if dist_env.dtype == "bf16" else torch.float32
    model = load_checkpoint(args.init, dist_env.device, dtype).requires_grad_(False)
    convert_linears_(model, args)  # for --experts
    head = new_draft_head(model.config.dim, args.seed).to(dist_env.device)
    print(summary(args, head, dataset.size, 0, dist_env), file=sys.stderr)
    model = compile_model(model) if args.compile else model
    optimizer, stop, acceptance = build_optimizer(head), stop_on_signals(), None
    metrics, bar = Metrics(args.out, 0, args.tensorboard), progress_bar(0, args.steps, dist_env)
    for step in bar:
        start, loss = time.perf_counter(), torch.zeros((), device=dist_env.device)
        batch = decode(dataset.rows(step, range(B)), packed=False)[0].to(dist_env.device)
        for micro in batch.split(args.micro_batch_size):
            with dist_env.autocast():
                logits = draft_logits(head, model, micro, attend, UNROLL_STEPS)
            micro_loss = draft_loss(*logits) * len(micro) / B
            micro_loss.backward()
            loss += micro_loss.detach()
        lr = learning_rate(step, args.steps, args.lr)
        row = {"step": step + 1, "loss": loss.item()}
        row |= {"grad_norm": update(head, optimizer, lr), "lr": lr}
        if not math.isfinite(row["loss"] + row["grad_norm"]):
            raise ValueError(f"step {row['step']}: loss {row['loss']}; try a lower --lr")
        row["tokens_per_second"] = round(B * T / (time.perf_counter() - start), 1)

        stopping, done = bool(stop), step + 1 == args.steps
        if (step + 1) % args.eval_every == 0 or done:
            row |= validate_draft_head(head, model, dataset.validation, args, dist_env)
            acceptance = row["acceptance"]
            rates = ", ".join(f"{rate:.0%}" for rate in acceptance)
            message = f"step {step + 1}: validation {row['val_loss']:.4f}, accepted {rates}"
            bar.write(message, file=sys.stderr)
        metrics.write(row)
        bar.set_postfix_str(f"loss {row['loss']:.3f}", refresh=False)
        if (step + 1) % args.save_every == 0 or stopping or done:
            save_draft_head(args.out, head, step + 1, acceptance)
        if stopping:
            message = f"stopped after step {step + 1}, saved {args.out / DRAFT_HEAD}"
            bar.write(message, file=sys.stderr)
            break
    metrics.close()
