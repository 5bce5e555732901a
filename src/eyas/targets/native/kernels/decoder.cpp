// A pass of a decoder's layers over the slot cache, in one parallel region: threads take pieces of each product from a
// counter and wait for each other where a result is needed whole.
//
// The layers are those of Llama and its kin: RMSNorm, grouped-query attention with RoPE (biases and norms of heads
// where there are any), a gated MLP. A drafter's first layer also reads embeddings, each input under its own norm.
// Activations are float32; those of a bf16 model are rounded wherever its PyTorch modules would round.
//
// Shapes: T tokens of a pass, R rows, Q columns (cells of a row), H hidden size, D head size, V outputs of the head.

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "attention.h"
#include "guess.h"
#include "gumbel.h"
#include "linear.h"

using namespace eyas;

namespace {

// The structs are also known to native/library.py, field by field.
struct Layer {
    Linear q, k, v, o, gate, up, down;
    const float *input_norm, *mlp_norm;  // [H]
    const float* embedding_norm;         // [H] of a drafter's first layer, which reads embeddings too; else null
    const float *q_norm, *k_norm;        // [D] or null
    int64_t window;                      // latest positions that a token sees; 0 = all
    int64_t normed_residual;             // whether the layer adds to the normed input instead of the input
};

struct Decoder {
    const Layer* layers;
    int64_t count, hidden, heads, kv_heads, size, intermediate;
    int64_t rotated;                     // leading features of a head that RoPE rotates
    int64_t bf16;
    float eps, scale;
    const void* embedding;               // [embeddings, H] row-major
    int64_t embeddings, embedding_bf16;
    Linear mix;                          // of embedding and state side by side, before the first layer; or none
    const float* norm;                   // [H] or null
    int64_t returns_normed;              // whether the states that come back are those after the norm
    Linear head;                         // or none
    int64_t limit;                       // positions stay below it; 0 = there is no limit
};

struct Pass {
    int64_t tokens, columns;             // T, Q
    const int64_t* cells;                // [T] row * Q + column of each token; null = all cells
    const int64_t* ids;                  // [T]
    const int64_t* lengths;              // [R] committed columns
    const int64_t* parents;              // [R, parents_row] see `Tree`
    int64_t parents_row;                 // from row to row of `parents`, 0 = the same for all
    int64_t start, first;                // the first staged column, the first that this pass writes
    int64_t slot;                        // of row 0
    const float *cosines, *sines;        // [positions, rotated]
    char* const* keys;                   // for each layer [slots, kv_heads, C, D]
    char* const* values;
    int64_t capacity;                    // C
    float* x;                            // [T, H] a drafter's states, then what leaves the last layer
    const float* above;                  // [R, above_count, H] where a guess takes its parent's state from; or null
    int64_t above_count, above_first;    // cells of a row there, the staged column of the first
    const int64_t* taps;                 // boundaries, in the order of `tapped`
    int64_t tap_count;
    char* tapped;                        // [T, taps, H] in the model's dtype
    char* final;                         // [T, H] after the final norm, or null
    char* logits;                        // [T, V], or null
    float* scratch;                      // [T, eyas_token_scratch]
    int64_t threads;
};

constexpr int64_t PIECE = 4;  // panels that a thread takes at once
constexpr int64_t BLOCK = 4;  // tokens whose attention it takes at once

class Region {  // the threads of a pass
  public:
    explicit Region(int64_t phases) : counters_(new std::atomic<int64_t>[phases]()) {}
    ~Region() { delete[] counters_; }

    // Take pieces of `total` until none is left, then wait for the other threads.
    template <class Work>
    void share(int64_t phase, int64_t total, int64_t piece, const Work& work) {
        for (;;) {
            int64_t begin = counters_[phase].fetch_add(piece, std::memory_order_relaxed);
            if (begin >= total) break;
            work(begin, begin + piece < total ? begin + piece : total);
        }
#pragma omp barrier
    }

