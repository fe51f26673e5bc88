"""Sparse upcycling: initialize an MoE model from a dense checkpoint.

    python train.py --init checkpoints/small --upcycle 8 --out runs/moe

Every expert is a copy of the dense MLP, and the router is initialized with small random weights
(Komatsuzaki et al., arXiv:2212.05055). As routing weights sum to 1 and all experts are equal, the
MoE model computes the same function as the dense model; training then differentiates the experts.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import contextlib
from dataclasses import replace

import torch
from torch import nn

import moe
from model import ModelConfig, MoE, Transformer
from training.config import TrainConfig


def upcycle_config(dense: ModelConfig, args: TrainConfig) -> ModelConfig:
    """--upcycle: the MoE config, in the first family whose config.json can represent it. ValueError
    for a model that cannot be upcycled."""
    what = "is an MoE model already" if dense.moe_layers else ""
    what = what or ("has mlp_bias, which experts do not support" if dense.mlp_bias else "")
    what = what or ("has multi-token prediction layers" if dense.n_mtp_layers else "")
    if what:
        raise ValueError(f"--upcycle requires a plain dense model: --init {args.init} {what}")
    moe_fields = dict(moe_layers=tuple(range(dense.n_layers)), n_experts=args.upcycle)
    moe_fields |= dict(n_experts_per_token=args.upcycle_top_k, expert_ffn_dim=dense.ffn_dim)
    moe_fields |= dict(scoring="softmax", correction_bias=False, n_groups=1, topk_groups=1)
    moe_fields |= dict(group_score_topk=1, n_shared_experts=0, routed_scaling=1.0)
    moe_fields |= dict(norm_topk=True)  # weights sum to 1: equal experts add up to the MLP
    for family in ("mixtral", "qwen3_moe"):
        with contextlib.suppress(ValueError):
            config = replace(dense, family=family, **moe_fields)
            config.to_hf()
            return config
    return replace(dense, family="sheaf", **moe_fields)


@torch.no_grad()
def upcycle_(model: Transformer, config: ModelConfig, seed: int) -> Transformer:
    """Sparse upcycling (arXiv:2212.05055), in place: every MLP becomes the MoE of `config`, with
    copies of the MLP as experts and a small random router. The model's output is unchanged."""
    rng = torch.Generator().manual_seed(seed)
    for i, block in enumerate(model.layers):
        with torch.device("meta"):
            moe_layer = MoE(config, i)
        gate, up, down = (p.weight for p in block.mlp.children())
        gate_up, down = moe.upcycle_mlp(gate, up, down, config.n_experts)
        router = torch.empty(moe_layer.router.shape).normal_(0.0, 0.02, generator=rng)
        moe_layer.router = nn.Parameter(router.to(gate.device))
        moe_layer.w_gate_up, moe_layer.w_down = nn.Parameter(gate_up), nn.Parameter(down)
        block.mlp = moe_layer
    model.config = config
    return model
