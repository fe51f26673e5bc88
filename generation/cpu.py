"""CPU kernels for linear layers: bf16, int8, int4, q8_0 and q4_0 weights at memory bandwidth.

Decoding one token multiplies every weight matrix by one vector. Each weight is read once and used
once, so a step cannot be faster than reading the weights; torch's bf16 matmul on a CPU stays well
below that. The kernels are C (cpu.c, where their roofline is), compiled on first use by the
system's compiler (a few seconds) and cached in the user's cache folder. Without a compiler
F.linear is used.

1. One row of x: `matmul` reads four parts of the matrix at once, since a core's prefetcher follows
   several streams of addresses. q8_0 and q4_0 weights are multiplied as integers.
2. A few rows (a decoding batch) need no more memory traffic than one, yet torch takes twice the
   time for two rows and three times for sixteen. Here six rows of the weight are used from L1 for
   all rows of x, with bf16 dot products where the CPU has them.
3. With many rows (prefill), CPUs before AVX-512 have no bf16 matmul instructions, and torch's
   emulation runs at a seventh of its fp32 rate. `linear_via_fp32` converts 256 rows of the weight
   at a time to fp32, few enough to stay in cache, and multiplies those.
4. glibc returns freed tensors to the system, and each new page of the next tensor costs a page
   fault: a norm over 512 rows of 2048 takes 0.35 ms, or 4 ms with the faults. `keep_freed_memory`
   makes glibc keep the memory, for the whole process.

When it loses: CPUs with AVX-512 have better bf16 matmuls than point 3's, which is off there; for
matrices of a few kilobytes the call overhead dominates. No gradients: with grad mode on a layer is
plain F.linear. Inside torch.compile each call is one opaque operator.

Hooks: the Linear swap, `swap_linear_(model)`; one expert's matmul in an MoE layer, `expert_linear`;
quantize.py's linear_fn, `packed_linear` and `block_linear`. cpu_decode.py runs whole layers.
Equivalence (test_all.py): equal to nn.Linear up to rounding, and closer to float64. Needs torch;
copy cpu.py with cpu*.c.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu.c")
FORMATS = {"bf16": 0, "q8_0": 1, "q4_0": 2}  # cpu.c's


class Matrix(ctypes.Structure):
    """cpu.c's Matrix. `tensors` are those that it points to."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("w", "scales", "bias")]
    _fields_ += [(name, ctypes.c_int64) for name in ("N", "C", "format")]


@functools.cache
def load_kernels(march: str = "native") -> ctypes.CDLL | None:
    """Compile cpu.c for an architecture and load it; None, with a warning, if that fails."""
    name = os.environ.get("CC", "cc")
    # OpenMP is not linked: at load its symbols bind to the runtime that torch has already loaded. A
    # second runtime would be a second pool of threads spinning on the same cores.
    flags = ["-O3", f"-march={march}", "-ffast-math", "-fno-finite-math-only", "-fPIC", "-fopenmp"]
    try:
        if (compiler := shutil.which(name)) is None:
            raise FileNotFoundError(f"no C compiler {name!r} (install gcc, or set CC)")
        lib = open_library(compiler, flags)
        for name, pointers, sizes in (
            ("linear", 3, 1),
            ("decode", 6, 1),
            ("experts", 7, 1),
            ("add_adapters", 6, 2),
            ("gemv_int8", 4, 2),
            ("gemv_int4", 5, 3),
            ("unpack", 4, 3),
            ("gemm_packed", 5, 4),
        ):
            function = getattr(lib, name)
            function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * sizes
            function.restype = None
        return lib
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as e:
        log.warning("without the CPU kernels of cpu.c, torch's slower ones are used: %s", e)
        return None


