// What each step of the chain did to the probabilities in one remembered call.
//
// Owns the words for the steps and the choice of the tokens shown. Must not know how calls are remembered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "dry.hpp"
#include "memory.hpp"
#include "params.hpp"
#include "watermark.hpp"

namespace llmrun {

struct ExplainedStep {
    std::string_view name;
    size_t remaining;                   // how many tokens may be chosen after it
    std::vector<double> probabilities;  // after it, of the explanation's tokens in their order; 0 for one cut
};

struct Explanation {
    int32_t chosen;
    std::vector<int32_t> tokens;  // the model's likeliest first
    std::vector<ExplainedStep> steps;
};

// Does the call again, the exact way. Steps: "model" (nothing done yet), then those that can do anything, in
// their order: "mask" (tokens that were not allowed), "logit_bias", and the names of order.hpp; with mirostat
// "temperature" and "mirostat"; with a watermark "green" is the last. The token was drawn from
// the last one's probabilities. Shown are the `count` likeliest tokens of the first and of the last step, and the
// chosen one.
Explanation explain(const RememberedCall& call, const SamplerParams& params, const std::vector<Step>& order,
                    Dry dry, const std::optional<Watermark>& watermark, size_t count);

}  // namespace llmrun
