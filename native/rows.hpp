// One token for each of many sequences, in one call.
//
// Owns what becomes of a row that can't be sampled from, and from how many rows on other threads help. Must not
// know Python, nor how a token is chosen.
#pragma once

#include <cstdint>
#include <span>

#include "sampler.hpp"

namespace llmrun {

// The values are Python's too.
enum class Status : int32_t {
    chosen = 0,
    not_a_number = 1,  // a logit is NaN
    infinite = 2,      // a logit is +inf
    impossible = 3,    // no logit is finite, of those that the mask allows
    no_memory = 4,
};

struct Row {
    Sampler* sampler;     // no two rows have the same one
    const float* logits;  // [sampler->vocabulary_size()], only read
    Mask mask;            // its banned tokens are all in the vocabulary

    // What came of it: the token that was chosen, or the first one at fault.
    int32_t token = 0;
    Status status = Status::chosen;
};

// Lets each row's sampler choose its token and accept it, with the same outcome as one row after the other. A row
// that can't be sampled from moves no random generator and spoils no other.
void sample_rows(std::span<Row> rows);

}  // namespace llmrun
