// SynthID-Text's tournament (https://doi.org/10.1038/s41586-024-08025-4): in one round for each key, the tokens that
// win it take probability from the others.
//
// Owns who wins a round after what stands before, the same as for transformers' SynthIDTextWatermarkLogitsProcessor.
// Must not know the sequence, nor how a token is drawn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "stages.hpp"

namespace llmrun {

class Tournament {
  public:
    // keys: of the rounds. n_gram: how many tokens decide, of which the candidate is the last.
    Tournament(std::vector<int64_t> keys, int32_t n_gram);

    size_t context_length() const { return n_gram_ - 1; }
    size_t rounds() const { return keys_.size(); }
    static uint64_t hash(std::span<const int32_t> before);
    // before: hash of the last context_length() tokens.
    bool wins(uint64_t before, int32_t token, size_t round) const;
    void play(Candidates& candidates, uint64_t before) const;

  private:
    std::vector<uint64_t> keys_;
    int32_t n_gram_;
};

}  // namespace llmrun
