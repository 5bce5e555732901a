// Layers that mix tokens by a recurrence in place of attention: a convolution over the last inputs of each channel, then
// a state per head [key size, value size] that every token decays, adds to, and reads:
//
//     S = decay S + k (x) d,  y = q S        delta rule: d = factor (v - k (decay S)); Mamba-2: d = factor v
//
// or the convolution alone, over products of two inputs (LFM2).
//
// A token continues from the states of the token that it follows: its row's, or those after a node of the tree. It depends
// on nothing else: prompts, trees and commits all use the same step. Columns of a state are independent of each other, so
// they are processed in blocks whose states, for all inner nodes of a tree, stay in the cache.
//
// A slot's states are one vector; each layer has a piece of it, see `Recurrent`. A pass only reads the committed states. It
// stages the states after the columns that are kept in any case (a prompt's, a root). For guesses it keeps the inputs of
// their steps, and `fold` repeats the steps of the accepted ones on the staged states.
//
// Shapes: T tokens of a pass, R rows, Q columns of a row, C channels, K inputs of the convolution.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "experts.h"

namespace eyas {

// Floats kept per token: the outputs of the layer's `inputs`, the channels after the convolution, and the decay and the
// factor of each head.
inline int64_t row_size(const Recurrent& r) { return r.width + r.channels + (2 * r.heads + PANEL - 1) / PANEL * PANEL; }

inline int64_t row_size(const Decoder& d) {
    int64_t most = 0;
    for (int64_t i = 0; i < d.count; i++) most = std::max(most, row_size(d.layers[i].recurrent));
    return most;
}

// Mixed features per token, which a recurrent layer's `out` reads.
inline int64_t mixed_size(const Recurrent& r) { return r.heads ? r.heads * r.value_size : r.channels; }

constexpr int64_t COLUMNS = 4 * LANES;  // of a state that are processed together

// One step on `N` vectors of columns: the states `from` [key size, N] become the states `to`, from which `out` is read.
template <int N, bool DELTA>
void step(const float* from, float* to, const float* key, const float* query, const float* value, float decay,
          float factor, int64_t size, float* out) {
    constexpr int64_t row = N * LANES;
    const vec kept = all(decay);
    vec added[N], read[N];
    for (int n = 0; n < N; n++) added[n] = zero();
    if constexpr (DELTA)
        for (int64_t i = 0; i < size; i++) {
            const vec k = all(key[i]);
            for (int n = 0; n < N; n++) added[n] = fma(k, load(from + i * row + n * LANES), added[n]);
        }
    for (int n = 0; n < N; n++) {
        added[n] = mul(sub(load(value + n * LANES), mul(kept, added[n])), all(factor));
        read[n] = zero();
    }
    for (int64_t i = 0; i < size; i++) {
        const vec k = all(key[i]), q = all(query[i]);
        for (int n = 0; n < N; n++) {
            const vec next = fma(k, added[n], mul(kept, load(from + i * row + n * LANES)));
            store(to + i * row + n * LANES, next);
            read[n] = fma(q, next, read[n]);
        }
    }
    for (int n = 0; n < N; n++) store(out + n * LANES, read[n]);
}

using HeadStep = void (*)(const float*, float*, const float*, const float*, const float*, float, float, int64_t, float*);

inline HeadStep step_of(bool delta, int64_t columns) {
    static constexpr HeadStep steps[2][4] = {{step<1, false>, step<2, false>, step<3, false>, step<4, false>},
                                         {step<1, true>, step<2, true>, step<3, true>, step<4, true>}};
    return steps[delta][columns / LANES - 1];
}

// One token's step: the states that it continues from, and where the states after it go.
struct Turn {
    int64_t token, from, to;  // from, to: `COMMITTED`, `STAGED`, or the number of a guess's states
};
constexpr int64_t COMMITTED = -2, STAGED = -1;

// A row's turns. Guesses from whose states nothing continues share number 0.
struct Turns {
    std::vector<Turn> turns;
    int64_t sure = 0, guesses = 1;  // the number of sure turns; of guesses' states

