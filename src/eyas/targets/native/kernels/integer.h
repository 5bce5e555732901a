// Products in integers: 4-bit or 8-bit weights, from GGUF files or `--quantize`, times inputs quantized to 8 bits.
//
// Weights and inputs are in blocks of 32 inputs. A weight is `scale * (code - zero)`, or `scale * code + minimum` (weight.h).
// Inputs x of a block are quantized to x / scale, from -127 to 127, rounded to nearest, ties to even; the scale is 1 / 127 of
// the greatest |x|. A block whose values are all below 2^-60 counts as 0. Codes and scale depend on the token alone.
//
// A block's sum S of products of codes is an integer below 2^24, the same whatever the order and the instruction. All that
// follows has one order: with X the sum of the input's codes,
//
//     sum = fma(float(S) * input scale, weight scale, sum);  sum = fma(input scale * X, minimum, sum)
//
// block after block, in float32. (In a block with two scales, S is the sum of its halves' sums times their integer scales,
// exact as it is below 2^24 too.) So a result has the same bits for any number of tokens, panels and threads, with AVX2,
// AVX-512 and VNNI.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>

#include "weight.h"

namespace eyas {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
using ivec = __m512i;
inline ivec load_bits(const char* at) { return _mm512_loadu_si512(at); }
inline void store_bits(char* to, ivec a) { _mm512_storeu_si512(to, a); }
inline ivec all(int32_t x) { return _mm512_set1_epi32(x); }
inline ivec both(ivec a, ivec b) { return _mm512_and_si512(a, b); }
inline ivec either(ivec a, ivec b) { return _mm512_or_si512(a, b); }
inline ivec add(ivec a, ivec b) { return _mm512_add_epi32(a, b); }
inline ivec right(ivec a, int bits) { return _mm512_srli_epi32(a, static_cast<unsigned>(bits)); }
inline ivec left(ivec a, int bits) { return _mm512_slli_epi32(a, static_cast<unsigned>(bits)); }
inline ivec add_shorts(ivec a, ivec b) { return _mm512_add_epi16(a, b); }
inline ivec products(ivec a, ivec b) { return _mm512_maddubs_epi16(a, b); }
inline ivec add_products(ivec sum, ivec a, ivec b) { return add_shorts(sum, products(a, b)); }
inline ivec sums_of_shorts(ivec a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
inline ivec minus_128(ivec bytes) { return _mm512_xor_si512(bytes, all(static_cast<int32_t>(0x80808080))); }
inline ivec magnitudes(ivec bytes) { return _mm512_abs_epi8(bytes); }
inline ivec with_signs(ivec bytes, ivec of) {
    return _mm512_mask_sub_epi8(bytes, _mm512_movepi8_mask(of), _mm512_setzero_si512(), bytes);
}
inline vec floats(ivec a) { return _mm512_cvtepi32_ps(a); }
inline vec halves(const char* at) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))); }
inline vec bytes(const uint8_t* at) {
    return floats(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}
inline ivec bits_of(vec a) { return _mm512_castps_si512(a); }
inline ivec larger(ivec a, ivec b) { return _mm512_max_epi32(a, b); }
inline __m256i half_of_larger(ivec a) { return _mm256_max_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1)); }
inline __m128i narrow(vec a) { return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)); }
inline void store_codes(int8_t* to, vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), narrow(a)); }
inline __m128i half_of_codes(const float* x, vec factor) { return narrow(mul(load(x), factor)); }
#else
using ivec = __m256i;
inline ivec load_bits(const char* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
inline void store_bits(char* to, ivec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a); }
inline ivec all(int32_t x) { return _mm256_set1_epi32(x); }
inline ivec both(ivec a, ivec b) { return _mm256_and_si256(a, b); }
inline ivec either(ivec a, ivec b) { return _mm256_or_si256(a, b); }
inline ivec add(ivec a, ivec b) { return _mm256_add_epi32(a, b); }
inline ivec right(ivec a, int bits) { return _mm256_srli_epi32(a, bits); }
inline ivec left(ivec a, int bits) { return _mm256_slli_epi32(a, bits); }
inline ivec add_shorts(ivec a, ivec b) { return _mm256_add_epi16(a, b); }
inline ivec products(ivec a, ivec b) { return _mm256_maddubs_epi16(a, b); }
// One after the other: compilers make the products of many sums first, for which 16 registers are too few.
inline ivec add_products(ivec sum, ivec a, ivec b) {
    ivec product;
    asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(a), "x"(b));
    return sum;
}
inline ivec sums_of_shorts(ivec a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
inline ivec minus_128(ivec bytes) { return _mm256_xor_si256(bytes, all(static_cast<int32_t>(0x80808080))); }
inline ivec magnitudes(ivec bytes) { return _mm256_abs_epi8(bytes); }
inline ivec with_signs(ivec bytes, ivec of) { return _mm256_sign_epi8(bytes, of); }
inline vec floats(ivec a) { return _mm256_cvtepi32_ps(a); }
inline vec halves(const char* at) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))); }
inline vec bytes(const uint8_t* at) {
    return floats(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}
inline ivec bits_of(vec a) { return _mm256_castps_si256(a); }
inline ivec larger(ivec a, ivec b) { return _mm256_max_epi32(a, b); }
inline __m256i half_of_larger(ivec a) { return a; }
inline __m128i narrow(vec a) {
    const __m256i wide = _mm256_cvtps_epi32(a);
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    return _mm_packs_epi16(half, half);
}
inline void store_codes(int8_t* to, vec a) { _mm_storel_epi64(reinterpret_cast<__m128i*>(to), narrow(a)); }
inline __m128i half_of_codes(const float* x, vec factor) {
    return _mm_unpacklo_epi64(narrow(mul(load(x), factor)), narrow(mul(load(x + LANES), factor)));
}
#endif

#if (defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)) || defined(__AVXVNNI__)
constexpr bool VNNI = true;
#else
constexpr bool VNNI = false;
#endif

// Without VNNI, a block's products of 4-bit codes are summed in 16-bit lanes, which can hold the sum: 15 * 127 * 16.
constexpr bool in_shorts(int bits) { return !VNNI && bits == 4; }

// Without VNNI, four products of codes of 5 or 6 bits fit into a 16-bit lane: 63 * 127 * 4.
constexpr bool eights_in_shorts(int bits) { return !VNNI && (bits == 5 || bits == 6); }

// Of signed 8-bit codes, magnitudes are multiplied, and inputs take their signs: without VNNI, two such products fit into a
// 16-bit lane, 128 * 127 * 2, and the zero point isn't needed.
constexpr bool by_magnitude(int64_t kind) { return !VNNI && code_bits(kind) == 8 && !has_minimum(kind); }

// Of a block at `block`, the codes of 4 adjacent inputs from i on, for the outputs of vector `part`.
template <int64_t KIND>
inline ivec four_codes(const char* block, int64_t i, int part) {
    constexpr int BITS = code_bits(KIND);
    const char* codes = block + header_bytes(KIND) + part * 4 * LANES;
    if constexpr (stored_bits(KIND) == 8) return load_bits(codes + i * PANEL);
    ivec four = load_bits(codes + i % (GROUP / 2) * PANEL);
    four = both(i < GROUP / 2 ? four : right(four, 4), all(0x0f0f0f0f));
    if constexpr (BITS == 4) return four;
    const ivec upper = load_bits(codes + (GROUP / 2 + 4 * upper_vector(BITS, i / 4)) * PANEL);
    const int shift = upper_shift(BITS, i / 4) - 4;  // to bit 4
    const ivec moved = shift < 0 ? left(upper, -shift) : right(upper, shift);
    return either(four, both(moved, all(BITS == 5 ? 0x10101010 : 0x30303030)));
}

// Four input codes, in every 32-bit lane.
inline ivec four_of(const int8_t* codes) {
    int32_t four;
    std::memcpy(&four, codes, 4);
    return all(four);
}

// Add to each sum the products of four unsigned weight codes and four input codes. Without VNNI, two products of 8-bit codes
// are summed in 16 bits, which hold 127 * 127 * 2 and 128 * 127 * 2, so the high bits of weight codes are multiplied apart.
template <int64_t KIND>
inline ivec dot(ivec sum, ivec weights, ivec inputs) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
    return _mm512_dpbusd_epi32(sum, weights, inputs);
#elif defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, weights, inputs);
#else
    if (in_shorts(code_bits(KIND))) return add_products(sum, weights, inputs);
    if (by_magnitude(KIND)) return add(sum, sums_of_shorts(products(magnitudes(weights), with_signs(inputs, weights))));
    const ivec low = sums_of_shorts(products(both(weights, all(0x7f7f7f7f)), inputs));
    const ivec high = sums_of_shorts(products(both(weights, all(static_cast<int32_t>(0x80808080))), inputs));
    return add(sum, add(low, high));
#endif
}

