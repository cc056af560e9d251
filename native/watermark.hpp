// A watermark along one sequence: a mark that a key leaves in the choice of tokens, and that the same key finds again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "green.hpp"
#include "stages.hpp"

namespace llmrun {

struct WatermarkParams {
    int64_t key = 0;      // positive
    int32_t n_gram = 0;   // tokens that decide, the candidate being the last; 0: the token before does
    double share = 0.25;  // green share of the vocabulary
    float bias = 2.0f;    // added to the logits of green tokens
};

// How often a text did what the key wants.
struct WatermarkCount {
    size_t judged = 0;  // tokens
    size_t hits = 0;    // green ones among them
};

// Copies are independent and go on identically.
class Watermark {
  public:
    // takes_largest: the largest logit behind a bias is the only one left.
    // Throws std::invalid_argument when a value is out of its bounds.
    Watermark(int32_t vocabulary_size, const WatermarkParams& params, bool takes_largest);

    // Makes these the whole sequence.
    void rewind(std::span<const int32_t> tokens);
    void accept(int32_t token);

    // The last tokens that it looks at besides the candidates: green.context_length() at most, oldest first.
    const std::vector<int32_t>& context() const { return recent_; }
    // What comes behind all steps of the chain.
    void apply(Candidates& candidates, std::span<const int32_t> context) const;
    // Looks through a text. With repeats a token counts again where it stands behind the same ones again, although
    // that is no new evidence. Throws std::invalid_argument when a token is not in the vocabulary.
    WatermarkCount count(std::span<const int32_t> text, bool repeats) const;

  private:
    int32_t vocabulary_size_;
    GreenList green_;
    bool takes_largest_;
    std::vector<int32_t> recent_;
};

}  // namespace llmrun
