#include "watermark.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <set>
#include <stdexcept>

namespace llmrun {
namespace {

constexpr int32_t longest_n_gram = 64;

void require(bool condition, const char* complaint) {
    if (!condition) {
        throw std::invalid_argument(complaint);
    }
}

const WatermarkParams& checked(int32_t vocabulary_size, const WatermarkParams& params) {
    require(vocabulary_size >= 1, "a watermark needs a vocabulary");
    require(params.key > 0, "a watermark's key has to be greater than 0");
    require(params.n_gram >= 0 && params.n_gram <= longest_n_gram, "a watermark's n-gram has 64 tokens at most");
    require(params.share > 0.0 && params.share < 1.0, "a watermark's share has to be between 0 and 1");
    require(std::isfinite(params.bias) && params.bias > 0.0f, "a watermark's bias has to be greater than 0");
    return params;
}

}  // namespace

Watermark::Watermark(int32_t vocabulary_size, const WatermarkParams& params, bool takes_largest)
    : vocabulary_size_(vocabulary_size),
      green_(vocabulary_size, checked(vocabulary_size, params).key, params.share, params.bias, params.n_gram),
      takes_largest_(takes_largest) {}

void Watermark::accept(int32_t token) {
    recent_.push_back(token);
    if (recent_.size() > green_.context_length()) {
        recent_.erase(recent_.begin());
    }
}

void Watermark::rewind(std::span<const int32_t> tokens) {
    const auto last = tokens.last(std::min(tokens.size(), green_.context_length()));
    recent_.assign(last.begin(), last.end());
}

void Watermark::apply(Candidates& candidates, std::span<const int32_t> context) const {
    if (candidates.size > 1 && context.size() == green_.context_length()) {
        green_.add_bias(candidates, context);
    }
    if (takes_largest_) {
        temperature(candidates, 0.0f);
    }
}

WatermarkCount Watermark::count(std::span<const int32_t> text, bool repeats) const {
    require(std::all_of(text.begin(), text.end(),
                        [&](int32_t token) { return token >= 0 && token < vocabulary_size_; }),
            "the token is not in the vocabulary");
    WatermarkCount counted;
    std::set<std::vector<int32_t>> n_grams;
    const size_t length = green_.context_length();
    for (size_t i = length; i < text.size(); ++i) {
        const auto n_gram = text.subspan(i - length, length + 1);
        if (n_grams.emplace(n_gram.begin(), n_gram.end()).second || repeats) {
            ++counted.judged;
            counted.hits += green_.contains(n_gram.first(length), text[i]) ? 1 : 0;
        }
    }
    return counted;
}

}  // namespace llmrun
