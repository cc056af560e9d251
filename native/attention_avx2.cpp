#include "attention.hpp"
#include "matmul_x86.hpp"

namespace llmrun::attention_avx2 {

#include "matmul_avx2.hpp"

struct Isa : Avx2 {
    static constexpr int vectors = 2, rows = 6;

    LLMRUN_INLINE static Float plus(Float a, Float b) { return _mm256_add_ps(a, b); }
    LLMRUN_INLINE static Float over(Float a, Float b) { return _mm256_div_ps(a, b); }
    LLMRUN_INLINE static Float lesser(Float a, Float b) { return _mm256_min_ps(a, b); }
    LLMRUN_INLINE static Float greater(Float a, Float b) { return _mm256_max_ps(a, b); }
    LLMRUN_INLINE static Float nearest(Float x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    LLMRUN_INLINE static Float zero_if(Float x, float value) { return _mm256_andnot_ps(_mm256_cmp_ps(x, every_float(value), _CMP_EQ_OQ), x); }
    // value * 2^exponent, or 0 where x is less than a bound
    LLMRUN_INLINE static Float scaled(Float value, Float exponent, Float x, float bound) {
        const Int sum = _mm256_add_epi32(_mm256_castps_si256(value), left<23>(_mm256_cvtps_epi32(exponent)));
        return _mm256_and_ps(_mm256_castsi256_ps(sum), _mm256_cmp_ps(x, every_float(bound), _CMP_NLT_UQ));
    }
    LLMRUN_INLINE static float greatest(Float x) {
        const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
    }
    // of two vectors
    LLMRUN_INLINE static float sum(const Float* x) {
        const Float eight = plus(x[0], x[1]);
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
    LLMRUN_INLINE static Float signed_bytes(const char* p) {
        return to_floats(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
    }
    LLMRUN_INLINE static Float every_half(uint16_t half) { return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(half))); }
};

#include "attention_core.hpp"

}  // namespace llmrun::attention_avx2

namespace llmrun {
extern const AttentionKernels attention_of_avx2;
const AttentionKernels attention_of_avx2 = attention_avx2::table;
}  // namespace llmrun
