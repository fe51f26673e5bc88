"""DPO and GRPO: training objectives from preference pairs and from rewarded rollouts.

    python train.py --init DIR --task dpo --data PAIRS.jsonl     direct preference optimization
    python train.py --init DIR --task grpo --data PROMPTS.jsonl --reward prefix    RL on completions
                                                                 sampled from the model

Both are objectives of training/step.py; prompts and padding are not targets. `row` and `validate`
are collective.

They have no state that a resumed run would miss: the prompts or pairs of a step and the samples are
functions of (seed, step, index) and the weights.

GRPO samples with paged_kv.py's Engine on the trained weights themselves: no second copy (except,
under autocast, the cast weights while sampling) and no transfer, but no sharded weights either. The
Engine's log-probabilities are those of the old policy, so that the ratio accounts for rounding
differences between sampling and training. The prefix cache is emptied before every rollout, since
its keys are of old weights: it only shares the prompt among the completions of a group.

The reference model is a frozen copy or, with LoRA, the model with adapters disabled, which costs no
memory. The head runs on completion tokens only.

The model must have all layers and see whole sequences and the whole vocabulary (no pipeline,
context or tensor parallelism).
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import contextlib
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from generation.sampling import RowSampler
from model import Attend, causal_attention
from paged_kv import Engine, PagedKVCache, SamplingParams
from training.alignment import Reward, dpo_loss, group_advantages, grpo_loss, token_logprobs
from training.data import IGNORE, decode, encode_row, is_padding
from training.lora import LoRALinear, adapter_parameters, disable_adapters

# sum of a tensor over all ranks
AllReduce = Callable[[Tensor], Tensor]
PAIRS, PROMPTS = 128, 32  # maximum numbers of validation pairs (DPO) and prompts (GRPO)


def _check(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


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
    ok = reference is not None or adapter_parameters(model)
    _check(ok, "no reference model: pass a frozen copy as reference, or add LoRA adapters")


def target_mask(batch: Tensor) -> Tensor:
    """Mask of the targets of encoded rows: (B, T + 1) -> (B, T)."""
    return decode(batch, packed=False)[1] != IGNORE


@dataclass
class DPO:
    """alignment.dpo_loss summed over pairs of completions; the loss of a step is the mean."""

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


class Rollout(NamedTuple):
    """A completion: its tokens, with the EOS that ended it, and their log-probabilities."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]


@contextlib.contextmanager
def _absorb_mla(model: nn.Module) -> Iterator[None]:
    """Use absorbed MLA, which the Engine requires, and restore the setting of training."""
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
def _cast_weights_once(model: nn.Module) -> Iterator[None]:
    """Under autocast, replace weights of linear layers by copies in its dtype: in inference mode
    autocast does not cache casts, and every Engine step would repeat them. Same results."""
    device = next(model.parameters()).device.type
    users = Counter(p for m in model.modules() for p in m.parameters(recurse=False))
    originals = {}
    for m in model.modules() if torch.is_autocast_enabled(device) else ():
        is_linear = type(m) in (nn.Linear, LoRALinear) and m.weight.dtype == torch.float32
        if is_linear and users[m.weight] == 1:  # a tied embedding must stay fp32
            originals[m] = m.weight
    try:
        for m, weight in originals.items():
            cast = weight.detach().to(torch.get_autocast_dtype(device))
            m.weight = nn.Parameter(cast, requires_grad=False)
        yield
    finally:
        for m, weight in originals.items():
            m.weight = weight


