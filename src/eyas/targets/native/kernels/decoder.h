// A pass of a decoder's layers over the slot cache, stage by stage, whose pieces threads share (region.h).
//
// The layers are those of Llama and its kin: RMSNorm or LayerNorm before or after what a layer adds, grouped-query
// attention with RoPE (biases and norms of queries and keys where there are any), latent attention (latent.h) or a
// recurrence (recurrent.h), an MLP, after attention or beside it, or several as experts. A drafter's first layer also
// reads embeddings, each input under its own norm. A block drafter's tokens see all of their block, and its layers make
// keys and values of the target's states alone. Activations are float32; those of a bf16 model are rounded wherever its
// PyTorch modules would round.
//
// Shapes: T tokens of a pass, R rows, Q columns (cells of a row), H hidden size, D head size, V outputs of the head.

#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "latent.h"
#include "recurrent.h"

namespace eyas {

// PATHS: a token sees the committed columns and its own path. BLOCKS: the committed columns and all that the pass stages
// in its row, before it and after. CONTEXT: there are no tokens; each layer only makes keys and values of the states `x`.
enum Mode : int64_t { PATHS, BLOCKS, CONTEXT };

// Also known to native/library.py, field by field.
struct Pass {
    int64_t mode;                        // one of `Mode`
    int64_t tokens, columns;             // T, Q
    const int64_t* cells;                // [T] row * Q + column of each token; null = all cells
    const int64_t* ids;                  // [T]
    const int64_t* lengths;              // [R] committed columns
    const int64_t* parents;              // [R, parents_row] see `Tree`
    int64_t parents_row;                 // from row to row of `parents`, 0 = the same for all
    int64_t before, most;                // columns of each row staged before this pass; more than any token sees
    int64_t slot;                        // of row 0
    const float *cosines, *sines;        // [ropes, positions, rotated]
    int64_t positions;
    char* const* keys;                   // for each layer [slots, kv_heads, C, D]; latents [slots, C, L], and as values
    char* const* values;                 // the keys that all heads share [slots, C, P]
    int64_t capacity;                    // C
    int64_t in_codes;                    // whether keys and values are in 8 bits, see `entry_size`
    float* x;                            // [T, H] a drafter's states, then what leaves the last layer
    const float* above;                  // [R, above_count, H] where a guess takes its parent's state from; or null
    int64_t above_count, above_first;    // cells of a row there, the staged column of the first
    const int64_t* taps;                 // boundaries, in the order of `tapped`
    int64_t tap_count;
    char* tapped;                        // [T, taps, H] in the model's dtype
    char* final;                         // [T, H] after the final norm, or null
    char* logits;                        // [T, V], or null
    float* scratch;                      // [T, eyas_token_scratch]
    RowStates states;
    int64_t threads;

