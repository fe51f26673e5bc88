/* Decode steps, included by cpu.c: all layers of a dense model for R tokens.

   One team of threads runs the whole step. A barrier, or the end of an `omp for`, stands between
   parts that read what other threads wrote: q, k, v | rope of k, write to the cache | attention |
   output projection | gate and up | down. Norms and the rounding of a matmul's input are cheap:
   every thread does them for itself, which saves a barrier. Adapters add none: a part's matmul lies
   between their two phases. The residual stream, norms and attention are fp32. */

typedef struct {
    const uint16_t *attention_norm, *mlp_norm, *q_norm, *k_norm; /* the last two (D,) or NULL */
    Matrix q, k, v, o, gate, up, down;
    uint16_t *k_cache, *v_cache; /* bf16, in blocks of block_size positions */
    int64_t block_size, block_stride, head_stride, slot_stride; /* strides in elements */
    int64_t ring;                /* slots of a ring buffer, slot = position % ring; 0: not a ring */
    int64_t window;              /* sliding window; 0: none */
    const int32_t *tables;       /* (R, width): block table of each token's sequence */
    const int64_t *slots; /* (R, Hkv) where k and v are written; NULL: at the token's position */
    int64_t width;
    float *weights;              /* (R, Hkv, keys): attention weights, summed over a group; or NULL */
} Layer;

typedef struct {
    const Layer *layers;
    int64_t L, C, F, Hq, Hkv, D, rope_dim, interleaved;
    float eps, scale;
} Model;

typedef struct { /* a step of R tokens: its input, and what its threads share */
    int64_t R;
    const float *cos, *sin;                   /* (R, rope_dim / 2) */
    const int64_t *positions;                 /* (R,) */
    float *x;                                 /* (R, C): the residual stream */
    float *q, *k, *v, *attended, *hidden;     /* (R, Q), (R, KV), (R, KV), (R, Q), (R, F) */
    const Adapters *adapters;
    float *low;                               /* (3, adapters->size) */
    int64_t *arrived;                         /* threads that have written their part of low */
} Step;

typedef struct { /* thread t of T, and its own buffers */
    int64_t t, T;
    Rows in;
    float *normed, *up;                       /* (R, C), (R, F) */
    float *scores;                            /* (Hq / Hkv, longest) */
    int64_t *at;                              /* (longest,): where the keys are */
    int64_t longest;                          /* most keys of a token, in whole registers */
    uint16_t *buffer;                         /* (RANKS, widest), of adapters */
    int64_t arrivals;                         /* so many make low whole */
} Thread;

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
    const int64_t n = m->rope_dim / 2, stride = m->interleaved ? 2 : 1;
    const int64_t apart = m->interleaved ? 1 : n; /* of the two dims of a pair */
    for (int64_t i = 0; i < n; i++) {
        const float a = x[i * stride], b = x[i * stride + apart];
        x[i * stride] = a * cos[i] - b * sin[i];
        x[i * stride + apart] = b * cos[i] + a * sin[i];
    }
}

INLINE int64_t slot_offset(const Layer *l, int64_t slot) {
    return slot / l->block_size * l->block_stride + slot % l->block_size * l->slot_stride;
}

/* Where the cache has `position` of token r's sequence. */
INLINE int64_t kv_offset(const Layer *l, int64_t r, int64_t position) {
    if (l->ring) position %= l->ring;
    const int64_t block = l->tables[r * l->width + position / l->block_size];
    return slot_offset(l, block * l->block_size + position % l->block_size);
}

/* Where token r's sequence has positions first to first + S - 1; no division for each. */
static void offsets(const Layer *l, int64_t r, int64_t first, int64_t S, int64_t *at) {
    if (l->ring) first %= l->ring;
    int64_t block = first / l->block_size, i = first % l->block_size;
    for (int64_t j = 0; j < S; j++) {
        at[j] = l->tables[r * l->width + block] * l->block_stride + i * l->slot_stride;
        if (++i == l->block_size) block++, i = 0;
        if (l->ring && block * l->block_size + i == l->ring) block = i = 0;
    }
}

enum { AHEAD = 64 };   /* keys and values to prefetch */
enum { SPINS = 2000 }; /* of a thread that waits, before it lets others have its core */

