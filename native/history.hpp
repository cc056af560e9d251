// What a sequence has said so far, as far as the penalties look back.
//
// Owns the ring of accepted tokens and the count of each token in it. Must not know logits or parameters.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmrun {

// The last `capacity` tokens; the oldest falls out.
class History {
  public:
    explicit History(size_t capacity) : tokens_(capacity) {}

    void push(int32_t token) {
        if (tokens_.empty()) {
            return;
        }
        newest_ = newest_ + 1 == tokens_.size() ? 0 : newest_ + 1;
        tokens_[newest_] = token;
        size_ = std::min(size_ + 1, tokens_.size());
    }

    // The token `ago` tokens before the newest, which is 0 ago; ago < size().
    int32_t newest(size_t ago) const {
        return tokens_[newest_ >= ago ? newest_ - ago : newest_ + tokens_.size() - ago];
    }

    size_t size() const { return size_; }
    void clear() { size_ = 0; }

    // All of them, oldest first, in place of what the list held.
    void write_to(std::vector<int32_t>& list) const {
        list.clear();
        for (size_t ago = size_; ago > 0; --ago) {
            list.push_back(newest(ago - 1));
        }
    }

  private:
    std::vector<int32_t> tokens_;
    size_t size_ = 0;
    size_t newest_ = 0;
};

// How often each token occurs in a window: adding, removing and walking the distinct tokens never
// touch the rest of the vocabulary.
class TokenCounts {
  public:
    struct Counted {
        int32_t token;
        int32_t count;
    };

    // Distinct tokens never outnumber the window.
    TokenCounts(size_t vocabulary_size, size_t window) : positions_(window == 0 ? 0 : vocabulary_size, none) {
        distinct_.reserve(std::min(vocabulary_size, window + 1));
    }

    void add(int32_t token) {
        int32_t& position = positions_[token];
        if (position == none) {
            position = static_cast<int32_t>(distinct_.size());
            distinct_.push_back({token, 0});
        }
        ++distinct_[position].count;
    }

    // The token has to have been added.
    void remove(int32_t token) {
        const int32_t position = positions_[token];
        if (--distinct_[position].count == 0) {
            const Counted moved = distinct_.back();
            distinct_[position] = moved;
            positions_[moved.token] = position;
            positions_[token] = none;
            distinct_.pop_back();
        }
    }

    // How often the token was added and not removed; 0 always where there is no window.
    int32_t count(int32_t token) const {
        const int32_t position = positions_.empty() ? none : positions_[token];
        return position == none ? 0 : distinct_[position].count;
    }

    void clear() {
        for (const Counted& counted : distinct_) {
            positions_[counted.token] = none;
        }
        distinct_.clear();
    }

    const std::vector<Counted>& distinct() const { return distinct_; }

  private:
    static constexpr int32_t none = -1;

    std::vector<int32_t> positions_;  // [vocabulary_size] in distinct_
    std::vector<Counted> distinct_;
};

}  // namespace llmrun
