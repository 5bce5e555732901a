// Multi-head latent attention (DeepSeek-V2 and its relatives): for each token the cache holds one latent and one key with
// RoPE, which all heads share.
//
// A head's own keys and values are projections of the latents and are never computed. Instead, its query is multiplied by
// the transposed weight of its keys and attends to the latents themselves, and the mixed latents are multiplied by the
// weight of its values. So the cost of a token grows with the positions that it sees as in ordinary attention.
//
// Shapes: T tokens, C capacity, L size of a latent, P features with RoPE, D = N + P size of a query, V that of a value.
#pragma once

#include <vector>

#include "attention.h"
#include "layer.h"

namespace eyas {

constexpr int64_t HEADS = 4;  // heads that attend together, as they read the same latents

// Sizes per token, with latent attention and without: the output of `k`, the output of `v` (latent attention: the input of
// `Latent.query`), and the mixed values of a head; then the number of shares that the heads are split into.
inline int64_t keys_size(const Decoder& d) { return d.rank ? d.rank + d.rotated : d.kv_heads * d.size; }
inline int64_t values_size(const Decoder& d) { return d.rank ? d.query_rank : d.kv_heads * d.size; }
inline int64_t mixed_size(const Decoder& d) { return d.rank ? d.value_size : d.size; }
inline int64_t shares_of(const Decoder& d) { return d.rank ? (d.heads + HEADS - 1) / HEADS : d.kv_heads; }

// Rotate the P features x in place by a position's cosines and sines. Pairs are halves, or neighbors that become halves.
inline void turn(const Decoder& d, float* x, const float* cosine, const float* sine) {
    const int64_t half = d.rotated / 2;
    if (d.pairs) {
        float right[MAX_ROTATED / 2];
        for (int64_t i = 0; i < half; i++) right[i] = x[2 * i + 1], x[i] = x[2 * i];
        std::memcpy(x + half, right, half * sizeof(float));
    }
    rotate(x, cosine, sine, d.rotated, d.bf16 && !d.exact_rope);
    if (d.bf16 && d.exact_rope)
        for (int64_t i = 0; i < d.rotated; i += LANES) store(x + i, rounded(load(x + i)));
}

// The queries of some heads, for a block of tokens at a time.
class LatentQueries {
  public:
    LatentQueries(const Decoder& d, int64_t tokens, int64_t heads)
        : d_(d), heads_(heads), queries_(d.rank ? tokens * heads * (d.rank + d.rotated) : 0),
          mixed_(d.rank ? tokens * heads * d.rank : 0) {}

    // Take the queries q [tokens, all heads, D] of heads [first, stop);
    // `entry(t)` is where the cosines and sines of a token's position begin.
    template <class Entry>
    void absorb(const Layer& layer, const float* q, int64_t tokens, int64_t first, int64_t stop, const Entry& entry,
                const float* cosines, const float* sines) {
        const int64_t rank = d_.rank, row = d_.heads * d_.size, panels = rank / PANEL;
        for (int64_t h = first; h < stop; h++) {
            const float* of_head = q + h * d_.size;
            multiply(layer.latent.absorb, {of_head, row, tokens}, h * panels, (h + 1) * panels, false,
                     [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) { put(query(t, h - first), o - h * rank, rank, sum); });
            for (int64_t t = 0; t < tokens; t++) {
                float* tail = query(t, h - first) + rank;
                std::memcpy(tail, of_head + t * row + d_.size - d_.rotated, d_.rotated * sizeof(float));
                turn(d_, tail, cosines + entry(t), sines + entry(t));
            }
        }
    }

    // Let `heads` heads of `count` tokens, from token t of the block on, attend to a row's latents and keys.
    template <class T>
    void attend(const T* latents, const T* keys, const int64_t* columns, int64_t t, int64_t count, const int64_t* counts,
                int64_t heads, float* scores) {
        Queries<T> queries({latents, latents, columns, d_.rank, d_.rank, d_.scale, d_.softcap, false, keys, d_.rotated}, scores);
        for (int64_t i = 0; i < count; i++)
            for (int64_t h = 0; h < heads; h++) queries.add(query(t + i, h), mixed(t + i, h), counts[i]);
        queries.finish();
    }

    // Project the mixed latents to the heads' values: out [tokens, all heads, V].
    void expand(const Layer& layer, int64_t tokens, int64_t first, int64_t stop, float* out) {
        const int64_t size = d_.value_size, both = layer.latent.expand.out / d_.heads, row = d_.heads * size;
        for (int64_t h = first; h < stop; h++) {
            const int64_t begin = (h + 1) * both - size;
            multiply(layer.latent.expand, {mixed(0, h - first), heads_ * d_.rank, tokens}, begin / PANEL,
                     (begin + size) / PANEL, d_.bf16, [&](int64_t t, int64_t o, const vec(&sum)[PARTS]) {
                         put(out + t * row + h * size, o - begin, size, sum);
                     });
        }
    }

  private:
    float* query(int64_t t, int64_t h) { return queries_.data() + (t * heads_ + h) * (d_.rank + d_.rotated); }
    float* mixed(int64_t t, int64_t h) { return mixed_.data() + (t * heads_ + h) * d_.rank; }

    const Decoder& d_;
    int64_t heads_;
    std::vector<float> queries_, mixed_;  // [tokens, heads, L + P], [tokens, heads, L]
};

}  // namespace eyas
