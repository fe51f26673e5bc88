/* CPU kernels of generation/cpu.py and cpu_decode.py: linear layers, and whole decode steps.

   Roofline. A decode step of one token reads every weight once, for one multiplication. So it takes
   at least bytes of weights / memory bandwidth: 2.07 GB of bf16 at 45 GB/s are 22 tokens per
   second; 2 cores could multiply ten times faster. What keeps a step above that bound is
   (1) reading one stream of addresses per core, where the prefetcher follows several: `matmul`
       reads four parts of its rows at once;
   (2) conversions: 8-bit and 4-bit weights are multiplied as integers, with x rounded to int8;
   (3) pauses between matmuls: `decode` runs all layers with one team of threads.
   Many rows of x are bound by multiplications instead: a weight in a register is used for several
   rows (`dot_*`), and 8 and 4 bits are packed for integer products without shuffles (`dot_panel`).

   Matrices are row-major. N output features, C input features, R rows of x.

   Build: cc -O3 -march=native -ffast-math -fno-finite-math-only -fopenmp -fPIC -shared. Intrinsics
   for AVX-512 (bf16 and VNNI) and AVX2 (with FMA and F16C); other CPUs run the plain C. */

#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum { BF16, Q8_0, Q4_0 }; /* formats of a Matrix; the last two are llama.cpp's */
enum { BLOCK = 32 };       /* columns of Q8_0 and Q4_0 that share a scale */
enum { SPAN = 512 };       /* int8 rows of x are padded with zeros to a multiple of it */
enum { PREFETCH = 1024 };  /* bytes ahead in a row */
enum { W_MAX = 6, R_MAX = 4 }; /* most rows of a matrix and of x that a dot_* multiplies */
enum { PANEL_ROWS = 8 };   /* rows of x that dot_panel multiplies at a time */

typedef struct {
    const void *w;          /* (N, C) bf16 or int8; or Q4_0's bytes (N, C / 2) */
    const uint16_t *scales; /* (N, C / BLOCK) fp16; NULL for bf16 */
    const uint16_t *bias;   /* (N,) bf16, or NULL */
    int64_t N, C, format;
} Matrix;

typedef struct {     /* rows of a matmul's input, rounded to what the weights are multiplied with */
    void *values;    /* (R, P): for bf16 `real`, else int8 */
    float *scales;   /* (R, P / BLOCK) of int8 */
    float *offsets;  /* (R, P / BLOCK): -zero point of w * scale * sum of the block's int8 */
    int64_t P;       /* C, padded */
} Rows;

/* ------------------------------------------------------------------------------------------------
   Numbers */

