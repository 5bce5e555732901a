// Products of few tokens with a packed weight.
//
// A weight [out, in] lies in panels of 16 outputs. A panel holds, for each input in turn, the 16 weights that it is
// multiplied by, so a product reads memory once and in order:
//
//     panel 0: w[0..15][0]  w[0..15][1]  ...  w[0..15][in-1]     panel 1: w[16..31][0]  ...
//
// In bf16 two weights share a 32-bit word, so that a shift and a mask widen them: with vectors of 8 those of outputs o
// and o+8, with vectors of 16 those of inputs i and i+1.
//
// Every output is one chain of fused multiply-adds over the inputs in their order, in float32, whatever the number of
// tokens, panels and threads. So a token's result does not depend on what else is in the pass.
//
// Shapes: T tokens, `in` features of a token, `out` outputs.
#pragma once

#include <algorithm>

#include "vector.h"

namespace eyas {

constexpr int PANEL = 16;
constexpr int AHEAD = 4096;                          // bytes that a panel is fetched before it is read
constexpr int PARTS = PANEL / LANES;                 // vectors that hold a panel's outputs
constexpr int MOST = LANES == 16 ? 12 : 6;           // tokens whose sums fit into the registers
constexpr int together(int tokens) {                 // panels that are worked on at once
    return LANES == 16 ? (tokens <= 4 ? 4 : tokens <= 8 ? 3 : 2) : (tokens == 1 ? 4 : tokens == 2 ? 2 : 1);
}

enum Kind : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

constexpr int64_t bytes_of(int64_t kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1; }

// Also known to native/library.py, field by field.
struct Linear {
    const char* weight;   // the first panel; null = there is no such linear
    const float* bias;    // [out] or null
    const float* scale;   // [out] of int8 weights, else null
    int64_t out, in, kind;
};

inline int64_t panels(const Linear& linear) { return (linear.out + PANEL - 1) / PANEL; }

template <int64_t KIND>
inline void load_panel(const char* at, vec (&w)[PARTS]) {
    if constexpr (KIND == FLOAT32) {
        for (int part = 0; part < PARTS; part++) w[part] = load(reinterpret_cast<const float*>(at) + part * LANES);
    } else if constexpr (KIND == INT8) {
        for (int part = 0; part < PARTS; part++) w[part] = load(reinterpret_cast<const int8_t*>(at) + part * LANES);
    } else if constexpr (PARTS == 1) {
        w[0] = load(reinterpret_cast<const uint16_t*>(at));
    } else {
        __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        w[0] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
        w[PARTS - 1] = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
    }
}

// Where the weight of output `lane` and input i lies among a panel's values.
inline int64_t place(int64_t kind, int lane, int64_t i, int64_t in) {
    if (kind != BFLOAT16) return i * PANEL + lane;
    if (PARTS > 1) return i * PANEL + (lane < LANES ? 2 * lane : 2 * (lane - LANES) + 1);
    return i / 2 * 2 < in - in % 2 ? i / 2 * 2 * PANEL + 2 * lane + i % 2 : i * PANEL + lane;
}

// Where weights are fetched from memory while others are worked on: `distance` bytes beyond, `pace` bytes for each input.
struct Fetch {
    int64_t distance, pace;
};

// The sums [T, P, PARTS] of T tokens x [T, ldx] with P panels.
template <int64_t KIND, int T, int P>
void tile(const float* x, int64_t ldx, const char* panels, int64_t in, Fetch fetch, vec* result) {
    constexpr int64_t step = PANEL * bytes_of(KIND);
    const char* panel[P];
    for (int p = 0; p < P; p++) panel[p] = panels + p * in * step;
    vec sum[T][P][PARTS] = {};  // local, so that it can stay in registers
    auto add = [&](int64_t i, const vec (&w)[P][PARTS]) {
        for (int t = 0; t < T; t++) {
            vec factor = all(x[t * ldx + i]);
            for (int p = 0; p < P; p++)
                for (int part = 0; part < PARTS; part++) sum[t][p][part] = fma(factor, w[p][part], sum[t][p][part]);
        }
    };
    int64_t i = 0;
#ifdef __AVX512F__
    if constexpr (KIND == BFLOAT16)
        for (; i + 1 < in; i += 2) {
            vec even[P][PARTS], odd[P][PARTS];
            for (int p = 0; p < P; p++) {
                __m512i both = _mm512_loadu_si512(panel[p] + i * step);
                even[p][0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
                odd[p][0] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
                _mm_prefetch(panel[p] + fetch.distance + i * fetch.pace, _MM_HINT_T0);
            }
            add(i, even), add(i + 1, odd);
        }
#endif
    for (; i < in; i++) {
        vec w[P][PARTS];
        for (int p = 0; p < P; p++) {
            load_panel<KIND>(panel[p] + i * step, w[p]);
            _mm_prefetch(panel[p] + fetch.distance + i * fetch.pace, _MM_HINT_T0);
        }
        add(i, w);
    }
    std::memcpy(result, sum, sizeof(sum));
}

using Tile = void (*)(const float*, int64_t, const char*, int64_t, Fetch, vec*);

// The tile of so many tokens and panels: as many as go together, one, or two of three. They are compiled once for all
// that is done with their sums.
template <int64_t KIND, int T = MOST>
Tile tile_of(int64_t tokens, int64_t panels) {
    if constexpr (T > 1)
        if (tokens < T) return tile_of<KIND, T - 1>(tokens, panels);
    if constexpr (together(T) == 3)
        if (panels == 2) return tile<KIND, T, 2>;
    return panels == 1 ? tile<KIND, T, 1> : tile<KIND, T, together(T)>;
}

inline Tile tile_of(int64_t kind, int64_t tokens, int64_t panels) {
    return kind == FLOAT32    ? tile_of<FLOAT32>(tokens, panels)
           : kind == BFLOAT16 ? tile_of<BFLOAT16>(tokens, panels)
                              : tile_of<INT8>(tokens, panels);
}

// Tokens are worked on in so many groups of nearly equal size.
inline int64_t groups_of(int64_t tokens) { return (tokens + MOST - 1) / MOST; }

// Panels that a thread takes at once.
inline int64_t piece_of(int64_t tokens) {
    const int64_t groups = groups_of(tokens);
    return together(static_cast<int>((tokens + groups - 1) / groups)) == 3 ? 6 : 4;
}

// Sums with their scale and bias, the model's own rounding included.
inline void finish(const Linear& linear, int64_t output, bool bf16, vec (&sum)[PARTS]) {
    float tail[PANEL];
    auto of_outputs = [&](const float* values, int part) {
        if (output + PANEL <= linear.out) return load(values + output + part * LANES);
        for (int lane = 0; lane < PANEL; lane++) tail[lane] = output + lane < linear.out ? values[output + lane] : 0;
        return load(tail + part * LANES);
    };
    for (int part = 0; part < PARTS; part++) {
        if (linear.scale) sum[part] = mul(sum[part], of_outputs(linear.scale, part));
        if (linear.bias) sum[part] = add(sum[part], of_outputs(linear.bias, part));
        if (bf16) sum[part] = rounded(sum[part]);
    }
}

// Multiply x [tokens, ldx] by panels [first, stop); `emit(token, output, sum)` gets 16 outputs at a time.
// All tokens go, in groups, through a few panels before the next few, which then come from the cache.
template <class Emit>
void multiply(const Linear& linear, const float* x, int64_t ldx, int64_t tokens, int64_t first, int64_t stop,
              bool bf16, const Emit& emit) {
    const int64_t row = PANEL * bytes_of(linear.kind), groups = groups_of(tokens);
    const int64_t at_once = together(static_cast<int>((tokens + groups - 1) / groups));  // with the largest group
    const int64_t stride = groups > 1 ? at_once : stop - first;
    vec sums[MOST * together(MOST) * PARTS];
    for (; first < stop; first += stride)
        for (int64_t index = 0; index < groups; index++) {
            const int64_t last = std::min(first + stride, stop), token = tokens * index / groups;
            const int64_t count = tokens * (index + 1) / groups - token;
            const int64_t most = std::min<int64_t>(together(static_cast<int>(count)), at_once);
            for (int64_t panel = first, step; panel < last; panel += step) {
                const int64_t left = last - panel;
                step = left >= most ? most : most == 3 && left == 2 ? 2 : 1;
                // tokens in several groups: each of them fetches its part of the panels that come next
                Fetch fetch{AHEAD, row};
                if (groups > 1) fetch = {(step * groups + index) * linear.in * row / groups, row / groups};
                tile_of(linear.kind, count, step)(x + token * ldx, ldx, linear.weight + panel * linear.in * row,
                                                  linear.in, fetch, sums);
                vec* at = sums;
                for (int64_t t = token; t < token + count; t++)
                    for (int64_t p = panel; p < panel + step; p++, at += PARTS) {
                        vec sum[PARTS];
                        std::memcpy(sum, at, sizeof(sum));
                        finish(linear, p * PANEL, bf16, sum);
                        emit(t, p * PANEL, sum);
                    }
            }
        }
}

// Store 16 outputs of a row that has `out` of them.
template <class T>
inline void put(T* row, int64_t output, int64_t out, const vec (&values)[PARTS]) {
    if (output + PANEL <= out) {
        for (int part = 0; part < PARTS; part++) store(row + output + part * LANES, values[part]);
        return;
    }
    T tail[PANEL];
    for (int part = 0; part < PARTS; part++) store(tail + part * LANES, values[part]);
    std::memcpy(row + output, tail, (out - output) * sizeof(T));
}

}  // namespace eyas
