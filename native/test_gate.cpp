// Draft lengths, and a run of decode steps that plans drafts. tests/engine/core/test_gate.py has what the gate decides.
#include <array>
#include <vector>

#include "check.hpp"
#include "decode.hpp"

using namespace llmrun;

namespace {

constexpr StepShape alone{1, 1};

// A step of 16 tokens costs less than twice as much as one of 1.
std::vector<StepCost> cheap() { return {{1, 1.0}, {4, 1.2}, {8, 1.4}, {16, 1.8}}; }

void test_what_came_true_is_drafted_more() {
    Gate gate(15, cheap(), {});
    const std::vector<int32_t> draft(15, 3);
    CHECK(gate.n_compared() == 15 && Gate(40, cheap(), {}).n_compared() == 40);
    CHECK(gate.plan({}, 0, alone).length == 0 && gate.plan(draft, 1, alone).length == 0);
    for (int i = 0; i < 20; ++i) {
        gate.plan(draft, 1, alone);
        gate.compare({});  // nothing came yet
        gate.compare(draft);
    }
    CHECK(gate.plan(draft, 1, alone).length == 15 && gate.plan(draft, 1, alone, 5).length == 3);
    CHECK(gate.plan(draft, 1, alone, 0).length == 0);
    gate.forget();
    const double expected = gate.expected(1, 15);
    gate.compare(draft);
    CHECK(gate.expected(1, 15) == expected);
}

void test_failures_end_the_drafts() {
    Gate gate(15, cheap(), {});
    for (int i = 0; i < 50; ++i) {
        gate.learn(1, 30, false);
    }
    const std::vector<int32_t> draft(15, 3), other{4};
    int n_failed = 0;
    while (gate.plan(draft, 20, alone).length > 0) {
        gate.compare(other);
        CHECK(++n_failed < 30);
    }
    CHECK(gate.credit(20, alone) < 0.5 && Gate(15, cheap(), {}).credit(1, alone) == 1.0);
}

void test_draft_models() {
    const std::vector<StepCost> fast{{1, 0.01}, {4, 0.01}};
    Gate gate(15, cheap(), fast);
    CHECK(gate.choose(Gate::model, 15, alone).length > 0 && Gate(15, cheap(), {}).choose(Gate::model, 15, alone).length == 0);
    CHECK(gate.is_worth_prefill(1, alone));
    CHECK(Gate(15, cheap(), {}, true).is_worth_prefill(1000, alone) && !Gate(15, cheap(), {}).is_worth_prefill(1, alone));
    CHECK(gate.draft_cost(alone, 3) > 0.02 && Gate(15, cheap(), {}).draft_cost(alone, 3) == 0.0);
    const std::vector<int32_t> drafted{1, 2, 3};
    gate.plan({9, 9}, 1, alone);
    gate.add_model_draft(drafted);
    gate.learn_sureness(true);
    gate.set_length(3, 0.03);
    const double before = gate.expected(Gate::model, 3);
    gate.compare(drafted);
    CHECK(gate.expected(Gate::model, 3) > before);
}

void test_what_drafts_gain() {
    Gate gate(15, cheap(), {}, true);
    CHECK(gate.speedup() == 1.0 && gate.plan({1, 2, 3}, 1, alone).length == 3);
    CHECK(gate.planned_cost() > 0.19 && gate.planned_cost() < 0.21);
    gate.compare(std::vector<int32_t>{1, 2, 3, 4});
    CHECK(gate.speedup() > 4 / 1.21 && gate.speedup() < 4 / 1.19);
    gate.set_costs({{1, 1.0}, {4, 5.0}}, {});
    gate.plan({1, 2, 3}, 1, alone);
    CHECK(gate.planned_cost() == 4.0);
    gate.compare(std::vector<int32_t>{4});
    CHECK(gate.speedup() < 5 / 6.1);
}

// A model that repeats the tokens 0 to 4.
constexpr int32_t vocabulary = 5;

struct Model {
    std::array<float, vocabulary> row;
    int n_calls = 0;
};

int32_t decode(void* context, LlamaBatch batch) {
    Model& model = *static_cast<Model*>(context);
    ++model.n_calls;
    model.row.fill(0.0f);
    model.row[(batch.token[0] + 1) % vocabulary] = 50.0f;
    return 0;
}

void test_a_run_ends_before_a_step_with_a_draft() {
    Model model;
    Sampler sampler(vocabulary, SamplerParams{}, {}, false, 0);
    SuffixAutomaton lookup;
    Gate gate(4, cheap(), {}, true);
    int32_t token = 0, position = 0, sequence = 0, count = 1;
    int32_t* ids = &sequence;
    int8_t output = 0;
    LlamaBatch batch{0, &token, nullptr, &position, &count, &ids, &output};
    const Decoder decoder{decode, [](void* context, int32_t) { return static_cast<Model*>(context)->row.data(); },
                          [](const void*, int32_t) { return false; }};
    const std::atomic<bool> quiet{false};
    const RunLimits limits{100, 1e9, quiet, {}};
    lookup.extend(std::array{0});
    const std::array first{RunRow{&sampler, 0, 0, 0, &lookup, &gate}};
    const Run run = decode_run(decoder, &model, nullptr, batch, first, limits);
    CHECK(run.n_steps == 5 && model.n_calls == 5 && lookup.size() == 6 && run.decode_status == 0);
    const std::array next{RunRow{&sampler, run.sampled.back(), 5, 0, &lookup, &gate}};
    CHECK(decode_run(decoder, &model, nullptr, batch, next, limits).n_steps == 0 && model.n_calls == 5);
    CHECK(lookup.draft(2).first == (std::vector<int32_t>{1, 2}));
}

}  // namespace

int main() {
    test_what_came_true_is_drafted_more();
    test_failures_end_the_drafts();
    test_draft_models();
    test_what_drafts_gain();
    test_a_run_ends_before_a_step_with_a_draft();
    return summary();
}