INLINE float bf16_to_float(uint16_t bf16) {
    uint32_t bits = (uint32_t)bf16 << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint16_t float_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

INLINE float fp16_to_float(uint16_t fp16) {
    uint32_t bits = (uint32_t)(fp16 & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, 4);
    value *= 0x1p112f; /* the biases of the exponents are 15 and 127 */
    memcpy(&bits, &value, 4);
    if ((fp16 & 0x7c00) == 0x7c00) bits |= 0x7f800000; /* infinity or NaN */
    bits |= (uint32_t)(fp16 & 0x8000) << 16;
    memcpy(&value, &bits, 4);
    return value;
}

/* e^x with a relative error of 2e-7 + 5e-8 |x|; 0 below -87.7, infinity above 88.4, but NaN for
   -infinity. Unlike expf it vectorizes. */
INLINE float exponential(float x) {
    x = x > 89 ? 89 : x;
    float t = x * 1.44269504f, whole = floorf(t + 0.5f), f = t - whole;
    float p = 1.5403530e-4f;
    p = p * f + 1.3333558e-3f, p = p * f + 9.6181291e-3f, p = p * f + 5.5504109e-2f;
    p = p * f + 0.24022651f, p = p * f + 0.69314718f, p = p * f + 1;
    uint32_t bits = (uint32_t)((int32_t)(whole < -126 ? -127 : whole) + 127) << 23; /* 2^whole */
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

/* ------------------------------------------------------------------------------------------------
   Dot products of W rows of a matrix with R rows of x, all of whose sums are in registers

   The rows are n, n + apart, ..., n + (W - 1) * apart, and r, ..., r + R - 1: y[i][k] is row r + i
   times row n + k * apart. W and R are constants. With one row of x, w is prefetched further ahead
   than the hardware does; with several, the next W rows of w are. */

#ifdef __AVX512BF16__
typedef __m512 vec;
typedef uint16_t real;
enum { STEP = 32 };
INLINE vec multiply_add(vec sum, const uint16_t *w, const real *x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_loadu_si512(x));
}
INLINE real to_real(float x) { return float_to_bf16(x); }
INLINE float from_real(real x) { return bf16_to_float(x); }
#else
typedef float vec __attribute__((vector_size(32)));
typedef float real;
enum { STEP = 8 };
INLINE vec multiply_add(vec sum, const uint16_t *w, const real *x) {
    typedef uint16_t bf16s __attribute__((vector_size(16), aligned(2)));
    typedef uint32_t words __attribute__((vector_size(32)));
    typedef float floats __attribute__((vector_size(32), aligned(4)));
    words fp32 = __builtin_convertvector(*(const bf16s *)w, words) << 16;
    return sum + (vec)fp32 * *(const floats *)x;
}
INLINE real to_real(float x) { return x; }
INLINE float from_real(real x) { return x; }
#endif

int real_is_bf16(void) { return sizeof(real) == 2; }

INLINE void dot_bf16(
    const Matrix *m, int64_t n, int64_t apart, const Rows *x, int64_t r, float y[R_MAX][W_MAX],
    const int W, const int R
) {
    const int64_t C = m->C, ahead = R == 1 ? PREFETCH / 2 : W * C;
    const uint16_t *w = (const uint16_t *)m->w + n * C;
    const real *row = (const real *)x->values + r * x->P;
    vec sum[W_MAX][R_MAX];
    for (int k = 0; k < W; k++)
        for (int i = 0; i < R; i++) sum[k][i] = (vec){0};
    int64_t c = 0;
    for (; c + STEP <= C; c += STEP)
        for (int k = 0; k < W; k++) {
            const uint16_t *from = w + k * apart * C + c;
            __builtin_prefetch(from + ahead);
            for (int i = 0; i < R; i++)
                sum[k][i] = multiply_add(sum[k][i], from, row + i * x->P + c);
        }
    for (int k = 0; k < W; k++)
        for (int i = 0; i < R; i++) {
            y[i][k] = 0;
            for (int j = 0; j < (int)(sizeof(vec) / 4); j++) y[i][k] += sum[k][i][j];
            for (int64_t d = c; d < C; d++)
                y[i][k] += bf16_to_float(w[k * apart * C + d]) * from_real(row[i * x->P + d]);
        }
}

#ifdef __AVX512VNNI__
/* In 128 columns of x for Q4_0: the first halves of four blocks, then their second halves. */
INLINE int64_t int4_place(int64_t c) {
    return c / 128 * 128 + c % 32 / 16 * 64 + c % 128 / 32 * 16 + c % 16;
}

/* 16 blocks, whose products of scales fill a register. A step multiplies 64 bytes of w, as unsigned
   integers, with int8 of x: 2 blocks of 8 lanes (Q8_0), or 4 blocks of 4 lanes (Q4_0). `tail`: the
   last span, of `bytes` bytes, with fewer than 16 blocks. */
INLINE void dot_span(
    const uint8_t *w, int64_t w_stride, const uint16_t *scales, int64_t s_stride, const int8_t *x,
    const float *x_scales, const float *x_offsets, int64_t P, __m512 sum[W_MAX][R_MAX],
    int64_t ahead, const int W, const int R, const int int4, const int tail, int64_t bytes
) {
    const __m512i low = _mm512_set1_epi8(15), flip = _mm512_set1_epi8(-128);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i block = int4 ? _mm512_srli_epi32(lane, 2) : _mm512_srli_epi32(lane, 3);
    const __mmask16 blocks = tail ? (1u << bytes / (int4 ? 16 : 32)) - 1 : 0xffff;
    __m512 scale[W_MAX][R_MAX];
    for (int k = 0; k < W; k++) {
        __m512 s = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(blocks, scales + k * s_stride));
        for (int i = 0; i < R; i++) {
            scale[k][i] = s * _mm512_loadu_ps(x_scales + i * P / BLOCK);
            sum[k][i] += s * _mm512_loadu_ps(x_offsets + i * P / BLOCK);
        }
    }
    for (int step = 0; step < (int4 ? 4 : 8); step++) {
        const int64_t left = tail ? bytes - step * 64 : 64;
        if (left <= 0) break;
        const __mmask64 mask = left < 64 ? (1ull << left) - 1 : ~0ull;
        const __m512i index = _mm512_add_epi32(block, _mm512_set1_epi32(step * (int4 ? 4 : 2)));
        for (int k = 0; k < W; k++) {
            const uint8_t *from = w + k * w_stride + step * 64;
            __builtin_prefetch(from + ahead);
            __m512i q = tail ? _mm512_maskz_loadu_epi8(mask, from) : _mm512_loadu_si512(from);
            __m512i high = _mm512_and_si512(_mm512_srli_epi16(q, 4), low);
            q = int4 ? _mm512_and_si512(q, low) : _mm512_xor_si512(q, flip);
            for (int i = 0; i < R; i++) {
                const int8_t *v = x + i * P + step * (int4 ? 128 : 64);
                __m512i d = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q, _mm512_loadu_si512(v));
                if (int4) d = _mm512_dpbusd_epi32(d, high, _mm512_loadu_si512(v + 64));
                __m512 s = _mm512_permutexvar_ps(index, scale[k][i]);
                sum[k][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d), s, sum[k][i]);
            }
        }
    }
}

