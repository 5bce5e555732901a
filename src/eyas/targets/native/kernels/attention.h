// Attention of the tokens of a pass over the slot cache.
//
// A token sees the committed columns of its row at positions 0, 1, 2, ... (a sliding window leaves out the oldest),
// then its ancestors among the staged columns, at the positions that follow. Its scores, their sum and the mixed values
// are computed from these alone and in this order, so they do not depend on the tree, the other rows or where the pass
// was staged.
//
// Shapes: C capacity of the cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>

#include "vector.h"

namespace eyas {

// Write the columns marked in `seen` [most] to `columns`, in order; returns their number.
inline int64_t visible(const uint8_t* seen, int64_t most, int64_t* columns) {
    int64_t count = 0;
    for (int64_t i = 0; i < most; i++)
        if (seen[i]) columns[count++] = i;
    return count;
}

// Staged columns. Each follows another staged column, or the committed columns.
struct Tree {
    const int64_t* parents;  // the staged column that each one follows, -1 = none; null = always the one before it
    int64_t roots;           // 1: column 0 is a root that `parents` leaves out, counting the nodes after it from 0

    int64_t parent(int64_t column) const {
        if (!parents) return column - 1;
        return column < roots ? -1 : parents[column - roots] + roots;
    }
    int64_t depth(int64_t column) const {  // columns on its path
        if (!parents) return column + 1;
        int64_t depth = 0;
        for (; column >= 0; column = parent(column)) depth++;
        return depth;
    }
};

// How far back the tokens of a pass see in a layer.
struct Window {
    int64_t size;      // the number of latest positions that a token sees; 0 = all
    int64_t anchored;  // whether all guesses see as far back as the last committed token does
    int64_t guesses;   // whether the staged columns are guesses: these see their whole path and the last committed column

    // The first committed column that a token sees, whose path has `depth` staged columns.
    int64_t first(int64_t committed, int64_t depth) const {
        if (!size) return 0;
        const int64_t nearest = guesses ? committed - 1 : committed;
        return std::max<int64_t>(0, std::min(nearest, committed - size + (guesses && anchored ? 0 : depth)));
    }
};

// The columns that staged column `column` sees, in the order of their positions: the committed ones, then its path through
// the staged ones; with a window only the latest. Sets `count` to their number and returns a pointer to the first of them,
// within `room`.
inline const int64_t* visible(int64_t committed, const Tree& tree, int64_t column, const Window& window, int64_t* room,
                              int64_t& count) {
    const int64_t depth = tree.depth(column);
    count = 0;
    for (int64_t i = window.first(committed, depth); i < committed; i++) room[count++] = i;
    count += depth;
    for (int64_t at = count; column >= 0; column = tree.parent(column)) room[--at] = committed + column;
    if (!window.size || window.guesses || count <= window.size) return room;
    room += count - window.size;
    count = window.size;
    return room;
}

// The length of a key or value of `size` numbers, in units of T: the numbers themselves, or 8-bit codes followed by their
// scale, a float.
template <class T>
constexpr int64_t entry_size(int64_t size) { return sizeof(T) == 1 ? size + static_cast<int64_t>(sizeof(float)) : size; }

// A key or value, loaded as floats; 8-bit codes are dequantized.
template <class T>
struct Entry {
    struct None {};
    const T* at;
    std::conditional_t<sizeof(T) == 1, vec, None> factor;

