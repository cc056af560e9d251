#include "ggml_kernels.hpp"

#include <algorithm>
#include <atomic>
#include <new>

#include "ggml_attention.hpp"

namespace llmrun::ggml {
namespace {

constexpr size_t line = 64;  // bytes of a cache line
constexpr int64_t tasks_per_thread = 4, most_panels = 16;

std::atomic<bool> enabled{true};
std::atomic<uint64_t> n_computed{0};

size_t rounded(size_t bytes) { return (bytes + line - 1) / line * line; }

// The work memory of a product, which all threads share: a counter, what `layout` wants, and a scratch for each thread.
class Work {
public:
    Work(void* memory, size_t middle, size_t scratch) : memory_(static_cast<char*>(memory)), middle_(middle), scratch_(scratch) {
        memory_ += (line - reinterpret_cast<uintptr_t>(memory_) % line) % line;
    }

    static size_t bytes(int n_threads, size_t middle, size_t scratch) {
        return line + line + rounded(middle) + static_cast<size_t>(n_threads) * rounded(scratch);
    }

    std::atomic<int64_t>& next() { return *reinterpret_cast<std::atomic<int64_t>*>(memory_); }
    char* middle() { return memory_ + line; }
    char* scratch(int thread) { return memory_ + line + rounded(middle_) + static_cast<size_t>(thread) * rounded(scratch_); }

private:
    char* memory_;
    size_t middle_, scratch_;
};

// Rows that a thread computes at a time: many, since each task begins without what it reads being on its way, but not so many that
// a thread without a core lets the others wait.
int64_t rows_of_task(const MatmulKernels& kernels, int64_t rows, int64_t n_matrices, int n_threads) {
    const int64_t share = rows * n_matrices / (tasks_per_thread * n_threads);
    return std::clamp((share + kernels.rows - 1) / kernels.rows, int64_t{1}, most_panels) * kernels.rows;
}

// Where the activations of MUL_MAT_ID's experts are: for each column, in the order of the experts, its first float, and its
// result's.
struct Routes {
    int64_t* begin;  // [experts + 1]
    int64_t* sources;
    int64_t* results;

    static size_t bytes(int64_t n_experts, int64_t n_columns) {
        return static_cast<size_t>(n_experts + 1 + 2 * n_columns) * sizeof(int64_t);
    }

    Routes(char* memory, int64_t n_experts, int64_t n_columns)
        : begin(reinterpret_cast<int64_t*>(memory)), sources(begin + n_experts + 1), results(sources + n_columns) {}

    void fill(const Tensor& operation) {
        const Tensor &activations = *operation.src[1], &ids = *operation.src[2];
        const int64_t n_experts = operation.src[0]->ne[2];
        std::fill_n(begin, n_experts + 1, int64_t{0});
        const auto each = [&](const auto& take) {
            for (int64_t token = 0; token < ids.ne[1]; ++token) {
                for (int64_t slot = 0; slot < ids.ne[0]; ++slot) {
                    const char* id = static_cast<const char*>(ids.data) + token * ids.nb[1] + slot * ids.nb[0];
                    const int32_t expert = *reinterpret_cast<const int32_t*>(id);
                    if (expert >= 0 && expert < n_experts) {
                        take(expert, token, slot);
                    }
                }
            }
        };
        each([&](int32_t expert, int64_t, int64_t) { ++begin[expert + 1]; });
        for (int64_t expert = 0; expert < n_experts; ++expert) {
            begin[expert + 1] += begin[expert];
        }
        each([&](int32_t expert, int64_t token, int64_t slot) {
            const int64_t place = begin[expert]++;  // which becomes the next expert's
            sources[place] = static_cast<int64_t>(slot % activations.ne[1] * activations.nb[1] + token * activations.nb[2]) / 4;
            results[place] = static_cast<int64_t>(slot * operation.nb[1] + token * operation.nb[2]) / 4;
        });
        std::copy_backward(begin, begin + n_experts, begin + n_experts + 1);
        begin[0] = 0;
    }
};

class Products final : public TensorTraits {
public:
    Products(const Functions& functions, const MatmulKernels& kernels) : functions_(functions), kernels_(kernels) {}

    // Whether the weights of an operation are better left as they are in the file.
    bool are_fit(const Tensor& operation) const {
        const MatmulKernel* kernel = operation.op == mul_mat || operation.op == mul_mat_id ? kernels_.of(operation.src[0]->type) : nullptr;
        return kernel && operation.src[0]->ne[0] % kernel->block == 0 && !has_own_products(kernel->type);
    }