INLINE void dot_blocks(
    const Matrix *m, int64_t n, int64_t apart, const Rows *x, int64_t r, float y[R_MAX][W_MAX],
    const int W, const int R, const int int4
) {
    const int64_t G = m->C / BLOCK, part = int4 ? 2 : 1, bytes = m->C / part, P = x->P;
    const int64_t ahead = R == 1 ? PREFETCH : W * bytes;
    const uint8_t *w = (const uint8_t *)m->w + n * bytes;
    const uint16_t *scales = m->scales + n * G;
    const int8_t *v = (const int8_t *)x->values + r * P;
    const float *s = x->scales + r * P / BLOCK, *o = x->offsets + r * P / BLOCK;
    __m512 sum[W_MAX][R_MAX];
    for (int k = 0; k < W; k++)
        for (int i = 0; i < R; i++) sum[k][i] = _mm512_setzero_ps();
    int64_t c = 0;
    for (; c + SPAN <= m->C; c += SPAN)
        dot_span(w + c / part, apart * bytes, scales + c / BLOCK, apart * G, v + c, s + c / BLOCK,
                 o + c / BLOCK, P, sum, ahead, W, R, int4, 0, 0);
    if (c < m->C)
        dot_span(w + c / part, apart * bytes, scales + c / BLOCK, apart * G, v + c, s + c / BLOCK,
                 o + c / BLOCK, P, sum, ahead, W, R, int4, 1, bytes - c / part);
    for (int k = 0; k < W; k++)
        for (int i = 0; i < R; i++) y[i][k] = _mm512_reduce_add_ps(sum[k][i]);
}

/* 16 rows of 16 words to 16 columns. */
INLINE void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) { /* r[4a + i] has columns i, 4 + i, ... of rows 4a to 4a + 3 */
        const __m512i a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x44);
        const __m512i b = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x44);
        const __m512i c = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xee);
        const __m512i d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xee);
        t[i] = _mm512_shuffle_i32x4(a, b, 0x88), t[i + 4] = _mm512_shuffle_i32x4(a, b, 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(c, d, 0x88), t[i + 12] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
    memcpy(r, t, sizeof t);
}

/* Rows n to n + 15 for many rows of x: lane i of a register belongs to row n + i, so that a block
   takes one product of scales. `panel` holds 8 registers for each block, each 4 columns of the 16
   rows; s their scales. */
static void pack_panel(const Matrix *m, int64_t n, int64_t rows, __m512i *panel, __m512 *s) {
    const __m512i low = _mm512_set1_epi8(15), flip = _mm512_set1_epi8(-128);
    const int64_t G = m->C / BLOCK, int4 = m->format == Q4_0, words = int4 ? 4 : 8;
    for (int64_t g = 0; g < G; g += 16 / words) { /* 64 bytes of each row */
        const int64_t left = (G - g) * words;
        const __mmask16 mask = left < 16 ? (1 << left) - 1 : 0xffff;
        __m512i r[16];
        for (int i = 0; i < 16; i++) {
            const int64_t row = n + (i < rows ? i : 0);
            r[i] = _mm512_maskz_loadu_epi32(mask, (const int32_t *)m->w + (row * G + g) * words);
        }
        transpose(r);
        for (int j = 0; j < (left < 16 ? left : 16); j++) {
            __m512i *out = panel + g * 8 + (int4 ? j / 4 * 8 + j % 4 : j);
            out[0] = int4 ? _mm512_and_si512(r[j], low) : _mm512_xor_si512(r[j], flip);
            if (int4) out[4] = _mm512_and_si512(_mm512_srli_epi16(r[j], 4), low);
        }
    }
    for (int64_t g = 0; g < G; g += 16) {
        const __mmask16 mask = G - g < 16 ? (1 << (G - g)) - 1 : 0xffff;
        __m512i r[16];
        for (int i = 0; i < 16; i++) {
            const uint16_t *scales = m->scales + (n + (i < rows ? i : 0)) * G + g;
            r[i] = (__m512i)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, scales));
        }
        transpose(r);
        for (int j = 0; j < 16 && g + j < G; j++) s[g + j] = (__m512)r[j];
    }
}

