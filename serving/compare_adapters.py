"""A batch in which every request has one of several LoRA adapters, beside the same batch without
adapters, and beside PEFT's mixed batch (`adapter_names` of generate): in one process, in turn.

    python -m serving.compare_adapters [--checkpoint DIR] [--requests N]    or --dummy CONFIG

Greedy decoding of random prompts of equal length (PEFT pads others), with random adapters of mixed
ranks in all linear layers. Prints output tokens per second, medians over the rounds, the ratio to
the batch without adapters, and the share of requests whose output equals PEFT's; in bf16, nearly
equal logits may change places. Needs: peft, transformers; without peft its row is left out.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m serving.compare_adapters --help")

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from training.flags import check_positive

RANKS = (4, 8, 16, 32)
SIZES = dict(requests=64, adapters=16, prompt=32, new=32, rounds=3)  # flags and their defaults
Run = Callable[[], list[list[int]]]  # generates the output tokens of each request


def write_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]], rank: int, seed: int, base: str
) -> Path:
    """A random adapter in PEFT's format. shapes: (C, F) of each linear layer by its Hugging Face
    name."""
    from training.lora import CONFIG, PREFIX, WEIGHTS

    rng, tensors = torch.Generator().manual_seed(seed), {}
    for name, (C, F) in shapes.items():
        for key, shape, std in (("A", (rank, C), C**-0.5), ("B", (F, rank), 0.2 * rank**-0.5)):
            weight = torch.randn(shape, generator=rng) * std
            tensors[f"{PREFIX}{name}.lora_{key}.weight"] = weight
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    config |= {"bias": "none", "target_modules": targets, "base_model_name_or_path": base}
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def engine_runs(args: argparse.Namespace, prompts: list[list[int]], tmp: Path) -> dict[str, Run]:
    """The Engine of `generate.py --batch`, without and with adapters. Writes the adapters."""
    from generation.config import parse_args
    from generation.load import load
    from huggingface.weights import hf_modules, save_checkpoint
    from paged_kv import SamplingParams
    from serving.batch import build_engine
    from serving.build import engine_options, make_pool, register_adapter

    model_flag = ["--dummy", args.dummy] if args.dummy else ["--checkpoint", args.checkpoint]
    flags = ["--batch", "-", *model_flag, "--device", "cpu", "--max-num-seqs", str(args.requests)]
    config = parse_args([*flags, "--set", "prefix_cache=false"])  # equal prompts in every round
    model, _ = load(config, torch.device("cpu"))
    names = hf_modules(model)
    if args.dummy:
        save_checkpoint(model, tmp / "base")
    options = engine_options(config, model)
    plain = build_engine(model, **options)
    fused = model.layer_groups  # those without adapters
    pool = make_pool(model)
    mixed, with_adapters = build_engine(model, **options, adapters=pool), model.layer_groups
    shapes = {names[name]: shape for name, shape in pool.shapes.items()}
    for i in range(args.adapters):
        base = args.checkpoint or str(tmp / "base")
        write_adapter(tmp / f"a{i}", shapes, RANKS[i % len(RANKS)], i, base)
        register_adapter(pool, f"a{i}", tmp / f"a{i}")
    greedy = dict(temperature=0, max_new_tokens=args.new, ignore_eos=True)

    def run(engine: Any, groups: Any, adapters: list[str | None]) -> list[list[int]]:
        model.layer_groups = groups
        params = [SamplingParams(**greedy, adapter=name) for name in adapters]
        outputs = engine.generate(prompts, params)
        if error := next((output.error for output in outputs if output.error), None):
            raise ValueError(error)
        return [output.token_ids for output in outputs]

    each = [f"a{i % args.adapters}" for i in range(len(prompts))]
    return {
        "no adapters": lambda: run(plain, fused, [None] * len(prompts)),
        f"{args.adapters} adapters": lambda: run(mixed, with_adapters, each),
    }


def peft_run(args: argparse.Namespace, prompts: list[list[int]], tmp: Path) -> Run:
    """PEFT's generate with adapter_names."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = args.checkpoint or tmp / "base"
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, tmp / "a0", "a0")
    for i in range(1, args.adapters):
        model.load_adapter(tmp / f"a{i}", f"a{i}")
    model.bfloat16().eval()
    ids = torch.tensor(prompts)
    each = [f"a{i % args.adapters}" for i in range(len(prompts))]
    options = dict(do_sample=False, max_new_tokens=args.new, min_new_tokens=args.new)

    def run() -> list[list[int]]:
        mask = torch.ones_like(ids)
        out = model.generate(input_ids=ids, attention_mask=mask, adapter_names=each, **options)
        return out[:, ids.shape[1] :].tolist()

    return run


@torch.inference_mode()
def compare(args: argparse.Namespace) -> None:
    """Run all rounds, and print the table."""
    args.checkpoint = args.checkpoint or (None if args.dummy else "checkpoints/small")
    rng = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 4000, (args.requests, args.prompt), generator=rng).tolist()
    with tempfile.TemporaryDirectory() as folder:
        runs = engine_runs(args, prompts, Path(folder))
        if not args.no_peft and importlib.util.find_spec("peft"):
            runs["PEFT"] = peft_run(args, prompts, Path(folder))
        seconds, outputs = {name: [] for name in runs}, {}
        for i in range(args.rounds + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                outputs[name] = run()
                seconds[name] += [time.perf_counter() - start] if i else []  # the first warms up
    n, first = args.requests * args.new, statistics.median(seconds["no adapters"])
    print(f"{args.requests} requests, {args.prompt} + {args.new} tokens, ranks {RANKS} in turn")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:14}{n / median:10.1f} tok/s{first / median:8.2f}")
    if "PEFT" in outputs:
        ours = outputs[f"{args.adapters} adapters"]
        same = sum(map(list.__eq__, ours, outputs["PEFT"])) / len(ours)
        print(f"{same:.0%} of the outputs equal PEFT's")


def main() -> None:
    parser = argparse.ArgumentParser("python -m serving.compare_adapters")
    parser.add_argument("--checkpoint", default=None, help="default: checkpoints/small")
    parser.add_argument("--dummy", default=None, help="random weights, such as tinyllama-1.1b")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--no-peft", action="store_true")
    args = parser.parse_args()
    try:
        check_positive(args, *SIZES)
        compare(args)
    except ValueError as e:
        parser.exit(1, f"error: {e}\n")


if __name__ == "__main__":
    main()
