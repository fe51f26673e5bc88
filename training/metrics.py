"""Metrics of a training run: metrics.jsonl, plots, TensorBoard, the profiler, FLOPs and memory.

    python train.py --out runs/mine --plot         plot metrics.png
    python train.py ... --profile 10               Chrome trace and memory of the 10th step
    python train.py ... --set tensorboard=true     also log to TensorBoard

A row of metrics.jsonl is one step, over all ranks, the same under every parallelism: `loss` and
`val_loss` in nats per target token (dpo: per pair; `loss` includes output_z_loss), `grad_norm` of
the whole gradient before clipping, `tokens_per_second` without padding, `mfu` if the device's peak
is known, `data_wait` in seconds of the slowest rank. Steps with validation add `peak_memory` in
bytes of the rank with the most, and `comm_wait`, the share of time since the last validation that
ranks were blocked in collectives. (On GPUs, kernels wait instead of the program: use --profile,
which measures `exposed_communication` in its trace.) MoE models add `worst_load`, `load_entropy`,
`dead_experts`; a skipped batch adds the reason as `skipped`; --task dpo adds `reward_margin` and
`accuracy`, with validation `val_...`; grpo `reward_mean`, `completion_length`, `truncated`,
`no_signal`, `kl`, `clipped` and `val_reward`.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from huggingface.weights import write_atomically
from model import ModelConfig, Transformer
from training.config import TrainConfig
from training.dist_env import DistEnv

# Dense bf16 matmul peaks in FLOP/s, without sparsity (vendor datasheets). Other devices report no
# MFU. FP8 peaks are twice these; the MFU of --fp8 is also relative to bf16.
PEAK_FLOPS = {
    "NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12, "NVIDIA L40S": 362e12, "NVIDIA L4": 121e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}  # fmt: skip


def flops_per_token(model: Transformer, seq_len: int, flops_per_weight: int = 6) -> int:
    """FLOPs per token of forward and backward: 6 per matmul weight (of experts, the K of E that a
    token uses), and 6 * Hq * (D + Dv) per key that a query attends to (half the sequence on
    average) in every layer. Recomputation is not counted, as in MFU (PaLM, arXiv:2204.02311,
    appendix B). flops_per_weight: 6 for training, 4 with frozen weights."""
    c = model.config
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    experts = sum(p[0].numel() for p in model.parameters() if p.dim() == 3)
    weights += c.n_experts_per_token * experts
    if not c.tie_embeddings:
        weights -= model.embed.weight.numel()  # a lookup, not a matmul
    weights += c.n_mtp_layers * model.head.weight.numel()  # the head runs again for each MTP layer
    windows = (c.windows or (None,) * c.n_layers) + (None,) * c.n_mtp_layers
    windows = [min(w or seq_len, seq_len) for w in windows]
    keys = sum(w - w * w / (2 * seq_len) for w in windows)
    attention = 6 * c.n_heads * (c.head_dim + (c.v_head_dim or c.head_dim)) * keys
    return round(flops_per_weight * weights + attention)


def peak_flops(device: torch.device, dtype: str, world: int) -> float:
    """Peak FLOP/s of all ranks together; 0 if unknown."""
    if device.type != "cuda" or dtype not in ("bf16", "fp16"):
        return 0.0
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device), 0.0) * world


class PeakMemory:
    """Peak memory since construction: on a GPU, of tensors; on a CPU, of the process, relative to
    its size at construction (Linux only, else 0)."""

    def __init__(self, device: torch.device):
        self.device, self.before = device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif STATUS.exists():
            warm_up_libraries()
            with contextlib.suppress(OSError):  # if not reset, the peak may be an earlier one
                Path("/proc/self/clear_refs").write_text("5")
            self.before = _proc_status("VmRSS")

    def bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return max(0, _proc_status("VmHWM") - self.before) if STATUS.exists() else 0


def warm_up_libraries() -> None:
    """Run matmul, attention and AdamW once: memory allocated at first use is not to be counted."""
    p = nn.Parameter(torch.zeros(1, 1, 64, 64))
    y = F.scaled_dot_product_attention(p, p, p, is_causal=True)[0, 0] @ p[0, 0]
    F.cross_entropy(y, torch.zeros(64, dtype=torch.int64)).backward()
    torch.optim.AdamW([p], fused=True).step()


STATUS = Path("/proc/self/status")


def _proc_status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


class Metrics:
    """Appends the rows of a run after step `first` to OUT/metrics.jsonl, flushing each."""

    def __init__(self, out: Path, first: int, tensorboard: bool = False):
        path = out / "metrics.jsonl"
        if path.exists():  # steps after the last checkpoint will run again
            keep = [json.dumps(row) + "\n" for row in read_metrics(path) if row["step"] <= first]
            write_atomically(path, lambda tmp: tmp.write_text("".join(keep)))
        self.file = open(path, "a", encoding="utf-8")
        self.board = None
        if tensorboard:  # purge_step: TensorBoard drops older data from this step on
            self.board = summary_writer()(out / "tensorboard", purge_step=first + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        is_json = lambda x: not isinstance(x, float) or math.isfinite(x)  # JSON has no NaN, no inf
        values = {name: x if is_json(x) else str(x) for name, x in row.items()}
        try:
            self.file.write(json.dumps(values) + "\n")
            self.file.flush()
        except OSError as e:
            raise OSError(f"{self.file.name}: cannot be written ({e.strerror})") from None
        for name, value in row.items() if self.board else ():
            if isinstance(value, (int, float)) and name != "step":
                self.board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self.file.close()
        if self.board:
            self.board.close()


def summary_writer() -> Any:
    """TensorBoard's SummaryWriter class. ValueError if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--set tensorboard=true needs it: pip install tensorboard") from None
    return SummaryWriter


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without lines that a crash left incomplete."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        with contextlib.suppress(json.JSONDecodeError, RecursionError):
            rows.append(json.loads(line))
    required = {"step", "loss", "lr"}
    return [row for row in rows if isinstance(row, dict) and required <= row.keys()]


