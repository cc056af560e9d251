// One sequence's sampler: llama.cpp's default chain, from logits to a token.
//
// Owns the order of the chain, the sequence's history and its random generators. Must not know Python or
// llama.h. The result equals, token for token and draw for draw, what a llama_sampler_chain made as in
// llama.cpp's common/sampling.cpp gives on the same machine (a seed of 2^32-1 is a seed here, not "random").
// One exception: top-p without top-k that leaves over 1024 tokens, of which a few have equal logits, may
// draw another one of those equals.
//
// Mostly the candidates come from a shortlist, for which the row is read once and nothing is copied; where
// that can't tell them exactly, every step is done on the whole vocabulary.
#pragma once

#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "changes.hpp"
#include "dry.hpp"
#include "history.hpp"
#include "params.hpp"
#include "peaks.hpp"
#include "shortlist.hpp"
#include "stages.hpp"

namespace llmrun {

constexpr int32_t largest_vocabulary = 1 << 24;

// The logits can't be sampled from: one of them is NaN or +inf, or none is finite.
class BadLogits : public std::runtime_error {
  public:
    BadLogits(int32_t token, float logit);
    int32_t token;  // the first one at fault; the first of the vocabulary when no logit is finite
    float logit;
};

struct LogProbability {
    int32_t token;
    float value;
};

// One thread at a time. Copies are independent and go on identically.
class Sampler {
  public:
    // exact: do every step on the whole vocabulary, always; the reference for the tests.
    // Throws std::invalid_argument when a value makes no sense for this vocabulary.
    Sampler(int32_t vocabulary_size, SamplerParams params,
            const std::vector<std::vector<int32_t>>& dry_breakers = {}, bool exact = false);

    // Chooses the next token from vocabulary_size logits, which are only read. Does not accept it: the
    // caller may still refuse the token, and has to call accept() for every one that joins the sequence.
    // Throws BadLogits; the random generators have not moved then.
    int32_t sample(const float* logits);

    // Adds a token of the sequence, of the prompt too, to the history that the penalties look at.
    void accept(int32_t token);

    // The natural logarithms of the probabilities that the model itself gives (softmax of the logits, before
    // any step of the chain): of `token` first, then of the `count` likeliest, which may be fewer when not as
    // many are possible. Equally likely ones come in the order of their ids. Throws BadLogits.
    const std::vector<LogProbability>& log_probabilities(const float* logits, int32_t token, size_t count);

    int32_t vocabulary_size() const { return vocabulary_size_; }
    // The state of the random generators, the chain's and XTC's, as std::mt19937 writes it; for tests.
    std::string random_state() const;
    // How many tokens were chosen by doing every step on the whole vocabulary.
    int64_t exact_count() const { return exact_count_; }
    // Bytes of the logits that the last sample() read, without what the exact way reads of its own list.
    size_t bytes_read() const { return peaks_.bytes_read(); }

  private:
    void read(const float* logits);
    float& logit(int32_t token) { return changes_.logit(token, logits_[token]); }
    void change_logits();
    void apply_logit_bias();
    void apply_penalties();
    void apply_dry();
    Candidates whole_vocabulary();
    void truncate(Candidates& candidates);
    size_t choose(Candidates& candidates);
    size_t choose_by_mirostat(Candidates& candidates);

    int32_t vocabulary_size_;
    SamplerParams params_;
    bool exact_;
    History history_;
    TokenCounts counts_;  // of the last repeat_last_n tokens; empty when nothing is penalised
    Dry dry_;
    std::mt19937 random_;
    std::mt19937 xtc_random_;
    float mu_;  // mirostat's largest allowed surprise, bits

    const float* logits_ = nullptr;  // valid during a call
    Peaks peaks_;
    ChangedLogits changes_;
    Shortlist shortlist_;
    std::vector<Candidate> buffer_;  // [vocabulary_size], by token id until a step sorts it; made when needed
    Scratch scratch_;
    std::vector<LogProbability> log_probabilities_;
    int64_t exact_count_ = 0;
};

}  // namespace llmrun
