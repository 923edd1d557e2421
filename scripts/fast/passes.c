/* What a training step does besides its products, each in one pass over its numbers; and attention,
   whose products are too small for a library.

   C with OpenMP, which scripts/fast/passes.py calls. Tensors are contiguous, unless the distance
   between rows is given; `half` says that numbers are bfloat16, the first half of a float, and not
   float. All sums are in float, and the same on every run: rows are shared out among `threads` in
   the same way each time. */

#include <stdlib.h>

#include "simd.h"

#define LANES 32
#define BLOCK (8 * LANES) /* random numbers made together */
#define PARALLEL _Pragma("omp parallel for schedule(static) num_threads(threads)")

/* n numbers of x from `at`, as floats: in place, or in `room` if they are bfloat16. */
static inline const float *get(const void *x, int64_t half, int64_t at, int64_t n, float *room) {
    if (!half) return (const float *)x + at;
    const uint16_t *from = (const uint16_t *)x + at;
    uint32_t *bits = (uint32_t *)room;
    SIMD for (int64_t j = 0; j < n; j++) bits[j] = (uint32_t)from[j] << 16;
    return room;
}

/* The way back: rounded to the nearest bfloat16, or as they are. */
static inline void put(const float *x, int64_t half, int64_t at, int64_t n, void *out) {
    if (!half) {
        memcpy((float *)out + at, x, n * sizeof(float));
        return;
    }
    uint16_t *to = (uint16_t *)out + at;
    const uint32_t *bits = (const uint32_t *)x;
    SIMD for (int64_t j = 0; j < n; j++)
        to[j] = (uint16_t)((bits[j] + 0x7fff + (bits[j] >> 16 & 1)) >> 16);
}

/* Dropout: of 65,536 chances `limit` make a number 0, and the others multiply it by `scale`. */
typedef struct {
    uint64_t seed;
    int64_t limit;
    float scale;
} Dropout;

/* 16 random bits for each of n numbers of a row, in whole BLOCKs: Philox4x32-10 (Salmon et al.
   2011, "Parallel random numbers: as easy as 1, 2, 3"). The draw depends on seed and place alone,
   so the backward pass draws it again. The four 32-bit words are in lanes of 64 bits. */
void draw(uint64_t seed, int64_t row, int64_t n, uint16_t *out) {
    for (int64_t at = 0; at < n; at += BLOCK, out += BLOCK) {
        uint64_t a[LANES], b[LANES], c[LANES], d[LANES], *words = (uint64_t *)out;
        uint32_t first = seed, second = seed >> 32;
        for (int64_t l = 0; l < LANES; l++) {
            a[l] = at / 8 + l;
            b[l] = row;
            c[l] = row >> 32;
            d[l] = 0;
        }
        for (int round = 0; round < 10; round++, first += 0x9E3779B9, second += 0xBB67AE85)
            SIMD for (int64_t l = 0; l < LANES; l++) {
                uint64_t x = 0xD2511F53 * (a[l] & 0xFFFFFFFF), y = 0xCD9E8D57 * (c[l] & 0xFFFFFFFF);
                a[l] = y >> 32 ^ b[l] ^ first;
                b[l] = y;
                c[l] = x >> 32 ^ d[l] ^ second;
                d[l] = x;
            }
        SIMD for (int64_t l = 0; l < LANES; l++) {
            words[2 * l] = (a[l] & 0xFFFFFFFF) | b[l] << 32;
            words[2 * l + 1] = (c[l] & 0xFFFFFFFF) | d[l] << 32;
        }
    }
}

/* x times `scale`, or 0 where the bits are below the limit, into out. */
static inline void thin(const float *x, int64_t n, const uint16_t *bits, uint16_t limit,
                        float scale, float *out) {
    SIMD for (int64_t j = 0; j < n; j++) out[j] = bits[j] >= limit ? x[j] * scale : 0.0f;
}

