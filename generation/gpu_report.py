"""Checks and measures every kernel and program on this machine's GPUs.

    python -m generation.bench --gpu-report              everything
    python -m generation.bench --gpu-report attention    the entries whose title contains a word

Each entry runs in a process of its own, with a time limit, so that a crash ends only that entry.
First come the files' own checks, four at a time because their kernels compile on the CPU: the times
that they print are no benchmarks. The tables and programs follow, one at a time.
Writes BENCHMARKS-GPU.md (device, driver, versions, tables) and BENCHMARKS-GPU.json (the same) to
the current folder. Without a GPU it prints what it would run.

Kernel times are medians of triton.testing.do_bench: GPU time, with the L2 cache flushed. Short
kernels run in a CUDA graph, without launch overhead, over copies of the inputs that exceed the L2
cache. TFLOP/s count the visible scores only (causal: half); GB/s count each input once.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m generation.bench --gpu-report")

import argparse
import contextlib
import itertools
import json
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).resolve().parents[1]
GRACE = 60  # seconds from SIGTERM to SIGKILL
CHECKS_AT_A_TIME = 4
Row = dict[str, Any]

# --------------------------------------------------------------------------------------------------
# Kernels at the shapes of the targets
# --------------------------------------------------------------------------------------------------


def milliseconds(f: Callable[[], Any]) -> float:
    """Median GPU time of f(), with the L2 cache flushed before each call."""
    from triton.testing import do_bench

    return do_bench(f, warmup=20, rep=100, return_mode="median")


def graph_milliseconds(f: Callable[..., Any], *args: Any) -> float:
    """GPU time of f(*args) in a CUDA graph of calls over copies of args, 256 MB together, which
    exceed the L2 cache. args: tensors, tuples of them, or None."""
    size = sum(x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor))
    clone = lambda x: x.clone() if isinstance(x, torch.Tensor) else x
    copies = [tree_map(clone, args) for _ in range(-(-(2**28) // size))]
    f(*args)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in copies:
            f(*inputs)
    return milliseconds(graph.replay) / len(copies)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal random numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=dtype)


def copy_table() -> Iterator[Row]:
    """The ceilings: bandwidth of a copy and of a sum, TFLOP/s of a bf16 matmul."""
    x = randn(2**30)
    y = torch.empty_like(x)
    yield {"case": "copy", "GB/s": 2 * x.nbytes / milliseconds(lambda: y.copy_(x)) / 1e6}
    yield {"case": "read", "GB/s": x.nbytes / milliseconds(x.sum) / 1e6}
    a, b = randn(8192, 8192), randn(8192, 8192)
    yield {"case": "bf16 8192^3", "TFLOP/s": 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9}


def attention_table() -> Iterator[Row]:
    """flash_attention beside SDPA's backends: TFLOP/s of the forward and of the backward pass."""
    from attention import flash_attention, flash_attention_fp8, quantize_blocks

    def sdpa(backend: SDPBackend, q: Any, k: Any, v: Any, causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

    peers = {
        "flash_attention": lambda q, k, v, causal: flash_attention(q, k, v, causal=causal),
        "SDPA flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    }
    cases = (128, 8192, False), (128, 8192, True), (64, 8192, True), (128, 2048, True)
    for D, T, causal in cases:
        shape = (16384 // T, T, 2048 // D, D)
        q, k, v, do = (randn(*shape) for _ in range(4))
        flops = 4 * q.numel() * T / (2 if causal else 1)
        for name, attend in peers.items():
            forward = milliseconds(lambda: attend(q, k, v, causal))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            o = attend(*leaves, causal)
            grad = lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)
            backward = milliseconds(grad)
            for x in leaves:
                x.requires_grad_(False)
            case = f"D {D}, T {T}, {'causal' if causal else 'full'}"
            rates = {"forward": flops / forward / 1e9, "backward": 2.5 * flops / backward / 1e9}
            yield {"case": case, "kernel": name, **rates}
        forward = milliseconds(lambda: flash_attention_fp8(q, k, v, causal=causal))
        yield {"case": case, "kernel": "flash_attention_fp8", "forward": flops / forward / 1e9}
        forward -= milliseconds(lambda: [quantize_blocks(x) for x in (q, k, v)])
        row = {"case": case, "kernel": "the same without quantize_blocks"}
        yield row | {"forward": flops / forward / 1e9}


def decode_table() -> Iterator[Row]:
    """Attention of one new token per sequence, with a dense and a paged KV cache: GB/s of KV."""
    from attention import decode_attention
    from paged_kv import paged_attention

    for B, S in ((16, 8192), (1, 32768)):
        q, k, v = randn(B, 1, 32, 128), randn(B, S, 8, 128), randn(B, S, 8, 128)
        ms = graph_milliseconds(decode_attention, q, k, v)
        yield {"case": f"dense, B {B}, {S} keys, 32 / 8 heads", "GB/s": 2 * k.nbytes / ms / 1e6}
    q, k = randn(32, 1, 128, 576), randn(32, 4096, 1, 576)
    ms = graph_milliseconds(partial(decode_attention, latent_dim=512), q, k, None)
    yield {"case": "dense MLA, B 32, 4096 keys, 128 heads", "GB/s": k.nbytes / ms / 1e6}
    int32 = partial(torch.tensor, device="cuda", dtype=torch.int32)
    for B, S, heads, latent in ((32, 4096, (32, 8, 128), None), (1, 32768, (32, 8, 128), None),
                                (32, 4096, (128, 1, 576), 512)):  # fmt: skip
        (Hq, Hkv, D), n = heads, B * S // 16
        table = torch.randperm(n, device="cuda").view(B, -1).int()
        q, k = randn(B, Hq, D), randn(n, Hkv, 16, D).transpose(1, 2)
        v = None if latent else randn(n, Hkv, 16, D).transpose(1, 2)
        args = q, k, v, table, int32(range(B + 1)), int32([S] * B)
        ms = graph_milliseconds(partial(paged_attention, latent_dim=latent), *args)
        size = k.nbytes * (1 if latent else 2)
        name = "paged MLA" if latent else "paged"
        yield {"case": f"{name}, B {B}, {S} keys, {Hq} / {Hkv} heads", "GB/s": size / ms / 1e6}


def linear_table() -> Iterator[Row]:
    """Weight-only layers at Llama-3.1-8B's shapes, in GB/s of the weight; FP8 matmuls."""
    from quantization.gemm import gemm, random_qweights, weight_only_matmul
    from quantize import fp8_matmul, to_fp8

    for N, K in ((4096, 4096), (28672, 4096), (4096, 14336)):
        dense = randn(N, K)
        int8, int4 = random_qweights(N, K, "cuda")
        for rows in (1, 4, 16, 64):
            x, row = randn(rows, K), {"case": f"{N} x {K}, {rows} rows"}
            ms = graph_milliseconds(F.linear, x, dense)
            row["bf16 us"], row["bf16 GB/s"] = 1e3 * ms, dense.nbytes / ms / 1e6
            for name, w in (("int8", int8), ("int4", int4)):
                ms = graph_milliseconds(weight_only_matmul, x, *w)
                size = sum(t.nbytes for t in w if t is not None)
                row |= {f"{name} us": 1e3 * ms, f"{name} GB/s": size / ms / 1e6}
            yield row
    n = 8192
    a, b = randn(n, n), randn(n, n)
    rate = lambda f: 2 * n**3 / milliseconds(f) / 1e9
    yield {"case": "bf16 8192^3, F.linear", "TFLOP/s": rate(lambda: F.linear(a, b))}
    yield {"case": "bf16 8192^3, gemm", "TFLOP/s": rate(lambda: gemm(a, b))}
    for name, blocks in (("rowwise", "rowwise"), ("1x128", "128x128")):
        a8, b8 = to_fp8(a, name), to_fp8(b, blocks)
        row = {"case": f"FP8 {name}, fp8_matmul"}
        fast = lambda: fp8_matmul(a8, b8, torch.bfloat16, use_fast_accum=True)
        yield row | {"TFLOP/s": rate(fast)}
    scaled = lambda: gemm(a8[0], b8[0], a_scale=a8[1], b_scale=b8[1])
    yield {"case": "FP8 1x128, gemm", "TFLOP/s": rate(scaled)}
    i8 = torch.randint(-127, 128, (n, n), device="cuda", dtype=torch.int8)
    yield {"case": "int8 8192^3, gemm", "TFLOP/s": rate(lambda: gemm(i8, i8))}


def experts_table() -> Iterator[Row]:
    """Qwen3-30B-A3B's experts beside torch._grouped_mm: milliseconds, and GB/s or TFLOP/s."""
    from moe import grouped_experts, grouped_mm_experts, route

    E, K, C, width = 128, 8, 2048, 768
    up, down = randn(E, 2 * width, C) * C**-0.5, randn(E, C, width) * width**-0.5
    for N in (16, 64, 4096, 32768):
        weights, ids = route(randn(N, E, dtype=torch.float32), K, renormalize=True)
        leaves, row = [randn(N, C), weights, up, down], {"case": f"{N} tokens"}
        for name, f in (("grouped_mm", grouped_mm_experts), ("grouped_experts", grouped_experts)):
            run = lambda: f(leaves[0], leaves[1], ids, *leaves[2:])
            row[f"{name} ms"] = forward = graph_milliseconds(f, *leaves[:2], ids, *leaves[2:])
            for x in leaves:
                x.requires_grad_()
            both = lambda: torch.autograd.grad(run().sum(), leaves)
            row[f"{name} with backward ms"] = milliseconds(both)
            for x in leaves:
                x.requires_grad_(False)
        row["TFLOP/s"] = 6 * N * K * C * width / forward / 1e9
        row["GB/s"] = len(ids.unique()) * 6 * C * width / forward / 1e6
        yield row


TABLES = {
    f.__name__.removesuffix("_table"): f
    for f in (copy_table, attention_table, decode_table, linear_table, experts_table)
}

# --------------------------------------------------------------------------------------------------
# Entries
# --------------------------------------------------------------------------------------------------


class MemoryMonitor:
    """The largest memory in use on any GPU from the constructor to stop(), by nvidia-smi."""

    def __init__(self) -> None:
        query = "--query-gpu=memory.used --format=csv,noheader,nounits --loop-ms=100"
        self.samples = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(["nvidia-smi", *query.split()], stdout=self.samples)

    def stop(self) -> int:
        """In MiB."""
        self.process.terminate()
        self.process.wait()
        with self.samples as f:
            f.seek(0)
            return max(map(int, f.read().split()), default=0)


@dataclass
class Entry:
    """One command of the report, and its result."""

    title: str
    command: str  # after `python`
    target: str = ""
    timeout: float = 300
    is_check: bool = False  # may run beside others
    seconds: float = 0.0
    exit_code: int | None = None  # None: not run, or over its time limit
    output: str = ""
    peak_memory_mib: int | None = None  # in use on a GPU, with what allocators keep

    def run(self) -> Entry:
        start = time.perf_counter()
        argv = [sys.executable, *shlex.split(self.command)]
        memory = None if self.is_check else MemoryMonitor()
        with tempfile.TemporaryFile("w+", errors="replace") as out:
            process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.exit_code = process.wait(self.timeout)
            finally:
                process.terminate()  # torchrun then ends its workers, which kill() would leave
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
                process.kill()
            out.seek(0)
            self.output = out.read()[-20_000:]
        self.seconds = time.perf_counter() - start
        self.peak_memory_mib = memory and memory.stop()
        return self

    def status(self) -> str:
        if self.exit_code is None:
            return f"over its limit of {self.timeout:.0f} s"
        if self.exit_code != 0:
            return f"FAILED ({self.exit_code})"
        memory = f", peak memory {self.peak_memory_mib} MiB" if self.peak_memory_mib else ""
        return f"{self.seconds:.0f} s{memory}"


def entries(n_gpus: int) -> list[Entry]:
    """All entries: the checks, then what is measured, the cheapest and most basic first."""
    table = lambda name, target="": Entry(
        f"{name} table", f"-m generation.bench --table {name}", target
    )
    files = "attention.py paged_kv.py moe.py quantize.py speculative.py quantization/gemm.py "
    files += "quantization/sparse.py training/chunked_loss.py training/optimizers.py "
    files += "training/lora.py training/offload.py training/recompute.py generation/sampling.py "
    files += (
        "generation/kv_eviction.py generation/adapters.py serving/kv_store.py serving/vattention.py"
    )
    llama = "generate.py --dummy llama3.1-8b --prompt-tokens 128 --bench 2"
    train = "train.py --model llama3.2-1b --steps 8 --batch-size 4 --micro-batch-size 4 "
    train += "--seq-len 4096 --attention flash --out /tmp/sheaf-gpu-report --eval-every 8 "
    train += "--data test_all.py"
    rows = [Entry(f"{path}: check", path, is_check=True) for path in files.split()]
    rows += [
        table("copy"),
        table("attention", "D 128, T 8192: forward 450 full and 400 causal; backward 350 and 300"),
        table("decode", "80% of the copy, 65% at B 1"),
        table("linear", "int8 80%, int4 60% of the copy at 1 row; FP8 rowwise 1100 TFLOP/s"),
        table("experts", "1.0x grouped_mm, 300 TFLOP/s; 32768 tokens with backward 30 ms"),
        Entry("decode, bf16, eager", llama),
        Entry("decode, bf16", f"{llama} --compile", "85% of the copy"),
        *(Entry(f"decode, {q}", f"{llama} --compile --quantize {q}") for q in ("int8", "int4")),
        Entry("decode, fp8", f"{llama} --compile --quantize fp8"),
        Entry("serving", "generate.py --dummy llama3.1-8b --bench-serving 64 --compile "
              "--set input_tokens=100:1024 --set output_tokens=100:1024 --max-num-seqs 64"),
        Entry("training, 1B", train, "50% MFU"),
        Entry("training, 1B, compiled", f"{train} --compile", "50% MFU"),
        Entry("training, 1B, FP8", f"{train} --compile --fp8 rowwise", "1.2x bf16"),
    ]  # fmt: skip
    if n_gpus > 1:
        spawn = f"-m torch.distributed.run --standalone --nproc-per-node {n_gpus}"
        rows.append(Entry("tensor parallel", f"{spawn} parallel.py"))
        for flags in (f"--dp {n_gpus} --zero 3", f"--tp {n_gpus}", f"--pp {n_gpus}"):
            rows.append(Entry(f"training, {flags}", f"{spawn} {train} {flags}"))
    return rows


# --------------------------------------------------------------------------------------------------
# The report
# --------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Device, driver and versions."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "count": torch.cuda.device_count(),
        "memory GB": round(properties.total_memory / 1e9, 1),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": __import__("triton").__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def markdown_table(output: str) -> str:
    """The JSON lines of a --table as a Markdown table; any other output as a code block."""
    try:
        rows = [json.loads(line) for line in output.splitlines()]
        columns = list(dict.fromkeys(key for row in rows for key in row))
    except (json.JSONDecodeError, TypeError):
        return f"```\n{output.strip()}\n```"
    text = lambda x: f"{x:.4g}" if isinstance(x, float) else str(x)
    lines = [columns, ["---"] * len(columns)]
    lines += [[text(row.get(c, "")) for c in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_report(system: dict[str, Any], done: list[Entry]) -> None:
    """Write both files; called after each entry, so that a killed report keeps its results."""
    lines = ["# Measured on a GPU", "", ", ".join(f"{k} {v}" for k, v in system.items()), ""]
    for e in done:
        lines += [f"## {e.title}", "", f"`python {e.command}`: {e.status()}"]
        lines += [f"Target: {e.target}."] if e.target else []
        lines += ["", markdown_table(e.output), ""]
    Path("BENCHMARKS-GPU.md").write_text("\n".join(lines))
    report = {"machine": system, "entries": [asdict(e) for e in done]}
    Path("BENCHMARKS-GPU.json").write_text(json.dumps(report, indent=1))


def report(words: list[str]) -> int:
    """Run the entries; the exit code is the number of those that failed."""
    chosen = [
        e for e in entries(torch.cuda.device_count())
        if not words or any(word in e.title for word in words)
    ]  # fmt: skip
    if not torch.cuda.is_available():
        print("No GPU here. On a machine with one, this runs:")
        print("\n".join(f"  python {e.command}" for e in chosen))
        return 0
    system, done = machine(), []
    with ThreadPoolExecutor(CHECKS_AT_A_TIME) as pool:
        checks = pool.map(Entry.run, [e for e in chosen if e.is_check])
        measured = (e.run() for e in chosen if not e.is_check)
        for e in itertools.chain(checks, measured):
            done.append(e)
            write_report(system, done)
            print(f"{e.title:40} {e.status()}", flush=True)
    print("Wrote BENCHMARKS-GPU.md and BENCHMARKS-GPU.json; please send them in an issue.")
    return sum(e.exit_code != 0 for e in done)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m generation.bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    flags = parser.add_mutually_exclusive_group(required=True)
    flags.add_argument("--gpu-report", nargs="*", metavar="WORD", help="all entries, or some")
    flags.add_argument("--table", choices=TABLES, help="one table as JSON lines")
    args = parser.parse_args(argv)
    if args.table is None:
        return report(args.gpu_report)
    for row in TABLES[args.table]():
        print(json.dumps(row), flush=True)
    return 0
