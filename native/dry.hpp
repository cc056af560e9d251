// DRY ("don't repeat yourself"): makes a token the less likely the longer the repeat that it would extend.
//
// Owns which tokens are penalised and by how much, as llama_sampler_dry_apply does (ported there from
// Koboldcpp pull request 982 by pi6am). Must not know logits, texts, or the rest of the chain.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "history.hpp"

namespace llmrun {

struct DryParams {
    float multiplier;
    float base;
    int32_t allowed_length;  // repeats up to this length are free
    int32_t last_n;          // how many last tokens are looked at

    bool enabled() const { return multiplier != 0.0f && base >= 1.0f && last_n > 0; }
};

class Dry {
  public:
    struct Penalty {
        int32_t token;
        float amount;  // to be subtracted from the token's logit
    };

    // breakers: token sequences that a repeat is not followed across; empty ones are ignored.
    Dry(DryParams params, const std::vector<std::vector<int32_t>>& breakers);

    // The penalties for the token after this history, each token once, ascending; valid until the next call.
    const std::vector<Penalty>& penalties(const History& history);

    // Whether the last penalties() had to look for repeats, even if it found none.
    bool searched() const { return searched_; }

  private:
    struct Extension {
        int32_t token;
        int length;
    };

    int longest_breaker_tail(const History& history, int position) const;
    int repeat_limit(const History& history, int window) const;
    void count_repeats(const History& history, int window, int limit);
    void collect_extensions(const History& history, int window);
    bool is_breaker(int32_t token) const;

    DryParams params_;
    bool searched_ = false;
    std::unordered_map<int32_t, std::vector<std::vector<int32_t>>> breaker_tails_;  // by first token
    std::vector<int> repeats_;           // [window] oldest first: how many tokens up to here repeat the end
    std::vector<Extension> extensions_;  // tokens that once followed a repeat
    std::vector<Penalty> penalties_;
};

}  // namespace llmrun
