"""tuning.py: what train.py trains on beside the next token of a text: preferences and rewards.

    python train.py --task dpo --data PAIRS.jsonl ...     direct preference optimization
    python train.py --task grpo --data PROMPTS.jsonl ...  answers drawn from the model, and rewarded

An objective is what a step's rows are, and their loss:

    batch(step)      this rank's rows (rows, T + 1), coded as data.py has them: prompts and padding
                     are no targets
    count(batch)     what the summed loss of the step is divided by, this rank's part (a tensor)
    loss(model, micro, rows, attend)
                     the summed loss of micro = batch[rows], rows a slice
    row              what there is to say of the last step, for metrics.jsonl; over all ranks, so
                     that all ranks must ask
    validate(model, size, attend)
                     what there is to say of examples held out, "val_..." for metrics.jsonl, in
                     micro-batches of `size` rows; {} without any. All ranks must ask

and it has no state that a resumed run would miss: which prompts or pairs a step takes, and what is
drawn, are functions of (seed, step, index) and the weights. (GRPO with `updates` above 1 draws anew
where a run is resumed between two draws.)

GRPO draws its answers with paged_kv.py's Engine over the very weights that are trained: no second
copy (but, under autocast, of what it would cast, while it draws), no transfer, and nothing that an
Engine cannot read, shards. The Engine's own log-probabilities are the old policy's: where training
rounds otherwise than it does, the ratio says so. Keys of old weights must not be found again, so
its prefix cache begins every step empty: it
serves a prompt's answers, which share theirs.

The reference is a frozen model, or, with adapters (lora.py), the model with these off: it then
costs no memory. Log-probabilities are of answers alone, so that the head multiplies no prompt.

The model must have all its layers and see whole sequences (no pipeline, no context parallelism);
where its vocabulary is cut, `of` is to know how, and an Engine cannot draw from it.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import argparse
import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from huggingface.tokenizer import load_tokenizer
from huggingface.weights import load_checkpoint
from model import Attend, Transformer, causal_attention
from paged_kv import Engine, PagedKVCache, SamplingParams
from parallelism.dist_env import DistEnv
from parallelism.parallel_dims import ParallelDims
from training.alignment import (
    Reward,
    dpo_loss,
    group_advantages,
    grpo_loss,
    load_reward,
    token_logprobs,
)
from training.data import (
    IGNORE,
    decode,
    encode_row,
    preference_rows,
    read_preferences,
    read_prompts,
)
from training.dataset import NextToken, Dataset, load_chat, train_val_split
from training.lora import LoRALinear, adapters, disabled

# (logits (N, V), targets (N,)) -> log-probabilities (N,); another where the vocabulary is cut
LogProbs = Callable[[Tensor, Tensor], Tensor]
# the sum over all ranks of a tensor that each has its own of
Total = Callable[[Tensor], Tensor]
PAIRS, PROMPTS = 128, 32  # of those held out, to validate with


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# What both objectives do
# --------------------------------------------------------------------------------------------------


def chosen(n: int, seed: int, step: int, batch_size: int, mine: Sequence[int]) -> list[int]:
    """Which of n samples stand at places `mine` of a step's batch: an endless row of epochs, each
    shuffled, so that all are seen once before any is seen twice."""
    found, orders = [], {}
    for i in mine:
        epoch, place = divmod(step * batch_size + i, n)
        if epoch not in orders:
            rng = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            orders[epoch] = torch.randperm(n, generator=rng).tolist()
        found.append(orders[epoch][place])
    return found


def logprobs(
    model: Any, micro: Tensor, attend: Attend = causal_attention, of: LogProbs = token_logprobs
) -> Tensor:
    """Of coded rows (B, T + 1), the log-probability of every target (B, T), 0 where there is none.
    The head multiplies the positions that have one, no others."""
    inputs, targets, positions = decode(micro, packed=False)
    hidden = model(inputs, positions, attend=attend, return_hidden=True)
    counted = targets != IGNORE
    found = of(model.head(hidden[counted]), targets[counted])
    return found.new_zeros(targets.shape).masked_scatter(counted, found)


def target_mask(batch: Tensor) -> Tensor:
    """Which targets of coded rows count: (B, T + 1) -> (B, T)."""
    return decode(batch, packed=False)[1] != IGNORE


@dataclass
class _Reference:
    """What the model must not stray from: `frozen`, or with None the model without adapters."""

    frozen: nn.Module | None

    def check(self, model: nn.Module) -> None:
        ok = self.frozen is not None or len(adapters(model)) > 0
        _check(ok, "a reference is wanted: hand over a frozen copy of the model, or adapt it first")

    @torch.no_grad()
    def __call__(self, model: nn.Module, micro: Tensor, attend: Attend, of: LogProbs) -> Tensor:
        if self.frozen is not None:
            return logprobs(self.frozen, micro, attend, of)
        with disabled(model):
            return logprobs(model, micro, attend, of)


# --------------------------------------------------------------------------------------------------
# Preferences
# --------------------------------------------------------------------------------------------------


@dataclass
class DPO:
    """Pairs of answers: alignment.dpo_loss of each, summed; a step is their mean."""

    model: nn.Module
    rows: Tensor  # (2 * pairs, T + 1) coded, the chosen answer first, then the rejected one
    batch_size: int  # pairs of a step, on all ranks together
    mine: Sequence[int]  # which of these are this rank's
    seed: int = 0
    beta: float = 0.1
    label_smoothing: float = 0.0
    reference: nn.Module | None = None  # None: the model without its adapters
    of: LogProbs = token_logprobs
    total: Total = lambda x: x
    held: Tensor | None = None  # rows like `rows`
    sums: Tensor = field(default_factory=lambda: torch.zeros(3), init=False)

    def __post_init__(self):
        n = len(self.rows)
        _check(n > 0 and n % 2 == 0, f"{n} rows are not pairs of a chosen and a rejected answer")
        self.refer = _Reference(self.reference)
        self.refer.check(self.model)

    def batch(self, step: int) -> Tensor:
        n = len(self.rows) // 2
        pairs = chosen(n, self.seed, step, self.batch_size, self.mine)
        self.sums = torch.zeros(3)
        return self.rows.view(n, 2, -1)[pairs].flatten(0, 1).long()

    def count(self, batch: Tensor) -> Tensor:
        return torch.tensor(len(batch) // 2, device=batch.device)

    def loss(
        self, model: nn.Module, micro: Tensor, rows: slice, attend: Attend = causal_attention
    ) -> Tensor:
        ok = len(micro) % 2 == 0
        _check(ok, f"a micro-batch of {len(micro)} rows cuts a pair in two; make it even")
        ref = self.refer(model, micro, attend, self.of).sum(-1)
        new = logprobs(model, micro, attend, self.of).sum(-1)
        pairs = new[0::2], new[1::2], ref[0::2], ref[1::2]
        loss, stats = dpo_loss(*pairs, self.beta, self.label_smoothing)
        both = [stats["reward_margin"], stats["accuracy"]]
        self.sums = self.sums.to(loss.device) + torch.stack(
            [*both, both[0].new_tensor(len(ref) // 2)]
        )
        return loss

    @property
    def row(self) -> dict[str, float]:
        margin, accuracy, pairs = self.total(self.sums.clone()).tolist()
        n = max(1, pairs)
        return {"reward_margin": round(margin / n, 6), "accuracy": round(accuracy / n, 6)}

    @torch.no_grad()
    def validate(
        self, model: nn.Module, size: int, attend: Attend = causal_attention
    ) -> dict[str, float]:
        """Of all pairs on each rank, which gather sharded weights together."""
        if self.held is None:
            return {}
        before, self.sums, loss = self.sums, torch.zeros(3), 0.0
        device = next(self.model.parameters()).device
        for micro in self.held[: 2 * PAIRS].long().to(device).split(max(2, size // 2 * 2)):
            loss += self.loss(model, micro, slice(len(micro)), attend).item()
        (margin, accuracy, n), self.sums = self.sums.tolist(), before
        found = {"val_loss": loss, "val_reward_margin": margin, "val_accuracy": accuracy}
        return {name: round(x / n, 6) for name, x in found.items()}


# --------------------------------------------------------------------------------------------------
# Answers drawn from the model that is trained
# --------------------------------------------------------------------------------------------------


class Rollout(NamedTuple):
    """An answer: its tokens, with the end-of-text that closed it, and their log-probabilities."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]


