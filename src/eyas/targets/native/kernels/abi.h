// What Python and the kernels tell each other: native/library.py reads constants and structs from here, so that they are
// written down once. So there is nothing else here: fields are int64_t, float, double, pointers, or structs from above.
//
// Shapes: T tokens of a pass, R rows, Q columns (cells of a row), H hidden size, D head size, V outputs of the head.
#pragma once

#include <cstdint>

namespace eyas {

constexpr int PANEL = 16;              // outputs of a panel
constexpr int64_t GROUP = 32;          // inputs of a block of packed weights
constexpr int64_t SUPER = 8;           // blocks of a super-block
constexpr int64_t MOST_ROTATED = 512;  // features that RoPE rotates in latent attention
constexpr int64_t MOST_TAPS = 8;       // inputs of a convolution

// Packed kinds have codes of 8 or 4 bits, to be read as signed by taking half of their range away, or with a least weight.
// Those of super-blocks have a least weight (SUPER), or codes to be read as signed and a scale for each 16 inputs (HALVES).
enum Kind : int64_t {
    FLOAT32 = 0, BFLOAT16 = 1, SIGNED8 = 2, LEAST8 = 3, SIGNED4 = 4, LEAST4 = 5, ZERO4 = 6, SUPER8 = 7, SUPER4 = 8,
    HALVES8 = 9
};

// How bf16 inputs are multiplied. Below 32 bits: numbers of tokens, a bit each, that are multiplied by `vdpbf16ps`, with
// the same sums as a chain's. Tiles (tiles.h) have sums of their own, and are for all numbers of tokens or for none.
// Inputs of packed weights are multiplied in integers, or AS_FLOATS.
enum Way : int64_t { TILES = int64_t{1} << 32, TILES_OF_VECTORS = int64_t{1} << 33, AS_FLOATS = int64_t{1} << 34 };

enum Activation : int64_t { SILU, GELU, CLIPPED, EXACT_GELU, SQUARED_RELU };

// PATHS: a token sees the committed columns and its own path. BLOCKS: the committed columns and all that the pass stages
// in its row, before it and after. CONTEXT: there are no tokens; each layer only makes keys and values of the states `x`.
enum Mode : int64_t { PATHS, BLOCKS, CONTEXT };

struct Linear {
    const char* weight;   // the first panel; null = there is no such linear
    const float* bias;    // [out] or null
    int64_t out, in, kind;
    int64_t ways;         // how it is multiplied, see `Way`; 0 = inputs may not be bf16
};

struct Gating {                          // what a gated MLP has inside, of the outputs of its gate and of `up`: SILU, GELU
    int64_t activation;                  // (tanh form), EXACT_GELU: that of the gate, times up. CLIPPED (GPT-OSS): both at
    float alpha, limit;                  // most `limit`, up at least -limit; gate * sigmoid(alpha * gate) * (up + 1)
    float scale;                         // a factor of the gate, before the activation
};

struct Experts {
    const Linear *gate, *up, *down;      // [E] of each expert; gate null = they have none
    int64_t count, chosen;               // E, K of them for each token; count 0 = there are none
    Linear router;                       // to E scores
    const float* bias;                   // [E] added to the scores by which experts are chosen, or null
    int64_t groups, groups_used;         // only experts of so many groups are chosen, those with the highest sums of
    int64_t summed;                      // so many of their experts' best scores; groups 1 = all experts
    int64_t sigmoid, renormalised;       // scores are sigmoids, not a softmax; weights are divided by their sum
    int64_t rounds_scores, rounds_weights;  // bf16: whether the router's outputs are rounded, and weights with what they weight
    float scale;                         // a factor of the weights
    Linear shared_gate;                  // its one output's sigmoid weights the layer's own MLP; or none
    Gating gating;
};

struct Latent {                          // multi-head latent attention, see latent.h
    Linear query;                        // from what `q` and a norm [its inputs] make to queries; or none: `q` makes them
    const float* query_norm;
    const float* norm;                   // [L] of the latent, which `k` makes, with the key of all heads behind it
    Linear absorb;                       // for each head from its query [N] to [L]
    Linear expand;                       // from a latent [L] to each head's key [N] and value [V]
};

struct Recurrent {                       // what mixes tokens in the place of attention, see recurrent.h
    const Linear* inputs;                // of the layer's input; their outputs are a token's row [width]
    int64_t count;                       // 0 = there is no recurrence
    const int64_t* places;               // [panels of `inputs`] where in the row each 16 outputs go
    const float* scales;                 // [width] factors of the row, or null
    int64_t width, channels, kernel;     // C: the first features of the row go through a convolution over K tokens
    int64_t multiplier;                  // where in the row what the channels are multiplied by before begins; 0 = nothing
    const float *filter, *filter_bias;   // [K, C], the oldest token's first; [C] or null
    int64_t delta;                       // whether the recurrence is a delta rule, not Mamba-2's
    int64_t heads, key_heads, value_size, key_size;
    int64_t value, key, query;           // the channels in which they begin; without heads channels are what is mixed
    const int64_t *step_places, *factor_places;  // [heads] in the row, of a step's size and (delta rule) its factor
    const float *step_bias, *rates;      // [heads] a step decays a state by exp(rate * softplus(size + bias))
    const float* skip;                   // [heads] share of its value that a head adds to what it reads, or null
    float factor_scale;
    int64_t gate, gates_first;           // where in the row its gates begin; whether they multiply before the norm.
                                         // Behind heads, and in the convolution, there is a SiLU
    const float* norm;                   // [heads * value_size] or null
    int64_t norm_size;                   // features that are normed together
    float norm_eps;
    int64_t states;                      // where in a slot's states this layer's begin: [K - 1, C], those of its heads
    Linear out;                          // of what is mixed
};

struct Layer {
    Linear q, k, v, o, gate, up, down;   // q, k, v, o: of attention; or none. gate, up, down: of the MLP, or of the expert
                                         // that all tokens share; or none. Without a gate an MLP has its activation between
                                         // `up` and `down`
    Latent latent;
    Recurrent recurrent;                 // beside attention, or in its place
    Experts experts;
    const float *input_norm, *mlp_norm;  // [H] or null
    const float* embedding_norm;         // [H] of a drafter's first layer, which reads embeddings too; else null
    const float *q_norm, *k_norm;        // [D], or of all heads together [heads * D]; or null
    const float *attention_out_norm, *mlp_out_norm;  // [H] of what attention and MLP add; or null
    const float* sinks;                  // [heads] see `Query`; or null
    int64_t rope;                        // which RoPE tables; -1 = none
    int64_t window;                      // latest positions that a token sees; 0 = all
    int64_t normed_residual;             // whether the layer adds to the normed input instead of the input
    float recurrent_scale, attention_scale, mlp_scale;  // factors of what the layer adds
    float gate_scale;                    // see `Gating`
};

struct Decoder {
    const Layer* layers;
    int64_t count, hidden, heads, kv_heads, size, intermediate;
    int64_t rotated;                     // leading features of a head that RoPE rotates
    int64_t bf16;
    int64_t norms_heads_together, rounds_twice, centred;  // see `norm_heads`, `rms_norm`, `norm`
    int64_t activation;                  // of MLPs
    int64_t in_parallel;                 // whether attention and MLP read the same state, and are added to it together
    int64_t heads_in_turn;               // whether `q` makes query, key and value of each head in turn; no `k`, no `v`
    int64_t gates;                       // whether `q` makes query and gate of each head in turn: what it mixes is gated
    float eps, scale, softcap;           // scale and softcap: of attention's scores, see `Context`
    float embedding_scale;
    const void* embedding;               // [embeddings, H] row-major, or packed
    int64_t embeddings, embedding_kind;
    const void* position_embedding;      // [limit, H] row-major, added to the embeddings, as they are kept; or null
    Linear mix;                          // of embedding and state side by side, before the first layer; or none
    const float* norm;                   // [H] or null
    int64_t returns_normed;              // whether the states that come back are those after the norm
    Linear head;                         // or none
    int64_t limit;                       // positions stay below it; 0 = there is no limit
    int64_t rank, query_rank, value_size;  // of latent attention: L, inputs of `Latent.query`, V; rank 0 = there is none
    int64_t pairs, exact_rope;           // there RoPE turns neighbours, not halves; is rounded once, not at each step
    float latent_eps;                    // of its norms
};

struct RowStates {
    int64_t rows;                  // R; 0 = the pass has none
    const int64_t* sure;           // [R] of the pass: how many of a row's columns are kept in any case
    const float* const* committed; // [R] the states of each row's slot
    float* const* staged;          // [R] those after its sure columns
    float* inputs;                 // [T, row_size] of each layer, see `row_size`
    int64_t apart;                 // from one recurrent layer's to the next; 0 = they take turns
    int64_t copies;                // how many copies of states are made besides
    const int64_t* copied;         // [copies, 2] of which row, after how many of its tokens
    float* const* to;              // [copies] where they go
};

struct Fold {
    RowStates states;              // whose `inputs` are those of the pass
    int64_t tokens;                // T of the pass
    const int64_t* starts;         // [R + 1] where each row's accepted tokens begin
    const int64_t* accepted;       // [starts[R]] tokens of the pass, in their order
    int64_t threads;
};

struct Pass {
    int64_t mode;                        // one of `Mode`
    int64_t tokens, columns;             // T, Q
    const int64_t* cells;                // [T] row * Q + column of each token; null = all cells
    const int64_t* ids;                  // [T]
    const int64_t* lengths;              // [R] committed columns
    const int64_t* parents;              // [R, parents_row] see `Tree`
    int64_t parents_row;                 // from row to row of `parents`, 0 = the same for all
    int64_t before, most;                // columns of each row staged before this pass; more than any token sees
    int64_t slot;                        // of row 0
    const float *cosines, *sines;        // [ropes, positions, rotated]
    int64_t positions;
    char* const* keys;                   // for each layer [slots, kv_heads, C, D]; latents [slots, C, L], and as values
    char* const* values;                 // the keys that all heads share [slots, C, P]
    int64_t capacity;                    // C
    int64_t in_codes;                    // whether keys and values are in 8 bits, see `entry_size`
    float* x;                            // [T, H] a drafter's states, then what leaves the last layer
    const float* above;                  // [R, above_count, H] where a guess takes its parent's state from; or null
    int64_t above_count, above_first;    // cells of a row there, the staged column of the first
    const int64_t* taps;                 // boundaries, in the order of `tapped`
    int64_t tap_count;
    char* tapped;                        // [T, taps, H] in the model's dtype
    char* final;                         // [T, H] after the final norm, or null
    char* logits;                        // [T, V], or null
    float* scratch;                      // [T, eyas_token_scratch]
    RowStates states;
    int64_t threads;
};

struct Beam {                            // a beam search, see beam.h
    int64_t rows, depth, width;          // R, D, K
    const char* normed;                  // [R, H] after the final norm: what the head reads below the roots
    const float* fed;                    // [R, H] what the first level's guesses are fed back
    const int64_t* ids;                  // [V] the target's tokens
    const float *divisors, *scales;      // [R] of the logits, and of the noise that is added to them; null = there is none
    const int64_t *seeds, *positions;    // [R] of the noise
    const float* worth;                  // [groups, 2, BINS] of best children, and of others; null: their log-probability
    const int64_t* groups;               // [R]
    const char* drafting;                // [R] whether a row matters to whether the search goes on
    double least;                        // which a beam must exceed in one of them; minus infinity = always
    int64_t *tokens, *parents;           // [R, M] candidates of all levels; parents: among the row's, -1 = the root
    float *scores, *logprobs;            // [R, M]
    int64_t* beams;                      // [R, (D - 1) * K] of each level but the last, among the level's candidates
    const double* prices;                // [most] what 1, 2, ... nodes must gain together; null = none are chosen
    int64_t most;                        // nodes that are chosen of a single row
    int64_t* chosen;                     // [1 + 2 * most] how many, the candidates in their order, their parents among them
};

}  // namespace eyas
