"""train.py: train a Llama- or DeepSeek-style model from text, on one process or under torchrun.

    python train.py                              the standard library's source -> runs/stdlib
    python train.py --data FILE.jsonl --model small --steps 2000 --out runs/mine
    torchrun --nproc-per-node 2 train.py ...     the same steps, each rank a share of every batch
    python train.py --train-draft-head --init checkpoints/small --out runs/head
                                                 a draft head for speculative decoding with it

A run, in order: read the documents; train a tokenizer on them; write them as token files; then per
step take a batch, accumulate gradients over micro-batches, clip, AdamW; now and then validate and
save. OUT is a Hugging Face folder (config.json, model.safetensors in bf16, tokenizer.model) that
generate.py and transformers open, beside train_state.safetensors (fp32 weights, Adam moments,
step) and metrics.jsonl. --fp8 and --qat change what a step multiplies, not what is saved.
--train-draft-head leaves the model as it is and trains what foretells it: OUT then holds no model
but draft_head.safetensors.

Three things hold, and test_all.py proves them:

- The batch is a pure function of (seed, step, sample index). No loader has a state, so a run
  resumed with --resume prints the losses of an uninterrupted one to the last digit (on CPU).
- The loss of a step is the mean over its *tokens*: every micro-batch's sum is divided by the count
  of the whole step, on all ranks, so micro-batch size and rank count change nothing but rounding.
- A checkpoint appears whole or not at all. SIGTERM and Ctrl-C save and leave; kill -9 at any moment
  leaves the previous one.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import copy
import hashlib
import io
import json
import math
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from attention import as_attend
from model import (
    CONFIGS,
    Attend,
    ModelConfig,
    MoE,
    Transformer,
    allocate,
    causal_attention,
    load_checkpoint,
    read_config,
    save_checkpoint,
    write_atomically,
)
from quantize import RECIPES, SCHEMES, fp8_training_, qat_
from speculative import DraftHead

BOS, EOS = 1, 2  # one of each around every document
IGNORE = -100  # a target that is not counted
MTP_WEIGHT = 0.3  # of the loss of predicting further (DeepSeek-V3, arXiv:2412.19437, 4.2)

# Dense matmul peaks, FLOP/s, bf16 without sparsity (vendor datasheets). A device that is not here
# gets no MFU: a wrong one is worse than none. FP8 has twice these; --fp8 is measured against them
# too, so that its MFU is bf16's times the speed-up.
PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}

# What --qat rounds to: the grids of generate.py's --quantize
QAT_GRIDS = {name: SCHEMES[name].grid for name in ("int8", "int4")}

# --------------------------------------------------------------------------------------------------
# Text
# --------------------------------------------------------------------------------------------------

Document = tuple[str, str]  # (name, text); the name decides whether it is held out


def read_documents(data: str | None) -> list[Document]:
    """The documents of --data: a text file, a folder of them, a JSONL with "text"; or, without it,
    the source of Python's standard library, tests left out. In a fixed order. ValueError if there
    is no text.
    """
    path = Path(data or sysconfig.get_paths()["stdlib"])
    if not path.exists():
        raise ValueError(f"--data {path}: no such file or folder")
    if path.is_dir():
        docs = list(_folder(path, "*.py" if data is None else "*"))
    elif path.suffix in (".jsonl", ".ndjson"):
        docs = list(_jsonl(path))
    else:
        text = _text(path)
        pieces = range(0, len(text or ""), 8192)  # so that some of a single file can be held out
        docs = [(f"{i}", text[i : i + 8192]) for i in pieces]
    docs = [(name, text) for name, text in docs if text.strip()]
    if not docs:
        raise ValueError(
            f'--data {path}: holds no text (UTF-8 files, or JSONL lines with a "text" field)'
        )
    return docs


def _text(path: Path) -> str | None:
    try:
        text = path.read_bytes().decode("utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return None if "\0" in text else text


def _folder(root: Path, pattern: str) -> Iterator[Document]:
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    for path in sorted(root.rglob(pattern)):
        inside = path.relative_to(root)
        if not path.is_file() or any(p.startswith(".") for p in inside.parts):
            continue
        if pattern == "*.py" and skip & set(inside.parts):
            continue
        if (text := _text(path)) is not None:
            yield inside.as_posix(), text


def _jsonl(path: Path) -> Iterator[Document]:
    for n, line in enumerate((_text(path) or "").split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            text.encode()  # half a surrogate pair is no text
        except AttributeError:
            raise ValueError(
                f'{path}: line {n}: "text" must be a string, not {type(text).__name__}'
            ) from None
        except (json.JSONDecodeError, UnicodeEncodeError, KeyError, TypeError):
            raise ValueError(f'{path}: line {n} is not a JSON object with a "text" field') from None
        yield f"{n}", text


def held_out(name: str) -> bool:
    """Whether a document is for validation: one in 16, by a hash of its name, the same on every
    machine."""
    return hashlib.sha256(name.encode()).digest()[0] < 16


def split(docs: list[Document]) -> tuple[list[str], list[str]]:
    """(training texts, held-out texts): by held_out; the last sixteenth if that leaves none."""
    kept = [text for name, text in docs if not held_out(name)]
    held = [text for name, text in docs if held_out(name)]
    if kept and held:
        return kept, held
    texts = [text for _, text in docs]
    if len(texts) == 1:
        texts = [texts[0][: -len(texts[0]) // 16], texts[0][-len(texts[0]) // 16 :]]
    n = max(1, len(texts) // 16)
    return texts[:-n], texts[-n:]


# --------------------------------------------------------------------------------------------------
# Tokens
# --------------------------------------------------------------------------------------------------


def train_tokenizer(texts: list[str], vocab_size: int) -> bytes:
    """A sentencepiece BPE model that gives text back unchanged (but U+2581, its mark for a space).

    Whitespace is kept as it is, and runs of it are pieces: sixteen spaces of indentation, or ":"
    with its newline, cost one token. Unknown characters fall back to bytes.
    """
    pieces = (text[i : i + 4000] for text in texts for i in range(0, len(text), 4000))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=pieces,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9999,
            split_digits=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=20000,
            hard_vocab_limit=False,
            unk_id=0,
            bos_id=BOS,
            eos_id=EOS,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as e:
        raise ValueError(
            f"--data: too little text for a tokenizer of {vocab_size} pieces ({e})"
        ) from None
    return model.getvalue()


def write_tokens(
    path: Path, encode: Callable[[list[str]], list[list[int]]], texts: list[str]
) -> None:
    """One flat file of int32: BOS document EOS, BOS document EOS, ..."""

    def write(tmp: Path) -> None:
        with open(tmp, "wb") as f:
            for i in range(0, len(texts), 64):
                for ids in encode(texts[i : i + 64]):
                    array.array("i", [BOS, *ids, EOS]).tofile(f)

    write_atomically(path, write)


def read_tokens(path: Path) -> Tensor:
    """The file of write_tokens, memory-mapped, (n,) int32."""
    return torch.from_file(
        str(path), shared=False, size=path.stat().st_size // 4, dtype=torch.int32
    )


def prepare_tokens(args: argparse.Namespace, vocab_size: int) -> None:
    """Write OUT/tokenizer.model and both token files from --data."""
    kept, held = split(read_documents(args.data))
    path = args.out / "tokenizer.model"
    if args.resume and path.exists():
        model = path.read_bytes()
    elif args.init is None:
        model = train_tokenizer(kept, vocab_size)
    elif (args.init / "tokenizer.model").exists():
        model = (args.init / "tokenizer.model").read_bytes()
    else:
        raise ValueError(f"--init {args.init}: has no tokenizer.model to tokenize --data with")
    try:
        sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as e:
        raise ValueError(f"{args.init}/tokenizer.model: not a sentencepiece model ({e})") from None
    if sp.vocab_size() > vocab_size:
        raise ValueError(
            f"{path}: {sp.vocab_size()} pieces do not fit vocab_size {vocab_size} of config.json"
        )
    write_atomically(path, lambda tmp: tmp.write_bytes(model))
    write_tokens(args.out / "val.tokens", sp.encode, held)
    write_tokens(args.out / "train.tokens", sp.encode, kept)


def open_tokens(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """(training tokens, held-out tokens)."""
    train, held = (read_tokens(args.out / f"{split}.tokens") for split in ("train", "val"))
    for name, tokens in (("training", train), ("held-out", held)):
        if len(tokens) < args.seq_len + 1:
            raise ValueError(
                f"--data: {len(tokens)} {name} tokens are too few for --seq-len {args.seq_len}; "
                "give more text, or shorter sequences"
            )
    return train, held


def batch_of(
    tokens: Tensor, seed: int, step: int, indices: range, batch_size: int, seq_len: int
) -> Tensor:
    """Samples `indices` of the batch of `step`: (len(indices), seq_len + 1), inputs and targets
    overlapping.

    A pure function of its arguments. Sample g = step * batch_size + index is the g-th window of an
    endless row of epochs; each epoch cuts the tokens at a phase of its own and shuffles the
    windows, so that all are seen once before any is seen twice.
    """
    n = (len(tokens) - 1) // seq_len - 1  # windows an epoch, leaving room for the phase
    rows, shuffled = [], {}
    for g in (step * batch_size + i for i in indices):
        epoch, place = divmod(g, max(n, 1))
        if epoch not in shuffled:
            rng = torch.Generator().manual_seed(
                seed * 1_000_003 + epoch
            )  # it hears only the low 32 bits
            phase = int(torch.randint(seq_len, (), generator=rng)) if n > 0 else 0
            shuffled[epoch] = phase, torch.randperm(max(n, 1), generator=rng)
        phase, order = shuffled[epoch]
        start = phase + int(order[place]) * seq_len
        rows.append(tokens[start : start + seq_len + 1])
    return torch.stack(rows).long()


# --------------------------------------------------------------------------------------------------
# One step
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where this process computes: its device, the dtype of its matmuls, and which rank of how
    many it is."""

    device: torch.device
    dtype: str
    rank: int
    world: int

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bf16")


