"""metrics.py: what a run of train.py says of itself: metrics.jsonl, its pictures, a profile.

    python train.py --out runs/mine --plot        metrics.png
    python train.py ... --profile 10              the 10th step: a Chrome trace, and its memory
    python train.py ... --tensorboard             the same numbers for TensorBoard

A row of metrics.jsonl is a step, of all ranks together and the same under every layout: `loss` and
`val_loss` in nats per token that counts (dpo's per pair; `loss` with the share of --output-z-loss),
`grad_norm` of the whole gradient before clipping, `tokens_per_second`, `mfu` where the device's
peak is known, `data_wait` in seconds of the rank that waited longest. Where a step is validated,
also `peak_memory` in bytes of the rank that has most, and `comm_wait`, the share of the time since
the last one that ranks stood in collectives. (On GPUs kernels wait and not programs: there
--profile finds `exposed_communication` in its trace.) Then `worst_load` and the like of mixtures,
why a batch was `skipped`, and what the task adds: dpo `reward_margin` and `accuracy`, validated as
`val_...`; grpo `reward_mean`, `completion_length`, `truncated`, `no_signal`, `kl`, `clipped`, and
`val_reward`.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from huggingface.weights import write_atomically
from model import Transformer
from parallelism.dist_env import DistEnv

# Dense matmul peaks, FLOP/s, bf16 without sparsity (vendor datasheets). A device that is not here
# gets no MFU: a wrong one is worse than none. FP8 has twice these; --fp8 is measured against them
# too, so that its MFU is bf16's times the speed-up.
PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}

# --------------------------------------------------------------------------------------------------
# Work and memory
# --------------------------------------------------------------------------------------------------


def flops_per_token(model: Transformer, seq_len: int, passes: int = 6) -> int:
    """Forward and backward: 6 per weight that multiplies (of experts, the K of E that a token
    meets), and 6 * Hq * (D + Dv) per key that a query sees, half the sequence on average, in every
    layer. MFU counts these and no recomputation (PaLM, arXiv:2204.02311, appendix B)."""
    c = model.config
    weights = 0.0
    for p in model.parameters():
        if p.dim() >= 2:
            stack = p.dim() == 3  # of experts
            weights += c.n_experts_per_token * p[0].numel() if stack else p.numel()
    if not c.tie_embeddings:
        weights -= model.embed.weight.numel()  # looked up, not multiplied
    weights += c.n_mtp_layers * model.head.weight.numel()  # which multiplies once more
    windows = (c.windows or (None,) * c.n_layers) + (None,) * c.n_mtp_layers
    short = [min(w or seq_len, seq_len) for w in windows]
    keys = sum(w - w * w / (2 * seq_len) for w in short)
    return round(
        passes * weights + 6 * c.n_heads * (c.head_dim + (c.v_head_dim or c.head_dim)) * keys
    )


def peak_flops(device: torch.device, dtype: str, world: int) -> float:
    """Of all ranks together, FLOP/s; 0 where it is not known."""
    if device.type != "cuda" or dtype not in ("bf16", "fp16"):
        return 0.0
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device), 0.0) * world


class PeakMemory:
    """The most memory since this was made: on a GPU of tensors; on a CPU of the process, beyond
    what it held then, where the system can say so (Linux)."""

    def __init__(self, device: torch.device):
        self.device, self.before = device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif STATUS.exists():
            warm_up_libraries()
            with contextlib.suppress(OSError):  # then the peak may be older than this
                Path("/proc/self/clear_refs").write_text("5")
            self.before = _resident("VmRSS")

    def bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(0, _resident("VmHWM") - self.before) if STATUS.exists() else 0


def warm_up_libraries() -> None:
    """What products, attention and AdamW load and set up at their first use is no model's."""
    p = nn.Parameter(torch.zeros(1, 1, 64, 64))
    y = F.scaled_dot_product_attention(p, p, p, is_causal=True)[0, 0] @ p[0, 0]
    F.cross_entropy(y, torch.zeros(64, dtype=torch.int64)).backward()
    torch.optim.AdamW([p], fused=True).step()


STATUS = Path("/proc/self/status")