// Per-block scale and code sums of a token's quantized inputs.
struct Step {
    float scale, sum;  // sum: scale times the sum of the codes
    int32_t less[2];   // the negated sums of the first 16 codes and of the others
    int32_t less4, less5, less8;  // the negated sum of all codes times the zero point of signed weights of so many bits
};

constexpr float MIN_INPUT = 0x1p-60f;  // a block of smaller inputs has codes of 0

// The factors from inputs to codes, and from codes to inputs: the latter is NaN if one of x [size] isn't finite.
struct Scales {
    float to_codes = 0, from_codes = 0;

    Scales(const float* x, int64_t size) {
        ivec top = all(0);  // of magnitudes, which as integers have the same order; non-finite ones are the greatest
        for (int64_t i = 0; i < size; i += LANES) top = larger(top, both(bits_of(load(x + i)), all(0x7fffffff)));
        __m256i half = half_of_larger(top);
        __m128i four = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
        const float most = _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1))));
        if (!(most < MIN_INPUT)) to_codes = 127.0f / most, from_codes = most * (1.0f / 127.0f) + (most - most);
    }
};

// The sums of a block's first 16 codes and of the others.
inline void sums_of_codes(__m256i codes, int32_t (&sums)[2]) {
    const __m256i eight = _mm256_sad_epu8(_mm256_xor_si256(codes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    const __m256i both = _mm256_add_epi32(eight, _mm256_shuffle_epi32(eight, 0x4e));  // of codes that are greater by 128
    sums[0] = _mm256_cvtsi256_si32(both) - GROUP / 2 * 128, sums[1] = _mm256_extract_epi32(both, 4) - GROUP / 2 * 128;
}

// Quantize inputs x [in], padded to whole blocks, and make the step of each block; those of the next block are `apart`.
inline void encode(const float* x, int64_t in, int64_t apart, int8_t* codes, Step* steps) {
    float tail[GROUP] = {};
    for (int64_t first = 0; first < in; first += GROUP, x += GROUP, codes += apart * GROUP, steps += apart) {
        if (first + GROUP > in) x = static_cast<const float*>(std::memcpy(tail, x, (in - first) * sizeof(float)));
        const Scales scales(x, GROUP);
        const vec factor = all(scales.to_codes);
        const __m256i made = _mm256_set_m128i(half_of_codes(x + GROUP / 2, factor), half_of_codes(x, factor));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), made);
        int32_t sums[2];
        sums_of_codes(made, sums);
        const int32_t whole = sums[0] + sums[1];
        const float sum = scales.from_codes * static_cast<float>(whole);
        *steps = {scales.from_codes, sum, {-sums[0], -sums[1]}, -whole * 8, -whole * 16, -whole * 128};
    }
}

