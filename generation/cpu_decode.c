/* Decode steps, included by cpu.c: all layers of a dense model for R tokens.

   One team of threads runs the whole step. A barrier separates the parts that read what another
   thread wrote: q, k, v | attention | output projection | gate and up | down. What is cheap (norms,
   rounding the input of a matmul) every thread repeats for itself, which saves a barrier. The
   residual stream, norms and attention are fp32. */

typedef struct {
    const uint16_t *attention_norm, *mlp_norm, *q_norm, *k_norm; /* the last two (D,) or NULL */
    Matrix q, k, v, o, gate, up, down;
    uint16_t *k_cache, *v_cache; /* bf16, in blocks of block_size positions */
    int64_t block_size, block_stride, head_stride, slot_stride; /* strides in elements */
    int64_t ring;                /* a position is taken modulo this; 0: as it is */
    int64_t window;              /* sliding window; 0: none */
    const int32_t *tables;       /* (R, width) blocks of each token's sequence */
    const int64_t *slots;        /* (R,) where k and v are written; NULL: at the token's position */
    int64_t width;
} Layer;

typedef struct {
    const Layer *layers;
    int64_t L, C, F, Hq, Hkv, D, rope_dim, interleaved;
    float eps, scale;
} Model;

static void rms_norm(const float *x, const uint16_t *weight, float eps, int64_t C, float *y) {
    float squares = 0;
    for (int64_t c = 0; c < C; c++) squares += x[c] * x[c];
    const float inverse = 1 / sqrtf(squares / C + eps);
    for (int64_t c = 0; c < C; c++) y[c] = x[c] * inverse * bf16_to_float(weight[c]);
}

/* Normalize and rotate a head of q or k (D,), in fp32. */
static void rope(
    const Model *m, const uint16_t *norm, const float *cos, const float *sin, float *x
) {
    if (norm) rms_norm(x, norm, m->eps, m->D, x);
    const int64_t n = m->rope_dim / 2, step = m->interleaved ? 2 : 1, far = m->interleaved ? 1 : n;
    for (int64_t i = 0; i < n; i++) {
        const float a = x[i * step], b = x[i * step + far];
        x[i * step] = a * cos[i] - b * sin[i];
        x[i * step + far] = b * cos[i] + a * sin[i];
    }
}

INLINE int64_t slot_offset(const Layer *l, int64_t slot) {
    return slot / l->block_size * l->block_stride + slot % l->block_size * l->slot_stride;
}

/* Where token r's sequence has `position`. */
INLINE int64_t offset(const Layer *l, int64_t r, int64_t position) {
    if (l->ring) position %= l->ring;
    const int64_t block = l->tables[r * l->width + position / l->block_size];
    return slot_offset(l, block * l->block_size + position % l->block_size);
}

