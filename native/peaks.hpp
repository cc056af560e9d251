// Where the large values of a row of logits are.
//
// Owns the maxima of its groups and columns, from one pass over the row, so that a later question touches only
// the few places where an answer can be. Must not know sampling parameters or changed logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "simd.hpp"
#include "stages.hpp"

namespace llmrun {

class Peaks {
  public:
    // loops: the CPU level to use; has to stay alive.
    explicit Peaks(int32_t vocabulary_size, const Loops& loops = llmrun::loops());

    // Reads the row, which has to stay valid while anything is asked. Returns the first token whose logit is
    // NaN or +inf, or -1; after a bad one nothing may be asked.
    int32_t read(const float* logits);

    size_t vocabulary_size() const { return vocabulary_size_; }

    // -inf when no logit is finite.
    float largest() const { return largest_; }

    // A finite value that at least `count` logits reach, and not many more; lowest_logit when there is none.
    float reached_by(size_t count) const;

    // Replaces the list by the tokens with at least this logit, ascending; the threshold is finite.
    void collect(float threshold, std::vector<Candidate>& found);

    // exp(logit - largest) of every logit, e^-86 at least; what is past the vocabulary is 0. Those above the largest are
    // anything: they are for the caller to correct.
    void weigh(float largest, std::vector<float>& weights) const;

    // The sum of the weights that are at least the threshold.
    double add_at_least(const std::vector<float>& weights, float threshold) const;

    // Bytes of the row that were read since `read` began, whole cache lines of 64 bytes; for the benchmark.
    size_t bytes_read() const { return lines_read_ * 64; }

    static constexpr float lowest_logit = -3.40282347e+38f;

  private:
    float reached_by(size_t count, const std::vector<float>& values) const;
    void collect_group(size_t group, float threshold, std::vector<Candidate>& found);

    const Loops* loops_;
    const float* logits_ = nullptr;
    size_t vocabulary_size_;
    size_t whole_groups_;
    std::vector<float> columns_;  // [groups * 16] the largest of each column
    std::vector<float> maxima_;   // [groups]
    std::vector<float> last_;     // [256] the last group when it is not whole, filled up with -inf
    float largest_ = 0.0f;
    mutable size_t lines_read_ = 0;
};

}  // namespace llmrun