// Buffers for the codes and steps of tokens.
class Codes {
  public:
    // Quantize tokens x [count, ld]; valid until the next call.
    Tokens of(const float* x, int64_t ld, int64_t count, int64_t in) {
        const int64_t blocks = blocks_of(in);
        if (count * blocks > size_) {
            size_ = count * blocks;
            codes_.reset(new int8_t[size_ * GROUP]), steps_.reset(new Step[size_]);
        }
        for (int64_t t = 0; t < count; t++)
            encode(x + t * ld, in, count, codes_.get() + t * GROUP, steps_.get() + t);
        return {x, ld, count, nullptr, codes_.get(), steps_.get(), count};
    }

  private:
    int64_t size_ = 0;
    std::unique_ptr<int8_t[]> codes_;
    std::unique_ptr<Step[]> steps_;
};

// Panels that are processed together: one where memory is the bottleneck, which is fastest read in order. With up to 8 tokens
// Zen 5 always takes one, as it loads two vectors of inputs a cycle; others share each load between two panels.
constexpr int together_in_integers(int tokens) {
    return LANES == 16 ? (!ZEN5 && tokens >= 3 && tokens <= 8 ? 2 : 1) : tokens <= 1 ? 2 : 1;
}

// Totals that fit into AVX2's registers. Of more than six tokens, one of a panel's two vectors is summed after the other, and
// inputs are loaded twice.
constexpr int MAX_TOTALS = 12;