    Tree tree(int64_t row) const { return {parents ? parents + row * parents_row : nullptr}; }
};

constexpr int64_t BLOCK = 16;  // the most tokens whose attention it takes at once
constexpr int64_t UNITS = 4;   // blocks of tokens for each thread, so that none waits long for the last

// Write `size` floats as a T.
inline void write(float* to, const float* from, int64_t size) { std::memcpy(to, from, size * sizeof(float)); }
inline void write(uint16_t* to, const float* from, int64_t size) {
    for (int64_t i = 0; i < size; i++) to[i] = narrowed(from[i]);
}

// As codes from -127 to 127, rounded to nearest, ties to even, and 1 / 127 of the greatest; one that isn't a number stays so.
inline void write(int8_t* to, const float* from, int64_t size) {
    vec top = zero(), nothing = zero();
    for (int64_t i = 0; i < size; i += LANES) {
        top = larger(top, larger(load(from + i), sub(zero(), load(from + i))));
        nothing = add(nothing, sub(load(from + i), load(from + i)));
    }
    const float most = highest(top);
    const bool counts = most >= LEAST_INPUT;
    for (int64_t i = 0; i < size; i += LANES) store_codes(to + i, mul(load(from + i), all(counts ? 127.0f / most : 0.0f)));
    const float factor = (counts ? most * (1.0f / 127.0f) : 0.0f) + sum(nothing);
    std::memcpy(to + size, &factor, sizeof(float));
}

inline int64_t widest_input(const Decoder& decoder) {
    bool embeds = decoder.mix.weight || (decoder.count && decoder.layers[0].embedding_norm);
    return embeds ? 2 * decoder.hidden : decoder.hidden;
}

inline int64_t widest_mixed(const Decoder& d) {
    int64_t most = d.heads * mixed_size(d);
    for (int64_t i = 0; i < d.count; i++) most = std::max(most, mixed_size(d.layers[i].recurrent));
    return most;
}

// Floats of scratch that each token takes.
inline int64_t token_scratch(const Decoder& d) {
    return widest_input(d) + d.hidden + d.heads * d.size * (1 + d.gates) + widest_mixed(d) + keys_size(d) +
           values_size(d) + d.intermediate;
}

// Call `work(t, count, columns, counts)` for tokens `first` to `stop`, in runs of one row in which each token sees what
// the one before saw: of `columns` the first `counts[i]`. `room` is for twice as many columns as any token sees.
template <class Work>
void in_runs(const Pass& pass, int64_t window, int64_t first, int64_t stop, int64_t* room, const Work& work) {
    auto cell_of = [&](int64_t t) { return pass.cells ? pass.cells[t] : t; };
    for (int64_t t = first; t < stop;) {
        const int64_t row = cell_of(t) / pass.columns;
        const Tree tree = pass.tree(row);
        int64_t *held = room, *next = room + pass.most, counts[BLOCK], count = 0, length = 0;
        const int64_t* list = nullptr;
        for (; t + count < stop && cell_of(t + count) / pass.columns == row; count++) {
            const int64_t last = pass.mode == BLOCKS ? pass.columns - 1 : cell_of(t + count) % pass.columns;
            const int64_t* found = visible(pass.lengths[row], tree, pass.before + last, window, next, length);
            if (count && (length < counts[count - 1] || std::memcmp(found, list, counts[count - 1] * sizeof(int64_t)))) break;
            counts[count] = length;
            list = found;
            std::swap(held, next);
        }
        work(t, count, list, counts);
        t += count;
    }
}

template <class T>  // T: what the outputs hold, and the cache if it isn't in codes
void run(const Decoder& d, const Pass& pass) {
    const int64_t tokens = pass.tokens, hidden = d.hidden, wide = widest_input(d);
    const int64_t q_size = d.heads * d.size, kv_size = keys_size(d), v_size = values_size(d),
                  out_size = d.heads * mixed_size(d);
    const int64_t shares = shares_of(d), group = (d.heads + shares - 1) / shares;  // heads that share keys
    const bool bf16 = d.bf16;
    const Gating gating{d.activation, 0, 0};
    float* normed = pass.scratch;               // [T, wide]
    float* residual = normed + tokens * wide;   // [T, H] what a layer adds to, if that isn't its input; or what its
                                                // attention adds, until its MLP has read the same state
    float* q = residual + tokens * hidden;      // [T, heads, D]
    float* k = q + tokens * q_size;             // [T, kv_heads, D]
    float* v = k + tokens * kv_size;            // of latent attention: what its queries are made of
    float* gates = v + tokens * v_size;         // [T, heads, D] of attention, if there are any
    float* mixed = gates + tokens * q_size * d.gates;  // [T, heads, D or V]
    float* gated = mixed + tokens * widest_mixed(d);   // [T, intermediate]

    auto cell_of = [&](int64_t t) { return pass.cells ? pass.cells[t] : t; };
    auto tap = [&](int64_t boundary, int64_t t, const float* state) {
        for (int64_t i = 0; i < pass.tap_count; i++)
            if (pass.taps[i] == boundary)
                write(reinterpret_cast<T*>(pass.tapped) + (t * pass.tap_count + i) * hidden, state, hidden);
    };
    auto norm_or_copy = [&](const float* state, const float* weight, float* out) {
        if (weight)
            norm(d, state, weight, hidden, out);
        else
            std::memcpy(out, state, hidden * sizeof(float));
    };
    const int64_t stage = pass.before, most = pass.most;
    const int64_t block = std::clamp<int64_t>(tokens * shares / (UNITS * pass.threads), 4, BLOCK);
    const int64_t blocks = (tokens + block - 1) / block;
    auto tree_of = [&](int64_t row) { return pass.tree(row); };
    auto position_of = [&](int64_t t) {
        const int64_t row = cell_of(t) / pass.columns, column = stage + cell_of(t) % pass.columns;
        const int64_t position = pass.lengths[row] + tree_of(row).depth(column) - 1;
        return d.limit ? std::min(position, d.limit - 1) : position;
    };
    const bool of_drafter = d.mix.weight || d.layers[0].embedding_norm, context = pass.mode == CONTEXT;
    const float* input = context ? pass.x : normed;  // of the products of queries, keys and values
    const int64_t input_width = context ? hidden : wide;
    Mixture mixture(d.layers, d.count, tokens);
    Region region(pass.threads);
    Narrowed narrowed(region, bf16);
    Own<Room> rooms;
    Own<LatentQueries> of_latents;
    auto stored = [&](const auto& work) {  // with a pointer to what the cache holds
        return pass.in_codes ? work(static_cast<int8_t*>(nullptr)) : work(static_cast<T*>(nullptr));
    };
    // Where entries of so many numbers of a row's head begin in a layer's cache [slots, heads, C, entry].
    auto place_of = [&](auto* base, int64_t row, int64_t heads, int64_t h, int64_t size) {
        using C = std::remove_pointer_t<decltype(base)>;
        return base + ((pass.slot + row) * heads + h) * pass.capacity * entry_size<C>(size);
    };
    Recurrence recurrence(d, pass.states, tokens);
    if (pass.states.rows) {
        std::vector<int64_t> at(pass.states.rows * pass.columns, -1);
        for (int64_t t = 0; t < tokens; t++) at[cell_of(t)] = t;
        recurrence.plan(std::move(at), pass.columns, tree_of);
    }

    region.share(context ? 0 : tokens, 1, [&](int64_t t, int64_t) {
        float* state = pass.x + t * hidden;
        if (pass.above) {
            const int64_t row = cell_of(t) / pass.columns, column = stage + cell_of(t) % pass.columns;
            const int64_t parent = std::max<int64_t>(tree_of(row).parent(column) - pass.above_first, 0);
            std::memcpy(state, pass.above + (row * pass.above_count + parent) * hidden, hidden * sizeof(float));
        }
        float* embedded = of_drafter ? normed + t * wide : state;
        embed(d, pass.ids[t], d.position_embedding ? position_of(t) : 0, embedded);
        if (d.mix.weight) std::memcpy(normed + t * wide + hidden, state, hidden * sizeof(float));
    });
    if (d.mix.weight && !context)
        region.share(panels(d.mix), piece_of(tokens), [&](int64_t first, int64_t stop) {
            multiply(d.mix, narrowed.of(d.mix, normed, wide, tokens), first, stop, bf16,
                     [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) { put(pass.x + t * hidden, o, hidden, sum); });
        });

    auto attention = [&](const Layer& layer, int64_t index) {
        // Where 16 outputs go of a product of several parts of each head: query, key and value, or query and gate.
        auto sort_out = [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) {
            float* parts[3] = {q, d.gates ? gates : k, v};
            const int64_t turns = d.gates ? 2 : 3;
            put(parts[o / d.size % turns] + t * q_size + o / d.size / turns * d.size, o % d.size, d.size, sum);
        };
        const int64_t of_q = context ? 0 : panels(layer.q), of_k = panels(layer.k), of_v = panels(layer.v);
        region.share(of_q + of_k + of_v, piece_of(tokens), [&](int64_t first, int64_t stop) {
            auto part = [&](const Linear& linear, int64_t before, float* to, int64_t size) {
                int64_t a = std::max<int64_t>(first - before, 0), b = std::min(stop - before, panels(linear));
                if (a < b)
                    multiply(linear, narrowed.of(linear, input, input_width, tokens), a, b, bf16,
                             [=](int64_t t, int64_t o, const vec(&sum)[PARTS]) { put(to + t * size, o, size, sum); });
            };
            if (d.heads_in_turn || (d.gates && first < of_q))
                multiply(layer.q, narrowed.of(layer.q, input, input_width, tokens), first, std::min(stop, of_q), bf16, sort_out);
            else if (!context)
                part(layer.q, 0, layer.latent.query.weight ? v : q, layer.q.out);
            part(layer.k, of_q, k, kv_size);
            part(layer.v, of_q + of_k, v, kv_size);
        });

        auto entry_of = [&](int64_t t) {  // of a token's position in the RoPE tables
            return (std::max<int64_t>(layer.rope, 0) * pass.positions + position_of(t)) * d.rotated;
        };
        region.share(tokens, 1, [&](int64_t t, int64_t) {
            const int64_t cell = cell_of(t), column = stage + cell % pass.columns;
            const int64_t row = cell / pass.columns, entry = entry_of(t);
            const int64_t at = pass.lengths[row] + column;
            auto keep = [&](char* base, int64_t heads, int64_t h, int64_t size, const float* from) {
                stored([&](auto* kind) {
                    using C = std::remove_pointer_t<decltype(kind)>;
                    write(place_of(reinterpret_cast<C*>(base), row, heads, h, size) + at * entry_size<C>(size), from, size);
                });
            };
            if (d.rank) {
                float *latent = k + t * kv_size, *of_query = v + t * v_size;
                rms_norm(d, latent, layer.latent.norm, d.rank, latent, d.latent_eps);
                turn(d, latent + d.rank, pass.cosines + entry, pass.sines + entry);
                keep(pass.keys[index], 1, 0, d.rank, latent);
                keep(pass.values[index], 1, 0, d.rotated, latent + d.rank);
                if (layer.latent.query.weight) rms_norm(d, of_query, layer.latent.query_norm, v_size, of_query, d.latent_eps);
                return;
            }
            auto turn = [&](float* head) {
                if (layer.rope >= 0) rotate(head, pass.cosines + entry, pass.sines + entry, d.rotated, bf16);
            };
            if (!context) {
                norm_heads(d, q + t * q_size, layer.q_norm, d.heads);
                for (int64_t h = 0; h < d.heads; h++) turn(q + t * q_size + h * d.size);
            }
            norm_heads(d, k + t * kv_size, layer.k_norm, d.kv_heads);
            for (int64_t h = 0; h < d.kv_heads; h++) {
                float* key = k + t * kv_size + h * d.size;
                turn(key);
                keep(pass.keys[index], d.kv_heads, h, d.size, key);
                keep(pass.values[index], d.kv_heads, h, d.size, v + t * kv_size + h * d.size);
            }
        });
        if (context) return;
        if (layer.latent.query.weight)
            region.share(panels(layer.latent.query), piece_of(tokens), [&](int64_t first, int64_t stop) {
                multiply(layer.latent.query, narrowed.of(layer.latent.query, v, v_size, tokens), first, stop, bf16,
                         [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) { put(q + t * q_size, o, q_size, sum); });
            });

        // The heads of a group read the same keys; so do tokens of a row of which each sees what the one before saw.
        region.share(shares * blocks, 1, [&](int64_t unit, int64_t) {
            const int64_t at_once = std::min(block, tokens);
            Room& room = rooms.mine(score_room(at_once * group, most), 2 * most);
            LatentQueries& latents = of_latents.mine(d, at_once, group);
            const int64_t h = unit / blocks, first = unit % blocks * block, stop = std::min(tokens, first + block);
            const int64_t head = h * group, last = std::min(head + group, d.heads);
            if (d.rank)
                latents.absorb(layer, q + first * q_size, stop - first, head, last,
                               [&](int64_t i) { return entry_of(first + i); }, pass.cosines, pass.sines);
            auto attend = [&](int64_t t, int64_t count, const int64_t* list, const int64_t* counts) {
                const int64_t row = cell_of(t) / pass.columns;
                stored([&](auto* kind) {
                    using C = std::remove_pointer_t<decltype(kind)>;
                    const C *keys = reinterpret_cast<C*>(pass.keys[index]), *values = reinterpret_cast<C*>(pass.values[index]);
                    if (d.rank)
                        return latents.attend(place_of(keys, row, 1, 0, d.rank), place_of(values, row, 1, 0, d.rotated), list,
                                              t - first, count, counts, last - head, room.scores.get());
                    Queries<C> queries({place_of(keys, row, d.kv_heads, h, d.size), place_of(values, row, d.kv_heads, h, d.size),
                                        list, d.size, d.size, d.scale, d.softcap, bf16}, room.scores.get());
                    for (int64_t i = 0; i < count; i++)
                        for (int64_t g = head; g < last; g++) {
                            const int64_t at = (t + i) * q_size + g * d.size;
                            queries.add(q + at, mixed + at, counts[i], layer.sinks ? layer.sinks[g] : NO_SINK);
                        }
                    queries.finish();
                });
            };
            in_runs(pass, layer.window, first, stop, room.columns.get(), attend);
            if (d.rank) latents.expand(layer, stop - first, head, last, mixed + first * out_size);
        });
        region.share(d.gates ? tokens : 0, 1, [&](int64_t t, int64_t) {
            for (int64_t i = t * q_size; i < (t + 1) * q_size; i += LANES) {
                const vec share = div(all(1.0f), add(all(1.0f), exponential(sub(zero(), load(gates + i)))));
                const vec gated = mul(load(mixed + i), bf16 ? rounded(share) : share);
                store(mixed + i, bf16 ? rounded(gated) : gated);
            }
        });
    };

    for (int64_t index = 0; index < d.count; index++) {
        const Layer& layer = d.layers[index];
        region.share(context ? 0 : tokens, 1, [&](int64_t t, int64_t) {
            float* state = pass.x + t * hidden;
            float* out = normed + t * wide;
            tap(index, t, state);
            if (layer.embedding_norm) {
                norm(d, out, layer.embedding_norm, hidden, out);
                out += hidden;
            }
            norm_or_copy(state, layer.input_norm, out);
            if (layer.normed_residual) std::memcpy(residual + t * hidden, out, hidden * sizeof(float));
        });
        const int64_t mixed_width = layer.recurrent.count ? mixed_size(layer.recurrent) : out_size;
        if (layer.recurrent.count)
            recurrence.run(region, narrowed, layer.recurrent, normed, wide, tree_of, cell_of, mixed);
        else
            attention(layer, index);
        if (context) continue;

        // What attention or MLP adds to `before`: at once, or put aside in `aside` [T, ld].
        auto product = [&](const Linear& linear, const float* x, int64_t ldx, const float* before, float* aside, int64_t ld) {
            region.share(panels(linear), piece_of(tokens), [&](int64_t first, int64_t stop) {
                multiply(linear, narrowed.of(linear, x, ldx, tokens), first, stop, bf16,
                         [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) {
                             if (aside) return put(aside + t * ld, o, hidden, sum);
                             for (int part = 0; part < PARTS; part++) {
                                 const int64_t at = t * hidden + o + part * LANES;
                                 vec output = sum[part];
                                 if (d.in_parallel) output = add(output, load(residual + at));
                                 if (d.in_parallel && bf16) output = rounded(output);
                                 store(pass.x + at, added(d, load(before + at), output));
                             }
                         });
            });
        };
        auto add_normed = [&](int64_t t, const float* before, const float* weight) {
            float* output = normed + t * wide;
            norm(d, output, weight, hidden, output);
            for (int64_t i = 0, at = t * hidden; i < hidden; i += LANES, at += LANES)
                store(pass.x + at, added(d, load(before + at), load(output + i)));
        };
        const float* before = layer.normed_residual ? residual : pass.x;
        if (d.in_parallel)
            product(layer.o, mixed, mixed_width, before, residual, hidden);
        else
            product(layer.o, mixed, mixed_width, before, layer.attention_out_norm ? normed : nullptr, wide);
        region.share(tokens, 1, [&](int64_t t, int64_t) {
            if (layer.attention_out_norm) add_normed(t, before, layer.attention_out_norm);
            norm_or_copy(pass.x + t * hidden, layer.mlp_norm, normed + t * wide);
        });
        const Experts& experts = layer.experts;
        if (experts.count) {
            mixture.route(region, narrowed, experts, normed, wide, tokens, bf16);
            mixture.run(region, narrowed, experts, normed, wide, tokens, bf16);
        }
        if (layer.down.weight) {
            region.share(panels(layer.up), piece_of(tokens), [&](int64_t first, int64_t stop) {
                const Tokens own = narrowed.of(layer.up, normed, wide, tokens);
                if (layer.gate.weight)
                    gated_mlp(layer.gate, layer.up, own, first, stop, bf16, gating, gated);
                else
                    plain_mlp(layer.up, own, first, stop, bf16, d.activation, gated);
            });
            product(layer.down, gated, layer.up.out, pass.x, experts.count || layer.mlp_out_norm ? normed : nullptr, wide);
        }
        if (experts.count)
            region.share(tokens, 1, [&](int64_t t, int64_t) {
                float *state = pass.x + t * hidden, *output = normed + t * wide;
                mixture.sum(experts, t, bf16, layer.down.weight ? output : nullptr, output);
                if (layer.mlp_out_norm) return;
                for (int64_t i = 0; i < hidden; i += LANES)
                    store(state + i, added(d, load(state + i), load(output + i)));
            });
        if (layer.mlp_out_norm)
            region.share(tokens, 1, [&](int64_t t, int64_t) { add_normed(t, pass.x, layer.mlp_out_norm); });
    }

    region.share(context ? 0 : tokens, 1, [&](int64_t t, int64_t) {
        float* out = normed + t * wide;
        tap(d.count, t, pass.x + t * hidden);
        norm_or_copy(pass.x + t * hidden, d.norm, out);
        tap(d.count + 1, t, out);
        if (d.returns_normed) std::memcpy(pass.x + t * hidden, out, hidden * sizeof(float));
        if (pass.final) write(reinterpret_cast<T*>(pass.final) + t * hidden, out, hidden);
    });
    if (pass.logits)
        region.share(panels(d.head), piece_of(tokens), [&](int64_t first, int64_t stop) {
            multiply(d.head, narrowed.of(d.head, normed, wide, tokens), first, stop, bf16,
                     [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) {
                         put(reinterpret_cast<T*>(pass.logits) + t * d.head.out, o, d.head.out, sum);
                     });
        });
}

}  // namespace eyas
