"""Convert a checkpoint to fewer key-value heads: grouped-query attention from multi-head attention.

    python -m huggingface.mha_to_gqa checkpoints/small runs/mqa --kv-heads 1
    python train.py --init runs/mqa --out runs/uptrained --steps 200

Each group of key-value heads is replaced by the mean of its projections (GQA, Ainslie et al.,
arXiv:2305.13245, section 2.1), which the paper finds better than its first head or a random one.
The KV cache shrinks in the same ratio. The converted model is worse until it is trained for a few
percent of the original steps (uptraining).

Equivalence (test_all.py): a checkpoint whose heads are equal within each group keeps its logits.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m huggingface.mha_to_gqa CHECKPOINT OUT --kv-heads N")

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch

from huggingface.weights import load_checkpoint, save_checkpoint
from model import Attention, Transformer

WEIGHTS = "*.safetensors *.bin *.pth *.pt *.gguf *.index.json config.json".split()  # not copied


@torch.no_grad()
def pool_kv_heads_(model: Transformer, n_kv_heads: int) -> Transformer:
    """In place: mean-pool the key and value heads of every layer to n_kv_heads."""
    config = model.config
    if config.kv_lora_rank:
        raise ValueError("--kv-heads: latent attention (kv_lora_rank) has no key-value heads")
    if config.qk_conv:
        raise ValueError("--kv-heads does not support qk_conv: heads have kernels of their own")
    if not (0 < n_kv_heads <= config.n_kv_heads and config.n_kv_heads % n_kv_heads == 0):
        raise ValueError(
            f"--kv-heads {n_kv_heads} must divide the checkpoint's {config.n_kv_heads} "
            "key-value heads"
        )
    for module in model.modules():
        if isinstance(module, Attention):
            for linear in (module.k_proj, module.v_proj):
                for p in linear.parameters():
                    heads = p.unflatten(0, (n_kv_heads, -1, config.head_dim))
                    p.data = heads.float().mean(1).flatten(0, 1).to(p.dtype)
                linear.out_features = len(linear.weight)
    model.config = replace(config, n_kv_heads=n_kv_heads)
    return model


def main(argv: list[str]) -> int:
    """Exit code 2 and one line for a folder or number that cannot be converted."""
    parser = argparse.ArgumentParser("python -m huggingface.mha_to_gqa", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="Hugging Face checkpoint folder")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--kv-heads", type=int, required=True, help="key-value heads of OUT")
    args = parser.parse_args(argv)
    try:
        if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
            raise ValueError(f"{args.out}: is not empty, or no folder; give another")
        model = pool_kv_heads_(load_checkpoint(args.checkpoint), args.kv_heads)
        save_checkpoint(model, args.out)
        for path in args.checkpoint.iterdir():  # tokenizer, chat template
            if path.is_file() and not any(map(path.match, WEIGHTS)):
                shutil.copy(path, args.out)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