// Scales and minimum weights of 16 outputs, vector `part`, in block b of a panel; `half`: of its first or second 16 inputs.
template <int64_t KIND>
inline vec scale_of(const char* panel, const char* block, int64_t b, int part, int half = 0) {
    if constexpr (!is_super(KIND)) return halves(block + part * 2 * LANES);
    const vec all_of_super = halves(panel + b / SUPER * super_bytes(KIND) + part * 2 * LANES);
    if constexpr (has_minimum(KIND)) return mul(bytes(reinterpret_cast<const uint8_t*>(block) + part * LANES), all_of_super);
    return mul(load(reinterpret_cast<const int8_t*>(block) + half * PANEL + part * LANES), all_of_super);
}
template <int64_t KIND>
inline vec minimum_of(const char* panel, const char* block, int64_t b, int part) {
    if constexpr (base(KIND) == ZERO4) {  // exact: a product of 5 and 11 bits
        const vec zeros = bytes(reinterpret_cast<const uint8_t*>(block) + 2 * PANEL + part * LANES);
        return mul(sub(zero(), zeros), scale_of<KIND>(panel, block, b, part));
    }
    if constexpr (!is_super(KIND)) return halves(block + 2 * PANEL + part * 2 * LANES);
    const vec all_of_super = halves(panel + b / SUPER * super_bytes(KIND) + 2 * PANEL + part * 2 * LANES);
    return mul(bytes(reinterpret_cast<const uint8_t*>(block) + PANEL + part * LANES), all_of_super);
}

