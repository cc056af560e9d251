// The fast way against the exact one on random cases, and the loops of every CPU level against plain ones.
// Usage: test_shortlist [how many random cases]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "check.hpp"
#include "sampler.hpp"

using namespace llmrun;

namespace {

using Floats = std::vector<float>;

// What one random case is made of. Each draw depends on nothing but the seed.
class Draw {
  public:
    explicit Draw(uint32_t seed) : random_(seed) {}

    int below(int bound) { return static_cast<int>(random_() % static_cast<uint32_t>(bound)); }
    bool chance(int percent) { return below(100) < percent; }
    float between(float low, float high) {
        return low + (high - low) * (static_cast<float>(random_() >> 8) / 16777216.0f);
    }
    float normal() { return between(-1, 1) + between(-1, 1) + between(-1, 1); }

    int vocabulary_size() {
        constexpr int sizes[] = {1, 2, 15, 16, 17, 100, 255, 256, 257, 300, 511, 512, 700};
        return chance(3) ? 4000 + below(3000) : sizes[below(13)];
    }

    Floats logits(int size) {
        Floats row(size);
        const int kind = below(8);
        const float scale = between(0.1f, 6.0f);
        for (float& logit : row) {
            logit = normal() * scale;
            logit = kind == 1 ? std::round(logit) : logit;
            logit = kind == 2 && chance(60) ? -INFINITY : logit;
            logit = kind == 3 ? 1.5f : logit;
            logit = kind == 4 ? logit * 1e-39f : logit;
            logit = kind == 5 ? logit * 1e37f : logit;
            logit = kind == 6 && !chance(5) ? logit - 50.0f : logit;
        }
        if (kind == 7) {
            std::sort(row.begin(), row.end());
        }
        if (chance(2)) {
            row[below(size)] = chance(50) ? NAN : INFINITY;
        }
        return row;
    }

    SamplerParams params(int size) {
        SamplerParams params;
        params.seed = random_();
        params.temperature = chance(15) ? 0.0f : between(0.1f, 2.0f);
        params.temperature_range = chance(10) ? between(0.0f, 1.0f) : 0.0f;
        params.top_k = chance(40) ? 0 : 1 + below(chance(80) ? 50 : 400);
        params.top_p = chance(30) ? 1.0f : between(0.0f, 1.0f);
        params.min_p = chance(30) ? 0.0f : between(0.0f, chance(95) ? 0.3f : 1.5f);
        params.typical_p = chance(8) ? between(0.1f, 1.0f) : 1.0f;
        params.top_n_sigma = chance(10) ? between(0.1f, 3.0f) : -1.0f;
        params.xtc_probability = chance(10) ? between(0.0f, 1.0f) : 0.0f;
        params.repeat_penalty = chance(30) ? between(0.7f, 1.5f) : 1.0f;
        params.presence_penalty = chance(10) ? between(-1.0f, 1.0f) : 0.0f;
        params.dry_multiplier = chance(10) ? between(0.1f, 2.0f) : 0.0f;
        for (int i = chance(20) ? below(20) : 0; i > 0; --i) {
            params.logit_bias.emplace_back(below(size), chance(50) ? -INFINITY : between(-5.0f, 5.0f));
        }
        return params;
    }

  private:
    std::mt19937 random_;
};

// The token, or what was wrong with the logits.
int64_t outcome(Sampler& sampler, const Floats& logits) {
    try {
        return sampler.sample(logits.data());
    } catch (const BadLogits& error) {
        return -1 - int64_t{error.token};
    }
}

void test_random_cases(uint32_t cases) {
    int64_t exactly = 0;
    int64_t tokens = 0;
    for (uint32_t seed = 0; seed < cases; ++seed) {
        Draw draw(seed);
        const int size = draw.vocabulary_size();
        const SamplerParams params = draw.params(size);
        Sampler fast(size, params);
        Sampler exact(size, params, {}, true);
        for (int i = 0; i < 3; ++i) {
            const Floats logits = draw.logits(size);
            const int64_t token = outcome(fast, logits);
            const int64_t expected = outcome(exact, logits);
            // Above 1024 kept candidates equal ones may be exchanged.
            const bool equal_logits = token >= 0 && expected >= 0 && size > 1024 && params.top_k == 0 &&
                                      logits[token] == logits[expected];
            if (token != expected && !equal_logits) {
                std::printf("case %u.%d: token %lld in place of %lld\n", seed, i,
                            static_cast<long long>(token), static_cast<long long>(expected));
                ++failures;
                break;
            }
            const int32_t next = static_cast<int32_t>(expected >= 0 ? expected : draw.below(size));
            for (const int32_t accepted : {next, next / 2, next}) {
                fast.accept(accepted);
                exact.accept(accepted);
            }
            ++tokens;
        }
        CHECK(fast.random_state() == exact.random_state());
        exactly += fast.exact_count();
    }
    std::printf("%lld tokens, %lld of them only the exact way\n", static_cast<long long>(tokens),
                static_cast<long long>(exactly));
    CHECK(cases < 100 || exactly < tokens / 2);
}

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

int main(int count, char** arguments) {
    test_loops();
    test_exponentials_one_by_one();
    test_every_level_finds_the_same();
    test_changed_logits();
    test_log_probabilities();
    test_random_cases(count > 1 ? static_cast<uint32_t>(std::strtoul(arguments[1], nullptr, 10)) : 20000);
    return summary();
}
