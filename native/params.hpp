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

// Type, name and default of each number: llmrun/protocol/params.py has the same, and says what they mean. All neutral
// values switch a step off.
#define LLMRUN_SAMPLER_NUMBERS(NUMBER)        \
    NUMBER(float, temperature, 0.8f)          \
    NUMBER(float, temperature_range, 0.0f)    \
    NUMBER(float, temperature_exponent, 1.0f) \
    NUMBER(int32_t, top_k, 40)                \
    NUMBER(float, top_p, 0.95f)               \
    NUMBER(float, min_p, 0.05f)               \
    NUMBER(float, typical_p, 1.0f)            \
    NUMBER(float, top_n_sigma, -1.0f)         \
    NUMBER(float, xtc_probability, 0.0f)      \
    NUMBER(float, xtc_threshold, 0.1f)        \
    NUMBER(int32_t, repeat_last_n, 64)        \
    NUMBER(float, repeat_penalty, 1.0f)       \
    NUMBER(float, frequency_penalty, 0.0f)    \
    NUMBER(float, presence_penalty, 0.0f)     \
    NUMBER(float, dry_multiplier, 0.0f)       \
    NUMBER(float, dry_base, 1.75f)            \
    NUMBER(int32_t, dry_allowed_length, 2)    \
    NUMBER(int32_t, dry_last_n, 64)           \
    NUMBER(int32_t, mirostat, 0)              \
    NUMBER(float, mirostat_tau, 5.0f)         \
    NUMBER(float, mirostat_eta, 0.1f)

struct SamplerParams {
    uint32_t seed = 0;
#define LLMRUN_DECLARE(type, name, value) type name = value;
    LLMRUN_SAMPLER_NUMBERS(LLMRUN_DECLARE)
#undef LLMRUN_DECLARE
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

    // Calls visit(name, number) for each number.
    template <typename Visit>
    void for_each_number(Visit visit) {
#define LLMRUN_VISIT(type, name, value) visit(#name, name);
        LLMRUN_SAMPLER_NUMBERS(LLMRUN_VISIT)
#undef LLMRUN_VISIT
    }

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
