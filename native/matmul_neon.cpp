#include "matmul_arm.hpp"

namespace llmrun::neon {

#include "matmul_dotprod.hpp"

struct Isa : Dotprod {
    static constexpr const char* name = "NEON dotprod";
    static constexpr bool has_matrices = false;

    // 16 activations, of which 4 are multiplied
    struct Step {
        int8x16_t activations;
        int part;
    };

    LLMRUN_INLINE static Step step_of(const char* activations, int step) { return {signed_bytes_of(load_register(activations + step / 4 * 16)), step % 4}; }

    using Dotprod::dot;
    template <bool>
    LLMRUN_INLINE static Int dot(Int sums, Int weights, Step step) {
        return step.part == 0   ? dot_part<0>(sums, weights, step.activations)
               : step.part == 1 ? dot_part<1>(sums, weights, step.activations)
               : step.part == 2 ? dot_part<2>(sums, weights, step.activations)
                                : dot_part<3>(sums, weights, step.activations);
    }

private:
    template <int Part>
    LLMRUN_INLINE static Int dot_part(Int sums, Int weights, int8x16_t activations) {
        return {vdotq_laneq_s32(sums.a, signed_bytes_of(weights.a), activations, Part),
                vdotq_laneq_s32(sums.b, signed_bytes_of(weights.b), activations, Part)};
    }
};

#include "matmul_core.hpp"

}  // namespace llmrun::neon

namespace llmrun {
extern const MatmulKernels matmul_neon;
const MatmulKernels matmul_neon = neon::table;
}  // namespace llmrun
