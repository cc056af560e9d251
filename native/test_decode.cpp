// A run of decode steps against the same steps one by one.
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

// A model whose logits depend on the token and its position.
struct Model {
    Floats row{};
    int fails_at = -1;       // number of the decode call
    bool is_damaged = false;
    int n_calls = 0;
    std::atomic<bool>* interrupts = nullptr;
    int milliseconds = 0;
    std::vector<std::pair<int32_t, int32_t>> fed{};  // token, position
};

Floats logits_after(int32_t token, int32_t position) {
    return Draw(static_cast<uint32_t>(token * 1000 + position)).logits(vocabulary);
}

int32_t decode(void* context, LlamaBatch batch) {
    Model& model = *static_cast<Model*>(context);
    if (model.n_calls++ == model.fails_at) {
        return 2;
    }
    model.fed.emplace_back(batch.token[0], batch.pos[0]);
    model.row = logits_after(batch.token[0], batch.pos[0]);
    for (float& logit : model.row) {
        logit = std::isfinite(logit) ? logit : 0.0f;
    }
    model.row[end] = -INFINITY;
    if (model.is_damaged && batch.pos[0] == 13) {
        model.row.assign(vocabulary, NAN);
    }
    if (model.interrupts != nullptr) {
        *model.interrupts = true;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(model.milliseconds));
    return 0;
}

float* logits(void* context, int32_t) { return static_cast<Model*>(context)->row.data(); }

bool never(const void*, int32_t) { return false; }
bool is_listed(const void* ends, int32_t token) { return *static_cast<const int32_t*>(ends) == token; }

const SamplerParams params = [] {
    SamplerParams made;
    made.seed = 5;
    return made;
}();

Run run_of(Model& model, Sampler& sampler, size_t steps, const std::atomic<bool>& interrupted, double seconds = 1e9,
           const int32_t* last = nullptr) {
    int32_t token = 3;
    int32_t position = 10;
    LlamaBatch batch{1, &token, nullptr, &position, nullptr, nullptr, nullptr};
    return decode_run({decode, logits, last != nullptr ? is_listed : never}, &model, last, batch, sampler,
                      {steps, seconds, interrupted});
}

const std::atomic<bool> quiet{false};

void test_a_run_is_its_steps() {
    Model model;
    Sampler sampler(vocabulary, params, {}, false, 0);
    const Run run = run_of(model, sampler, 20, quiet);
    CHECK(run.steps.size() == 20 && run.decode_status == 0 && run.status == Status::chosen);
    Model twin;
    Sampler other(vocabulary, params, {}, false, 0);
    int32_t token = 3;
    double before = 0;
    for (size_t i = 0; i < run.steps.size(); ++i) {
        int32_t position = static_cast<int32_t>(10 + i);
        CHECK(run.steps[i].fed == token);
        decode(&twin, {1, &token, nullptr, &position, nullptr, nullptr, nullptr});
        token = other.sample(twin.row.data(), {});
        other.accept(token);
        CHECK(run.steps[i].sampled == token);
        CHECK(run.steps[i].decode_seconds >= 0 && run.steps[i].seconds >= before + run.steps[i].decode_seconds);
        before = run.steps[i].seconds;
    }
    CHECK(model.fed == twin.fed && sampler.random_state() == other.random_state());
}

void test_what_ends_a_run() {
    Model model;
    Sampler sampler(vocabulary, params, {}, false, 0);
    const Run whole = run_of(model, sampler, 20, quiet);
    const int32_t last = whole.steps[4].sampled;
    const auto steps = [](Model model, size_t most, const std::atomic<bool>& interrupted, double seconds = 1e9,
                          const int32_t* token = nullptr) {
        Sampler fresh(vocabulary, params, {}, false, 0);
        return run_of(model, fresh, most, interrupted, seconds, token).steps.size();
    };
    CHECK(steps({}, 1, quiet) == 1);
    CHECK(steps({}, 20, quiet, 1e9, &last) <= 5);
    CHECK(steps({}, 20, quiet, 0.0) == 1);
    std::atomic<bool> interrupted{false};
    CHECK(steps({.interrupts = &interrupted}, 20, interrupted) == 1);
    CHECK(steps({.milliseconds = 2}, 1000, quiet, 0.02) <= 11);
}

void test_failures() {
    Model aborted{.fails_at = 3};
    Sampler sampler(vocabulary, params, {}, false, 0);
    const Run cut = run_of(aborted, sampler, 20, quiet);
    CHECK(cut.steps.size() == 3 && cut.decode_status == 2 && cut.status == Status::chosen);
    Model damaged{.is_damaged = true};
    Sampler other(vocabulary, params, {}, false, 0);
    const Run bad = run_of(damaged, other, 20, quiet);
    CHECK(bad.steps.size() == 4 && bad.decode_status == 0 && bad.status == Status::not_a_number);
}

}  // namespace

int main() {
    test_a_run_is_its_steps();
    test_what_ends_a_run();
    test_failures();
    return summary();
}