// The sums [T, P, PARTS] of T tokens with P panels; a row of `fetch` is a block.
template <int64_t KIND, int T, int P>
void integer_tile(const Tokens& tokens, const char* panels, int64_t in, Fetch fetch, vec* result) {
    constexpr int BITS = code_bits(KIND);
    constexpr bool TWO = has_halves(KIND);  // whether a block has two scales
    constexpr int AT_ONCE = T * P * PARTS <= MAX_TOTALS ? PARTS : 1;
    const int64_t blocks = blocks_of(in), bytes = first_block(KIND, blocks) + blocks * block_bytes(KIND);
    vec sum[T][P][PARTS] = {};
    for (int64_t b = 0; b < blocks; b++) {
        const char* block[P];
        for (int p = 0; p < P; p++) {
            block[p] = panels + p * bytes + first_block(KIND, blocks) + b * block_bytes(KIND);
            const char* next = panels + p * fetch.apart + fetch.at(b);
            for (int64_t line = 0; line < fetch.pace; line += 64) _mm_prefetch(next + line, PACKED_HINT);
        }
        const Step* step = tokens.steps + b * tokens.coded;
        for (int from = 0; from < PARTS; from += AT_ONCE) {
            const int8_t* inputs = tokens.codes + b * tokens.coded * GROUP;
            if (AT_ONCE < PARTS) asm("" : "+r"(inputs));  // loads them again for the second part, not from copies on the stack
            ivec total[T][P][AT_ONCE];
            auto less_zeros = [&](int t, int half) {  // the negated share of the zero point in the sums
                if (has_minimum(KIND) || by_magnitude(KIND)) return all(0);
                if (TWO) return left(all(step[t].less[half]), zero_bits(KIND));
                return all(BITS == 4 ? step[t].less4 : BITS == 5 ? step[t].less5 : step[t].less8);
            };
            auto begin = [&](int half) {
                for (int t = 0; t < T; t++) {
                    const ivec start = in_shorts(BITS) ? all(0) : less_zeros(t, half);
                    for (int p = 0; p < P; p++)
                        for (int n = 0; n < AT_ONCE; n++) total[t][p][n] = start;
                }
            };
            auto add_four = [&](int64_t i, const ivec (&w)[P][AT_ONCE]) {  // inputs from i on
                for (int t = 0; t < T; t++) {
                    const ivec x = four_of(inputs + t * GROUP + i);
                    for (int p = 0; p < P; p++)
                        for (int n = 0; n < AT_ONCE; n++) total[t][p][n] = dot<KIND>(total[t][p][n], w[p][n], x);
                }
            };
            auto add_eight = [&](int64_t i, const ivec (&w)[P][AT_ONCE], int64_t k, const ivec (&v)[P][AT_ONCE]) {
                for (int t = 0; t < T; t++) {
                    const ivec x = four_of(inputs + t * GROUP + i), y = four_of(inputs + t * GROUP + k);
                    for (int p = 0; p < P; p++)
                        for (int n = 0; n < AT_ONCE; n++) {
                            const ivec both = add_shorts(products(w[p][n], x), products(v[p][n], y));
                            total[t][p][n] = add(total[t][p][n], sums_of_shorts(both));
                        }
                }
            };
            auto read_codes = [&](int64_t i, ivec (&codes)[P][AT_ONCE]) {
                for (int p = 0; p < P; p++)
                    for (int n = 0; n < AT_ONCE; n++) {
                        codes[p][n] = four_codes<KIND>(block[p], i, from + n);
                        if constexpr (by_magnitude(KIND)) codes[p][n] = minus_128(codes[p][n]);
                    }
            };
            auto add_codes = [&](int64_t first, int64_t stop) {  // of the inputs from `first` on
                auto add_both = [&](int64_t i, int64_t k) {
                    ivec codes[P][AT_ONCE], others[P][AT_ONCE];
                    read_codes(i, codes);
                    read_codes(k, others);
                    if constexpr (eights_in_shorts(BITS)) {
                        add_eight(i, codes, k, others);
                    } else {
                        add_four(i, codes);
                        add_four(k, others);
                    }
                };
                if constexpr (stored_bits(KIND) == 8) {
                    for (int64_t i = first; i < stop; i += 8) add_both(i, i + 4);
                } else {  // where a block has one scale, fours that share bytes
#pragma GCC unroll 4  // with constant shifts
                    for (int64_t i = first; i < first + GROUP / 2; i += TWO ? 8 : 4) add_both(i, i + (TWO ? 4 : GROUP / 2));
                }
            };
            begin(0);
            if constexpr (TWO) {
                vec half[T][P][AT_ONCE];  // the sums of the first half
                auto scale = [&](int p, int n, int of) {
                    return load(reinterpret_cast<const int8_t*>(block[p]) + of * PANEL + (from + n) * LANES);
                };
                add_codes(0, GROUP / 2);
                for (int t = 0; t < T; t++)
                    for (int p = 0; p < P; p++)
                        for (int n = 0; n < AT_ONCE; n++) half[t][p][n] = mul(floats(total[t][p][n]), scale(p, n, 0));
                begin(1);
                add_codes(GROUP / 2, GROUP);
                for (int p = 0; p < P; p++)
                    for (int n = 0; n < AT_ONCE; n++) {
                        const char* factors = panels + p * bytes + b / SUPER * super_bytes(KIND);
                        const vec shared = halves(factors + (from + n) * 2 * LANES);
                        for (int t = 0; t < T; t++) {
                            const vec exact = fma(floats(total[t][p][n]), scale(p, n, 1), half[t][p][n]);
                            vec& own = sum[t][p][from + n];
                            own = fma(mul(exact, all(step[t].scale)), shared, own);
                        }
                    }
                continue;
            }
            add_codes(0, GROUP);
            for (int p = 0; p < P; p++)
                for (int n = 0; n < AT_ONCE; n++) {
                    const vec scale = scale_of<KIND>(panels + p * bytes, block[p], b, from + n);
                    for (int t = 0; t < T; t++) {
                        ivec& exact = total[t][p][n];
                        if (in_shorts(BITS)) exact = add(less_zeros(t, 0), sums_of_shorts(exact));
                        vec& own = sum[t][p][from + n];
                        own = fma(mul(floats(exact), all(step[t].scale)), scale, own);
                    }
                    if constexpr (has_minimum(KIND)) {
                        const vec minimum = minimum_of<KIND>(panels + p * bytes, block[p], b, from + n);
                        for (int t = 0; t < T; t++) {
                            vec& own = sum[t][p][from + n];
                            own = fma(all(step[t].sum), minimum, own);
                        }
                    }
                }
        }
    }
    std::memcpy(result, sum, sizeof(sum));
}

