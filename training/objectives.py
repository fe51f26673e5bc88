"""The objective of --task: next-token prediction, DPO, GRPO, or a draft head (training/step.py)."""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

from model import Transformer
from training.config import TrainConfig
from training.dataset import Dataset
from training.dist_env import DistEnv
from training.dpo import build_dpo
from training.draft_head import DraftHeadObjective
from training.grpo import build_grpo
from training.lora_jobs import LoRAJobs
from training.parallelize import ParallelDims
from training.step import NextToken, Objective

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
