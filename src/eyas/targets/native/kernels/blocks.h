// GGML's quantized blocks, as GGUF files hold them row by row, to panels of packed weights (weight.h). No number changes.
//
// A row is a sequence of units: single blocks of 32 inputs, or super-blocks of eight. A unit is read into the codes of its
// blocks, a byte each, and the numbers of its blocks as the panel holds them. The names are GGML's, whose `gguf` package
// dequantizes the same blocks: tests compare the two.
#pragma once

#include <cstdint>
#include <cstring>

#include "region.h"
#include "weight.h"

namespace eyas {

struct Unit {
    uint8_t codes[SUPER][GROUP];
    uint8_t numbers[SUPER][4];  // of each block: fp16 scale and minimum; or two bytes
    uint16_t shared[2];         // of a super-block: fp16 factors of scales, and of minimums
};

inline void copy_half(const uint8_t* from, uint8_t* to) { std::memcpy(to, from, 2); }

// 16 bytes with the codes of 32 inputs: the lower halves belong to the first 16.
inline void read_nibbles(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < 16; i++) codes[i] = from[i] & 15, codes[i + 16] = from[i] >> 4;
}

// Adds 16 to the code of each input whose bit is set in four bytes.
inline void add_fifth_bits(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < GROUP; i++) codes[i] |= static_cast<uint8_t>((from[i / 8] >> i % 8 & 1) << 4);
}

// 12 bytes with eight scales and eight minimums of 6 bits.
inline void read_six_bits(const uint8_t* from, uint8_t (*numbers)[4]) {
    for (int i = 0; i < 4; i++) {
        numbers[i][0] = from[i] & 63, numbers[i][1] = from[i + 4] & 63;
        numbers[i + 4][0] = static_cast<uint8_t>((from[i + 8] & 15) | from[i] >> 6 << 4);
        numbers[i + 4][1] = static_cast<uint8_t>(from[i + 8] >> 4 | from[i + 4] >> 6 << 4);
    }
}

// Two fp16 factors; GGML subtracts minimums, so theirs is negated.
inline void read_factors(const uint8_t* from, uint16_t* shared) {
    std::memcpy(shared, from, 4);
    shared[1] ^= 0x8000;
}

constexpr int8_t NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct Q4_0 {
    static constexpr int64_t TYPE = 2, BYTES = 18, KIND = SIGNED4;
    static void read(const uint8_t* at, Unit& unit) { copy_half(at, unit.numbers[0]), read_nibbles(at + 2, unit.codes[0]); }
};
struct Q4_1 {
    static constexpr int64_t TYPE = 3, BYTES = 20, KIND = MINIMUM4;
    static void read(const uint8_t* at, Unit& unit) {
        std::memcpy(unit.numbers[0], at, 4);
        read_nibbles(at + 4, unit.codes[0]);
    }
};
struct Q5_0 {
    static constexpr int64_t TYPE = 6, BYTES = 22, KIND = SIGNED5;
    static void read(const uint8_t* at, Unit& unit) {
        copy_half(at, unit.numbers[0]), read_nibbles(at + 6, unit.codes[0]), add_fifth_bits(at + 2, unit.codes[0]);
    }
};
struct Q5_1 {
    static constexpr int64_t TYPE = 7, BYTES = 24, KIND = MINIMUM5;
    static void read(const uint8_t* at, Unit& unit) {
        std::memcpy(unit.numbers[0], at, 4);
        read_nibbles(at + 8, unit.codes[0]), add_fifth_bits(at + 4, unit.codes[0]);
    }
};
struct Q8_0 {
    static constexpr int64_t TYPE = 8, BYTES = 34, KIND = SIGNED8;
    static void read(const uint8_t* at, Unit& unit) {
        copy_half(at, unit.numbers[0]);
        for (int i = 0; i < GROUP; i++) unit.codes[0][i] = at[2 + i] ^ 128;
    }
};
struct IQ4_NL {
    static constexpr int64_t TYPE = 20, BYTES = 18, KIND = SIGNED8;
    static void read(const uint8_t* at, Unit& unit) {
        copy_half(at, unit.numbers[0]), read_nibbles(at + 2, unit.codes[0]);
        for (auto& code : unit.codes[0]) code = static_cast<uint8_t>(NONLINEAR[code] + 128);
    }
};