typedef struct { /* a block of PANEL_ROWS rows of x */
    int32_t words[8][PANEL_ROWS];
    float scales[PANEL_ROWS], offsets[PANEL_ROWS];
} Tile;

/* Rows r, r + 1, ... of x, zeros after the last. */
static void pack_tiles(const Rows *x, int64_t r, int64_t R, int64_t G, int int4, Tile *tiles) {
    for (int64_t g = 0; g < G; g++, tiles++)
        for (int i = 0; i < PANEL_ROWS; i++) {
            const int64_t row = (r + i < R ? r + i : 0) * x->P, keep = r + i < R;
            const int8_t *v = (const int8_t *)x->values + row;
            v += int4 ? int4_place(g * BLOCK) : g * BLOCK;
            for (int j = 0; j < 8; j++)
                memcpy(&tiles->words[j][i], v + 4 * j + (int4 && j > 3 ? 48 : 0), 4);
            tiles->scales[i] = keep * x->scales[row / BLOCK + g];
            tiles->offsets[i] = keep * x->offsets[row / BLOCK + g];
        }
}

/* y (PANEL_ROWS, 16), of the blocks of rows of x and of 16 rows of the matrix. */
static void dot_panel(
    const Tile *x, const __m512i *panel, const __m512 *s, int64_t G, float y[PANEL_ROWS][16]
) {
    __m512 sum[PANEL_ROWS];
    for (int i = 0; i < PANEL_ROWS; i++) sum[i] = _mm512_setzero_ps();
    for (int64_t g = 0; g < G; g++, x++, panel += 8) {
        __m512i d[PANEL_ROWS];
        for (int i = 0; i < PANEL_ROWS; i++) d[i] = _mm512_setzero_si512();
        for (int j = 0; j < 8; j++)
            #pragma GCC unroll 16
            for (int i = 0; i < PANEL_ROWS; i++)
                d[i] = _mm512_dpbusd_epi32(d[i], panel[j], _mm512_set1_epi32(x->words[j][i]));
        #pragma GCC unroll 16
        for (int i = 0; i < PANEL_ROWS; i++) {
            const __m512 scale = s[g] * _mm512_set1_ps(x->scales[i]);
            sum[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(d[i]), scale, sum[i]);
            sum[i] = _mm512_fmadd_ps(s[g], _mm512_set1_ps(x->offsets[i]), sum[i]);
        }
    }
    for (int i = 0; i < PANEL_ROWS; i++) _mm512_storeu_ps(y[i], sum[i]);
}
#else
INLINE int64_t int4_place(int64_t c) { return c; }

/* A block's dot product in fp32, without the scales; int4 without the zero point. */
#ifdef __AVX2__
typedef __m256 lanes;
INLINE lanes dot_block(const uint8_t *w, const int8_t *x, const int int4) {
    const __m128i low = _mm_set1_epi8(15);
    __m256i v = _mm256_loadu_si256((const void *)x), q, pairs;
    if (int4) {
        __m128i both = _mm_loadu_si128((const void *)w);
        __m128i high = _mm_and_si128(_mm_srli_epi16(both, 4), low);
        pairs = _mm256_maddubs_epi16(_mm256_set_m128i(high, _mm_and_si128(both, low)), v);
    } else {
        q = _mm256_loadu_si256((const void *)w);
        pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(v, q));
    }
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#else
typedef float lanes __attribute__((vector_size(4)));
INLINE lanes dot_block(const uint8_t *w, const int8_t *x, const int int4) {
    int32_t sum = 0;
    if (int4)
        for (int j = 0; j < 16; j++) sum += (w[j] & 15) * x[j] + (w[j] >> 4) * x[j + 16];
    else
        for (int j = 0; j < BLOCK; j++) sum += (int8_t)w[j] * x[j];
    return (lanes){sum};
}
#endif