def pyplot() -> Any:
    """matplotlib.pyplot with the file backend. ValueError if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(out: Path) -> Path:
    """Plot loss, learning rate, throughput and expert load of a run to OUT/metrics.png."""
    path = out / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"--plot: {path} does not exist; train first, or give the run's --out")
    plt = pyplot()
    rows = read_metrics(path)
    heights = (3, 1, 1) + (1.5, 1.5) * any("worst_load" in r for r in rows)
    size = dict(figsize=(8, 1.5 * sum(heights)), height_ratios=heights)
    figure, (top, middle, bottom, *expert_axes) = plt.subplots(len(heights), **size)
    for axes in (top, middle):
        axes.sharex(bottom)
        axes.label_outer()
    line = lambda axes, name, rows, *style, **options: axes.plot(
        [r["step"] for r in rows], [r.get(name, math.nan) for r in rows], *style, **options
    )
    line(top, "loss", [r for r in rows if "skipped" not in r], lw=0.8, label="training loss")
    for r in rows:
        if "skipped" in r:
            top.axvline(r["step"], color="C3", lw=0.8)
    line(top, "val_loss", [r for r in rows if "val_loss" in r], "o-", label="validation loss")
    top.set(ylabel="loss (nats per token)")
    top.legend()
    line(middle, "lr", rows)
    middle.set(ylabel="learning rate")
    line(bottom, "tokens_per_second", rows, lw=0.8)
    bottom.set(xlabel="step", ylabel="tokens/s", ylim=(0, None))
    if expert_axes:
        plot_experts(figure, *expert_axes, rows)
    figure.tight_layout()
    figure.savefig(out / "metrics.png", dpi=120)
    return out / "metrics.png"


def plot_experts(figure: Any, line: Any, heat: Any, rows: list[dict[str, Any]]) -> None:
    """Plot load balance over steps, and a heat map of each expert's load in the last validation."""
    rows = [r for r in rows if "worst_load" in r]
    steps, right = [r["step"] for r in rows], line.twinx()
    dead = f"busiest expert ({rows[-1].get('dead_experts', 0)} without a token in the last step)"
    line.plot(steps, [r["worst_load"] for r in rows], lw=0.8, label=dead)
    line.set(xlabel="step", ylabel="load / mean")
    entropy = [r.get("load_entropy", math.nan) for r in rows]  # missing in older runs
    right.plot(steps, entropy, "C1", lw=0.8, label="entropy")
    right.set(ylabel="entropy / log E")
    right.legend(handles=[*line.lines, *right.lines], loc="center right")
    loads = [(r["step"], r["expert_load"]) for r in rows if "expert_load" in r]
    step, load = loads[-1] if loads else (0, [[0]])
    shares = [[n * len(layer) / max(1, sum(layer)) for n in layer] for layer in load]
    width = max(map(len, shares))  # layers may have fewer experts than others
    shares = [[*row, *[math.nan] * (width - len(row))] for row in shares]
    image = heat.imshow(shares, aspect="auto", vmin=0, vmax=2, cmap="coolwarm")
    heat.set(xlabel="expert", ylabel="MoE layer", title=f"load / mean, step {step}")
    figure.colorbar(image, ax=heat)


