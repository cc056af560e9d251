// One sequence's sampler: llama.cpp's default chain, from logits to a token.
//
// Owns the order of the chain, the sequence's history and its random generators. Must not know Python or
// llama.h. The result equals, token for token and draw for draw, what a llama_sampler_chain made as in
// llama.cpp's common/sampling.cpp gives on the same machine (a seed of 2^32-1 is a seed here, not "random").
#pragma once

#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "dry.hpp"
#include "history.hpp"
#include "stages.hpp"

namespace llmrun {

constexpr int32_t largest_vocabulary = 1 << 24;

// Names, meaning and defaults as in llmrun/params.py; all neutral values switch a step off.
struct SamplerParams {
    uint32_t seed = 0;
    float temperature = 0.8f;
    float temperature_range = 0.0f;
    float temperature_exponent = 1.0f;
    int32_t top_k = 40;
    float top_p = 0.95f;
    float min_p = 0.05f;
    float typical_p = 1.0f;
    float top_n_sigma = -1.0f;
    float xtc_probability = 0.0f;
    float xtc_threshold = 0.1f;
    int32_t repeat_last_n = 64;
    float repeat_penalty = 1.0f;
    float frequency_penalty = 0.0f;
    float presence_penalty = 0.0f;
    float dry_multiplier = 0.0f;
    float dry_base = 1.75f;
    int32_t dry_allowed_length = 2;
    int32_t dry_last_n = 64;
    int32_t mirostat = 0;
    float mirostat_tau = 5.0f;
    float mirostat_eta = 0.1f;
    std::vector<std::pair<int32_t, float>> logit_bias;  // (token, added logit); -inf bans the token

    bool penalizes() const {
        return repeat_last_n > 0 &&
               (repeat_penalty != 1.0f || frequency_penalty != 0.0f || presence_penalty != 0.0f);
    }
};

// The logits can't be sampled from: one of them is NaN or +inf, or none is finite.
class BadLogits : public std::runtime_error {
  public:
    BadLogits(int32_t token, float logit);
    int32_t token;  // the first one at fault; the first of the vocabulary when no logit is finite
    float logit;
};

// One thread at a time. Copies are independent and go on identically.
class Sampler {
  public:
    // Throws std::invalid_argument when a value makes no sense for this vocabulary.
    Sampler(int32_t vocabulary_size, SamplerParams params,
            const std::vector<std::vector<int32_t>>& dry_breakers = {});

    // Chooses the next token from vocabulary_size logits, which are only read. Does not accept it: the
    // caller may still refuse the token, and has to call accept() for every one that joins the sequence.
    // Throws BadLogits; the random generators have not moved then.
    int32_t sample(const float* logits);

    // Adds a token of the sequence, of the prompt too, to the history that the penalties look at.
    void accept(int32_t token);

    int32_t vocabulary_size() const { return vocabulary_size_; }
    // The state of the random generators, the chain's and XTC's, as std::mt19937 writes it; for tests.
    std::string random_state() const;

  private:
    Candidates load(const float* logits);
    void change_logit(int32_t token, float logit);
    void apply_logit_bias();
    void apply_penalties();
    void apply_dry();
    void require_possible_token() const;
    void truncate(Candidates& candidates);
    size_t choose(Candidates& candidates);
    size_t choose_by_mirostat(Candidates& candidates);

    int32_t vocabulary_size_;
    SamplerParams params_;
    History history_;
    TokenCounts counts_;  // of the last repeat_last_n tokens; empty when nothing is penalised
    Dry dry_;
    std::mt19937 random_;
    std::mt19937 xtc_random_;
    float mu_;  // mirostat's largest allowed surprise, bits

    std::vector<Candidate> buffer_;  // [vocabulary_size], by token id until a step sorts it
    Scratch scratch_;
};

}  // namespace llmrun
