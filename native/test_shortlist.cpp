// What the fast way is made of: the loops of every CPU level against plain ones, the maxima, the changed
// logits.
#include <algorithm>
#include <cmath>
#include <vector>

#include "check.hpp"
#include "random_case.hpp"
#include "sampler.hpp"

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
        double expected = 0;
        for (const float logit : row) {
            expected += std::exp(static_cast<double>(logit) - largest);
        }
        const ExponentialSum sum =
            loops.add_exponentials(row.data(), 2, maxima.data(), largest, largest - 40);
        CHECK(std::fabs(sum.sum / expected - 1) < 1e-6);
        CHECK(sum.absorbed > 0 && sum.absorbed <= 512 * 6e-8);
        CHECK(loops.add_exponentials(row.data(), 2, maxima.data(), largest, largest + 1).sum == 0);
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
            const ExponentialSum sum = loops.add_exponentials(row.data(), 1, &row[17], 0.0f, -1000.0f);
            CHECK(std::fabs(sum.sum / std::exp(static_cast<double>(x)) - 1) < 1e-6);
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
    test_changed_logits();
    test_log_probabilities();
    return summary();
}
