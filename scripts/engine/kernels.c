/* What a step of decoding does besides its products, each in one pass over its numbers.

   Plain C: scripts/engine/kernels.py compiles it, calls it, and says what each function takes. All
   tensors are contiguous; of those in a larger one, `stride` numbers lie between neighbours. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

#define SIMD _Pragma("omp simd")
#define MOST_KEYS 4096
#define MOST_WIDE 16 /* times 16 numbers in a head */
#define MOST_COLUMNS 16384

typedef float sixteen __attribute__((vector_size(64), aligned(4)));
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(64)));

static inline float sum_of(sixteen x) {
    eight y = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
              __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    four z = __builtin_shufflevector(y, y, 0, 1, 2, 3) + __builtin_shufflevector(y, y, 4, 5, 6, 7);
    z += __builtin_shufflevector(z, z, 2, 3, 0, 1);
    return z[0] + z[1];
}

/* e^x for x <= 0: 2^n e^r with |r| <= (ln 2)/2, and Cephes' polynomial for e^r. */
static inline float exponential(float x) {
    x = x > -87.0f ? x : -87.0f;
    float n = floorf(x * 1.44269504f + 0.5f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    union { int32_t bits; float power; } two = {((int32_t)n + 127) << 23};
    return (p * r * r + r + 1.0f) * two.power;
}

/* One query of 16·w numbers over its n keys, which stand at the places `at`. */
static inline __attribute__((always_inline)) void look(
    const float *q, const float *k, const float *v, const int32_t *at, int64_t n, int64_t w,
    float scale, float *out) {
    float score[MOST_KEYS], most = -INFINITY, sum = 0;
    sixteen mean[MOST_WIDE];
    for (int64_t l = 0; l < n; l++) {
        const float *key = k + at[l] * 16 * w;
        sixteen product = *(const sixteen *)q * *(const sixteen *)key;
        for (int64_t i = 1; i < w; i++)
            product += *(const sixteen *)(q + 16 * i) * *(const sixteen *)(key + 16 * i);
        score[l] = scale * sum_of(product);
        most = score[l] > most ? score[l] : most;
    }
    _Pragma("omp simd reduction(+ : sum)") for (int64_t l = 0; l < n; l++) {
        score[l] = exponential(score[l] - most);
        sum += score[l];
    }
    for (int64_t i = 0; i < w; i++) mean[i] = (sixteen){0};
    for (int64_t l = 0; l < n; l++)
        for (int64_t i = 0; i < w; i++)
            mean[i] += score[l] * *(const sixteen *)(v + at[l] * 16 * w + 16 * i);
    for (int64_t i = 0; i < w; i++) *(sixteen *)(out + 16 * i) = mean[i] / sum;
}

/* q, rows (B·K) of H heads; k and v (B, H, L, 16·w) by strides; allowed (B, K, L), K may be 1 for
   all, or null; out (B·K, H·16·w). */
void attend(const float *q, int64_t row, const float *k, const float *v, int64_t source,
            int64_t head, const uint8_t *allowed, int64_t one_for_all, int64_t B, int64_t K,
            int64_t H, int64_t L, int64_t w, float *out) {
    int32_t at[MOST_KEYS];
    float scale = 1.0f / sqrtf(16.0f * w);
    for (int64_t b = 0; b < B; b++)
        for (int64_t j = 0; j < K; j++, q += row, out += H * 16 * w) {
            const uint8_t *may = allowed ? allowed + (one_for_all ? b : b * K + j) * L : 0;
            int64_t n = 0;
            for (int64_t l = 0; l < L; l++) {
                at[n] = l;
                n += may ? may[l] : 1;
            }
            for (int64_t h = 0; h < H; h++) {
                const float *keys = k + b * source + h * head, *values = v + b * source + h * head;
                int64_t from = h * 16 * w;
                if (w == 2) look(q + from, keys, values, at, n, 2, scale, out + from);
                else look(q + from, keys, values, at, n, w, scale, out + from);
            }
        }
}

/* LayerNorm of a row. */
static void normalise(const float *x, int64_t D, const float *weight, const float *bias, float eps,
                      float *out) {
    float sum = 0, squares = 0;
    _Pragma("omp simd reduction(+ : sum)") for (int64_t j = 0; j < D; j++) sum += x[j];
    float mean = sum / D;
    _Pragma("omp simd reduction(+ : squares)") for (int64_t j = 0; j < D; j++)
        squares += (x[j] - mean) * (x[j] - mean);
    float per = 1.0f / sqrtf(squares / D + eps);
    SIMD for (int64_t j = 0; j < D; j++) out[j] = (x[j] - mean) * per * weight[j] + bias[j];
}

/* Each row of x (N, D) as bytes q and their unit: x = unit·q, the largest is ±127. Where weight and
   bias (D) aren't null, x is normalised first. */
void round_rows(const float *x, int64_t N, int64_t D, const float *weight, const float *bias,
                float eps, int8_t *q, float *unit) {
    float normal[MOST_COLUMNS];
    for (int64_t i = 0; i < N; i++, x += D, q += D) {
        const float *row = weight ? normal : x;
        if (weight) normalise(x, D, weight, bias, eps, normal);
        float most = 0;
        _Pragma("omp simd reduction(max : most)") for (int64_t j = 0; j < D; j++) {
            float size = fabsf(row[j]);
            most = size > most ? size : most;
        }
        float per = most > 0 ? 127.0f / most : 0;
        SIMD for (int64_t j = 0; j < D; j++) q[j] = (int8_t)(int32_t)rintf(row[j] * per);
        unit[i] = most / 127.0f;
    }
}

/* Whole sums (N, F) of bytes' products to unit[n]·units[f]·sum + bias[f], and `more` (N, F) on top;
   or what is negative to 0. */
void scale_sums(const int32_t *sums, int64_t N, int64_t F, const float *unit, const float *units,
                const float *bias, const float *more, int64_t relu, float *out) {
    for (int64_t i = 0; i < N; i++, sums += F, out += F) {
        SIMD for (int64_t j = 0; j < F; j++) out[j] = sums[j] * (unit[i] * units[j]) + bias[j];
        if (more) { SIMD for (int64_t j = 0; j < F; j++) out[j] += more[i * F + j]; }
        if (relu) { SIMD for (int64_t j = 0; j < F; j++) out[j] = out[j] > 0 ? out[j] : 0; }
    }
}

/* The k largest of each row of z (N, V), largest first, of equals the first: values and places
   (N, k). `total` gets each row's log of the sum of e^z, where it isn't null. */
void best_of_rows(const float *z, int64_t N, int64_t V, int64_t k, float *top, int64_t *place,
                  float *total) {
    for (int64_t i = 0; i < N; i++, z += V, top += k, place += k) {
        int64_t found = 0;
        for (int64_t start = 0; start < V; start += 64) { /* most blocks hold nothing of interest */
            int64_t end = start + 64 < V ? start + 64 : V;
            float most = -INFINITY;
            _Pragma("omp simd reduction(max : most)") for (int64_t j = start; j < end; j++)
                most = z[j] > most ? z[j] : most;
            if (found == k && !(most > top[k - 1])) continue;
            for (int64_t j = start; j < end; j++) {
                if (found == k && !(z[j] > top[k - 1])) continue;
                int64_t at = found < k ? found++ : k - 1;
                for (; at > 0 && z[j] > top[at - 1]; at--) {
                    top[at] = top[at - 1];
                    place[at] = place[at - 1];
                }
                top[at] = z[j];
                place[at] = j;
            }
        }
        if (total) {
            float sum = 0, most = top[0];
            _Pragma("omp simd reduction(+ : sum)") for (int64_t j = 0; j < V; j++)
                sum += exponential(z[j] - most);
            total[i] = most + logf(sum);
        }
    }
}

/* A decoder in one call. For a few rows calls cost more than what is computed. */

#define MOST_ROWS 32
#define MOST_NUMBERS 65536 /* of MOST_ROWS or fewer rows */

typedef struct {
    const float *weight, *bias; /* null: there is no norm */
    float eps;
} Norm;

typedef struct {
    const void *weight; /* (D, F); or, where `units` isn't null, bytes (F/16, D/4, 16, 4) */
    const float *bias, *units;
    const int32_t *sums; /* of each output's bytes */
    int64_t D, F;
} Map;

typedef struct {
    Norm before[3], after[3];
    Map look_back, look_back_out, look_across, look_across_out, expand, contract;
} Layer;

/* x·W, added to out: each weight is read once. */
static void multiply(const Map *m, const float *x, int64_t N, float *out) {
    const float *w = m->weight;
    int64_t D = m->D, F = m->F;
    for (int64_t d = 0; d < D; d += 4, w += 4 * F)
        for (int64_t i = 0; i < N; i++) {
            const float *a = x + i * D + d;
            float *y = out + i * F;
            SIMD for (int64_t f = 0; f < F; f++)
                y[f] += a[0] * w[f] + a[1] * w[F + f] + a[2] * w[2 * F + f] + a[3] * w[3 * F + f];
        }
}

/* Whether this processor multiplies bytes four at a time; else PyTorch's products are faster. */
#ifdef __AVX512VNNI__
const int64_t multiplies_bytes = 1;
#else
const int64_t multiplies_bytes = 0;
#endif

/* Sixteen sums, and on each the products of four bytes u by four of w. */
static inline ints add_fours(ints sum, const uint8_t *u, const int8_t *w) {
#ifdef __AVX512VNNI__
    int32_t four;
    memcpy(&four, u, 4);
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(four), _mm512_loadu_si512(w));
#else
    for (int64_t f = 0; f < 16; f++)
        for (int64_t c = 0; c < 4; c++) sum[f] += u[c] * w[4 * f + c];
    return sum;
#endif
}

