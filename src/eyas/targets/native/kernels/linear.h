// Products of a few tokens with a weight in panels (weight.h).
//
// Every output is one chain of float32 fused multiply-adds over the inputs in order, whatever the number of tokens, panels
// and threads. So a token's result does not depend on what else is in the pass. With bf16 weights the second input of each
// pair comes first, as in `vdpbf16ps`, which adds the products of two inputs; like it, chains treat subnormal numbers as 0.
// So the two can be chosen by speed alone. Processors with AMX multiply by tiles (tiles.h), in an order of their own, which
// depends on nothing else either. Packed weights have sums of their own (integer.h).
//
// Shapes: T tokens, `in` features of a token, `out` outputs.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "integer.h"
#include "region.h"
#include "tiles.h"

namespace eyas {

constexpr int MAX_TILE_TOKENS = LANES == 16 ? 12 : 6;  // tokens whose sums fit into the registers
constexpr int together(int tokens) {        // panels that are processed together
    return LANES == 16 ? (tokens <= 4 ? 4 : tokens <= 9 ? 3 : 2) : (tokens == 1 ? 4 : tokens == 2 ? 2 : 1);
}

// The sums [T, P, PARTS] of T tokens with P panels.
template <int64_t KIND, bool PAIRED, int T, int P>
void tile(const Tokens& tokens, const char* panels, int64_t in, Fetch fetch, vec* result) {
    constexpr int64_t row = PANEL * bytes_of(KIND);
    [[maybe_unused]] constexpr int64_t step = step_of(KIND);
    const char* panel[P];
    for (int p = 0; p < P; p++) panel[p] = panels + p * in * row;
    vec sum[T][P][PARTS] = {};  // local, so that it can stay in registers
    auto add = [&](int64_t i, const vec (&w)[P][PARTS]) {
        for (int t = 0; t < T; t++) {
            vec factor = all(tokens.x[t * tokens.ld + i]);
            for (int p = 0; p < P; p++)
                for (int part = 0; part < PARTS; part++) sum[t][p][part] = fma(factor, w[p][part], sum[t][p][part]);
        }
    };
    int64_t i = 0;
#ifdef __AVX512F__
    if constexpr (step > 1)
        for (; i + step <= in; i += step) {
            __m512i words[P];
            const int64_t ahead = fetch.at(i);
            for (int p = 0; p < P; p++) {
                words[p] = _mm512_loadu_si512(panel[p] + i * row);
                _mm_prefetch(panel[p] + ahead, HINT);
            }
#if defined(__AVX512BF16__)
            if constexpr (PAIRED) {
                for (int t = 0; t < T; t++) {
                    const __m512bh factors = reinterpret_cast<__m512bh>(all_of_pair(tokens.pairs + t * in_pairs(in) + i));
                    for (int p = 0; p < P; p++)
                        sum[t][p][0] = _mm512_dpbf16_ps(sum[t][p][0], reinterpret_cast<__m512bh>(words[p]), factors);
                }
                continue;
            }
#endif
            vec even[P][PARTS], odd[P][PARTS];
            for (int p = 0; p < P; p++) even[p][0] = first_of(words[p]), odd[p][0] = second_of(words[p]);
            add(i + 1, odd), add(i, even);
        }
#endif
    for (; i < in; i++) {
        const int64_t at = KIND != FLOAT32 && (i ^ 1) < in ? i ^ 1 : i;
        vec w[P][PARTS];
        for (int p = 0; p < P; p++) {
            load_panel<KIND>(panel[p] + at * row, w[p]);
            _mm_prefetch(panel[p] + fetch.at(i), HINT);
        }
        add(at, w);
    }
    std::memcpy(result, sum, sizeof(sum));
}

using Tile = void (*)(const Tokens&, const char*, int64_t, Fetch, vec*);

// The register tile of `tokens` tokens and `panels` panels: `together(tokens)`, one, or two where that is three. Tiles are
// compiled once, whatever is done with their sums.
template <int64_t KIND, bool PAIRED, int T = MAX_TILE_TOKENS>
Tile tile_of(int64_t tokens, int64_t panels) {
    if constexpr (T > 1)
        if (tokens < T) return tile_of<KIND, PAIRED, T - 1>(tokens, panels);
    if constexpr (together(T) == 3)
        if (panels == 2) return tile<KIND, PAIRED, T, 2>;
    return panels == 1 ? tile<KIND, PAIRED, T, 1> : tile<KIND, PAIRED, T, together(T)>;
}

Tile tile_of(int64_t kind, bool paired, int64_t tokens, int64_t panels);  // floats.cpp

// More than `MAX_CODED` tokens are multiplied by a packed weight in several groups. All but the first find a panel in the caches,
// and loads of inputs are then the bottleneck, so the tokens of a group share each load between two panels (not with AVX2, which
// has too few registers for their sums). From `MIN_UNPACKED` tokens on it pays to unpack the codes of a panel once for all groups,
// which then are smaller: with bytes, a tile of eight tokens loses to one of six.
constexpr bool SHARES = LANES == 16;
constexpr int MAX_CODED = SHARES ? 8 : 12, MIN_UNPACKED = SHARES ? 33 : MAX_CODED + 1, MAX_UNPACKED = 6;

// The register tile of a packed weight: of `tokens` tokens and one panel, or all panels that are processed together.
template <int64_t KIND, int T = KIND < IN_BYTES ? MAX_CODED : MAX_UNPACKED>
Tile integer_tile_of(int64_t tokens, int64_t panels) {
    if constexpr (T > 1)
        if (tokens < T) return integer_tile_of<KIND, T - 1>(tokens, panels);
    return panels == 1 ? integer_tile<KIND, T, 1> : integer_tile<KIND, T, SHARES ? 2 : together_in_integers(T)>;
}

Tile packed_tile_of(const Linear& linear, bool unpacked, int64_t tokens, int64_t panels);  // integers.cpp
void unpack_panel(const Linear& linear, int64_t panel, char* unpacked);                    // integers.cpp
void narrow_panel(const Linear& linear, int64_t panel, char* narrow);                      // integers.cpp

inline bool is_coded(const Linear& linear) { return is_packed(linear.kind) && linear.microkernels != AS_FLOATS; }

// The number of panels that a group of `tokens` tokens, of `total` in all, is multiplied by together.
inline int64_t panels_together(const Linear& linear, bool tiled, int64_t tokens, int64_t total) {
    if (tiled) return TILE_PANELS;
    if (!is_packed(linear.kind)) return together(static_cast<int>(tokens));
    if (!is_coded(linear)) return 1;
    return SHARES && total > MAX_CODED ? 2 : together_in_integers(static_cast<int>(tokens));
}

// The number of groups, of nearly equal size, that tokens are processed in.
inline int64_t groups_of(int64_t tokens, int64_t most = MAX_TILE_TOKENS) { return (tokens + most - 1) / most; }

// The most tokens of a group, of `total` in all.
inline int64_t most_together(const Linear& linear, bool tiled, int64_t total) {
    if (tiled) return TILE_TOKENS;
    return !is_coded(linear) ? MAX_TILE_TOKENS : total < MIN_UNPACKED ? MAX_CODED : MAX_UNPACKED;
}

inline bool is_tiled(const Linear& linear) { return PAIRS && !is_packed(linear.kind) && linear.microkernels >= TILES; }

// Whether a group of `tokens` tokens is multiplied by `vdpbf16ps`.
inline bool is_paired(const Linear& linear, int64_t tokens) { return PAIRS && linear.microkernels >> tokens & 1; }

// The inputs of a product in the form that its tiles read: bf16 or codes. Each thread makes its own copy when it takes its
// first piece.
class Narrowed {
  public:
    Narrowed(const Region& region, bool bf16) : region_(region), bf16_(bf16) {}  // whether bf16 can hold the inputs

