/* Weight-only quantization, included by cpu.c: x is not rounded further than to bf16.

   int8: C values per row and an fp32 scale; zeros is NULL. int4: C / 2 bytes per row, the even
   column in the low nibble, and for each of G groups a bf16 scale and a zero point:
   (q - zero) * scale. One row of x is multiplied by gemv_*, a few by gemm_packed. */

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
typedef __m512i group_map;
static inline vec dot_int4(
    vec sum, const uint8_t *w, const uint16_t *scales, const uint16_t *x, const float *x_scales,
    const int groups, group_map lane_group
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
static inline group_map group_of_lanes(int groups) {
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
enum { S = 64 };
typedef int group_map;
static inline vec dot_int4(
    vec sum, const uint8_t *w, const uint16_t *scales, const uint16_t *x, const float *x_scales,
    const int groups, group_map lane_group
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
static inline group_map group_of_lanes(int groups) { return 0; }
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
INLINE void rows_int4(
    const uint8_t *const w[2], const uint16_t *const scales[2], const uint16_t *x,
    const float *x_scales, int64_t C, int64_t group_size, const int groups, float total[2]
) {
    const group_map lane_group = group_of_lanes(groups);
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

/* y (R, N) = x (R, C) W^T, with rows of w dequantized six at a time. */
void gemm_packed(
    const void *w, const void *scales, const uint8_t *zeros, const float *x, float *y, int64_t N,
    int64_t C, int64_t G, int64_t R
) {
    Rows rows = new_rows(R, C);
    round_rows(&rows, x, R, C, BF16);
    #pragma omp parallel
    {
        uint16_t *six = malloc(6 * C * 2);
        const Matrix m = {six, NULL, NULL, 6, C, BF16};
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < N; n += 6) {
            const int64_t W = N - n < 6 ? N - n : 6;
            for (int64_t k = 0; k < W; k++)
                unpack_row(w, zeros == NULL ? NULL : scales, zeros, six + k * C, n + k, C, G);
            matmul(&m, &rows, R, y + n, N, 0, 0, W);
            for (int64_t r = 0; r < R && zeros == NULL; r++)
                for (int64_t k = 0; k < W; k++) y[r * N + n + k] *= ((const float *)scales)[n + k];
        }
        free(six);
    }
    free(rows.values);
}
