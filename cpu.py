"""cpu.py: linear layers at the speed of a CPU's memory.

Decoding one token multiplies every weight matrix by one vector. Each weight is read once and used
once, so the step cannot be faster than reading the weights; on a CPU, torch's bf16 product is well
short of that. Four things hold it back, and this file mends them:

1. One row after another is one stream of addresses per core, and a core's prefetcher fetches ahead
   on several at once. `gemv` cuts the matrix into four row blocks and walks all four side by side,
   with the sums in fp32: C, compiled on first use by the system's compiler (a second), kept in the
   user's cache folder. Without a compiler F.linear serves as before.
2. A few rows (a batch that decodes) need no more memory traffic than one, yet torch takes twice the
   time for two rows and three times for sixteen. `gemm` keeps six rows of the weight in the
   nearest cache for all rows of x, and fetches the next six while it multiplies, with pairs of bf16
   where the CPU has the instruction for it.
3. With many rows (prefill), a CPU before AVX-512 has no bf16 product, and torch's stand-in runs
   at a seventh of its fp32 rate. `widened` turns 256 rows of the weight at a time into fp32, few
   enough to stay in the cache, and multiplies those.

4. What torch frees, glibc gives back to the system, and each new page of the next tensor costs a
   fault: a norm over 512 rows of 2048 takes 0.35 ms, and 4 ms with that. `keep_freed_memory` has
   glibc keep it, for the whole process.

When it loses: a CPU with AVX-512 has better bf16 products than rule 3, which is therefore off
there; for matrices of a few kilobytes the cost of a call is all there is to see. Gradients do not
flow through any: with grad mode on, and inside torch.compile, a layer is plain F.linear.

Hooks: the Linear swap, `swap_linear_(model)`; the experts of a mixture, `experts`. Equivalence: the
same numbers as nn.Linear up to rounding, and nearer to exact (test_all.py holds both against
float64). Needs: torch. `python cpu.py` checks itself and prints the bandwidth reached beside
F.linear's and a plain read's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SOURCE = r"""
#include <stdint.h>
#include <string.h>

static inline float widen(uint16_t bf16) {
    uint32_t bits = (uint32_t)bf16 << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* y[n] = sum over c of w[n][c] * x[c]: rows n, n + N/4, n + N/2 and n + 3N/4 together. */
void gemv_bf16(const uint16_t *w, const float *x, float *y, int64_t N, int64_t C) {
    int64_t Q = N / 4;
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < Q; n++) {
        const uint16_t *w0 = w + n * C, *w1 = w0 + Q * C, *w2 = w1 + Q * C, *w3 = w2 + Q * C;
        float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
        #pragma omp simd reduction(+ : s0, s1, s2, s3)
        for (int64_t c = 0; c < C; c++) {
            s0 += widen(w0[c]) * x[c];
            s1 += widen(w1[c]) * x[c];
            s2 += widen(w2[c]) * x[c];
            s3 += widen(w3[c]) * x[c];
        }
        y[n] = s0, y[n + Q] = s1, y[n + 2 * Q] = s2, y[n + 3 * Q] = s3;
    }
    for (int64_t n = 4 * Q; n < N; n++) {
        y[n] = 0;
        for (int64_t c = 0; c < C; c++) y[n] += widen(w[n * C + c]) * x[c];
    }
}

/* A few rows of x. What is summed at a time: pairs of bf16 where there is an instruction for it,
   else fp32. The tile of sums, 6 rows of w times XR of x, fills the registers. */
