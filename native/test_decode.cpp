// A run of decode steps against the same steps one by one.
#include <array>
#include <chrono>
#include <thread>
#include <vector>

#include "check.hpp"
#include "decode.hpp"
#include "random_case.hpp"

using namespace llmrun;

namespace {

constexpr int32_t vocabulary = 50;
constexpr int32_t end = 7;

// A token, its position and its sequence.
using Fed = std::array<int32_t, 3>;

// A model whose logits depend on the token, its position and its sequence.
struct Model {
    std::vector<Floats> rows{};
    int fails_at = -1;      // number of the decode call
    int damaged_row = -1;   // from position 13 on
    int n_calls = 0;
    std::atomic<bool>* interrupts = nullptr;
    int milliseconds = 0;
    std::vector<Fed> fed{};
    int n_waits = 0;  // for logits of row 0
};

Floats logits_after(const Fed& fed) {
    Floats row = Draw(static_cast<uint32_t>(fed[0] * 1000 + fed[1] * 10 + fed[2])).logits(vocabulary);
    for (float& logit : row) {
        logit = std::isfinite(logit) ? logit : 0.0f;
    }
    row[end] = -INFINITY;
    return row;
}

int32_t decode(void* context, LlamaBatch batch) {
    Model& model = *static_cast<Model*>(context);
    if (model.n_calls++ == model.fails_at) {
        return 2;
    }
    model.rows.clear();
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        CHECK(batch.logits[i] == 1);
        model.fed.push_back({batch.token[i], batch.pos[i], batch.seq_id[i][0]});
        model.rows.push_back(logits_after(model.fed.back()));
        if (i == model.damaged_row && batch.pos[i] >= 13) {
            model.rows.back().assign(vocabulary, NAN);
        }
    }
    if (model.interrupts != nullptr) {
        *model.interrupts = true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(model.milliseconds));
    return 0;
}

float* logits(void* context, int32_t row) {
    Model& model = *static_cast<Model*>(context);
    model.n_waits += row == 0;
    return model.rows[row].data();
}

bool never(const void*, int32_t) { return false; }
bool is_listed(const void* ends, int32_t token) { return *static_cast<const int32_t*>(ends) == token; }

// Samplers of several sequences, each with a seed of its own.
std::vector<Sampler> samplers_of(size_t count) {
    std::vector<Sampler> samplers;
    for (size_t row = 0; row < count; ++row) {
        SamplerParams params;
        params.seed = 5 + static_cast<uint32_t>(row);
        samplers.emplace_back(vocabulary, params, std::vector<std::vector<int32_t>>{}, false, 0);
    }
    return samplers;
}

Fed first_of(size_t row) {
    const auto number = static_cast<int32_t>(row);
    return {3 + number, 10 + number, 2 * number};
}

Run run_of(Model& model, std::vector<Sampler>& samplers, size_t steps, const std::atomic<bool>& interrupted,
           double seconds = 1e9, const int32_t* last = nullptr, std::function<double(const Run&)> take = {},
           bool overlaps = false) {
    constexpr size_t most = 16;
    std::array<int32_t, most> tokens, positions, sequences, counts;
    std::array<int32_t*, most> ids;
    std::array<int8_t, most> outputs{};
    std::vector<RunRow> rows;
    for (size_t row = 0; row < samplers.size(); ++row) {
        const auto [token, position, sequence] = first_of(row);
        rows.push_back({&samplers[row], token, position, sequence});
        ids[row] = &sequences[row];
        counts[row] = 1;
    }
    LlamaBatch batch{0, tokens.data(), nullptr, positions.data(), counts.data(), ids.data(), outputs.data()};
    return decode_run({decode, logits, last != nullptr ? is_listed : never}, &model, last, batch, rows,
                      {steps, seconds, interrupted, std::move(take), overlaps});
}

const std::atomic<bool> quiet{false};

void test_a_run_is_its_steps(size_t n_rows) {
    Model model;
    std::vector<Sampler> samplers = samplers_of(n_rows);
    const Run run = run_of(model, samplers, 20, quiet);
    CHECK(run.steps.size() == 20 && run.sampled.size() == 20 * n_rows && run.decode_status == 0 && run.failed.empty());
    CHECK(model.fed.size() == 20 * n_rows);
    double before = 0;
    for (const RunStep& step : run.steps) {
        CHECK(step.decode_seconds >= 0 && step.seconds >= before + step.decode_seconds);
        before = step.seconds;
    }
    std::vector<Sampler> others = samplers_of(n_rows);
    for (size_t row = 0; row < n_rows; ++row) {
        Fed fed = first_of(row);
        for (size_t step = 0; step < 20; ++step) {
            const size_t at = step * n_rows + row;
            CHECK(model.fed[at] == fed);
            const int32_t token = others[row].sample(logits_after(fed).data(), {});
            others[row].accept(token);
            CHECK(run.sampled[at] == token);
            fed = {token, fed[1] + 1, fed[2]};
        }
        CHECK(samplers[row].random_state() == others[row].random_state());
    }
}