def _resident(field: str) -> int:
    """Bytes, by /proc/self/status."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


# --------------------------------------------------------------------------------------------------
# metrics.jsonl
# --------------------------------------------------------------------------------------------------


class Metrics:
    """The rows of a run, from step first + 1 on, into OUT/metrics.jsonl, each at once."""

    def __init__(self, out: Path, first: int, tensorboard: bool = False):
        truncate_metrics(out / "metrics.jsonl", first)
        self.file = open(out / "metrics.jsonl", "a", encoding="utf-8")
        self.board = None
        if tensorboard:  # which drops what it has of the steps from purge_step on
            self.board = summary_writer()(out / "tensorboard", purge_step=first + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        odd = {k: str(x) for k, x in row.items() if isinstance(x, float) and not math.isfinite(x)}
        self.file.write(json.dumps({**row, **odd}) + "\n")  # JSON has no NaN
        self.file.flush()
        for name, value in row.items() if self.board else ():
            if isinstance(value, (int, float)) and name != "step":
                self.board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self.file.close()
        if self.board:
            self.board.close()


def summary_writer() -> Any:
    """TensorBoard's. ValueError where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "--tensorboard needs tensorboard, which is optional: pip install tensorboard"
        ) from None
    return SummaryWriter


def truncate_metrics(path: Path, step: int) -> None:
    """Drop the lines past `step`: steps made after the last save are about to be made again."""
    if path.exists():
        keep = [json.dumps(row) + "\n" for row in read_metrics(path) if row["step"] <= step]
        write_atomically(path, lambda tmp: tmp.write_text("".join(keep)))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a line that a crash left unfinished is not one."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with contextlib.suppress(json.JSONDecodeError, RecursionError):
            rows.append(json.loads(line))
    wanted = {"step", "loss", "lr"}
    return [row for row in rows if isinstance(row, dict) and wanted <= row.keys()]


# --------------------------------------------------------------------------------------------------
# Pictures
# --------------------------------------------------------------------------------------------------


def pyplot() -> Any:
    """matplotlib's, drawing into files. ValueError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib, which is optional: pip install matplotlib"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(out: Path) -> Path:
    """Loss, learning rate, throughput and experts' load of OUT/metrics.jsonl as OUT/metrics.png."""
    path = out / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"--plot: {path} is not there; train first, or name the run with --out")
    draw = pyplot()
    rows = read_metrics(path)
    heights = (3, 1, 1) + (1.5, 1.5) * any("worst_load" in r for r in rows)
    more = dict(figsize=(8, 1.5 * sum(heights)), height_ratios=heights)
    figure, (top, middle, bottom, *mixtures) = draw.subplots(len(heights), **more)
    for above in (top, middle):
        above.sharex(bottom)
        above.label_outer()
    kept = [r for r in rows if "skipped" not in r]
    top.plot([r["step"] for r in kept], [r["loss"] for r in kept], lw=0.8, label="training loss")
    for r in rows:
        if "skipped" in r:
            top.axvline(r["step"], color="C3", lw=0.8)
    validated = [r for r in rows if "val_loss" in r]
    steps, losses = [r["step"] for r in validated], [r["val_loss"] for r in validated]
    top.plot(steps, losses, "o-", label="validation loss")
    top.set(ylabel="loss (nats per token)")
    top.legend()
    middle.plot([r["step"] for r in rows], [r["lr"] for r in rows])
    middle.set(ylabel="learning rate")
    speeds = [r.get("tokens_per_second", math.nan) for r in rows]
    bottom.plot([r["step"] for r in rows], speeds, lw=0.8)
    bottom.set(xlabel="step", ylabel="tokens/s", ylim=(0, None))
    if mixtures:
        plot_experts(figure, *mixtures, rows)
    figure.tight_layout()
    figure.savefig(out / "metrics.png", dpi=120)
    return out / "metrics.png"


