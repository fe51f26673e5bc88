"""train.py: train a Llama- or DeepSeek-style model from text, on one process or under torchrun.

    python train.py                              the standard library's source -> runs/stdlib
    python train.py --data FILE.jsonl --model small --steps 2000 --out runs/mine
    torchrun --nproc-per-node 2 train.py ...     the same steps, each rank a share of every batch
    python train.py --train-draft-head --init checkpoints/small --out runs/head
                                                 a draft head for speculative decoding with it
    python train.py --init checkpoints/small --upcycle 8 --out runs/mixture
                                                 8 experts in place of every MLP, each its copy
    torchrun --nproc-per-node 8 train.py --tp 2 --cp 2 --zero 3 ...
                                                 matrices over two ranks, sequences over two, and
                                                 what is left over the two with other batches
    torchrun --nproc-per-node 4 train.py --model small-moe --ep 2 ...
                                                 experts shared out over every two ranks
    python train.py --diloco 100 --diloco-at FOLDER --diloco-workers 4 --diloco-worker 0 --out RUN0
                                                 and 1, 2, 3 elsewhere: workers that meet in each
                                                 100th step, and may come and go (diloco.py)

A run, in order: read the documents; train a tokenizer on them; write them as token files; then per
step take a batch, accumulate gradients over micro-batches, clip, AdamW; now and then validate and
save. OUT is a Hugging Face folder (config.json, model.safetensors in bf16, tokenizer.model) that
generate.py and transformers open, beside train_state.safetensors (fp32 weights, Adam moments,
step) and metrics.jsonl. --fp8 and --qat change what a step multiplies, not what is saved.
--train-draft-head leaves the model as it is and trains what foretells it: OUT then holds no model
but draft_head.safetensors.

Four things hold, and test_all.py proves them:

- The batch is a pure function of (seed, step, sample index). No loader has a state, so a run
  resumed with --resume prints the losses of an uninterrupted one to the last digit (on CPU).
- The loss of a step is the mean over its *tokens*: every micro-batch's sum is divided by the count
  of the whole step, on all ranks, so micro-batch size and rank count change nothing but rounding.
- Layouts (--tp --cp --ep --zero ..., layout.py) change nothing but rounding either: one seed is
  the same weights and batches under each, and the checkpoint goes on under any other. (But for
  --aux-loss, which is one of each micro-batch.)
- A checkpoint appears whole or not at all. SIGTERM and Ctrl-C save and leave; kill -9 at any moment
  leaves the previous one.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import hashlib
import io
import json
import math
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

import moe
from attention import as_attend
from diloco import DiLoCo, Workers
from layout import IGNORE, Layout
from layout import add_flags as add_layout_flags
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
    tokens: Tensor, seed: int, step: int, indices: Iterable[int], batch_size: int, seq_len: int
) -> Tensor:
    """Samples `indices` of the batch of `step`: (as many, seq_len + 1), inputs and targets
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


ALONE = Layout()  # one process


def attend_of(attention: str) -> Attend:
    """The model's attend argument for that kind of attention."""
    return as_attend() if attention == "flash" else causal_attention


