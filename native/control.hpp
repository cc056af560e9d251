// Steering and hearing llama.cpp from outside Python: C callbacks that its threads may call at any time.
//
// Owns the cancel flag, the log filter and the watch on the front's end of the pipe. Needs no GIL and must
// not know Python or llama.h; the signatures are those of ggml_abort_callback, llama_progress_callback,
// ggml_backend_sched_eval_callback and ggml_log_callback.
#pragma once

#include <atomic>
#include <cstdint>

namespace llmrun {

// Set from one thread, read by llama.cpp's. Must outlive every context or load that was given its address.
struct CancelFlag {
    std::atomic<bool> cancelled{false};
    std::atomic<float> progress{0.0f};  // of loading a model, 0 to 1
    std::atomic<uint64_t> n_computed{0};  // operations of graphs, counted where llama.cpp asks whether to abort
    std::atomic<int> layer{-1};  // of an encoder, that is being computed; -1: none is known
};

extern "C" {

// For llama_set_abort_callback; data is a CancelFlag*. True stops the computation. ggml calls it after each
// operation on a processor, from one thread.
bool llmrun_abort_callback(void* data);

// For mtmd_context_params.cb_eval; data is a CancelFlag*. Looks at it every few operations, since an encoder has no
// abort callback; false ends the computation, as if it were complete. Notes the layer, which ends a tensor's name.
bool llmrun_eval_callback(void* tensor, bool ask, void* data);

// For llama_model_params.progress_callback; data is a CancelFlag*. Notes the progress; false stops the load.
bool llmrun_progress_callback(float progress, void* data);

// For llama_log_set. Writes whole lines to standard error: warnings and errors, or all when `verbose` is
// not null.
void llmrun_log_callback(int level, const char* text, void* verbose);
}

// The nodes of the graph that llama.cpp has last reserved memory for, as its log tells; 0 before, or where it
// says it in other words. Some of them are views, which compute nothing.
int graph_nodes();

// Ends this process with _exit(0), from a thread of its own, as soon as the other end of fd (a pipe or
// socket) is closed; unread data does not delay it. fd itself may be closed without effect. On Windows it
// does nothing.
// Returns 0, or an errno when fd can't be watched.
int exit_when_closed(int fd);

}  // namespace llmrun
