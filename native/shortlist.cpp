// How a few logits can stand for all: whatever k places of the row are looked at, the k-th largest value found
// there is at most the k-th largest of the row. Places may owe their value to a token whose logit was changed:
// for each such token that matters one more place is looked at. The changed ones join with their new logits.
#include "shortlist.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>

namespace llmrun {
namespace {

constexpr float lowest_logit = Peaks::lowest_logit;

// Up to here collecting everything is cheap.
constexpr size_t small_vocabulary = 4096;

// Up to here a list is sorted, so that a seed draws what it draws from llama.cpp's sorted list.
constexpr size_t sorted_list = 1024;

bool larger_logit(const Candidate& a, const Candidate& b) { return a.logit > b.logit; }
bool same_logit(const Candidate& a, const Candidate& b) { return a.logit == b.logit; }
bool earlier(const Candidate& a, const Candidate& b) { return a.id < b.id; }

// A total order, in which std::sort has no choice.
bool before(const Candidate& a, const Candidate& b) {
    return (a.logit > b.logit) | ((a.logit == b.logit) & (a.id < b.id));
}

// The chain then ends with the largest logit, whatever the probabilities.
bool keeps_only_the_largest(const SamplerParams& params) {
    return params.is_greedy() && params.typical_p >= 1.0f && !params.may_exclude_top_choices();
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

// Without top-k: the share is one of a sum over the whole vocabulary. A few thresholds are tried on the weights; only
// what reaches the last one is collected, and only what lies near the cut is sorted.
bool Shortlist::fill_top_p(const Row& row) {
    const SamplerParams& params = row.params;
    const float largest = this->largest(row);
    if (largest == -INFINITY || params.min_p > 1.0f) {
        return false;
    }
    weigh(row, largest);
    const double total = row.peaks.add_at_least(weights_, 0.0f);
    const double wanted = params.top_p * total;
    const float least = params.min_p > 0.0f ? largest + logf(params.min_p) : lowest_logit;
    // All that is farther away could not fill the rest, if every token were there.
    const auto safe = static_cast<float>(std::log(row.peaks.vocabulary_size() / (total - wanted)));
    Cut cut = Cut::missed;
    const bool min_p_decides = largest - safe <= least;
    const float likely = min_p_decides ? safe : std::min(likely_distance(params.top_p, safe), safe);
    for (const float distance : {likely, safe}) {
        const float threshold = std::max(largest - distance, least);
        if (!(threshold > lowest_logit)) {
            return false;
        }
        collect(row, threshold);
        cut = keep_share(largest, threshold, wanted);
        if (cut != Cut::missed || min_p_decides) {
            break;
        }
    }
    if (cut == Cut::missed && !min_p_decides) {
        return false;
    }
    if (list_.size() > sorted_list && !later_steps_see_the_list(params)) {
        return true;
    }
    std::sort(list_.begin(), list_.end(), before);
    sorted_ = true;
    return cut != Cut::tied && std::adjacent_find(list_.begin(), list_.end(), same_logit) == list_.end();
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

// exp(logit - largest) over the vocabulary, as changed.
void Shortlist::weigh(const Row& row, float largest) {
    row.peaks.weigh(largest, weights_);
    for (const ChangedLogits::Change& change : row.changes) {
        weights_[change.token] = expf(change.logit - largest);
    }
}

// How far below the largest logit those probably lie that weigh this share, at most `safe`: a sample of the row says
// so, or nothing useful where few tokens have all the weight.
float Shortlist::likely_distance(float share, float safe) const {
    constexpr int halvings = 9;
    const double wanted = share * add_sample(0.0f);
    float low = 0.0f;
    float high = safe;
    for (int i = 0; i < halvings; ++i) {
        const float middle = (low + high) / 2;
        (add_sample(expf(-middle)) >= wanted ? high : low) = middle;
    }
    return high + 0.2f;
}

// The sum of the weights that are at least the threshold, of one group in so many.
double Shortlist::add_sample(float threshold) const {
    constexpr size_t stride = 16 * group_size;
    double sum = 0.0;
    for (size_t first = 0; first < weights_.size(); first += stride) {
        sum += loops().add_at_least(weights_.data() + first, 1, threshold);
    }
    return sum;
}

// Drops all but the likeliest that together weigh so much, the earlier of equals first; the list stays in its order.
// Nothing where all of it weighs less.
Shortlist::Cut Shortlist::keep_share(float largest, float smallest, double wanted) {
    constexpr size_t steps = 1024;
    const float scale = (steps - 1) / std::max(largest - smallest, 1e-6f);
    const auto step = [&](const Candidate& candidate) {
        return static_cast<size_t>((largest - candidate.logit) * scale);
    };
    std::array<double, steps> weights{};
    for (Candidate& candidate : list_) {
        candidate.p = weights_[candidate.id];
        weights[step(candidate)] += candidate.p;
    }
    size_t last = 0;
    double sum = 0.0;
    while (last < steps && sum + weights[last] < wanted) {
        sum += weights[last++];
    }
    if (last == steps) {
        return Cut::missed;
    }

    std::vector<Candidate>& near = scratch_.sorted;
    near.clear();
    std::copy_if(list_.begin(), list_.end(), std::back_inserter(near),
                 [&](const Candidate& candidate) { return step(candidate) == last; });
    std::sort(near.begin(), near.end(), before);
    auto cut = near.begin();
    for (sum += cut->p; sum < wanted && cut + 1 != near.end(); sum += cut->p) {
        ++cut;
    }
    // Without a branch, because nobody could predict it.
    Candidate* kept = list_.data();
    for (const Candidate& candidate : list_) {
        *kept = candidate;
        kept += before(*cut, candidate) ? 0 : 1;
    }
    list_.resize(kept - list_.data());
    return cut + 1 != near.end() && same_logit(cut[0], cut[1]) ? Cut::tied : Cut::clear;
}

}  // namespace llmrun