#define WHOLE(n) (((n) + BLOCK - 1) / BLOCK * BLOCK)

/* dropout(x) of `count` numbers, 0 where a `gate` (like x, or null) isn't positive; plus `more`
   unless null. */
void drop(const void *x, int64_t x_half, int64_t count, const float *more, const void *gate,
          const Dropout *mask, void *out, int64_t out_half, int64_t threads) {
    PARALLEL for (int64_t b = 0; b < WHOLE(count) / BLOCK; b++) { /* a block of 256 */
        int64_t at = b * BLOCK, n = count - at < BLOCK ? count - at : BLOCK;
        float room[BLOCK], gates[BLOCK], y[BLOCK], scale = mask->scale;
        uint16_t bits[BLOCK];
        const float *from = get(x, x_half, at, n, room); /* as floats */
        SIMD for (int64_t j = 0; j < n; j++) y[j] = from[j] * scale;
        if (mask->limit) {
            draw(mask->seed, b, n, bits); /* 16 random bits for each number */
            thin(y, n, bits, mask->limit, 1, y); /* 0 where they are below the limit */
        }
        if (gate) {
            const float *open = get(gate, x_half, at, n, gates);
            SIMD for (int64_t j = 0; j < n; j++) y[j] = open[j] > 0 ? y[j] : 0.0f;
        }
        if (more) { SIMD for (int64_t j = 0; j < n; j++) y[j] += more[at + j]; }
        put(y, out_half, at, n, out); /* as floats, or rounded to 16 bits */
    }
}

/* LayerNorm of x (N, D), in float; each row's mean and 1/deviation are kept. */
void norm(const float *x, int64_t N, int64_t D, const float *weight, const float *bias,
          const float *eps, float *mean, float *per, void *out, int64_t half, int64_t threads) {
    PARALLEL for (int64_t i = 0; i < N; i++) {
        const float *row = x + i * D;
        float sum = 0, squares = 0, y[D];
        _Pragma("omp simd reduction(+ : sum)") for (int64_t j = 0; j < D; j++) sum += row[j];
        float middle = sum / D;
        _Pragma("omp simd reduction(+ : squares)") for (int64_t j = 0; j < D; j++)
            squares += (row[j] - middle) * (row[j] - middle);
        float by = 1.0f / sqrtf(squares / D + *eps);
        SIMD for (int64_t j = 0; j < D; j++) y[j] = (row[j] - middle) * by * weight[j] + bias[j];
        mean[i] = middle;
        per[i] = by;
        put(y, half, i * D, D, out);
    }
}

/* Its gradients, from a gradient g (N, D): for x (N, D), for weight and bias (2, D). */
void norm_back(const void *g, int64_t half, const float *x, int64_t N, int64_t D,
               const float *weight, const float *mean, const float *per, float *by_x,
               float *by_both, int64_t threads) {
    float *parts = calloc(threads * 2 * D, sizeof(float)); /* each thread's own sums */
    PARALLEL for (int64_t t = 0; t < threads; t++) {
        float *by_weight = parts + t * 2 * D, *by_bias = by_weight + D;
        for (int64_t i = N * t / threads; i < N * (t + 1) / threads; i++) {
            float room[D], normal[D], part[D], sum = 0, along = 0;
            const float *row = x + i * D, *from = get(g, half, i * D, D, room);
            float middle = mean[i], by = per[i], *to = by_x + i * D;
            _Pragma("omp simd reduction(+ : sum, along)") for (int64_t j = 0; j < D; j++) {
                normal[j] = (row[j] - middle) * by;
                part[j] = from[j] * weight[j];
                by_weight[j] += from[j] * normal[j];
                by_bias[j] += from[j];
                sum += part[j];
                along += part[j] * normal[j];
            }
            SIMD for (int64_t j = 0; j < D; j++)
                to[j] = by * (part[j] - sum / D - normal[j] * (along / D));
        }
    }
    memset(by_both, 0, 2 * D * sizeof(float));
    for (int64_t t = 0; t < threads; t++)
        for (int64_t j = 0; j < 2 * D; j++) by_both[j] += parts[t * 2 * D + j];
    free(parts);
}

