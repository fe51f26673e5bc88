"""LoRA fine-tuning in the steps of an Engine, on the tokens that its requests leave unused.

    python generate.py --serve --checkpoint DIR --finetune JOB.json       also with --batch

JOB.json is {"data": ["notes.txt"], "out": "runs/notes"} and, optionally, other fields of
FinetuneJob. The adapter is written to `out` in PEFT's format; requests see the base model. `out` is
a folder without a model or adapter: a job is not resumed. One process writes it at a time.

A step of continuous batching has a budget of tokens (--max-num-batched-tokens), which bounds its
time, and requests seldom use all of it: decoding needs one token each. FlexLLM (Miao et al.,
arXiv:2402.18789) fills the rest with windows of a fine-tuning sequence (serving/token_windows.py).
A window costs its tokens in the forward pass and again in the backward pass, which with LoRA has no
gradients of the frozen weights and so takes about as long. Requests come first: fine-tuning gets
what they leave, and none of it where they use the whole budget; it runs when a step's tokens have
been delivered. So no step and what follows it exceed the budget, and a request waits for one full
step at most, as behind another request's prompt.

Gain: fine-tuning with the weights that are in memory anyway, in time that is otherwise unused.
Cost: steps that are as long as the budget allows; activations of one sequence. When it loses: where
time between tokens matters more than use of the device (then lower --max-num-batched-tokens), and
under full load, where it does not advance.

Equivalence (test_all.py): the adapter == that of whole sequences, within 1e-5; the requests'
tokens are the same bits; every step is within its budget. Hook: Engine.background. Part of
generate.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from huggingface.tokenizer import Tokenizer, one_line
from huggingface.weights import hf_modules
from model import Transformer, dense_attention
from serving.token_windows import TokenWindows
from training.data import delimit, document_delimiters, get_batch, read_documents
from training.lora import adapter_parameters, apply_lora_, save_adapters
from training.optimizers import learning_rate
from training.state import CHECKPOINTS
from training.writer_lock import writer_lock


@dataclass(frozen=True)
class FinetuneJob:
    """What --finetune reads. A step is one update, of batch_size sequences of seq_len tokens;
    window: tokens per forward or backward pass at most; alpha None: 2 x rank."""

    data: list[str]  # as of train.py --data
    out: str
    rank: int = 16
    alpha: float | None = None
    lr: float = 2e-4
    steps: int = 100
    batch_size: int = 8
    seq_len: int = 512
    window: int = 64
    seed: int = 0

    @classmethod
    def read(cls, path: Path) -> FinetuneJob:
        """ValueError names the file and the field."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise ValueError(f"--finetune {path}: not a JSON file ({e})") from None
        known = {f.name: f for f in fields(cls)}
        is_job = isinstance(values, dict) and {"data", "out"} <= values.keys() <= known.keys()
        if not is_job:
            names = ", ".join(known)
            raise ValueError(f"--finetune {path}: must be an object with data, out, and of {names}")
        for name, x in values.items():
            kind = "seed" if name == "seed" else known[name].type.split()[0]
            is_valid, text = VALID[kind]
            if not is_valid(x):
                raise ValueError(f"--finetune {path}: {name} must be {text}, not {x!r}")
        return cls(**values)


def _is_path(x: Any) -> bool:
    return isinstance(x, str) and bool(x)


def _is_number(x: Any, kind: Any = int) -> bool:
    return isinstance(x, kind) and not isinstance(x, bool) and 0 <= x < float("inf")


VALID = {  # type of a field -> (check, text)
    "list[str]": (lambda x: isinstance(x, list) and x and all(map(_is_path, x)), "a list of paths"),
    "str": (_is_path, "a path"),
    "int": (lambda x: _is_number(x) and x > 0, "an integer above 0"),
    "float": (lambda x: _is_number(x, (int, float)) and x > 0, "a number above 0"),
    "seed": (lambda x: _is_number(x) and x < 2**32, "an integer from 0 to 2**32 - 1"),
}


def with_adapters(model: Transformer, job: FinetuneJob) -> Transformer:
    """A model with new adapters over the same weights."""
    with torch.device("meta"):
        twin = Transformer(model.config)
    twin.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    for module in twin.modules():
        if hasattr(module, "absorb_up_to"):
            module.absorb_up_to = 0  # one form of MLA for windows of all sizes
    return apply_lora_(twin, job.rank, job.alpha or 2 * job.rank, seed=job.seed)


