// The steps and the whole sampler on cases small enough to check by hand. Many are llama.cpp's own
// (tests/test-sampling.cpp; test_chain.cpp says where each is); that every token equals llama.cpp's is checked
// in tests/test_sampler.py.
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "check.hpp"
#include "sampler.hpp"

using namespace llmrun;

namespace {

using Floats = std::vector<float>;
using Tokens = std::vector<int32_t>;

// Candidates with these probabilities, and what a step leaves of them.
struct List {
    explicit List(const Floats& probabilities) {
        for (const float p : probabilities) {
            storage.push_back({static_cast<int32_t>(storage.size()), std::log(p), p});
        }
        candidates = {storage.data(), storage.size(), false, &scratch};
    }

    List& after(const std::function<void(Candidates&)>& step) {
        step(candidates);
        return *this;
    }

    // The probabilities that a draw would take, in the list's order.
    Floats drawn_from() {
        Generator random(0);
        draw(candidates, random);
        float sum = 0;
        for (const Candidate& candidate : candidates) {
            sum += candidate.p;
        }
        Floats result;
        for (const Candidate& candidate : candidates) {
            result.push_back(candidates.size == 1 ? 1.0f : candidate.p / sum);
        }
        return result;
    }

    Tokens ids() {
        Tokens result;
        for (const Candidate& candidate : candidates) {
            result.push_back(candidate.id);
        }
        return result;
    }

