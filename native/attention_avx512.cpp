#include "attention.hpp"
#include "matmul_x86.hpp"

namespace llmrun::attention_avx512 {

#include "matmul_avx512.hpp"

struct Isa : Avx512 {
    static constexpr int vectors = 2, rows = 12;

    LLMRUN_INLINE static Float plus(Float a, Float b) { return _mm512_add_ps(a, b); }
    LLMRUN_INLINE static Float over(Float a, Float b) { return _mm512_div_ps(a, b); }
    LLMRUN_INLINE static Float lesser(Float a, Float b) { return _mm512_min_ps(a, b); }
    LLMRUN_INLINE static Float greater(Float a, Float b) { return _mm512_max_ps(a, b); }
    LLMRUN_INLINE static Float nearest(Float x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    LLMRUN_INLINE static Float zero_if(Float x, float value) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, every_float(value), _CMP_NEQ_UQ), x);
    }
    // value * 2^exponent, or 0 where x is less than a bound
    LLMRUN_INLINE static Float scaled(Float value, Float exponent, Float x, float bound) {
        return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, every_float(bound), _CMP_NLT_UQ), value, exponent);
    }
    LLMRUN_INLINE static float greatest(Float x) { return _mm512_reduce_max_ps(x); }
    // of one vector
    LLMRUN_INLINE static float sum(const Float* x) {
        const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(*x), _mm512_extractf32x8_ps(*x, 1));
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
    LLMRUN_INLINE static Float every_half(uint16_t half) { return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(half))); }
    LLMRUN_INLINE static Float signed_bytes(const char* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(reinterpret_cast<const uint8_t*>(p))));
    }
};

#include "attention_core.hpp"

}  // namespace llmrun::attention_avx512

namespace llmrun {
extern const AttentionKernels attention_of_avx512;
const AttentionKernels attention_of_avx512 = attention_avx512::table;
}  // namespace llmrun
