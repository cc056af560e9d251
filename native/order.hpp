// The steps of the chain that can be put in another order.
//
// Owns their names, llama.cpp's order, and how an order is read. Must not know what a step does.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace llmrun {

// In llama.cpp's order. The biases come before them and the draw after them, always.
enum class Step : uint8_t {
    penalties,
    dry,
    top_n_sigma,
    top_k,
    typical_p,
    top_p,
    min_p,
    xtc,
    temperature,
};

constexpr std::array<std::string_view, 9> step_names{
    "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"};

inline std::string_view name_of(Step step) { return step_names[static_cast<size_t>(step)]; }

inline std::vector<Step> default_order() {
    std::vector<Step> steps;
    for (size_t i = 0; i < step_names.size(); ++i) {
        steps.push_back(static_cast<Step>(i));
    }
    return steps;
}

// Throws std::invalid_argument, which names the step that is unknown or there twice.
inline std::vector<Step> order_from(const std::vector<std::string>& names) {
    std::vector<Step> steps;
    for (const std::string& name : names) {
        const auto found = std::find(step_names.begin(), step_names.end(), name);
        if (found == step_names.end()) {
            throw std::invalid_argument("the sampler has no step '" + name + "'");
        }
        const auto step = static_cast<Step>(found - step_names.begin());
        if (std::find(steps.begin(), steps.end(), step) != steps.end()) {
            throw std::invalid_argument("the step '" + name + "' is in the order twice");
        }
        steps.push_back(step);
    }
    return steps;
}

}  // namespace llmrun
