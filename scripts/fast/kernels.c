/* What a step of decoding does besides its products, each in one pass over its numbers; and a
   decoder for a few rows in one call.

   scripts/fast/kernels.py calls it. Tensors are contiguous, unless strides are given. */

#include "simd.h"
#include <stdlib.h>

#define MOST_WIDE 16 /* times 16 numbers in a head */

typedef float four __attribute__((vector_size(16), aligned(4)));
typedef float eight __attribute__((vector_size(32), aligned(4)));
#ifdef __AVX512F__ /* as many numbers as one instruction takes: of more, compilers make slow code */
#define LANE 16
typedef sixteen lane;
#else
#define LANE 8
typedef eight lane;
#endif

static inline float sum_of(const lane *x) {
    eight y = *(const eight *)x;
    if (LANE == 16) y += *((const eight *)x + 1);
    four z = __builtin_shufflevector(y, y, 0, 1, 2, 3) + __builtin_shufflevector(y, y, 4, 5, 6, 7);
    z += __builtin_shufflevector(z, z, 2, 3, 0, 1);
    return z[0] + z[1];
}

/* One query of 16·w numbers over its n keys, which are at the places `at`. */
static inline __attribute__((always_inline)) void look(
    const float *q, const float *k, const float *v, const int32_t *at, int64_t n, int64_t w,
    float scale, float *out) {
    float score[n], most = -INFINITY, sum = 0;
    lane mean[MOST_WIDE * 16 / LANE];
    const int64_t d = 16 * w;
    for (int64_t l = 0; l < n; l++) {
        const float *key = k + at[l] * d;
        lane product = *(const lane *)q * *(const lane *)key;
        for (int64_t i = LANE; i < d; i += LANE)
            product += *(const lane *)(q + i) * *(const lane *)(key + i);
        score[l] = scale * sum_of(&product);
        most = score[l] > most ? score[l] : most;
    }
    _Pragma("omp simd reduction(+ : sum)") for (int64_t l = 0; l < n; l++) {
        score[l] = exponential(score[l] - most);
        sum += score[l];
    }
    for (int64_t i = 0; i < d / LANE; i++) mean[i] = (lane){0};
    for (int64_t l = 0; l < n; l++)
        for (int64_t i = 0; i < d / LANE; i++)
            mean[i] += score[l] * *(const lane *)(v + at[l] * d + i * LANE);
    for (int64_t i = 0; i < d / LANE; i++) *(lane *)(out + i * LANE) = mean[i] / sum;
}

/* Keys and values (layers, B, H, L, 16·w) by strides, and which of them may be seen. */
typedef struct {
    float *keys, *values;
    int64_t layer, sentence, head, L, masks;
    const uint8_t *may; /* (B, masks, L), masks being K or 1; or null */
} Past;

/* q, rows (B·K) of H heads; keys and values of a layer; out (B·K, H·16·w). */
void attend(const float *q, int64_t row, const Past *past, int64_t layer, int64_t B, int64_t K,
            int64_t H, int64_t w, float *out) {
    int64_t L = past->L;
    int32_t at[L];
    float scale = 1.0f / sqrtf(16.0f * w);
    for (int64_t i = 0; i < B * K; i++, q += row) {
        int64_t b = i / K, n = 0;
        const uint8_t *may = past->may ? past->may + (b * past->masks + i % past->masks) * L : 0;
        for (int64_t l = 0; l < L; l++) {
            at[n] = l;
            n += may ? may[l] : 1;
        }
        for (int64_t h = 0; h < H; h++, out += 16 * w) {
            int64_t from = layer * past->layer + b * past->sentence + h * past->head;
            const float *keys = past->keys + from, *values = past->values + from;
            if (w == 2) look(q + h * 32, keys, values, at, n, 2, scale, out);
            else look(q + h * 16 * w, keys, values, at, n, w, scale, out);
        }
    }
}

typedef struct {
    const float *weight, *bias; /* null: there is no norm */
    float eps;
} Norm;

/* LayerNorm of a row. */
static void normalise(const float *x, int64_t D, const Norm *norm, float *out) {
    const float *weight = norm->weight, *bias = norm->bias;
    float sum = 0, squares = 0;
    _Pragma("omp simd reduction(+ : sum)") for (int64_t j = 0; j < D; j++) sum += x[j];
    float mean = sum / D;
    _Pragma("omp simd reduction(+ : squares)") for (int64_t j = 0; j < D; j++)
        squares += (x[j] - mean) * (x[j] - mean);
    float per = 1.0f / sqrtf(squares / D + norm->eps);
    SIMD for (int64_t j = 0; j < D; j++) out[j] = (x[j] - mean) * per * weight[j] + bias[j];
}

/* Each row of x (N, D) as bytes q and their unit: x ≈ unit·q, the largest is ±127. If there is a
   norm, x is normalised first. */
