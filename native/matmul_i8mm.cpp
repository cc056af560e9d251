#include "matmul_arm.hpp"

namespace llmrun::i8mm {

#include "matmul_dotprod.hpp"

// An instruction multiplies 8 weights of 2 rows with 8 activations of 2 columns.
struct Isa : Dotprod {
    static constexpr const char* name = "NEON i8mm";
    static constexpr bool has_matrices = true;

    // 8 steps of 4 weights of each row -> 4 steps of 8
    LLMRUN_INLINE static void pair_steps(uint8_t* bytes) {
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            const Int x = load(bytes + 64 * i), y = load(bytes + 64 * i + 32);
            store(bytes + 64 * i, {vzip1q_s32(x.a, y.a), vzip2q_s32(x.a, y.a)});
            store(bytes + 64 * i + 32, {vzip1q_s32(x.b, y.b), vzip2q_s32(x.b, y.b)});
        }
    }

    // The columns of a pair have turns by 8 activations; the last column of an odd number is alone.
    LLMRUN_INLINE static void pair_columns(const char* bytes, char* record, int64_t column, int64_t count) {
        const bool is_alone = column + 1 == count && count % 2;
        char* to = record + (is_alone ? 32 * column : column / 2 * 64 + column % 2 * 8);
        LLMRUN_UNROLL for (int i = 0; i < 4; ++i) {
            __builtin_memcpy(to + i * (is_alone ? 8 : 16), bytes + 8 * i, 8);
        }
    }

    // Adds the products of `Steps` steps to the dots of a tile.
    template <int Count, int Steps>
    LLMRUN_INLINE static void multiply_pairs(const uint8_t* weights, const char* record, int begin, Int (*dots)[1]) {
        constexpr int pairs = (Count + 1) / 2;
        Int sums[pairs][2];
        LLMRUN_UNROLL for (int i = 0; i < pairs; ++i) {
            const Int first = dots[2 * i][0], second = 2 * i + 1 < Count ? dots[2 * i + 1][0] : none();
            sums[i][0] = {vzip1q_s32(first.a, second.a), vzip2q_s32(first.a, second.a)};
            sums[i][1] = {vzip1q_s32(first.b, second.b), vzip2q_s32(first.b, second.b)};
        }
        LLMRUN_UNROLL for (int step = begin; step < begin + Steps; ++step) {
            const Int first = load(weights + 64 * step), last = load(weights + 64 * step + 32);
            LLMRUN_UNROLL for (int i = 0; i < pairs; ++i) {
                const char* activations = record + 64 * i;
                const int8x16_t both = 2 * i + 1 < Count ? signed_bytes_of(load_register(activations + 16 * step)) : eight(activations + 8 * step);
                sums[i][0] = multiply(sums[i][0], first, both);
                sums[i][1] = multiply(sums[i][1], last, both);
            }
        }
        LLMRUN_UNROLL for (int i = 0; i < pairs; ++i) {
            const Int x = sums[i][0], y = sums[i][1];
            dots[2 * i][0] = {vuzp1q_s32(x.a, x.b), vuzp1q_s32(y.a, y.b)};
            if (2 * i + 1 < Count) {
                dots[2 * i + 1][0] = {vuzp2q_s32(x.a, x.b), vuzp2q_s32(y.a, y.b)};
            }
        }
    }

private:
    LLMRUN_INLINE static int8x16_t eight(const char* p) {
        return vreinterpretq_s8_u8(vcombine_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p)), vdup_n_u8(0)));
    }
    LLMRUN_INLINE static Int multiply(Int sums, Int weights, int8x16_t activations) {
        return {vmmlaq_s32(sums.a, signed_bytes_of(weights.a), activations), vmmlaq_s32(sums.b, signed_bytes_of(weights.b), activations)};
    }
};

#include "matmul_core.hpp"

}  // namespace llmrun::i8mm

namespace llmrun {
extern const MatmulKernels matmul_i8mm;
const MatmulKernels matmul_i8mm = i8mm::table;
}  // namespace llmrun
