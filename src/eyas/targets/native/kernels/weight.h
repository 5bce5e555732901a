// A linear layer's weight as the kernels read it.
//
// A weight [out, in] is stored in panels of 16 outputs. A panel holds, for each input in turn, the 16 weights that it is
// multiplied by, so a product reads memory once and in order:
//
//     panel 0: w[0..15][0]  w[0..15][1]  ...  w[0..15][in-1]     panel 1: w[16..31][0]  ...
//
// With vectors of 16, bf16 weights are in pairs of inputs: a 32-bit word holds one output's weights for inputs i and i+1.
// With vectors of 8, a word holds the weights of outputs o and o+8 for one input.
//
// Packed weights are multiplied in integers (integer.h). A panel's blocks of 32 inputs follow each other, the last one padded
// with zeros. A block holds the 16 outputs' scales, their minimum weights if the kind has them, and codes: four adjacent
// inputs of one output, then of the next. A byte of 4-bit codes has input i < 16 in its low half and i + 16 in its high half.
// Codes of 5 and 6 bits have their lower four bits like that. Behind them follow the upper bits, in one or two vectors of a
// byte for each output and each of four adjacent inputs: bit `upper_shift` of vector `upper_vector` has those of the four
// inputs from 4 v on.
// Scales and minimum weights are fp16, or in super-blocks (GGML's k-quants) small integers, one or two per output, times
// fp16 factors that eight blocks share, at the beginning of the panel. Blocks are the same for all vector sizes. AWQ's and
// GPTQ's blocks (ZERO) have a zero point, a byte, in place of a minimum weight, which is minus that times the scale.
#pragma once

#include <type_traits>

#include "abi.h"
#include "vector.h"

