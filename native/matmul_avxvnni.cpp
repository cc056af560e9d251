#include "matmul_x86.hpp"

namespace llmrun::avxvnni {

#include "matmul_avx2.hpp"

struct Isa : Avx2 {
    static constexpr const char* name = "AVX-VNNI";
    static constexpr int vectors = 1, columns = 6;
    static constexpr bool has_wide_bytes = true, has_wide_sums = true, has_matrices = false;

    // Products are added up from begin() on by dot(), which end() adds to what there was.
    template <bool>
    LLMRUN_INLINE static Int begin(Int sums) { return sums; }
    template <bool>
    LLMRUN_INLINE static Int dot(Int sums, Int weights, Int activations) {
        return _mm256_dpbusd_avx_epi32(sums, weights, activations);
    }
    template <bool>
    LLMRUN_INLINE static Int end(Int, Int products) { return products; }
};

#include "matmul_core.hpp"

}  // namespace llmrun::avxvnni

namespace llmrun {
extern const MatmulKernels matmul_avxvnni;
const MatmulKernels matmul_avxvnni = avxvnni::table;
}  // namespace llmrun
