#include "rows.hpp"

#include <algorithm>
#include <cmath>
#include <new>
#include <thread>

#include "pool.hpp"

namespace llmrun {
namespace {

// Waking a thread takes as long as sampling a few rows.
constexpr size_t rows_worth_waking = 8;
constexpr unsigned most_threads = 4;

// Never destroyed: its threads may outlive everything else.
Pool& shared_pool() {
    static Pool& pool = *new Pool(std::clamp(std::thread::hardware_concurrency(), 1u, most_threads) - 1);
    return pool;
}

Status status_of(const BadLogits& error) {
    if (std::isnan(error.logit)) {
        return Status::not_a_number;
    }
    return error.logit > 0 ? Status::infinite : Status::impossible;
}

void sample(Row& row) {
    try {
        row.token = row.sampler->sample(row.logits, row.mask);
        row.sampler->accept(row.token);
        row.status = Status::chosen;
    } catch (const BadLogits& error) {
        row.token = error.token;
        row.status = status_of(error);
    } catch (const std::bad_alloc&) {
        row.status = Status::no_memory;
    }
}

}  // namespace

void sample_rows(std::span<Row> rows) {
    if (rows.size() >= rows_worth_waking) {
        shared_pool().run(rows.size(), [&](size_t row) { sample(rows[row]); });
        return;
    }
    for (Row& row : rows) {
        sample(row);
    }
}

}  // namespace llmrun
