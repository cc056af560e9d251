#include "decode.hpp"

#include <chrono>

namespace llmrun {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point before, Clock::time_point after) {
    return std::chrono::duration<double>(after - before).count();
}

void fill(LlamaBatch& batch, std::span<const RunRow> rows) {
    batch.n_tokens = static_cast<int32_t>(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
        batch.token[i] = rows[i].token;
        batch.pos[i] = rows[i].position;
        batch.seq_id[i][0] = rows[i].sequence;
        batch.logits[i] = 1;
    }
}

// Points each row at its logits; returns whether there are any.
bool find_logits(const Decoder& decoder, void* context, std::span<Row> rows) {
    for (size_t i = 0; i < rows.size(); ++i) {
        rows[i].logits = decoder.logits(context, static_cast<int32_t>(i));
        if (rows[i].logits == nullptr) {
            return false;
        }
    }
    return true;
}

// Plans the drafts of the next step; returns whether one may pay. Limits of the step are not known here.
bool plan_drafts(std::span<const RunRow> rows) {
    const auto n_rows = static_cast<int32_t>(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i].gate != nullptr) {
            auto [drafted, match] = rows[i].lookup->draft(rows[i].gate->n_compared());
            const StepShape step{n_rows, n_rows};
            if (rows[i].gate->plan(std::move(drafted), static_cast<int32_t>(match), step).length > 0) {
                return true;
            }
        }
    }
    return false;
}

// Teaches a row the sampled token.
void learn(const RunRow& row, const int32_t& token) {
    if (row.gate != nullptr) {
        row.lookup->extend({&token, 1});
        row.gate->compare({&token, 1});
    }
}

}  // namespace

Run decode_run(const Decoder& decoder, void* context, const void* vocabulary, LlamaBatch& batch,
               std::span<const RunRow> rows, const RunLimits& limits) {
    Run run;
    fill(batch, rows);
    std::vector<Row> sampling;
    for (const RunRow& row : rows) {
        sampling.push_back({row.sampler, nullptr, {}});
    }
    const Clock::time_point start = Clock::now();
    Clock::time_point before = start;
    double due = limits.seconds;
    bool is_submitted = false, is_last = false;
    while (is_submitted || !plan_drafts(rows)) {
        if (!is_submitted) {
            run.decode_status = decoder.decode(context, batch);
        }
        is_submitted = false;
        if (run.decode_status != 0 || !find_logits(decoder, context, sampling)) {
            return run;
        }
        const Clock::time_point decoded = Clock::now();
        sample_rows(sampling);
        const Clock::time_point now = Clock::now();
        const double elapsed = seconds_between(start, now);
        run.steps.push_back({seconds_between(before, decoded), elapsed});
        bool ends = ++run.n_steps >= limits.steps || limits.interrupted || is_last;
        for (size_t i = 0; i < rows.size(); ++i) {
            const int32_t token = sampling[i].token;
            run.sampled.push_back(token);
            if (sampling[i].status != Status::chosen) {
                run.failed.push_back(i);
            }
            ends = ends || sampling[i].status != Status::chosen || decoder.is_end(vocabulary, token);
            learn(rows[i], token);
            batch.token[i] = token;
            batch.pos[i] += 1;
        }
        if (ends || (elapsed >= due && !limits.take)) {
            return run;
        }
        before = now;
        if (elapsed >= due) {
            is_submitted = limits.overlaps && !plan_drafts(rows);
            if (is_submitted) {
                run.decode_status = decoder.decode(context, batch);
            }
            const double more = limits.take(run);
            run.steps.clear();
            run.sampled.clear();
            is_last = more < 0;
            if (is_last && !is_submitted) {
                return run;
            }
            const Clock::time_point taken = Clock::now();
            due = seconds_between(start, taken) + more;
            before = is_submitted ? before : taken;
        }
    }
    return run;
}

}  // namespace llmrun
