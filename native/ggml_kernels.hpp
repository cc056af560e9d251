// llmrun's own kernels (matmul.hpp) inside ggml's backend for the processor, without a change of llama.cpp.
//
// The seam: before an operation, that backend asks each of its "extra buffer types" (ggml-cpu/traits.h) for an object that
// computes it, whatever buffer the weights are in. The type for repacked weights is always there; the object that it points to
// is replaced by ours, which answers for the products and the attention we can compute, and passes on all other questions. So
// the weights stay where they are (mapped), graphs are not split, ggml's own threads compute, as many as a graph is given, and
// operations that we decline are computed as before. A device of our own, as ggml's BLAS backend is one, would
// take a thread pool of its own, and six changes between the pools in each layer.
//
// The structs are those of the pinned version, which the headers that it installs only describe in part: library.py checks what
// it can before install() is called, llama_layout.cpp the rest of what is public.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matmul.hpp"

namespace llmrun::ggml {

// struct ggml_tensor
struct Tensor {
    int type;
    void* buffer;
    int64_t ne[4];
    size_t nb[4];
    int op;
    int32_t op_params[16];
    int32_t flags;
    Tensor* src[10];
    Tensor* view_src;
    size_t view_offs;
    void* data;
    char name[64];
    void* extra;
    char padding[8];
};

// struct ggml_compute_params
struct ComputeParams {
    int thread;
    int n_threads;
    size_t work_bytes;
    void* work;
    void* threadpool;
    bool use_reference;
};

constexpr int f32 = 0, f16 = 1;                                    // GGML_TYPE_F32, GGML_TYPE_F16
constexpr int mul_mat = 29, mul_mat_id = 30, flash_attn_ext = 74;  // GGML_OP_MUL_MAT, GGML_OP_MUL_MAT_ID, GGML_OP_FLASH_ATTN_EXT

// class ggml::cpu::tensor_traits
class TensorTraits {
public:
    virtual ~TensorTraits() = default;
    virtual bool work_size(int n_threads, const Tensor* operation, size_t& bytes) = 0;
    virtual bool compute_forward(ComputeParams* params, Tensor* operation) = 0;
};

// class ggml::cpu::extra_buffer_type
class ExtraBufferType {
public:
    virtual ~ExtraBufferType() = default;
    virtual bool supports_op(void* device, const Tensor* operation) = 0;
    virtual TensorTraits* get_tensor_traits(const Tensor* operation) = 0;
};

// Functions of the libraries.
struct Functions {
    bool (*is_host)(void* buffer);      // ggml_backend_buffer_is_host
    void (*barrier)(void* threadpool);  // ggml_barrier
};

// Answers for an extra buffer type from now on. Once a type; `kernels` stays valid.
void install(void* buffer_type, const Functions& functions, const MatmulKernels& kernels);

// Whether ours compute, in all types at once; while nothing computes.
void enable(bool are_on);

// How many products ours have computed since the start.
uint64_t computed();

}  // namespace llmrun::ggml
