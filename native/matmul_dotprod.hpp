// What the sets with dot products of signed bytes have in common: the base of their `Isa`.

#include "matmul_neon.hpp"

struct Dotprod : Neon {
    static constexpr int vectors = 1, columns = 6;
    static constexpr bool has_wide_bytes = false, has_wide_sums = true;

    // Products are added up from begin() on by dot(), which end() adds to what there was.
    LLMRUN_INLINE static Int begin(Int sums) { return sums; }
    template <bool>
    LLMRUN_INLINE static Int dot(Int sums, Int weights, Int activations) {
        return {vdotq_s32(sums.a, signed_bytes_of(weights.a), signed_bytes_of(activations.a)),
                vdotq_s32(sums.b, signed_bytes_of(weights.b), signed_bytes_of(activations.b))};
    }
    LLMRUN_INLINE static Int end(Int, Int products) { return products; }
    LLMRUN_INLINE static Int end_with(Int sums, Int products, Int factors) {
        return {vmlaq_s32(sums.a, products.a, factors.a), vmlaq_s32(sums.b, products.b, factors.b)};
    }
    LLMRUN_INLINE static Int factor(Int x) { return x; }
    template <bool, bool>
    LLMRUN_INLINE static Int add_with(Int sums, Int weights, Int activations, Int factors) {
        return end_with(sums, dot<false>(none(), weights, activations), right_signed<16>(factors));
    }
};