def plot_experts(figure: Any, line: Any, heat: Any, rows: list[dict[str, Any]]) -> None:
    """The balance of all steps, and every expert's load in the last step that has it."""
    rows = [r for r in rows if "worst_load" in r]
    steps, right = [r["step"] for r in rows], line.twinx()
    dead = f"busiest expert ({rows[-1].get('dead_experts', 0)} without a token in the last step)"
    line.plot(steps, [r["worst_load"] for r in rows], lw=0.8, label=dead)
    line.set(xlabel="step", ylabel="load / mean")
    entropy = [r.get("load_entropy", math.nan) for r in rows]  # a run may be older than it
    right.plot(steps, entropy, "C1", lw=0.8, label="entropy")
    right.set(ylabel="entropy / log E")
    right.legend(handles=[*line.lines, *right.lines], loc="center right")
    loads = [(r["step"], r["expert_load"]) for r in rows if "expert_load" in r]
    step, load = loads[-1] if loads else (0, [[0]])
    shares = [[n * len(layer) / max(1, sum(layer)) for n in layer] for layer in load]
    image = heat.imshow(shares, aspect="auto", vmin=0, vmax=2, cmap="coolwarm")
    heat.set(xlabel="expert", ylabel="mixture", title=f"load / mean, step {step}")
    figure.colorbar(image, ax=heat)


# --------------------------------------------------------------------------------------------------
# A step, looked at closely
# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def profiled(out: Path, memory: PeakMemory, rank: int) -> Iterator[dict[str, Any]]:
    """Write OUT/profile/rank<N>.trace.json, for chrome://tracing or Perfetto, of what runs inside,
    and its memory: on a GPU rank<N>.memory.pickle, for pytorch.org/memory_viz, else
    rank<N>.memory.json, the bytes that each operation allocated. What is yielded gets, on a GPU,
    the seconds in which it only communicates."""
    from torch.profiler import ProfilerActivity, profile  # slow to import

    folder, cuda = out / "profile", memory.device.type == "cuda"
    folder.mkdir(exist_ok=True)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    if cuda:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    facts: dict[str, Any] = {}
    with profile(activities=kinds, profile_memory=True, record_shapes=True) as seen:
        yield facts
    seen.export_chrome_trace(str(trace := folder / f"rank{rank}.trace.json"))
    if cuda:
        events = json.loads(trace.read_text())["traceEvents"]
        facts["exposed_communication"] = round(exposed_communication(events)[0], 6)
        torch.cuda.memory._dump_snapshot(str(folder / f"rank{rank}.memory.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
        return
    used = [(e.key, e.count, e.self_cpu_memory_usage) for e in seen.key_averages()]
    rows = [dict(op=op, calls=n, bytes=b) for op, n, b in sorted(used, key=lambda u: -u[2]) if b]
    text = json.dumps({"peak_memory": memory.bytes(), "operations": rows}, indent=1)
    (folder / f"rank{rank}.memory.json").write_text(text)


def exposed_communication(events: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """(seconds in which a GPU does nothing but communicate, seconds from its first kernel to the
    end of its last), of the "traceEvents" of a Chrome trace: NCCL's kernels, less what others
    cover."""
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for e in events:
        if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            spans["nccl" in e["name"].lower()].append((e["ts"], e["ts"] + e["dur"]))
    both = [span for some in spans.values() for span in some]
    if not both:
        return 0.0, 0.0
    whole = max(end for _, end in both) - min(start for start, _ in both)
    return (_covered(both) - _covered(spans[False])) / 1e6, whole / 1e6


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of their union."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def progress_bar(first: int, steps: int, place: DistEnv) -> tqdm:
    """The bar over steps first..steps, on rank 0."""
    return tqdm(
        range(first, steps),
        initial=first,
        total=steps,
        disable=place.rank > 0,
        mininterval=0.5 if sys.stderr.isatty() else 15,
        dynamic_ncols=True,
    )


def summary(
    args: argparse.Namespace, model: Transformer, n_tokens: int | None, first: int, place: DistEnv
) -> str:
    """What is about to be trained, in one line."""
    size = sum(p.numel() for p in model.parameters()) / 1e6
    step_tokens = args.batch_size * args.seq_len
    if first >= args.steps:
        return f"{args.out}: all {first} steps are done; --steps makes a run longer"
    text = ""
    if n_tokens is not None:
        epochs = args.steps * step_tokens / n_tokens
        text = f" on {n_tokens / 1e6:.2f}M tokens, {epochs:.1f} epochs,"
    products = f", FP8 {args.fp8}" if args.fp8 else f", QAT {args.qat}" if args.qat else ""
    return (
        f"{size:.2f}M parameters{text} {args.steps} steps of {step_tokens} from step {first}, "
        f"{args.dtype}{products} on {place.device}"
    )
