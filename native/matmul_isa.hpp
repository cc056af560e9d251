// What the files of all instruction sets share.
#pragma once

#include "matmul.hpp"

#define LLMRUN_INLINE __attribute__((always_inline)) inline
#ifdef __clang__
#define LLMRUN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define LLMRUN_UNROLL _Pragma("GCC unroll 16")
#endif
