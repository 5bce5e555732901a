// A mixture of experts: routing, the experts' outputs, and their weighted sum.
//
// Each expert is an MLP, gated or not. Its tokens are gathered and multiplied together, so a weight is read once
// however many tokens are routed to it. A token's outputs are weighted and summed in the order in which its experts were
// chosen, so its result doesn't depend on what else is in the pass.
//
// Shapes: T tokens, E experts, K of them chosen for a token, S = T * K slots, ordered by expert; H hidden size.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "layer.h"

namespace eyas {

inline float sigmoid(float x, bool bf16) {
    const float value = 1.0f / (1.0f + std::exp(-x));
    return bf16 ? rounded(value) : value;
}

// The groups from which a token's experts are chosen, as a bit mask; `valued(e)` is the score of an expert.
template <class Valued>
uint64_t groups_used(const Experts& experts, const Valued& valued) {
    if (experts.groups == 1) return 1;
    const int64_t group = experts.count / experts.groups;
    const float least = -std::numeric_limits<float>::infinity();
    float sums[64];
    for (int64_t g = 0; g < experts.groups; g++) {
        float above = std::numeric_limits<float>::infinity();  // scores are taken in descending order: the last one
        int64_t last = -1;
        sums[g] = 0;
        for (int64_t i = 0; i < experts.summed; i++) {
            float best = least;
            int64_t found = -1;
            for (int64_t e = g * group; e < (g + 1) * group; e++) {
                const float score = valued(e);
                if ((score < above || (score == above && e > last)) && score > best) best = score, found = e;
            }
            sums[g] += best, above = best, last = found;
        }
    }
    uint64_t used = 0;
    for (int64_t i = 0; i < experts.groups_used; i++) {
        int64_t best = -1;
        for (int64_t g = 0; g < experts.groups; g++)
            if (!(used >> g & 1) && (best < 0 || sums[g] > sums[best])) best = g;
        used |= uint64_t{1} << best;
    }
    return used;
}

// Choose the experts of a token by their scores [E], which are overwritten: `ids` and `weights` [K], the best first.
inline void choose(const Experts& experts, bool bf16, float* scores, int64_t* ids, float* weights) {
    const int64_t count = experts.count;
    if (experts.sigmoid) {
        for (int64_t e = 0; e < count; e++) scores[e] = sigmoid(scores[e], false);
    } else {
        float most = scores[0], total = 0;
        for (int64_t e = 1; e < count; e++) most = std::max(most, scores[e]);
        for (int64_t e = 0; e < count; e++) total += scores[e] = std::exp(scores[e] - most);
        for (int64_t e = 0; e < count; e++) scores[e] /= total;
    }
    auto valued = [&](int64_t e) { return scores[e] + (experts.bias ? experts.bias[e] : 0.0f); };
    const uint64_t used = groups_used(experts, valued);
    const int64_t group = count / experts.groups;
    float total = 1e-20f;  // weights that are all 0 stay 0
    for (int64_t k = 0; k < experts.chosen; k++) {
        float best = -std::numeric_limits<float>::infinity();
        ids[k] = 0;
        for (int64_t e = 0; e < count; e++) {
            const float score = valued(e);
            if (score > best && (used >> (e / group) & 1) && std::find(ids, ids + k, e) == ids + k) best = score, ids[k] = e;
        }
        total += weights[k] = scores[ids[k]];
    }
    for (int64_t k = 0; k < experts.chosen; k++) {
        if (experts.renormalized) weights[k] /= total;
        weights[k] *= experts.scale;
        if (bf16 && experts.rounds_weights) weights[k] = rounded(weights[k]);
    }
}

// The experts' work on the tokens of a pass.
class Mixture {
  public:
    // Reserve what `tokens` tokens need at most in any of these layers.
    Mixture(const Layer* layers, int64_t count, int64_t tokens) {
        for (int64_t i = 0; i < count; i++)
            if (const Experts& own = layers[i].experts; own.count) reserve(own, tokens);
    }
    Mixture(const Experts& experts, int64_t tokens) { reserve(experts, tokens); }

    // The experts of token t, and their weights [K].
    int64_t* ids(const Experts& experts, int64_t t) { return ids_.data() + t * experts.chosen; }
    float* weights(const Experts& experts, int64_t t) { return weights_.data() + t * experts.chosen; }
    // Choose experts for tokens x [tokens, ldx].
    void route(Region& region, Narrowed& narrowed, const Experts& experts, const float* x, int64_t ldx,
               int64_t tokens, bool bf16) {
        const int64_t count = experts.count;
        region.share(panels(experts.router), piece_of(experts.router, tokens), [&](int64_t first, int64_t stop) {
            multiply(experts.router, narrowed.of(experts.router, x, ldx, tokens), first, stop, bf16 && experts.rounds_scores,
                     [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) { put(scores_.get() + t * count, o, count, sum); });
        });
        region.share(tokens, 1, [&](int64_t t, int64_t) {
            choose(experts, bf16, scores_.get() + t * count, ids(experts, t), weights(experts, t));
            if (experts.shared_gate.weight)
                multiply(experts.shared_gate, narrowed.of(experts.shared_gate, x + t * ldx, ldx, 1), 0, 1, bf16,
                         [&](int64_t, int64_t, const vec(&sum)[PARTS]) {
                             float gate[LANES];
                             store(gate, sum[0]);
                             shared_[t] = sigmoid(gate[0], bf16);
                         });
        });
    }

