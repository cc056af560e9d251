#include "control.hpp"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "background.hpp"
#include "ggml_kernels.hpp"

#ifdef _WIN32
#include <io.h>
#else
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>
#endif

namespace llmrun {
namespace {

// ggml.h's ggml_log_level.
constexpr int level_debug = 1;
constexpr int level_warn = 3;
constexpr int level_error = 4;
constexpr int level_continue = 5;

constexpr const char* nodes_label = ": nodes = ";  // in the line of llama_context::sched_reserve()

constexpr int standard_error = 2;
constexpr size_t longest_line = 64 * 1024;

void write_fully(const std::string& text) {
    size_t written = 0;
    while (written < text.size()) {
        const char* rest = text.data() + written;
        const size_t length = text.size() - written;
#ifdef _WIN32
        const auto count = _write(standard_error, rest, static_cast<unsigned>(length));
#else
        const auto count = ::write(standard_error, rest, length);
#endif
        if (count <= 0) {
            if (count < 0 && errno == EINTR) {
                continue;
            }
            return;  // nobody to tell
        }
        written += static_cast<size_t>(count);
    }
}

// llama.cpp may log a line in pieces, the later ones at "continue" level, from several threads.
class LineFilter {
  public:
    void add(int level, const char* text, bool verbose) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (level != level_continue) {
            end_line();
            // At debug level llama.cpp names every tensor, some thousand lines a model.
            shown_ = (verbose && level != level_debug) || level == level_warn || level == level_error;
        }
        if (!shown_) {
            return;
        }
        pending_ += text;
        const size_t line_end = pending_.rfind('\n');
        if (line_end != std::string::npos) {
            write_fully(pending_.substr(0, line_end + 1));
            pending_.erase(0, line_end + 1);
        } else if (pending_.size() > longest_line) {
            end_line();
        }
    }

  private:
    void end_line() {
        if (!pending_.empty()) {
            write_fully(pending_ + '\n');
            pending_.clear();
        }
    }

    std::mutex mutex_;
    std::string pending_;
    bool shown_ = false;
};

// Never destroyed: llama.cpp's threads may log while the process ends.
LineFilter& line_filter() {
    static auto* filter = new LineFilter;
    return *filter;
}

std::atomic<int> n_graph_nodes{0};

// Returns 7 for "ffn_out-7", -1 for a name without a layer.
int layer_of(const char* name) {
    const char* dash = std::strrchr(name, '-');
    return dash != nullptr && dash[1] >= '0' && dash[1] <= '9' ? std::atoi(dash + 1) : -1;
}

#ifndef _WIN32
[[noreturn]] void exit_on_hang_up(int fd) {
#ifdef POLLRDHUP
    constexpr short hang_up = POLLRDHUP;
#else
    constexpr short hang_up = 0;  // POLLHUP and POLLERR are always reported
#endif
    pollfd watched{fd, hang_up, 0};
    while (::poll(&watched, 1, -1) <= 0) {
    }
    ::_exit(0);
}
#endif

}  // namespace

extern "C" {

bool llmrun_abort_callback(void* data) {
    auto* flag = static_cast<CancelFlag*>(data);
    // One thread computes with a flag at a time, so that no locked addition is needed.
    flag->n_computed.store(flag->n_computed.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    return flag->cancelled.load(std::memory_order_relaxed);
}

bool llmrun_eval_callback(void* tensor, bool ask, void* data) {
    constexpr unsigned operations = 16;
    thread_local unsigned count = 0;
    auto* flag = static_cast<CancelFlag*>(data);
    if (!ask) {
        return !flag->cancelled.load();
    }
    if (const int layer = layer_of(static_cast<const ggml::Tensor*>(tensor)->name); layer >= 0) {
        flag->layer.store(layer, std::memory_order_relaxed);
    }
    return ++count % operations == 0;
}

bool llmrun_progress_callback(float progress, void* data) {
    auto* flag = static_cast<CancelFlag*>(data);
    flag->progress.store(progress, std::memory_order_relaxed);
    return !flag->cancelled.load(std::memory_order_relaxed);
}

void llmrun_log_callback(int level, const char* text, void* verbose) {
    if (text != nullptr) {
        if (const char* nodes = std::strstr(text, nodes_label); nodes != nullptr) {
            n_graph_nodes.store(std::atoi(nodes + std::strlen(nodes_label)), std::memory_order_relaxed);
        }
        line_filter().add(level, text, verbose != nullptr);
    }
}
}

int graph_nodes() {
    return n_graph_nodes.load(std::memory_order_relaxed);
}

int exit_when_closed(int fd) {
#ifdef _WIN32
    (void)fd;
    return 0;
#else
    const int watched = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);  // ours alone, whatever happens to fd
    if (watched < 0) {
        return errno;
    }
    const int problem = start_in_background([watched] { exit_on_hang_up(watched); });
    if (problem != 0) {
        ::close(watched);
    }
    return problem;
#endif
}

}  // namespace llmrun
