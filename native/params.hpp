// What a sampler is asked to do.
//
// Owns the parameters' names and defaults, and which steps they leave in the chain. Must not know how any of
// them is carried out.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "order.hpp"
#include "watermark.hpp"

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
    std::vector<Step> order = default_order();          // each at most once; one that is missing is off
    std::optional<WatermarkParams> watermark;           // its step is the last, whatever the order

    bool penalizes() const {
        return repeat_last_n > 0 &&
               (repeat_penalty != 1.0f || frequency_penalty != 0.0f || presence_penalty != 0.0f);
    }
    bool breaks_repeats() const { return dry_multiplier != 0.0f && dry_base >= 1.0f && dry_last_n > 0; }
    bool may_exclude_top_choices() const { return xtc_probability > 0.0f && xtc_threshold <= 0.5f; }
    bool adapts_temperature() const { return temperature_range > 0.0f; }
    bool is_greedy() const { return temperature <= 0.0f && !adapts_temperature(); }

    // Whether the step, if it is in the order, can do anything.
    bool switches_on(Step step) const;
    // Gives the step its neutral value.
    void switch_off(Step step);
};

inline bool SamplerParams::switches_on(Step step) const {
    switch (step) {
        case Step::penalties: return penalizes();
        case Step::dry: return breaks_repeats();
        case Step::top_n_sigma: return top_n_sigma > 0.0f;
        case Step::top_k: return top_k > 0;
        case Step::typical_p: return typical_p < 1.0f;
        case Step::top_p: return top_p < 1.0f;
        case Step::min_p: return min_p > 0.0f;
        case Step::xtc: return may_exclude_top_choices();
        case Step::temperature: return temperature != 1.0f || adapts_temperature();
    }
    return false;
}

inline void SamplerParams::switch_off(Step step) {
    switch (step) {
        case Step::penalties: repeat_last_n = 0; break;
        case Step::dry: dry_multiplier = 0.0f; break;
        case Step::top_n_sigma: top_n_sigma = -1.0f; break;
        case Step::top_k: top_k = 0; break;
        case Step::typical_p: typical_p = 1.0f; break;
        case Step::top_p: top_p = 1.0f; break;
        case Step::min_p: min_p = 0.0f; break;
        case Step::xtc: xtc_probability = 0.0f; break;
        case Step::temperature:
            temperature = 1.0f;
            temperature_range = 0.0f;
            break;
    }
}

}  // namespace llmrun