// Unpack a panel of `in` inputs: its codes are in bytes afterwards.
template <int64_t KIND>
void unpack_panel(const char* panel, int64_t in, char* unpacked) {
    const int64_t blocks = blocks_of(in), first = first_block(KIND, blocks);
    std::memcpy(unpacked, panel, first);
    for (int64_t b = 0; b < blocks; b++) {
        const char* block = panel + first + b * block_bytes(KIND);
        char* to = unpacked + first + b * block_bytes(KIND | IN_BYTES);
        std::memcpy(to, block, header_bytes(KIND));
#pragma GCC unroll 8  // with constant shifts
        for (int64_t i = 0; i < GROUP; i += 4)
            for (int part = 0; part < PARTS; part++)
                store_bits(to + header_bytes(KIND) + i * PANEL + part * 4 * LANES, four_codes<KIND>(block, i, part));
    }
}

// The weights of a panel's 16 outputs for input i, dequantized.
template <int64_t KIND>
inline void load_floats(const char* panel, int64_t i, int64_t in, vec (&w)[PARTS]) {
    const int64_t b = i / GROUP, own = i % GROUP;
    const char* block = panel + first_block(KIND, blocks_of(in)) + b * block_bytes(KIND);
    const bool second = own >= GROUP / 2;
    for (int part = 0; part < PARTS; part++) {
        const ivec four = four_codes<KIND>(block, own / 4 * 4, part);
        const vec code = floats(both(right(four, static_cast<int>(8 * (own % 4))), all(0xff)));
        const vec scale = scale_of<KIND>(panel, block, b, part, second);
        if constexpr (has_minimum(KIND))
            w[part] = fma(code, scale, minimum_of<KIND>(panel, block, b, part));
        else
            w[part] = mul(sub(code, all(static_cast<float>(1 << zero_bits(KIND)))), scale);
    }
}

// The same sums without quantizing inputs. Layers are tried with it at load, where a code that rounds differently would
// hide real errors.
template <int64_t KIND>
void float_tile(const Tokens& tokens, const char* panels, int64_t in, Fetch, vec* result) {
    for (int64_t t = 0; t < tokens.count * PARTS; t++) result[t] = zero();
    for (int64_t i = 0; i < in; i++) {
        vec w[PARTS];
        load_floats<KIND>(panels, i, in, w);
        for (int64_t t = 0; t < tokens.count; t++)
            for (int part = 0; part < PARTS; part++)
                result[t * PARTS + part] = fma(all(tokens.x[t * tokens.ld + i]), w[part], result[t * PARTS + part]);
    }
}

// The steps between codes that are tried for a block, as shares of its value of the greatest magnitude. GGML's Q4_0 takes the
// first. The best of these five leaves 0.7 of its squared error in weights that had five bits.
constexpr float NARROW_STEPS[] = {-1 / 8.0f, -1 / 8.5f, -1 / 7.5f, -1 / 7.0f, 1 / 7.0f};

