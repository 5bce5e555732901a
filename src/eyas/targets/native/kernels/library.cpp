// The functions that native/library.py calls: packing weights, single products, attention, guesses, noise; the rest is in
// passes.cpp.
#include <cmath>
#include <iterator>
#include <limits>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "blocks.h"
#include "guess.h"
#include "gumbel.h"
#include "linear.h"
#include "suffix.h"

using namespace eyas;

// `eyas_draw`. Noise takes two logarithms per token, and hardly any token can win: its noise must make up for its logit's
// distance from the best one. The random bits of a few tokens show whether any of them can.
template <class T>
static int64_t draw(const T* logits, int64_t size, float divisor, float scale, int64_t seed, int64_t position, int64_t threads) {
    constexpr int64_t FEW = 32;
    constexpr double MAX_NOISE = 100.0;  // more than any token has; logits may be minus infinity
    constexpr float LOWEST = -std::numeric_limits<float>::infinity();
    const int64_t pieces = (size + NOISE_PIECE - 1) / NOISE_PIECE, likely = best(logits, size);
    const uint64_t key = key_of(seed, position);
    float noise;
    gumbel(seed, position, likely, 1, &noise);
    const double reached = wide(logits[likely]) / divisor + noise * scale;  // by the token with the best logit
    const bool skips = scale > 0 && std::isfinite(reached);
    std::vector<float> tops(pieces, LOWEST);
    std::vector<int64_t> found(pieces, 0);
    Region(threads).share(pieces, 1, [&](int64_t piece, int64_t) {
        const int64_t stop = std::min((piece + 1) * NOISE_PIECE, size);
        for (int64_t first = piece * NOISE_PIECE, count; first < stop; first += count) {
            count = std::min(FEW, stop - first);
            const double top = greatest(logits + first, count) / divisor, rounding = 1e-6 * (std::abs(reached) + std::abs(top));
            const double missing = (reached - top - rounding) / scale;  // sums are rounded to float32
            if (skips && !may_reach(key, first, count, std::min(MAX_NOISE, missing))) continue;
            float scores[FEW];
            gumbel(seed, position, first, count, scores);
            for (int64_t i = 0; i < count; i++) scores[i] = wide(logits[first + i]) / divisor + scores[i] * scale;
            const int64_t own = best(scores, count);
            if (scores[own] > tops[piece]) tops[piece] = scores[own], found[piece] = first + own;
        }
    });
    return found[std::max_element(tops.begin(), tops.end()) - tops.begin()];
}

