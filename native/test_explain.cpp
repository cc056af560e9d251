// Explanations on cases small enough to check by hand, and the memory that they come from.
#include <cmath>
#include <string>
#include <vector>

#include "check.hpp"
#include "sampler.hpp"

using namespace llmrun;

namespace {

using Floats = std::vector<float>;
using Tokens = std::vector<int32_t>;
using Doubles = std::vector<double>;

bool near(const Doubles& actual, const Doubles& expected) {
    return std::equal(actual.begin(), actual.end(), expected.begin(), expected.end(),
                      [](double a, double b) { return std::fabs(a - b) < 1e-6; });
}

SamplerParams with_steps(const std::vector<Step>& order) {
    SamplerParams params;
    params.order = order;
    return params;
}

// Logits whose softmax is 0.1, 0.2, 0.3, 0.4.
const Floats tenths{std::log(0.1f), std::log(0.2f), std::log(0.3f), std::log(0.4f)};

Explanation explained(const SamplerParams& params, const Floats& logits, size_t count,
                      const Mask& mask = {}) {
    Sampler sampler(static_cast<int32_t>(logits.size()), params, {}, false, 1);
    const int32_t token = sampler.sample(logits.data(), mask);
    const Explanation explanation = sampler.explain(0, count);
    CHECK(explanation.chosen == token);
    return explanation;
}

Tokens remaining(const Explanation& explanation) {
    Tokens counts;
    for (const ExplainedStep& step : explanation.steps) {
        counts.push_back(static_cast<int32_t>(step.remaining));
    }
    return counts;
}

std::string names(const Explanation& explanation) {
    std::string text;
    for (const ExplainedStep& step : explanation.steps) {
        text += std::string(text.empty() ? "" : " ") + std::string(step.name);
    }
    return text;
}

void test_steps() {
    SamplerParams params;
    params.top_k = 3;
    params.top_p = 0.7f;
    params.temperature = 0.5f;
    const Explanation explanation = explained(params, tenths, 4);
    CHECK(names(explanation) == "model top_k top_p min_p temperature");
    CHECK(explanation.tokens == Tokens({3, 2, 1, 0}));
    CHECK(remaining(explanation) == Tokens({4, 3, 2, 2, 2}));
    CHECK(near(explanation.steps[0].probabilities, {0.4, 0.3, 0.2, 0.1}));
    CHECK(near(explanation.steps[1].probabilities, {4 / 9.0, 3 / 9.0, 2 / 9.0, 0}));
    CHECK(near(explanation.steps[2].probabilities, {4 / 7.0, 3 / 7.0, 0, 0}));
    CHECK(near(explanation.steps[4].probabilities, {16 / 25.0, 9 / 25.0, 0, 0}));
}

void test_nothing_but_the_draw() {
    const Explanation explanation = explained(with_steps({}), tenths, 4);
    CHECK(names(explanation) == "model");
    CHECK(near(explanation.steps[0].probabilities, {0.4, 0.3, 0.2, 0.1}));
}

void test_greedy() {
    SamplerParams params = with_steps({Step::temperature});
    params.temperature = 0.0f;
    const Explanation explanation = explained(params, tenths, 2);
    CHECK(names(explanation) == "model temperature");
    CHECK(explanation.tokens == Tokens({3, 2}));
    CHECK(remaining(explanation) == Tokens({4, 1}));
    CHECK(near(explanation.steps[1].probabilities, {1, 0}));
}

void test_which_tokens_are_shown() {
    SamplerParams params = with_steps({});
    params.logit_bias = {{0, 5.0f}};
    const Explanation explanation = explained(params, {1, 2, 2, 4}, 1);
    CHECK(names(explanation) == "model logit_bias");
    CHECK(explanation.chosen == 0);
    CHECK(explanation.tokens == Tokens({3, 0}));  // the model's likeliest, and the final one
    CHECK(explained(params, {1, 2, 2, 4}, 0).tokens == Tokens({0}));
    CHECK(explained(params, {1, 2, 2, 4}, 9).tokens == Tokens({3, 1, 2, 0}));
}

void test_mask() {
    SamplerParams params;
    params.top_k = 1;
    const std::vector<uint32_t> words{0b0011};
    Floats logits = tenths;
    logits[2] = NAN;  // not allowed, and so not looked at
    const Explanation explanation = explained(params, logits, 4, {words.data()});
    CHECK(names(explanation) == "model mask top_k top_p min_p temperature");
    CHECK(explanation.chosen == 1);
    CHECK(explanation.tokens == Tokens({3, 1, 0}));
    CHECK(near(explanation.steps[0].probabilities, {4 / 7.0, 2 / 7.0, 1 / 7.0}));
    CHECK(near(explanation.steps[1].probabilities, {0, 2 / 3.0, 1 / 3.0}));
    CHECK(remaining(explanation) == Tokens({3, 2, 1, 1, 1, 1}));
}

void test_top_choices_that_are_excluded() {
    SamplerParams params = with_steps({Step::xtc});
    params.xtc_probability = 1.0f;
    params.xtc_threshold = 0.25f;
    const Explanation explanation = explained(params, tenths, 4);
    CHECK(near(explanation.steps[1].probabilities, {0, 3 / 6.0, 2 / 6.0, 1 / 6.0}));
    CHECK(explanation.steps[1].remaining == 3);
}

void test_mirostat() {
    SamplerParams params;
    params.temperature = 1.0f;
    params.mirostat_tau = 0.7f;  // mu is 1.4 bits at first: what is likelier than 0.38
    for (params.mirostat = 1; params.mirostat <= 2; ++params.mirostat) {
        const Explanation explanation = explained(params, tenths, 4);
        CHECK(names(explanation) == "model mirostat");
        CHECK(explanation.chosen != 3 || explanation.steps[1].probabilities[0] > 0.4);
    }
    params.mirostat = 2;
    CHECK(near(explained(params, tenths, 4).steps[1].probabilities, {1, 0, 0, 0}));
    params.temperature = 0.5f;
    CHECK(names(explained(params, tenths, 4)) == "model temperature mirostat");
}

void test_penalties_of_then() {
    SamplerParams params = with_steps({Step::penalties, Step::dry});
    params.presence_penalty = 100.0f;
    params.dry_multiplier = 100.0f;
    params.repeat_last_n = 2;
    Sampler sampler(4, params, {}, false, 3);
    for (int i = 0; i < 3; ++i) {
        sampler.accept(sampler.sample(tenths.data()));
    }
    // Each call saw at most the two tokens before it.
    CHECK(near(sampler.explain(2, 4).steps.back().probabilities, {0.4, 0.3, 0.2, 0.1}));
    for (const size_t back : {0, 1}) {
        const Explanation explanation = sampler.explain(back, 4);
        CHECK(names(explanation) == "model penalties dry");
        for (size_t i = 0; i < explanation.tokens.size(); ++i) {
            bool recent = false;
            for (size_t earlier = back + 1; earlier < 3; ++earlier) {
                recent |= sampler.explain(earlier, 0).chosen == explanation.tokens[i];
            }
            CHECK((explanation.steps[1].probabilities[i] < 1e-9) == recent);
        }
    }
}

void test_infinite_logits() {
    SamplerParams params = with_steps({Step::temperature});
    params.temperature = 1e-38f;
    const Explanation explanation = explained(params, {10, 20, 0}, 3);
    CHECK(near(explanation.steps[1].probabilities, {0.5, 0.5, 0}));
}

void test_memory() {
    const auto remembers = [](const Sampler& sampler, size_t back) {
        try {
            sampler.explain(back, 1);
        } catch (const std::invalid_argument&) {
            return false;
        }
        return true;
    };
    Sampler sampler(4, SamplerParams{}, {}, false, 2);
    Tokens tokens;
    CHECK(!remembers(sampler, 0));
    for (int i = 0; i < 5; ++i) {
        tokens.push_back(sampler.sample(tenths.data()));
    }
    CHECK(sampler.explain(0, 1).chosen == tokens[4] && sampler.explain(1, 1).chosen == tokens[3]);
    CHECK(!remembers(sampler, 2));

    // What can't be sampled is not remembered.
    const Floats bad(4, -INFINITY);
    try {
        sampler.sample(bad.data());
    } catch (const BadLogits&) {
    }
    CHECK(sampler.explain(0, 1).chosen == tokens[4] && !remembers(sampler, 1));

    tokens.push_back(sampler.sample(tenths.data()));
    sampler.rewind(1, {});
    CHECK(sampler.explain(0, 1).chosen == tokens[4] && !remembers(sampler, 1));
    sampler.rewind(9, {});
    CHECK(!remembers(sampler, 0));
    Sampler forgetful(4, SamplerParams{});
    forgetful.sample(tenths.data());
    forgetful.rewind(1, {});
    CHECK(!remembers(forgetful, 0));
}

void test_rewind() {
    SamplerParams params;
    params.temperature = 0.0f;
    params.presence_penalty = 100.0f;
    params.repeat_last_n = 2;
    Sampler sampler(4, params);
    for (const int32_t token : {3, 2, 1}) {
        sampler.accept(token);
    }
    const Tokens tokens{0, 3, 3, 1};
    sampler.rewind(0, tokens);
    CHECK(sampler.sample(tenths.data()) == 2);  // 3 and 1 were the last two
    sampler.accept(2);
    CHECK(sampler.sample(tenths.data()) == 3);
    const Tokens unknown{0, 4};
    bool refused = false;
    try {
        sampler.rewind(0, unknown);
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    CHECK(refused);
    CHECK(sampler.sample(tenths.data()) == 3);  // and nothing had changed
}

}  // namespace

int main() {
    test_steps();
    test_nothing_but_the_draw();
    test_greedy();
    test_which_tokens_are_shown();
    test_mask();
    test_top_choices_that_are_excluded();
    test_mirostat();
    test_penalties_of_then();
    test_infinite_logits();
    test_memory();
    test_rewind();
    return summary();
}
