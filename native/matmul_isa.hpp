// What the files of all instruction sets share.
#pragma once

#include "matmul.hpp"

#define LLMRUN_INLINE __attribute__((always_inline)) inline
#ifdef __clang__
#define LLMRUN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define LLMRUN_UNROLL _Pragma("GCC unroll 16")
#endif

namespace llmrun {
namespace {

// The 4 bytes of each lane, for the instruction set `Isa`.
template <class Isa>
LLMRUN_INLINE void signed_bytes_to_floats(typename Isa::Int x, typename Isa::Float* floats) {
    floats[0] = Isa::to_floats(Isa::template right_signed<24>(Isa::template left<24>(x)));
    floats[1] = Isa::to_floats(Isa::template right_signed<24>(Isa::template left<16>(x)));
    floats[2] = Isa::to_floats(Isa::template right_signed<24>(Isa::template left<8>(x)));
    floats[3] = Isa::to_floats(Isa::template right_signed<24>(x));
}

}  // namespace
}  // namespace llmrun
