"""CPU kernels for linear layers: bf16, int8 and int4 weights at memory bandwidth.

Decoding one token multiplies every weight matrix by one vector. Each weight is read once and used
once, so a step cannot be faster than reading the weights; torch's bf16 matmul on a CPU stays well
below that. Four causes, each with its fix:

1. Processing row after row is one stream of addresses per core, and a core's prefetcher can follow
   several. `gemv` splits the matrix into four blocks of rows and reads all four concurrently, with
   fp32 sums. It is C, compiled on first use by the system's compiler (about a second) and cached in
   the user's cache folder. Without a compiler F.linear is used.
2. A few rows (a decoding batch) need no more memory traffic than one, yet torch takes twice the
   time for two rows and three times for sixteen. `gemm` keeps six rows of the weight in L1 for all
   rows of x and prefetches the next six while it multiplies, with bf16 dot-product instructions
   where the CPU has them.
3. With many rows (prefill), CPUs before AVX-512 have no bf16 matmul instructions, and torch's
   emulation runs at a seventh of its fp32 rate. `linear_via_fp32` converts 256 rows of the weight
   at a time to fp32, few enough to stay in cache, and multiplies those.
4. glibc returns freed tensors to the system, and each new page of the next tensor costs a page
   fault: a norm over 512 rows of 2048 takes 0.35 ms, or 4 ms with the faults. `keep_freed_memory`
   makes glibc keep the memory, for the whole process.

When it loses: CPUs with AVX-512 have better bf16 matmuls than cause 3's fix, which is off there;
for matrices of a few kilobytes the call overhead dominates. No gradients: with grad mode on a layer
is plain F.linear. Inside torch.compile each call is one opaque operator.

Hooks: the Linear swap, `swap_linear_(model)`; one expert's matmul in an MoE layer, `expert_linear`.
Equivalence (test_all.py): equal to nn.Linear up to rounding, and closer to float64. Needs torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static inline float bf16_to_float(uint16_t bf16) {
    uint32_t bits = (uint32_t)bf16 << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* y[n] = sum over c of w[n][c] * x[c]; rows n, n + N/4, n + N/2 and n + 3N/4 concurrently. */
void gemv_bf16(const uint16_t *w, const float *x, float *y, int64_t N, int64_t C) {
    int64_t Q = N / 4;
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < Q; n++) {
        const uint16_t *w0 = w + n * C, *w1 = w0 + Q * C, *w2 = w1 + Q * C, *w3 = w2 + Q * C;
        float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
        #pragma omp simd reduction(+ : s0, s1, s2, s3)
        for (int64_t c = 0; c < C; c++) {
            s0 += bf16_to_float(w0[c]) * x[c];
            s1 += bf16_to_float(w1[c]) * x[c];
            s2 += bf16_to_float(w2[c]) * x[c];
            s3 += bf16_to_float(w3[c]) * x[c];
        }
        y[n] = s0, y[n + Q] = s1, y[n + 2 * Q] = s2, y[n + 3 * Q] = s3;
    }
    for (int64_t n = 4 * Q; n < N; n++) {
        y[n] = 0;
        for (int64_t c = 0; c < C; c++) y[n] += bf16_to_float(w[n * C + c]) * x[c];
    }
}

/* GEMM for a few rows of x: bf16 dot products if the CPU has the instruction, else fp32 FMAs. The
   tile of sums, 6 rows of w by XR rows of x, fills the registers. */
#ifdef __AVX512BF16__
#include <immintrin.h>
typedef uint16_t real;
typedef __m512 vec;
enum { XR = 4, STEP = 32, REAL_IS_BF16 = 1 };
static inline vec mac(vec sum, const uint16_t *w, const real *x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_loadu_si512(x));
}
static inline float to_float(real x) { return bf16_to_float(x); }
#else
typedef float real;
typedef float vec __attribute__((vector_size(32)));
enum { XR = 2, STEP = 8, REAL_IS_BF16 = 0 };
static inline vec mac(vec sum, const uint16_t *w, const real *x) {
    typedef uint16_t bf16s __attribute__((vector_size(16), aligned(2)));
    typedef uint32_t words __attribute__((vector_size(32)));
    typedef float floats __attribute__((vector_size(32), aligned(4)));
    words fp32 = __builtin_convertvector(*(const bf16s *)w, words) << 16;
    return sum + (vec)fp32 * *(const floats *)x;
}
static inline float to_float(real x) { return x; }
#endif

int real_is_bf16(void) { return REAL_IS_BF16; }

/* y[r][k] = sum over c of w[k][c] * x[r][c] for W rows of w and R rows of x; prefetches P of the
   next 6 rows of w, starting with the p-th. */
static inline __attribute__((always_inline)) void tile(
    const uint16_t *w, const real *x, float *y, int64_t N, int64_t C, const int W, const int R,
    int p, const int P
) {
    vec sum[6][XR];
    for (int k = 0; k < W; k++) for (int r = 0; r < R; r++) sum[k][r] = (vec){0};
    const uint16_t *next[6];
    for (int i = 0; i < P; i++) next[i] = w + (6 + (p + i) % 6) * C;
    int64_t c = 0;
    for (; c + STEP <= C; c += STEP) {
        for (int i = 0; i < P; i++) __builtin_prefetch(next[i] + c, 0, 2);
        for (int k = 0; k < W; k++)
            for (int r = 0; r < R; r++) sum[k][r] = mac(sum[k][r], w + k * C + c, x + r * C + c);
    }
    for (int k = 0; k < W; k++)
        for (int r = 0; r < R; r++) {
            float total = 0;
            for (int i = 0; i < (int)(sizeof(vec) / 4); i++) total += sum[k][r][i];
            for (int64_t d = c; d < C; d++)
                total += bf16_to_float(w[k * C + d]) * to_float(x[r * C + d]);
            y[r * N + k] = total;
        }
}

/* W rows of w times all rows of x, XR at a time. w comes from memory only for the first XR; the
   previous strip prefetched it, P rows of w in each of its tiles. */
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

/* Quantized weights. int8: C values per row and an fp32 scale; zeros is NULL. int4: C / 2 bytes per
   row, the even column in the low nibble, and for each of G groups a bf16 scale and a zero point:
   (q - zero) * scale. Vectors x and y are bf16. */
static inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

void gemv_int8(
    const int8_t *w, const float *scales, const uint16_t *x, uint16_t *y, int64_t N, int64_t C
) {
    int64_t Q = N / 4;
    float *x_fp32 = malloc(4 * C);
    for (int64_t c = 0; c < C; c++) x_fp32[c] = bf16_to_float(x[c]);
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < Q; n++) {
        const int8_t *w0 = w + n * C, *w1 = w0 + Q * C, *w2 = w1 + Q * C, *w3 = w2 + Q * C;
        float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
        #pragma omp simd reduction(+ : s0, s1, s2, s3)
        for (int64_t c = 0; c < C; c++) {
            s0 += w0[c] * x_fp32[c];
            s1 += w1[c] * x_fp32[c];
            s2 += w2[c] * x_fp32[c];
            s3 += w3[c] * x_fp32[c];
        }
        float sums[4] = {s0, s1, s2, s3};
        for (int64_t i = 0, k = n; i < 4; i++, k += Q) y[k] = float_to_bf16(sums[i] * scales[k]);
    }
    for (int64_t n = 4 * Q; n < N; n++) {
        float sum = 0;
        for (int64_t c = 0; c < C; c++) sum += w[n * C + c] * x_fp32[c];
        y[n] = float_to_bf16(sum * scales[n]);
    }
    free(x_fp32);
}

/* int4 is unpacked by shifts alone: in S columns (S / 4 words of 16 bits) nibble i of word l is
   column 4l + i, so the words shifted right by 4i match row i of x reordered to (4, S / 4). A lane
   of the sums covers 8 columns of one group, whose scale is applied once for the four shifts. */
#ifdef __AVX512BF16__
enum { S = 128 };
typedef __m512i lanes;
static inline vec dot_int4(
    vec sum, const uint8_t *w, const uint16_t *scales, const uint16_t *x, const float *x_scales,
    const int groups, lanes lane_group
) {
    static const uint16_t int4_to_bf16[32] = {  /* indexed by 5 bits, the highest ignored */
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
        0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    };
    const __m512i table = _mm512_loadu_si512(int4_to_bf16), words = _mm512_loadu_si512(w);
    vec part = {0};
    for (int i = 0; i < 4; i++) {
        __m512i q = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * i), table);
        part = _mm512_dpbf16_ps(part, (__m512bh)q, (__m512bh)_mm512_loadu_si512(x + 32 * i));
    }
    int64_t packed = 0;
    memcpy(&packed, scales, 2 * groups);
    __m512i fp32 = _mm512_maskz_permutexvar_epi16(
        0xaaaaaaaa, lane_group, _mm512_set1_epi64(packed)
    );
    return sum + part * (vec)fp32;
}
static inline lanes group_of_lanes(int groups) {
    uint16_t group[32];
    for (int i = 0; i < 32; i++) group[i] = i * groups / 32;
    return _mm512_loadu_si512(group);
}
static void reorder_x(const uint16_t *x, int64_t C, uint16_t *order, float *x_scales) {
    for (int64_t b = 0; b < C; b += 4)
        for (int i = 0; i < 4; i++) order[b / S * S + i * (S / 4) + b % S / 4] = x[b + i];
}
#elif defined(__AVX2__)
/* Without bf16 dot products: x is quantized to int16 with one scale per 32 columns (the largest
   becomes 2^15 - 1), and the integer sums are exact. */
#include <immintrin.h>
enum { S = 64 };
typedef int lanes;
static inline vec dot_int4(
    vec sum, const uint8_t *w, const uint16_t *scales, const uint16_t *x, const float *x_scales,
    const int groups, lanes lane_group
) {
    const __m256i words = _mm256_loadu_si256((const void *)w), low = _mm256_set1_epi16(15);
    __m256i part = {0};
    for (int i = 0; i < 4; i++) {
        __m256i q = _mm256_and_si256(_mm256_srli_epi16(words, 4 * i), low);
        __m256i xs = _mm256_loadu_si256((const void *)(x + 16 * i));
        part = _mm256_add_epi32(part, _mm256_madd_epi16(q, xs));
    }
    float first = bf16_to_float(scales[0]) * x_scales[0];
    float second = bf16_to_float(scales[groups - 1]) * x_scales[1];
    vec scale = _mm256_set_m128(_mm_set1_ps(second), _mm_set1_ps(first));
    return sum + _mm256_cvtepi32_ps(part) * scale;
}
static inline lanes group_of_lanes(int groups) { return 0; }
static void reorder_x(const uint16_t *x, int64_t C, uint16_t *order, float *x_scales) {
    for (int64_t b = 0; b < C; b += 32) {
        float amax = 0;
        for (int64_t c = b; c < b + 32; c++) {
            float size = bf16_to_float(x[c] & 0x7fff);
            amax = amax > size ? amax : size;
        }
        x_scales[b / 32] = amax / 32767;
        float inverse = amax > 0 ? 32767 / amax : 0;
        for (int64_t c = b; c < b + 32; c++)
            order[c / S * S + c % 4 * (S / 4) + c % S / 4] =
                (int16_t)__builtin_rintf(bf16_to_float(x[c]) * inverse);
    }
}
#endif

#if defined(__AVX512BF16__) || defined(__AVX2__)
/* Two rows at a time with explicit prefetch: a row is so short that the hardware prefetcher is too
   late. */
static inline __attribute__((always_inline)) void rows_int4(
    const uint8_t *const w[2], const uint16_t *const scales[2], const uint16_t *x,
    const float *x_scales, int64_t C, int64_t group_size, const int groups, float total[2]
) {
    enum { PREFETCH = 1024 };
    const lanes lane_group = group_of_lanes(groups);
    vec sum[2] = {{0}, {0}};
    int64_t c = 0;
    for (; c + S <= C; c += S)
        for (int r = 0; r < 2; r++) {
            const uint16_t *s = scales[r] + c / group_size;
            __builtin_prefetch(w[r] + c / 2 + PREFETCH);
            sum[r] = dot_int4(
                sum[r], w[r] + c / 2, s, x + c, x_scales + c / 32, groups, lane_group
            );
        }
    for (int r = 0; r < 2; r++) {
        if (c < C) {  /* the tail, padded with zeros as x is */
            uint8_t tail[S / 2] = {0};
            uint16_t s[4] = {0};
            memcpy(tail, w[r] + c / 2, (C - c) / 2);
            memcpy(s, scales[r] + c / group_size, 2 * (C / group_size - c / group_size));
            sum[r] = dot_int4(sum[r], tail, s, x + c, x_scales + c / 32, groups, lane_group);
        }
        total[r] = 0;
        for (int i = 0; i < (int)(sizeof(vec) / 4); i++) total[r] += sum[r][i];
    }
}

void gemv_int4(
    const uint8_t *w, const uint16_t *scales, const uint8_t *zeros, const uint16_t *x, uint16_t *y,
    int64_t N, int64_t C, int64_t G
) {
    int64_t half = (N + 1) / 2, group_size = C / G;
    uint16_t *order = calloc(C + S, 2);
    float *x_scales = calloc((C + S) / 32, 4), *sums = calloc(G, 4);
    reorder_x(x, C, order, x_scales);
    for (int64_t g = 0; g < G; g++)
        for (int64_t c = g * group_size; c < (g + 1) * group_size; c++)
            sums[g] += bf16_to_float(x[c]);
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < half; n++) {
        int64_t row[2] = {n, n + half < N ? n + half : n};
        const uint8_t *const rows[2] = {w + row[0] * C / 2, w + row[1] * C / 2};
        const uint16_t *const s[2] = {scales + row[0] * G, scales + row[1] * G};
        float total[2];
        if (group_size * 4 == S) rows_int4(rows, s, order, x_scales, C, group_size, 4, total);
        else if (group_size * 2 == S) rows_int4(rows, s, order, x_scales, C, group_size, 2, total);
        else rows_int4(rows, s, order, x_scales, C, group_size, 1, total);
        for (int r = 0; r < 2; r++) {
            const uint8_t *z = zeros + row[r] * G;
            float zero_term = 0;
            for (int64_t g = 0; g < G; g++) zero_term += bf16_to_float(s[r][g]) * z[g] * sums[g];
            y[row[r]] = float_to_bf16(total[r] - zero_term);
        }
    }
    free(order), free(x_scales), free(sums);
}
#else
void gemv_int4(
    const uint8_t *w, const uint16_t *scales, const uint8_t *zeros, const uint16_t *x, uint16_t *y,
    int64_t N, int64_t C, int64_t G
) {
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        float sum = 0;
        for (int64_t g = 0; g < G; g++) {
            float part = 0;
            const uint8_t *row = w + (n * C + g * C / G) / 2, zero = zeros[n * G + g];
            const uint16_t *xs = x + g * C / G;
            for (int64_t j = 0; j < C / G / 2; j++) {
                part += ((row[j] & 15) - zero) * bf16_to_float(xs[2 * j]);
                part += ((row[j] >> 4) - zero) * bf16_to_float(xs[2 * j + 1]);
            }
            sum += part * bf16_to_float(scales[n * G + g]);
        }
        y[n] = float_to_bf16(sum);
    }
}
#endif

/* Dequantize 32 values of a row to bf16. */
#ifdef __AVX512BF16__
static inline void unpack_int8(const int8_t *w, float scale, uint16_t *out) {
    vec low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)w)));
    vec high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(w + 16))));
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(high * scale, low * scale));
}
static inline void unpack_int4(const uint8_t *w, float scale, float zero, uint16_t *out) {
    /* a table of the 16 possible values, indexed by 16-bit words in column order */
    const vec q = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vec values = (q - zero) * scale;
    __m512i table = (__m512i)_mm512_cvtne2ps_pbh(values, values);
    __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)w));
    __m256i pairs = _mm256_or_si256(bytes, _mm256_slli_epi16(bytes, 4));
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(pairs), table));
}
#else
static inline void unpack_int8(const int8_t *w, float scale, uint16_t *out) {
    for (int i = 0; i < 32; i++) out[i] = float_to_bf16(w[i] * scale);
}
static inline void unpack_int4(const uint8_t *w, float scale, float zero, uint16_t *out) {
    for (int j = 0; j < 16; j++) {
        out[2 * j] = float_to_bf16(((w[j] & 15) - zero) * scale);
        out[2 * j + 1] = float_to_bf16(((w[j] >> 4) - zero) * scale);
    }
}
#endif

/* Dequantize row n and prefetch row n + 6; int8 without the scale if scales is NULL. */
static inline void unpack_row(
    const void *w, const void *scales, const uint8_t *zeros, uint16_t *out, int64_t n, int64_t C,
    int64_t G
) {
    if (zeros == NULL) {
        const int8_t *row = (const int8_t *)w + n * C;
        float scale = scales == NULL ? 1 : ((const float *)scales)[n];
        int64_t c = 0;
        for (; c + 32 <= C; c += 32) {
            __builtin_prefetch(row + c + 6 * C);
            unpack_int8(row + c, scale, out + c);
        }
        for (; c < C; c++) out[c] = float_to_bf16(row[c] * scale);
        return;
    }
    const uint8_t *row = (const uint8_t *)w + n * C / 2;
    for (int64_t g = n * G; g < (n + 1) * G; g++) {
        float scale = bf16_to_float(((const uint16_t *)scales)[g]), zero = zeros[g];
        for (int64_t c = 0; c < C / G; c += 32, row += 16, out += 32) {
            __builtin_prefetch(row + 3 * C);
            unpack_int4(row, scale, zero, out);
        }
    }
}

void unpack(
    const void *w, const void *scales, const uint8_t *zeros, uint16_t *out, int64_t N, int64_t C,
    int64_t G
) {
    #pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) unpack_row(w, scales, zeros, out + n * C, n, C, G);
}

/* gemm_bf16 over rows dequantized six at a time. */
void gemm_packed(
    const void *w, const void *scales, const uint8_t *zeros, const real *x, float *y, int64_t N,
    int64_t C, int64_t G, int64_t R
) {
    #pragma omp parallel
    {
        uint16_t *rows = malloc(6 * C * 2);
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n += 6) {
            int64_t W = N - n < 6 ? N - n : 6;
            for (int64_t k = 0; k < W; k++)
                unpack_row(w, zeros == NULL ? NULL : scales, zeros, rows + k * C, n + k, C, G);
            if (W == 6) strip(rows, x, y + n, N, C, R, 6, 0);
            else for (int64_t k = 0; k < W; k++) strip(rows + k * C, x, y + n + k, N, C, R, 1, 0);
            for (int64_t r = 0; r < R && zeros == NULL; r++)
                for (int64_t k = 0; k < W; k++) y[r * N + n + k] *= ((const float *)scales)[n + k];
        }
        free(rows);
    }
}
"""


