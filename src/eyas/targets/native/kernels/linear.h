// Products of few tokens with a packed weight.
//
// A weight [out, in] lies in panels of 16 outputs. A panel holds, for each input in turn, the 16 weights that it is
// multiplied by, so a product reads memory once and in order:
//
//     panel 0: w[0..15][0]  w[0..15][1]  ...  w[0..15][in-1]     panel 1: w[16..31][0]  ...
//
// (bf16 with vectors of 8: pairs w[o], w[o+8] share a 32-bit word, which is widened by a shift and a mask.)
//
// Every output is one chain of fused multiply-adds over the inputs in their order, in float32, whatever the number of
// tokens, panels and threads. So a token's result does not depend on what else is in the pass.
//
// Shapes: T tokens, `in` features of a token, `out` outputs.
#pragma once

#include <type_traits>

#include "vector.h"

namespace eyas {

constexpr int PANEL = 16;
constexpr int AHEAD = 4096;                          // bytes that a panel is fetched before it is read
constexpr int PARTS = PANEL / LANES;                 // vectors that hold a panel's outputs
constexpr int MOST = LANES == 16 ? 12 : 6;           // tokens whose sums fit into the registers
constexpr int together(int tokens) {                 // panels that are worked on at once
    return LANES == 16 ? (tokens <= 4 ? 4 : 2) : (tokens == 1 ? 4 : tokens == 2 ? 2 : 1);
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

// Where output `lane` of a panel lies among its 16 values.
inline int place(int64_t kind, int lane) {
    if (kind != BFLOAT16 || PARTS == 1) return lane;
    return lane < LANES ? 2 * lane : 2 * (lane - LANES) + 1;
}

// Where weights are fetched from memory while others are worked on: `distance` bytes beyond, `pace` bytes for each input.
struct Fetch {
    int64_t distance, pace;
};

// The sums of T tokens x [T, ldx] with P panels.
template <int64_t KIND, int T, int P>
inline __attribute__((always_inline)) void tile(const float* x, int64_t ldx, const char* const (&panel)[P],
                                                int64_t in, Fetch fetch, vec (&result)[T][P][PARTS]) {
    constexpr int64_t step = PANEL * bytes_of(KIND);
    vec sum[T][P][PARTS] = {};  // local, so that it can stay in registers
    for (int64_t i = 0; i < in; i++) {
        for (int p = 0; p < P; p++) {
            vec w[PARTS];
            load_panel<KIND>(panel[p] + i * step, w);
            _mm_prefetch(panel[p] + fetch.distance + i * fetch.pace, _MM_HINT_T0);
            for (int t = 0; t < T; t++) {
                vec factor = all(x[t * ldx + i]);
                for (int part = 0; part < PARTS; part++) sum[t][p][part] = fma(factor, w[part], sum[t][p][part]);
            }
        }
    }
    std::memcpy(result, sum, sizeof(sum));
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

// Tokens that go through the panels together, one of `count` groups.
struct Group {
    int64_t token, index, count;
};

template <int64_t KIND, int T, int P, class Emit>
void multiply_tile(const Linear& linear, const float* x, int64_t ldx, Group group, int64_t first, bool bf16,
                   const Emit& emit) {
    constexpr int64_t step = PANEL * bytes_of(KIND);
    const char* panel[P];
    for (int p = 0; p < P; p++) panel[p] = linear.weight + (first + p) * linear.in * step;
    // tokens in several groups: each of them fetches its part of the panels that come next
    Fetch fetch{AHEAD, step};
    if (group.count > 1) fetch = {(P * group.count + group.index) * linear.in * step / group.count, step / group.count};
    const int64_t token = group.token;
    vec sum[T][P][PARTS];
    tile<KIND, T, P>(x + token * ldx, ldx, panel, linear.in, fetch, sum);
    for (int t = 0; t < T; t++)
        for (int p = 0; p < P; p++) {
            finish(linear, (first + p) * PANEL, bf16, sum[t][p]);
            emit(token + t, (first + p) * PANEL, sum[t][p]);
        }
}

template <int64_t KIND, int T, class Emit>
void multiply_group(const Linear& linear, const float* x, int64_t ldx, Group group, int64_t first, int64_t stop,
                    bool bf16, const Emit& emit) {
    constexpr int P = together(T);
    for (; first + P <= stop; first += P) multiply_tile<KIND, T, P>(linear, x, ldx, group, first, bf16, emit);
    for (; first < stop; first++) multiply_tile<KIND, T, 1>(linear, x, ldx, group, first, bf16, emit);
}

template <int64_t KIND, int T, class Emit>
void multiply_count(int64_t count, const Linear& linear, const float* x, int64_t ldx, Group group, int64_t first,
                    int64_t stop, bool bf16, const Emit& emit) {
    if (count == T)
        multiply_group<KIND, T>(linear, x, ldx, group, first, stop, bf16, emit);
    else if constexpr (T > 1)
        multiply_count<KIND, T - 1>(count, linear, x, ldx, group, first, stop, bf16, emit);
}

// Multiply x [tokens, ldx] by panels [first, stop); `emit(token, output, sum)` gets 16 outputs at a time.
// All tokens go through a few panels before the next few, which then come from the cache.
template <class Emit>
void multiply(const Linear& linear, const float* x, int64_t ldx, int64_t tokens, int64_t first, int64_t stop,
              bool bf16, const Emit& emit) {
    int64_t groups = (tokens + MOST - 1) / MOST;
    int64_t stride = groups > 1 ? together(MOST) : stop - first;
    for (; first < stop; first += stride) {
        int64_t last = first + stride < stop ? first + stride : stop;
        for (int64_t index = 0; index < groups; index++) {
            const Group group{tokens * index / groups, index, groups};
            const int64_t count = tokens * (index + 1) / groups - group.token;
            auto run = [&](auto kind) {
                multiply_count<decltype(kind)::value, MOST>(count, linear, x, ldx, group, first, last, bf16, emit);
            };
            switch (linear.kind) {
                case FLOAT32: run(std::integral_constant<int64_t, FLOAT32>()); break;
                case BFLOAT16: run(std::integral_constant<int64_t, BFLOAT16>()); break;
                default: run(std::integral_constant<int64_t, INT8>());
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
