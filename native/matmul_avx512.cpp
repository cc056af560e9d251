#include "matmul_x86.hpp"

namespace llmrun::avx512vnni {

#include "matmul_avx512.hpp"

struct Isa : Avx512 {
    static constexpr const char* name = "AVX-512 VNNI";
    static constexpr int vectors = 2, columns = 6;
    static constexpr bool has_wide_bytes = true, has_wide_sums = true, has_matrices = false;

    // Products are added up from begin() on by dot(), which end() adds to what there was.
    template <bool>
    LLMRUN_INLINE static Int begin(Int sums) { return sums; }
    template <bool>
    LLMRUN_INLINE static Int dot(Int sums, Int weights, Int activations) {
        return _mm512_dpbusd_epi32(sums, weights, activations);
    }
    template <bool>
    LLMRUN_INLINE static Int end(Int, Int products) { return products; }
};

#include "matmul_core.hpp"

}  // namespace llmrun::avx512vnni

namespace llmrun {
extern const MatmulKernels matmul_avx512vnni;
const MatmulKernels matmul_avx512vnni = avx512vnni::table;
}  // namespace llmrun