    // The turns of a row's tokens [Q], -1 = none; the first `sure` of them follow each other.
    static Turns of(const int64_t* tokens, int64_t columns, const Tree& tree, int64_t sure) {
        Turns made;
        std::vector<int64_t> children(columns), numbers(columns, STAGED), unused;
        made.sure = std::min(sure, columns);
        for (int64_t c = made.sure; c < columns; c++)
            if (const int64_t parent = tree.parent(c); parent >= made.sure && tokens[c] >= 0) children[parent]++;
        for (int64_t c = 0; c < columns; c++) {
            if (tokens[c] < 0) continue;
            if (c < made.sure) {
                made.turns.push_back({tokens[c], c ? STAGED : COMMITTED, STAGED});
                continue;
            }
            const int64_t parent = tree.parent(c), from = parent < 0 ? COMMITTED : numbers[parent];
            const bool last = parent >= made.sure && --children[parent] == 0;  // it may overwrite its parent's
            int64_t to = 0;
            if (children[c] && last)
                to = from;
            else if (children[c] && unused.empty())
                to = made.guesses++;
            else if (children[c])
                to = unused.back(), unused.pop_back();
            if (!children[c] && last) unused.push_back(from);
            made.turns.push_back({tokens[c], from, numbers[c] = to});
        }
        return made;
    }
};

// The recurrent layers' work on the tokens of a pass, or on its accepted guesses.
class Recurrence {
  public:
    Recurrence(const Decoder& d, const RowStates& states, int64_t tokens)
        : d_(d), states_(states), tokens_(tokens), row_(states.rows ? row_size(d) : 0), turns_(states.rows) {}

    // Before a pass: row r has tokens `at` [R, Q] in its columns, -1 = none, which follow each other as `tree_of(r)` says.
    template <class TreeOf>
    void plan(std::vector<int64_t> at, int64_t columns, const TreeOf& tree_of) {
        at_ = std::move(at), columns_ = columns;
        for (int64_t r = 0; r < states_.rows; r++)
            turns_[r] = Turns::of(at_.data() + r * columns, columns, tree_of(r), states_.sure[r]);
    }

    // Run a layer on tokens x [T, ld] -> mixed [T, `mixed_size`].
    template <class TreeOf, class CellOf>
    void run(Region& region, Narrowed& narrowed, const Recurrent& layer, const float* x, int64_t ld, const TreeOf& tree_of,
             const CellOf& cell_of, float* mixed) {
        project(region, narrowed, layer, x, ld);
        region.share(layer.multiplier || layer.scales ? tokens_ : 0, 1, [&](int64_t t, int64_t) {
            if (layer.scales) multiply_into(row(t), row(t), layer.scales, layer.width);
            if (layer.multiplier) multiply_into(row(t), row(t), row(t) + layer.multiplier, layer.channels);
        });
        const int64_t normed = layer.delta ? 2 * layer.key_heads : 0;  // heads whose channels are normed
        const int64_t pieces = normed + (layer.channels - normed * layer.key_size + PIECE - 1) / PIECE + 1;
        region.share(tokens_ * pieces, 1, [&](int64_t unit, int64_t) {
            const int64_t t = unit / pieces, piece = unit % pieces, cell = cell_of(t);
            if (piece == pieces - 1) return gates(layer, row(t));
            if (piece < normed) {
                convolve(layer, t, cell, tree_of, piece * layer.key_size, (piece + 1) * layer.key_size);
                return unit_length(layer, row(t) + layer.width + piece * layer.key_size, piece < layer.key_heads);
            }
            const int64_t first = normed * layer.key_size + (piece - normed) * PIECE;
            convolve(layer, t, cell, tree_of, first, std::min(first + PIECE, layer.channels));
        });
        recur(region, layer, mixed);
        region.share(tokens_, 1, [&](int64_t t, int64_t) {
            float* out = mixed + t * mixed_size(layer);
            if (!layer.heads) return multiply_into(out, row(t) + layer.width, row(t) + layer.gate, layer.channels);
            gated_norm(layer, row(t), out);
        });
        inputs_done_++;
    }

    // Repeat the steps of accepted tokens on the staged states, in all layers.
    void fold(Region& region, const Fold& fold) {
        for (int64_t r = 0; r < states_.rows; r++) {
            for (int64_t i = fold.starts[r]; i < fold.starts[r + 1]; i++)
                turns_[r].turns.push_back({fold.accepted[i], STAGED, STAGED});
            turns_[r].sure = fold.starts[r + 1] - fold.starts[r];
        }
        for (int64_t i = 0; i < d_.count; i++)
            if (const Recurrent& layer = d_.layers[i].recurrent; layer.count) {
                recur(region, layer, nullptr);
                inputs_done_++;
            }
    }

  private:
    static constexpr int64_t PIECE = 256;  // channels that a thread takes at a time

    float* row(int64_t t) const { return states_.inputs + inputs_done_ * states_.apart + t * row_; }