void test_what_ends_a_run() {
    Model model;
    std::vector<Sampler> samplers = samplers_of(3);
    const Run whole = run_of(model, samplers, 20, quiet);
    const auto steps = [](Model model, size_t most, const std::atomic<bool>& interrupted, double seconds = 1e9,
                          const int32_t* token = nullptr) {
        std::vector<Sampler> fresh = samplers_of(3);
        return run_of(model, fresh, most, interrupted, seconds, token).steps.size();
    };
    CHECK(steps({}, 1, quiet) == 1);
    for (size_t row = 0; row < 3; ++row) {
        CHECK(steps({}, 20, quiet, 1e9, &whole.sampled[4 * 3 + row]) <= 5);
    }
    CHECK(steps({}, 20, quiet, 0.0) == 1);
    std::atomic<bool> interrupted{false};
    CHECK(steps({.interrupts = &interrupted}, 20, interrupted) == 1);
    CHECK(steps({.milliseconds = 2}, 1000, quiet, 0.02) <= 11);
}

void test_steps_are_taken_when_they_are_due() {
    Model model;
    std::vector<Sampler> samplers = samplers_of(2);
    const Run whole = run_of(model, samplers, 10, quiet);
    std::vector<int32_t> taken;
    size_t n_taken = 0;
    const auto take = [&](const Run& run) {
        CHECK(run.steps.size() == 1 && run.failed.empty());
        taken.insert(taken.end(), run.sampled.begin(), run.sampled.end());
        return ++n_taken == 9 ? 1e9 : 0.0;
    };
    samplers = samplers_of(2);
    const Run last = run_of(model, samplers, 10, quiet, -1.0, nullptr, take);
    CHECK(n_taken == 9 && last.steps.size() == 1 && last.n_steps == 10);
    taken.insert(taken.end(), last.sampled.begin(), last.sampled.end());
    CHECK(taken == whole.sampled);
    samplers = samplers_of(2);
    CHECK(run_of(model, samplers, 10, quiet, 0.0, nullptr, [](const Run&) { return -1.0; }).steps.empty());
}

void test_steps_are_taken_while_the_next_one_is_computed() {
    Model model;
    std::vector<Sampler> samplers = samplers_of(2);
    const Run whole = run_of(model, samplers, 10, quiet);
    for (const int ends_at : {1, 4, 9, 100}) {
        Model device;
        samplers = samplers_of(2);
        std::vector<int32_t> taken;
        int n_taken = 0;
        const auto take = [&](const Run& run) {
            CHECK(run.steps.size() == 1);
            taken.insert(taken.end(), run.sampled.begin(), run.sampled.end());
            CHECK(device.n_calls == ++n_taken + 1 && device.n_waits == n_taken);
            return n_taken == ends_at ? -1.0 : 0.0;
        };
        const Run run = run_of(device, samplers, 10, quiet, -1.0, nullptr, take, true);
        CHECK(run.steps.size() == 1 && device.n_waits == device.n_calls);
        CHECK(device.n_calls == std::min(ends_at + 1, 10) && run.n_steps == static_cast<size_t>(device.n_calls));
        taken.insert(taken.end(), run.sampled.begin(), run.sampled.end());
        CHECK(std::equal(taken.begin(), taken.end(), whole.sampled.begin()) && taken.size() == 2 * run.n_steps);
    }
    Model fails{.fails_at = 3};
    samplers = samplers_of(2);
    int n_taken = 0;
    const auto count = [&](const Run&) { return ++n_taken, 0.0; };
    const Run cut = run_of(fails, samplers, 10, quiet, -1.0, nullptr, count, true);
    CHECK(n_taken == 3 && cut.decode_status == 2 && cut.n_steps == 3 && cut.steps.empty());
}

void test_failures() {
    Model aborted{.fails_at = 3};
    std::vector<Sampler> samplers = samplers_of(2);
    const Run cut = run_of(aborted, samplers, 20, quiet);
    CHECK(cut.steps.size() == 3 && cut.sampled.size() == 6 && cut.decode_status == 2 && cut.failed.empty());
    Model damaged{.damaged_row = 1};  // it begins at position 11
    samplers = samplers_of(2);
    const Run bad = run_of(damaged, samplers, 20, quiet);
    CHECK(bad.steps.size() == 3 && bad.decode_status == 0 && bad.failed == std::vector<size_t>{1});
    std::vector<Sampler> others = samplers_of(2);  // what the failed row leaves as it was
    Model healthy;
    run_of(healthy, others, 3, quiet);
    CHECK(samplers[0].random_state() == others[0].random_state());
}

}  // namespace

int main() {
    test_a_run_is_its_steps(1);
    test_a_run_is_its_steps(3);
    test_a_run_is_its_steps(12);  // with the pool
    test_what_ends_a_run();
    test_steps_are_taken_when_they_are_due();
    test_steps_are_taken_while_the_next_one_is_computed();
    test_failures();
    return summary();
}
