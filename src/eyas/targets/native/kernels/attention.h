// Attention of the tokens of a pass over the slot cache.
//
// A token sees the committed columns of its row, which are positions 0, 1, 2, ... (a sliding window leaves out the
// oldest), then those staged columns that are its ancestors, whose positions follow. Its scores, their sum and the
// mixed values are computed in that order and by nothing else, so they do not depend on the tree, the other rows or
// where the pass was staged.
//
// Shapes: D head size, G query heads that share a key head, C capacity of the cache.
#pragma once

#include <limits>

#include "vector.h"

namespace eyas {

// The columns that a token sees, in the order of their positions: committed ones, then ancestors among the staged ones,
// of which `seen` [stages] knows; with a window the latest of them. Returns the first of `count` columns in `room`.
inline const int64_t* visible(int64_t committed, int64_t start, int64_t stages, const uint8_t* seen, int64_t window,
                              int64_t* room, int64_t& count) {
    count = 0;
    for (int64_t column = window && committed > window ? committed - window : 0; column < committed; column++)
        room[count++] = column;
    for (int64_t i = 0; i < stages; i++)
        if (seen[i]) room[count++] = start + i;
    if (!window || count <= window) return room;
    room += count - window;
    count = window;
    return room;
}

// One query [D] over keys and values [C, D] at `columns` [count] -> out [D]. `scores` has room for count + LANES.
template <class T>
void attend(const float* query, const T* keys, const T* values, const int64_t* columns, int64_t count, int64_t size,
            float scale, bool bf16, float* scores, float* out) {
    vec highest = all(-std::numeric_limits<float>::infinity());
    for (int64_t j = 0; j < count; j += 8) {
        vec products[8];
        const T* key[8];
        for (int lane = 0; lane < 8; lane++) {
            key[lane] = keys + columns[j + lane < count ? j + lane : count - 1] * size;
            products[lane] = zero();
        }
        for (int64_t d = 0; d < size; d += LANES) {
            vec q = load(query + d);
            for (int lane = 0; lane < 8; lane++) products[lane] = fma(q, load(key[lane] + d), products[lane]);
        }
        _mm256_storeu_ps(scores + j, _mm256_mul_ps(sums(products), _mm256_set1_ps(scale)));
    }
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t j = count; j < padded; j++) scores[j] = -std::numeric_limits<float>::infinity();
    for (int64_t j = 0; j < padded; j += LANES) highest = larger(highest, load(scores + j));
    float lanes[LANES], top = -std::numeric_limits<float>::infinity();
    store(lanes, highest);
    for (float lane : lanes) top = lane > top ? lane : top;
    vec total = zero();
    for (int64_t j = 0; j < padded; j += LANES) {
        vec weight = exponential(sub(load(scores + j), all(top)));
        store(scores + j, weight);
        if (j + LANES > count)  // what is beyond the last key weighs nothing
            for (int64_t i = count; i < padded; i++) scores[i] = 0;
        total = add(total, load(scores + j));
    }
    vec inverse = all(1.0f / sum(total));
    constexpr int WIDE = 8;  // vectors of values that are summed at once
    for (int64_t d = 0; d < size; d += WIDE * LANES) {
        int parts = static_cast<int>((size - d < WIDE * LANES ? size - d : WIDE * LANES) / LANES);
        vec mixed[WIDE];
        for (vec& part : mixed) part = zero();
        if (parts == WIDE) {
            for (int64_t j = 0; j < count; j++) {
                const T* value = values + columns[j] * size + d;
                vec weight = all(scores[j]);
                for (int p = 0; p < WIDE; p++) mixed[p] = fma(weight, load(value + p * LANES), mixed[p]);
            }
        } else {
            for (int64_t j = 0; j < count; j++) {
                const T* value = values + columns[j] * size + d;
                vec weight = all(scores[j]);
                for (int p = 0; p < parts; p++) mixed[p] = fma(weight, load(value + p * LANES), mixed[p]);
            }
        }
        for (int p = 0; p < parts; p++) {
            vec done = mul(mixed[p], inverse);
            store(out + d + p * LANES, bf16 ? rounded(done) : done);
        }
    }
}

}  // namespace eyas
