#include "matmul_arm.hpp"

namespace llmrun::neon {

#include "matmul_neon.hpp"

struct Isa : Neon {
    static constexpr const char* name = "NEON dotprod";
    static constexpr int vectors = 1, columns = 6;
    static constexpr bool has_wide_bytes = false, has_wide_sums = true;

    // 16 activations, of which 4 are multiplied
    struct Step {
        int8x16_t activations;
        int part;
    };

    LLMRUN_INLINE static Step step_of(const char* activations, int step) { return {signed_bytes_of(load_register(activations + step / 4 * 16)), step % 4}; }

    // Products are added up from begin() on by dot(), which end() adds to what there was.
    template <bool>
    LLMRUN_INLINE static Int begin(Int sums) { return sums; }
    template <bool>
    LLMRUN_INLINE static Int dot(Int sums, Int weights, Int activations) {
        return {vdotq_s32(sums.a, signed_bytes_of(weights.a), signed_bytes_of(activations.a)),
                vdotq_s32(sums.b, signed_bytes_of(weights.b), signed_bytes_of(activations.b))};
    }
    template <bool>
    LLMRUN_INLINE static Int dot(Int sums, Int weights, Step step) {
        return step.part == 0   ? dot_part<0>(sums, weights, step.activations)
               : step.part == 1 ? dot_part<1>(sums, weights, step.activations)
               : step.part == 2 ? dot_part<2>(sums, weights, step.activations)
                                : dot_part<3>(sums, weights, step.activations);
    }
    template <bool>
    LLMRUN_INLINE static Int end(Int, Int products) { return products; }

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
