/* Box and Muller's formula as in normals.py, in one pass over the memory: the compiler turns the loop into vector
   instructions of its own processor. Polynomials are those of Cephes (S. L. Moshier), right to float32's last digits. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 128
#define RARE (1 << 20) /* numbers below this are extended by 128 more bits: normals.py, RARE */

/* ln u for 0 < u < 1; near 1 it is 1 - u = left that has the digits. */
static inline float logarithm(float u, float left) {
    int32_t bits;
    memcpy(&bits, &u, 4);
    int32_t e = (bits - 0x3f3504f3) >> 23; /* u = 2^e m with m in [sqrt(1/2), sqrt(2)) */
    bits -= e * (1 << 23);
    float m, k = (float)e;
    memcpy(&m, &bits, 4);
    float f = e == 0 ? -left : m - 1, z = f * f; /* in pairs, which do not wait for each other */
    float p = (7.0376836292e-2f * f - 1.1514610310e-1f) * z + (1.1676998740e-1f * f - 1.2420140846e-1f);
    p = p * (z * z) + ((1.4249322787e-1f * f - 1.6668057665e-1f) * z + (2.0000714765e-1f * f - 2.4999993993e-1f));
    p = p * f + 3.3333331174e-1f;
    p = p * f * z - 2.12194440e-4f * k - 0.5f * z;
    return f + p + 0.693359375f * k;
}

/* sqrt(-2 ln u), u = (number + 1/2)/2^32. */
static inline float radius_of(int32_t number) {
    float nearer = ((float)(number ^ (number >> 31)) + 0.5f) * 0x1p-32f;
    float u = number < 0 ? 1 - nearer : nearer; /* below 0 it is above 2^31, as an unsigned number */
    return __builtin_sqrtf(-2 * logarithm(u, nearer));
}

/* The same for a number below RARE, of whose digits few are left: four more words follow it. */
static float extended_radius(int32_t number, const int32_t *more) {
    double low = 0.5;
    for (int i = 3; i >= 0; i--) low = ((double)(uint32_t)more[i] + low) * 0x1p-32;
    return (float)sqrt(-2 * log(((double)number + low) * 0x1p-32));
}

/* A radius and an angle of 32 bits, two independent normal numbers. */
static inline void turn(float *first, float *second, float r, int32_t angle) {
    uint32_t whole = (uint32_t)angle, quarters = (whole + (1u << 29)) >> 30;
    float t = (float)(int32_t)(whole - (quarters << 30)) * (3.14159265358979f * 0x1p-31f), z = t * t;
    float sine = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * t + t;
    float cosine = ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z - 0.5f * z + 1;
    float x = quarters & 1 ? sine : cosine, y = quarters & 1 ? cosine : sine;
    *first = r * ((quarters + 1) & 2 ? -x : x);
    *second = r * (quarters & 2 ? -y : y);
}

/* first += sum + scale r cos, second += other + scale r sin, each sum made before it meets what is there. */
static inline void add_pair(float *first, float *second, float sum, float other, float r, int32_t angle) {
    float x, y;
    turn(&x, &y, r, angle);
    *first += sum + x;
    *second += other + y;
}

/* into[k, :] += sums[k, :] + |scales[k]| N(0, 1); `sums` may be null.
   A row's bits: `half` numbers, `half` angles, then `spare` words that extend rare numbers. Its first half takes
   cosines, its second half sines of the same radii. Returns 1 where a row had too few of them, else 0. */
int32_t add_normals(
    float *into, int64_t stride, const float *sums, int64_t sums_stride, int64_t rows, int64_t size,
    const int32_t *bits, int64_t spare, const float *scales
) {
    static const float none[BLOCK];
    int64_t half = (size + 1) / 2, pairs = size - half;
    for (int64_t k = 0; k < rows; k++) {
        const int32_t *more = bits + (2 * half + spare) * k + 2 * half, *end = more + spare;
        float scale = __builtin_fabsf(scales[k]), radii[BLOCK], unused = 0;
        for (int64_t i = 0; i < half; i += BLOCK) {
            int64_t count = half - i < BLOCK ? half - i : BLOCK, both = pairs - i < count ? pairs - i : count;
            uint32_t least = UINT32_MAX;
            const int32_t *restrict numbers = bits + (2 * half + spare) * k + i, *restrict angles = numbers + half;
            float *restrict first = into + k * stride + i, *restrict second = first + half;
            const float *restrict sum = sums ? sums + k * sums_stride + i : none, *restrict other = sums ? sum + half : none;
            for (int64_t j = 0; j < count; j++) least = (uint32_t)numbers[j] < least ? (uint32_t)numbers[j] : least;
            if (least >= RARE && both == BLOCK) {
                for (int64_t j = 0; j < BLOCK / 2; j++) { /* two at a time: one waits for its root, the other goes on */
                    int64_t l = j + BLOCK / 2;
                    float r = scale * radius_of(numbers[j]), q = scale * radius_of(numbers[l]);
                    add_pair(first + j, second + j, sum[j], other[j], r, angles[j]);
                    add_pair(first + l, second + l, sum[l], other[l], q, angles[l]);
                }
                continue;
            }
            for (int64_t j = 0; j < count; j++) radii[j] = radius_of(numbers[j]);
            for (int64_t j = 0; j < count; j++) {
                if ((uint32_t)numbers[j] >= RARE) continue;
                if (end - more < 4) return 1;
                radii[j] = extended_radius(numbers[j], more);
                more += 4;
            }
            for (int64_t j = 0; j < both; j++)
                add_pair(first + j, second + j, sum[j], other[j], scale * radii[j], angles[j]);
            if (count > both) add_pair(first + both, &unused, sum[both], 0, scale * radii[both], angles[both]);
        }
    }
    return 0;
}