void round_rows(const float *x, int64_t N, int64_t D, const Norm *norm, int8_t *q, float *unit) {
    float normal[D];
    for (int64_t i = 0; i < N; i++, x += D, q += D) {
        const float *row = norm->weight ? normal : x;
        if (norm->weight) normalise(x, D, norm, normal);
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

/* Integer sums (N, F) of bytes' products to unit[n]·units[f]·sum + bias[f], plus `more` (N, F)
   unless null; with `relu`, negative results become 0. */
void scale_sums(const int32_t *sums, int64_t N, int64_t F, const float *unit, const float *units,
                const float *bias, const float *more, int64_t relu, float *out) {
    for (int64_t i = 0; i < N; i++, sums += F, out += F) {
        SIMD for (int64_t j = 0; j < F; j++) out[j] = sums[j] * (unit[i] * units[j]) + bias[j];
        if (more) { SIMD for (int64_t j = 0; j < F; j++) out[j] += more[i * F + j]; }
        if (relu) { SIMD for (int64_t j = 0; j < F; j++) out[j] = out[j] > 0 ? out[j] : 0; }
    }
}

/* The k largest of each row of z (N, V), largest first, of equals the earlier first: values and
   places (N, k). `total` gets each row's log of the sum of e^z, if it isn't null. */
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

/* A decoder in one call. For a few rows calls cost more than the computation. */

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

#ifdef __AVX512VNNI__ /* this processor multiplies bytes four at a time */
#include <immintrin.h>

const int64_t multiplies_bytes = 32; /* rows: PyTorch's products are faster for more */
typedef int32_t ints __attribute__((vector_size(64), aligned(4)));

/* Sixteen sums, plus in each the products of four bytes of u by four of w. */
static inline ints add_fours(ints sum, const uint8_t *u, const int8_t *w) {
    int32_t four;
    memcpy(&four, u, 4);
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(four), _mm512_loadu_si512(w));
}

/* The sums (N, F) of bytes' products, four rows at a time. The processor multiplies unsigned bytes,
   q + 128, by signed ones. */
static void multiply_bytes(const Map *m, const int8_t *q, int64_t N, int32_t *sums) {
    int64_t D = m->D, F = m->F;
    uint8_t u[(N + 3) * D];
    SIMD for (int64_t j = 0; j < N * D; j++) u[j] = (uint8_t)(q[j] + 128);
    memset(u + N * D, 0, 3 * D);
    for (int64_t f = 0; f < F; f += 16)
        for (int64_t i = 0; i < N; i += 4) {
            const int8_t *w = (const int8_t *)m->weight + f * D;
            ints sum[4], odd[4] = {0};
            for (int64_t r = 0; r < 4; r++) sum[r] = -128 * *(const ints *)(m->sums + f);
            for (int64_t d = 0; d < D; d += 8, w += 128)
                for (int64_t r = 0; r < 4; r++) {
                    const uint8_t *a = u + (i + r) * D + d;
                    sum[r] = add_fours(sum[r], a, w);
                    odd[r] = add_fours(odd[r], a + 4, w + 64);
                }
            for (int64_t r = 0; r < 4 && i + r < N; r++)
                *(ints *)(sums + (i + r) * F + f) = sum[r] + odd[r];
        }
}
#elif defined(__AVX2__)
#include <immintrin.h>

const int64_t multiplies_bytes = INT32_MAX; /* rows: PyTorch has no instructions for any */

/* The sums (N, F) of bytes' products, four rows at a time. |q| by ±w are at most 127·127, of which
   two fit into 16 bits: so the sums are exact. */
static void multiply_bytes(const Map *m, const int8_t *q, int64_t N, int32_t *sums) {
    int64_t D = m->D, F = m->F, wide = D / 4;
    int32_t signs[(N + 3) * wide], sizes[(N + 3) * wide];
    memset(signs + N * wide, 0, 12 * wide);
    memcpy(signs, q, N * D);
    for (int64_t j = 0; j < (N + 3) * D; j++) ((int8_t *)sizes)[j] = abs(((int8_t *)signs)[j]);
    const __m256i ones = _mm256_set1_epi16(1);
    for (int64_t f = 0; f < F; f += 16)
        for (int64_t i = 0; i < N; i += 4) {
            const __m256i *w = (const __m256i *)((const int8_t *)m->weight + f * D);
            const int32_t *sign = signs + i * wide, *size = sizes + i * wide;
            __m256i low[4], high[4];
            for (int r = 0; r < 4; r++) low[r] = high[r] = _mm256_setzero_si256();
            for (int64_t d = 0; d < wide; d++, w += 2, sign++, size++) {
                __m256i first = _mm256_loadu_si256(w), second = _mm256_loadu_si256(w + 1);
                for (int r = 0; r < 4; r++) {
                    __m256i s = _mm256_set1_epi32(sign[r * wide]);
                    __m256i a = _mm256_set1_epi32(size[r * wide]);
                    __m256i p = _mm256_maddubs_epi16(a, _mm256_sign_epi8(first, s));
                    low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(p, ones));
                    p = _mm256_maddubs_epi16(a, _mm256_sign_epi8(second, s));
                    high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(p, ones));
                }
            }
            for (int r = 0; r < 4 && i + r < N; r++) {
                __m256i *to = (__m256i *)(sums + (i + r) * F + f);
                _mm256_storeu_si256(to, low[r]);
                _mm256_storeu_si256(to + 1, high[r]);
            }
        }
}
#else
const int64_t multiplies_bytes = 0;
static void multiply_bytes(const Map *m, const int8_t *q, int64_t N, int32_t *sums) {}
#endif

