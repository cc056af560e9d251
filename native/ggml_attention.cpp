#include "ggml_attention.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>

namespace llmrun::ggml {
namespace {

constexpr int64_t line = 64;        // bytes of a cache line
constexpr int64_t most_rows = 192;  // of a task: keys and values are unpacked once for all, whose states stay in the cache
constexpr int64_t few_rows = 48;    // of a head, which are divided by their cells; else a task has at least as many
constexpr int64_t tasks_per_thread = 4;
constexpr int64_t rows_of_addition = 4;         // whose states a thread adds together
constexpr int64_t most_state_bytes = 64 << 20;  // of all chunks

std::atomic<uint64_t> n_computed{0};

int64_t rounded(int64_t bytes) { return (bytes + line - 1) / line * line; }

int64_t parts(int64_t count, int64_t size) { return (count + size - 1) / size; }

float parameter(const Tensor& operation, int index) {
    float value;
    std::memcpy(&value, operation.op_params + index, sizeof value);
    return value;
}

// An operation as problems: one for each head of keys and values, of each sequence.
class Problems {
public:
    Problems(const Tensor& operation, const AttentionKernels& kernels)
        : operation_(operation), queries_(*operation.src[0]), keys_(*operation.src[1]), mask_(operation.src[3]), sinks_(operation.src[4]),
          heads(queries_.ne[2] / keys_.ne[2]), rows(queries_.ne[1] * heads), count(keys_.ne[2] * queries_.ne[3]), chunks(parts(keys_.ne[1], cells_of_chunk)),
          depth(keys_.ne[0]), width(operation.src[2]->ne[0]), value_floats(kernels.value_floats(width)) {}

    Attention at(int64_t index, const float* slopes) const {
        const Tensor& values = *operation_.src[2];
        const int64_t head = index % keys_.ne[2], sequence = index / keys_.ne[2], copies = queries_.ne[3] / keys_.ne[3];
        const auto part = [&](const Tensor& tensor, int64_t i, int64_t j) {
            return static_cast<const char*>(tensor.data) + i * stride(tensor, 2) + j * stride(tensor, 3);
        };
        const Strided mask = mask_ ? Strided{part(*mask_, 0, sequence % mask_->ne[3]), stride(*mask_, 1)} : Strided{nullptr, 0};
        char* results = static_cast<char*>(operation_.data) + head * heads * stride(operation_, 1) + sequence * stride(operation_, 3);
        const float softcap = parameter(operation_, 2);
        return {heads, rows, keys_.ne[1], depth, width,
                {part(queries_, head * heads, sequence), stride(queries_, 1)}, stride(queries_, 2),
                {{part(keys_, head, sequence / copies), stride(keys_, 1)}, {part(values, head, sequence / copies), stride(values, 1)}},
                mask, results, stride(operation_, 2), stride(operation_, 1), parameter(operation_, 0), softcap,
                slopes + head * heads, sinks_ ? static_cast<const float*>(sinks_->data) + head * heads : nullptr};
    }

    // What ALiBi multiplies the mask by, for each head.
    void fill_slopes(float* slopes) const {
        const float bias = parameter(operation_, 1);
        const auto n_heads = static_cast<int64_t>(queries_.ne[2]);
        const auto power_of_two = static_cast<int64_t>(1) << static_cast<int>(std::floor(std::log2(static_cast<double>(n_heads))));
        const float base = std::pow(2.0f, -bias / static_cast<float>(power_of_two));
        const float later_base = std::pow(2.0f, -bias / 2 / static_cast<float>(power_of_two));
        for (int64_t head = 0; head < n_heads; ++head) {
            slopes[head] = bias <= 0              ? 1.0f
                           : head < power_of_two ? std::pow(base, static_cast<float>(head + 1))
                                                 : std::pow(later_base, static_cast<float>(2 * (head - power_of_two) + 1));
        }
    }

