#include "matmul_x86.hpp"

namespace llmrun::avxvnni {

#include "matmul_avx2.hpp"

struct Isa : Avx2 {
    static constexpr const char* name = "AVX-VNNI";
    static constexpr int vectors = 2, columns = 6;
    static constexpr bool has_wide_bytes = true, has_wide_sums = true, has_matrices = false;

    // Products are added up from begin() on by dot(), which end() adds to what there was.
    LLMRUN_INLINE static Int begin(Int sums) { return sums; }
    template <bool>
    LLMRUN_INLINE static Int dot(Int sums, Int weights, Int activations) {
        return _mm256_dpbusd_avx_epi32(sums, weights, activations);
    }
    LLMRUN_INLINE static Int end(Int, Int products) { return products; }
    LLMRUN_INLINE static Int end_with(Int sums, Int products, Int factors) { return plus(sums, _mm256_mullo_epi32(products, factors)); }
    LLMRUN_INLINE static Int factor(Int x) { return x; }
    // Small weights' products in pairs fit into 16 bits.
    template <bool, bool Small>
    LLMRUN_INLINE static Int add_with(Int sums, Int weights, Int activations, Int factors) {
        return Small ? _mm256_dpwssd_avx_epi32(sums, _mm256_maddubs_epi16(weights, activations), factors)
                     : end_with(sums, dot<false>(none(), weights, activations), right_signed<16>(factors));
    }
};

#include "matmul_core.hpp"

}  // namespace llmrun::avxvnni

namespace llmrun {
extern const MatmulKernels matmul_avxvnni;
const MatmulKernels matmul_avxvnni = avxvnni::table;
}  // namespace llmrun