@contextlib.contextmanager
def _absorbed(model: nn.Module) -> Iterator[None]:
    """An Engine has latent attention absorbed, always; training has not."""
    modules = [m for m in model.modules() if hasattr(m, "absorb_up_to")]
    before = [m.absorb_up_to for m in modules]
    for m in modules:
        m.absorb_up_to = math.inf
    try:
        yield
    finally:
        for m, limit in zip(modules, before):
            m.absorb_up_to = limit


@contextlib.contextmanager
def _cast_once(model: nn.Module) -> Iterator[None]:
    """Under autocast, linear layers with weights of its dtype. In inference mode autocast keeps no
    casts, and every step of an Engine would make them all again; the numbers are the same."""
    device = next(model.parameters()).device.type
    users = Counter(p for m in model.modules() for p in m.parameters(recurse=False))
    held = {}
    for m in model.modules() if torch.is_autocast_enabled(device) else ():
        plain = type(m) in (nn.Linear, LoRALinear) and m.weight.dtype == torch.float32
        if plain and users[m.weight] == 1:  # an embedding is looked up as it is
            held[m] = m.weight
    try:
        for m, weight in held.items():
            cast = weight.detach().to(torch.get_autocast_dtype(device))
            m.weight = nn.Parameter(cast, requires_grad=False)
        yield
    finally:
        for m, weight in held.items():
            m.weight = weight