    int64_t slopes_bytes() const { return rounded(queries_.ne[2] * static_cast<int64_t>(sizeof(float))); }

private:
    static int64_t stride(const Tensor& tensor, int dimension) { return static_cast<int64_t>(tensor.nb[dimension]); }

    const Tensor& operation_;
    const Tensor &queries_, &keys_;
    const Tensor *mask_, *sinks_;

public:
    const int64_t heads, rows, count, chunks, depth, width, value_floats;
};

// States of rows, one behind the other.
struct States {
    char* memory;
    int64_t rows, value_floats;

    int64_t bytes() const { return 2 * rounded(rows * 4) + rounded(rows * value_floats * 4); }

    State at(int64_t index, int64_t row = 0) const {
        char* first = memory + index * bytes();
        float* values = reinterpret_cast<float*>(first + 2 * rounded(rows * 4)) + row * value_floats;
        return {reinterpret_cast<float*>(first) + row, reinterpret_cast<float*>(first + rounded(rows * 4)) + row, values};
    }
};

// How an operation is divided into tasks. The results don't depend on it.
struct Division {
    bool by_cells;  // each task is a chunk of cells, whose states are added afterwards; else it is some rows over all cells
    int64_t rows;   // of a task
    int64_t n_states;

    Division(const Problems& problems, const AttentionKernels& kernels, int n_threads) {
        const int64_t n_chunks = problems.count * problems.chunks;
        by_cells = problems.rows <= few_rows && n_chunks * States{nullptr, problems.rows, problems.value_floats}.bytes() <= most_state_bytes;
        if (by_cells) {
            rows = problems.rows;
            n_states = n_chunks;
        } else {
            const int64_t wanted = parts(tasks_per_thread * n_threads, problems.count);  // tasks of a head
            rows = std::clamp(parts(problems.rows, wanted), few_rows, most_rows);
            rows = parts(rows, kernels.rows) * kernels.rows;
            n_states = n_threads;
        }
    }
};

// Where the parts of the work memory are, which all threads share: a counter of tasks, slopes, a scratch for each thread, states.
struct Layout {
    int64_t slopes, scratches, scratch_bytes, states, bytes;