    std::vector<Candidate> storage;
    Scratch scratch;
    Candidates candidates;
};

bool near(const Floats& actual, const Floats& expected) {
    return std::equal(actual.begin(), actual.end(), expected.begin(), expected.end(),
                      [](float a, float b) { return std::fabs(a - b) < 1e-5f; });
}

const Floats quarters{0.1f, 0.2f, 0.3f, 0.4f};

void test_temperature() {
    const auto with = [](float value) {
        return List(quarters).after([&](Candidates& c) { temperature(c, value); }).drawn_from();
    };
    CHECK(near(with(1.0f), quarters));
    CHECK(near(with(0.0f), {0, 0, 0, 1}));
    CHECK(near(with(-1.0f), {0, 0, 0, 1}));
    CHECK(near(with(0.5f), {0.01f / 0.3f, 0.04f / 0.3f, 0.09f / 0.3f, 0.16f / 0.3f}));
}

void test_dynamic_temperature() {
    const auto with = [](float value, float range, const Floats& probabilities) {
        return List(probabilities)
            .after([&](Candidates& c) { dynamic_temperature(c, value, range, 1.0f); })
            .drawn_from();
    };
    CHECK(near(with(1.0f, 0.0f, quarters), quarters));
    CHECK(near(with(0.0f, 0.0f, quarters), {0, 0, 0, 1}));
    // The entropy of equals is the largest possible, so the temperature is too; equals stay equals.
    CHECK(near(with(1.0f, 1.0f, {0.25f, 0.25f, 0.25f, 0.25f}), {0.25f, 0.25f, 0.25f, 0.25f}));
    // Certainty has no entropy: the lowest temperature.
    CHECK(near(with(0.5f, 0.5f, {1.0f, 1e-30f}), {1, 0}));
}

void test_top_k() {
    const auto with = [](int32_t k) {
        return List(quarters).after([&](Candidates& c) { top_k(c, k); }).drawn_from();
    };
    CHECK(near(with(1), {1}));
    CHECK(near(with(3), {0.44444f, 0.33333f, 0.22222f}));
    CHECK(near(with(4), {0.4f, 0.3f, 0.2f, 0.1f}));
    CHECK(near(with(100), {0.4f, 0.3f, 0.2f, 0.1f}));
    CHECK(near(with(0), quarters));
}

void test_top_p() {
    const auto with = [](float p) {
        return List(quarters).after([&](Candidates& c) { top_p(c, p); }).drawn_from();
    };
    CHECK(near(with(0.0f), {1}));
    CHECK(near(with(0.7f), {0.571429f, 0.428571f}));
    CHECK(near(with(0.8f), {0.44444f, 0.33333f, 0.22222f}));
    CHECK(near(with(1.0f), quarters));
}

void test_min_p() {
    const auto with = [](float p) {
        return List(quarters).after([&](Candidates& c) { min_p(c, p); }).drawn_from();
    };
    CHECK(near(with(0.0f), quarters));
    CHECK(near(with(0.24f), quarters));
    CHECK(near(with(0.26f), {0.2f / 0.9f, 0.3f / 0.9f, 0.4f / 0.9f}));
    CHECK(near(with(0.49f), {0.2f / 0.9f, 0.3f / 0.9f, 0.4f / 0.9f}));
    CHECK(near(with(0.51f), {0.3f / 0.7f, 0.4f / 0.7f}));
    CHECK(near(with(0.74f), {0.3f / 0.7f, 0.4f / 0.7f}));
    CHECK(near(with(0.76f), {1}));
    CHECK(near(with(1.0f), {1}));
    CHECK(near(with(1.05f), {1}));
}

void test_top_choices() {
    const auto with = [](float threshold) {
        Generator random(0);
        return List({0.4f, 0.3f, 0.2f, 0.1f})
            .after([&](Candidates& c) { exclude_top_choices(c, 0.99f, threshold, random); })
            .ids();
    };
    CHECK(with(0.09f) == Tokens({3}));
    CHECK(with(0.19f) == Tokens({2, 3}));
    CHECK(with(0.29f) == Tokens({1, 2, 3}));
    CHECK(with(0.39f) == Tokens({0, 1, 2, 3}));
    CHECK(with(0.51f) == Tokens({0, 1, 2, 3}));
}

void test_typical() {
    const auto with = [](const Floats& probabilities) {
        Tokens ids = List(probabilities).after([](Candidates& c) { typical(c, 0.5f); }).ids();
        std::sort(ids.begin(), ids.end());
        return ids;
    };
    CHECK(with({0.97f, 0.01f, 0.01f, 0.01f}) == Tokens({0}));
    CHECK(with({0.4f, 0.2f, 0.2f, 0.2f}) == Tokens({1, 2, 3}));
}

void test_top_n_sigma() {
    const auto with = [](float n) {
        return List(quarters).after([&](Candidates& c) { top_n_sigma(c, n); }).drawn_from();
    };
    CHECK(near(with(1.0f), {0, 0, 0.428571f, 0.571429f}));
    CHECK(near(with(0.0f), quarters));
    CHECK(near(with(3.0f), quarters));
}

// Lists of the lengths at which another way of sorting is taken; the k largest have to be the same ones.
void test_long_lists() {
    for (const size_t size : {128, 129, 1024, 1025, 5000}) {
        Floats probabilities(size);
        for (size_t i = 0; i < size; ++i) {
            probabilities[i] = static_cast<float>(1 + (i * 7919) % size);  // a permutation: 7919 is prime
        }
        for (const size_t k : {size_t{1}, size_t{128}, size / 2, size - 1, size}) {
            List list(probabilities);
            top_k(list.candidates, static_cast<int32_t>(k));
            CHECK(list.candidates.size == k);
            for (size_t i = 0; i < k; ++i) {
                CHECK(probabilities[list.candidates[i].id] == static_cast<float>(size - i));
            }
        }
        List list(probabilities);
        top_p(list.candidates, 0.75f);  // a triangle: half of the list is three quarters of its area
        CHECK(std::abs(static_cast<int>(list.candidates.size) - static_cast<int>(size / 2)) <= 1);
        CHECK(list.candidates[0].id == std::max_element(probabilities.begin(), probabilities.end()) -
                                           probabilities.begin());
    }
}

// ---- the whole sampler ----

SamplerParams neutral() {
    SamplerParams params;
    params.temperature = 1.0f;
    params.top_k = 0;
    params.top_p = 1.0f;
    params.min_p = 0.0f;
    return params;
}

SamplerParams greedy() {
    SamplerParams params = neutral();
    params.temperature = 0.0f;
    return params;
}

int32_t next(Sampler& sampler, const Floats& logits) { return sampler.sample(logits.data()); }

int32_t next_after(const SamplerParams& params, const Tokens& history, const Floats& logits,
                   const std::vector<Tokens>& breakers = {}) {
    Sampler sampler(static_cast<int32_t>(logits.size()), params, breakers);
    for (const int32_t token : history) {
        sampler.accept(token);
    }
    return next(sampler, logits);
}

void test_penalties() {
    SamplerParams repeat = greedy();
    repeat.repeat_penalty = 2.0f;
    CHECK(next_after(repeat, {}, {4, 3, 1}) == 0);
    CHECK(next_after(repeat, {0}, {4, 3, 1}) == 1);        // 4 / 2 < 3
    CHECK(next_after(repeat, {0, 0, 0}, {4, 1, 1}) == 0);  // once, however often it occurred
    CHECK(next_after(repeat, {0}, {-2, -3, -5}) == 1);     // negative ones are multiplied

    SamplerParams frequency = greedy();
    frequency.frequency_penalty = 1.0f;
    CHECK(next_after(frequency, {0, 0}, {3.5f, 2, 1}) == 1);
    CHECK(next_after(frequency, {0}, {3.5f, 2, 1}) == 0);

    SamplerParams presence = greedy();
    presence.presence_penalty = 2.0f;
    CHECK(next_after(presence, {0, 0}, {3.5f, 2, 1}) == 1);
    CHECK(next_after(presence, {0, 0}, {4.5f, 2, 1}) == 0);
}

void test_penalties_forget() {
    SamplerParams params = greedy();
    params.presence_penalty = 10.0f;
    params.repeat_last_n = 2;
    CHECK(next_after(params, {0, 1}, {3, 2, 1}) == 2);
    CHECK(next_after(params, {0, 1, 1}, {3, 2, 1}) == 0);
    CHECK(next_after(params, {0, 1, 0, 2, 0}, {3, 2, 1}) == 1);
    params.dry_multiplier = 1.0f;  // makes the ring longer, but not the penalties' part of it
    CHECK(next_after(params, {0, 1, 1}, {3, 2, 1}) == 0);
    params.repeat_last_n = 0;
    CHECK(next_after(params, {0, 1, 0}, {3, 2, 1}) == 0);
}

SamplerParams dry(float multiplier, int32_t allowed_length, int32_t last_n) {
    SamplerParams params = greedy();
    params.dry_multiplier = multiplier;
    params.dry_base = 2.0f;
    params.dry_allowed_length = allowed_length;
    params.dry_last_n = last_n;
    return params;
}

void test_dry() {
    const Tokens abcab{0, 1, 2, 0, 1};  // 2 would repeat "0 1 2"
    const Floats likes_2{0, 0.5f, 1, 0};
    CHECK(next_after(dry(0.0f, 2, 9), abcab, likes_2) == 2);
    CHECK(next_after(dry(2.0f, 2, 9), abcab, likes_2) == 1);
    CHECK(next_after(dry(0.4f, 2, 9), abcab, likes_2) == 2);  // 1 - 0.4 > 0.5
    CHECK(next_after(dry(2.0f, 3, 9), abcab, likes_2) == 2);  // the repeat is only 2 long
    CHECK(next_after(dry(2.0f, 2, 4), abcab, likes_2) == 2);  // its beginning is forgotten
    CHECK(next_after(dry(0.3f, 1, 9), abcab, likes_2) == 1);  // 0.3 * 2^(2 - 1)
    SamplerParams small_base = dry(2.0f, 2, 9);
    small_base.dry_base = 0.5f;
    CHECK(next_after(small_base, abcab, likes_2) == 2);
}

void test_dry_breakers() {
    const Tokens abcab{0, 1, 2, 0, 1};
    const Floats likes_2{0, 0.5f, 1, 0};
    const SamplerParams params = dry(2.0f, 2, 9);
    CHECK(next_after(params, abcab, likes_2, {{1}}) == 2);
    CHECK(next_after(params, abcab, likes_2, {{0, 1}}) == 2);
    CHECK(next_after(params, abcab, likes_2, {{0, 3}}) == 1);  // does not occur
    CHECK(next_after(params, abcab, likes_2, {{}}) == 1);
    CHECK(next_after(params, abcab, likes_2, {{2}}) == 2);     // a breaker itself is never penalised
    CHECK(next_after(params, abcab, likes_2, {{2, 3}}) == 1);  // its first token alone is
}

void test_dry_penalties() {
    const auto by_token = [](const Tokens& tokens, const std::vector<Tokens>& breakers) {
        Dry dry({1.0f, 2.0f, 1, 100}, breakers);
        History history(100);
        for (const int32_t token : tokens) {
            history.push(token);
        }
        Floats amounts(5);
        for (const auto& [token, amount] : dry.penalties(history)) {
            amounts[token] = amount;
        }
        return amounts;
    };
    // The example of dry.cpp: a b c c b c y a b c. b would extend 1 token, c 3, y 2.
    CHECK(near(by_token({0, 1, 2, 2, 1, 2, 3, 0, 1, 2}, {}), {0, 1, 4, 2, 0}));

    // 4 would extend the 4 tokens 0 1 2 3; fewer when a breaker is among them.
    const Tokens repeat{0, 1, 2, 3, 4, 0, 1, 2, 3};
    CHECK(near(by_token(repeat, {}), {0, 0, 0, 0, 8}));
    CHECK(near(by_token(repeat, {{1}}), {0, 0, 0, 0, 2}));
    CHECK(near(by_token(repeat, {{0, 1}}), {0, 0, 0, 0, 2}));
    CHECK(near(by_token(repeat, {{1, 2}, {1}}), {0, 0, 0, 0, 1}));  // the longest at one place counts
    CHECK(near(by_token(repeat, {{1}, {1, 2}, {0}}), {0, 0, 0, 0, 1}));
    CHECK(near(by_token(repeat, {{1, 2, 3}}), {0, 0, 0, 0, 0}));
    CHECK(near(by_token(repeat, {{2, 3, 4}}), {0, 0, 0, 0, 8}));  // not finished
}

void test_long_repeats_stay_finite() {
    SamplerParams params = dry(1.0f, 0, 2000);
    CHECK(next_after(params, Tokens(2000, 1), {-5, 0}) == 0);
    params.dry_multiplier = 0.25f;  // times 2^128
    CHECK(next_after(params, Tokens(2000, 1), {-3e38f, 0}) == 1);
    params.dry_multiplier = 1e30f;  // over the largest float: banned
    CHECK(next_after(params, Tokens(2000, 1), {-5, 0}) == 0);
}

void test_logit_bias() {
    SamplerParams params = greedy();
    params.logit_bias = {{2, 2.5f}};
    CHECK(next_after(params, {}, {3, 2, 1}) == 2);
    params.logit_bias = {{0, -INFINITY}, {1, -1.0f}, {1, -1.0f}};
    CHECK(next_after(params, {}, {3, 2, 1}) == 2);
}

void test_ties_and_extremes() {
    CHECK(next_after(greedy(), {}, {1, 1, 1, 1}) == 0);  // the first of equals
    CHECK(next_after(greedy(), {}, {-INFINITY, -1e30f, -INFINITY}) == 1);
    CHECK(next_after(SamplerParams{}, {}, {0, 0, 1000, 0}) == 2);
    CHECK(next_after(SamplerParams{}, {}, {7}) == 0);
    SamplerParams mirostat = greedy();
    for (mirostat.mirostat = 1; mirostat.mirostat <= 2; ++mirostat.mirostat) {
        CHECK(next_after(mirostat, {}, {7}) == 0);
        CHECK(next_after(mirostat, {}, {0, 0, 1000, 0}) == 2);
    }

    // All equal: each token is drawn about equally often.
    Sampler sampler(4, neutral());
    std::vector<int> count(4);
    for (int i = 0; i < 4000; ++i) {
        ++count[next(sampler, {1, 1, 1, 1})];
    }
    CHECK(*std::min_element(count.begin(), count.end()) > 900);
}

void test_mirostat_steers() {
    // Small tau: after some tokens only the likeliest ones are drawn; large tau: the others too.
    Floats logits(200);
    for (size_t i = 0; i < logits.size(); ++i) {
        logits[i] = -std::log(static_cast<float>(i + 1));
    }
    const auto mean_rank = [&](int32_t version, float tau) {
        SamplerParams params = neutral();
        params.mirostat = version;
        params.mirostat_tau = tau;
        Sampler sampler(200, params);
        double sum = 0;
        for (int i = 0; i < 500; ++i) {
            sum += next(sampler, logits);
        }
        return sum / 500;
    };
    for (const int32_t version : {1, 2}) {
        CHECK(mean_rank(version, 1.0f) < 3);
        CHECK(mean_rank(version, 5.0f) > 8);
    }
}

void test_one_draw_a_token() {
    SamplerParams one = neutral();
    one.top_k = 1;
    Sampler singleton(256, one);
    Sampler control(256, neutral());
    next(singleton, Floats(256));
    next(control, Floats(256));
    CHECK(singleton.random_state() == control.random_state());
}

void test_draws_are_taken_back() {
    for (const int32_t mirostat : {0, 1, 2}) {
        SamplerParams params = neutral();
        params.mirostat = mirostat;
        params.xtc_probability = 0.5f;
        params.xtc_threshold = 0.001f;
        Sampler sampler(256, params);
        Floats logits(256);
        for (size_t i = 0; i < logits.size(); ++i) {
            logits[i] = -std::log(static_cast<float>(i + 1));
        }
        for (int i = 0; i < 300; ++i) {
            next(sampler, logits);
        }
        const Sampler before(sampler);
        for (const int count : {1, 20, 64}) {
            for (int i = 0; i < count; ++i) {
                next(sampler, logits);
            }
            sampler.undraw(static_cast<size_t>(count));
            CHECK(sampler.random_state() == before.random_state());
            Sampler again(sampler), expected(before);
            for (int i = 0; i < 20; ++i) {
                CHECK(next(again, logits) == next(expected, logits));
            }
        }
    }
}

void test_copies() {
    SamplerParams params = neutral();
    params.presence_penalty = 1.0f;
    Sampler first(256, params);
    first.accept(next(first, Floats(256)));
    Sampler second(first);
    for (int i = 0; i < 20; ++i) {
        const int32_t token = next(first, Floats(256));
        CHECK(token == next(second, Floats(256)));
        first.accept(token);
        second.accept(token);
    }
}

void test_bad_logits() {
    const auto bad_token = [](const SamplerParams& params, const Floats& logits) {
        Sampler sampler(static_cast<int32_t>(logits.size()), params);
        try {
            next(sampler, logits);
        } catch (const BadLogits& error) {
            return error.token;
        }
        return -1;
    };
    const Floats with_nan{0, 1, NAN, NAN};
    const Floats with_infinity{0, INFINITY, 1};
    SamplerParams params;
    for (params.mirostat = 0; params.mirostat <= 2; ++params.mirostat) {
        CHECK(bad_token(params, with_nan) == 2);
        CHECK(bad_token(params, with_infinity) == 1);
        CHECK(bad_token(params, {-INFINITY, -INFINITY}) == 0);
        CHECK(bad_token(params, {-INFINITY, 0}) == -1);
    }
    params = greedy();
    params.logit_bias = {{1, 3e38f}};
    CHECK(bad_token(params, {0, 3e38f}) == 1);  // the sum overflows
}

void test_nonsense_is_refused() {
    const auto refused = [](int32_t size, const SamplerParams& params) {
        try {
            Sampler sampler(size, params);
        } catch (const std::invalid_argument&) {
            return true;
        }
        return false;
    };
    SamplerParams params;
    CHECK(!refused(1, params));
    CHECK(refused(0, params));
    CHECK(refused(largest_vocabulary + 1, params));
    params.repeat_penalty = 0.0f;
    CHECK(refused(10, params));
    params = {};
    params.logit_bias = {{10, 1.0f}};
    CHECK(refused(10, params));
}

void test_history() {
    History history(3);
    CHECK(history.size() == 0);
    for (int32_t token = 0; token < 8; ++token) {
        history.push(token);
        CHECK(history.newest(0) == token);
    }
    CHECK(history.size() == 3);
    CHECK(history.newest(1) == 6);
    CHECK(history.newest(2) == 5);
    History none(0);
    none.push(1);
    CHECK(none.size() == 0);
}

}  // namespace

int main() {
    test_temperature();
    test_dynamic_temperature();
    test_top_k();
    test_top_p();
    test_min_p();
    test_top_choices();
    test_typical();
    test_top_n_sigma();
    test_long_lists();
    test_penalties();
    test_penalties_forget();
    test_dry();
    test_dry_breakers();
    test_dry_penalties();
    test_long_repeats_stay_finite();
    test_logit_bias();
    test_ties_and_extremes();
    test_mirostat_steers();
    test_one_draw_a_token();
    test_draws_are_taken_back();
    test_copies();
    test_bad_logits();
    test_nonsense_is_refused();
    test_history();
    return summary();
}
