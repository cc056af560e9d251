// Sorts with the same std algorithms on the same sequences as llama.cpp: std::sort and std::partial_sort are
// not stable, and so equal logits come out in the order that its build gives them.
#include "stages.hpp"

#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <numeric>

#include "simd.hpp"

namespace llmrun {
namespace {

constexpr float infinity = INFINITY;

// float to int as x86 does it: what does not fit is INT_MIN (plain C++ leaves that undefined).
int to_int(float value) {
    return value >= -2147483648.0f && value < 2147483648.0f ? static_cast<int>(value) : INT_MIN;
}

bool larger_logit(const Candidate& a, const Candidate& b) { return a.logit > b.logit; }

// Buckets of equal width over the logits that matter; everything beyond is in the first or last one.
constexpr int bucket_count = 128;
constexpr float bucket_low = -10.0f;
constexpr float bucket_high = 10.0f;
constexpr float bucket_scale = bucket_count / (bucket_high - bucket_low);
constexpr float bucket_offset = -bucket_low * bucket_scale;

int bucket_of(float logit) {
    return std::clamp(to_int(bucket_scale * logit + bucket_offset), 0, bucket_count - 1);
}

// Writes the `count` largest candidates, sorted, to the front of scratch.sorted (more, unsorted, may follow).
// A bucket sort: only the buckets that the wanted candidates fall into are copied and sorted.
void sort_largest_into_scratch(Candidates& candidates, size_t count) {
    Scratch& scratch = *candidates.scratch;
    scratch.buckets.resize(candidates.size);
    std::array<size_t, bucket_count> population{};
    for (size_t i = 0; i < candidates.size; ++i) {
        const int bucket = bucket_of(candidates[i].logit);
        scratch.buckets[i] = bucket;
        ++population[bucket];
    }

    int lowest = bucket_count - 1;
    size_t copied = population[lowest];
    while (copied < count) {
        copied += population[--lowest];
    }
    scratch.sorted.resize(copied);
    std::array<Candidate*, bucket_count> next{};
    Candidate* start = scratch.sorted.data();
    for (int bucket = bucket_count - 1; bucket >= lowest; --bucket) {
        next[bucket] = start;
        start += population[bucket];
    }
    for (size_t i = 0; i < candidates.size; ++i) {
        if (scratch.buckets[i] >= lowest) {
            *next[scratch.buckets[i]]++ = candidates[i];
        }
    }

    start = scratch.sorted.data();
    for (int bucket = bucket_count - 1; bucket > lowest; --bucket) {
        std::sort(start, start + population[bucket], larger_logit);
        start += population[bucket];
    }
    Candidate* wanted_end = scratch.sorted.data() + count;
    std::partial_sort(start, wanted_end, start + population[lowest], larger_logit);
}

// Keeps the `count` largest, sorted. A heap is quicker for few, the buckets for many.
void keep_largest(Candidates& candidates, size_t count) {
    if (count <= 128) {
        std::partial_sort(candidates.begin(), candidates.begin() + count, candidates.end(), larger_logit);
    } else {
        sort_largest_into_scratch(candidates, count);
        std::copy_n(candidates.scratch->sorted.data(), count, candidates.data);
    }
    candidates.size = count;
    candidates.sorted = true;
}

void sort(Candidates& candidates) {
    if (!candidates.sorted) {
        keep_largest(candidates, candidates.size);
    }
}

float largest_logit(Candidates& candidates) {
    float largest = candidates[0].logit;
    if (!candidates.sorted) {
        for (const Candidate& candidate : candidates) {
            largest = std::max(largest, candidate.logit);
        }
    }
    return largest;
}

// Uniform in [0, 1): takes two words of the generator.
double uniform(Generator& random) { return std::uniform_real_distribution<double>(0.0, 1.0)(random); }

// Where a draw ends when rounding or NaN has kept the sum from reaching its target: llama.cpp takes the last
// one, which we do unless it is impossible.
size_t last_possible(Candidates& candidates) {
    size_t last = candidates.size - 1;
    while (last > 0 && candidates[last].logit == -infinity) {
        --last;
    }
    return last;
}

// std::discrete_distribution of the probabilities without its allocations. One candidate needs no draw.
size_t draw_discrete(Candidates& candidates, Generator& random) {
    if (candidates.size < 2) {
        return 0;
    }
    double sum = 0.0;
    for (const Candidate& candidate : candidates) {
        sum += candidate.p;
    }
    const double target = uniform(random);
    double running = 0.0;
    for (size_t i = 0; i + 1 < candidates.size; ++i) {
        running += candidates[i].p / sum;
        if (running >= target) {
            return i;
        }
    }
    return last_possible(candidates);
}

// Gives each candidate exp(logit - largest) as p, and all their sum. In a long list no token is likelier or less likely
// than another by more than a float's rounding for how its exponential is taken.
double weigh(Candidates& candidates) {
    constexpr size_t long_list = 4096;
    const float largest = largest_logit(candidates);
    double sum = 0.0;
    if (candidates.size <= long_list) {
        for (Candidate& candidate : candidates) {
            candidate.p = expf(candidate.logit - largest);
            sum += candidate.p;
        }
        return sum;
    }
    std::vector<float>& weights = candidates.scratch->scores;
    const size_t groups = (candidates.size + group_size - 1) / group_size;
    weights.assign(groups * group_size, -infinity);
    std::transform(candidates.begin(), candidates.end(), weights.begin(),
                   [](const Candidate& candidate) { return candidate.logit; });
    loops().exponentials(weights.data(), groups, largest, weights.data());
    for (size_t i = 0; i < candidates.size; ++i) {
        candidates[i].p = weights[i];
        sum += weights[i];
    }
    return sum;
}

// How many of a sorted list mirostat 1 keeps: its Zipf exponent by least squares of log p over log rank.
int zipf_count(Candidates& candidates, int32_t vocabulary_size, float mu) {
    constexpr size_t estimated_on = 100;
    float sum_tb = 0.0f;
    float sum_tt = 0.0f;
    for (size_t i = 0; i < estimated_on - 1 && i < candidates.size - 1; ++i) {
        const float t = logf(static_cast<float>(i + 2) / static_cast<float>(i + 1));
        const float b = logf(candidates[i].p / candidates[i + 1].p);
        sum_tb += t * b;
        sum_tt += t * t;
    }
    const float exponent = sum_tb / sum_tt;
    const float epsilon = exponent - 1;
    return to_int(powf((epsilon * powf(2, mu)) / (1 - powf(vocabulary_size, -epsilon)), 1 / exponent));
}

size_t count_unsurprising(Candidates& candidates, float mu) {
    size_t kept = 0;
    while (kept < candidates.size && !(-log2f(candidates[kept].p) > mu)) {
        ++kept;
    }
    return kept;
}

}  // namespace

void softmax(Candidates& candidates) {
    const float largest = largest_logit(candidates);
    float sum = 0.0f;
    for (Candidate& candidate : candidates) {
        candidate.p = expf(candidate.logit - largest);
        sum += candidate.p;
    }
    for (Candidate& candidate : candidates) {
        candidate.p /= sum;
    }
}

void top_n_sigma(Candidates& candidates, float n) {
    if (n <= 0.0f || candidates.size <= 1) {
        return;
    }
    const auto each = [&](const auto& visit) {
        for (const Candidate& candidate : candidates) {
            visit(candidate.logit);
        }
    };
    const float smallest = smallest_within_sigma(each, n);
    for (Candidate& candidate : candidates) {
        if (candidate.logit < smallest) {
            candidate.logit = -infinity;
        }
    }
}

void top_k(Candidates& candidates, int32_t k) {
    if (k <= 0) {
        return;
    }
    const size_t count = std::min(static_cast<size_t>(k), candidates.size);
    if (!candidates.sorted) {
        keep_largest(candidates, count);
    }
    candidates.size = count;
}

void typical(Candidates& candidates, float p) {
    if (p >= 1.0f) {
        return;
    }
    sort(candidates);
    softmax(candidates);
    float entropy = 0.0f;
    for (const Candidate& candidate : candidates) {
        entropy += -candidate.p * logf(candidate.p);
    }

    // How far each token's surprise is from the entropy. A p of 0 makes the entropy NaN and all scores equal.
    Scratch& scratch = *candidates.scratch;
    scratch.scores.resize(candidates.size);
    for (size_t i = 0; i < candidates.size; ++i) {
        scratch.scores[i] = fabsf(-logf(candidates[i].p) - entropy);
    }
    scratch.order.resize(candidates.size);
    std::iota(scratch.order.begin(), scratch.order.end(), size_t{0});
    std::sort(scratch.order.begin(), scratch.order.end(),
              [&](size_t a, size_t b) { return scratch.scores[a] < scratch.scores[b]; });

    float sum = 0.0f;
    scratch.sorted.clear();
    for (const size_t index : scratch.order) {
        scratch.sorted.push_back(candidates[index]);
        sum += candidates[index].p;
        if (sum > p) {
            break;
        }
    }
    candidates.size = scratch.sorted.size();
    std::copy(scratch.sorted.begin(), scratch.sorted.end(), candidates.data);
    candidates.sorted = false;
}

void top_p(Candidates& candidates, float p) {
    if (p >= 1.0f) {
        return;
    }
    softmax(candidates);

    // A long list is sorted only as far as it is usually needed, and all of it when that was not enough.
    size_t sorted_count = candidates.size;
    const bool partly = !candidates.sorted && candidates.size > 1024;
    if (partly) {
        sorted_count = 256;
        sort_largest_into_scratch(candidates, sorted_count);
    } else {
        sort(candidates);
    }
    const Candidate* sorted = partly ? candidates.scratch->sorted.data() : candidates.data;

    float sum = 0.0f;
    size_t kept = candidates.size;
    for (size_t i = 0; i < candidates.size; ++i) {
        sum += sorted[i].p;
        if (sum >= p) {
            kept = i + 1;
            break;
        }
        if (i + 1 == sorted_count && sorted_count < candidates.size) {
            sorted_count = candidates.size;
            sort_largest_into_scratch(candidates, sorted_count);
            sorted = candidates.scratch->sorted.data();
        }
    }
    if (partly) {
        std::copy_n(sorted, kept, candidates.data);
        candidates.sorted = true;
    }
    candidates.size = kept;
}

void min_p(Candidates& candidates, float p) {
    if (p <= 0.0f || candidates.size == 0) {
        return;
    }
    const float smallest = largest_logit(candidates) + logf(p);
    size_t kept = 0;
    if (candidates.sorted) {
        kept = 1;
        while (kept < candidates.size && !(candidates[kept].logit < smallest)) {
            ++kept;
        }
    } else {
        for (const Candidate& candidate : candidates) {
            if (candidate.logit >= smallest) {
                candidates[kept++] = candidate;
            }
        }
        if (kept == 0) {  // p over 1
            sort(candidates);
            kept = 1;
        }
    }
    candidates.size = kept;
}

void exclude_top_choices(Candidates& candidates, float probability, float threshold, Generator& random) {
    if (probability <= 0.0f || threshold > 0.5f || candidates.size < 2) {
        return;
    }
    const float chance = std::uniform_real_distribution<float>(0.0f, 1.0f)(random);
    if (chance > probability) {
        return;
    }
    sort(candidates);
    softmax(candidates);
    size_t last = 0;
    for (size_t i = 0; i < candidates.size && candidates[i].p >= threshold; ++i) {
        last = i;
    }
    candidates.data += last;
    candidates.size -= last;
}

void keep_by_mirostat(Candidates& candidates, int32_t version, int32_t vocabulary_size, float mu) {
    sort(candidates);
    softmax(candidates);
    if (version == 1) {
        top_k(candidates, std::max(zipf_count(candidates, vocabulary_size, mu), 1));
    } else {
        candidates.size = std::max<size_t>(count_unsurprising(candidates, mu), 1);
    }
}

void temperature(Candidates& candidates, float temperature) {
    if (temperature > 0.0f) {
        for (Candidate& candidate : candidates) {
            candidate.logit /= temperature;
        }
        return;
    }
    size_t largest = 0;
    for (size_t i = 1; i < candidates.size; ++i) {
        const bool larger = candidates[i].logit > candidates[largest].logit;
        candidates[larger ? largest : i].logit = -infinity;
        largest = larger ? i : largest;
    }
}

void dynamic_temperature(Candidates& candidates, float middle, float range, float exponent) {
    if (range <= 0.0f) {
        temperature(candidates, middle);
        return;
    }
    if (candidates.size <= 1) {
        return;
    }
    const float lowest = std::max(0.0f, middle - range);
    const float highest = middle + range;
    const float largest_entropy = -logf(1.0f / candidates.size);
    sort(candidates);
    softmax(candidates);
    float entropy = 0.0f;
    for (const Candidate& candidate : candidates) {
        if (candidate.p > 0.0f) {
            entropy -= candidate.p * logf(candidate.p);
        }
    }
    const float share = entropy / largest_entropy;
    temperature(candidates, lowest + (highest - lowest) * powf(share, exponent));
}

size_t draw(Candidates& candidates, Generator& random) {
    if (candidates.size == 1) {
        uniform(random);  // one draw a token, so that a seed's stream does not depend on the truncation
        return 0;
    }
    const double target = weigh(candidates) * uniform(random);
    double running = 0.0;
    for (size_t i = 0; i < candidates.size; ++i) {
        running += candidates[i].p;
        if (running >= target) {
            return i;
        }
    }
    return last_possible(candidates);
}

size_t draw_by_mirostat(Candidates& candidates, MirostatTarget target, float& mu, Generator& random) {
    softmax(candidates);
    const size_t chosen = draw_discrete(candidates, random);
    const float surprise = -log2f(candidates[chosen].p);
    const float error = surprise - target.tau;
    mu = mu - target.eta * error;
    return chosen;
}

}  // namespace llmrun