    void project(Region& region, Narrowed& narrowed, const Recurrent& layer, const float* x, int64_t ld) {
        int64_t total = 0;
        for (int64_t i = 0; i < layer.count; i++) total += panels(layer.inputs[i]);
        region.share(total, piece_of(layer.inputs[0], tokens_), [&](int64_t first, int64_t stop) {
            int64_t before = 0;
            for (int64_t i = 0; i < layer.count; before += panels(layer.inputs[i++])) {
                const Linear& linear = layer.inputs[i];
                const int64_t a = std::max<int64_t>(first - before, 0), b = std::min(stop - before, panels(linear));
                const int64_t* places = layer.places + before;
                if (a < b)
                    multiply(linear, narrowed.of(linear, x, ld, tokens_), a, b, d_.bf16,
                             [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) {
                                 put(row(t) + places[o / PANEL], 0, std::min<int64_t>(linear.out - o, PANEL), sum);
                             });
            }
        });
    }

    void multiply_into(float* to, const float* a, const float* b, int64_t size) const {
        for (int64_t i = 0; i < size; i += LANES) store(to + i, keep(mul(load(a + i), load(b + i))));
    }

    // Convolve channels [first, stop) of a token, over its own input and the inputs of the tokens before it.
    template <class TreeOf>
    void convolve(const Recurrent& layer, int64_t t, int64_t cell, const TreeOf& tree_of, int64_t first, int64_t stop) {
        const int64_t r = cell / columns_, taps = layer.kernel;
        const Tree tree = tree_of(r);
        const float* inputs[MAX_TAPS];
        int64_t column = cell % columns_, earlier = taps - 1;
        for (int64_t k = taps - 1; k >= 0; k--)
            if (column >= 0)
                inputs[k] = row(at_[r * columns_ + column]), column = tree.parent(column);
            else
                inputs[k] = states_.committed[r] + layer.states + --earlier * layer.channels;
        float* out = row(t) + layer.width;
        for (int64_t c = first; c < stop; c += LANES) {
            vec sum = layer.filter_bias ? load(layer.filter_bias + c) : zero();
            for (int64_t k = 0; k < taps; k++) sum = fma(load(layer.filter + k * layer.channels + c), load(inputs[k] + c), sum);
            store(out + c, layer.heads ? activated(SILU, keep(sum), d_.bf16) : keep(sum));
        }
    }

    // Scale a head's query or key to length 1, and divide a query by the square root of its size.
    void unit_length(const Recurrent& layer, float* head, bool query) const {
        vec squares = zero();
        for (int64_t i = 0; i < layer.key_size; i += LANES) squares = fma(load(head + i), load(head + i), squares);
        float factor = 1.0f / std::sqrt(sum(squares) + 1e-6f);
        if (query) factor /= std::sqrt(static_cast<float>(layer.key_size));
        for (int64_t i = 0; i < layer.key_size; i += LANES) store(head + i, mul(load(head + i), all(factor)));
    }

    // The decay and the factor of each head.
    void gates(const Recurrent& layer, float* row) const {
        float* decays = row + layer.width + layer.channels;
        auto kept = [this](float x) { return d_.bf16 ? rounded(x) : x; };
        auto softplus = [](float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); };
        for (int64_t h = 0; h < layer.heads; h++) {
            const float step = row[layer.step_places[h]] + layer.step_bias[h];
            float factor;
            if (layer.delta) {
                decays[h] = std::exp(layer.rates[h] * softplus(step));
                factor = kept(layer.factor_scale * sigmoid(row[layer.factor_places[h]], d_.bf16));
            } else {
                factor = kept(softplus(kept(step)));
                decays[h] = std::exp(layer.rates[h] * factor);
            }
            decays[layer.heads + h] = factor;
        }
    }

