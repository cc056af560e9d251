// The few logits that biases and penalties change, beside the row that stays as the model wrote it.
//
// Owns a small hash table that never allocates after it was made. Must not know why a logit changes.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmrun {

class ChangedLogits {
  public:
    struct Change {
        int32_t token;
        float logit;
        float unchanged;
    };

    // most: how many distinct tokens can be changed at once.
    explicit ChangedLogits(size_t most) : slots_(std::bit_ceil(2 * most + 2), vacant) {
        changes_.reserve(most);
        shift_ = 32 - std::countr_zero(slots_.size());
    }

    void clear() {
        for (const Change& change : changes_) {
            size_t slot = first_slot(change.token);
            while (slots_[slot] != vacant) {
                slots_[slot] = vacant;
                slot = next_slot(slot);
            }
        }
        changes_.clear();
    }

    // The token's logit, to be changed; at first the given one.
    float& logit(int32_t token, float unchanged) {
        const size_t slot = slot_of(token);
        if (slots_[slot] == vacant) {
            slots_[slot] = static_cast<int32_t>(changes_.size());
            changes_.push_back({token, unchanged, unchanged});
        }
        return changes_[slots_[slot]].logit;
    }

    bool contains(int32_t token) const { return slots_[slot_of(token)] != vacant; }
    size_t size() const { return changes_.size(); }
    bool empty() const { return changes_.empty(); }
    const Change* begin() const { return changes_.data(); }
    const Change* end() const { return changes_.data() + changes_.size(); }

  private:
    static constexpr int32_t vacant = -1;

    // Fibonacci hashing; at most half of the slots are taken.
    size_t first_slot(int32_t token) const { return (static_cast<uint32_t>(token) * 2654435769u) >> shift_; }
    size_t next_slot(size_t slot) const { return (slot + 1) & (slots_.size() - 1); }
    size_t slot_of(int32_t token) const {
        size_t slot = first_slot(token);
        while (slots_[slot] != vacant && changes_[slots_[slot]].token != token) {
            slot = next_slot(slot);
        }
        return slot;
    }

    std::vector<int32_t> slots_;  // index into changes_; a power of two of them
    std::vector<Change> changes_;
    int shift_;
};

}  // namespace llmrun