def make_engine(
    model: Any,
    seq_len: int,
    *,
    running: int = 64,
    autocast: Callable[[], Any] = contextlib.nullcontext,
    **how: Any,
) -> Engine:
    """An Engine over the model that is trained (itself, not what torch.compile made of it), for
    `running` answers at once, each of up to seq_len + 1 tokens with its prompt. autocast: as in
    training; its dtype is that of the cache. how: the Engine's own arguments.

    Steps are not captured as CUDA graphs: under autocast these would keep what weights were cast to
    when they were captured. ValueError for sharded parameters: ranks draw answers of other lengths,
    and cannot gather weights together."""
    sharded = any(hasattr(p, "device_mesh") for p in model.parameters())
    _check(not sharded, "answers cannot be drawn from sharded parameters (fully_shard)")
    blocks = running * -(-(seq_len + 1) // how.get("block_size", 16))
    how = {"num_blocks": blocks, "max_num_seqs": running, "static": False, **how}
    how.setdefault("max_num_batched_tokens", max(512, running))
    with _absorbed(model):
        engine = Engine(model, **how)
    weight = next(model.parameters())
    with autocast():
        if torch.is_autocast_enabled(weight.device.type):
            dtype = torch.get_autocast_dtype(weight.device.type)
            size = how["num_blocks"], how.get("block_size", 16)
            engine.cache = PagedKVCache(
                model.config, *size, dtype, weight.device, how.get("kv_dtype")
            )
    return engine


def generate_rollouts(
    engine: Engine,
    prompts: Sequence[list[int]],
    n: int,
    params: SamplingParams | Sequence[SamplingParams],
) -> list[Rollout]:
    """n answers to each prompt, side by side, from the weights as they are. params: for all, or for
    each; their n and logprobs are set here. ValueError where a prompt cannot be served."""
    engine.allocator.uncache(list(engine.allocator.entries))  # keys of the weights before
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    with _absorbed(engine.model), _cast_once(engine.model):
        outputs = engine.generate(prompts, [replace(p, n=n, logprobs=0) for p in each])
    found = []
    for output in outputs:
        _check(output.error is None, f"a prompt of {len(output.prompt_ids)} tokens: {output.error}")
        for sample in output.samples:
            logps = [logp for logp, _, _ in sample.logprobs]
            found.append(Rollout(output.prompt_ids, sample.token_ids, logps))
    return found


class Task(NamedTuple):
    """A prompt, as text and as tokens, and what its reward compares answers with."""

    prompt: str
    prompt_ids: list[int]
    answer: str


PER = ("token", "sequence", "constant")


@dataclass
class GRPO:
    """Answers of the model, rewarded: alignment.grpo_loss.

    per: what a step's loss is a mean over. "token": all tokens count alike (DAPO,
    arXiv:2503.14476); "sequence": all answers do, each the mean of its tokens (arXiv:2402.03300,
    eq. 3); "constant": tokens over answers * max_new_tokens (Dr. GRPO, arXiv:2503.20783)."""

    model: nn.Module
    engine: Engine  # of engine_of(model, seq_len)
    tasks: Sequence[Task]
    reward: Reward
    text: Callable[[list[int]], str]  # of tokens, without the end-of-text
    seq_len: int  # T
    batch_size: int  # prompts of a step, on all ranks together
    mine: Sequence[int]  # which of these are this rank's
    n: int = 8  # answers to each
    max_new_tokens: int = 128
    seed: int = 0
    clip: float = 0.2
    clip_high: float | None = None
    kl: float = 0.0
    normalize: bool = True
    per: str = "token"
    updates: int = 1  # steps on one drawing
    reference: nn.Module | None = None  # if kl is not 0; None: the model without its adapters
    autocast: Callable[[], Any] = contextlib.nullcontext
    of: LogProbs = token_logprobs
    total: Total = lambda x: x
    held: Sequence[Task] = ()

    def __post_init__(self):
        _check(bool(self.tasks), "GRPO needs a prompt to answer")
        _check(self.n > 1, f"n must be 2 or more, not {self.n}: one answer has no group")
        _check(self.per in PER, f"per must be one of {', '.join(PER)}, not {self.per!r}")
        _check(self.updates > 0, f"updates must be 1 or more, not {self.updates}")
        most = min(self.seq_len + 1, self.engine.capacity) - self.max_new_tokens
        for task in (*self.tasks, *self.held):
            n = len(task.prompt_ids)
            ok = 0 < n <= most
            _check(ok, f"prompt {task.prompt[:40]!r} has {n} tokens; with max_new_tokens "
                   f"{self.max_new_tokens} it may have from 1 to {most}")  # fmt: skip
        self.refer, self.drawn = _Reference(self.reference), None
        if self.kl:
            self.refer.check(self.model)

    def batch(self, step: int) -> Tensor:
        drawing = step // self.updates
        if self.drawn != drawing:
            self._draw(drawing)
            self.drawn = drawing
        self.sums = torch.zeros(3)
        return self.rows

    def _draw(self, drawing: int) -> None:
        """This rank's answers, their rewards and all that loss needs of them."""
        picks = chosen(len(self.tasks), self.seed, drawing, self.batch_size, self.mine)
        tasks = [self.tasks[i] for i in picks]
        params = [self._params(drawing, i) for i in self.mine]
        with self.autocast():
            answers = generate_rollouts(self.engine, [t.prompt_ids for t in tasks], self.n, params)
        each = [task for task in tasks for _ in range(self.n)]
        rewards = torch.tensor([self._reward(*pair) for pair in zip(each, answers)])
        groups = rewards.view(-1, self.n)
        self.advantages = group_advantages(groups, self.normalize).flatten()
        self.rows, self.old = self._rows(answers)
        lengths = torch.tensor([len(a.completion_ids) for a in answers], dtype=torch.float32)
        cut = [a.completion_ids[-1] not in self.engine.eos for a in answers]
        same = (groups == groups[:, :1]).all(1).repeat_interleave(self.n)
        facts = rewards, lengths, torch.tensor(cut), same, torch.ones(len(answers))
        self.facts = torch.stack([x.float().sum() for x in facts])

    def _params(self, drawing: int, index: int) -> SamplingParams:
        """Draws of temperature 1: of the policy itself, which the loss is about."""
        digest = hashlib.sha256(f"{self.seed}/{drawing}/{index}".encode()).digest()
        seed = int.from_bytes(digest[:7], "little")
        return SamplingParams(seed=seed, max_new_tokens=self.max_new_tokens)

    def _reward(self, task: Task, answer: Rollout) -> float:
        ids = answer.completion_ids
        ids = ids[:-1] if ids[-1] in self.engine.eos else ids
        try:
            value = float(self.reward(task.prompt, self.text(ids), task.answer))
        except Exception as e:  # it is somebody else's program
            raise ValueError(
                f"the reward of an answer to {task.prompt[:40]!r}: {type(e).__name__}: {e}"
            ) from e
        _check(math.isfinite(value), f"the reward of an answer to {task.prompt[:40]!r} is {value}")
        return value

    def _rows(self, answers: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
        """Coded rows (R, T + 1), and the log-probabilities of their targets (R, T)."""
        rows, old = [], torch.zeros(len(answers), self.seq_len)
        for logps, (prompt, completion, drawn) in zip(old, answers):
            rows.append(encode_row([*prompt, *completion], len(prompt), self.seq_len))
            logps[len(prompt) - 1 :][: len(drawn)] = torch.tensor(drawn)
        return torch.stack(rows).long(), old

    def validate(
        self, model: nn.Module, size: int, attend: Attend = causal_attention
    ) -> dict[str, float]:
        """The mean reward of the likeliest answer to each; each rank draws some."""
        if not self.held:
            return {}
        params = SamplingParams(temperature=0.0, max_new_tokens=self.max_new_tokens)
        tasks = self.held[:PROMPTS]
        tasks = [task for i, task in enumerate(tasks) if i % self.batch_size in self.mine]
        with self.autocast():
            answers = generate_rollouts(self.engine, [task.prompt_ids for task in tasks], 1, params)
        rewards = [self._reward(*pair) for pair in zip(tasks, answers)]
        sums = torch.tensor([math.fsum(rewards), float(len(rewards))])
        reward, n = self.total(sums.to(next(self.model.parameters()).device)).tolist()
        return {"val_reward": round(reward / n, 6)}

    def count(self, batch: Tensor) -> Tensor:
        if self.per == "token":
            return target_mask(batch).sum()
        share = 1 if self.per == "sequence" else self.max_new_tokens
        return torch.tensor(len(batch) * share, device=batch.device)

    def loss(
        self, model: nn.Module, micro: Tensor, rows: slice, attend: Attend = causal_attention
    ) -> Tensor:
        ref = self.refer(model, micro, attend, self.of) if self.kl else None
        new = logprobs(model, micro, attend, self.of)
        mask = target_mask(micro).to(new.dtype)
        if self.per == "sequence":
            mask = mask / mask.sum(-1, keepdim=True)
        old, advantages = (x[rows].to(new) for x in (self.old, self.advantages))
        how = self.clip, self.clip_high, self.kl
        loss, stats = grpo_loss(new, old, ref, advantages, mask, *how)
        new_sums = torch.stack([stats["kl"], stats["clipped"], mask.sum()])
        self.sums = self.sums.to(new_sums) + new_sums
        return loss

    @property
    def row(self) -> dict[str, float]:
        facts = torch.cat((self.facts.to(self.sums), self.sums))
        reward, length, cut, same, answers, kl, clipped, weight = self.total(facts).tolist()
        found = {
            "reward_mean": reward / max(1, answers),
            "completion_length": length / max(1, answers),
            "truncated": cut / max(1, answers),  # answers that max_new_tokens ended
            "no_signal": same / max(1, answers),  # answers of groups with one reward
            "clipped": clipped / max(1e-9, weight),
        }
        found |= {"kl": kl / max(1e-9, weight)} if self.kl else {}
        return {name: round(value, 6) for name, value in found.items()}


# --------------------------------------------------------------------------------------------------
# --task
# --------------------------------------------------------------------------------------------------


def build_objective(
    args: argparse.Namespace, model: Transformer, text: Dataset, place: DistEnv, layout: ParallelDims
) -> NextToken | DPO | GRPO:
    """What --task says a step is: its batch, and with `loss` what is learned of it."""
    share = args.batch_size // args.diloco_workers
    if args.task in ("text", "sft"):
        return NextToken(text.rows, [args.diloco_worker * share + i for i in layout.samples(share)])
    render, encode = load_chat(args.out)
    frozen = None
    if not args.lora and (args.task == "dpo" or args.kl):
        frozen = load_checkpoint(args.init, place.device, next(model.parameters()).dtype)
        frozen.requires_grad_(False)
    how: dict[str, Any] = dict(seed=args.seed, reference=frozen, total=layout.all_reduce_sum)
    if args.task == "dpo":
        pairs = [pair for path in args.data for pair in read_preferences(Path(path))]
        made = (preference_rows(some, render, encode, args.seq_len) for some in train_val_split(pairs))
        (rows, how["held"]), n = made, args.batch_size // 2
        return DPO(model, rows, n, layout.samples(n), beta=args.beta, **how)
    tasks = []
    for prompt, answer in (pair for path in args.data for pair in read_prompts(Path(path))):
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        tasks.append(Task(said[-1]["content"], encode(render(said, True)), answer))
    (tasks, held), n = map(list, map(dict.values, train_val_split(tasks))), args.batch_size // args.num_generations
    how |= dict(n=args.num_generations, max_new_tokens=args.max_new_tokens, kl=args.kl, held=held)
    return GRPO(
        model, make_engine(model, args.seq_len, autocast=place.autocast), tasks,
        load_reward(args.reward), load_tokenizer(args.out).decode, args.seq_len, n,
        layout.samples(n), autocast=place.autocast, **how,
    )  # fmt: skip