def loss_sums(
    model: Transformer, batch: Tensor, attend: Attend = causal_attention, layout: Layout = ALONE
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropies of batch (B, T + 1), in nats: of the next token, and of those further
    ahead, the mean over the model's multi-token prediction depths (0 without any). Of the tokens
    that `layout` gives this rank."""
    tokens, at = batch.clamp(min=0), layout.positions(batch.shape[1] - 1, batch.device)
    inputs, targets = tokens[:, :-1], batch[:, 1:]
    if at is not None:
        inputs, targets = inputs[:, at], targets[:, at]
    if not model.mtp:
        main = layout.cross_entropy(model(inputs, at, attend=attend), targets)
        return main, torch.zeros_like(main)
    hidden = model(inputs, at, attend=attend, return_hidden=True)
    ahead = hidden.new_zeros((), dtype=torch.float32)
    main = layout.cross_entropy(model.head(hidden), targets)
    for depth in range(len(model.mtp)):
        following = tokens[:, 1 + depth : -1]
        hidden = model.predict_further(hidden[:, :-1], following, None, attend, depth)
        ahead = ahead + layout.cross_entropy(model.head(hidden), batch[:, 2 + depth :])
    return main, ahead / max(1, len(model.mtp))


def accumulate(
    model: torch.nn.Module,
    batch: Tensor,
    micro_batch_size: int,
    autocast: Callable[[], Any] = contextlib.nullcontext,
    attend: Attend = causal_attention,
    balance: Balance | None = None,
    layout: Layout = ALONE,
) -> dict[str, float]:
    """Leave in .grad the gradient of the mean loss over all the step's tokens (and MTP_WEIGHT times
    that of predicting further, and the auxiliary losses of `balance`); return those losses.

    The divisor is the token count of the whole step (all micro-batches, all ranks), known before
    the first backward. A mean of micro-batch means would weigh a token by how few stand beside it.
    An auxiliary loss is a mean over routed tokens, of which all rows have the same number: it
    counts by the share of the step's rows.
    """
    tp, cp = layout.size("tp"), layout.size("cp")
    count = layout.total((batch[:, 1:] != IGNORE).sum()) // (cp * layout.size("pp"))
    rows = len(batch) * layout.batch_shares * cp
    if layout.stages is not None:
        how = autocast, attend, balance, layout
        totals = layout.stages.accumulate(model, batch, count, rows, *how)
    else:
        totals = torch.zeros(3, device=batch.device)
        for micro in layout.micro_batches(model, batch, micro_batch_size):
            if balance is not None:
                balance.watching = True
            with autocast():
                main, ahead = (loss / count for loss in loss_sums(model, micro, attend, layout))
            aux = main.new_zeros(()) if balance is None else balance.take() * (len(micro) / rows)
            # the gradients of a mixture's inputs are added up over tp: of this loss, each is all
            (main + MTP_WEIGHT * ahead + aux / tp).backward()
            totals += torch.stack((main, ahead, aux)).detach()
    layout.sum_gradients(model)
    main, ahead, aux = layout.total(totals).tolist()
    losses = {"loss": main} | ({"mtp_loss": ahead} if len(model.mtp) else {})
    return losses | ({"aux_loss": aux} if balance is not None and balance.auxiliary else {})


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


def build_optimizer(model: torch.nn.Module, layout: Layout = ALONE) -> Any:
    """AdamW (arXiv:1711.05101), decay on matrices and embeddings, none on norms and biases."""
    groups: dict[Any, list[nn.Parameter]] = {(True, None): [], (False, None): []}
    for p in model.parameters():  # a fused step is of tensors on one mesh
        groups.setdefault((p.dim() >= 2, getattr(p, "device_mesh", None)), []).append(p)
    settings = [
        {"params": params, "weight_decay": 0.1 if decays else 0.0}
        for (decays, _), params in groups.items()
    ]
    how = dict(lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    return layout.optimizer(settings, partial(torch.optim.AdamW, **how))


def update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, lr: float, layout: Layout = ALONE
) -> float:
    """Clip the gradient of the whole model to norm 1, take the optimizer's step, clear the
    gradient; the norm before clipping."""
    norm = layout.clip(model, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
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
    layout: Layout = ALONE,
) -> float:
    """Mean loss over the held_out_batches, the same ones on all ranks."""
    batches = [*held_out_batches(tokens, seq_len, micro_batch_size, place.device)]
    total, count = 0.0, sum(batch[:, 1:].numel() for batch in batches)
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
    """Up to 65,536 held-out tokens as (micro_batch_size or fewer, seq_len + 1): windows spread
    evenly, always the same ones."""
    n = (len(tokens) - 1) // seq_len
    picked = min(n, max(1, 65536 // seq_len))
    starts = [i * n // picked * seq_len for i in range(picked)]
    for i in range(0, picked, micro_batch_size):
        rows = [tokens[s : s + seq_len + 1] for s in starts[i : i + micro_batch_size]]
        yield torch.stack(rows).long().to(device)


# --------------------------------------------------------------------------------------------------
# Experts from an MLP
# --------------------------------------------------------------------------------------------------


def upcycled_config(dense: ModelConfig, args: argparse.Namespace) -> ModelConfig:
    """--upcycle: the config of the mixture, in the family that can say it. ValueError for a model
    that no mixture of ours is a copy of."""
    what = "is a mixture of experts already" if dense.moe_layers else ""
    what = what or ("has mlp_bias, which experts have not" if dense.mlp_bias else "")
    what = what or ("has multi-token prediction layers" if dense.n_mtp_layers else "")
    if what:
        raise ValueError(f"--upcycle: --init {args.init} {what}; give it a plain dense model")
    mixture = dict(moe_layers=tuple(range(dense.n_layers)), n_experts=args.upcycle)
    mixture |= dict(n_experts_per_token=args.upcycle_top_k, expert_ffn_dim=dense.ffn_dim)
    mixture |= dict(scoring="softmax", correction_bias=False, n_groups=1, topk_groups=1)
    mixture |= dict(group_score_topk=1, n_shared_experts=0, routed_scaling=1.0)
    mixture |= dict(norm_topk=True)  # equal experts, their weights summing to 1, are the MLP
    for family in ("mixtral", "qwen3_moe"):
        with contextlib.suppress(ValueError):
            config = replace(dense, family=family, **mixture)
            config.to_hf()
            return config
    return replace(dense, family="sheaf", **mixture)


@torch.no_grad()
def upcycle_(model: Transformer, config: ModelConfig, seed: int) -> Transformer:
    """Sparse upcycling (arXiv:2212.05055): every MLP becomes the mixture of `config`, whose experts
    are its copies and whose router is drawn small. The model computes what it did."""
    rng = torch.Generator().manual_seed(seed)
    for block in model.layers:
        with torch.device("meta"):
            mixture = MoE(config)
        gate, up, down = (p.weight for p in block.mlp.children())
        gate_up, down = moe.upcycled(gate, up, down, config.n_experts)
        router = torch.empty(mixture.router.shape).normal_(0.0, 0.02, generator=rng)
        mixture.router = nn.Parameter(router.to(gate.device))
        mixture.w_gate_up, mixture.w_down = nn.Parameter(gate_up), nn.Parameter(down)
        block.mlp = mixture
    model.config = config
    return model


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
MOMENTS = ("exp_avg", "exp_avg_sq")
# --resume takes these from the checkpoint. Those in FIXED decide what is learned and stay; others
# may be given anew (another micro-batch size sums in another order: equal but for rounding).
LOSSES = ("aux_loss", "sequence_loss", "z_loss")
OUTER = ("diloco", "outer_lr", "outer_momentum")
FIXED = ("seed", "batch_size", "seq_len", "lr", "data", "dtype", "fp8", "qat", *LOSSES, *OUTER)
SAVED = (*FIXED, "steps", "micro_batch_size", "save_every", "eval_every", "compile", "attention")
SAVED += ("experts", "diloco_at", "diloco_workers", "diloco_worker", "diloco_timeout")


def save_run(
    out: Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    step: int,
    args: argparse.Namespace,
    layout: Layout = ALONE,
    island: Island | None = None,
) -> None:
    """Write OUT: first all that --resume needs, in one file; then the Hugging Face folder in
    bf16. All ranks call this, and the first writes."""
    tensors, writes = {}, not dist.is_initialized() or dist.get_rank() == 0

    weights = layout.wholes(dict(model.named_parameters()))
    buffers = layout.wholes(dict(model.named_buffers()), buffers=True)
    weights = ((name, "weight", x) for name, x in chain(weights, buffers))
    moments = layout.moments(model, optimizer, MOMENTS)
    for name, key, x in chain(weights, moments):  # each of them made by all ranks together
        if writes:
            tensors[f"{key}.{name}"] = x.cpu()
    if not writes:
        return
    about = {
        "step": str(step),
        "run": json.dumps({k: getattr(args, k) for k in SAVED}),
        "config": json.dumps(model.config.to_hf()),
    }
    if island is not None:
        held = island.outer.state_dict()
        tensors["outer.state"] = held.pop("state").cpu()
        about["outer"] = json.dumps(held)
    write_atomically(out / STATE, lambda tmp: save_file(tensors, tmp, about))
    export(out)


def export(out: Path) -> None:
    """The Hugging Face folder that generate.py and transformers open: STATE's model in bf16, but
    for its buffers, the routing corrections."""
    with torch.device("meta"):
        half = Transformer(read_run(out)[2])
    with safe_open(out / STATE, framework="pt") as f:
        tensors = {name: f.get_tensor(f"weight.{name}") for name, _ in half.named_buffers()}
        for name, _ in half.named_parameters():
            tensors[name] = f.get_tensor(f"weight.{name}").to(torch.bfloat16)
    half.load_state_dict(tensors, strict=False, assign=True)
    half.tie()
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


def load_run(
    out: Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    step: int,
    layout: Layout = ALONE,
) -> None:
    """Put the checkpoint's weights and moments into model and optimizer, bit for bit."""
    states: dict[nn.Parameter, dict[str, Tensor]] = {}
    with safe_open(out / STATE, framework="pt") as f, torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(f.get_tensor(f"weight.{name}"))
        for name, p in model.named_parameters():
            stored = layout.stored(name)
            layout.put(name, p, f.get_tensor(f"weight.{stored}"))
            if step > 0:
                moments = {m: torch.empty_like(p) for m in MOMENTS}
                for moment, x in moments.items():
                    layout.put(name, x, f.get_tensor(f"{moment}.{stored}"))
                states[p] = {"step": torch.tensor(float(step), device=p.device), **moments}
    if layout.buckets is None:
        optimizer.state.update(states)
    elif states:
        optimizer.load_state(states)


