// What the files for Arm's instruction sets share. Only always-inlined functions: each file is compiled for its own set.
#pragma once

#include <arm_neon.h>

#include "matmul_isa.hpp"

namespace llmrun {
namespace {

LLMRUN_INLINE float as_half(float x) { return static_cast<float>(static_cast<__fp16>(x)); }

// What ggml multiplies a block of 32 activations by, the largest of which is given.
LLMRUN_INLINE float factor_of(float largest) {
    const float scale = largest / 127.0f;
    return scale > 0 ? 1.0f / scale : 0.0f;
}

// Eight numbers of 16 bits.
using Eight = int16x8_t;

LLMRUN_INLINE Eight load_eight(const void* p) { return vreinterpretq_s16_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
LLMRUN_INLINE Eight widened(uint64_t bytes) { return vreinterpretq_s16_u16(vmovl_u8(vcreate_u8(bytes))); }
LLMRUN_INLINE Eight less(Eight x, int by) { return vsubq_s16(x, vdupq_n_s16(static_cast<int16_t>(by))); }
LLMRUN_INLINE int32x4_t products_of_pairs(Eight a, Eight b) {
    return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
}
LLMRUN_INLINE void store_four(void* p, int32x4_t x) { vst1q_s32(static_cast<int32_t*>(p), x); }

}  // namespace
}  // namespace llmrun