    Layout(const Problems& problems, const AttentionKernels& kernels, const Division& division, int n_threads)
        : slopes(line), scratches(slopes + problems.slopes_bytes()),
          scratch_bytes(rounded(static_cast<int64_t>(kernels.scratch_bytes(problems.depth, problems.width, division.rows)))),
          states(scratches + n_threads * scratch_bytes),
          bytes(states + division.n_states * States{nullptr, division.rows, problems.value_floats}.bytes()) {}
};

int64_t share(int64_t pieces, int64_t thread, int64_t n_threads) { return pieces * thread / n_threads; }

char* aligned(void* memory) { return static_cast<char*>(memory) + (line - reinterpret_cast<uintptr_t>(memory) % line) % line; }

}  // namespace

const AttentionKernel* FlashAttention::kernel_of(const Tensor& operation) const {
    if (operation.op != flash_attn_ext) {
        return nullptr;
    }
    const Tensor &queries = *operation.src[0], &keys = *operation.src[1], &values = *operation.src[2];
    const Tensor *mask = operation.src[3], *sinks = operation.src[4];
    const bool is_regular = queries.type == f32 && operation.type == f32 && queries.nb[0] == sizeof(float) && queries.nb[1] % sizeof(float) == 0 &&
                            queries.nb[2] % sizeof(float) == 0 && queries.nb[3] % sizeof(float) == 0 &&
                            keys.ne[2] == values.ne[2] && keys.ne[3] == values.ne[3] && queries.ne[2] % keys.ne[2] == 0 &&
                            queries.ne[3] % keys.ne[3] == 0 && (!mask || (mask->type == f16 && mask->ne[2] == 1 && mask->nb[0] == 2)) &&
                            (!sinks || sinks->type == f32);
    return is_regular ? kernels_.of(keys.type, values.type, keys.ne[0], values.ne[0]) : nullptr;
}

bool FlashAttention::work_size(int n_threads, const Tensor* operation, size_t& bytes) {
    if (!kernel_of(*operation)) {
        return false;
    }
    const Problems problems(*operation, kernels_);
    int64_t most = 0;  // it can be computed by fewer threads
    for (int n = 1; n <= n_threads; ++n) {
        most = std::max(most, Layout(problems, kernels_, Division(problems, kernels_, n), n).bytes);
    }
    bytes = static_cast<size_t>(line + most);
    return true;
}

bool FlashAttention::compute_forward(ComputeParams* params, Tensor* operation) {
    const AttentionKernel* kernel = kernel_of(*operation);
    if (!kernel) {
        return false;
    }
    const int thread = params->thread, n_threads = params->n_threads;
    const Problems problems(*operation, kernels_);
    const Division division(problems, kernels_, n_threads);
    const Layout layout(problems, kernels_, division, n_threads);
    char* memory = aligned(params->work);
    std::atomic<int64_t>& next = *reinterpret_cast<std::atomic<int64_t>*>(memory);
    float* slopes = reinterpret_cast<float*>(memory + layout.slopes);
    char* scratch = memory + layout.scratches + thread * layout.scratch_bytes;
    const States states{memory + layout.states, division.rows, problems.value_floats};
    if (thread == 0) {
        n_computed.fetch_add(1, std::memory_order_relaxed);
        new (&next) std::atomic<int64_t>(0);
        problems.fill_slopes(slopes);
    }
    functions_.barrier(params->threadpool);
    if (division.by_cells) {
        // In the order of the memory: all heads of a chunk are side by side.
        const int64_t n_tasks = problems.count * problems.chunks;
        for (int64_t task = share(n_tasks, thread, n_threads); task < share(n_tasks, thread + 1, n_threads); ++task) {
            const Attention attention = problems.at(task % problems.count, slopes);
            const int64_t begin = task / problems.count * cells_of_chunk;
            const int64_t next = std::min(task + 1, n_tasks - 1);
            kernel->attend(attention, 0, problems.rows, begin, std::min(begin + cells_of_chunk, attention.cells), states.at(task),
                           problems.at(next % problems.count, slopes).cache.from(next / problems.count * cells_of_chunk), scratch);
        }
        functions_.barrier(params->threadpool);
        const int64_t pieces = parts(problems.rows, rows_of_addition), n_sums = pieces * problems.count;
        for (int64_t piece = share(n_sums, thread, n_threads); piece < share(n_sums, thread + 1, n_threads); ++piece) {
            const int64_t problem = piece / pieces, row = piece % pieces * rows_of_addition;
            const int64_t last = std::min(row + rows_of_addition, problems.rows);
            const State sum = states.at(problem, row);
            for (int64_t chunk = 1; chunk < problems.chunks; ++chunk) {
                kernels_.add(problems.width, last - row, sum, states.at(chunk * problems.count + problem, row));
            }
            kernels_.finish(problems.at(problem, slopes), row, last, sum);
        }
        return true;
    }
    const State state = states.at(thread);
    const int64_t pieces = parts(problems.rows, division.rows), n_tasks = pieces * problems.count;
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < n_tasks;) {
        const Attention attention = problems.at(task % problems.count, slopes);
        const int64_t piece = pieces - 1 - task / problems.count;  // later positions have more cells
        const int64_t first = piece * division.rows, last = std::min(first + division.rows, problems.rows);
        kernel->attend(attention, first, last, 0, attention.cells, state, attention.cache, scratch);
        kernels_.finish(attention, first, last, state);
    }
    return true;
}

uint64_t FlashAttention::computed() { return n_computed.load(std::memory_order_relaxed); }

}  // namespace llmrun::ggml