/* scores (group, stride): q (group, D) times S keys. */
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
/* 16 keys at a time, transposed, so that no sum crosses lanes; q is rounded to bf16. */
static void score(
    const float *q, const uint16_t *k, const int64_t *at, int64_t S, int64_t group, int64_t D,
    float *scores, int64_t stride
) {
    const int64_t pairs = (D + 1) / 2;
    uint32_t rounded[group][pairs];
    for (int64_t g = 0; g < group; g++)
        for (int64_t d = 0; d < D; d += 2) {
            const uint32_t high = d + 1 < D ? float_to_bf16(q[g * D + d + 1]) : 0;
            rounded[g][d / 2] = high << 16 | float_to_bf16(q[g * D + d]);
        }
    for (int64_t j = 0; j < S; j += 16)
        for (int64_t d = 0; d < D; d += 32) {
            const __mmask32 mask = D - d < 32 ? (1u << (D - d)) - 1 : ~0u;
            __m512i r[16];
            for (int i = 0; i < 16; i++) {
                r[i] = _mm512_maskz_loadu_epi16(mask, k + at[j + i < S ? j + i : j] + d);
                __builtin_prefetch(k + at[j + i + AHEAD < S ? j + i + AHEAD : j] + d);
            }
            transpose(r);
            for (int64_t g = 0; g < group; g++) {
                __m512 sum = d ? _mm512_loadu_ps(scores + g * stride + j) : _mm512_setzero_ps();
                for (int p = 0; p < 16 && d / 2 + p < pairs; p++) {
                    const __m512i both = _mm512_set1_epi32(rounded[g][d / 2 + p]);
                    sum = _mm512_dpbf16_ps(sum, (__m512bh)r[p], (__m512bh)both);
                }
                _mm512_storeu_ps(scores + g * stride + j, sum);
            }
        }
}
#else
static void score(
    const float *q, const uint16_t *k, const int64_t *at, int64_t S, int64_t group, int64_t D,
    float *scores, int64_t stride
) {
    for (int64_t j = 0; j < S; j++)
        for (int64_t g = 0; g < group; g++) {
            float sum = 0;
            for (int64_t d = 0; d < D; d++) sum += q[g * D + d] * bf16_to_float(k[at[j] + d]);
            scores[g * stride + j] = sum;
        }
}
#endif

/* out (G, D) = probabilities (G, stride) times S values, 16 columns at a time in registers. */
INLINE void weighted_sum(
    const float *p, int64_t stride, const uint16_t *v, const int64_t *at, int64_t S, int64_t D,
    float *out, const int G
) {
    typedef float floats __attribute__((vector_size(64)));
    typedef uint16_t bf16s __attribute__((vector_size(32), aligned(2)));
    typedef uint32_t words __attribute__((vector_size(64)));
    int64_t d = 0;
    for (; d + 16 <= D; d += 16) {
        floats sum[G];
        for (int g = 0; g < G; g++) sum[g] = (floats){0};
        for (int64_t j = 0; j < S; j++) {
            const bf16s bits = *(const bf16s *)(v + at[j] + d);
            __builtin_prefetch(v + at[j + AHEAD < S ? j + AHEAD : j] + d);
            const floats row = (floats)(__builtin_convertvector(bits, words) << 16);
            for (int g = 0; g < G; g++) sum[g] += row * p[g * stride + j];
        }
        for (int g = 0; g < G; g++) memcpy(out + g * D + d, &sum[g], 64);
    }
    for (; d < D; d++)
        for (int g = 0; g < G; g++) {
            float sum = 0;
            for (int64_t j = 0; j < S; j++) sum += p[g * stride + j] * bf16_to_float(v[at[j] + d]);
            out[g * D + d] = sum;
        }
}

/* Attention of the query heads (group, D) of one kv head, for token r, at `position`. */
static void attend(
    const Model *m, const Layer *l, const float *q, int64_t head, int64_t r, int64_t position,
    Thread *own, float *out
) {
    const int64_t D = m->D, group = m->Hq / m->Hkv, longest = own->longest, *at = own->at;
    float *scores = own->scores;
    const int64_t first = l->window && position >= l->window ? position - l->window + 1 : 0;
    const int64_t S = position + 1 - first;
    offsets(l, r, first, S, own->at);
    score(q, l->k_cache + head * l->head_stride, at, S, group, D, scores, longest);
    for (int64_t g = 0; g < group; g++) {
        float *s = scores + g * longest, largest = s[0], total = 0;
        for (int64_t j = 1; j < S; j++) largest = s[j] > largest ? s[j] : largest;
        for (int64_t j = 0; j < S; j++) total += s[j] = exponential((s[j] - largest) * m->scale);
        for (int64_t j = 0; j < S; j++) s[j] /= total;
    }
    if (l->weights) {
        float *sum = l->weights + (r * m->Hkv + head) * S;
        for (int64_t j = 0; j < S; j++) sum[j] = scores[j];
        for (int64_t g = 1; g < group; g++)
            for (int64_t j = 0; j < S; j++) sum[j] += scores[g * longest + j];
    }
    const uint16_t *v = l->v_cache + head * l->head_stride;
    int64_t g = 0;
    for (; g + 8 <= group; g += 8)
        weighted_sum(scores + g * longest, longest, v, at, S, D, out + g * D, 8);
    for (; g < group; g++)
        weighted_sum(scores + g * longest, longest, v, at, S, D, out + g * D, 1);
}