    Entry() = default;
    Entry(const T* entry, int64_t size) : at(entry) {
        if constexpr (sizeof(T) == 1) {
            float found;
            std::memcpy(&found, entry + size, sizeof(float));
            factor = all(found);
        }
    }
    vec from(int64_t i) const {
        if constexpr (sizeof(T) == 1) return mul(load(at + i), factor);
        return load(at + i);
    }
};

// What a set of queries attends to: keys [C, size] and values [C, value_size] at `columns`; a query sees the first `count`
// of them. Keys may be split in two pieces (latent attention); the second piece is `tails` [C, tail_size].
template <class T>
struct Context {
    const T *keys, *values;
    const int64_t* columns;
    int64_t size, value_size;
    float scale, softcap;  // softcap: limits the scores' absolute values (Gemma 2); 0 = none
    bool bf16;
    const T* tails = nullptr;
    int64_t tail_size = 0;
};

constexpr float NO_SINK = -std::numeric_limits<float>::infinity();

struct Query {
    const float* state;   // [size + tail_size]
    float* out;           // [value_size]
    int64_t count;
    float sink;           // an attention sink: the score of a key without a value, which takes its share of the weights (GPT-OSS)
};

// Replace the scores of a query's keys by their unnormalized softmax weights, zero beyond the last. Returns one over the
// sum of the weights, the sink's included.
inline float weigh(float* scores, int64_t count, int64_t padded, float softcap, float sink) {
    if (softcap > 0)
        for (int64_t j = 0; j < padded; j += LANES)
            store(scores + j, mul(all(softcap), tangent(div(load(scores + j), all(softcap)))));
    for (int64_t j = count; j < padded; j++) scores[j] = NO_SINK;
    vec highest = all(NO_SINK);
    for (int64_t j = 0; j < padded; j += LANES) highest = larger(highest, load(scores + j));
    float lanes[LANES], top = sink;
    store(lanes, highest);
    for (float lane : lanes) top = lane > top ? lane : top;
    vec total = zero();
    for (int64_t j = 0; j < padded; j += LANES) {
        const vec weights = exponential(sub(load(scores + j), all(top)));
        store(scores + j, weights);
        total = add(total, weights);
    }
    return 1.0f / (sink > NO_SINK ? sum(total) + std::exp(sink - top) : sum(total));
}

constexpr int64_t TILE = 512;    // keys that all queries process before the next ones are read
constexpr int64_t QUERIES = 32;  // queries that share one read of the keys
// Accumulator vectors that N queries keep in registers at the same time; they are reduced eight at a time.
constexpr int sums_of(int queries) { return LANES == 8 || queries == 1 ? 8 : 16; }

// Store the scores of N queries for KEYS keys; `products` has those of one query after the other's.
template <int N, int KEYS, int SUMS>
void put_scores(const vec (&products)[SUMS], float scale, float* scores, int64_t stride) {
    float found[SUMS];
    for (int i = 0; i < SUMS; i += 8) _mm256_storeu_ps(found + i, _mm256_mul_ps(sums(products + i), _mm256_set1_ps(scale)));
    for (int n = 0; n < N; n++) std::memcpy(scores + n * stride, found + n * KEYS, KEYS * sizeof(float));
}

constexpr int64_t KEYS_AHEAD = 48;

// Prefetch what is read after the scores of keys [first, stop): their values, and the keys that many further on, up to `last`.
// The weights that a pass has read since may have taken their place in the caches. SIZE: of keys and values, if the compiler
// knows it. (Inlined, since GCC drops a function that does nothing else.)
template <int64_t SIZE = 0, class T>
__attribute__((always_inline)) inline void fetch(const Context<T>& context, int64_t first, int64_t stop, int64_t last) {
    const int64_t of_key = entry_size<T>(SIZE ? SIZE : context.size) * sizeof(T);
    const int64_t of_value = entry_size<T>(SIZE ? SIZE : context.value_size) * sizeof(T);
    for (int64_t j = first; j < stop; j++) {
        const char* value = reinterpret_cast<const char*>(context.values) + context.columns[j] * of_value;
        for (int64_t line = 0; line < of_value; line += 64) _mm_prefetch(value + line, _MM_HINT_T0);
        if (j + KEYS_AHEAD >= last) continue;
        const char* key = reinterpret_cast<const char*>(context.keys) + context.columns[j + KEYS_AHEAD] * of_key;
        for (int64_t line = 0; line < of_key; line += 64) _mm_prefetch(key + line, _MM_HINT_T0);
    }
}

#if defined(__AVX512BF16__)
constexpr int64_t PAIRED = 32, MAX_PAIRED = 8;  // numbers in a vector of bf16; the most vectors of a key or value

// Whether products with keys or values of `size` numbers are computed two at a time.
template <class T>
inline bool is_paired(const Context<T>& context, int64_t size) {
    return std::is_same_v<T, uint16_t> && context.bf16 && size % PAIRED == 0 && size <= PAIRED * MAX_PAIRED;
}

// `score_together` for a bf16 model, whose queries and keys bf16 can hold: two products at a time. A SIZE known to the
// compiler saves a tenth of the time.
template <int N, int64_t SIZE = 0>
void score_paired(const Context<uint16_t>& context, const Query* query, int64_t first, int64_t stop, float* scores,
                  int64_t stride, bool fetches) {
    constexpr int SUMS = sums_of(N), KEYS = SUMS / N;
    const int64_t size = SIZE ? SIZE : context.size;
    __m512bh states[N][SIZE ? SIZE / PAIRED : MAX_PAIRED];
    for (int n = 0; n < N; n++)
        for (int64_t d = 0; d < size; d += PAIRED)
            states[n][d / PAIRED] = _mm512_cvtne2ps_pbh(load(query[n].state + d + LANES), load(query[n].state + d));
    for (int64_t j = first; j < stop; j += KEYS) {
        const uint16_t* key[KEYS];
        for (int i = 0; i < KEYS; i++) key[i] = context.keys + context.columns[j + i < stop ? j + i : stop - 1] * size;
        if (fetches) fetch<SIZE>(context, j, std::min<int64_t>(j + KEYS, stop), stop);
        vec products[SUMS] = {};
        for (int64_t d = 0; d < size; d += PAIRED)
            for (int i = 0; i < KEYS; i++) {
                const auto of_key = reinterpret_cast<__m512bh>(_mm512_loadu_si512(key[i] + d));
                for (int n = 0; n < N; n++)
                    products[n * KEYS + i] = _mm512_dpbf16_ps(products[n * KEYS + i], states[n][d / PAIRED], of_key);
            }
        put_scores<N, KEYS>(products, context.scale, scores + j, stride);
    }
}

// Round a query's weights [padded] to bf16, in place.
inline void narrow_weights(float* weights, int64_t padded) {
    for (int64_t j = 0; j < padded; j += LANES)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<uint16_t*>(weights) + j),
                            reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(load(weights + j))));
}

