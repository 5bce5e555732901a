// The interface between Python and the kernels. native/library.py reads constants and structs from this file, so that each
// is defined once. It may hold nothing else: fields are int64_t, float, double, pointers, or structs from above.
//
// Shapes: T tokens of a pass, R rows, Q columns (cells of a row), H hidden size, D head size, V outputs of the head.
#pragma once

#include <cstdint>

namespace eyas {

constexpr int PANEL = 16;              // outputs of a panel
constexpr int64_t GROUP = 32;          // inputs of a block of packed weights
constexpr int64_t SUPER = 8;           // blocks of a super-block
constexpr int64_t MAX_ROTATED = 512;  // the most features that RoPE rotates in latent attention
constexpr int64_t MAX_TAPS = 8;       // the most inputs of a convolution

// Packed kinds hold codes of as many bits as their names say: signed ones, read by subtracting half of their range, or
// unsigned ones with a minimum (MINIMUM). Super-blocks have a minimum (SUPER), or signed codes with a scale per 16 inputs
// (HALVES).
enum Kind : int64_t {
    FLOAT32 = 0, BFLOAT16 = 1, SIGNED8 = 2, SIGNED4 = 3, MINIMUM4 = 4, ZERO4 = 5, SIGNED5 = 6, MINIMUM5 = 7, SUPER5 = 8,
    SUPER4 = 9, HALVES8 = 10, HALVES6 = 11
};

// What multiplies bf16 inputs. Below bit 32, bit n says that groups of n tokens use `vdpbf16ps`, whose sums are those of
// a chain (linear.h). Tiles (tiles.h) have sums of their own, so they are used for every number of tokens or for none.
// Inputs of packed weights are multiplied in integers, or AS_FLOATS.
enum Microkernel : int64_t {
    TILES = int64_t{1} << 32, TILES_OF_VECTORS = int64_t{1} << 33, AS_FLOATS = int64_t{1} << 34
};

enum Activation : int64_t { SILU, GELU, CLIPPED, EXACT_GELU, SQUARED_RELU };

// PATHS: a token sees the committed columns and its own path. BLOCKS: it sees the committed columns and all that the pass
// stages in its row, before and after it. CONTEXT: no tokens; each layer only computes keys and values from the states `x`.
// STAGING: like PATHS, but the last layer only computes keys and values, and nothing else is returned.
enum Mode : int64_t { PATHS, BLOCKS, CONTEXT, STAGING };

struct Linear {
    const char* weight;   // the first panel; null = there is no such linear
    const float* bias;    // [out] or null
    int64_t out, in, kind;
    int64_t microkernels; // what multiplies it, see `Microkernel`; 0 = inputs aren't narrowed to bf16
};

struct Gating {                          // How a gated MLP combines gate and up. SILU, GELU (tanh form), EXACT_GELU:
    int64_t activation;                  // activation(gate) * up. CLIPPED (GPT-OSS): gate * sigmoid(alpha * gate) * (up + 1),
    float alpha, limit;                  // with both clipped to at most `limit`, and up to at least -limit
    float scale;                         // multiplies the gate, before the activation
};

struct Experts {
    const Linear *gate, *up, *down;      // [E] one of each per expert; gate null = experts have no gate
    int64_t count, chosen;               // E experts, K of them for each token; count 0 = no experts
    Linear router;                       // from the layer's input to E scores
    const float* bias;                   // [E] added to the scores only to choose experts, or null
    int64_t groups, groups_used;         // experts are chosen from `groups_used` of `groups` groups: those with the highest
    int64_t summed;                      // sums of their `summed` best scores; groups 1 = from all experts
    int64_t sigmoid, renormalized;       // scores are sigmoids, not a softmax; weights are divided by their sum
    int64_t rounds_scores, rounds_weights;  // bf16: whether router outputs are rounded; weights and weighted outputs
    float scale;                         // multiplies the weights
    Linear shared_gate;                  // one output, whose sigmoid weights the layer's own MLP; or none
    Gating gating;
};

struct Latent {                          // multi-head latent attention, see latent.h
    Linear query;                        // from the normed output of `q` to queries; or none: `q` makes the queries
    const float* query_norm;             // [inputs of `query`]
    const float* norm;                   // [L] of the latent; `k` makes it, followed by the key that all heads share
    Linear absorb;                       // from each head's query [N] to [L]
    Linear expand;                       // from a latent [L] to each head's key [N] and value [V]
};

struct Recurrent {                       // mixes tokens in place of attention, see recurrent.h
    const Linear* inputs;                // read the layer's input; their outputs make up a token's row [width]
    int64_t count;                       // of `inputs`; 0 = no recurrence
    const int64_t* places;               // [panels of `inputs`] where in the row each panel's 16 outputs go
    const float* scales;                 // [width] factors of the row, or null
    int64_t width, channels, kernel;     // the first C features of a row go through a convolution over K tokens
    int64_t multiplier;                  // where in the row the channels' factors before the convolution begin; 0 = none
    const float *filter, *filter_bias;   // [K, C], the oldest token first; [C] or null
    int64_t delta;                       // whether the recurrence is a delta rule rather than Mamba-2
    int64_t heads, key_heads, value_size, key_size;
    int64_t value, key, query;           // the channels where they begin; without heads the channels are the output
    const int64_t *step_places, *factor_places;  // [heads] where in the row a step's size and (delta rule) factor are
    const float *step_bias, *rates;      // [heads] a step decays a state by exp(rate * softplus(size + bias))
    const float* skip;                   // [heads] the share of its value that a head adds to what it reads, or null
    float factor_scale;
    int64_t gate, gates_first;           // where in the row the gates begin; whether they multiply before the norm.
                                         // With heads, gates and convolution go through a SiLU
    const float* norm;                   // [heads * value_size] or null
    int64_t norm_size;                   // features that are normed together
    float norm_eps;
    int64_t states;                      // where this layer's part of a slot's states begins: [K - 1, C], then its heads'
    Linear out;                          // reads the mixed features
};

struct Layer {
    Linear q, k, v, o, gate, up, down;   // q, k, v, o: attention, or none. gate, up, down: the MLP, or the expert that all
                                         // tokens share, or none. An MLP without a gate applies its activation between
                                         // `up` and `down`
    Latent latent;
    Recurrent recurrent;                 // next to attention, or in its place
    Experts experts;
    const float *input_norm, *mlp_norm;  // [H] or null
    const float* embedding_norm;         // [H] in a drafter's first layer, which reads embeddings too; else null
    const float *q_norm, *k_norm;        // [D], or [heads * D] over all heads together; or null
    const float *attention_out_norm, *mlp_out_norm;  // [H] of the outputs of attention and MLP; or null
    const float* sinks;                  // [heads] see `Query`; or null
    int64_t rope;                        // index of its RoPE tables; -1 = none
    int64_t window, anchored;            // see `Window`
    int64_t normed_residual;             // whether the layer adds to the normed input instead of the input
    float recurrent_scale, attention_scale, mlp_scale;  // multiply what each part adds
    float gate_scale;                    // see `Gating`
};

struct Decoder {
    const Layer* layers;
    int64_t count, hidden, heads, kv_heads, size, intermediate;
    int64_t rotated;                     // leading features of a head that RoPE rotates
    int64_t bf16;
    int64_t norms_heads_together, rounds_twice, centered;  // see `norm_heads`, `rms_norm`, `norm`
    int64_t activation;                  // of MLPs
    int64_t in_parallel;                 // whether attention and MLP read the same state and are added to it together
    int64_t heads_in_turn;               // whether `q` makes query, key and value head by head, without `k` and `v`
    int64_t gates;                       // whether `q` makes query and gate head by head; gates multiply attention's output
    float eps, scale, softcap;           // scale and softcap: of attention's scores, see `Context`
    float embedding_scale;
    const void* embedding;               // [embeddings, H] row-major, or packed
    int64_t embeddings, embedding_kind;
    const void* position_embedding;      // [limit, H] row-major, in the embeddings' dtype (packed: the model's); or null
    Linear mix;                          // reads embedding and state, concatenated, before the first layer; or none
    Linear fuse;                         // makes a drafter's states from the target's; or none
    const float* norm;                   // [H] or null
    int64_t returns_normed;              // whether the states returned are those after the norm
    Linear head;                         // or none
    int64_t limit;                       // positions stay below it; 0 = no limit
    int64_t rank, query_rank, value_size;  // latent attention: L, inputs of `Latent.query`, V; rank 0 = none
    int64_t pairs, exact_rope;           // its RoPE pairs neighbors, not halves; it rounds once, not at each step
    float latent_eps;                    // of its norms
};

struct RowStates {
    int64_t rows;                  // R; 0 = no recurrent states
    const int64_t* sure;           // [R] how many of a row's columns in the pass are kept in any case
    const float* const* committed; // [R] the states of each row's slot
    float* const* staged;          // [R] the states after each row's sure columns
    float* inputs;                 // [T, row_size] for each layer, see `row_size`
    int64_t apart;                 // stride between recurrent layers' `inputs`; 0 = they share one buffer in turn
    int64_t copies;                // the number of further copies of states to make
    const int64_t* copied;         // [copies, 2] the row of each, and after how many of its tokens it is made
    float* const* to;              // [copies] where they go
};

struct Fold {
    RowStates states;              // with the `inputs` of the pass
    int64_t tokens;                // T of the pass
    const int64_t* starts;         // [R + 1] where each row's accepted tokens begin
    const int64_t* accepted;       // [starts[R]] indices of tokens of the pass, in order
    int64_t threads;
};

struct Pass {
    int64_t mode;                        // one of `Mode`
    int64_t tokens, columns;             // T, Q
    const int64_t* cells;                // [T] row * Q + column of each token; null = all cells
    const int64_t* ids;                  // [T]
    const int64_t* lengths;              // [R] committed columns
    const int64_t* parents;              // [R, parents_row] see `Tree`
    int64_t parents_row, roots;          // stride between rows of `parents`, 0 = all rows share them; see `Tree`
    int64_t before, most;                // columns of each row staged before this pass; an upper bound of those a token sees
    int64_t slot;                        // of row 0
    const float *cosines, *sines;        // [ropes, positions, rotated]
    int64_t positions;
    char* const* keys;                   // for each layer [slots, kv_heads, C, D]. Latent attention: latents [slots, C, L],
    char* const* values;                 // and as values the keys that all heads share [slots, C, P]
    int64_t capacity;                    // C
    int64_t in_codes;                    // whether keys and values are quantized to 8 bits, see `entry_size`
    int64_t guesses;                     // see `Window`
    float* x;                            // [T, H] in: a drafter's states; out: what leaves the last layer
    const float* above;                  // [R, above_count, H] the states of guesses' parents; or null
    int64_t above_count, above_first;    // cells per row of `above`; the staged column of the first
    const char* sources;                 // [T, inputs of `fuse`] the target's states, in the model's dtype; or null
    const int64_t* taps;                 // layer boundaries, in the order of `tapped`
    int64_t tap_count;
    char* tapped;                        // [T, taps, H] in the model's dtype
    char* final;                         // [T, H] after the final norm, or null
    const int64_t* kept;                 // [T] the slot that keeps a token's last states, -1 = none; or null
    float* kept_states;                  // [slots, H] where it keeps what leaves the last layer,
    char* kept_final;                    // and this after the final norm
    char* logits;                        // [T, V], or null
    float* scratch;                      // [T, eyas_token_scratch]
    RowStates states;
    int64_t threads;
};

struct Beam {                            // a beam search, see beam.h
    int64_t rows, depth, width;          // R, D, K
    const char* normed;                  // [R, H] the roots' states after the final norm, which the head reads first
    const float* fed;                    // [R, H] the states fed back to the first level's guesses; null for a language model
    const int64_t* ids;                  // [V] the target's token for each choice
    const int64_t* outputs;              // [V] the head's output for each choice, which is also the token fed; null = all of
    int64_t choices;                     // the head's, and `ids` are fed. V, the number of choices
    const float *divisors, *scales;      // [R] what logits are divided by; what multiplies the noise added; null = none
    const int64_t *seeds, *positions;    // [R] of the noise
    const float* worth;                  // [groups, 2, BINS] of best children, and of others; null = their log-probability
    const int64_t* groups;               // [R] indices into `worth`; null = all 0
    const char* drafting;                // [R] whether a row counts for going on with the search; null = all do
    double least;                        // it goes on while the best score of such a row exceeds this; -inf = always
    int64_t *tokens, *parents;           // [R, M] candidates of all levels; parents index the row's, -1 = the root
    float *scores, *logprobs;            // [R, M]
    int64_t* beams;                      // [R, (D - 1) * K] of each level but the last: indices into the level's candidates
    const double* prices;                // [most] what 1, 2, ... nodes must gain together; null = none are chosen
    double calibration;                  // by which nodes' values are multiplied before that
    double level_price;                  // what each further level must gain; -inf = levels don't end for that
    int64_t most;                        // the most nodes to choose, of a single row
    int64_t* chosen;                     // [1 + 3 * most] their number; candidates depth first, parents among them, tokens
    float* chosen_logprobs;              // [most + 1] of the paths; and last, the sum of the nodes' values
};

struct SuffixSearch {                    // a search for what follows a text's last tokens, see suffix.h
    const int32_t* text;                 // [size] tokens; NOTHING for `longest` places before them and for any draft's after
    int64_t size;
    const int32_t* context;              // [known] the last tokens
    int64_t known, depth, fanout;        // the most levels, and children of a node
    double factor, offset;               // at most factor * m + offset tokens after a match of m tokens,
    int64_t most;                        // and at most `most`
    double least;                        // the least probability of a path
    int64_t longest;                     // longer matches count as matches of this length
    double score;                        // in: what the draft must exceed; out: its expected number of correct tokens
    int64_t *tokens, *parents;           // [nodes] of the draft; parents among them, -1 = the root
    double* logprobs;                    // [nodes] of the steps
};

}  // namespace eyas