class Island:
    """--diloco: this worker among the others. Of several ranks the first one meets these, with
    whole weights on the CPU, so that any layout will do and all its ranks are in the same rounds.
    Routing corrections stay each worker's own."""

    def __init__(self, args: argparse.Namespace, model: Transformer, layout: Layout, place: Place):
        self.model, self.layout, self.place = model, layout, place
        self.every, self.first = args.diloco, place.rank == 0
        self.whole = None if layout.mesh is None else {}  # {} on other ranks than the first
        self.collect()
        if self.first:
            tokenizer = hashlib.sha256((args.out / "tokenizer.model").read_bytes()).hexdigest()[:8]
            same = ("seed", "batch_size", "seq_len", "steps", "lr", "diloco_workers")
            about = {_flag(name): getattr(args, name) for name in same} | {"tokenizer": tokenizer}
            here = args.diloco_at, args.diloco_worker, args.diloco_workers
            self.workers = Workers(*here, timeout=args.diloco_timeout, about=about)
            params = model.parameters() if self.whole is None else self.whole.values()
            outer = dict(every=args.diloco, lr=args.outer_lr, momentum=args.outer_momentum)
            self.outer = DiLoCo(params, self.workers, device="cpu", **outer)

    def load(self, out: Path) -> None:
        if self.first:
            with safe_open(out / STATE, framework="pt") as f:
                about = json.loads(f.metadata()["outer"])
                self.outer.load_state_dict({"state": f.get_tensor("outer.state"), **about})

    def begin(self, step: int) -> int:
        """The step to begin with: `step`, or if the run is elsewhere, where it will be."""
        late = self.first and self.workers.begin(self.outer.round)
        return self.meet(join=True)["step"] if self.shared(late) else step

    def after(self, step: int) -> dict[str, Any]:
        """After `step`: {} or, of the meeting that it ends in, what there is to be said."""
        if (step + 1) % self.every == 0:
            return self.meet()
        if self.first:
            self.outer.step()
        return {}

    def meet(self, join: bool = False) -> dict[str, Any]:
        model, layout, said = self.model, self.layout, None
        self.collect()
        if self.first:
            met = self.outer.join() if join else self.outer.step()
            said = {"step": self.outer.round * self.every, "round": met.number}
            said |= {"workers": met.workers, "sent_bytes": met.sent}
        here = dict(model.named_parameters())
        shapes = {} if self.whole is None else layout.shapes(model)
        for name, shape in shapes.items():
            whole = self.whole[name] if self.first else torch.empty(shape)
            dist.broadcast(whole := whole.to(self.place.device), 0)
            layout.put_stored(here, name, whole)
        return self.shared(said)

    @torch.no_grad()
    def collect(self) -> None:
        """Into the first rank's whole weights, what all have."""
        here = {} if self.whole is None else dict(self.model.named_parameters())
        for name, x in self.layout.wholes(here) if here else ():
            if self.first:
                self.whole.setdefault(name, torch.empty(x.shape)).copy_(x)

    def shared(self, x: Any) -> Any:
        """The first rank's."""
        if self.whole is None:
            return x
        dist.broadcast_object_list(box := [x], 0, device=self.place.device)
        return box[0]

    def close(self) -> None:
        if self.first:
            self.workers.close()


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
    """Loss, learning rate and experts' load of OUT/metrics.jsonl as OUT/metrics.png."""
    path = out / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"--plot: {path} is not there; train first, or name the run with --out")
    draw = pyplot()
    rows = read_metrics(path)
    heights = (3, 1, 1.5, 1.5) if any("worst_load" in r for r in rows) else (3, 1)
    more = dict(figsize=(8, 1.5 * sum(heights)), height_ratios=heights)
    figure, (top, bottom, *mixtures) = draw.subplots(len(heights), **more)
    top.sharex(bottom)
    top.label_outer()
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
    if mixtures:
        plot_experts(figure, *mixtures, rows)
    figure.tight_layout()
    figure.savefig(out / "metrics.png", dpi=120)
    return out / "metrics.png"


