// How a few logits can stand for all: whatever k places of the row are looked at, the k-th largest value found
// there is at most the k-th largest of the row. Places may owe their value to a token whose logit was changed:
// for each such token that matters one more place is looked at. The changed ones join with their new logits.
#include "shortlist.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>

namespace llmrun {
namespace {

constexpr float lowest_logit = Peaks::lowest_logit;

// Up to here collecting everything is cheap.
constexpr size_t small_vocabulary = 4096;

bool larger_logit(const Candidate& a, const Candidate& b) { return a.logit > b.logit; }
bool same_logit(const Candidate& a, const Candidate& b) { return a.logit == b.logit; }
bool earlier(const Candidate& a, const Candidate& b) { return a.id < b.id; }

// A smaller number for a larger logit.
uint32_t descending_key(float logit) {
    const auto bits = std::bit_cast<uint32_t>(logit);
    const bool negative = bits >> 31 != 0;
    return negative ? bits : ~bits & 0x7fffffff;
}

// The chain then ends with the largest logit, whatever the probabilities.
bool keeps_only_the_largest(const SamplerParams& params) {
    return params.temperature <= 0.0f && !params.adapts_temperature() && params.typical_p >= 1.0f &&
           !params.may_exclude_top_choices();
}

// A later step sorts the list, or looks at its length.
bool later_steps_see_the_list(const SamplerParams& params) {
    return params.may_exclude_top_choices() || params.adapts_temperature();
}

}  // namespace

template <typename Visit>
void Shortlist::each_logit(const Row& row, const Visit& visit) {
    changes_by_token_.assign(row.changes.begin(), row.changes.end());
    std::sort(changes_by_token_.begin(), changes_by_token_.end(),
              [](const auto& a, const auto& b) { return a.token < b.token; });
    size_t token = 0;
    for (const ChangedLogits::Change& change : changes_by_token_) {
        for (; token < static_cast<size_t>(change.token); ++token) {
            visit(row.logits[token]);
        }
        visit(change.logit);
        ++token;
    }
    for (; token < row.peaks.vocabulary_size(); ++token) {
        visit(row.logits[token]);
    }
}

bool Shortlist::fill(const SamplerParams& params, const float* logits, Peaks& peaks,
                     const ChangedLogits& changes) {
    const Row row{params, logits, peaks, changes};
    sorted_ = false;
    if (keeps_only_the_largest(params)) {
        return fill_largest(row);
    }
    if (params.top_k > 0) {
        return fill_top_k(row);
    }
    if (params.typical_p < 1.0f) {
        return false;
    }
    if (params.top_n_sigma > 0.0f) {
        return fill_within_sigma(row);
    }
    if (params.top_p < 1.0f) {
        return fill_top_p(row);
    }
    return params.min_p > 0.0f && fill_min_p(row);
}

const std::vector<Candidate>& Shortlist::likeliest(Peaks& peaks, size_t count) {
    list_.clear();
    if (count > 0) {
        peaks.collect(peaks.reached_by(count), list_);
        std::stable_sort(list_.begin(), list_.end(), larger_logit);
        list_.resize(std::min(count, list_.size()));
    }
    return list_;
}

bool Shortlist::fill_largest(const Row& row) {
    collect(row, reached_by_unchanged(row, 1));
    if (list_.empty()) {
        return false;
    }
    // The first of equals, as long as nothing has sorted the list before.
    const bool unsorted = row.params.top_k <= 0 && row.params.top_p >= 1.0f && row.params.min_p <= 1.0f;
    const Candidate best = *std::min_element(list_.begin(), list_.end(), larger_logit);
    const auto equals = std::count_if(list_.begin(), list_.end(),
                                      [&](const Candidate& other) { return same_logit(other, best); });
    list_.assign(1, best);
    return equals == 1 || unsorted;
}

bool Shortlist::fill_top_k(const Row& row) {
    const SamplerParams& params = row.params;
    const size_t count = std::min(static_cast<size_t>(params.top_k), row.peaks.vocabulary_size());
    const float threshold = reached_by_unchanged(row, count);
    if (threshold == lowest_logit && row.peaks.vocabulary_size() > small_vocabulary) {
        return false;
    }
    collect(row, threshold);
    if (!keep_largest(count)) {
        return false;
    }
    if (params.top_n_sigma > 0.0f && row.peaks.vocabulary_size() > 1) {
        const float smallest =
            smallest_within_sigma([&](const auto& visit) { each_logit(row, visit); }, params.top_n_sigma);
        if (list_.back().logit < smallest) {
            // The masked ones have no probability, but they are still there.
            if (later_steps_see_the_list(params) || params.typical_p < 1.0f) {
                return false;
            }
            std::erase_if(list_, [&](const Candidate& candidate) { return candidate.logit < smallest; });
        }
    }
    Candidates candidates = this->candidates();
    typical(candidates, params.typical_p);
    top_p(candidates, params.top_p);
    min_p(candidates, params.min_p);
    sorted_ = candidates.sorted;
    list_.resize(candidates.size);
    return true;
}

// Without top-k: what is masked has no probability, and so the steps may go on without it.
bool Shortlist::fill_within_sigma(const Row& row) {
    const SamplerParams& params = row.params;
    const size_t vocabulary_size = row.peaks.vocabulary_size();
    const float smallest =
        smallest_within_sigma([&](const auto& visit) { each_logit(row, visit); }, params.top_n_sigma);
    if (vocabulary_size == 1 || !(smallest > lowest_logit)) {
        return false;
    }
    collect(row, smallest);
    const bool sorts = params.top_p < 1.0f || params.min_p > 1.0f || later_steps_see_the_list(params);
    if (list_.empty() || (sorts && has_equals())) {
        return false;
    }
    if (list_.size() < vocabulary_size && later_steps_see_the_list(params)) {
        return false;
    }
    Candidates candidates = this->candidates();
    top_p(candidates, params.top_p);
    min_p(candidates, params.min_p);
    sorted_ = candidates.sorted;
    list_.resize(candidates.size);
    return true;
}

// Without top-k: the probabilities depend on a sum over the whole vocabulary, which llama.cpp adds up in float
// one by one. A quicker sum and a bound of the two sums' distance mostly decide how long the prefix is.
bool Shortlist::fill_top_p(const Row& row) {
    const SamplerParams& params = row.params;
    const float largest = this->largest(row);
    if (largest == -INFINITY || params.min_p > 1.0f) {
        return false;
    }
    Bounds total = total_weight(row, largest);
    if (std::isinf(total.high)) {
        total.low = total.high = total_weight_as_floats(row, largest);
    }
    if (!collect_likely(row, largest, total.high)) {
        return false;
    }
    size_t kept = reaching(params.top_p, total.low);
    if (kept != reaching(params.top_p, total.high)) {
        kept = reaching(params.top_p, total_weight_as_floats(row, largest));
    }
    return keep_sorted(kept);
}

// Without top-k and top-p, the list stays in the order of the vocabulary.
bool Shortlist::fill_min_p(const Row& row) {
    const float largest = this->largest(row);
    const float smallest = largest + logf(row.params.min_p);
    if (!(smallest > lowest_logit) || row.params.min_p > 1.0f) {
        return false;
    }
    collect(row, smallest);
    return !(later_steps_see_the_list(row.params) && has_equals());
}

// A value that at least `count` tokens reach whose logits were not changed; lowest_logit when there is none.
float Shortlist::reached_by_unchanged(const Row& row, size_t count) const {
    size_t allowed = 0;  // how many of those that reach it may be changed ones
    while (true) {
        const float threshold = row.peaks.reached_by(count + allowed);
        const auto changed = static_cast<size_t>(
            std::count_if(row.changes.begin(), row.changes.end(),
                          [&](const auto& change) { return change.unchanged >= threshold; }));
        if (changed <= allowed) {
            return threshold;
        }
        allowed = changed;
    }
}

// All tokens with at least this logit, as changed, by id.
void Shortlist::collect(const Row& row, float threshold) {
    row.peaks.collect(threshold, list_);
    if (row.changes.empty()) {
        return;
    }
    std::erase_if(list_, [&](const Candidate& candidate) { return row.changes.contains(candidate.id); });
    const auto unchanged = static_cast<std::ptrdiff_t>(list_.size());
    for (const ChangedLogits::Change& change : row.changes) {
        if (change.logit >= threshold) {
            list_.push_back({change.token, change.logit, 0.0f});
        }
    }
    const auto changed = list_.begin() + unchanged;
    if (changed != list_.end()) {
        std::sort(changed, list_.end(), earlier);
        scratch_.sorted.resize(list_.size());
        std::merge(list_.begin(), changed, changed, list_.end(), scratch_.sorted.begin(), earlier);
        list_.swap(scratch_.sorted);
    }
}

float Shortlist::largest(const Row& row) {
    if (row.changes.empty()) {
        return row.peaks.largest();
    }
    collect(row, reached_by_unchanged(row, 1));
    return list_.empty() ? -INFINITY : std::min_element(list_.begin(), list_.end(), larger_logit)->logit;
}

// By logit, largest first. The longer lists by radix sort: three passes over 11 bits each.
void Shortlist::sort_list() {
    constexpr size_t short_list = 2048;
    constexpr int digit_bits = 11;
    constexpr size_t digits = size_t{1} << digit_bits;
    sorted_ = true;
    if (list_.size() < short_list) {
        std::sort(list_.begin(), list_.end(), larger_logit);
        return;
    }
    scratch_.sorted.resize(list_.size());
    for (int shift = 0; shift < 32; shift += digit_bits) {
        const auto digit = [&](const Candidate& candidate) {
            return (descending_key(candidate.logit) >> shift) % digits;
        };
        std::array<uint32_t, digits + 1> start{};
        for (const Candidate& candidate : list_) {
            ++start[digit(candidate) + 1];
        }
        std::partial_sum(start.begin(), start.end(), start.begin());
        for (const Candidate& candidate : list_) {
            scratch_.sorted[start[digit(candidate)]++] = candidate;
        }
        list_.swap(scratch_.sorted);
    }
}

// Sorts the `count` largest of the list and drops the rest. False when there are fewer, or when equal logits
// make the order or the end arbitrary.
bool Shortlist::keep_largest(size_t count) {
    if (list_.size() < count) {
        return false;
    }
    const auto end = list_.begin() + static_cast<std::ptrdiff_t>(count);
    if (list_.size() > 2 * count + 32) {
        std::nth_element(list_.begin(), end, list_.end(), larger_logit);
        std::sort(list_.begin(), end, larger_logit);
    } else {
        std::sort(list_.begin(), list_.end(), larger_logit);
    }
    const auto looked_at = end == list_.end() ? end : end + 1;
    const bool distinct = std::adjacent_find(list_.begin(), looked_at, same_logit) == looked_at;
    list_.resize(count);
    sorted_ = true;
    return distinct;
}

bool Shortlist::has_equals() {
    std::vector<float>& logits = scratch_.scores;
    logits.clear();
    for (const Candidate& candidate : list_) {
        logits.push_back(candidate.logit);
    }
    std::sort(logits.begin(), logits.end());
    return std::adjacent_find(logits.begin(), logits.end()) != logits.end();
}

// Between what values llama.cpp's float sum of exp(logit - largest) is; up to infinity when unknown. Adding a
// term to a float sum that is at least as large is off by at most the term, and by at most 2^-24 of the sum.
Shortlist::Bounds Shortlist::total_weight(const Row& row, float largest) const {
    constexpr double unit = 5.9604644775390625e-8;  // 2^-24
    constexpr double error_of_terms = 4e-6;         // of our exponentials, of the library's, and of our sums
    const ExponentialSum unchanged = row.peaks.add_exponentials();
    const double scale = std::exp(static_cast<double>(row.peaks.largest()) - largest);
    double total = unchanged.sum * scale;
    double added = total;
    for (const ChangedLogits::Change& change : row.changes) {
        const double weight = std::exp(static_cast<double>(change.logit) - largest);
        total += weight - std::exp(static_cast<double>(change.unchanged) - largest);
        added += weight;
    }
    const double absorbed = unchanged.absorbed * std::max(1.0, scale) + unit * row.changes.size();
    const double error = added * error_of_terms;
    const double distance = error + (total + error) * absorbed * 1.01;
    if (!(distance < total / 2)) {
        return {1.0f, INFINITY};
    }
    return {static_cast<float>(total - distance), static_cast<float>(total + distance)};
}

float Shortlist::total_weight_as_floats(const Row& row, float largest) {
    float total = 0.0f;
    each_logit(row, [&](float logit) { total += expf(logit - largest); });
    return total;
}

// Fills the list, sorted and with its weights, so far that it certainly holds all that top-p and min-p keep.
// False when it would hold all that is finite, but -inf ones are kept too, and counted later.
bool Shortlist::collect_likely(const Row& row, float largest, float total) {
    const SamplerParams& params = row.params;
    const bool min_p_decides = params.min_p > 0.0f;
    float distance = 3.0f;
    while (true) {
        float threshold = min_p_decides ? largest + logf(params.min_p) : largest - distance;
        threshold = std::max(threshold, lowest_logit);
        collect(row, threshold);
        double weight = 0.0;
        for (Candidate& candidate : list_) {
            candidate.p = expf(candidate.logit - largest);
            weight += candidate.p;
        }
        const bool complete = min_p_decides || threshold == lowest_logit;
        if (complete || weight > static_cast<double>(params.top_p) * total) {
            sort_list();
            if (complete || reaching(params.top_p, total) < list_.size()) {
                return threshold != lowest_logit || list_.size() == row.peaks.vocabulary_size();
            }
        }
        distance += std::max(2.0f, distance / 4);
    }
}

// How many of the list make up this share of the total: float sums, as llama.cpp takes them.
size_t Shortlist::reaching(float p, float total) const {
    float sum = 0.0f;
    for (size_t i = 0; i < list_.size(); ++i) {
        sum += list_[i].p / total;
        if (sum >= p) {
            return i + 1;
        }
    }
    return list_.size();
}

// Keeps the first `count`. False when equal logits make their end or their order arbitrary; a few equals in a
// long list may be in any order, because no token is likelier for it.
bool Shortlist::keep_sorted(size_t count) {
    constexpr size_t long_list = 1024;
    constexpr size_t few = 100;  // one in so many
    if (count < list_.size() && same_logit(list_[count - 1], list_[count])) {
        return false;
    }
    list_.resize(count);
    size_t equals = 0;
    for (size_t i = 1; i < count; ++i) {
        equals += same_logit(list_[i - 1], list_[i]) ? 1 : 0;
    }
    return equals == 0 || (count > long_list && equals * few < count);
}

}  // namespace llmrun