// `mix_together` for a bf16 model: two keys at a time, with weights that `narrow_weights` has rounded.
template <int N>
void mix_paired(const Context<uint16_t>& context, const Query* query, int64_t first, int64_t stop, const float* weights,
                int64_t stride, const float* inverse, bool last) {
    auto mix = [&](auto width, int64_t at) {  // `width` vectors of a value at a time, from number `at` on
        constexpr int WIDE = decltype(width)::value;
        vec mixed[N][WIDE][2] = {};  // of every eight numbers the first four, and the others
        for (int n = 0; first && n < N; n++)
            for (int p = 0; p < WIDE; p++) {
                const float* out = query[n].out + at + p * PAIRED;
                mixed[n][p][0] = _mm512_shuffle_f32x4(load(out), load(out + LANES), 0x88);
                mixed[n][p][1] = _mm512_shuffle_f32x4(load(out), load(out + LANES), 0xdd);
            }
        for (int64_t j = first; j < stop; j += 2) {
            const uint16_t* one = context.values + context.columns[j] * context.value_size + at;
            const uint16_t* two = context.values + context.columns[std::min(j + 1, stop - 1)] * context.value_size + at;
            for (int p = 0; p < WIDE; p++) {
                const __m512i a = _mm512_loadu_si512(one + p * PAIRED), b = _mm512_loadu_si512(two + p * PAIRED);
                const auto low = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(a, b));
                const auto high = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(a, b));
                for (int n = 0; n < N; n++) {
                    const uint16_t* own = reinterpret_cast<const uint16_t*>(weights + n * stride) + j;
                    const auto both = reinterpret_cast<__m512bh>(all_of_pair(own));
                    mixed[n][p][0] = _mm512_dpbf16_ps(mixed[n][p][0], both, low);
                    mixed[n][p][1] = _mm512_dpbf16_ps(mixed[n][p][1], both, high);
                }
            }
        }
        for (int n = 0; n < N; n++)
            for (int p = 0; p < WIDE; p++) {
                for (int half = 0; half < 2; half++) {  // the numbers in order again
                    const vec a = mixed[n][p][0], b = mixed[n][p][1];
                    const vec both = half ? _mm512_shuffle_f32x4(a, b, 0xee) : _mm512_shuffle_f32x4(a, b, 0x44);
                    vec done = _mm512_shuffle_f32x4(both, both, 0xd8);
                    if (last) done = rounded(mul(done, all(inverse[n])));
                    store(query[n].out + at + p * PAIRED + half * LANES, done);
                }
            }
    };
    int64_t at = 0;
    auto all_of = [&](auto width) {
        constexpr int WIDE = decltype(width)::value;
        if constexpr (N * WIDE <= 8)
            for (; at + WIDE * PAIRED <= context.value_size; at += WIDE * PAIRED) mix(width, at);
    };
    all_of(std::integral_constant<int, 4>());
    all_of(std::integral_constant<int, 2>());
    all_of(std::integral_constant<int, 1>());
}
#endif

