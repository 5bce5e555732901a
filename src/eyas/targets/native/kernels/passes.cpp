// The functions that native/library.py calls: experts, whole passes and drafts. This file takes longest to compile.
#include "beam.h"

using namespace eyas;

extern "C" {

// The weighted sum [tokens, H] of the outputs of the experts `ids` [tokens, K] for x [tokens, H].
void eyas_experts(const Experts* experts, const float* x, int64_t tokens, const int64_t* ids, const float* weights,
                  float* out, int64_t bf16, int64_t threads) {
    const int64_t hidden = experts->down->out, slots = tokens * experts->chosen;
    Mixture mixture(*experts, tokens);
    std::copy(ids, ids + slots, mixture.ids(*experts, 0));
    std::copy(weights, weights + slots, mixture.weights(*experts, 0));
    Region region(threads);
    Narrowed narrowed(region, bf16);
    mixture.run(region, narrowed, *experts, x, hidden, tokens, bf16);
    region.share(tokens, 1, [&](int64_t t, int64_t) {
        mixture.sum(*experts, t, bf16, nullptr, out + t * hidden);
    });
}

int64_t eyas_token_scratch(const Decoder* decoder) { return token_scratch(*decoder); }

// Floats that a recurrent layer keeps per token.
int64_t eyas_row_size(const Decoder* decoder) { return row_size(*decoder); }

// Repeat the steps of accepted guesses on the staged states.
void eyas_fold(const Decoder* decoder, const Fold* fold) {
    Region region(fold->threads);
    Recurrence(*decoder, fold->states, fold->tokens).fold(region, *fold);
}

// Run a pass. Returns 0, or 1 without running if a token has no embedding.
int64_t eyas_decoder(const Decoder* decoder, const Pass* pass) {
    for (int64_t t = 0; t < pass->tokens && pass->ids; t++)
        if (pass->ids[t] < 0 || pass->ids[t] >= decoder->embeddings) return 1;
    if (decoder->bf16)
        DecoderRun<uint16_t>(*decoder, *pass).run();
    else
        DecoderRun<float>(*decoder, *pass).run();
    return 0;
}

// Grow a draft's candidates. Returns the number of levels, or 0 without running if a token has no embedding.
int64_t eyas_beam(const Decoder* decoder, const Pass* pass, const Beam* beam) {
    return decoder->bf16 ? search<uint16_t>(*decoder, *pass, *beam) : search<float>(*decoder, *pass, *beam);
}
}