/* The sums (N, F) of bytes' products, four rows at a time. Processors multiply unsigned bytes q + 128
   by signed ones. */
static void multiply_bytes(const Map *m, const int8_t *q, int64_t N, int32_t *sums) {
    uint8_t u[MOST_NUMBERS + 3 * MOST_COLUMNS];
    int64_t D = m->D, F = m->F;
    SIMD for (int64_t j = 0; j < N * D; j++) u[j] = (uint8_t)(q[j] + 128);
    memset(u + N * D, 0, 3 * D);
    for (int64_t f = 0; f < F; f += 16)
        for (int64_t i = 0; i < N; i += 4) {
            const int8_t *w = (const int8_t *)m->weight + f * D;
            ints sum[4], odd[4] = {0}, less;
            memcpy(&less, m->sums + f, sizeof less);
            for (int64_t r = 0; r < 4; r++) sum[r] = -128 * less;
            for (int64_t d = 0; d < D; d += 8, w += 128)
                for (int64_t r = 0; r < 4; r++) {
                    const uint8_t *a = u + (i + r) * D + d;
                    sum[r] = add_fours(sum[r], a, w);
                    odd[r] = add_fours(odd[r], a + 4, w + 64);
                }
            for (int64_t r = 0; r < 4 && i + r < N; r++) {
                sum[r] += odd[r];
                memcpy(sums + (i + r) * F + f, sum + r, sizeof less);
            }
        }
}

