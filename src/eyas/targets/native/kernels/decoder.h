// A pass of a decoder's layers over the slot cache, in stages whose pieces threads share (region.h).
//
// The layers are those of Llama and its relatives: RMSNorm or LayerNorm before or after attention and MLP; grouped-query
// attention with RoPE (and any biases and norms of queries and keys), latent attention (latent.h) or a recurrence
// (recurrent.h); an MLP, after attention or in parallel with it, or experts. A drafter's first layer also reads
// embeddings, each input under its own norm. A block drafter's tokens see all of their block, and its layers compute keys
// and values from the target's states alone. Activations are float32; those of a bf16 model are rounded wherever its
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

inline Tree tree_of_row(const Pass& pass, int64_t row) {
    return {pass.parents ? pass.parents + row * pass.parents_row : nullptr, pass.roots};
}

constexpr int64_t BLOCK = 16;  // the most tokens of a piece of attention
constexpr int64_t UNITS = 4;   // pieces of attention for each thread, so that none waits long for the last

// Write `size` floats as a T.
inline void write(float* to, const float* from, int64_t size) { std::memcpy(to, from, size * sizeof(float)); }
inline void write(uint16_t* to, const float* from, int64_t size) {
    for (int64_t i = 0; i < size; i++) to[i] = narrowed(from[i]);
}