def plot_experts(figure: Any, line: Any, heat: Any, rows: list[dict[str, Any]]) -> None:
    """The balance of all steps, and every expert's load in the last step that has it."""
    rows = [r for r in rows if "worst_load" in r]
    steps, right = [r["step"] for r in rows], line.twinx()
    dead = f"busiest expert ({rows[-1].get('dead_experts', 0)} without a token in the last step)"
    line.plot(steps, [r["worst_load"] for r in rows], lw=0.8, label=dead)
    line.set(xlabel="step", ylabel="load / mean")
    entropy = [r.get("load_entropy", math.nan) for r in rows]  # a run may be older than it
    right.plot(steps, entropy, "C1", lw=0.8, label="entropy")
    right.set(ylabel="entropy / log E")
    right.legend(handles=[*line.lines, *right.lines], loc="center right")
    loads = [(r["step"], r["expert_load"]) for r in rows if "expert_load" in r]
    step, load = loads[-1] if loads else (0, [[0]])
    shares = [[n * len(layer) / max(1, sum(layer)) for n in layer] for layer in load]
    image = heat.imshow(shares, aspect="auto", vmin=0, vmax=2, cmap="coolwarm")
    heat.set(xlabel="expert", ylabel="mixture", title=f"load / mean, step {step}")
    figure.colorbar(image, ax=heat)


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
    add_expert_flags(p)
    add_layout_flags(p)
    add_diloco_flags(p)
    p.add_argument("--compile", action="store_true", help="torch.compile the model")
    p.add_argument("--plot", action="store_true", help="draw OUT/metrics.png and exit")
    args = p.parse_args(argv)
    check_numbers(args)
    if args.fp8 and args.qat:
        raise ValueError("--fp8 and --qat exclude each other; choose one")
    if args.world_size is not None and not args.dry_run:
        raise ValueError("--world-size goes with --dry-run; torchrun starts the ranks of a run")
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