    // The kernel for an operation; null if ggml has to compute it.
    const MatmulKernel* kernel_of(const Tensor& operation) const {
        if (!are_fit(operation)) {
            return nullptr;
        }
        const Tensor& weights = *operation.src[0];
        void* buffer = weights.view_src ? weights.view_src->buffer : weights.buffer;
        if (operation.op_params[1] != 0 || !is_of_floats(*operation.src[1]) || !is_of_floats(operation) || !buffer || weights.extra) {
            return nullptr;  // weights with something extra have been repacked
        }
        const MatmulKernel* kernel = kernels_.of(weights.type);
        if (weights.view_src && kernel->block_bytes == 2 * kernel->block) {
            return nullptr;  // part of a KV cache, which has whole rows only when it is full
        }
        const bool has_whole_rows = static_cast<int64_t>(weights.nb[1]) == weights.ne[0] / kernel->block * kernel->block_bytes;
        return has_whole_rows && functions_.is_host(buffer) ? kernel : nullptr;
    }

    bool work_size(int n_threads, const Tensor* operation, size_t& bytes) override {
        if (!kernel_of(*operation)) {
            return false;
        }
        bytes = Work::bytes(n_threads, middle_bytes(*operation), scratch_bytes(*operation));
        return true;
    }

    bool compute_forward(ComputeParams* params, Tensor* operation) override {
        if (!kernel_of(*operation)) {
            return false;
        }
        if (params->thread == 0) {
            n_computed.fetch_add(1, std::memory_order_relaxed);
        }
        if (operation->op == mul_mat) {
            multiply(*params, *operation);
        } else {
            multiply_experts(*params, *operation);
        }
        return true;
    }

private:
    static bool is_of_floats(const Tensor& tensor) {
        return tensor.type == f32 && tensor.nb[0] == sizeof(float) && tensor.nb[1] % sizeof(float) == 0 &&
               tensor.nb[2] % sizeof(float) == 0 && tensor.nb[3] % sizeof(float) == 0;
    }

    size_t middle_bytes(const Tensor& operation) const {
        const Tensor &weights = *operation.src[0], &activations = *operation.src[1];
        const MatmulKernel& kernel = *kernel_of(operation);
        if (operation.op == mul_mat) {
            return static_cast<size_t>(kernel.packed_bytes(weights.ne[0], activations.ne[1] * activations.ne[2] * activations.ne[3]));
        }
        const int64_t columns = operation.ne[1] * operation.ne[2];
        return rounded(Routes::bytes(weights.ne[2], columns)) + static_cast<size_t>(columns * kernel.packed_bytes(weights.ne[0], 1));
    }

    size_t scratch_bytes(const Tensor& operation) const {
        const int64_t columns = operation.op == mul_mat ? operation.ne[1] : operation.ne[1] * operation.ne[2];
        return static_cast<size_t>(kernel_of(operation)->scratch_bytes(operation.src[0]->ne[0], columns));
    }

    static Columns columns_of(const Tensor& tensor, int64_t matrix) {
        char* data = static_cast<char*>(tensor.data);
        data += matrix % tensor.ne[2] * static_cast<int64_t>(tensor.nb[2]) + matrix / tensor.ne[2] * static_cast<int64_t>(tensor.nb[3]);
        return {reinterpret_cast<float*>(data), static_cast<int64_t>(tensor.nb[1] / sizeof(float)), nullptr};
    }

    // A thread's part of a number of equal pieces of work.
    static int64_t share(int64_t pieces, int64_t thread, int64_t n_threads) { return pieces * thread / n_threads; }

    void multiply(const ComputeParams& params, const Tensor& operation) const {
        const Tensor &weights = *operation.src[0], &activations = *operation.src[1];
        const MatmulKernel& kernel = *kernel_of(operation);
        const int64_t depth = weights.ne[0], rows = weights.ne[1], columns = activations.ne[1];
        const int64_t n_matrices = activations.ne[2] * activations.ne[3];
        const int64_t each_bytes = kernel.packed_bytes(depth, columns), each_records = kernel.records(depth, columns);
        Work work(params.work, middle_bytes(operation), scratch_bytes(operation));
        if (params.thread == 0) {
            new (&work.next()) std::atomic<int64_t>(params.n_threads);  // the first ones are taken already
        }
        const int64_t end = share(each_records * n_matrices, params.thread + 1, params.n_threads);
        for (int64_t record = share(each_records * n_matrices, params.thread, params.n_threads); record < end;) {
            const int64_t matrix = record / each_records, first = record % each_records;
            const int64_t last = std::min(each_records, first + end - record);
            kernel.pack(columns_of(activations, matrix), depth, columns, work.middle() + matrix * each_bytes, first, last);
            record += last - first;
        }
        functions_.barrier(params.threadpool);
        char* scratch = work.scratch(params.thread);
        const int64_t each = rows_of_task(kernels_, rows, n_matrices, params.n_threads), tasks = (rows + each - 1) / each;
        const int64_t copies2 = activations.ne[2] / weights.ne[2], copies3 = activations.ne[3] / weights.ne[3];
        for (int64_t task = params.thread; task < tasks * n_matrices; task = work.next().fetch_add(1, std::memory_order_relaxed)) {
            const int64_t matrix = task / tasks, first = task % tasks * each;
            const int64_t offset = matrix % activations.ne[2] / copies2 * static_cast<int64_t>(weights.nb[2]) +
                                   matrix / activations.ne[2] / copies3 * static_cast<int64_t>(weights.nb[3]);
            const Product product{static_cast<const uint8_t*>(weights.data) + offset, static_cast<int64_t>(weights.nb[1]), rows, depth,
                                  columns, work.middle() + matrix * each_bytes, columns_of(activations, matrix), columns_of(operation, matrix)};
            kernel.multiply(product, first, std::min(rows, first + each), scratch);
        }
    }

