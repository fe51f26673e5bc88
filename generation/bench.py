"""Speed of generate.py: memory bandwidth, timed runs and their summary.

    python -m generation.bench --gpu-report    every kernel and program on this machine's GPUs

A decode step reads every weight and the KV cache once, so bytes / bandwidth bounds its time. With
--bench, summarize has the tokens/s of that bound beside the measured ones: "predicted" counts those
bytes, at the bandwidth measured on this device, and neither compute nor launches nor transfers. It
is left out where these are most of a step; see predicts.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m generation.bench --gpu-report")

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from huggingface.tokenizer import Continuation
from model import Transformer


def measure_bandwidth(device: torch.device) -> float:
    """Memory bandwidth of the device, bytes per second: the best of 5 measurements of reading 512
    MB (on CUDA 1 GB, ten times per measurement, and also of copying it)."""
    on_cuda = device.type == "cuda"
    x = torch.ones(2**28 if on_cuda else 2**27, device=device)
    y = torch.empty_like(x) if on_cuda else None
    size, repeats, best = x.numel() * x.element_size(), 10 if on_cuda else 1, 0.0
    for _ in range(5):
        for moved, fn in ((size, x.sum), (2 * size, lambda: y.copy_(x)))[: 1 + on_cuda]:
            synchronize(device)
            start = time.perf_counter()
            for _ in range(repeats):
                fn()
            synchronize(device)
            best = max(best, moved * repeats / (time.perf_counter() - start))
    return best


def weight_bytes(model: Transformer, batch: int = 1) -> int:
    """Bytes of weights that a decode step reads: all matmul weights (of the experts, the expected
    share that is used by at least one of the `batch` rows if routing is uniform) and one embedding
    row per batch row, without the MTP layers."""
    c, total = model.config, 0.0
    # not head.weight, which a quantized layer would dequantize
    embed, head = (getattr(m, "_parameters", {}).get("weight") for m in (model.embed, model.head))
    for name, p in chain(model.named_parameters(), model.named_buffers()):
        if name.startswith("mtp.") or name.endswith(".expert_bias"):
            continue
        if p is embed and head is not embed:
            total += batch * p[0].nbytes
        elif p.dim() == 3:
            E = len(model.get_submodule(name.rpartition(".w_")[0]).router)
            total += p.nbytes * (1 - (1 - c.n_experts_per_token / E) ** batch)
        else:
            total += p.nbytes
    return round(total)


MIN_BYTES = 2**28  # a step that reads less finds it in caches, or waits for launches


def predicts(args: Any, decoder: Any) -> bool:
    """Whether bytes / bandwidth predicts the steps of generate.py --bench: one row and process, a
    token per step, all weights on the device, and on CUDA no eager launches."""
    plain = decoder.speculator is None and args.offload is None and args.n == 1
    alone = not torch.distributed.is_initialized()
    return bool(args.bench and plain and alone and (args.compile or not decoder.token.is_cuda))


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class RunTimings:
    """Timings of one run, in seconds."""

    tokens: int  # new tokens of the longest row
    prefill_seconds: float  # until the first token
    decode_seconds: float  # all steps after the first
    decode_tokens: int  # of all rows, after the first step
    decode_bytes: int  # read by those steps, not counting the drafter
    joules_per_token: float | None = None  # of the whole run, over the new tokens of all rows


def time_steps(
    steps: Iterable[list[int]], decoder: Any, rows: list[Continuation],
    energy: Callable[[], float] | None = None,
) -> RunTimings:  # fmt: skip
    """Run all steps and time them. energy: joules so far, of generation/energy.py."""
    joules, start = energy and energy(), time.perf_counter()
    n, prefill_seconds, decode_bytes = 0, 0.0, 0
    for _ in steps:
        if n == 0:
            prefill_seconds = time.perf_counter() - start
        else:
            decode_bytes += decoder.bytes_per_step()
        n += 1
    decode_seconds = time.perf_counter() - start - prefill_seconds
    tokens = [len(row.tokens) for row in rows]
    decode_tokens = sum(tokens) - len(tokens)
    joules = energy and (energy() - joules) / sum(tokens)
    timings = prefill_seconds, decode_seconds, decode_tokens, decode_bytes
    return RunTimings(max(tokens), *timings, joules)


def benchmark(
    run: Callable[[], RunTimings], n: int, decoder: Any
) -> tuple[list[RunTimings], list[RunTimings]]:
    """n runs after a warm-up, and as many without the decoder's drafts or exits if it has any: in
    turns, so that other load on the machine affects both."""
    runs, baseline, speculator = [], [], decoder.speculator
    for _ in range(n + 1):
        if speculator is not None:
            decoder.speculator = None
            baseline.append(run())
            decoder.speculator = speculator
            speculator.reset()
        runs.append(run())
    return runs[1:], baseline[1:]


def summarize(
    runs: list[RunTimings], prompt_tokens: int, load_seconds: float, bandwidth: float,
    predict: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Medians over the runs, under the keys that --json prints; predict: see `predicts`."""
    med = lambda f: statistics.median(f(r) for r in runs)
    summary = {
        "prompt_tokens": prompt_tokens,
        "new_tokens": runs[-1].tokens,
        "load_seconds": load_seconds,
        "first_token_seconds": med(lambda r: r.prefill_seconds),
        "prefill_tokens_per_second": prompt_tokens / med(lambda r: r.prefill_seconds),
    }
    if runs[-1].tokens > 1:
        speed = med(lambda r: r.decode_bytes / r.decode_seconds / 1e9)
        summary["tokens_per_second"] = med(lambda r: r.decode_tokens / r.decode_seconds)
        per_token = med(lambda r: r.decode_bytes / r.decode_tokens)
        if predict and per_token >= MIN_BYTES:
            summary["predicted_tokens_per_second"] = bandwidth / per_token
        summary |= {
            "gigabytes_per_second": speed,
            "device_gigabytes_per_second": bandwidth / 1e9,
            "bandwidth_share": speed * 1e9 / bandwidth,
        }
    if runs[-1].joules_per_token is not None:
        summary["joules_per_token"] = med(lambda r: r.joules_per_token)
    return {k: round(v, 4) for k, v in summary.items()}


