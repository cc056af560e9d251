#include "matmul_x86.hpp"

namespace llmrun::avx2 {

#include "matmul_avx2.hpp"

struct Isa : Avx2 {
    static constexpr const char* name = "AVX2";
    static constexpr int vectors = 2, columns = 3;
    static constexpr bool has_wide_bytes = false, has_wide_sums = false, has_matrices = false;

    // Sums of bytes begin with pairs, in 16 bits. Signed bytes need 32 bits at once.
    template <bool Signed>
    LLMRUN_INLINE static Int begin(Int sums) { return Signed ? sums : none(); }
    template <bool Signed>
    LLMRUN_INLINE static Int dot(Int sums, Int weights, Int activations) {
        if (Signed) {
            return add_pairs(sums, _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(activations, weights)));
        }
        return _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, activations));
    }
    template <bool Signed>
    LLMRUN_INLINE static Int end(Int sums, Int products) { return Signed ? products : add_pairs(sums, products); }

    LLMRUN_INLINE static Int add_pairs(Int sums, Int pairs) {
        return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
};

#include "matmul_core.hpp"

}  // namespace llmrun::avx2

namespace llmrun {
extern const MatmulKernels matmul_avx2;
const MatmulKernels matmul_avx2 = avx2::table;
}  // namespace llmrun