def add_expert_flags(p: argparse.ArgumentParser) -> None:
    """Those of mixtures of experts."""
    p.add_argument(
        "--experts",
        choices=("grouped", "loop"),
        default="grouped",
        help="of mixtures: moe.py's grouped products, or one expert after the other (%(default)s); "
        "--fp8 has a loop of its own, whichever is said here",
    )
    loss = partial(p.add_argument, type=float, metavar="COEF")
    loss("--aux-loss", help="Switch's, for even loads (0.01 without a routing correction, else 0)")
    loss("--sequence-loss", default=0.0, help="DeepSeek-V3's, for even loads in a sequence (0)")
    loss("--z-loss", default=0.0, help="ST-MoE's, for small router logits (0)")
    number = partial(p.add_argument, type=int)
    number("--upcycle", metavar="E", help="each MLP of --init becomes a mixture of so many copies")
    number("--upcycle-top-k", default=2, help="experts per token (%(default)s)")


def add_diloco_flags(p: argparse.ArgumentParser) -> None:
    """Those of diloco.py; each worker is a program of its own, with an --out of its own."""
    number = partial(p.add_argument, type=int)
    number("--diloco", metavar="H", help="meet other workers in each H-th step, and in no other")
    p.add_argument(
        "--diloco-at",
        metavar="WHERE",
        help="a folder that all workers write to, or HOST:PORT of `python diloco.py --serve`",
    )
    number("--diloco-workers", default=1, metavar="N", help="that share every batch out (1)")
    number("--diloco-worker", default=0, metavar="I", help="which one this is (0)")
    real = partial(p.add_argument, type=float)
    real("--diloco-timeout", default=60.0, help="seconds to wait for a worker (%(default)s)")
    real("--outer-lr", default=0.7, help="of SGD on what workers moved by (%(default)s)")
    real("--outer-momentum", default=0.9, help="its Nesterov momentum (%(default)s)")


