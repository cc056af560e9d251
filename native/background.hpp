// Threads beside Python's, which end with the process.
//
// Owns how one is started. Must not know what it does.
#pragma once

#include <system_error>
#include <thread>
#include <utility>

#ifndef _WIN32
#include <pthread.h>

#include <csignal>
#endif

namespace llmrun {

// Starts a thread that nobody waits for, and that receives none of the signals meant for Python's threads.
// Returns 0, or an errno when there can't be another thread.
template <typename Work>
int start_in_background(Work work) {
#ifndef _WIN32
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    int problem = 0;
    try {
        std::thread(std::move(work)).detach();
    } catch (const std::system_error& error) {
        problem = error.code().value();
    }
#ifndef _WIN32
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
    return problem;
}

}  // namespace llmrun
