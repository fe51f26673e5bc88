"""GRPO: reinforcement learning on the model's own completions, with rewards of a program.

    python train.py --init DIR --task grpo --data PROMPTS.jsonl --reward prefix

Group relative policy optimization (DeepSeekMath, arXiv:2402.03300, eq. 3) is PPO's clipped loss
without a critic: several completions are sampled per prompt, and the advantage of all tokens of a
completion is its reward minus the mean reward of its group. Rewards are computed by a program
(RLVR; Tulu 3, arXiv:2411.15124, section 6): REWARDS, or a function of the user.

Completions are sampled with paged_kv.py's Engine on the trained weights themselves: no second copy
(except, under autocast, the cast weights while sampling) and no transfer, but no sharded weights
either. The Engine's log-probabilities are those of the old policy, so that the ratio accounts for
rounding differences between sampling and training. The prefix cache is emptied before every
rollout, since its keys are of old weights: it only shares the prompt among the completions of a
group. Log-probabilities, the reference model (used if kl is not 0) and what the model must be are
those of dpo.py.

Cost: sampling, which takes most of the time, and a third forward pass if kl is not 0. When it
loses: if all rewards of a group are equal (no gradient), or if the policy can get the reward
without solving the task (reward hacking). Dividing by the group's standard deviation upweights
prompts that are nearly always or never solved, and 1 / |y| upweights short completions (Dr. GRPO,
arXiv:2503.20783): normalize=False and a mask of ones avoid both.

Losses and statistics are sums, to be added over micro-batches and ranks; the caller divides them by
the token count of the step. GRPO is an objective of training/step.py without a state that a resumed
run would miss: the prompts of a step and their samples are functions of (seed, step, index) and the
weights. `row` and `validate` are collective. Equivalence (test_all.py): loss and gradient are those
of the formulas in fp64.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import contextlib
import hashlib
import importlib.util
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from generation.sampling import RowSampler
from huggingface.tokenizer import eos_ids
from model import Attend, Transformer, causal_attention
from paged_kv import Engine, PagedKVCache, SamplingParams
from training.chats import (
    Prompt,
    Render,
    as_messages,
    check_rendered,
    map_items,
    read_prompts,
    with_tools,
)
from training.config import TrainConfig
from training.data import encode_row
from training.dataset import load_chat, train_val_split
from training.dist_env import DistEnv
from training.dpo import (
    AllReduce,
    check_reference,
    epoch_indices,
    frozen_reference,
    logprobs,
    reference_logprobs,
    target_mask,
)
from training.lora import LoRALinear
from training.parallelize import ParallelDims

Reward = Callable[[str, str, str], float]  # (prompt, completion, answer)
PROMPTS = 32  # maximum number of validation prompts


def _check(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# Loss
# --------------------------------------------------------------------------------------------------


def group_advantages(rewards: Tensor, normalize: bool = True) -> Tensor:
    """Group-relative advantages: rewards minus their group's mean, (G, n) -> (G, n). normalize:
    also divide by the group's (population) standard deviation (arXiv:2402.03300, 4.1.2); False is
    Dr. GRPO (arXiv:2503.20783, 3.2). Exactly 0 if all rewards of a group are equal."""
    _check(rewards.dim() == 2, f"rewards must be (groups, n), not {tuple(rewards.shape)}")
    centered = rewards - rewards.mean(1, keepdim=True)
    centered = centered.masked_fill((rewards == rewards[:, :1]).all(1, keepdim=True), 0.0)
    if not normalize:
        return centered
    return centered / (centered.square().mean(1, keepdim=True).sqrt() + 1e-6)


def grpo_loss(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor | None, advantages: Tensor,
    mask: Tensor, clip: float = 0.2, clip_high: float | None = None, kl: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """GRPO loss (arXiv:2402.03300, eq. 3) summed over tokens, from token_logprobs.

    logprobs (B, T) of the model; old_logprobs of the policy that sampled the tokens; ref_logprobs
    of the reference model, required if kl is not 0; advantages (B,) or (B, T). mask (B, T) weights
    tokens: 0 for tokens that were not sampled; else 1, for equal weight per token (DAPO,
    arXiv:2503.14476, 3.3), or 1 / |y|, for equal weight per completion as in eq. 3.

    With r = exp(logprobs - old_logprobs), a token's loss is -min(r A, clamp(r, 1 - clip, 1 +
    clip_high) A) + kl * k3, where k3 = exp(d) - d - 1, d = ref - logprobs, is an unbiased,
    non-negative estimate of KL(model || ref) (eq. 4). clip_high: default clip.

    Returns the loss and mask-weighted sums: kl (k3, 0 without a reference) and clipped (1 for
    tokens whose gradient is clipped)."""
    _check(kl == 0 or ref_logprobs is not None, f"kl {kl} requires ref_logprobs")
    _check(0 < clip < 1, f"clip must be between 0 and 1, not {clip}")
    high = clip if clip_high is None else clip_high
    _check(high > 0, f"clip_high must be above 0, not {high}")
    A = advantages[:, None] if advantages.dim() == 1 else advantages
    sampled, mask = mask != 0, mask.to(logprobs.dtype)
    # masked values may be inf or NaN
    ratio = (logprobs - old_logprobs).masked_fill(~sampled, 0.0).exp()
    unclipped, clipped = ratio * A, ratio.clamp(1 - clip, 1 + high) * A
    loss, k3 = -torch.minimum(unclipped, clipped), torch.zeros_like(ratio)
    if ref_logprobs is not None:
        d = (ref_logprobs - logprobs).masked_fill(~sampled, 0.0)
        k3 = d.exp() - d - 1
        loss = loss + kl * k3 if kl else loss
    is_clipped = (clipped < unclipped).to(mask.dtype)
    stats = {"kl": (k3 * mask).sum().detach(), "clipped": (is_clipped * mask).sum()}
    return (loss * mask).sum(), stats


# --------------------------------------------------------------------------------------------------
# Rewards
# --------------------------------------------------------------------------------------------------


NUMBER = re.compile(r"(?<!\d)-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<!\d)-?\.\d+")


def _last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def exact_reward(prompt: str, completion: str, answer: str) -> float:
    """1 if the completion equals the answer, ignoring surrounding whitespace."""
    return float(completion.strip() == answer.strip())


def number_reward(prompt: str, completion: str, answer: str) -> float:
    """1 if the last number in the completion equals the last number in the answer, as in GSM8K
    (arXiv:2110.14168): "so 1,024.0" matches "#### 1024"."""
    wanted = _last_number(answer)
    _check(wanted is not None, f'reward "number": the answer {answer!r} contains no number')
    return float(_last_number(completion) == wanted)


def prefix_reward(prompt: str, completion: str, answer: str) -> float:
    """1 if the completion starts with the answer, ignoring leading whitespace."""
    return float(completion.lstrip().startswith(answer.strip()))


REWARDS = {"exact": exact_reward, "number": number_reward, "prefix": prefix_reward}


def load_reward(name: str) -> Reward:
    """A reward function reward(prompt, completion, answer) -> float: one of REWARDS, or FUNCTION
    of "FILE.py:FUNCTION"; the file is executed. ValueError if there is no such function."""
    if name in REWARDS:
        return REWARDS[name]
    path, colon, function = name.rpartition(":")
    if not (colon and path.endswith(".py") and Path(path).is_file()):
        known = ", ".join(REWARDS)
        raise ValueError(f"reward {name!r} must be {known} or FILE.py:FUNCTION of an existing file")
    # a name of its own: a file json.py must not replace the library's module
    spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and typing look for it there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # user code may raise anything
        raise ValueError(f"reward {name!r}: {path} failed: {type(e).__name__}: {e}") from e
    reward = getattr(module, function, None)
    _check(callable(reward), f"reward {name!r}: {path} has no function {function!r}")
    return reward


# --------------------------------------------------------------------------------------------------
# Rollouts: completions sampled with the current weights
# --------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------
# Objective
# --------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """A prompt, as text and as tokens, and the reference answer of its reward."""

    prompt: str
    prompt_ids: list[int]
    answer: str


def prompt_text(item: Prompt, render: Render) -> str:
    """A prompt, of which a string is a user message, rendered up to the assistant's answer."""
    messages = as_messages(item.prompt, "user")
    check_rendered(messages, item.tools, render)
    return with_tools(render, item.tools)(messages, True)