// Twice the numbers of 4-bit floats (E2M1), and half a power of two by its exponent. Powers that fp16 hasn't aren't packed,
// except for blocks of zeros, which may have any.
constexpr int8_t FLOATS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct MXFP4 {
    static constexpr int64_t TYPE = 39, BYTES = 17, KIND = SIGNED8;
    static void read(const uint8_t* at, Unit& unit) {
        const int power = at[0] - 128;
        uint16_t scale = 0;
        if (power >= -14 && power <= 15)
            scale = static_cast<uint16_t>((power + 15) << 10);
        else if (power >= -24 && power < -14)
            scale = static_cast<uint16_t>(1 << (power + 24));
        std::memcpy(unit.numbers[0], &scale, 2);
        read_nibbles(at + 1, unit.codes[0]);
        for (auto& code : unit.codes[0]) code = static_cast<uint8_t>(FLOATS[code] + 128);
    }
};

// In super-blocks of 256 inputs, 32 or 64 bytes hold codes of inputs that are 32 apart: bits 0 and 1 those of the first 32.
struct Q3_K {
    static constexpr int64_t TYPE = 11, BYTES = 110, KIND = HALVES6;
    static void read(const uint8_t* at, Unit& unit) {
        const uint8_t *third = at, *low = at + 32, *scales = at + 96;
        for (int block = 0; block < SUPER; block++) {
            for (int i = 0; i < GROUP; i++) {
                const int two = low[block / 4 * 32 + i] >> 2 * (block % 4) & 3, four = third[i] >> block & 1;
                unit.codes[block][i] = static_cast<uint8_t>(two + 4 * four + 32 - 4);
            }
            for (int half = 0; half < 2; half++) {
                const int n = 2 * block + half, four = scales[n % 8] >> n / 8 * 4 & 15, two = scales[8 + n % 4] >> n / 4 * 2 & 3;
                unit.numbers[block][half] = static_cast<uint8_t>((four | two << 4) - 32);
            }
        }
        std::memcpy(unit.shared, at + 108, 2);
    }
};
struct Q4_K {
    static constexpr int64_t TYPE = 12, BYTES = 144, KIND = SUPER4;
    static void read(const uint8_t* at, Unit& unit) {
        read_factors(at, unit.shared), read_six_bits(at + 4, unit.numbers);
        for (int block = 0; block < SUPER; block++)
            for (int i = 0; i < GROUP; i++) unit.codes[block][i] = at[16 + block / 2 * 32 + i] >> block % 2 * 4 & 15;
    }
};
struct Q5_K {
    static constexpr int64_t TYPE = 13, BYTES = 176, KIND = SUPER5;
    static void read(const uint8_t* at, Unit& unit) {
        read_factors(at, unit.shared), read_six_bits(at + 4, unit.numbers);
        for (int block = 0; block < SUPER; block++)
            for (int i = 0; i < GROUP; i++) {
                const int four = at[48 + block / 2 * 32 + i] >> block % 2 * 4 & 15, fifth = at[16 + i] >> block & 1;
                unit.codes[block][i] = static_cast<uint8_t>(four | fifth << 4);
            }
    }
};
struct Q6_K {
    static constexpr int64_t TYPE = 14, BYTES = 210, KIND = HALVES6;
    static void read(const uint8_t* at, Unit& unit) {
        for (int block = 0; block < SUPER; block++) {
            const uint8_t *low = at + block / 4 * 64 + block % 2 * 32, *high = at + 128 + block / 4 * 32;
            const int shift = block % 4 / 2 * 4, above = 2 * (block % 4);
            for (int i = 0; i < GROUP; i++) {
                const int four = low[i] >> shift & 15, two = high[i] >> above & 3;
                unit.codes[block][i] = static_cast<uint8_t>(four | two << 4);
            }
            std::memcpy(unit.numbers[block], at + 192 + 2 * block, 2);
        }
        std::memcpy(unit.shared, at + 208, 2);
    }
};
struct IQ4_XS {
    static constexpr int64_t TYPE = 23, BYTES = 136, KIND = HALVES8;
    static void read(const uint8_t* at, Unit& unit) {
        std::memcpy(unit.shared, at, 2);
        for (int block = 0; block < SUPER; block++) {
            const int four = at[4 + block / 2] >> block % 2 * 4 & 15, two = at[2 + block / 4] >> block % 4 * 2 & 3;
            unit.numbers[block][0] = unit.numbers[block][1] = static_cast<uint8_t>((four | two << 4) - 32);
            read_nibbles(at + 8 + 16 * block, unit.codes[block]);
            for (auto& code : unit.codes[block]) code = static_cast<uint8_t>(NONLINEAR[code] + 128);
        }
    }
};