/* Round x (R, C), the input of `count` linears of a layer, targets from `target` on, for a matmul
   of this format. Before that low = A x, this thread's ranks: the others', which expand_adapters
   needs, are in most cases there when the matmul is done. */
static Group shrink_adapters(
    const Model *m, int64_t layer, int64_t target, int64_t count, const Step *s, Thread *own,
    const float *x, int64_t C, int64_t format
) {
    const Layer *l = m->layers + layer;
    const Group group = {
        l->k_cache, 2 * m->Hkv, l->head_stride, l->block_stride, layer, target, count
    };
    const int64_t n = s->adapters->n;
    round_rows(&own->in, x, s->R, C, n ? BF16 : format);
    if (n) {
        shrink(s->adapters, &group, &own->in, C, s->low, own->buffer, own->t, own->T);
        __atomic_fetch_add(s->arrived, 1, __ATOMIC_RELEASE);
        own->arrivals += own->T;
    }
    if (n && format != BF16) round_rows(&own->in, x, s->R, C, format);
    return group;
}

/* y[i] (R, F[i]) += B low for the linears of a group: this thread's columns. */
static void expand_adapters(
    const Group *group, const Step *s, const Thread *own, float **y, const int64_t *F
) {
    const int64_t t = own->t, T = own->T;
    for (int64_t n = 0; __atomic_load_n(s->arrived, __ATOMIC_ACQUIRE) < own->arrivals; n++)
        if (n >= SPINS) sched_yield();
    for (int64_t i = 0; i < group->count; i++) {
        const int64_t f[] = {SHARE(F[i])};
        expand(s->adapters, group, i, s->low, y[i], NULL, NULL, F[i], f[0], f[1]);
    }
}

/* x += attention(norm(x)). KV head h of token r is task r * Hkv + h. */
static void attention_block(const Model *m, int64_t i, const Step *s, Thread *own) {
    const Layer *l = m->layers + i;
    const int64_t R = s->R, C = m->C, D = m->D, Q = m->Hq * D, KV = m->Hkv * D, n = m->rope_dim / 2;
    const int64_t t = own->t, T = own->T, group = m->Hq / m->Hkv;
    for (int64_t r = 0; r < R; r++)
        rms_norm(s->x + r * C, l->attention_norm, m->eps, C, own->normed + r * C);
    const Group inputs = shrink_adapters(m, i, 0, 3, s, own, own->normed, C, l->q.format);
    matmul(&l->q, &own->in, R, s->q, Q, 0, SHARE(Q));
    matmul(&l->k, &own->in, R, s->k, KV, 0, SHARE(KV));
    matmul(&l->v, &own->in, R, s->v, KV, 0, SHARE(KV));
    float *qkv[] = {s->q, s->k, s->v};
    const int64_t sizes[] = {Q, KV, KV};
    expand_adapters(&inputs, s, own, qkv, sizes);
    #pragma omp barrier
    #pragma omp for schedule(static)
    for (int64_t task = 0; task < R * m->Hkv; task++) {
        const int64_t r = task / m->Hkv, h = task % m->Hkv;
        float *key = s->k + r * KV + h * D, *value = s->v + r * KV + h * D;
        rope(m, l->k_norm, s->cos + r * n, s->sin + r * n, key);
        int64_t at = l->slots ? slot_offset(l, l->slots[task]) : kv_offset(l, r, s->positions[r]);
        at += h * l->head_stride;
        for (int64_t d = 0; d < D; d++) {
            l->k_cache[at + d] = float_to_bf16(key[d]);
            l->v_cache[at + d] = float_to_bf16(value[d]);
        }
    }
    #pragma omp for schedule(dynamic) /* sequences differ in length */
    for (int64_t task = 0; task < R * m->Hkv; task++) {
        const int64_t r = task / m->Hkv, h = task % m->Hkv, at = r * Q + h * group * D;
        for (int64_t g = 0; g < group; g++)
            rope(m, l->q_norm, s->cos + r * n, s->sin + r * n, s->q + at + g * D);
        attend(m, l, s->q + at, h, r, s->positions[r], own, s->attended + at);
    }
    const Group output = shrink_adapters(m, i, 3, 1, s, own, s->attended, Q, l->o.format);
    matmul(&l->o, &own->in, R, s->x, C, 1, SHARE(C));
    expand_adapters(&output, s, own, (float *[]){s->x}, &C);
    #pragma omp barrier
}

