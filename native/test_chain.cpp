// The chain in its own order and in others, on lists small enough to check by hand.
//
// Every case of llama.cpp's own tests/test-sampling.cpp is here or in test_sampler.cpp, with its figures:
//   test_dist_singleton_rng          test_sampler.cpp: test_one_draw_a_token
//   test_temp, test_temp_ext         test_sampler.cpp: test_temperature, test_dynamic_temperature
//   test_top_k, test_top_p           test_sampler.cpp: test_top_k, test_top_p
//   test_min_p, test_xtc             test_sampler.cpp: test_min_p, test_top_choices
//   test_typical, test_top_n_sigma   test_sampler.cpp: test_typical, test_top_n_sigma
//   test_penalties, test_dry         test_llama_cpps_penalties, test_llama_cpps_dry
//   test_sampler_queue               test_llama_cpps_queues
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "bad_logits.hpp"
#include "chain.hpp"
#include "check.hpp"
#include "mask.hpp"

using namespace llmrun;

namespace {

using Floats = std::vector<float>;
using Tokens = std::vector<int32_t>;

bool near(const Floats& actual, const Floats& expected) {
    return std::equal(actual.begin(), actual.end(), expected.begin(), expected.end(),
                      [](float a, float b) { return std::fabs(a - b) < 1e-5f; });
}

// A list with these logits, and a sequence around it.
struct Bench {
    Bench(const Floats& logits, const SamplerParams& params, const Tokens& tokens,
          const std::vector<Tokens>& breakers = {})
        : params(params),
          counts(logits.size(), tokens.size()),
          history(tokens.size()),
          dry({params.dry_multiplier, params.dry_base, params.dry_allowed_length, params.dry_last_n},
              breakers) {
        for (const float logit : logits) {
            storage.push_back({static_cast<int32_t>(storage.size()), logit, 0.0f});
        }
        candidates = {storage.data(), storage.size(), false, &scratch};
        for (const int32_t token : tokens) {
            counts.add(token);
            history.push(token);
        }
    }

    Bench& after(Step step) {
        apply(step, candidates, {params, counts, history, dry, random});
        return *this;
    }

    // The probabilities of a draw, by token; 0 for those that are not in the list.
    Floats by_token() {
        Generator any(0);
        draw(candidates, any);
        float sum = 0;
        for (const Candidate& candidate : candidates) {
            sum += candidates.size == 1 ? 1.0f : candidate.p;
        }
        Floats result(storage.size());
        for (const Candidate& candidate : candidates) {
            result[candidate.id] = candidates.size == 1 ? 1.0f : candidate.p / sum;
        }
        return result;
    }

