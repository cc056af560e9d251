// What a sampler is asked to do.
//
// Owns the parameters' names and defaults. Must not know how any of them is carried out.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace llmrun {

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
    bool may_exclude_top_choices() const { return xtc_probability > 0.0f && xtc_threshold <= 0.5f; }
    bool adapts_temperature() const { return temperature_range > 0.0f; }
};

}  // namespace llmrun