    // Tokens x [count, ld] of the current stage's product.
    Tokens of(const Linear& linear, const float* x, int64_t ld, int64_t count) {
        if (is_coded(linear)) {
            Coded& coded = coded_.mine();
            if (region_.stage() != coded.stage || x != coded.made.x || count != coded.made.count) {
                coded.made = coded.codes.of(x, ld, count, linear.in);
                coded.stage = region_.stage();
            }
            return coded.made;
        }
        const int64_t groups = groups_of(count);
        const bool paired = groups && (is_paired(linear, count / groups) || is_paired(linear, (count + groups - 1) / groups));
        if (!bf16_ || !(paired || is_tiled(linear))) return {x, ld, count};
        Copy& copy = copies_.mine();
        const int64_t in = in_pairs(linear.in), room = (count + TILE_TOKENS - 1) * in;  // a tile reads whole rows
        if (region_.stage() != copy.stage || x != copy.x || count != copy.count) {
            if (room > copy.size) copy.room.reset(new uint16_t[copy.size = room]());
            for (int64_t t = 0; t < count; t++) {
                int64_t i = 0;
                for (; i + LANES <= in; i += LANES) store(copy.room.get() + t * in + i, load(x + t * ld + i));
                for (; i < in; i++) copy.room[t * in + i] = narrowed(x[t * ld + i]);
            }
            copy.stage = region_.stage(), copy.x = x, copy.count = count;
        }
        return {x, ld, count, copy.room.get()};
    }

  private:
    struct Copy {
        int64_t stage = -1, count = 0, size = 0;
        const float* x = nullptr;
        std::unique_ptr<uint16_t[]> room;
    };
    struct Coded {
        int64_t stage = -1;
        Tokens made{nullptr, 0, 0};
        Codes codes;
    };
    const Region& region_;
    bool bf16_;
    Own<Copy> copies_;
    Own<Coded> coded_;
};

// Panels that a thread takes at a time: one where many tokens make it take long enough, so that threads end together.
inline int64_t piece_of(const Linear& linear, int64_t tokens) {
    const int64_t groups = groups_of(tokens);
    if (LANES == 8 && groups >= 8) return 1;
    return is_packed(linear.kind) || together(static_cast<int>((tokens + groups - 1) / groups)) == 3 ? 6 : 4;
}

// While it lives, this thread treats subnormal numbers as 0, as `vdpbf16ps` always does.
class WithoutSubnormals {
  public:
    WithoutSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~WithoutSubnormals() { _mm_setcsr(before_); }

