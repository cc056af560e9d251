// The green list: tokens that a key favours after what stands before them (https://arxiv.org/abs/2306.04634).
//
// Owns which tokens those are, the same as for transformers' WatermarkLogitsProcessor with torch on a CPU. Must not
// know the sequence, nor how a token is drawn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "stages.hpp"

namespace llmrun {

// The first `count` of torch.randperm(size) on a CPU whose generator has this seed.
std::vector<int32_t> permuted(uint32_t seed, int32_t size, int32_t count);

class GreenList {
  public:
    // Where a candidate decides on itself, so many of the likeliest are looked at.
    static constexpr size_t most_tried = 40;

    // key: positive. share: of the vocabulary. bias: added to a logit.
    // self_hash: 0, where the token before decides; else how many tokens do, of which the candidate is the last.
    GreenList(int32_t vocabulary_size, int64_t key, double share, float bias, int32_t self_hash);

    // How many tokens before decide.
    size_t context_length() const { return self_hash_ > 0 ? self_hash_ - 1 : 1; }
    // before: the last context_length() tokens.
    bool contains(std::span<const int32_t> before, int32_t token) const;
    // Adds the bias to the green ones; where a candidate decides on itself, only to those that are looked at.
    void add_bias(Candidates& candidates, std::span<const int32_t> before) const;

  private:
    uint32_t seed(std::span<const int32_t> before, int32_t token) const;

    int32_t vocabulary_size_;
    int32_t count_;
    int64_t key_;
    float bias_;
    int32_t self_hash_;
    std::shared_ptr<const std::vector<int32_t>> numbers_;  // one for each token, where a candidate decides on itself
};

}  // namespace llmrun
