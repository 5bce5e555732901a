// The greatest logits of a row: the best guesses of a drafter, and a target's best token.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "vector.h"

namespace eyas {

inline float wide(float x) { return x; }
inline float wide(uint16_t x) {  // bf16
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// The greatest of `size` logits.
template <class T>
float greatest(const T* logits, int64_t size) {
    constexpr float least = -std::numeric_limits<float>::infinity();
    const int64_t whole = size / LANES * LANES;
    vec highest = all(least);
    for (int64_t i = 0; i < whole; i += LANES) highest = larger(highest, load(logits + i));
    float lanes[LANES], top = least;
    store(lanes, highest);
    for (float lane : lanes) top = std::max(top, lane);
    for (int64_t i = whole; i < size; i++) top = std::max(top, wide(logits[i]));
    return top;
}

// The index of the greatest of `size` logits, the first of equals; 0 if all are NaN.
template <class T>
int64_t best(const T* logits, int64_t size) {
    const float top = greatest(logits, size);
    int64_t i = 0;
    while (i + LANES <= size && !any_equal(load(logits + i), all(top))) i += LANES;
    for (; i < size; i++)
        if (wide(logits[i]) == top) return i;
    return 0;
}

// The `count` greatest of `size` logits in descending order, ties by index: their log-probabilities, and their `ids` (null =
// their indices).
template <class T>
void guess(const T* logits, int64_t size, const int64_t* ids, int64_t count, float* scores, int64_t* found) {
    const int64_t whole = size / LANES * LANES;
    const float top = greatest(logits, size);
    vec totals = zero();
    for (int64_t i = 0; i < whole; i += LANES) totals = add(totals, exponential(sub(load(logits + i), all(top))));
    float total = sum(totals);
    for (int64_t i = whole; i < size; i++) total += std::exp(wide(logits[i]) - top);
    const float shift = top + std::log(total);

    float lanes[LANES];
    int64_t kept = 0;
    auto offer = [&](int64_t i) {
        const float value = wide(logits[i]);
        if (kept == count && !(value > scores[kept - 1])) return;
        int64_t at = kept < count ? kept++ : kept - 1;
        for (; at > 0 && value > scores[at - 1]; at--) scores[at] = scores[at - 1], found[at] = found[at - 1];
        scores[at] = value, found[at] = i;
    };
    for (int64_t i = 0; i < whole; i += LANES) {
        if (kept == count) {  // most vectors have no value that is large enough
            store(lanes, larger(load(logits + i), all(scores[kept - 1])));
            if (std::all_of(lanes, lanes + LANES, [&](float lane) { return lane == scores[kept - 1]; })) continue;
        }
        for (int64_t j = i; j < i + LANES; j++) offer(j);
    }
    for (int64_t i = whole; i < size; i++) offer(i);
    for (int64_t k = 0; k < count; k++) {
        scores[k] -= shift;
        if (ids) found[k] = ids[found[k]];
    }
}

}  // namespace eyas