def speedup(runs: list[RunTimings], baseline: list[RunTimings]) -> dict[str, Any]:
    """Speedup over `baseline`, the same runs without drafts or exits; {} if there is none."""
    if not baseline or runs[-1].tokens < 2:
        return {}
    med = lambda runs: statistics.median(r.decode_tokens / r.decode_seconds for r in runs)
    return {
        "baseline_tokens_per_second": round(med(baseline), 4),
        "speedup": round(med(runs) / med(baseline), 4),
    }


def summary_line(s: dict[str, Any], device: str) -> str:
    """The summary as one line."""
    line = (
        f"[{device}] loaded in {s['load_seconds']:.2f} s, first token after "
        f"{s['first_token_seconds']:.3f} s ({s['prompt_tokens']} prompt tokens, "
    )
    if "cached_tokens" in s:
        line += f"{s['cached_tokens']} of them from the KV store, "
    line += f"{s['prefill_tokens_per_second']:.0f} tok/s)"
    if "tokens_per_second" in s:
        line += f", then {s['tokens_per_second']:.1f} tok/s"
        if "predicted_tokens_per_second" in s:
            line += f" (predicted {s['predicted_tokens_per_second']:.1f})"
        line += (
            f" reading {s['gigabytes_per_second']:.2f} GB/s, {s['bandwidth_share']:.0%} of the "
            f"{s['device_gigabytes_per_second']:.1f} GB/s measured here"
        )
    if "joules_per_token" in s:
        line += f"; {s['joules_per_token']:.4g} J per token"
    if "kv_tokens" in s:
        line += f"; up to {s['kv_tokens']} tokens per KV head"
    if "kv_fetched_bytes" in s:
        line += f", {s['kv_fetched_bytes'] / 1e6:.1f} MB fetched"
    if "confidence" in s:
        line += f"; the small model's answer, confidence {s['confidence']:.3f}"
    if s.get("verifications"):
        rates = s["acceptance"]
        while len(rates) > 1 and rates[-1] == 0 == rates[-2]:
            rates = rates[:-1]
        accepted = " ".join(f"{rate:.0%}" for rate in rates)
        line += f"; {s['verifications']} verifications of drafts, "
        line += f"{s['tokens_per_verification']:.2f} tokens each, drafts accepted {accepted}"
    elif "verifications" in s:
        line += "; no drafts"
    elif "layers_per_step" in s:
        line += f"; {s['layers_per_step']:.2f} layers per token"
        if s["agreement"] is not None:
            line += f", {s['agreement']:.1%} of the tokens are the full model's"
    if "speedup" in s:
        line += f"; {s['speedup']:.2f}x the {s['baseline_tokens_per_second']:.1f} tok/s without "
        line += "exits" if "layers_per_step" in s else "drafts"
    return line


def device_name(device: torch.device, mesh: Any = None, cp: int | None = None) -> str:
    """The device of one rank, and the sizes of --pp, --tp and --cp."""
    name = f"{device.type}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    dims = [] if mesh is None else [d for d in ("pp", "tp") if mesh.size(d) > 1] or ["tp"]
    sizes = [f"{d} {mesh.size(d)}" for d in dims] + ([f"cp {cp}"] if (cp or 1) > 1 else [])
    return ", ".join([name, *sizes])


if __name__ == "__main__":
    from generation import gpu_report

    raise SystemExit(gpu_report.main(sys.argv[1:]))