/* Attention of the query heads (group, D) of one kv head, for token r, at `position`. */
static void attend(
    const Model *m, const Layer *l, const float *q, int64_t head, int64_t r, int64_t position,
    float *scores, float *out
) {
    const int64_t D = m->D, group = m->Hq / m->Hkv;
    const int64_t first = l->window && position >= l->window ? position - l->window + 1 : 0;
    const int64_t S = position + 1 - first;
    for (int64_t j = 0; j < S; j++) {
        const uint16_t *k = l->k_cache + offset(l, r, first + j) + head * l->head_stride;
        for (int64_t g = 0; g < group; g++) {
            float sum = 0;
            for (int64_t d = 0; d < D; d++) sum += q[g * D + d] * bf16_to_float(k[d]);
            scores[g * S + j] = sum * m->scale;
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float *s = scores + g * S, largest = s[0], total = 0;
        for (int64_t j = 1; j < S; j++) largest = s[j] > largest ? s[j] : largest;
        for (int64_t j = 0; j < S; j++) total += s[j] = exponential(s[j] - largest);
        for (int64_t j = 0; j < S; j++) s[j] /= total;
    }
    memset(out, 0, group * D * sizeof(float));
    for (int64_t j = 0; j < S; j++) {
        const uint16_t *v = l->v_cache + offset(l, r, first + j) + head * l->head_stride;
        for (int64_t g = 0; g < group; g++)
            for (int64_t d = 0; d < D; d++) out[g * D + d] += scores[g * S + j] * bf16_to_float(v[d]);
    }
}

/* x (R, C): the inputs of the first layer, overwritten by the outputs of the last. Token r is at
   positions[r]; cos and sin (R, rope_dim / 2). A sequence may have several tokens. */
void decode(
    const Model *m, float *x, const float *cos, const float *sin, const int64_t *positions,
    int64_t R
) {
    const int64_t C = m->C, F = m->F, D = m->D, Q = m->Hq * D, KV = m->Hkv * D;
    const int64_t widest = C > F ? (C > Q ? C : Q) : (F > Q ? F : Q);
    int64_t longest = 0;
    for (int64_t r = 0; r < R; r++) longest = positions[r] > longest ? positions[r] : longest;
    float *q = malloc(R * (2 * Q + 2 * KV + F) * sizeof(float));
    float *k = q + R * Q, *v = k + R * KV, *attended = v + R * KV, *hidden = attended + R * Q;
    #pragma omp parallel
    {
        const int64_t t = omp_get_thread_num(), T = omp_get_num_threads();
        Rows in = new_rows(R, widest);
        const int64_t scores_size = m->Hq / m->Hkv * (longest + 1);
        float *normed = malloc((R * (C + F) + scores_size) * sizeof(float));
        float *up = normed + R * C, *scores = up + R * F;
        for (int64_t i = 0; i < m->L; i++) {
            const Layer *l = m->layers + i;
            for (int64_t r = 0; r < R; r++)
                rms_norm(x + r * C, l->attention_norm, m->eps, C, normed + r * C);
            round_rows(&in, normed, R, C, l->q.format);
            matmul(&l->q, &in, R, q, Q, 0, SHARE(Q));
            matmul(&l->k, &in, R, k, KV, 0, SHARE(KV));
            matmul(&l->v, &in, R, v, KV, 0, SHARE(KV));
            #pragma omp barrier
            #pragma omp for schedule(static)
            for (int64_t task = 0; task < R * m->Hkv; task++) {
                const int64_t r = task / m->Hkv, h = task % m->Hkv, n = m->rope_dim / 2;
                float *key = k + r * KV + h * D, *value = v + r * KV + h * D;
                rope(m, l->k_norm, cos + r * n, sin + r * n, key);
                int64_t at = l->slots ? slot_offset(l, l->slots[r]) : offset(l, r, positions[r]);
                at += h * l->head_stride;
                for (int64_t d = 0; d < D; d++) {
                    l->k_cache[at + d] = float_to_bf16(key[d]);
                    l->v_cache[at + d] = float_to_bf16(value[d]);
                }
            }
            #pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < R * m->Hkv; task++) {
                const int64_t r = task / m->Hkv, h = task % m->Hkv, n = m->rope_dim / 2;
                const int64_t group = m->Hq / m->Hkv, at = r * Q + h * group * D;
                for (int64_t g = 0; g < group; g++)
                    rope(m, l->q_norm, cos + r * n, sin + r * n, q + at + g * D);
                attend(m, l, q + at, h, r, positions[r], scores, attended + at);
            }
            round_rows(&in, attended, R, Q, l->o.format);
            matmul(&l->o, &in, R, x, C, 1, SHARE(C));
            #pragma omp barrier
            for (int64_t r = 0; r < R; r++)
                rms_norm(x + r * C, l->mlp_norm, m->eps, C, normed + r * C);
            round_rows(&in, normed, R, C, l->gate.format);
            const int64_t share[] = {SHARE(F)};
            matmul(&l->gate, &in, R, hidden, F, 0, share[0], share[1]);
            matmul(&l->up, &in, R, up, F, 0, share[0], share[1]);
            for (int64_t r = 0; r < R; r++)
                for (int64_t f = r * F + share[0]; f < r * F + share[1]; f++)
                    hidden[f] *= up[f] / (1 + exponential(-hidden[f]));
            #pragma omp barrier
            round_rows(&in, hidden, R, F, l->down.format);
            matmul(&l->down, &in, R, x, C, 1, SHARE(C));
            #pragma omp barrier
        }
        free(in.values), free(normed);
    }
    free(q);
}

/* The experts of an MoE layer. Slots are pairs of a token and one of its experts, sorted by expert:
   expert e has slots starts[e] to starts[e + 1]. x (tokens, C); gate_up (E * 2F, C), for each expert
   gate rows first; down (E * C, F). Adds weights[slot] * expert(x[token]) to y (tokens, C). */
void experts(
    const Matrix *gate_up, const Matrix *down, const int64_t *starts, const int64_t *tokens,
    const float *weights, const float *x, float *y, int64_t E
) {
    const int64_t C = gate_up->C, F = down->C, widest = C > F ? C : F;
    int64_t most = 0;
    for (int64_t e = 0; e < E; e++)
        most = starts[e + 1] - starts[e] > most ? starts[e + 1] - starts[e] : most;
    float *hidden = malloc(most * (2 * F + C) * sizeof(float)), *out = hidden + most * 2 * F;
    #pragma omp parallel
    {
        const int64_t t = omp_get_thread_num(), T = omp_get_num_threads();
        const int64_t f[] = {SHARE(F)}, c[] = {SHARE(C)};
        Rows in = new_rows(most, widest);
        float *rows = malloc(most * widest * sizeof(float));
        for (int64_t e = 0; e < E; e++) {
            const int64_t first = starts[e], R = starts[e + 1] - first, gate = e * 2 * F;
            if (R == 0) continue;
            for (int64_t r = 0; r < R; r++)
                memcpy(rows + r * C, x + tokens[first + r] * C, C * sizeof(float));
            round_rows(&in, rows, R, C, gate_up->format);
            matmul(gate_up, &in, R, hidden - gate, 2 * F, 0, gate + f[0], gate + f[1]);
            matmul(gate_up, &in, R, hidden - gate, 2 * F, 0, gate + F + f[0], gate + F + f[1]);
            for (int64_t r = 0; r < R; r++)
                for (int64_t i = r * 2 * F + f[0]; i < r * 2 * F + f[1]; i++)
                    hidden[i] *= hidden[i + F] / (1 + exponential(-hidden[i]));
            #pragma omp barrier
            for (int64_t r = 0; r < R; r++)
                memcpy(rows + r * F, hidden + r * 2 * F, F * sizeof(float));
            round_rows(&in, rows, R, F, down->format);
            matmul(down, &in, R, out - e * C, C, 0, e * C + c[0], e * C + c[1]);
            for (int64_t r = 0; r < R; r++)
                for (int64_t i = c[0]; i < c[1]; i++)
                    y[tokens[first + r] * C + i] += weights[first + r] * out[r * C + i];
            #pragma omp barrier
        }
        free(in.values), free(rows);
    }
    free(hidden);
}
