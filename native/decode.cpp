#include "decode.hpp"

#include <chrono>

namespace llmrun {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point before, Clock::time_point after) {
    return std::chrono::duration<double>(after - before).count();
}

}  // namespace

Run decode_run(const Decoder& decoder, void* context, const void* vocabulary, LlamaBatch& batch, Sampler& sampler,
               const RunLimits& limits) {
    Run run;
    run.steps.reserve(limits.steps);
    const Clock::time_point start = Clock::now();
    Clock::time_point before = start;
    for (;;) {
        run.decode_status = decoder.decode(context, batch);
        const float* logits = run.decode_status == 0 ? decoder.logits(context, 0) : nullptr;
        if (logits == nullptr) {
            return run;
        }
        const Clock::time_point decoded = Clock::now();
        Row row{&sampler, logits, {}};
        sample_rows({&row, 1});
        const Clock::time_point now = Clock::now();
        const double elapsed = seconds_between(start, now);
        run.steps.push_back({batch.token[0], row.token, seconds_between(before, decoded), elapsed});
        run.status = row.status;
        if (row.status != Status::chosen || decoder.is_end(vocabulary, row.token) ||
            run.steps.size() >= limits.steps || elapsed >= limits.seconds || limits.interrupted) {
            return run;
        }
        batch.token[0] = row.token;
        batch.pos[0] += 1;
        before = now;
    }
}

}  // namespace llmrun
