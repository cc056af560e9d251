// Which tokens may be chosen this time.
//
// Owns the bit mask and the row of logits in which every other one is -inf. Must not know who forbids a
// token, nor what is done with the logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "stages.hpp"

namespace llmrun {

// A view; what it points to has to stay alive during the call it is given to.
struct Mask {
    // Bit t % 32 of word t / 32 is set when token t is allowed; null allows all. Bits after the vocabulary
    // are not looked at.
    const uint32_t* allowed = nullptr;
    std::span<const int32_t> banned{};  // tokens of the vocabulary that are not, whatever their bits say

    bool allows_everything() const { return allowed == nullptr && banned.empty(); }
};

class MaskedRow {
  public:
    explicit MaskedRow(int32_t vocabulary_size) : vocabulary_size_(vocabulary_size) {}

    // Takes over the mask as words in which the banned tokens' bits are cleared.
    void set(const Mask& mask);

    // Those words; valid until the next set().
    const std::vector<uint32_t>& words() const { return words_; }

    // How many tokens are allowed.
    size_t count() const;

    // Replaces the list by the allowed tokens with their logits, ascending.
    void collect(const float* logits, std::vector<Candidate>& list) const;

    // A copy of the logits in which those that are not allowed are -inf; valid until the next call.
    const float* apply(const float* logits);

  private:
    int32_t vocabulary_size_;
    std::vector<uint32_t> words_;  // made when needed, as is the row
    std::vector<float> row_;
};

}  // namespace llmrun