/* norm(x)·W + b, plus `more` unless null; with `relu`, negative results become 0. x (N, D), the
   others (N, F). */
void apply(const Map *m, const Norm *norm, const float *x, int64_t N, const float *more,
           int64_t relu, float *out) {
    int64_t D = m->D, F = m->F;
    if (m->units) {
        int64_t most = F > 2048 ? 8 : 32, n; /* rows at a time: more don't stay in the cache */
        int8_t q[most * D];
        int32_t sums[most * F];
        float unit[most];
        for (; N > 0; N -= n, x += n * D, out += n * F) {
            n = N < most ? N : most;
            round_rows(x, n, D, norm, q, unit);
            multiply_bytes(m, q, n, sums);
            scale_sums(sums, n, F, unit, m->units, m->bias, more, relu, out);
            if (more) more += n * F;
        }
        return;
    }
    float normal[N * D];
    const float *w = m->weight;
    for (int64_t i = 0; i < N; i++) {
        if (norm->weight) normalise(x + i * D, D, norm, normal + i * D);
        SIMD for (int64_t f = 0; f < F; f++)
            out[i * F + f] = m->bias[f] + (more ? more[i * F + f] : 0);
    }
    if (norm->weight) x = normal;
    for (int64_t d = 0; d < D; d += 4, w += 4 * F) /* each weight is read once */
        for (int64_t i = 0; i < N; i++) {
            const float *a = x + i * D + d;
            float *y = out + i * F;
            SIMD for (int64_t f = 0; f < F; f++)
                y[f] += a[0] * w[f] + a[1] * w[F + f] + a[2] * w[2 * F + f] + a[3] * w[3 * F + f];
        }
    if (relu) { SIMD for (int64_t j = 0; j < N * F; j++) out[j] = out[j] > 0 ? out[j] : 0; }
}

/* The end of a sublayer: x (N, D) becomes norm(x + y·W + b). */
static void join(const Map *m, const Norm *norm, const float *y, int64_t N, float *x) {
    int64_t D = m->F;
    float sum[N * D];
    apply(m, &(Norm){0}, y, N, x, 0, sum);
    for (int64_t i = 0; i < N; i++)
        if (norm->weight) normalise(sum + i * D, D, norm, x + i * D);
        else memcpy(x + i * D, sum + i * D, D * sizeof(float));
}

/* `count` layers and the norm after them, in place: x (B·K, H·16·w) holds K new tokens of each of B
   sentences, whose keys and values become the last of `own`. */
void decode_layers(const Layer *l, int64_t count, const Norm *last, float *x, int64_t B, int64_t K,
                   int64_t H, int64_t w, const Past *own, const Past *source) {
    int64_t N = B * K, d = 16 * w, D = H * d;
    for (int64_t n = 0; n < count; n++, l++) {
        float wide[N * (3 * D > l->expand.F ? 3 * D : l->expand.F)], heads[N * D];
        apply(&l->look_back, &l->before[0], x, N, 0, 0, wide); /* queries, keys, values: (N, 3·D) */
        for (int64_t i = 0; i < N; i++)
            for (int64_t h = 0; h < H; h++) {
                int64_t to = n * own->layer + i / K * own->sentence + h * own->head;
                to += (own->L - K + i % K) * d;
                memcpy(own->keys + to, wide + (3 * i + 1) * D + h * d, d * sizeof(float));
                memcpy(own->values + to, wide + (3 * i + 2) * D + h * d, d * sizeof(float));
            }
        attend(wide, 3 * D, own, n, B, K, H, w, heads);
        join(&l->look_back_out, &l->after[0], heads, N, x);
        apply(&l->look_across, &l->before[1], x, N, 0, 0, wide);
        attend(wide, D, source, n, B, K, H, w, heads);
        join(&l->look_across_out, &l->after[1], heads, N, x);
        apply(&l->expand, &l->before[2], x, N, 0, 1, wide);
        join(&l->contract, &l->after[2], wide, N, x);
    }
    if (last->weight)
        for (int64_t i = 0; i < N; i++) normalise(x + i * D, D, last, x + i * D);
}
