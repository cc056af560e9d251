#include "attention.hpp"

#include <cstring>

namespace llmrun {

#ifdef LLMRUN_MATMUL_X86
extern const AttentionKernels attention_of_avx2;
extern const AttentionKernels attention_of_avx512;
#elif defined(LLMRUN_MATMUL_ARM)
extern const AttentionKernels attention_of_neon;
#endif

const AttentionKernel* AttentionKernels::of(int key_type, int value_type, int64_t depth, int64_t width) const {
    for (const AttentionKernel* kernel = begin; kernel != end; ++kernel) {
        if (kernel->key_type == key_type && kernel->value_type == value_type) {
            return depth % kernel->key_block == 0 && width % kernel->value_block == 0 ? kernel : nullptr;
        }
    }
    return nullptr;
}

const AttentionKernels& attention_kernels(const MatmulKernels& products) {
#ifdef LLMRUN_MATMUL_X86
    return std::strncmp(products.name, "AVX-512", 7) == 0 ? attention_of_avx512 : attention_of_avx2;
#elif defined(LLMRUN_MATMUL_ARM)
    (void)products;
    return attention_of_neon;
#else
    static const AttentionKernels none{};
    (void)products;
    return none;
#endif
}

}  // namespace llmrun
