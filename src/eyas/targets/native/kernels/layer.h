// A decoder layer as the kernels know it, and what it does to one token: norms, RoPE, activation, residual.
//
// Activations are float32; those of a bf16 model are rounded wherever its PyTorch modules would round.
//
// Shapes: T tokens of a pass, H hidden size, D head size.
#pragma once

#include <cmath>

#include "linear.h"

namespace eyas {

constexpr int64_t MOST_ROTATED = 512;  // features that RoPE rotates in latent attention
constexpr int64_t MOST_TAPS = 8;       // inputs of a convolution

enum Activation : int64_t { SILU, GELU, CLIPPED, EXACT_GELU, SQUARED_RELU };

// The structs are also known to native/library.py, field by field.
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

// RMSNorm. Llama's rounds the normed value before it is multiplied by the weight and after, Gemma's and OLMo's only after.
inline void rms_norm(const Decoder& d, const float* x, const float* weight, int64_t size, float* out, float eps) {
    vec squares = zero();
    for (int64_t i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    vec factor = all(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
    for (int64_t i = 0; i < size; i += LANES) {
        vec normed = mul(load(x + i), factor);
        vec done = mul(d.bf16 && d.rounds_twice ? rounded(normed) : normed, load(weight + i));
        store(out + i, d.bf16 ? rounded(done) : done);
    }
}

// LayerNorm, rounded at the end; its biases lie behind its weights.
inline void layer_norm(const Decoder& d, const float* x, const float* weight, int64_t size, float* out) {
    vec total = zero(), squares = zero();
    for (int64_t i = 0; i < size; i += LANES) total = add(total, load(x + i));
    const vec mean = all(sum(total) / static_cast<float>(size));
    for (int64_t i = 0; i < size; i += LANES) {
        vec apart = sub(load(x + i), mean);
        squares = fma(apart, apart, squares);
    }
    const vec factor = all(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + d.eps));
    for (int64_t i = 0; i < size; i += LANES) {
        vec done = fma(mul(sub(load(x + i), mean), factor), load(weight + i), load(weight + size + i));
        store(out + i, d.bf16 ? rounded(done) : done);
    }
}

// The norm of a decoder's layers.
inline void norm(const Decoder& d, const float* x, const float* weight, int64_t size, float* out) {
    if (d.centred)
        layer_norm(d, x, weight, size, out);
    else
        rms_norm(d, x, weight, size, out, d.eps);
}

// The norm of queries or keys, head by head or (OLMo) of all heads as one vector.
inline void norm_heads(const Decoder& d, float* x, const float* weight, int64_t heads) {
    if (!weight) return;
    const int64_t size = d.norms_heads_together ? heads * d.size : d.size;
    for (int64_t at = 0; at < heads * d.size; at += size) norm(d, x + at, weight, size, x + at);
}

// Rotate one head in place (half-split layout).
inline void rotate(float* head, const float* cosine, const float* sine, int64_t rotated, bool bf16) {
    int64_t half = rotated / 2;
    auto keep = [bf16](vec x) { return bf16 ? rounded(x) : x; };
    auto turn = [&](float* left, float* right, const float* c, const float* s, int64_t shift) {
        vec a = load(left), b = load(right);
        vec first = add(keep(mul(a, load(c))), keep(mul(sub(zero(), b), load(s))));
        vec second = add(keep(mul(b, load(c + shift))), keep(mul(a, load(s + shift))));
        store(left, keep(first));
        store(right, keep(second));
    };
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) turn(head + i, head + half + i, cosine + i, sine + i, half);
    if (i < half) {  // fewer features than lanes
        float left[LANES] = {}, right[LANES] = {}, c[2 * LANES] = {}, s[2 * LANES] = {};
        int64_t rest = (half - i) * sizeof(float);
        std::memcpy(left, head + i, rest), std::memcpy(right, head + half + i, rest);
        std::memcpy(c, cosine + i, rest), std::memcpy(c + LANES, cosine + half + i, rest);
        std::memcpy(s, sine + i, rest), std::memcpy(s + LANES, sine + half + i, rest);
        turn(left, right, c, s, LANES);
        std::memcpy(head + i, left, rest), std::memcpy(head + half + i, right, rest);
    }
}

inline void embed(const Decoder& d, int64_t token, int64_t position, float* out) {
    const bool packed = is_packed(d.embedding_kind), bf16 = packed ? d.bf16 : d.embedding_kind == BFLOAT16;
    auto looked_up = [bf16](const void* table, int64_t at) {
        return bf16 ? load(static_cast<const uint16_t*>(table) + at) : load(static_cast<const float*>(table) + at);
    };
    if (packed) load_row(d.embedding_kind, static_cast<const char*>(d.embedding), token, d.hidden, out);
    for (int64_t i = 0; i < d.hidden; i += LANES) {
        vec values = packed ? load(out + i) : looked_up(d.embedding, token * d.hidden + i);
        if (packed && d.bf16) values = rounded(values);
        values = mul(values, all(d.embedding_scale));
        if (d.bf16) values = rounded(values);
        if (d.position_embedding) values = add(values, looked_up(d.position_embedding, position * d.hidden + i));
        store(out + i, d.bf16 ? rounded(values) : values);
    }
}

// An activation of one input, in the model's own rounding.
inline vec activated(int64_t activation, vec x, bool bf16) {
    auto keep = [bf16](vec value) { return bf16 ? rounded(value) : value; };
    if (activation == SQUARED_RELU) {
        const vec positive = larger(x, zero());
        return keep(mul(positive, positive));
    }
    return keep(activation == SILU ? silu(x) : activation == GELU ? gelu(x) : exact_gelu(x));
}

// Panels [first, stop) of what an MLP without a gate has inside, for tokens x -> inner [tokens, up.out].
inline void plain_mlp(const Linear& up, const Tokens& x, int64_t first, int64_t stop, bool bf16, int64_t activation,
                      float* inner) {
    multiply(up, x, first, stop, bf16, [&](int64_t t, int64_t o, vec(&sum)[PARTS]) {
        for (vec& part : sum) part = activated(activation, part, bf16);
        put(inner + t * up.out, o, up.out, sum);
    });
}

// Panels [first, stop) of what a gated MLP has inside, see `Gating`, for tokens x -> inner [tokens, gate.out].
inline void gated_mlp(const Linear& gate, const Linear& up, const Tokens& x, int64_t first, int64_t stop, bool bf16,
                      const Gating& gating, float* inner) {
    const int64_t size = gate.out;
    const vec limit = all(gating.limit), alpha = all(gating.alpha), one = all(1.0f);
    auto keep = [bf16](vec value) { return bf16 ? rounded(value) : value; };
    auto of_gate = [&](vec x) {
        if (gating.scale != 1.0f) x = keep(mul(x, all(gating.scale)));
        if (gating.activation != CLIPPED) return activated(gating.activation, x, bf16);
        x = smaller(x, limit);
        const vec share = div(one, add(one, exponential(sub(zero(), keep(mul(x, alpha))))));
        return keep(mul(x, keep(share)));
    };
    multiply(gate, x, first, stop, bf16, [&](int64_t t, int64_t o, vec(&sum)[PARTS]) {
        for (vec& part : sum) part = of_gate(part);
        put(inner + t * size, o, size, sum);
    });
    multiply(up, x, first, stop, bf16, [&](int64_t t, int64_t o, vec(&sum)[PARTS]) {
        for (int part = 0; part < PARTS; part++) {
            vec factor = sum[part];
            if (gating.activation == CLIPPED)
                factor = keep(add(larger(smaller(factor, limit), sub(zero(), limit)), one));
            sum[part] = keep(mul(load(inner + t * size + o + part * LANES), factor));
        }
        put(inner + t * size, o, size, sum);
    });
}

}  // namespace eyas
