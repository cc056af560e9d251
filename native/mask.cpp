#include "mask.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace llmrun {
namespace {

constexpr size_t bits = 32;
constexpr uint32_t all = 0xffffffff;

// Calls visit with the number of each set bit, the lowest first.
template <typename Visit>
void each_bit(uint32_t word, const Visit& visit) {
    for (; word != 0; word &= word - 1) {
        visit(static_cast<size_t>(std::countr_zero(word)));
    }
}

}  // namespace

void MaskedRow::set(const Mask& mask) {
    const size_t size = vocabulary_size_;
    words_.resize((size + bits - 1) / bits);
    if (mask.allowed != nullptr) {
        std::copy_n(mask.allowed, words_.size(), words_.begin());
    } else {
        std::fill(words_.begin(), words_.end(), all);
    }
    if (size % bits != 0) {
        words_.back() &= all >> (bits - size % bits);
    }
    for (const int32_t token : mask.banned) {
        words_[token / bits] &= ~(uint32_t{1} << token % bits);
    }
}

size_t MaskedRow::count() const {
    size_t allowed = 0;
    for (const uint32_t word : words_) {
        allowed += std::popcount(word);
    }
    return allowed;
}

void MaskedRow::collect(const float* logits, std::vector<Candidate>& list) const {
    list.clear();
    for (size_t i = 0; i < words_.size(); ++i) {
        each_bit(words_[i], [&](size_t bit) {
            const size_t token = i * bits + bit;
            list.push_back({static_cast<int32_t>(token), logits[token], 0.0f});
        });
    }
}

const float* MaskedRow::apply(const float* logits) {
    row_.resize(vocabulary_size_);
    const size_t size = row_.size();
    for (size_t i = 0; i < words_.size(); ++i) {
        const size_t first = i * bits;
        const size_t count = std::min(bits, size - first);
        const uint32_t word = words_[i];
        if (std::popcount(word) <= static_cast<int>(bits / 2)) {
            std::fill_n(row_.begin() + first, count, -INFINITY);
            each_bit(word, [&](size_t bit) { row_[first + bit] = logits[first + bit]; });
        } else {
            std::copy_n(logits + first, count, row_.begin() + first);
            const uint32_t in_row = all >> (bits - count);
            each_bit(~word & in_row, [&](size_t bit) { row_[first + bit] = -INFINITY; });
        }
    }
    return row_.data();
}

}  // namespace llmrun