#ifdef __AVX512BF16__
#include <immintrin.h>
typedef uint16_t real;
typedef __m512 vec;
enum { XR = 4, STEP = 32, REAL_IS_BF16 = 1 };
static inline vec mac(vec sum, const uint16_t *w, const real *x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_loadu_si512(x));
}
static inline float value(real x) { return widen(x); }
#else
typedef float real;
typedef float vec __attribute__((vector_size(32)));
enum { XR = 2, STEP = 8, REAL_IS_BF16 = 0 };
static inline vec mac(vec sum, const uint16_t *w, const real *x) {
    typedef uint16_t bf16s __attribute__((vector_size(16), aligned(2)));
    typedef uint32_t words __attribute__((vector_size(32)));
    typedef float floats __attribute__((vector_size(32), aligned(4)));
    words wide = __builtin_convertvector(*(const bf16s *)w, words) << 16;
    return sum + (vec)wide * *(const floats *)x;
}
static inline float value(real x) { return x; }
#endif

int real_is_bf16(void) { return REAL_IS_BF16; }

/* y[r][k] = sum over c of w[k][c] * x[r][c] for W rows of w and R of x; meanwhile P of the next W
   rows of w are fetched, the p-th and on. */
static inline __attribute__((always_inline)) void tile(
    const uint16_t *w, const real *x, float *y, int64_t N, int64_t C, const int W, const int R,
    int p, const int P
) {
    vec sum[6][XR];
    for (int k = 0; k < W; k++) for (int r = 0; r < R; r++) sum[k][r] = (vec){0};
    const uint16_t *ahead[6];
    for (int i = 0; i < P; i++) ahead[i] = w + (6 + (p + i) % 6) * C;
    int64_t c = 0;
    for (; c + STEP <= C; c += STEP) {
        for (int i = 0; i < P; i++) __builtin_prefetch(ahead[i] + c, 0, 2);
        for (int k = 0; k < W; k++)
            for (int r = 0; r < R; r++) sum[k][r] = mac(sum[k][r], w + k * C + c, x + r * C + c);
    }
    for (int k = 0; k < W; k++)
        for (int r = 0; r < R; r++) {
            float total = 0;
            for (int i = 0; i < (int)(sizeof(vec) / 4); i++) total += sum[k][r][i];
            for (int64_t d = c; d < C; d++) total += widen(w[k * C + d]) * value(x[r * C + d]);
            y[r * N + k] = total;
        }
}

/* W rows of w times all of x, XR rows after XR: from memory comes w for the first of them, and
   before that it was fetched by the W rows before, so many of its rows by each. */
static inline __attribute__((always_inline)) void strip(
    const uint16_t *w, const real *x, float *y, int64_t N, int64_t C, int64_t R, const int W,
    const int P
) {
    int64_t r = 0;
    for (; r + XR <= R; r += XR) tile(w, x + r * C, y + r * N, N, C, W, XR, r / XR * P, P);
    if (R - r == 1) tile(w, x + r * C, y + r * N, N, C, W, 1, r / XR * P, P);
    if (XR > 2 && R - r == 2) tile(w, x + r * C, y + r * N, N, C, W, XR / 2, r / XR * P, P);
    if (XR > 2 && R - r == 3) tile(w, x + r * C, y + r * N, N, C, W, XR * 3 / 4, r / XR * P, P);
}

