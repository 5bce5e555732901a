// The beam search of a draft in one call: the head on the roots' states, then a pass over each level's beam.
//
// Every beam node offers its K best children; the K best paths become the next level's beam. A path's score is the sum of
// what its steps are worth: their log-probability, or the logarithm of the rate at which such steps are accepted. This is
// the search of eyas/tree/shared.py, in the same arithmetic.
//
// Guesses continue the states of those above them, or, in a language model, only their texts.
//
// Shapes: R rows, D levels, W beam nodes, K children of each, V choices, H draft hidden, M candidates of a row.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "decoder.h"
#include "guess.h"
#include "gumbel.h"

namespace eyas {

constexpr int64_t BINS = 28;           // of probabilities: bin = floor(10 sqrt(-log p))
constexpr float FINENESS = 10.0f, TIE_BREAK = 1e-4f;

inline int64_t children_of(const Beam& beam) { return beam.width + (beam.depth - 1) * beam.width * beam.width; }

// The best children of a level's nodes, from logits [R * W, outputs]: their log-probabilities and choices [R * W, K].
template <class T>
void best_children(const Beam& beam, const T* logits, int64_t outputs, int64_t level, int64_t nodes, int64_t threads,
                   float* scores, int64_t* found) {
    Region region(threads);
    const int64_t size = beam.choices;
    const int64_t pieces = (size + NOISE_PIECE - 1) / NOISE_PIECE;
    std::vector<float> noise(beam.scales ? beam.rows * size : 0);
    region.share(beam.scales ? beam.rows * pieces : 0, 1, [&](int64_t unit, int64_t) {
        const int64_t row = unit / pieces, first = unit % pieces * NOISE_PIECE;
        gumbel(beam.seeds[row], beam.positions[row] + level, beam.ids + first, std::min(NOISE_PIECE, size - first),
               noise.data() + row * size + first);
    });
    Own<std::vector<float>> warped;
    region.share(beam.rows * nodes, 1, [&](int64_t t, int64_t) {
        const int64_t row = t / nodes;
        const T* own = logits + t * outputs;
        float* to_scores = scores + t * beam.width;
        int64_t* to_found = found + t * beam.width;
        if (!beam.divisors && !beam.scales && !beam.outputs) return guess(own, size, nullptr, beam.width, to_scores, to_found);
        std::vector<float>& values = warped.mine(size);
        const float divisor = beam.divisors ? beam.divisors[row] : 1.0f, scale = beam.scales ? beam.scales[row] : 0.0f;
        for (int64_t i = 0; i < size; i++) {
            values[i] = wide(own[beam.outputs ? beam.outputs[i] : i]) / divisor;
            if (beam.scales) values[i] += noise[row * size + i] * scale;
        }
        guess(values.data(), size, nullptr, beam.width, to_scores, to_found);
    });
}

// What a step adds to a path's score, at most 0.
inline float worth_of(const Beam& beam, int64_t row, float step, bool later) {
    if (!beam.worth) return step;
    const float place = std::sqrt(-step) * FINENESS;
    const int64_t bin = place < BINS - 1 ? static_cast<int64_t>(place) : BINS - 1;  // the last one for NaN too
    return beam.worth[(2 * (beam.groups ? beam.groups[row] : 0) + later) * BINS + bin] + TIE_BREAK * step;
}

// Choose the candidates of a row whose total value exceeds their price by the most, as eyas/tree/values.py does. They come
// depth first, the best children before the others: so what is accepted mostly lies together, and needn't be moved to the
// committed columns, and a path's tokens attend together.
inline void choose(const Beam& beam, int64_t candidates) {
    std::vector<int64_t> order(candidates);
    std::iota(order.begin(), order.end(), 0);
    order.erase(std::remove_if(order.begin(), order.end(), [&](int64_t i) { return std::isnan(beam.scores[i]); }), order.end());
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return beam.scores[a] > beam.scores[b]; });
    double value = 0, best = 0, promise = 0;
    int64_t count = 0, most = std::min<int64_t>(beam.most, order.size());
    for (int64_t i = 0; i < most; i++) {
        value += std::exp(static_cast<double>(beam.scores[order[i]]));
        const double gain = value - beam.prices[i] / beam.calibration;
        if (gain > best) best = gain, promise = value, count = i + 1;
    }
    beam.chosen_logprobs[beam.most] = static_cast<float>(promise);
    order.resize(count);
    std::sort(order.begin(), order.end(), std::greater<>());
    std::vector<int64_t> nodes, open{-1};
    while (!open.empty()) {
        const int64_t node = open.back();
        open.pop_back();
        if (node >= 0) nodes.push_back(node);
        for (const int64_t child : order)
            if (beam.parents[child] == node) open.push_back(child);
    }
    beam.chosen[0] = count;
    for (int64_t i = 0; i < count; i++) {
        const int64_t parent = beam.parents[nodes[i]];
        beam.chosen[1 + i] = nodes[i];
        beam.chosen[1 + count + i] = parent < 0 ? -1 : std::find(nodes.begin(), nodes.end(), parent) - nodes.begin();
        beam.chosen[1 + 2 * count + i] = beam.tokens[nodes[i]];
        beam.chosen_logprobs[i] = beam.logprobs[nodes[i]];
    }
}

