#include "pool.hpp"

#include "background.hpp"

namespace llmrun {

Pool::Pool(unsigned helpers) {
    while (helpers > 0 && start_in_background([this] { help(); }) == 0) {
        --helpers;
    }
}

void Pool::run(size_t count, const Work& work) {
    if (in_use_.exchange(true, std::memory_order_acquire)) {
        for (size_t piece = 0; piece < count; ++piece) {
            work(piece);
        }
        return;
    }
    work_ = &work;
    unfinished_.store(static_cast<int32_t>(count), std::memory_order_relaxed);
    // From here on a helper that is late from the round before may take pieces too.
    left_.store(static_cast<int64_t>(count), std::memory_order_release);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    take_pieces();
    while (const int32_t unfinished = unfinished_.load(std::memory_order_acquire)) {
        unfinished_.wait(unfinished, std::memory_order_acquire);
    }
    in_use_.store(false, std::memory_order_release);
}

void Pool::help() {
    for (;;) {
        const int32_t round = round_.load(std::memory_order_acquire);
        take_pieces();
        round_.wait(round, std::memory_order_acquire);
    }
}

void Pool::take_pieces() {
    for (int64_t left; (left = left_.fetch_sub(1, std::memory_order_acq_rel)) > 0;) {
        (*work_)(static_cast<size_t>(left - 1));
        if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            unfinished_.notify_one();
        }
    }
}

}  // namespace llmrun
