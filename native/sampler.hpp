// One sequence's sampler: llama.cpp's chain, from logits to a token.
//
// Owns the way that is taken through the chain, the sequence's history and its random generators. Must not
// know Python or llama.h. The result equals, token for token and draw for draw, what a llama_sampler_chain
// made as in llama.cpp's common/sampling.cpp gives on the same machine (a seed of 2^32-1 is a seed here, not
// "random"). Two exceptions: top-p without top-k that leaves over 1024 tokens, of which a few have equal
// logits, may draw another one of those equals; and a token whose logit is -inf is never drawn, whatever
// overflowed.
//
// Mostly the candidates come from a shortlist, for which the row is read once and nothing is copied; where
// that can't tell them exactly, or the steps are in another order, they are done on the whole vocabulary.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bad_logits.hpp"
#include "changes.hpp"
#include "dry.hpp"
#include "explain.hpp"
#include "generator.hpp"
#include "history.hpp"
#include "mask.hpp"
#include "memory.hpp"
#include "params.hpp"
#include "peaks.hpp"
#include "shortlist.hpp"
#include "stages.hpp"
#include "watermark.hpp"

namespace llmrun {

constexpr int32_t largest_vocabulary = 1 << 24;

struct LogProbability {
    int32_t token;
    float value;
};

// One thread at a time. Copies are independent and go on identically.
class Sampler {
  public:
    // exact: do every step on the whole vocabulary, always; the reference for the tests.
    // remember: how many of the last sample() calls can be explained; 4 bytes for each token of the vocabulary
    // and call.
    // Throws std::invalid_argument when a value makes no sense for this vocabulary.
    Sampler(int32_t vocabulary_size, SamplerParams params,
            const std::vector<std::vector<int32_t>>& dry_breakers = {}, bool exact = false,
            size_t remember = 0);

    // Chooses the next token from vocabulary_size logits, which are only read. Does not accept it: the
    // caller may still refuse the token, and has to call accept() for every one that joins the sequence.
    // With a mask the result is that of a row in which the logits of all other tokens are -inf; what they are
    // is not looked at. Throws BadLogits, and std::invalid_argument when a banned token is not in the
    // vocabulary; the random generators have not moved then.
    int32_t sample(const float* logits, const Mask& mask = {});

    // Adds a token of the answer to the history that the penalties and a watermark look at.
    void accept(int32_t token);
    // Adds tokens that stand before the answer, or none if one is not in the vocabulary.
    void accept_many(std::span<const int32_t> tokens);

    // Forgets the last `dropped` remembered calls and makes `tokens` the whole history, as if no others had been
    // accepted. The random generators, and mirostat's mu, go on as they are. Throws std::invalid_argument when
    // a token is not in the vocabulary; nothing has changed then.
    void rewind(size_t dropped, std::span<const int32_t> tokens);

    // Takes the random generators, and mirostat's mu, back to where they were before the last `count` sample() calls,
    // of which at least the last 64 are known.
    void undraw(size_t count);

    // What the steps did in the sample() call `back` calls ago, the last one being 0; moves nothing.
    // Throws std::invalid_argument when that call is not remembered.
    Explanation explain(size_t back, size_t count) const;

    // The natural logarithms of the probabilities that the model itself gives (softmax of the logits, before
    // any step of the chain): of `token` first, then of the `count` likeliest, which may be fewer when not as
    // many are possible. Equally likely ones come in the order of their ids. Throws BadLogits.
    const std::vector<LogProbability>& log_probabilities(const float* logits, int32_t token, size_t count);

    // Throws std::invalid_argument when a token is not in the vocabulary.
    void require_known(std::span<const int32_t> tokens) const;

    int32_t vocabulary_size() const { return vocabulary_size_; }
    // The state of the random generators, the chain's and XTC's, as Generator writes it; for tests.
    std::string random_state() const;
    // How many tokens were chosen by doing every step on the whole vocabulary.
    int64_t exact_count() const { return exact_count_; }
    // Bytes of logits that the last sample(), if it was without a mask, read; not what the exact way reads of
    // its own list.
    size_t bytes_read() const { return peaks_.bytes_read(); }

  private:
    struct Drawn {
        uint64_t words;  // of the generators, before a sample() call
        uint64_t xtc_words;
        float mu;
    };

    void remember(const float* logits, const Mask& mask);
    void remember_said(int32_t token);
    int32_t choose(const float* logits);
    int32_t choose_allowed(const float* logits);
    std::optional<int32_t> choose_of_few(const float* logits);
    int32_t choose_exactly();
    int32_t draw_marked(Candidates& candidates);
    void read(const float* logits);
    float& logit(int32_t token) { return changes_.logit(token, logits_[token]); }
    void change_logits();
    Candidates whole_vocabulary();
    size_t draw_by_mirostat(Candidates& candidates);

    int32_t vocabulary_size_;
    std::optional<Watermark> watermark_;
    SamplerParams params_;
    std::vector<Step> steps_;  // those that can do anything, in their order
    bool exact_;
    bool needs_no_impossible_;  // the steps give the same without the candidates that are -inf
    History history_;
    TokenCounts counts_;  // of the last repeat_last_n tokens; empty when nothing is penalised
    Dry dry_;
    Generator random_;
    Generator xtc_random_;
    float mu_;  // mirostat's largest allowed surprise, bits
    std::vector<Drawn> drawn_;

    const float* logits_ = nullptr;  // valid during a call
    Peaks peaks_;
    ChangedLogits changes_;
    Shortlist shortlist_;
    std::vector<Candidate> buffer_;  // [vocabulary_size], by token id until a step sorts it; made when needed
    Scratch scratch_;
    MaskedRow masked_row_;
    Memory memory_;
    std::vector<LogProbability> log_probabilities_;
    int64_t exact_count_ = 0;
};

}  // namespace llmrun