/* Overwrites x (n,) with its softmax; returns log Σ e^x. */
static inline float softmax(float *x, int64_t n) {
    float most = -INFINITY, sum = 0;
    _Pragma("omp simd reduction(max : most)") for (int64_t j = 0; j < n; j++)
        most = x[j] > most ? x[j] : most;
    _Pragma("omp simd reduction(+ : sum)") for (int64_t j = 0; j < n; j++) {
        x[j] = exponential(x[j] - most);
        sum += x[j];
    }
    float by = 1.0f / sum;
    SIMD for (int64_t j = 0; j < n; j++) x[j] *= by;
    return most + logf(sum);
}

/* Overwrites each row of z (N, V) with its softmax less `minus`; log_z (N,) gets log Σ e^z. */
void probabilities(void *z, int64_t half, int64_t N, int64_t V, const float *minus, float *log_z,
                   int64_t threads) {
    PARALLEL for (int64_t i = 0; i < N; i++) {
        float room[V];
        float *row = (float *)get(z, half, i * V, V, room);
        log_z[i] = softmax(row, V);
        SIMD for (int64_t j = 0; j < V; j++) row[j] -= *minus;
        if (half) put(row, half, i * V, V, z);
    }
}

/* Attention from rows to rows. Each of B sentences has rows of its own: of queries from q_start[b]
   to q_start[b + 1], of keys and values from k_start[b]. A row holds H heads of d numbers. */
typedef struct {
    const int64_t *q_start, *k_start;
    int64_t B, H, d, half, causal;
} Sentences;

/* Queries, keys and values, or their gradients; numbers from one row's start to the next's. */
typedef struct {
    void *q, *k, *v;
    int64_t q_row, k_row;
} Heads;

/* c (R, n) = a·b, for b (K, n), n a multiple of 16. Entry (r, k) of a is at r·across + k·along.
   Past the last row 7 more can be read, unless `clamp` says that they can't. */
static inline __attribute__((always_inline)) void multiply(
    const float *a, int64_t across, int64_t along, int clamp, const float *b, int64_t R, int64_t K,
    int64_t n, float *c) {
    for (int64_t r = 0; r < R; r += 8) {
        const float *row[8];
        for (int64_t i = 0; i < 8; i++)
            row[i] = a + (clamp && r + i >= R ? R - 1 : r + i) * across;
        for (int64_t j = 0; j < n; j += 16) {
            sixteen sum[8] = {0};
            for (int64_t k = 0; k < K; k++) {
                sixteen right = *(const sixteen *)(b + k * n + j);
                for (int64_t i = 0; i < 8; i++) sum[i] += row[i][k * along] * right;
            }
            for (int64_t i = 0; i < 8 && r + i < R; i++) *(sixteen *)(c + (r + i) * n + j) = sum[i];
        }
    }
}

static void times(const float *a, int64_t width, const float *b, int64_t R, int64_t K, int64_t n,
                  float *c) { /* a (R, width) */
    multiply(a, width, 1, 1, b, R, K, n, c);
}

static void transposed_times(const float *a, int64_t width, const float *b, int64_t R, int64_t K,
                             int64_t n, float *c) { /* a (K, width) */
    multiply(a, 1, width, 0, b, R, K, n, c);
}

/* One head of one sentence at work: T queries, S keys, in a thread's own memory. Weights have a row
   for each key and a column for each query, so sixteen queries are handled at once. */
typedef struct {
    int64_t T, S, M; /* M is T, rounded up to whole sixteens */
    float *q, *k, *v, *g, *turned, *weights, *thinned, *slopes, *out;
    uint16_t *bits;
} Desk;