@functools.cache
def load_kernels() -> ctypes.CDLL | None:
    """Compile and load the C code above; None without a working C compiler."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    # OpenMP is not linked: at load its symbols bind to the runtime that torch has already loaded. A
    # second runtime would be a second pool of threads spinning on the same cores.
    flags = ["-O3", "-march=native", "-ffast-math", "-fPIC", "-fopenmp", "-c"]
    try:
        info = Path("/proc/cpuinfo")  # in the key: machines with different CPUs may share a folder
        lines = info.read_text().splitlines() if info.exists() else []
        cpu_model = {x for x in lines if x.startswith(("model name", "flags", "Features"))}
        cache_key = " ".join([SOURCE, compiler, *flags, *sorted(cpu_model)]).encode()
        build_hash = hashlib.sha256(cache_key).hexdigest()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sheaf"
        library = cache / f"gemv-{build_hash[:16]}.so"
        if not library.exists():
            cache.mkdir(parents=True, exist_ok=True)
            tmp = library.with_name(f"{library.stem}-{os.getpid()}.tmp")
            source, obj = tmp.with_suffix(".c"), tmp.with_suffix(".o")
            source.write_text(SOURCE)
            for command in ([*flags, source, "-o", obj], ["-shared", obj, "-o", tmp]):
                subprocess.run([compiler, *command], check=True, capture_output=True, timeout=60)
            os.replace(tmp, library)
            source.unlink(), obj.unlink()
        lib = ctypes.CDLL(str(library))
        for name, pointers, sizes in (
            ("gemv_bf16", 3, 2),
            ("gemm_bf16", 3, 3),
            ("gemv_int8", 4, 2),
            ("gemv_int4", 5, 3),
            ("unpack", 4, 3),
            ("gemm_packed", 5, 4),
        ):
            function = getattr(lib, name)
            function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * sizes
            function.restype = None
        return lib
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        return None


def gemv(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight (N, C) bf16, x one row (..., C), bias (N,) -> (..., N) in x's dtype, rounded once."""
    N, C = weight.shape
    assert weight.dtype == torch.bfloat16 and weight.is_contiguous() and x.numel() == C
    x_fp32 = x.float().contiguous()
    y = torch.empty(*x.shape[:-1], N)
    load_kernels().gemv_bf16(weight.data_ptr(), x_fp32.data_ptr(), y.data_ptr(), N, C)
    return (y if bias is None else y + bias).to(x.dtype)