    // Take the states of all rows through their turns. If `mixed` is null, nothing is read from them.
    void recur(Region& region, const Recurrent& layer, float* mixed) {
        const int64_t blocks = (layer.value_size + COLUMNS - 1) / COLUMNS, units = std::max<int64_t>(layer.heads * blocks, 1);
        region.share(states_.rows * units, 1, [&](int64_t unit, int64_t) {
            const int64_t r = unit / units;
            if (turns_[r].turns.empty()) return;
            if (unit % units == 0) keep_inputs(layer, r);
            if (!layer.heads) return;
            const int64_t h = unit % units / blocks, column = unit % units % blocks * COLUMNS;
            const int64_t columns = std::min(COLUMNS, layer.value_size - column);
            const int64_t size = layer.key_size * columns;
            const int64_t at = layer.states + (layer.kernel - 1) * layer.channels + layer.key_size * (h * layer.value_size + column);
            std::vector<float>& room = rooms_.mine();
            if (static_cast<int64_t>(room.size()) < turns_[r].guesses * size) room.resize(turns_[r].guesses * size);
            auto states = [&](int64_t number) {
                if (number == COMMITTED) return const_cast<float*>(states_.committed[r]) + at;
                return number == STAGED ? states_.staged[r] + at : room.data() + number * size;
            };
            const HeadStep step = step_of(layer.delta, columns);
            const int64_t of_keys = h / (layer.heads / layer.key_heads) * layer.key_size;
            const WithoutSubnormals mode;
            float unread[COLUMNS];
            for (int64_t i = 0; i < static_cast<int64_t>(turns_[r].turns.size()); i++) {
                const Turn& turn = turns_[r].turns[i];
                const float* channels = row(turn.token) + layer.width;
                const float *value = channels + layer.value + h * layer.value_size + column, *decays = channels + layer.channels;
                float* out = mixed ? mixed + turn.token * mixed_size(layer) + h * layer.value_size + column : unread;
                step(states(turn.from), states(turn.to), channels + layer.key + of_keys, channels + layer.query + of_keys,
                     value, decays[h], decays[layer.heads + h], layer.key_size, out);
                for (int64_t c = 0; mixed && c < columns; c += LANES) {
                    vec read = load(out + c);
                    if (layer.skip) read = fma(load(value + c), all(layer.skip[h]), read);
                    store(out + c, keep(read));
                }
                if (i < turns_[r].sure)
                    each_copy(r, i + 1, [&](float* to) { std::memcpy(to + at, states(STAGED), size * sizeof(float)); });
            }
        });
    }

    // Stage the inputs of the convolution that the next token of a row needs.
    void keep_inputs(const Recurrent& layer, int64_t r) const {
        const Turns& of_row = turns_[r];
        const float* before = (of_row.turns[0].from == COMMITTED ? states_.committed[r] : states_.staged[r]) + layer.states;
        auto after = [&](int64_t count, float* to) {
            for (int64_t k = 0; k < layer.kernel - 1; k++) {  // in place: reads are ahead of writes
                const int64_t number = count - (layer.kernel - 1) + k;
                const float* from = number < 0 ? before + (count + k) * layer.channels : row(of_row.turns[number].token);
                std::memmove(to + layer.states + k * layer.channels, from, layer.channels * sizeof(float));
            }
        };
        for (int64_t count = 1; count <= of_row.sure; count++) each_copy(r, count, [&](float* to) { after(count, to); });
        if (of_row.sure) after(of_row.sure, states_.staged[r]);
    }

    // Call `work` with each copy to be made of a row's states after `count` tokens.
    template <class Work>
    void each_copy(int64_t r, int64_t count, const Work& work) const {
        for (int64_t i = 0; i < states_.copies; i++)
            if (states_.copied[2 * i] == r && states_.copied[2 * i + 1] == count) work(states_.to[i]);
    }

    // Norm and gate what a token has mixed.
    void gated_norm(const Recurrent& layer, const float* row, float* mixed) const {
        const float* gates = row + layer.gate;
        const int64_t size = layer.norm_size;
        for (int64_t first = 0; first < mixed_size(layer); first += size) {
            auto gate = [&](int64_t i) { return silu(load(gates + first + i)); };
            vec squares = zero();
            float* x = mixed + first;
            for (int64_t i = 0; i < size; i += LANES) {
                if (layer.gates_first) store(x + i, mul(load(x + i), gate(i)));
                squares = fma(load(x + i), load(x + i), squares);
            }
            if (!layer.norm) {
                for (int64_t i = 0; i < size; i += LANES) store(x + i, keep(load(x + i)));
                continue;
            }
            const vec factor = all(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + layer.norm_eps));
            for (int64_t i = 0; i < size; i += LANES) {
                vec done = keep(mul(keep(mul(load(x + i), factor)), load(layer.norm + first + i)));
                if (!layer.gates_first) done = keep(mul(done, gate(i)));
                store(x + i, done);
            }
        }
    }

    vec keep(vec x) const { return d_.bf16 ? rounded(x) : x; }

    const Decoder& d_;
    const RowStates& states_;
    int64_t tokens_, row_, columns_ = 0, inputs_done_ = 0;
    std::vector<int64_t> at_;  // [R, Q]
    std::vector<Turns> turns_;
    Own<std::vector<float>> rooms_;
};

}  // namespace eyas