// Whether levels after the first `levels` may gain more than they cost. Each is taken to have one more candidate that pays,
// and to multiply the best path's value as the levels so far did on average. See eyas/tree/values.py.
inline bool may_pay(const Beam& beam, int64_t candidates, int64_t levels, double best) {
    std::vector<double> values;  // the greatest first
    for (int64_t i = 0; i < candidates; i++)
        if (!std::isnan(beam.scores[i])) values.push_back(beam.calibration * std::exp(static_cast<double>(beam.scores[i])));
    std::sort(values.begin(), values.end(), std::greater<>());
    auto profit = [&] {
        double total = 0, most = 0;
        for (int64_t i = 0; i < std::min<int64_t>(beam.most, values.size()); i++) {
            total += values[i];
            most = std::max(most, total - beam.prices[i]);
        }
        return most;
    };
    double path = std::min(beam.calibration * std::exp(best), 1.0);
    const double now = profit(), step = std::pow(path, 1.0 / levels);
    for (int64_t further = 1; levels + further <= beam.depth; further++) {
        path *= step;
        values.insert(std::upper_bound(values.begin(), values.end(), path, std::greater<>()), path);
        if (profit() - further * beam.level_price > now) return true;
    }
    return false;
}

// Search below the committed pairs. `base` says where they are, and has the RoPE tables. Returns the number of levels
// searched, or 0 if a token has no embedding.
template <class T>
int64_t search(const Decoder& d, const Pass& base, const Beam& beam) {
    const int64_t rows = beam.rows, width = beam.width, hidden = d.hidden, size = d.head.out;
    const int64_t columns = std::max<int64_t>((beam.depth - 1) * width, 1), all = children_of(beam);
    std::vector<float> states[2], scratch(rows * width * token_scratch(d)), step(rows * width * width);
    for (auto& each : states) each.resize(rows * width * hidden);
    std::vector<T> logits(rows * width * size);
    std::vector<int64_t> parents(rows * columns), found(rows * width * width), frontier(rows * width), order(width + 1);
    std::vector<float> score(rows * width), logprob(rows * width);  // of the beam's paths [R, W]
    std::vector<int64_t> index(rows * width, -1);                   // of the beam's nodes among candidates
    const int64_t longest = *std::max_element(base.lengths, base.lengths + rows);

    std::vector<float> normed(rows * hidden);
    const T* last = reinterpret_cast<const T*>(beam.normed);
    std::transform(last, last + rows * hidden, normed.begin(), [](T x) { return wide(x); });
    {
        Region region(base.threads);
        Narrowed narrowed(region, d.bf16);
        region.share(panels(d.head), piece_of(d.head, rows), [&](int64_t first, int64_t stop) {
            multiply(d.head, narrowed.of(d.head, normed.data(), hidden, rows), first, stop, d.bf16,
                     [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) { put(logits.data() + t * size, o, size, sum); });
        });
    }
    const float* above = beam.fed;
    int64_t nodes = 1, staged = 0, begun = 0;  // nodes of this level; columns and candidates before it
    for (int64_t level = 0;; level++) {
        best_children(beam, logits.data(), size, level, nodes, base.threads, step.data(), found.data());
        const int64_t offered = nodes * width, next = std::min(width, offered);
        bool goes_on = beam.least == -std::numeric_limits<double>::infinity();
        for (int64_t row = 0; row < rows; row++) {
            float *scores = beam.scores + row * all + begun, *logprobs = beam.logprobs + row * all + begun;
            for (int64_t i = 0; i < offered; i++) {
                const int64_t node = row * width + i / width;
                const float own = std::min(step[row * offered + i], 0.0f);
                scores[i] = score[node] + worth_of(beam, row, own, i % width > 0);
                logprobs[i] = logprob[node] + own;
                beam.tokens[row * all + begun + i] = beam.ids[found[row * offered + i]];
                beam.parents[row * all + begun + i] = index[node];
            }
            if (level + 1 == beam.depth) continue;
            for (int64_t i = 0; i < offered; i++) {  // ties by index; std::sort can't do it: scores may be NaN
                int64_t at = std::min(i, next);
                for (; at > 0 && scores[i] > scores[order[at - 1]]; at--) order[at] = order[at - 1];
                order[at] = i;
            }
            for (int64_t i = 0; i < next; i++) {
                const int64_t best = order[i], node = row * width + i;
                beam.beams[row * (beam.depth - 1) * width + level * width + i] = best;
                score[node] = scores[best], logprob[node] = logprobs[best], index[node] = begun + best;
                const int64_t choice = found[row * offered + best];
                const int64_t token = frontier[row * next + i] = (beam.outputs ? beam.outputs : beam.ids)[choice];
                if (token < 0 || token >= d.embeddings) return 0;
                parents[row * columns + staged + i] = best / width + (level ? staged - nodes : -1);
            }
            goes_on |= (!beam.drafting || beam.drafting[row]) && score[row * width] > beam.least;
        }
        begun += offered;
        if (goes_on && beam.prices && level + 1 < beam.depth) goes_on = may_pay(beam, begun, level + 1, score[0]);
        if (level + 1 == beam.depth || !goes_on) {
            if (beam.prices) choose(beam, begun);
            return level + 1;
        }

        Pass pass = base;
        pass.tokens = rows * next, pass.columns = next, pass.ids = frontier.data();
        pass.parents = parents.data(), pass.parents_row = columns;
        pass.before = staged, pass.most = longest + staged + next;
        pass.x = states[level % 2].data(), pass.above = beam.fed ? above : nullptr, pass.above_count = nodes;
        pass.above_first = level ? staged - nodes : -1;
        pass.logits = reinterpret_cast<char*>(logits.data()), pass.scratch = scratch.data();
        DecoderRun<T>(d, pass).run();
        above = pass.x, staged += next, nodes = next;
    }
}

}  // namespace eyas