// Score N queries together against keys [first, stop), reading each key once; `stride` from one query's scores to the next's.
// `fetches`: these are the first queries that read the keys.
template <int N, bool TAILS, class T>
void score_together(const Context<T>& context, const Query* query, int64_t first, int64_t stop, float* scores,
                    int64_t stride, bool fetches) {
#if defined(__AVX512BF16__)
    if constexpr (!TAILS && std::is_same_v<T, uint16_t>)
        if (is_paired(context, context.size)) {
            const bool usual = N != 3 && context.size == 64 && context.value_size == 64;  // of three queries, GCC spills sums
            const auto score = usual ? score_paired<N, 64> : score_paired<N>;
            return score(context, query, first, stop, scores, stride, fetches);
        }
#endif
    constexpr int SUMS = sums_of(N), KEYS = SUMS / N;  // keys that are processed together
    for (int64_t j = first; j < stop; j += KEYS) {
        if (fetches) fetch(context, j, std::min<int64_t>(j + KEYS, stop), stop);
        vec products[SUMS] = {};
        auto multiply = [&](const T* keys, int64_t size, int64_t at) __attribute__((always_inline)) {
            Entry<T> key[KEYS];
            for (int i = 0; i < KEYS; i++)
                key[i] = {keys + context.columns[j + i < stop ? j + i : stop - 1] * entry_size<T>(size), size};
            for (int64_t d = 0; d < size; d += LANES)
                for (int i = 0; i < KEYS; i++) {
                    vec of_key = key[i].from(d);
                    for (int n = 0; n < N; n++)
                        products[n * KEYS + i] = fma(load(query[n].state + at + d), of_key, products[n * KEYS + i]);
                }
        };
        multiply(context.keys, context.size, 0);
        if constexpr (TAILS) multiply(context.tails, context.tail_size, context.size);
        put_scores<N, KEYS>(products, context.scale, scores + j, stride);
    }
}

// Add the weighted values of keys [first, stop) to the sums that N queries have over the keys before; the last call
// multiplies the sums by `inverse`.
template <int N, class T>
void mix_together(const Context<T>& context, const Query* query, int64_t first, int64_t stop, const float* weights,
                  int64_t stride, const float* inverse, bool last) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, uint16_t>)
        if (is_paired(context, context.value_size))
            return mix_paired<N>(context, query, first, stop, weights, stride, inverse, last);
#endif
    auto mix = [&](auto width, int64_t d) {  // `width` vectors of values at a time, from feature d on
        constexpr int WIDE = decltype(width)::value;
        vec mixed[N][WIDE] = {};
        if (first)
            for (int n = 0; n < N; n++)
                for (int p = 0; p < WIDE; p++) mixed[n][p] = load(query[n].out + d + p * LANES);
        for (int64_t j = first; j < stop; j++) {
            const int64_t size = context.value_size;
            const Entry<T> value(context.values + context.columns[j] * entry_size<T>(size), size);
            for (int p = 0; p < WIDE; p++) {
                vec part = value.from(d + p * LANES);
                for (int n = 0; n < N; n++) mixed[n][p] = fma(all(weights[n * stride + j]), part, mixed[n][p]);
            }
        }
        for (int n = 0; n < N; n++)
            for (int p = 0; p < WIDE; p++) {
                vec done = last ? mul(mixed[n][p], all(inverse[n])) : mixed[n][p];
                store(query[n].out + d + p * LANES, last && context.bf16 ? rounded(done) : done);
            }
    };
    constexpr int MAX_WIDE = sums_of(N) / N;
    int64_t d = 0;
    auto all_of = [&](auto width) {
        constexpr int WIDE = decltype(width)::value;
        if constexpr (WIDE <= MAX_WIDE)
            for (; d + WIDE * LANES <= context.value_size; d += WIDE * LANES) mix(width, d);
    };
    all_of(std::integral_constant<int, 8>());
    all_of(std::integral_constant<int, 4>());
    all_of(std::integral_constant<int, 2>());
    all_of(std::integral_constant<int, 1>());
}

