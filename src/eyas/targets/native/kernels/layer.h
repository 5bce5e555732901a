// What a decoder layer does to each token by itself: norms, RoPE, embeddings, activations and MLPs.
//
// Activations are float32; those of a bf16 model are rounded wherever its PyTorch modules would round.
//
// Shapes: T tokens of a pass, H hidden size, D head size.
#pragma once

#include <cmath>

#include "linear.h"

namespace eyas {

// RMSNorm. Llama's rounds both before and after multiplying by the weight, Gemma's and OLMo's only after.
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

// LayerNorm, rounded at the end; its biases follow its weights.
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
    if (d.centered)
        layer_norm(d, x, weight, size, out);
    else
        rms_norm(d, x, weight, size, out, d.eps);
}

// The norm of queries or keys, head by head or (OLMo) over all heads as one vector.
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

// An activation function, rounded as the model rounds it.
inline vec activated(int64_t activation, vec x, bool bf16) {
    auto keep = [bf16](vec value) { return bf16 ? rounded(value) : value; };
    if (activation == SQUARED_RELU) {
        const vec positive = larger(x, zero());
        return keep(mul(positive, positive));
    }
    return keep(activation == SILU ? silu(x) : activation == GELU ? gelu(x) : exact_gelu(x));
}

// Panels [first, stop) of the inner activations of an MLP without a gate, for tokens x -> inner [tokens, up.out].
inline void plain_mlp(const Linear& up, const Tokens& x, int64_t first, int64_t stop, bool bf16, int64_t activation,
                      float* inner) {
    multiply(up, x, first, stop, bf16, [&](int64_t t, int64_t o, vec(&sum)[PARTS]) {
        for (vec& part : sum) part = activated(activation, part, bf16);
        put(inner + t * up.out, o, up.out, sum);
    });
}

// Panels [first, stop) of the inner activations of a gated MLP (see `Gating`), for tokens x -> inner [tokens, gate.out].
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