static Desk desk_of(const Sentences *s) {
    int64_t T = 0, S = 0, d = s->d;
    for (int64_t b = 0; b < s->B; b++) {
        int64_t t = s->q_start[b + 1] - s->q_start[b], n = s->k_start[b + 1] - s->k_start[b];
        T = t > T ? t : T;
        S = n > S ? n : S;
    }
    int64_t M = (T + 15) / 16 * 16, longest = T > S ? T : S, total = WHOLE(S * M) / 2;
    int64_t sizes[] = {T * d, S * d, S * d, T * d, d * M, S * M, S * M, S * M, longest * d};
    for (int64_t i = 0; i < 9; i++) total += sizes[i];
    Desk desk = {0};
    float *room = malloc(total * sizeof(float)), **part = &desk.q;
    for (int64_t i = 0; i < 9; room += sizes[i++]) *part++ = room;
    desk.bits = (uint16_t *)room;
    return desk;
}

/* n rows of d numbers as floats, one after the other; and the way back. */
static void collect(const void *x, int64_t half, int64_t at, int64_t row, int64_t n, int64_t d,
                    float *out) {
    for (int64_t i = 0; i < n; i++) {
        const float *from = get(x, half, at + i * row, d, out + i * d);
        if (!half) memcpy(out + i * d, from, d * sizeof(float));
    }
}

static void spread(const float *x, int64_t half, int64_t at, int64_t row, int64_t n, int64_t d,
                   void *out) {
    for (int64_t i = 0; i < n; i++) put(x + i * d, half, at + i * row, d, out);
}

/* x (T, d) transposed: (d, M), with zeros after the T-th column. */
static void turn(const float *x, int64_t T, int64_t M, int64_t d, float *out) {
    for (int64_t c = 0; c < d; c++) {
        for (int64_t i = 0; i < T; i++) out[c * M + i] = x[i * d + c];
        for (int64_t i = T; i < M; i++) out[c * M + i] = 0;
    }
}

/* Scores (S, M) to weights: the softmax of each column. If causal, query i sees keys 0 to i. */
static void soften(float *scores, int64_t S, int64_t M, float scale, int64_t causal) {
    for (int64_t j = 0; j < M; j += 16) {
        float most[16], sum[16] = {0};
        for (int64_t i = 0; i < 16; i++) most[i] = -INFINITY;
        for (int64_t l = 0; l < S; l++)
            SIMD for (int64_t i = 0; i < 16; i++) {
                float x = scores[l * M + j + i] *= scale;
                most[i] = x > most[i] && (!causal || l <= j + i) ? x : most[i];
            }
        for (int64_t l = 0; l < S; l++)
            SIMD for (int64_t i = 0; i < 16; i++) {
                float x = exponential(scores[l * M + j + i] - most[i]);
                x = !causal || l <= j + i ? x : 0.0f;
                scores[l * M + j + i] = x;
                sum[i] += x;
            }
        for (int64_t i = 0; i < 16; i++) sum[i] = 1.0f / sum[i];
        for (int64_t l = 0; l < S; l++)
            SIMD for (int64_t i = 0; i < 16; i++) scores[l * M + j + i] *= sum[i];
    }
}

/* From slopes (S, M), the gradient for weights, to that for scores. */
static void soften_back(const float *weights, int64_t S, int64_t M, float scale, float *slopes) {
    for (int64_t j = 0; j < M; j += 16) {
        float mean[16] = {0};
        for (int64_t l = 0; l < S; l++)
            SIMD for (int64_t i = 0; i < 16; i++)
                mean[i] += weights[l * M + j + i] * slopes[l * M + j + i];
        for (int64_t l = 0; l < S; l++)
            SIMD for (int64_t i = 0; i < 16; i++) {
                float slope = slopes[l * M + j + i] - mean[i];
                slopes[l * M + j + i] = weights[l * M + j + i] * slope * scale;
            }
    }
}

/* Bring head h of sentence b to the desk: its queries, keys and values, and the weights with and
   without dropout, (S, M). */