/* norm(x)·W + b, and `more` on top, or what is negative to 0: x (N, D), the others (N, F). */
void apply(const Map *m, const Norm *norm, const float *x, int64_t N, const float *more,
           int64_t relu, float *out) {
    const float *weight = norm ? norm->weight : 0;
    int64_t D = m->D, F = m->F;
    if (m->units) {
        int8_t q[MOST_NUMBERS];
        int32_t sums[MOST_NUMBERS];
        float unit[MOST_ROWS];
        round_rows(x, N, D, weight, weight ? norm->bias : 0, weight ? norm->eps : 0, q, unit);
        multiply_bytes(m, q, N, sums);
        scale_sums(sums, N, F, unit, m->units, m->bias, more, relu, out);
        return;
    }
    float normal[MOST_NUMBERS];
    for (int64_t i = 0; i < N; i++) {
        if (weight) normalise(x + i * D, D, weight, norm->bias, norm->eps, normal + i * D);
        SIMD for (int64_t f = 0; f < F; f++)
            out[i * F + f] = m->bias[f] + (more ? more[i * F + f] : 0);
    }
    multiply(m, weight ? normal : x, N, out);
    if (relu) { SIMD for (int64_t j = 0; j < N * F; j++) out[j] = out[j] > 0 ? out[j] : 0; }
}

