// Gumbel noise of tokens: the numbers that `eyas.verify.path.gumbel` defines, in the same integer arithmetic and float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace eyas {

constexpr int64_t NOISE_PIECE = 1024;  // tokens whose noise a thread computes at a time

// SplitMix64's finalizer (Steele, Lea, Flood 2014).
inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

inline double as_double(uint64_t bits) {
    double value;
    std::memcpy(&value, &bits, 8);
    return value;
}

// The logarithm of a positive normal number, within 2 units in the last place. x = 2^e m with m near 1; log m is the
// series of 2 artanh((m - 1) / (m + 1)). Without branches, so that the compiler vectorizes it.
inline double logarithm(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    constexpr uint64_t half_root = 0x3FE6A09E667F3BCD;  // the square root of 1/2: m lies between it and twice as much
    const uint64_t shifted = bits - half_root + (1023ull << 52);
    const double e = as_double(0x4330000000000000 | (shifted >> 52)) - (4503599627370496.0 + 1023.0);
    const double m = as_double(bits - (shifted & (0xFFFull << 52)) + (1023ull << 52));
    const double s = (m - 1.0) / (m + 1.0), q = s * s;
    double p = 1.0 / 23;
    for (int k = 21; k >= 3; k -= 2) p = p * q + 1.0 / k;
    const double rest = p * q * s;
    return e * 0.6931471803691238 + (2.0 * s + (2.0 * rest + e * 1.9082149292705877e-10));
}

// The 52 random bits of a token; its noise is an increasing function of them. `key` belongs to a seed and a position.
inline uint64_t key_of(uint64_t seed, uint64_t position) { return mix(mix(seed) + position); }
inline uint64_t bits_of(uint64_t key, int64_t id) {
    return mix(key + (static_cast<uint64_t>(id) + 1) * 0x9E3779B97F4A7C15) >> 12;
}

// Whether any of `count` tokens from `first` on may have at least this `noise`; may be true where none has.
inline bool may_reach(uint64_t key, int64_t first, int64_t count, double noise) {
    // noise exceeds x with probability 1 - exp(-exp(-x)) < exp(-x)
    const double above = std::min(1.0, std::exp(-noise + 1e-3 * (1.0 + std::abs(noise))));
    const int64_t least = static_cast<int64_t>((1.0 - above) * (int64_t{1} << 52)) - 2;
    int64_t most = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < count; i++) most = std::max(most, static_cast<int64_t>(bits_of(key, first + i)));
    return most >= least;
}

// Noise [count] of tokens `id(i)`, for a seed and a position.
template <class Id>
inline void gumbel_of(uint64_t seed, uint64_t position, const Id& id, int64_t count, float* out) {
    const uint64_t key = key_of(seed, position);
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        const uint64_t bits = bits_of(key, id(i));
        // (bits + 1/2) / 2^52: exact, and never 0 or 1
        const double uniform = as_double(0x3FF0000000000000 | bits) - 1.0 + 1.1102230246251565e-16;
        out[i] = static_cast<float>(-logarithm(-logarithm(uniform)));
    }
}

// Noise [count] of the tokens `ids`, or of the tokens from `first` on.
inline void gumbel(uint64_t seed, uint64_t position, const int64_t* ids, int64_t count, float* out) {
    gumbel_of(seed, position, [ids](int64_t i) { return ids[i]; }, count, out);
}
inline void gumbel(uint64_t seed, uint64_t position, int64_t first, int64_t count, float* out) {
    gumbel_of(seed, position, [first](int64_t i) { return first + i; }, count, out);
}

}  // namespace eyas
