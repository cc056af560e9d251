#include "attention.hpp"
#include "matmul_x86.hpp"

namespace llmrun::attention_avx512 {

struct Isa {
    static constexpr int lanes = 16, vectors = 2, rows = 12;
    using Int = __m512i;
    using Float = __m512;

    template <int Bits>
    LLMRUN_INLINE static Int right(Int x) { return _mm512_srli_epi32(x, Bits); }
    LLMRUN_INLINE static Float no_floats() { return _mm512_setzero_ps(); }
    LLMRUN_INLINE static Float every_float(float x) { return _mm512_set1_ps(x); }
    LLMRUN_INLINE static Float every_float_of(const float* p) { return _mm512_set1_ps(*p); }
    LLMRUN_INLINE static Float load_floats(const float* p) { return _mm512_loadu_ps(p); }
    LLMRUN_INLINE static void store_floats(float* p, Float x) { _mm512_storeu_ps(p, x); }
    LLMRUN_INLINE static Float times(Float a, Float b) { return _mm512_mul_ps(a, b); }
    LLMRUN_INLINE static Float plus(Float a, Float b) { return _mm512_add_ps(a, b); }
    LLMRUN_INLINE static Float minus(Float a, Float b) { return _mm512_sub_ps(a, b); }
    LLMRUN_INLINE static Float over(Float a, Float b) { return _mm512_div_ps(a, b); }
    LLMRUN_INLINE static Float add_product(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
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
    LLMRUN_INLINE static Float halves(const uint16_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    // of the lower 16 bits
    LLMRUN_INLINE static Float half(Int x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }
    LLMRUN_INLINE static Float every_half(uint16_t half) { return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(half))); }
    LLMRUN_INLINE static Float signed_bytes(const char* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(reinterpret_cast<const uint8_t*>(p))));
    }
    LLMRUN_INLINE static void signed_bytes_to_floats(Int x, Float* floats) {
        floats[0] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 24), 24));
        floats[1] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 16), 24));
        floats[2] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 8), 24));
        floats[3] = _mm512_cvtepi32_ps(_mm512_srai_epi32(x, 24));
    }
    // 16 bytes of each of 16 rows -> 4 vectors with 4 bytes of each
    LLMRUN_INLINE static void transpose(const uint8_t* rows, int64_t stride, Int* out) {
        Int x[4];
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            const uint8_t* row = rows + i * stride;
            x[i] = _mm512_castsi128_si512(load_16(row));
            x[i] = _mm512_inserti32x4(x[i], load_16(row + 4 * stride), 1);
            x[i] = _mm512_inserti32x4(x[i], load_16(row + 8 * stride), 2);
            x[i] = _mm512_inserti32x4(x[i], load_16(row + 12 * stride), 3);
        }
        const Int a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
        const Int c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
        out[0] = _mm512_unpacklo_epi64(a, c);
        out[1] = _mm512_unpackhi_epi64(a, c);
        out[2] = _mm512_unpacklo_epi64(b, d);
        out[3] = _mm512_unpackhi_epi64(b, d);
    }
};

#include "attention_core.hpp"

}  // namespace llmrun::attention_avx512

namespace llmrun {
extern const AttentionKernels attention_of_avx512;
const AttentionKernels attention_of_avx512 = attention_avx512::table;
}  // namespace llmrun
