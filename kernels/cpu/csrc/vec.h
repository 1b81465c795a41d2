/* Eight floats at a time (AVX2, FMA): what the attention and the elementwise kernels share. */
#ifndef PDSERVE_VEC_H
#define PDSERVE_VEC_H

#include <immintrin.h>
#include <stdint.h>

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX2_INLINE __attribute__((target("avx2,fma"), always_inline)) static inline

/* Before a loop of few rounds over an array of registers: else the array may stay in memory. */
#define UNROLL _Pragma("GCC unroll 8")

/* The first n lanes (n < 8). */
AVX2_INLINE __m256i first_lanes(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* Always the same tree: a sum depends on its lanes alone. */
AVX2_INLINE float sum_lanes(__m256 x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

AVX2_INLINE float max_lanes(__m256 x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

/* x = n ln2 + r with |r| <= ln2 / 2. *power = 2^n; result = e^r - 1 (Taylor, degree 7: the next term is below 6e-9).
 * -126 <= n <= 127. */
AVX2_INLINE __m256 reduced_expm1(__m256 x, __m256 *power) {
    __m256 n = _mm256_mul_ps(x, _mm256_set1_ps(1.44269504f));
    n = _mm256_round_ps(n, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    /* ln2 in two parts, the first of few bits: n times it is exact. */
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.0f / 5040);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    *power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    return _mm256_fmadd_ps(_mm256_mul_ps(p, r), r, r);
}

/* e^x for x <= 88; exactly 0 below -87. NaN stays NaN. */
AVX2_INLINE __m256 exp8(__m256 x) {
    __m256 is_zero = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ);
    __m256 power;
    __m256 m = reduced_expm1(x, &power);
    return _mm256_andnot_ps(is_zero, _mm256_fmadd_ps(m, power, power));
}

AVX2_INLINE float exp1(float x) { return _mm256_cvtss_f32(exp8(_mm256_set1_ps(x))); }

/* tanh |x| = m / (m + 2) with m = e^{2|x|} - 1, which keeps its relative accuracy near 0. NaN stays NaN. */
AVX2_INLINE __m256 tanh8(__m256 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 size = _mm256_min_ps(_mm256_set1_ps(20.0f), _mm256_mul_ps(_mm256_set1_ps(2.0f), _mm256_andnot_ps(sign, x)));
    __m256 power;
    __m256 m = reduced_expm1(size, &power);
    m = _mm256_fmadd_ps(m, power, _mm256_sub_ps(power, _mm256_set1_ps(1.0f)));
    __m256 result = _mm256_div_ps(m, _mm256_add_ps(m, _mm256_set1_ps(2.0f)));
    return _mm256_or_ps(result, _mm256_and_ps(sign, x));
}

#endif