@functools.cache
def max_gemm_rows() -> int:
    """Rows of x up to which `gemm` is faster than the matmuls for many rows."""
    return 0 if load_kernels() is None else 64 if load_kernels().real_is_bf16() else 16


def gemm(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight (N, C) bf16, x a few rows (..., C) bf16, bias (N,) -> (..., N) bf16, rounded once."""
    N, C = weight.shape
    assert weight.dtype == x.dtype == torch.bfloat16 and weight.is_contiguous()
    x = x.contiguous()
    rows = x if load_kernels().real_is_bf16() else x.float()
    y = torch.empty(*x.shape[:-1], N)
    load_kernels().gemm_bf16(weight.data_ptr(), rows.data_ptr(), y.data_ptr(), N, C, x.numel() // C)
    return (y if bias is None else y + bias).to(x.dtype)


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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear on the fastest CPU path, for inference: x (..., C), weight (N, C) -> (..., N)."""
    rows = x.numel() // weight.shape[1]
    supported = x.dtype == weight.dtype == torch.bfloat16 and x.device.type == "cpu"
    if supported and not torch.is_grad_enabled():
        if torch.compiler.is_compiling():
            return torch.ops.sheaf.cpu_linear(x, weight, bias)
        if rows == 1 and load_kernels() is not None:
            return gemv(weight, x, bias)
        if 1 < rows <= max_gemm_rows():
            return gemm(weight, x, bias)
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
    unsupported inputs: x not bf16, group size below 32, gradients. Requires load_kernels()."""
    C, N, G = x.shape[-1], len(qweight), scales.shape[-1]
    rows, width = x.numel() // C, qweight.shape[1] * (1 if zeros is None else 2)
    if C != width:
        raise ValueError(f"x must have {width} columns, as the weight, not {C}")
    on_cpu = x.device.type == qweight.device.type == "cpu" and qweight.is_contiguous()
    fits = x.dtype == torch.bfloat16 and rows > 0 and (zeros is None or C // G >= 32)
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
    elif rows <= max_gemm_rows():
        x_rows = x if load_kernels().real_is_bf16() else x.float()
        y = torch.empty(*x.shape[:-1], N)
        load_kernels().gemm_packed(*weight_ptrs, x_rows.data_ptr(), y.data_ptr(), N, C, G, rows)
    else:
        weight = torch.empty(N, C, dtype=torch.bfloat16)
        load_kernels().unpack(*weight_ptrs, weight.data_ptr(), N, C, G)
        return linear(x, weight, bias)
    return (y if bias is None else y + bias).to(x.dtype)


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


class CPULinear(nn.Linear):
    """nn.Linear that calls `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def expert_linear(x: Tensor, stack: Any, e: int) -> Tensor:
    """`linear` with expert e of a stack (E, N, C), or the stack's own linear(x, e), as quantized
    stacks have: x (n, C) -> (n, N)."""
    return stack.linear(x, e) if hasattr(stack, "linear") else linear(x, stack[e])


def keep_freed_memory(keep: bool = True) -> bool:
    """Keep freed tensors' memory in the process for later tensors (mallopt(3)); False if the C
    library is not glibc. The process then stays at its peak size. keep=False: blocks of 128 KB and
    more are returned to the system at once, even those that glibc would keep."""
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    mapped, trimmed = (2**30, 2**31 - 1) if keep else (2**17, 2**17)
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

    if load_kernels() is None:
        print("no working C compiler (install gcc, or set CC): F.linear is used")
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
