// A watermark on cases whose outcome transformers 4.57 gave (tests/upstream/watermarks.py), and along a sequence.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "sampler.hpp"

using namespace llmrun;

namespace {

using Floats = std::vector<float>;
using Tokens = std::vector<int32_t>;

constexpr int64_t millionth_prime = 15485863;

Tokens green_behind(int32_t token, int32_t vocabulary_size, int32_t count) {
    return permuted(static_cast<uint32_t>(millionth_prime * token), vocabulary_size, count);
}

void test_permutation() {
    CHECK(green_behind(10, 20, 5) == Tokens({15, 9, 4, 12, 1}));
    CHECK(green_behind(42, 49152, 8) == Tokens({41348, 10328, 24826, 34390, 42773, 19569, 41902, 36398}));
    CHECK(green_behind(42, 151936, 8) == Tokens({100612, 100754, 139950, 21968, 121621, 85450, 5454, 12260}));
    CHECK(green_behind(0, 49152, 4) == Tokens({2732, 29836, 36535, 27990}));
    CHECK(permuted(7, 1, 1) == Tokens({0}));
    Tokens all = permuted(7, 1000, 1000);
    std::sort(all.begin(), all.end());
    Tokens ascending(1000);
    std::iota(ascending.begin(), ascending.end(), 0);
    CHECK(all == ascending);
    for (const int32_t count : {-1, 3}) {
        bool refused = false;
        try {
            permuted(7, 2, count);
        } catch (const std::invalid_argument&) {
            refused = true;
        }
        CHECK(refused);
    }
}

// Which tokens get the bias, of a row in which all are alike.
Tokens biased(const GreenList& list, const Tokens& before, int32_t vocabulary_size) {
    std::vector<Candidate> row;
    for (int32_t token = 0; token < vocabulary_size; ++token) {
        row.push_back({token, 0.0f, 0.0f});
    }
    Scratch scratch;
    Candidates candidates{row.data(), row.size(), true, &scratch};
    list.add_bias(candidates, before);
    CHECK(!candidates.sorted);
    Tokens tokens;
    for (const Candidate& candidate : candidates) {
        if (candidate.logit != 0.0f) {
            tokens.push_back(candidate.id);
        }
    }
    return tokens;
}

void test_list_is_what_it_contains() {
    for (const int32_t self_hash : {0, 1, 3}) {
        const GreenList list(35, int64_t{1} << 60, 0.4, 2.0f, self_hash);
        const Tokens before(list.context_length(), 9);
        Tokens contained;
        for (int32_t token = 0; token < 35; ++token) {
            if (list.contains(before, token)) {
                contained.push_back(token);
            }
        }
        CHECK(biased(list, before, 35) == contained);
        CHECK(self_hash > 0 || contained.size() == 14);
    }
}

// Products of such a key and a token exceed 64 bits.
void test_large_keys() {
    const auto green = [](int64_t key, int32_t token) {
        return biased(GreenList(20, key, 0.25, 1.0f, 0), {token}, 20);
    };
    CHECK(green((int64_t{1} << 40) + 5, 19) == Tokens({2, 10, 11, 14, 18}));
    CHECK(green((int64_t{1} << 62) + 12345, 19) == Tokens({4, 7, 8, 11, 13}));
    CHECK(green((int64_t{1} << 62) + 12345, 7) == Tokens({1, 4, 10, 11, 18}));
    CHECK(green(INT64_MAX, 19) == Tokens({2, 9, 11, 12, 15}));
    CHECK(green(INT64_MAX, 7) == Tokens({2, 9, 14, 16, 18}));
}

// Of the 100 candidates, those that transformers takes for green behind 5 and 17.
void test_self_hash() {
    const auto green = [](int64_t key, int32_t self_hash) {
        const GreenList list(100, key, 0.25, 2.0f, self_hash);
        const Tokens before{5, 17};
        Tokens tokens;
        for (int32_t token = 0; token < 100; ++token) {
            if (list.contains(std::span(before).last(list.context_length()), token)) {
                tokens.push_back(token);
            }
        }
        return tokens;
    };
    const int64_t large = (int64_t{1} << 60) + 7;
    CHECK(green(millionth_prime, 1) == Tokens({3,  10, 14, 18, 25, 34, 38, 41, 42, 47, 49, 53,
                                               55, 57, 62, 65, 67, 76, 79, 85, 89, 90, 92}));
    CHECK(green(millionth_prime, 3) == Tokens({1,  9,  14, 18, 25, 33, 34, 38, 41, 42, 47, 49,
                                               53, 62, 65, 67, 68, 76, 79, 90, 92, 98, 99}));
    CHECK(green(large, 1) == Tokens({0,  1,  3,  14, 22, 23, 25, 26, 31, 33, 36, 44, 48,
                                     54, 61, 62, 66, 70, 79, 80, 82, 85, 91, 96, 99}));
    CHECK(green(large, 3) == Tokens({2,  7,  22, 25, 26, 29, 30, 31, 37, 39, 42, 46, 48,
                                     49, 55, 57, 62, 71, 80, 85, 96, 99}));
}

SamplerParams marked(const WatermarkParams& watermark, float temperature = 1.0f) {
    SamplerParams params;
    params.temperature = temperature;
    params.watermark = watermark;
    return params;
}

WatermarkParams green(float bias = 2.0f, int32_t self_hash = 0) {
    return {.key = millionth_prime, .n_gram = self_hash, .bias = bias};
}

void test_greedy_takes_the_largest_behind_the_bias() {
    Floats logits(20, 0.0f);
    logits[0] = 3.0f;
    logits[12] = 1.5f;  // green behind 10, as 1, 4, 9 and 15 are
    logits[4] = 1.0f;
    const auto chosen = [&](float bias, bool with_context) {
        Sampler sampler(20, marked(green(bias), 0.0f));
        if (with_context) {
            sampler.accept_many(Tokens{3, 10});
        }
        return sampler.sample(logits.data());
    };
    CHECK(chosen(1.4f, true) == 0);
    CHECK(chosen(1.6f, true) == 12);
    CHECK(chosen(1.6f, false) == 0);  // nothing stands before that could decide
    Sampler sampler(20, marked(green(1.6f), 0.0f), {}, false, 1);
    sampler.accept(10);
    CHECK(sampler.sample(logits.data()) == 12);
    const Explanation explanation = sampler.explain(0, 3);
    CHECK(explanation.steps.back().name == "green");
    CHECK(explanation.steps.back().remaining == 1);
}

void test_candidates_that_decide_on_themselves() {
    const GreenList list(100, millionth_prime, 0.25, 2.0f, 1);
    Floats logits(100);
    for (int32_t token = 0; token < 100; ++token) {
        logits[token] = -0.01f * static_cast<float>(token);
    }
    int32_t first = 0;
    while (!list.contains({}, first)) {
        ++first;
    }
    Sampler sampler(100, marked(green(2.0f, 1), 0.0f));
    CHECK(sampler.sample(logits.data()) == first);

    std::vector<Candidate> row;
    for (int32_t token = 99; token >= 0; --token) {
        row.push_back({token, logits[token], 0.0f});
    }
    Scratch scratch;
    Candidates candidates{row.data(), row.size(), false, &scratch};
    list.add_bias(candidates, {});
    for (const Candidate& candidate : candidates) {
        const bool looked_at = candidate.id < static_cast<int32_t>(GreenList::most_tried);
        CHECK((candidate.logit != logits[candidate.id]) == (looked_at && list.contains({}, candidate.id)));
    }
}

void test_rewind_of_a_sampler() {
    Floats logits(20, 0.0f);
    logits[0] = 1.0f;
    logits[12] = 0.5f;
    Sampler sampler(20, marked(green(), 0.0f));
    sampler.accept_many(Tokens{10});
    CHECK(sampler.sample(logits.data()) == 12);
    sampler.accept(0);
    Sampler copy = sampler;
    sampler.rewind(1, Tokens{10});
    CHECK(sampler.sample(logits.data()) == 12);
    CHECK(copy.sample(logits.data()) != 12);  // 12 is not green behind 0
}

void test_counts() {
    const Watermark watermark(20, green(), false);
    const Tokens text{10, 12, 10, 12, 10, 0};
    CHECK(watermark.count(text, false).judged == 3);
    CHECK(watermark.count(text, true).judged == 5);
    const Tokens pair{10, 12};
    const WatermarkCount found = watermark.count(pair, false);
    CHECK(found.judged == 1 && found.hits == 1);
    CHECK(watermark.count(Tokens{10}, false).judged == 0 && watermark.count({}, false).judged == 0);

    bool refused = false;
    try {
        watermark.count(Tokens{1, 20}, false);
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    CHECK(refused);
}

// Much of what is drawn with a key carries its mark, and not that of another one.
void test_what_is_drawn_is_found() {
    for (const WatermarkParams& params : {green(), green(2.0f, 3)}) {
        SamplerParams sampling = marked(params);
        sampling.top_k = 10;
        sampling.top_p = 1.0f;
        sampling.min_p = 0.0f;
        Sampler sampler(50, sampling);
        Tokens text;
        for (int i = 0; i < 300; ++i) {
            Floats logits(50);
            for (int32_t token = 0; token < 50; ++token) {
                logits[token] = static_cast<float>((token * 37 + i * 11) % 50) * 0.1f;
            }
            text.push_back(sampler.sample(logits.data()));
            sampler.accept(text.back());
        }
        const auto z = [&](const WatermarkParams& looked_for) {
            const WatermarkCount found = Watermark(50, looked_for, false).count(text, false);
            const double expected = looked_for.share * found.judged;
            return (found.hits - expected) / std::sqrt(expected * (1 - looked_for.share));
        };
        WatermarkParams other = params;
        other.key += 12345;
        CHECK(z(params) > 6.0);
        CHECK(std::fabs(z(other)) < 4.0);
    }
}

void test_what_is_refused() {
    const auto refused = [](const WatermarkParams& watermark, int32_t mirostat = 0) {
        SamplerParams params = marked(watermark);
        params.mirostat = mirostat;
        try {
            Sampler sampler(20, params);
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    CHECK(!refused(green()));
    CHECK(refused(green(), 2));
    CHECK(refused(green(0.0f)) && refused(green(NAN)) && refused(green(2.0f, 65)));
    for (const double share : {0.0, 1.0}) {
        WatermarkParams params = green();
        params.share = share;
        CHECK(refused(params));
    }
    WatermarkParams without_key = green();
    without_key.key = 0;
    CHECK(refused(without_key));
    bool refuses_nothing = false;
    try {
        Watermark(0, green(), false);
    } catch (const std::invalid_argument&) {
        refuses_nothing = true;
    }
    CHECK(refuses_nothing);
}

}  // namespace

int main() {
    test_permutation();
    test_list_is_what_it_contains();
    test_large_keys();
    test_self_hash();
    test_greedy_takes_the_largest_behind_the_bias();
    test_candidates_that_decide_on_themselves();
    test_rewind_of_a_sampler();
    test_counts();
    test_what_is_drawn_is_found();
    test_what_is_refused();
    return summary();
}
