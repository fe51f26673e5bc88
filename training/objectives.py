"""The objective of --task: next-token prediction, DPO, GRPO, or a draft head (training/step.py)."""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

from pathlib import Path
from typing import Any

from huggingface.tokenizer import load_tokenizer
from huggingface.weights import load_checkpoint
from model import Transformer
from parallelism.dist_env import DistEnv
from parallelism.parallel_dims import ParallelDims
from training.alignment import load_reward
from training.config import TrainConfig
from training.data import preference_rows, read_preferences, read_prompts
from training.dataset import Dataset, load_chat, train_val_split
from training.draft_head import DraftHeadObjective
from training.lora_jobs import LoRAJobs
from training.step import NextToken, Objective
from training.tuning import DPO, GRPO, Task, make_engine

ON_ROWS = {"text": NextToken, "sft": NextToken}  # by --task: objectives of rows of tokens


def build_objective(
    config: TrainConfig, model: Transformer, dataset: Dataset, env: DistEnv, layout: ParallelDims
) -> Objective:
    """The objective of config.task."""
    if config.task == "draft-head":
        return DraftHeadObjective(config, dataset, env)
    if config.lora_jobs:
        return LoRAJobs.build(config, model, dataset.jobs, env, layout)
    if config.task in ON_ROWS:
        parts, part = config.batch_share
        batch_size = config.batch_size // parts
        first = part * batch_size
        local_ids = [first + i for i in layout.samples(batch_size)]
        rest = dataset.validation, config.seq_len, env, layout
        return ON_ROWS[config.task](dataset.rows, local_ids, *rest)
    render, encode = load_chat(config.out)
    frozen = None
    if not config.lora and (config.task == "dpo" or config.kl):
        frozen = load_checkpoint(config.init, env.device, next(model.parameters()).dtype)
        frozen.requires_grad_(False)
    kwargs: dict[str, Any] = dict(seed=config.seed, reference=frozen)
    kwargs["all_reduce"] = layout.all_reduce_sum
    if config.task == "dpo":
        pairs = [pair for path in config.data for pair in read_preferences(Path(path))]
        rows, kwargs["validation"] = (
            preference_rows(part, render, encode, config.seq_len) for part in train_val_split(pairs)
        )
        n = config.batch_size // 2
        return DPO(model, rows, n, layout.samples(n), beta=config.beta, **kwargs)
    tasks = []
    for prompt, answer in (pair for path in config.data for pair in read_prompts(Path(path))):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        tasks.append(Task(messages[-1]["content"], encode(render(messages, True)), answer))
    tasks, validation = map(list, map(dict.values, train_val_split(tasks)))
    n = config.batch_size // config.num_generations
    kwargs |= dict(n=config.num_generations, max_new_tokens=config.max_new_tokens, kl=config.kl)
    return GRPO(
        model, make_engine(model, config.seq_len, autocast=env.autocast), tasks,
        load_reward(config.reward), load_tokenizer(config.out).decode, config.seq_len, n,
        layout.samples(n), autocast=env.autocast, validation=validation, **kwargs,
    )  # fmt: skip
