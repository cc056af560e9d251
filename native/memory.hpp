// What the last calls of a sampler were given, so that they can be done again and explained.
//
// Owns the ring of remembered calls; each takes 4 bytes for each token of the vocabulary, from its first use
// on. Must not know the chain.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "generator.hpp"
#include "watermark.hpp"

namespace llmrun {

struct RememberedCall {
    std::vector<float> logits;      // [vocabulary_size] as the model wrote them
    std::vector<uint32_t> allowed;  // a bit for each token; empty when everything was allowed
    std::vector<int32_t> history;   // what the penalties looked at, oldest first
    Generator xtc_random{0};        // before the call
    float mu = 0.0f;                // before the call
    std::vector<int32_t> watermark;  // context of the watermark, oldest first
    int32_t chosen = 0;
};

// The last `capacity` calls; the oldest falls out.
class Memory {
  public:
    explicit Memory(size_t capacity) : capacity_(capacity) {}

    size_t capacity() const { return capacity_; }
    size_t size() const { return size_; }

    // Where the next call is to be written, if need be in place of the oldest one; it counts only when keep()
    // follows. capacity() > 0.
    RememberedCall& next() {
        calls_.resize(capacity_);
        size_ = size_ < capacity_ ? size_ : capacity_ - 1;
        return calls_[next_];
    }

    void keep() {
        next_ = (next_ + 1) % capacity_;
        ++size_;
    }

    // The call `back` calls before the last one; back < size().
    const RememberedCall& last(size_t back) const {
        return calls_[(next_ + capacity_ - 1 - back) % capacity_];
    }

    // Forgets the last `count` calls, or all if there are not as many.
    void drop(size_t count) {
        count = count < size_ ? count : size_;
        size_ -= count;
        next_ = capacity_ == 0 ? 0 : (next_ + capacity_ - count) % capacity_;
    }

  private:
    size_t capacity_;
    size_t size_ = 0;
    size_t next_ = 0;
    std::vector<RememberedCall> calls_;  // [capacity] once anything is remembered
};

}  // namespace llmrun