namespace eyas {

constexpr int PARTS = PANEL / LANES;  // vectors that hold a panel's outputs

constexpr bool is_packed(int64_t kind) { return kind > BFLOAT16; }

// A packed kind with this bit has its codes in bytes, four adjacent inputs of all 16 outputs after another: a panel is unpacked
// like that once if several groups of tokens are multiplied by it.
constexpr int64_t IN_BYTES = 16;
constexpr int64_t base(int64_t kind) { return kind % IN_BYTES; }

constexpr int code_bits(int64_t kind) {
    kind = base(kind);
    if (kind == SIGNED5 || kind == MINIMUM5 || kind == SUPER5) return 5;
    return (kind >= SIGNED4 && kind <= ZERO4) || kind == SUPER4 ? 4 : kind == HALVES6 ? 6 : 8;
}
constexpr int stored_bits(int64_t kind) { return kind < IN_BYTES ? code_bits(kind) : 8; }
constexpr bool is_super(int64_t kind) { return base(kind) >= SUPER5; }
constexpr bool has_halves(int64_t kind) { return base(kind) == HALVES8 || base(kind) == HALVES6; }
constexpr bool has_minimum(int64_t kind) {
    kind = base(kind);
    return kind == MINIMUM4 || kind == ZERO4 || kind == MINIMUM5 || kind == SUPER5 || kind == SUPER4;
}
constexpr int zero_bits(int64_t kind) { return code_bits(kind) - 1; }  // of signed codes: the zero point is 2 to this power
constexpr int64_t header_bytes(int64_t kind) {
    return base(kind) == ZERO4 ? 3 * PANEL : (has_minimum(kind) || is_super(kind) ? 2 : 1) * PANEL * (is_super(kind) ? 1 : 2);
}
constexpr int upper_shift(int bits, int64_t v) { return static_cast<int>(bits == 5 ? (v + 4) % 8 : (v % 4 * 2 + 4) % 8); }
constexpr int64_t upper_vector(int bits, int64_t v) { return bits == 5 ? 0 : v / 4; }
constexpr int64_t block_bytes(int64_t kind) { return header_bytes(kind) + GROUP * PANEL * stored_bits(kind) / 8; }
constexpr int64_t blocks_of(int64_t in) { return (in + GROUP - 1) / GROUP; }
constexpr int64_t super_bytes(int64_t kind) { return !is_super(kind) ? 0 : has_minimum(kind) ? 4 * PANEL : 2 * PANEL; }
constexpr int64_t first_block(int64_t kind, int64_t blocks) { return (blocks + SUPER - 1) / SUPER * super_bytes(kind); }

constexpr int64_t bytes_of(int64_t kind) { return kind == FLOAT32 ? 4 : 2; }

// Inputs whose weights are read together: 2 = in words of pairs, 1 = one by one.
constexpr int64_t step_of(int64_t kind) { return LANES == 16 && kind == BFLOAT16 ? 2 : 1; }

#if defined(__AVX512BF16__)
constexpr bool PAIRS = LANES == 16;  // whether there is `vdpbf16ps`
#else
constexpr bool PAIRS = false;
#endif

inline int64_t panels(const Linear& linear) { return (linear.out + PANEL - 1) / PANEL; }

// Contiguous bytes of one input's weights, or of a packed block; and of a panel.
inline int64_t row_bytes(const Linear& linear) {
    return is_packed(linear.kind) ? block_bytes(linear.kind) : PANEL * bytes_of(linear.kind);
}
constexpr int64_t panel_bytes(int64_t kind, int64_t in) {
    const int64_t blocks = blocks_of(in);
    return is_packed(kind) ? first_block(kind, blocks) + blocks * block_bytes(kind) : in * PANEL * bytes_of(kind);
}
inline int64_t panel_bytes(const Linear& linear) { return panel_bytes(linear.kind, linear.in); }

// The number of inputs that belong to a pair.
constexpr int64_t in_pairs(int64_t in) { return in - in % 2; }

// The inputs of a product: `count` tokens x [count, ld], perhaps also in pairs of bf16 [count, in_pairs(in)], or as codes
// [blocks, coded, GROUP] with their steps [blocks, coded] (integer.h), of which the first `count` tokens are multiplied: a
// block's codes of all tokens lie together, so that a tile finds them at constant distances from one address.
struct Tokens {
    const float* x;
    int64_t ld, count;
    const uint16_t* pairs = nullptr;
    const int8_t* codes = nullptr;
    const struct Step* steps = nullptr;
    int64_t coded = 0;
};

template <int64_t KIND>
inline void load_panel(const char* at, vec (&w)[PARTS]) {
    if constexpr (KIND == FLOAT32) {
        for (int part = 0; part < PARTS; part++) w[part] = load(reinterpret_cast<const float*>(at) + part * LANES);
    } else if constexpr (PARTS == 1) {
        w[0] = load(reinterpret_cast<const uint16_t*>(at));
    } else {
        __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        w[0] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
        w[PARTS - 1] = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
    }
}

#ifdef __AVX512F__
// The first and the second value of the pair in each word, as floats.
inline vec first_of(__m512i words) { return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)); }
inline vec second_of(__m512i words) {
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

#endif

// The index of the weight of output `lane` and input i among a panel's values.
inline int64_t place(int64_t kind, int lane, int64_t i, int64_t in) {
    if (PARTS > 1 && kind == BFLOAT16) return i * PANEL + (lane < LANES ? 2 * lane : 2 * (lane - LANES) + 1);
    const int64_t step = step_of(kind), first = i / step * step;
    return step == 1 || first + step > in ? i * PANEL + lane : first * PANEL + 2 * lane + i % 2;
}

// The weights of the first LANES outputs of a bf16 panel for input i, looked up one by one.
inline vec weight_of(const char* panel, int64_t i, int64_t in) {
    float found[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t bits = 0;
        std::memcpy(reinterpret_cast<char*>(&bits) + 2, panel + place(BFLOAT16, lane, i, in) * 2, 2);
        std::memcpy(found + lane, &bits, 4);
    }
    return load(found);
}

using Hint = decltype(_MM_HINT_T0);

// How many bytes ahead weights are prefetched (packed ones further ahead, as they are processed faster), and into which
// caches. Caches lose every weight before it is read again. On AMD's cores, non-temporal prefetches leave the last-level
// cache to data that is read again: the drafter, keys and values, and the interpreter.
constexpr int64_t PACKED_AHEAD = 8192;  // measured on AMD's Zen 4 and 5
#if defined(EYAS_AMD) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
constexpr int64_t ahead(int64_t tokens) { return tokens <= 4 ? 2048 : 4096; }
constexpr Hint HINT = _MM_HINT_NTA, PACKED_HINT = _MM_HINT_NTA;
#ifdef __AVXVNNI__
constexpr bool ZEN5 = true;
#else
constexpr bool ZEN5 = false;
#endif
#else
constexpr int64_t ahead(int64_t) { return 4096; }
constexpr Hint HINT = _MM_HINT_T0, PACKED_HINT = _MM_HINT_T1;
constexpr bool ZEN5 = false;
#endif

// Where weights are prefetched while others are processed: `distance` bytes ahead, `pace` bytes for each row i. An offset
// past `end`, the end of a panel, is `skip` bytes further on, in the panel that is read next. While several panels are processed
// together, what is fetched for each lies `apart` from that of the one before.
struct Fetch {
    int64_t distance, pace, end, skip, apart;

    int64_t at(int64_t i) const {
        const int64_t offset = distance + i * pace;
        return offset < end ? offset : offset + skip;
    }
};

}  // namespace eyas
