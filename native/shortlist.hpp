// The fast way from a row of logits to the candidates that the truncating steps leave: only the few large
// logits are looked at, and nothing of the rest is copied or sorted.
//
// Owns the decision whether that gives exactly what the steps in stages.hpp give on the whole vocabulary.
// Must not know history, random generators, or why a logit was changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "changes.hpp"
#include "params.hpp"
#include "peaks.hpp"
#include "stages.hpp"

namespace llmrun {

class Shortlist {
  public:
    // Does top-n-sigma, top-k, typical, top-p and min-p on the logits that `peaks` has read, some of them
    // changed. False where the whole vocabulary has to be looked at: equal logits whose order matters and
    // that only the same sort puts in the same order, -inf among the candidates, or nothing to truncate.
    bool fill(const SamplerParams& params, const float* logits, Peaks& peaks, const ChangedLogits& changes);

    // What fill() left; valid until the next call.
    Candidates candidates() { return {list_.data(), list_.size(), sorted_, &scratch_}; }

    // The `count` largest finite logits, sorted, equal ones by id; valid until the next call.
    const std::vector<Candidate>& likeliest(Peaks& peaks, size_t count);

  private:
    // One call's arguments.
    struct Row {
        const SamplerParams& params;
        const float* logits;
        Peaks& peaks;
        const ChangedLogits& changes;
    };
    // Where top-p cut the list: between different logits, between equal ones, or not in it.
    enum class Cut { clear, tied, missed };

    bool fill_largest(const Row& row);
    bool fill_top_k(const Row& row);
    bool fill_within_sigma(const Row& row);
    bool fill_top_p(const Row& row);
    bool fill_min_p(const Row& row);

    float reached_by_unchanged(const Row& row, size_t count) const;
    void collect(const Row& row, float threshold);
    float largest(const Row& row);
    bool keep_largest(size_t count);
    bool has_equals();
    void weigh(const Row& row, float largest);
    float likely_distance(float share, float safe) const;
    double add_sample(float threshold) const;
    Cut keep_share(float largest, float smallest, double wanted);

    // Calls visit for every logit, as changed, in order.
    template <typename Visit>
    void each_logit(const Row& row, const Visit& visit);

    std::vector<Candidate> list_;
    bool sorted_ = false;  // by logit, largest first; by id otherwise
    std::vector<ChangedLogits::Change> changes_by_token_;
    std::vector<float> weights_;  // exp(logit - largest) of each token, for top-p without top-k
    Scratch scratch_;
};

}  // namespace llmrun