/* y[r][n] = sum over c of w[n][c] * x[r][c] */
void gemm_bf16(const uint16_t *w, const real *x, float *y, int64_t N, int64_t C, int64_t R) {
    int64_t Q = N / 6;
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < 6 * Q; n += 6) {
        const uint16_t *rows = w + n * C;
        if (R <= XR) strip(rows, x, y + n, N, C, R, 6, 6);
        else if (R <= 2 * XR) strip(rows, x, y + n, N, C, R, 6, 3);
        else if (R <= 5 * XR) strip(rows, x, y + n, N, C, R, 6, 2);
        else strip(rows, x, y + n, N, C, R, 6, 1);
    }
    for (int64_t n = 6 * Q; n < N; n++) strip(w + n * C, x, y + n, N, C, R, 1, 0);
}
"""


@functools.cache
def kernel() -> ctypes.CDLL | None:
    """The C above as a library; None where there is no compiler that can build it."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    # OpenMP calls are left unresolved: at load they bind to the runtime torch has already loaded.
    # A second runtime would mean a second pool of threads spinning on the same cores.
    flags = ["-O3", "-march=native", "-ffast-math", "-fPIC", "-fopenmp", "-c"]
    recipe = hashlib.sha256(" ".join([SOURCE, compiler, *flags, _cpu_model()]).encode()).hexdigest()
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sheaf"
        library = cache / f"gemv-{recipe[:16]}.so"
        if not library.exists():
            cache.mkdir(parents=True, exist_ok=True)
            tmp = library.with_suffix(f".{os.getpid()}")
            source, built = tmp.with_suffix(".c"), tmp.with_suffix(".o")
            source.write_text(SOURCE)
            for command in ([*flags, source, "-o", built], ["-shared", built, "-o", tmp]):
                subprocess.run([compiler, *command], check=True, capture_output=True, timeout=60)
            os.replace(tmp, library)
            source.unlink(), built.unlink()
        lib = ctypes.CDLL(str(library))
        lib.gemv_bf16.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2
        lib.gemm_bf16.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3
        lib.gemv_bf16.restype = lib.gemm_bf16.restype = None
        return lib
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        return None


def _cpu_model() -> str:
    """What -march=native depends on: a cache folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "".join(sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))}))


def gemv(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight (N, C) bf16, x one row (..., C), bias (N,) -> (..., N) of x's dtype, rounded once."""
    N, C = weight.shape
    assert weight.dtype == torch.bfloat16 and weight.is_contiguous() and x.numel() == C
    wide = x.float().contiguous()
    y = torch.empty(*x.shape[:-1], N)
    kernel().gemv_bf16(weight.data_ptr(), wide.data_ptr(), y.data_ptr(), N, C)
    return (y if bias is None else y + bias).to(x.dtype)


@functools.cache
def few() -> int:
    """Rows up to which `gemm` is ahead of the products for many."""
    return 0 if kernel() is None else 64 if kernel().real_is_bf16() else 16


def gemm(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight (N, C) bf16, x a few rows (..., C) bf16, bias (N,) -> (..., N), rounded once."""
    N, C = weight.shape
    assert weight.dtype == x.dtype == torch.bfloat16 and weight.is_contiguous()
    x = x.contiguous()
    rows = x if kernel().real_is_bf16() else x.float()
    y = torch.empty(*x.shape[:-1], N)
    kernel().gemm_bf16(weight.data_ptr(), rows.data_ptr(), y.data_ptr(), N, C, x.numel() // C)
    return (y if bias is None else y + bias).to(x.dtype)


def widened(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight (N, C) bf16, x (..., C), bias (N,) -> (..., N) of x's dtype, through fp32 products."""
    N, C = weight.shape
    columns = x.float().reshape(-1, C).t()  # y^T = W x^T: a block of W gives whole rows of y^T
    y = torch.empty(N, columns.shape[1])
    block = torch.empty(min(N, 256), C)
    for start in range(0, N, 256):
        part = weight[start : start + 256]
        torch.mm(block[: len(part)].copy_(part), columns, out=y[start : start + 256])
    y = y.t() if bias is None else y.t() + bias
    return y.to(x.dtype).reshape(*x.shape[:-1], N)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear as a CPU likes it, for inference: x (..., C), weight (N, C) -> (..., N)."""
    rows = x.numel() // weight.shape[1]
    ours = x.dtype == weight.dtype == torch.bfloat16 and x.device.type == "cpu"
    if ours and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        if rows == 1 and kernel() is not None:
            return gemv(weight, x, bias)
        if 1 < rows <= few():
            return gemm(weight, x, bias)
        if rows >= 4 and torch.backends.cpu.get_cpu_capability() == "AVX2":
            return widened(weight, x, bias)
    return F.linear(x, weight, bias)


class CPULinear(nn.Linear):
    """nn.Linear through `linear`; see the essay above."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def experts(x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """SwiGLU experts, a loop over `linear`: x (N, C), weights and ids (N, K), w_gate_up (E, 2F, C)
    gate rows first, w_down (E, C, F) -> (N, C)."""
    out = torch.zeros_like(x)
    for e in ids.unique().tolist():
        token, k = (ids == e).nonzero(as_tuple=True)
        gate, up = linear(x[token], w_gate_up[e]).chunk(2, dim=-1)
        y = linear(F.silu(gate) * up, w_down[e]) * weights[token, k, None].type_as(x)
        out.index_add_(0, token, y)
    return out


def keep_freed_memory() -> bool:
    """Tensors that are freed stay with the process, for those that come next (mallopt(3)); False
    where the C library is not glibc. The process's size is then that of its largest moment."""
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 2**30) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def swap_linear_(model: nn.Module) -> nn.Module:
    """Replace, in place, every nn.Linear by a CPULinear over the same parameters."""
    kernel()  # built now, not within the first forward
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