    // Run x [tokens, ldx] through the experts that `ids` and `weights` name.
    void run(Region& region, Narrowed& narrowed, const Experts& experts, const float* x, int64_t ldx,
             int64_t tokens, bool bf16) {
        const int64_t hidden = experts.down->out, inner = experts.up->out, slots = tokens * experts.chosen;
        region.share(1, 1, [&](int64_t, int64_t) { assign(experts, slots); });
        region.share(slots, 1, [&](int64_t s, int64_t) {
            std::memcpy(outer_.get() + s * hidden, x + tokens_[s] * ldx, hidden * sizeof(float));
        });
        share(region, panels(*experts.up), [&](int64_t e, int64_t first, int64_t stop) {
            const int64_t start = starts_[e], count = starts_[e + 1] - start;
            const Linear& up = experts.up[e];
            const Tokens own = narrowed.of(up, outer_.get() + start * hidden, hidden, count);
            float* inside = inner_.get() + start * inner;
            if (experts.gate)
                gated_mlp(experts.gate[e], up, own, first, stop, bf16, experts.gating, inside);
            else
                plain_mlp(up, own, first, stop, bf16, experts.gating.activation, inside);
        });
        share(region, panels(*experts.down), [&](int64_t e, int64_t first, int64_t stop) {
            const int64_t start = starts_[e], count = starts_[e + 1] - start;
            const Tokens own = narrowed.of(experts.down[e], inner_.get() + start * inner, inner, count);
            multiply(experts.down[e], own, first, stop, bf16,
                     [&](int64_t i, int64_t o, vec(&sum)[PARTS]) {
                         for (vec& part : sum) {
                             part = mul(part, all(factors_[start + i]));
                             if (bf16 && experts.rounds_weights) part = rounded(part);
                         }
                         put(outer_.get() + (start + i) * hidden, o, hidden, sum);
                     });
        });
    }

    // The sum [H] of the experts' weighted outputs for token t, and of the shared expert's output (or null).
    void sum(const Experts& experts, int64_t t, bool bf16, const float* shared, float* out) const {
        const int64_t hidden = experts.down->out, *slots = slots_.data() + t * experts.chosen;
        auto keep = [bf16](vec value) { return bf16 ? rounded(value) : value; };
        for (int64_t i = 0; i < hidden; i += LANES) {
            vec total = zero();
            for (int64_t k = 0; k < experts.chosen; k++) total = add(total, load(outer_.get() + slots[k] * hidden + i));
            total = keep(total);
            if (shared) {
                vec own = load(shared + i);
                if (experts.shared_gate.weight) own = keep(mul(own, all(shared_[t])));
                total = keep(add(total, own));
            }
            store(out + i, total);
        }
    }

  private:
    void reserve(const Experts& experts, int64_t tokens) {
        const int64_t slots = tokens * experts.chosen, hidden = experts.down->out, inner = experts.up->out;
        if (slots > static_cast<int64_t>(ids_.size())) {
            ids_.resize(slots), weights_.resize(slots), tokens_.resize(slots), slots_.resize(slots), factors_.resize(slots);
            outer_.reset(new float[slots * hidden]);
        }
        if (slots * inner > inner_size_) inner_.reset(new float[inner_size_ = slots * inner]);
        if (tokens * experts.count > scores_size_) scores_.reset(new float[scores_size_ = tokens * experts.count]);
        if (experts.count >= static_cast<int64_t>(starts_.size())) starts_.resize(experts.count + 1);
        shared_.resize(tokens);
    }

    // Order the slots by expert, and within an expert by token.
    void assign(const Experts& experts, int64_t slots) {
        std::fill(starts_.begin(), starts_.end(), 0);
        for (int64_t s = 0; s < slots; s++) starts_[ids_[s] + 1]++;
        used_.clear();
        for (int64_t e = 0; e < experts.count; e++) {
            if (starts_[e + 1]) used_.push_back(e);
            starts_[e + 1] += starts_[e];
        }
        std::vector<int64_t> next(starts_);
        for (int64_t i = 0; i < slots; i++) {
            const int64_t slot = next[ids_[i]]++;
            slots_[i] = slot, tokens_[slot] = i / experts.chosen, factors_[slot] = weights_[i];
        }
    }

    // Share the panels of all experts in use: `work(expert, first, stop)`.
    template <class Work>
    void share(Region& region, int64_t each, const Work& work) {
        region.share(static_cast<int64_t>(used_.size()) * each, PIECE, [&](int64_t first, int64_t stop) {
            while (first < stop) {
                const int64_t index = first / each, last = std::min(stop, (index + 1) * each);
                work(used_[index], first - index * each, last - index * each);
                first = last;
            }
        });
    }

    std::vector<int64_t> ids_, tokens_, slots_, starts_, used_;  // [T, K], [S] a slot's token, [T, K], [E + 1], experts with tokens
    std::vector<float> weights_, factors_, shared_;              // [T, K], [S], [T]
    int64_t inner_size_ = 0, scores_size_ = 0;
    std::unique_ptr<float[]> scores_, outer_, inner_;            // [T, E], [S, H] inputs, then outputs; [S, intermediate]
};

}  // namespace eyas