def attention(spec: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """TokenWindows' attention: of the last tokens to all keys."""
    keys = torch.arange(k.shape[1], device=k.device)
    return dense_attention(spec, q, k.transpose(1, 2), v.transpose(1, 2), positions, keys)


class FineTuner:
    """The job of --finetune: a call works for at most as many tokens as it is given."""

    def __init__(self, model: Transformer, job: FinetuneJob, tokens: Tensor, base: str = ""):
        """tokens (n,): the training text; base: the model's name in the adapter."""
        if model.embed.weight.dtype == torch.float16:
            raise ValueError("--finetune: fp16 weights need loss scaling; use --dtype bf16 or fp32")
        if len(tokens) <= job.seq_len:
            few = f"{len(tokens)} tokens of data are too few for seq_len {job.seq_len}"
            raise ValueError(f"--finetune: {few}; give more text, or reduce seq_len")
        self.model, self.job, self.tokens = with_adapters(model, job), job, tokens
        self.base, self.lock = base, ExitStack()  # of job.out, released by save()
        self.parameters = [*adapter_parameters(self.model).values()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=job.lr, betas=(0.9, 0.95))
        self.device, self.updates, self.losses = model.embed.weight.device, 0, []
        self.work = self._run()
        self.needed = next(self.work)

    @property
    def finished(self) -> bool:
        return self.needed == 0

    @torch.inference_mode(False)
    @torch.enable_grad()
    def __call__(self, budget: int) -> int:
        """Returns the tokens that were run, forward or backward."""
        left = budget
        while not self.finished and left >= self.needed:
            left -= self.work.send(left)
            self.needed = next(self.work)
        return budget - left

    def _run(self) -> Iterator[int]:
        """A generator: yields the tokens that the next pass needs, is sent a budget, and yields
        the tokens that it used."""
        for step in range(self.job.steps):
            total = 0.0
            for sequence in range(self.job.batch_size):
                windows = self._windows(step, sequence)
                while windows.next_tokens:
                    is_forward = windows.is_forward
                    budget = yield 1 if is_forward else windows.next_tokens
                    n = min(windows.next_tokens, budget, self.job.window)
                    n = n if is_forward else windows.next_tokens
                    windows.step(n)
                    yield n
                total += windows.total
            self._update(step, total)
        self.save()
        yield 0

    def _windows(self, step: int, sequence: int) -> TokenWindows:
        job, head = self.job, self.model.head
        sizes = job.batch_size, job.seq_len
        row = get_batch(self.tokens, job.seed, step, [sequence], *sizes)[0].to(self.device).long()
        count = job.batch_size * job.seq_len

        def loss(hidden: Tensor, at: slice) -> Tensor:
            logits = head(hidden[0]).float()
            return F.cross_entropy(logits, row[1:][at], reduction="sum") / count

        model = lambda *args: self.model(*args, return_hidden=True)
        return TokenWindows(model, loss, row[:-1], attention)

    def _update(self, step: int, loss: float) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        if norm.isfinite():
            self.optimizer.param_groups[0]["lr"] = learning_rate(step, self.job.steps, self.job.lr)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates, self.losses = step + 1, [*self.losses, loss]

    def save(self) -> None:
        """Write the adapter; say how far it got."""
        names = hf_modules(self.model)
        with self.lock:
            save_adapters(self.model, self.job.out, self.base, names.__getitem__)
        last = f", loss {self.losses[-1]:.3f}" if self.losses else ""
        text = f"[fine-tuning] {self.updates} of {self.job.steps} steps{last}; {self.job.out}"
        print(text, file=sys.stderr, flush=True)


def training_tokens(job: FinetuneJob, tokenizer: Tokenizer, eos: tuple[int, ...]) -> Tensor:
    """The documents of a job, each with its BOS and EOS. ValueError if one cannot be read."""
    try:
        documents = [document for path in job.data for document in read_documents(path)]
    except ValueError as e:
        raise ValueError(f"--finetune: data {str(e).removeprefix('--data ')}") from None
    ids, delimiters = [], document_delimiters(tokenizer, eos)
    for _, text in documents:
        ids += delimit(tokenizer.encode(text, bos=False), delimiters)
    return torch.tensor(ids)


def lock_output(out: Path, lock: ExitStack) -> None:
    """Make and lock the folder of the adapter. ValueError if it holds results."""
    out.mkdir(parents=True, exist_ok=True)
    lock.enter_context(writer_lock(out))
    found = [*out.glob("*.safetensors"), *out.glob(CHECKPOINTS)]
    if found:
        raise ValueError(f"{out}: holds {found[0].name} already; name another folder")


def start(path: Path, service: Any, base: Path) -> FineTuner:
    """Let the Engine of a service (serving/batch.py) fine-tune in the background. base: the folder
    of its model, which the adapter names."""
    job, engine = FinetuneJob.read(path), service.engine
    most = engine.scheduler.max_num_batched_tokens
    if job.window > most:
        text = f"window {job.window} exceeds --max-num-batched-tokens {most}"
        raise ValueError(f"--finetune {path}: {text}")
    with ExitStack() as lock:
        try:
            lock_output(Path(job.out), lock)  # now, not after the last step
        except OSError as e:
            raise ValueError(f"--finetune {path}: out {job.out}: {e.strerror}") from None
        except ValueError as e:
            raise ValueError(f"--finetune {path}: out {e}") from None
        tokens = training_tokens(job, service.tokenizer, tuple(service.eos))
        tuner = FineTuner(engine.model, job, tokens, str(base))
        tuner.lock = lock.pop_all()

    def background(budget: int) -> None:
        try:
            tuner(budget)
        except Exception as e:  # requests go on
            error = f"{type(e).__name__}: {one_line(e)}"
            print(f"[fine-tuning] stopped: {error}", file=sys.stderr, flush=True)
            engine.background = None
        if tuner.finished:
            engine.background = None

    engine.background = background
    return tuner
