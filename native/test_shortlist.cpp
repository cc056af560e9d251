// What the fast way is made of: the loops of every CPU level against plain ones, the maxima, the changed
// logits.
#include <algorithm>
#include <cmath>
#include <vector>

#include "check.hpp"
#include "random_case.hpp"
#include "sampler.hpp"
#include "shortlist.hpp"

using namespace llmrun;

namespace {

void test_loops() {
    for (const Loops& loops : available_loops()) {
        Draw draw(1);
        Floats row(2 * group_size);
        for (float& logit : row) {
            logit = draw.normal() * 4;
        }
        row[300] = -INFINITY;
        Floats columns(2 * columns_per_group);
        Floats maxima(2);
        std::vector<int32_t> worst(columns_per_group);
        loops.find_maxima(row.data(), 2, columns.data(), maxima.data(), worst.data());
        CHECK(maxima[0] == *std::max_element(row.begin(), row.begin() + group_size));
        CHECK(maxima[1] == *std::max_element(row.begin() + group_size, row.end()));
        CHECK(columns[0] <= maxima[0] && columns[0] >= row[16] && columns[0] >= row[240]);
        CHECK(*std::max_element(worst.begin(), worst.end()) == 0x7f800000);
        CHECK(loops.count_at_least(columns.data(), columns.size(), maxima[0]) >= 1);
        CHECK(loops.count_at_least(columns.data(), 3, -100.0f) == 3);

        const float largest = std::max(maxima[0], maxima[1]);
        Floats weights(row.size());
        loops.exponentials(row.data(), 2, largest, weights.data());
        const float threshold = std::exp(-3.0f);
        double all = 0;
        double heavy = 0;
        for (size_t i = 0; i < row.size(); ++i) {
            all += std::exp(static_cast<double>(row[i]) - largest);
            heavy += weights[i] >= threshold ? weights[i] : 0;
        }
        CHECK(std::fabs(loops.add_at_least(weights.data(), 2, 0.0f) / all - 1) < 1e-6);
        CHECK(std::fabs(loops.add_at_least(weights.data(), 2, threshold) / heavy - 1) < 1e-6);
        CHECK(loops.add_at_least(weights.data(), 2, 1.5f) == 0);

        std::vector<uint64_t> words(group_size / 64);
        loops.find_at_least(row.data(), 1.0f, words.data());
        for (size_t i = 0; i < group_size; ++i) {
            CHECK((words[i / 64] >> i % 64 & 1) == (row[i] >= 1.0f ? 1 : 0));
        }
        row[511] = -NAN;
        loops.find_maxima(row.data(), 2, columns.data(), maxima.data(), worst.data());
        CHECK(*std::max_element(worst.begin(), worst.end()) > 0x7f800000);
    }
}

void test_exponentials_one_by_one() {
    for (const Loops& loops : available_loops()) {
        for (float x = -60.0f; x <= 0.0f; x += 0.0371f) {
            Floats row(group_size, -INFINITY);
            row[17] = x;
            loops.exponentials(row.data(), 1, 0.0f, row.data());
            CHECK(std::fabs(row[17] / std::exp(static_cast<double>(x)) - 1) < 1e-6);
        }
    }
}

void test_every_level_finds_the_same() {
    Draw draw(2);
    const Floats row = draw.logits(700);
    for (const Loops& loops : available_loops()) {
        Peaks peaks(700, loops);
        CHECK(peaks.read(row.data()) == -1);
        CHECK(peaks.largest() == *std::max_element(row.begin(), row.end()));
        Floats sorted = row;
        std::sort(sorted.begin(), sorted.end(), std::greater<>());
        std::vector<Candidate> found;
        for (const size_t count : {1, 2, 7, 20, 100, 700}) {
            const float threshold = peaks.reached_by(count);
            CHECK(threshold <= sorted[count - 1]);
            peaks.collect(threshold, found);
            CHECK(found.size() >= count);
            CHECK(std::is_sorted(found.begin(), found.end(),
                                 [](const Candidate& a, const Candidate& b) { return a.id < b.id; }));
            for (const Candidate& candidate : found) {
                CHECK(candidate.logit == row[candidate.id] && candidate.logit >= threshold);
            }
        }
    }
}

// What is kept weighs the share, without its least likely it does not, and nothing likelier was dropped.
void check_share(const Floats& row, const ChangedLogits& changes, float share, Candidates kept) {
    Floats logits = row;
    for (const auto& change : changes) {
        logits[change.token] = change.logit;
    }
    std::vector<bool> is_kept(row.size());
    float least = INFINITY;
    for (const Candidate& candidate : kept) {
        CHECK(candidate.logit == logits[candidate.id] && !is_kept[candidate.id]);
        is_kept[candidate.id] = true;
        least = std::min(least, candidate.logit);
    }
    const float largest = *std::max_element(logits.begin(), logits.end());
    double total = 0;
    double weight = 0;
    for (size_t token = 0; token < logits.size(); ++token) {
        const double term = std::exp(static_cast<double>(logits[token]) - largest);
        total += term;
        weight += is_kept[token] ? term : 0;
        CHECK(is_kept[token] || logits[token] <= least);
    }
    const double rounding = 1e-5 * total;
    CHECK(weight >= share * total - rounding);
    CHECK(kept.size == 1 || weight - std::exp(static_cast<double>(least) - largest) < share * total + rounding);
}

void test_top_p_keeps_what_a_full_sort_would() {
    Shortlist shortlist;
    SamplerParams params;
    params.top_k = 0;
    params.min_p = 0.0f;
    Draw draw(3);
    int filled = 0;
    for (int round = 0; round < 400; ++round) {
        const size_t size = round % 8 == 0 ? 60000 : 300 + draw.below(6000);
        const float scale = draw.between(0.01f, 8.0f);
        const bool peaked = draw.chance(30);
        Floats row(size);
        for (float& logit : row) {
            logit = draw.normal() * scale - (peaked && !draw.chance(1) ? 12.0f : 0.0f);
        }
        ChangedLogits changes(size);
        for (int i = draw.chance(50) ? draw.below(50) : 0; i > 0; --i) {
            const int32_t token = draw.below(static_cast<int>(size));
            changes.logit(token, row[token]) = draw.chance(50) ? -INFINITY : row[token] - draw.between(-3, 3);
        }
        params.top_p = draw.chance(10) ? draw.between(0.999f, 1.0f) : draw.between(0.0f, 1.0f);
        Peaks peaks(static_cast<int32_t>(size));
        CHECK(peaks.read(row.data()) == -1);
        if (shortlist.fill(params, row.data(), peaks, changes)) {  // not where equal logits are among few
            check_share(row, changes, params.top_p, shortlist.candidates());
            ++filled;
        }
    }
    CHECK(filled > 300);
}

void test_changed_logits() {
    ChangedLogits changes(100);
    for (int round = 0; round < 3; ++round) {
        for (int32_t token = 0; token < 100; ++token) {
            changes.logit(token * 64, 1.0f) += static_cast<float>(token);
        }
        CHECK(changes.size() == 100);
        CHECK(changes.logit(640, 5.0f) == 11.0f);
        CHECK(changes.contains(6336) && !changes.contains(1));
        changes.clear();
        CHECK(changes.empty() && !changes.contains(640));
    }
}

void test_log_probabilities() {
    const Floats logits{1, 3, -INFINITY, 3, 2};
    Sampler sampler(5, SamplerParams{});
    const auto& values = sampler.log_probabilities(logits.data(), 2, 3);
    const float total = std::log(std::exp(1.0f) + 2 * std::exp(3.0f) + std::exp(2.0f));
    CHECK(values.size() == 4);
    CHECK(values[0].token == 2 && values[0].value == -INFINITY);
    CHECK(values[1].token == 1 && std::fabs(values[1].value - (3 - total)) < 1e-5f);
    CHECK(values[2].token == 3 && values[3].token == 4);
    CHECK(sampler.log_probabilities(logits.data(), 0, 100).size() == 5);  // the four that are possible
    CHECK(sampler.log_probabilities(logits.data(), 0, 0).size() == 1);

    const Floats impossible(5, -INFINITY);
    bool refused = false;
    try {
        sampler.log_probabilities(impossible.data(), 0, 1);
    } catch (const BadLogits&) {
        refused = true;
    }
    CHECK(refused);
}

}  // namespace

int main() {
    test_loops();
    test_exponentials_one_by_one();
    test_every_level_finds_the_same();
    test_top_p_keeps_what_a_full_sort_would();
    test_changed_logits();
    test_log_probabilities();
    return summary();
}
