/* LoRA adapters, included by cpu.c: y += scale * B (A x) for segments of rows, with the weights where
   generation/adapters.py keeps them, in the blocks of the KV cache.

   A is (rank, C), and those of targets with the same input are next to each other: a few rows are
   copied out of the blocks and multiplied like any matrix. B is kept transposed, (rank, F): low = A x
   has few elements, so y is a sum of `rank` rows of B, a piece of each in L1 at a time. The threads
   divide the ranks of A and the columns of B. */

enum { PIECE = 256 }; /* columns of B at a time */
enum { RANKS = 12 };  /* rows of A at a time */
enum { ROWS = 8 };    /* rows of y at a time */

typedef struct {
    int64_t first, end, rank, low;   /* rows; where its low begins, in elements per target */
    const int32_t *blocks, *offsets; /* (layers, targets, 2): where A and B begin; -1: not adapted */
    float scale;
} Segment;

typedef struct { /* of a step; n = 0: none */
    const Segment *segments;
    int64_t n, targets, size; /* size: elements of low per target */
} Adapters;

typedef struct { /* linears of a layer with one input: the first of them, and how many */
    const uint16_t *pages;
    int64_t parts, part_stride, chunk, layer, target, count;
} Group;

static const int32_t *offset_of(const Adapters *a, const Group *g, const Segment *s, int64_t i) {
    return s->offsets + 2 * (g->layer * a->targets + g->target + i);
}

/* Copy n elements of a segment's weights from `at` on. */
static void copy_weights(const Group *g, const Segment *s, int64_t at, int64_t n, uint16_t *to) {
    for (int64_t m; n > 0; n -= m, at += m, to += m) {
        const int64_t chunk = at / g->chunk, begin = at % g->chunk;
        const uint16_t *from = g->pages + chunk % g->parts * g->part_stride + begin;
        m = g->chunk - begin < n ? g->chunk - begin : n;
        memcpy(to, from + s->blocks[chunk / g->parts] * g->chunk, m * sizeof(uint16_t));
    }
}

/* low (rows, adapted targets * rank) of each segment = A x, x (R, C): the ranks of thread t of T.
   buffer: (RANKS, C). */
static void shrink(
    const Adapters *a, const Group *g, const Rows *x, int64_t C, float *low, uint16_t *buffer,
    int64_t t, int64_t T
) {
    for (const Segment *s = a->segments; s < a->segments + a->n; s++) {
        int64_t at = -1, n = 0;
        for (int64_t i = g->count - 1; i >= 0; i--) {
            const int32_t begin = *offset_of(a, g, s, i);
            if (begin >= 0) at = begin, n += s->rank;
        }
        const Rows rows = {(real *)x->values + s->first * x->P, NULL, NULL, x->P};
        const int64_t end = n * (t + 1) / T;
        for (int64_t j = n * t / T; j < end; j += RANKS) {
            const int64_t m = end - j < RANKS ? end - j : RANKS;
            const Matrix matrix = {buffer, NULL, NULL, m, C, BF16};
            copy_weights(g, s, at + j * C, m * C, buffer);
            float *out = low + g->count * s->low + j;
            matmul(&matrix, &rows, s->end - s->first, out, n, 0, 0, m);
        }
    }
}

/* sums (rows, PIECE) = scale * B low for columns f to f + n of a segment's rows from r on. */
static void expand_piece(
    const Group *g, const Segment *s, const float *low, int64_t stride, int64_t at, int64_t F,
    int64_t rows, int64_t f, int64_t n, float sums[ROWS][PIECE]
) {
    uint16_t b[4][PIECE];
    for (int64_t r = 0; r < rows; r++) memset(sums[r], 0, n * sizeof(float));
    for (int64_t j = 0; j < s->rank; j += 4) {
        const int64_t m = s->rank - j < 4 ? s->rank - j : 4;
        for (int64_t k = 0; k < m; k++) copy_weights(g, s, at + (j + k) * F + f, n, b[k]);
        for (int64_t k = m; k < 4; k++) memset(b[k], 0, n * sizeof(uint16_t));
        for (int64_t r = 0; r < rows; r++) {
            float c[4] = {0};
            for (int64_t k = 0; k < m; k++) c[k] = s->scale * low[r * stride + j + k];
            for (int64_t k = 0; k < n; k++)
                sums[r][k] += c[0] * bf16_to_float(b[0][k]) + c[1] * bf16_to_float(b[1][k])
                            + c[2] * bf16_to_float(b[2][k]) + c[3] * bf16_to_float(b[3][k]);
        }
    }
}

/* y (R, F) of the i-th target += scale * B low, in columns `begin` to `end`; y is fp32, or bf16 with
   its rows in `order`. */
INLINE void expand(
    const Adapters *a, const Group *g, int64_t i, const float *low, float *y, uint16_t *y_bf16,
    const int64_t *order, int64_t F, int64_t begin, int64_t end
) {
    float sums[ROWS][PIECE];
    for (const Segment *s = a->segments; s < a->segments + a->n; s++) {
        const int32_t at = offset_of(a, g, s, i)[1];
        int64_t before = 0, n = 0;
        for (int64_t k = 0; k < g->count; k++)
            if (*offset_of(a, g, s, k) >= 0) n += s->rank, before += k < i ? s->rank : 0;
        for (int64_t f = begin; at >= 0 && f < end; f += PIECE) {
            const int64_t size = end - f < PIECE ? end - f : PIECE;
            for (int64_t r = s->first; r < s->end; r += ROWS) {
                const int64_t rows = s->end - r < ROWS ? s->end - r : ROWS;
                const float *from = low + g->count * s->low + (r - s->first) * n + before;
                expand_piece(g, s, from, n, at, F, rows, f, size, sums);
                for (int64_t k = 0; k < rows; k++) {
                    const int64_t to = (order ? order[r + k] : r + k) * F + f;
                    for (int64_t c = 0; c < size && y; c++) y[to + c] += sums[k][c];
                    for (int64_t c = 0; c < size && !y; c++)
                        y_bf16[to + c] = float_to_bf16(bf16_to_float(y_bf16[to + c]) + sums[k][c]);
                }
            }
        }
    }
}

/* y[i] (R, F[i]) += the adapters' part, for the linears of a group with input x (R, C), both bf16.
   x has its rows in the segments' order, which is row order[r] of y. */
void add_adapters(
    const Adapters *a, const Group *g, const uint16_t *x, uint16_t *const *y, const int64_t *F,
    const int64_t *order, int64_t R, int64_t C
) {
    Rows in = {(void *)x, NULL, NULL, C};
    if (sizeof(real) != sizeof(uint16_t)) {
        in.values = malloc(R * C * sizeof(real));
        for (int64_t k = 0; k < R * C; k++) ((real *)in.values)[k] = to_real(bf16_to_float(x[k]));
    }
    float *low = malloc(g->count * a->size * sizeof(float));
    #pragma omp parallel
    {
        const int64_t t = omp_get_thread_num(), T = omp_get_num_threads();
        uint16_t *buffer = malloc(RANKS * C * sizeof(uint16_t));
        shrink(a, g, &in, C, low, buffer, t, T);
        #pragma omp barrier
        for (int64_t i = 0; i < g->count; i++) {
            const int64_t f[] = {SHARE(F[i])};
            expand(a, g, i, low, NULL, y[i], order, F[i], f[0], f[1]);
        }
        free(buffer);
    }
    free(low);
    if (in.values != (void *)x) free(in.values);
}
