/* What the compiled functions share. Plain C for GCC and Clang. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define SIMD _Pragma("omp simd")

typedef float sixteen __attribute__((vector_size(64), aligned(4)));

/* e^x for x <= 0: 2^n e^r with |r| <= (ln 2)/2, and Cephes' polynomial for e^r. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x; /* NaN stays */
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