INLINE void dot_blocks(
    const Matrix *m, int64_t n, int64_t apart, const Rows *x, int64_t r, float y[R_MAX][W_MAX],
    const int W, const int R, const int int4
) {
    const int64_t G = m->C / BLOCK, bytes = m->C / (int4 ? 2 : 1), P = x->P;
    const int64_t ahead = R == 1 ? PREFETCH : W * bytes;
    lanes sum[W_MAX][R_MAX];
    for (int k = 0; k < W; k++)
        for (int i = 0; i < R; i++) sum[k][i] = (lanes){0}, y[i][k] = 0;
    for (int64_t g = 0; g < G; g++)
        for (int k = 0; k < W; k++) {
            const int64_t row = n + k * apart;
            const uint8_t *w = (const uint8_t *)m->w + row * bytes + g * (int4 ? 16 : 32);
            const float scale = fp16_to_float(m->scales[row * G + g]);
            __builtin_prefetch(w + ahead);
            for (int i = 0; i < R; i++) {
                const int64_t at = (r + i) * P + g * BLOCK;
                lanes d = dot_block(w, (const int8_t *)x->values + at, int4);
                sum[k][i] += d * (scale * x->scales[at / BLOCK]);
                if (int4) y[i][k] += scale * x->offsets[at / BLOCK];
            }
        }
    for (int k = 0; k < W; k++)
        for (int i = 0; i < R; i++)
            for (int j = 0; j < (int)(sizeof(lanes) / 4); j++) y[i][k] += sum[k][i][j];
}
#endif

INLINE void dot(
    const Matrix *m, int64_t n, int64_t apart, const Rows *x, int64_t r, float y[R_MAX][W_MAX],
    const int W, const int R
) {
    if (m->format == BF16) dot_bf16(m, n, apart, x, r, y, W, R);
    else if (m->format == Q8_0) dot_blocks(m, n, apart, x, r, y, W, R, 0);
    else dot_blocks(m, n, apart, x, r, y, W, R, 1);
}

/* ------------------------------------------------------------------------------------------------
   Matmuls */

/* Round values (R, C) to what a matrix of this format is multiplied with. */
static void round_rows(Rows *x, const float *values, int64_t R, int64_t C, int64_t format) {
    const int64_t P = x->P = (C + SPAN - 1) / SPAN * SPAN;
    for (int64_t r = 0; r < R && format == BF16; r++)
        for (int64_t c = 0; c < C; c++) ((real *)x->values)[r * P + c] = to_real(values[r * C + c]);
    if (format == BF16) return;
    for (int64_t r = 0; r < R; r++)
        for (int64_t c = 0; c < P; c += BLOCK) {
            const float *v = values + r * C + c;
            const int n = c < C ? BLOCK : 0; /* or padding */
            int8_t q[BLOCK] = {0}, *out = (int8_t *)x->values + r * P;
            uint32_t largest = 0, bits; /* |v| compared as integers: NaN is the largest */
            for (int i = 0; i < n; i++) {
                memcpy(&bits, v + i, 4);
                bits &= 0x7fffffff;
                largest = largest > bits ? largest : bits;
            }
            float scale;
            memcpy(&scale, &largest, 4);
            scale /= 127;
            const float inverse = scale > 0 ? 1 / scale : 0;
            int32_t sum = 0;
            for (int i = 0; i < n; i++) sum += q[i] = (int8_t)rintf(v[i] * inverse);
            x->scales[(r * P + c) / BLOCK] = scale;
            x->offsets[(r * P + c) / BLOCK] = -scale * sum * (format == Q4_0 ? 8 : 128);
            if (format == Q4_0) {
                memcpy(out + int4_place(c), q, 16);
                memcpy(out + int4_place(c + 16), q + 16, 16);
            } else memcpy(out + c, q, BLOCK);
        }
}

INLINE void store(const Matrix *m, float *y, int64_t n, float sum, int add) {
    y[n] = (add ? y[n] : 0) + sum + (m->bias ? bf16_to_float(m->bias[n]) : 0);
}