def settle_diloco_flags(args: argparse.Namespace, shares: int) -> None:
    """ValueError for flags of --diloco that do not fit each other, or a batch of which a worker's
    part is `shares` ranks'."""
    given = args.given & {_flag(k) for k in SAVED if k.startswith(("diloco_", "outer_"))}
    if args.diloco is None and given:
        raise ValueError(f"{min(given)} goes with --diloco; give both, or leave it out")
    if args.diloco is None:
        return
    if args.diloco_at is None:
        raise ValueError("--diloco needs --diloco-at, where workers find each other")
    if not 0 <= args.diloco_worker < args.diloco_workers:
        raise ValueError(
            f"--diloco-worker must be from 0 to {args.diloco_workers - 1}, not {args.diloco_worker}"
        )
    if not 0 <= args.outer_momentum < 1:
        raise ValueError(f"--outer-momentum must be from 0 to 1, not {args.outer_momentum}")
    if args.steps % args.diloco:
        raise ValueError(f"--steps {args.steps} must be a multiple of --diloco {args.diloco}")
    if args.batch_size % (args.diloco_workers * shares):
        raise ValueError(
            f"--batch-size {args.batch_size} must be a multiple of the {args.diloco_workers} "
            f"workers x {shares} ranks of one with batches of their own"
        )


