// What the sets with dot products of signed bytes have in common: the base of their `Isa`.

#include "matmul_neon.hpp"

struct Dotprod : Neon {
    static constexpr int vectors = 1, columns = 6;
    static constexpr bool has_wide_bytes = false, has_wide_sums = true;

    // Products are added up from begin() on by dot(), which end() adds to what there was.
    template <bool>
    LLMRUN_INLINE static Int begin(Int sums) { return sums; }
    template <bool>
    LLMRUN_INLINE static Int dot(Int sums, Int weights, Int activations) {
        return {vdotq_s32(sums.a, signed_bytes_of(weights.a), signed_bytes_of(activations.a)),
                vdotq_s32(sums.b, signed_bytes_of(weights.b), signed_bytes_of(activations.b))};
    }
    template <bool>
    LLMRUN_INLINE static Int end(Int, Int products) { return products; }
};