/* The end of a sublayer: x (N, D) becomes norm(x + y·W + b). */
static void join(const Map *m, const Norm *norm, const float *y, int64_t N, float *x) {
    float sum[MOST_NUMBERS];
    int64_t D = m->F;
    apply(m, 0, y, N, x, 0, sum);
    for (int64_t i = 0; i < N; i++)
        if (norm->weight)
            normalise(sum + i * D, D, norm->weight, norm->bias, norm->eps, x + i * D);
        else memcpy(x + i * D, sum + i * D, D * sizeof(float));
}

/* Keys, values (layers, B, H, L, 16·w) by strides, and at which of them one may look. */
typedef struct {
    float *keys, *values;
    int64_t layer, sentence, head, L;
    const uint8_t *may; /* (B, K or 1, L), or null */
} Past;

/* A decoder layer for K new tokens of each of B sentences, x (B·K, H·16·w) in place. Their keys and
   values become the last of `own`. */
static void decode_layer(const Layer *l, float *x, int64_t B, int64_t K, int64_t H, int64_t w,
                         const Past *own, const Past *source) {
    float wide[MOST_NUMBERS], heads[MOST_NUMBERS];
    int64_t N = B * K, d = 16 * w, D = H * d;
    apply(&l->look_back, &l->before[0], x, N, 0, 0, wide); /* queries, keys and values: (N, 3·D) */
    for (int64_t i = 0; i < N; i++)
        for (int64_t h = 0; h < H; h++) {
            int64_t to = i / K * own->sentence + h * own->head + (own->L - K + i % K) * d;
            memcpy(own->keys + to, wide + (3 * i + 1) * D + h * d, d * sizeof(float));
            memcpy(own->values + to, wide + (3 * i + 2) * D + h * d, d * sizeof(float));
        }
    attend(wide, 3 * D, own->keys, own->values, own->sentence, own->head, own->may, 0, B, K, H,
           own->L, w, heads);
    join(&l->look_back_out, &l->after[0], heads, N, x);
    apply(&l->look_across, &l->before[1], x, N, 0, 0, wide);
    attend(wide, D, source->keys, source->values, source->sentence, source->head, source->may, 1, B,
           K, H, source->L, w, heads);
    join(&l->look_across_out, &l->after[1], heads, N, x);
    apply(&l->expand, &l->before[2], x, N, 0, 1, wide);
    join(&l->contract, &l->after[2], wide, N, x);
}

/* `count` layers one after the other, and the norm after them. */
void decode_layers(const Layer *layers, int64_t count, const Norm *last, float *x, int64_t B,
                   int64_t K, int64_t H, int64_t w, Past *own, Past *source) {
    int64_t D = H * 16 * w;
    for (int64_t i = 0; i < count; i++) {
        decode_layer(layers + i, x, B, K, H, w, own, source);
        for (int64_t j = 0; j < 2; j++) {
            Past *past = j ? source : own;
            past->keys += past->layer;
            past->values += past->layer;
        }
    }
    if (last->weight)
        for (int64_t i = 0; i < B * K; i++, x += D)
            normalise(x, D, last->weight, last->bias, last->eps, x);
}
