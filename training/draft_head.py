"""draft_head.py: train a head that drafts for a model in speculative decoding.

    python train.py --train-draft-head --init checkpoints/small --out runs/head
    python generate.py checkpoints/small --speculate head ...

A program over train.py, with its text, its steps and its optimizer. The model stays as it is and
gets no gradient; what is learned is how its hidden state at a position, and the tokens since, lead
to its next ones (speculative.DraftHead), against its own distributions. OUT then holds no model but
draft_head.safetensors.
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

UNROLL_STEPS = 2  # of them in training: twice the steps in the time that all four take teach more
STEP_DECAY = 0.5  # what a step weighs in the loss, beside the step before it


def new_draft_head(dim: int, seed: int) -> DraftHead:
    """Drawn from the seed; it begins as the identity, for `down` is zero."""
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
    """The target's logits (B, T, V) of tokens (B, T), and for i = 1..steps what the head makes of
    those from position i on (B, T - i, V): begun i positions earlier at the target's hidden state,
    fed with the text's i tokens since (teacher forcing)."""
    with torch.no_grad():
        hidden = model(tokens, attend=attend, return_hidden=True)
        target, embedded = model.head(hidden), model.embed(tokens).float()
    drafted, drafts = hidden.float(), []
    for i in range(1, steps + 1):
        drafted = head(drafted[:, :-1], embedded[:, i:])
        drafts.append(model.head(drafted))
    return target, drafts


def draft_loss(target: Tensor, drafts: list[Tensor]) -> Tensor:
    """Cross-entropy, in nats, against the target's own distribution: what is accepted is what the
    target would say, not what the text says. The mean over each step's positions, and over steps
    weighted by FADE, for a later draft counts only if those before it were taken."""
    p, loss, weights = target.float().softmax(-1), 0.0, 0.0
    for i, draft in enumerate(drafts, 1):
        weight = STEP_DECAY**i
        draft, weights = draft.float().flatten(0, 1), weights + weight
        loss = loss + weight * F.cross_entropy(draft, p[:, i:].flatten(0, 1))
    return loss / weights


def acceptance_counts(target: Tensor, drafts: list[Tensor], tokens: Tensor) -> Tensor:
    """(2, DRAFTED): how many chains of greedy drafts came to an i-th token, and how often the
    target took it.

    A chain begins wherever the text's next token is the target's own choice, and goes on while
    draft, choice and text are one token. So each count is of what decoding at temperature 0 does,
    its drafts fed with their own tokens, as long as it writes what the text says.
    """
    n = tokens.shape[1] - 1 - NUM_DRAFT_TOKENS
    choice = target.argmax(-1)
    followed = choice[:, :-1] == tokens[:, 1:]
    chains, counts = followed[:, :n], []
    for i, draft in enumerate(drafts, 1):
        taken = chains & (draft.argmax(-1)[:, :n] == choice[:, i : i + n])
        counts.append(torch.stack((chains.sum(), taken.sum())))
        chains = taken & followed[:, i : i + n]
    return torch.stack(counts, 1)


@torch.no_grad()
def validate_draft_head(
    head: DraftHead, model: Transformer, tokens: Tensor, args: argparse.Namespace, place: DistEnv
) -> dict[str, Any]:
    """Over the held_out_batches: mean loss, and of the i-th tokens drafted the share that is taken,
    all before them being so (acceptance_counts; 0 where there was none)."""
    losses, counts = [], torch.zeros(2, NUM_DRAFT_TOKENS, device=place.device)
    for batch in validation_batches(tokens, args.seq_len, args.micro_batch_size, place.device):
        with place.autocast():
            logits = draft_logits(head, model, batch[:, :-1], make_attend(args.attention))
        losses += [draft_loss(logits[0], logits[1][:UNROLL_STEPS]).item()] * len(batch)
        counts += acceptance_counts(*logits, batch[:, :-1])
    shares = (counts[1] / counts[0].clamp(min=1)).tolist()
    return {"val_loss": sum(losses) / len(losses), "acceptance": [round(s, 4) for s in shares]}


def save_draft_head(out: Path, head: DraftHead, step: int, acceptance: list[float] | None) -> None:
    """OUT/draft_head.safetensors in bf16, with its shape and what it was last seen to be good for
    (null before the first validation) as metadata."""
    tensors = {name: p.detach().to("cpu", torch.bfloat16) for name, p in head.named_parameters()}
    (dim, ffn_dim), text = head.down.weight.shape, json.dumps(acceptance)
    about = {"dim": str(dim), "ffn_dim": str(ffn_dim), "steps": str(step), "acceptance": text}
    write_atomically(out / DRAFT_HEAD, lambda tmp: save_file(tensors, tmp, about))


def train_draft_head(args: argparse.Namespace, text: Dataset, place: DistEnv) -> None:
    """All of --train-draft-head, from tokens to file. The model is that of --init in the dtype of
    the matmuls, and gets no gradient."""
    B, T, attend = args.batch_size, args.seq_len, make_attend(args.attention)
    dtype = torch.bfloat16 if place.dtype == "bf16" else torch.float32
    model = load_checkpoint(args.init, place.device, dtype).requires_grad_(False)
    convert_linears_(model, args)  # no more than --experts
    head = new_draft_head(model.config.dim, args.seed).to(place.device)
    print(summary(args, head, text.size, 0, place), file=sys.stderr)
    model = compile_model(model) if args.compile else model
    optimizer, stop, acceptance = build_optimizer(head), stop_on_signals(), None
    metrics, bar = Metrics(args.out, 0, args.tensorboard), progress_bar(0, args.steps, place)
    for step in bar:
        start, loss = time.perf_counter(), torch.zeros((), device=place.device)
        batch = decode(text.rows(step, range(B)), packed=False)[0].to(place.device)
        for micro in batch.split(args.micro_batch_size):
            with place.autocast():
                logits = draft_logits(head, model, micro, attend, UNROLL_STEPS)
            share = draft_loss(*logits) * len(micro) / B
            share.backward()
            loss += share.detach()
        lr = learning_rate(step, args.steps, args.lr)
        row = {"step": step + 1, "loss": loss.item()}
        row |= {"grad_norm": update(head, optimizer, lr), "lr": lr}
        if not math.isfinite(row["loss"] + row["grad_norm"]):
            raise ValueError(f"step {row['step']}: loss {row['loss']}; try a lower --lr")
        row["tokens_per_second"] = round(B * T / (time.perf_counter() - start), 1)

        leaving, done = bool(stop), step + 1 == args.steps
        if (step + 1) % args.eval_every == 0 or done:
            row |= validate_draft_head(head, model, text.held, args, place)
            acceptance = row["acceptance"]
            shares = ", ".join(f"{share:.0%}" for share in acceptance)
            said = f"step {step + 1}: validation {row['val_loss']:.4f}, accepted {shares}"
            bar.write(said, file=sys.stderr)
        metrics.write(row)
        bar.set_postfix_str(f"loss {row['loss']:.3f}", refresh=False)
        if (step + 1) % args.save_every == 0 or leaving or done:
            save_draft_head(args.out, head, step + 1, acceptance)
        if leaving:
            said = f"stopped after step {step + 1}, saved {args.out / DRAFT_HEAD}"
            bar.write(said, file=sys.stderr)
            break
    metrics.close()