// The codes of one output's block, among those of the other outputs of its panel (weight.h).
template <int64_t KIND>
void store_block(const uint8_t* own, uint8_t* to) {
    constexpr int BITS = code_bits(KIND);
    constexpr int64_t NEXT = PANEL * 4, FOURS = GROUP / 4, LOW = 0x0f0f0f0f;
    uint32_t four[FOURS];
    std::memcpy(four, own, GROUP);
    auto store = [&](int64_t at, uint32_t word) { std::memcpy(to + at * NEXT, &word, 4); };
    if constexpr (BITS == 8) {
        for (int64_t v = 0; v < FOURS; v++) store(v, four[v]);
    } else {
        for (int64_t v = 0; v < FOURS / 2; v++) store(v, (four[v] & LOW) | (four[v + FOURS / 2] & LOW) << 4);
        uint32_t upper[2] = {};
        for (int64_t v = 0; v < FOURS; v++) upper[upper_vector(BITS, v)] |= (four[v] >> 4 & LOW) << upper_shift(BITS, v);
        for (int64_t n = 0; n < (BITS - 4); n++) store(FOURS / 2 + n, upper[n]);
    }
}

// One panel of the 16 rows `rows`; missing ones are null, and their weights 0.
template <class Type>
void pack_panel(const uint8_t* const* rows, int64_t blocks, uint8_t* panel) {
    constexpr int64_t KIND = Type::KIND, SPAN = is_super(KIND) ? SUPER : 1, SIZE = is_super(KIND) ? 1 : 2;
    constexpr int64_t NUMBERS = header_bytes(KIND) / (PANEL * SIZE), FACTORS = super_bytes(KIND) / (2 * PANEL);
    uint8_t* all = panel + first_block(KIND, blocks);
    for (int64_t first = 0; first < blocks; first += SPAN)
        for (int64_t lane = 0; lane < PANEL; lane++) {
            Unit unit{};
            if (rows[lane] != nullptr) Type::read(rows[lane] + first / SPAN * Type::BYTES, unit);
            for (int64_t n = 0; n < FACTORS; n++)
                std::memcpy(panel + first / SPAN * super_bytes(KIND) + (n * PANEL + lane) * 2, unit.shared + n, 2);
            for (int64_t block = 0; block < SPAN; block++) {
                uint8_t* at = all + (first + block) * block_bytes(KIND);
                for (int64_t n = 0; n < NUMBERS; n++)
                    std::memcpy(at + (n * PANEL + lane) * SIZE, unit.numbers[block] + n * SIZE, SIZE);
                store_block<KIND>(unit.codes[block], at + header_bytes(KIND) + lane * 4);  // those of the next lane follow
            }
        }
}

// Packs `out` rows of `blocks` blocks, given their addresses; whether there is such a type.
template <class... Types>
bool pack_blocks(int64_t type, const uint8_t* const* rows, int64_t out, int64_t blocks, uint8_t* packed, int64_t threads) {
    auto pack = [&](auto of) {
        using Type = decltype(of);
        constexpr int64_t KIND = Type::KIND;
        const int64_t size = first_block(KIND, blocks) + blocks * block_bytes(KIND), count = (out + PANEL - 1) / PANEL;
        Region(threads).share(count, 1, [&](int64_t panel, int64_t) {
            const uint8_t* own[PANEL] = {};
            for (int64_t lane = 0; lane < std::min(int64_t{PANEL}, out - panel * PANEL); lane++) own[lane] = rows[panel * PANEL + lane];
            pack_panel<Type>(own, blocks, packed + panel * size);
        });
        return true;
    };
    return ((type == Types::TYPE && pack(Types{})) || ...);
}

}  // namespace eyas