def check() -> None:
    """gemv and the widened product against float64."""
    rng = torch.Generator().manual_seed(0)
    shapes = ((64, 96, 1), (257, 1000, 1), (3, 5, 1), (64, 96, 32), (301, 95, 7), (7, 40, 80))
    for N, C, rows in shapes:
        linear = nn.Linear(C, N, bias=N % 2 == 1).bfloat16().requires_grad_(False)
        linear.weight.normal_(generator=rng)
        x = torch.randn(1, rows, C, generator=rng).bfloat16()
        bias = None if linear.bias is None else linear.bias.double()
        exact = F.linear(x.double(), linear.weight.double(), bias)
        got = swap_linear_(nn.Sequential(linear))(x)
        error = ((got.double() - exact).norm() / exact.norm()).item()
        assert error < 4e-3, (N, C, rows, error)  # half a unit in bf16's last place is 2e-3


def seconds(f: Callable[[], object], repeats: int = 15) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def benchmark() -> None:
    """GB/s of weight read, TinyLlama's shapes; each line of the tables cycles through 250 MB."""
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"{torch.get_num_threads()} threads, {capability}, torch {torch.__version__}")
    big = torch.ones(2**27)
    print(f"plain read of memory: {big.numel() * 4 / seconds(big.sum) / 1e9:.1f} GB/s")
    print(f"{'weight':>14} {'F.linear':>9} {'gemv':>9}   GB/s, bf16, one row")
    for N, C in ((2048, 2048), (256, 2048), (5632, 2048), (2048, 5632), (32000, 2048)):
        weights = [torch.randn(N, C).bfloat16() for _ in range(max(2, 125_000_000 // (N * C)))]
        x = torch.randn(1, C).bfloat16()
        size = 2 * N * C * len(weights) / 1e9
        plain = size / seconds(lambda: [F.linear(x, w) for w in weights])
        ours = size / seconds(lambda: [gemv(w, x) for w in weights]) if kernel() else math.nan
        print(f"{N:>6} x {C:<5} {plain:>9.1f} {ours:>9.1f}")
    print(f"{'rows':>14} {'F.linear':>9} {'CPULinear':>9}   GFLOP/s, bf16, weight 5632 x 2048")
    weights = [torch.randn(5632, 2048).bfloat16() for _ in range(11)]
    for rows in (2, 4, 8, 16, 32, 64, 128, 512):
        x = torch.randn(rows, 2048).bfloat16()
        flops = 2 * rows * 2048 * 5632 / 1e9 * len(weights)
        plain = flops / seconds(lambda: [F.linear(x, w) for w in weights], 3)
        ours = flops / seconds(lambda: [linear(x, w) for w in weights], 3)
        print(f"{rows:>14} {plain:>9.0f} {ours:>9.0f}")


if __name__ == "__main__":
    if kernel() is None:
        print("no C compiler builds the kernel here (install gcc, or set CC): F.linear serves")
    with torch.inference_mode():
        check()
        benchmark()