  private:
    std::atomic<int64_t>* counters_;
};

// RMSNorm as transformers writes it: the normed value is rounded before it is multiplied by the weight.
void rms_norm(const float* x, const float* weight, int64_t size, float eps, bool bf16, float* out) {
    vec squares = zero();
    for (int64_t i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    vec factor = all(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
    for (int64_t i = 0; i < size; i += LANES) {
        vec normed = mul(load(x + i), factor);
        vec done = mul(bf16 ? rounded(normed) : normed, load(weight + i));
        store(out + i, bf16 ? rounded(done) : done);
    }
}

// Rotate one head in place (half-split layout).
void rotate(float* head, const float* cosine, const float* sine, int64_t rotated, bool bf16) {
    int64_t half = rotated / 2;
    auto keep = [bf16](vec x) { return bf16 ? rounded(x) : x; };
    auto turn = [&](float* left, float* right, const float* c, const float* s, int64_t shift) {
        vec a = load(left), b = load(right);
        vec first = add(keep(mul(a, load(c))), keep(mul(sub(zero(), b), load(s))));
        vec second = add(keep(mul(b, load(c + shift))), keep(mul(a, load(s + shift))));
        store(left, keep(first));
        store(right, keep(second));
    };
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) turn(head + i, head + half + i, cosine + i, sine + i, half);
    if (i < half) {  // fewer features than lanes
        float left[LANES] = {}, right[LANES] = {}, c[2 * LANES] = {}, s[2 * LANES] = {};
        int64_t rest = (half - i) * sizeof(float);
        std::memcpy(left, head + i, rest), std::memcpy(right, head + half + i, rest);
        std::memcpy(c, cosine + i, rest), std::memcpy(c + LANES, cosine + half + i, rest);
        std::memcpy(s, sine + i, rest), std::memcpy(s + LANES, sine + half + i, rest);
        turn(left, right, c, s, LANES);
        std::memcpy(head + i, left, rest), std::memcpy(head + half + i, right, rest);
    }
}

// Write `size` floats as a T.
void write(float* to, const float* from, int64_t size) { std::memcpy(to, from, size * sizeof(float)); }
void write(uint16_t* to, const float* from, int64_t size) {
    for (int64_t i = 0; i < size; i++) to[i] = narrowed(from[i]);
}

int64_t widest_input(const Decoder& decoder) {
    bool embeds = decoder.mix.weight || (decoder.count && decoder.layers[0].embedding_norm);
    return embeds ? 2 * decoder.hidden : decoder.hidden;
}

void embed(const Decoder& d, int64_t token, float* out) {
    const int64_t at = token * d.hidden;
    for (int64_t i = 0; i < d.hidden; i += LANES) {
        vec values = d.embedding_bf16 ? load(static_cast<const uint16_t*>(d.embedding) + at + i)
                                      : load(static_cast<const float*>(d.embedding) + at + i);
        store(out + i, d.bf16 ? rounded(values) : values);
    }
}

// Floats of scratch that each token takes.
int64_t token_scratch(const Decoder& d) {
    return widest_input(d) + d.hidden + (2 * d.heads + 2 * d.kv_heads) * d.size + d.intermediate;
}

template <class T>  // T: what the cache and the outputs hold
void run(const Decoder& d, const Pass& pass) {
    const int64_t tokens = pass.tokens, hidden = d.hidden, wide = widest_input(d);
    const int64_t q_size = d.heads * d.size, kv_size = d.kv_heads * d.size, group = d.heads / d.kv_heads;
    const int64_t head_stride = pass.capacity * d.size, slot_stride = d.kv_heads * head_stride;
    const bool bf16 = d.bf16;
    float* normed = pass.scratch;               // [T, wide]
    float* residual = normed + tokens * wide;   // [T, H] what a layer adds to, if that isn't its input
    float* q = residual + tokens * hidden;      // [T, heads, D]
    float* k = q + tokens * q_size;             // [T, kv_heads, D]
    float* v = k + tokens * kv_size;
    float* mixed = v + tokens * kv_size;        // [T, heads, D]
    float* gated = mixed + tokens * q_size;     // [T, intermediate]

    auto cell_of = [&](int64_t t) { return pass.cells ? pass.cells[t] : t; };
    auto tap = [&](int64_t boundary, int64_t t, const float* state) {
        for (int64_t i = 0; i < pass.tap_count; i++)
            if (pass.taps[i] == boundary)
                write(reinterpret_cast<T*>(pass.tapped) + (t * pass.tap_count + i) * hidden, state, hidden);
    };
    const int64_t stage = pass.first - pass.start;  // staged columns of passes before this one
    const int64_t most = pass.first + pass.columns, blocks = (tokens + BLOCK - 1) / BLOCK;
    auto tree_of = [&](int64_t row) { return Tree{pass.parents ? pass.parents + row * pass.parents_row : nullptr}; };
    const bool of_drafter = d.mix.weight || d.layers[0].embedding_norm;
    Region region(8 * d.count + 4);

#pragma omp parallel num_threads(static_cast<int>(pass.threads))
    {
        int64_t phase = 0;
        std::vector<float> scores(4 * (most + 2 * LANES));
        std::vector<int64_t> columns(2 * most);

        region.share(phase++, tokens, 1, [&](int64_t t, int64_t) {
            float* state = pass.x + t * hidden;
            if (pass.above) {
                const int64_t row = cell_of(t) / pass.columns, column = stage + cell_of(t) % pass.columns;
                const int64_t parent = std::max<int64_t>(tree_of(row).parent(column) - pass.above_first, 0);
                std::memcpy(state, pass.above + (row * pass.above_count + parent) * hidden, hidden * sizeof(float));
            }
            if (!of_drafter) return embed(d, pass.ids[t], state);
            embed(d, pass.ids[t], normed + t * wide);
            if (d.mix.weight) std::memcpy(normed + t * wide + hidden, state, hidden * sizeof(float));
        });
        if (d.mix.weight)
            region.share(phase++, panels(d.mix), PIECE, [&](int64_t first, int64_t stop) {
                multiply(d.mix, normed, wide, tokens, first, stop, bf16,
                         [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) { put(pass.x + t * hidden, o, hidden, sum); });
            });

        for (int64_t index = 0; index < d.count; index++) {
            const Layer& layer = d.layers[index];
            region.share(phase++, tokens, 1, [&](int64_t t, int64_t) {
                float* state = pass.x + t * hidden;
                float* out = normed + t * wide;
                tap(index, t, state);
                if (layer.embedding_norm) {
                    rms_norm(out, layer.embedding_norm, hidden, d.eps, bf16, out);
                    out += hidden;
                }
                if (layer.input_norm)
                    rms_norm(state, layer.input_norm, hidden, d.eps, bf16, out);
                else
                    std::memcpy(out, state, hidden * sizeof(float));
                if (layer.normed_residual) std::memcpy(residual + t * hidden, out, hidden * sizeof(float));
            });

            const int64_t of_q = panels(layer.q), of_k = panels(layer.k), of_v = panels(layer.v);
            region.share(phase++, of_q + of_k + of_v, PIECE, [&](int64_t first, int64_t stop) {
                auto part = [&](const Linear& linear, int64_t before, float* to, int64_t size) {
                    int64_t a = std::max<int64_t>(first - before, 0), b = std::min(stop - before, panels(linear));
                    if (a < b)
                        multiply(linear, normed, wide, tokens, a, b, bf16,
                                 [=](int64_t t, int64_t o, const vec(&sum)[PARTS]) { put(to + t * size, o, size, sum); });
                };
                part(layer.q, 0, q, q_size);
                part(layer.k, of_q, k, kv_size);
                part(layer.v, of_q + of_k, v, kv_size);
            });

            T* keys = reinterpret_cast<T*>(pass.keys[index]) + pass.slot * slot_stride;
            T* values = reinterpret_cast<T*>(pass.values[index]) + pass.slot * slot_stride;
            region.share(phase++, tokens, 1, [&](int64_t t, int64_t) {
                const int64_t cell = cell_of(t), column = pass.first + cell % pass.columns;
                const int64_t row = cell / pass.columns;
                int64_t position = pass.lengths[row] + tree_of(row).depth(column - pass.start) - 1;
                if (d.limit) position = std::min(position, d.limit - 1);
                const float* cosine = pass.cosines + position * d.rotated;
                const float* sine = pass.sines + position * d.rotated;
                auto turn = [&](float* head, const float* norm) {
                    if (norm) rms_norm(head, norm, d.size, d.eps, bf16, head);
                    rotate(head, cosine, sine, d.rotated, bf16);
                };
                for (int64_t h = 0; h < d.heads; h++) turn(q + t * q_size + h * d.size, layer.q_norm);
                for (int64_t h = 0; h < d.kv_heads; h++) {
                    float* key = k + t * kv_size + h * d.size;
                    turn(key, layer.k_norm);
                    const int64_t at = row * slot_stride + h * head_stride + column * d.size;
                    write(keys + at, key, d.size);
                    write(values + at, v + t * kv_size + h * d.size, d.size);
                }
            });

            // The heads of a group read the same keys; so do tokens of a row of which each sees what the one before saw.
            region.share(phase++, d.kv_heads * blocks, 1, [&](int64_t unit, int64_t) {
                const int64_t h = unit / blocks, stop = std::min(tokens, (unit % blocks + 1) * BLOCK);
                for (int64_t t = unit % blocks * BLOCK; t < stop;) {
                    const int64_t row = cell_of(t) / pass.columns;
                    int64_t *held = columns.data(), *next = columns.data() + most, counts[BLOCK], count = 0, length = 0;
                    const int64_t* list = nullptr;
                    for (; t + count < stop && cell_of(t + count) / pass.columns == row; count++) {
                        const int64_t column = stage + cell_of(t + count) % pass.columns;
                        const int64_t* found =
                            visible(pass.lengths[row], pass.start, tree_of(row), column, layer.window, next, length);
                        if (count && (length < counts[count - 1] || std::memcmp(found, list, counts[count - 1] * sizeof(int64_t))))
                            break;
                        counts[count] = length;
                        list = found;
                        std::swap(held, next);
                    }
                    const int64_t base = row * slot_stride + h * head_stride;
                    Queries<T> queries({keys + base, values + base, list, d.size, d.size, d.scale, bf16}, scores.data());
                    for (int64_t i = 0; i < count; i++)
                        for (int64_t g = h * group; g < (h + 1) * group; g++) {
                            const int64_t head = (t + i) * q_size + g * d.size;
                            queries.add(q + head, mixed + head, counts[i]);
                        }
                    queries.finish();
                    t += count;
                }
            });

            auto add_to = [&](const float* before) {
                return [=, &pass](int64_t t, int64_t o, const vec(&sum)[PARTS]) {
                    for (int part = 0; part < PARTS; part++) {
                        const int64_t at = t * hidden + o + part * LANES;
                        vec next = add(load(before + at), sum[part]);
                        store(pass.x + at, bf16 ? rounded(next) : next);
                    }
                };
            };
            region.share(phase++, panels(layer.o), PIECE, [&](int64_t first, int64_t stop) {
                multiply(layer.o, mixed, q_size, tokens, first, stop, bf16,
                         add_to(layer.normed_residual ? residual : pass.x));
            });

            region.share(phase++, tokens, 1, [&](int64_t t, int64_t) {
                rms_norm(pass.x + t * hidden, layer.mlp_norm, hidden, d.eps, bf16, normed + t * wide);
            });
            region.share(phase++, panels(layer.gate), PIECE, [&](int64_t first, int64_t stop) {
                auto keep = [bf16](vec x) { return bf16 ? rounded(x) : x; };
                multiply(layer.gate, normed, wide, tokens, first, stop, bf16,
                         [&](int64_t t, int64_t o, vec(&sum)[PARTS]) {
                             for (vec& gate : sum) gate = keep(silu(gate));
                             put(gated + t * d.intermediate, o, d.intermediate, sum);
                         });
                multiply(layer.up, normed, wide, tokens, first, stop, bf16,
                         [&](int64_t t, int64_t o, vec(&sum)[PARTS]) {
                             const float* gate = gated + t * d.intermediate + o;
                             for (int part = 0; part < PARTS; part++)
                                 sum[part] = keep(mul(load(gate + part * LANES), sum[part]));
                             put(gated + t * d.intermediate, o, d.intermediate, sum);
                         });
            });
            region.share(phase++, panels(layer.down), PIECE, [&](int64_t first, int64_t stop) {
                multiply(layer.down, gated, d.intermediate, tokens, first, stop, bf16, add_to(pass.x));
            });
        }

        region.share(phase++, tokens, 1, [&](int64_t t, int64_t) {
            float* out = normed + t * wide;
            tap(d.count, t, pass.x + t * hidden);
            if (d.norm)
                rms_norm(pass.x + t * hidden, d.norm, hidden, d.eps, bf16, out);
            else
                std::memcpy(out, pass.x + t * hidden, hidden * sizeof(float));
            tap(d.count + 1, t, out);
            if (d.returns_normed) std::memcpy(pass.x + t * hidden, out, hidden * sizeof(float));
            if (pass.final) write(reinterpret_cast<T*>(pass.final) + t * hidden, out, hidden);
        });
        if (pass.logits)
            region.share(phase++, panels(d.head), PIECE, [&](int64_t first, int64_t stop) {
                multiply(d.head, normed, wide, tokens, first, stop, bf16,
                         [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) {
                             put(reinterpret_cast<T*>(pass.logits) + t * d.head.out, o, d.head.out, sum);
                         });
            });
    }
}

}  // namespace

extern "C" {

int64_t eyas_lanes() { return LANES; }

// Pack a row-major weight [out, in], whose values take `bytes_of(kind)`, into panels; what an incomplete one lacks is 0.
void eyas_pack(const char* weight, int64_t out, int64_t in, int64_t kind, char* packed) {
    const int64_t bytes = bytes_of(kind), count = (out + PANEL - 1) / PANEL;
#pragma omp parallel for
    for (int64_t panel = 0; panel < count; panel++)
        for (int lane = 0; lane < PANEL; lane++) {
            const int64_t row = panel * PANEL + lane;
            char* to = packed + (panel * in * PANEL + place(kind, lane)) * bytes;
            for (int64_t i = 0; i < in; i++, to += PANEL * bytes) {
                if (row < out)
                    std::memcpy(to, weight + (row * in + i) * bytes, bytes);
                else
                    std::memset(to, 0, bytes);
            }
        }
}

// The row-major weight [out, in] of a packed one.
void eyas_unpack(const char* packed, int64_t out, int64_t in, int64_t kind, char* weight) {
    const int64_t bytes = bytes_of(kind);
#pragma omp parallel for
    for (int64_t row = 0; row < out; row++) {
        const char* from = packed + (row / PANEL * in * PANEL + place(kind, static_cast<int>(row % PANEL))) * bytes;
        for (int64_t i = 0; i < in; i++, from += PANEL * bytes) std::memcpy(weight + (row * in + i) * bytes, from, bytes);
    }
}

// x [tokens, in] times a packed weight -> out [tokens, out]
void eyas_linear(const Linear* linear, const float* x, int64_t tokens, float* out, int64_t bf16, int64_t threads) {
    Region region(1);
#pragma omp parallel num_threads(static_cast<int>(threads))
    region.share(0, panels(*linear), PIECE, [&](int64_t first, int64_t stop) {
        multiply(*linear, x, linear->in, tokens, first, stop, bf16,
                 [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) { put(out + t * linear->out, o, linear->out, sum); });
    });
}

// Attention [rows, columns, heads, value_size] of queries [rows, heads, columns, size] over keys and values whose rows
// and heads are `strides` apart: row and head of the keys, row and head of the values.
void eyas_attention(const float* queries, const void* keys, const void* values, const uint8_t* seen, float* out,
                    const int64_t* sizes, const int64_t* strides, float scale, int64_t bf16, int64_t threads) {
    const int64_t rows = sizes[0], heads = sizes[1], columns = sizes[2], size = sizes[3], kv_heads = sizes[4],
                  most = sizes[5], value_size = sizes[6], group = heads / kv_heads;
    auto run = [&](auto* all_keys, auto* all_values) {
        Region region(1);
#pragma omp parallel num_threads(static_cast<int>(threads))
        {
            std::vector<float> scores(4 * (most + 2 * LANES));
            std::vector<int64_t> list(most);
            region.share(0, rows * kv_heads * columns, 1, [&](int64_t unit, int64_t) {
                const int64_t column = unit % columns, h = unit / columns % kv_heads, row = unit / columns / kv_heads;
                const int64_t count = visible(seen + (row * columns + column) * most, most, list.data());
                using T = std::remove_const_t<std::remove_pointer_t<decltype(all_keys)>>;
                Queries<T> together({all_keys + row * strides[0] + h * strides[1],
                                     all_values + row * strides[2] + h * strides[3], list.data(), size, value_size,
                                     scale, bf16 != 0}, scores.data());
                for (int64_t g = h * group; g < (h + 1) * group; g++)
                    together.add(queries + ((row * heads + g) * columns + column) * size,
                                 out + ((row * columns + column) * heads + g) * value_size, count);
                together.finish();
            });
        }
    };
    if (bf16)
        run(static_cast<const uint16_t*>(keys), static_cast<const uint16_t*>(values));
    else
        run(static_cast<const float*>(keys), static_cast<const float*>(values));
}

// The `count` greatest log-probabilities of each of `tokens` rows of logits [V], and what they belong to: `ids` [V] of
// them, or their places in the row if that is null.
void eyas_guess(const void* logits, int64_t tokens, int64_t size, int64_t bf16, const int64_t* ids, int64_t count,
                float* scores, int64_t* found, int64_t threads) {
#pragma omp parallel for num_threads(static_cast<int>(threads))
    for (int64_t t = 0; t < tokens; t++) {
        if (bf16)
            guess(static_cast<const uint16_t*>(logits) + t * size, size, ids, count, scores + t * count, found + t * count);
        else
            guess(static_cast<const float*>(logits) + t * size, size, ids, count, scores + t * count, found + t * count);
    }
}

// Noise [rows, steps, count] of the tokens `ids` at positions [rows, steps], with a seed for each row.
void eyas_gumbel(const int64_t* seeds, const int64_t* positions, int64_t rows, int64_t steps, const int64_t* ids,
                 int64_t count, float* out, int64_t threads) {
    constexpr int64_t piece = 1024;
    const int64_t pieces = (count + piece - 1) / piece;
#pragma omp parallel for num_threads(static_cast<int>(threads))
    for (int64_t unit = 0; unit < rows * steps * pieces; unit++) {
        const int64_t at = unit / pieces, first = unit % pieces * piece;
        gumbel(seeds[at / steps], positions[at], ids + first, std::min(piece, count - first), out + at * count + first);
    }
}

int64_t eyas_token_scratch(const Decoder* decoder) { return token_scratch(*decoder); }

// Returns 0, or 1 without running where a token has no embedding.
int64_t eyas_decoder(const Decoder* decoder, const Pass* pass) {
    for (int64_t t = 0; t < pass->tokens; t++)
        if (pass->ids[t] < 0 || pass->ids[t] >= decoder->embeddings) return 1;
    if (decoder->bf16)
        run<uint16_t>(*decoder, *pass);
    else
        run<float>(*decoder, *pass);
    return 0;
}
}
