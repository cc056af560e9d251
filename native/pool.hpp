// A few parked threads that help with many small pieces of work.
//
// Owns the threads, and who does which piece. Must not know what is done.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace llmrun {

// Its threads never end, so it has to live as long as the process. In a forked child, which has none of them,
// the calling thread does everything.
class Pool {
  public:
    using Work = std::function<void(size_t)>;  // must not throw

    // helpers: how many threads there are beside the calling one; fewer where no more can be started.
    explicit Pool(unsigned helpers);

    // Calls work once with each number below `count`, on this thread and the helpers at the same time, and
    // returns when all is done. While another thread is in here this one does its work alone.
    void run(size_t count, const Work& work);

  private:
    [[noreturn]] void help();
    void take_pieces();

    std::atomic<bool> in_use_{false};
    std::atomic<int32_t> round_{0};  // the helpers sleep until it changes
    std::atomic<int64_t> left_{0};   // pieces that nobody has taken; below 0 for those who come too late
    std::atomic<int32_t> unfinished_{0};
    const Work* work_ = nullptr;  // read only by who has taken a piece, until that is finished
};

}  // namespace llmrun