def open_library(compiler: str, flags: Sequence[str]) -> ctypes.CDLL:
    """The shared library of cpu.c in the user's cache folder, compiled if it is missing or cannot
    be loaded. OSError, RuntimeError or SubprocessError if that fails."""
    cpuinfo = Path("/proc/cpuinfo")  # in the key: machines with different CPUs may share a folder
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu_model = {x for x in lines if x.startswith(("model name", "flags", "Features"))}
    sources = [path.read_text() for path in sorted(SOURCE.parent.glob("cpu*.c"))]
    key = " ".join([*sources, compiler, *flags, *sorted(cpu_model)]).encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sheaf"
    library = cache / f"cpu-{hashlib.sha256(key).hexdigest()[:16]}.so"
    try:
        return ctypes.CDLL(str(library))
    except OSError:  # missing, or damaged, as by a loss of power
        compile_kernels(compiler, flags, library)
    return ctypes.CDLL(str(library))


def compile_kernels(compiler: str, flags: Sequence[str], library: Path) -> None:
    """Compile cpu.c into `library`. OSError; RuntimeError with the compiler's first error line;
    SubprocessError after 10 minutes."""
    library.parent.mkdir(parents=True, exist_ok=True)
    tmp = library.with_name(f"{library.stem}-{os.getpid()}.tmp")
    obj = tmp.with_suffix(".o")
    for command in ([*flags, "-c", SOURCE, "-o", obj], ["-shared", obj, "-o", tmp]):
        done = subprocess.run([compiler, *command], capture_output=True, text=True, timeout=600)
        if done.returncode:
            lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
            error = next((line for line in lines if "error" in line.lower()), lines[0])
            raise RuntimeError(f"{compiler} failed: {error}")
    with open(tmp, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(tmp, library)
    obj.unlink()


def matrix(weight: Tensor, scales: Tensor | None = None, bias: Tensor | None = None) -> Matrix:
    """weight (N, C) bf16; or q8_0: int8, or q4_0: (N, C / 2) uint8, with scales (N, C / 32) fp16.
    bias (N,) bf16."""
    name = "bf16" if scales is None else "q8_0" if weight.dtype == torch.int8 else "q4_0"
    N, C = weight.shape[0], weight.shape[1] * (2 if name == "q4_0" else 1)
    tensors = (weight, scales, bias)
    assert all(t is None or t.is_contiguous() for t in tensors), "C reads row-major memory"
    assert scales is None or scales.numel() * 32 == N * C, "not one scale per 32 columns"
    m = Matrix(*(None if t is None else t.data_ptr() for t in tensors), N, C, FORMATS[name])
    m.tensors = tensors
    return m


def matmul(m: Matrix, x: Tensor) -> Tensor:
    """x (..., C) -> (..., N) in x's dtype, rounded once."""
    assert x.shape[-1] == m.C, (x.shape, m.C)
    rows = x.float().contiguous()
    y = torch.empty(*x.shape[:-1], m.N)
    load_kernels().linear(ctypes.byref(m), rows.data_ptr(), y.data_ptr(), x.numel() // m.C)
    return y.to(x.dtype)


def max_matmul_rows() -> int:
    """Rows of x up to which `matmul` is faster than the matmuls for many rows."""
    return 0 if load_kernels() is None else 64 if load_kernels().real_is_bf16() else 16


def linear_via_fp32(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight (N, C) bf16, x (..., C), bias (N,) -> (..., N) in x's dtype, with fp32 matmuls."""
    N, C = weight.shape
    columns = x.float().reshape(-1, C).t()  # y^T = W x^T: a block of W gives whole rows of y^T
    y = torch.empty(N, columns.shape[1])
    block = torch.empty(min(N, 256), C)
    for start in range(0, N, 256):
        part = weight[start : start + 256]
        torch.mm(block[: len(part)].copy_(part), columns, out=y[start : start + 256])
    y = y.t() if bias is None else y.t() + bias
    return y.to(x.dtype).reshape(*x.shape[:-1], N)


def _is_supported(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels, which get addresses and no shapes, can read these operands. If not,
    F.linear runs, or reports the error."""
    params = (weight,) if bias is None else (weight, bias)
    bf16 = all(t.dtype == torch.bfloat16 and t.is_cpu for t in (x, *params))
    fits = x.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])
    return bf16 and fits and x.numel() > 0 and all(t.is_contiguous() for t in params)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear on the fastest CPU path, for inference: x (..., C), weight (N, C), bias (N,) ->
    (..., N)."""
    if _is_supported(x, weight, bias) and not torch.is_grad_enabled():
        if torch.compiler.is_compiling():
            return torch.ops.sheaf.cpu_linear(x, weight, bias)
        rows = x.numel() // weight.shape[1]
        if 0 < rows <= max_matmul_rows():
            return matmul(matrix(weight, bias=bias), x)
        if rows >= 4 and torch.backends.cpu.get_cpu_capability() == "AVX2":
            return linear_via_fp32(weight, x, bias)
    return F.linear(x, weight, bias)


def packed_linear(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    fallback: Callable[..., Tensor],
) -> Tensor:
    """F.linear with a quantized weight: x (..., C), bias (N,) -> (..., N). int8: qweight (N, C),
    scales (N, 1) fp32, zeros None. int4: qweight (N, C / 2) uint8, the even column in the low
    nibble, scales (N, G) bf16, zeros (N, G) uint8. fallback, with the same arguments, is called for
    unsupported inputs: x not bf16, groups that are not whole rows or of 32, 64, 128, ... columns,
    grad mode. Requires load_kernels()."""
    C, N, G = x.shape[-1], len(qweight), scales.shape[-1]
    rows, width = x.numel() // C, qweight.shape[1] * (1 if zeros is None else 2)
    if C != width:
        raise ValueError(f"x must have {width} columns, as the weight, not {C}")
    on_cpu = x.is_cpu and qweight.is_cpu and qweight.is_contiguous() and scales.is_contiguous()
    fits = x.dtype == torch.bfloat16 and rows > 0
    if zeros is not None:  # cpu_weight_only.c unpacks 32 columns at a time
        size = C // G
        fits = fits and size * G == C and size % 32 == 0 and (G == 1 or size & (size - 1) == 0)
    if torch.is_grad_enabled() or not fits or not on_cpu:
        return fallback(x, qweight, scales, zeros, bias)
    if torch.compiler.is_compiling():
        return torch.ops.sheaf.cpu_packed_linear(x, qweight, scales, zeros, bias)
    x, zeros_ptr = x.contiguous(), None if zeros is None else zeros.data_ptr()
    weight_ptrs = (qweight.data_ptr(), scales.data_ptr(), zeros_ptr)
    if rows <= (1 if load_kernels().real_is_bf16() else 4):
        y = torch.empty(*x.shape[:-1], N, dtype=torch.bfloat16)
        for r in range(rows):
            row_ptrs = (x.data_ptr() + 2 * r * C, y.data_ptr() + 2 * r * N)
            if zeros is None:
                load_kernels().gemv_int8(*weight_ptrs[:2], *row_ptrs, N, C)
            else:
                load_kernels().gemv_int4(*weight_ptrs, *row_ptrs, N, C, G)
    elif rows <= max_matmul_rows():
        x_fp32, y = x.float(), torch.empty(*x.shape[:-1], N)
        load_kernels().gemm_packed(*weight_ptrs, x_fp32.data_ptr(), y.data_ptr(), N, C, G, rows)
    else:
        weight = torch.empty(N, C, dtype=torch.bfloat16)
        load_kernels().unpack(*weight_ptrs, weight.data_ptr(), N, C, G)
        return linear(x, weight, bias)
    return (y if bias is None else y + bias).to(x.dtype)


def block_linear(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    zeros: None,
    bias: Tensor | None,
    fallback: Callable[..., Tensor],
) -> Tensor:
    """F.linear with a weight in q8_0 or q4_0, as in `matrix`, and x rounded to int8 per 32 columns:
    x (..., C), bias (N,) -> (..., N). fallback, with the same arguments, is called in grad mode and
    for an x without rows, with other columns, or not on a CPU. Requires load_kernels()."""
    C = qweight.shape[1] * (1 if qweight.dtype == torch.int8 else 2)
    if torch.is_grad_enabled() or x.numel() == 0 or x.shape[-1] != C or not x.is_cpu:
        return fallback(x, qweight, scales, zeros, bias)
    if torch.compiler.is_compiling():
        return torch.ops.sheaf.cpu_block_linear(x, qweight, scales, zeros, bias)
    m = matrix(qweight, scales)
    y = matmul(m, x if bias is None else x.float())
    return y if bias is None else (y + bias).to(x.dtype)


# Opaque operators: torch.compile calls them and fuses the operations in between. (Not custom_op,
# whose call costs as much as a small matmul.) Defined once per process.
OPS = torch.library.Library("sheaf", "FRAGMENT")


def _fake_linear(x: Tensor, weight: Tensor, *more: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _define_op(name: str, function: Callable[..., Tensor], arguments: str) -> None:
    if not hasattr(torch.ops.sheaf, name):
        OPS.define(f"{name}({arguments}) -> Tensor")
        OPS.impl(name, function, "CPU")
        torch.library.register_fake(f"sheaf::{name}", _fake_linear, lib=OPS)


_define_op("cpu_linear", linear, "Tensor x, Tensor weight, Tensor? bias")
_define_op(
    "cpu_packed_linear",
    partial(packed_linear, fallback=None),
    "Tensor x, Tensor qweight, Tensor scales, Tensor? zeros, Tensor? bias",
)
_define_op(
    "cpu_block_linear",
    partial(block_linear, fallback=None),
    "Tensor x, Tensor qweight, Tensor scales, Tensor? zeros, Tensor? bias",
)


class CPULinear(nn.Linear):
    """nn.Linear that calls `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def expert_linear(x: Tensor, stack: Any, e: int) -> Tensor:
    """`linear` with expert e of a stack (E, N, C), or the stack's own linear(x, e), as quantized
    stacks have: x (n, C) -> (n, N)."""
    return stack.linear(x, e) if hasattr(stack, "linear") else linear(x, stack[e])


def keep_freed_memory(largest: int = 2**30) -> bool:
    """Keep the memory of freed tensors of up to `largest` bytes in the process for later tensors
    (mallopt(3)); False if the C library is not glibc. The process then stays at its peak size. That
    of larger tensors, and with 0 of all from 128 KB on, is returned to the system at once."""
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    mapped = max(largest, 2**17)
    trimmed = min(16 * largest, 2**31 - 1) or mapped
    return bool(mallopt(M_MMAP_THRESHOLD, mapped) and mallopt(M_TRIM_THRESHOLD, trimmed))


def swap_linear_(model: nn.Module) -> nn.Module:
    """Replace, in place, every nn.Linear by a CPULinear with the same parameters."""
    load_kernels()  # compile now, not in the first forward
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                with torch.device("meta"):
                    linear = CPULinear(
                        child.in_features, child.out_features, child.bias is not None
                    )
                linear.weight, linear.bias = child.weight, child.bias
                setattr(module, name, linear.train(child.training))
    return model


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """`linear` with one, few and many rows against float64; GB/s of weights read, beside F.linear,
    with TinyLlama's feed-forward weight. Each call cycles through 250 MB of weights."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.15 s

    for N, C, rows in ((64, 96, 1), (257, 1000, 1), (301, 95, 7), (7, 40, 80)):
        weight, x = torch.randn(N, C).bfloat16(), torch.randn(rows, C).bfloat16()
        exact = x.double() @ weight.double().t()
        error = ((linear(x, weight) - exact).norm() / exact.norm()).item()
        assert error < 4e-3, (N, C, rows, error)  # half a unit in bf16's last place is 2e-3
    capability, memory = torch.backends.cpu.get_cpu_capability(), torch.ones(2**26)
    seconds = lambda f: Timer("f()", globals=dict(f=f)).blocked_autorange().median
    print(f"{torch.get_num_threads()} threads, {capability}, torch {torch.__version__}")
    print(f"plain read of memory: {memory.nbytes / seconds(memory.sum) / 1e9:.1f} GB/s")
    print(f"{'rows':>6} {'F.linear':>9} {'linear':>9}   GB/s, bf16, weight 5632 x 2048")
    weights = [torch.randn(5632, 2048).bfloat16() for _ in range(11)]
    for rows in (1, 2, 8, 64):
        x, size = torch.randn(rows, 2048).bfloat16(), 11 * weights[0].nbytes / 1e9
        torch_s, ours = (seconds(lambda: [f(x, w) for w in weights]) for f in (F.linear, linear))
        print(f"{rows:>6} {size / torch_s:9.1f} {size / ours:9.1f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
