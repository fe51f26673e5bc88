"""The objective of --task: next-token prediction, DPO, GRPO, or a draft head (training/step.py)."""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import sys
from pathlib import Path

from huggingface.tokenizer import eos_ids
from huggingface.weights import load_checkpoint
from model import Transformer
from training.alignment import load_reward
from training.chats import map_items, padding_hint, preference_rows, prompt_text
from training.config import TrainConfig
from training.data import Prompt, read_preferences, read_prompts
from training.dataset import Dataset, load_chat, train_val_split
from training.dist_env import DistEnv
from training.draft_head import DraftHeadObjective
from training.lora_jobs import LoRAJobs
from training.parallelize import ParallelDims
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
    if config.task == "dpo":
        return build_dpo(config, model, env, layout)
    if config.task == "grpo":
        return build_grpo(config, model, env, layout)
    parts, part = config.batch_share
    batch_size = config.batch_size // parts
    local_ids = [part * batch_size + i for i in layout.samples(batch_size)]
    rest = dataset.validation, config.seq_len, env, layout
    return ON_ROWS[config.task](dataset.rows, local_ids, *rest)


def build_dpo(config: TrainConfig, model: Transformer, env: DistEnv, layout: ParallelDims) -> DPO:
    """--task dpo: the pairs of --data, split for validation. ValueError names file and line."""
    pairs = [pair for path in config.data for pair in read_preferences(Path(path))]
    chat = *load_chat(config.out, model.config), config.seq_len
    rows, validation = (preference_rows(part, *chat) for part in train_val_split(pairs))
    if env.rank == 0 and (hint := padding_hint(rows, "")):
        print(hint, file=sys.stderr)
    n = config.batch_size // 2
    return DPO(
        model, rows, n, layout.samples(n), config.seed, config.beta,
        frozen_reference(config, model, env), layout.all_reduce_sum, validation,
    )  # fmt: skip


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


def frozen_reference(config: TrainConfig, model: Transformer, env: DistEnv) -> Transformer | None:
    """A frozen copy of the model of --init. With --lora None: `model` without its adapters."""
    if config.lora:
        return None
    dtype = next(model.parameters()).dtype
    return load_checkpoint(config.init, env.device, dtype).requires_grad_(False)