// Quantize a panel of `in` inputs to SIGNED4, each block by the step with the least squared error.
template <int64_t KIND>
void narrow_panel(const char* panel, int64_t in, char* narrow) {
    for (int64_t b = 0; b < blocks_of(in); b++) {
        char* block = narrow + b * block_bytes(SIGNED4);
        std::memset(block, 0, block_bytes(SIGNED4));
        vec values[GROUP][PARTS];
        for (int64_t i = 0; i < GROUP; i++) load_floats<KIND>(panel, b * GROUP + i, in, values[i]);
        for (int part = 0; part < PARTS; part++) {
            vec most = zero(), least = zero();
            for (auto& value : values) most = larger(most, value[part]), least = smaller(least, value[part]);
            float highest[LANES], lowest[LANES], step[LANES], inverse[LANES], missed[LANES], chosen[LANES] = {}, fewest[LANES];
            store(highest, most), store(lowest, least);
            uint16_t half[LANES];
            auto code_of = [](vec value, vec factor) { return smaller(larger(nearest(mul(value, factor)), all(-8.0f)), all(7.0f)); };
            std::fill_n(fewest, LANES, std::numeric_limits<float>::infinity());
            for (const float share : NARROW_STEPS) {
                for (int lane = 0; lane < LANES; lane++) {
                    const float top = highest[lane] > -lowest[lane] ? highest[lane] : lowest[lane];
                    half[lane] = _cvtss_sh(top * share, _MM_FROUND_TO_NEAREST_INT);
                    step[lane] = _cvtsh_ss(half[lane]), inverse[lane] = half[lane] & 0x7fff ? 1 / step[lane] : 0;
                }
                vec error = zero();
                for (auto& value : values) {
                    const vec apart = sub(value[part], mul(code_of(value[part], load(inverse)), load(step)));
                    error = fma(apart, apart, error);
                }
                store(missed, error);
                for (int lane = 0; lane < LANES; lane++) {
                    if (!(missed[lane] < fewest[lane])) continue;
                    fewest[lane] = missed[lane], chosen[lane] = inverse[lane];
                    std::memcpy(block + 2 * (part * LANES + lane), half + lane, 2);
                }
            }
            for (int64_t i = 0; i < GROUP; i++) {
                float codes[LANES];
                store(codes, add(code_of(values[i][part], load(chosen)), all(8.0f)));
                char* to = block + header_bytes(SIGNED4) + i % (GROUP / 2) / 4 * 4 * PANEL + i % 4;
                for (int lane = 0; lane < LANES; lane++) {
                    const int code = static_cast<int>(codes[lane]);
                    to[4 * (part * LANES + lane)] |= static_cast<char>(i < GROUP / 2 ? code : code << 4);
                }
            }
        }
    }
}

// Row `output` of a packed weight as floats [in].
template <int64_t KIND>
void load_row(const char* weight, int64_t output, int64_t in, float* row) {
    const int64_t blocks = blocks_of(in);
    const char* panel = weight + output / PANEL * (first_block(KIND, blocks) + blocks * block_bytes(KIND));
    for (int64_t i = 0; i < in; i++) {
        vec w[PARTS];
        float lanes[PANEL];
        load_floats<KIND>(panel, i, in, w);
        for (int part = 0; part < PARTS; part++) store(lanes + part * LANES, w[part]);
        row[i] = lanes[output % PANEL];
    }
}

// Call `work` with a packed kind, as a file has it, as a compile-time constant.
template <class Work>
auto with_kind(int64_t kind, const Work& work) {
    switch (kind) {
        case SIGNED8: return work(std::integral_constant<int64_t, SIGNED8>());
        case SIGNED4: return work(std::integral_constant<int64_t, SIGNED4>());
        case MINIMUM4: return work(std::integral_constant<int64_t, MINIMUM4>());
        case ZERO4: return work(std::integral_constant<int64_t, ZERO4>());
        case SIGNED5: return work(std::integral_constant<int64_t, SIGNED5>());
        case MINIMUM5: return work(std::integral_constant<int64_t, MINIMUM5>());
        case SUPER5: return work(std::integral_constant<int64_t, SUPER5>());
        case SUPER4: return work(std::integral_constant<int64_t, SUPER4>());
        case HALVES8: return work(std::integral_constant<int64_t, HALVES8>());
        default: return work(std::integral_constant<int64_t, HALVES6>());
    }
}

inline void load_row(int64_t kind, const char* weight, int64_t output, int64_t in, float* row) {
    with_kind(kind, [&](auto known) { load_row<known.value>(weight, output, in, row); });
}

}  // namespace eyas