@contextlib.contextmanager
def profile_step(out: Path, memory: PeakMemory, rank: int) -> Iterator[dict[str, Any]]:
    """Profile the body. Writes OUT/profile/rank<N>.trace.json for chrome://tracing or Perfetto and,
    on a GPU, rank<N>.memory.pickle for pytorch.org/memory_viz, else rank<N>.memory.json with the
    bytes allocated by each operation. On a GPU the yielded dict gets "exposed_communication", s."""
    from torch.profiler import ProfilerActivity, profile  # slow to import

    folder, cuda = out / "profile", memory.device.type == "cuda"
    folder.mkdir(exist_ok=True)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    if cuda:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    stats: dict[str, Any] = {}
    with profile(activities=kinds, profile_memory=True, record_shapes=True) as profiler:
        yield stats
    profiler.export_chrome_trace(str(trace := folder / f"rank{rank}.trace.json"))
    if cuda:
        events = json.loads(trace.read_text())["traceEvents"]
        stats["exposed_communication"] = round(exposed_communication(events), 6)
        torch.cuda.memory._dump_snapshot(str(folder / f"rank{rank}.memory.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
        return
    used = [e for e in profiler.key_averages() if e.self_cpu_memory_usage]
    used.sort(key=lambda e: -e.self_cpu_memory_usage)
    rows = [dict(op=e.key, calls=e.count, bytes=e.self_cpu_memory_usage) for e in used]
    text = json.dumps({"peak_memory": memory.bytes(), "operations": rows}, indent=1)
    (folder / f"rank{rank}.memory.json").write_text(text)


def exposed_communication(events: Iterable[Mapping[str, Any]]) -> float:
    """Seconds of NCCL kernels that no other kernel overlaps, from the "traceEvents" of a Chrome
    trace."""
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for e in events:
        if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            spans["nccl" in e["name"].lower()].append((e["ts"], e["ts"] + e["dur"]))
    return (_union_length(spans[True] + spans[False]) - _union_length(spans[False])) / 1e6


def _union_length(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def progress_bar(first: int, steps: int, env: DistEnv) -> tqdm:
    """A progress bar of steps first..steps, shown on rank 0."""
    seconds = 0.5 if sys.stderr.isatty() else 15
    shown = dict(disable=env.rank > 0, mininterval=seconds, dynamic_ncols=True)
    return tqdm(initial=first, total=steps, **shown)


class Throughput:
    """Tokens per second and MFU of a step, without padding: call start() when it begins."""

    def __init__(self, args: TrainConfig, config: ModelConfig, env: DistEnv):
        with torch.device("meta"):
            model = Transformer(config)
        # LoRA and draft heads: no gradient of the frozen weights
        flops_per_weight = 4 if args.lora or args.lora_jobs or args.task == "draft-head" else 6
        self.flops = flops_per_token(model, args.seq_len, flops_per_weight)
        self.peak = peak_flops(env.device, args.dtype, env.world)

    def start(self) -> None:
        self.begin = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self.begin

    def row(self, tokens: float) -> dict[str, float]:
        """Of the time since start(), in which this many tokens were read."""
        speed = tokens / self.elapsed()
        mfu = {"mfu": round(speed * self.flops / self.peak, 4)} if self.peak else {}
        return {"tokens_per_second": round(speed, 1)} | mfu


def summary(args: TrainConfig, model: Transformer, dataset: Any, first: int, env: DistEnv) -> str:
    """One line about the run: parameters, tokens, steps, dtype, device."""
    if first >= args.steps:
        return f"{args.out}: all {first} steps are done; increase --steps to continue"
    size = sum(p.numel() for p in model.parameters()) / 1e6
    text = ""
    if dataset.size is not None:
        inputs = args.steps * args.batch_size * args.seq_len  # padding included
        epochs = inputs / (dataset.size + dataset.padding)
        text = f" on {dataset.size / 1e6:.2f}M tokens, {epochs:.1f} epochs,"
    precision = f", FP8 {args.fp8}" if args.fp8 else f", QAT {args.qat}" if args.qat else ""
    return (
        f"{size:.2f}M parameters{text} {args.steps} steps of {args.batch_size} rows of "
        f"{args.seq_len} from step {first}, {args.dtype}{precision} on {env.device}"
    )


def log(env: DistEnv, line: str) -> None:
    """Print a line above the progress bar, on rank 0."""
    if env.rank == 0:
        tqdm.write(line, file=sys.stderr)


def show_row(row: Mapping[str, Any], env: DistEnv, bar: tqdm) -> None:
    """Show a step in the progress bar; a skipped one, and validations, on lines of their own."""
    mfu = f", MFU {row['mfu']:.1%}" if "mfu" in row else ""
    text = f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tok/s{mfu}"
    bar.set_postfix_str(text, refresh=False)
    start = f"step {row['step']}: "
    if "skipped" in row:
        log(env, f"{start}skipped, {row['skipped']}")
    if "peak_memory" in row:
        text = f"loss {row['loss']:.4f}"
        for name in ("val_loss", "val_accuracy", "val_reward"):
            shown_as = "validation" if name == "val_loss" else name.removeprefix("val_")
            text += f", {shown_as} {row[name]:.4f}" if name in row else ""
        if "acceptance" in row:
            text += ", accepted " + ", ".join(f"{rate:.0%}" for rate in row["acceptance"])
        log(env, f"{start}{text}, peak {row['peak_memory'] / 2**20:,.0f} MiB")
    if "stragglers" in row:
        log(env, start + row["stragglers"])