@dataclass
class GRPO:
    """Group relative policy optimization: grpo_loss of sampled, rewarded completions. The
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


def build_grpo(config: TrainConfig, model: Transformer, env: DistEnv, layout: ParallelDims) -> GRPO:
    """--task grpo: the prompts of --data, split for validation, sampled with the model's Engine."""
    render, tokenizer = load_chat(config.out, model.config)

    def task(item: Prompt) -> Task:
        ids = tokenizer.encode(prompt_text(item, render), bos=False)
        text = item.prompt if isinstance(item.prompt, str) else item.prompt[-1].get("content", "")
        return Task(text, ids, item.answer)

    prompts = [prompt for path in config.data for prompt in read_prompts(Path(path))]
    tasks = map_items("prompt", prompts, task)
    tasks, validation = (list(part.values()) for part in train_val_split(tasks))
    n = config.batch_size // config.num_generations
    ends = eos_ids(config.out, model.config.eos_ids, tokenizer)  # those of generate.py
    return GRPO(
        model, make_engine(model, config.seq_len, autocast=env.autocast, eos_ids=ends), tasks,
        load_reward(config.reward), tokenizer.decode, config.seq_len, n,
        layout.samples(n), config.num_generations, config.max_new_tokens, config.seed,
        kl=config.kl, reference=frozen_reference(config, model, env) if config.kl else None,
        autocast=env.autocast, all_reduce=layout.all_reduce_sum, validation=validation,
    )  # fmt: skip
