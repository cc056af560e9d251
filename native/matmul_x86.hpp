// What the files for x86's instruction sets share. Only always-inlined functions: each file is compiled for its own set.
#pragma once

#include <immintrin.h>

#include "matmul.hpp"

#define LLMRUN_INLINE __attribute__((always_inline)) inline
#ifdef __clang__
#define LLMRUN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define LLMRUN_UNROLL _Pragma("GCC unroll 16")
#endif

namespace llmrun {
namespace {

LLMRUN_INLINE __m128i load_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

LLMRUN_INLINE float as_half(float x) { return _cvtsh_ss(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }

// Writes 32 quantized activations and the sums of each half.
LLMRUN_INLINE void store_quantized(__m128i x, __m128i y, char* bytes, int* sums) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 16), y);
    const __m128i middle = _mm_set1_epi8(-128), zero = _mm_setzero_si128();
    const __m128i a = _mm_sad_epu8(_mm_xor_si128(x, middle), zero), b = _mm_sad_epu8(_mm_xor_si128(y, middle), zero);
    sums[0] = _mm_cvtsi128_si32(a) + _mm_extract_epi32(a, 2) - 16 * 128;
    sums[1] = _mm_cvtsi128_si32(b) + _mm_extract_epi32(b, 2) - 16 * 128;
}

}  // namespace
}  // namespace llmrun
