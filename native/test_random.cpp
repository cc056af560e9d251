// The sampler against itself done the exact way, on random cases: parameters, orders, logits, masks.
// Usage: test_random CASES [PART PARTS]: of that many cases those whose number leaves PART when divided by
// PARTS.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "check.hpp"
#include "random_case.hpp"
#include "sampler.hpp"

using namespace llmrun;

namespace {

struct Totals {
    int64_t tokens = 0;
    int64_t exactly = 0;  // of those that a shortlist might have found
};

// The token, or what was wrong with the logits.
int64_t outcome(Sampler& sampler, const Floats& logits, const Mask& mask = {}) {
    try {
        return sampler.sample(logits.data(), mask);
    } catch (const BadLogits& error) {
        return error.logit < 0 ? -1 : -2 - int64_t{error.token};
    }
}

// The row that a mask stands for.
Floats masked(Floats logits, const Mask& mask) {
    for (size_t token = 0; token < logits.size(); ++token) {
        if (mask.allowed != nullptr && !(mask.allowed[token / 32] >> token % 32 & 1)) {
            logits[token] = -INFINITY;
        }
    }
    for (const int32_t token : mask.banned) {
        logits[token] = -INFINITY;
    }
    return logits;
}

// In a long list equal ones may be exchanged; and what top-p leaves there without top-k is not sorted.
bool is_long(const SamplerParams& params, const Floats& logits) {
    const auto& order = params.order;
    const bool any_number = params.top_k == 0 || std::find(order.begin(), order.end(), Step::top_k) == order.end();
    return any_number && logits.size() > 1024;
}

bool may_differ(const SamplerParams& params, const Floats& logits, int64_t token, int64_t other) {
    if (token < 0 || other < 0) {
        return false;
    }
    if (params.top_p < 1.0f) {  // a sum in double ends a row of nearly equal ones elsewhere than one in float
        return is_long(params, logits) || std::fabs(logits[token] - logits[other]) < 1e-4f;
    }
    return is_long(params, logits) && logits[token] == logits[other];
}

void check_explanation(const Sampler& sampler, int64_t token) {
    const Explanation explanation = sampler.explain(0, 3);
    CHECK(explanation.chosen == token);
    const auto chosen = std::find(explanation.tokens.begin(), explanation.tokens.end(), explanation.chosen);
    CHECK(chosen != explanation.tokens.end());
    CHECK(explanation.steps.back().probabilities[chosen - explanation.tokens.begin()] > 0);
    size_t remaining = explanation.steps.front().remaining;
    for (const ExplainedStep& step : explanation.steps) {
        CHECK(step.probabilities.size() == explanation.tokens.size());
        CHECK(step.remaining > 0 && step.remaining <= remaining);
        remaining = step.remaining;
    }
}

void play(uint32_t seed, Totals& totals) {
    Draw draw(seed);
    const int size = draw.vocabulary_size();
    const SamplerParams params = draw.params(size);
    const bool remembers = draw.chance(10);
    Sampler fast(size, params, {}, false, remembers ? 2 : 0);
    Sampler exact(size, params, {}, true);
    const bool could_be_fast =
        params.mirostat == 0 && std::is_sorted(params.order.begin(), params.order.end());
    for (int i = 0; i < 3; ++i) {
        const Floats logits = draw.logits(size);
        const std::vector<uint32_t> words = draw.mask(size);
        const std::vector<int32_t> banned = draw.chance(20) ? draw.tokens(size, 3) : std::vector<int32_t>{};
        const Mask mask{draw.chance(30) ? words.data() : nullptr, banned};
        const int64_t token = outcome(fast, logits, mask);
        const int64_t expected = outcome(exact, masked(logits, mask));
        if (token != expected && !may_differ(params, logits, token, expected)) {
            std::printf("case %u.%d: token %lld in place of %lld\n", seed, i, static_cast<long long>(token),
                        static_cast<long long>(expected));
            ++failures;
            return;
        }
        const bool overflows = std::fabs(logits[0]) > 1e30f;  // when divided by the temperature
        // An explanation is made the exact way.
        if (remembers && token >= 0 && !overflows && !is_long(params, logits)) {
            check_explanation(fast, token);
        }
        if (draw.chance(5)) {
            const std::vector<int32_t> tokens = draw.tokens(size, 100);
            fast.rewind(1, tokens);
            exact.rewind(1, tokens);
        }
        const auto next = static_cast<int32_t>(expected >= 0 ? expected : draw.below(size));
        for (const int32_t accepted : {next, next / 2, next}) {
            fast.accept(accepted);
            exact.accept(accepted);
        }
        totals.tokens += could_be_fast ? 1 : 0;
    }
    if (seed % 16 == 0) {  // writing the states takes longer than the rest
        CHECK(fast.random_state() == exact.random_state());
    }
    totals.exactly += could_be_fast ? fast.exact_count() : 0;
}

}  // namespace

int main(int count, char** arguments) {
    const auto number = [&](int index, uint32_t otherwise) {
        return count > index ? static_cast<uint32_t>(std::strtoul(arguments[index], nullptr, 10)) : otherwise;
    };
    const uint32_t cases = number(1, 20000);
    Totals totals;
    for (uint32_t seed = number(2, 0); seed < cases; seed += number(3, 1)) {
        play(seed, totals);
    }
    std::printf("%lld tokens, %lld of them only the exact way\n", static_cast<long long>(totals.tokens),
                static_cast<long long>(totals.exactly));
    CHECK(cases < 1000 || totals.exactly < totals.tokens / 2);
    return summary();
}
