// llmrun's own attention (attention.hpp) inside ggml's backend for the processor: GGML_OP_FLASH_ATTN_EXT, by the seam of
// ggml_kernels.hpp.
#pragma once

#include "attention.hpp"
#include "ggml_kernels.hpp"

namespace llmrun::ggml {

class FlashAttention final : public TensorTraits {
public:
    FlashAttention(const Functions& functions, const AttentionKernels& kernels) : functions_(functions), kernels_(kernels) {}

    // The kernel for an operation; null if ggml has to compute it.
    const AttentionKernel* kernel_of(const Tensor& operation) const;

    bool work_size(int n_threads, const Tensor* operation, size_t& bytes) override;
    bool compute_forward(ComputeParams* params, Tensor* operation) override;

    // How many operations these have computed since the start.
    static uint64_t computed();

private:
    Functions functions_;
    const AttentionKernels& kernels_;
};

}  // namespace llmrun::ggml