extern "C" {

// The size in bytes of each struct of abi.h, in its order; returns how many there are.
int64_t eyas_sizes(int64_t* sizes) {
    const int64_t all[] = {sizeof(Linear), sizeof(Gating),    sizeof(Experts), sizeof(Latent), sizeof(Recurrent),
                           sizeof(Layer),  sizeof(Decoder), sizeof(RowStates), sizeof(Fold),   sizeof(Pass), sizeof(Beam),
                           sizeof(SuffixSearch)};
    std::copy(std::begin(all), std::end(all), sizes);
    return std::size(all);
}

int64_t eyas_lanes() { return LANES; }

// What can multiply bf16 inputs here, see `Microkernel`; 1 = `vdpbf16ps`.
int64_t eyas_microkernels() {
    if (!PAIRS) return 0;
    return tiles_are_allowed() ? 1 | TILES_OF_VECTORS | TILES : 1 | TILES_OF_VECTORS;
}

// Whether integer products have instructions of their own (VNNI).
int64_t eyas_vnni() {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    return 1;
#else
    return 0;
#endif
}

// Rows `ids` of a packed weight [.., in] -> out [count, in]
void eyas_rows(const char* weight, int64_t kind, int64_t in, const int64_t* ids, int64_t count, float* out, int64_t threads) {
    Region(threads).share(count, 1, [&](int64_t i, int64_t) { load_row(kind, weight, ids[i], in, out + i * in); });
}

// Pack a row-major weight [out, in], whose values take `bytes_of(kind)`, into panels; the last one is padded with 0.
void eyas_pack(const char* weight, int64_t out, int64_t in, int64_t kind, char* packed, int64_t threads) {
    const int64_t bytes = bytes_of(kind), count = (out + PANEL - 1) / PANEL;
    Region(threads).share(count, 1, [&](int64_t panel, int64_t) {
        for (int lane = 0; lane < PANEL; lane++) {
            const int64_t row = panel * PANEL + lane;
            for (int64_t i = 0; i < in; i++) {
                char* to = packed + (panel * in * PANEL + place(kind, lane, i, in)) * bytes;
                if (row < out)
                    std::memcpy(to, weight + (row * in + i) * bytes, bytes);
                else
                    std::memset(to, 0, bytes);
            }
        }
    });
}

// Pack rows of GGML's blocks, at the addresses `rows` [out], into panels. Returns whether there is such a type.
int64_t eyas_pack_blocks(int64_t type, const uint8_t* const* rows, int64_t out, int64_t blocks, uint8_t* packed, int64_t threads) {
    return pack_blocks<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS>(type, rows, out, blocks, packed, threads);
}

// Quantize a packed weight to SIGNED4.
void eyas_narrow(const Linear* linear, char* narrow, int64_t threads) {
    Region(threads).share(panels(*linear), 1, [&](int64_t panel, int64_t) {
        narrow_panel(*linear, panel, narrow + panel * panel_bytes(SIGNED4, linear->in));
    });
}

// Unpack panels into a row-major weight [out, in].
void eyas_unpack(const char* packed, int64_t out, int64_t in, int64_t kind, char* weight, int64_t threads) {
    const int64_t bytes = bytes_of(kind);
    Region(threads).share(out, 1, [&](int64_t row, int64_t) {
        const char* panel = packed + row / PANEL * in * PANEL * bytes;
        for (int64_t i = 0; i < in; i++) {
            char* to = weight + (row * in + i) * bytes;
            std::memcpy(to, panel + place(kind, static_cast<int>(row % PANEL), i, in) * bytes, bytes);
        }
    });
}

// x [tokens, in] times a packed weight -> out [tokens, out]
void eyas_linear(const Linear* linear, const float* x, int64_t tokens, float* out, int64_t bf16, int64_t threads) {
    Region region(threads);
    Narrowed narrowed(region, linear->microkernels != 0);
    region.share(panels(*linear), piece_of(*linear, tokens), [&](int64_t first, int64_t stop) {
        multiply(*linear, narrowed.of(*linear, x, linear->in, tokens), first, stop, bf16,
                 [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) { put(out + t * linear->out, o, linear->out, sum); });
    });
}

// Attention [rows, columns, heads, value_size] of queries [rows, heads, columns, size] over keys and values. `strides`: of
// the keys' rows and heads, then of the values' rows and heads.
void eyas_attention(const float* queries, const void* keys, const void* values, const uint8_t* seen, float* out,
                    const int64_t* sizes, const int64_t* strides, float scale, int64_t bf16, int64_t threads) {
    const int64_t rows = sizes[0], heads = sizes[1], columns = sizes[2], size = sizes[3], kv_heads = sizes[4],
                  most = sizes[5], value_size = sizes[6], group = heads / kv_heads;
    auto run = [&](auto* all_keys, auto* all_values) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(all_keys)>>;
        Region region(threads);
        Own<Room> rooms;
        region.share(rows * kv_heads * columns, 1, [&](int64_t unit, int64_t) {
            Room& room = rooms.mine(score_room(group, most), most);
            const int64_t column = unit % columns, h = unit / columns % kv_heads, row = unit / columns / kv_heads;
            const int64_t count = visible(seen + (row * columns + column) * most, most, room.columns.get());
            Queries<T> together({all_keys + row * strides[0] + h * strides[1],
                                 all_values + row * strides[2] + h * strides[3], room.columns.get(), size, value_size,
                                 scale, 0, bf16 != 0}, room.scores.get());
            for (int64_t g = h * group; g < (h + 1) * group; g++)
                together.add(queries + ((row * heads + g) * columns + column) * size,
                             out + ((row * columns + column) * heads + g) * value_size, count);
            together.finish();
        });
    };
    if (bf16)
        run(static_cast<const uint16_t*>(keys), static_cast<const uint16_t*>(values));
    else
        run(static_cast<const float*>(keys), static_cast<const float*>(values));
}

// The `count` greatest log-probabilities of each of `tokens` rows of logits [V], and the `ids` [V] of their tokens, or their
// indices in the row if that is null.
void eyas_guess(const void* logits, int64_t tokens, int64_t size, int64_t bf16, const int64_t* ids, int64_t count,
                float* scores, int64_t* found, int64_t threads) {
    Region(threads).share(tokens, 1, [&](int64_t t, int64_t) {
        if (bf16)
            guess(static_cast<const uint16_t*>(logits) + t * size, size, ids, count, scores + t * count, found + t * count);
        else
            guess(static_cast<const float*>(logits) + t * size, size, ids, count, scores + t * count, found + t * count);
    });
}

// The index of the greatest of a row of logits [V], the first of equals.
int64_t eyas_best(const void* logits, int64_t size, int64_t bf16) {
    return bf16 ? best(static_cast<const uint16_t*>(logits), size) : best(static_cast<const float*>(logits), size);
}

// The token with the greatest logit [V] / divisor + noise * scale, the first of equals.
int64_t eyas_draw(const void* logits, int64_t size, int64_t bf16, float divisor, float scale, int64_t seed,
                  int64_t position, int64_t threads) {
    return bf16 ? draw(static_cast<const uint16_t*>(logits), size, divisor, scale, seed, position, threads)
                : draw(static_cast<const float*>(logits), size, divisor, scale, seed, position, threads);
}

// Noise [rows, steps, count] of the tokens `ids` at positions [rows, steps], with a seed for each row.
void eyas_gumbel(const int64_t* seeds, const int64_t* positions, int64_t rows, int64_t steps, const int64_t* ids,
                 int64_t count, float* out, int64_t threads) {
    const int64_t pieces = (count + NOISE_PIECE - 1) / NOISE_PIECE;
    Region(threads).share(rows * steps * pieces, 1, [&](int64_t unit, int64_t) {
        const int64_t at = unit / pieces, first = unit % pieces * NOISE_PIECE;
        gumbel(seeds[at / steps], positions[at], ids + first, std::min(NOISE_PIECE, count - first), out + at * count + first);
    });
}

// The best draft of a search, into its buffers; returns its number of tokens.
int64_t eyas_suffix(SuffixSearch* search) { return best_draft(*search); }
}