  private:
    unsigned before_;
};

// This thread's memory for unpacked panels.
inline char* room_for_unpacked(int64_t bytes) {
    thread_local std::vector<char> room;
    if (static_cast<int64_t>(room.size()) < bytes) room.resize(bytes);
    return room.data();
}

// Add the bias to sums, and round them as the model does.
inline void finish(const Linear& linear, int64_t output, bool bf16, vec (&sum)[PARTS]) {
    float tail[PANEL];
    auto of_outputs = [&](const float* values, int part) {
        if (output + PANEL <= linear.out) return load(values + output + part * LANES);
        for (int lane = 0; lane < PANEL; lane++) tail[lane] = output + lane < linear.out ? values[output + lane] : 0;
        return load(tail + part * LANES);
    };
    for (int part = 0; part < PARTS; part++) {
        if (linear.bias) sum[part] = add(sum[part], of_outputs(linear.bias, part));
        if (bf16) sum[part] = rounded(sum[part]);
    }
}

// Multiply tokens by panels [first, stop); `emit(token, output, sum)` gets 16 outputs at a time.
// All groups of tokens go through a few panels before the next few, so that all but the first group find them in the cache.
template <class Emit>
void multiply(const Linear& linear, const Tokens& tokens, int64_t first, int64_t stop, bool bf16, const Emit& emit) {
    if (is_coded(linear) && !tokens.codes) {
        Codes own;
        return multiply(linear, own.of(tokens.x, tokens.ld, tokens.count, linear.in), first, stop, bf16, emit);
    }
    const bool tiled = tokens.pairs && is_tiled(linear);
    const int64_t row = row_bytes(linear), bytes = panel_bytes(linear), total = tokens.count;
    const int64_t groups = groups_of(total, most_together(linear, tiled, total));
    const int64_t at_once = panels_together(linear, tiled, (total + groups - 1) / groups, total);  // for the largest group
    const int64_t stride = groups > 1 ? at_once : stop - first;
    const bool unpacks = total >= MIN_UNPACKED && is_coded(linear) && code_bits(linear.kind) < 8;
    const int64_t unpacked_bytes = unpacks ? panel_bytes(linear.kind | IN_BYTES, linear.in) : 0;
    char* const unpacked = unpacks ? room_for_unpacked(stride * unpacked_bytes) : nullptr;
    vec sums[TILE_TOKENS * TILE_PANELS];
    const WithoutSubnormals mode;
    const TilesInUse registers(tiled && linear.microkernels == TILES);
    for (; first < stop; first += stride) {
        if (unpacks)
            for (int64_t panel = first; panel < std::min(first + stride, stop); panel++)
                unpack_panel(linear, panel, unpacked + (panel - first) * unpacked_bytes);
        for (int64_t index = 0; index < groups; index++) {
            const int64_t last = std::min(first + stride, stop), token = total * index / groups;
            const int64_t count = total * (index + 1) / groups - token;
            const int64_t most = std::min(panels_together(linear, tiled, count, total), at_once);
            const bool paired = tokens.pairs && is_paired(linear, count);
            Tokens group{tokens.x + token * tokens.ld, tokens.ld, count};
            if (paired || tiled) group.pairs = tokens.pairs + token * in_pairs(linear.in);
            if (tokens.codes)
                group.codes = tokens.codes + token * GROUP, group.steps = tokens.steps + token, group.coded = tokens.coded;
            for (int64_t panel = first, step; panel < last; panel += step) {
                const int64_t left = last - panel;
                step = left >= most ? most : tiled ? left : most == 3 && left == 2 ? 2 : 1;
                Fetch fetch{is_packed(linear.kind) ? PACKED_AHEAD : ahead(count), row, bytes, (step - 1) * bytes, bytes};
                // with several groups, each prefetches its share of the panels that come next
                if (groups > 1) fetch = {(step * groups + index) * bytes / groups, row / groups, 0, 0, bytes};
                const char* weight = linear.weight + panel * bytes;
                if (unpacks) {
                    const char* own = unpacked + (panel - first) * unpacked_bytes;
                    fetch.distance += weight - own;  // the packed panels
                    weight = own;
                }
                if (tiled)
                    multiply_tiles(linear, group, weight, step, fetch, sums);
                else if (is_packed(linear.kind))
                    packed_tile_of(linear, unpacks, count, step)(group, weight, linear.in, fetch, sums);
                else
                    tile_of(linear.kind, paired, count, step)(group, weight, linear.in, fetch, sums);
                for (int64_t p = panel; p < panel + step; p++)
                    for (int64_t t = 0; t < count; t++) {
                        vec sum[PARTS];
                        std::memcpy(sum, sums + (t * step + p - panel) * PARTS, sizeof(sum));
                        finish(linear, p * PANEL, bf16, sum);
                        emit(token + t, p * PANEL, sum);
                    }
            }
        }
    }
}

// Store 16 outputs in a row of `out`.
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