def make_engine(
    model: Any, seq_len: int, *, max_num_seqs: int = 64,
    autocast: Callable[[], Any] = contextlib.nullcontext, eos_ids: Sequence[int] | None = None,
) -> Engine:  # fmt: skip
    """An Engine on the model in training (not its torch.compile wrapper), for max_num_seqs
    completions at once, of up to seq_len + 1 tokens with their prompts. autocast: that of training;
    the cache has its dtype. eos_ids: None for those of model.config.

    Without CUDA graphs: under autocast they would keep weights cast at capture time. ValueError for
    sharded parameters: ranks sample different numbers of tokens and cannot all-gather weights."""
    sharded = any(hasattr(p, "device_mesh") for p in model.parameters())
    _check(not sharded, "cannot sample from sharded parameters (fully_shard)")
    size = max_num_seqs * -(-(seq_len + 1) // 16), 16  # number of blocks, tokens per block
    device = next(model.parameters()).device
    sampler = RowSampler(model.config.vocab_size, max_num_seqs, device)
    with _absorb_mla(model):
        engine = Engine(
            model, num_blocks=size[0], block_size=size[1], max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(512, max_num_seqs), static=False, sampler=sampler,
            eos_ids=eos_ids,
        )  # fmt: skip
    with autocast():
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
            engine.cache = PagedKVCache(model.config, *size, dtype, device)
    return engine


def generate_rollouts(
    engine: Engine, prompts: Sequence[list[int]], n: int,
    params: SamplingParams | Sequence[SamplingParams],
) -> list[Rollout]:  # fmt: skip
    """Sample n completions per prompt with the current weights, grouped by prompt. params: one for
    all prompts, or one per prompt; n and logprobs are set here. ValueError if a prompt does not
    fit."""
    engine.allocator.uncache(list(engine.allocator.entries))  # computed with older weights
    params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    with _absorb_mla(engine.model), _cast_weights_once(engine.model):
        outputs = engine.generate(prompts, [replace(p, n=n, logprobs=0) for p in params])
    rollouts = []
    for output in outputs:
        _check(output.error is None, f"a prompt of {len(output.prompt_ids)} tokens: {output.error}")
        for sample in output.samples:
            logps = [logp for logp, _, _ in sample.logprobs]
            rollouts.append(Rollout(output.prompt_ids, sample.token_ids, logps))
    return rollouts


class Task(NamedTuple):
    """A prompt, as text and as tokens, and the reference answer of its reward."""

    prompt: str
    prompt_ids: list[int]
    answer: str


@dataclass
class GRPO:
    """Group relative policy optimization: alignment.grpo_loss of sampled, rewarded completions. The
    loss of a step is the mean over tokens (DAPO, arXiv:2503.14476, 3.3)."""

    model: nn.Module
    engine: Engine  # from make_engine(model, seq_len)
    tasks: Sequence[Task]
    reward: Reward
    text: Callable[[list[int]], str]  # detokenizes a completion, without EOS
    seq_len: int  # T
    batch_size: int  # prompts per step over all ranks
    local_ids: Sequence[int]  # this rank's prompts of a batch
    n: int = 8  # completions per prompt
    max_new_tokens: int = 128
    seed: int = 0
    kl: float = 0.0
    reference: nn.Module | None = None  # used if kl is not 0; None: the model without adapters
    autocast: Callable[[], Any] = contextlib.nullcontext
    all_reduce: AllReduce = lambda x: x
    validation: Sequence[Task] = ()

    def __post_init__(self):
        _check(bool(self.tasks), "tasks: GRPO needs at least one prompt")
        _check(self.n > 1, f"n must be 2 or more, not {self.n}: advantages are within a group")
        limit = min(self.seq_len + 1, self.engine.capacity) - self.max_new_tokens
        room = f"max_new_tokens {self.max_new_tokens} leaves no room for prompts in a row of"
        _check(limit > 0, f"{room} {self.seq_len} tokens; reduce it, or increase --seq-len")
        for task in (*self.tasks, *self.validation):
            n, prompt = len(task.prompt_ids), f"prompt {task.prompt[:40]!r}"
            room = f"with max_new_tokens {self.max_new_tokens} it may have from 1 to {limit}"
            _check(0 < n <= limit, f"{prompt} has {n} tokens; {room}")
        self.step = None
        if self.kl:
            check_reference(self.reference, self.model)

    def batch(self, step: int) -> Tensor:
        if self.step != step:
            self._generate(step)
            self.step = step
        self.sums = torch.zeros(3)
        return self.rows

    def _generate(self, step: int) -> None:
        """Sample this rank's completions; set advantages, rows and old log-probabilities."""
        order = len(self.tasks), self.seed, step, self.batch_size, self.local_ids
        tasks = [self.tasks[i] for i in epoch_indices(*order)]
        params = [self._params(step, i) for i in self.local_ids]
        prompts = [task.prompt_ids for task in tasks]
        with self.autocast():
            rollouts = generate_rollouts(self.engine, prompts, self.n, params)
        repeated = [task for task in tasks for _ in range(self.n)]
        rewards = torch.tensor([self._reward(*pair) for pair in zip(repeated, rollouts)])
        groups = rewards.view(-1, self.n)
        self.advantages = group_advantages(groups).flatten()
        self.rows, self.old = self._rows(rollouts)
        lengths = torch.tensor([len(r.completion_ids) for r in rollouts], dtype=torch.float32)
        truncated = [r.completion_ids[-1] not in self.engine.eos for r in rollouts]
        same = (groups == groups[:, :1]).all(1).repeat_interleave(self.n)
        stats = rewards, lengths, torch.tensor(truncated), same, torch.ones(len(rollouts))
        self.rollout_stats = torch.stack([x.float().sum() for x in stats])

    def _params(self, step: int, index: int) -> SamplingParams:
        """Temperature 1: samples from the policy itself, as the loss assumes."""
        digest = hashlib.sha256(f"{self.seed}/{step}/{index}".encode()).digest()
        seed = int.from_bytes(digest[:7], "little")
        return SamplingParams(seed=seed, max_new_tokens=self.max_new_tokens)

    def _reward(self, task: Task, rollout: Rollout) -> float:
        ids = rollout.completion_ids
        ids = ids[:-1] if ids[-1] in self.engine.eos else ids
        which = f"the reward of a completion of {task.prompt[:40]!r}"
        try:
            value = float(self.reward(task.prompt, self.text(ids), task.answer))
        except (Exception, SystemExit) as e:  # the reward is user code
            raise ValueError(f"{which}: {type(e).__name__}: {e}") from e
        _check(math.isfinite(value), f"{which} is {value}")
        return value

    def _rows(self, rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
        """Encoded rows (R, T + 1), and the log-probabilities of their targets (R, T)."""
        rows, old = [], torch.zeros(len(rollouts), self.seq_len)
        for row_logps, (prompt, completion, logps) in zip(old, rollouts):
            rows.append(encode_row([*prompt, *completion], len(prompt), self.seq_len))
            row_logps[len(prompt) - 1 :][: len(logps)] = torch.tensor(logps)
        return torch.stack(rows).long(), old

    def validate(
        self, model: nn.Module, size: int, attend: Attend = causal_attention
    ) -> dict[str, float]:
        """Mean reward of greedy completions; the validation prompts are divided over ranks."""
        if not self.validation:
            return {}
        params = SamplingParams(temperature=0.0, max_new_tokens=self.max_new_tokens)
        tasks = self.validation[:PROMPTS]
        tasks = [task for i, task in enumerate(tasks) if i % self.batch_size in self.local_ids]
        with self.autocast():
            prompts = [task.prompt_ids for task in tasks]
            rollouts = generate_rollouts(self.engine, prompts, 1, params)
        rewards = [self._reward(*pair) for pair in zip(tasks, rollouts)]
        sums = torch.tensor([math.fsum(rewards), float(len(rewards))])
        reward, n = self.all_reduce(sums.to(next(self.model.parameters()).device)).tolist()
        return {"val_reward": round(reward / n, 6)}

    def count(self, batch: Tensor) -> Tensor:
        return target_mask(batch).sum()

    def loss(
        self, model: nn.Module, micro: Tensor, rows: slice, attend: Attend = causal_attention
    ) -> Tensor:
        ref = reference_logprobs(self.reference, model, micro, attend) if self.kl else None
        new = logprobs(model, micro, attend)
        mask = target_mask(micro).to(new.dtype)
        old, advantages = (x[rows].to(new) for x in (self.old, self.advantages))
        loss, stats = grpo_loss(new, old, ref, advantages, mask, kl=self.kl)
        new_sums = torch.stack([stats["kl"], stats["clipped"], mask.sum()])
        self.sums = self.sums.to(new_sums) + new_sums
        return loss

    @property
    def row(self) -> dict[str, float]:
        stats = self.all_reduce(torch.cat((self.rollout_stats.to(self.sums), self.sums)))
        reward, length, truncated, same, count, kl, clipped, weight = stats.tolist()
        # truncated: completions that reached max_new_tokens; no_signal: of groups of equal rewards
        sums = {"reward_mean": reward, "completion_length": length}
        sums |= {"truncated": truncated, "no_signal": same}
        row = {name: total / max(1, count) for name, total in sums.items()}
        row |= {"clipped": clipped / max(1e-9, weight)}
        row |= {"kl": kl / max(1e-9, weight)} if self.kl else {}
        return {name: round(value, 6) for name, value in row.items()}
