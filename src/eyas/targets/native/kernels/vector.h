// Vectors of floats, and the arithmetic that the kernels need, for AVX2 and AVX-512.
//
// Everything here computes each lane by itself, so a number never depends on the lane that it is in. Values of a bf16
// model are kept as floats that bf16 can represent; `rounded` rounds a result to such a float.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace eyas {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int LANES = 16;
using vec = __m512;
inline vec zero() { return _mm512_setzero_ps(); }
inline vec all(float x) { return _mm512_set1_ps(x); }
inline vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vec x) { _mm512_storeu_ps(p, x); }
inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
inline vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
inline vec div(vec a, vec b) { return _mm512_div_ps(a, b); }
inline vec larger(vec a, vec b) { return _mm512_max_ps(a, b); }
inline vec smaller(vec a, vec b) { return _mm512_min_ps(a, b); }
inline vec nearest(vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vec times_power_of_two(vec a, vec n) {
    __m512i exponent = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    return mul(a, _mm512_castsi512_ps(exponent));
}
inline vec zero_below(vec a, vec x, float least) {  // 0 where x is less than `least`
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all(least), _CMP_NLT_UQ), a);
}
inline bool any_equal(vec a, vec b) { return _mm512_cmpeq_ps_mask(a, b) != 0; }
inline vec load(const uint16_t* p) {  // bf16
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline vec load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline vec rounded(vec a) {  // to the nearest bf16, ties to even
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
inline void store(uint16_t* p, vec a) {  // bf16, of values that one can hold
    __m512i high = _mm512_srli_epi32(_mm512_castps_si512(a), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
}
// A pair of inputs, broadcast to every word.
inline __m512i all_of_pair(const uint16_t* pair) {
    int32_t both;
    std::memcpy(&both, pair, 4);
    return _mm512_set1_epi32(both);
}
inline __m256 folded(vec a) { return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }
#else
constexpr int LANES = 8;
using vec = __m256;
inline vec zero() { return _mm256_setzero_ps(); }
inline vec all(float x) { return _mm256_set1_ps(x); }
inline vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vec x) { _mm256_storeu_ps(p, x); }
inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
inline vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
inline vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
inline vec div(vec a, vec b) { return _mm256_div_ps(a, b); }
inline vec larger(vec a, vec b) { return _mm256_max_ps(a, b); }
inline vec smaller(vec a, vec b) { return _mm256_min_ps(a, b); }
inline vec nearest(vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vec times_power_of_two(vec a, vec n) {
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return mul(a, _mm256_castsi256_ps(exponent));
}
inline vec zero_below(vec a, vec x, float least) {  // 0 where x is less than `least`
    return _mm256_and_ps(a, _mm256_cmp_ps(x, all(least), _CMP_NLT_UQ));
}
inline bool any_equal(vec a, vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)) != 0; }
inline vec load(const uint16_t* p) {  // bf16
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline vec load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline vec rounded(vec a) {  // to the nearest bf16, ties to even
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
inline void store(uint16_t* p, vec a) {  // bf16, of values that one can hold
    __m256i high = _mm256_srli_epi32(_mm256_castps_si256(a), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
inline __m256 folded(vec a) { return a; }
#endif

inline float sum(vec a) {
    __m256 half = folded(a);
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

// The sums of eight vectors as one vector of eight floats. The lanes of each are added in the same order.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
inline __m256 sums(const vec* a) {
    auto halves = [](vec x, vec y) { return add(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee)); };
    auto quarters = [](vec x, vec y) { return add(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd)); };
    const vec s0123 = quarters(halves(a[0], a[1]), halves(a[2], a[3])), s4567 = quarters(halves(a[4], a[5]), halves(a[6], a[7]));
    const vec two = add(_mm512_shuffle_ps(s0123, s4567, 0x44), _mm512_shuffle_ps(s0123, s4567, 0xee));
    const vec one = add(two, _mm512_movehdup_ps(two));  // of every four lanes the first has a sum of 0 to 3, the third of 4 to 7
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, one));
}
#else
inline __m256 sums(const vec* a) {
    __m256 s01 = _mm256_hadd_ps(a[0], a[1]), s23 = _mm256_hadd_ps(a[2], a[3]);
    __m256 s45 = _mm256_hadd_ps(a[4], a[5]), s67 = _mm256_hadd_ps(a[6], a[7]);
    __m256 low = _mm256_hadd_ps(s01, s23), high = _mm256_hadd_ps(s45, s67);
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}
#endif

// e to the power of anything less counts as 0. It vanishes next to the 1 that it is added to wherever it is used, and
// products of smaller powers would be subnormal numbers, with which some processors compute a hundred times as slowly.
constexpr float MIN_POWER = -60.0f;

// e to the power of x, clamped to [-60, 88], as 2^n (1 + rest). Cody and Waite's reduction, Cephes' polynomial.
struct Power {
    vec n, rest;

    explicit Power(vec power) {
        vec x = larger(smaller(power, all(88.0f)), all(MIN_POWER));
        n = nearest(mul(x, all(1.44269504088896341f)));
        vec r = fma(n, all(-0.693359375f), x);
        r = fma(n, all(2.12194440e-4f), r);
        vec p = all(1.9875691500e-4f);
        p = fma(p, r, all(1.3981999507e-3f));
        p = fma(p, r, all(8.3334519073e-3f));
        p = fma(p, r, all(4.1665795894e-2f));
        p = fma(p, r, all(1.6666665459e-1f));
        p = fma(p, r, all(5.0000001201e-1f));
        rest = fma(mul(r, r), p, r);
    }
};

// e to the power of x, within 2 units in the last place; 0 below -60.
inline vec exponential(vec x) {
    const Power e(x);
    return zero_below(times_power_of_two(add(e.rest, all(1.0f)), e.n), x, MIN_POWER);
}

// The hyperbolic tangent, (e^2x - 1) / (e^2x + 1), within a few units in its own last place: a soft cap multiplies it.
inline vec tangent(vec x) {
    const Power e(add(x, x));
    const vec two_to_n = times_power_of_two(all(1.0f), e.n);
    const vec less_one = fma(two_to_n, e.rest, sub(two_to_n, all(1.0f)));
    return div(less_one, add(less_one, all(2.0f)));
}

inline vec silu(vec x) { return div(x, add(exponential(sub(zero(), x)), all(1.0f))); }

// GELU in its tanh form, x (1 + tanh u) / 2 = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3).
inline vec gelu(vec x) {
    vec u = mul(all(1.5957691216057308f), fma(mul(mul(x, x), x), all(0.044715f), x));  // twice that
    return div(x, add(exponential(sub(zero(), u)), all(1.0f)));
}

// GELU itself, x (1 + erf(x / sqrt 2)) / 2, its error function within 2e-7: Abramowitz and Stegun, 7.1.26.
inline vec exact_gelu(vec x) {
    vec scaled = mul(x, all(0.70710678118654752f)), size = larger(scaled, sub(zero(), scaled));
    vec t = div(all(1.0f), fma(size, all(0.3275911f), all(1.0f)));
    vec p = all(1.061405429f);
    p = fma(p, t, all(-1.453152027f));
    p = fma(p, t, all(1.421413741f));
    p = fma(p, t, all(-0.284496736f));
    p = fma(p, t, all(0.254829592f));
    vec half = mul(mul(p, t), mul(exponential(sub(zero(), mul(size, size))), all(0.5f)));  // (1 - erf(size)) / 2
    return sub(larger(x, zero()), mul(larger(x, sub(zero(), x)), half));
}

inline float rounded(float x) {
    float lanes[LANES];
    store(lanes, rounded(all(x)));
    return lanes[0];
}

inline uint16_t narrowed(float x) {  // bf16, of a value that one can hold
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>(bits >> 16);
}

}  // namespace eyas
