// Attention of the tokens of a pass over the slot cache.
//
// A token sees the committed columns of its row, which are positions 0, 1, 2, ... (a sliding window leaves out the
// oldest), then those staged columns that are its ancestors, whose positions follow. Its scores, their sum and the
// mixed values are computed in that order and by nothing else, so they do not depend on the tree, the other rows or
// where the pass was staged.
//
// Shapes: C capacity of the cache.
#pragma once

#include <limits>

#include "vector.h"

namespace eyas {

// The columns that `seen` [most] says, in their order; returns how many.
inline int64_t visible(const uint8_t* seen, int64_t most, int64_t* columns) {
    int64_t count = 0;
    for (int64_t i = 0; i < most; i++)
        if (seen[i]) columns[count++] = i;
    return count;
}

// Staged columns, each of which follows another one, or the committed columns.
struct Tree {
    const int64_t* parents;  // the staged column that each staged column follows, -1 = none; null = the one before it

    int64_t parent(int64_t column) const { return parents ? parents[column] : column - 1; }
    int64_t depth(int64_t column) const {  // columns on its path
        if (!parents) return column + 1;
        int64_t depth = 0;
        for (; column >= 0; column = parents[column]) depth++;
        return depth;
    }
};

// The columns that staged column `column` sees, in the order of their positions: the committed ones, then its path among
// the staged ones, which follow them; with a window the latest of them. Returns the first of `count` columns in `room`,
// and their number.
inline const int64_t* visible(int64_t committed, const Tree& tree, int64_t column, int64_t window, int64_t* room,
                              int64_t& count) {
    count = 0;
    for (int64_t i = window && committed > window ? committed - window : 0; i < committed; i++) room[count++] = i;
    count += tree.depth(column);
    for (int64_t at = count; column >= 0; column = tree.parent(column)) room[--at] = committed + column;
    if (!window || count <= window) return room;
    room += count - window;
    count = window;
    return room;
}

// What some queries attend to: keys [C, size] and values [C, value_size] at `columns`. A query sees the first `count` of
// them.
template <class T>
struct Context {
    const T *keys, *values;
    const int64_t* columns;
    int64_t size, value_size;
    float scale, softcap;  // softcap: of the scores' absolute values (Gemma 2); 0 = none
    bool bf16;
};

struct Query {
    const float* state;   // [size]
    float* out;           // [value_size]
    int64_t count;
};

// The weights of a query's keys in place of their scores, zero beyond the last; returns one over their sum.
inline float weigh(float* scores, int64_t count, int64_t padded, float softcap) {
    if (softcap > 0)
        for (int64_t j = 0; j < padded; j += LANES)
            store(scores + j, mul(all(softcap), tangent(div(load(scores + j), all(softcap)))));
    constexpr float least = -std::numeric_limits<float>::infinity();
    for (int64_t j = count; j < padded; j++) scores[j] = least;
    vec highest = all(least);
    for (int64_t j = 0; j < padded; j += LANES) highest = larger(highest, load(scores + j));
    float lanes[LANES], top = least;
    store(lanes, highest);
    for (float lane : lanes) top = lane > top ? lane : top;
    for (int64_t j = 0; j < padded; j += LANES) store(scores + j, exponential(sub(load(scores + j), all(top))));
    for (int64_t j = count; j < padded; j++) scores[j] = 0;
    vec total = zero();
    for (int64_t j = 0; j < padded; j += LANES) total = add(total, load(scores + j));
    return 1.0f / sum(total);
}

// N queries side by side, which read each key and value once; every sum is the one that a query has alone.
// `scores` has room for N times the longest count + 2 * LANES.
template <int N, class T>
void attend_together(const Context<T>& context, const Query* query, float* scores) {
    constexpr int KEYS = 8 / N, WIDE = 8 / N;  // keys and vectors of values that are worked on at once
    int64_t longest = 0;
    for (int n = 0; n < N; n++) longest = query[n].count > longest ? query[n].count : longest;
    const int64_t padded = (longest + LANES - 1) / LANES * LANES, stride = padded + LANES;
    for (int64_t j = 0; j < longest; j += KEYS) {
        vec products[8] = {};
        const T* key[KEYS];
        for (int i = 0; i < KEYS; i++)
            key[i] = context.keys + context.columns[j + i < longest ? j + i : longest - 1] * context.size;
        for (int64_t d = 0; d < context.size; d += LANES)
            for (int i = 0; i < KEYS; i++) {
                vec of_key = load(key[i] + d);
                for (int n = 0; n < N; n++)
                    products[n * KEYS + i] = fma(load(query[n].state + d), of_key, products[n * KEYS + i]);
            }
        float found[8];
        _mm256_storeu_ps(found, _mm256_mul_ps(sums(products), _mm256_set1_ps(context.scale)));
        for (int n = 0; n < N; n++)
            for (int i = 0; i < KEYS; i++) scores[n * stride + j + i] = found[n * KEYS + i];
    }
    vec inverse[N];
    for (int n = 0; n < N; n++) inverse[n] = all(weigh(scores + n * stride, query[n].count, padded, context.softcap));
    for (int64_t d = 0; d < context.value_size; d += WIDE * LANES) {
        const int64_t rest = (context.value_size - d) / LANES;
        vec mixed[N][WIDE] = {};
        auto mix = [&](int parts) __attribute__((always_inline)) {
            for (int64_t j = 0; j < longest; j++) {
                const T* value = context.values + context.columns[j] * context.value_size + d;
                for (int p = 0; p < parts; p++) {
                    vec part = load(value + p * LANES);
                    for (int n = 0; n < N; n++) mixed[n][p] = fma(all(scores[n * stride + j]), part, mixed[n][p]);
                }
            }
        };
        const int parts = rest < WIDE ? static_cast<int>(rest) : WIDE;
        if (parts == WIDE)
            mix(WIDE);
        else
            mix(parts);
        for (int n = 0; n < N; n++)
            for (int p = 0; p < parts; p++) {
                vec done = mul(mixed[n][p], inverse[n]);
                store(query[n].out + d + p * LANES, context.bf16 ? rounded(done) : done);
            }
    }
}

// Queries of one context, which are attended as many at once as fit into the registers.
template <class T>
class Queries {
  public:
    Queries(const Context<T>& context, float* scores) : context_(context), scores_(scores) {}

    void add(const float* state, float* out, int64_t count) {
        waiting_[total_++] = {state, out, count};
        if (total_ == 4) attend_together<4>(context_, waiting_, scores_), total_ = 0;
    }

    // Attend those that are left.
    void finish() {
        if (total_ >= 2) attend_together<2>(context_, waiting_, scores_);
        if (total_ % 2) attend_together<1>(context_, waiting_ + total_ - 1, scores_);
        total_ = 0;
    }

  private:
    Context<T> context_;
    float* scores_;
    Query waiting_[4];
    int total_ = 0;
};

}  // namespace eyas