static void weigh(const Heads *x, const Sentences *s, int64_t b, int64_t h, const Dropout *mask,
                  Desk *desk) {
    int64_t d = s->d, T = s->q_start[b + 1] - s->q_start[b], S = s->k_start[b + 1] - s->k_start[b];
    int64_t M = (T + 15) / 16 * 16, keys = s->k_start[b] * x->k_row + h * d;
    desk->T = T;
    desk->S = S;
    desk->M = M;
    collect(x->q, s->half, s->q_start[b] * x->q_row + h * d, x->q_row, T, d, desk->q);
    collect(x->k, s->half, keys, x->k_row, S, d, desk->k);
    collect(x->v, s->half, keys, x->k_row, S, d, desk->v);
    turn(desk->q, T, M, d, desk->turned);
    times(desk->k, d, desk->turned, S, d, M, desk->weights);
    soften(desk->weights, S, M, 1.0f / sqrtf(d), s->causal);
    if (mask->limit) {
        draw(mask->seed, b * s->H + h, S * M, desk->bits);
        thin(desk->weights, S * M, desk->bits, mask->limit, mask->scale, desk->thinned);
    }
}

/* out, rows of H·d: softmax(QKᵀ/√d)·V of each head, with dropout on the weights. */
void attend_rows(const Heads *x, const Sentences *s, const Dropout *mask, void *out,
                 int64_t threads) {
    PARALLEL for (int64_t t = 0; t < threads; t++) {
        Desk desk = desk_of(s);
        int64_t d = s->d, wide = s->H * d, items = s->B * s->H;
        for (int64_t i = items * t / threads; i < items * (t + 1) / threads; i++) {
            int64_t b = i / s->H, h = i % s->H;
            weigh(x, s, b, h, mask, &desk);
            const float *weights = mask->limit ? desk.thinned : desk.weights;
            transposed_times(weights, desk.M, desk.v, desk.T, desk.S, d, desk.out);
            spread(desk.out, s->half, s->q_start[b] * wide + h * d, wide, desk.T, d, out);
        }
        free(desk.q);
    }
}

/* Its gradients for queries, keys and values, from a gradient g: rows of H·d. */
void attend_rows_back(const Heads *x, const Sentences *s, const Dropout *mask, const void *g,
                      const Heads *by, int64_t threads) {
    PARALLEL for (int64_t t = 0; t < threads; t++) {
        Desk desk = desk_of(s);
        int64_t d = s->d, wide = s->H * d, items = s->B * s->H;
        for (int64_t i = items * t / threads; i < items * (t + 1) / threads; i++) {
            int64_t b = i / s->H, h = i % s->H;
            weigh(x, s, b, h, mask, &desk);
            int64_t T = desk.T, S = desk.S, M = desk.M, q = s->q_start[b], k = s->k_start[b];
            const float *weights = mask->limit ? desk.thinned : desk.weights;
            collect(g, s->half, q * wide + h * d, wide, T, d, desk.g);
            times(weights, M, desk.g, S, T, d, desk.out);
            spread(desk.out, s->half, k * by->k_row + h * d, by->k_row, S, d, by->v);
            turn(desk.g, T, M, d, desk.turned);
            times(desk.v, d, desk.turned, S, d, M, desk.slopes);
            if (mask->limit)
                thin(desk.slopes, S * M, desk.bits, mask->limit, mask->scale, desk.slopes);
            soften_back(desk.weights, S, M, 1.0f / sqrtf(d), desk.slopes);
            times(desk.slopes, M, desk.q, S, T, d, desk.out);
            spread(desk.out, s->half, k * by->k_row + h * d, by->k_row, S, d, by->k);
            transposed_times(desk.slopes, M, desk.k, T, S, d, desk.out);
            spread(desk.out, s->half, q * by->q_row + h * d, by->q_row, T, d, by->q);
        }
        free(desk.q);
    }
}