/* W rows of the matrix, all rows of x. */
INLINE void matmul_strip(
    const Matrix *m, int64_t n, const Rows *x, int64_t R, float *y, int64_t stride, int add,
    const int W
) {
    for (int64_t r = 0; r < R; r += R_MAX) {
        float sums[R_MAX][W_MAX];
        const int rows = R - r < R_MAX ? R - r : R_MAX;
        if (rows == 1) dot(m, n, 1, x, r, sums, W, 1);
        else if (rows == 2) dot(m, n, 1, x, r, sums, W, 2);
        else if (rows == 3) dot(m, n, 1, x, r, sums, W, 3);
        else dot(m, n, 1, x, r, sums, W, 4);
        for (int i = 0; i < rows; i++)
            for (int k = 0; k < W; k++) store(m, y + (r + i) * stride, n + k, sums[i][k], add);
    }
}

#ifdef __AVX512VNNI__
/* For many rows of x: 16 rows of the matrix at a time, packed once for all of them. */
static void matmul_panels(
    const Matrix *m, const Rows *x, int64_t R, float *y, int64_t stride, int add, int64_t start,
    int64_t end
) {
    const int64_t G = m->C / BLOCK, strips = (R + PANEL_ROWS - 1) / PANEL_ROWS;
    __m512i *panel = aligned_alloc(64, G * 9 * 64 + strips * G * sizeof(Tile));
    __m512 *s = (__m512 *)(panel + 8 * G);
    Tile *tiles = (Tile *)(s + G);
    for (int64_t i = 0; i < strips; i++)
        pack_tiles(x, i * PANEL_ROWS, R, G, m->format == Q4_0, tiles + i * G);
    for (int64_t n = start; n < end; n += 16) {
        const int64_t rows = end - n < 16 ? end - n : 16;
        pack_panel(m, n, rows, panel, s);
        for (int64_t r = 0; r < R; r += PANEL_ROWS) {
            float sums[PANEL_ROWS][16];
            dot_panel(tiles + r / PANEL_ROWS * G, panel, s, G, sums);
            for (int64_t i = 0; i < PANEL_ROWS && r + i < R; i++)
                for (int64_t k = 0; k < rows; k++)
                    store(m, y + (r + i) * stride, n + k, sums[i][k], add);
        }
    }
    free(panel);
}
#endif

/* y[r][n] = sum over c of w[n][c] * x[r][c] + bias[n] for start <= n < end, y (R, stride); with
   `add`, added to y. */
__attribute__((noinline, noclone)) static void matmul(
    const Matrix *m, const Rows *x, int64_t R, float *y, int64_t stride, int add, int64_t start,
    int64_t end
) {
    int64_t n = start;
#ifdef __AVX512VNNI__
    if (R >= 2 * PANEL_ROWS && m->format != BF16) {
        matmul_panels(m, x, R, y, stride, add, start, end);
        return;
    }
#endif
    if (R == 1) {
        const int64_t quarter = (end - start) / 4;
        for (; n < start + quarter; n++) {
            float sums[R_MAX][W_MAX];
            dot(m, n, quarter, x, 0, sums, 4, 1);
            for (int k = 0; k < 4; k++) store(m, y, n + k * quarter, sums[0][k], add);
        }
        n = start + 4 * quarter;
    }
    for (; n + 6 <= end && m->format == BF16; n += 6) matmul_strip(m, n, x, R, y, stride, add, 6);
    for (; n + 4 <= end && m->format != BF16; n += 4) matmul_strip(m, n, x, R, y, stride, add, 4);
    for (; n < end; n++) matmul_strip(m, n, x, R, y, stride, add, 1);
}

/* The first and the last row, exclusive, of thread t of T: multiples of 12, so that strips of 4 and
   6 rows, and the order of every sum, are the same for any T. */
#define SHARE(N) (N) / 12 * t / T * 12, t + 1 == T ? (N) : (N) / 12 * (t + 1) / T * 12

static Rows new_rows(int64_t R, int64_t C) {
    const int64_t P = (C + SPAN - 1) / SPAN * SPAN;
    float *values = aligned_alloc(64, R * (P + 2 * P / BLOCK) * sizeof(float));
    return (Rows){values, values + R * P, values + R * (P + P / BLOCK), P};
}

/* x (R, C) fp32 -> y (R, N) fp32 */
void linear(const Matrix *m, const float *x, float *y, int64_t R) {
    Rows rows = new_rows(R, m->C);
    round_rows(&rows, x, R, m->C, m->format);
    #pragma omp parallel
    {
        const int64_t t = omp_get_thread_num(), T = omp_get_num_threads();
        matmul(m, &rows, R, y, m->N, 0, SHARE(m->N));
    }
    free(rows.values);
}

#include "cpu_weight_only.c"
#include "cpu_adapters.c"
#include "cpu_decode.c"