// Floats that `total` queries need for their scores of at most `most` keys.
inline int64_t score_room(int64_t total, int64_t most) { return ((total < QUERIES ? total : QUERIES) + 3) * (most + 2 * LANES); }

// A thread's buffers for scores and for the columns that a token sees.
struct Room {
    Room(int64_t of_scores, int64_t of_columns) : scores(new float[of_scores]), columns(new int64_t[of_columns]) {}

    std::unique_ptr<float[]> scores;
    std::unique_ptr<int64_t[]> columns;
};

// Queries of one context. Up to 32 of them go through keys and values together, a tile at a time, so that memory is read
// once; groups of them share registers. Every sum is the one that a query would have alone.
template <class T>
class Queries {
  public:
    Queries(const Context<T>& context, float* scores) : context_(context), scores_(scores) {}

    void add(const float* state, float* out, int64_t count, float sink = NO_SINK) {
        if (total_ == QUERIES) finish();
        waiting_[total_++] = {state, out, count, sink};
    }

    // Attend with the queries that are still waiting.
    void finish() {
        int64_t most = 0;
        for (int64_t i = 0; i < total_; i++) most = std::max(most, waiting_[i].count);
        const int64_t padded = (most + LANES - 1) / LANES * LANES, stride = padded + LANES;
        for (int64_t first = 0; first < most; first += TILE)
            groups([&](auto size, int64_t at, int64_t longest) {
                constexpr int N = decltype(size)::value;
                const auto score = context_.tails ? score_together<N, true, T> : score_together<N, false, T>;
                if (first < longest)
                    score(context_, waiting_ + at, first, std::min(longest, first + TILE), scores_ + at * stride, stride,
                          at == 0);
            });
        float inverse[QUERIES];
        groups([&](auto size, int64_t at, int64_t longest) {
            const int64_t own = (longest + LANES - 1) / LANES * LANES;
            for (int64_t i = at; i < at + decltype(size)::value; i++) {
                inverse[i] = weigh(scores_ + i * stride, waiting_[i].count, own, context_.softcap, waiting_[i].sink);
#if defined(__AVX512BF16__)
                if (is_paired(context_, context_.value_size)) narrow_weights(scores_ + i * stride, own);
#endif
            }
        });
        for (int64_t first = 0; first < most; first += TILE)
            groups([&](auto size, int64_t at, int64_t longest) {
                constexpr int N = decltype(size)::value;
                const int64_t stop = std::min(longest, first + TILE);
                if (first < longest)
                    mix_together<N>(context_, waiting_ + at, first, stop, scores_ + at * stride, stride, inverse + at, stop == longest);
            });
        total_ = 0;
    }

  private:
    // Call `work` with the size, the first query and the largest count of each group of at most 4 queries. Groups are nearly
    // equal in size (AVX-512), or have 4, 2 or 1 queries.
    template <class Work>
    void groups(const Work& work) {
        int64_t at = 0;
        auto next = [&](auto size) {
            int64_t longest = 0;
            for (int64_t i = at; i < at + size; i++) longest = std::max(longest, waiting_[i].count);
            work(size, at, longest);
            at += size;
        };
        while (const int64_t left = total_ - at) {
            const int64_t groups = LANES == 16 ? (left + 3) / 4 : 1, size = (left + groups - 1) / groups;
            if (size >= 4)
                next(std::integral_constant<int, 4>());
            else if (LANES == 16 && size == 3)
                next(std::integral_constant<int, LANES == 16 ? 3 : 2>());
            else if (size >= 2)
                next(std::integral_constant<int, 2>());
            else
                next(std::integral_constant<int, 1>());
        }
    }

    Context<T> context_;
    float* scores_;
    Query waiting_[QUERIES];
    int64_t total_ = 0;
};

extern template class Queries<float>;  // attention.cpp
extern template class Queries<uint16_t>;
extern template class Queries<int8_t>;

}  // namespace eyas
