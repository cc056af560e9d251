// Rows in one call against rows one after the other, and the threads that share the work.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sys/resource.h>
#endif

#include "check.hpp"
#include "pool.hpp"
#include "random_case.hpp"
#include "rows.hpp"

using namespace llmrun;

// A call of operator new that asks for this many bytes fails.
static std::atomic<size_t> refused_bytes{0};

void* operator new(size_t size) {
    if (size == refused_bytes) {
        throw std::bad_alloc();
    }
    if (void* memory = std::malloc(size)) {
        return memory;
    }
    throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

// Pools live as long as the process.
std::vector<Pool*>& pools = *new std::vector<Pool*>;
Pool& new_pool(unsigned helpers) { return *pools.emplace_back(new Pool(helpers)); }

void check_rounds(Pool& pool, int rounds) {
    for (int round = 0; round < rounds; ++round) {
        const size_t count = static_cast<size_t>(round % 70);
        std::vector<int> done(count);  // not atomic: nobody else may touch a piece, nor be there afterwards
        pool.run(count, [&](size_t piece) { ++done[piece]; });
        CHECK(std::all_of(done.begin(), done.end(), [](int times) { return times == 1; }));
    }
}

void test_each_piece_is_done_once() {
    for (const unsigned helpers : {0u, 1u, 3u}) {
        check_rounds(new_pool(helpers), 5000);
    }
}

void test_several_threads_may_have_work() {
    Pool& pool = new_pool(2);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) {
        threads.emplace_back([&] { check_rounds(pool, 3000); });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
}

// Everybody works: the pieces wait for each other.
void test_the_helpers_help() {
    std::atomic<int> there{0};
    new_pool(2).run(3, [&](size_t) {
        ++there;
        while (there < 3) {
            std::this_thread::yield();
        }
    });
    CHECK(there == 3);
}

void test_where_no_thread_can_be_started_one_does_all() {
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    rlimit before{};
    getrlimit(RLIMIT_AS, &before);
    const rlimit none{1, before.rlim_max};  // no room for another stack
    setrlimit(RLIMIT_AS, &none);
    Pool& pool = new_pool(1);
    setrlimit(RLIMIT_AS, &before);
    check_rounds(pool, 70);
#endif
}

// ---- rows ----

struct Case {
    explicit Case(uint32_t seed) : draw(seed), size(draw.vocabulary_size()), sampler(size, draw.params(size)) {}

    Row next() {
        logits = draw.logits(size);
        words = draw.mask(size);
        banned = draw.chance(20) ? draw.tokens(size, 3) : std::vector<int32_t>{};
        return {&sampler, logits.data(), {draw.chance(30) ? words.data() : nullptr, banned}};
    }

    Draw draw;
    int size;
    Sampler sampler;
    Floats logits;
    std::vector<uint32_t> words;
    std::vector<int32_t> banned;
};

void test_many_rows_are_each_one_alone() {
    for (const uint32_t count : {1u, 7u, 8u, 33u}) {
        std::vector<std::unique_ptr<Case>> together;
        std::vector<std::unique_ptr<Case>> alone;
        for (uint32_t seed = 0; seed < count; ++seed) {
            together.push_back(std::make_unique<Case>(100 * count + seed));
            alone.push_back(std::make_unique<Case>(100 * count + seed));
        }
        for (int step = 0; step < 20; ++step) {
            std::vector<Row> rows;
            for (const auto& each : together) {
                rows.push_back(each->next());
            }
            sample_rows(rows);
            for (uint32_t i = 0; i < count; ++i) {
                Row row = alone[i]->next();
                sample_rows({&row, 1});
                CHECK(rows[i].token == row.token && rows[i].status == row.status);
            }
        }
        for (uint32_t i = 0; i < count; ++i) {
            CHECK(together[i]->sampler.random_state() == alone[i]->sampler.random_state());
        }
    }
}

void test_the_token_is_accepted() {
    SamplerParams params;
    params.temperature = 0.0f;
    params.presence_penalty = 10.0f;
    Sampler sampler(3, params);
    const Floats logits{3, 2, 1};
    for (const int32_t expected : {0, 1, 2}) {
        Row row{&sampler, logits.data(), {}};
        sample_rows({&row, 1});
        CHECK(row.token == expected && row.status == Status::chosen);
    }
}

void test_what_is_wrong() {
    const auto outcome = [](const Floats& logits) {
        Sampler sampler(static_cast<int32_t>(logits.size()), {});
        Row row{&sampler, logits.data(), {}};
        sample_rows({&row, 1});
        return std::pair(row.token, row.status);
    };
    CHECK(outcome({0, NAN, NAN}) == std::pair(1, Status::not_a_number));
    CHECK(outcome({0, 0, INFINITY}) == std::pair(2, Status::infinite));
    CHECK(outcome({-INFINITY, -INFINITY}) == std::pair(0, Status::impossible));
}

void test_no_memory_for_one_row() {
    constexpr int size = 4321;
    SamplerParams reversed;
    std::reverse(reversed.order.begin(), reversed.order.end());  // done on a list of the whole vocabulary
    Floats logits(size);
    std::iota(logits.begin(), logits.end(), 0.0f);  // all different: the others need no such list
    std::vector<Sampler> samplers(10, Sampler(size, SamplerParams{}));
    samplers[4] = Sampler(size, reversed);
    std::vector<Row> rows;
    for (Sampler& sampler : samplers) {
        rows.push_back({&sampler, logits.data(), {}});
    }
    refused_bytes = size * sizeof(Candidate);
    sample_rows(rows);
    refused_bytes = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
        CHECK(rows[i].status == (i == 4 ? Status::no_memory : Status::chosen));
    }
    sample_rows({&rows[4], 1});
    CHECK(rows[4].status == Status::chosen);
}

}  // namespace

int main() {
    test_each_piece_is_done_once();
    test_several_threads_may_have_work();
    test_the_helpers_help();
    test_where_no_thread_can_be_started_one_does_all();
    test_many_rows_are_each_one_alone();
    test_the_token_is_accepted();
    test_what_is_wrong();
    test_no_memory_for_one_row();
    return summary();
}