def attend_of(attention: str) -> Attend:
    """The model's attend argument for that kind of attention."""
    return as_attend() if attention == "flash" else causal_attention


def loss_sums(
    model: Transformer, batch: Tensor, attend: Attend = causal_attention
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropies of batch (B, T + 1), in nats: of the next token, and of those further
    ahead, the mean over the model's multi-token prediction depths (0 without any)."""
    tokens = batch.clamp(min=0)
    hidden = model(tokens[:, :-1], attend=attend, return_hidden=True)
    ahead = hidden.new_zeros((), dtype=torch.float32)
    main = _cross_entropy(model.head(hidden), batch[:, 1:])
    for depth in range(len(model.mtp)):
        following = tokens[:, 1 + depth : -1]
        hidden = model.predict_further(hidden[:, :-1], following, None, attend, depth)
        ahead = ahead + _cross_entropy(model.head(hidden), batch[:, 2 + depth :])
    return main, ahead / max(1, len(model.mtp))


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def accumulate(
    model: torch.nn.Module,
    batch: Tensor,
    micro_batch_size: int,
    autocast: Callable[[], Any] = contextlib.nullcontext,
    attend: Attend = causal_attention,
) -> dict[str, float]:
    """Leave in .grad the gradient of the mean loss over all the step's tokens (and MTP_WEIGHT times
    that of predicting further); return those losses.

    The divisor is the token count of the whole step (all micro-batches, all ranks), known before
    the first backward. A mean of micro-batch means would weigh a token by how few stand beside it.
    """
    count = _all_reduce((batch[:, 1:] != IGNORE).sum())
    totals = torch.zeros(2, device=batch.device)
    for micro in batch.split(micro_batch_size):
        with autocast():
            main, ahead = (loss / count for loss in loss_sums(model, micro, attend))
        (main + MTP_WEIGHT * ahead).backward()
        totals += torch.stack((main, ahead)).detach()
    if dist.is_initialized():
        for p in model.parameters():
            dist.all_reduce(p.grad)
    main, ahead = _all_reduce(totals).tolist()
    return {"loss": main} | ({"mtp_loss": ahead} if len(model.mtp) else {})


class Balance:
    """Load balancing without an auxiliary loss (arXiv:2408.15664): after each step every expert's
    routing correction moves by `speed`, up if the expert got fewer tokens than the mean, else
    down. Counts through the experts hook; mixtures without a correction are left alone."""

    def __init__(self, model: Transformer, speed: float = 2e-3):
        self.speed = speed
        mixtures = (m for m in model.modules() if isinstance(m, MoE))
        self.mixtures = [m for m in mixtures if m.config.correction_bias]
        self.loads = [torch.zeros_like(m.correction) for m in self.mixtures]
        for moe, load in zip(self.mixtures, self.loads):
            moe.experts = self._counting(moe.experts, load)

    def _counting(self, experts: Callable[..., Tensor], load: Tensor) -> Callable[..., Tensor]:
        def run(x: Tensor, weights: Tensor, ids: Tensor, *matrices: Tensor) -> Tensor:
            if torch.is_grad_enabled():  # not in validation
                load.add_(torch.bincount(ids.flatten(), minlength=len(load)))
            return experts(x, weights, ids, *matrices)

        return run

    def update(self) -> float | None:
        """Move the corrections; the busiest expert's load over the mean, the worst of all layers
        (1 is perfect)."""
        worst = None
        for moe, load in zip(self.mixtures, self.loads):
            mean = _all_reduce(load).mean()
            moe.correction += self.speed * (mean - load).sign()
            worst = max(worst or 0.0, (load.max() / mean).item())
            load.zero_()
        return worst


def _all_reduce(x: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def build_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101), decay on matrices and embeddings, none on norms and biases."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, lr: float) -> float:
    """Clip the gradient to norm 1, take the optimizer's step, clear the gradient; the norm before
    clipping."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.item()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first 5% (at most 500 steps), then a cosine down to a tenth of the
    peak."""
    warmup = min(500, max(1, steps // 20))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


@torch.no_grad()
def validate(
    model: torch.nn.Module,
    tokens: Tensor,
    seq_len: int,
    micro_batch_size: int,
    place: Place,
    attend: Attend = causal_attention,
) -> float:
    """Mean loss over the held_out_batches."""
    total, count = 0.0, 0
    for batch in held_out_batches(tokens, seq_len, micro_batch_size, place.device):
        with place.autocast():
            total += loss_sums(model, batch, attend)[0].item()
        count += batch[:, 1:].numel()
    return total / count


def held_out_batches(
    tokens: Tensor, seq_len: int, micro_batch_size: int, device: torch.device
) -> Iterator[Tensor]:
    """Up to 65,536 held-out tokens as (micro_batch_size or fewer, seq_len + 1): windows spread
    evenly, always the same ones."""
    n = (len(tokens) - 1) // seq_len
    picked = min(n, max(1, 65536 // seq_len))
    starts = [i * n // picked * seq_len for i in range(picked)]
    for i in range(0, picked, micro_batch_size):
        rows = [tokens[s : s + seq_len + 1] for s in starts[i : i + micro_batch_size]]
        yield torch.stack(rows).long().to(device)


# --------------------------------------------------------------------------------------------------
# A draft head
# --------------------------------------------------------------------------------------------------

DRAFT_HEAD = "draft_head.safetensors"
DRAFTED = 4  # tokens in a row that validation drafts
UNROLLED = 2  # of them in training: twice the steps in the time that all four take teach more
FADE = 0.5  # what a step weighs in the loss, beside the step before it
DRAFT_LR = 1e-2  # where --lr is not given


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
    steps: int = DRAFTED,
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
        weight = FADE**i
        draft, weights = draft.float().flatten(0, 1), weights + weight
        loss = loss + weight * F.cross_entropy(draft, p[:, i:].flatten(0, 1))
    return loss / weights


def draft_counts(target: Tensor, drafts: list[Tensor], tokens: Tensor) -> Tensor:
    """(2, DRAFTED): how many chains of greedy drafts came to an i-th token, and how often the
    target took it.

    A chain begins wherever the text's next token is the target's own choice, and goes on while
    draft, choice and text are one token. So each count is of what decoding at temperature 0 does,
    its drafts fed with their own tokens, as long as it writes what the text says.
    """
    n = tokens.shape[1] - 1 - DRAFTED
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
    head: DraftHead, model: Transformer, tokens: Tensor, args: argparse.Namespace, place: Place
) -> dict[str, Any]:
    """Over the held_out_batches: mean loss, and of the i-th tokens drafted the share that is taken,
    all before them being so (draft_counts; 0 where there was none)."""
    losses, counts = [], torch.zeros(2, DRAFTED, device=place.device)
    for batch in held_out_batches(tokens, args.seq_len, args.micro_batch_size, place.device):
        with place.autocast():
            logits = draft_logits(head, model, batch[:, :-1], attend_of(args.attention))
        losses += [draft_loss(logits[0], logits[1][:UNROLLED]).item()] * len(batch)
        counts += draft_counts(*logits, batch[:, :-1])
    shares = (counts[1] / counts[0].clamp(min=1)).tolist()
    return {"val_loss": sum(losses) / len(losses), "acceptance": [round(s, 4) for s in shares]}


def save_draft_head(out: Path, head: DraftHead, step: int, acceptance: list[float] | None) -> None:
    """OUT/draft_head.safetensors in bf16, with its shape and what it was last seen to be good for
    (null before the first validation) as metadata."""
    tensors = {name: p.detach().to("cpu", torch.bfloat16) for name, p in head.named_parameters()}
    (dim, ffn_dim), text = head.down.weight.shape, json.dumps(acceptance)
    about = {"dim": str(dim), "ffn_dim": str(ffn_dim), "steps": str(step), "acceptance": text}
    write_atomically(out / DRAFT_HEAD, lambda tmp: save_file(tensors, tmp, about))


# --------------------------------------------------------------------------------------------------
# Checkpoints
# --------------------------------------------------------------------------------------------------

STATE = "train_state.safetensors"
# --resume takes these from the checkpoint. Those in FIXED decide what is learned and stay; others
# may be given anew (another micro-batch size sums in another order: equal but for rounding).
FIXED = ("seed", "batch_size", "seq_len", "lr", "data", "dtype", "fp8", "qat")
SAVED = (*FIXED, "steps", "micro_batch_size", "save_every", "eval_every", "compile", "attention")


def save_run(
    out: Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    step: int,
    args: argparse.Namespace,
) -> None:
    """Write OUT: first all that --resume needs, in one file; then the Hugging Face folder in
    bf16."""
    tensors = {}
    for name, buffer in model.named_buffers():
        tensors[f"weight.{name}"] = buffer.cpu()
    for name, p in model.named_parameters():
        tensors[f"weight.{name}"] = p.detach().cpu()
        for moment in ("exp_avg", "exp_avg_sq"):
            if p in optimizer.state:
                tensors[f"{moment}.{name}"] = optimizer.state[p][moment].cpu()
    about = {
        "step": str(step),
        "run": json.dumps({k: getattr(args, k) for k in SAVED}),
        "config": json.dumps(model.config.to_hf()),
    }
    write_atomically(out / STATE, lambda tmp: save_file(tensors, tmp, about))
    export(out, model)


def export(out: Path, model: Transformer) -> None:
    """The Hugging Face folder that generate.py and transformers open: the model in bf16."""
    half = copy.deepcopy(model)
    for p in half.parameters():
        p.data = p.data.to(torch.bfloat16)  # the buffers, routing corrections, stay as they are
    save_checkpoint(half, out)


def read_run(out: Path) -> tuple[int, dict[str, Any], ModelConfig]:
    """(steps done, SAVED settings, the model's config) of the checkpoint in OUT."""
    path = out / STATE
    if not path.exists():
        raise ValueError(
            f"--resume: {path} is not there; nothing was saved yet, start without --resume"
        )
    try:
        with safe_open(path, framework="pt") as f:
            about = f.metadata()
        return (
            int(about["step"]),
            json.loads(about["run"]),
            ModelConfig.from_hf(json.loads(about["config"])),
        )
    except Exception as e:  # whatever is wrong with the file, the mend is the same
        raise ValueError(
            f"{path}: cannot be read ({e}); restore the file, or start anew in another --out"
        ) from None


def load_run(out: Path, model: Transformer, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Put the checkpoint's weights and moments into model and optimizer, bit for bit."""
    with safe_open(out / STATE, framework="pt") as f, torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(f.get_tensor(f"weight.{name}"))
        for name, p in model.named_parameters():
            p.copy_(f.get_tensor(f"weight.{name}"))
            if step > 0:
                moments = {
                    m: f.get_tensor(f"{m}.{name}").to(p.device) for m in ("exp_avg", "exp_avg_sq")
                }
                optimizer.state[p] = {"step": torch.tensor(float(step), device=p.device), **moments}


def cut_metrics(path: Path, step: int) -> None:
    """Drop the lines past `step`: steps made after the last save are about to be made again."""
    if path.exists():
        keep = [json.dumps(row) + "\n" for row in read_metrics(path) if row["step"] <= step]
        write_atomically(path, lambda tmp: tmp.write_text("".join(keep)))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a line that a crash left unfinished is not one."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def pyplot() -> Any:
    """matplotlib's, drawing into files. ValueError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib, which is optional: pip install matplotlib"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(out: Path) -> Path:
    """Loss and learning rate of OUT/metrics.jsonl as OUT/metrics.png."""
    path = out / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"--plot: {path} is not there; train first, or name the run with --out")
    draw = pyplot()
    rows = read_metrics(path)
    figure, (top, bottom) = draw.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1))
    top.plot([r["step"] for r in rows], [r["loss"] for r in rows], lw=0.8, label="training loss")
    validated = [r for r in rows if "val_loss" in r]
    top.plot(
        [r["step"] for r in validated],
        [r["val_loss"] for r in validated],
        "o-",
        label="validation loss",
    )
    top.set(ylabel="loss (nats per token)")
    top.legend()
    bottom.plot([r["step"] for r in rows], [r["lr"] for r in rows])
    bottom.set(xlabel="step", ylabel="learning rate")
    figure.tight_layout()
    figure.savefig(out / "metrics.png", dpi=120)
    return out / "metrics.png"


# --------------------------------------------------------------------------------------------------
# The run
# --------------------------------------------------------------------------------------------------


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line, and in .given which flags were on it; ValueError names one out of range."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("--out", type=Path, default=Path("runs/stdlib"), help="folder of the run")
    p.add_argument(
        "--data", help='text file, folder, or JSONL with "text" (default: the standard library)'
    )
    p.add_argument(
        "--model", default="small", metavar="CONFIG", help=f"a config.json, or {', '.join(CONFIGS)}"
    )
    p.add_argument(
        "--init", type=Path, metavar="DIR", help="start from this checkpoint and its tokenizer"
    )
    p.add_argument("--resume", action="store_true", help="go on with the run in --out")
    p.add_argument("--steps", type=int, default=500, help="in all (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    p.add_argument(
        "--batch-size",
        type=int,
        default=8,
        help="sequences in one step, over all ranks (%(default)s)",
    )
    p.add_argument(
        "--micro-batch-size",
        type=int,
        default=2,
        help="sequences in one forward, per rank (%(default)s)",
    )
    p.add_argument("--seq-len", type=int, default=512, help="tokens (%(default)s)")
    p.add_argument("--lr", type=float, default=2e-3, help=f"peak (%(default)s, heads {DRAFT_LR})")
    p.add_argument("--save-every", type=int, default=100)
    p.add_argument("--eval-every", type=int, default=100)
    p.add_argument("--device", help="default: cuda if there is one, else cpu")
    p.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="of the matmuls (autocast). auto: bf16 where the hardware multiplies it, else fp32",
    )
    p.add_argument(
        "--attention",
        choices=("sdpa", "flash"),
        default="sdpa",
        help="flash: attention.py's kernels; on a CPU its plain torch, slower (%(default)s)",
    )
    add_product_flags(p)
    p.add_argument("--compile", action="store_true", help="torch.compile the model")
    p.add_argument("--plot", action="store_true", help="draw OUT/metrics.png and exit")
    args = p.parse_args(argv)
    for name in "steps batch_size micro_batch_size seq_len save_every eval_every lr".split():
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"{_flag(name)} must be positive, not {getattr(args, name)}")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed must be from 0 to 2**32 - 1, not {args.seed}")
    if args.fp8 and args.qat:
        raise ValueError("--fp8 and --qat exclude each other; choose one")
    args.given = {a.split("=")[0] for a in argv if a.startswith("--")}
    settle_draft_head_flags(args)
    return args


def add_product_flags(p: argparse.ArgumentParser) -> None:
    """Those of quantize.py's training, and of speculative.py's."""
    p.add_argument(
        "--fp8",
        choices=tuple(RECIPES),
        help="linear layers multiply in FP8, with scales per tensor, row or block; without FP8 "
        "tensor cores the same numbers, slower",
    )
    p.add_argument(
        "--qat",
        choices=tuple(QAT_GRIDS),
        help="train for generate.py --quantize int8 or int4: every forward rounds the weights so",
    )
    p.add_argument(
        "--train-draft-head",
        action="store_true",
        help="train no model but a head that drafts for that of --init in speculative decoding: "
        f"OUT/{DRAFT_HEAD}",
    )


def settle_draft_head_flags(args: argparse.Namespace) -> None:
    """ValueError for what --train-draft-head cannot go with; its own default for --lr."""
    if not args.train_draft_head:
        return
    if args.init is None:
        raise ValueError("--train-draft-head needs --init, the model that the head is to draft for")
    for flag in ("--model", "--fp8", "--qat"):
        if flag in args.given:
            raise ValueError(f"--train-draft-head trains no model; leave {flag} out")
    if args.resume:
        raise ValueError("--resume: a draft head trains in minutes; start anew in another --out")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("--train-draft-head runs in one process; start it without torchrun")
    if args.seq_len < DRAFTED + 2:
        raise ValueError(f"--seq-len must be at least {DRAFTED + 2} with --train-draft-head")
    if "--lr" not in args.given:
        args.lr = DRAFT_LR


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def settle_args(args: argparse.Namespace) -> int:
    """Fill args from the checkpoint under --resume; refuse what would spoil a run. Returns the
    first step."""
    if not args.resume:
        if (args.out / STATE).exists():
            done = read_run(args.out)[0]
            raise ValueError(
                f"--out {args.out}: holds a run of {done} steps; go on with --resume, or name "
                "another folder"
            )
        held = {path.name for path in args.out.glob("*.safetensors")}
        if held == {DRAFT_HEAD}:
            raise ValueError(f"--out {args.out}: holds a draft head; name another folder")
        if held:
            raise ValueError(
                f"--out {args.out}: holds a model that no run here made; name another folder"
            )
        return 0
    done, run, _ = read_run(args.out)
    for name in SAVED:
        flag, value = _flag(name), getattr(args, name)
        if flag not in args.given:
            setattr(args, name, run.get(name, value))  # a run may be older than a flag
        elif name in FIXED and value != run.get(name):
            raise ValueError(
                f"{flag} {value} differs from the run's {run.get(name)}; leave it out, or start "
                "anew in another --out"
            )
    return done


def find_place(args: argparse.Namespace) -> Place:
    """Pick device and dtype; under torchrun, join the other ranks."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if args.batch_size % world:
        raise ValueError(f"--batch-size {args.batch_size} must be a multiple of the {world} ranks")
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device {name}: not usable here ({str(e).splitlines()[0]})") from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if args.dtype == "auto":
        args.dtype = "bf16" if multiplies_bf16(device) else "fp32"
    return Place(device, args.dtype, rank, world)


def multiplies_bf16(device: torch.device) -> bool:
    """Whether bf16 products are faster than fp32's; on a CPU before AVX-512 they are far slower."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return torch.backends.cpu.get_cpu_capability() not in ("AVX2", "DEFAULT", "NO AVX")


def model_config(args: argparse.Namespace) -> ModelConfig:
    """The shape to train: of OUT under --resume, of --init, or what --model says."""
    if args.resume:
        return read_run(args.out)[2]
    if args.init is not None:
        if not args.init.is_dir():
            raise ValueError(f"--init {args.init}: no such folder")
        return read_config(args.init / "config.json")
    if args.model in CONFIGS or Path(args.model).exists():
        shape = CONFIGS[args.model] if args.model in CONFIGS else read_config(args.model)
        context = max(shape.max_seq_len, args.seq_len)
        return replace(shape, max_seq_len=context, bos_id=BOS, eos_ids=(EOS,))
    raise ValueError(f"--model {args.model}: neither a config.json nor one of {', '.join(CONFIGS)}")


def build_model(args: argparse.Namespace, config: ModelConfig, device: torch.device) -> Transformer:
    """The model to train, in fp32: that of --init, or new, drawn from --seed."""
    if args.init is not None and not args.resume:
        return load_checkpoint(args.init, device, torch.float32).train()
    with torch.device("meta"):
        model = Transformer(config)
    allocate(model, "cpu", torch.float32)
    model.init_weights(torch.Generator().manual_seed(args.seed))  # on the CPU: one seed, one model
    return model.to(device)


def change_products(model: Transformer, args: argparse.Namespace) -> None:
    """--fp8 and --qat: have the model's layers multiply what the flag says, over the parameters
    that they have."""
    if args.fp8:
        fp8_training_(model, args.fp8)
    if args.qat:
        try:
            qat_(model, QAT_GRIDS[args.qat])
        except ValueError as e:
            raise ValueError(
                f"--qat {args.qat}, in groups of 32: {e}; or train --qat int8"
            ) from None


def flops_per_token(model: Transformer, seq_len: int) -> int:
    """Forward and backward: 6 per weight that multiplies (of experts, the K of E that a token
    meets), and 6 * Hq * (D + Dv) per key that a query sees, half the sequence on average, in every
    layer. MFU counts these and no recomputation (PaLM, arXiv:2204.02311, appendix B)."""
    c = model.config
    weights = 0.0
    for p in model.parameters():
        if p.dim() >= 2:
            weights += p.numel() * (c.n_experts_per_token / c.n_experts if p.dim() == 3 else 1)
    if not c.tie_embeddings:
        weights -= model.embed.weight.numel()  # looked up, not multiplied
    weights += c.n_mtp_layers * model.head.weight.numel()  # which multiplies once more
    windows = (c.windows or (None,) * c.n_layers) + (None,) * c.n_mtp_layers
    short = [min(w or seq_len, seq_len) for w in windows]
    keys = sum(w - w * w / (2 * seq_len) for w in short)
    return round(6 * weights + 6 * c.n_heads * (c.head_dim + (c.v_head_dim or c.head_dim)) * keys)


def train(args: argparse.Namespace) -> None:
    """The whole run; every stage is one call."""
    first = settle_args(args)
    place = find_place(args)
    config = model_config(args)
    args.out.mkdir(parents=True, exist_ok=True)
    for leftover in args.out.glob(".*.tmp") if place.rank == 0 else ():
        leftover.unlink()  # of a save that was killed
    if place.rank == 0 and not (args.resume and (args.out / "train.tokens").exists()):
        prepare_tokens(args, config.vocab_size)
    if place.world > 1:
        dist.barrier()  # the other ranks read what rank 0 wrote
    if args.seq_len <= config.n_mtp_layers:
        raise ValueError(
            f"--seq-len must be more than the model's {config.n_mtp_layers} MTP layers"
        )
    train_tokens, val_tokens = open_tokens(args)
    if args.train_draft_head:
        train_draft_head(args, train_tokens, val_tokens, place)
        return
    model = build_model(args, config, place.device)
    change_products(model, args)
    optimizer = build_optimizer(model)
    if args.resume:
        load_run(args.out, model, optimizer, first)
        if place.rank == 0:
            export(args.out, model)  # a crash may have come between the two files of the last save
    if place.rank == 0:
        print(summary(args, model, len(train_tokens), first, place), file=sys.stderr)
    run_steps(args, model, optimizer, train_tokens, val_tokens, first, place)


def run_steps(
    args: argparse.Namespace,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    train_tokens: Tensor,
    val_tokens: Tensor,
    first: int,
    place: Place,
) -> None:
    """Steps first..args.steps, with progress, metrics, validation and checkpoints."""
    B, T, micro = args.batch_size, args.seq_len, args.micro_batch_size
    step_model = torch.compile(model) if args.compile else model
    attend = attend_of(args.attention)
    mine = range(place.rank, B, place.world)
    balance = Balance(model)
    flops, peak = flops_per_token(model, T), peak_flops(place)
    stop = stop_on_signals()
    metrics = open_metrics(args.out, first) if place.rank == 0 else io.StringIO()
    bar = progress(first, args.steps, place)
    for step in bar:
        start = time.perf_counter()
        batch = batch_of(train_tokens, args.seed, step, mine, B, T).to(place.device)
        lr = learning_rate(step, args.steps, args.lr)
        row = {"step": step + 1, **accumulate(step_model, batch, micro, place.autocast, attend)}
        row |= {"grad_norm": update(model, optimizer, lr), "lr": lr}
        refuse_nan(row, args)
        if (worst := balance.update()) is not None:
            row["worst_load"] = round(worst, 3)
        speed = B * T / (time.perf_counter() - start)
        row["tokens_per_second"] = round(speed, 1)

        leaving, done = any_rank(stop, place.device), step + 1 == args.steps
        if (step + 1) % args.eval_every == 0 or done:
            row["val_loss"] = validate(step_model, val_tokens, T, micro, place, attend)
            say(bar, f"step {step + 1}: loss {row['loss']:.4f}, validation {row['val_loss']:.4f}")
        metrics.write(json.dumps(row) + "\n")
        metrics.flush()
        mfu = f", MFU {speed * flops / peak:.1%}" if peak else ""
        bar.set_postfix_str(f"loss {row['loss']:.3f}, {speed:,.0f} tok/s{mfu}", refresh=False)
        if place.rank == 0 and ((step + 1) % args.save_every == 0 or leaving or done):
            save_run(args.out, model, optimizer, step + 1, args)
        if leaving:
            say(bar, f"stopped after step {step + 1}, saved in {args.out}; go on with --resume")
            break


def train_draft_head(
    args: argparse.Namespace, train_tokens: Tensor, val_tokens: Tensor, place: Place
) -> None:
    """All of --train-draft-head, from tokens to file. The model is that of --init in the dtype of
    the matmuls, and gets no gradient."""
    B, T, attend = args.batch_size, args.seq_len, attend_of(args.attention)
    dtype = torch.bfloat16 if place.dtype == "bf16" else torch.float32
    model = load_checkpoint(args.init, place.device, dtype).requires_grad_(False)
    head = new_draft_head(model.config.dim, args.seed).to(place.device)
    print(summary(args, head, len(train_tokens), 0, place), file=sys.stderr)
    model = torch.compile(model) if args.compile else model
    optimizer, stop, acceptance = build_optimizer(head), stop_on_signals(), None
    metrics, bar = open_metrics(args.out, 0), progress(0, args.steps, place)
    for step in bar:
        start, loss = time.perf_counter(), torch.zeros((), device=place.device)
        batch = batch_of(train_tokens, args.seed, step, range(B), B, T)[:, :-1].to(place.device)
        for micro in batch.split(args.micro_batch_size):
            with place.autocast():
                logits = draft_logits(head, model, micro, attend, UNROLLED)
            share = draft_loss(*logits) * len(micro) / B
            share.backward()
            loss += share.detach()
        lr = learning_rate(step, args.steps, args.lr)
        row = {"step": step + 1, "loss": loss.item()}
        row |= {"grad_norm": update(head, optimizer, lr), "lr": lr}
        refuse_nan(row, args)
        row["tokens_per_second"] = round(B * T / (time.perf_counter() - start), 1)

        leaving, done = bool(stop), step + 1 == args.steps
        if (step + 1) % args.eval_every == 0 or done:
            row |= validate_draft_head(head, model, val_tokens, args, place)
            acceptance = row["acceptance"]
            shares = ", ".join(f"{share:.0%}" for share in acceptance)
            say(bar, f"step {step + 1}: validation {row['val_loss']:.4f}, accepted {shares}")
        metrics.write(json.dumps(row) + "\n")
        metrics.flush()
        bar.set_postfix_str(f"loss {row['loss']:.3f}", refresh=False)
        if (step + 1) % args.save_every == 0 or leaving or done:
            save_draft_head(args.out, head, step + 1, acceptance)
        if leaving:
            say(bar, f"stopped after step {step + 1}, saved {args.out / DRAFT_HEAD}")
            break


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


def refuse_nan(row: dict[str, Any], args: argparse.Namespace) -> None:
    """Stop before a run that diverged is saved over its last good checkpoint."""
    if not math.isfinite(row["loss"] + row["grad_norm"]):
        raise ValueError(
            f"step {row['step']}: loss {row['loss']}, gradient norm {row['grad_norm']}; the last "
            f"checkpoint in {args.out} is as it was. Try a lower --lr in another --out"
        )


def say(bar: tqdm, line: str) -> None:
    """Print a line above the progress bar, on rank 0."""
    if not bar.disable:
        bar.write(line, file=sys.stderr)


def peak_flops(place: Place) -> float:
    """Of all ranks together, FLOP/s; 0 where it is not known."""
    if place.device.type != "cuda" or place.dtype != "bf16":
        return 0.0
    return PEAK_FLOPS.get(torch.cuda.get_device_name(place.device), 0.0) * place.world


def stop_on_signals() -> list[int]:
    """A list that the first SIGTERM or Ctrl-C puts a number into; the second acts at once."""
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return caught


def any_rank(caught: list[int], device: torch.device) -> bool:
    """Whether any rank was told to stop: all must leave at the same step."""
    return bool(_all_reduce(torch.tensor(len(caught), device=device)).item())


def open_metrics(out: Path, first: int) -> io.TextIOBase:
    """metrics.jsonl, ready to take the row of step first + 1."""
    cut_metrics(out / "metrics.jsonl", first)
    return open(out / "metrics.jsonl", "a", encoding="utf-8")


def summary(
    args: argparse.Namespace, model: Transformer, n_tokens: int, first: int, place: Place
) -> str:
    """What is about to be trained, in one line."""
    size = sum(p.numel() for p in model.parameters()) / 1e6
    step_tokens = args.batch_size * args.seq_len
    if first >= args.steps:
        return f"{args.out}: all {first} steps are done; --steps makes a run longer"
    epochs = args.steps * step_tokens / n_tokens
    products = f", FP8 {args.fp8}" if args.fp8 else f", QAT {args.qat}" if args.qat else ""
    return (
        f"{size:.2f}M parameters on {n_tokens / 1e6:.2f}M tokens, {args.steps} steps of "
        f"{step_tokens} ({epochs:.1f} epochs) from step {first}, {args.dtype}{products} on "
        f"{place.device}"
    )


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse_args(sys.argv[1:] if argv is None else argv)
        if args.plot:
            print(plot(args.out))
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
