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

}  // namespace
}  // namespace llmrun
