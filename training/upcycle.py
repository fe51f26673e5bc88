"""upcycle.py: experts from an MLP: a mixture that begins as the dense model it is made of.

    python train.py --init checkpoints/small --upcycle 8 --out runs/mixture

Sparse upcycling (Komatsuzaki et al., arXiv:2212.05055): every expert is a copy of the dense MLP,
and the router is drawn small. Weights that sum to 1 over equal experts are the MLP, so the mixture
computes what the dense model did, and training drives its experts apart.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import argparse
import contextlib
from dataclasses import replace

import torch
from torch import nn

import moe
from model import ModelConfig, MoE, Transformer


def upcycle_config(dense: ModelConfig, args: argparse.Namespace) -> ModelConfig:
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
        gate_up, down = moe.upcycle_mlp(gate, up, down, config.n_experts)
        router = torch.empty(mixture.router.shape).normal_(0.0, 0.02, generator=rng)
        mixture.router = nn.Parameter(router.to(gate.device))
        mixture.w_gate_up, mixture.w_down = nn.Parameter(gate_up), nn.Parameter(down)
        block.mlp = mixture
    model.config = config
    return model
