"""compress.py: a model in fewer bits, as generate.py's flags ask for it.

    python generate.py --quantize int8 "def quicksort("          quantized while it loads
    python generate.py --quantize int4 --calibrate gptq --save DIR
    python generate.py --checkpoint DIR --quantize-report        what each scheme costs and gains

Composition only: the schemes are quantize.py's, what needs data is calibrate.py's, and this file
knows the model: which linears share an input, what a block is, where the text comes from.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cpu
from model import ModelConfig, Transformer, load_checkpoint, save_checkpoint
from quantize import (
    Quantized,
    Scheme,
    from_config,
    quantize_,
    quantize_module,
    scheme_of,
    to_config,
    weight_only,
)

# --------------------------------------------------------------------------------------------------
# Loading and saving
# --------------------------------------------------------------------------------------------------


def load(args: argparse.Namespace, device: torch.device, dtype: torch.dtype | None) -> Transformer:
    """The model of --checkpoint, quantized as its folder says, or as --quantize."""
    path = args.checkpoint / "config.json"
    stored = json.loads(path.read_text(encoding="utf-8")).get("quantization_config") or {}
    if stored.get("quant_method") != "sheaf":
        each = partial(quantize_module, scheme=asked_scheme(args), skip=skipped(args))
        return prepared_(load_checkpoint(args.checkpoint, device, dtype, each=each))
    if args.quantize is not None:
        raise ValueError(
            f"--quantize: {args.checkpoint} is quantized already ({stored.get('scheme')}); leave "
            "the flag out, or start from the checkpoint that it was made of"
        )
    prepare = partial(from_config, config=stored)
    try:
        return prepared_(load_checkpoint(args.checkpoint, device, dtype, prepare=prepare))
    except ValueError as e:
        if not str(e).startswith("quantization_config"):
            raise
        raise ValueError(f"{path}: {e}") from None


def quantize_asked_(args: argparse.Namespace, model: Transformer) -> None:
    """--quantize on a model that is there."""
    asked_scheme(args)
    quantize_(model, args.quantize, skip=skipped(args), group_size=args.group_size)
    prepared_(model)


def prepared_(model: Transformer) -> Transformer:
    """On a CPU cpu.py's products in place of quantize.py's, where it has them."""
    ours = model.embed.weight.device.type == "cpu" and cpu.kernel() is not None
    for module in model.modules() if ours else ():
        if isinstance(module, Quantized) and module.scheme.product is weight_only:
            module.product = partial(cpu.packed_linear, otherwise=weight_only)
    return model


def asked_scheme(args: argparse.Namespace) -> Scheme:
    """The scheme that --quantize and --group-size say."""
    try:
        return scheme_of(args.quantize, args.group_size)
    except ValueError as e:
        flag = "--group-size" if str(e).startswith("group_size") else "--quantize"
        raise ValueError(f"{flag}: {e}") from None


def skipped(args: argparse.Namespace) -> tuple[str, ...]:
    """What stays in 16 bit: --quantize-skip says."""
    return tuple(filter(None, args.quantize_skip.split(",")))
