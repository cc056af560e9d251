#include "attention.hpp"
#include "matmul_arm.hpp"

namespace llmrun::attention_neon {

#include "matmul_neon.hpp"

struct Isa : Neon {
    static constexpr int vectors = 2, rows = 6;

    LLMRUN_INLINE static Float plus(Float x, Float y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
    LLMRUN_INLINE static Float over(Float x, Float y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
    LLMRUN_INLINE static Float lesser(Float x, Float y) { return {vminq_f32(x.a, y.a), vminq_f32(x.b, y.b)}; }
    LLMRUN_INLINE static Float greater(Float x, Float y) { return {vmaxq_f32(x.a, y.a), vmaxq_f32(x.b, y.b)}; }
    LLMRUN_INLINE static Float nearest(Float x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b)}; }
    LLMRUN_INLINE static Float zero_where(Float x, uint32x4_t a, uint32x4_t b) {
        return {vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x.a), a)), vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x.b), b))};
    }
    LLMRUN_INLINE static Float zero_if(Float x, float value) {
        return zero_where(x, vceqq_f32(x.a, vdupq_n_f32(value)), vceqq_f32(x.b, vdupq_n_f32(value)));
    }
    // value * 2^exponent, or 0 where x is less than a bound
    LLMRUN_INLINE static Float scaled(Float value, Float exponent, Float x, float bound) {
        const Int sum = Neon::plus({vreinterpretq_s32_f32(value.a), vreinterpretq_s32_f32(value.b)},
                                   left<23>({vcvtnq_s32_f32(exponent.a), vcvtnq_s32_f32(exponent.b)}));
        return zero_where({vreinterpretq_f32_s32(sum.a), vreinterpretq_f32_s32(sum.b)}, vcltq_f32(x.a, vdupq_n_f32(bound)),
                          vcltq_f32(x.b, vdupq_n_f32(bound)));
    }
    LLMRUN_INLINE static float greatest(Float x) { return vmaxvq_f32(vmaxq_f32(x.a, x.b)); }
    // of two vectors
    LLMRUN_INLINE static float sum(const Float* x) {
        const Float eight = plus(x[0], x[1]);
        const float32x4_t four = vaddq_f32(eight.a, eight.b);
        const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
        return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
    }
    LLMRUN_INLINE static Float signed_bytes(const char* p) { return widened(vmovl_s8(vreinterpret_s8_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p))))); }
    LLMRUN_INLINE static Float every_half(uint16_t half) { return from_halves(vdupq_n_u16(half)); }
};

#include "attention_core.hpp"

}  // namespace llmrun::attention_neon

namespace llmrun {
extern const AttentionKernels attention_of_neon;
const AttentionKernels attention_of_neon = attention_neon::table;
}  // namespace llmrun
