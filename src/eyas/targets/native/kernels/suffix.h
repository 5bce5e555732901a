// Suffix decoding: the most frequent continuations of a text's last tokens. This is the search of
// eyas/drafters/weightless/suffix.py, in the same arithmetic; the reasons are there.
//
// Shapes: n occurrences of the last token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "abi.h"

namespace eyas {

constexpr int32_t NOTHING = -1;        // marks positions without a token

// A token that may be drafted next.
struct Continuation {
    double probability;                // of the path to it
    int64_t parent, recent;            // its last occurrence among its parent's
    int32_t token;
    double step;                       // its probability after its parent
    int64_t level;
    std::vector<int64_t> stops;        // where the drafted tokens begin in the text, for each of its occurrences

    // The most probable one is drafted first; then the first parent's; then the most recent one.
    bool operator<(const Continuation& other) const {
        return std::make_tuple(probability, -parent, recent) < std::make_tuple(other.probability, -other.parent, other.recent);
    }
};

// The probability that a text that was copied for `length` tokens is copied for one more.
inline double goes_on(int64_t length) { return static_cast<double>(length) / static_cast<double>(length + 1); }

// The most frequent tokens at a level that follow occurrences at `stops`, which end a match of `match` tokens.
inline std::vector<Continuation> continuations(const SuffixSearch& s, const std::vector<int64_t>& stops, int64_t match,
                                               int64_t level, double probability, int64_t parent) {
    std::vector<std::pair<int32_t, int64_t>> following;
    for (int64_t i = 0; i < static_cast<int64_t>(stops.size()); i++)
        if (s.text[stops[i] + level] != NOTHING) following.emplace_back(s.text[stops[i] + level], i);
    std::sort(following.begin(), following.end());
    const double all = static_cast<double>(stops.size()), on = goes_on(match + level);
    std::vector<Continuation> found;
    for (auto first = following.begin(), end = first; first != following.end(); first = end) {
        end = std::find_if(first, following.end(), [&](const auto& each) { return each.first != first->first; });
        const double step = (end - first) / all * on;
        if (probability * step < s.least) continue;
        found.push_back({probability * step, parent, std::prev(end)->second, first->first, step, level, {}});
        for (auto at = first; at != end; at++) found.back().stops.push_back(stops[at->second]);
    }
    std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return b < a; });
    if (static_cast<int64_t>(found.size()) > s.fanout) found.resize(s.fanout);
    return found;
}

// The most probable continuations of occurrences at `stops`, which end a match of `match` tokens, up to `most` tokens, and
// their score, unless that can't exceed the best draft's: then fewer.
inline double grow(const SuffixSearch& s, const std::vector<int64_t>& stops, int64_t match, int64_t most, double best,
                   std::vector<std::tuple<int64_t, int64_t, double>>& made) {
    const int64_t width = std::min(most, s.depth);
    double score = 0;
    std::priority_queue<Continuation> open;
    auto offer = [&](const std::vector<int64_t>& from, int64_t level, double probability, int64_t parent) {
        for (auto& each : continuations(s, from, match, level, probability, parent)) open.push(std::move(each));
    };
    made.clear();
    offer(stops, 0, 1.0, -1);
    for (int64_t count = 0; !open.empty() && count < most; count = made.size()) {
        const Continuation next = open.top();
        open.pop();
        if (score + next.probability * static_cast<double>(most - count) <= best) break;
        made.emplace_back(next.token, next.parent, std::log(next.step));
        double probability = next.probability;
        score += probability;
        int64_t level = next.level + 1, parent = count;
        // while all continue alike, the next token needs no queue unless another path is as probable
        const double rival = open.empty() ? 0.0 : open.top().probability;
        for (; level < width && static_cast<int64_t>(made.size()) < most; level++, parent++) {
            const int32_t token = s.text[next.stops[0] + level];
            auto same = [&](int64_t stop) { return s.text[stop + level] == token; };
            if (token == NOTHING || !std::all_of(next.stops.begin(), next.stops.end(), same)) break;
            const double step = goes_on(match + level);
            if (probability * step < s.least || probability * step <= rival) break;
            made.emplace_back(token, parent, std::log(step));
            probability *= step;
            score += probability;
        }
        if (level < width) offer(next.stops, level, probability, parent);
    }
    return score;
}

// `eyas_suffix`: the best draft that any suffix of the context gives. Returns its number of tokens.
inline int64_t best_draft(SuffixSearch& s) {
    std::vector<std::pair<int64_t, int64_t>> matches;  // [n] the position after each occurrence, and the match's length
    std::vector<bool> lengths(s.longest + 1);
    constexpr int64_t BLOCK = 64;
    const int32_t* last = s.context + s.known - 1;
    for (int64_t block = 0; s.known && block < s.size; block += BLOCK) {
        const int64_t end = std::min(block + BLOCK, s.size);
        int32_t any = 0;  // compilers turn this loop into vectors, which most blocks need nothing else
        for (int64_t i = block; i < end; i++) any |= s.text[i] == *last;
        for (int64_t i = block; any && i < end; i++) {
            if (s.text[i] != *last) continue;
            int64_t length = 1;
            while (length < std::min(s.longest, s.known) && s.text[i - length] == last[-length]) length++;
            matches.emplace_back(i + 1, length);
            lengths[length] = true;
        }
    }
    std::vector<std::tuple<int64_t, int64_t, double>> best, made;
    for (int64_t match = s.longest; match; match--) {
        if (!lengths[match]) continue;
        const int64_t most =
            std::min(s.most, static_cast<int64_t>(s.factor * static_cast<double>(match) + s.offset + 1e-6));
        if (static_cast<double>(most) <= s.score) break;  // shorter matches may draft even less
        std::vector<int64_t> stops;
        for (const auto& [stop, length] : matches)
            if (length >= match) stops.push_back(stop);
        const double score = grow(s, stops, match, most, s.score, made);
        if (score > s.score) s.score = score, best.swap(made);
    }
    for (size_t i = 0; i < best.size(); i++) std::tie(s.tokens[i], s.parents[i], s.logprobs[i]) = best[i];
    return best.size();
}

}  // namespace eyas