    SamplerParams params;
    TokenCounts counts;
    History history;
    Dry dry;
    Generator random{0};
    std::vector<Candidate> storage;
    Scratch scratch;
    Candidates candidates{};
};

void test_llama_cpps_penalties() {
    const Floats fifths(5, std::log(0.2f));
    const auto with = [&](float repeat, float frequency, float presence, const Tokens& tokens) {
        SamplerParams params;
        params.repeat_penalty = repeat;
        params.frequency_penalty = frequency;
        params.presence_penalty = presence;
        return Bench(fifths, params, tokens).after(Step::penalties).by_token();
    };
    CHECK(near(with(50, 0, 0, {0}), {0, 0.25f, 0.25f, 0.25f, 0.25f}));
    CHECK(near(with(50, 0, 0, {0, 1, 2}), {0, 0, 0, 0.5f, 0.5f}));
    CHECK(near(with(50, 0, 0, {0, 1, 2, 0, 0}), {0, 0, 0, 0.5f, 0.5f}));
    CHECK(near(with(1, 5, 5, {0}), {0.000011f, 0.249997f, 0.249997f, 0.249997f, 0.249997f}));
    CHECK(near(with(1, 5, 5, {0, 1, 2}), {0.000023f, 0.000023f, 0.000023f, 0.499966f, 0.499966f}));
    CHECK(near(with(1, 5, 5, {0, 1, 2, 0, 0}), {0, 0.000023f, 0.000023f, 0.499977f, 0.499977f}));
}

void test_llama_cpps_dry() {
    const auto with = [](const Floats& logits, const Tokens& tokens, float multiplier, int32_t allowed,
                         const std::vector<Tokens>& breakers) {
        SamplerParams params;
        params.dry_multiplier = multiplier;
        params.dry_base = 1.1f;
        params.dry_allowed_length = allowed;
        return Bench(logits, params, tokens, breakers).after(Step::dry).by_token();
    };
    const Floats quarters(4, std::log(0.25f));
    const Floats fifths(5, std::log(0.2f));
    CHECK(near(with(quarters, {0, 1}, 1, 2, {}), {0.25f, 0.25f, 0.25f, 0.25f}));
    CHECK(near(with(quarters, {0, 1, 2, 0, 1}, 1, 2, {}), {0.296923f, 0.296923f, 0.109232f, 0.296923f}));
    CHECK(near(with(fifths, {0, 1, 3, 4, 0, 1}, 1, 2, {{3}}), {0.2f, 0.2f, 0.2f, 0.2f, 0.2f}));
    CHECK(near(with(fifths, {0, 1, 2, 0, 1}, 2, 2, {}),
               {0.241818f, 0.241818f, 0.032727f, 0.241818f, 0.241818f}));
    CHECK(near(with(fifths, {0, 1, 2, 3, 4, 0, 1}, 1, 4, {}), {0.2f, 0.2f, 0.2f, 0.2f, 0.2f}));
}

// Probabilities 0, 1, 2, ... of 10,000 tokens, and the steps in an order: how many are left, and the
// likeliest and the least likely of them. What is right follows from the sums of whole numbers.
void test_llama_cpps_queues() {
    constexpr int size = 10000;
    Floats logits;
    for (int token = 0; token < size; ++token) {
        logits.push_back(std::log(static_cast<float>(token)));
    }
    const auto check_queue = [&](const std::string& steps, int k, float p, float min) {
        SamplerParams params;
        params.top_k = k;
        params.top_p = p;
        params.min_p = min;
        Bench bench(logits, params, {});
        int left = size;
        int lowest = 0;
        for (const char step : steps) {
            bench.after(step == 'k' ? Step::top_k : step == 'p' ? Step::top_p : Step::min_p);
            if (step == 'k') {
                left = std::min(left, k);
                lowest = std::max(lowest, size - k);
            } else if (step == 'p' && p < 1.0f) {
                const int total = size * (size - 1) / 2 - lowest * (lowest - 1) / 2;
                const int target = static_cast<int>(std::ceil(p * static_cast<float>(total)));
                int sum = size - 1;
                for (lowest = size - 1; sum < target; sum += lowest) {
                    --lowest;
                }
                left = size - lowest;
            } else if (step == 'm') {
                left = std::min(left, std::max(1, static_cast<int>(std::ceil((1.0f - min) * size))));
                left = std::min(left, size - 1);  // token 0 is impossible
                lowest = std::max({lowest, 1, static_cast<int>(std::floor(min * size)), size - left});
                lowest = std::min(lowest, size - 1);
            }
            Candidates& list = bench.candidates;
            CHECK(list.size == static_cast<size_t>(left));
            CHECK(!list.sorted || list[0].id == size - 1);
            CHECK(!list.sorted || list[list.size - 1].id == lowest);
        }
    };
    check_queue("k", size, 1.0f, 1.0f);
    check_queue("k", 1, 1.0f, 1.0f);
    check_queue("p", size, 1.0f, 1.0f);
    check_queue("p", size, 0.0f, 1.0f);
    check_queue("m", size, 1.0f, 1.0f);
    check_queue("m", size, 1.0f, 1e-12f);
    check_queue("k", 100, 1.0f, 1.0f);
    check_queue("p", size, 0.0003f, 1.0f);
    check_queue("p", size, 0.8f, 1.0f);
    check_queue("m", size, 1.0f, 9997.9f / 9999.0f);
    check_queue("m", size, 1.0f, 0.1f);
    check_queue("mp", 100, 0.8f, 9997.9f / 9999.0f);
    for (const char* steps :
         {"kp", "km", "pk", "pm", "mk", "mp", "kpm", "kmp", "pkm", "pmk", "mkp", "mpk"}) {
        check_queue(steps, 100, 0.8f, 0.1f);
    }
}

void test_penalties_on_a_cut_list() {
    SamplerParams params;
    params.top_k = 2;
    params.presence_penalty = 5.0f;
    Bench bench({1, 4, 3, 2}, params, {0, 1});
    bench.after(Step::top_k).after(Step::penalties);
    CHECK(bench.candidates.size == 2 && !bench.candidates.sorted);
    CHECK(bench.candidates[0].id == 1 && bench.candidates[0].logit == -1.0f);
    bench.after(Step::top_k);
    CHECK(bench.candidates[0].id == 2);
}

void test_dry_on_a_cut_list() {
    SamplerParams params;
    params.top_k = 2;
    params.dry_multiplier = 5.0f;
    Bench bench({0, 1, 4, 3}, params, {0, 1, 2, 0, 1});
    bench.after(Step::top_k).after(Step::dry);
    CHECK(bench.candidates[0].id == 2 && bench.candidates[0].logit == -1.0f && !bench.candidates.sorted);
    Bench nothing_to_repeat({0, 1, 4, 3}, params, {0, 1});
    nothing_to_repeat.after(Step::top_k).after(Step::dry);
    CHECK(nothing_to_repeat.candidates.sorted);
}

void test_what_penalties_may_not_leave() {
    const auto bad_logit = [](const SamplerParams& params, const Floats& logits, Step step) {
        try {
            Bench(logits, params, {0, 0, 0}).after(Step::top_k).after(step);
        } catch (const BadLogits& error) {
            return error.logit;
        }
        return 0.0f;
    };
    SamplerParams params;
    params.top_k = 1;
    params.frequency_penalty = -2e38f;
    CHECK(bad_logit(params, {3e38f, 0}, Step::penalties) == INFINITY);
    params.frequency_penalty = 3e38f;
    CHECK(bad_logit(params, {0, -1}, Step::penalties) == -INFINITY);
    params.dry_allowed_length = 0;
    params.dry_multiplier = 3e38f;
    CHECK(bad_logit(params, {0, -1}, Step::dry) == -INFINITY);
    params.dry_multiplier = -3e38f;
    CHECK(bad_logit(params, {0, -1}, Step::dry) == INFINITY);
}

void test_biases_on_a_part_of_the_vocabulary() {
    SamplerParams params;
    params.logit_bias = {{3, 1.0f}, {4, 2.0f}, {9, 1.0f}, {3, 1.0f}};
    std::vector<Candidate> list{{1, 0, 0}, {3, 0, 0}, {7, 0, 0}};
    Scratch scratch;
    Candidates candidates{list.data(), list.size(), false, &scratch};
    apply_logit_bias(candidates, params);
    CHECK(list[0].logit == 0 && list[1].logit == 2 && list[2].logit == 0);
}

void test_orders() {
    CHECK(order_from({"temperature", "top_k"}) == std::vector({Step::temperature, Step::top_k}));
    CHECK(order_from({}).empty());
    CHECK(default_order().size() == step_names.size());
    CHECK(name_of(Step::typical_p) == "typical_p");
    const auto complaint = [](const std::vector<std::string>& names) {
        try {
            order_from(names);
        } catch (const std::invalid_argument& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    CHECK(complaint({"top_k", "top_q"}).find("'top_q'") != std::string::npos);
    CHECK(complaint({"min_p", "top_k", "min_p"}).find("'min_p'") != std::string::npos);
}

void test_steps_that_are_off() {
    SamplerParams params;
    params.repeat_penalty = 1.1f;
    params.dry_multiplier = 1.0f;
    params.top_n_sigma = 1.0f;
    params.typical_p = 0.5f;
    params.xtc_probability = 0.5f;
    for (const Step step : default_order()) {
        CHECK(params.switches_on(step));
        params.switch_off(step);
        CHECK(!params.switches_on(step));
    }
}

void test_masked_rows() {
    constexpr int32_t size = 70;  // not a whole number of words
    Floats logits;
    for (int32_t token = 0; token < size; ++token) {
        logits.push_back(static_cast<float>(token));
    }
    MaskedRow row(size);
    const std::vector<uint32_t> words{0xfffffff0, 0x00000011, 0xffffffff};
    const Tokens banned{5, 69, 5};
    row.set({words.data(), banned});
    const auto allowed = [&](int32_t token) {
        return words[token / 32] >> token % 32 & 1 && token != 5 && token != 69;
    };
    const float* masked = row.apply(logits.data());
    std::vector<Candidate> list;
    row.collect(logits.data(), list);
    CHECK(list.size() == row.count());
    size_t next = 0;
    for (int32_t token = 0; token < size; ++token) {
        CHECK(masked[token] == (allowed(token) ? logits[token] : -INFINITY));
        if (allowed(token)) {
            CHECK(list[next].id == token && list[next].logit == logits[token]);
            ++next;
        }
    }
    CHECK(next == list.size());
    row.set({nullptr, banned});
    CHECK(row.count() == 68);
    CHECK(Mask{}.allows_everything() && !Mask{words.data()}.allows_everything());
}

void test_histories() {
    History history(3);
    Tokens tokens{9};
    history.write_to(tokens);
    CHECK(tokens.empty());
    for (const int32_t token : {1, 2, 3, 4}) {
        history.push(token);
    }
    history.write_to(tokens);
    CHECK(tokens == Tokens({2, 3, 4}));
    history.clear();
    CHECK(history.size() == 0);

    TokenCounts counts(10, 5);
    counts.add(7);
    counts.add(7);
    CHECK(counts.count(7) == 2 && counts.count(3) == 0);
    counts.clear();
    CHECK(counts.count(7) == 0 && counts.distinct().empty());
    CHECK(TokenCounts(10, 0).count(3) == 0);
}

// Rounding or NaN can keep a sum from its target; what is impossible is not drawn even then.
void test_draws_that_overflow() {
    SamplerParams params;
    params.temperature = 1e-38f;
    Bench bench({10, 20, -INFINITY}, params, {});
    bench.after(Step::temperature);
    CHECK(bench.candidates[draw(bench.candidates, bench.random)].id == 1);
}

}  // namespace

int main() {
    test_llama_cpps_penalties();
    test_llama_cpps_dry();
    test_llama_cpps_queues();
    test_penalties_on_a_cut_list();
    test_dry_on_a_cut_list();
    test_what_penalties_may_not_leave();
    test_biases_on_a_part_of_the_vocabulary();
    test_orders();
    test_steps_that_are_off();
    test_masked_rows();
    test_histories();
    test_draws_that_overflow();
    return summary();
}