def check_numbers(args: argparse.Namespace) -> None:
    """ValueError for a number that is out of range."""
    positive = "steps batch_size micro_batch_size seq_len save_every eval_every lr upcycle "
    layout = "dp dp_replicate pp pp_chunks tp cp cp_ulysses ep ep_node_size ep_chunks world_size "
    layout += "zero_node_size diloco diloco_workers diloco_timeout outer_lr"
    for name in (positive + "upcycle_top_k " + layout).split():
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            raise ValueError(f"{_flag(name)} must be positive, not {value}")
    for name in LOSSES:
        if (value := getattr(args, name)) is not None and not 0 <= value < math.inf:
            raise ValueError(f"{_flag(name)} must be 0 or more, not {value}")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed must be from 0 to 2**32 - 1, not {args.seed}")
    if args.upcycle is not None and not 2 <= args.upcycle_top_k <= args.upcycle:
        raise ValueError(  # of one the weight is always 1, and its router would learn nothing
            f"--upcycle-top-k must be from 2 to --upcycle {args.upcycle}, not {args.upcycle_top_k}"
        )
    if args.upcycle is not None and args.init is None and not args.resume:
        raise ValueError("--upcycle needs --init, the dense model that the experts are copies of")


def settle_expert_flags(args: argparse.Namespace, config: ModelConfig) -> None:
    """The default of --aux-loss; ValueError for flags that a dense model has no use for."""
    asked = [name for name in LOSSES if getattr(args, name)] + ["ep"] * (args.ep > 1)
    if asked and not config.moe_layers:
        raise ValueError(f"{_flag(asked[0])}: the model has no mixture of experts; leave it out")
    for flag, needed in (
        ("--ep-chunks", "--ep"), ("--ep-node-size", "--ep"), ("--upcycle-top-k", "--upcycle"),
        ("--cp-method", "--cp"), ("--cp-ulysses", "--cp"), ("--no-sequence-parallel", "--tp"),
        ("--async-tp", "--tp"),
    ):  # fmt: skip
        if flag in args.given and needed not in args.given:
            raise ValueError(f"{flag} goes with {needed}; give both, or leave it out")
    if args.resume and args.upcycle is not None:
        raise ValueError("--upcycle starts a run; with --resume leave it out")
    if args.aux_loss is None:  # a run that is older than the flag had none
        uneven = config.moe_layers and not config.correction_bias and not args.resume
        args.aux_loss = 0.01 if uneven else 0.0


def settle_draft_head_flags(args: argparse.Namespace) -> None:
    """ValueError for what --train-draft-head cannot go with; its own default for --lr."""
    if not args.train_draft_head:
        return
    if args.init is None:
        raise ValueError("--train-draft-head needs --init, the model that the head is to draft for")
    for flag in ("--model", "--fp8", "--qat", "--upcycle", "--diloco", *map(_flag, LOSSES)):
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
    """The model to train, in fp32: that of --init, or new, drawn from --seed; of it what `layout`
    gives this rank. Weights are drawn on the CPU: one seed, one model."""
    drawn = args.init is None or args.resume
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
    change_products(model, args)
    layout.finish_(model, torch.bfloat16 if place.dtype == "bf16" else None)
    if late:
        model.to_empty(device=place.device)
        if layout.stages is None:
            model.tie()
        if not args.resume:
            layout.draw_(model, args.seed)
    return model.to(place.device).train()


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


