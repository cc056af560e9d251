#include "matmul_x86.hpp"

namespace llmrun::avx2 {

#include "matmul_avx2.hpp"

struct Isa : Avx2 {
    static constexpr const char* name = "AVX2";
    static constexpr int vectors = 2, columns = 3;
    static constexpr bool has_wide_bytes = false, has_wide_sums = false, has_matrices = false;

    // Products of bytes begin as pairs in 16 bits.
    LLMRUN_INLINE static Int begin(Int) { return none(); }
    template <bool Signed>
    LLMRUN_INLINE static Int dot(Int sums, Int weights, Int activations) {
        if (Signed) {
            return _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(activations, weights));  // there is room for one
        }
        return kept(_mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, activations)));
    }
    LLMRUN_INLINE static Int end(Int sums, Int products) { return end_with(sums, products, _mm256_set1_epi16(1)); }
    LLMRUN_INLINE static Int end_with(Int sums, Int products, Int factors) { return kept(add_pairs(sums, products, factors)); }
    // GCC adds in an order of its own else, with more numbers than there are registers.
    LLMRUN_INLINE static Int kept(Int x) {
        __asm__("" : "+x"(x));
        return x;
    }
    LLMRUN_INLINE static Int factor(Int x) { return either(both(x, every(0xffff)), left<16>(x)); }
    template <bool Signed, bool>
    LLMRUN_INLINE static Int add_with(Int sums, Int weights, Int activations, Int factors) {
        return end_with(sums, dot<Signed>(none(), weights, activations), factors);
    }
};

#include "matmul_core.hpp"

}  // namespace llmrun::avx2

namespace llmrun {
extern const MatmulKernels matmul_avx2;
const MatmulKernels matmul_avx2 = avx2::table;
}  // namespace llmrun
