#include "peaks.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace llmrun {
namespace {

constexpr int32_t infinity_bits = 0x7f800000;  // everything above it, without its sign, is NaN
constexpr size_t floats_per_line = 16;

float middle(float a, float b) { return a / 2 + b / 2; }

}  // namespace

Peaks::Peaks(int32_t vocabulary_size, const Loops& loops)
    : loops_(&loops),
      vocabulary_size_(vocabulary_size),
      whole_groups_(vocabulary_size_ / group_size),
      maxima_((vocabulary_size_ + group_size - 1) / group_size) {
    columns_.resize(maxima_.size() * columns_per_group);
    last_.resize(maxima_.size() > whole_groups_ ? group_size : 0, -INFINITY);
}

int32_t Peaks::read(const float* logits) {
    logits_ = logits;
    lines_read_ = (vocabulary_size_ + floats_per_line - 1) / floats_per_line;
    std::array<int32_t, columns_per_group> worst{};
    loops_->find_maxima(logits, whole_groups_, columns_.data(), maxima_.data(), worst.data());
    if (!last_.empty()) {
        std::copy(logits + whole_groups_ * group_size, logits + vocabulary_size_, last_.begin());
        loops_->find_maxima(last_.data(), 1, columns_.data() + whole_groups_ * columns_per_group,
                            maxima_.data() + whole_groups_, worst.data());
    }
    largest_ = *std::max_element(maxima_.begin(), maxima_.end());
    if (largest_ < INFINITY && *std::max_element(worst.begin(), worst.end()) <= infinity_bits) {
        return -1;
    }
    const auto is_bad = [](float logit) { return !(logit < INFINITY); };
    return static_cast<int32_t>(std::find_if(logits, logits + vocabulary_size_, is_bad) - logits);
}

float Peaks::reached_by(size_t count) const {
    if (count == 1 || largest_ == -INFINITY) {
        return std::max(largest_, lowest_logit);
    }
    // As many maxima reach the answer as are asked for. The fewer there are in all, the more they hide.
    if (4 * count <= maxima_.size()) {
        return reached_by(count, maxima_);
    }
    if (2 * count <= columns_.size()) {
        return reached_by(count, columns_);
    }
    return lowest_logit;
}

// Steps down from the largest in growing steps, then halves the last step.
float Peaks::reached_by(size_t count, const std::vector<float>& values) const {
    const auto reaching = [&](float threshold) {
        return loops_->count_at_least(values.data(), values.size(), threshold);
    };
    const size_t enough = count + count / 8;
    float high = largest_;
    float low = largest_;
    for (float step = 1.0f; reaching(low) < count; step *= 2) {
        if (low == lowest_logit) {
            return lowest_logit;
        }
        high = low;
        low = std::max(largest_ - step, lowest_logit);
    }
    size_t reached = reaching(low);
    for (float half = middle(low, high); reached > enough && low < half && half < high;
         half = middle(low, high)) {
        const size_t more = reaching(half);
        if (more >= count) {
            low = half;
            reached = more;
        } else {
            high = half;
        }
    }
    return low;
}

void Peaks::collect(float threshold, std::vector<Candidate>& found) {
    found.clear();
    for (size_t group = 0; group < maxima_.size(); ++group) {
        if (maxima_[group] >= threshold) {
            collect_group(group, threshold, found);
        }
    }
}

// Eight comparisons at a time become eight bits of a word, and only the bits that are set are looked at.
void Peaks::collect_group(size_t group, float threshold, std::vector<Candidate>& found) {
    const float* logits = group < whole_groups_ ? logits_ + group * group_size : last_.data();
    const auto first = static_cast<int32_t>(group * group_size);
    std::array<uint64_t, group_size / 64> words;
    loops_->find_at_least(logits, threshold, words.data());
    for (size_t word = 0; word < words.size(); ++word) {
        for (uint64_t left = words[word]; left != 0; left &= left - 1) {
            const auto place = static_cast<int32_t>(word * 64 + std::countr_zero(left));
            found.push_back({first + place, logits[place], 0.0f});
        }
    }
    lines_read_ += floats_per_line;
}

void Peaks::weigh(float largest, std::vector<float>& weights) const {
    weights.resize(maxima_.size() * group_size);
    loops_->exponentials(logits_, whole_groups_, largest, weights.data());
    if (!last_.empty()) {
        loops_->exponentials(last_.data(), 1, largest, weights.data() + whole_groups_ * group_size);
        std::fill(weights.begin() + static_cast<std::ptrdiff_t>(vocabulary_size_), weights.end(), 0.0f);
    }
    lines_read_ += (vocabulary_size_ + floats_per_line - 1) / floats_per_line;
}

double Peaks::add_at_least(const std::vector<float>& weights, float threshold) const {
    return loops_->add_at_least(weights.data(), maxima_.size(), threshold);
}

}  // namespace llmrun