def flops_per_token(model: Transformer, seq_len: int) -> int:
    """Forward and backward: 6 per weight that multiplies (of experts, the K of E that a token
    meets), and 6 * Hq * (D + Dv) per key that a query sees, half the sequence on average, in every
    layer. MFU counts these and no recomputation (PaLM, arXiv:2204.02311, appendix B)."""
    c = model.config
    weights = 0.0
    for p in model.parameters():
        if p.dim() >= 2:
            stack = p.dim() == 3  # of experts
            weights += c.n_experts_per_token * p[0].numel() if stack else p.numel()
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
    settle_expert_flags(args, config)
    layout = Layout(args, config, place.world, place.device.type)
    settle_diloco_flags(args, layout.batch_shares)
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
    model = build_model(args, config, place, layout)
    optimizer = build_optimizer(model, layout)
    if args.resume:
        load_run(args.out, model, optimizer, first, layout)
        if place.rank == 0:
            export(args.out)  # a crash may have come between the two files of the last save
    if place.rank == 0:
        print(summary(args, meta_model(config), len(train_tokens), first, place), file=sys.stderr)
        if layout.mesh is not None:
            print(layout.mesh, file=sys.stderr)
    run = args, model, optimizer, train_tokens, val_tokens, first, place, layout
    if args.diloco is None:
        run_steps(*run)
        return
    island = Island(args, model, layout, place)
    if args.resume:
        island.load(args.out)
    try:
        run_steps(*run, island)
    finally:
        island.close()


def run_steps(
    args: argparse.Namespace,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    train_tokens: Tensor,
    val_tokens: Tensor,
    first: int,
    place: Place,
    layout: Layout = ALONE,
    island: Island | None = None,
) -> None:
    """Steps first..args.steps, with progress, metrics, validation and checkpoints."""
    B, T, micro = args.batch_size // args.diloco_workers, args.seq_len, args.micro_batch_size
    step_model = compiled(model) if args.compile and layout.mesh is None else model
    attend = layout.attend(attend_of(args.attention))
    mine = [args.diloco_worker * B + i for i in layout.samples(B)]
    losses = dict(aux=args.aux_loss, seq=args.sequence_loss, z=args.z_loss)
    balance = Balance(model, **losses, layout=layout)
    flops, peak = flops_per_token(meta_model(model.config), T), peak_flops(place)
    stop = stop_on_signals()
    metrics = open_metrics(args.out, first) if place.rank == 0 else io.StringIO()
    bar, at = progress(first, args.steps, place), first if island is None else island.begin(first)
    for step in bar:
        if step < at:  # the others have made it without this worker
            continue
        start = time.perf_counter()
        batch = batch_of(train_tokens, args.seed, step, mine, args.batch_size, T).to(place.device)
        lr = learning_rate(step, args.steps, args.lr)
        losses = accumulate(step_model, batch, micro, place.autocast, attend, balance, layout)
        row = {"step": step + 1, **losses}
        row |= {"grad_norm": update(model, optimizer, lr, layout), "lr": lr}
        refuse_nan(row, args)
        balance.update(layout)
        row |= balance.row
        speed = B * T / (time.perf_counter() - start)
        row["tokens_per_second"] = round(speed, 1)
        if island is not None:
            row |= island.after(step)
            at, step = row["step"], row["step"] - 1

        leaving, done = any_rank(stop, place.device), step + 1 == args.steps
        if (step + 1) % args.eval_every == 0 or done:
            row["val_loss"] = validate(step_model, val_tokens, T, micro, place, attend, layout)
            row |= {"expert_load": balance.last.tolist()} if balance.row else {}
            say(bar, f"step {step + 1}: loss {row['loss']:.4f}, validation {row['val_loss']:.4f}")
        metrics.write(json.dumps(row) + "\n")
        metrics.flush()
        mfu = f", MFU {speed * flops / peak:.1%}" if peak else ""
        bar.set_postfix_str(f"loss {row['loss']:.3f}, {speed:,.0f} tok/s{mfu}", refresh=False)
        if (step + 1) % args.save_every == 0 or leaving or done:
            save_run(args.out, model, optimizer, step + 1, args, layout, island)
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
    change_products(model, args)  # no more than --experts
    head = new_draft_head(model.config.dim, args.seed).to(place.device)
    print(summary(args, head, len(train_tokens), 0, place), file=sys.stderr)
    model = compiled(model) if args.compile else model
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
    told = torch.tensor(len(caught), device=device)
    if dist.is_initialized():
        dist.all_reduce(told)
    return bool(told.item())


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
