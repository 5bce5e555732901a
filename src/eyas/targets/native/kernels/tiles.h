// Products of bf16 inputs by AMX: a tile register holds the sums of 16 tokens and 16 outputs, and one instruction adds the
// products of 32 inputs to it.
//
//     A: 16 tokens x 32 inputs      B: 16 words (pairs of inputs) x 16 outputs      C: sums, 16 tokens x 16 outputs
//
// Sixteen words of a bf16 panel, as they lie in memory (weight.h), are such a B.
// `tdpbf16ps` sums the even ones of its 32 inputs in order, starting from 0, and the odd ones likewise. It adds the two
// sums, and then their sum to C; subnormal numbers count as 0. The last inputs, fewer than 32, are added one by one. So a
// sum is the same whatever the number of tokens, panels and threads, but it differs from a chain's.
//
// Vectors can compute the same sums, slowly: a processor's tiles are checked against them, and tests run them everywhere.
#pragma once

#include <algorithm>

#include "weight.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace eyas {

constexpr int64_t TILE_TOKENS = 16, TILE_INPUTS = 32, TILE_PANELS = 6;  // 6 C, next to an A and a B

// Ask the system for the tile registers, which a process must do once; false = there are none.
inline bool tiles_are_allowed() {
#ifdef __AMX_BF16__
    constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return false;
#endif
}

// While it lives, this thread's tile registers have 16 rows of 64 bytes.
class TilesInUse {
  public:
#ifdef __AMX_BF16__
    explicit TilesInUse(bool used) : used_(used) {
        struct {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } shape;
        if (used) _tile_loadconfig(&shape);
    }
    ~TilesInUse() {
        if (used_) _tile_release();
    }
#else
    explicit TilesInUse(bool) {}
#endif
    TilesInUse(const TilesInUse&) = delete;

  private:
    [[maybe_unused]] bool used_ = false;
};

#if defined(__AVX512BF16__)
// The sums C [16 tokens, P] of whole blocks of 32 inputs, by vectors.
inline void tiles_of_vectors(const Linear& linear, const Tokens& tokens, const char* weight, int64_t panels, Fetch, vec* sums) {
    const int64_t row = PANEL * bytes_of(linear.kind), ld = in_pairs(linear.in);
    std::fill(sums, sums + tokens.count * panels, zero());
    for (int64_t i = 0; i + TILE_INPUTS <= linear.in; i += TILE_INPUTS)
        for (int64_t p = 0; p < panels; p++) {
            const char* words = weight + (p * linear.in + i) * row;
            for (int64_t t = 0; t < tokens.count; t++) {
                vec even = zero(), odd = zero();
                for (int pair = 0; pair < 16; pair++) {
                    const __m512i factors = all_of_pair(tokens.pairs + t * ld + i + 2 * pair);
                    const __m512i word = _mm512_loadu_si512(words + pair * 64);
                    even = fma(first_of(factors), first_of(word), even);
                    odd = fma(second_of(factors), second_of(word), odd);
                }
                sums[t * panels + p] = add(sums[t * panels + p], add(even, odd));
            }
        }
}

#ifdef __AMX_BF16__
// The same by tiles. Their numbers must be literals, as they are part of the instructions.
inline void tiles_of_amx(const Linear& linear, const Tokens& tokens, const char* weight, int64_t panels, Fetch fetch, vec* sums) {
    const int64_t row = PANEL * bytes_of(linear.kind), ld = in_pairs(linear.in);
    auto memory = [] { asm volatile("" ::: "memory"); };  // compilers don't know that tiles read and write it
    memory();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    for (int64_t i = 0; i + TILE_INPUTS <= linear.in; i += TILE_INPUTS) {
        _tile_loadd(6, tokens.pairs + i, ld * 2);
        for (int64_t p = 0; p < panels; p++) {
            for (int64_t line = 0; line < TILE_INPUTS * fetch.pace; line += 64)
                _mm_prefetch(weight + p * linear.in * row + fetch.at(i) + line, _MM_HINT_T0);
            memory();
            _tile_loadd(7, weight + (p * linear.in + i) * row, 64);
            switch (p) {
                case 0: _tile_dpbf16ps(0, 6, 7); break;
                case 1: _tile_dpbf16ps(1, 6, 7); break;
                case 2: _tile_dpbf16ps(2, 6, 7); break;
                case 3: _tile_dpbf16ps(3, 6, 7); break;
                case 4: _tile_dpbf16ps(4, 6, 7); break;
                default: _tile_dpbf16ps(5, 6, 7);
            }
        }
    }
    alignas(64) float out[TILE_PANELS][TILE_TOKENS][PANEL];
    _tile_stored(0, out[0], 64);
    _tile_stored(1, out[1], 64);
    _tile_stored(2, out[2], 64);
    _tile_stored(3, out[3], 64);
    _tile_stored(4, out[4], 64);
    _tile_stored(5, out[5], 64);
    memory();
    for (int64_t t = 0; t < tokens.count; t++)
        for (int64_t p = 0; p < panels; p++) sums[t * panels + p] = load(out[p][t]);
}
#endif

// The sums [T, P] of up to 16 tokens with up to 6 panels.
inline void multiply_tiles(const Linear& linear, const Tokens& tokens, const char* weight, int64_t panels, Fetch fetch, vec* sums) {
    const int64_t row = PANEL * bytes_of(linear.kind);
    auto run = tiles_of_vectors;
#ifdef __AMX_BF16__
    if (linear.microkernels == TILES) run = tiles_of_amx;
#endif
    run(linear, tokens, weight, panels, fetch, sums);
    for (int64_t i = linear.in / TILE_INPUTS * TILE_INPUTS; i < linear.in; i++)
        for (int64_t p = 0; p < panels; p++) {
            const vec w = weight_of(weight + p * linear.in * row, i, linear.in);
            for (int64_t t = 0; t < tokens.count; t++)
                sums[t * panels + p] = fma(all(tokens.x[t * tokens.ld + i]), w, sums[t * panels + p]);
        }
}
#else
inline void multiply_tiles(const Linear&, const Tokens&, const char*, int64_t, Fetch, vec*) {}
#endif

}  // namespace eyas