    void multiply_experts(const ComputeParams& params, const Tensor& operation) const {
        const Tensor &weights = *operation.src[0], &activations = *operation.src[1];
        const MatmulKernel& kernel = *kernel_of(operation);
        const int64_t depth = weights.ne[0], rows = weights.ne[1], n_experts = weights.ne[2];
        const int64_t n_columns = operation.ne[1] * operation.ne[2];
        Work work(params.work, middle_bytes(operation), scratch_bytes(operation));
        Routes routes(work.middle(), n_experts, n_columns);
        char* packed = work.middle() + rounded(Routes::bytes(n_experts, n_columns));
        if (params.thread == 0) {
            routes.fill(operation);
            new (&work.next()) std::atomic<int64_t>(params.n_threads);
        }
        functions_.barrier(params.threadpool);
        const auto count = [&](int64_t expert) { return routes.begin[expert + 1] - routes.begin[expert]; };
        const auto packed_of = [&](int64_t expert) { return packed + routes.begin[expert] * kernel.packed_bytes(depth, 1); };
        for (int64_t expert = 0; expert < n_experts; ++expert) {
            if (count(expert)) {
                const Columns columns{static_cast<float*>(activations.data), 0, routes.sources + routes.begin[expert]};
                const int64_t records = kernel.records(depth, count(expert));
                kernel.pack(columns, depth, count(expert), packed_of(expert), share(records, params.thread, params.n_threads),
                            share(records, params.thread + 1, params.n_threads));
            }
        }
        functions_.barrier(params.threadpool);
        char* scratch = work.scratch(params.thread);
        const int64_t each = rows_of_task(kernels_, rows, n_experts, params.n_threads), tasks = (rows + each - 1) / each;
        int64_t task = params.thread;
        for (int64_t expert = 0, before = 0; expert < n_experts; ++expert) {
            if (!count(expert)) {
                continue;
            }
            for (; task < before + tasks; task = work.next().fetch_add(1, std::memory_order_relaxed)) {
                const int64_t first = (task - before) * each;
                const uint8_t* data = static_cast<const uint8_t*>(weights.data) + expert * static_cast<int64_t>(weights.nb[2]);
                const Columns results{static_cast<float*>(operation.data), 0, routes.results + routes.begin[expert]};
                const Columns columns{static_cast<float*>(activations.data), 0, routes.sources + routes.begin[expert]};
                const Product product{data, static_cast<int64_t>(weights.nb[1]), rows, depth, count(expert), packed_of(expert), columns, results};
                kernel.multiply(product, first, std::min(rows, first + each), scratch);
            }
            before += tasks;
        }
    }

    Functions functions_;
    const MatmulKernels& kernels_;
};

class Before final : public ExtraBufferType {
public:
    Before(ExtraBufferType& other, const Functions& functions, const MatmulKernels& kernels)
        : other_(other), products_(functions, kernels), attention_(functions, attention_kernels(kernels)) {}

    // Asked at load, of weights that might be repacked.
    bool supports_op(void* device, const Tensor* operation) override {
        const bool is_ours = enabled.load(std::memory_order_relaxed) && products_.are_fit(*operation);
        return !is_ours && other_.supports_op(device, operation);
    }

    TensorTraits* get_tensor_traits(const Tensor* operation) override {
        if (enabled.load(std::memory_order_relaxed) && products_.kernel_of(*operation)) {
            return &products_;
        }
        if (enabled.load(std::memory_order_relaxed) && attention_.kernel_of(*operation)) {
            return &attention_;
        }
        return other_.get_tensor_traits(operation);
    }

private:
    ExtraBufferType& other_;
    Products products_;
    FlashAttention attention_;
};

// The beginning of struct ggml_backend_buffer_type.
struct BufferType {
    void* functions[6];
    void* device;
    ExtraBufferType* context;
};

}  // namespace

void install(void* buffer_type, const Functions& functions, const MatmulKernels& kernels) {
    BufferType& type = *static_cast<BufferType*>(buffer_type);
    type.context = new Before(*type.context, functions, kernels);  // as long as ggml's, which is never freed
}

void enable(bool are_on) { enabled.store(are_on, std::memory_order_relaxed); }

uint64_t computed() { return n_computed.load(std::memory_order_relaxed); }

}  // namespace llmrun::ggml
