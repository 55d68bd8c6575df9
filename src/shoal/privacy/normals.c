/* Box and Muller's formula as in normals.py, in one pass over the memory: the compiler turns the loop into vector
   instructions of its own processor. Polynomials are those of Cephes (S. L. Moshier), right to float32's last digits. */

#include <stdint.h>
#include <string.h>

/* ln u for 0 < u <= 1: u = 2^e m with m in [sqrt(1/2), sqrt(2)). */
static inline float logarithm(float u) {
    int32_t bits;
    memcpy(&bits, &u, 4);
    int32_t e = (bits - 0x3f3504f3) >> 23;
    bits -= e * (1 << 23);
    float m, k = (float)e;
    memcpy(&m, &bits, 4);
    float f = m - 1, z = f * f, p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    p = p * f * z - 2.12194440e-4f * k - 0.5f * z;
    return f + p + 0.693359375f * k;
}

/* One 31-bit number and one angle of 32 bits, two independent normal numbers. */
static inline void add_pair(float *first, float *second, int32_t number, int32_t angle, float scale) {
    float u = ((float)(number & 0x7fffffff) + 0.5f) * 0x1p-31f;
    float square = -2 * logarithm(u);
    float r = scale * __builtin_sqrtf(square > 0 ? square : 0);
    uint32_t whole = (uint32_t)angle, quarters = (whole + (1u << 29)) >> 30;
    float t = (float)(int32_t)(whole - (quarters << 30)) * (3.14159265358979f * 0x1p-31f), z = t * t;
    float sine = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * t + t;
    float cosine = ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z - 0.5f * z + 1;
    float x = quarters & 1 ? sine : cosine, y = quarters & 1 ? cosine : sine;
    *first += r * ((quarters + 1) & 2 ? -x : x);
    *second += r * (quarters & 2 ? -y : y);
}

/* into[k, :] += |scales[k]| N(0, 1); a row's first half takes cosines, its second half sines of the same radii. */
void add_normals(
    float *into, int64_t stride, int64_t rows, int64_t size, const int32_t *bits, const float *scales
) {
    int64_t half = (size + 1) / 2, pairs = size - half;
    for (int64_t k = 0; k < rows; k++) {
        float *restrict first = into + k * stride, *restrict second = first + half, unused = 0, scale = __builtin_fabsf(scales[k]);
        const int32_t *restrict numbers = bits + 2 * half * k, *restrict angles = numbers + half;
        for (int64_t i = 0; i < pairs; i++) add_pair(first + i, second + i, numbers[i], angles[i], scale);
        if (half > pairs) add_pair(first + pairs, &unused, numbers[pairs], angles[pairs], scale);
    }
}