// Quantize to codes from -127 to 127, rounded to nearest, ties to even, followed by their scale: 1 / 127 of the greatest
// magnitude, or NaN if a value isn't finite.
inline void write(int8_t* to, const float* from, int64_t size) {
    const Scales scales(from, size);
    for (int64_t i = 0; i < size; i += LANES) store_codes(to + i, mul(load(from + i), all(scales.to_codes)));
    std::memcpy(to + size, &scales.from_codes, sizeof(float));
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

// Floats of scratch per token.
inline int64_t token_scratch(const Decoder& d) {
    return widest_input(d) + d.hidden + d.heads * d.size * (1 + d.gates) + widest_mixed(d) + keys_size(d) +
           values_size(d) + d.intermediate + d.fuse.in;
}

// Call `work(t, count, columns, counts)` for tokens [first, stop), in runs of one row in which each token sees all that the
// one before it sees: token i of a run sees the first `counts[i]` of `columns`. `room` holds twice the columns of any token.
template <class Work>
void in_runs(const Pass& pass, const Window& window, int64_t first, int64_t stop, int64_t* room, const Work& work) {
    auto cell_of = [&](int64_t t) { return pass.cells ? pass.cells[t] : t; };
    for (int64_t t = first; t < stop;) {
        const int64_t row = cell_of(t) / pass.columns;
        const Tree tree = tree_of_row(pass, row);
        int64_t *held = room, *next = room + pass.most, counts[BLOCK + 1], count = 0, length = 0;
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

// One pass, stage by stage. T: the type of the outputs, and of the cache unless it is quantized.
template <class T>
class DecoderRun {
  public:
    DecoderRun(const Decoder& d, const Pass& pass)
        : d_(d), pass_(pass), tokens_(pass.tokens), hidden_(d.hidden), wide_(widest_input(d)), q_size_(d.heads * d.size),
          kv_size_(keys_size(d)), v_size_(values_size(d)), out_size_(d.heads * mixed_size(d)),
          bf16_(d.bf16),
          context_(pass.mode == CONTEXT), normed_(pass.scratch), residual_(normed_ + tokens_ * wide_),
          q_(residual_ + tokens_ * hidden_), k_(q_ + tokens_ * q_size_), v_(k_ + tokens_ * kv_size_),
          gates_(v_ + tokens_ * v_size_), mixed_(gates_ + tokens_ * q_size_ * d.gates),
          gated_(mixed_ + tokens_ * widest_mixed(d)), sources_(gated_ + tokens_ * d.intermediate),
          mixture_(d.layers, d.count, tokens_), region_(pass.threads), narrowed_(region_, bf16_),
          recurrence_(d, pass.states, tokens_) {
        if (!pass.states.rows) return;
        std::vector<int64_t> at(pass.states.rows * pass.columns, -1);
        for (int64_t t = 0; t < tokens_; t++) at[cell_of(t)] = t;
        recurrence_.plan(std::move(at), pass.columns, [&](int64_t row) { return tree_of(row); });
    }

    void run() {
        read_inputs();
        for (int64_t index = 0; index < d_.count; index++) {
            const Layer& layer = d_.layers[index];
            stages_ = context_ || (pass_.mode == STAGING && index + 1 == d_.count);
            norm_inputs(layer, index);
            mix(layer, index);
            if (!stages_) mlp(layer);
        }
        if (!stages_) finish();
    }

  private:
    int64_t cell_of(int64_t t) const { return pass_.cells ? pass_.cells[t] : t; }
    int64_t row_of(int64_t t) const { return cell_of(t) / pass_.columns; }
    int64_t column_of(int64_t t) const { return pass_.before + cell_of(t) % pass_.columns; }  // among the row's staged ones
    Tree tree_of(int64_t row) const { return tree_of_row(pass_, row); }
    int64_t position_of(int64_t t) const {
        const int64_t row = row_of(t), position = pass_.lengths[row] + tree_of(row).depth(column_of(t)) - 1;
        return d_.limit ? std::min(position, d_.limit - 1) : position;
    }
    int64_t entry_of(const Layer& layer, int64_t t) const {  // where a token's position begins in the RoPE tables
        return (std::max<int64_t>(layer.rope, 0) * pass_.positions + position_of(t)) * d_.rotated;
    }
    template <class Work>
    auto stored(const Work& work) const {  // call `work` with a null pointer of the cache's type
        return pass_.in_codes ? work(static_cast<int8_t*>(nullptr)) : work(static_cast<T*>(nullptr));
    }
    // Where the entries of a row's head, `size` numbers each, begin in a layer's cache [slots, heads, C, entry].
    template <class C>
    C* entries_of(char* base, int64_t row, int64_t heads, int64_t h, int64_t size) const {
        return reinterpret_cast<C*>(base) + ((pass_.slot + row) * heads + h) * pass_.capacity * entry_size<C>(size);
    }
    // Write a token's entry of `size` numbers.
    void keep_entry(char* base, int64_t t, int64_t heads, int64_t h, int64_t size, const float* from) const {
        const int64_t row = row_of(t), column = pass_.lengths[row] + column_of(t);
        stored([&](auto* kind) {
            using C = std::remove_pointer_t<decltype(kind)>;
            write(entries_of<C>(base, row, heads, h, size) + column * entry_size<C>(size), from, size);
        });
    }

    void tap(int64_t boundary, int64_t t, const float* state) const {
        for (int64_t i = 0; i < pass_.tap_count; i++)
            if (pass_.taps[i] == boundary)
                write(reinterpret_cast<T*>(pass_.tapped) + (t * pass_.tap_count + i) * hidden_, state, hidden_);
    }

    void norm_or_copy(const float* state, const float* weight, float* out) const {
        if (weight)
            norm(d_, state, weight, hidden_, out);
        else
            std::memcpy(out, state, hidden_ * sizeof(float));
    }

    // Write a product of x [T, ldx] to `to` [T, ld], whose rows have room for `size` outputs.
    template <class Out>
    void product(const Linear& linear, const float* x, int64_t ldx, Out* to, int64_t size, int64_t ld) {
        region_.share(panels(linear), piece_of(linear, tokens_), [&](int64_t first, int64_t stop) {
            multiply(linear, narrowed_.of(linear, x, ldx, tokens_), first, stop, bf16_,
                     [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) { put(to + t * ld, o, size, sum); });
        });
    }

    // The tokens' input states: their embeddings, their parents' states or the target's, or both.
    void read_inputs() {
        const bool of_drafter = d_.mix.weight || d_.layers[0].embedding_norm;
        if (pass_.sources) {
            const T* from = reinterpret_cast<const T*>(pass_.sources);
            for (int64_t i = 0; i < tokens_ * d_.fuse.in; i += LANES) store(sources_ + i, load(from + i));
            product(d_.fuse, sources_, d_.fuse.in, pass_.x, hidden_, hidden_);
        }
        region_.share(context_ ? 0 : tokens_, 1, [&](int64_t t, int64_t) {
            float* state = pass_.x + t * hidden_;
            if (pass_.above) {
                const int64_t row = row_of(t);
                const int64_t parent = std::max<int64_t>(tree_of(row).parent(column_of(t)) - pass_.above_first, 0);
                std::memcpy(state, pass_.above + (row * pass_.above_count + parent) * hidden_, hidden_ * sizeof(float));
            }
            float* embedded = of_drafter ? normed_ + t * wide_ : state;
            embed(d_, pass_.ids[t], d_.position_embedding ? position_of(t) : 0, embedded);
            if (d_.mix.weight) std::memcpy(normed_ + t * wide_ + hidden_, state, hidden_ * sizeof(float));
        });
        if (d_.mix.weight && !context_) product(d_.mix, normed_, wide_, pass_.x, hidden_, hidden_);
    }

    void norm_inputs(const Layer& layer, int64_t index) {
        region_.share(context_ ? 0 : tokens_, 1, [&](int64_t t, int64_t) {
            float* state = pass_.x + t * hidden_;
            float* out = normed_ + t * wide_;
            tap(index, t, state);
            if (layer.embedding_norm) {
                norm(d_, out, layer.embedding_norm, hidden_, out);
                out += hidden_;
            }
            norm_or_copy(state, layer.input_norm, out);
            if (layer.normed_residual) std::memcpy(residual_ + t * hidden_, out, hidden_ * sizeof(float));
        });
    }

    void attention(const Layer& layer, int64_t index) {
        project(layer);
        char *keys = pass_.keys[index], *values = pass_.values[index];
        region_.share(tokens_, 1, [&](int64_t t, int64_t) {
            if (d_.rank)
                stage_latent(layer, t, keys, values);
            else
                stage_heads(layer, t, keys, values);
        });
        if (stages_) return;
        if (layer.latent.query.weight) product(layer.latent.query, v_, v_size_, q_, q_size_, q_size_);
        attend(layer, keys, values);
        if (d_.gates) gate();
    }

    // Queries, unless the layer only stages, keys and values.
    void project(const Layer& layer) {
        const float* input = context_ ? pass_.x : normed_;
        const int64_t width = context_ ? hidden_ : wide_;
        // Store 16 outputs of a product that makes several parts of each head: query, key and value, or query and gate.
        auto sort_out = [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) {
            float* parts[3] = {q_, d_.gates ? gates_ : k_, v_};
            const int64_t turns = d_.gates ? 2 : 3;
            put(parts[o / d_.size % turns] + t * q_size_ + o / d_.size / turns * d_.size, o % d_.size, d_.size, sum);
        };
        const int64_t of_q = stages_ && !d_.heads_in_turn ? 0 : panels(layer.q), of_k = panels(layer.k), of_v = panels(layer.v);
        region_.share(of_q + of_k + of_v, piece_of(layer.q, tokens_), [&](int64_t first, int64_t stop) {
            auto part = [&](const Linear& linear, int64_t before, float* to, int64_t size) {
                int64_t a = std::max<int64_t>(first - before, 0), b = std::min(stop - before, panels(linear));
                if (a < b)
                    multiply(linear, narrowed_.of(linear, input, width, tokens_), a, b, bf16_,
                             [=](int64_t t, int64_t o, const vec(&sum)[PARTS]) { put(to + t * size, o, size, sum); });
            };
            if (d_.heads_in_turn || (d_.gates && first < of_q))
                multiply(layer.q, narrowed_.of(layer.q, input, width, tokens_), first, std::min(stop, of_q), bf16_, sort_out);
            else if (!stages_)
                part(layer.q, 0, layer.latent.query.weight ? v_ : q_, layer.q.out);
            part(layer.k, of_q, k_, kv_size_);
            part(layer.v, of_q + of_k, v_, kv_size_);
        });
    }

    // Put a token's latent into the cache, and the key that its heads share.
    void stage_latent(const Layer& layer, int64_t t, char* keys, char* values) {
        float *latent = k_ + t * kv_size_, *of_query = v_ + t * v_size_;
        const int64_t entry = entry_of(layer, t);
        rms_norm(d_, latent, layer.latent.norm, d_.rank, latent, d_.latent_eps);
        turn(d_, latent + d_.rank, pass_.cosines + entry, pass_.sines + entry);
        keep_entry(keys, t, 1, 0, d_.rank, latent);
        keep_entry(values, t, 1, 0, d_.rotated, latent + d_.rank);
        if (layer.latent.query.weight && !stages_)
            rms_norm(d_, of_query, layer.latent.query_norm, v_size_, of_query, d_.latent_eps);
    }

    // Norm and rotate a token's queries and keys; put its keys and values into the cache.
    void stage_heads(const Layer& layer, int64_t t, char* keys, char* values) {
        const int64_t entry = entry_of(layer, t);
        auto turn = [&](float* head) {
            if (layer.rope >= 0) rotate(head, pass_.cosines + entry, pass_.sines + entry, d_.rotated, bf16_);
        };
        if (!stages_) {
            norm_heads(d_, q_ + t * q_size_, layer.q_norm, d_.heads);
            for (int64_t h = 0; h < d_.heads; h++) turn(q_ + t * q_size_ + h * d_.size);
        }
        norm_heads(d_, k_ + t * kv_size_, layer.k_norm, d_.kv_heads);
        for (int64_t h = 0; h < d_.kv_heads; h++) {
            float* key = k_ + t * kv_size_ + h * d_.size;
            turn(key);
            keep_entry(keys, t, d_.kv_heads, h, d_.size, key);
            keep_entry(values, t, d_.kv_heads, h, d_.size, v_ + t * kv_size_ + h * d_.size);
        }
    }

    // The number of pieces that attention is split into: one for each of the `shares` and `BLOCK` tokens. If these are few and
    // threads can't share them equally, all items, of `grain` queries each, are split evenly instead: into few pieces, as each
    // one reads its keys and values, but not so few that threads wait long for the last. Rows have keys of their own.
    int64_t pieces_of(int64_t shares, int64_t items, int64_t grain) const {
        const int64_t threads = pass_.threads, blocks = (tokens_ + BLOCK - 1) / BLOCK, pieces = shares * blocks;
        if (pieces % threads == 0 || pieces >= UNITS * threads) return pieces;
        int64_t turns = (pieces + threads - 1) / threads;
        if (blocks == 1) turns = std::max(pieces / threads, std::clamp<int64_t>(items * grain / (threads * BLOCK), 1, UNITS));
        return std::min(turns * threads * std::min(row_of(tokens_ - 1) + 1, UNITS), items);
    }

    int64_t heads_together() const { return (d_.heads + shares_of(d_) - 1) / shares_of(d_); }  // which share keys

    // The heads of a group read the same keys; so do tokens of a row if each sees all that the one before it sees.
    void attend(const Layer& layer, char* all_keys, char* all_values) {
        const int64_t shares = shares_of(d_), group = heads_together();
        const int64_t grain = d_.rank ? group : 1;  // queries that stay together
        const int64_t each = tokens_ * group / grain, items = shares * each, pieces = pieces_of(shares, items, grain);
        const int64_t most = std::min(each, (items + pieces - 1) / pieces) * grain;
        region_.share(pieces, 1, [&](int64_t piece, int64_t) {
            const int64_t stop = items * (piece + 1) / pieces;
            for (int64_t item = items * piece / pieces, next; item < stop; item = next) {
                const int64_t h = item / each;
                next = std::min(stop, (h + 1) * each);
                attend_share(layer, all_keys, all_values, h, (item - h * each) * grain, (next - h * each) * grain, most);
            }
        });
    }

    // Attention of queries [from, to), by token, of the heads that share the keys of h; at most `most` at a time.
    void attend_share(const Layer& layer, char* all_keys, char* all_values, int64_t h, int64_t from, int64_t to, int64_t most) {
        const int64_t group = heads_together();
        const int64_t first = from / group, stop = (to + group - 1) / group, head = h * group;
        const int64_t last = std::min(head + group, d_.heads);
        Room& room = rooms_.mine(score_room(most, pass_.most), 2 * pass_.most);
        LatentQueries& latents = of_latents_.mine(d_, (most + group - 1) / group, group);
        if (d_.rank)
            latents.absorb(layer, q_ + first * q_size_, stop - first, head, last,
                           [&](int64_t i) { return entry_of(layer, first + i); }, pass_.cosines, pass_.sines);
        auto attend = [&](int64_t t, int64_t count, const int64_t* list, const int64_t* counts) {
            const int64_t row = row_of(t);
            stored([&](auto* kind) {
                using C = std::remove_pointer_t<decltype(kind)>;
                if (d_.rank)
                    return latents.attend(static_cast<const C*>(entries_of<C>(all_keys, row, 1, 0, d_.rank)),
                                          static_cast<const C*>(entries_of<C>(all_values, row, 1, 0, d_.rotated)), list,
                                          t - first, count, counts, last - head, room.scores.get());
                Queries<C> queries({entries_of<C>(all_keys, row, d_.kv_heads, h, d_.size),
                                    entries_of<C>(all_values, row, d_.kv_heads, h, d_.size), list, d_.size, d_.size,
                                    d_.scale, d_.softcap, bf16_}, room.scores.get());
                const int64_t begin = std::max(from, t * group), end = std::min(to, (t + count) * group);
                for (int64_t i = begin; i < end; i++) {
                    const int64_t g = head + i % group, at = i / group * q_size_ + g * d_.size;
                    queries.add(q_ + at, mixed_ + at, counts[i / group - t], layer.sinks ? layer.sinks[g] : NO_SINK);
                }
                queries.finish();
            });
        };
        in_runs(pass_, Window{layer.window, layer.anchored, pass_.guesses}, first, stop, room.columns.get(), attend);
        if (d_.rank) latents.expand(layer, stop - first, head, last, mixed_ + first * out_size_);
    }

    // Multiply the output of attention by the sigmoids of its gates.
    void gate() {
        region_.share(tokens_, 1, [&](int64_t t, int64_t) {
            for (int64_t i = t * q_size_; i < (t + 1) * q_size_; i += LANES) {
                const vec share = div(all(1.0f), add(all(1.0f), exponential(sub(zero(), load(gates_ + i)))));
                const vec gated = mul(load(mixed_ + i), bf16_ ? rounded(share) : share);
                store(mixed_ + i, bf16_ ? rounded(gated) : gated);
            }
        });
    }

    vec keep(vec value) const { return bf16_ ? rounded(value) : value; }
    vec scaled(vec output, float scale) const { return scale == 1.0f ? output : keep(mul(output, all(scale))); }

    // Compute `scale` times the product of x, plus `with` [T, H] unless that is null. Put it in `aside` [T, ld]; if that is
    // null, add it to `before` as the new state.
    void add_product(const Linear& linear, const float* x, float scale, const float* with, const float* before, float* aside,
                     int64_t ld) {
        region_.share(panels(linear), piece_of(linear, tokens_), [&](int64_t first, int64_t stop) {
            multiply(linear, narrowed_.of(linear, x, linear.in, tokens_), first, stop, bf16_,
                     [&](int64_t t, int64_t o, vec(&sum)[PARTS]) {
                         for (int part = 0; part < PARTS; part++) {
                             const int64_t at = t * hidden_ + o + part * LANES;
                             sum[part] = scaled(sum[part], scale);
                             if (with) sum[part] = keep(add(sum[part], load(with + at)));
                             if (!aside) store(pass_.x + at, keep(add(load(before + at), sum[part])));
                         }
                         if (aside) put(aside + t * ld, o, hidden_, sum);
                     });
        });
    }

    void add_normed(int64_t t, const float* before, const float* weight) {
        float* output = normed_ + t * wide_;
        norm(d_, output, weight, hidden_, output);
        for (int64_t i = 0, at = t * hidden_; i < hidden_; i += LANES, at += LANES)
            store(pass_.x + at, keep(add(load(before + at), load(output + i))));
    }

    // Add the output of a recurrence, of attention, or of both, and norm the MLP's input.
    void mix(const Layer& layer, int64_t index) {
        const bool recurs = layer.recurrent.count, attends = layer.o.weight;
        const float* before = layer.normed_residual ? residual_ : pass_.x;
        float* normed_later = layer.attention_out_norm ? normed_ : nullptr;
        if (recurs) {
            recurrence_.run(region_, narrowed_, layer.recurrent, normed_, wide_, [&](int64_t row) { return tree_of(row); },
                            [&](int64_t t) { return cell_of(t); }, mixed_);
            add_product(layer.recurrent.out, mixed_, layer.recurrent_scale, nullptr, before,
                        attends ? residual_ : normed_later, attends ? hidden_ : wide_);
        }
        if (attends) attention(layer, index);
        if (stages_) return;
        if (attends && d_.in_parallel)
            add_product(layer.o, mixed_, layer.attention_scale, nullptr, before, residual_, hidden_);
        else if (attends)
            add_product(layer.o, mixed_, layer.attention_scale, recurs ? residual_ : nullptr, before, normed_later, wide_);
        region_.share(tokens_, 1, [&](int64_t t, int64_t) {
            if (layer.attention_out_norm) add_normed(t, before, layer.attention_out_norm);
            norm_or_copy(pass_.x + t * hidden_, layer.mlp_norm, normed_ + t * wide_);
        });
    }

    void mlp(const Layer& layer) {
        const Experts& experts = layer.experts;
        if (experts.count) {
            mixture_.route(region_, narrowed_, experts, normed_, wide_, tokens_, bf16_);
            mixture_.run(region_, narrowed_, experts, normed_, wide_, tokens_, bf16_);
        }
        if (layer.down.weight) {
            region_.share(panels(layer.up), piece_of(layer.up, tokens_), [&](int64_t first, int64_t stop) {
                const Tokens own = narrowed_.of(layer.up, normed_, wide_, tokens_);
                if (layer.gate.weight)
                    gated_mlp(layer.gate, layer.up, own, first, stop, bf16_, {d_.activation, 0, 0, layer.gate_scale}, gated_);
                else
                    plain_mlp(layer.up, own, first, stop, bf16_, d_.activation, gated_);
            });
            add_product(layer.down, gated_, experts.count ? 1.0f : layer.mlp_scale, d_.in_parallel ? residual_ : nullptr,
                        pass_.x, experts.count || layer.mlp_out_norm ? normed_ : nullptr, wide_);
        }
        if (experts.count)
            region_.share(tokens_, 1, [&](int64_t t, int64_t) {
                float *state = pass_.x + t * hidden_, *output = normed_ + t * wide_;
                mixture_.sum(experts, t, bf16_, layer.down.weight ? output : nullptr, output);
                if (layer.mlp_out_norm) return;
                for (int64_t i = 0; i < hidden_; i += LANES)
                    store(state + i, keep(add(load(state + i), scaled(load(output + i), layer.mlp_scale))));
            });
        if (layer.mlp_out_norm)
            region_.share(tokens_, 1, [&](int64_t t, int64_t) { add_normed(t, pass_.x, layer.mlp_out_norm); });
    }

    // The final norm and the head.
    void finish() {
        region_.share(tokens_, 1, [&](int64_t t, int64_t) {
            float* out = normed_ + t * wide_;
            tap(d_.count, t, pass_.x + t * hidden_);
            norm_or_copy(pass_.x + t * hidden_, d_.norm, out);
            tap(d_.count + 1, t, out);
            if (d_.returns_normed) std::memcpy(pass_.x + t * hidden_, out, hidden_ * sizeof(float));
            if (pass_.final) write(reinterpret_cast<T*>(pass_.final) + t * hidden_, out, hidden_);
            if (!pass_.kept || pass_.kept[t] < 0) return;
            write(pass_.kept_states + pass_.kept[t] * hidden_, pass_.x + t * hidden_, hidden_);
            write(reinterpret_cast<T*>(pass_.kept_final) + pass_.kept[t] * hidden_, out, hidden_);
        });
        if (pass_.logits) product(d_.head, normed_, wide_, reinterpret_cast<T*>(pass_.logits), d_.head.out, d_.head.out);
    }

    const Decoder& d_;
    const Pass& pass_;
    const int64_t tokens_, hidden_, wide_, q_size_, kv_size_, v_size_, out_size_;
    const bool bf16_, context_;
    bool stages_ = false;    // whether the current layer only puts keys and values into the cache
    float* const normed_;    // [T, wide]
    float* const residual_;  // [T, H] what a layer adds to, if that isn't its input; or attention's output, until the MLP has
                             // read the same state
    float* const q_;         // [T, heads, D]
    float* const k_;         // [T, kv_heads, D]
    float* const v_;         // [T, kv_heads, D]; of latent attention: the input of `Latent.query`
    float* const gates_;     // [T, heads, D] attention's gates, if there are any
    float* const mixed_;     // [T, heads, D or V]
    float* const gated_;     // [T, intermediate]
    float* const sources_;   // [T, inputs of `fuse`]
    Mixture mixture_;
    Region region_;
    Narrowed narrowed_;
    Own<Room> rooms_;
    Own<LatentQueries> of_latents_;
    Recurrence recurrence_;
};

}  // namespace eyas
