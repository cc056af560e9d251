// A watermark along one sequence: a mark that a key leaves in the choice of tokens, and that the same key finds again.
//
// Owns which tokens decide, when they do, and how often a text did what the key wants. Must not know the two schemes'
// arithmetic, the chain before it, nor the draw after it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "green.hpp"
#include "stages.hpp"
#include "synthid.hpp"

namespace llmrun {

struct WatermarkParams {
    bool is_synthid = false;    // else it is green
    std::vector<int64_t> keys;  // positive; one for green, one for each round of synthid
    int32_t n_gram = 0;         // tokens that decide, the candidate being the last; for green 0: the token before does
    double share = 0.25;        // green: of the vocabulary
    float bias = 2.0f;          // green: added to a logit

    std::string_view name() const { return is_synthid ? "synthid" : "green"; }
};

// How often a text did what the key wants.
struct WatermarkCount {
    size_t judged = 0;  // tokens
    size_t trials = 0;  // one for each of them, or for synthid one for each round
    size_t hits = 0;
};

// Copies are independent and go on identically.
class Watermark {
  public:
    // What it looks at besides the candidates.
    struct Context {
        std::vector<int32_t> tokens;  // the last ones
        bool is_repeated = false;     // synthid: they decided lately, and do not again
    };

    // takes_largest: the largest logit behind a bias is the only one left.
    // Throws std::invalid_argument when a value is out of its bounds.
    Watermark(int32_t vocabulary_size, const WatermarkParams& params, bool takes_largest);

    // What stands before the answer.
    void begin(std::span<const int32_t> prompt);
    // A token of the answer.
    void accept(int32_t token);
    // Makes these the whole sequence; what begin() was told is the first of them.
    void rewind(std::span<const int32_t> tokens);

    Context context() const;
    // What comes behind all steps of the chain.
    void apply(Candidates& candidates, const Context& context) const;
    // Looks through a text. With repeats a token counts again where it stands behind the same ones again, although
    // that is no new evidence; synthid never counts it. Throws std::invalid_argument when a token is not in the
    // vocabulary.
    WatermarkCount count(std::span<const int32_t> text, bool repeats) const;

  private:
    static constexpr size_t remembered = 1024;

    size_t context_length() const;
    void forget();
    void push(int32_t token);

    int32_t vocabulary_size_;
    std::optional<GreenList> green_;
    std::optional<Tournament> tournament_;
    bool takes_largest_;
    size_t prompt_length_ = 0;
    std::vector<int32_t> recent_;  // [context_length()] at most, oldest first
    std::vector<uint64_t> seen_;  // synthid: [remembered] hashes of the contexts that decided, a ring
    size_t next_ = 0;
};

}  // namespace llmrun