/* x += down(silu(gate(norm(x))) * up(norm(x))) */
static void mlp_block(const Model *m, int64_t i, const Step *s, Thread *own) {
    const Layer *l = m->layers + i;
    const int64_t R = s->R, C = m->C, F = m->F, t = own->t, T = own->T, f[] = {SHARE(F)};
    float *hidden = s->hidden;
    for (int64_t r = 0; r < R; r++)
        rms_norm(s->x + r * C, l->mlp_norm, m->eps, C, own->normed + r * C);
    const Group inputs = shrink_adapters(m, i, 4, 2, s, own, own->normed, C, l->gate.format);
    matmul(&l->gate, &own->in, R, hidden, F, 0, f[0], f[1]);
    matmul(&l->up, &own->in, R, own->up, F, 0, f[0], f[1]);
    float *gate_up[] = {hidden, own->up};
    const int64_t sizes[] = {F, F};
    expand_adapters(&inputs, s, own, gate_up, sizes);
    for (int64_t r = 0; r < R; r++)
        for (int64_t k = r * F + f[0]; k < r * F + f[1]; k++)
            hidden[k] *= own->up[k] / (1 + exponential(-hidden[k]));
    #pragma omp barrier
    const Group output = shrink_adapters(m, i, 6, 1, s, own, hidden, F, l->down.format);
    matmul(&l->down, &own->in, R, s->x, C, 1, SHARE(C));
    expand_adapters(&output, s, own, (float *[]){s->x}, &C);
    #pragma omp barrier
}

/* x (R, C): the inputs of the first layer, overwritten by the outputs of the last. Token r attends
   to positions[r] + 1 keys; cos and sin (R, rope_dim / 2). A sequence may have several tokens. */
void decode(
    const Model *m, float *x, const float *cos, const float *sin, const int64_t *positions,
    const Adapters *adapters, int64_t R
) {
    const int64_t C = m->C, F = m->F, Q = m->Hq * m->D, KV = m->Hkv * m->D;
    const int64_t widest = C > F ? (C > Q ? C : Q) : (F > Q ? F : Q); /* input of a matmul */
    int64_t last = 0;
    for (int64_t r = 0; r < R; r++) last = positions[r] > last ? positions[r] : last;
    const int64_t longest = last / 16 * 16 + 16, group = m->Hq / m->Hkv;
    const int64_t size = R * (2 * Q + 2 * KV + F) + 3 * adapters->size;
    float *q = malloc(size * sizeof(float)), *k = q + R * Q, *v = k + R * KV;
    float *attended = v + R * KV, *hidden = attended + R * Q, *low = hidden + R * F;
    int64_t arrived = 0;
    const Step step = {
        R, cos, sin, positions, x, q, k, v, attended, hidden, adapters, low, &arrived
    };
    #pragma omp parallel
    {
        float *normed = malloc((R * (C + F) + group * longest) * sizeof(float));
        float *up = normed + R * C, *scores = up + R * F;
        int64_t *at = malloc(longest * sizeof(int64_t));
        const int64_t t = omp_get_thread_num(), T = omp_get_num_threads();
        uint16_t *buffer = malloc(RANKS * widest * sizeof(uint16_t));
        Thread own = {t, T, new_rows(R, widest), normed, up, scores, at, longest, buffer, 0};
        for (int64_t i = 0; i < m->L; i++) {
            attention_block(m, i, &step, &own);
            mlp_block(m, i, &step, &own);
        }
        free(own.in.values), free(normed), free(at), free(buffer);
    }
    free(q);
}

/* Adds weight * expert(x) to y for every pair of a token and one of its experts. x and y (N, C);
   gate_up (E * 2F, C), for each expert gate rows first; down (E * C, F). The pairs are sorted by
   expert: those of expert e are starts[e] to starts[e + 1] in tokens and weights. */
void experts(
    const Matrix *gate_up, const Matrix *down, const int64_t *starts, const int64_t *tokens,
    const float *weights, const float *x, float *y, int64_t E
) {
    const int64_t C = gate_up->C, F = down->C, widest = C > F ? C : F;
    int64_t most = 0; /* pairs of an expert */
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
