// What the files for x86's instruction sets share. Only always-inlined functions: each file is compiled for its own set.
#pragma once

#include <immintrin.h>

#include "matmul_isa.hpp"

namespace llmrun {
namespace {

LLMRUN_INLINE __m128i load_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

LLMRUN_INLINE __m256i load_32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

LLMRUN_INLINE uint16_t half_at(const uint8_t* p) {
    uint16_t half;
    __builtin_memcpy(&half, p, sizeof half);
    return half;
}

LLMRUN_INLINE float from_half(const uint8_t* p) { return _cvtsh_ss(half_at(p)); }

// Each is read where it has its place among the eight.
template <int Stride>
LLMRUN_INLINE __m128i eight_halves(const uint8_t* p) {
    __m128i x = _mm_cvtsi32_si128(half_at(p));
    x = _mm_insert_epi16(x, half_at(p + Stride), 1);
    x = _mm_insert_epi16(x, half_at(p + 2 * Stride), 2);
    x = _mm_insert_epi16(x, half_at(p + 3 * Stride), 3);
    x = _mm_insert_epi16(x, half_at(p + 4 * Stride), 4);
    x = _mm_insert_epi16(x, half_at(p + 5 * Stride), 5);
    x = _mm_insert_epi16(x, half_at(p + 6 * Stride), 6);
    return _mm_insert_epi16(x, half_at(p + 7 * Stride), 7);
}

LLMRUN_INLINE float as_half(float x) { return _cvtsh_ss(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }

// What ggml multiplies a block of 32 activations by, the largest of which is given.
LLMRUN_INLINE float factor_of(float largest) { return largest > 0 ? 127.0f / largest : 0.0f; }

// Writes 32 quantized activations and the sums of each half.
LLMRUN_INLINE void store_quantized(__m128i x, __m128i y, char* bytes, int* sums) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 16), y);
    const __m128i middle = _mm_set1_epi8(-128), zero = _mm_setzero_si128();
    const __m128i a = _mm_sad_epu8(_mm_xor_si128(x, middle), zero), b = _mm_sad_epu8(_mm_xor_si128(y, middle), zero);
    sums[0] = _mm_cvtsi128_si32(a) + _mm_extract_epi32(a, 2) - 16 * 128;
    sums[1] = _mm_cvtsi128_si32(b) + _mm_extract_epi32(b, 2) - 16 * 128;
}

// Eight numbers of 16 bits.
using Eight = __m128i;

LLMRUN_INLINE Eight load_eight(const void* p) { return _mm_loadu_si128(static_cast<const Eight*>(p)); }
LLMRUN_INLINE Eight widened(uint64_t bytes) { return _mm_cvtepu8_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(bytes))); }
LLMRUN_INLINE Eight less(Eight x, int by) { return _mm_sub_epi16(x, _mm_set1_epi16(static_cast<int16_t>(by))); }
LLMRUN_INLINE __m128i products_of_pairs(Eight a, Eight b) { return _mm_madd_epi16(a, b); }
LLMRUN_INLINE void store_four(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }

}  // namespace
}  // namespace llmrun
